"""Real vLLM with ``asynchronous_fetch: false``: the same tokens, while fetches block decoding."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import assert_all_free, assert_close, greedy, spoil
from machine import WAIT_MAX_S

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)


@pytest.fixture(scope="module")
def engines(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Callable[[bool], Any]]:
    """Return a function (asynchronous) -> engine. Only one engine exists at a time."""
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
    """Store the chunks of all prompts, and reset the engine's own cache."""
    engine.reset(plane, records=True)
    engine.outputs([prompt(1000)])
    engine.flush()
    assert len(plane.records) == 3
    engine.reset(plane)


def test_outputs_are_the_same(engines: Any, plane: Any, reference: Any, prompt: Any, serve: Any) -> None:
    engine = engines(False)
    warm(engine, plane, prompt)
    for length in LENGTHS:
        engine.forget()
        assert serve(engine, length) == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "stored chunks were stored again"
    engine.forget()
    prompts = [prompt(length) for length in LENGTHS]
    assert engine.outputs(prompts) == reference(prompts), "all at once"


def test_chunks_computed_after_a_load_are_stored(engines: Any, plane: Any, prompt: Any) -> None:
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
def test_chunks_computed_on_a_failed_load_are_not_stored(
    engines: Any, plane: Any, reference: Any, prompt: Any, good: int
) -> None:
    """The step that loads also computes on the loaded KV."""
    engine = engines(False)
    warm(engine, plane, prompt)
    whole = dict(plane.records)
    del plane.records[list(whole)[2]]  # two chunks are loaded; the same step computes the third
    plane.script.fail_fetch_at = good
    spoil(engine)
    prompts = [prompt(1000), prompt(700), prompt(600, 1)]
    assert engine.outputs(prompts) == reference(prompts)
    engine.flush()
    assert_close(plane.records, whole)
    assert_all_free(engine)


@pytest.mark.parametrize("good", [0, 1])
def test_a_seeded_request_with_a_short_load_samples_the_same_tokens(
    engines: Any, plane: Any, seeded: Any, seeded_reference: Any, prompt: Any, good: int
) -> None:
    """Symptom: other tokens. vLLM rolls the step back, but not its random generator."""
    engine = engines(False)
    warm(engine, plane, prompt)
    plane.script.fail_fetch_at = good
    (output,) = engine.generate([prompt(1000)], **seeded)
    assert list(output.outputs[0].token_ids) == seeded_reference(prompt(1000))
    counted = engine.counted_since()
    assert counted["load_failures/corrupt"] == 1 and counted["slower_paths/seed"] == 1


def test_a_stalled_fetch_ends_by_its_deadline(engines: Any, plane: Any, prompt: Any, serve: Any) -> None:
    engine = engines(False)
    warm(engine, plane, prompt)
    plane.script.stall.add("Fetch")
    begin = time.monotonic()
    with engine.impatient():
        serve(engine, 700)
    assert time.monotonic() - begin < WAIT_MAX_S


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoding_stalls_during_synchronous_fetches(engines: Any, plane: Any, prompt: Any, asynchronous: bool) -> None:
    engine = engines(asynchronous)
    warm(engine, plane, prompt)
    steps = 0
    seen: list[int] = []

    def watch() -> None:
        """Count steps during the fetch, then let it end."""
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
    parameters = greedy(300)
    core.add_request("decoding", {"prompt_token_ids": prompt(31)}, parameters)
    core.step()
    core.add_request("fetching", {"prompt_token_ids": prompt(700)}, parameters)
    while core.has_unfinished_requests():
        core.step()
        steps += 1
    watcher.join()
    assert (seen[1] - seen[0] >= 5) if asynchronous else (seen[1] == seen[0])
