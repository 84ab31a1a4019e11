"""The identity of an SGLang engine's KV: everything but tokens, which SGLang's page hashes contain.

Weights, code and quantization count by content, the model's configuration after overrides, and each argument of the
server that differs from its default and is not in ``_MEANINGLESS``. Arguments of later releases are unknown, so they
count. The digest begins with the engine's name: no record of SGLang is a record of vLLM.
"""

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.identity.content import ContentHashes, changed_since, hub_folder
from host_control.vllm.identity.namespace import meaningful, positions
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout
from shadowserve.keys import KVNamespace, ModelIdentity

_MEANINGLESS: Final = re.compile(
    # Where things are and who asks for them; the content of weights is hashed.
    "model_path|tokenizer.*|served_model_name|revision|download_dir|host|port|.*_port|.*_addr|.*_path|.*_paths|.*_ip|"
    ".*_dir|.*_folder|.*_file|.*_endpoints?|.*_urls?|ssl_.*|api_key|admin_api_key|smg_.*|grpc_.*|http2_.*|.*http2|"
    "sidecar.*|fastapi_.*|weight_loader_.*|weight_version|model_checksum|"
    # What is shown or recorded.
    "log_.*|.*log_interval|.*metrics.*|bucket_.*|.*_buckets|.*trace.*|.*_logging|stat_loggers|crash_.*|show_.*|"
    "enable_cache_report|kv_events_config|load_publish_endpoint|otlp_.*|uvicorn_.*|decode_log_interval|"
    "enable_request_time_stats_logging|return_.*|enable_return_.*|file_storage_path|stream.*|incremental_.*|"
    "skip_tokenizer_init|chat_template|.*chat_template.*|completion_template|reasoning_parser|tool_.*|warmups|"
    "skip_server_warmup|constrained_json_.*|grammar_backend|sampling_.*|preferred_sampling_params|"
    # How much runs at once, in which order, and where it runs.
    "mem_fraction_static|max_.*|chunked_prefill_size|prefill_(max|delayer|decode).*|enable_dynamic_chunking|"
    "schedule.*|.*priority.*|retraction_.*|disable_overlap_schedule|num_continuous_decode_steps|enable_mixed_chunk|"
    "radix_eviction_.*|disable_radix_cache|device|base_gpu_id|gpu_id_step|random_seed|.*watchdog_timeout|"
    "dist_.*|nnodes|node_rank|"
    "tp_size|pp_size|dp_size|dp_rank|load_balance_method|numa_node|gc_.*|cuda_graph_.*|.*cuda_graph.*|.*cudagraph.*|"
    "use_ray|sleep_on_idle|enable_memory_saver|enable_.*cpu_backup|"
    "hicache_.*|enable_hierarchical_cache|page_size|disable_custom_all_reduce|enable_p2p_check|"
    # How the model's files are read; what they make is in the model's configuration.
    "trust_remote_code|json_model_override_args|context_length|load_format|dtype|enable_multimodal|"
    "disaggregation_.*|"
    # The engine's own marks.
    "_.*"
)
"""Arguments of the server that do not change KV by more than the order of sums, or that another input covers."""
_REFUSED: Final = {
    "enable_lora": "LoRA: SGLang's keys have an adapter's name, not its content",
    "lora_paths": "LoRA: SGLang's keys have an adapter's name, not its content",
    "speculative_algorithm": "speculative decoding: draft layers have KV of their own",
    "custom_weight_loader": "weights of a custom loader",
    "is_embedding": "an embedding model",
    "dllm_algorithm": "a diffusion model: a token's KV depends on later tokens",
    "enable_lmcache": "LMCache beside it",
    "enable_flexkv": "FlexKV beside it",
    "rl_on_policy_target": "weights of a training run",
    "enable_eplb": "experts that move while the engine runs",
    "checkpoint_engine_wait_weights_before_ready": "weights of a checkpoint engine",
    "forward_hooks": "forward hooks",
    "kt_weight_path": "weights of KTransformers",
    "modelopt_checkpoint_restore_path": "quantization of a ModelOpt checkpoint",
    "disaggregation_decode_enable_offload_kvcache": "a decode engine that stores without telling the prefix",
}
_FORMATS: Final = {
    "auto", "pt", "safetensors", "npcache", "gguf", "bitsandbytes", "mistral", "fastsafetensors",
}  # fmt: skip
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_ENVIRONMENT: Final = re.compile(
    r"SGLANG_.*(QUANT|FP8|FP4|INT8|INT4|W4A|W8A|TF32|BF16|PRECISION|ROUND|ROPE|EXTERNAL|SIMULATE|SPARSE|SKIP_LAYER).*"
)
"""Variables that may change how values are rounded or which code computes them."""


def refuse_arguments(arguments: Any) -> None:
    """Raise UncacheableError for an engine whose KV the keys would not identify."""
    for name, what in _REFUSED.items():
        if getattr(arguments, name, None):
            raise UncacheableError(f"{what} is not supported (--{name.replace('_', '-')})")
    if getattr(arguments, "hicache_host_memory_mode", "cache") != "cache":
        raise UncacheableError("--hicache-host-memory-mode other than cache: SGLang does not tell the whole prefix")
    if getattr(arguments, "enable_memory_saver", False) and not getattr(arguments, "enable_weights_cpu_backup", False):
        raise UncacheableError("--enable-memory-saver loses the weights without --enable-weights-cpu-backup")
    if str(arguments.load_format) not in _FORMATS:
        raise UncacheableError(f"the content of weights with --load-format {arguments.load_format} is not known")


def refuse_ranks(ranks: Any) -> None:
    """Raise UncacheableError for engines whose ranks hold parts of pages that have no name here."""
    for name, what in (("attn_cp_size", "context parallelism"), ("dcp_size", "decode context parallelism")):
        if getattr(ranks, name, 1) > 1:
            raise UncacheableError(f"{what} is not supported")
    if getattr(ranks, "should_split_heads", False):
        raise UncacheableError("pages that are split by heads (tp_lcm_size) are not supported")


def engine_identity(arguments: Any, model: Any, dtype: Any, page_tokens: int, hashes: ContentHashes) -> ModelIdentity:
    """Return the identity of an engine's model.

    Args:
        arguments: SGLang's ServerArgs.
        model: SGLang's ModelConfig.
        dtype: Element type of the KV cache.
        page_tokens: Tokens of a page.

    Raises:
        UncacheableError: An input is not known; the message says which.
    """
    import torch

    refuse_arguments(arguments)
    if model.is_multimodal:
        raise UncacheableError(
            "images and other media are not supported, since SGLang's keys have 64 bits of their content and not its "
            "shape; turn them off with --enable-multimodal false or use a text model"
        )
    folder, files = _files(arguments)
    started = _started_ns()
    described = canonical(model.hf_config)
    configuration = _configuration(arguments, folder, described)
    for path in (*files, *configuration, *folder.glob("*.json"), *folder.glob("*.py"), *_branches(folder)):
        if changed_since(path, started):
            raise UncacheableError(f"{path} has changed since this engine started; restart the engine")
    computed = {
        "engine": "sglang",
        "hf_config": meaningful(described),
        "architectures": list(model.hf_config.architectures or ()),
        "dtype": str(model.dtype),
        "positions": positions({"whole": described}, int(model.context_len)),
        "page_tokens": page_tokens,
        "hip": torch.version.hip is not None,  # the fp8 formats of some AMD GPUs have other values
        "arguments": _arguments(arguments),
        "environment": {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)},
        "configuration": sorted(hashes.digests(configuration)),
    }
    weights = sorted(hashes.digests(files))
    return ModelIdentity(
        model=digest(computed),
        weights=digest(weights),
        dtype=str(dtype).removeprefix("torch."),
        chunk_tokens=page_tokens,
    )


def shard_layout(identity: ModelIdentity, layout: ChunkLayout, pool: Any, config: Any, heads_total: int) -> ChunkLayout:
    """Return a layout with the namespace of this rank's layers and heads.

    Args:
        pool: The host pool, with its first and last layer.
        config: SGLang's HiCacheStorageConfig.
        heads_total: KV heads of the model.
    """
    group, heads = "full", (0, 1)
    if layout.kinds == 2:
        count, rank, ranks = int(pool.head_num), int(config.tp_rank), int(config.tp_size)
        if count * ranks == heads_total:
            heads = (rank * count, (rank + 1) * count)
        else:  # heads are repeated on several ranks, in an order that is SGLang's business
            heads, group = (0, count), f"full, rank {rank} of {ranks}"
    first = int(pool.start_layer)
    return KVNamespace(model=identity, layers=(first, first + layout.layers), heads=heads, group=group).name(layout)


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments that count, without those that have their default."""
    found = {}
    for field in dataclasses.fields(arguments) if dataclasses.is_dataclass(arguments) else _struct_fields(arguments):
        value = getattr(arguments, field.name, None)
        if value != field.default and not _MEANINGLESS.fullmatch(field.name):
            found[field.name] = canonical(value)
    return found


def _struct_fields(arguments: Any) -> Any:
    from sglang.srt.server_args import record_fields

    return record_fields(type(arguments))


def _files(arguments: Any) -> tuple[Path, list[Path]]:
    """Return the model's folder and the files of its weights."""
    path = Path(str(arguments.model_path))
    if path.is_file():
        return path.parent, [path]
    folder = path
    if not path.is_dir():
        folder = hub_folder(str(arguments.model_path), revision=arguments.revision, cache_dir=arguments.download_dir)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if not files:
        raise UncacheableError(f"{folder} contains no weights of a known type ({', '.join(_WEIGHTS)})")
    return folder, files


def _branches(folder: Path) -> list[Path]:
    """Return the files that say which commit a branch of a model in a hub cache is."""
    cache = folder.parents[1] if folder.parent.name == "snapshots" else None
    return [path for path in cache.glob("refs/**/*") if path.is_file()] if cache else []


def _configuration(arguments: Any, folder: Path, described: Any) -> list[Path]:
    """Return files beside the weights that change what is computed: quantization and the model's own code."""
    files = [*folder.glob("*quant*.json"), *(folder.glob("*.py") if described.get("auto_map") else ())]
    if "--" in str(described.get("auto_map")):
        raise UncacheableError("a model whose code is in another repository is not supported")
    if scales := getattr(arguments, "quantization_param_path", None):
        files.append(Path(str(scales)))
    return sorted(files)


def _started_ns() -> int:
    """Return the time at which this process started, in nanoseconds."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time_ns() - int((uptime - ticks / os.sysconf("SC_CLK_TCK")) * 1e9)
