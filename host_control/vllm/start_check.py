"""Checks the plugin's configuration before vLLM loads weights.

vLLM creates connectors only after that. But it calls the plugin's entry point before it creates a configuration. So
:func:`check_at_start` makes vLLM call :func:`check` with each complete configuration. A connector's constructor checks
again: with ``kv_connector_module_path`` there is no entry point.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from host_control.config import HostConfig
from host_control.vllm.calibrated import preset_steps
from host_control.vllm.groups import Groups
from host_control.vllm.support import has_full_graphs, in_step_problem
from shadowserve.errors import ConfigurationError
from shadowserve.tls import read_authorities, read_key_pair

_logger = logging.getLogger("vllm.shadowserve")

_TIER_OPTIONS: Final = ("type", "module_path", "locality", "enable_kv_events", "trust_names", "backpressure")
"""Keys of an entry of ``secondary_tiers`` that are not keys of section ``host``."""
_TIER_UNUSED: Final = (
    *("asynchronous_fetch", "layer_order", "pages", "fetch_or_recompute", "hints", "pd_role", "pd_timeout_s"),
    *("computing_cache", "device", "delivery", "reshaping_buffer_bytes", "lookup_threads", "otlp_endpoint"),
    "metrics_port",
    *("chunk_tokens", "load_tokens_min", "exact_copies", "bins", "value_bins", "scale_tokens"),
)


def check_at_start() -> None:
    """Wrap vLLM's configuration class, so that it checks the plugin's configuration, too."""
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
        except Exception:  # an unknown release of vLLM; the connector's constructor checks again
            _logger.exception("ShadowServe: checking the configuration before the engine's start failed")

    checked.checks_shadowserve = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked


def check(vllm_config: Any) -> None:
    """Check the plugin's configuration as far as possible before the engine starts."""
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

    Raises:
        ConfigurationError: An unknown key, an invalid value, an unusable file, or an option that the engine does not
            support.
    """
    config = HostConfig.from_engine(extra)
    _check_files(config)
    preset_steps(config, vllm_config)
    if config.pages and (device := vllm_config.device_config.device_type) != "cpu":
        raise ConfigurationError(
            f"pages: true needs an engine that computes on a CPU, and this one computes on '{device}'; remove pages"
        )
    by_layers = config.layer_order is True
    in_step = {"layer_order: true": by_layers, "asynchronous_fetch: false": not config.asynchronous_fetch}
    loads = config.fetch and vllm_config.kv_transfer_config.is_kv_consumer
    if by_layers and config.fetch and not loads:  # it would need piecewise CUDA graphs for no benefit
        raise ConfigurationError("layer_order: true needs an engine that loads, and this one has kv_role: kv_producer")
    named = " and ".join(option for option, enabled in in_step.items() if enabled)
    if loads and named and (problem := in_step_problem(vllm_config)) is not None:
        raise ConfigurationError(f"{named} cannot be used with this engine: {problem}; or remove {named}")
    needs_one_group(config, _other_groups(vllm_config), loads=loads)
    return config


def _other_groups(vllm_config: Any) -> str:
    """Return the kind of KV cache groups other than full attention that the model's configuration implies, or ""."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is not None and speculative.use_eagle_block_drop():
        return "draft layers"
    stateful = getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False)
    return "recurrent state" if stateful else ""


def needs_one_group(config: HostConfig, others: str, *, loads: bool) -> None:
    """Check that no option needs a single KV cache group of full attention if the engine has ``others``."""
    options = {"layer_order: true": config.layer_order is True and loads, "pages: true": config.pages}
    named = " and ".join(option for option, enabled in options.items() if enabled)
    if others and named:
        raise ConfigurationError(
            f"{named} needs one KV cache group of full attention without draft layers, and this engine has {others}; "
            f"remove {named}"
        )


def why_not_layers(config: HostConfig, vllm_config: Any, groups: Groups, *, loads: bool) -> str:
    """Return the reason why ``layer_order: auto`` is off in an engine, or "" if it is on."""
    if not loads:
        return "this engine loads nothing"
    for option, given in {
        "pages: true": config.pages,
        "asynchronous_fetch: false": not config.asynchronous_fetch,
    }.items():
        if given:
            return f"{option} is set"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "engines that run data-parallel wait for each other's steps"
    if not groups.one:
        return "it needs one KV cache group of full attention without draft layers"
    if (problem := in_step_problem(vllm_config)) is not None:
        return problem
    if has_full_graphs(vllm_config):
        return "it would replace CUDA graphs of the whole model by graphs of its pieces; layer_order: true does so"
    return ""


def tier_settings(given: Mapping[str, Any]) -> HostConfig:
    """Return the configuration of a tier of vLLM's offloading.

    Raises:
        ConfigurationError: An unknown key, an invalid value, or a key that the tier does not use.
    """
    config = HostConfig.from_engine(given, place="secondary_tiers")
    for key in _TIER_UNUSED:
        off = key == "layer_order" and not config.layer_order
        if getattr(config, key) != HostConfig.model_fields[key].default and not off:
            raise ConfigurationError(
                f"ShadowServeTier does not use {key}, and it is set to {getattr(config, key)!r}; remove it, or use "
                "ShadowServeConnector (docs/guides/offloading-tier.md)"
            )
    if config.lossy:
        raise ConfigurationError(
            f"ShadowServeTier stores rows as vLLM has them and does not use quantizer: {config.quantizer}; remove it, "
            "or use ShadowServeConnector (docs/guides/offloading-tier.md)"
        )
    _check_files(config)
    return config


def _connectors(transfer: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the extra configuration of each connector of an engine."""
    if transfer is None or transfer.kv_connector is None:
        return
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector != "MultiConnector":
        yield transfer.kv_connector, extra
        return
    for child in extra.get("connectors") or ():
        yield str(child.get("kv_connector")), child.get("kv_connector_extra_config") or {}


def _check_files(config: HostConfig) -> None:
    """Raise ConfigurationError if a TLS file cannot be used."""
    if (credentials := config.credentials()) is not None:
        read_authorities("tls_ca", credentials.authorities)
        if credentials.certificate:
            read_key_pair(credentials.certificate, credentials.key)


def _print_without_traceback(error: ConfigurationError) -> None:
    """Print ``error`` as one line, without a traceback, if it ends the process."""
    before = sys.excepthook

    def print_line(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(f"ShadowServe: {error}", file=sys.stderr)
        else:
            before(kind, value, traceback)

    sys.excepthook = print_line
