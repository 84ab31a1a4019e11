"""Measurements of vLLM's steps, and reports to data planes."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import Clock, wait_for
from scheduler_support import CHUNK, arrive, report, step
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.interference.step_rates import Sample
from host_control.interference.table import attention_pairs

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = list(range(40 * CHUNK + 10))
DECODED_S = 0.02


RATE = 123_000_000


def recording(method: str, **attributes: Any) -> Any:
    """Return an object that records the calls of a method in ``observed``."""
    observed: list[tuple[Any, ...]] = []
    attributes[method] = lambda *what: observed.append(what)
    return SimpleNamespace(observed=observed, **attributes)


class Reports:
    """Records reports."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def decodes(self, rate: int, *, paused: bool = False) -> None:
        self.sent.append((rate, paused))

    def rests(self) -> None:
        self.sent.append("rests")

    def ends(self) -> None:
        self.sent.append("ends")

    def take(self) -> list[Sample]:
        return []

    def close(self) -> None:
        self.sent.append("closed")


class Engine:
    """An engine's steps with a fake clock."""

    def __init__(self, **config: Any) -> None:
        from host_control.vllm.metrics import Counts
        from host_control.vllm.timing import Timing

        self.clock, self.counts = Clock(), Counts()
        self.timing = Timing(HostConfig(**config), counts=self.counts, clock=self.clock)
        self.timing.reports = self.reports = Reports()
        self.moved_bytes = 0

    def sample(self, moved_bytes: int = 0, *, known: bool = True) -> None:
        """Add a sample with more moved bytes."""
        self.moved_bytes += moved_bytes
        self.timing.judge([Sample(self.clock.now, self.clock.now, self.moved_bytes, False, known)])

    def step(self, output: Any, seconds: float = 1.0, **how: Any) -> bool:
        self.timing.step(output, **{"waits": False, "loads": 0, "begin": 0, **how})
        self.clock.now += seconds
        return self.timing.stepped()


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.timing.table = recording("observe", predict=lambda row, *_: DECODED_S if row == "decoding" else None)
    engine.timing.interference = recording("decoded", rate=RATE)
    return engine


def decoding(requests: int = 2) -> Any:
    return step(cached={str(number): (500, 1) for number in range(requests)})


def test_without_transfers_few_steps_are_measured(engine: Any) -> None:
    """Symptom: measuring took 25 us of each step of an engine without transfers."""
    engine.sample()
    for _ in range(64 + 10 * 32):
        engine.step(decoding(), DECODED_S)
        engine.sample()
    assert len(engine.timing.table.observed) == len(engine.timing.interference.observed) == 64 + 10
    engine.step(decoding(), DECODED_S)
    engine.sample(1 << 20)
    for _ in range(20):
        engine.step(decoding(), DECODED_S)
        engine.sample()
    assert len(engine.timing.table.observed) == 64 + 10 + 20, "every step after a transfer is measured"


def test_a_step_begins_at_the_end_of_the_previous_one(engine: Any) -> None:
    """Like asynchronous scheduling."""
    timing, clock = engine.timing, engine.clock
    timing.step(step(new={"a": (0, 100)}), waits=False, loads=0, begin=0)
    clock.now += 1
    timing.step(step(new={"b": (200, 60)}, cached={"c": (500, 40)}), waits=False, loads=0, begin=0)
    clock.now += 1
    assert timing.stepped()
    clock.now += 3
    assert timing.stepped() and not timing.stepped()
    assert timing.table.observed == [("prompts", 100, 5000.0, 2.0), ("prompts", 100, 60 * 230 + 40 * 520, 3.0)]


def test_each_kind_of_step_has_its_row(engine: Any) -> None:
    engine.sample()
    assert not engine.step(decoding(64))
    engine.sample()
    pairs = 64 * attention_pairs(500, 1)
    assert engine.timing.table.observed == [("decoding", 64, pairs, 1.0)]
    for output, how in (
        (step(cached={"a": (0, 20), "b": (0, 10)}), {}),  # neither
        (step(new={"a": (0, 2000)}), {"waits": True}),
        (step(), {}),
        (decoding(), {"loads": 1, "begin": 1}),  # a load starts with the step
    ):
        assert not engine.step(output, **how)
        engine.sample()
    assert len(engine.timing.table.observed) == 1
    assert engine.step(step(new={"a": (0, 2000)}), loads=1), "steps with prompts are measured during loads, too"


def test_only_decode_steps_are_reported(engine: Any) -> None:
    decodes = (RATE, False)
    for output, reported, *waits in (
        (decoding(), [], True),  # a step that waits for loads
        (step(), ["ends"]),
        (step(new={"a": (0, 2000)}), ["ends"]),
        (step(cached={"a": (512, 512)}), ["ends"]),
        (decoding(), [decodes]),
        (step(new={"a": (0, 2000)}, cached={"b": (500, 1)}), [decodes]),
        (step(cached={"a": (500, 4)}), [decodes]),  # with drafts
        (step(), ["ends"]),
    ):
        engine.reports.sent.clear()
        engine.step(output, waits=bool(waits))
        assert engine.reports.sent == [*reported, "rests"], output


def test_a_load_right_after_the_last_decode_step_is_not_limited(engine: Any) -> None:
    """Symptom: for half a second after an answer, the next request's KV arrived at the rate for decoding engines."""
    engine.timing.step(decoding(), waits=False, loads=0, begin=0)
    engine.timing.step(step(), waits=False, loads=1, begin=1)
    assert engine.reports.sent == [(RATE, False)], "the decode step still runs"
    engine.timing.stepped()
    engine.timing.step(step(), waits=False, loads=1, begin=0)
    assert engine.reports.sent[-1] == "ends"


def test_an_answer_of_the_last_request_ends_decoding_for_other_engines(engine: Any) -> None:
    engine.timing.step(decoding(), waits=False, loads=0, begin=0)
    engine.timing.stepped(idle=True)
    assert engine.reports.sent[-1] == "ends"


def test_decoding_ends_with_the_last_decode_step(engine: Any) -> None:
    for _ in range(2):
        engine.timing.step(decoding(), waits=False, loads=0, begin=0)
    engine.timing.stepped()
    assert "rests" not in engine.reports.sent
    engine.timing.stepped()
    assert engine.reports.sent[-1] == "rests"


def test_without_a_budget_nothing_is_reported() -> None:
    engine = Engine(interference_budget=0)
    engine.timing.begin(b"m", "here", 0, logging.getLogger("t"))
    for _ in range(8):
        engine.step(decoding(), DECODED_S, loads=1)
    assert [each for each in engine.reports.sent if each != "rests"] == []


def test_steps_are_learnt_with_the_rate_of_all_transfers(engine: Any) -> None:
    """Symptom: a step counted as quiet while the data plane moved KV for another engine."""
    policy, table = engine.timing.interference, engine.timing.table
    engine.sample()
    engine.step(decoding(), DECODED_S)
    engine.sample()
    assert policy.observed == [(DECODED_S, pytest.approx(DECODED_S), 0.0)] and len(table.observed) == 1
    for _ in range(4):
        engine.step(decoding(), 0.025)
    assert len(policy.observed) == 1, "the rate is not known yet"
    engine.sample(48_000_000)
    assert policy.observed[1:] == [(DECODED_S, pytest.approx(0.025), pytest.approx(48_000_000 / 0.1))] * 4
    assert len(table.observed) == 1, "the engine learnt a step with transfers as decoding"
    counted = engine.counts.take().data
    assert counted["decode_during_fetch_seconds"] == pytest.approx(0.1)
    assert counted["decode_during_fetch_predicted_seconds"] == pytest.approx(4 * DECODED_S)


def test_steps_without_a_known_rate_are_not_learnt(engine: Any) -> None:
    engine.step(decoding(), DECODED_S)  # before the first answer
    engine.sample()
    engine.step(decoding(), DECODED_S)
    engine.sample(known=False)
    assert not engine.timing.interference.observed and not engine.timing.table.observed
    engine.step(decoding(), DECODED_S)
    engine.sample()
    assert len(engine.timing.interference.observed) == 1


def test_pauses_measure_decoding_without_transfers(engine: Any) -> None:
    """Symptom: with continuous loads, the engine never learnt that the rate can be higher."""
    paused = []
    engine.sample()
    for _ in range(1200):
        engine.step(decoding(), DECODED_S)
        paused.append(engine.reports.sent[-2][1])
        engine.sample(0 if paused[-1] else 1_000_000)
    assert not any(paused[:1024]) and sum(paused) == 16
    assert [rate for _, _, rate in engine.timing.interference.observed].count(0.0) == 16


def test_a_pause_ends_without_measurements(engine: Any) -> None:
    engine.sample()
    while not engine.timing._paused_since_s:
        engine.step(decoding(), DECODED_S)
        engine.sample(1_000_000)
    began = engine.clock.now
    while engine.timing._paused_since_s:
        engine.step(step(new={"p": (0, 500)}, cached={"a": (700, 1)}), 0.5)
        assert engine.clock.now < began + 4
    for _ in range(60):
        engine.step(decoding(), DECODED_S)
        engine.sample(1_000_000)
        assert not engine.timing._paused_since_s, "the next pause is as far away as before"


def test_layer_times_come_from_workers_or_from_the_step() -> None:
    engine = Engine(computing_cache="none")
    engine.timing.begin(b"m", "here", 10, logging.getLogger("t"))
    prompt = step(new={"a": (0, 500)})
    for _ in range(3):
        engine.timing.step(prompt, waits=False, loads=0, begin=0)
        assert engine.timing.layer_seconds() == 0
        engine.clock.now += 2.0
        engine.timing.stepped()
    engine.timing.step(prompt, waits=True, loads=0, begin=0)
    assert engine.timing.layer_seconds() == pytest.approx(0.2), "ten layers, each takes a tenth"
    for _ in range(3):
        engine.timing.loaded(report(layer_seconds=0.15))
    engine.timing.stepped()
    engine.timing.step(prompt, waits=True, loads=0, begin=0)
    assert engine.timing.layer_seconds() == pytest.approx(0.15)
    engine.timing.stepped()
    engine.timing.step(step(), waits=False, loads=0, begin=0)
    assert engine.timing.layer_seconds() == 0


def test_measurements_are_kept_by_model_and_machine(tmp_path: Path) -> None:
    def begun(model: bytes, machine: str) -> Any:
        engine = Engine(computing_cache=str(tmp_path / "computing.json"))
        engine.timing.begin(model, machine, 0, logging.getLogger("t"))
        return engine

    first = begun(b"m", "here")
    first.sample()
    for _ in range(3):
        first.step(decoding(), DECODED_S)
        first.sample()
    first.timing.close()
    sizes = "decoding", 2, 2 * attention_pairs(500, 1)
    assert begun(b"m", "here").timing.table.predict(*sizes) == pytest.approx(DECODED_S)
    for other in ((b"n", "here"), (b"m", "there")):
        assert begun(*other).timing.table.predict(*sizes) is None


def test_a_data_plane_gets_reports_of_decoding(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    arrive(side, plane, TOKENS, stored=40)  # this connects
    side.step(decoding())
    wait_for(lambda: any(report.decodes for report in plane.reports))
    side.stepped()
    wait_for(lambda: not plane.reports[-1].decodes)
    first = plane.reports[0]
    assert first.rate == side._timing.interference.rate > 0 and first.interference_budget == pytest.approx(0.02)
