"""What clients may do as often as they like, in a log: the first of an address at once, then once a minute a count.

A client with a certificate that is not accepted comes again and again, a web page asks as often as it likes, whoever
scans ports does so from many addresses, and whoever is denied something may ask for it a million times, to push out
what else the audit log knows: a line for each would fill the log. The counters have all of them.
"""

from typing import Final, NamedTuple

__all__ = ["CALLERS_MAX", "INTERVAL_S", "LINES_MAX", "OTHERS", "Incidents", "Repeated"]

INTERVAL_S: Final = 60.0
CALLERS_MAX: Final = 256
"""Told apart at a time, for each event: the machines of a fleet. What further ones do is counted together."""
LINES_MAX: Final = 4
"""Of one caller, told at once: a client has two or three reasons until its certificate is right."""
OTHERS: Final = "others"
"""What stands for the callers beyond CALLERS_MAX."""


class Repeated(NamedTuple):
    """What happened to one caller without a line of its own; ``reason`` is the last one's."""

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
    """What happened lately, to whom, and how often since it was told; used by one thread at a time.

    Args:
        lines_max: lines of one event and one caller in a minute, before its rest is counted.
        alike: whether what is told already is told again.
    """

    def __init__(self, lines_max: int = LINES_MAX, *, alike: bool = False) -> None:
        self._lines_max = lines_max
        self._alike = alike
        self._events: dict[str, dict[str, _Caller]] = {}  # by event and caller, in the order in which they are due

    def note(self, event: str, caller: str, reason: str, now_s: float) -> bool:
        """Take note of an event; return whether the log is to have a line for it."""
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
        """Return what is still to be told of those whose minute is over; forget those of whom there is nothing."""
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
