"""One rate for everything that a data plane moves beside engines that decode, and who moves next within it.

Each engine reports whether it decodes, and at which rate its steps stay within its interference budget. While engines
decode, the lowest of their rates holds for all movers of the data plane together; while none does, there is no bound.
A mover asks for a turn of so many bytes. A turn begins when the bytes of the turn before it have had their time at the
rate, so one turn runs at a time, and a turn that spreads its bytes over its time never exceeds the rate.

Turns go by precedence, and in the order in which they were asked for within one. An eighth of the bytes goes to the
longest wait of those that precedence leaves behind, so that nothing waits for ever.

A report has an end: an engine that died holds nothing back after that. No I/O; the clock is handed over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ENGINES_MAX", "RATE_MIN", "Mover", "SharedRate", "Turn"]

RATE_MIN: Final = 16 << 20
"""Bytes a second that an engine may ask for at least: less, and one chunk takes seconds."""
ENGINES_MAX: Final = 64
"""Engines of one host whose reports are kept, those that have died included, until their reports end."""
_LEFT_BEHIND: Final = 8
"""One byte in so many goes to movers that others precede."""
_PAUSE_MAX_S: Final = 2.0
_PAUSE_EVERY: Final = 10
"""A pause lasts so long at most, and the time to the next one is so many times its length."""


class Mover(Enum):
    """What moves bytes: its name in metrics, its place in the order, whether it stays off the engines' memory.

    What stays off it, on a DPU, touches only memory and devices of the DPU itself.
    """

    FETCH = ("fetch", 0, False)
    PAGE_LOAD = ("page_load", 0, False)
    TIER_LOAD = ("tier_load", 0, False)
    STORE = ("store", 1, False)
    TIER_STORE = ("tier_store", 1, False)
    PREEMPTION_SAVE = ("preemption_save", 2, False)
    PREFETCH = ("prefetch", 3, True)
    DEVICE_WRITE = ("device_write", 4, True)
    SCRUB = ("scrub", 5, True)

    def __init__(self, label: str, precedence: int, internal: bool) -> None:
        self.label = label
        self.precedence = precedence
        self.internal = internal


@dataclass
class _Report:
    rate: int
    budget: float
    until: float


@dataclass(eq=False)
class Turn:
    """Some bytes that a mover wants to move.

    Attributes:
        mover: whose.
        size: bytes.
        precedence: of the mover; 0 once a fetch waits for these bytes.
        asked_s: when it was asked for.
        begun_s: when it was granted; None while it waits.
        rate: bytes a second that it is to spread its bytes at; 0: no bound.
    """

    mover: Mover
    size: int
    precedence: int
    asked_s: float
    begun_s: float | None = None
    rate: int = 0


class SharedRate:
    """Grants turns.

    Args:
        clock: seconds, monotonic.
        shares_memory: movers that are internal to the data plane use the memory of the engines' host as well.

    Attributes:
        granted_bytes: by mover, of turns that were granted; what a turn did not move is taken off again.
    """

    def __init__(self, clock: Callable[[], float], *, shares_memory: bool = True) -> None:
        self._clock = clock
        self._shares_memory = shares_memory
        self._reports: dict[str, dict[bytes, _Report]] = {}
        self._waiting: list[Turn] = []
        self._under_way: set[Turn] = set()
        self._debt_bytes = 0.0  # of turns that were granted, which have not had their time yet
        self._debt_at_s = clock()
        self._owed_bytes = 0.0  # to movers that others precede
        self._paused_until_s = self._next_pause_s = clock()
        self._pauser: tuple[str, bytes] | None = None
        self._reported_bytes = 0
        self.granted_bytes = dict.fromkeys(Mover, 0)

    # ---- Reports of engines

    def report(self, owner: str, engine: bytes, *, rate: int, budget: float, lasts_s: float) -> None:
        """Take an engine's word that it decodes, until ``lasts_s`` have passed.

        Args:
            owner: the host of the engine.
            engine: which of its engines.
            rate: bytes a second at which its steps stay within its budget; 0: they do at any rate.
            budget: by which fraction its steps may be longer.
            lasts_s: seconds.
        """
        self._settle_debt()
        mine = self._reports.setdefault(owner, {})
        if engine in mine or len(mine) < ENGINES_MAX:
            mine[engine] = _Report(rate, budget, self._clock() + lasts_s)

    def ended(self, owner: str, engine: bytes) -> None:
        """Take an engine's word that it does not decode."""
        self._settle_debt()
        mine = self._reports.get(owner, {})
        mine.pop(engine, None)
        if not mine:
            self._reports.pop(owner, None)

    def pause(self, owner: str, engine: bytes, seconds: float) -> None:
        """Begin no turn for so long, so that an engine sees its steps beside nothing; 0: go on.

        A pause is two seconds long at most. The next one begins ten times its length later at the soonest.
        """
        now = self._clock()
        if seconds > 0:
            if now >= self._next_pause_s:
                seconds = min(seconds, _PAUSE_MAX_S)
                self._pauser = owner, engine
                self._paused_until_s, self._next_pause_s = now + seconds, now + (1 + _PAUSE_EVERY) * seconds
        elif self._pauser == (owner, engine):
            self._paused_until_s, self._pauser = now, None

    @property
    def engines(self) -> int:
        """How many engines decode."""
        return sum(map(len, self._decoding().values()))

    @property
    def budget(self) -> float:
        """The least budget of the engines that decode; 0 where none does."""
        return min((each.budget for mine in self._decoding().values() for each in mine.values()), default=0.0)

    @property
    def rate(self) -> int:
        """Bytes a second of all movers together; 0: no bound."""
        rates = [each.rate for mine in self._decoding().values() for each in mine.values() if each.rate]
        return min(rates, default=0)

    @property
    def bounded(self) -> bool:
        """Whether turns wait for each other, or for the end of a pause."""
        return self.rate > 0 or self._clock() < self._paused_until_s

    def _decoding(self) -> dict[str, dict[bytes, _Report]]:
        now = self._clock()
        for owner, mine in list(self._reports.items()):
            for engine in [engine for engine, report in mine.items() if report.until <= now]:
                del mine[engine]
            if not mine:
                del self._reports[owner]
        return self._reports

    # ---- Turns of movers

    def ask(self, mover: Mover, size: int) -> Turn:
        """Ask for a turn; :meth:`grant` grants it some time."""
        turn = Turn(mover, size, mover.precedence, self._clock())
        self._waiting.append(turn)
        return turn

    def hasten(self, turn: Turn) -> None:
        """A fetch waits for these bytes: they go with fetches."""
        turn.precedence = 0

    def grant(self) -> float | None:
        """Grant what is due; return the seconds after which to look again, None where nothing waits."""
        self._settle_debt()
        rate, now = self.rate, self._clock()
        for turn in [turn for turn in self._waiting if turn.mover.internal and not self._shares_memory]:
            self._begin(turn, 0)
        if now >= self._paused_until_s:
            if not rate:
                self._debt_bytes = 0.0
            while self._waiting and (not rate or self._debt_bytes < 1):
                self._begin(self._choose(), rate)
        if not self._waiting:
            return None
        ends = [report.until for mine in self._reports.values() for report in mine.values()]
        due = now + self._debt_bytes / rate if rate else now
        return max(min([max(due, self._paused_until_s), *ends]) - now, 0.0)

    def _choose(self) -> Turn:
        """Return what goes next."""
        first = min(self._waiting, key=lambda turn: turn.precedence)
        behind = next((turn for turn in self._waiting if turn.precedence > first.precedence), None)
        if behind is None:
            return first
        if self._owed_bytes >= behind.size:
            self._owed_bytes -= behind.size
            return behind
        self._owed_bytes += first.size / (_LEFT_BEHIND - 1)
        return first

    def _begin(self, turn: Turn, rate: int) -> None:
        self._waiting.remove(turn)
        if all(each.precedence == turn.precedence for each in self._waiting):
            self._owed_bytes = 0.0
        turn.begun_s, turn.rate = self._clock(), rate
        self._under_way.add(turn)
        self.granted_bytes[turn.mover] += turn.size
        if rate:
            self._debt_bytes += turn.size

    def end(self, turn: Turn, moved_bytes: int) -> None:
        """A turn is over: it has moved so many bytes, or, if it was never granted, is not wanted any more."""
        if turn.begun_s is None:
            self._waiting.remove(turn)
            return
        self._settle_debt()
        self._under_way.remove(turn)
        self.granted_bytes[turn.mover] += moved_bytes - turn.size
        if turn.rate:
            self._debt_bytes = max(self._debt_bytes + moved_bytes - turn.size, 0.0)

    def note(self, mover: Mover, size: int) -> None:
        """Count bytes that move without a turn, as there was no bound when their mover asked."""
        self.granted_bytes[mover] += size

    def _settle_debt(self) -> None:
        """Let the time since the last look count at the rate that held; with each change of the rate comes one."""
        now = self._clock()
        rate = self.rate
        self._debt_bytes = max(self._debt_bytes - rate * (now - self._debt_at_s), 0.0) if rate else 0.0
        self._debt_at_s = now

    # ---- What moves

    def moved(self) -> tuple[int, bool]:
        """Return the bytes that have moved so far, which never get fewer, and whether something moves now.

        Of a turn that spreads its bytes those count that have had their time.
        """
        now, moving = self._clock(), [turn for turn in self._under_way if self._counts(turn.mover)]
        total = sum(size for mover, size in self.granted_bytes.items() if self._counts(mover))
        for turn in moving:
            passed_s = now - (turn.begun_s or now)
            total -= turn.size - min(int(turn.rate * passed_s), turn.size)
        self._reported_bytes = max(self._reported_bytes, total)
        return self._reported_bytes, bool(moving)

    def _counts(self, mover: Mover) -> bool:
        return self._shares_memory or not mover.internal
