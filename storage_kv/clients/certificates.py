"""The server's TLS context, made of the configured files and again when they change. Open connections keep theirs."""

import logging
import ssl
from typing import Final

from shadowserve.errors import ConfigurationError
from shadowserve.tls import Renewed, read_authorities, read_key_pair
from storage_kv.config import StorageConfig

_log = logging.getLogger(__name__)

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secret and authenticated. TLS 1.3 has no others."""


class Certificates:
    """The server's certificate, and the authorities of its clients' certificates.

    Attributes:
        expires_s: Expiry of the certificate in use, Unix time.
    """

    def __init__(self, config: StorageConfig) -> None:
        """Read the files.

        Raises:
            ConfigurationError: One of them cannot be used; the message names key, file and reason.
        """
        self._config = config
        self.expires_s = 0.0
        self._files = Renewed((config.tls_cert, config.tls_key, config.tls_client_ca), self._make, _unusable)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._files.current()

    def _make(self) -> ssl.SSLContext:
        config = self._config
        pair = read_key_pair(config.tls_cert, config.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
        try:
            context.set_ciphers(_CIPHERS)
            context.load_cert_chain(config.tls_cert, config.tls_key)
            if config.tls_client_ca:
                authorities = read_authorities("tls_client_ca", config.tls_client_ca)
                context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigurationError(
                f"tls_cert, tls_key, tls_client_ca: OpenSSL cannot use these files: {error}"
            ) from None
        self.expires_s = pair.expires.timestamp()
        _log.info("certificate_read file=%s expires=%s", config.tls_cert, f"{pair.expires:%Y-%m-%dT%H:%MZ}")
        return context


def _unusable(error: ConfigurationError) -> None:
    _log.error("certificates_unusable in_use='the previous ones' reason=%r", str(error))
