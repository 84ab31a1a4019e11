"""``ShadowServeTier`` in vLLM's scheduler and tiering code, with a real data plane and a real storage node."""

import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dataplane"))

from dataplane_support import DaemonProcess, Server  # noqa: E402
from identity_support import model_folder, tensors  # noqa: E402
from machine import WAIT_MAX_S, free_port, wait_for  # noqa: E402

from host_control.config import HostConfig  # noqa: E402
from shadowserve.keys import storage_key  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

STEP = SimpleNamespace(new_req_ids=(), preempted_req_ids=())
"""vLLM's notification of a step without a new request."""
BUFFERS = {
    "decompression_buffer_bytes": "16MiB",
    "dequantization_buffer_bytes": "32MiB",
    "dma_source_buffer_bytes": "32MiB",
    "store_buffer_bytes": "16MiB",
}


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Server]:
    with Server("storage_kv", tmp_path) as server:
        yield server


@pytest.fixture
def plane(storage: Server, tmp_path: Path) -> Iterator[DaemonProcess]:
    with closing(DaemonProcess(storage, tmp_path, **BUFFERS)) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tier") / "model")


@pytest.fixture
def make(plane: DaemonProcess, folder: Path) -> Iterator[Callable[..., Any]]:
    from tiering import OffloadingEngine

    engines = []

    def start(**options: Any) -> Any:
        engine = OffloadingEngine(options.pop("model", folder), options.pop("address", plane.address), **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        if hasattr(engine, "worker"):
            engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + 31 * index) % 997 + 1 for index in range(length)]


def filled(make: Callable[..., Any], **options: Any) -> Any:
    """Return an engine that has computed and stored a prompt of four chunks."""
    engine = make(**options)
    engine.serve(prompt(300))
    engine.settle()
    return engine


def keys_of(engine: Any, tokens: list[int]) -> list[bytes]:
    """Return vLLM's keys of the chunks of a prompt in the first group."""
    from tiering import BLOCK, CHUNK
    from vllm.v1.kv_offload.base import make_offload_key

    hashes = engine.request(tokens).block_hashes
    step = CHUNK // BLOCK
    return [make_offload_key(each, 0) for each in hashes[step - 1 :: step]]


def context(name: str = "asked") -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def look(tier: Any, key: bytes, name: str = "asked") -> str:
    """Look a row up as vLLM does, once per step, until the answer is known."""

    def known() -> str:
        answer = tier.lookup(key, context(name))
        tier.on_schedule_end(STEP)
        return "" if answer.name == "RETRY" else str(answer.name)

    return str(wait_for(known))


def job(number: int, keys: list[bytes], rows: list[int], load: bool = True) -> Any:
    import numpy as np
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(number, keys, np.array(rows, np.int32), load, context())


def outcome(tier: Any) -> Any:
    """Return the result of the only running job."""
    (found,) = wait_for(lambda: list(tier.get_finished_jobs()))
    return found


def counts(engine: Any) -> dict[str, float]:
    """Return the tier's metrics since the engine's start."""
    if (last := engine.tier.get_stats()) is not None:
        engine.stats.aggregate(last)
    return {name.removeprefix("vllm:shadowserve_tier_"): n for name, n in engine.stats.reduce().items()}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "bfloat16": ({}, {}, 4),
    "fp8, as bytes": ({"dtype": "uint8"}, {"engine": {"kv_cache_dtype": "fp8"}}, 4),
    "windows, their last tokens": ({"windows": True}, {}, 5),
    "rows larger than a slice": ({"num_kv_heads": 32, "head_size": 160}, {"rows": 8}, 4),
}
"""Arguments of the groups and of the engine, and the number of stored rows."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_loads_what_the_first_stored(make: Callable[..., Any], storage: Server, kind: str) -> None:
    from tiering import specs

    shape, options, rows = KINDS[kind]
    first = make(groups=specs(**shape), **options)
    assert first.serve(prompt(300)) == 0
    first.settle()
    assert storage.ask("DBSIZE") == rows
    assert (first.tier.block_size_bytes > 2 << 20) == ("larger" in kind)
    stored = counts(first)
    assert stored["stored_bytes"] < 0.95 * stored["stored_raw_bytes"] or kind != "bfloat16", "its exponents compress"
    second = make(groups=specs(**shape), **options)
    assert second.tier.problem == ""
    assert second.serve(prompt(300)) == 256
    assert second.serve(prompt(300, seed=1)) == 0, "another prompt"
    assert counts(second)["fetched_bytes"] > 0.9 * stored["stored_bytes"] or "windows" in kind


@pytest.mark.parametrize("publishes", [True, False])
def test_stored_rows_are_published_as_events(make: Callable[..., Any], publishes: bool) -> None:
    tier = (engine := make(enable_kv_events=publishes, locality="REMOTE")).tier
    keys = keys_of(engine, prompt(300))
    tier.submit_store(job(1, keys, [0, 1, 2, 3], load=False))
    assert outcome(tier).success
    heard = [(event.keys, event.medium.name, event.locality.name, event.removed) for event in tier.take_events()]
    assert heard == ([(keys, "STORAGE", "REMOTE", False)] if publishes else [])


def test_rows_evicted_from_the_cpu_tier_are_loaded_again(make: Callable[..., Any]) -> None:
    """The CPU tier has room for two prompts; the third and fourth evict the first."""
    engine = make(rows=10)
    for seed in range(4):
        engine.serve(prompt(300, seed))
        engine.settle()  # vLLM does not evict rows that are being stored
    engine.forget()
    for seed in range(4):
        assert engine.serve(prompt(300, seed)) == 256
        engine.settle()


def test_rows_with_any_bytes_are_stored_exactly(make: Callable[..., Any]) -> None:
    """Other types and padding in a row may look like NaNs of the cache's dtype."""
    import numpy as np

    tier = (engine := make()).tier
    rows = np.asarray(tier._primary_kv_view).view(np.uint8)
    rows[0], rows[1] = 0xFF, np.random.default_rng(1).integers(0, 256, rows.shape[1], np.uint8)
    keys, kept = keys_of(engine, prompt(300)), rows[:2].copy()
    tier.submit_store(job(1, keys[:2], [0, 1], load=False))
    assert outcome(tier).success
    tier.submit_load(job(2, keys[:2], [8, 9]))
    assert outcome(tier).success
    assert (rows[8:10] == kept).all()


@pytest.mark.parametrize("what", ["weights", "option", "pages", "blocks of a row"])
def test_engines_with_different_inputs_share_nothing(
    make: Callable[..., Any], tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(make)
    other: dict[str, Any] = {"engine": {"hf_overrides": {"rope_theta": 5000.0}}} if what == "option" else {}
    if what == "pages":
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    if what == "weights":
        other = {"model": model_folder(tmp_path / "model", weights=tensors(bytes(4096)))}
    if what == "blocks of a row":
        import tiering

        monkeypatch.setattr(tiering, "CHUNK", 2 * tiering.BLOCK)
        other = {"rows": 128}
    assert make(**other).serve(prompt(300)) == 0
    monkeypatch.undo()
    assert make().serve(prompt(300)) == 256


def test_a_row_deleted_between_lookup_and_load_is_computed(make: Callable[..., Any], storage: Server) -> None:
    engine = filled(make)
    keys = keys_of(engine, prompt(300))
    assert [look(engine.tier, key) for key in keys] == ["HIT"] * 4
    storage.command(b"DEL", storage_key(engine.tier._key(keys[2])))
    engine.tier.submit_load(job(1, keys, [40, 41, 42, 43]))
    found = outcome(engine.tier)
    assert not found.success and found.successful_keys == tuple(keys[:2])
    assert [look(engine.tier, key) for key in keys] == ["HIT", "HIT", "MISS", "MISS"], (
        "otherwise vLLM would load forever"
    )
    assert counts(engine)["load_failures:('absent',)"] == 2
    engine.tier.on_request_finished(context())
    assert [look(engine.tier, key, "later") for key in keys] == ["HIT", "HIT", "MISS", "HIT"]


def test_an_engine_without_a_data_plane_computes(make: Callable[..., Any]) -> None:
    engine = make(address="127.0.0.1:1", connect_timeout_s=0.2, lookup_timeout_s=0.2, store_timeout_s=0.2)
    assert [engine.serve(prompt(300, seed)) for seed in range(3)] == [0, 0, 0]
    engine.settle()
    failed = counts(engine)
    assert any(name.startswith("store_failures") for name in failed)
    assert any(name.startswith("lookup_failures") for name in failed)


def test_a_lookup_of_a_frozen_storage_node_ends_by_its_deadline(make: Callable[..., Any], storage: Server) -> None:
    filled(make)
    engine = make(lookup_timeout_s=0.3, fetch_timeout_s=0.3, store_timeout_s=0.3)
    storage.freeze()
    assert engine.serve(prompt(300)) == 0
    engine.settle()
    storage.thaw()
    assert wait_for(lambda: engine.serve(prompt(300)) or (engine.forget(), 0)[1]) == 256, "found after the thaw"


def test_a_load_from_a_frozen_storage_node_ends_by_its_deadline(make: Callable[..., Any], storage: Server) -> None:
    engine = filled(make, fetch_timeout_s=0.5)
    keys = keys_of(engine, prompt(300))
    assert {look(engine.tier, key) for key in keys} == {"HIT"}
    storage.freeze()
    engine.tier.submit_load(job(1, keys, [40, 41, 42, 43]))
    found = outcome(engine.tier)
    assert (found.job_id, found.success, found.successful_keys) == (1, False, None)
    storage.thaw()


def test_stores_that_wait_too_long_fail(make: Callable[..., Any], storage: Server, plane: DaemonProcess) -> None:
    """vLLM keeps the rows of a job until it ends, so a slow store would fill its CPU tier."""
    engine = make(store_timeout_s=0.3)
    keys = keys_of(engine, prompt(300))
    storage.freeze()
    for number in range(6):
        engine.tier.submit_store(job(number, keys, [0, 1, 2, 3], load=False))
    ended: list[Any] = []
    wait_for(lambda: (ended.extend(engine.tier.get_finished_jobs()), len(ended) == 6)[1])
    assert [each.job_id for each in ended] == list(range(6)) and not any(each.success for each in ended)
    storage.thaw()
    client = HostConfig(data_plane=plane.address).client(0)
    # All have one deadline: the second one may have had a millisecond left.
    assert sum(client.statistics().store_outcomes.values()) <= 2, "waiting jobs were tried, too"
    client.close()


def test_a_restarted_data_plane_is_used_again(make: Callable[..., Any], storage: Server, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    daemon = DaemonProcess(storage, tmp_path, **BUFFERS, listen=address)
    engine = filled(make, address=address)
    daemon.close()
    with closing(DaemonProcess(storage, tmp_path, **BUFFERS, listen=address)) as daemon:
        engine.forget()
        assert wait_for(lambda: engine.serve(prompt(300)) or (engine.forget(), 0)[1]) == 256
        engine.serve(prompt(300, seed=5))
        engine.settle()
        engine.forget()
        assert engine.serve(prompt(300, seed=5)) in (0, 256)


@pytest.mark.parametrize("how", ["a reset", "a call to the workers"])
def test_rows_stored_before_a_sign_of_new_weights_are_not_found(make: Callable[..., Any], how: str) -> None:
    """Symptom: after a change of weights, the engine loaded old KV and stored new KV under old keys."""
    from host_control.vllm import epochs

    engine = filled(make)
    engine.forget()
    assert engine.serve(prompt(300)) == 256
    if how == "a reset":
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    else:
        epochs._counts["collective_rpc"] += 1
        engine.forget()
    engine.worker.gpu[:] = 0
    assert engine.serve(prompt(300)) == 0
    assert engine.serve(prompt(300, seed=9)) == 0
    engine.settle()
    engine.forget()
    assert engine.serve(prompt(300)) == 256, "its own rows since then"
    other = make()
    assert other.serve(prompt(300)) == 256, "rows of engines without such a sign"
    assert other.serve(prompt(300, seed=9)) == 0


def test_draining_ends_waiting_and_running_jobs(make: Callable[..., Any], storage: Server) -> None:
    engine = filled(make, store_timeout_s=1.0, fetch_timeout_s=WAIT_MAX_S)
    keys, others = keys_of(engine, prompt(300)), keys_of(engine, prompt(300, seed=1))
    storage.freeze()
    for number in range(4):
        engine.tier.submit_store(job(number, others, [0, 1, 2, 3], load=False))
    engine.tier.submit_load(job(4, keys, [40, 41, 42, 43]))
    engine.tier.drain_jobs()
    ended = {each.job_id: each.success for each in engine.tier.get_finished_jobs()}
    assert ended == dict.fromkeys(range(5), False)
    storage.thaw()


def test_a_shutdown_releases_memory_and_threads(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    engine = make()
    engine.serve(prompt(300))
    engine.close()
    assert "Failed to close" not in caplog.text, "a view of vLLM's memory is left"
    assert not list(Path("/dev/shm").glob(f"shadowserve-05e1f00d{os.getpid():08x}*"))
    own = [thread for thread in threading.enumerate() if thread.name.startswith("shadowserve")]
    wait_for(lambda: not [thread for thread in own if thread.is_alive() and thread not in before])


def test_a_shutdown_ends_within_its_time_limit(
    make: Callable[..., Any], storage: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a shutdown took a minute."""
    engine = filled(make, close_timeout_s=0.3, store_timeout_s=WAIT_MAX_S, fetch_timeout_s=WAIT_MAX_S)
    keys = keys_of(engine, prompt(300))
    storage.freeze()
    engine.tier.submit_store(job(1, keys_of(engine, prompt(300, seed=1)), [0, 1, 2, 3], load=False))
    engine.tier.submit_load(job(2, keys, [40, 41, 42, 43]))
    wait_for(storage.asked)
    monkeypatch.setattr(engine.tier._client, "_connect_timeout", 0.3)  # the time limit for releasing memory
    began = time.monotonic()
    engine.tier.shutdown()
    assert time.monotonic() - began < WAIT_MAX_S / 2 and storage.asked(), "the storage node answered"
    storage.thaw()


@pytest.mark.parametrize(("canonical", "found"), [(False, "MISS"), (True, "HIT")])
def test_engines_with_other_numbers_of_ranks_only_share_canonical_rows(
    make: Callable[..., Any], canonical: bool, found: str
) -> None:
    """vLLM treats rows of one group as independent of ranks. But ranks write their layers one after the other, so only
    rows in canonical order are.
    """
    from tiering import specs

    offload = {"canonical_layout": canonical}
    one = filled(make, groups=specs(num_kv_heads=2), offload=offload)
    two = make(groups=specs(num_kv_heads=1), engine={"tensor_parallel_size": 2}, offload=offload)
    assert two.tier.block_size_bytes == one.tier.block_size_bytes and two.tier.problem == ""
    assert look(two.tier, keys_of(two, prompt(300))[0]) == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": {"enable_lora": True}}, "adapters"),
        ({"engine": {"prefix_caching_hash_algo": "xxhash"}}, "cryptographic"),
        ({"engine": {"load_format": "ipc_cache"}}, "another process's memory"),
        ({"engine": {"enable_lora": True}, "trust_names": True}, ""),
    ],
)
def test_the_tier_is_off_if_hashes_do_not_identify_kv(
    make: Callable[..., Any], storage: Server, options: dict[str, Any], said: str
) -> None:
    engine = make(**options)
    assert said in engine.tier.problem and bool(said) == bool(engine.tier.problem)
    assert engine.serve(prompt(300)) == 0
    engine.settle()
    assert (storage.ask("DBSIZE") == 0) == bool(said)


def test_a_tier_created_outside_a_connector_is_off(make: Callable[..., Any], plane: DaemonProcess) -> None:
    from tiering import TIER

    from host_control.vllm.tier import ShadowServeTier

    engine = make()
    settings = {name: value for name, value in TIER.items() if name not in ("type", "module_path")}
    tier = ShadowServeTier(engine.tier._offloading_spec, engine.tier._primary_kv_view, "tier", **settings)
    assert "not created by one of" in tier.problem
    tier.submit_store(job(1, [bytes(36)], [0], load=False))
    tier.submit_load(job(2, [bytes(36)], [0]))
    assert [each.success for each in tier.get_finished_jobs()] == [False, False]
    assert tier.lookup(bytes(36), context()).name == "MISS"
    tier.drain_jobs()
    tier.shutdown()


@pytest.mark.parametrize(("role", "stored", "loaded"), [("kv_producer", 4, 0), ("kv_consumer", 0, 256)])
def test_a_role_that_only_stores_or_only_loads(
    make: Callable[..., Any], storage: Server, role: str, stored: int, loaded: int
) -> None:
    engine = filled(make, transfer={"kv_role": role})
    assert storage.ask("DBSIZE") == stored
    filled(make)
    engine.forget()
    assert engine.serve(prompt(300)) == loaded


def test_metrics_are_exported_with_vllm_s(make: Callable[..., Any]) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    engine = make()
    config = engine.scheduler.vllm_config
    metrics = engine.connector.build_prom_metrics(
        config, {Counter: Counter, Gauge: Gauge, Histogram: Histogram}, ["engine"], {0: ["0"]}
    )
    engine.serve(prompt(300))
    engine.settle()
    engine.tier._failed("load", 2, "absent", "")
    stats = engine.tier.get_stats()
    metrics.observe(stats.data, 0)
    shown = {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    assert {"vllm:shadowserve_tier_load_failures_total"} <= shown


def metric(port: int, name: str) -> float:
    """Return the value of a data plane's metric; ``name`` includes labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_MAX_S) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_the_tier_reports_steps_and_its_transfers_keep_the_interference_budget(
    make: Callable[..., Any], storage: Server, tmp_path: Path
) -> None:
    """Symptom: the tier ignored interference_budget."""
    assert make(interference_budget=0).tier._reports is None
    port = free_port()
    (tmp_path / "other").mkdir()
    with closing(DaemonProcess(storage, tmp_path / "other", **BUFFERS, metrics_port=port)) as daemon:
        engine = make(address=daemon.address)
        engine.serve(prompt(300))
        engine.forget()
        assert engine.serve(prompt(300)) == 256
        assert metric(port, 'shadowserve_moved_bytes_total{mover="tier_store"}') > 0
        assert metric(port, 'shadowserve_moved_bytes_total{mover="tier_load"}') > 0
        engine.tier.on_new_request(context("decodes"))

        def decodes() -> bool:
            engine.tier.on_schedule_end(STEP)
            return metric(port, "shadowserve_decoding_engines") == 1

        wait_for(decodes)
        assert 16 << 20 <= metric(port, "shadowserve_interference_rate_bytes_per_s") < 1e9
        wait_for(lambda: metric(port, "shadowserve_decoding_engines") == 0)
