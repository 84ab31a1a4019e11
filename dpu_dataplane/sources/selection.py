"""Which source a configuration names."""

import math
from collections.abc import Callable
from concurrent.futures import Executor

from dpu_dataplane.config import NODES_MAX, DataPlaneConfig
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.servers import Servers
from dpu_dataplane.sources.resp.several import SeveralServers
from dpu_dataplane.sources.resp.source import RespSource
from dpu_dataplane.sources.source import Source
from dpu_dataplane.sources.tiers.above import TiersAbove
from dpu_dataplane.sources.tiers.alone import TiersAlone
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve import native
from shadowserve.pool.prefetch_policy import PrefetchPolicy

__all__ = ["nodes_max", "source_of"]


def nodes_max(config: DataPlaneConfig) -> int:
    """Return of how many servers one batch may take bytes."""
    return NODES_MAX if config.storage_cluster else max(1, len(config.storage_nodes))


def source_of(
    config: DataPlaneConfig,
    metrics: Metrics,
    budget: InterferenceBudget,
    pipeline: native.Pipeline,
    fetching: Executor,
    storing: Executor,
) -> Source:
    """Return the source that is configured; it is not started.

    Args:
        config: of the daemon.
        metrics: to count in.
        budget: that what tiers move by themselves, and loads of pages, are held to.
        pipeline: that receives what is fetched and has what is stored; with room for :func:`nodes_max`.
        fetching: for its calls that fetch, one at a time.
        storing: likewise for those that store.

    Raises:
        ConfigurationError: a library that it needs is not installed, or TLS is wanted and cannot be had.
    """
    below: Source | None = None
    if config.storage_cluster or config.storage_nodes or config.storage:
        kind: Callable[[DataPlaneConfig, Metrics], Servers] = OneServer
        if config.storage_cluster or config.storage_nodes:
            kind = ServerCluster if config.storage_cluster else SeveralServers
        servers = kind(config, metrics)
        by_layers = not config.storage_cluster  # a cluster's nodes do not know the request
        threshold = Threshold(config.layer_request_bytes_min) if by_layers else None
        below = RespSource(servers, pipeline, fetching, storing, len(config.stage_cores()["net"]), metrics, threshold)
    if config.tiers is None:
        assert below is not None, "the configuration has neither"
        return below
    tiers = Tiers(
        config.tiers,
        metrics,
        pipeline,
        storing,
        budget,
        heads_bytes=int(config.head_cache_bytes),
        patience=config.command_timeout_s,
    )
    ahead_s = math.inf if config.tiers.ahead_s is None else config.tiers.ahead_s
    prefetch = PrefetchPolicy(config.tiers.ahead_requests, ahead_s)
    prefetching = Prefetcher(tiers, below, prefetch, metrics, budget, config.command_timeout_s)
    drain_s = config.shutdown_timeout_s / 2
    if below is None:
        return TiersAlone(tiers, prefetching, pipeline, fetching, metrics, budget, drain_s)
    return TiersAbove(tiers, below, prefetching, pipeline, fetching, metrics, budget, drain_s)
