"""The identity of an engine's model: all inputs to the key that its requests share."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from host_control.layouts import element_type
from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.identity.content import ContentHashes
from host_control.vllm.identity.table import options
from host_control.vllm.identity.weights import code_digests, model_class, model_folder, weight_digests
from host_control.vllm.support import UncacheableError, layer_specs
from shadowserve.chunk import DType
from shadowserve.keys import ModelIdentity

# Fields of a model's configuration that do not change KV: names, versions, sampling and training. The context length is
# among them because some models write it into their configuration; positions() handles its effect.
_MEANINGLESS: Final = {
    "_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "architectures_original", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range", "attention_dropout",
    "hidden_dropout", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "max_model_len",
}  # fmt: skip
# Types in vllm/model_executor/layers/rotary_embedding whose angles depend only on the checkpoint's parameters.
_FIXED: Final = {
    "default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "proportional",
    "mllama4",
}  # fmt: skip
_LONG: Final = {"longrope", "su"}


def model_identity(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int, hashes: ContentHashes) -> ModelIdentity:
    """Return the identity of an engine's model. The weights are loaded, and ``uncacheable`` returned ``None``."""
    try:
        computed: dict[str, Any] = computation(vllm_config, hashes)
        if (draft := _draft(vllm_config, hashes)) is not None:
            computed["draft"] = draft
        return ModelIdentity(
            model=digest(computed),
            weights=digest(weight_digests(vllm_config, hashes)),
            dtype=_cache_dtype(vllm_config, _element(vllm_config, kv_cache_config)),
            chunk_tokens=chunk_tokens,
        )
    except UncacheableError:
        raise
    except Exception as error:  # a later release of vLLM may differ; the engine must start nevertheless
        raise UncacheableError(f"this engine's model cannot be identified: {error!r}") from error


def _element(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return the dtype of the attention layers' KV cache; the model's dtype if there is none."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in layer_specs(group.kv_cache_spec):
            if (dtype := getattr(spec, "dtype", None)) is not None:
                return dtype
    return vllm_config.model_config.dtype


def _draft(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any] | None:
    """Return the identity of draft layers, whose KV is stored with the model's; ``None`` if there are none."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return None
    draft = copy.copy(vllm_config)
    draft.model_config = speculative.draft_model_config
    draft.speculative_config = None
    return {
        "method": speculative.method,
        "hf_config": meaningful(canonical(draft.model_config.hf_config)),
        "weights": weight_digests(draft, hashes),
    }


def computation(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any]:
    """Return all inputs except weights and tokens: the model's class, configuration, code and options."""
    model = vllm_config.model_config
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UncacheableError("a diffusion model's KV depends on later tokens")
    described = canonical(model.hf_config)
    text = canonical(model.hf_text_config)
    named = model_class(model, hashes)
    _positions_of_one_request(model, named["architecture"], (described, text))
    return {
        "class": named,
        "hf_config": meaningful(described),
        "hf_text_config": meaningful(text),
        "dtype": str(model.dtype),
        "quantization_files": _quantization_files(vllm_config, hashes),
        "code": code_digests(vllm_config, hashes),
        "positions": positions({"whole": described, "text": text}, model.max_model_len),
        "options": options(vllm_config),
        "encoder_scales": _encoder_scales(model, hashes),
    }


def _positions_of_one_request(model: Any, architecture: str, described: tuple[Any, ...]) -> None:
    """Raise UncacheableError if rotated keys depend on other requests in a batch, as in Transformers' rotary code."""
    if not architecture.startswith("Transformers"):
        return
    for kind, *_ in positions({"": dict(enumerate(described))}, model.max_model_len):
        raise UncacheableError(
            f"{architecture} with rotary embeddings of type '{kind}' rotates by the longest request in a batch"
        )


def meaningful(value: Any) -> Any:
    """Return a model's configuration without the fields that do not change KV."""
    if isinstance(value, Mapping):
        return {key: meaningful(item) for key, item in value.items() if key not in _MEANINGLESS}
    return [meaningful(item) for item in value] if isinstance(value, list) else value


def _quantization_files(vllm_config: Any, hashes: ContentHashes) -> list[str]:
    """Return the digests of files that configure the quantization outside the model's configuration."""
    quantization = getattr(vllm_config, "quant_config", None)
    if quantization is None:
        return []
    folder = model_folder(vllm_config)
    return hashes.digests([folder / name for name in quantization.get_config_filenames() if (folder / name).is_file()])


def _encoder_scales(model: Any, hashes: ContentHashes) -> list[str]:
    path = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    return hashes.digests([Path(path)]) if path else []


def _cache_dtype(vllm_config: Any, dtype: Any) -> str:
    """Return the name of a cache's dtype. vLLM stores 8-bit formats as bytes, so their format is added.

    ``fp8`` is OCP E4M3, except on some AMD GPUs, which have a format of their own.
    """
    named = str(dtype).removeprefix("torch.")
    if element_type(dtype) is not DType.UINT8:
        return named
    from vllm.platforms import current_platform

    asked = str(vllm_config.cache_config.cache_dtype)
    if asked in ("fp8", "fp8_e4m3"):
        asked = f"fp8_e4m3 as {str(current_platform.fp8_dtype()).removeprefix('torch.')}"
    return f"{asked}/{named}"


def positions(hf_config: Mapping[str, Any], max_model_len: int) -> list[Any]:
    """Return the inputs to the key that ``max_model_len`` adds. Most models have none.

    LongRoPE uses its long factors if the context is longer than in training. Dynamic scaling may use the context length
    as the trained length. For unknown types, the length itself is an input.
    """
    found = set()
    for rope in _ropes(hf_config):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind in _LONG:
            trained = rope.get("original_max_position_embeddings") or hf_config.get("original_max_position_embeddings")
            found.add(("long", max_model_len > trained) if isinstance(trained, int) else (kind, max_model_len))
        elif kind not in _FIXED and not (kind == "dynamic" and "alpha" in rope):
            found.add((kind, max_model_len))
    return sorted(found, key=repr)


def _ropes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every set of rotary parameters at any depth: there may be one per sub-model and type of layer."""
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(item, Mapping):
            nested = [inner for inner in item.values() if isinstance(inner, Mapping)]
            yield from [item, *nested] if {"rope_type", "type"} & item.keys() or not nested else nested
        else:
            yield from _ropes(item)
