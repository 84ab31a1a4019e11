"""The table of all inputs that could change KV: their effect on the key, and the reason.

The namespace (:func:`options`) and docs/identity.md (scripts/gen-identity-docs) are generated from it, and a test
changes every input in real configurations. A field of vLLM's configuration that is not in the table, such as a newer
one, is part of the key if it differs from its default: it may change KV, and a miss is better than wrong tokens.
"""

import dataclasses
import enum
import os
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
        """Return the list of names."""
        return self.names.split()


_K, _D, _N, _R, _O = Effect.KEY, Effect.DERIVED, Effect.NO, Effect.ROUNDING, Effect.OFF

TABLE: Final = (
    # ------------------------------------------------------------------ the model
    Input(
        "weights",
        "every_byte",
        _K,
        "SHA-256 of each file that the loader reads, or its name in a hub cache, which is the SHA-256",
    ),
    Input("weights", "path name hub_or_local", _N, "the same bytes are the same weights, wherever they are stored"),
    Input(
        "weights",
        "streamed modelexpress ipc_cache secondary",
        _O,
        "the content of these sources is not known",
    ),
    Input("model", "class", _K, "the model's class: vLLM's, Transformers', a plugin's or an override, with its source"),
    Input("model", "remote_code", _K, "with --trust-remote-code, the model's own Python files compute"),
    Input(
        "model",
        "rope",
        _K,
        "LongRoPE uses its long factors if the context is longer than in training; for types that are not known to "
        "ignore it, max_model_len is in the key",
    ),
    Input("model", "quantization_files", _K, "quantize_config.json and similar files of quantized weights"),
    Input(
        "model_config",
        "hf_config hf_text_config",
        _K,
        "all fields after overrides: shapes, rope_parameters, windows, quantization and its exceptions",
    ),
    Input(
        "model_config",
        "dtype quantization quantization_config",
        _K,
        "how weights and activations are rounded, and which are not quantized",
    ),
    Input(
        "model_config",
        "hf_config_path hf_overrides config_format disable_sliding_window generation_config override_generation_config",
        _D,
        "hf_config contains their changes",
    ),
    Input(
        "model_config",
        "model_impl model_class_overrides convert trust_remote_code code_revision",
        _D,
        "see model.class and model.remote_code",
    ),
    Input("model_config", "model revision", _D, "the content of files is hashed, not their names"),
    Input("model_config", "model_weights", _O, "weights streamed from object storage cannot be hashed"),
    Input("model_config", "seed", _D, "it only affects dummy weights, which are in the key"),
    Input("model_config", "max_model_len", _D, "see model.rope; otherwise it only limits requests"),
    Input("model_config", "runner pooler_config", _O, "only engines that generate text use the cache"),
    Input("model_config", "multimodal_config", _D, "see multimodal_config"),
    Input(
        "model_config",
        "is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len "
        "allow_deprecated_quantization",
        _N,
        "follow from other inputs, or only check them",
    ),
    Input("model_config", "enforce_eager disable_cascade_attn", _R, "the same sums in another order"),
    Input(
        "model_config",
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
        "renderer_num_workers enable_prompt_embeds",
        _N,
        "the key is computed from token IDs; requests with prompt embeddings run without the cache",
    ),
    Input(
        "model_config",
        "allowed_local_media_path allowed_media_domains hf_token served_model_name max_logprobs "
        "logprobs_mode use_fp64_gumbel enable_trace_replay return_sampling_mask logits_processors",
        _N,
        "names, access, and sampling",
    ),
    Input(
        "model_config",
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator",
        _N,
        "location of memory; weights that change at run time start a new epoch",
    ),
    # ------------------------------------------------------------------ caches
    Input("cache_config", "cache_dtype", _K, "the namespace's dtype, with the 8-bit format that the GPU uses for fp8"),
    Input(
        "cache_config",
        "kv_cache_dtype_skip_layers sliding_window kv_sharing_fast_prefill swa_bounded_replay "
        "mamba_cache_dtype mamba_ssm_cache_dtype",
        _K,
        "which layers keep which tokens, and in which dtype",
    ),
    Input("cache_config", "*", _N, "block sizes, memory sizes and the engine's own prefix cache"),
    Input("kv_cache_config", "layers heads_of_the_rank head_size kind", _K, "the contents of a record are in its key"),
    Input("kv_cache_config", "block_size number_of_blocks layout", _N, "stored chunks have a layout of their own"),
    # ------------------------------------------------------------------ devices, kernels and parallelism
    Input("parallel_config", "tensor_parallel_size", _K, "the heads of each rank; MLA is the same on all ranks"),
    Input(
        "parallel_config", "worker_cls worker_extension_cls", _K, "the user's code, unless they are vLLM's own classes"
    ),
    Input(
        "parallel_config",
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size",
        _O,
        "more than one is not supported",
    ),
    Input("parallel_config", "*", _R, "placement of experts, batches and collectives; another order of sums"),
    Input("scheduler_config", "*", _R, "how tokens are batched; another order of sums"),
    Input("device_config", "*", _R, "devices compute the same within rounding"),
    Input(
        "load_config",
        "load_format",
        _D,
        "the loaded files are hashed; formats of other loaders are in the key, too",
    ),
    Input(
        "load_config",
        "model_loader_extra_config ignore_patterns download_dir",
        _D,
        "they select the files that are hashed",
    ),
    Input("load_config", "*", _N, "how files are read"),
    Input("offload_config", "*", _N, "location of weights"),
    Input(
        "attention_config",
        "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits use_non_causal",
        _K,
        "they round queries or skip tokens, which is more than the rounding of sums",
    ),
    Input("attention_config", "*", _R, "backends and tile sizes; another order of sums"),
    Input(
        "mamba_config",
        "enable_stochastic_rounding stochastic_rounding_philox_rounds",
        _K,
        "recurrent state is rounded at random",
    ),
    Input("mamba_config", "*", _R, "kernels"),
    Input(
        "kernel_config",
        "moe_backend linear_backend linear_backend_per_quant",
        _K,
        "some backends quantize activations; the default is auto",
    ),
    Input("kernel_config", "*", _R, "kernels and their tuning"),
    Input("compilation_config", "*", _R, "fused and compiled kernels; another order of sums"),
    Input("optimization_level", "*", _R, "chooses among the above"),
    Input("performance_mode", "*", _R, "chooses among the above"),
    Input("additional_config", "*", _K, "options of platform plugins with unknown effects"),
    Input("quant_config", "*", _D, "it follows from hf_config, quantization_config and the quantization's files"),
    Input("engram_config", "*", _N, "location of embeddings"),
    Input("diffusion_config", "*", _O, "a token's KV depends on later tokens"),
    Input(
        "speculative_config",
        "*",
        _D,
        "only verified tokens have keys; if draft layers have KV of their own, the method, their configuration and "
        "their weights are in the key",
    ),
    Input("lora_config", "*", _D, "see the request's adapter; it does not affect requests without an adapter"),
    Input("watermark_config", "*", _N, "sampling"),
    Input("structured_outputs_config", "*", _N, "sampling"),
    Input("reasoning_config", "*", _N, "handling of output tokens"),
    Input("aux_output_config", "*", _N, "additional outputs"),
    Input("observability_config", "*", _N, "what is shown"),
    Input("logging_config", "*", _N, "what is shown"),
    Input("profiler_config", "*", _N, "what is measured"),
    Input(
        "kv_transfer_config",
        "*",
        _N,
        "the connector; see host for the keys of its configuration that change KV",
    ),
    Input("kv_events_config", "*", _N, "notifications"),
    Input("ec_transfer_config", "*", _N, "source of encoder outputs"),
    Input("ec_manager_config", "*", _N, "location of encoder outputs"),
    Input("weight_transfer_config", "*", _N, "weights that change at run time start a new epoch"),
    Input("instance_id", "*", _N, "a name"),
    Input("shutdown_timeout", "*", _N, "shutdown"),
    # ------------------------------------------------------------------ non-token inputs
    Input(
        "multimodal_config",
        "language_model_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
        _K,
        "how the encoder and the model use processed inputs; the scales by content",
    ),
    Input(
        "multimodal_config",
        "mm_processor_kwargs media_io_kwargs mm_device_do_normalize limit_per_prompt enable_mm_embeds",
        _D,
        "the processed tensors are hashed",
    ),
    Input("multimodal_config", "mm_encoder_attn_backend mm_encoder_tp_mode", _R, "another order of sums"),
    Input("multimodal_config", "*", _N, "caches, transports, profiling"),
    Input("request", "tokens", _K, "they form the prefix chain"),
    Input("request", "cache_salt", _K, "it separates users who do not share KV"),
    Input("request", "epoch", _K, "it changes with the weights and when the cache is reset"),
    Input("request", "adapter_files", _K, "content of adapter_config.json and weights, as loaded by the engine"),
    Input(
        "request",
        "adapter_application",
        _K,
        "lora_dtype, target modules, adapter of the vision tower, layout of experts",
    ),
    Input(
        "request",
        "adapter_name adapter_number adapter_path max_lora_rank max_loras max_cpu_loras fully_sharded_loras",
        _N,
        "names and locations; vLLM rejects a rank that does not fit",
    ),
    Input(
        "request",
        "adapter_changed_while_running load_inplace",
        _O,
        "the loaded content is unknown",
    ),
    Input("request", "features", _K, "SHA-256 of the processed tensors, modality, position and length"),
    Input("request", "mm_uuids mm_hash counter", _N, "names of an input, not its content"),
    Input(
        "request",
        "features_elsewhere identifier_of_two_inputs",
        _O,
        "tensors that are only in a worker's memory, and identifiers that were used for other content in this engine",
    ),
    Input("request", "prompt_embeds pooling streaming_input", _O, "tokens do not identify the KV"),
    Input("request", "sampling priority arrival", _N, "sampling and scheduling"),
    # ------------------------------------------------------------------ ShadowServe
    Input("host", "quantizer bins value_bins scale_tokens chunk_tokens", _K, "contents of records"),
    Input("host", "*", _N, "how records are moved"),
    # ------------------------------------------------------------------ environment
    Input(
        "environment",
        "VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
        "VLLM_HUMMING_USE_F16_ACCUM VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_DEEPEPLL_NVFP4_DISPATCH "
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
        "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_CPU_INT4_W4A8 "
        "VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM VLLM_MLA_DISABLE",
        _K,
        "if set, they change how activations are rounded or routed",
    ),
    Input("environment", "VLLM_USE_MODELSCOPE", _O, "the loaded files are not known; set --model to the folder"),
    Input("environment", "*", _R, "kernels, threads, network, logs"),
    Input(
        "versions",
        "vllm transformers torch cuda drivers shadowserve",
        _R,
        "the same computation, compiled differently",
    ),
)

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
