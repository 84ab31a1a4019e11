"""Delays the answers to an address that has sent a wrong password.

A server that delays only wrong answers can be asked in parallel, and shows a right password by its speed. So after a
failure all attempts of that address, right or wrong, are answered one after the other, with delays that grow with the
failures. An attempt that would wait too long is refused unchecked. Nothing sleeps: the connection pauses.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_FIRST_DELAY_S: Final = 0.05
_DELAY_MAX_S: Final = 0.25
_WAIT_MAX_S: Final = 5.0
_FORGET_AFTER_S: Final = 10.0
_ADDRESSES_MAX: Final = 4096


@dataclass(slots=True)
class _Queue:
    """Attempts of one network; ``free_s`` is when its last answer is sent, ``last_s`` the time of its last failure."""

    failures: int = 0
    free_s: float = 0.0
    last_s: float = 0.0


class AuthenticationThrottle:
    """The queues of all networks with recent failures. Needs the node's lock."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, _Queue] = OrderedDict()

    def is_refused(self, address: str, now_s: float) -> bool:
        """Return True if an attempt must be refused because too many are queued before it."""
        queue = self._queue(address, now_s)
        return queue is not None and queue.free_s - now_s > _WAIT_MAX_S

    def answer_at(self, address: str, now_s: float, *, accepted: bool) -> float:
        """Record an attempt; return when it may be answered, 0.0 for at once."""
        queue = self._queue(address, now_s)
        if queue is None:
            if accepted:
                return 0.0
            queue = self._queues[network_of(address)] = _Queue()
            while len(self._queues) > _ADDRESSES_MAX:
                self._queues.popitem(last=False)
        if not accepted:
            queue.failures += 1
            queue.last_s = now_s
        delay_s = min(_FIRST_DELAY_S * 2 ** min(queue.failures - 1, 16), _DELAY_MAX_S)
        queue.free_s = max(queue.free_s, now_s) + delay_s
        return queue.free_s

    def _queue(self, address: str, now_s: float) -> _Queue | None:
        network = network_of(address)
        queue = self._queues.get(network)
        if queue is not None and now_s - queue.last_s > _FORGET_AFTER_S and queue.free_s < now_s:
            del self._queues[network]
            return None
        return queue


def network_of(address: str) -> str:
    """Return the host of an address or, for IPv6, its /64 network: one client has all addresses of that."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return host if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False).network_address)
