"""Engines that run without the cache have the same memory and outputs as without the plugin.

Models for which vLLM cannot continue after a prefix, and failures during the plugin's start.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tiny_models import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the plugin's lines in vLLM's log."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.shadowserve"), Lines()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def served(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Return an engine's outputs and memory."""
    rounds = []
    for forget in (False, False, True):  # without a cache, with vLLM's own prefix cache, after its reset
        if forget:
            engine.forget()
        outputs = engine.generate(prompts)
        rounds.append([(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs])
    caches = engine.scheduler.kv_cache_config
    return {
        "outputs": rounds,
        "free blocks": engine.free_blocks(),
        "blocks": (caches.num_blocks, engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks),
        "groups": [
            (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, group.layer_names)
            for group in caches.kv_cache_groups
        ],
    }


def assert_no_activity(engine: Any, data_plane: Any) -> None:
    side = engine.connector._scheduler
    assert not side._requests and side._lookup is None and not side._clients
    assert data_plane.calls == [] and data_plane.records == {}
    counted = {name for name, count in engine.counters().items() if count}
    assert counted <= {"off_requests"}, "other counters have changed"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("deepseek", {}, "neither prefix caching nor chunked prefill"),
        ("gemma3", {"enable_prefix_caching": False}, "need vLLM's prefix caching, and it is off"),
    ],
    ids=["deepseek", "gemma3"],
)
def test_a_model_that_cannot_be_cached_runs_as_without_the_plugin(
    name: str, options: dict[str, Any], reason: str, family: Any, make_engine: Any, data_plane: Any, prompt: Any
) -> None:
    prompts = [prompt(600), prompt(300, 1)]
    options = {"model": family(name), **FAMILIES[name].engine, **options}
    engine = make_engine(None, **options)
    try:
        expected = served(engine, prompts)
        engine.assert_sensitive(prompts, [tokens for tokens, _ in expected["outputs"][0]])
    finally:
        engine.close()
    with logged() as lines:
        engine = make_engine(data_plane.address, **options)
    try:
        assert served(engine, prompts) == expected
        (line,) = [line for line in lines if "off" in line]
        assert re.search(reason, line), line
        assert_no_activity(engine, data_plane)
    finally:
        engine.close()


@pytest.mark.parametrize("off", ["worker", "scheduler"])
def test_the_plugin_is_off_if_only_scheduler_or_worker_finds_a_problem(
    off: str, make_engine: Any, data_plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can differ: for a group with different layers, the scheduler has only one layer."""
    import host_control.vllm.connector as connector

    halves = iter(["worker", "scheduler"])  # vLLM creates the worker's connector first
    monkeypatch.setattr(connector, "uncacheable", lambda *_: "only one half says so" if next(halves) == off else None)
    prompts = [prompt(700), prompt(300)]
    expected = reference(prompts)
    with logged() as lines:
        engine = make_engine(data_plane.address)
    try:
        assert [line for line in lines if "only one half says so" in line and "off" in line] != [], lines
        for _ in range(2):
            assert engine.outputs(prompts) == expected
            engine.forget()
        assert engine.connector.reset_cache() is True
        assert data_plane.records == {} and not {"Lookup", "Fetch", "Store"} & set(data_plane.calls)
        assert {name for name, count in engine.counters().items() if count} <= {"off_requests"}
    finally:
        engine.close()


@pytest.mark.parametrize("place", ["uncacheable", "model_identity"])
def test_a_failure_at_the_plugins_start_does_not_stop_the_engine(
    place: str, make_engine: Any, data_plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    import host_control.vllm.connector as connector
    import host_control.vllm.worker_side as worker_side

    def fail(*_: Any) -> Any:
        raise PermissionError("model.safetensors")

    monkeypatch.setattr(connector if place == "uncacheable" else worker_side, place, fail)
    with logged() as lines:
        engine = make_engine(data_plane.address)
    try:
        assert any("off" in line and "PermissionError('model.safetensors')" in line for line in lines), lines
        serve(engine, 700)
        assert not {"Lookup", "Fetch", "Store"} & set(data_plane.calls)
    finally:
        engine.close()
    assert data_plane.registrations == 0
