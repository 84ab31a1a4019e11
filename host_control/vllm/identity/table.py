"""The table of all inputs that could change KV: their effect on the key, and the reason.

The namespace (:func:`options`) and docs/design/identity.md (scripts/gen-identity-docs) are generated from it, and a
test changes every input in real configurations. A field of vLLM's configuration that is not in the table, such as a
newer one, is part of the key if it differs from its default: it may change KV, and a miss is better than wrong tokens.
"""

import dataclasses
import enum
import os
from collections.abc import Callable
from typing import Any, Final

from host_control.vllm.identity.canonical import canonical


class Effect(enum.StrEnum):
    """The effect of an input on the key."""

    KEY = "yes"
    DERIVED = "indirectly"
    NO = "no"
    ROUNDING = "no, rounding"
    OFF = "no cache"


@dataclasses.dataclass(frozen=True)
class Input:
    """One or more inputs with the same effect and reason.

    Attributes:
        place: Attribute of ``VllmConfig``, or a name for inputs outside of it.
        names: Names of fields, separated by blanks; ``*`` for all other fields of the place.
        effect: Effect on the key.
        why: Reason.
    """

    place: str
    names: str
    effect: Effect
    why: str

    def named(self) -> list[str]:
        return self.names.split()


_Row = tuple[Effect, str, str]


def _rows_of(effect: Effect) -> Callable[[str, str], _Row]:
    return lambda names, why: (effect, names, why)


_K, _D, _N, _R, _O = map(_rows_of, (Effect.KEY, Effect.DERIVED, Effect.NO, Effect.ROUNDING, Effect.OFF))

_ROWS: Final[dict[str, tuple[_Row, ...]]] = {
    # ---- The model ---------------------------------------------------------------------------------------------------
    "weights": (
        _K(
            "every_byte", "SHA-256 of each file that the loader reads, or its name in a hub cache, which is the SHA-256"
        ),
        _N("path name hub_or_local", "the same bytes are the same weights, wherever they are stored"),
        _O("streamed modelexpress ipc_cache secondary", "the content of these sources is not known"),
    ),
    "model": (
        _K("class", "the model's class: vLLM's, Transformers', a plugin's or an override, with its source"),
        _K("remote_code", "with --trust-remote-code, the model's own Python files compute"),
        _K(
            "rope",
            "LongRoPE uses its long factors if the context is longer than in training; for types that are not "
            "known to ignore it, max_model_len is in the key",
        ),
        _K("quantization_files", "quantize_config.json and similar files of quantized weights"),
    ),
    "model_config": (
        _K(
            "hf_config hf_text_config",
            "all fields after overrides: shapes, rope_parameters, windows, quantization and its exceptions",
        ),
        _K(
            "dtype quantization quantization_config",
            "how weights and activations are rounded, and which are not quantized",
        ),
        _D(
            "hf_config_path hf_overrides config_format disable_sliding_window generation_config "
            "override_generation_config",
            "hf_config contains their changes",
        ),
        _D(
            "model_impl model_class_overrides convert trust_remote_code code_revision",
            "see model.class and model.remote_code",
        ),
        _D("model revision", "the content of files is hashed, not their names"),
        _O("model_weights", "weights streamed from object storage cannot be hashed"),
        _D("seed", "it only affects dummy weights, which are in the key"),
        _D("max_model_len", "see model.rope; otherwise it only limits requests"),
        _O("runner pooler_config", "only engines that generate text use the cache"),
        _D("multimodal_config", "see multimodal_config"),
        _N(
            "is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len "
            "allow_deprecated_quantization",
            "follow from other inputs, or only check them",
        ),
        _R("enforce_eager disable_cascade_attn", "the same sums in another order"),
        _N(
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
            "renderer_num_workers enable_prompt_embeds",
            "the key is computed from token IDs; requests with prompt embeddings run without the cache",
        ),
        _N(
            "allowed_local_media_path allowed_media_domains hf_token served_model_name max_logprobs logprobs_mode"
            " use_fp64_gumbel enable_trace_replay return_sampling_mask logits_processors",
            "names, access, and sampling",
        ),
        _N(
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator",
            "location of memory; weights that change at run time start a new epoch",
        ),
    ),
    # ---- Caches ------------------------------------------------------------------------------------------------------
    "cache_config": (
        _K("cache_dtype", "the namespace's dtype, with the 8-bit format that the GPU uses for fp8"),
        _K(
            "kv_cache_dtype_skip_layers sliding_window kv_sharing_fast_prefill swa_bounded_replay "
            "mamba_cache_dtype mamba_ssm_cache_dtype",
            "which layers keep which tokens, and in which dtype",
        ),
        _N("*", "block sizes, memory sizes and the engine's own prefix cache"),
    ),
    "kv_cache_config": (
        _K("layers heads_of_the_rank head_size kind", "the contents of a record are in its key"),
        _N("block_size number_of_blocks layout", "stored chunks have a layout of their own"),
    ),
    # ---- Devices, kernels and parallelism ----------------------------------------------------------------------------
    "parallel_config": (
        _K("tensor_parallel_size", "the heads of each rank; MLA is the same on all ranks"),
        _K("worker_cls worker_extension_cls", "the user's code, unless they are vLLM's own classes"),
        _O(
            "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size",
            "more than one is not supported",
        ),
        _R("*", "placement of experts, batches and collectives; another order of sums"),
    ),
    "scheduler_config": (_R("*", "how tokens are batched; another order of sums"),),
    "device_config": (_R("*", "devices compute the same within rounding"),),
    "load_config": (
        _D("load_format", "the loaded files are hashed; formats of other loaders are in the key, too"),
        _D("model_loader_extra_config ignore_patterns download_dir", "they select the files that are hashed"),
        _N("*", "how files are read"),
    ),
    "offload_config": (_N("*", "location of weights"),),
    "attention_config": (
        _K(
            "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
            "indexer_sparse_logits use_non_causal",
            "they round queries or skip tokens, which is more than the rounding of sums",
        ),
        _R("*", "backends and tile sizes; another order of sums"),
    ),
    "mamba_config": (
        _K("enable_stochastic_rounding stochastic_rounding_philox_rounds", "recurrent state is rounded at random"),
        _R("*", "kernels"),
    ),
    "kernel_config": (
        _K(
            "moe_backend linear_backend linear_backend_per_quant",
            "some backends quantize activations; the default is auto",
        ),
        _R("*", "kernels and their tuning"),
    ),
    "compilation_config": (_R("*", "fused and compiled kernels; another order of sums"),),
    "optimization_level": (_R("*", "chooses among the above"),),
    "performance_mode": (_R("*", "chooses among the above"),),
    "additional_config": (_K("*", "options of platform plugins with unknown effects"),),
    "quant_config": (_D("*", "it follows from hf_config, quantization_config and the quantization's files"),),
    "engram_config": (_N("*", "location of embeddings"),),
    "diffusion_config": (_O("*", "a token's KV depends on later tokens"),),
    "speculative_config": (
        _D(
            "*",
            "only verified tokens have keys; if draft layers have KV of their own, the method, their "
            "configuration and their weights are in the key",
        ),
    ),
    "lora_config": (_D("*", "see the request's adapter; it does not affect requests without an adapter"),),
    "watermark_config": (_N("*", "sampling"),),
    "structured_outputs_config": (_N("*", "sampling"),),
    "reasoning_config": (_N("*", "handling of output tokens"),),
    "aux_output_config": (_N("*", "additional outputs"),),
    "observability_config": (_N("*", "what is shown"),),
    "logging_config": (_N("*", "what is shown"),),
    "profiler_config": (_N("*", "what is measured"),),
    "kv_transfer_config": (_N("*", "the connector; see host for the keys of its configuration that change KV"),),
    "kv_events_config": (_N("*", "notifications"),),
    "ec_transfer_config": (_N("*", "source of encoder outputs"),),
    "ec_manager_config": (_N("*", "location of encoder outputs"),),
    "weight_transfer_config": (_N("*", "weights that change at run time start a new epoch"),),
    "instance_id": (_N("*", "a name"),),
    "shutdown_timeout": (_N("*", "shutdown"),),
    # ---- Non-token inputs --------------------------------------------------------------------------------------------
    "multimodal_config": (
        _K(
            "language_model_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate "
            "video_pruning_method",
            "how the encoder and the model use processed inputs; the scales by content",
        ),
        _D(
            "mm_processor_kwargs media_io_kwargs mm_device_do_normalize limit_per_prompt enable_mm_embeds",
            "the processed tensors are hashed",
        ),
        _R("mm_encoder_attn_backend mm_encoder_tp_mode", "another order of sums"),
        _N("*", "caches, transports, profiling"),
    ),
    "request": (
        _K("tokens", "they form the prefix chain"),
        _K("cache_salt", "it separates users who do not share KV"),
        _K("epoch", "it changes with the weights and when the cache is reset"),
        _K("adapter_files", "content of adapter_config.json and weights, as loaded by the engine"),
        _K("adapter_application", "lora_dtype, target modules, adapter of the vision tower, layout of experts"),
        _N(
            "adapter_name adapter_number adapter_path max_lora_rank max_loras max_cpu_loras fully_sharded_loras",
            "names and locations; vLLM rejects a rank that does not fit",
        ),
        _O("adapter_changed_while_running load_inplace", "the loaded content is unknown"),
        _K("features", "SHA-256 of the processed tensors, modality, position and length"),
        _N("mm_uuids mm_hash counter", "names of an input, not its content"),
        _O(
            "features_elsewhere identifier_of_two_inputs",
            "tensors that are only in a worker's memory, and identifiers that were used for other content in this"
            " engine",
        ),
        _O("prompt_embeds pooling streaming_input", "tokens do not identify the KV"),
        _N("sampling priority arrival", "sampling and scheduling"),
    ),
    # ---- ShadowServe -------------------------------------------------------------------------------------------------
    "host": (
        _K("quantizer calibration bins value_bins scale_tokens chunk_tokens", "contents of records"),
        _N("*", "how records are moved"),
    ),
    # ---- Environment -------------------------------------------------------------------------------------------------
    "environment": (
        _K(
            "VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
            "VLLM_HUMMING_USE_F16_ACCUM VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_DEEPEPLL_NVFP4_DISPATCH "
            "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
            "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
            "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_CPU_INT4_W4A8 "
            "VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM VLLM_MLA_DISABLE",
            "if set, they change how activations are rounded or routed",
        ),
        _O("VLLM_USE_MODELSCOPE", "the loaded files are not known; set --model to the folder"),
        _R("*", "kernels, threads, network, logs"),
    ),
    "versions": (_R("vllm transformers torch cuda drivers shadowserve", "the same computation, compiled differently"),),
}

TABLE: Final = tuple(Input(place, names, effect, why) for place, rows in _ROWS.items() for effect, names, why in rows)

ENVIRONMENT: Final = tuple(
    name for row in TABLE if row.place == "environment" and row.effect is Effect.KEY for name in row.named()
)


def _effects() -> dict[str, dict[str, Effect]]:
    effects: dict[str, dict[str, Effect]] = {}
    for row in TABLE:
        effects.setdefault(row.place, {}).update(dict.fromkeys(row.named(), row.effect))
    return effects


_EFFECTS: Final = _effects()
# Inputs that the namespace describes in fields of their own.
_ELSEWHERE: Final = {
    "model_config.hf_config",
    "model_config.hf_text_config",
    "cache_config.cache_dtype",
    "parallel_config.tensor_parallel_size",
    "multimodal_config.mm_encoder_fp8_scale_path",
}


def options(vllm_config: Any) -> dict[str, Any]:
    """Return the inputs whose value is in the key, and those that the table does not list, by place and name.

    Defaults are left out, so that a new field in a later vLLM changes no key.
    """
    found: dict[str, Any] = {}
    for place, value in _places(vllm_config):
        known = _EFFECTS.get(place, {})
        for name, item, default in _fields(value):
            effect = known.get(name) or known.get("*") or Effect.KEY
            where = f"{place}.{name}" if name else place
            if effect is Effect.KEY and where not in _ELSEWHERE and not _is_default(item, default):
                found[where] = canonical(item)
    for name in ENVIRONMENT:
        if name in os.environ:
            found[f"environment.{name}"] = os.environ[name]
    return found


def _places(vllm_config: Any) -> list[tuple[str, Any]]:
    places = [(field.name, getattr(vllm_config, field.name, None)) for field in dataclasses.fields(vllm_config)]
    return [*places, ("multimodal_config", getattr(vllm_config.model_config, "multimodal_config", None))]


def _fields(value: Any) -> list[tuple[str, Any, Any]]:
    """Return name, value and default of each field. A value without fields is one field without a name."""
    if not dataclasses.is_dataclass(value):
        return [("", value, None)]
    return [(field.name, getattr(value, field.name, None), _default(field)) for field in dataclasses.fields(value)]


def _default(field: Any) -> Any:
    if callable(unwrap := getattr(field.default, "get_default", None)):  # a pydantic field
        return unwrap(call_default_factory=True)
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_default(value: Any, default: Any) -> bool:
    if value is None or value in ("", "auto", [], {}, ()) or value == default:
        return True
    return isinstance(value, str) and value.startswith("vllm.")  # chosen by the platform
