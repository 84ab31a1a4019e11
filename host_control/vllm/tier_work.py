"""Background threads of the offloading tier: they look up and store rows of vLLM's CPU tier.

vLLM's rows are not in registered memory, so numpy copies each of them once. The copy releases the GIL.
"""

import collections
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.registered_memory import RegisteredMemory
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_logger = init_logger("vllm.shadowserve")
_BATCH_ROWS_MAX: Final = 8
_LOOKUP_KEYS_MAX: Final = 16_384
"""Keys per Lookup call: 0.6 MB of the 8 MB that a message may have."""


class Rows(NamedTuple):
    """The rows of one job of vLLM: vLLM's keys, the record keys, and the rows' indexes in the CPU tier."""

    job_id: int
    keys: tuple[bytes, ...]
    records: tuple[bytes, ...]
    chunk_ids: list[int]

    @classmethod
    def of(cls, job: Any, key: Callable[[bytes], bytes]) -> Self:
        keys = tuple(job.keys)
        return cls(job.job_id, keys, tuple(key(each) for each in keys), [int(each) for each in job.chunk_ids])


@dataclass(eq=False)
class _Lookup:
    """The lookup of one key for one or more requests. ``found`` is ``None`` until the answer is known."""

    record: bytes
    deadline: float
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class RowLookups:
    """Looks rows up, once per step, and keeps the answers as long as the requests run.

    All methods run on the scheduler's thread. None of them blocks.

    Args:
        record: Returns the record key for vLLM's key of a row.
        timeout: Seconds after which a lookup without an answer is a miss.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        namespace: bytes,
        record: Callable[[bytes], bytes],
        timeout: float,
        failed: Callable[[str, int, str, str], None],
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._record = record
        self._timeout = timeout
        self._failed = failed
        self._lock = threading.Lock()
        self._lookups: dict[bytes, _Lookup] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._new: list[_Lookup] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shadowserve-tier-lookup")
        self._pool.submit(client.wait_ready, timeout)  # connect now, so that the first lookup need not

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Return True if a row is stored; ``None`` until that is known, before the deadline."""
        now = time.monotonic()
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = _Lookup(self._record(key), now + self._timeout)
            self._new.append(lookup)
        lookup.requests.add(request_id)
        self._by_request.setdefault(request_id, set()).add(key)
        if lookup.found is None and now >= lookup.deadline:
            with self._lock:  # the thread may have set the answer meanwhile; the first one counts
                late = lookup.found is None
                lookup.found = bool(lookup.found)
            if late:
                self._failed("lookup", 1, "deadline", "no answer in time")
        return lookup.found

    def send(self) -> None:
        new, self._new = self._new, []
        for first in range(0, len(new), _LOOKUP_KEYS_MAX):
            self._pool.submit(self._run, new[first : first + _LOOKUP_KEYS_MAX])

    def set_missing(self, keys: Iterable[bytes]) -> None:
        """Turn rows that could not be loaded into misses."""
        for key in keys:
            if (lookup := self._lookups.get(key)) is not None:
                with self._lock:
                    lookup.found = False

    def forget(self, request_id: str) -> None:
        """Drop a request and the lookups that no other request needs."""
        for key in self._by_request.pop(request_id, ()):
            lookup = self._lookups[key]
            lookup.requests.discard(request_id)
            if not lookup.requests:
                del self._lookups[key]

    def reset(self) -> None:
        self._lookups, self._by_request, self._new = {}, {}, []

    def close(self) -> None:
        """End the thread. A running lookup ends by its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, lookups: Sequence[_Lookup]) -> None:
        left_s = max(lookup.deadline for lookup in lookups) - time.monotonic()
        if left_s <= 0:
            return  # find() turns them into misses
        try:
            chain = (self._namespace, [lookup.record for lookup in lookups])
            (found_chain,) = self._client.find([chain], left_s, published=False)()
            present, reason, detail = found_chain.stored, "", ""
        except DataPlaneError as error:
            present, reason, detail = np.zeros(len(lookups), np.bool_), error.outcome, str(error)
        failed = 0
        with self._lock:
            for lookup, found in zip(lookups, present.tolist(), strict=True):
                failed += lookup.found is None
                lookup.found = found if lookup.found is None else lookup.found
        if reason:
            self._failed("lookup", failed, reason, detail)


class RowStores:
    """Stores rows on a thread, one job of vLLM after the other.

    vLLM keeps the rows of a job unchanged until the job ends, so only the current batch is copied to registered memory.
    A job that waits longer than ``store_timeout_s`` fails: otherwise a slow store would fill the CPU tier with rows
    that wait.

    Args:
        memory: Memory for a batch. It is closed with this object.
        done: Called once per job: the job, the keys of stored rows, reason, detail, seconds.
    """

    def __init__(
        self,
        memory: RegisteredMemory,
        row: Callable[[int], npt.NDArray[np.uint8]],
        done: Callable[[Rows, Sequence[bytes], str, str, float], None],
        count: Callable[[str, int], None],
        config: HostConfig,
    ) -> None:
        self._memory = memory
        self._row = row
        self._done = done
        self._count = count
        self._timeout = config.store_timeout_s
        self._batch = min(_BATCH_ROWS_MAX, memory.size // memory.shapes[0].raw_bytes)
        self._condition = threading.Condition()
        self._queue: collections.deque[tuple[Rows, float]] = collections.deque()
        self._busy = self._hurry = self._closing = False
        self._thread = threading.Thread(target=self._run, name="shadowserve-tier-store", daemon=True)
        self._thread.start()

    def submit(self, rows: Rows) -> None:
        with self._condition:
            self._queue.append((rows, time.monotonic()))
            self._condition.notify_all()

    def drain(self) -> None:
        """Finish the running batch, let all other rows fail, and wait for that."""
        with self._condition:
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._busy)
            self._hurry = False

    def close(self, timeout: float) -> None:
        """Store queued jobs for at most ``timeout`` seconds, then end the thread."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)
            self._hurry = True
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        self._memory.close()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                rows, queued_s = self._queue.popleft()
                self._busy = True
            stored: list[bytes] = []
            try:
                reason, detail = self._store(rows, queued_s, stored)
            except Exception as error:  # keep the thread alive
                _logger.exception("ShadowServe: storing rows failed")
                reason, detail = "internal", f"{type(error).__name__}: {error}"
                self._memory.retire(release=True)
            self._done(rows, stored, reason, detail, time.monotonic() - queued_s)

    def _store(self, rows: Rows, queued_s: float, stored: list[bytes]) -> tuple[str, str]:
        """Store a job's rows in batches, append the stored keys to ``stored``, and return reason and detail."""
        if time.monotonic() - queued_s > self._timeout:
            return "deadline", "the job waited too long: rows are offloaded faster than they can be stored"
        for first in range(0, len(rows.keys), self._batch):
            if self._hurry:
                return "cancelled", ""
            batch = slice(first, first + self._batch)
            records, ends = rows.records[batch], time.monotonic() + self._timeout
            fill = functools.partial(self._fill, rows.chunk_ids[batch])
            try:
                answer = self._memory.store(
                    fill, records, [b""] * len(records), ends, purpose=pb.PURPOSE_OFFLOADING_TIER
                )
            except DataPlaneError as error:
                return error.outcome, str(error)
            self._count("stored_raw_bytes", answer.raw_bytes)
            self._count("stored_bytes", answer.stored_bytes)
            stored += itertools.compress(rows.keys[batch], answer.stored)
            if answer.reason != "complete":
                return answer.reason, answer.detail
        return "complete", ""

    def _fill(self, chunk_ids: Sequence[int], memory: Any) -> None:
        slots = np.frombuffer(memory, np.uint8).reshape(-1, self._memory.shapes[0].raw_bytes)
        for slot, chunk_id in zip(slots, chunk_ids, strict=False):
            np.copyto(slot, self._row(chunk_id))
