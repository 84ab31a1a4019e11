"""``--kv-transfer-config`` of vLLM, checked as vLLM and the plugin would, without an engine."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from host_control.config import HostConfig
from shadowserve.calibration import read
from shadowserve.errors import ConfigurationError, NotInstalledError
from shadowserve_tools.doctor.finding import Finding

WHAT: Final = "kv-transfer-config"
VLLM_KEYS: Final = (
    *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"),
    *("kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"),
)
"""Keys of vLLM's KVTransferConfig. Importing vLLM for them would take ten seconds."""
_CONNECTOR: Final = "ShadowServeConnector"
_TIER: Final = "ShadowServeTier"
_TIER_KEYS: Final = ("type", "module_path", "trust_names", "enable_kv_events", "locality", "backpressure")
"""Keys of an entry of ``secondary_tiers`` besides those of section ``host``."""
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_EXAMPLE: Final = '{"kv_connector": "ShadowServeConnector", "kv_role": "kv_both"}'


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine: keys of section ``host``, and vLLM's own.

    Attributes:
        is_tier: True if the plugin is a tier of vLLM's own offloading, and not the connector.
    """

    host: HostConfig
    transfer: Mapping[str, Any]
    is_tier: bool = False


def engine_config(text: str) -> EngineConfig:
    """Parse ``--kv-transfer-config``; ConfigurationError: it is not for this plugin, or unusable."""
    try:
        transfer = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"it is no JSON: {error}") from error
    if not isinstance(transfer, dict):
        raise ConfigurationError(f"it is no JSON object, such as {_EXAMPLE}")
    for key in transfer:
        if key not in VLLM_KEYS:
            nearest = difflib.get_close_matches(key, VLLM_KEYS, n=1, cutoff=0.0)[0]
            raise ConfigurationError(f'vLLM has no key "{key}"; did you mean "{nearest}"?')
    if transfer.get("kv_role") not in _ROLES:
        raise ConfigurationError(f'"kv_role" is {_shown(transfer, "kv_role")}; it is one of {", ".join(_ROLES)}')
    name = transfer.get("kv_connector")
    if name == "MultiConnector":
        members = _list(_extra(transfer), "connectors", "kv_connector", _CONNECTOR)
        return EngineConfig(HostConfig.from_engine(_extra(members)), transfer)
    if name == "OffloadingConnector":
        tier = _list(_extra(transfer), "secondary_tiers", "type", _TIER)
        keys = {key: value for key, value in tier.items() if key not in _TIER_KEYS}
        return EngineConfig(HostConfig.from_engine(keys), transfer, is_tier=True)
    if name != _CONNECTOR:
        raise ConfigurationError(f'"kv_connector" is {_shown(transfer, "kv_connector")}; it is "{_CONNECTOR}"')
    return EngineConfig(HostConfig.from_engine(_extra(transfer)), transfer)


def transfer_config(engine: EngineConfig) -> Iterator[Finding]:
    """Say what an engine would be started with, and what of vLLM's own keys will disappoint."""
    config = engine.host
    chunks = "rows of vLLM's tier" if engine.is_tier else f"chunks of {config.chunk_tokens} tokens, {config.quantizer}"
    yield Finding(WHAT, "ok", f"data plane {config.data_plane}, {chunks}")
    policy = engine.transfer.get("kv_load_failure_policy", "fail")
    if policy != "recompute" and engine.transfer["kv_role"] != "kv_producer" and not engine.is_tier:
        remedy = 'add "kv_load_failure_policy": "recompute"'
        found = f"kv_load_failure_policy is '{policy}': vLLM fails requests whose KV cannot be loaded"
        yield Finding("load failures", "warning", found, remedy)
    if config.calibration:
        yield _calibration(config)


def _calibration(config: HostConfig) -> Finding:
    """Read a calibration; only an engine knows whether it is of its model."""
    try:
        found = read(Path(config.calibration))
    except (ConfigurationError, NotInstalledError) as error:
        return Finding("calibration", "failed", str(error), "run 'shadowserve calibrate MODEL --output FILE'")
    shape = f"{found.layers} layers, {found.heads} KV heads of {found.head_size}"
    return Finding("calibration", "ok", f"{config.quantizer} of {found.digest.hex()[:16]}: {found.model}, {shape}")


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "missing"


def _extra(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigurationError('"kv_connector_extra_config" is no JSON object')
    return extra


def _list(extra: Mapping[str, Any], key: str, name: str, wanted: str) -> dict[str, Any]:
    entries = extra.get(key)
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get(name) == wanted:
            return entry
    raise ConfigurationError(f'no entry of "{key}" in "kv_connector_extra_config" has "{name}": "{wanted}"')
