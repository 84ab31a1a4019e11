"""Real vLLM with the fetch-or-recompute policy (``fetch_or_recompute: true``)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from machine import wait_for

from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SEEDS = range(1, 6)
SLOW_S = 1.5
"""Duration of a fetch, much longer than the tiny model needs for a prompt."""


@pytest.fixture(scope="module")
def running(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    """An engine with the policy. ``reference`` checks that another prefix changes outputs."""
    engine = make_engine(plane.address, extra={"fetch_or_recompute": True})
    yield engine
    engine.close()


@pytest.fixture
def engine(running: Any, plane: Any) -> Any:
    """The same engine without measurements and records."""
    running.reset(plane, records=True)
    plane.script.record_bytes = 100_000
    plane.decisions.clear()
    scheduler = running.connector._scheduler
    policy = scheduler._policy_runner._policy
    scheduler._timing.table = ComputeTable()
    scheduler._policy_runner._policy = type(policy)(
        scheduler._timing.table,
        LoadTable(),
        chunk_tokens=256,
        step_tokens=policy._step_tokens,
        load_tokens_min=64,
        fetch_timeout_s=100 * SLOW_S,
    )
    return running


def cached(engine: Any, prompt: list[int], expected: list[int]) -> int:
    """Check the output, and return the number of cached tokens."""
    (output,) = engine.generate([prompt])
    assert list(output.outputs[0].token_ids) == expected
    return int(output.num_cached_tokens or 0)


def test_prompts_are_computed_if_fetching_is_slower(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    prompts = [prompt(600, seed) for seed in SEEDS]
    expected = reference(prompts)
    assert engine.outputs(prompts) == expected
    engine.flush()
    engine.forget()
    plane.script.fetch_delay = SLOW_S
    plane.calls.clear()
    assert [cached(engine, *each) for each in zip(prompts[:3], expected[:3], strict=True)] == [512] * 3
    assert [cached(engine, *each) for each in zip(prompts[3:], expected[3:], strict=True)] == [0] * 2
    assert plane.calls.count("Fetch") == 3 and "Store" not in plane.calls, "stored chunks were stored again"
    wait_for(lambda: len(plane.decisions) == 5)
    assert [told.kind for told in plane.decisions] == ["unknown"] * 3 + ["compute"] * 2
    for told in plane.decisions[3:]:
        assert told.predicted["compute"] == told.predicted_seconds < told.predicted["fetch"]
        assert told.predicted["fetch"] > 0.9 * SLOW_S and told.seconds > 0
    counted = engine.counted_since()
    assert (counted["decisions/unknown"], counted["decisions/compute"]) == (3, 2)


def test_an_engine_that_only_fetches_explores_computing(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    tokens = prompt(512)
    (expected,) = reference([tokens])
    assert cached(engine, tokens, expected) == 0
    engine.flush()
    seen = []
    for _ in range(4):
        engine.forget()
        seen.append(cached(engine, tokens, expected))
    assert seen == [511, 511, 511, 256]
    assert engine.counted_since()["decisions/explore"] == 1


def test_a_load_that_reaches_its_deadline_is_learnt(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    prompts = [prompt(600, seed) for seed in SEEDS]
    expected = reference(prompts)
    assert engine.outputs(prompts) == expected
    engine.flush()
    engine.forget()
    plane.script.fetch_delay = 1000.0
    with engine.impatient():
        for each in zip(prompts[:3], expected[:3], strict=True):
            cached(engine, *each)
        plane.calls.clear()
        assert [cached(engine, *each) for each in zip(prompts[3:], expected[3:], strict=True)] == [0] * 2
    assert "Fetch" not in plane.calls
