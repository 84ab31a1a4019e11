"""A part of the failure matrix: one seed of each case. ``make failure-matrix`` runs all of it."""

import errno
import re
from contextlib import closing
from pathlib import Path

import matrix
import pytest
import redis
from cases import CASES, Case, Context, Row, run_case
from cases_pages import await_devices
from nodes import Storage, tiers
from outcomes import Expected, Outcome, Tally
from paged import PagedEngine, Shape

REPOSITORY = Path(__file__).parents[2]
SHORT = [case for case in CASES if case.short]


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_a_fault_ends_in_what_was_stored_a_miss_or_an_error(case: Case, tmp_path: Path) -> None:
    row = run_case(case, tmp_path, seed=1, repetitions=1)
    assert not row.unavailable and not row.broken and not row.complaints
    assert not row.tally.failed, {outcome.value: row.tally.examples(outcome) for outcome in Outcome}
    assert row.tally.counts[Outcome.RIGHT] > 0


def test_the_summary_names_every_fault_and_reports_nothing_wrong() -> None:
    text = (REPOSITORY / "docs" / "reference" / "failure-matrix.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert {row[0] for row in rows} == {case.fault for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)
    assert ", 0 wrong, 0 hang." in text


def test_other_bytes_and_lost_writes_are_wrong() -> None:
    expected = Expected(1)
    first = expected.begin("key")
    assert expected.judge("key", None)[0] is Outcome.MISSED
    expected.acknowledged("key", first)
    value = expected.value("key", first)
    assert expected.judge("key", value)[0] is Outcome.RIGHT
    assert expected.judge("key", None)[0] is Outcome.WRONG
    assert expected.judge("key", value[:-1])[0] is Outcome.WRONG
    second = expected.begin("key")
    assert expected.judge("key", value)[0] is Outcome.RIGHT
    assert expected.judge("key", expected.value("key", second))[0] is Outcome.RIGHT
    expected.acknowledged("key", second)
    assert expected.judge("key", value)[0] is Outcome.WRONG
    expected.may_be_lost("key", "a fault")
    assert expected.judge("key", None) == (Outcome.MISSED, "a fault")
    assert expected.judge("key", value)[0] is Outcome.WRONG


def test_pages_of_another_prefix_and_blocks_that_were_given_away_are_wrong(tmp_path: Path) -> None:
    """Check that the judgement of page loads finds wrong bytes and unexplained misses."""
    tally = Tally()
    shape = Shape()
    one, other = shape.prompt("one"), shape.prompt("other")
    with closing(Context(1, "pool", tmp_path, tally)) as context:
        plane = context.data_plane(0, tiers=tiers("4MiB", tmp_path / "disk", "16MiB"))
        engine = context.enter(closing(PagedEngine(plane.address, tally, "seed", shape)))
        engine.stores.store_whole([one, other])
        await_devices(engine, [one, other])
        assert not tally.failed and tally.counts[Outcome.RIGHT] >= 4
        one.chunks = other.chunks
        engine.load([one])
        assert tally.counts[Outcome.WRONG] == 1
        engine.load([shape.prompt("not stored")])
        assert tally.counts[Outcome.WRONG] == 2, "a chunk is absent without a reason"
        engine.pages.segment.memory[:1] = b"\xff"  # as a late write would
        engine.check()
        assert tally.counts[Outcome.WRONG] == 3


def test_a_wrong_answer_and_a_hang_fail_the_matrix() -> None:
    for outcome in Outcome:
        row = Row(CASES[0], Tally())
        row.tally.note(outcome, "a reason")
        assert row.failed is (outcome in (Outcome.WRONG, Outcome.HANG))
        found = matrix.as_json([row], 1.0, 0)
        assert found["counts"][outcome.value] == 1
        assert "a reason" in matrix.as_text(found) or outcome is Outcome.RIGHT


@pytest.mark.parametrize(("error", "one_in"), [(errno.EIO, 0), (errno.EIO, 2)])
def test_errors_that_pass_while_it_starts_delete_nothing(error: int, one_in: int, tmp_path: Path) -> None:
    """Symptom: the server formatted a device that could not be read once."""
    with closing(Storage("pool", tmp_path, faulty=True).start()) as storage:
        with redis.Redis(port=storage.port) as client:
            for number in range(40):
                client.set(f"key{number}", b"%d" % number * 3000)
        assert storage.stop()
        storage.faults.set(read_error=error, one_in=one_in)
        if not storage.try_start():
            log = storage.log.read_text()
            assert re.search(r"cannot be read|cannot read|opened", log) and "Traceback" not in log, log[-2000:]
        assert storage.faults.met and storage.stop()
        storage.faults.clear()
        storage.start()
        with redis.Redis(port=storage.port) as client:
            lost = [n for n in range(40) if client.get(f"key{n}") != b"%d" % n * 3000]
        assert not lost
