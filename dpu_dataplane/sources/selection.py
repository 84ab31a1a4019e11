"""Which source a configuration names."""

from concurrent.futures import Executor

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.ranges import NODES_MAX
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.source import RespSource
from dpu_dataplane.sources.source import Source
from shadowserve import native

__all__ = ["nodes_max", "source_of"]


def nodes_max(config: DataPlaneConfig) -> int:
    """Return of how many servers one round may take bytes."""
    return NODES_MAX if config.storage_cluster else 1


def source_of(
    config: DataPlaneConfig, metrics: Metrics, pipeline: native.Pipeline, fetching: Executor, storing: Executor
) -> Source:
    """Return the source that is configured; it is not started.

    Args:
        config: of the daemon.
        metrics: to count in.
        pipeline: that receives what is fetched and has what is stored; with room for :func:`nodes_max`.
        fetching: for its calls that fetch, one at a time.
        storing: likewise for those that store.

    Raises:
        ConfigurationError: a library that it needs is not installed, or TLS is wanted and cannot be had.
    """
    servers = ServerCluster(config, metrics) if config.storage_cluster else OneServer(config, metrics)
    by_layers = config.chunked_pipeline and not config.storage_cluster  # a cluster's nodes do not know the request
    threshold = Threshold(config.layer_request_bytes_min) if by_layers else None
    return RespSource(servers, pipeline, fetching, storing, len(config.stage_cores()["net"]), metrics, threshold)
