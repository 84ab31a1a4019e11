"""The load of the benchmarks with a real engine, and their counting."""

import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.oversubscription import limit
from shadowserve_tools.bench.parts import engine
from shadowserve_tools.bench.parts.engine import Watch, model_config, write_weights
from shadowserve_tools.bench.parts.serving import Partition, arrivals
from shadowserve_tools.bench.parts.systems import Answers, System


def test_arrivals_depend_on_their_seed_and_have_the_rate() -> None:
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


def test_cores_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 9})
    assert Partition.halves() == Partition((2, 3), (5, 7, 9))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    with pytest.raises(ShadowServeError, match="two cores"):
        Partition.halves()


def test_a_different_answer_is_an_error() -> None:
    answers = Answers()
    answers.check(System(name="A"), 0, 0, {"answer": [1, 2], "cached": 0}, 0)
    answers.check(System(name="B"), 0, 0, {"answer": [1, 2], "cached": 256}, 256)
    answers.check(System(name="B"), 1, 0, {"answer": [3, 2], "cached": 256}, 256)
    with pytest.raises(ShadowServeError, match=r"B, question 0 about document 0: the answer is \[1, 3\]; of A it was"):
        answers.check(System(name="B"), 0, 0, {"answer": [1, 3], "cached": 256}, 256)
    with pytest.raises(ShadowServeError, match="0 tokens were not computed, instead of 256"):
        answers.check(System(name="B"), 0, 0, {"answer": [1, 2], "cached": 0}, 256)
    answers.check(System(name="lossy", exact=False), 0, 0, {"answer": [1, 3], "cached": 256}, 256)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Connector:
    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        return (256, True) if request.found else (None, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        pass

    def update_connector_output(self, output: Any) -> None:
        pass


def planned(*, preempted: Sequence[str] = (), **requests: tuple[int, int]) -> Any:
    """Return a scheduler's plan for requests: the tokens that each has computed before, and computes now."""
    before = [each for each, _ in requests.values()]
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(requests), num_computed_tokens=before),
        num_scheduled_tokens={name: now for name, (_, now) in requests.items()},
        total_num_scheduled_tokens=sum(now for _, now in requests.values()),
        preempted_req_ids=set(preempted),
    )


def test_tokens_computed_again_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)
    steps = iter([planned(a=(0, 10), b=(0, 5)), planned(preempted="a", b=(5, 1)), planned(a=(4, 7), b=(6, 1))])
    scheduler = SimpleNamespace(connector=None, schedule=lambda: next(steps))
    watch = Watch(scheduler)
    for number in range(3):
        scheduler.schedule()
        clock.now = 2.0 * number + 1.0
        watch.stepped(2.0 * number)
    assert watch.computed == [(1.0, 2, 15, 0), (1.0, 1, 1, 0), (1.0, 2, 8, 6)] and watch.preemptions == 1


def test_the_limit_is_a_turn_without_repeated_computing() -> None:
    """A step takes 10 ms, plus 0.5 ms per request and 0.4 ms per token. 5,000 tokens (2 s) are computed again."""
    generator, steps = random.Random(3), []
    for number in range(400):
        requests, again = generator.randrange(8, 24), 100 if number % 8 == 0 else 0
        new = generator.randrange(90) if number % 5 == 0 else 0
        seconds = 0.010 + 0.0005 * requests + 0.0004 * (again + new)
        steps.append((seconds * generator.gauss(1.0, 0.01), requests, requests + again + new, again))
    total = sum(step[0] for step in steps)
    assert limit(steps) == pytest.approx(total / (total - 0.0004 * 5000), rel=0.01)


def test_blocked_time_is_retrieval_without_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, connector = Clock(), Connector()
    monkeypatch.setattr(engine, "time", clock)
    steps = iter([planned(other=(0, 1)), planned(), planned(other=(1, 1))])
    scheduler = SimpleNamespace(connector=connector, schedule=lambda: next(steps))
    watch = Watch(scheduler)
    request = SimpleNamespace(request_id="request-1-0a1b2c3d", found=False)

    def step(ends: float) -> None:
        begin = clock.now
        scheduler.schedule()
        clock.now = ends
        watch.stepped(begin)

    connector.get_num_new_matched_tokens(request, 0)
    step(12.0)  # it computes for another request from 0 to 12; the request arrived at 10
    request.found = True
    connector.get_num_new_matched_tokens(request, 0)
    clock.now = 13.0
    connector.update_state_after_alloc(request, None, 256)
    step(16.0)  # no tokens to compute
    step(17.0)
    clock.now = 18.0
    connector.update_connector_output(SimpleNamespace(finished_recving={"request-1-0a1b2c3d"}))
    found = watch.steps("request-1", 0.0, {"at": 10.0, "first": 20.0})
    assert found == {"lookup_s": 2.0, "allocation_s": 1.0, "retrieval_s": 5.0, "last_s": 2.0, "blocked_s": 5.0}
    assert watch.steps("request-2", 0.0, {"at": 10.0, "first": 20.0}) == {}, "no KV was retrieved"


def test_weights_are_complete_and_reproducible(tmp_path: Path) -> None:
    config = model_config(layers=2, hidden=64, heads=2, head_size=32, vocabulary=128, tokens=64)
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name, config)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    length = int.from_bytes(files[0][:8], "little")
    header = json.loads(files[0][8 : 8 + length])
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(files[0]) - 8 - length
    assert header["model.layers.1.self_attn.o_proj.weight"]["shape"] == [64, 64]
    assert header["model.layers.0.mlp.down_proj.weight"]["shape"] == [64, config["intermediate_size"]]
