"""The table of all that could change KV: what it is, whether it changes the key, and why.

Data, not prose: the namespace is made from it (:func:`options`), docs/identity.md is generated from it
(scripts/gen-identity-docs), and a test changes every one of these in real configurations. A field of vLLM's
configuration that the table does not know, a newer one, is part of the key wherever it differs from its default: what
is not known may change KV, and a miss is the smaller harm.
"""

import dataclasses
import enum
import os
from typing import Any, Final

from host_control.vllm.identity.canonical import canonical

__all__ = ["ENVIRONMENT", "TABLE", "Effect", "Input", "options"]


class Effect(enum.StrEnum):
    """What an input does to the key."""

    KEY = "yes"
    DERIVED = "through what comes of it"
    NO = "no"
    ROUNDING = "no, rounding"
    OFF = "no cache"


@dataclasses.dataclass(frozen=True)
class Input:
    """One row, or several that share a reason.

    Attributes:
        place: where it is found: an attribute of ``VllmConfig``, or a word for what is not in it.
        names: of fields there; ``*`` for all that no other row of this place names.
        effect: on the key.
        why: in a sentence.
    """

    place: str
    names: str
    effect: Effect
    why: str

    def named(self) -> list[str]:
        """Return the names, one by one."""
        return self.names.split()


_K, _D, _N, _R, _O = Effect.KEY, Effect.DERIVED, Effect.NO, Effect.ROUNDING, Effect.OFF

TABLE: Final = (
    # ------------------------------------------------------------------ the model
    Input(
        "weights",
        "every_byte",
        _K,
        "SHA-256 of each file that the loader takes, or the name that a hub's cache gave it",
    ),
    Input("weights", "path name hub_or_local", _N, "the same bytes are the same weights wherever they lie"),
    Input(
        "weights",
        "streamed modelexpress ipc_cache secondary",
        _O,
        "they come from where their content is not known",
    ),
    Input("model", "class", _K, "what computes: vLLM's own, Transformers', a plugin's, an override's, with its source"),
    Input("model", "remote_code", _K, "with --trust-remote-code, the Python files beside the model are what computes"),
    Input(
        "model",
        "rope",
        _K,
        "LongRoPE turns keys by the long factors where the context is longer than it was trained with; of "
        "kinds that are not known to ignore it, max_model_len is in the key",
    ),
    Input("model", "quantization_files", _K, "quantize_config.json and its like, where the weights are quantized"),
    Input(
        "model_config",
        "hf_config hf_text_config",
        _K,
        "all of it after overrides: shapes, rope_parameters, windows, quantization and what it ignores",
    ),
    Input(
        "model_config",
        "dtype quantization quantization_config",
        _K,
        "they say how weights and activations are rounded; the last holds what is not quantized",
    ),
    Input(
        "model_config",
        "hf_config_path hf_overrides config_format disable_sliding_window generation_config override_generation_config",
        _D,
        "hf_config, as the model has left it, holds what they change",
    ),
    Input(
        "model_config",
        "model_impl model_class_overrides convert trust_remote_code code_revision",
        _D,
        "the class that computes, and the code beside the model",
    ),
    Input("model_config", "model revision", _D, "the content of files is hashed, their name is not"),
    Input("model_config", "model_weights", _O, "weights streamed from object storage cannot be hashed here"),
    Input("model_config", "seed", _D, "dummy weights are made of it, and nothing else that is cached"),
    Input("model_config", "max_model_len", _D, "see model.rope; else it only bounds requests"),
    Input("model_config", "runner pooler_config", _O, "only engines that generate are cached"),
    Input("model_config", "multimodal_config", _D, "see multimodal_config"),
    Input(
        "model_config",
        "is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len "
        "allow_deprecated_quantization",
        _N,
        "follow from what is in the key, or only check it",
    ),
    Input("model_config", "enforce_eager disable_cascade_attn", _R, "the same sums in another order"),
    Input(
        "model_config",
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
        "renderer_num_workers enable_prompt_embeds",
        _N,
        "the key is made of token ids, whoever made them; requests with prompt embeddings are served without the cache",
    ),
    Input(
        "model_config",
        "allowed_local_media_path allowed_media_domains hf_token served_model_name max_logprobs "
        "logprobs_mode use_fp64_gumbel enable_trace_replay return_sampling_mask logits_processors",
        _N,
        "names, access, and what is made of logits",
    ),
    Input(
        "model_config",
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator",
        _N,
        "where memory lies; weights that change at run time are the epoch's matter",
    ),
    # ------------------------------------------------------------------ caches
    Input("cache_config", "cache_dtype", _K, "the namespace's dtype, with the 8-bit format that this GPU means by fp8"),
    Input(
        "cache_config",
        "kv_cache_dtype_skip_layers sliding_window kv_sharing_fast_prefill swa_bounded_replay "
        "mamba_cache_dtype mamba_ssm_cache_dtype",
        _K,
        "which layers keep which tokens, and as what",
    ),
    Input("cache_config", "*", _N, "blocks, amounts of memory and the engine's own prefix cache"),
    Input("kv_cache_config", "layers heads_of_the_rank head_size kind", _K, "what a record holds is in its key"),
    Input("kv_cache_config", "block_size number_of_blocks layout", _N, "a chunk is stored in an order of its own"),
    # ------------------------------------------------------------------ where and how it runs
    Input("parallel_config", "tensor_parallel_size", _K, "by the heads of each rank; a latent is the same on all"),
    Input("parallel_config", "worker_cls worker_extension_cls", _K, "code of the user's, where it is not vLLM's own"),
    Input(
        "parallel_config",
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size",
        _O,
        "more than one is not supported",
    ),
    Input("parallel_config", "*", _R, "where experts, batches and collectives run; sums in another order"),
    Input("scheduler_config", "*", _R, "how tokens are batched; sums in another order"),
    Input("device_config", "*", _R, "a CPU, a GPU and another GPU compute the same within rounding"),
    Input(
        "load_config",
        "load_format",
        _D,
        "the files that it takes are hashed; formats that are not vLLM's own are in the key besides",
    ),
    Input("load_config", "model_loader_extra_config ignore_patterns download_dir", _D, "which files there are"),
    Input("load_config", "*", _N, "how files are read"),
    Input("offload_config", "*", _N, "where weights lie"),
    Input(
        "attention_config",
        "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits use_non_causal",
        _K,
        "they round queries or leave tokens out: more than rounding of sums",
    ),
    Input("attention_config", "*", _R, "backends and tile sizes; sums in another order"),
    Input(
        "mamba_config",
        "enable_stochastic_rounding stochastic_rounding_philox_rounds",
        _K,
        "states are rounded at random",
    ),
    Input("mamba_config", "*", _R, "kernels"),
    Input(
        "kernel_config",
        "moe_backend linear_backend linear_backend_per_quant",
        _K,
        "some of them quantize activations; left to vLLM, they are auto",
    ),
    Input("kernel_config", "*", _R, "kernels and their tuning"),
    Input("compilation_config", "*", _R, "fused and compiled kernels; sums in another order"),
    Input("optimization_level", "*", _R, "chooses among the above"),
    Input("performance_mode", "*", _R, "chooses among the above"),
    Input("additional_config", "*", _K, "what a platform's plugin reads; nobody here knows what it does"),
    Input("quant_config", "*", _D, "made of hf_config, quantization_config and the quantization's files"),
    Input("engram_config", "*", _N, "where embeddings lie"),
    Input("diffusion_config", "*", _O, "a token's KV depends on later ones"),
    Input(
        "speculative_config",
        "*",
        _D,
        "drafts are verified, and only verified tokens have keys; where draft layers have KV of their own, the "
        "method, their configuration and their weights are in the key",
    ),
    Input("lora_config", "*", _D, "see the request's adapter: requests without one are not touched by it"),
    Input("watermark_config", "*", _N, "of sampling"),
    Input("structured_outputs_config", "*", _N, "of sampling"),
    Input("reasoning_config", "*", _N, "of what is made of tokens"),
    Input("aux_output_config", "*", _N, "what else is returned"),
    Input("observability_config", "*", _N, "what is shown"),
    Input("logging_config", "*", _N, "what is shown"),
    Input("profiler_config", "*", _N, "what is measured"),
    Input(
        "kv_transfer_config",
        "*",
        _N,
        "this connector; what of its own configuration matters is in section host below",
    ),
    Input("kv_events_config", "*", _N, "who is told"),
    Input("ec_transfer_config", "*", _N, "where encoders' outputs come from"),
    Input("ec_manager_config", "*", _N, "where encoders' outputs stay"),
    Input("weight_transfer_config", "*", _N, "weights that change at run time are the epoch's matter"),
    Input("instance_id", "*", _N, "a name"),
    Input("shutdown_timeout", "*", _N, "how an engine ends"),
    # ------------------------------------------------------------------ inputs that are no tokens
    Input(
        "multimodal_config",
        "language_model_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
        _K,
        "what the encoder and the model do with what the processor has made; the scales by content",
    ),
    Input(
        "multimodal_config",
        "mm_processor_kwargs media_io_kwargs mm_device_do_normalize limit_per_prompt enable_mm_embeds",
        _D,
        "the tensors that the processor has made are hashed",
    ),
    Input("multimodal_config", "mm_encoder_attn_backend mm_encoder_tp_mode", _R, "sums in another order"),
    Input("multimodal_config", "*", _N, "caches, transports, profiling"),
    Input("request", "tokens", _K, "the chain"),
    Input("request", "cache_salt", _K, "separates users who do not share"),
    Input("request", "epoch", _K, "new after reset_cache"),
    Input("request", "adapter_files", _K, "adapter_config.json and weights by content, as the engine loaded them"),
    Input(
        "request",
        "adapter_application",
        _K,
        "lora_dtype, target modules, the tower's adapter, the layout of experts",
    ),
    Input(
        "request",
        "adapter_name adapter_number adapter_path max_lora_rank max_loras max_cpu_loras fully_sharded_loras",
        _N,
        "names and places; a rank that does not fit is refused by vLLM",
    ),
    Input(
        "request",
        "adapter_changed_while_running load_inplace",
        _O,
        "which of its contents the engine has loaded cannot be known",
    ),
    Input("request", "features", _K, "the SHA-256 of the tensors that the processor made, kind, place and length"),
    Input("request", "mm_uuids mm_hash counter", _N, "the user's or vLLM's word for an input, not its content"),
    Input(
        "request",
        "features_elsewhere identifier_of_two_inputs",
        _O,
        "tensors that are in a worker's memory alone, and identifiers that have stood for another content "
        "in this engine",
    ),
    Input("request", "prompt_embeds pooling streaming_input", _O, "tokens do not name their KV"),
    Input("request", "sampling priority arrival", _N, "what is made of logits"),
    # ------------------------------------------------------------------ of ours
    Input("host", "quantizer bins value_bins scale_tokens chunk_tokens", _K, "what is stored"),
    Input("host", "*", _N, "how it is moved"),
    # ------------------------------------------------------------------ around it
    Input(
        "environment",
        "VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
        "VLLM_HUMMING_USE_F16_ACCUM VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_DEEPEPLL_NVFP4_DISPATCH "
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
        "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_CPU_INT4_W4A8 "
        "VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM VLLM_MLA_DISABLE",
        _K,
        "where they are set: they round activations or route them elsewhere",
    ),
    Input("environment", "VLLM_USE_MODELSCOPE", _O, "which files were loaded is not known; give the folder"),
    Input("environment", "*", _R, "kernels, threads, network, logs"),
    Input(
        "versions",
        "vllm transformers torch cuda drivers shadowserve",
        _R,
        "the same computation, compiled otherwise",
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
# Of these, the namespace says in a field of its own what they mean.
_ELSEWHERE: Final = {
    "model_config.hf_config",
    "model_config.hf_text_config",
    "cache_config.cache_dtype",
    "parallel_config.tensor_parallel_size",
    "multimodal_config.mm_encoder_fp8_scale_path",
}


def options(vllm_config: Any) -> dict[str, Any]:
    """Return what the table takes into the key by its value, and what it does not know, by place and name.

    What is at its default is left out, so that a field that a later vLLM adds changes no key.
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
    """Return name, value and default of each field; of what has no fields, itself without a name."""
    if not dataclasses.is_dataclass(value):
        return [("", value, None)]
    return [(field.name, getattr(value, field.name, None), _default(field)) for field in dataclasses.fields(value)]


def _default(field: Any) -> Any:
    if callable(unwrap := getattr(field.default, "get_default", None)):  # pydantic's
        return unwrap(call_default_factory=True)
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_default(value: Any, default: Any) -> bool:
    if value is None or value in ("", "auto", [], {}, ()) or value == default:
        return True
    return isinstance(value, str) and value.startswith("vllm.")  # a platform's choice
