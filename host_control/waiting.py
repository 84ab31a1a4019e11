"""What waits in this engine's queue, told to the data planes, so that what it will fetch is near when it runs.

The engine's thread says what has happened: a request has come, has begun, was sent back, has ended. That takes
microseconds, however long the queue is. A thread of our own tells the data planes what that makes of the queue: who
waits, in which order, and when each will probably begin. A message holds what has changed since the one before; keys of
a request are said once. While a message is under way nothing queues behind it: the next one is made when it is over, of
what is then. All of it is a hint: a message that is lost costs a fetch that could have been nearer.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import grpc

from host_control.client import DataPlaneClient
from host_control.connection import Peer
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["Begins", "Chains", "WaitingQueue"]

Chains = Mapping[DataPlaneClient, Sequence[tuple[bytes, Sequence[bytes]]]]
"""What a request will fetch: of each data plane namespaces and keys of their records, a prompt's first chunk first."""

_PAUSE_S: Final = 0.02
"""Between two messages: what happens meanwhile goes into one."""
_TURN_S: Final = 0.05
"""Between two looks at lookups that were not answered yet."""
_CORRECTS_S: Final = 0.25
"""Between two looks at when requests will begin, where nothing else has happened: each takes a ms of the engine's core
if it finds something to say, and while requests wait it does."""
_LASTS_S: Final = 30.0
"""Of what was said, if nothing follows: as long as an engine may be busy with one thing, such as loading a model."""
_BEAT_S: Final = _LASTS_S / 3
_KEYS_MAX: Final = 8192
"""In one message, as in a lookup; what more are goes into the next one."""
_AGAIN_S: Final = 0.1
_FAILED_S: Final = 1.0
"""Until everything is said anew: to a data plane that lacks messages, and to one that did not answer."""
_REQUESTS_MAX: Final = 1024
"""Told of at one time, those that run first: what runs behind so many others is not brought nearer yet."""
_BEGINS_SEEN: Final = 16
_DRIFT_S: Final = 0.05
_DRIFT_SHARE: Final = 0.25
"""A request that is expected otherwise than was said by more than both is told of anew."""
_NEXT: Final = 8
"""Of so many that run next: of those behind them it changes with every one that begins, and matters later."""


class Begins:
    """When requests begin, by when others did: as many in a time as of late, while there were others that waited.

    What a queue waits for, computing or blocks or other requests' last tokens, is in that, whatever the engine.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_BEGINS_SEEN + 1)

    def begun(self, now: float, *, others: bool) -> None:
        """A request has begun; ``others`` wait still."""
        self._seen.append(now)
        if not others:
            self._seen.clear()

    def expected(self, place: int, now: float) -> float:
        """Return in how many seconds the request will begin before which so many others do; infinite: unknown."""
        if len(self._seen) < 2 or self._seen[-1] <= self._seen[0]:
            return math.inf
        each = (self._seen[-1] - self._seen[0]) / (len(self._seen) - 1)
        # One that is overdue may begin at any moment; that the others' time has passed makes it no sooner.
        return place * each + max(each - (now - self._seen[-1]), each / 4)


@dataclass(eq=False)
class _Entry:
    """A request; ``place`` orders them, and ``chains`` are not known until it was looked up."""

    number: int
    place: tuple[float, float]
    chains: Chains | None = None


@dataclass
class _Told:
    """What one data plane was told, and as whom it answered then."""

    peer: Peer | None = None
    number: int = 0
    chains: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    begins_at: list[float] = field(default_factory=list)
    at: float = -math.inf
    unused: bool = False
    not_before: float = -math.inf
    call: Any = None
    missed: bool = False  # there is more to say once the call is over


class WaitingQueue:
    """The queue of one engine. Methods are called on its thread, and take microseconds.

    Args:
        look: returns what a request will fetch; None as long as nobody knows. Called on this object's own thread.
        clients: of the data planes.
        by_priority: requests run by priority, the lowest number first, and else as they came; one that is sent back
            keeps its place then, and otherwise comes first.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        look: Callable[[str], Chains | None],
        clients: Sequence[DataPlaneClient],
        *,
        by_priority: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._by_priority = by_priority
        self._clock = clock
        self._name = os.urandom(16)
        self._numbers = count(1)
        self._messages = count(1)
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._begun: dict[str, _Entry] = {}
        self._begins = Begins()
        self._told = {client: _Told() for client in clients}
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shadowserve-queue", daemon=True)
        self._thread.start()

    # ---- What has happened

    def enqueue(self, request_id: str, priority: int = 0) -> None:
        """A request waits, behind all others of its priority."""
        number = next(self._numbers)
        with self._lock:
            self._entries[request_id] = _Entry(number, (float(priority) if self._by_priority else 0.0, float(number)))
        self._changed.set()

    def begun(self, request_id: str) -> None:
        """A request waits no more: it loads, or runs."""
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                return
            self._begun[request_id] = entry
            self._begins.begun(self._clock(), others=bool(self._entries))
        self._changed.set()

    def sent_back(self, request_id: str) -> None:
        """A request that has begun waits again; what it will fetch is looked for anew."""
        with self._lock:
            entry = self._begun.pop(request_id, None)
            if entry is None:
                return
            number = next(self._numbers)
            place = entry.place if self._by_priority else (0.0, -float(number))
            self._entries[request_id] = _Entry(number, place)
        self._changed.set()

    def wants(self, request_id: str, chains: Chains) -> None:
        """Say what a waiting request will fetch, instead of what its lookup has found, or will."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            entry.chains = chains
        self._changed.set()

    def ended(self, request_id: str) -> None:
        """A request is over, whether it has begun or not."""
        with self._lock:
            self._begun.pop(request_id, None)
            if self._entries.pop(request_id, None) is None:
                return
        self._changed.set()

    def close(self) -> None:
        """Tell nobody any more; what was told ends by itself."""
        self._closed = True
        self._changed.set()

    # ---- Telling it

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                unknown = any(entry.chains is None for entry in self._entries.values())
                waits = bool(self._entries)
            told = any(each.chains or each.call is not None for each in self._told.values())
            self._changed.wait(_TURN_S if unknown else _CORRECTS_S if waits or told else None)
            self._changed.clear()
            if self._closed:
                return
            self._tell()
            time.sleep(_PAUSE_S)

    def _tell(self) -> None:
        for told in self._told.values():
            told.missed = True  # in this order: an answer that comes now sees it, or this sees the answer
            told.missed = told.call is not None
        if not any(self._is_told(client, told) for client, told in self._told.items()):
            return  # and nobody's order is of interest
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: item[1].place)[:_REQUESTS_MAX]
        for request_id, entry in entries:
            if entry.chains is None:
                chains = self._look(request_id)
                with self._lock:
                    entry.chains = entry.chains if entry.chains is not None else chains
        now = self._clock()
        with self._lock:
            expected = [now + self._begins.expected(place, now) for place in range(len(entries))]
        for client, told in self._told.items():
            self._tell_one(client, told, [entry for _, entry in entries], expected, now)

    def _is_told(self, client: DataPlaneClient, told: _Told) -> bool:
        """Return whether there is somebody to be told of changes now, and no message to him is under way."""
        peer = client.peer
        if peer is None or told.call is not None or self._clock() < told.not_before:
            return False
        return not (told.unused and told.peer is peer)

    def _tell_one(
        self, client: DataPlaneClient, told: _Told, entries: Sequence[_Entry], expected: Sequence[float], now: float
    ) -> None:
        """Tell one data plane what has changed, if it is to be told now."""
        peer = client.peer
        if peer is None or not self._is_told(client, told):
            return
        whole = told.peer is not peer
        if whole:
            told.chains, told.order, told.begins_at, told.unused = {}, [], [], False
        message = pb.ExpectRequest(queue=self._name, whole=whole, lasts_ms=int(1000 * _LASTS_S))
        known, told.missed = self._changes(client, told, entries, message)
        order, begins_at = [], []
        for entry, at in zip(entries, expected, strict=True):
            if entry.number in known:
                order.append(entry.number)
                begins_at.append(at)
        if order != told.order or self._drifted(told.begins_at, begins_at, now):
            message.order.extend(order)
            if begins_at and begins_at[0] < math.inf:
                message.begins_in_ms.extend(min(int(1000 * (at - now)), 0xFFFFFFFF) for at in begins_at)
        nothing = not (message.arrivals or message.gone or message.order)
        if nothing and (not known or now - told.at < _BEAT_S) and not (whole and known):
            return
        message.number = next(self._messages)
        call = client.expect(message)
        if call is None:
            return
        told.peer, told.chains, told.order, told.begins_at, told.at = peer, known, order, begins_at, now
        told.call = call
        call.add_done_callback(lambda ended: self._take_answer(client, told, ended))

    @staticmethod
    def _changes(
        client: DataPlaneClient, told: _Told, entries: Sequence[_Entry], message: pb.ExpectRequest
    ) -> tuple[dict[int, Any], bool]:
        """Put into a message who has come and gone; return who is known then with what they want, and whether others
        found no room."""
        wanted = {entry.number: entry.chains.get(client) for entry in entries if entry.chains is not None}
        known, left = {}, _KEYS_MAX
        for number, chains in wanted.items():
            if not chains:
                continue
            if told.chains.get(number) is not chains:
                left -= sum(len(keys) for _, keys in chains)
                if left < 0 and message.arrivals:
                    continue
                message.arrivals.append(
                    pb.Arrival(
                        request=number,
                        chains=[pb.KeyChain(keys=keys, namespace=namespace) for namespace, keys in chains],
                    )
                )
            known[number] = chains
        message.gone.extend(number for number in told.chains if number not in known)
        return known, left < 0

    @staticmethod
    def _drifted(told: Sequence[float], now_expected: Sequence[float], now: float) -> bool:
        """Return whether some of those that run next are expected otherwise than was said."""
        if len(told) != len(now_expected):
            return True
        return any(
            new != old and not abs(new - old) <= max(_DRIFT_S, _DRIFT_SHARE * (new - now))
            for old, new in zip(told[:_NEXT], now_expected[:_NEXT], strict=True)
        )

    def _take_answer(self, client: DataPlaneClient, told: _Told, call: Any) -> None:
        """Take note of what came of a message, on a thread of gRPC's."""
        try:
            answer: pb.ExpectResponse = call.result()
            told.unused, again, pause_s = answer.unused, answer.again, _AGAIN_S
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            again, pause_s = True, _FAILED_S
            # An older data plane knows nothing of it: nothing more is said until another one answers.
            told.unused = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED
            client.lost(error)
        if again and not told.unused:
            told.peer, told.not_before = None, self._clock() + pause_s  # the next message is of everything
        told.call = None
        if told.missed:
            self._changed.set()
