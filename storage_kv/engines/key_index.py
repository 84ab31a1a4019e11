"""Keys in the order of their creation, so that SCAN can go on where it stopped however the keys have changed since."""

from shadowserve.pool.ordered import Ordered

__all__ = ["KeyIndex"]


class KeyIndex:
    """Gives each key a serial number, ever increasing; a scan's cursor is the serial number to go on from.

    A key that exists from the first call of a scan to the last is returned exactly once, as SCAN promises (Redis
    promises "at least once"). There is one for each tenant: a cursor tells nothing of what others do.
    """

    __slots__ = ("_keys", "_next_serial")

    def __init__(self, first_serial: int = 1) -> None:
        """Make an empty index."""
        self._keys: Ordered[bytes] = Ordered()
        self._next_serial = first_serial

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> int:
        """Add a key that is not in the index; return its serial number."""
        serial = self._next_serial
        self._next_serial += 1
        self._keys.add(serial, key)
        return serial

    def remove(self, serial: int) -> None:
        """Remove the key of ``serial``."""
        self._keys.remove(serial)

    def successor(self) -> "KeyIndex":
        """Return an empty index to take its place: serial numbers go on, so that no old cursor hides a new key."""
        return KeyIndex(self._next_serial)

    def page(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor (0: the scan is complete) and at most ``count`` keys from ``cursor`` on."""
        following, keys = self._keys.page(cursor, count)
        return following or 0, keys
