"""The effect of the context length on rotated keys, as vLLM's rotary embeddings apply it."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

# Types in vllm/model_executor/layers/rotary_embedding whose angles depend only on the checkpoint's parameters.
_FIXED: Final = {
    "default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "proportional",
    "mllama4",
}  # fmt: skip
_LONG: Final = {"longrope", "su"}


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
