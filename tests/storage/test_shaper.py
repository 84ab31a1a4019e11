"""The shaper, with a clock that the tests set."""

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_kv.egress import POLICIES, Demand
from storage_kv.shaper import Flow, Link, Others, Shaper

MBIT = 1e6


@dataclass
class Sent:
    """A client with replies other than layers."""

    id: int
    tenant: int = 0
    weight: float = 1.0


class Run:
    """A shaper with layers that are sent when it permits them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.shaper = Shaper(lambda: self.link)
        self.now_s = 1000.0
        self.left: dict[Flow, int] = {}
        self.sent: list[tuple[float, Flow]] = []

    def enter(self, layer_bytes: float, window_s: float, layers: int, limit: float = inf) -> Flow:
        flow = Flow(Demand(layer_bytes, window_s, layers), limit)
        self.left[flow] = layers
        flow.next_bits = int(8 * layer_bytes)
        self.shaper.enter(flow, self.now_s)
        return flow

    def go(self, for_s: float) -> None:
        """Advance the clock like the thread of the streams, which sleeps until the next possible send."""
        ends_s = self.now_s + for_s
        while True:
            for flow in self.shaper.ready(self.now_s):
                self.shaper.spend(flow)
                self.sent.append((self.now_s, flow))
                self.left[flow] -= 1
                if not self.left[flow]:
                    flow.next_bits = 0
                    self.shaper.leave(flow)
            wait_s = self.shaper.wait_s(self.now_s)
            if self.now_s + wait_s >= ends_s:
                self.now_s = ends_s
                return
            self.now_s += max(wait_s, 1e-6)

    def bits(self, flow: Flow, since_s: float = 0.0) -> float:
        return sum(8 * flow.demand.layer_bytes for time_s, each in self.sent if each is flow and time_s >= since_s)


def shared(budget: float = 100 * MBIT, policy: str = "equal") -> Link:
    return Link(budget, policy, budget / 16, 0.02)  # type: ignore[arg-type]


def test_without_a_bound_everything_goes_at_once() -> None:
    run = Run(shared(0))
    run.go(0.5)
    flows = [run.enter(1e6, 0.1, 3) for _ in range(4)]
    run.go(0.001)
    assert [run.bits(flow) for flow in flows] == [24e6] * 4
    run.go(0.1)
    late = run.enter(1e6, 0.1, 1)
    run.go(0.001)  # an unshared link has no epochs
    assert run.bits(late) == 8e6


def test_a_rate_that_a_request_asked_for_holds_without_a_bound_and_with_one() -> None:
    for link in (shared(0), shared()):
        run = Run(link)
        flow = run.enter(125_000, 0.1, 1000, limit=10 * MBIT)
        run.go(2.0)
        assert 18 * MBIT <= run.bits(flow) <= 20 * MBIT


def test_layers_come_at_even_times_at_the_policys_rates() -> None:
    run = Run(shared(100 * MBIT, "kv_prop"))
    small, large = run.enter(100_000, 0.1, 500), run.enter(300_000, 0.1, 500)
    run.go(2.0)
    assert run.bits(small) / 2.0 == pytest.approx(25 * MBIT, rel=0.05)
    assert run.bits(large) / 2.0 == pytest.approx(75 * MBIT, rel=0.05)
    times = [time_s for time_s, flow in run.sent if flow is small]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps == pytest.approx([0.032] * len(gaps), rel=1e-3)


def test_the_rate_of_a_finished_request_goes_to_others_at_the_next_epoch() -> None:
    run = Run(shared())
    short, long = run.enter(50_000, 0.1, 10), run.enter(50_000, 0.1, 10_000)
    run.go(0.0801)  # short has just sent its last layer
    assert run.left[short] == 0 and long.rate == 50 * MBIT
    run.go(0.02)
    assert long.rate == 100 * MBIT


def test_a_new_request_gets_its_rate_at_the_next_epoch() -> None:
    run = Run(shared())
    first = run.enter(10_000, 0.1, 10_000)
    run.go(0.0301)
    second = run.enter(10_000, 0.1, 10_000)
    run.go(0.005)
    assert first.rate == 100 * MBIT and not run.bits(second)
    run.go(0.02)
    assert first.rate == second.rate == 50 * MBIT


def test_a_slow_reader_saves_at_most_one_layer_of_credit() -> None:
    run = Run(shared())
    flow = run.enter(100_000, 0.1, 10_000)
    run.go(0.1)
    flow.next_bits = 0
    run.go(10.0)
    flow.next_bits = 800_000
    before = run.bits(flow)
    run.go(0.0081)
    assert run.bits(flow) - before <= 2 * 800_000


def test_unused_capacity_shortens_first_layers() -> None:
    run = Run(shared(100 * MBIT, "stall_opt"))
    flow = run.enter(12_500, 0.1, 10)  # a megabit per second suffices
    run.go(0.0011)
    assert run.bits(flow) == 100_000


def test_clients_of_other_replies_have_a_fair_share_and_pay_for_more() -> None:
    run = Run(shared())
    others = run.shaper.others
    flow = run.enter(10_000, 0.1, 100_000)
    assert others.wait_s(Sent(1), run.now_s) == 0.0
    run.go(0.001)
    for client in (1, 2, 3):
        others.charge(Sent(client), 1, run.now_s)
    run.go(0.02)  # the next epoch includes them
    assert flow.rate == 25 * MBIT and others.rate == 75 * MBIT
    others.wait_s(Sent(1), run.now_s)
    others.charge(Sent(1), 1_000_000, run.now_s)
    waited_s = 0.0
    while wait_s := others.wait_s(Sent(1), run.now_s):
        assert wait_s <= 0.02 and flow.rate >= 25 * MBIT
        run.go(wait_s)
        waited_s += wait_s
        if waited_s > 0.05:
            # A waiting flow counts, although nothing is sent to it.
            assert flow.rate == 50 * MBIT and others.rate == 50 * MBIT
    assert 8 / 75 <= waited_s <= 8 / 45
    run.left[flow] = 1
    run.go(0.1)
    assert others.rate == inf and others.wait_s(Sent(1), run.now_s) == 0.0


@given(
    mix=st.lists(
        st.tuples(st.floats(1e3, 1e6), st.floats(1e-3, 1.0), st.integers(1, 30), st.floats(0.0, 0.2)),
        min_size=1,
        max_size=6,
    ),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_all_layers_are_sent_and_never_more_than_the_link_carries(
    mix: list[tuple[float, float, int, float]], policy: str
) -> None:
    run = Run(shared(100 * MBIT, policy))
    began_s = run.now_s
    flows = []
    for layer_bytes, window_s, layers, after_s in mix:
        run.go(after_s)
        flows.append(run.enter(layer_bytes, window_s, layers))
    for _ in range(200):
        run.go(1.0)
        if not any(run.left[flow] for flow in flows):
            break
    assert not any(run.left[flow] for flow in flows)
    largest = sum(8 * flow.demand.layer_bytes for flow in flows)  # each flow may have saved one layer
    total = 0.0
    for time_s, flow in run.sent:
        total += 8 * flow.demand.layer_bytes
        assert total <= 100 * MBIT * (time_s - began_s) * (1 + 1e-6) + largest


def test_the_shortest_request_is_sent_first_without_delaying_the_last() -> None:
    ends: dict[str, list[float]] = {}
    for policy in ("equal", "shortest_remaining"):
        run = Run(shared(8 * MBIT, policy))
        short, long = run.enter(1e4, 0.01, 10), run.enter(1e4, 0.01, 40)  # 100 ms and 400 ms of the link
        run.go(2.0)
        ends[policy] = [max(time_s for time_s, flow in run.sent if flow is each) - 1000.0 for each in (short, long)]
    assert ends["equal"] == pytest.approx([0.2, 0.5], abs=0.05)
    assert ends["shortest_remaining"] == pytest.approx([0.13, 0.5], abs=0.04)


def test_debts_end_when_there_are_no_layers_to_send() -> None:
    others = Others()
    for client in range(1000):
        others.charge(Sent(client), 1 << 30, 1.0)
    assert others.wait_s(Sent(1), 5.0) == 0.0
