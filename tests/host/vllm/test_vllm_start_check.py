"""Configurations that are refused before vLLM loads weights, with one line that contains the remedy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host_control.config import HostConfig
from host_control.vllm import start_check
from host_control.vllm.start_check import _TIER_UNUSED, check, connector_settings, why_not_layers
from shadowserve.errors import ConfigurationError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def engine(name: str, extra: dict[str, Any], **changes: Any) -> Any:
    """Return vLLM's configuration for an engine on a CPU with a connector."""
    loads = changes.pop("loads", True)
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra, is_kv_consumer=loads)
    given: dict[str, Any] = {
        "kv_transfer_config": transfer,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        "device_config": SimpleNamespace(device_type="cpu"),
        "max_concurrent_batches": 1,
        "use_v2_model_runner": False,
        "speculative_config": None,
        "model_config": SimpleNamespace(is_hybrid=False, is_attention_free=False),
    }
    return SimpleNamespace(**(given | changes))


def problem(name: str, extra: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        check(engine(name, extra, **changes))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def accepts(name: str, extra: dict[str, Any], **changes: Any) -> bool:
    check(engine(name, extra, **changes))
    return True


DRAFTS = SimpleNamespace(use_eagle_block_drop=lambda: True)
STAGES = {
    "parallel_config": SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=1),
    "max_concurrent_batches": 2,
}


@pytest.mark.parametrize(
    ("extra", "changes", "words"),
    [
        ({"layer_ordr": True}, {}, ("kv_connector_extra_config: ", "'layer_ordr'", "'layer_order'")),
        ({"chunk_tokens": "many"}, {}, ("kv_connector_extra_config: chunk_tokens", "'many'")),
        ({"tls_ca": "/nowhere/ca.pem"}, {}, ("tls_ca", "/nowhere/ca.pem")),
        # Symptom: wrong tokens of a load that fell short during the next step. vLLM rolls one step back.
        ({"layer_order": True}, {"max_concurrent_batches": 2}, ("--no-async-scheduling", "remove layer_order: true")),
        ({"asynchronous_fetch": False}, {"max_concurrent_batches": 2}, ("remove asynchronous_fetch: false",)),
        ({"layer_order": True}, STAGES, ("layer_order: true", "pipeline stage")),
        ({"layer_order": True}, {"use_v2_model_runner": True}, ("layer_order: true", "VLLM_USE_V2_MODEL_RUNNER=0")),
        ({"asynchronous_fetch": False}, {"use_v2_model_runner": True}, ("asynchronous_fetch: false", "second model")),
        ({"layer_order": True}, {"loads": False}, ("layer_order: true", "kv_role: kv_producer")),
        ({"layer_order": True}, {"model_config": SimpleNamespace(is_hybrid=True)}, ("one KV cache group", "recurrent")),
        ({"pages": True}, {"speculative_config": DRAFTS}, ("pages: true needs one KV cache group", "draft layers")),
        ({"pages": True}, {"device_config": SimpleNamespace(device_type="cuda")}, ("pages: true", "'cuda'")),
        ({"pages": True, "quantizer": "binned"}, {}, ("pages: true", "quantizer: binned")),
        ({"pages": True, "data_plane": "10.0.0.1:50151"}, {}, ("pages: true", "10.0.0.1:50151")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_unusable_configuration_is_refused(
    extra: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    said = problem("ShadowServeConnector", extra, **changes)
    assert all(word in said for word in words), said
    assert "command line" not in said
    child = {"kv_connector": "ShadowServeConnector", "kv_connector_extra_config": extra}
    assert problem("MultiConnector", {"connectors": [{"kv_connector": "NixlConnector"}, child]}, **changes) == said


def test_supported_options_are_accepted() -> None:
    assert accepts("ShadowServeConnector", {"layer_order": True, "pages": True, "fetch_timeout_s": 1.0})
    assert accepts("ShadowServeConnector", {"layer_order": True, "fetch": False}, max_concurrent_batches=2)
    assert accepts("ShadowServeConnector", {"asynchronous_fetch": False}, loads=False, max_concurrent_batches=2)
    assert accepts("NixlConnector", {"whatever": 1})
    assert accepts("ShadowServeConnector", {}, kv_transfer_config=None)


FULL_GRAPHS = SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True))


@pytest.mark.parametrize(
    ("extra", "changes", "words"),
    [
        ({}, {}, ""),
        ({}, {"max_concurrent_batches": 2}, "schedules a step before the previous one"),
        ({}, STAGES, "pipeline stage"),
        ({}, {"use_v2_model_runner": True}, "second model runner"),
        ({}, {"compilation_config": FULL_GRAPHS}, "CUDA graphs"),
        ({}, {"parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=2)}, "data-parallel"),
        ({"pages": True}, {}, "pages: true"),
        ({"asynchronous_fetch": False}, {}, "asynchronous_fetch: false"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_layer_order_auto_is_on_where_the_engine_can_stream_as_it_is(
    extra: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    configured = engine("ShadowServeConnector", extra, **changes)
    config = connector_settings(extra, configured)
    why_not = why_not_layers(config, configured, SimpleNamespace(one=True), loads=True)
    assert words in why_not and bool(words) == bool(why_not)
    assert "one KV cache group" in why_not_layers(HostConfig(), engine("", {}), SimpleNamespace(one=False), loads=True)


TIER = {"type": "ShadowServeTier", "module_path": "host_control.vllm.tier", "data_plane": "127.0.0.1:1"}


@pytest.mark.parametrize(
    "given",
    [
        {"layer_order": True},
        {"pages": True},
        {"fetch_or_recompute": True},
        {"pd_role": "prefill"},
        {"pd_timeout_s": 1.0},
        {"computing_cache": "none"},
        {"device": "mlx5_0"},
        {"lookup_threads": 4},
        {"reshaping_buffer_bytes": "1MiB"},
        {"asynchronous_fetch": False},
        {"delivery": "pinned"},
        {"chunk_tokens": 64},
        {"load_tokens_min": 1},
        {"bins": 32},
        {"value_bins": 32},
        {"scale_tokens": 16},
        {"quantizer": "binned"},
    ],
    ids=str,
)
def test_a_tier_refuses_keys_that_it_does_not_use(given: dict[str, Any]) -> None:
    """Symptom: the tier ignored the key."""
    extra = {"secondary_tiers": [{"type": "fs"}, TIER | given]}
    said = problem("OffloadingConnector", extra)
    ((key, value),) = given.items()
    assert "ShadowServeTier" in said and key in said and "docs/guides/offloading-tier.md" in said, said


def test_a_tier_accepts_its_keys_and_vllms() -> None:
    used = {
        "store_timeout_s": 1.0,
        "lookup_timeout_s": 1.0,
        "order": "sjf",
        "quantizer": "passthrough",
        "layer_order": False,
    }
    options = {"trust_names": True, "locality": "LOCAL", "backpressure": {}, "enable_kv_events": True}
    assert accepts("OffloadingConnector", {"secondary_tiers": [TIER | used | options]})
    said = problem("OffloadingConnector", {"secondary_tiers": [TIER | {"stor_timeout": 1.0}]})
    assert said.startswith("secondary_tiers: there is no key 'stor_timeout'; did you mean 'store_timeout_s'?")


def test_a_tier_uses_or_refuses_every_key() -> None:
    """Every new option must be used or refused."""
    sources = Path(__file__).resolve().parents[3] / "host_control"
    read = "".join((sources / name).read_text() for name in ("vllm/tier.py", "vllm/tier_work.py", "config.py"))
    read += (sources / "vllm/identity/content.py").read_text()
    unread = {key for key in HostConfig.model_fields if f"settings.{key}" not in read and f"config.{key}" not in read}
    unread -= {key for key in unread if f"self.{key}" in read}
    assert unread <= set(_TIER_UNUSED)


def test_vllm_checks_each_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config

    class Made:
        def __post_init__(self) -> None:
            self.complete = True

    monkeypatch.setattr(vllm.config, "VllmConfig", Made)
    seen = []
    monkeypatch.setattr(start_check, "check", lambda config: seen.append(config.complete))
    for _ in range(2):
        start_check.check_at_start()
    Made().__post_init__()
    assert seen == [True], "once, after vLLM's own message"
    monkeypatch.setattr(start_check, "check", lambda config: config.something_new)
    Made().__post_init__()  # the connector reports an unreadable configuration

    def refuse(config: Any) -> None:
        raise ConfigurationError("no")

    monkeypatch.setattr(start_check, "check", refuse)
    monkeypatch.setattr("sys.excepthook", print)
    with pytest.raises(ConfigurationError):
        Made().__post_init__()
