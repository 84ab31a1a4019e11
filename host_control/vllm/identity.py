"""Which KV a vLLM engine computes: its namespace.

Two engines share KV only if everything that changes its values is the same. The model's name alone does not say that:
weights change under the same path, and overrides change the computation. So the namespace's revision also holds a
fingerprint of the model's configuration and of samples of its local weights.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from host_control.client import ChunkShape
from host_control.config import HostConfig
from host_control.layouts import dtype_name
from shadowserve.keys import KVNamespace

__all__ = ["chunk_shape", "request_extra", "rank_namespace"]

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE_BYTES: Final = 1 << 16
_SAMPLES: Final = 16
_VOLATILE: Final = {"_name_or_path", "transformers_version", "architectures_original"}


def rank_namespace(vllm_config: Any, kv_cache_config: Any, config: HostConfig, tp_rank: int) -> KVNamespace:
    """Return the identity of what one rank computes. ``uncacheable`` has said ``None``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    latent = type(spec).__name__ == "MLAAttentionSpec"
    whole = dtype_name(spec.dtype) != "uint8"
    binnable = whole or _is_float8_e4m3(spec.dtype, str(vllm_config.cache_config.cache_dtype))
    quantizer = config.quantizer if whole or (binnable and config.quantizer == "binned") else "passthrough"
    heads, total = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)
    cache_dtype = str(spec.dtype).removeprefix("torch.")
    if not whole:
        cache_dtype = f"{vllm_config.cache_config.cache_dtype}/{cache_dtype}"
    return KVNamespace(
        model=str(model.model),
        revision=f"{model.revision or ''}+{_fingerprint(vllm_config)}",
        dtype=cache_dtype,
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        attention="mla" if latent else ("mha" if heads == total else "gqa"),
        chunk_tokens=config.chunk_tokens,
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        quantizer=quantizer,
        quantizer_parameters=_binned_parameters(config, latent) if quantizer == "binned" else None,
    )


def _is_float8_e4m3(dtype: Any, cache_dtype: str) -> bool:
    """Return whether an 8-bit cache, which vLLM keeps as bytes, holds OCP's E4M3: some AMD GPUs have another."""
    import torch
    from vllm.platforms import current_platform

    if dtype is torch.float8_e4m3fn:
        return True
    named = dtype is torch.uint8 and cache_dtype in ("fp8", "fp8_e4m3")
    return named and current_platform.fp8_dtype() is torch.float8_e4m3fn


def _binned_parameters(config: HostConfig, latent: bool) -> dict[str, int]:
    """Return what the binned quantizer is asked for; what is left out is as it was before it could be chosen."""
    parameters = {"bins": config.bins}
    if config.value_bins != config.bins and not latent:
        parameters["value_bins"] = config.value_bins
    if config.scale_tokens != 1:
        parameters["scale_tokens"] = config.scale_tokens
    return parameters


def chunk_shape(namespace: KVNamespace, layout: Any, config: HostConfig) -> ChunkShape:
    """Return how this rank's chunks lie in shared memory; ``layout`` is its ``PagedLayout``."""
    dtype = dtype_name(layout.dtype) or "uint8"
    parameters = namespace.quantizer_parameters or {}
    return ChunkShape(
        namespace=namespace.digest(),
        dtype="float8_e4m3" if dtype == "uint8" and namespace.quantizer == "binned" else dtype,
        layers=layout.layers,
        kinds=layout.kinds,
        vector_length=layout.vector_length,
        chunk_tokens=config.chunk_tokens,
        quantizer=namespace.quantizer,
        bins=parameters.get("bins", 0),
        value_bins=parameters.get("value_bins", 0),
        scale_tokens=parameters.get("scale_tokens", 1),
    )


def request_extra(request: Any, epoch: str) -> bytes:
    """Return what distinguishes a request's KV beside its tokens: salt, adapter, multimodal inputs.

    Args:
        request: of vLLM.
        epoch: changes when the engine's caches are reset (new weights, perhaps); empty before the first time.
    """
    lora = request.lora_request
    features = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]
    if not (request.cache_salt or lora or features or epoch):
        return b""
    parts = {
        "salt": request.cache_salt,
        "lora": [lora.lora_name, lora.lora_int_id, lora.lora_path] if lora is not None else None,
        "features": features,
        "epoch": epoch,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _fingerprint(vllm_config: Any) -> str:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf_config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    described = {
        "hf_config": hf_config,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": str(cache.cache_dtype),
        "load_format": "dummy" if str(vllm_config.load_config.load_format) == "dummy" else "",
        "seed": model.seed if str(vllm_config.load_config.load_format) == "dummy" else "",
        # Some position encodings depend on it.
        "max_model_len": model.max_model_len if "rope_scaling" in json.dumps(hf_config, default=str) else "",
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for part in _weight_samples(Path(str(model.model))):
        digest.update(part)
    return digest.hexdigest()[:32]


def _weight_samples(folder: Path) -> Iterator[bytes]:
    """Yield names, sizes and samples of local weight files: enough to tell retrained weights from the old ones."""
    if not folder.is_dir():
        return
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        yield f"{path.name}:{size}".encode()
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                yield file.read(_SAMPLE_BYTES)
