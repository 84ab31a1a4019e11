"""Real vLLM that blocks while it fetches (``asynchronous_fetch: false``): the same tokens, and decoding that stalls."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from machine import WAIT_MAX_S

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)


@pytest.fixture(scope="module")
def engines(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Callable[[bool], Any]]:
    """Return a function that gives an engine that fetches asynchronously, or not; one of them at a time."""
    running: list[tuple[bool, Any]] = []

    def get(asynchronous: bool) -> Any:
        if not running or running[0][0] != asynchronous:
            if running:
                running.pop()[1].close()
            running.append((asynchronous, make_engine(plane.address, extra={"asynchronous_fetch": asynchronous})))
        running[0][1].reset(plane)
        return running[0][1]

    yield get
    for _, engine in running:
        engine.close()


def warm(engine: Any, plane: Any, prompt: Any) -> None:
    """Store every prompt's chunks, and forget them in the engine."""
    engine.reset(plane, records=True)
    engine.outputs([prompt(1000)])
    engine.flush()
    assert len(plane.records) == 3
    engine.reset(plane)


def test_outputs_are_the_same(engines: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine = engines(False)
    warm(engine, plane, prompt)
    for length in LENGTHS:
        engine.forget()
        (output,) = engine.generate([prompt(length)])
        assert list(output.outputs[0].token_ids) == reference([prompt(length)])[0]
        assert output.num_cached_tokens == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "known chunks are not stored again"
    engine.forget()
    prompts = [prompt(length) for length in LENGTHS]
    assert engine.outputs(prompts) == reference(prompts), "all at once"


def test_what_is_computed_behind_a_load_is_stored(engines: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine = engines(False)
    warm(engine, plane, prompt)
    whole = dict(plane.records)
    for key in list(plane.records)[1:]:
        del plane.records[key]
    (output,) = engine.generate([prompt(1000)])
    assert output.num_cached_tokens == 256
    engine.flush()
    assert plane.records.keys() == whole.keys()


@pytest.mark.parametrize("good", [0, 1, 2])
def test_nothing_wrong_is_stored_behind_a_load_that_fails(
    engines: Any, plane: Any, reference: Any, prompt: Any, good: int
) -> None:
    """The step that loads computes on it at once: what it makes of a bad load must reach nobody."""
    engine = engines(False)
    warm(engine, plane, prompt)
    whole = dict(plane.records)
    del plane.records[list(whole)[2]]  # two chunks are loaded, the third is computed behind them, in the same step
    plane.script.fail_fetch_at = good
    for cache in engine.worker._parts[0][0].layout._mover._views:
        cache.fill_(3.0)  # or the blocks may still hold what the prompt left there when it was stored
    prompts = [prompt(1000), prompt(700), prompt(600, 1)]
    assert engine.outputs(prompts) == reference(prompts)
    engine.flush()
    for key, kv in whole.items():
        stored, computed = (np.frombuffer(bytes_, np.float32) for bytes_ in (plane.records[key], kv))
        assert np.allclose(stored, computed, rtol=1e-3, atol=1e-3)
    assert engine.free_blocks() == engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


@pytest.mark.parametrize("good", [0, 1])
def test_a_seeded_request_whose_load_falls_short_samples_what_it_samples_without_the_plugin(
    engines: Any, plane: Any, seeded: Any, seeded_reference: Any, prompt: Any, good: int
) -> None:
    """Symptom: other tokens. vLLM drops the step that waited for the load, but its generator has gone on."""
    engine = engines(False)
    warm(engine, plane, prompt)
    plane.script.fail_fetch_at = good
    (output,) = engine.generate([prompt(1000)], **seeded)
    assert list(output.outputs[0].token_ids) == seeded_reference(prompt(1000))
    counted = engine.counted_since()
    assert counted["load_failures/corrupt"] == 1 and counted["slower_paths/seed"] == 1


def test_a_fetch_that_never_ends_costs_its_deadline(engines: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine = engines(False)
    warm(engine, plane, prompt)
    plane.script.stall.add("Fetch")
    begin = time.monotonic()
    with engine.impatient():
        assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert time.monotonic() - begin < WAIT_MAX_S


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoding_stalls_while_it_fetches(engines: Any, plane: Any, prompt: Any, asynchronous: bool) -> None:
    from vllm import SamplingParams

    engine = engines(asynchronous)
    warm(engine, plane, prompt)
    steps = 0
    seen: list[int] = []

    def watch() -> None:
        """Once the fetch is under way, see whether tokens still come; then let it end."""
        plane.wait_for_call("Fetch")
        seen.append(steps)
        ends = time.monotonic() + (WAIT_MAX_S / 2 if asynchronous else 0.5)
        while steps < seen[0] + 5 and time.monotonic() < ends:
            time.sleep(0.005)
        seen.append(steps)
        plane.script.unstall.set()

    plane.script.stall.add("Fetch")
    watcher = threading.Thread(target=watch)
    watcher.start()
    core = engine.llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, detokenize=False)
    core.add_request("decoding", {"prompt_token_ids": prompt(31)}, parameters)
    core.step()
    core.add_request("fetching", {"prompt_token_ids": prompt(700)}, parameters)
    while core.has_unfinished_requests():
        core.step()
        steps += 1
    watcher.join()
    assert (seen[1] - seen[0] >= 5) if asynchronous else (seen[1] == seen[0])
