"""Reports of an engine's steps, samples from data planes, and the transfer rates during steps."""

import random
from collections.abc import Iterator

import pytest
from machine import wait_for
from scripted import Clock, ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.interference.step_rates import Sample, StepRates
from host_control.step_reports import StepReports

RATE = 100 << 20


@pytest.fixture
def reports(client: DataPlaneClient, clock: Clock) -> Iterator[StepReports]:
    clock.now = 50.0
    reports = StepReports([client], 0.02, clock=clock)
    yield reports
    reports.close()


def wait_report(plane: ScriptedDataPlane, seen: int) -> None:
    wait_for(lambda: len(plane.reports) > seen)


def test_an_engine_that_decodes_reports_it_again_and_again(reports: StepReports, plane: ScriptedDataPlane) -> None:
    """There is none before the engine decodes."""
    reports.rests()
    reports.decodes(RATE)
    wait_report(plane, 3)
    said = plane.reports[0]
    assert (said.decodes, said.rate, said.interference_budget, said.pause_ms) == (True, RATE, 0.02, 0)
    assert 1 <= len(said.engine) <= 32 and 1000 <= said.lasts_ms <= 10_000
    assert len({report.engine for report in plane.reports}) == 1


def test_a_pause_and_another_rate_are_reported(reports: StepReports, plane: ScriptedDataPlane) -> None:
    reports.decodes(RATE)
    wait_report(plane, 0)
    reports.decodes(RATE // 4, paused=True)
    wait_for(lambda: plane.reports[-1].rate == RATE // 4)
    assert plane.reports[-1].pause_ms > 0
    reports.decodes(RATE // 4)
    wait_for(lambda: plane.reports[-1].pause_ms == 0)


def test_the_end_of_decoding_is_reported_once(reports: StepReports, plane: ScriptedDataPlane, clock: Clock) -> None:
    reports.decodes(RATE)
    reports.rests()
    wait_report(plane, 0)
    clock.now += 1
    wait_for(lambda: not plane.reports[-1].decodes)
    count = len(plane.reports)
    reports.decodes(RATE)
    wait_report(plane, count)
    assert plane.reports[count].decodes, "only one report said that it was idle"


@pytest.mark.parametrize("how", ["its steps never end", "it closes", "no decode step follows"])
def test_an_engine_counts_as_idle_after_a_while_or_its_end(
    reports: StepReports, plane: ScriptedDataPlane, clock: Clock, how: str
) -> None:
    reports.decodes(RATE)
    wait_report(plane, 0)
    if how == "it closes":
        reports.close()
    elif how == "no decode step follows":
        reports.ends()
    else:
        clock.now += 61
    wait_for(lambda: not plane.reports[-1].decodes)


def test_answers_are_samples_of_moved_bytes(reports: StepReports, plane: ScriptedDataPlane) -> None:
    plane.moved_bytes = 1000
    reports.decodes(RATE)
    wait_report(plane, 1)
    plane.moved_bytes = 1500
    samples: list[Sample] = []

    def moved() -> bool:
        samples.extend(reports.take())
        return bool(samples) and samples[-1].moved_bytes == 500

    wait_for(moved)
    assert [sample.known for sample in samples] == [False] + [True] * (len(samples) - 1)


# ---------------------------------------------------------------------------------------------- quiet steps


def sample(now: float, moved_bytes: int, *, moving: bool = False, known: bool = True) -> Sample:
    return Sample(now, now + 0.01, moved_bytes, moving, known)


def judged(steps: list[tuple[float, float]], samples: list[Sample]) -> dict[int, float]:
    rates: StepRates[int] = StepRates()
    for number, (begun_s, ended_s) in enumerate(steps):
        rates.ended(begun_s, ended_s, number)
    return {number: rate for number, _, rate in rates.take(samples)}


def test_a_steps_rate_is_known_after_a_later_sample() -> None:
    rates: StepRates[str] = StepRates()
    rates.ended(1.1, 1.9, "a")
    assert not list(rates.take([sample(1.0, 0), sample(1.85, 0)]))
    assert [(step, rate) for step, _, rate in rates.take([sample(2.0, 0)])] == [("a", 0.0)]


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        ([sample(1.0, 0), sample(3.0, 0)], 0.0),
        ([sample(1.0, 0), sample(2.0, 0), sample(3.0, 500)], pytest.approx(250)),
        ([sample(1.0, 0), sample(3.0, 0, moving=True)], None),
        ([sample(1.0, 0, moving=True), sample(3.0, 0)], None),
        ([sample(1.0, 0), sample(3.0, 0, known=False)], None),
        ([sample(1.5, 0), sample(3.0, 0)], None),
    ],
    ids=["calm", "moved behind it", "moving", "moving before", "unknown", "begun before the first sample"],
)
def test_a_step_counts_as_quiet_only_without_moved_bytes_around_it(samples: list[Sample], rate: float | None) -> None:
    assert judged([(1.2, 2.5)], samples) == ({} if rate is None else {0: rate})


def test_no_step_with_transfers_counts_as_quiet() -> None:
    """Random transfers and steps, with late samples."""
    chance = random.Random(3)
    calm = 0
    for _ in range(300):
        movements = sorted(chance.uniform(0, 10) for _ in range(chance.randrange(4)))
        ends = sorted(chance.uniform(0, 10) for _ in range(20))
        steps = list(zip(ends, ends[1:], strict=False))
        samples = []
        for sent_s in sorted(chance.uniform(0, 10) for _ in range(15)):
            received_s = sent_s + chance.uniform(0, 0.3)
            at_s = chance.uniform(sent_s, received_s)
            samples.append(Sample(sent_s, received_s, sum(100 for each in movements if each <= at_s), False, True))
        totals = [each.moved_bytes for each in samples]
        samples = [each._replace(moved_bytes=max(totals[: index + 1])) for index, each in enumerate(samples)]
        for number, rate in judged(steps, samples).items():
            begun_s, ended_s = steps[number]
            if rate == 0:
                calm += 1
                assert not any(begun_s <= each <= ended_s for each in movements)
    assert calm > 1000
