"""The source that a configuration names."""

from dpu_dataplane.config import NODES_MAX, DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.several import SeveralServers
from dpu_dataplane.sources.resp.source import RespSource
from dpu_dataplane.sources.source import Resources, Source
from dpu_dataplane.sources.tiers.source import TieredSource


def nodes_max(config: DataPlaneConfig) -> int:
    """Return the most nodes that one batch may read from."""
    return NODES_MAX if config.storage_cluster or config.storage_nodes else 1


def source_of(config: DataPlaneConfig, resources: Resources) -> Source:
    """Make the configured source; it is not started. ConfigurationError if TLS is configured and cannot be used."""
    servers = _servers_of(config, resources.metrics)
    if servers is not None:
        servers.attach(resources)
    if config.tiers is not None:
        return TieredSource(config, servers, resources)
    assert servers is not None, "the configuration has neither storage nor tiers"
    return servers


def _servers_of(config: DataPlaneConfig, metrics: Metrics) -> RespSource | None:
    if config.storage_cluster:
        return ServerCluster(config, metrics)
    if config.storage_nodes:
        return SeveralServers(config, metrics)
    return OneServer(config, metrics) if config.storage else None
