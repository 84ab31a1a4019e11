"""What an engine's context length does to the keys it rotates, as vLLM's rotary embeddings read it."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

# vllm/model_executor/layers/rotary_embedding: their angles come from the checkpoint's parameters alone.
_FIXED: Final = {
    "default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "proportional",
    "mllama4",
}  # fmt: skip
_LONG: Final = {"longrope", "su"}


def positions(hf_config: Mapping[str, Any], max_model_len: int) -> list[Any]:
    """Return what of ``max_model_len`` changes rotated keys: nothing for most models.

    LongRoPE has two sets of factors and takes the long one where the context is longer than it was trained with.
    Dynamic scaling may take the context's length as the trained one. Of a kind that is not known, the whole length
    counts.
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
    """Yield every set of rotary parameters, at whatever depth: models have them by sub-model and kind of layer."""
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(item, Mapping):
            nested = [inner for inner in item.values() if isinstance(inner, Mapping)]
            yield from [item, *nested] if {"rope_type", "type"} & item.keys() or not nested else nested
        else:
            yield from _ropes(item)
