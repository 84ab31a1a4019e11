"""TLS of the gRPC server: certificate, key and client authorities, read again when the files change."""

import logging

import grpc

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from shadowserve.errors import ConfigurationError
from shadowserve.tls import Renewed, read_authorities, read_key_pair

logger = logging.getLogger(__name__)


class _Files:
    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self.expires = 0.0
        self._files = Renewed((config.tls_cert, config.tls_key, config.tls_client_ca), self._read, _unusable)
        self.first = self._returned = self._files.current()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        pair = read_key_pair(config.tls_cert, config.tls_key)
        authorities = read_authorities("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
        self.expires = pair.expires.timestamp()
        logger.info("certificate %s is valid until %s UTC", config.tls_cert, f"{pair.expires:%Y-%m-%d %H:%M}")
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the files if they have changed since the last call, else None. gRPC calls it at each handshake."""
        current = self._files.current()
        if current is self._returned:
            return None
        self._returned = current
        return current


def _unusable(error: ConfigurationError) -> None:
    logger.error("the certificates have changed and cannot be used; the old ones stay in use: %s", error)


def server_credentials(config: DataPlaneConfig, metrics: Metrics) -> grpc.ServerCredentials | None:
    """Return the server credentials, None without TLS; ConfigurationError if a file cannot be used."""
    if not config.tls_cert:
        return None
    files = _Files(config)
    metrics.gauges["tls_certificate_expiry_timestamp_seconds"] = (
        "Expiry of the certificate in use, in seconds since 1970",
        lambda: files.expires,
    )
    return grpc.dynamic_ssl_server_credentials(
        files.first,
        files.changed,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
        require_client_authentication=bool(config.tls_client_ca),
    )
