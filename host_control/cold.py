"""Loads that wait for cold chunks: object storage brings them nearer while the engine continues with other requests.

One thread asks for all loads that wait, again and again: each question makes storage bring some of the missing chunks,
and tells how far it is. Nothing is brought before a request's load starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from host_control.disaggregation import Available, Background
from host_control.transfer import Reason
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, leading

_INTERVAL_S: Final = 0.02
_INTERVAL_MAX_S: Final = 0.1
_SHARE: Final = 0.1
"""Between two questions for a load: a tenth of the time that it has waited, within these bounds."""

Ask = Callable[[int, int], tuple[Flags, Flags]]
"""From the first chunk and the one behind the last to the chunks that are near, and those of the others that are being
brought or stored. Starts to bring the cold ones."""


@dataclass(eq=False)
class _ColdLoad:
    """A load that waits, since and until a time, for its leading ``chunks``; ``near`` of them are near."""

    ask: Ask
    chunks: int
    since: float
    until: float
    then: Callable[[Available], None]
    near: int = 0
    next_at: float = 0.0


class ColdLoads(Background):
    """Brings the cold chunks of loads nearer, in the background."""

    def __init__(self) -> None:
        super().__init__("shadowserve-cold")
        self._loads: dict[str, _ColdLoad] = {}

    def begin(self, name: str, ask: Ask, chunks: int, seconds: float, then: Callable[[Available], None]) -> None:
        """Start to bring the leading ``chunks`` chunks of a load, within some seconds.

        ``then`` is called in another thread, again and again, with the number of chunks that are near, and at last with
        the reason why there will be no more: ``complete``; ``cold_late``, out of time; ``cold_gone``, where storage
        cannot read a chunk or does not have it any more; or the reason of a failed question.
        """
        now = time.monotonic()
        with self._condition:
            self._loads[name] = _ColdLoad(ask, chunks, now, now + seconds, then)
            self._wake()

    def end(self, name: str) -> None:
        if name in self._loads:
            with self._condition:
                self._loads.pop(name, None)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._closing or (self._loads and self._left() <= 0)):
                    self._condition.wait(self._left() if self._loads else None)
                if self._closing:
                    return
                now = time.monotonic()
                due = [(name, each) for name, each in self._loads.items() if each.next_at <= now]
            for name, load in due:
                available = self._poll(load)
                now = time.monotonic()
                load.next_at = now + min(max(_INTERVAL_S, _SHARE * (now - load.since)), _INTERVAL_MAX_S)
                with self._condition:
                    if self._loads.get(name) is not load:
                        continue  # it has ended meanwhile, or started over
                    if available.ended:
                        del self._loads[name]
                load.then(available)

    def _left(self) -> float:
        return max(0.0, min(each.next_at for each in self._loads.values()) - time.monotonic())

    def _poll(self, load: _ColdLoad) -> Available:
        late = time.monotonic() >= load.until
        try:
            near, moving = load.ask(load.near, load.chunks)
        except DataPlaneError as error:
            return Available(load.near, "" if error.outcome == Reason.DEADLINE and not late else error.outcome)
        except Exception:  # a bug must not leave the load waiting for its deadline
            return Available(load.near, Reason.INTERNAL)
        count = leading(near)
        load.near += count
        if load.near == load.chunks:
            return Available(load.near, Reason.COMPLETE)
        if not moving[count]:
            return Available(load.near, Reason.COLD_GONE)
        return Available(load.near, Reason.COLD_LATE if late else "")
