"""Log lines that callers bring about: the first of a kind and caller at once, then once a minute how many more.

Whoever can call could have as many lines as calls otherwise, and fill the disk that the log is on.
"""

import logging
import time
from typing import Final

from shadowserve.incidents import INTERVAL_S, Incidents

__all__ = ["Repeats", "address_of"]

_TEXT_MAX: Final = 600

logger = logging.getLogger(__name__)


def address_of(peer: str) -> str:
    """Return what a peer of gRPC is told apart by: its address, since its port is another one each time."""
    return peer if peer.startswith("unix") or peer.count(":") < 2 else peer.rpartition(":")[0]


class Repeats:
    """Who brought what about lately, and how often since it was told. Used on the event loop's thread alone."""

    def __init__(self) -> None:
        self._incidents = Incidents(lines_max=1)
        self._levels: dict[str, int] = {}

    def tell(self, level: int, kind: str, caller: str, text: str) -> bool:
        """Log a line, or count it.

        Args:
            level: of the line, one for each kind.
            kind: what lines are counted together; there are few.
            caller: likewise.
            text: of the line, cut where it is long.

        Returns:
            Whether it was logged.
        """
        now, text = time.monotonic(), text[:_TEXT_MAX]
        self.flush(now)
        self._levels[kind] = level
        told = self._incidents.note(kind, caller, text, now)
        if told:
            logger.log(level, "%s", text)
        return told

    def flush(self, now: float) -> None:
        """Tell of those whose minute is over how often it was; forget those of whom there is nothing."""
        for each in self._incidents.due(now):
            logger.log(self._levels[each.event], "%d times more in %g s, last: %s", each.times, INTERVAL_S, each.reason)
