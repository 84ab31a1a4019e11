"""The source that a configuration names."""

import math
from concurrent.futures import Executor

from dpu_dataplane.config import NODES_MAX, DataPlaneConfig
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import HEADER_CACHE_BYTES
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.several import SeveralServers
from dpu_dataplane.sources.resp.source import RespSource
from dpu_dataplane.sources.source import Source
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.source import LocalSource, TieredSource
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve import native
from shadowserve.pool.prefetch_policy import PrefetchPolicy


def nodes_max(config: DataPlaneConfig) -> int:
    """Return the most nodes that one batch may read from."""
    return NODES_MAX if config.storage_cluster else max(1, len(config.storage_nodes))


def source_of(
    config: DataPlaneConfig,
    metrics: Metrics,
    budget: InterferenceBudget,
    pipeline: native.Pipeline,
    fetch_executor: Executor,
    store_executor: Executor,
) -> Source:
    """Make the configured source; it is not started. ConfigurationError if TLS is configured and cannot be used."""
    below = _servers_of(config, metrics)
    if below is not None:
        by_layers = not config.storage_cluster  # a cluster does not know the request
        threshold = Threshold(config.layer_request_bytes_min) if by_layers else None
        below.attach(pipeline, fetch_executor, store_executor, len(config.stage_cores()["net"]), threshold)
    if config.tiers is None:
        assert below is not None, "the configuration has neither storage nor tiers"
        return below
    tiers = Tiers(
        config.tiers,
        metrics,
        pipeline,
        store_executor,
        budget,
        headers_bytes=HEADER_CACHE_BYTES,
        read_timeout_s=config.command_timeout_s,
        drain_s=config.shutdown_timeout_s / 2,
    )
    ahead_s = math.inf if config.tiers.ahead_s is None else config.tiers.ahead_s
    policy = PrefetchPolicy(config.tiers.ahead_requests, ahead_s)
    prefetcher = Prefetcher(tiers, below, policy, metrics, budget, config.command_timeout_s)
    if below is None:
        return LocalSource(tiers, prefetcher, pipeline, fetch_executor, metrics, budget)
    return TieredSource(below, tiers, prefetcher, pipeline, fetch_executor, metrics, budget)


def _servers_of(config: DataPlaneConfig, metrics: Metrics) -> RespSource | None:
    if config.storage_cluster:
        return ServerCluster(config, metrics)
    if config.storage_nodes:
        return SeveralServers(config, metrics)
    return OneServer(config, metrics) if config.storage else None
