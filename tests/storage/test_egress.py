"""Policies for sharing a link: the paper's table, and properties of any mix of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_kv.egress import POLICIES, Demand, allocate, ttft_s

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
    st.builds(Demand, st.floats(1e3, 1e9), st.floats(1e-4, 10.0), st.integers(1, 128)),
    min_size=1,
    max_size=8,
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
    order.shuffle(indices)  # type: ignore[attr-defined]
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
