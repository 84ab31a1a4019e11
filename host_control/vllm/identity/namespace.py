"""The identity of what an engine computes: everything that is the same for all of its requests."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from host_control.layouts import element_type
from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.identity.content import ContentHashes
from host_control.vllm.identity.positions import positions
from host_control.vllm.identity.table import options
from host_control.vllm.identity.weights import code_digests, model_class, model_folder, weight_digests
from host_control.vllm.support import UncacheableError, layer_specs
from shadowserve.chunk import DType
from shadowserve.keys import ModelIdentity

# Of a model's configuration: names, versions, tokens that mean something to whoever samples, and training. The
# context's length is here because some models write it into their configuration; :mod:`positions` says what it does.
_MEANINGLESS: Final = {
    "_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "architectures_original", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range", "attention_dropout",
    "hidden_dropout", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "max_model_len",
}  # fmt: skip


def model_identity(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int, hashes: ContentHashes) -> ModelIdentity:
    """Return what an engine computes, once its weights are loaded. ``uncacheable`` has said ``None``.

    Raises:
        UncacheableError: what is computed cannot be named.
    """
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
    except Exception as error:  # of a vLLM that is not as it was: an engine must start all the same
        raise UncacheableError(f"what this engine computes cannot be named: {error!r}") from error


def _element(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return the dtype of what attention keeps, of the model where it keeps nothing."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in layer_specs(group.kv_cache_spec):
            if (dtype := getattr(spec, "dtype", None)) is not None:
                return dtype
    return vllm_config.model_config.dtype


def _draft(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any] | None:
    """Return what computes the KV of draft layers, which is stored beside the model's; nothing where there are none."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return None
    draft = copy.copy(vllm_config)
    draft.model_config = speculative.draft_model_config
    draft.speculative_config = None
    return {
        "method": speculative.method,
        "hf_config": _meaningful(canonical(draft.model_config.hf_config)),
        "weights": weight_digests(draft, hashes),
    }


def computation(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any]:
    """Return what turns tokens and weights into KV, by name: the model's class, configuration, code and options.

    Raises:
        UncacheableError: see :func:`model_identity`.
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
