"""Engines as they start: connections, memory of other kinds, one host without a storage node, and no cache at all."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import spoil
from machine import PATIENT, free_port, wait_for
from stack import Process
from tiny_models import FAMILIES

from host_control.delivery import ExportedHostMemory
from shadowserve_tools.processes import start_data_plane, start_storage

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_with_a_slow_data_plane_the_first_prompt_is_stored_and_other_engines_are_named(
    make_engine: Callable[..., Any], data_plane: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptoms: the engine waited for its connection for two seconds only; two that shared nothing did not say so."""
    import host_control.vllm.connector as connector

    warnings: list[str] = []
    monkeypatch.setattr(connector._logger, "warning", lambda text, *values: warnings.append(text % values))
    data_plane.script.stall.add("Hello")
    data_plane.differences = ["another engine has other chunks"]

    def answer_late() -> None:
        data_plane.wait_for_call("Hello")
        time.sleep(3)
        data_plane.script.unstall.set()

    with ThreadPoolExecutor(1) as others:
        late = others.submit(answer_late)
        with closing(make_engine(data_plane.address)) as engine:
            engine.outputs([prompt(600)])
            late.result()
            engine.flush()
            assert len(data_plane.records) == 2, engine.counters()
            assert sum("another engine has other chunks" in text for text in warnings) == 1, warnings
            (hello,) = {
                each.engine.SerializeToString(): each for each in data_plane.hellos if each.engine.model
            }.values()
            assert (hello.engine.chunk_tokens, hello.engine.quantizer) == (256, "lossless")


def test_pages_without_devices_are_fetched_as_chunks(
    data_plane: Any, make_engine: Callable[..., Any], serve: Any
) -> None:
    with closing(make_engine(data_plane.address, extra={"pages": True})) as engine:
        serve(engine, 1000)
        engine.flush()
        engine.forget()
        serve(engine, 1000)
        counted = engine.counters()
        assert counted["loaded_tokens"] == 768 and counted["slower_paths/no_page_devices"] == 1
        assert "FetchPages" not in data_plane.calls


def test_the_tiers_keep_kv_across_a_restart_of_the_data_plane(
    make_engine: Callable[..., Any], prompt: Any, reference: Any, serve: Any, tmp_path: Path
) -> None:
    device = {"path": str(tmp_path / "tier"), "size": "64MiB"}
    tiers = json.dumps({"memory_budget_bytes": "64MiB", "devices": [device]})
    daemon = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--tiers", tiers, *PATIENT)
    prompts = [prompt(length) for length in (300, 700, 1000)]
    try:
        with closing(make_engine(daemon.address)) as engine:

            def found() -> bool:
                engine.forget()
                return bool(serve(engine, 1000) == 768)

            assert engine.outputs(prompts) == reference(prompts)
            engine.flush()
            for restarts in (False, True):
                if restarts:
                    daemon.stop()
                    daemon.restart()
                wait_for(found)
                engine.forget()
                assert engine.outputs(prompts) == reference(prompts)
    finally:
        daemon.stop()


def test_an_engine_stores_from_and_loads_into_exported_memory(
    tmp_path: Path, make_engine: Callable[..., Any], prompt: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(700)
    with (
        start_storage(tmp_path) as storage,
        start_data_plane(tmp_path, storage.address, *PATIENT, "--backend", "doca") as data_plane,
    ):
        with closing(make_engine(data_plane.address, extra={"delivery": "exported", "layer_order": True})) as engine:
            assert engine.outputs([tokens]) == reference([tokens])
            engine.flush()
            streams, client = [], engine.worker._client
            start = client._stream
            monkeypatch.setattr(client, "_stream", lambda *given, **how: streams.append(given) or start(*given, **how))
            for _ in range(2):
                engine.forget()
                spoil(engine)
                assert engine.served(tokens) == (reference([tokens])[0], 512)
            assert len(streams) == 2, "layer by layer: a stream reports the progress, because there is no shared memory"
            engine.forget()
            with engine.awaiting_lookups():
                assert engine.outputs([prompt(31), tokens]) == reference([prompt(31), tokens])
            assert len(streams) == 2, "beside a running request, chunk by chunk"
            for part in (engine.worker.loads.managers[0], engine.worker.stores.queue):  # fetches and stores
                assert isinstance(part._registration.current, ExportedHostMemory)
        assert " bytes of exported_memory, " in data_plane.log.read_text()


# ---- Without the cache an engine has the memory and the outputs of one without the plugin ----------------------------


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
    assert not side._requests and not side._serves and not side._clients
    assert data_plane.calls == [] and data_plane.records == {}
    counted = {name for name, count in engine.counters().items() if count}
    assert counted <= {"off_requests", "prompts", "prompt_tokens/off"}, "other counters have changed"


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
    with closing(make_engine(None, **options)) as engine:
        expected = served(engine, prompts)
        engine.assert_sensitive(prompts, [tokens for tokens, _ in expected["outputs"][0]])
    with logged() as lines, closing(make_engine(data_plane.address, **options)) as engine:
        assert served(engine, prompts) == expected
        (line,) = [line for line in lines if "off" in line]
        assert re.search(reason, line), line
        assert_no_activity(engine, data_plane)


@pytest.mark.parametrize("place", ["uncacheable", "model_identity"])
def test_a_failure_at_the_plugins_start_does_not_stop_the_engine(
    place: str, make_engine: Any, data_plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    import host_control.vllm.connector as connector
    import host_control.vllm.worker_side as worker_side

    def fail(*_: Any) -> Any:
        raise PermissionError("model.safetensors")

    monkeypatch.setattr(connector if place == "uncacheable" else worker_side, place, fail)
    with logged() as lines, closing(make_engine(data_plane.address)) as engine:
        assert any("off" in line and "PermissionError('model.safetensors')" in line for line in lines), lines
        serve(engine, 700)
        assert not {"Lookup", "Fetch", "Store"} & set(data_plane.calls)
    assert data_plane.registrations == 0
