"""What the benchmarks with a real engine offer it, and how they count."""

import os
import statistics

import pytest

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.serving import Load, Model, Partition, Served, arrivals, p95


def test_arrivals_are_the_same_for_the_same_seed_and_come_at_the_rate() -> None:
    assert arrivals(20, 5.0, 1) == arrivals(20, 5.0, 1) != arrivals(20, 5.0, 2)
    gaps = [
        later - earlier
        for seed in range(50)
        for times in [arrivals(100, 4.0, seed)]
        for earlier, later in zip(times, times[1:], strict=False)
    ]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05), "a Poisson process"
    assert arrivals(3, 0.0, 1) == [0.0, 0.0, 0.0]


def test_requests_take_the_documents_in_turns() -> None:
    orders = Load(chunks=2, documents=3, output=4, requests=5, rate=1.0).orders()
    assert [order["seed"] for order in orders] == [0, 1, 2, 0, 1]
    assert {order["tokens"] for order in orders} == {2 * 256 + 16}, "something behind the chunks is left to compute"


def test_runs_are_counted_together() -> None:
    runs = [Served([1.0, 3.0], [0.1, 0.1], 2, 4.0), Served([2.0], [0.4], 1, 2.0)]
    both = Served.of(runs)
    assert (both.ttft, both.tpot, both.throughput) == (2.0, pytest.approx(0.2), 0.5)
    assert p95([*range(100)]) == 95 and p95([7.0]) == 7.0


def test_kv_of_a_token() -> None:
    assert Model(layers=8, hidden=512, heads=16, head_size=128).kv_bytes == 64 << 10


def test_cores_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 9})
    assert Partition.halves() == Partition((2, 3), (5, 7, 9))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    with pytest.raises(ShadowServeError, match="two cores"):
        Partition.halves()
