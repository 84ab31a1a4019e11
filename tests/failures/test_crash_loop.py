"""The crash loop, short; and the verdict of the leak soak. ``make soak`` runs both for long."""

from pathlib import Path

import crash_loop
import pytest
import soak
from outcomes import Outcome

MIB = 1 << 20
KILLS = 20


def test_twenty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    report = crash_loop.run(tmp_path, KILLS, seed=1)
    assert report["passed"], report
    assert report["kills"] == KILLS
    assert report["outcomes"][Outcome.RIGHT.value] > 0


def test_an_expected_state_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "expected"
    first = crash_loop.Journal(path, 1)
    for number in range(4):
        version = first.begin(f"key {number}")
        if number:
            first.acknowledged(f"key {number}", version)
    first.removing("key 2")
    first.begin("key 3")
    first.close()
    again = crash_loop.Journal(path, 1)
    again.close()
    assert {key: again.of(key) for key in again.keys} == {key: first.of(key) for key in first.keys}


@pytest.mark.parametrize(("grows", "passes"), [(0.0, True), (4 * MIB, True), (40 * MIB, False)])
def test_growth_is_told_from_noise(grows: float, passes: bool) -> None:
    noise = [0, 3 * MIB, -2 * MIB, MIB, 900 * MIB]  # an outlier now and then
    samples = [(float(i), 100 * MIB + grows * i / 300 + noise[4 if i % 50 == 7 else i % 4]) for i in range(400)]
    assert soak.verdict(samples, 16 * MIB)["passed"] is passes
