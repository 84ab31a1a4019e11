"""Loads of pages straight into an engine's paged memory (host.pages): where they are possible, and their placer."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from host_control.answers import FetchAnswer
from host_control.config import HostConfig
from host_control.fetch import FetchJob
from host_control.layouts import NOWHERE
from host_control.pages import PageDelivery, SharedPages
from host_control.vllm.groups import Groups
from host_control.vllm.shards import Shard
from host_control.vllm.weights_watch import WeightsWatch
from shadowserve.errors import ConfigurationError

if TYPE_CHECKING:
    from host_control.vllm.metrics import SlowerPaths  # which imports vLLM; the failure matrix runs without it

_OBSTACLES: Final = {
    "no_page_devices": "pages: true is configured, and the data plane has no devices in tiers that could bring pages; "
    "chunks are stored compressed and fetched as without pages. Give the data plane tiers.devices, or remove pages",
    "pages_refused": "pages: true is configured, and the data plane refused this engine's paged memory; chunks are "
    "fetched as without pages. Its log says why; often registered_bytes_max is too small",
    "pages_private": "pages: true is configured, and /dev/shm had no room to replace paged memory after a call without "
    "an answer; chunks are fetched as without pages until the engine starts again. Enlarge /dev/shm",
}


def share_pages(
    config: HostConfig, kv_cache_config: Any, groups: Groups, caches: dict[str, Any], logger: logging.Logger
) -> SharedPages | None:
    """Share paged memory with the data plane, for host.pages; return None where that is not configured.

    Raises:
        ConfigurationError: The memory cannot be shared; nothing has changed.
    """
    if not config.pages:
        return None
    try:
        (group,) = groups.groups
        names = kv_cache_config.kv_cache_groups[group.index].layer_names
        tensors = [caches[name] for name in names if name in caches]
        if len(tensors) < len(names) or any(tensor.device.type != "cpu" or tensor.dim() != 4 for tensor in tensors):
            raise ConfigurationError("it does not compute on a CPU, or its KV caches have an unknown layout")
        if any((tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype) for tensor in tensors):
            raise ConfigurationError("its layers are not alike")
        began = time.monotonic()
        pages = SharedPages(tensors, group.record_blocks * (int(tensors[0].shape[0]) // kv_cache_config.num_blocks))
        logger.info("ShadowServe: paged memory is shared since %.0f ms", 1000 * (time.monotonic() - began))
    except ConfigurationError as error:
        raise ConfigurationError(f"pages: true cannot be used with this engine: {error}; or remove pages") from None
    return pages


class PagePlacer:
    """A :class:`~host_control.fetch.Placer` for loads of one shard.

    Args:
        slower: Counts the loads that could not go into pages; on one rank only.
    """

    def __init__(
        self,
        delivery: PageDelivery,
        part: Shard,
        watch: Callable[[], WeightsWatch],
        slower: "SlowerPaths | None" = None,
    ) -> None:
        self._delivery = delivery
        self._part = part
        self._watch = watch
        self._slower = slower

    def _blocks(self, job: FetchJob) -> list[int]:
        return self._part.kernel_blocks(job.target.groups[self._part.group.index].blocks)

    def first(self, job: FetchJob) -> int:
        """Return the first chunk from which on all blocks may be written; earlier ones may be shared."""
        if self._slower is not None and (obstacle := self._delivery.obstacle):
            self._slower.add(obstacle, _OBSTACLES[obstacle])
        kept = [index for index, block in enumerate(self._blocks(job)) if block == NOWHERE]
        return kept[-1] // self._part.record_blocks + 1 if kept else 0

    def place(
        self,
        job: FetchJob,
        chunks: range,
        deadline: float,
        cancelled: Callable[[], bool],
        on_layers: Callable[[int], None],
    ) -> FetchAnswer | None:
        """See :class:`~host_control.fetch.Placer`."""
        each = self._part.record_blocks
        keys: Sequence[bytes] = job.keys[0][chunks.start : chunks.stop]
        blocks = self._blocks(job)[chunks.start * each : chunks.stop * each]
        answer = self._delivery.fetch(keys, blocks, deadline, cancelled, on_layers)
        if answer is not None:
            watch = self._watch()
            with torch.inference_mode():
                watch.check(job.target.epoch, watch.sample())
        return answer
