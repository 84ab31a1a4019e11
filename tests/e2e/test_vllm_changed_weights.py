"""Weights that are changed in a running engine; at most its prefix cache is emptied afterwards.

A float32 engine with a checkpoint in bfloat16, on a CPU: norms and embeddings are as they were loaded, linear layers
are packed. The changes do not affect the lowest bytes of values.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import greedy
from machine import NEVER_S

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

STORED = (800, 3)
"""Arguments of a prompt whose KV was stored before the change."""
FRESH = (700, 4)
"""Arguments of a prompt that is computed after the change."""


def flip_signs(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[::2].neg_()


def write_values_of_bfloat16(model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.weight.data[number::3] = 2.5


def change_one_element(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight.data[5] = 64.0


CHANGES = [flip_signs, write_values_of_bfloat16, change_one_element]


@pytest.fixture(scope="module")
def random_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights that are so large that each change is visible."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in sorted(tensors.items()):
        values = torch.randn(tensor.shape, generator=generator) * 0.15 if tensor.dim() == 2 else torch.ones_like(tensor)
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(random_model: Path, make_engine: Any, prompt: Any) -> dict[str, list[list[int]]]:
    """Return the outputs of an engine without the plugin, with the original weights and after each change."""
    engine = make_engine(None, model=random_model, enable_prefix_caching=False)
    prompts = [prompt(*STORED), prompt(*FRESH)]
    try:
        known = {"": engine.outputs(prompts)}
        for change in CHANGES:
            kept: list[Any] = engine.llm.apply_model(norms)[0]
            engine.llm.apply_model(change)
            known[change.__name__] = engine.outputs(prompts)
            engine.llm.apply_model(lambda model, kept=kept: restore(model, kept))
    finally:
        engine.close()
    for name, outputs in known.items():
        for one, unchanged in zip(outputs, known[""], strict=True):
            assert not name or one != unchanged, f"{name} changes no output"
    return known


def norms(model: Any) -> list[Any]:
    return [layer.input_layernorm.weight.data.clone() for layer in model.model.layers]


def restore(model: Any, kept: list[Any]) -> None:
    for layer, weight in zip(model.model.layers, kept, strict=True):
        layer.input_layernorm.weight.data.copy_(weight)


@pytest.fixture
def engine(plane: Any, random_model: Path, expected: Any, make_engine: Callable[..., Any]) -> Iterator[Any]:
    plane.records.clear()
    engine = make_engine(plane.address, model=random_model)
    yield engine
    if hasattr(engine, "llm"):  # the test has not closed it
        engine.close()


@pytest.mark.parametrize("told", ["prefix cache emptied", "nothing"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_engine_loads_kv_of_other_weights(
    change: Callable[[Any], None],
    told: str,
    engine: Any,
    plane: Any,
    random_model: Path,
    expected: Any,
    make_engine: Any,
    prompt: Any,
) -> None:
    prompts = [prompt(*STORED), prompt(*FRESH)]
    assert engine.outputs(prompts[:1]) == expected[""][:1]
    engine.flush()
    assert len(plane.records) == 3
    if told == "nothing":  # then the engine's own prefix cache has no effect
        engine.forget()
    engine.llm.apply_model(change)
    if told != "nothing":
        engine.forget()
    assert engine.outputs(prompts) == expected[change.__name__]
    engine.flush()
    engine.close()
    other = make_engine(plane.address, model=random_model)
    try:
        assert other.outputs(prompts) == expected[""]
        assert other.counters()["loaded_tokens"] == 768
    finally:
        other.close()


def test_calls_that_change_nothing_keep_the_cache(engine: Any, plane: Any, expected: Any, prompt: Any) -> None:
    prompts = [prompt(*STORED)]
    for _ in range(3):
        assert engine.outputs(prompts) == expected[""][:1]
        engine.flush()
        engine.llm.apply_model(lambda model: None)
        engine.forget()
    assert engine.counters()["loaded_tokens"] == 2 * 768
    assert len(plane.records) == 3


def test_loads_and_stores_wait_while_weights_are_in_doubt(
    engine: Any, plane: Any, expected: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_control.vllm import loaded_weights

    assert engine.outputs([prompt(*STORED)]) == expected[""][:1]
    engine.flush()
    engine.forget()
    go, crc32 = threading.Event(), loaded_weights.native.crc32

    def slow(memory: Any, crc: int) -> int:
        assert go.wait(NEVER_S)
        return crc32(memory, crc)

    monkeypatch.setattr(loaded_weights.native, "crc32", slow)
    core, outputs = engine.llm.llm_engine, dict[str, list[int]]()
    sampling = greedy(8)
    for name, arguments in (("stored", STORED), ("fresh", FRESH)):
        core.add_request(name, {"prompt_token_ids": prompt(*arguments)}, sampling)

    def step_until(condition: Callable[[], Any]) -> None:
        ends = time.monotonic() + NEVER_S
        while not condition():
            assert time.monotonic() < ends
            for output in core.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)

    fetches = len(plane.fetches)
    try:
        step_until(lambda: len(outputs.get("fresh", ())) == 8 and len(plane.fetches) > fetches)
        step_until(lambda: engine.worker._loads._results)
        for _ in range(20):
            core.step()
        assert "stored" not in outputs and len(plane.records) == 3
    finally:
        go.set()
    step_until(lambda: not core.has_unfinished_requests())
    engine.flush()
    assert [outputs["stored"], outputs["fresh"]] == expected[""]
    assert engine.counters()["loaded_tokens"] == 768 and len(plane.records) == 3 + 2
