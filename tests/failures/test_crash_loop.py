"""The crash loop, short. ``make soak`` runs it for long."""

from pathlib import Path

import crash_loop
from outcomes import Outcome

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
