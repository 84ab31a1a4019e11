"""Stores in the background, at the cost of one copy of each chunk on the engine's thread.

The engine's thread gathers a chunk into a slot of registered memory; the queue's thread lets the data plane store it,
in order. A GPU may still be writing the slot at that time: the queue's thread waits for it, not the engine's. When no
slot is free the chunk is dropped and counted: a cache may forget, the engine may not wait. Behind a gap in a prompt's
chain later chunks are of no use, so they are dropped too.
"""

import collections
import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from host_control.client import DataPlaneClient, StoreAnswer
from host_control.registered_memory import Memory, RegisteredMemory
from host_control.transfer import Reason
from shadowserve.chunk import Quantizer
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Staged:
    """A chunk in a slot of registered memory.

    Attributes:
        part, shape: Numbers of its shard, and of the chunk layout that it is stored in.
        parent: Record key of the chunk before it; empty for a prompt's first.
        position: Position of its first token in its prompt.
        copy: Its exact copy: chunk layout, key and parent.
        wait: Waits for the end of the copy; returns why the chunk is not to be stored, or empty. None: it has ended.
        published: Other engines may wait for the chunk.
        lasts_s: Seconds after which it is of no use; 0: for good.
        reported: take_stored() tells of it.
    """

    part: int
    shape: int
    key: bytes
    parent: bytes
    segment: Memory
    slot: int
    position: int
    wait: Callable[[], str] | None = None
    published: bool = False
    lasts_s: float = 0.0
    purpose: Any = pb.PURPOSE_REQUEST
    reported: bool = False
    copy: tuple[int, bytes, bytes] | None = None

    def precedes(self, other: "_Staged") -> bool:
        """Tell if another chunk can be stored in the same call, right behind this one."""
        alike = other.segment is self.segment and other.lasts_s == self.lasts_s and other.purpose == self.purpose
        return (
            alike and other.shape == self.shape and other.slot == self.slot + 1 and bool(self.copy) == bool(other.copy)
        )


class Copies(NamedTuple):
    """Exact copies of chunks, which local tiers keep: their chunk layout, keys, and the key before the first."""

    shape: int
    keys: Sequence[bytes]
    previous: bytes

    def of(self, index: int, *, chained: bool) -> tuple[int, bytes, bytes]:
        """Return the chunk layout, key and parent of a chunk's copy."""
        parent = self.keys[index - 1] if index else self.previous
        return self.shape, self.keys[index], parent if chained else b""


class _Slots:
    """Free slots of each segment (of ``size`` bytes) and shard; every shard has the same number of slots."""

    def __init__(self, chunk_bytes: Sequence[int], size: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._count = size // sum(chunk_bytes)
        self._begins = [self._count * sum(chunk_bytes[:part]) for part in range(len(chunk_bytes))]
        self._free: dict[Memory, list[list[int]]] = {}
        if self._count < 1:
            raise ConfigurationError(
                f"a chunk has {sum(chunk_bytes)} bytes, the store buffer {size}; raise host.store_buffer_bytes"
            )

    def add(self, segment: Memory, kept: set[Memory]) -> None:
        """Add a segment with all slots free, and forget those that are not ``kept``."""
        self._free[segment] = [list(range(self._count)) for _ in self._chunk_bytes]
        self._free = {owner: free for owner, free in self._free.items() if owner is segment or owner in kept}

    def take(self, segment: Memory | None, part: int, after: int | None = None) -> int | None:
        """Take a free slot, only the one behind slot ``after`` if given; None if there is none."""
        free = self._free.get(segment) if segment is not None else None
        if not free or not free[part] or (after is not None and free[part][0] != after + 1):
            return None
        return free[part].pop(0)

    def give_back(self, staged: _Staged) -> None:
        if (free := self._free.get(staged.segment)) is not None:
            free[staged.part].append(staged.slot)

    def place(self, part: int, slot: int) -> slice:
        begin = self._begins[part] + slot * self._chunk_bytes[part]
        return slice(begin, begin + self._chunk_bytes[part])


class _RecentKeys(collections.OrderedDict[bytes, float]):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def remember(self, key: bytes) -> None:
        self[key] = time.monotonic()
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class _Reports:
    """Keys of stored chunks, and of chunks that were skipped because they are stored or wait."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.stored: list[bytes] = []
        self.skipped: collections.deque[tuple[int, bytes]] = collections.deque()  # with the chunks staged before

    def add(self, keys: list[bytes]) -> int:
        """Add keys of stored chunks; return how many had no room."""
        room = self.most - len(self.stored)
        self.stored += keys[:room]
        return len(keys[room:])

    def skip(self, staged: int, key: bytes) -> None:
        if len(self.skipped) < self.most:
            self.skipped.append((staged, key))

    def take(self, settled: int, recent: _RecentKeys) -> list[bytes]:
        """Return the stored keys, after ``settled`` staged chunks; ``recent``: keys that were not dropped."""
        stored, self.stored = self.stored, []
        while self.skipped and self.skipped[0][0] <= settled:
            _, key = self.skipped.popleft()
            if key in recent:
                stored.append(key)
        return stored


class StoreQueue:
    """Chunks that wait to be stored. :meth:`offer` is for the engine's thread; it never waits.

    Chunks of one shard may be stored in several chunk layouts, which differ in the quantizer alone: they use the same
    slots.

    Args:
        registration: Memory that chunks wait in. The queue owns it from now on. Its chunk layouts are those of each
            shard, and then others of the same shards, if any.
        parts: Number of shards; by default one for each chunk layout.
        timeout: Seconds for a batch.
        recent_keys: Number of keys that are remembered as stored.
        retry_interval: Seconds between attempts to connect while there is nothing to store.
        plain: Store uncompressed, so that devices can bring the chunks into pages.
        reports_max: Most keys of stored chunks that wait for :meth:`take_stored`; later ones are counted and dropped.

    Attributes:
        last_error: Reason of the last failure to connect.
        details: Last sentence about each reason.
        staged: Number of chunks that were staged so far.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        *,
        parts: int | None = None,
        batch_chunks: int = 8,
        timeout: float = 10.0,
        recent_keys: int = 65536,
        retry_interval: float = 1.0,
        plain: bool = False,
        reports_max: int = 0,
    ) -> None:
        self._client = client
        self._registration = registration
        sizes = [shape.raw_bytes for shape in registration.shapes]
        chunk_bytes = sizes[:parts]
        if any(size != chunk_bytes[shape % len(chunk_bytes)] for shape, size in enumerate(sizes)):
            raise ValueError(f"chunks of {sizes} bytes are not those of {parts} shards")
        self._slots = _Slots(chunk_bytes, registration.size)
        self._batch_chunks = batch_chunks
        self._timeout = timeout
        self._retry_interval = retry_interval
        self._plain = plain
        self._condition = threading.Condition()
        self._queue: collections.deque[_Staged] = collections.deque()
        self._recent = _RecentKeys(recent_keys)
        self._busy = 0
        self._together = False
        self._closing = False
        self.staged = 0
        self.last_error = "connecting"
        self._tried = threading.Event()
        self._counts: collections.Counter[str] = collections.Counter()
        self._reports = _Reports(reports_max)
        self.details: dict[str, str] = {}
        prefix = secrets.token_hex(8)
        self._job_ids = (f"{prefix}-{number}" for number in itertools.count(1))
        self._thread = threading.Thread(target=self._run, name="shadowserve-store", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Delay calls until everything offered inside is staged, up to a whole batch.

        The data plane encodes a chunk while it stores the one before, but only within a call.
        """
        self._together = True
        try:
            yield
        finally:
            with self._condition:
                self._together = False
                self._condition.notify_all()

    def offer(
        self,
        keys: Sequence[bytes],
        gather: Callable[[int, Any], Callable[[], str] | None],
        *,
        part: int = 0,
        shape: int | None = None,
        chained: bool = True,
        previous: bytes | None = None,
        positions: Sequence[int] | None = None,
        anchored: bool = True,
        absent_since: float = float("-inf"),
        published: bool = False,
        lasts_s: float = 0.0,
        purpose: Any = pb.PURPOSE_REQUEST,
        reported: bool = False,
        copies: Copies | None = None,
    ) -> int:
        """Stage consecutive chunks of one prompt and shard, without those that are stored; return their number.

        Args:
            gather: Copies chunk ``i`` into the memory that it is given, or starts to. Returns a function that waits for
                the end of the copy, in the queue's thread, and returns why the chunk is not to be stored, or empty.
            shape: Number of the chunk layout among the registration's; by default the shard's first.
            chained: Each chunk is of use only with those before it.
            previous: Key of the chunk before the first; None at the start of a prompt.
            positions: Position of each chunk's first token in its prompt, for layouts of ``weighted``.
            anchored: ``previous`` is known to be stored.
            absent_since: Time (monotonic) at which a lookup found the chunks absent; an earlier store does not count.
            published: Other engines may wait for them: those that are dropped are withdrawn.
            lasts_s: Seconds after which they are of no use; 0: for good.
            reported: :meth:`take_stored` tells when they are stored, also of those that are by now.
            copies: Store the same chunks in this form in local tiers, too, and these records in storage only.
        """
        with self._condition:
            reachable = not chained or previous is None or anchored or previous in self._recent
        staged, dropped, shape = 0, list[bytes](), part if shape is None else shape
        parents = [previous or b"", *keys] if chained else [b""] * len(keys)
        for index, key in enumerate(keys):
            if not reachable:
                self._count("dropped_gap", len(keys) - index)
                dropped += keys[index:]
                break
            with self._condition:
                if self._recent.get(key, float("-inf")) > absent_since:
                    self._recent.move_to_end(key)
                    if reported:
                        self._reports.skip(self.staged, key)
                    continue
                segment = self._registration.current
                slot = self._slots.take(segment, part)
            if segment is None or slot is None:
                self._count("dropped_full" if segment is not None else f"dropped_{self.last_error}", 1)
                reachable = not chained
                dropped.append(key)
                continue
            position = 0 if positions is None else positions[index]
            copy = copies.of(index, chained=chained) if copies is not None else None
            about = (position, None, published, lasts_s, purpose, reported, copy)
            chunk = _Staged(part, shape, key, parents[index], segment, slot, *about)
            if not self._stage(chunk, index, gather):
                reachable = not chained
                dropped.append(key)
                continue
            staged += 1
        if published:
            self._client.publish(dropped, 0)
        return staged

    def _stage(self, chunk: _Staged, index: int, gather: Callable[[int, Any], Callable[[], str] | None]) -> bool:
        """Gather a chunk into its slot and queue it; return False where that fails."""
        try:  # without the lock: only this thread uses the slot
            wait = gather(index, chunk.segment.memory[self._slots.place(chunk.part, chunk.slot)])
        except Exception as error:  # a failure of the engine's copy must not end the engine's step
            self.details["gather_failed"] = f"{type(error).__name__}: {error}"
            self._count("dropped_gather_failed", 1)
            self._give_back([chunk])
            return False
        with self._condition:
            self._queue.append(replace(chunk, wait=wait))
            self.staged += 1
            self._recent.remember(chunk.key)
            self._condition.notify_all()
        return True

    @property
    def settled(self) -> int:
        """Number of staged chunks, in their order, that are stored or dropped by now."""
        with self._condition:
            return self._settled()

    def _settled(self) -> int:
        return self.staged - len(self._queue) - self._busy

    def remember(self, keys: Sequence[bytes]) -> None:
        with self._condition:
            for key in keys:
                self._recent.remember(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._condition:
            for key in keys:
                self._recent.pop(key, None)

    def take_counts(self) -> dict[str, int]:
        """Return the counters since the last call: ``stored``, ``stored_raw_bytes``, ``dropped_REASON``..."""
        if not self._counts:  # in most steps of an engine
            return {}
        with self._condition:
            counts, self._counts = self._counts, collections.Counter()
        return dict(counts)

    @property
    def has_stored(self) -> bool:
        return bool(self._reports.stored or self._reports.skipped)

    def take_stored(self) -> list[bytes]:
        """Return the keys of chunks that were stored or found stored since the last call."""
        with self._condition:
            return self._reports.take(self._settled(), self._recent)

    def wait_tried(self, timeout: float) -> bool:
        """Wait for the first attempt to connect, at most ``timeout`` seconds; return True if it succeeded."""
        return self._tried.wait(timeout) and self._registration.current is not None

    def flush(self, timeout: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Store what waits, at most ``timeout`` seconds, and end the thread."""
        deadline = time.monotonic() + timeout
        if self._registration.current is not None:
            self.flush(timeout)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        self._registration.close()

    def _count(self, name: str, count: int) -> None:
        with self._condition:
            self._counts[name] += count

    # ------------------------------------------------------------------ the storing thread

    def _run(self) -> None:
        while True:
            self._connect()
            self._tried.set()
            batch = self._next()
            if batch is None:
                return
            try:
                self._store(batch)
            except Exception as error:
                _logger.exception("storing failed")
                self._drop(batch, Reason.INTERNAL)
                self.last_error = f"{type(error).__name__}"
                self._registration.retire(release=True)
            finally:
                with self._condition:
                    self._busy = 0
                    self._condition.notify_all()

    def _connect(self) -> Memory | None:
        """Return the registered memory, None where it cannot be registered now."""
        current = self._registration.current
        if current is not None or self._closing:
            return current
        try:
            segment = self._registration.acquire(self._timeout)
        except DataPlaneError as error:
            if error.outcome == Reason.NO_MEMORY and self.last_error != Reason.NO_MEMORY:
                _logger.warning("shadowserve: nothing is stored: %s", error)
            self.last_error = error.outcome
            self.details[error.outcome] = str(error)
            return None
        with self._condition:
            self._slots.add(segment, {staged.segment for staged in self._queue})
        return segment

    def _next(self) -> list[_Staged] | None:
        """Return the next batch of neighbouring chunks, an empty one after a failed connection; None when closing."""
        with self._condition:
            while (
                len(self._queue) < (self._batch_chunks if self._together else 1) or self._registration.current is None
            ):
                if self._closing:
                    return None
                if self._registration.current is None:
                    self._condition.wait(self._retry_interval)
                    return []
                self._condition.wait()
            batch = [self._queue.popleft()]
            while self._queue and len(batch) < self._batch_chunks and batch[-1].precedes(self._queue[0]):
                batch.append(self._queue.popleft())
            self._busy = len(batch)
            return batch

    def _store(self, batch: list[_Staged]) -> None:
        batch = self._wait_for_copies(batch)
        retried = False
        while batch:
            segment = self._connect()
            if segment is None:
                self._drop(batch, self.last_error)
                return
            source = batch[0].segment
            if source is not segment:
                batch = self._move(batch, segment)
            if not source.intact():  # bytes of truncated memory read as zeros
                self._registration.lost(source)
                self._drop(batch, Reason.NO_MEMORY, "another process truncated the memory that chunks wait in")
                return
            if source is not segment:
                continue
            answer = self._call(batch)
            if answer.reason == Reason.UNKNOWN_MEMORY and not retried:
                retried = True  # the data plane has restarted: register again, once
                self._registration.retire(release=False)
                continue
            if answer.quiet:
                self._copy(batch)
            self._settle(batch, answer)
            return

    def _wait_for_copies(self, batch: list[_Staged]) -> list[_Staged]:
        """Return the chunks up to the first that is not to be stored; drop the others."""
        for index, staged in enumerate(batch):
            reason = staged.wait() if staged.wait is not None else ""
            if reason:
                self._drop(batch[index:], reason)
                return batch[:index]
        return batch

    def _copy(self, batch: list[_Staged]) -> None:
        """Store the exact copies of chunks in local tiers. Those without room are counted and dropped."""
        copies = [staged.copy for staged in batch if staged.copy is not None]
        if len(copies) < len(batch):
            return
        layouts, keys, parents = zip(*copies, strict=True)
        answer = self._send(batch, layouts[0], keys, parents, keep=pb.KEEP_LOCAL)
        self._count("copied", int(answer.stored.sum()))
        if answer.reason != Reason.COMPLETE:
            self._count(f"uncopied_{answer.reason}", int((~answer.stored).sum()))
            self.details[f"copies: {answer.reason}"] = answer.detail
        if not answer.quiet:
            self._registration.retire(release=True)

    def _call(self, batch: list[_Staged]) -> StoreAnswer:
        weighted = self._registration.shapes[batch[0].shape].quantizer is Quantizer.WEIGHTED
        return self._send(
            batch,
            batch[0].shape,
            [staged.key for staged in batch],
            [staged.parent for staged in batch],
            positions=[staged.position for staged in batch] if weighted else (),
            plain=self._plain,
            purpose=batch[0].purpose,
            keep=pb.KEEP_ALL if batch[0].copy is None else pb.KEEP_STORAGE,
        )

    def _send(
        self, batch: list[_Staged], layout: int, keys: Sequence[bytes], parents: Sequence[bytes], **how: Any
    ) -> StoreAnswer:
        """Let the data plane store a batch's chunks in one of the registration's chunk layouts."""
        offset = self._slots.place(batch[0].part, batch[0].slot).start
        args = (next(self._job_ids), self._registration.memory_id, offset, keys, parents, self._timeout)
        return self._client.store(*args, layout=layout, lasts_s=batch[0].lasts_s, **how)

    def _settle(self, batch: list[_Staged], answer: StoreAnswer) -> None:
        self._count("stored", int(answer.stored.sum()))
        self._count("stored_raw_bytes", answer.raw_bytes)
        self._count("stored_bytes", answer.stored_bytes)
        if not answer.quiet:
            # The data plane may still be reading these slots, so nothing is written into them again.
            self._registration.retire(release=True)
        stored = list(itertools.compress(batch, answer.stored))
        reports = [staged.key for staged in stored if staged.reported]
        with self._condition:
            if self._reports.most and (lost := self._reports.add(reports)):
                self._counts["unreported"] += lost
        self._give_back(stored)
        self._drop(list(itertools.compress(batch, ~answer.stored)), answer.reason, answer.detail)

    def _move(self, batch: list[_Staged], segment: Memory) -> list[_Staged]:
        """Copy chunks from memory that was given up into the memory in use."""
        moved: list[_Staged] = []
        for index, staged in enumerate(batch):
            with self._condition:
                slot = self._slots.take(segment, staged.part, moved[-1].slot if moved else None)
            if slot is None:
                self._drop(batch[index:], "full")
                break
            source, target = self._slots.place(staged.part, staged.slot), self._slots.place(staged.part, slot)
            segment.memory[target] = staged.segment.memory[source]
            moved.append(replace(staged, segment=segment, slot=slot, wait=None))
        self._give_back(batch)
        return moved

    def _drop(self, batch: list[_Staged], reason: str, detail: str = "") -> None:
        if not batch:
            return
        if detail:
            self.details[reason] = detail
        self.forget([staged.key for staged in batch])
        self._client.publish([staged.key for staged in batch if staged.published], 0)
        self._count(f"dropped_{reason}", len(batch))
        self._give_back(batch)

    def _give_back(self, batch: list[_Staged]) -> None:
        with self._condition:
            for staged in batch:
                self._slots.give_back(staged)
