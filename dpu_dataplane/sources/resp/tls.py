"""TLS to storage: one set of files, for the control connection (Python's ssl) and for the bytes' own (the C core).

The files are read again when they change, before the next connection is made.
"""

import logging
import ssl

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import native, tls
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.tls import Renewed, read_authorities, read_key_pair

__all__ = ["StorageTls", "distrust"]

logger = logging.getLogger(__name__)


class StorageTls:
    """Whom to trust as storage, and what to show it.

    Raises:
        ConfigurationError: a file cannot be used, or the C core was built without OpenSSL.
    """

    def __init__(self, config: DataPlaneConfig) -> None:
        if not native.tls_library():
            raise ConfigurationError(
                "storage_tls_ca: this build's C core has no TLS; install OpenSSL's headers (Debian: libssl-dev) and "
                "run 'make setup' again; 'shadowserve doctor' says what a build has"
            )
        self.authorities = config.storage_tls_ca
        self.certificate, self.key = config.storage_tls_cert, config.storage_tls_key
        self._name = config.storage_server_name
        self._files = Renewed((self.authorities, self.certificate, self.key), self._read, _unusable)

    def name_of(self, host: str) -> str:
        """Return the name that the certificate of the server at ``host`` must hold."""
        return self._name or host

    def contexts(self) -> tuple[ssl.SSLContext, native.Tls]:
        """Return what new connections are made with: Python's and the C core's."""
        return self._files.current()

    def _read(self) -> tuple[ssl.SSLContext, native.Tls]:
        read_authorities("storage_tls_ca", self.authorities)
        if self.certificate:
            read_key_pair(self.certificate, self.key, prefix="storage_")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_verify_locations(cafile=self.authorities)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
            contexts = context, native.Tls(self.authorities, self.certificate, self.key)
        except (ssl.SSLError, OSError, NativeError) as error:
            raise ConfigurationError(
                f"storage_tls_ca, storage_tls_cert: OpenSSL does not take them: {error}"
            ) from error
        logger.info("the files of TLS to storage were read")
        return contexts


def _unusable(error: ConfigurationError) -> None:
    logger.error("the files of TLS to storage have changed and cannot be used; those before stay in use: %s", error)


def distrust(reason: str, name: str) -> str:
    """Return why TLS with storage did not come about and what to do, from OpenSSL's words.

    Args:
        reason: as OpenSSL says it.
        name: that the certificate was to hold.
    """
    text = reason.lower()
    if any(words in text for words in ("expired", "mismatch", "not valid for", "verify failed")):
        return tls.rejection(reason, name, "the storage server", prefix="storage_")
    if "version number" in text or "packet length" in text or "record layer" in text:
        return "TLS: what answers there does not speak TLS: give it a certificate, or unset storage_tls_ca"
    if "alert" in text:
        return (
            f"TLS: it does not take us ({reason}): does it want a certificate of its clients (storage_tls_cert, "
            "storage_tls_key)? Its log says more"
        )
    return f"TLS: {reason}"
