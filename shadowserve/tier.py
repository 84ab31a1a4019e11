"""Tiers of records: names and numbers for data plane, host and metrics."""

from enum import IntEnum


class Tier(IntEnum):
    """Tier of a record, the nearest first; numbers as in proto/dataplane.proto."""

    NONE = 0
    MEMORY = 1
    """Memory of the data plane's machine."""
    DEVICE = 2
    STORAGE = 3
    """Memory or devices of a storage server."""
    COLD = 4
    """Object storage only."""

    @property
    def label(self) -> str:
        """Name in metrics and recordings."""
        return self.name.lower()
