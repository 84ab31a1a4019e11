"""Rate limit of log lines that callers cause: the first one of a kind and caller, then once a minute their number."""

import logging
import time
from typing import Final

from shadowserve.incidents import INTERVAL_S, Incidents

_TEXT_MAX: Final = 600

logger = logging.getLogger(__name__)


def address_of(peer: str) -> str:
    """Return the address in a gRPC peer name, without the port, which differs for each connection."""
    return peer if peer.startswith("unix") or peer.count(":") < 2 else peer.rpartition(":")[0]


class LogLimiter:
    """Log lines of the last minute, by kind and caller. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._incidents = Incidents(lines_max=1)
        self._levels: dict[str, int] = {}

    def log(self, level: int, kind: str, caller: str, text: str) -> bool:
        """Log a line, or count it with those of its kind and caller; return whether it was logged."""
        now, text = time.monotonic(), text[:_TEXT_MAX]
        self.flush(now)
        self._levels[kind] = level
        logged = self._incidents.note(kind, caller, text, now)
        if logged:
            logger.log(level, "%s", text)
        return logged

    def flush(self, now: float) -> None:
        """Log the numbers of lines whose minute is over."""
        for each in self._incidents.due(now):
            logger.log(self._levels[each.event], "%d times more in %g s, last: %s", each.times, INTERVAL_S, each.reason)
