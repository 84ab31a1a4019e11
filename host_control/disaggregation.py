"""Prompts that one engine computes and another one goes on with: what is about to be stored is waited for.

The engine that computes *publishes* the chunks that it found absent, says so again while the request lives, and
withdraws what it will not store after all. The one that goes on finds chunks that are published and not there, and
waits for them, in turns that ask for all requests together, until it must go on: its lookup for the first chunk, and
then its load, which begins with those that are there, for the rest. Where no load may wait, the lookup waits for all.

A prompt seldom ends with a chunk. Where it is handed over, the whole blocks behind its last chunk, its *tail*, have a
record of their own: a chunk's, with zeros behind the tail, which cost next to nothing once they are compressed. So
there is one kind of record, and one registration, whatever the tail's length; the key names that.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from shadowserve.pieces import Flags

__all__ = ["Available", "Ask", "Coming", "Disaggregation"]

POLL_INTERVAL: Final = 0.01
"""Least seconds between two questions for what is published: one Lookup for all requests that wait, one key for each.

A question costs host, data plane and storage some milliseconds of CPU time together. So one who has waited longer asks
less often, and is late by a tenth of its wait at most."""
_POLL_INTERVAL_MAX: Final = 0.1
_POLL_SHARE: Final = 0.1
"""Of what has been waited."""

Ask = Callable[[Sequence[bytes], Iterable[int], float], tuple[Flags, Flags | None]]
"""From chunk keys, shard_layouts and seconds to which are there, for all ranks of one of these shard_layouts, and which are published;
None where nobody can say."""


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """What is asked for one request beside its prompt.

    Attributes:
        publishes: seconds for which the chunks that its lookup finds absent are published; 0 for not at all.
        waits: seconds that its lookup waits, from its beginning, for chunks that are published; 0 for not at all.
        expected_tokens: leading tokens of the prompt that somebody has said to store: waited for, too, where storage
            takes no publications.
        tail_tokens: that the prompt's tail has; 0 where it has no record of its own.
        load_tokens_max: so many tokens are loaded at most.
        store_tokens_max: of so many leading tokens chunks are stored at most.
        cold: whether chunks are loaded that are in object storage alone.
    """

    publishes: float = 0.0
    waits: float = 0.0
    expected_tokens: int = 0
    tail_tokens: int = 0
    load_tokens_max: int | None = None
    store_tokens_max: int | None = None
    cold: bool = True

    def may_store(self, tokens: int) -> bool:
        """Return whether a chunk may be stored that ends behind so many tokens."""
        return self.store_tokens_max is None or tokens <= self.store_tokens_max


class Available(NamedTuple):
    """How far a prompt is there that is loaded while others still store it.

    Attributes:
        chunks: leading ones that are there, its tail among them.
        ended: why no more will be, ``"complete"`` where all are; empty while more may come.
    """

    chunks: int
    ended: str


@dataclass(eq=False)
class _Waiting:
    chunk_key: bytes
    shard_layouts: frozenset[int]
    since: float
    until: float
    then: Callable[[bool], None]


@dataclass(eq=False)
class _Published:
    chunk_keys: dict[bytes, None]  # that are still to be computed here, in their order
    seconds: float
    renewed_at: float


class Coming:
    """What this engine waits for, and what it has published; in the background.

    Args:
        ask: for chunk keys.
        publish: chunk keys, for so many seconds; 0 withdraws. Does not wait.
        timeout: seconds for a question.
    """

    def __init__(self, ask: Ask, publish: Callable[[Sequence[bytes], float], None], timeout: float) -> None:
        self._ask = ask
        self._publish = publish
        self._timeout = timeout
        self._condition = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._published: dict[str, _Published] = {}
        self._ended: list[list[bytes]] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def wait(self, chunk_key: bytes, shard_layouts: Iterable[int], until: float, then: Callable[[bool], None]) -> None:
        """Call ``then``, in any thread, once a chunk key is there or published no more; with True, at ``until``.

        It is asked for in these shard_layouts, and in those of others that wait at the same time.
        """
        with self._condition:
            self._waiting.append(_Waiting(chunk_key, frozenset(shard_layouts), time.monotonic(), until, then))
            self._wake()

    def publish(self, request_id: str, chunk_keys: Sequence[bytes], seconds: float) -> None:
        """Publish chunk keys for so long, and again until :meth:`computed` or :meth:`settle`."""
        with self._condition:
            self._published[request_id] = _Published(dict.fromkeys(chunk_keys), seconds, time.monotonic() + seconds / 2)
            self._wake()
        self._publish(chunk_keys, seconds)

    def computed(self, request_id: str, chunk_keys: Iterable[bytes]) -> None:
        """These are on their way to the store: they stay published, for half of their time at least.

        They are not published again: a rank that has dropped a chunk has withdrawn it, and nobody is to wait for that
        one. Cheap, and nothing at all for a request that has published nothing.
        """
        if (published := self._published.get(request_id)) is not None:
            with self._condition:
                for chunk_key in chunk_keys:
                    published.chunk_keys.pop(chunk_key, None)

    def settle(self, request_id: str) -> None:
        """A request has ended: what it has not computed is withdrawn. As cheap as :meth:`computed`."""
        if request_id in self._published:
            with self._condition:
                self._ended.append(list(self._published.pop(request_id).chunk_keys))
                self._wake()

    def close(self) -> None:
        """End the thread; who waits is told nothing."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def _wake(self) -> None:
        if self._thread is None:  # of most engines never
            self._thread = threading.Thread(target=self._run, name="shadowserve-disaggregation", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._closing or self._waiting or self._ended or self._is_due()):
                    renewals = [each.renewed_at for each in self._published.values()]
                    self._condition.wait(max(0.0, min(renewals) - time.monotonic()) if renewals else None)
                if self._closing:
                    return
                ended, self._ended = self._ended, []
            for chunk_keys in ended:
                self._publish(chunk_keys, 0)
            self._renew()
            if self._waiting:
                time.sleep(self._interval())
                self._look()

    def _interval(self) -> float:
        """Return the seconds until the next question; whoever has come last wants it soonest."""
        waited = time.monotonic() - max(each.since for each in self._waiting)
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
            renewed = [(list(each.chunk_keys), each.seconds) for each in due]
        for chunk_keys, seconds in renewed:
            self._publish(chunk_keys, seconds)

    def _look(self) -> None:
        """Ask once for all that wait, and tell those whose wait is over."""
        with self._condition:
            waiting = list(self._waiting)
        now = time.monotonic()
        over = np.array([each.until <= now for each in waiting], np.bool_)
        shard_layouts = frozenset[int]().union(*(each.shard_layouts for each in waiting))
        try:
            present, coming = self._ask([each.chunk_key for each in waiting], shard_layouts, self._timeout)
            ended = over | present | (~coming if coming is not None else np.False_)
        except Exception:  # no answer, or closed, or a bug: whoever asks again hears why
            ended = np.ones(len(waiting), np.bool_)
        done = [each for each, end in zip(waiting, ended, strict=True) if end]
        with self._condition:
            for each in done:
                self._waiting.remove(each)
        for each in done:
            each.then(each.until <= now)
