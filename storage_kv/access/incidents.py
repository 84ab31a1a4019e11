"""What clients may do as often as they like, in a log: the first of an address at once, then once a minute a count.

A client with a certificate that is not accepted comes again and again, a web page asks as often as it likes, whoever
scans ports does so from many addresses, and whoever is denied something may ask for it a million times, to push out
what else the audit log knows: a line for each would fill the log. The counters have all of them.
"""

from typing import Final, NamedTuple

from storage_kv.access.attempts import host_of

__all__ = ["ADDRESSES_MAX", "INTERVAL_S", "LINES_MAX", "OTHERS", "Incidents", "Repeated"]

INTERVAL_S: Final = 60.0
ADDRESSES_MAX: Final = 256
"""Told apart at a time, for each event: the data planes of a fleet. What further ones do is counted together."""
LINES_MAX: Final = 4
"""Of one address, told at once: a client has two or three reasons until its certificate is right."""
OTHERS: Final = "others"
"""What stands for the addresses beyond ADDRESSES_MAX."""


class Repeated(NamedTuple):
    """What happened to one address without a line of its own; ``reason`` is the last one's."""

    event: str
    address: str
    times: int
    reason: str


class _Peer:
    __slots__ = ("due_s", "last_reason", "lines", "reasons", "times")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.lines = 0
        self.reasons: set[str] = set()
        self.times = 0
        self.last_reason = ""


class Incidents:
    """What happened lately, to whom, and how often since it was told; used with the node's lock held."""

    def __init__(self, lines_max: int = LINES_MAX, *, alike: bool = False) -> None:
        """Remember nothing.

        Args:
            lines_max: lines of one event and one address in a minute, before its rest is counted.
            alike: whether what is told already is told again.
        """
        self._lines_max = lines_max
        self._alike = alike
        self._events: dict[str, dict[str, _Peer]] = {}  # by event and address, in the order in which they are due

    def note(self, event: str, address: str, reason: str, now_s: float) -> bool:
        """Take note of an event; return whether the log is to have a line for it."""
        peers = self._events.setdefault(event, {})
        host = host_of(address)
        if host not in peers and len(peers) - (OTHERS in peers) >= ADDRESSES_MAX:
            host = OTHERS
        peer = peers.get(host)
        if peer is None:
            peer = peers[host] = _Peer(now_s + INTERVAL_S)
        if host != OTHERS and peer.lines < self._lines_max and reason not in peer.reasons:
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
                host, peer = next(iter(peers.items()))
                if peer.due_s > now_s:
                    break
                del peers[host]
                if peer.times:
                    repeated.append(Repeated(event, host, peer.times, peer.last_reason))
                    peer.due_s, peer.times = now_s + INTERVAL_S, 0
                    peers[host] = peer
            if not peers:
                del self._events[event]
        return repeated
