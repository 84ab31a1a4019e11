"""What a tier does off the scheduler's thread: rows of vLLM's CPU tier are looked up, and stored.

vLLM's rows lie in memory that the data plane does not know. Between it and ours they are copied once, by numpy, which
holds no lock of the interpreter meanwhile.
"""

import collections
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from host_control.client import DataPlaneClient, StoreAnswer
from host_control.config import HostConfig
from host_control.registered_memory import RegisteredMemory
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_logger = init_logger("vllm.shadowserve")
_BATCH_ROWS_MAX: Final = 8
_LOOKUP_KEYS_MAX: Final = 16_384
"""Of one question: 0.6 MB, where a message may have 8."""


class Rows(NamedTuple):
    """The rows of one job of vLLM's: its keys, those of their records, and where they lie."""

    job_id: int
    keys: tuple[bytes, ...]
    records: tuple[bytes, ...]
    chunk_ids: list[int]

    @classmethod
    def of(cls, job: Any, key: Callable[[bytes], bytes]) -> Self:
        keys = tuple(job.keys)
        return cls(job.job_id, keys, tuple(key(each) for each in keys), [int(each) for each in job.chunk_ids])


# ---------------------------------------------------------------------- lookups


@dataclass(eq=False)
class _Asked:
    """A key that some requests have looked up."""

    record: bytes
    deadline: float
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class RowLookups:
    """Which rows are stored, asked once in each step and remembered while requests that have asked last.

    All methods are the scheduler's; none waits.

    Args:
        client: of the data plane.
        namespace: of the rows.
        record: returns the key of a row's record.
        timeout: seconds until a row whose lookup has no answer is a miss.
        failed: told of lookups without an answer: what, how many rows, reason, detail.
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
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._new: list[_Asked] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shadowserve-tier-lookup")
        self._pool.submit(client.wait_ready, timeout)  # the first request's deadline does not pay for the connection

    def look(self, key: bytes, request_id: str) -> bool | None:
        """Return whether a row is stored, ``None`` while nobody knows and time is left."""
        now = time.monotonic()
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(self._record(key), now + self._timeout)
            self._new.append(asked)
        asked.requests.add(request_id)
        self._by_request.setdefault(request_id, set()).add(key)
        if asked.found is None and now >= asked.deadline:
            with self._lock:  # the thread may have answered since; what was said first stays
                late = asked.found is None
                asked.found = bool(asked.found)
            if late:
                self._failed("lookup", 1, "deadline", "no answer in time")
        return asked.found

    def ask(self) -> None:
        """Have the thread ask for what is new."""
        new, self._new = self._new, []
        for first in range(0, len(new), _LOOKUP_KEYS_MAX):
            self._pool.submit(self._run, new[first : first + _LOOKUP_KEYS_MAX])

    def missed(self, keys: Iterable[bytes]) -> None:
        """Take note that rows are not to be had."""
        for key in keys:
            if (asked := self._asked.get(key)) is not None:
                with self._lock:
                    asked.found = False

    def forget(self, request_id: str) -> None:
        """Drop a request, and what only it has asked for."""
        for key in self._by_request.pop(request_id, ()):
            asked = self._asked[key]
            asked.requests.discard(request_id)
            if not asked.requests:
                del self._asked[key]

    def reset(self) -> None:
        """Forget every answer."""
        self._asked, self._by_request, self._new = {}, {}, []

    def close(self) -> None:
        """End the thread; a lookup that runs ends by its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, asked: Sequence[_Asked]) -> None:
        left = max(each.deadline for each in asked) - time.monotonic()
        if left <= 0:
            return  # whoever looks again hears that it was too late
        try:
            (present,) = self._client.lookup([(self._namespace, [each.record for each in asked])], left)()
            reason = detail = ""
        except DataPlaneError as error:
            present, reason, detail = np.zeros(len(asked), np.bool_), error.outcome, str(error)
        failed = 0
        with self._lock:
            for each, found in zip(asked, present.tolist(), strict=True):
                failed += each.found is None
                each.found = found if each.found is None else each.found
        if reason:
            self._failed("lookup", failed, reason, detail)


# ---------------------------------------------------------------------- stores


class RowStores:
    """Stores rows, one job of vLLM's after the other, from a thread of its own.

    vLLM keeps the rows of a job as they are until its outcome. So nothing waits in memory of ours but the batch that is
    being stored, and a job that has waited for its turn for the time that a batch may take is given up: rows that wait
    for a slow store would leave the CPU tier no room.

    Args:
        client: of the data plane.
        registration: that a batch lies in. Owned from now on.
        row: returns a row's bytes.
        done: told of each job once: the job, the keys of rows that are stored, reason, detail, seconds.
        count: told of bytes that were stored, as rows and as records.
        config: of the host.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        row: Callable[[int], npt.NDArray[np.uint8]],
        done: Callable[[Rows, Sequence[bytes], str, str, float], None],
        count: Callable[[str, int], None],
        config: HostConfig,
    ) -> None:
        self._client = client
        self._registration = registration
        self._row = row
        self._done = done
        self._count = count
        self._timeout = config.store_timeout_s
        self._batch = min(_BATCH_ROWS_MAX, registration.size // registration.shapes[0].raw_bytes)
        self._condition = threading.Condition()
        self._queue: collections.deque[tuple[Rows, float]] = collections.deque()
        self._busy = self._hurry = self._closing = False
        self._job_prefix = secrets.token_hex(8)
        self._calls = 0
        self._thread = threading.Thread(target=self._run, name="shadowserve-tier-store", daemon=True)
        self._thread.start()

    def submit(self, rows: Rows) -> None:
        """Store a job's rows, some time."""
        with self._condition:
            self._queue.append((rows, time.monotonic()))
            self._condition.notify_all()

    def drain(self) -> None:
        """End the batch that runs, fail what has not begun, and wait for that."""
        with self._condition:
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._busy)
            self._hurry = False

    def close(self, timeout: float) -> None:
        """Store what waits, at most ``timeout`` seconds, and end the thread."""
        ends = time.monotonic() + timeout
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)
            self._hurry = True
        self._thread.join(max(0.0, ends - time.monotonic()) + 0.1)
        self._registration.close()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                rows, arrived = self._queue.popleft()
                self._busy = True
            stored: list[bytes] = []
            try:
                reason, detail = self._store(rows, arrived, stored)
            except Exception as error:  # the thread must outlive any bug
                _logger.exception("ShadowServe: storing rows failed")
                reason, detail = "internal", f"{type(error).__name__}: {error}"
                self._registration.retire(release=True)
            self._done(rows, stored, reason, detail, time.monotonic() - arrived)

    def _store(self, rows: Rows, arrived: float, stored: list[bytes]) -> tuple[str, str]:
        """Store a job's rows by batches, and note which are; return why not all."""
        if time.monotonic() - arrived > self._timeout:
            return "deadline", "jobs before it took too long; the store is slower than what is to be kept"
        for first in range(0, len(rows.keys), self._batch):
            if self._hurry:
                return "cancelled", ""
            batch = slice(first, first + self._batch)
            try:
                answer = self._call(rows, batch)
            except DataPlaneError as error:
                return error.outcome, str(error)
            except ConfigurationError as error:
                return "no_memory", str(error)
            self._count("stored_raw_bytes", answer.raw_bytes)
            self._count("stored_bytes", answer.stored_bytes)
            stored += [key for key, there in zip(rows.keys[batch], answer.stored.tolist(), strict=True) if there]
            if answer.reason != "complete":
                return answer.reason, answer.detail
        return "complete", ""

    def _call(self, rows: Rows, batch: slice) -> StoreAnswer:
        """Store one batch; once more where the daemon has restarted.

        Raises:
            DataPlaneError: the data plane cannot be reached, or refuses.
            ConfigurationError: there is no memory to be had.
        """
        for _ in range(2):
            memory = self._registration.acquire(self._timeout)
            places = np.frombuffer(memory.memory, np.uint8).reshape(-1, self._registration.shapes[0].raw_bytes)
            for place, chunk_id in zip(places, rows.chunk_ids[batch], strict=False):
                np.copyto(place, self._row(chunk_id))
            if not memory.whole():
                self._registration.lost(memory)
                raise ConfigurationError("the memory that rows wait in was made shorter; it is given up")
            self._calls += 1
            records = rows.records[batch]
            answer = self._client.store(
                f"{self._job_prefix}-{self._calls}",
                self._registration.memory_id,
                0,
                records,
                [b""] * len(records),
                self._timeout,
                purpose=pb.PURPOSE_OFFLOADING_TIER,
            )
            if answer.reason == "unknown_memory" or not answer.quiet:
                self._registration.retire(release=not answer.quiet)
            if answer.reason != "unknown_memory":
                break
        return answer
