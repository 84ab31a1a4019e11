"""One rate for all movers beside decoding engines: order and times of grants, with a simulated clock."""

import pytest
from machine import Clock

from dpu_dataplane.shared_rate import ENGINES_MAX, Mover, SharedRate, Turn

RATE = 100 << 20
MIB = 1 << 20


class Movers:
    """Movers that always request a next turn. The clock stops between two grants."""

    def __init__(self, **how: bool) -> None:
        self.clock = Clock()
        self.shared = SharedRate(self.clock, **how)
        self.granted: list[tuple[Mover, int]] = []

    def decodes(self, engine: bytes = b"a", rate: int = RATE, owner: str = "host", lasts_s: float = 600.0) -> None:
        self.shared.report(owner, engine, rate=rate, budget=0.02, lasts_s=lasts_s)

    def go_on(self, seconds: float, *wanted: tuple[Mover, int]) -> dict[Mover, int]:
        """Let each mover request its next turn at its last grant. Return the bytes granted in this time."""
        before, ends = dict(self.shared.granted_bytes), self.clock.now + seconds
        turns = [self.shared.request(*each) for each in wanted]
        while True:
            after_s = self.shared.grant()
            for index, turn in enumerate(turns):
                if turn.granted_s is not None:
                    self.granted.append((turn.mover, turn.size))
                    self.shared.end(turn, turn.size)
                    turns[index] = self.shared.request(turn.mover, turn.size)
            if after_s is None or self.clock.now + max(after_s, 1e-6) > ends:
                break
            self.clock.now += max(after_s, 1e-6)
        self.clock.now = ends
        for turn in turns:
            if turn.granted_s is None:
                self.shared.end(turn, 0)
        return {
            mover: size - before[mover] for mover, size in self.shared.granted_bytes.items() if size > before[mover]
        }


def ask_now(movers: Movers, mover: Mover, size: int = MIB) -> Turn:
    turn = movers.shared.request(mover, size)
    movers.shared.grant()
    return turn


def test_without_a_decoding_engine_there_is_no_limit() -> None:
    movers = Movers()
    turns = [ask_now(movers, mover, 1 << 40) for mover in Mover]
    assert all(turn.granted_s == movers.clock.now and not turn.rate for turn in turns)


@pytest.mark.parametrize("size", [64 << 10, 4 << 20, 70 << 20])
def test_all_movers_together_keep_to_the_rate_whatever_the_size_of_their_turns(size: int) -> None:
    movers = Movers()
    movers.decodes()
    granted = movers.go_on(20.0, *((mover, size) for mover in Mover))
    assert sum(granted.values()) <= 20.0 * RATE + size
    assert sum(granted.values()) >= 0.95 * 20.0 * RATE - size, "the movers must use the rate"


def test_the_next_turn_begins_when_the_bytes_of_the_last_one_had_their_time() -> None:
    movers = Movers()
    movers.decodes()
    first, second = movers.shared.request(Mover.FETCH, RATE), movers.shared.request(Mover.FETCH, MIB)
    assert movers.shared.grant() == pytest.approx(1.0)
    assert (first.rate, second.granted_s) == (RATE, None)
    movers.clock.now += 0.5
    assert movers.shared.moved() == (RATE // 2, True)
    movers.shared.end(first, RATE)
    assert movers.shared.grant() == pytest.approx(0.5), "it was too fast, so its time is not over"
    movers.clock.now += 0.5
    movers.shared.grant()
    assert second.granted_s == movers.clock.now


def test_unused_bytes_of_a_turn_cost_no_time() -> None:
    movers = Movers()
    movers.decodes()
    failed = ask_now(movers, Mover.FETCH, 10 * RATE)
    movers.shared.end(failed, 0)
    assert ask_now(movers, Mover.STORE).granted_s == movers.clock.now
    assert movers.shared.granted_bytes[Mover.FETCH] == 0


def test_movers_go_by_precedence_with_an_eighth_for_lower_ones() -> None:
    movers = Movers()
    movers.decodes()
    granted = movers.go_on(100.0, (Mover.FETCH, MIB), (Mover.PREFETCH, MIB), (Mover.DEVICE_WRITE, MIB))
    total = sum(granted.values())
    assert granted[Mover.FETCH] / total == pytest.approx(7 / 8, rel=0.02)
    assert granted[Mover.PREFETCH] == pytest.approx(granted[Mover.DEVICE_WRITE], rel=0.1), (
        "the mover with the longest wait must go first"
    )
    order = [mover for mover in Mover if mover in movers.go_on(1.0, *((mover, MIB) for mover in Mover))]
    assert order[0] is Mover.FETCH


def test_engines_of_equal_precedence_share_the_rate() -> None:
    movers = Movers()
    movers.decodes()
    movers.go_on(50.0, (Mover.FETCH, MIB), (Mover.TIER_LOAD, MIB), (Mover.PAGE_LOAD, MIB))
    shares = [sum(size for each, size in movers.granted if each is mover) for mover in Mover]
    assert [share / sum(shares) for share in shares if share] == pytest.approx([1 / 3] * 3, rel=0.02)


def test_the_lowest_rate_applies_until_its_engine_stops_or_its_report_expires() -> None:
    movers = Movers()
    movers.decodes(b"a", rate=4 * RATE)
    movers.decodes(b"b", rate=RATE, lasts_s=2.0)
    movers.decodes(b"c", rate=0)
    assert (movers.shared.rate, movers.shared.engines) == (RATE, 3)
    movers.clock.now += 2.0
    assert (movers.shared.rate, movers.shared.engines) == (4 * RATE, 2), "engine b has ended"
    movers.shared.ended("host", b"a")
    assert (movers.shared.rate, movers.shared.bounded) == (0, False), "engine c permits any rate"


def test_waiting_turns_are_granted_when_the_last_report_expires() -> None:
    movers = Movers()
    movers.decodes(lasts_s=2.0)
    ask_now(movers, Mover.FETCH, 100 * RATE)
    waiting = movers.shared.request(Mover.STORE, MIB)
    assert movers.shared.grant() == pytest.approx(2.0), "not the hundred seconds of the previous turn"
    movers.clock.now += 2.0
    assert movers.shared.grant() is None and waiting.granted_s == movers.clock.now


def test_the_reports_of_a_host_are_bounded() -> None:
    movers = Movers()
    for number in range(2 * ENGINES_MAX):
        movers.decodes(b"%d" % number)
    movers.decodes(owner="another host", rate=RATE // 2)
    assert movers.shared.engines == ENGINES_MAX + 1 and movers.shared.rate == RATE // 2


def test_a_pause_grants_no_turn_and_is_limited() -> None:
    movers = Movers()
    movers.decodes()
    movers.shared.pause("host", b"a", 3600.0)
    waiting = movers.shared.request(Mover.FETCH, MIB)
    assert movers.shared.grant() == pytest.approx(2.0) and movers.shared.bounded
    movers.shared.pause("host", b"b", 0.0)
    movers.shared.grant()
    assert waiting.granted_s is None, "b's pause has not started"
    movers.clock.now += 1.0
    movers.shared.pause("host", b"a", 0.0)
    movers.shared.grant()
    assert waiting.granted_s == movers.clock.now, "the pause is long enough"
    movers.clock.now += 18.0
    movers.shared.pause("host", b"b", 1.0)
    assert ask_now(movers, Mover.FETCH).granted_s is not None, "the next pause is due after ten times its length"


def test_bytes_that_a_fetch_waits_for_have_the_precedence_of_fetches() -> None:
    movers = Movers()
    movers.decodes()
    ask_now(movers, Mover.FETCH)
    prefetch, store = movers.shared.request(Mover.PREFETCH, MIB), movers.shared.request(Mover.STORE, MIB)
    movers.shared.hasten(prefetch)
    movers.clock.now += MIB / RATE
    movers.shared.grant()
    assert prefetch.granted_s is not None and store.granted_s is None


def test_internal_movers_of_a_dpu_are_not_limited() -> None:
    movers = Movers(shares_memory=False)
    movers.decodes()
    ask_now(movers, Mover.FETCH, RATE)
    for mover in Mover:
        assert (ask_now(movers, mover).granted_s is not None) == mover.internal
    movers.clock.now += 1.0
    assert movers.shared.moved() == (RATE, True)
