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
from shadowserve.keys import KVNamespace, ModelIdentity

__all__ = ["chunk_layout", "rank_namespace"]

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
    """Return what one rank computes and holds, once its weights are loaded. ``uncacheable`` has said ``None``.

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
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    latent = type(spec).__name__ == "MLAAttentionSpec"
    layers = (0, len(kv_cache_config.kv_cache_groups[0].layer_names))
    model = ModelIdentity(
        model=digest(computation(vllm_config, hashes)),
        weights=digest(weight_digests(vllm_config, hashes)),
        dtype=_cache_dtype(vllm_config, spec.dtype),
        chunk_tokens=config.chunk_tokens,
    )
    if latent:
        return KVNamespace(model=model, group="latent", layers=layers, heads=(0, 1))
    ranks = vllm_config.parallel_config.tensor_parallel_size
    total = vllm_config.model_config.get_total_num_kv_heads()
    first = tp_rank * total // ranks  # where there are more ranks than heads, neighbours hold the same one
    if spec.num_kv_heads == max(1, total // ranks):
        return KVNamespace(model=model, layers=layers, heads=(first, first + spec.num_kv_heads))
    # A model that divides its heads in a way of its own: who holds what is known only by the rank.
    group = f"full, rank {tp_rank} of {ranks}"
    return KVNamespace(model=model, group=group, layers=layers, heads=(0, spec.num_kv_heads))


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


def _is_float8_e4m3(cache_dtype: str) -> bool:
    """Return whether what :func:`_cache_dtype` has named is OCP's E4M3: some AMD GPUs have another."""
    asked, _, element = cache_dtype.partition("/")
    return element == "float8_e4m3fn" or (element == "uint8" and asked == "fp8_e4m3 as float8_e4m3fn")


def chunk_layout(namespace: KVNamespace, layout: Any, config: HostConfig) -> ChunkLayout:
    """Return how this rank's chunks lie in shared memory, and what becomes of them; ``layout`` is its ``PagedLayout``.

    Caches of 8 bits are stored as they are, but for E4M3 where it shall be binned.

    Raises:
        UncacheableError: no record holds such a chunk.
    """
    dtype, quantizer = element_type(layout.dtype), Quantizer.from_label(config.quantizer)
    assert dtype is not None, "a cache that the layout took"
    if dtype is DType.UINT8 and quantizer is Quantizer.BINNED and _is_float8_e4m3(namespace.model.dtype):
        dtype = DType.FLOAT8_E4M3
    elif dtype is DType.UINT8:
        quantizer = Quantizer.PASSTHROUGH
    binned: dict[str, Any] = {}
    if quantizer is Quantizer.BINNED:
        other = config.value_bins if config.value_bins != config.bins and layout.kinds == 2 else 0
        binned = {"bins": config.bins, "value_bins": other, "scale_tokens": config.scale_tokens}
    try:
        return namespace.name(
            ChunkLayout(
                dtype=dtype,
                layers=layout.layers,
                kinds=layout.kinds,
                vector_length=layout.vector_length,
                tokens=config.chunk_tokens,
                quantizer=quantizer,
                **binned,
            )
        )
    except ValueError as error:
        raise UncacheableError(f"its chunks cannot be stored: {error}") from error
