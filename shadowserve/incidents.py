"""Log rate limit for events that clients can cause: the first ones at once, then one line per minute with a count.

A client can repeat a refused request millions of times, from many addresses. One line for each would fill the log and
push out other audit lines. Counters count every event.
"""

from typing import Final, NamedTuple

INTERVAL_S: Final = 60.0
CALLERS_MAX: Final = 256
"""Callers with their own lines, per event. Further callers share one count."""
LINES_MAX: Final = 4
"""Immediate lines per caller and minute: a client may have several reasons until its certificate is right."""
OTHERS: Final = "others"
"""Name of the callers beyond CALLERS_MAX."""


class Repeated(NamedTuple):
    """Events of one caller that were counted instead of logged; ``reason`` is the last one's."""

    event: str
    caller: str
    times: int
    reason: str


class _Caller:
    __slots__ = ("due_s", "last_reason", "lines", "reasons", "times")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.lines = 0
        self.reasons: set[str] = set()
        self.times = 0
        self.last_reason = ""


class Incidents:
    """Recent events by caller. Not thread-safe. ``alike``: log a reason again that was logged already."""

    def __init__(self, lines_max: int = LINES_MAX, *, alike: bool = False) -> None:
        self._lines_max = lines_max
        self._alike = alike
        self._events: dict[str, dict[str, _Caller]] = {}  # by event and caller, in the order in which they are due

    def note(self, event: str, caller: str, reason: str, now_s: float) -> bool:
        """Count an event; return True if the caller should log it now."""
        peers = self._events.setdefault(event, {})
        if caller not in peers and len(peers) - (OTHERS in peers) >= CALLERS_MAX:
            caller = OTHERS
        peer = peers.get(caller)
        if peer is None:
            peer = peers[caller] = _Caller(now_s + INTERVAL_S)
        if caller != OTHERS and peer.lines < self._lines_max and reason not in peer.reasons:
            peer.lines += 1
            if not self._alike:
                peer.reasons.add(reason)
            return True
        peer.times += 1
        peer.last_reason = reason
        return False

    def due(self, now_s: float) -> list[Repeated]:
        """Return the counts of callers whose minute is over; drop callers without new events."""
        repeated = []
        for event, peers in list(self._events.items()):
            while peers:
                caller, peer = next(iter(peers.items()))
                if peer.due_s > now_s:
                    break
                del peers[caller]
                if peer.times:
                    repeated.append(Repeated(event, caller, peer.times, peer.last_reason))
                    peer.due_s, peer.times = now_s + INTERVAL_S, 0
                    peers[caller] = peer
            if not peers:
                del self._events[event]
        return repeated
