"""The C core (native/), loaded once per process.

This package wraps everything in ``native/include/``. Only element types and quantizers are elsewhere
(:mod:`shadowserve.chunk`), because hosts without the C core need them, too. Result codes become exceptions here only.
Calls release the GIL and block; callers that must not block use threads.

Set ``SHADOWSERVE_NATIVE_LIBRARY`` to load another build of the library, for example one with sanitizers.
"""

from shadowserve.native import _block, _channels, _cold, _index, _kernels, _memory, _pipeline, _tls
from shadowserve.native._block import *
from shadowserve.native._channels import *
from shadowserve.native._cold import *
from shadowserve.native._index import *
from shadowserve.native._kernels import *
from shadowserve.native._library import (
    ABI_VERSION,
    Codec,
    Isa,
    MemoryKind,
    Origin,
    Result,
    Stage,
    library_path,
    result_text,
)
from shadowserve.native._memory import *
from shadowserve.native._pipeline import *
from shadowserve.native._tls import *

__all__ = ["ABI_VERSION", "Codec", "Isa", "MemoryKind", "Origin", "Result", "Stage", "library_path", "result_text"]
__all__ += _block.__all__
__all__ += _channels.__all__
__all__ += _cold.__all__
__all__ += _index.__all__
__all__ += _kernels.__all__
__all__ += _memory.__all__
__all__ += _pipeline.__all__
__all__ += _tls.__all__
