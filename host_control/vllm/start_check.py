"""Checks the plugin's configuration before vLLM loads weights.

vLLM makes a connector long after that. But each of its processes that makes a configuration calls the plugin's entry
point first. So :func:`check_at_start` has vLLM call :func:`check` with each complete configuration, before it starts
any engine. A connector's constructor checks again: a connector that vLLM finds by ``kv_connector_module_path`` alone
has no entry point.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from host_control.config import HostConfig
from host_control.vllm.support import in_step_problem
from shadowserve.errors import ConfigurationError
from shadowserve.tls import read_authorities, read_key_pair

__all__ = ["check", "check_at_start", "connector_settings", "needs_one_group", "tier_settings"]

_logger = logging.getLogger("vllm.shadowserve")

_TIER_OPTIONS: Final = ("type", "module_path", "locality", "enable_kv_events", "trust_names", "backpressure")
"""Keys of an entry of ``secondary_tiers`` that are vLLM's or the tier's, and not of section ``host``."""
_TIER_UNUSED: Final = (
    *("asynchronous_fetch", "layer_order", "pages", "fetch_or_recompute", "pd_role", "pd_timeout_s"),
    *("computing_cache", "device", "delivery", "reshaping_buffer_bytes", "lookup_threads"),
    *("chunk_tokens", "load_tokens_min", "recent_keys", "bins", "value_bins", "scale_tokens"),
)


def check_at_start() -> None:
    """Have vLLM check the plugin's configuration with each configuration that it makes."""
    from vllm.config import VllmConfig

    after: Callable[..., None] | None = getattr(VllmConfig, "__post_init__", None)
    if after is None or hasattr(after, "checks_shadowserve"):
        return

    @functools.wraps(after)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        after(self, *arguments, **named)
        try:
            check(self)
        except ConfigurationError as error:
            _print_without_traceback(error)
            raise
        except Exception:  # of a configuration that is like none that we know; a connector's constructor checks again
            _logger.exception("ShadowServe: this engine's configuration cannot be checked before its start")

    checked.checks_shadowserve = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked


def check(vllm_config: Any) -> None:
    """Check what can be known of the plugin's configuration before an engine starts.

    Raises:
        ConfigurationError: it cannot be used, or this engine cannot do what it asks for.
    """
    transfer = vllm_config.kv_transfer_config
    for name, extra in _connectors(transfer):
        if name == "ShadowServeConnector":
            connector_settings(extra, vllm_config)
        elif name == "OffloadingConnector":
            for tier in extra.get("secondary_tiers") or ():
                if isinstance(tier, Mapping) and tier.get("type") == "ShadowServeTier":
                    tier_settings({key: tier[key] for key in tier if key not in _TIER_OPTIONS})


def connector_settings(extra: Mapping[str, Any], vllm_config: Any) -> HostConfig:
    """Return the configuration of a connector.

    Args:
        extra: ``kv_connector_extra_config``.
        vllm_config: of the engine.

    Raises:
        ConfigurationError: an unknown key, a value that does not fit, a file that cannot be used, or an ability that
            this engine does not have.
    """
    config = HostConfig.from_engine(extra)
    _check_files(config)
    if config.pages and (device := vllm_config.device_config.device_type) != "cpu":
        raise ConfigurationError(
            f"pages: true needs an engine that computes on a CPU, and this one computes on '{device}'; remove pages"
        )
    within = {"layer_order: true": config.layer_order, "asynchronous_fetch: false": not config.asynchronous_fetch}
    loads = config.fetch and vllm_config.kv_transfer_config.is_kv_consumer
    if config.layer_order and config.fetch and not loads:  # it would cost piecewise CUDA graphs, and bring nothing
        raise ConfigurationError("layer_order: true needs an engine that loads, and this one has kv_role: kv_producer")
    named = " and ".join(name for name, asked in within.items() if asked)
    if loads and named and (problem := in_step_problem(vllm_config)) is not None:
        raise ConfigurationError(f"{named} cannot be used with this engine: {problem}; or remove {named}")
    needs_one_group(config, _other_groups(vllm_config), loads=loads)
    return config


def _other_groups(vllm_config: Any) -> str:
    """Return what an engine keeps beside one KV cache group of full attention, as far as its model alone says."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is not None and speculative.use_eagle_block_drop():
        return "draft layers"
    stateful = getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False)
    return "recurrent state" if stateful else ""


def needs_one_group(config: HostConfig, others: str, *, loads: bool) -> None:
    """Check that no ability is configured that needs one KV cache group of full attention, where there are ``others``.

    Raises:
        ConfigurationError: one is.
    """
    asked = {"layer_order: true": config.layer_order and loads, "pages: true": config.pages}
    named = " and ".join(name for name, wanted in asked.items() if wanted)
    if others and named:
        raise ConfigurationError(
            f"{named} needs one KV cache group of full attention without draft layers, and this engine has {others}; "
            f"remove {named}"
        )


def tier_settings(given: Mapping[str, Any]) -> HostConfig:
    """Return the configuration of a tier of vLLM's offloading.

    Args:
        given: keys of section ``host``.

    Raises:
        ConfigurationError: an unknown key, a value that does not fit, or a key that a tier does not use.
    """
    config = HostConfig.from_engine(given, place="secondary_tiers")
    for key in _TIER_UNUSED:
        if getattr(config, key) != HostConfig.model_fields[key].default:
            raise ConfigurationError(
                f"ShadowServeTier does not use {key}, and it is set to {getattr(config, key)!r}; remove it, or use "
                "ShadowServeConnector (docs/offloading-tier.md)"
            )
    if config.quantizer == "binned":
        raise ConfigurationError(
            "ShadowServeTier stores rows as vLLM has them and does not use quantizer: binned; remove it, or use "
            "ShadowServeConnector (docs/offloading-tier.md)"
        )
    _check_files(config)
    return config


def _connectors(transfer: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the extra configuration of each connector that an engine has."""
    if transfer is None or transfer.kv_connector is None:
        return
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector != "MultiConnector":
        yield transfer.kv_connector, extra
        return
    for child in extra.get("connectors") or ():
        yield str(child.get("kv_connector")), child.get("kv_connector_extra_config") or {}


def _check_files(config: HostConfig) -> None:
    """Raise ConfigurationError where a file that a configuration names cannot be used."""
    if (credentials := config.credentials()) is not None:
        read_authorities("tls_ca", credentials.authorities)
        if credentials.certificate:
            read_key_pair(credentials.certificate, credentials.key)


def _print_without_traceback(error: ConfigurationError) -> None:
    """Print this error as one line if it ends the process: it tells a user all there is to know."""
    before = sys.excepthook

    def print_line(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(f"ShadowServe: {error}", file=sys.stderr)
        else:
            before(kind, value, traceback)

    sys.excepthook = print_line
