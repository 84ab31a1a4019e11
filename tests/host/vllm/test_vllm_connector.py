"""``ShadowServeConnector`` and its two halves: every hook that vLLM calls, with one or both halves off."""

import functools
import json
import logging
import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from machine import WAIT_MAX_S, free_port
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from scheduler_support import Request, full, window
from scripted import ScriptedDataPlane

from shadowserve.errors import ConfigurationError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def groups() -> list[Any]:
    """Return the KV cache groups of the engine, here one group."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return [KVCacheGroupSpec(["a"], full())]


@pytest.fixture
def make(
    plane: ScriptedDataPlane, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Any]]:
    """Return a function that creates the connector of a role, off for a reason, or on without a reason."""
    import vllm.distributed.parallel_state as parallel_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    import host_control.vllm.connector as connector

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    transfer = SimpleNamespace(
        kv_connector_extra_config={"data_plane": plane.address},
        is_kv_consumer=True,
        is_kv_producer=True,
        kv_load_failure_policy="recompute",
    )
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=1)
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, policy="fcfs"),
        lora_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(is_hybrid=False, is_attention_free=False),
        max_concurrent_batches=1,
        kv_events_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    made = []

    def make(role: str, problem: str, steps: int = 1, **extra: Any) -> Any:
        config.max_concurrent_batches = steps
        transfer.kv_connector_extra_config = {"data_plane": plane.address, **extra}
        monkeypatch.setattr(connector, "uncacheable", lambda *_: problem or None)
        one = connector.ShadowServeConnector(config, KVConnectorRole[role], SimpleNamespace(kv_cache_groups=groups))
        made.append(one)
        return one

    yield make
    for one in made:
        one.shutdown()


@pytest.mark.parametrize("asked", ["layer_order", "pages"])
def test_an_engine_with_several_groups_refuses_settings_that_need_one(
    make: Callable[..., Any], groups: list[Any], asked: str
) -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    groups.append(KVCacheGroupSpec(["b"], window(64)))
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(ConfigurationError, match=f"{asked}: true needs one KV cache group .* has full, window;"):
            make(role, "", **{asked: True})
        make(role, "the plugin is off", **{asked: True})


def test_vllm_makes_piecewise_graphs_only_where_layers_are_loaded_one_by_one() -> None:
    from host_control.vllm.connector import ShadowServeConnector

    asks = ShadowServeConnector.requires_piecewise_for_cudagraph
    assert asks({"layer_order": True})
    assert not asks({"layer_order": True, "fetch": False}) and not asks({}) and not asks({"layer_order": "auto"})


@pytest.mark.parametrize("steps", [1, 2])
def test_layer_order_auto_says_once_why_it_is_off(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    with caplog.at_level(logging.INFO, "vllm.shadowserve"):
        sides = [make(role, "", steps) for role in ("SCHEDULER", "WORKER")]
    said = [record for record in caplog.records if "layer_order: auto is off" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"] * (steps - 1)
    found = {sides[0]._scheduler._engine.config.layer_order, sides[1]._worker._engine.config.layer_order}
    assert found == {"auto" if steps == 1 else False}


def assert_every_hook_does_nothing(scheduler: Any, worker: Any) -> None:
    """Call them in vLLM's order, with blocks of three groups, and outputs that must not be read."""
    from host_control.vllm.metadata import ShadowServeMetadata

    request, nothing = Request("r", list(range(600))), ShadowServeMetadata()
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([0, 1], [2], [3])), 0)
    metadata = scheduler.build_connector_meta(None)
    assert metadata == nothing
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("a")
    worker.save_kv_layer("a", None, None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    assert not results.finished_sending and not results.finished_recving and not results.failed_recving
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None is worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None))
    counted = scheduler.get_kv_connector_stats().data
    assert counted == {"off_requests": 1, "prompts": 1, "prompt_tokens/off": 600}
    assert scheduler.get_kv_connector_stats() is None is scheduler.get_finished_count()
    assert scheduler.requires_kv_delivery is False is scheduler.has_pending_push_work()
    assert scheduler.request_finished_all_groups(request, ([0, 1], [2], [3])) == (False, None)
    assert scheduler.reset_cache() is True


@pytest.mark.parametrize("off", ["SCHEDULER", "WORKER", "both"])
def test_a_connector_of_which_one_half_is_off_does_nothing(
    off: str, make: Callable[[str, str], Any], plane: ScriptedDataPlane, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make("WORKER", "the worker says so" if off != "SCHEDULER" else "")
    scheduler = make("SCHEDULER", "the scheduler says so" if off != "WORKER" else "")
    shake = worker.get_handshake_metadata()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): shake, (0, 1): shake})
    said = [record.getMessage() for record in caplog.records if "off" in record.getMessage()]
    reason = "the worker says so" if off == "WORKER" else "the scheduler says so"
    assert said == [f"ShadowServe is off, every prompt is computed: {reason}"], "once, also if both halves detect it"
    assert_every_hook_does_nothing(scheduler, worker)
    assert plane.calls == []


def test_a_later_stage_that_is_off_turns_the_engine_off(make: Callable[[str, str], Any]) -> None:
    from host_control.vllm.metadata import WorkerHandshake

    scheduler = make("SCHEDULER", "")
    on, off = WorkerHandshake(b"m" * 32, ((0, 0, b"n" * 32),), ""), WorkerHandshake(b"", (), "this stage")
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): on, (0, 1): on, (1, 0): off, (1, 1): on})
    assert scheduler._scheduler.problem == "this stage"
    assert scheduler.get_num_new_matched_tokens(Request("r", list(range(600))), 0) == (0, False)


def test_handshakes_that_are_another_connectors_turn_the_engine_off(make: Callable[[str, str], Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    from host_control.vllm.metadata import WorkerHandshake

    alone = WorkerHandshake(b"m" * 32, ((0, 0, b"n" * 32),), "")
    for others in ({(0, 0): KVConnectorHandshakeMetadata()}, {(0, 0): alone}):
        scheduler = make("SCHEDULER", "")
        scheduler.set_xfer_handshake_metadata_pp_aware(others)
        assert "handshake is missing" in scheduler._scheduler.problem
        assert scheduler.get_num_new_matched_tokens(Request("r", list(range(600))), 0) == (0, False)


def test_kv_caches_that_cannot_be_registered_leave_nothing_running(
    make: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make("WORKER", "")

    def fail(caches: Any) -> None:
        worker._worker._client = worker._worker._engine.config.client(0)
        raise PermissionError("model.safetensors")

    monkeypatch.setattr(worker._worker, "register", fail)
    worker.register_kv_caches({})
    assert worker._worker._client is None
    assert "PermissionError('model.safetensors')" in worker.get_handshake_metadata().problem


def test_the_connector_knows_several_groups() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    from host_control.vllm.connector import ShadowServeConnector

    assert supports_hma(ShadowServeConnector)


def test_registering_twice_is_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from host_control.vllm import register
    from host_control.vllm.connector import ShadowServeConnector

    register()
    register()
    transfer = SimpleNamespace(kv_connector="ShadowServeConnector", kv_connector_module_path=None)
    assert KVConnectorFactory.get_connector_class(transfer) is ShadowServeConnector


@pytest.mark.parametrize(("policy", "warns"), [("fail", True), ("recompute", False)])
def test_policy_that_fails_requests_is_named_at_the_start(policy: str, warns: bool, monkeypatch: Any) -> None:
    from host_control.vllm import connector

    lines: list[str] = []
    monkeypatch.setattr(connector._logger, "warning", lambda text, *arguments: lines.append(text % arguments))
    transfer = SimpleNamespace(is_kv_consumer=True, kv_load_failure_policy=policy)
    connector.ShadowServeConnector._warn(transfer, "")
    assert bool(lines) == warns
    assert all("kv_load_failure_policy" in line and "recompute" in line for line in lines)


def test_reports_of_ranks_merge_to_the_fewest_chunks_and_the_number_of_ranks() -> None:
    from host_control.vllm.metadata import WorkerReport

    merged = WorkerReport({"a": 3, "b": 1}, saved={"a": 1}).aggregate(WorkerReport({"a": 2, "c": 4}, saved={"a": 1}))
    assert (merged.loaded, merged.saved) == ({"a": 2, "b": 1, "c": 4}, {"a": 2})


def test_statistics_of_steps_and_ranks_add_up() -> None:
    from host_control.vllm.metrics import Counts, ShadowServeStats

    counts = Counts()
    assert counts.take() is None
    counts.add("stored_chunks", 2)
    counts.add("dropped_stores", reason="full")
    taken = counts.take()
    assert not taken.is_empty()
    total = ShadowServeStats(data={"stored_chunks": 1}).aggregate(taken)
    assert total.reduce() == {"dropped_stores/full": 1, "stored_chunks": 3}
    assert counts.take() is None


def test_each_failure_reason_is_logged_once_in_a_while(caplog: Any) -> None:
    from host_control.vllm.metrics import FailureLog

    log = FailureLog(logging.getLogger("test"))
    for _ in range(5):
        log.warn("loads", "corrupt", "slice 3")
        log.warn("loads", "deadline", "")
    assert [record.getMessage() for record in caplog.records] == [
        "ShadowServe: loads: corrupt: slice 3",
        "ShadowServe: loads: deadline",
    ]


def test_an_engine_serves_its_page_on_the_configured_port(monkeypatch: pytest.MonkeyPatch) -> None:
    from host_control.vllm import metrics

    registry, port = CollectorRegistry(), free_port()
    kinds: dict[Any, Any] = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    extra = {"metrics_port": port, "interference_budget": 0.05}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    exported = metrics.ShadowServePromMetrics(config, kinds, ["engine"], {0: ["0"]})
    exported.observe({"prompts": 2, "prompt_tokens/loaded": 768, "prompt_tokens/short": 256})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/summary.json", timeout=WAIT_MAX_S) as answer:
        [program] = json.load(answer)["programs"]
    assert "2 prompts with 1,024 tokens. 768 tokens (75.0 %) were loaded" in program["summary"]["paragraph"]
    assert "budget 5 %" in program["summary"]["paragraph"]
    taken = metrics._page(port)
    assert taken is None, "a second server process of the engine goes on without the page"
    exported._page.close()
