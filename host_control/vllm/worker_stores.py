"""Stores of a worker: finished chunks are copied into the store queue before their blocks can change."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch

from host_control.config import HostConfig
from host_control.lookup import EXACT, SAVED
from host_control.store import Copies, StoreQueue
from host_control.transfer import Reason
from host_control.vllm.groups import Groups
from host_control.vllm.metadata import ShadowServeMetadata, StoreOperation
from host_control.vllm.metrics import Counts, FailureLog
from host_control.vllm.shards import Rank, Shard, WorkerShards
from host_control.vllm.weights_watch import WeightsWatch
from shadowserve.keys import block_hash, record_keys
from shadowserve.proto import dataplane_pb2 as pb

_NAMES: Final = {"stored": "stored_chunks", "unreported": "dropped_events", "copied": "exact_copies"}
"""Metrics of the store queue's counters that have other names."""


class WorkerStores:
    """Copies KV of one worker into its store queue, on the worker's main thread."""

    def __init__(
        self,
        config: HostConfig,
        groups: Groups | None,
        rank: Rank,
        shards: WorkerShards,
        device: torch.device,
        watch: WeightsWatch,
        counts: Counts,
        logger: logging.Logger,
    ) -> None:
        self._config = config
        self._groups = groups
        self._rank = rank
        self._shards = shards
        self._device = device
        self._watch = watch
        self._counts = counts
        self._failures = FailureLog(logger)
        self.queue: StoreQueue | None = None
        self._saves: dict[str, int] = {}  # request -> chunks that were staged up to the end of its save

    def gather(self, operations: Sequence[StoreOperation], purpose: Any = pb.PURPOSE_REQUEST) -> None:
        """Copy finished chunks into the store queue."""
        if self.queue is None or not operations:
            return
        self._watch.look()
        epoch, sample = self._watch.epoch, cache(self._watch.sample)
        if self._device.type == "cuda":
            sample()  # in the order of the step's kernels; on a CPU the storing thread is early enough

        def why_not() -> str:
            if not self._watch.known(self._config.store_timeout_s, everywhere=True):
                return Reason.WEIGHTS_UNKNOWN
            return "" if self._watch.check(epoch, sample()) else Reason.WEIGHTS_CHANGED

        with self.queue.together():
            for operation in operations:
                for number, part in enumerate(self._shards.parts[0]):
                    if part.group.index == operation.group and not self._stored_by_another_rank(part):
                        self._offer(self.queue, operation, number, why_not, purpose)

    def save(self, metadata: ShadowServeMetadata) -> None:
        for request_id, operations in metadata.saves.items():
            self.gather(operations, pb.PURPOSE_PREEMPTION)
            self._saves[request_id] = self.queue.staged if self.queue is not None else 0

    def _stored_by_another_rank(self, part: Shard) -> bool:
        """Tell if all ranks hold this KV and share a data plane: then rank 0 stores it."""
        return part.whole and self._rank.tp_rank > 0 and self._config.data_plane_address(0) == self._config.data_plane

    def _offer(
        self, queue: StoreQueue, operation: StoreOperation, number: int, why_not: Callable[[], str], purpose: Any
    ) -> None:
        shards = self._shards
        layout, layouts = SAVED if operation.exact else 0, shards.stored_layouts
        part, namespace = shards.parts[0][number], shards.shapes[layout][number].namespace
        blocks = part.kernel_blocks(operation.blocks)
        assert self._groups is not None
        each, rows, chunk_tokens = part.record_blocks, None, self._groups.chunk_tokens
        if operation.tail_tokens:  # a row is a token, or a page where the content of pages is not known
            rows = -(-operation.tail_tokens * shards.shapes[0][number].tokens // chunk_tokens)

        def copy(index: int, chunk: Any) -> Callable[[], str]:
            part.layout.gather(chunk, blocks[index * each : (index + 1) * each], rows)
            return _after_copy(self._device, why_not)

        if operation.lasts_s and not operation.own:
            purpose = pb.PURPOSE_REQUEST  # saved chunks with an end would stay in local tiers
        absent = operation.absent_seconds
        queue.offer(
            record_keys(namespace, operation.chunk_keys),
            copy,
            part=number,
            shape=number + layouts.index(layout) * len(shards.parts[0]),
            copies=self._copies(operation, number) if EXACT in layouts and layout == 0 else None,
            chained=part.group.kind == "full",
            previous=record_keys(namespace, [operation.previous])[0] if operation.previous is not None else None,
            positions=[operation.position + index * chunk_tokens for index in range(len(operation.chunk_keys))],
            anchored=operation.anchored,
            published=operation.published,
            lasts_s=operation.lasts_s,
            purpose=purpose,
            reported=not (operation.exact or operation.lasts_s or operation.tail_tokens),
            absent_since=float("-inf") if absent is None else time.monotonic() - absent,
        )

    def _copies(self, operation: StoreOperation, number: int) -> Copies:
        """Return the exact copies of an operation's chunks."""
        shards = self._shards
        namespace = shards.shapes[EXACT][number].namespace
        previous = record_keys(namespace, [operation.previous])[0] if operation.previous is not None else b""
        shape = number + shards.stored_layouts.index(EXACT) * len(shards.parts[0])
        return Copies(shape, record_keys(namespace, operation.chunk_keys), previous)

    def take_saved(self) -> dict[str, int]:
        """Return the requests whose save is stored or dropped by now, each with 1 for this rank."""
        queue = self.queue
        saved = {name: 1 for name, staged in self._saves.items() if queue is None or staged <= queue.settled}
        for name in saved:
            del self._saves[name]
        return saved

    @property
    def has_stored(self) -> bool:
        return self.queue is not None and self.queue.has_stored

    def take_stored(self) -> list[int]:
        """Return the block hashes of records that were stored since the last call, where events are enabled."""
        return [] if self.queue is None else [block_hash(key) for key in self.queue.take_stored()]

    @property
    def saves(self) -> bool:
        return bool(self._saves)

    def take_counts(self) -> None:
        """Move the counters of the store queue into the worker's metrics."""
        if self.queue is None:
            return
        for name, count in self.queue.take_counts().items():
            if name.startswith("dropped_"):
                reason = name.removeprefix("dropped_")
                self._counts.add("dropped_stores", count, reason=reason)
                self._failures.warn("chunks were not stored", reason, self.queue.details.get(reason, ""))
            elif name.startswith("uncopied_"):
                reason = name.removeprefix("uncopied_")
                self._counts.add("dropped_copies", count, reason=reason)
                self._failures.warn("exact copies were not stored", reason, self.queue.details[f"copies: {reason}"])
            else:
                self._counts.add(_NAMES.get(name, name), count)

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close(self._config.close_timeout_s)
            self.take_counts()
            self.queue = None


def _after_copy(device: Any, then: Callable[[], str]) -> Callable[[], str]:
    """Return a function that waits for the copies that this thread has started on a device, and calls ``then``."""
    if device.type != "cuda":
        return then  # the copies have ended
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))

    def wait() -> str:
        event.synchronize()
        return then()

    return wait
