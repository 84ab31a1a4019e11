"""Where a record is, as lookups say: the names and numbers that data plane, host and metrics share."""

from enum import IntEnum

__all__ = ["Tier"]


class Tier(IntEnum):
    """Where a record is, the nearest first; numbers as in proto/dataplane.proto."""

    NONE = 0
    MEMORY = 1
    """Of the data plane's machine, as DEVICE."""
    DEVICE = 2
    STORAGE = 3
    """On a storage server, in its memory or on its devices."""
    COLD = 4
    """In object storage behind a storage server, and nowhere nearer."""

    @property
    def label(self) -> str:
        """The name in metrics and recordings."""
        return self.name.lower()
