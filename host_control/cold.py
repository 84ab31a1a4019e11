"""What loads wait for that is in object storage alone: it is brought nearer, while the engine goes on with others.

A load begins with the chunks that are near, as one does of which others still store the rest. One thread asks for all
loads that wait, again and again: each question has storage begin to bring what is missing, some at a time, and tells
how far it is. Nothing is brought for a request before its load begins, so that none is read for one that is computed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from host_control.disaggregation import Available
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, leading

__all__ = ["ColdLoads"]

_INTERVAL_S: Final = 0.02
_INTERVAL_MAX_S: Final = 0.1
_SHARE: Final = 0.1
"""Between two questions for a load: a tenth of what it has waited, within these bounds."""

Ask = Callable[[int, int], tuple[Flags, Flags]]
"""From the first chunk and the one behind the last to which of them are near, and which of the others are on their way;
has those brought that are cold."""


@dataclass(eq=False)
class _Waiting:
    ask: Ask
    chunks: int
    since: float
    until: float
    told: Callable[[Available], None]
    near: int = 0
    next: float = 0.0


class ColdLoads:
    """Loads that wait for object storage; in the background."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, name: str, ask: Ask, chunks: int, seconds: float, told: Callable[[Available], None]) -> None:
        """Have so many leading chunks brought within ``seconds``.

        ``told`` hears in another thread, again and again, how many of them are near, and at last why there are no more:
        ``"complete"``; ``"cold_late"``, in time; ``"cold_gone"``, where storage has one no more, or cannot read it; or
        why nobody could say.
        """
        now = time.monotonic()
        with self._condition:
            self._waiting[name] = _Waiting(ask, chunks, now, now + seconds, told)
            if self._thread is None:  # of most engines never
                self._thread = threading.Thread(target=self._run, name="shadowserve-cold", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def end(self, name: str) -> None:
        """Bring nothing more for a load, and tell nothing more of it."""
        if name in self._waiting:
            with self._condition:
                self._waiting.pop(name, None)

    def close(self) -> None:
        """End the thread; who waits is told nothing."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._closing or (self._waiting and self._left() <= 0)):
                    self._condition.wait(self._left() if self._waiting else None)
                if self._closing:
                    return
                now = time.monotonic()
                due = [(name, each) for name, each in self._waiting.items() if each.next <= now]
            for name, waiting in due:
                available = self._look(waiting)
                now = time.monotonic()
                waiting.next = now + min(max(_INTERVAL_S, _SHARE * (now - waiting.since)), _INTERVAL_MAX_S)
                with self._condition:
                    if self._waiting.get(name) is not waiting:
                        continue  # it has ended meanwhile, or begun anew
                    if available.ended:
                        del self._waiting[name]
                waiting.told(available)

    def _left(self) -> float:
        """Return the seconds until the next question is due."""
        return max(0.0, min(each.next for each in self._waiting.values()) - time.monotonic())

    def _look(self, waiting: _Waiting) -> Available:
        """Ask how far a load is."""
        late = time.monotonic() >= waiting.until
        try:
            near, coming = waiting.ask(waiting.near, waiting.chunks)
        except DataPlaneError as error:
            return Available(waiting.near, "" if error.outcome == "deadline" and not late else error.outcome)
        except Exception:  # a bug must not leave the load waiting for its deadline
            return Available(waiting.near, "internal")
        count = leading(near)
        waiting.near += count
        if waiting.near == waiting.chunks:
            return Available(waiting.near, "complete")
        if not coming[count]:
            return Available(waiting.near, "cold_gone")
        return Available(waiting.near, "cold_late" if late else "")
