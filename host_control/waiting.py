"""Sends the engine's queue of waiting requests to the data planes, which prefetch what these requests will load.

The engine's thread reports events in microseconds. A thread of this module sends each data plane what changed: which
requests wait, in which order, and when each will probably begin. Keys of a request are sent once. While a message is in
flight no other is queued behind it. All messages are hints.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import grpc

from host_control.client import DataPlaneClient
from host_control.connection import Peer
from host_control.lookup import RecordKeys
from shadowserve.proto import dataplane_pb2 as pb

_TURNS_MAX: Final = 64
"""Sessions whose next turn is expected."""
_TURN_AHEAD_S: Final = 10.0
"""For so long before its time a turn is sent: what is prefetched for it takes memory of requests that wait now."""
_TURN_LATE_S: Final = 30.0
"""For so long a turn is still expected after its time."""
_PAUSE_S: Final = 0.02
"""Between two messages: events meanwhile go into one."""
_POLL_S: Final = 0.05
"""Between two looks at lookups that have no answer yet."""
_CORRECTS_S: Final = 0.25
"""Between two looks at when requests will begin, without other events. Each costs the engine's core a millisecond if it
sends a message, and while requests wait it does."""
_LASTS_S: Final = 30.0
"""Validity of the last message: as long as an engine may be busy with one task, such as loading a model."""
_BEAT_S: Final = _LASTS_S / 3
_KEYS_MAX: Final = 8192
"""Keys in one message, as in a lookup; more go into the next one."""
_AGAIN_S: Final = 0.1
_FAILED_S: Final = 1.0
"""Until everything is sent again: to a data plane that lacks messages, and to one that did not answer."""
_REQUESTS_MAX: Final = 1024
"""Requests in one message, those that run first: later ones are not prefetched yet."""
_BEGINS_KEPT: Final = 16
_DRIFT_S: Final = 0.05
_DRIFT_SHARE: Final = 0.25
"""An expected begin that has changed by more than both is sent again."""
_NEXT: Final = 8
"""Number of next requests whose estimated starts are compared: later ones change with every begin, and matter later."""


class Begins:
    """Predicts when requests begin from the recent rate of begins, counted while other requests waited.

    That rate includes everything that a queue waits for: computing, blocks, other requests' last tokens.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_BEGINS_KEPT + 1)

    def begun(self, now: float, *, others: bool) -> None:
        """Record that a request has begun; ``others`` still wait."""
        self._times.append(now)
        if not others:
            self._times.clear()

    def expected(self, index: int, now: float) -> float:
        """Return the seconds until the request at a queue index begins; infinite if unknown."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return math.inf
        each = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        # An overdue begin may come at any moment, and those behind it are not sooner for that.
        return index * each + max(each - (now - self._times[-1]), each / 4)


@dataclass(eq=False)
class _Entry:
    """A request in the queue: its number in messages, its order, and the records that it will load, once known."""

    number: int
    rank: tuple[float, float]
    chains: RecordKeys | None = None


@dataclass(frozen=True)
class _Turn:
    """The next request of a session, which has not come yet: its entry, and when it will begin."""

    entry: _Entry
    at: float


@dataclass
class _PeerState:
    """State that one data plane was sent.

    Attributes:
        peer: The data plane's identity at the last message; None: everything has to be sent.
        chains: Records of each request that it knows.
        unused: It makes no use of messages.
        not_before: Time of the next message at the earliest.
        call: Message in flight.
        dirty: There is more to send once the message in flight has ended.
    """

    peer: Peer | None = None
    chains: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    begins_at: list[float] = field(default_factory=list)
    sent_at: float = -math.inf
    unused: bool = False
    not_before: float = -math.inf
    call: Any = None
    dirty: bool = False


class WaitingQueue:
    """The queue of one engine. Public methods are called on its thread, and take microseconds.

    Args:
        look: Returns the records that a request will load; None while unknown. Called on this object's own thread.
        by_priority: Requests run by priority, the lowest number first, and in order of arrival within a priority. One
            that is sent back keeps its rank then; otherwise it comes first.
    """

    def __init__(
        self,
        look: Callable[[str], RecordKeys | None],
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
        self._turns: dict[bytes, _Turn] = {}
        self._begins = Begins()
        self._peers = {client: _PeerState() for client in clients}
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shadowserve-queue", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ events

    def enqueue(self, request_id: str, priority: int = 0, session: bytes = b"") -> None:
        """Add a request, behind all others of its priority. It is the turn that was expected of its session."""
        number = next(self._numbers)
        with self._lock:
            self._turns.pop(session, None)
            self._entries[request_id] = _Entry(number, (float(priority) if self._by_priority else 0.0, float(number)))
        self._changed.set()

    def begun(self, request_id: str) -> None:
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                return
            self._begun[request_id] = entry
            self._begins.begun(self._clock(), others=bool(self._entries))
        self._changed.set()

    def sent_back(self, request_id: str) -> None:
        """Add a request again that had begun; its records are looked for again."""
        with self._lock:
            entry = self._begun.pop(request_id, None)
            if entry is None:
                return
            number = next(self._numbers)
            rank = entry.rank if self._by_priority else (0.0, -float(number))
            self._entries[request_id] = _Entry(number, rank)
        self._changed.set()

    def wants(self, request_id: str, chains: RecordKeys) -> None:
        """Set the records that a waiting request will load, in place of its lookup's."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            entry.chains = chains
        self._changed.set()

    def expect_turn(self, session: bytes, chains: RecordKeys, after_s: float) -> None:
        """Expect a session's next request after some seconds; of too many sessions, the latest turn is not expected."""
        turn = _Turn(_Entry(next(self._numbers), (math.inf, 0.0), chains), self._clock() + after_s)
        with self._lock:
            self._turns[session] = turn
            if len(self._turns) > _TURNS_MAX:
                del self._turns[max(self._turns, key=lambda each: self._turns[each].at)]
        self._changed.set()

    @property
    def unused(self) -> bool:
        """No data plane makes use of messages, as far as is known."""
        return all(state.unused for state in self._peers.values())

    def ended(self, request_id: str) -> None:
        """Forget a request that has ended, begun or not."""
        with self._lock:
            self._begun.pop(request_id, None)
            if self._entries.pop(request_id, None) is None:
                return
        self._changed.set()

    def close(self) -> None:
        """Send no more messages; those that were sent expire."""
        self._closed = True
        self._changed.set()

    # ------------------------------------------------------------------ messages

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                unknown = any(entry.chains is None for entry in self._entries.values())
                waits = bool(self._entries or self._turns)
            known = any(each.chains or each.call is not None for each in self._peers.values())
            self._changed.wait(_POLL_S if unknown else _CORRECTS_S if waits or known else None)
            self._changed.clear()
            if self._closed:
                return
            self._send()
            time.sleep(_PAUSE_S)

    def _send(self) -> None:
        for state in self._peers.values():
            # First set, then compared: an answer that comes now either sees the flag, or has cleared the call.
            state.dirty = True
            state.dirty = state.call is not None
        if not any(self._send_due(client, state) for client, state in self._peers.items()):
            return
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: item[1].rank)[:_REQUESTS_MAX]
        for request_id, entry in entries:
            if entry.chains is None:
                chains = self._look(request_id)
                with self._lock:
                    entry.chains = entry.chains if entry.chains is not None else chains
        now = self._clock()
        with self._lock:
            expected = [now + self._begins.expected(index, now) for index in range(len(entries))]
            self._turns = {name: turn for name, turn in self._turns.items() if now < turn.at + _TURN_LATE_S}
            turns = [turn for turn in self._turns.values() if turn.at - now <= _TURN_AHEAD_S]
        turns.sort(key=lambda turn: turn.at)
        waiting = [entry for _, entry in entries] + [turn.entry for turn in turns]
        expected += [turn.at for turn in turns]
        for client, state in self._peers.items():
            self._send_to(client, state, waiting[:_REQUESTS_MAX], expected[:_REQUESTS_MAX], now)

    def _send_due(self, client: DataPlaneClient, state: _PeerState) -> bool:
        peer = client.peer
        if peer is None or state.call is not None or self._clock() < state.not_before:
            return False
        return not (state.unused and state.peer is peer)

    def _send_to(
        self,
        client: DataPlaneClient,
        state: _PeerState,
        entries: Sequence[_Entry],
        expected: Sequence[float],
        now: float,
    ) -> None:
        peer = client.peer
        if peer is None or not self._send_due(client, state):
            return
        whole = state.peer is not peer
        if whole:
            state.chains, state.order, state.begins_at, state.unused = {}, [], [], False
        message = pb.ExpectRequest(queue=self._name, whole=whole, lasts_ms=int(1000 * _LASTS_S))
        known, state.dirty = self._add_changes(client, state, entries, message)
        order, begins_at = [], []
        for entry, at in zip(entries, expected, strict=True):
            if entry.number in known:
                order.append(entry.number)
                begins_at.append(at)
        if order != state.order or self._drifted(state.begins_at, begins_at, now):
            message.order.extend(order)
            if any(at < math.inf for at in begins_at):
                message.begins_in_ms.extend(int(min(1000 * max(at - now, 0.0), 0xFFFFFFFF)) for at in begins_at)
        nothing = not (message.arrivals or message.gone or message.order)
        if nothing and (not known or now - state.sent_at < _BEAT_S) and not (whole and known):
            return
        message.number = next(self._messages)
        call = client.expect(message)
        if call is None:
            return
        state.peer, state.chains, state.order, state.begins_at, state.sent_at = peer, known, order, begins_at, now
        state.call = call
        call.add_done_callback(lambda ended: self._take_answer(client, state, ended))

    @staticmethod
    def _add_changes(
        client: DataPlaneClient, state: _PeerState, entries: Sequence[_Entry], message: pb.ExpectRequest
    ) -> tuple[dict[int, Any], bool]:
        """Add new and removed requests to a message.

        Return the requests that the data plane knows then, and True if others did not fit.
        """
        wanted = {entry.number: entry.chains.get(client) for entry in entries if entry.chains is not None}
        known, left = {}, _KEYS_MAX
        for number, chains in wanted.items():
            if not chains:
                continue
            if state.chains.get(number) is not chains:
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
        message.gone.extend(number for number in state.chains if number not in known)
        return known, left < 0

    @staticmethod
    def _drifted(sent: Sequence[float], expected: Sequence[float], now: float) -> bool:
        if len(sent) != len(expected):
            return True
        return any(
            new != old and not abs(new - old) <= max(_DRIFT_S, _DRIFT_SHARE * (new - now))
            for old, new in zip(sent[:_NEXT], expected[:_NEXT], strict=True)
        )

    def _take_answer(self, client: DataPlaneClient, state: _PeerState, call: Any) -> None:
        try:
            answer: pb.ExpectResponse = call.result()
            state.unused, again, pause_s = answer.unused, answer.again, _AGAIN_S
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            again, pause_s = True, _FAILED_S
            # A data plane without this call gets no more messages until another one answers.
            state.unused = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED
            client.lost(error)
        if again and not state.unused:
            state.peer, state.not_before = None, self._clock() + pause_s  # the next message has everything
        state.call = None
        if state.dirty:
            self._changed.set()
