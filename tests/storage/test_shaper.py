"""Policies for sharing a link, and the shaper, with a clock that the tests set."""

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_kv.egress import POLICIES, Demand, allocate, ttft_s
from storage_kv.shaper import Flow, Link, Others, Shaper

G = 1e9
WORKLOAD_A = [
    Demand(tokens * 4096, total_ms / 32e3)
    for tokens, total_ms in ((8192, 955.89), (14336, 281.76), (32768, 8672.79), (57344, 2423.90))
]
TABLE_A9 = {
    "equal": (20, 20, 20, 20),
    "kv_prop": (5.82, 10.18, 23.27, 40.73),
    "bw_prop": (7.89, 46.85, 3.48, 21.78),
    "stall_opt": (8.99, 42.25, 3.96, 24.81),
    "calibrated_stall_opt": (13.99, 27.25, 8.96, 29.81),
}
demands = st.lists(
    st.builds(Demand, st.floats(1e3, 1e9), st.floats(1e-4, 10.0), st.integers(1, 128)), min_size=1, max_size=8
)
budgets = st.floats(1e6, 1e12)
policies = pytest.mark.parametrize("policy", POLICIES)
optima = pytest.mark.parametrize(("policy", "margin"), [("stall_opt", 0.0), ("calibrated_stall_opt", 5e8)])
capped = pytest.mark.parametrize(
    ("policy", "margin"), [("stall_opt", 0.0), ("calibrated_stall_opt", 5e8), ("shortest_remaining", 5e8)]
)


@pytest.mark.parametrize("policy", TABLE_A9)
def test_the_rates_are_the_papers_of_its_workload(policy: str) -> None:
    rates = allocate(policy, WORKLOAD_A, 80 * G, 5 * G)
    assert [rate / G for rate in rates] == pytest.approx(TABLE_A9[policy], abs=0.02)


@policies
@given(mix=demands, budget=budgets)
def test_rates_fit_the_link_and_every_request_has_one(policy: str, mix: list[Demand], budget: float) -> None:
    rates = allocate(policy, mix, budget, 5e8)
    assert len(rates) == len(mix) and all(rate > 0 for rate in rates)
    assert sum(rates) <= budget * (1 + 1e-9)


@capped
@given(mix=demands, budget=budgets)
def test_a_link_is_idle_only_if_all_requests_have_their_cap(
    policy: str, margin: float, mix: list[Demand], budget: float
) -> None:
    rates = allocate(policy, mix, budget, margin)
    caps = [demand.rate + margin for demand in mix]
    assert all(rate <= cap * (1 + 1e-9) for rate, cap in zip(rates, caps, strict=True))
    assert sum(rates) == pytest.approx(min(budget, sum(caps)), rel=1e-9)


@optima
@given(mix=demands, budget=budgets, pairs=st.data())
def test_no_move_of_bandwidth_between_two_requests_shortens_the_layers(
    policy: str, margin: float, mix: list[Demand], budget: float, pairs: st.DataObject
) -> None:
    # This is independent of the optimiser's argument: every feasible exchange is tried.
    rates = allocate(policy, mix, budget, margin)
    giver, taker = (pairs.draw(st.integers(0, len(mix) - 1)) for _ in range(2))
    moved = pairs.draw(st.floats(0.0, 0.9)) * rates[giver]
    moved = min(moved, mix[taker].rate + margin - rates[taker])
    if giver == taker or moved <= 0:
        return
    changed = list(rates)
    changed[giver] -= moved
    changed[taker] += moved

    def total(of: list[float]) -> float:
        return sum(demand.layer_bytes / rate for demand, rate in zip(mix, of, strict=True))

    assert total(changed) >= total(rates) * (1 - 1e-9)


@policies
@given(mix=demands, budget=budgets, more=st.floats(1.0, 10.0))
def test_a_faster_link_lowers_no_rate(policy: str, mix: list[Demand], budget: float, more: float) -> None:
    slow, fast = (allocate(policy, mix, each, 5e8) for each in (budget, budget * more))
    assert all(after >= before * (1 - 1e-9) for before, after in zip(slow, fast, strict=True))


@policies
@given(mix=demands, budget=budgets, order=st.randoms())
def test_the_order_of_requests_does_not_matter(policy: str, mix: list[Demand], budget: float, order: object) -> None:
    indices = list(range(len(mix)))
    order.shuffle(indices)
    rates = allocate(policy, mix, budget, 5e8)
    shuffled = allocate(policy, [mix[index] for index in indices], budget, 5e8)
    assert shuffled == pytest.approx([rates[index] for index in indices], rel=1e-9)


def test_a_request_with_less_left_gets_more_up_to_its_cap() -> None:
    long, short = Demand(1e6, 1e-3, layers_left=32), Demand(1e6, 1e-3, layers_left=16)
    assert allocate("shortest_remaining", [long, short], 9e9) == pytest.approx([0.9e9 + 2.4e9, 0.9e9 + 4.8e9])
    assert allocate("shortest_remaining", [long, short], 16e9, margin=1e9) == pytest.approx([7e9, 9e9])


@given(count=st.integers(1, 100), window_s=st.floats(1e-4, 1.0))
def test_repeated_short_requests_do_not_starve_a_long_one(count: int, window_s: float) -> None:
    long, short = Demand(1e8, 0.5, layers_left=80), Demand(1e3, window_s)
    rates = allocate("shortest_remaining", [long, *[short] * count], 1e9)
    assert rates[0] >= 0.2 * 1e9 / (count + 1) * (1 - 1e-9)


def test_time_to_first_token_is_transfer_or_computing_whichever_is_longer() -> None:
    demand = Demand(layer_bytes=125_000_000, window_s=0.5)  # a gigabit a layer
    assert ttft_s(demand, 1e9, 4) == pytest.approx(1 + 3 * 1 + 0.5)
    assert ttft_s(demand, 4e9, 4) == pytest.approx(0.25 + 3 * 0.5 + 0.5)
    assert ttft_s(demand, 4e9, 1) == pytest.approx(0.75)


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
    return Link(budget, policy, budget / 16, 0.02)


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
