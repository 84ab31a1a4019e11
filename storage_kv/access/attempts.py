"""Wrong passwords make the next answers to their address late, one after the other.

Some facts. A server that answers at once can be asked for thousands of passwords a second; one that only delays wrong
answers can be asked in parallel, and a right one known by its speed.

Consequence: after a failure, every attempt of that address, right or wrong, has a place in a line whose steps grow with
the failures. An attempt that would have to wait for too long is refused before its password is looked at. Nobody
sleeps: the answer is held back and the connection not read (Connection._pause).
"""

import ipaddress
from collections import OrderedDict
from typing import Final

_FIRST_STEP_S: Final = 0.05
_STEP_MAX_S: Final = 0.25
_WAIT_MAX_S: Final = 5.0
_FORGOTTEN_AFTER_S: Final = 10.0
_ADDRESSES_MAX: Final = 4096


class _Line:
    __slots__ = ("failures", "free_s", "last_s")

    def __init__(self) -> None:
        self.failures = 0
        self.free_s = 0.0
        self.last_s = 0.0


class Attempts:
    """The lines of all addresses that have failed lately; used with the node's lock held."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    def refused(self, address: str, now_s: float) -> bool:
        """Return whether an attempt is to be refused unseen: too many wait before it."""
        line = self._line(address, now_s)
        return line is not None and line.free_s - now_s > _WAIT_MAX_S

    def wait_until(self, address: str, now_s: float, *, accepted: bool) -> float:
        """Take note of an attempt; return when it may be answered, 0.0 for at once."""
        line = self._line(address, now_s)
        if line is None:
            if accepted:
                return 0.0
            line = self._lines[caller_of(address)] = _Line()
            while len(self._lines) > _ADDRESSES_MAX:
                self._lines.popitem(last=False)
        if not accepted:
            line.failures += 1
            line.last_s = now_s
        step_s = min(_FIRST_STEP_S * 2 ** min(line.failures - 1, 16), _STEP_MAX_S)
        line.free_s = max(line.free_s, now_s) + step_s
        return line.free_s

    def _line(self, address: str, now_s: float) -> _Line | None:
        host = caller_of(address)
        line = self._lines.get(host)
        if line is not None and now_s - line.last_s > _FORGOTTEN_AFTER_S and line.free_s < now_s:
            del self._lines[host]
            return None
        return line


def caller_of(address: str) -> str:
    """Return whom an address stands for: of IPv6 the network, since a client of one has all of its addresses."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return host if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False).network_address)
