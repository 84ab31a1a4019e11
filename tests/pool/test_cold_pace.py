"""The estimate of the bucket's speed."""

import pytest

from shadowserve.pool.cold.reads import ThroughputEstimate

MB = 1_000_000


def measured(pace: ThroughputEstimate, rounds: int, *, at_once: int, seconds: float, size: int) -> ThroughputEstimate:
    """Simulate a number of parallel requests, repeatedly."""
    now_s = 0.0
    for _ in range(rounds):
        for _ in range(at_once):
            pace.begin(now_s)
        began_s, now_s = now_s, now_s + seconds
        for _ in range(at_once):
            pace.end(now_s, began_s, size)
        now_s += 100.0  # an idle time is no measurement of the bucket
    return pace


def test_the_first_estimate_is_that_of_s3() -> None:
    assert ThroughputEstimate().expected_s(1) == pytest.approx(0.05)
    assert ThroughputEstimate().expected_s(100 * MB) == pytest.approx(1.0)


def test_large_reads_depend_on_the_total_rate_and_small_ones_on_the_latency() -> None:
    pace = measured(ThroughputEstimate(), 40, at_once=4, seconds=0.2, size=2 * MB)
    assert pace.expected_s(1) == pytest.approx(0.2, rel=0.05)
    assert pace.expected_s(400 * MB) == pytest.approx(10.0, rel=0.1)


def test_the_estimate_grows_when_the_bucket_becomes_slower_or_fails() -> None:
    pace = measured(ThroughputEstimate(), 40, at_once=1, seconds=0.02, size=2 * MB)
    before = pace.expected_s(100 * MB)
    assert measured(pace, 40, at_once=1, seconds=0.2, size=2 * MB).expected_s(100 * MB) > 8 * before
    failing = measured(ThroughputEstimate(), 10, at_once=1, seconds=5.0, size=0)
    assert failing.expected_s(MB) > 5
