"""One rate for all bytes that a data plane moves beside engines that decode, and the order of the moves.

While engines decode, the lowest rate that they report applies to all movers together; otherwise there is no limit. A
turn begins when the bytes of the turn before it have had their time at the rate. So one turn runs at a time, and a turn
that spreads its bytes over its time never exceeds the rate. Turns are granted by precedence, then in the order of their
requests; an eighth of the bytes goes to lower precedence, so that no mover starves. A report expires, so a dead engine
limits nothing. This module does no I/O.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

RATE_MIN: Final = 16 << 20  # lowest rate of an engine in bytes per second: below it, one chunk takes seconds
ENGINES_MAX: Final = 64  # most reports of a host, including those of dead engines that have not expired yet
_LOWER_SHARE: Final = 8  # one byte in eight goes to movers of lower precedence
_PAUSE_MAX_S: Final = 2.0  # longest pause
_PAUSE_EVERY: Final = 10  # time to the next pause as a multiple of the length of a pause


class Mover(Enum):
    """A mover of bytes: its label in metrics, its precedence, and whether it is internal.

    On a DPU, internal movers use memory and devices of the DPU only, not those of the engines' host.
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
    COPY = ("copy", 5, True)

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
    """A request to move bytes."""

    mover: Mover
    size: int  # number of bytes
    precedence: int  # precedence of the mover; 0 once a fetch waits for these bytes
    requested_s: float  # time of the request
    moved_bytes: int  # bytes that were moved; the mover corrects it, at first all requested bytes
    granted_s: float | None = None  # time of the grant; None while it waits
    waited: bool = False  # it was not granted at once
    rate: int = 0  # bytes per second of the move; 0 for no limit


class SharedRate:
    """Grants turns. With ``shares_memory`` internal movers use memory of the engines' host as well."""

    def __init__(self, clock: Callable[[], float], *, shares_memory: bool = True) -> None:
        self._clock = clock
        self._shares_memory = shares_memory
        self._reports: dict[str, dict[bytes, _Report]] = {}
        self._waiting: list[Turn] = []
        self._running: set[Turn] = set()
        self._debt_bytes = 0.0  # granted, and not paid by time at the rate yet
        self._debt_at_s = clock()
        self._owed_bytes = 0.0  # to movers of lower precedence
        self._paused_until_s = self._next_pause_s = clock()
        self._pauser: tuple[str, bytes] | None = None
        self._reported_bytes = 0
        self.granted_bytes = dict.fromkeys(Mover, 0)  # granted bytes by mover, without those that were not moved

    # ---- Reports of engines

    def report(self, owner: str, engine: bytes, *, rate: int, budget: float, lasts_s: float) -> None:
        """Record that an engine of a host decodes, for ``lasts_s``, at a rate in bytes a second; 0: at any rate."""
        self._settle_debt()
        mine = self._reports.setdefault(owner, {})
        if engine in mine or len(mine) < ENGINES_MAX:
            mine[engine] = _Report(rate, budget, self._clock() + lasts_s)

    def ended(self, owner: str, engine: bytes) -> None:
        self._settle_debt()
        mine = self._reports.get(owner, {})
        mine.pop(engine, None)
        if not mine:
            self._reports.pop(owner, None)

    def pause(self, owner: str, engine: bytes, seconds: float) -> None:
        """Grant no turn for some time, so that an engine can measure its undisturbed steps; 0 ends the pause.

        A pause takes at most two seconds. The next one begins ten times its length later at the earliest.
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
        return sum(map(len, self._decoding().values()))

    @property
    def budget(self) -> float:
        """Lowest budget of the decoding engines; 0 without any."""
        return min((each.budget for mine in self._decoding().values() for each in mine.values()), default=0.0)

    @property
    def rate(self) -> int:
        """Bytes per second of all movers together; 0 for no limit."""
        rates = [each.rate for mine in self._decoding().values() for each in mine.values() if each.rate]
        return min(rates, default=0)

    @property
    def bounded(self) -> bool:
        """True if turns wait, for each other or for the end of a pause."""
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

    def request(self, mover: Mover, size: int) -> Turn:
        """Request a turn; a later :meth:`grant` grants it."""
        turn = Turn(mover, size, mover.precedence, self._clock(), size)
        self._waiting.append(turn)
        return turn

    def hasten(self, turn: Turn) -> None:
        """Give a turn the precedence of fetches: a fetch waits for its bytes."""
        turn.precedence = 0

    def grant(self) -> float | None:
        """Grant the turns that are due; return the seconds until the next call, None without a waiting turn."""
        self._settle_debt()
        rate, now = self.rate, self._clock()
        for turn in [turn for turn in self._waiting if turn.mover.internal and not self._shares_memory]:
            self._grant_one(turn, 0)
        if now >= self._paused_until_s:
            if not rate:
                self._debt_bytes = 0.0
            while self._waiting and (not rate or self._debt_bytes < 1):
                self._grant_one(self._choose(), rate)
        if not self._waiting:
            return None
        ends = [report.until for mine in self._reports.values() for report in mine.values()]
        due = now + self._debt_bytes / rate if rate else now
        return max(min([max(due, self._paused_until_s), *ends]) - now, 0.0)

    def _choose(self) -> Turn:
        first = min(self._waiting, key=lambda turn: turn.precedence)
        lower = next((turn for turn in self._waiting if turn.precedence > first.precedence), None)
        if lower is None:
            return first
        if self._owed_bytes >= lower.size:
            self._owed_bytes -= lower.size
            return lower
        self._owed_bytes += first.size / (_LOWER_SHARE - 1)
        return first

    def _grant_one(self, turn: Turn, rate: int) -> None:
        self._waiting.remove(turn)
        if all(each.precedence == turn.precedence for each in self._waiting):
            self._owed_bytes = 0.0
        turn.granted_s, turn.rate = self._clock(), rate
        self._running.add(turn)
        self.granted_bytes[turn.mover] += turn.size
        if rate:
            self._debt_bytes += turn.size

    def end(self, turn: Turn, moved_bytes: int) -> None:
        """End a turn that has moved ``moved_bytes``, or withdraw one that was not granted."""
        if turn.granted_s is None:
            self._waiting.remove(turn)
            return
        self._settle_debt()
        self._running.remove(turn)
        self.granted_bytes[turn.mover] += moved_bytes - turn.size
        if turn.rate:
            self._debt_bytes = max(self._debt_bytes + moved_bytes - turn.size, 0.0)

    def note(self, mover: Mover, size: int) -> None:
        """Count bytes that move without a turn, because there was no limit at their request."""
        self.granted_bytes[mover] += size

    def _settle_debt(self) -> None:
        """Reduce the debt by the time since the last call, at the rate until now; at each change of the rate."""
        now = self._clock()
        rate = self.rate
        self._debt_bytes = max(self._debt_bytes - rate * (now - self._debt_at_s), 0.0) if rate else 0.0
        self._debt_at_s = now

    # ---- Moved bytes

    def moved(self) -> tuple[int, bool]:
        """Return the moved bytes so far, which never decrease, and whether a move is in progress."""
        now, moving = self._clock(), [turn for turn in self._running if self._counts(turn.mover)]
        total = sum(size for mover, size in self.granted_bytes.items() if self._counts(mover))
        for turn in moving:
            passed_s = now - (turn.granted_s or now)
            total -= turn.size - min(int(turn.rate * passed_s), turn.size)
        self._reported_bytes = max(self._reported_bytes, total)
        return self._reported_bytes, bool(moving)

    def _counts(self, mover: Mover) -> bool:
        return self._shares_memory or not mover.internal
