"""P/D disaggregation: prompts that one engine computes and another one continues with.

The prefill engine *publishes* the chunks that it found absent, publishes them again until the step that computes them
has ended, and withdraws those that it will not store after all. The decode engine finds chunks that are pending and
waits for them, in polls that ask for all requests together: its lookup waits for the first chunk, and then its load
waits for the rest. Where no load may wait, the lookup waits for all of them.

Where two engines share a prompt, the whole blocks behind its last chunk, its *tail*, have a record of their own: a
chunk's record, padded with zeros. The key tells its length.
"""

import abc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from shadowserve.pieces import Flags

POLL_INTERVAL: Final = 0.01
"""Least seconds between two polls, which cost host, data plane and storage some milliseconds of CPU time together."""
_POLL_INTERVAL_MAX: Final = 0.1
_POLL_SHARE: Final = 0.1
"""Of the time that the request has waited: a request that has waited longer is polled for less often."""

Ask = Callable[[Sequence[bytes], Iterable[int], float], tuple[Flags, Flags | None]]
"""From chunk keys, shard layouts and a timeout to the chunks that are stored in one of the layouts for all ranks, and
those that are pending; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """P/D disaggregation parameters of one request.

    Attributes:
        publishes: Seconds for which chunks that its lookup finds absent are published; 0: they are not.
        waits: Seconds, from the start of its lookup, that it waits for pending chunks; 0: it does not.
        expected_tokens: Leading tokens of the prompt that a proxy said another engine stores. Waited for also where
            storage does not know pending chunks.
        tail_tokens: Tokens of the prompt's tail; 0 where it has no record.
        cold: Load chunks that are in object storage alone.
    """

    publishes: float = 0.0
    waits: float = 0.0
    expected_tokens: int = 0
    tail_tokens: int = 0
    load_tokens_max: int | None = None
    store_tokens_max: int | None = None
    cold: bool = True

    def may_store(self, tokens: int) -> bool:
        """Tell if a chunk that ends behind ``tokens`` tokens may be stored."""
        return self.store_tokens_max is None or tokens <= self.store_tokens_max


class Available(NamedTuple):
    """How much of a load can be fetched by now, while the rest is pending or cold.

    ``chunks`` counts leading chunks, the tail among them.
    ``ended``: reason why there will be no more (``complete``: all are available), empty while more may follow.
    """

    chunks: int
    ended: str


@dataclass(eq=False)
class _Wait:
    """A wait for one chunk, in some shard layouts, since and until a time."""

    chunk_key: bytes
    layouts: frozenset[int]
    since: float
    until: float
    then: Callable[[bool], None]


@dataclass(eq=False)
class _Published:
    """Published chunks of one request: those that no step computes yet, in order, and those of steps in flight."""

    chunk_keys: dict[bytes, None]
    seconds: float
    renewed_at: float
    computing: set[bytes] = field(default_factory=set)


class Background(abc.ABC):
    """A thread that begins with its first work: most engines never need it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def _wake(self) -> None:
        """Wake the thread, or start it; the lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._condition.notify_all()

    @abc.abstractmethod
    def _run(self) -> None:
        """Work until :meth:`close`."""

    def close(self) -> None:
        """End the thread; waits get no further call."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()


class Publications(Background):
    """Chunks that this engine has published, and chunks of others that it waits for; in the background.

    ``publish`` publishes chunk keys for some seconds; 0 withdraws them. It does not block.
    """

    def __init__(self, ask: Ask, publish: Callable[[Sequence[bytes], float], None], timeout: float) -> None:
        super().__init__("shadowserve-disaggregation")
        self._ask = ask
        self._publish = publish
        self._timeout = timeout
        self._waits: list[_Wait] = []
        self._published: dict[str, _Published] = {}
        self._begun = self._ended = 0  # number of steps; for the engine's thread, as the next one
        self._computing: deque[tuple[int, _Published, Collection[bytes]]] = deque()
        """Chunks of steps in flight, by the step's number."""
        self._withdrawn: list[list[bytes]] = []

    def wait(self, chunk_key: bytes, layouts: Iterable[int], until: float, then: Callable[[bool], None]) -> None:
        """Call ``then``, in any thread, once a chunk is stored or not pending any more; with True at ``until``.

        The poll asks in these shard layouts, and in those of other waits.
        """
        with self._condition:
            self._waits.append(_Wait(chunk_key, frozenset(layouts), time.monotonic(), until, then))
            self._wake()

    def publish(self, request_id: str, chunk_keys: Sequence[bytes], seconds: float) -> None:
        """Publish chunks for some seconds, and again until the step that computes them ends, or :meth:`withdraw`."""
        with self._condition:
            self._published[request_id] = _Published(dict.fromkeys(chunk_keys), seconds, time.monotonic() + seconds / 2)
            self._wake()
        self._publish(chunk_keys, seconds)

    def begin_step(self) -> None:
        """Note that a step is scheduled."""
        self._begun += 1

    def computed(self, request_id: str, chunk_keys: Collection[bytes]) -> None:
        """Note that the step that was scheduled last computes chunks, and that they are stored at its end.

        Cheap, and a no-op for a request that has published nothing.
        """
        if (published := self._published.get(request_id)) is not None:
            with self._condition:
                for chunk_key in chunk_keys:
                    published.chunk_keys.pop(chunk_key, None)
                if self._begun > self._ended:
                    published.computing.update(chunk_keys)
                    self._computing.append((self._begun, published, chunk_keys))

    def end_step(self) -> None:
        """Note the end of the oldest step in flight: its chunks stay pending, for half of their time at least.

        They are not published again: a rank that dropped a chunk has withdrawn it, and no engine should wait for that
        one.
        """
        self._ended = min(self._ended + 1, self._begun)
        while self._computing and self._computing[0][0] <= self._ended:
            _, published, chunk_keys = self._computing.popleft()
            with self._condition:
                published.computing.difference_update(chunk_keys)

    def withdraw(self, request_id: str) -> None:
        """Withdraw the chunks of an ended request that were not computed. As cheap as :meth:`computed`."""
        if request_id in self._published:
            with self._condition:
                self._withdrawn.append(list(self._published.pop(request_id).chunk_keys))
                self._wake()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._closing or self._waits or self._withdrawn or self._is_due()):
                    renewals = [each.renewed_at for each in self._published.values()]
                    self._condition.wait(max(0.0, min(renewals) - time.monotonic()) if renewals else None)
                if self._closing:
                    return
                withdrawn, self._withdrawn = self._withdrawn, []
            for chunk_keys in withdrawn:
                self._publish(chunk_keys, 0)
            self._renew()
            if self._waits:
                time.sleep(self._interval())
                self._poll()

    def _interval(self) -> float:
        """Return the seconds until the next poll; the newest wait decides."""
        waited = time.monotonic() - max(each.since for each in self._waits)
        return min(max(POLL_INTERVAL, _POLL_SHARE * waited), _POLL_INTERVAL_MAX)

    def _is_due(self) -> bool:
        now = time.monotonic()
        return any(each.renewed_at <= now for each in self._published.values())

    def _renew(self) -> None:
        now = time.monotonic()
        with self._condition:
            due = [each for each in self._published.values() if each.renewed_at <= now]
            for each in due:
                each.renewed_at = now + each.seconds / 2
            renewed = [([*each.computing, *each.chunk_keys], each.seconds) for each in due]
        for chunk_keys, seconds in renewed:
            self._publish(chunk_keys, seconds)

    def _poll(self) -> None:
        """Ask once for all waits, and end those that are over."""
        with self._condition:
            waits = list(self._waits)
        now = time.monotonic()
        late = np.array([each.until <= now for each in waits], np.bool_)
        layouts = frozenset[int]().union(*(each.layouts for each in waits))
        try:
            stored, pending = self._ask([each.chunk_key for each in waits], layouts, self._timeout)
            over = late | stored | (~pending if pending is not None else np.False_)
        except Exception:  # no answer, or closed, or a bug: the lookup asks again and learns why
            over = np.ones(len(waits), np.bool_)
        done = [each for each, end in zip(waits, over, strict=True) if end]
        with self._condition:
            for each in done:
                self._waits.remove(each)
        for each in done:
            each.then(each.until <= now)
