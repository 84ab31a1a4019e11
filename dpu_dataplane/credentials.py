"""The daemon's TLS: its certificate, its key and the authorities of its callers, read again when the files change.

gRPC asks for them at each handshake.
"""

import logging

import grpc

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from shadowserve.errors import ConfigurationError
from shadowserve.tls import Renewed, read_authorities, read_key_pair

__all__ = ["server_credentials"]

logger = logging.getLogger(__name__)


class _Files:
    """The configured files, as gRPC takes them."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self.expires = 0.0
        self._files = Renewed((config.tls_cert, config.tls_key, config.tls_client_ca), self._read, _unusable)
        self.first = self._told = self._files.current()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        pair = read_key_pair(config.tls_cert, config.tls_key)
        authorities = read_authorities("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
        self.expires = pair.expires.timestamp()
        logger.info("certificate %s is valid until %s UTC", config.tls_cert, f"{pair.expires:%Y-%m-%d %H:%M}")
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what is new since the last call, ``None`` where nothing is. Called by gRPC at each handshake."""
        current = self._files.current()
        if current is self._told:
            return None
        self._told = current
        return current


def _unusable(error: ConfigurationError) -> None:
    logger.error("certificates have changed and cannot be used; those before stay in use: %s", error)


def server_credentials(config: DataPlaneConfig, metrics: Metrics) -> grpc.ServerCredentials | None:
    """Return what gRPC is to serve with, ``None`` for no TLS.

    Raises:
        ConfigurationError: a file cannot be used; the message names key, file and reason.
    """
    if not config.tls_cert:
        return None
    files = _Files(config)
    metrics.gauges["tls_certificate_expiry_timestamp_seconds"] = (
        "When the certificate in use expires, in seconds since 1970",
        lambda: files.expires,
    )
    return grpc.dynamic_ssl_server_credentials(
        files.first,
        files.changed,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
        require_client_authentication=bool(config.tls_client_ca),
    )
