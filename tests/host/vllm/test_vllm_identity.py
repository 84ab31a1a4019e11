"""Namespaces of caches, registration, and warnings at the start."""

from types import SimpleNamespace
from typing import Any

import identity_support
import pytest
from identity_support import ASSET, engine_config, kv_cache_config, spec

from host_control.config import HostConfig
from shadowserve.chunk import Quantizer

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


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

    config, host = engine_config(ASSET), HostConfig(quantizer=quantizer, scale_tokens=4)
    object.__setattr__(config.cache_config, "cache_dtype", cache_dtype)
    caches = kv_cache_config(spec(dtype=getattr(torch, element)))
    assert cache_dtype in identity_support.model_of(config, caches, host).dtype
    shape = identity_support.layout_of(config, caches, host)
    assert (shape.dtype.label, shape.quantizer.label, shape.raw_bytes) == (wire, stored, 3 * 2 * 128 * 256)
    treatment = (shape.bins, shape.value_bins, shape.scale_tokens)
    assert treatment == ((64, 16, 4) if stored == "binned" else (0, 0, 1))


def test_amd_has_another_e4m3_that_is_not_binned(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    config = engine_config(ASSET)
    object.__setattr__(config.cache_config, "cache_dtype", "fp8")
    caches = kv_cache_config(spec(dtype=torch.uint8))
    layout = identity_support.layout_of(config, caches, HostConfig(quantizer="binned"))
    assert layout.quantizer is Quantizer.PASSTHROUGH


def test_chunks_that_records_cannot_hold_have_a_reason() -> None:
    from host_control.vllm.support import UncacheableError

    with pytest.raises(UncacheableError, match="cannot hold its chunks: .*2 MiB"):
        identity_support.layout_of(engine_config(ASSET), kv_cache_config(spec(head_size=1 << 20)))


def test_values_with_the_bins_of_keys_are_named_as_if_there_were_no_choice() -> None:
    layout = identity_support.layout_of(
        engine_config(ASSET), None, HostConfig(quantizer="binned", bins=32, value_bins=32)
    )
    assert (layout.bins, layout.value_bins) == (32, 0)


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
