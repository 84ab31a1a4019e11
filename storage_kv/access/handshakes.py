"""Failed handshakes in the server's log: the first of an address at once, then once a minute how many more there were.

A client with a certificate that is not accepted comes again and again, and whoever scans ports does so from many
addresses: a line for each would fill the log. The counter and the audit log have every one of them.
"""

from typing import Final, NamedTuple

from storage_kv.access.attempts import host_of

__all__ = ["ADDRESSES_MAX", "INTERVAL_S", "OTHERS", "REASONS_MAX", "FailedHandshakes", "Repeated"]

INTERVAL_S: Final = 60.0
ADDRESSES_MAX: Final = 256
"""Told apart at a time: the data planes of a fleet. What comes from further ones is counted together."""
REASONS_MAX: Final = 4
"""Of one address, told at once: a client has two or three until its certificate is right."""
OTHERS: Final = "others"
"""What stands for the addresses beyond ADDRESSES_MAX."""


class Repeated(NamedTuple):
    """Handshakes of one address that failed without a line of their own; ``reason`` is the last one's."""

    address: str
    times: int
    reason: str


class _Peer:
    __slots__ = ("due_s", "last_reason", "reasons", "times")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.reasons: set[str] = set()
        self.times = 0
        self.last_reason = ""


class FailedHandshakes:
    """Who failed lately, and how often since it was told; used with the node's lock held."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._peers: dict[str, _Peer] = {}  # in the order in which they are due

    def note(self, address: str, reason: str, now_s: float) -> bool:
        """Take note of a failure; return whether the log is to have a line for it."""
        host = host_of(address)
        if host not in self._peers and len(self._peers) - (OTHERS in self._peers) >= ADDRESSES_MAX:
            host = OTHERS
        peer = self._peers.get(host)
        if peer is None:
            peer = self._peers[host] = _Peer(now_s + INTERVAL_S)
        if host != OTHERS and reason not in peer.reasons and len(peer.reasons) < REASONS_MAX:
            peer.reasons.add(reason)
            return True
        peer.times += 1
        peer.last_reason = reason
        return False

    def due(self, now_s: float) -> list[Repeated]:
        """Return what is still to be told of those whose minute is over; forget those of whom there is nothing."""
        repeated = []
        while self._peers:
            host, peer = next(iter(self._peers.items()))
            if peer.due_s > now_s:
                break
            del self._peers[host]
            if peer.times:
                repeated.append(Repeated(host, peer.times, peer.last_reason))
                peer.due_s, peer.times = now_s + INTERVAL_S, 0
                self._peers[host] = peer
        return repeated
