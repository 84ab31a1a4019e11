"""Weights that change while an engine runs: the old weights' KV is never served for the new weights, or the reverse.

A float32 engine with a checkpoint in bfloat16, on a CPU: norms and embeddings are as they were loaded, linear layers
are packed. test_vllm_weights has each kind of change and dtype without an engine.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import add
from machine import NEVER_S, drive

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CHUNK = 256
STORED = (600, 3)
"""Arguments of a prompt whose KV was stored with the old weights."""
FRESH = (700, 4)
"""Arguments of a prompt that no engine has computed."""
LATE = (200, 5)
"""Arguments of a prompt whose first chunk ends in generated tokens."""


@pytest.fixture(scope="module")
def weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two folders of one model, whose layers have different weights.

    Random weights, because a trained model gives the same output for two random prompts. The LM head is equal in
    both, because vLLM's CPU build does not reload it if it is tied to the embedding.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folders = {name: tmp_path_factory.mktemp(name) / "model" for name in ("old", "new")}
    for seed, folder in enumerate(folders.values()):
        shutil.copytree(model, folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in sorted(tensors.items()):
            values = torch.ones_like(tensor)
            if tensor.dim() == 2:
                generator = torch.Generator().manual_seed(seed if "layers" in name else 7)
                values = torch.randn(tensor.shape, generator=generator) * 0.15
            tensors[name] = values.to(torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


def flip_signs(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[::2].neg_()


@pytest.fixture(scope="module")
def expected(weights: dict[str, Path], make_engine: Any, prompt: Any) -> dict[tuple[str, tuple[int, int]], list[int]]:
    """Return the outputs of engines without a cache, for both weights, and for the old ones with flipped signs."""
    known = {}
    for name, folder in weights.items():
        with closing(make_engine(None, model=folder, enable_prefix_caching=False)) as engine:
            for changed in (name, "flipped") if name == "old" else (name,):
                if changed == "flipped":
                    engine.llm.apply_model(flip_signs)
                for arguments in (STORED, FRESH):
                    (known[changed, arguments],) = engine.outputs([prompt(*arguments)])
    for arguments in (STORED, FRESH):
        outputs = [known[name, arguments] for name in ("old", "new", "flipped")]
        assert all(outputs.count(each) == 1 for each in outputs), "these weights give the same outputs"
    return known


@pytest.fixture(scope="module")
def shared_engine(
    plane: Any, weights: dict[str, Path], expected: Any, make_engine: Callable[..., Any]
) -> Iterator[Any]:
    with closing(make_engine(plane.address, model=weights["old"], max_num_seqs=2)) as engine:
        yield engine


@pytest.fixture
def serving(shared_engine: Any, plane: Any, weights: dict[str, Path], prompt: Any) -> Iterator["Serving"]:
    """An engine with the old weights, which has stored one prompt."""
    serving = Serving(shared_engine, weights)
    serving.reload("old")
    assert shared_engine.llm.reset_prefix_cache(reset_connector=True)
    shared_engine.reset(plane, records=True)
    shared_engine.outputs([prompt(*STORED)])
    shared_engine.flush()
    assert len(plane.records) == 2
    shared_engine.forget()
    yield serving
    plane.script.unstall.set()
    serving.finish()


class Serving:
    """An engine that runs one step at a time."""

    def __init__(self, engine: Any, weights: dict[str, Path]) -> None:
        self.engine = engine
        self._weights = weights
        self._core = engine.llm.llm_engine
        self.outputs: dict[str, list[int]] = {}

    def reload(self, name: str) -> None:
        self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._weights[name])})

    def add(self, request_id: str, tokens: list[int], count: int = 8) -> None:
        add(self.engine, request_id, tokens, count)

    def step(self) -> None:
        for output in self._core.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)

    def step_until(self, condition: Callable[[], Any]) -> None:
        drive(self.step, condition, NEVER_S)

    def finish(self) -> None:
        self.step_until(lambda: not self._core.has_unfinished_requests())
        self.engine.flush()

    def reset(self) -> None:
        """Reset the cache as a trainer does whose requests continue."""
        assert self.engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def pause(self) -> None:
        """Pause as the engine core does for a trainer."""
        core = self._core.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=True)
        core.resume_scheduler()


def naming(serving: Serving, request_id: str) -> Callable[[list[int]], set[bytes]]:
    """Return the function from tokens to the current keys of their chunks, for a request like this one."""
    from shadowserve.keys import prefix_chain, record_keys

    scheduler = serving.engine.connector._scheduler
    (tracked,) = [one for name, one in scheduler._requests.items() if name.startswith(request_id)]
    (((_, namespace),),) = scheduler._lookup._prober.layouts[0]
    model, extra = scheduler._lookup._model, tracked.extra
    return lambda tokens: set(record_keys(namespace, prefix_chain(model, tokens, chunk_tokens=CHUNK, extra=extra)))


@contextmanager
def records_stay(plane: Any) -> Iterator[None]:
    """Check that no record is added during the context."""
    before = set(plane.records)
    yield
    assert set(plane.records) == before


@pytest.mark.parametrize("how", [Serving.reset, Serving.pause], ids=["reset", "pause"])
def test_waiting_requests_do_not_use_old_keys(
    how: Callable[[Serving], None], serving: Serving, plane: Any, prompt: Any, expected: Any
) -> None:
    for seed in (1, 2):
        serving.add(f"running {seed}", prompt(600, seed), 30)
    serving.step_until(lambda: len(serving.outputs) == 2)
    serving.add("stored", prompt(*STORED))
    serving.add("fresh", prompt(*FRESH))
    serving.step_until(lambda: len(serving.outputs.get("running 1", ())) > 10)
    old = naming(serving, "fresh")
    how(serving)
    serving.reload("new")
    serving.finish()
    assert serving.outputs["stored"] == expected["new", STORED]
    assert serving.outputs["fresh"] == expected["new", FRESH]
    assert old(prompt(*STORED)) <= set(plane.records), "the old name differs from the test's expectation"
    assert not old(prompt(*FRESH)) & set(plane.records)


def test_running_requests_are_not_stored_under_old_keys(serving: Serving, plane: Any, prompt: Any) -> None:
    serving.add("late", prompt(*LATE), 150)
    serving.step_until(lambda: len(serving.outputs.get("late", ())) > 10)
    old = naming(serving, "late")
    serving.reset()
    serving.reload("new")
    serving.finish()
    assert not old(prompt(*LATE) + serving.outputs["late"]) & set(plane.records)


def test_a_running_load_of_old_kv_is_discarded(serving: Serving, plane: Any, prompt: Any, expected: Any) -> None:
    plane.script.stall = {"Fetch"}
    serving.add("stored", prompt(*STORED))
    serving.step_until(lambda: "Fetch" in plane.calls)
    with pytest.raises(RuntimeError, match="remote KV transfer"):  # vLLM's message; vLLM does not notify connectors
        serving.reset()
    serving.reload("new")
    plane.script.unstall.set()
    serving.finish()
    assert serving.outputs["stored"] == expected["new", STORED]


def test_unannounced_new_weights_are_detected(serving: Serving, plane: Any, prompt: Any, expected: Any) -> None:
    old = set(plane.records)
    serving.reload("new")
    serving.engine.forget()
    assert serving.engine.outputs([prompt(*STORED)]) == [expected["new", STORED]]
    serving.engine.flush()
    # The new weights' KV is cached as well, under its own key.
    serving.engine.forget()
    serving.engine.outputs([prompt(*STORED)])
    serving.engine.flush()
    serving.engine.forget()
    fetches = len(plane.fetches)
    assert serving.engine.served(prompt(*STORED)) == (expected["new", STORED], 512)
    assert not {key for fetch in plane.fetches[fetches:] for key in fetch.keys} & old


def test_kv_of_mixed_weights_is_not_stored(serving: Serving, plane: Any, prompt: Any) -> None:
    serving.add("late", prompt(*LATE), 150)
    serving.step_until(lambda: len(serving.outputs.get("late", ())) > 10)
    serving.reload("new")  # the request continues after KV of the old weights
    with records_stay(plane):
        serving.finish()


def test_kv_after_the_engines_own_old_kv_is_not_stored(serving: Serving, plane: Any, prompt: Any) -> None:
    serving.engine.outputs([prompt(*FRESH)])  # now in the engine's own prefix cache
    serving.engine.flush()
    serving.reload("new")
    # vLLM itself continues after its old KV, because it was not notified. No other engine may use it.
    with records_stay(plane):
        serving.engine.outputs([prompt(*FRESH) + prompt(600, 9)])
        serving.engine.flush()


@pytest.mark.parametrize("call", ["prefix cache emptied", "nothing"])
def test_weights_that_are_changed_in_place_are_detected(
    call: str, serving: Serving, plane: Any, prompt: Any, expected: Any
) -> None:
    """At most the engine's prefix cache is emptied afterwards."""
    engine, stored = serving.engine, dict(plane.records)
    serving.add("old", prompt(31), 2)
    serving.step_until(lambda: "old" in serving.outputs)
    serving.add("names", prompt(31), 200)
    serving.step()
    old = naming(serving, "names")
    serving.finish()
    if call == "nothing":  # then the engine's own prefix cache has no effect
        engine.forget()
    engine.llm.apply_model(flip_signs)
    if call != "nothing":
        engine.forget()
    prompts = [prompt(*STORED), prompt(*FRESH)]
    assert engine.outputs(prompts) == [expected["flipped", STORED], expected["flipped", FRESH]]
    engine.flush()
    assert {key: plane.records[key] for key in stored} == stored, "KV of other weights was stored under old keys"
    assert old(prompt(*STORED)) == set(stored) and not old(prompt(*FRESH)) & set(plane.records)


def test_calls_that_change_nothing_keep_the_cache(serving: Serving, plane: Any, expected: Any, prompt: Any) -> None:
    engine = serving.engine
    engine.counted = engine.counters()
    for _ in range(2):
        engine.llm.apply_model(lambda model: None)
        engine.forget()
        assert engine.outputs([prompt(*STORED)]) == [expected["old", STORED]]
        engine.flush()
    assert engine.counted_since()["loaded_tokens"] == 2 * 512 and len(plane.records) == 2


def test_loads_and_stores_wait_while_weights_are_in_doubt(
    serving: Serving, plane: Any, expected: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_control.vllm import loaded_weights

    engine = serving.engine
    engine.counted = engine.counters()
    go, crc32 = threading.Event(), loaded_weights.native.crc32

    def slow(memory: Any, crc: int) -> int:
        assert go.wait(NEVER_S)
        return crc32(memory, crc)

    monkeypatch.setattr(loaded_weights.native, "crc32", slow)
    engine.forget()
    serving.add("stored", prompt(*STORED))
    serving.add("fresh", prompt(*FRESH))
    try:
        serving.step_until(lambda: len(serving.outputs.get("fresh", ())) == 8 and plane.fetches)
        serving.step_until(lambda: engine.worker.loads._results)
        for _ in range(20):
            serving.step()
        assert "stored" not in serving.outputs and len(plane.records) == 2
    finally:
        go.set()
    serving.finish()
    assert [serving.outputs["stored"], serving.outputs["fresh"]] == [expected["old", STORED], expected["old", FRESH]]
    assert engine.counted_since()["loaded_tokens"] == 512 and len(plane.records) == 2 + 2
