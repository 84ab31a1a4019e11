"""Keys in the order of their creation, so that SCAN can go on where it stopped however the keys have changed since."""

from bisect import bisect_left

__all__ = ["KeyIndex"]


class KeyIndex:
    """Gives each key a serial number, ever increasing; a scan's cursor is the serial number to go on from.

    A key that exists from the first call of a scan to the last is returned exactly once, as SCAN promises (Redis
    promises "at least once"). Removed keys leave holes, which are closed when they outnumber the keys.
    """

    def __init__(self) -> None:
        """Make an empty index."""
        self._serials: list[int] = []
        self._keys: list[bytes | None] = []
        self._next_serial = 1
        self._holes = 0

    def __len__(self) -> int:
        return len(self._keys) - self._holes

    def add(self, key: bytes) -> int:
        """Add a key that is not in the index; return its serial number."""
        serial = self._next_serial
        self._next_serial += 1
        self._serials.append(serial)
        self._keys.append(key)
        return serial

    def remove(self, serial: int) -> None:
        """Remove the key of ``serial``."""
        self._keys[bisect_left(self._serials, serial)] = None
        self._holes += 1
        if self._holes > 64 and self._holes > len(self):
            self._close_holes()

    def clear(self) -> None:
        """Remove all keys. Serial numbers go on, so that no old cursor points at a new key's past."""
        self._serials.clear()
        self._keys.clear()
        self._holes = 0

    def page(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor (0: the scan is complete) and at most ``count`` keys from ``cursor`` on."""
        position = bisect_left(self._serials, cursor)
        end = min(position + count, len(self._serials))
        keys = [key for key in self._keys[position:end] if key is not None]
        return (self._serials[end] if end < len(self._serials) else 0), keys

    def _close_holes(self) -> None:
        pairs = [(serial, key) for serial, key in zip(self._serials, self._keys, strict=True) if key is not None]
        self._serials = [serial for serial, _ in pairs]
        self._keys = [key for _, key in pairs]
        self._holes = 0
