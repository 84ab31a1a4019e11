"""Log lines that callers bring about: the first of a kind and caller at once, then once a minute how many more.

Whoever can call could have as many lines as calls otherwise, and fill the disk that the log is on.
"""

import logging
import time
from typing import Final, NamedTuple

__all__ = ["INTERVAL_S", "Repeats", "address_of"]

INTERVAL_S: Final = 60.0
CALLERS_MAX: Final = 256
"""Told apart at a time, of all kinds together. What comes from further ones is counted together."""
_OTHERS: Final = "others"
_TEXT_MAX: Final = 600

logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    kind: str
    caller: str


class _Untold:
    __slots__ = ("due_s", "last", "level", "times")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.times = 0
        self.level = logging.NOTSET
        self.last = ""


def address_of(peer: str) -> str:
    """Return what a peer of gRPC is told apart by: its address, since its port is another one each time."""
    return peer if peer.startswith("unix") or peer.count(":") < 2 else peer.rpartition(":")[0]


class Repeats:
    """Who brought what about lately, and how often since it was told. Used on the event loop's thread alone."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._untold: dict[_Kind, _Untold] = {}  # in the order in which they are due

    def tell(self, level: int, kind: str, caller: str, text: str) -> bool:
        """Log a line, or count it.

        Args:
            level: of the line.
            kind: what lines are counted together.
            caller: likewise.
            text: of the line, cut where it is long.

        Returns:
            Whether it was logged.
        """
        now = time.monotonic()
        self.flush(now)
        key = _Kind(kind, caller)
        if key not in self._untold and len(self._untold) >= CALLERS_MAX:
            key = _Kind(kind, _OTHERS)
        untold = self._untold.get(key)
        if untold is None:
            self._untold[key] = _Untold(now + INTERVAL_S)
            logger.log(level, "%s", text[:_TEXT_MAX])
            return True
        untold.times += 1
        untold.level, untold.last = level, text[:_TEXT_MAX]
        return False

    def flush(self, now: float) -> None:
        """Tell of those whose minute is over how often it was; forget those of whom there is nothing."""
        while self._untold:
            key, untold = next(iter(self._untold.items()))
            if untold.due_s > now:
                return
            del self._untold[key]
            if untold.times:
                logger.log(untold.level, "%d times more in %g s, last: %s", untold.times, INTERVAL_S, untold.last)
                untold.due_s, untold.times = now + INTERVAL_S, 0
                self._untold[key] = untold
