"""ShadowServe: what its three programs share.

Keys and namespaces (:mod:`shadowserve.keys`), the stored record (:mod:`shadowserve.record`), the RESP codec
(:mod:`shadowserve.resp`), memory and SSDs as one store (:mod:`shadowserve.pool`), configuration, errors, the C core's
loader (:mod:`shadowserve.native`) and the generated gRPC stubs (``shadowserve.proto``).
"""

from pkgutil import extend_path

from shadowserve._version import __version__

__all__ = ["__version__"]

# Run from a checkout, this folder hides the installed package, and with it the built C core. Let submodules be found
# in both.
__path__ = extend_path(__path__, __name__)
