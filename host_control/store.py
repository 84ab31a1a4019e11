"""Storing in the background, at no more cost to the engine than one copy of each chunk.

The engine's thread gathers a chunk into a slot of the host's memory, from where one thread of ours has the data plane
store it, in order. A GPU may still be writing the slot then: our thread waits for it, not the engine's. When no slot is
free the chunk is dropped and counted: a cache may forget, the engine may not wait. After a gap in a prompt's chain
later chunks are of no use, so they are dropped too.
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
from typing import Any

from host_control.client import DataPlaneClient, StoreAnswer
from host_control.registered_memory import Memory, RegisteredMemory
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["StoreQueue"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Staged:
    """A chunk that waits in ``segment``, in a slot of its part; its bytes are there once ``wait`` returns ``""``."""

    part: int
    shape: int  # as which it is stored
    key: bytes
    parent: bytes  # the chunk before it in its prompt; empty for the first
    segment: Memory
    slot: int
    wait: Callable[[], str] | None = None
    published: bool = False
    lasts_s: float = 0.0
    purpose: Any = pb.PURPOSE_REQUEST


class StoreQueue:
    """Chunks on their way to the store. :meth:`offer` is for the engine's thread; it never waits.

    Chunks of each part, which have one shape, wait in as many slots as those of each other part. A part's chunks may be
    stored as several shapes, which differ in the quantizer alone: they wait in the same slots.

    Args:
        client: of the data plane.
        registration: that chunks wait in. The queue owns it from now on. Its shapes are those of each part, and then
            perhaps others of the same parts.
        parts: of the chunks; by default there is one for each of the registration's shapes.
        batch_chunks: at most so many in one call.
        timeout: seconds for a batch.
        recent_keys: so many keys are remembered as stored.
        retry_interval: seconds between attempts to connect while there is nothing to store.
        plain: not compressed, so that devices can bring them into pages.

    Attributes:
        last_error: why there was no connection when one was last tried.
        details: reason -> the last sentence about it.
        staged: chunks that have been staged so far.
        settled: of these, in their order, that are stored by now, or dropped.
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
    ) -> None:
        self._client = client
        self._registration = registration
        sizes = [shape.raw_bytes for shape in registration.shapes]
        self._chunk_bytes = sizes[:parts]
        if any(size != self._chunk_bytes[shape % len(self._chunk_bytes)] for shape, size in enumerate(sizes)):
            raise ValueError(f"chunks of {sizes} bytes are not those of {parts} parts")
        self._slots = registration.size // sum(self._chunk_bytes)
        self._begins = [self._slots * sum(self._chunk_bytes[:part]) for part in range(len(self._chunk_bytes))]
        if self._slots < 1:
            raise ConfigurationError(
                f"a chunk has {sum(self._chunk_bytes)} bytes, the store buffer {registration.size}; "
                "raise host.store_buffer_bytes"
            )
        self._batch_chunks = batch_chunks
        self._timeout = timeout
        self._recent_max = recent_keys
        self._retry_interval = retry_interval
        self._plain = plain
        self._condition = threading.Condition()
        self._free: dict[Memory, list[list[int]]] = {}
        self._queue: collections.deque[_Staged] = collections.deque()
        self._recent: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        self._busy = 0
        self._together = False
        self._closing = False
        self.staged = self.settled = 0
        self.last_error = "connecting"
        self._tried = threading.Event()
        self._counts: collections.Counter[str] = collections.Counter()
        self.details: dict[str, str] = {}
        self._job_prefix = secrets.token_hex(8)
        self._job_number = 0
        self._thread = threading.Thread(target=self._run, name="shadowserve-store", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have what is offered within wait for the rest, up to a whole batch: the data plane encodes one while it puts
        the one before only within a call."""
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
        anchored: bool = True,
        absent_since: float = float("-inf"),
        published: bool = False,
        lasts_s: float = 0.0,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> int:
        """Stage consecutive chunks of one prompt and part; return how many: known ones are not staged again.

        Args:
            keys: of the chunks, in order.
            gather: copies chunk ``i`` into the memory it is given, or starts to. Returns what waits for the copy's end,
                in the queue's thread, and says why the chunk is not to be stored, if it is not.
            part: whose they are.
            shape: as which they are stored, among the registration's; by default the part's first.
            chained: whether each is of use only where those before it are stored, too.
            previous: key of the chunk before the first, ``None`` at the start of a prompt.
            anchored: whether ``previous`` is known to be stored.
            absent_since: when (monotonic) a lookup found these chunks absent: one that was stored before is gone again.
            published: whether others may wait for them: what is dropped is withdrawn then.
            lasts_s: seconds after which nobody needs them any more; 0: for good.
            purpose: what they are stored for, of the wire's.
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
                    continue
                segment, slot = self._take_slot(part)
            if segment is None or slot is None:
                self._count("dropped_full" if segment is not None else f"dropped_{self.last_error}", 1)
                reachable = not chained
                dropped.append(key)
                continue
            chunk = _Staged(part, shape, key, parents[index], segment, slot, None, published, lasts_s, purpose)
            try:  # Outside the lock: only this slot's owner touches it.
                wait = gather(index, segment.memory[self._place(part, slot)])
            except Exception as error:  # of the engine's making; it must not end the engine's step
                self.details["gather_failed"] = f"{type(error).__name__}: {error}"
                self._count("dropped_gather_failed", 1)
                self._give_back([chunk])
                reachable = not chained
                dropped.append(key)
                continue
            with self._condition:
                self._queue.append(replace(chunk, wait=wait))
                self.staged += 1
                self._remember(key)
                self._condition.notify_all()
            staged += 1
        if published:
            self._client.publish(dropped, 0)
        return staged

    def _take_slot(self, part: int) -> tuple[Memory | None, int | None]:
        """Return the memory in use, and a free slot of it, if there are any. The lock is held."""
        segment = self._registration.current
        free = self._free.get(segment) if segment is not None else None
        return segment, free[part].pop(0) if free and free[part] else None

    def remember(self, keys: Sequence[bytes]) -> None:
        """Take note that chunks are stored already."""
        with self._condition:
            for key in keys:
                self._remember(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Take note that chunks are not stored (any more)."""
        with self._condition:
            for key in keys:
                self._recent.pop(key, None)

    def take_counts(self) -> dict[str, int]:
        """Return what happened since the last call: ``stored``, ``stored_raw_bytes``, ``dropped_REASON``..."""
        if not self._counts:  # in most steps of an engine
            return {}
        with self._condition:
            counts, self._counts = self._counts, collections.Counter()
        return dict(counts)

    def wait_tried(self, timeout: float) -> bool:
        """Wait for the first attempt to connect, at most ``timeout`` seconds; return whether it succeeded."""
        return self._tried.wait(timeout) and self._registration.current is not None

    def idle(self) -> bool:
        """Return whether nothing waits or is on its way."""
        with self._condition:
            return not self._queue and not self._busy

    def flush(self, timeout: float) -> bool:
        """Wait until :meth:`idle`, at most ``timeout`` seconds; return whether it is."""
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

    def _place(self, part: int, slot: int) -> slice:
        begin = self._begins[part] + slot * self._chunk_bytes[part]
        return slice(begin, begin + self._chunk_bytes[part])

    def _remember(self, key: bytes) -> None:
        self._recent[key] = time.monotonic()
        self._recent.move_to_end(key)
        if len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)

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
                self._drop(batch, "internal")
                self.last_error = f"{type(error).__name__}"
                self._registration.retire(release=True)
            finally:
                with self._condition:
                    self.settled += self._busy
                    self._busy = 0
                    self._condition.notify_all()

    def _connect(self) -> Memory | None:
        current = self._registration.current
        if current is not None or self._closing:
            return current
        try:
            segment = self._registration.acquire(self._timeout)
        except DataPlaneError as error:
            self.last_error = error.outcome
            self.details[error.outcome] = str(error)
            return None
        except ConfigurationError as error:
            if self.last_error != "no_memory":
                _logger.warning("shadowserve: nothing is stored: %s", error)
            self.last_error = "no_memory"
            return None
        with self._condition:
            self._free[segment] = [list(range(self._slots)) for _ in self._chunk_bytes]
            kept = {staged.segment for staged in self._queue} | {segment}
            self._free = {owner: free for owner, free in self._free.items() if owner in kept}
        return segment

    def _next(self) -> list[_Staged] | None:
        """Return the next batch: neighbours of one part in one segment; an empty one now and then without any."""
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
            while self._queue and len(batch) < self._batch_chunks:
                last, following = batch[-1], self._queue[0]
                neighbours = following.shape == last.shape and following.slot == last.slot + 1
                alike = following.segment is last.segment and following.lasts_s == last.lasts_s
                alike &= following.purpose == last.purpose
                if not alike or not neighbours:
                    break
                batch.append(self._queue.popleft())
            self._busy = len(batch)
            return batch

    def _store(self, batch: list[_Staged]) -> None:
        retried = False
        for index, staged in enumerate(batch):
            reason = staged.wait() if staged.wait is not None else ""
            if reason:
                self._drop(batch[index:], reason)
                batch = batch[:index]
                break
        while batch:
            segment = self._connect()
            if segment is None:
                self._drop(batch, self.last_error)
                return
            source = batch[0].segment
            if source is not segment:
                batch = self._move(batch, segment)
            if not source.whole():  # what was read of it may be zeros that nobody has put there
                self._registration.lost(source)
                self._drop(batch, "no_memory", "the memory that chunks wait in was made shorter; it is given up")
                return
            if source is not segment:
                continue
            answer = self._call(batch)
            if answer.reason == "unknown_memory" and not retried:
                retried = True  # the daemon has restarted: register again, once
                self._registration.retire(release=False)
                continue
            self._settle(batch, answer)
            return

    def _call(self, batch: list[_Staged]) -> StoreAnswer:
        self._job_number += 1
        return self._client.store(
            f"{self._job_prefix}-{self._job_number}",
            self._registration.memory_id,
            self._place(batch[0].part, batch[0].slot).start,
            [staged.key for staged in batch],
            [staged.parent for staged in batch],
            self._timeout,
            layout=batch[0].shape,
            lasts_s=batch[0].lasts_s,
            plain=self._plain,
            purpose=batch[0].purpose,
        )

    def _settle(self, batch: list[_Staged], answer: StoreAnswer) -> None:
        self._count("stored", int(answer.stored.sum()))
        self._count("stored_raw_bytes", answer.raw_bytes)
        self._count("stored_bytes", answer.stored_bytes)
        if not answer.quiet:
            # The daemon may still be reading these slots; nobody writes into them again.
            self._registration.retire(release=True)
        self._give_back(list(itertools.compress(batch, answer.stored)))
        self._drop(list(itertools.compress(batch, ~answer.stored)), answer.reason, answer.detail)

    def _move(self, batch: list[_Staged], segment: Memory) -> list[_Staged]:
        """Copy chunks from a segment that was given up into the one in use."""
        moved: list[_Staged] = []
        for position, staged in enumerate(batch):
            with self._condition:
                free = self._free[segment][staged.part]
                fits = bool(free) and (not moved or free[0] == moved[-1].slot + 1)
                slot = free.pop(0) if fits else None
            if slot is None:
                self._drop(batch[position:], "full")
                break
            source, target = self._place(staged.part, staged.slot), self._place(staged.part, slot)
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
                free = self._free.get(staged.segment)
                if free is not None:
                    free[staged.part].append(staged.slot)
