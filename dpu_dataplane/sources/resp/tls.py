"""TLS to storage: one set of files, for control connections (Python's ssl) and for links (the C core)."""

import logging
import ssl

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import native, tls
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.tls import Renewed, read_authorities, read_key_pair

logger = logging.getLogger(__name__)


class StorageTls:
    """Certificates for connections to storage; the files are read again when they change."""

    def __init__(self, config: DataPlaneConfig) -> None:
        if not native.tls_library():
            raise ConfigurationError(
                "storage_tls_ca: this build's C core has no TLS; install OpenSSL's headers (Debian: libssl-dev) and "
                "run 'make setup' again; 'shadowserve doctor' lists the features of a build"
            )
        self.authorities = config.storage_tls_ca
        self.certificate, self.key = config.storage_tls_cert, config.storage_tls_key
        self._name = config.storage_server_name
        self._files = Renewed((self.authorities, self.certificate, self.key), self._read, _unusable)

    def name_of(self, host: str) -> str:
        """Return the name that the server's certificate must hold."""
        return self._name or host

    def contexts(self) -> tuple[ssl.SSLContext, native.Tls]:
        """Return the TLS contexts for new connections: Python's and the C core's."""
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
            raise ConfigurationError(f"storage_tls_ca, storage_tls_cert: OpenSSL rejects them: {error}") from error
        logger.info("read the TLS files for storage")
        return contexts


def _unusable(error: ConfigurationError) -> None:
    logger.error("the TLS files for storage have changed and cannot be used; the old ones stay in use: %s", error)


def explain_tls_error(reason: str, name: str) -> str:
    """Return why TLS with storage failed by OpenSSL's reason, and what to do; ``name`` must be in the certificate."""
    text = reason.lower()
    if any(words in text for words in ("expired", "mismatch", "not valid for", "verify failed")):
        return tls.rejection(reason, name, "the storage server", prefix="storage_")
    if "version number" in text or "packet length" in text or "record layer" in text:
        return "TLS: the server does not speak TLS: give it a certificate, or unset storage_tls_ca"
    if "alert" in text:
        return (
            f"TLS: the server rejects us ({reason}): does it require a client certificate (storage_tls_cert, "
            "storage_tls_key)? See its log"
        )
    return f"TLS: {reason}"
