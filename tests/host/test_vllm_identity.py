"""What is cached and under which name; registration; what vLLM is told at the start."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host_control.config import HostConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def spec(**options: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, **options}
    )


def kv_cache_config(*specs: Any) -> Any:
    groups = [SimpleNamespace(layer_names=["a", "b", "c"], kv_cache_spec=one) for one in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def vllm_config(model_path: Path | str = "some/model") -> Any:
    class HfConfig(SimpleNamespace):
        def to_dict(self) -> dict[str, Any]:
            return dict(self.__dict__)

    model = SimpleNamespace(
        model=model_path,
        revision=None,
        runner_type="generate",
        is_encoder_decoder=False,
        hf_config=HfConfig(hidden_size=8, transformers_version="5"),
        dtype="bfloat16",
        quantization=None,
        max_model_len=100,
        seed=0,
        get_num_kv_heads=lambda parallel: 2,
        get_num_attention_heads=lambda parallel: 4,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )


def test_whatever_changes_values_changes_the_namespace(tmp_path: Path) -> None:
    import torch

    from host_control.vllm.identity import rank_namespace

    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    base = vllm_config(tmp_path)

    def digest(config: Any = base, caches: Any = None, host: Any = None, rank: int = 0) -> bytes:
        return rank_namespace(config, caches or kv_cache_config(), host or HostConfig(), rank).digest()

    def changed(place: str, value: Any) -> Any:
        config = copy.deepcopy(base)
        first, _, name = place.partition(".")
        setattr(getattr(config, first), name, value)
        return config

    digests = [
        digest(),
        digest(rank=1),
        digest(host=HostConfig(quantizer="binned")),
        digest(host=HostConfig(quantizer="binned", bins=32)),
        digest(host=HostConfig(quantizer="binned", value_bins=32)),
        digest(host=HostConfig(quantizer="binned", value_bins=64)),
        digest(host=HostConfig(quantizer="binned", scale_tokens=16)),
        digest(host=HostConfig(chunk_tokens=512)),
        digest(caches=kv_cache_config(spec(num_kv_heads=1))),
        digest(caches=kv_cache_config(spec(dtype=torch.float16))),
        digest(changed("model_config.model", "other")),
        digest(changed("model_config.revision", "v2")),
        digest(changed("model_config.quantization", "awq")),
        digest(changed("model_config.dtype", "float16")),
        digest(changed("load_config.load_format", "dummy")),
    ]
    config = copy.deepcopy(base)
    config.model_config.hf_config.hidden_size = 9
    digests.append(digest(config))
    weights = bytearray(1 << 20)
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    digests.append(digest())
    assert len(set(digests)) == len(digests)


def test_what_does_not_change_values_does_not_change_the_namespace() -> None:
    from host_control.vllm.identity import rank_namespace

    one, other = vllm_config(), vllm_config()
    other.model_config.hf_config.transformers_version = "6"
    other.model_config.seed = 3
    host = HostConfig(fetch_timeout=3, order="sjf")
    assert (
        rank_namespace(one, kv_cache_config(), HostConfig(), 0).digest()
        == rank_namespace(other, kv_cache_config(), host, 0).digest()
    )


@pytest.mark.parametrize(
    ("cache_dtype", "element", "quantizer", "stored", "wire"),
    [
        ("fp8_e4m3", "uint8", "lossless", "passthrough", "uint8"),
        ("fp8_e4m3", "uint8", "binned", "binned", "float8_e4m3"),
        ("fp8", "uint8", "binned", "binned", "float8_e4m3"),
        ("fp8_inc", "float8_e4m3fn", "binned", "binned", "float8_e4m3"),
        ("fp8_inc", "float8_e4m3fn", "lossless", "passthrough", "uint8"),
        ("fp8_e5m2", "uint8", "binned", "passthrough", "uint8"),
        ("fp8_ds_mla", "uint8", "binned", "passthrough", "uint8"),
    ],
)
def test_fp8_caches_are_stored_as_they_are_but_for_e4m3_in_bins(
    cache_dtype: str, element: str, quantizer: Any, stored: str, wire: str
) -> None:
    import torch

    from host_control.vllm.identity import chunk_shape, rank_namespace

    config, host = vllm_config(), HostConfig(quantizer=quantizer, scale_tokens=4)
    config.cache_config.cache_dtype = cache_dtype
    dtype = getattr(torch, element)
    namespace = rank_namespace(config, kv_cache_config(spec(dtype=dtype)), host, 0)
    assert namespace.quantizer == stored and cache_dtype in namespace.dtype
    shape = chunk_shape(namespace, SimpleNamespace(dtype=dtype, layers=3, kinds=2, vector_length=128), host)
    assert (shape.dtype, shape.quantizer, shape.chunk_bytes) == (wire, stored, 3 * 2 * 128 * 256)
    treatment = (shape.bins, shape.value_bins, shape.scale_tokens)
    assert treatment == ((64, 16, 4) if stored == "binned" else (0, 0, 1))


def test_amd_has_another_e4m3_that_is_not_binned(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.platforms import current_platform

    from host_control.vllm.identity import rank_namespace

    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    config = vllm_config()
    config.cache_config.cache_dtype = "fp8"
    namespace = rank_namespace(config, kv_cache_config(spec(dtype=torch.uint8)), HostConfig(quantizer="binned"), 0)
    assert namespace.quantizer == "passthrough"


def test_values_with_the_bins_of_keys_are_named_as_before_there_was_a_choice() -> None:
    from host_control.vllm.identity import chunk_shape, rank_namespace

    host = HostConfig(quantizer="binned", bins=32, value_bins=32)
    namespace = rank_namespace(vllm_config(), kv_cache_config(), host, 0)
    assert namespace.quantizer_parameters == {"bins": 32}
    layout = SimpleNamespace(dtype=spec().dtype, layers=3, kinds=2, vector_length=128)
    assert chunk_shape(namespace, layout, host).value_bins == 0


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


def test_reports_of_ranks_merge_to_the_fewest_chunks() -> None:
    from host_control.vllm.metadata import WorkerReport

    merged = WorkerReport({"a": 3, "b": 1}).aggregate(WorkerReport({"a": 2, "c": 4}))
    assert merged.loaded == {"a": 2, "b": 1, "c": 4}


def test_statistics_of_steps_and_ranks_add_up() -> None:
    from host_control.vllm.metrics import Counts, ShadowServeStats

    counts = Counts()
    assert counts.take() is None
    counts.add("stored_chunks", 2)
    counts.add("dropped_stores", reason="full")
    taken = counts.take()
    assert taken is not None and not taken.is_empty()
    total = ShadowServeStats(data={"stored_chunks": 1}).aggregate(taken)
    assert total.reduce() == {"dropped_stores/full": 1, "stored_chunks": 3}
    assert counts.take() is None


def test_each_failure_reason_is_logged_once_in_a_while(caplog: Any) -> None:
    import logging

    from host_control.vllm.metrics import FailureLog

    log = FailureLog(logging.getLogger("test"), interval=60)
    for _ in range(5):
        log.warn("loads", "corrupt", "slice 3")
        log.warn("loads", "deadline", "")
    assert [record.getMessage() for record in caplog.records] == [
        "ShadowServe: loads: corrupt: slice 3",
        "ShadowServe: loads: deadline",
    ]
