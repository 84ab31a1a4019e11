"""How much is written to an SSD in a day, against what its maker says it takes.

An SSD is sold for so many full writes of itself a day over its warranty. A budget of bytes for each day (UTC) keeps a
cache from using it up early: beyond it the device takes no more objects, and placement goes round it until midnight.
Everything that is written counts, log and snapshots too. The count survives a restart: it is kept with the volume.
"""

import struct
from dataclasses import dataclass
from typing import Final

_STATE: Final = struct.Struct("<QQQ")
_DAY_MS: Final = 24 * 3600 * 1000


@dataclass(slots=True)
class Wear:
    """What was written to one device.

    Attributes:
        budget_bytes: most that is written in one day; None for no limit.
        day: days since 1970 that ``day_bytes`` is of.
        day_bytes: written on that day.
        total_bytes: written since the volume was made.
        refused: objects that went elsewhere, or nowhere, because of the budget.
    """

    budget_bytes: int | None = None
    day: int = 0
    day_bytes: int = 0
    total_bytes: int = 0
    refused: int = 0

    def note(self, length: int, now_ms: int) -> None:
        """Count ``length`` bytes that are being written."""
        self._turn(now_ms)
        self.day_bytes += length
        self.total_bytes += length

    def allows(self, length: int, now_ms: int) -> bool:
        """Return whether ``length`` bytes more are within today's budget."""
        if self.budget_bytes is None:
            return True
        self._turn(now_ms)
        return self.day_bytes + length <= self.budget_bytes

    def pack(self) -> bytes:
        """Return what a restart needs to know."""
        return _STATE.pack(self.day, self.day_bytes, self.total_bytes)

    def unpack(self, state: bytes) -> None:
        """Go on from what pack() returned; from anything else as if new."""
        if len(state) == _STATE.size:
            self.day, self.day_bytes, self.total_bytes = _STATE.unpack(state)

    def _turn(self, now_ms: int) -> None:
        """Begin a new day if it is one. A clock that was set back does not give a second budget for a day."""
        day = now_ms // _DAY_MS
        if day > self.day:
            self.day, self.day_bytes = day, 0
