"""What the connector's scheduler half learns of vLLM's steps, and the rate that it sets for loads beside decoding."""

import logging
from pathlib import Path
from typing import Any

import pytest
from scheduler_support import CHUNK, arrive, matched, report, step
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.slack.table import attention_pairs

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = list(range(40 * CHUNK + 10))
DECODED_S = 0.02


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Table:
    """Notes what it is told, and predicts what decoding takes."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def observe(self, *what: Any) -> None:
        self.told.append(what)

    def predict(self, row: str, tokens: int, pairs: float, steps: int = 1) -> float | None:
        return DECODED_S if row == "decoding" else None


class Policy:
    """Notes what it is told."""

    rate = 123_000_000

    def __init__(self) -> None:
        self.told: list[tuple[float, float, float]] = []

    def decoded(self, *what: float) -> None:
        self.told.append(what)


class Engine:
    """Steps of an engine whose clock is the test's."""

    def __init__(self, **config: Any) -> None:
        from host_control.vllm.metrics import Counts
        from host_control.vllm.timing import Timing

        self.clock, self.counts = Clock(), Counts()
        self.timing = Timing(HostConfig(**config), counts=self.counts, clock=self.clock)

    def step(self, output: Any, seconds: float = 1.0, **how: Any) -> bool:
        self.timing.step(output, **{"waits": False, "loads": 0, "begin": 0, **how})
        self.clock.now += seconds
        return self.timing.stepped()


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.timing.table, engine.timing.interference = Table(), Policy()  # type: ignore[assignment]
    return engine


def decoding(requests: int = 2) -> Any:
    return step(cached={str(number): (500, 1) for number in range(requests)})


def test_where_nothing_was_loaded_for_long_few_steps_are_learnt_from(engine: Any) -> None:
    """Symptom: learning took 25 us of each step of an engine that never loaded anything."""
    for _ in range(64 + 10 * 32):
        engine.step(decoding(), DECODED_S)
    assert len(engine.timing.table.told) == len(engine.timing.interference.told) == 64 + 10
    engine.step(decoding(), DECODED_S, loads=1, begin=1)
    for _ in range(20):
        engine.step(decoding(), DECODED_S)
    assert len(engine.timing.table.told) == 64 + 10 + 20, "how things are after a load is not known"


def test_a_step_begins_when_the_one_before_it_is_over(engine: Any) -> None:
    """As vLLM schedules one while another runs."""
    timing, clock = engine.timing, engine.clock
    timing.step(step(new={"a": (0, 100)}), waits=False, loads=0, begin=0)
    clock.now += 1
    timing.step(step(new={"b": (200, 60)}, cached={"c": (500, 40)}), waits=False, loads=0, begin=0)
    clock.now += 1
    assert timing.stepped()
    clock.now += 3
    assert timing.stepped() and not timing.stepped()
    assert timing.table.told == [("prompts", 100, 5000.0, 2.0), ("prompts", 100, 60 * 230 + 40 * 520, 3.0)]


def test_each_kind_of_step_has_its_row_and_what_tells_nothing_has_none(engine: Any) -> None:
    assert not engine.step(decoding(64))
    pairs = 64 * attention_pairs(500, 1)
    assert engine.timing.table.told == [("decoding", 64, pairs, 1.0)]
    for output, how in (
        (step(cached={"a": (0, 20), "b": (0, 10)}), {}),  # neither
        (step(new={"a": (0, 2000)}), {"waits": True}),
        (step(), {}),
        (decoding(), {"loads": 1, "begin": 1}),  # beside some of it
    ):
        assert not engine.step(output, **how)
    assert len(engine.timing.table.told) == 1
    assert engine.step(step(new={"a": (0, 2000)}), loads=1), "of prompts, they tell all the same"


def test_only_steps_that_decode_hold_loads_back(engine: Any) -> None:
    for output, rate in (
        (step(), 0),
        (step(new={"a": (0, 2000)}), 0),
        (step(cached={"a": (512, 512)}), 0),
        (decoding(), Policy.rate),
        (step(new={"a": (0, 2000)}, cached={"b": (500, 1)}), Policy.rate),
        (step(cached={"a": (500, 4)}), Policy.rate),  # with drafts
        (step(), 0),
    ):
        engine.step(output)
        assert engine.timing.rate == rate, output


def test_without_a_budget_nothing_holds_loads_back() -> None:
    engine = Engine(interference_budget=0)
    for _ in range(8):
        engine.step(decoding(), DECODED_S, loads=1)
        engine.timing.loaded(report(delivered_bytes=1 << 30))
        assert engine.timing.rate == 0


def test_steps_beside_loads_are_compared_at_the_rate_that_came(engine: Any) -> None:
    engine.step(decoding(), DECODED_S)
    policy, table = engine.timing.interference, engine.timing.table
    assert policy.told == [(DECODED_S, pytest.approx(DECODED_S), 0.0)] and len(table.told) == 1
    engine.step(decoding(), DECODED_S, loads=1, begin=1)
    begun = engine.clock.now
    for _ in range(3):
        engine.step(decoding(), 0.025, loads=1)
    assert len(policy.told) == 1, "nobody knows yet what came"
    engine.timing.step(decoding(), waits=False, loads=1, begin=0)
    engine.clock.now += 0.025
    engine.timing.loaded(report(delivered_bytes=48_000_000))
    engine.timing.stepped()
    rate = 48_000_000 / (engine.clock.now - begun + DECODED_S)
    assert policy.told[1:] == [(DECODED_S, pytest.approx(0.025), pytest.approx(rate))] * 4
    assert len(table.told) == 1, "what is beside a load is not what decoding takes"
    counted = engine.counts.take().data
    assert counted["beside_fetching_seconds"] == pytest.approx(0.1)
    assert counted["beside_fetching_predicted_seconds"] == pytest.approx(4 * DECODED_S)


def test_of_loads_without_end_each_that_ends_brings_its_share(engine: Any) -> None:
    engine.step(decoding(), DECODED_S, loads=1, begin=1)
    for count in (1, 2, 3):
        for _ in range(4):
            engine.step(decoding(), DECODED_S, loads=2)
        engine.timing.step(decoding(), waits=False, loads=2, begin=1)
        engine.clock.now += DECODED_S
        engine.timing.loaded(report(delivered_bytes=count * 10_000_000))
        engine.timing.stepped()
    rates = [rate for _, _, rate in engine.timing.interference.told]
    assert len(rates) == 15
    assert rates[-5:] == [pytest.approx(3e7 / (5 * DECODED_S))] * 5


def test_loads_without_end_are_held_up_now_and_then_to_see_decoding_alone(engine: Any) -> None:
    """Symptom: slow loads came one after the other, so that nobody ever saw that they need not be slow."""
    timing, policy = engine.timing, engine.timing.interference
    held = []
    for _ in range(1200):
        engine.step(decoding(), DECODED_S, loads=1)
        held.append(timing.held)
    assert not any(held[:1023]) and sum(held) == 0.5 / DECODED_S + 16
    assert [rate for _, _, rate in policy.told] == [0.0] * 16, "once what had begun before was over"
    timing.loaded(report(delivered_bytes=1_000_000_000))
    engine.step(decoding(), DECODED_S, loads=1)
    rate = max(rate for _, _, rate in policy.told[16:])
    assert rate == pytest.approx(1e9 / ((1201 - sum(held)) * DECODED_S)), "of the time in which loads went on"


def test_loads_go_on_as_soon_as_nothing_decodes(engine: Any) -> None:
    for other, how in ((step(), {"loads": 1}), (decoding(), {}), (decoding(), {"loads": 1, "waits": True})):
        while not engine.timing.held:
            engine.step(decoding(), DECODED_S, loads=1)
        engine.step(other, DECODED_S, **how)
        assert not engine.timing.held
        assert how.get("waits") is None or engine.timing.rate == 0, "what the engine waits for has no bound"


def test_loads_are_not_held_up_to_their_deadline_while_a_long_prompt_is_computed_beside_decoding(engine: Any) -> None:
    while not engine.timing.held:
        engine.step(decoding(), DECODED_S, loads=1)
    began = engine.clock.now
    while engine.timing.held:
        engine.step(step(new={"p": (0, 500)}, cached={"a": (700, 1)}), 0.5, loads=1)
        assert engine.clock.now < began + 4
    for _ in range(60):
        engine.step(decoding(), DECODED_S, loads=1)
        assert not engine.timing.held, "the next time is as far away as ever"


def test_a_layer_is_known_by_what_workers_say_or_as_a_part_of_the_step() -> None:
    engine = Engine(computing_cache="none")
    engine.timing.begin(b"m", "here", 10, logging.getLogger("t"))
    prompt = step(new={"a": (0, 500)})
    for _ in range(3):
        engine.timing.step(prompt, waits=False, loads=0, begin=0)
        assert engine.timing.layer_seconds() == 0
        engine.clock.now += 2.0
        engine.timing.stepped()
    engine.timing.step(prompt, waits=True, loads=0, begin=0)
    assert engine.timing.layer_seconds() == pytest.approx(0.2), "of ten layers, each a tenth"
    for _ in range(3):
        engine.timing.loaded(report(layer_seconds=0.15))
    engine.timing.stepped()
    engine.timing.step(prompt, waits=True, loads=0, begin=0)
    assert engine.timing.layer_seconds() == pytest.approx(0.15)
    engine.timing.stepped()
    engine.timing.step(step(), waits=False, loads=0, begin=0)
    assert engine.timing.layer_seconds() == 0


def test_what_was_learnt_is_kept_by_model_and_machine(tmp_path: Path) -> None:
    def begun(model: bytes, machine: str) -> Any:
        engine = Engine(computing_cache=str(tmp_path / "computing.json"))
        engine.timing.begin(model, machine, 0, logging.getLogger("t"))
        return engine

    first = begun(b"m", "here")
    for _ in range(3):
        first.step(decoding(), DECODED_S)
    first.timing.close()
    sizes = "decoding", 2, 2 * attention_pairs(500, 1)
    assert begun(b"m", "here").timing.table.predict(*sizes) == pytest.approx(DECODED_S)
    for other in ((b"n", "here"), (b"m", "there")):
        assert begun(*other).timing.table.predict(*sizes) is None


def test_workers_are_told_the_rate_with_each_step(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    assert side.step(decoding()).rate == side._timing.interference.rate > 0
    side.stepped()
    request = arrive(side, plane, TOKENS, stored=40)
    side.allocated(request, [list(range(100, 300))], matched(side, request))
    metadata = side.step(step())
    assert metadata.loads and metadata.rate == 0, "nothing decodes"
    side.stepped()
    side.step(decoding())
    side.worker_output({"r"}, report(delivered_bytes=10_000_000))
    side.stepped()
    assert side._timing._beside_since > 0 and not side._timing._delivered
    assert make_side(interference_budget=0).step(decoding()).rate == 0
