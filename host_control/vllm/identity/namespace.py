"""The namespace of what an engine computes: everything that is the same for all of its requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from host_control.config import HostConfig
from host_control.layouts import element_type
from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.identity.content import ContentHashes
from host_control.vllm.identity.positions import positions
from host_control.vllm.identity.table import options
from host_control.vllm.identity.weights import code_digests, model_class, model_folder, weight_digests
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import KVNamespace

__all__ = ["chunk_shape", "rank_namespace"]

# Of a model's configuration: names, versions, tokens that mean something to whoever samples, and training. The
# context's length is here because some models write it into their configuration; :mod:`positions` says what it does.
_MEANINGLESS: Final = {
    "_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "architectures_original", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range", "attention_dropout",
    "hidden_dropout", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "max_model_len",
}  # fmt: skip


def rank_namespace(
    vllm_config: Any, kv_cache_config: Any, config: HostConfig, tp_rank: int, hashes: ContentHashes
) -> KVNamespace:
    """Return the identity of what one rank computes, once its weights are loaded. ``uncacheable`` has said ``None``.

    Raises:
        UncacheableError: what is computed cannot be named.
    """
    try:
        return _named(vllm_config, kv_cache_config, config, tp_rank, hashes)
    except UncacheableError:
        raise
    except Exception as error:  # of a vLLM that is not as it was: an engine must start all the same
        raise UncacheableError(f"what this engine computes cannot be named: {error!r}") from error


def _named(
    vllm_config: Any, kv_cache_config: Any, config: HostConfig, tp_rank: int, hashes: ContentHashes
) -> KVNamespace:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    latent = type(spec).__name__ == "MLAAttentionSpec"
    whole = element_type(spec.dtype) is not DType.UINT8
    binnable = whole or _is_float8_e4m3(spec.dtype, str(vllm_config.cache_config.cache_dtype))
    quantizer = config.quantizer if whole or (binnable and config.quantizer == "binned") else "passthrough"
    heads, total = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)
    return KVNamespace(
        model=digest(computation(vllm_config, hashes)),
        weights=digest(weight_digests(vllm_config, hashes)),
        dtype=_cache_dtype(vllm_config, spec.dtype),
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


def computation(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any]:
    """Return what turns tokens and weights into KV, by name: the model's class, configuration, code and options.

    Raises:
        UncacheableError: see :func:`rank_namespace`.
    """
    model = vllm_config.model_config
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UncacheableError("a diffusion model's KV depends on later tokens")
    described = canonical(model.hf_config)
    text = canonical(model.hf_text_config)
    named = model_class(model, hashes)
    _positions_of_one_request(model, named["architecture"], (described, text))
    return {
        "class": named,
        "hf_config": _meaningful(described),
        "hf_text_config": _meaningful(text),
        "dtype": str(model.dtype),
        "quantization_files": _quantization_files(vllm_config, hashes),
        "code": code_digests(vllm_config, hashes),
        "positions": positions({"whole": described, "text": text}, model.max_model_len),
        "options": options(vllm_config),
        "encoder_scales": _encoder_scales(model, hashes),
    }


def _positions_of_one_request(model: Any, architecture: str, described: tuple[Any, ...]) -> None:
    """Raise where rotated keys depend on the requests that happen to be in a batch: Transformers' own rotary code."""
    if not architecture.startswith("Transformers"):
        return
    for kind, *_ in positions({"": dict(enumerate(described))}, model.max_model_len):
        raise UncacheableError(
            f"{architecture} with rotary positions of kind '{kind}' rotates by the longest in a batch"
        )


def _meaningful(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _meaningful(item) for key, item in value.items() if key not in _MEANINGLESS}
    return [_meaningful(item) for item in value] if isinstance(value, list) else value


def _quantization_files(vllm_config: Any, hashes: ContentHashes) -> list[str]:
    """Return the digests of files that say how weights are quantized, where the model's configuration does not."""
    quantization = getattr(vllm_config, "quant_config", None)
    if quantization is None:
        return []
    folder = model_folder(vllm_config)
    return hashes.digests([folder / name for name in quantization.get_config_filenames() if (folder / name).is_file()])


def _encoder_scales(model: Any, hashes: ContentHashes) -> list[str]:
    path = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    return hashes.digests([Path(path)]) if path else []


def _cache_dtype(vllm_config: Any, dtype: Any) -> str:
    """Return what a cache's elements are, and of 8 bits, which vLLM keeps as bytes, in which format.

    ``fp8`` is OCP's E4M3 but for some AMD GPUs, which have a format of their own.
    """
    named = str(dtype).removeprefix("torch.")
    if element_type(dtype) is not DType.UINT8:
        return named
    from vllm.platforms import current_platform

    asked = str(vllm_config.cache_config.cache_dtype)
    if asked in ("fp8", "fp8_e4m3"):
        asked = f"fp8_e4m3 as {str(current_platform.fp8_dtype()).removeprefix('torch.')}"
    return f"{asked}/{named}"


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


def chunk_shape(namespace: KVNamespace, layout: Any, config: HostConfig) -> ChunkLayout:
    """Return how this rank's chunks lie in shared memory; ``layout`` is its ``PagedLayout``."""
    dtype = element_type(layout.dtype)
    quantizer = Quantizer.from_label(namespace.quantizer)
    assert dtype is not None, "a cache that the layout took"
    parameters = namespace.quantizer_parameters or {}
    return ChunkLayout(
        namespace=namespace.digest(),
        dtype=DType.FLOAT8_E4M3 if dtype is DType.UINT8 and quantizer is Quantizer.BINNED else dtype,
        layers=layout.layers,
        kinds=layout.kinds,
        vector_length=layout.vector_length,
        tokens=config.chunk_tokens,
        quantizer=quantizer,
        bins=parameters.get("bins", 0),
        value_bins=parameters.get("value_bins", 0),
        scale_tokens=parameters.get("scale_tokens", 1),
    )
