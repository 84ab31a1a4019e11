"""The storage backend of SGLang's HiCache, called as SGLang calls it, over a scripted data plane and a small host pool.

tests/sglang/ runs it in SGLang's engine.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import ScriptedDataPlane
from sglang_pool import (
    HEADS,
    IDENTITY,
    PAGE,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    after,
    chain,
    indices,
    ranks,
)

from host_control.sglang import ShadowServeStorage
from host_control.sglang.engine import Engine
from host_control.sglang.identity import engine_identity
from host_control.vllm.identity.content import ContentHashes
from host_control.vllm.support import UncacheableError
from shadowserve.errors import ConfigurationError

Start = Callable[..., ShadowServeStorage]


@pytest.fixture
def start(plane: ScriptedDataPlane) -> Iterator[Start]:
    """Return a function that starts a backend on a pool, as SGLang does."""
    started = []

    def begin(pool: Any, engine: Engine | None = None, extra: Any = None, **changes: Any) -> ShadowServeStorage:
        options = {"data_plane": plane.address, "lookup_timeout_s": 5.0} | (extra or {})
        storage = ShadowServeStorage(
            ranks(**changes | {"extra_config": options}), {}, engine=engine or Engine(IDENTITY, HEADS)
        )
        started.append(storage)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, "kv")
        storage.on_host_pools_registered()
        return storage

    yield begin
    for storage in started:
        storage.close()


def same(pool: Any, pages: Sequence[int], other: Any, others: Sequence[int]) -> bool:
    return all(torch.equal(pool.page(a), other.page(b)) for a, b in zip(pages, others, strict=True))


@pytest.mark.parametrize("kind", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first"])
def test_pages_come_back_and_only_after_the_same_prefix(start: Start, plane: Any, kind: type, layout: str) -> None:
    pool, other = kind(layout), kind("page_first", seed=1)
    keys, stored, fetched = chain(41), list(range(50, 91)), list(range(100, 59, -1))
    storage = start(pool)
    assert storage.batch_exists(keys) == storage.batch_exists(["no hash"]) == 0
    assert storage.counts == {"exists absent": 41, "exists complete": 0, "exists internal": 1}
    assert all(storage.batch_set_v1(keys, indices(pool, stored)))
    assert [len(request.keys) for request in plane.stores] == [2, 2, 1]  # 41 pages: 16, 16, 4, 4, 1

    reader = start(other)
    assert reader.batch_exists(chain(41, "another prefix")) == 0
    assert not same(pool, stored, other, fetched)
    assert reader.batch_exists([*keys, *chain(5, "other tail")]) == 41
    assert all(reader.batch_get_v1(keys, indices(other, fetched)))
    assert same(pool, stored, other, fetched)
    assert plane.calls.count("Fetch") == 1
    assert all(storage.batch_set_v1(keys, indices(pool, stored))) and len(plane.stores) == 3  # stored before


def test_pages_of_large_chunks_come_back(start: Start) -> None:
    """Two threads copy them."""
    pool, other = (MHATokenToKVPoolHost("layer_first", seed, head_size=512) for seed in (0, 1))
    keys, stored, fetched = chain(33), range(33), list(range(100, 67, -1))
    assert all(start(pool).batch_set_v1(keys, indices(pool, stored)))
    assert all(start(other).batch_get_v1(keys, indices(other, fetched)))
    assert same(pool, stored, other, fetched)


@pytest.mark.parametrize("page", [1, 16, 48, 64])
def test_turns_of_any_length_are_found_from_any_page_on(start: Start, page: int) -> None:
    pool, other = MHATokenToKVPoolHost("page_first", 0, page), MHATokenToKVPoolHost("page_first", 1, page)
    count = min(pool.kv_buffer.shape[1] // page, 150)
    keys, storage = chain(count, page=page), start(pool)
    ends = sorted({0, 1, count // 3, count // 3 + 1, count - 3, count})
    for begin, end in zip(ends, ends[1:], strict=False):
        assert all(storage.batch_set_v1(keys[begin:end], indices(pool, range(begin, end)), after(keys[:begin])))

    reader, begin = start(other), min(7, count // 2)
    assert reader.batch_exists(keys[begin:], after(keys[:begin])) == count - begin
    middle = (begin + count) // 2
    for first, last in ((begin, middle), (middle, count)):  # SGLang's calls have 128 pages, wherever they begin
        assert all(reader.batch_get_v1(keys[first:last], indices(other, range(first, last)), after(keys[:first])))
    assert same(pool, range(begin, count), other, range(begin, count))


def test_fetches_that_do_not_tell_where_their_pages_are_follow_from_the_lookup(start: Start) -> None:
    pool, other = MHATokenToKVPoolHost("page_first", 0, 1), MHATokenToKVPoolHost("page_first", 1, 1)
    keys, others = chain(150, page=1), chain(150, "another prompt", page=1)
    start(pool).batch_set_v1(keys, indices(pool, range(150)))
    reader = start(other)  # as with pipeline parallelism
    assert reader.batch_exists(keys) == 150
    assert all(reader.batch_get_v1(keys[:128], indices(other, range(128))))
    assert all(reader.batch_get_v1(keys[128:], indices(other, range(128, 150))))
    assert same(pool, range(150), other, range(150))
    assert reader.batch_exists(others) == 0 and not any(reader.batch_get_v1(others[128:], indices(other, range(22))))


def test_a_record_is_found_only_by_an_engine_with_the_same_identity_page_size_and_rank(start: Start) -> None:
    pool, keys = MHATokenToKVPoolHost(), chain(16)
    start(pool).batch_set_v1(keys, indices(pool, range(16)))
    assert start(pool).batch_exists(keys) == 16
    assert start(pool, Engine(replace(IDENTITY, weights="others"), HEADS)).batch_exists(keys) == 0
    assert start(pool, Engine(IDENTITY, 2 * HEADS), tp_rank=0, tp_size=2).batch_exists(keys) == 16  # the same heads
    assert start(pool, Engine(IDENTITY, 2 * HEADS), tp_rank=1, tp_size=2).batch_exists(keys) == 0
    assert start(pool, Engine(IDENTITY, 1), tp_rank=0, tp_size=2).batch_exists(keys) == 0
    larger = MHATokenToKVPoolHost(page_size=32)
    assert start(larger).batch_exists(keys) == 0


def test_a_wrong_position_costs_a_hit_and_never_gives_other_pages(start: Start) -> None:
    pool, other, keys = MHATokenToKVPoolHost(), MHATokenToKVPoolHost(seed=1), chain(48)
    branch = [*keys[:20], *chain(12, "another branch")]
    storage = start(pool)
    storage.batch_set_v1(keys[:40], indices(pool, range(40)))
    storage.batch_set_v1(keys[40:], indices(pool, range(40, 48)))  # SGLang does not say what comes before
    reader = start(other)
    assert reader.batch_exists(keys) == 40
    assert reader.batch_exists(keys[5:]) < 43
    for hashes, begin in ((keys, 0), (keys, 37), (keys[5:], 0), (branch, 0), (branch, 17)):
        first = 5 if hashes[0] != keys[0] else 0
        got = reader.batch_get_v1(hashes[begin:], indices(other, range(len(hashes) - begin)), after(hashes[:begin]))
        pages = [page for page, moved in enumerate(got) if moved]
        assert same(pool, [first + begin + page for page in pages], other, pages)
        assert hashes is not branch or max([-1, *pages]) + begin < 20
    assert all(reader.batch_get_v1(keys[:20], indices(other, range(20))))  # a part of a block


def test_a_lookup_without_pages_of_its_prefix_gives_no_other_request_wrong_pages(start: Start) -> None:
    pool, other, keys = MHATokenToKVPoolHost(), MHATokenToKVPoolHost(seed=1), chain(32)
    start(pool).batch_set_v1(keys, indices(pool, range(32)))
    reader, gapped = start(other), after(keys[:10])
    assert reader.batch_exists(keys[26:], gapped) == 6  # the last block of 16 pages, which begins after the prefix
    assert all(reader.batch_get_v1(keys[26:], indices(other, range(6)), gapped))
    assert same(pool, range(26, 32), other, range(6))
    got = reader.batch_get_v1(keys[:10], indices(other, range(10)))
    assert all(same(pool, [page], other, [page]) for page, moved in enumerate(got) if moved)
    assert all(reader.batch_get_v1(keys[:16], indices(other, range(16))))
    assert same(pool, range(16), other, range(16))


def silence(plane: ScriptedDataPlane) -> None:
    plane.script.stall |= {"Lookup", "Store"}
    plane.script.fetch_delay = 60


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda plane: plane.stop(), "unreachable"),
        (silence, "deadline"),
        (lambda plane: setattr(plane.script, "fail_fetch_at", 1), "corrupt"),
        (lambda plane: plane.forget_hosts(), ""),
    ],
    ids=["killed", "stalled", "corrupt", "restarted"],
)
def test_a_failure_is_a_miss_within_the_time_limit(start: Start, plane: Any, fault: Any, reason: str) -> None:
    pool, keys = MHATokenToKVPoolHost(), chain(48)
    storage = start(pool, Engine(IDENTITY, HEADS, 0.3, 0.0), {"lookup_timeout_s": 0.5, "store_timeout_s": 0.5})
    storage.batch_set_v1(keys, indices(pool, range(48)))
    assert storage.batch_exists(keys) == 48
    fault(plane)
    began = time.monotonic()
    got = storage.batch_get_v1(keys, indices(pool, range(60, 108)))
    there = storage.batch_exists(keys)
    stored = storage.batch_set_v1(chain(3, "new"), indices(pool, range(3)))
    assert time.monotonic() - began < 5
    placed = [page for page, moved in enumerate(got) if moved]
    assert same(pool, placed, pool, [60 + page for page in placed])
    assert placed == {"corrupt": list(range(16)), "": list(range(48))}.get(reason, [])
    assert (there, all(stored)) == ((0, False) if reason in ("unreachable", "deadline") else (48, True))
    assert not reason or storage.counts[f"get {reason}"] == 48 - len(placed)


def test_slow_stores_of_a_node_end_before_a_flush_ends_the_engine(
    start: Start, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import host_control.sglang.plane as module

    later = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    pool, keys = MHATokenToKVPoolHost(), chain(150)
    storage, places = start(pool, extra={"store_timeout_s": 600}), indices(pool, range(150))
    assert all(storage.batch_set_v1(keys[:128], places[: 128 * PAGE], after([])))
    assert max(request.timeout_ms for request in plane.stores) <= 5000
    later = 9.0
    assert not any(storage.batch_set_v1(keys[128:], places[128 * PAGE :], after(keys[:128])))
    assert storage.counts["set deadline"] == 22
    assert all(storage.batch_set_v1(keys[128:], places[128 * PAGE :].clone(), after(keys[:128])))  # of another node


def test_nothing_moves_after_an_update_of_the_weights(start: Start, plane: Any) -> None:
    changed = False
    pool, keys = MHATokenToKVPoolHost(), chain(16)
    storage = start(pool, Engine(IDENTITY, HEADS, weights_changed=lambda: changed))
    assert all(storage.batch_set_v1(keys, indices(pool, range(16))))
    changed = True
    assert storage.batch_exists(keys) == 0
    assert not any(storage.batch_get_v1(keys, indices(pool, range(16))))
    assert not any(storage.batch_set_v1(chain(16, "new"), indices(pool, range(16))))
    assert storage.counts["set weights_changed"] == 16 and len(plane.stores) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra_config": {"interface_v1": 0}}, "interface_v1"),
        ({"extra_config": {"data_plan": "x"}}, "data_plane"),
        ({"extra_config": {"quantizer": "binned"}}, "quantizer can only be 'lossless'"),
        ({"extra_config": {"store_buffer_bytes": 4096}}, "store_buffer_bytes"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"pool": "mamba"}, "'mamba'"),
        ({"layout": "page_head"}, "page_head"),
        ({"kind": "NVFP4Pool"}, "NVFP4Pool"),
        ({"engine": None}, "cannot be identified: ModuleNotFoundError"),  # no SGLang is installed here
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(plane: Any, change: dict[str, Any], message: str) -> None:
    pool = type(change.pop("kind", "MHATokenToKVPoolHost"), (MHATokenToKVPoolHost,), {})()
    pool.layout = change.pop("layout", pool.layout)
    further, engine = change.pop("pool", "kv"), change.pop("engine", Engine(IDENTITY, HEADS))
    change["extra_config"] = {"data_plane": plane.address} | change.get("extra_config", {})
    with pytest.raises(ConfigurationError, match=message) as raised:  # noqa: PT012  # where it is noticed does not matter
        storage = ShadowServeStorage(ranks(**change), {}, engine=engine)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, further)
        storage.on_host_pools_registered()
    assert "\n" not in str(raised.value)


def test_of_other_pools_nothing_can_be_restored(start: Start) -> None:
    pool, keys = MHATokenToKVPoolHost(), chain(20)
    storage = start(pool)
    kv = SimpleNamespace(name="kv", keys=keys, host_indices=indices(pool, range(20)))
    mamba = SimpleNamespace(name="mamba", keys=keys[-1:], host_indices=torch.arange(1))
    assert storage.batch_set_v2([kv, mamba]) == {"kv": [True] * 20, "mamba": [False]}
    assert storage.batch_get_v2([kv, mamba]) == {"kv": [True] * 20, "mamba": [False]}
    assert storage.batch_exists_v2(keys, []).restorable_prefix_pages == list(range(1, 21))
    assert storage.batch_exists_v2(keys, [mamba]).restorable_prefix_pages == []


# ---- Identity


@dataclass
class Arguments:
    """Some of SGLang's arguments."""

    model_path: str = ""
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    port: int = 30000
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    enable_lora: bool = False
    speculative_algorithm: str | None = None
    unknown_of_a_later_release: int = 0
    hicache_size: int = 0
    hicache_host_memory_mode: str = "cache"
    enable_memory_saver: bool = False
    modelopt_checkpoint_restore_path: str | None = None
    disaggregation_decode_enable_offload_kvcache: bool = False


@dataclass
class Model:
    """Some of SGLang's description of a model."""

    hf_config: Any
    dtype: Any = torch.bfloat16
    context_len: int = 4096
    is_multimodal: bool = False


def described(**changes: Any) -> Any:
    values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "hidden_size": 64} | changes
    return SimpleNamespace(architectures=["LlamaForCausalLM"], to_dict=lambda: values)


@pytest.fixture
def identify(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    import logging

    import host_control.sglang.identity as module

    monkeypatch.setattr(module, "_started_ns", lambda: time.time_ns())

    def digest(weights: bytes = b"w", rope: Any = None, model: Any = None, page: int = 16, **arguments: Any) -> bytes:
        folder = tmp_path / hashlib.sha256(weights).hexdigest()[:8]
        folder.mkdir(exist_ok=True)
        if not (folder / "model.safetensors").exists():
            (folder / "model.safetensors").write_bytes(weights)
        settings = Arguments(**{"model_path": str(folder)} | arguments)
        config = described(**({"rope_parameters": rope} if rope else {}))
        hashes = ContentHashes(None, logging.getLogger("test"))
        return engine_identity(settings, Model(config, **(model or {})), torch.bfloat16, page, hashes).digest()

    return digest


def test_what_changes_kv_changes_the_identity_and_nothing_else_does(identify: Callable[..., bytes]) -> None:
    plain = identify()
    assert plain == identify(port=1, hicache_size=9) == identify(model={"context_len": 8192})
    others = [
        identify(weights=b"x"),
        identify(rope={"rope_type": "default", "rope_theta": 2e4}),
        identify(rope={"rope_type": "dynamic", "rope_theta": 1e4}),
        identify(rope={"rope_type": "dynamic", "rope_theta": 1e4}, model={"context_len": 8192}),
        identify(model={"dtype": torch.float16}),
        identify(page=32),
        identify(kv_cache_dtype="fp8_e4m3"),
        identify(quantization="fp8"),
        identify(unknown_of_a_later_release=1),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_a_branch_or_configuration_that_changes_after_the_start_is_refused(
    identify: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import host_control.sglang.identity as module

    snapshot, branch = tmp_path / "models--a--b" / "snapshots" / "commit", tmp_path / "models--a--b" / "refs" / "main"
    for folder in (snapshot, branch.parent):
        folder.mkdir(parents=True)
    for path in (snapshot / "model.safetensors", snapshot / "config.json", branch):
        path.write_bytes(b"{}")
    started = time.time_ns()
    monkeypatch.setattr(module, "_started_ns", lambda: started)
    identify(model_path=str(snapshot))
    for path in (branch, snapshot / "config.json"):
        started = time.time_ns()
        while path.stat().st_ctime_ns <= started:
            path.write_bytes(b"{ }")
        with pytest.raises(UncacheableError, match=path.name):
            identify(model_path=str(snapshot))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"load_format": "dummy"}, "dummy"),
        ({"hicache_host_memory_mode": "buffer_only"}, "prefix"),
        ({"enable_memory_saver": True}, "weights"),
        ({"modelopt_checkpoint_restore_path": "x"}, "ModelOpt"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "prefix"),
        ({"model": {"is_multimodal": True}}, "images"),
    ],
)
def test_an_engine_that_its_keys_do_not_identify_is_refused(identify: Any, change: Any, why: str) -> None:
    with pytest.raises(UncacheableError, match=why):
        identify(**change)
