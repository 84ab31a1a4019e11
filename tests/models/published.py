"""A KV cache's groups and bytes by vLLM's own rules; and models that no CPU runs, from their published configurations.

Each layer's spec is the one of vLLM's model class on one GPU. vLLM's own code forms the groups.
"""

import collections
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.vllm.groups import Groups
from host_control.vllm.support import uncacheable


def layer_specs(group: Any) -> list[Any]:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [specs[name] for name in group.layer_names] if specs else [group.kv_cache_spec] * len(group.layer_names)


def groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    found = []
    for group in kv_cache_config.kv_cache_groups:
        specs = layer_specs(group)
        window = getattr(specs[0], "sliding_window", None) or getattr(specs[0], "attention_chunk_size", None)
        found.append(
            {
                "kind": "+".join(sorted({type(spec).__name__.removesuffix("Spec") for spec in specs})),
                "layers": len(specs),
                "block_tokens": group.kv_cache_spec.block_size,
                "block_bytes": sum(spec.page_size_bytes for spec in specs),
                **({"window": window} if window else {}),
                **({"draft": True} if group.is_eagle_group else {}),
                **({} if group.kv_cache_spec.prefix_cacheable else {"scratch": True}),
            }
        )
    return found


def chunk_tokens(kv_cache_config: Any) -> int:
    """Return the shortest chunk of whole blocks of every group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # Without prefix caching, the block of a recurrent state is as long as the context.
    return math.lcm(*(spec.block_size for spec in specs if getattr(spec, "mamba_cache_mode", "") != "none"))


# ---- Published models

_BLOCK: Final = 16
_MLA_BLOCK: Final = 64


def _spec(kind: str, **options: Any) -> Any:
    """Return a spec of vLLM's, with blocks of 16 tokens in bfloat16 unless ``options`` say otherwise."""
    import torch
    from vllm.v1 import kv_cache_interface

    return getattr(kv_cache_interface, kind)(**{"block_size": _BLOCK, "dtype": torch.bfloat16, **options})


def _full(kv_heads: int, head_size: int, **more: Any) -> Any:
    return _spec("FullAttentionSpec", num_kv_heads=kv_heads, head_size=head_size, **more)


def _window(window: int, kv_heads: int, head_size: int) -> Any:
    return _spec("SlidingWindowSpec", num_kv_heads=kv_heads, head_size=head_size, sliding_window=window)


def _local(chunk: int, kv_heads: int, head_size: int) -> Any:
    return _spec("ChunkedLocalAttentionSpec", num_kv_heads=kv_heads, head_size=head_size, attention_chunk_size=chunk)


def _latent(**more: Any) -> Any:
    options = {"block_size": _MLA_BLOCK, "head_size": 576, "max_tp_shards": 1, **more}
    return _spec("MLAAttentionSpec", num_kv_heads=1, **options)


def _latent_window(window: int, **more: Any) -> Any:
    return _spec("SlidingWindowMLASpec", num_kv_heads=1, max_tp_shards=1, sliding_window=window, **more)


def _beside_states(attention: Callable[[int], Any], aligned: int, shapes: Any, dtypes: Any) -> tuple[Any, Any]:
    """Return the specs of attention and recurrent state: blocks as large as a state, as vLLM creates them of both."""
    from vllm.v1.kv_cache_interface import MambaSpec

    state = MambaSpec(block_size=-1, shapes=shapes, dtypes=dtypes).page_size_bytes
    tokens = math.ceil(state / attention(1).page_size_bytes / aligned) * aligned
    spec = attention(tokens)
    padded = {"page_size_padded": spec.page_size_bytes, "mamba_cache_mode": "align"}
    return spec, MambaSpec(block_size=tokens, shapes=shapes, dtypes=dtypes, **padded)


def _layers(kinds: list[Any]) -> dict[str, Any]:
    return {f"model.layers.{number}.attn": spec for number, spec in enumerate(kinds)}


def _deepseek_v32() -> dict[str, Any]:
    from torch import uint8
    from vllm.v1.kv_cache_interface import SparseCacheRole

    latent = _latent(dtype=uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656, is_index_group_leader=True)
    indexer = _latent(head_size=132, dtype=uint8, cache_role=SparseCacheRole.INDEXER)
    pairs = [(f"model.layers.{number}.self_attn", number) for number in range(61)]
    return {f"{name}.{part}": spec for name, _ in pairs for part, spec in (("attn", latent), ("indexer", indexer))}


def _deepseek_v4() -> dict[str, Any]:
    from torch import float32, uint8

    found: dict[str, Any] = {}
    kind = {"dtype": uint8, "cache_dtype_str": "fp8_ds_mla", "alignment": 576, "model_version": "deepseek_v4"}
    for number, ratio in enumerate([0, 0] + [4, 128] * 20 + [4]):
        name = f"model.layers.{number}.attn"
        found[f"{name}.swa_cache"] = _latent_window(128, block_size=64, head_size=512, state_content_bytes=584, **kind)
        if not ratio:
            continue
        options = {"block_size": 256, "tokens_per_state": ratio}
        found[name] = _latent(head_size=512, state_content_bytes=584, **options, **kind)
        block, overlap = (4, 2) if ratio == 4 else (8, 1)
        sizes = {"": 512} | ({".indexer": 128} if ratio == 4 else {})
        for part, size in sizes.items():
            found[f"{name}{part}.compressor"] = _latent_window(
                overlap * ratio, block_size=block, head_size=2 * overlap * size, dtype=float32, alignment=576
            )
        if ratio == 4:
            found[f"{name}.indexer"] = _latent(head_size=132, dtype=uint8, alignment=576, **options)
    return found


def _qwen3_next() -> dict[str, Any]:
    from torch import bfloat16

    shapes = ((3, 2 * 16 * 128 + 32 * 128), (32, 128, 128))
    full, state = _beside_states(lambda block: _full(2, 256, block_size=block), _BLOCK, shapes, (bfloat16, bfloat16))
    return _layers([full if number % 4 == 3 else state for number in range(48)])


def _kimi_linear() -> dict[str, Any]:
    from torch import bfloat16, float32

    shapes = ((3, 3 * 32 * 128), (32, 128, 128))
    latent, state = _beside_states(lambda block: _latent(block_size=block), _MLA_BLOCK, shapes, (bfloat16, float32))
    return _layers([latent if number in (4, 8, 12, 16, 20, 24, 27) else state for number in range(1, 28)])


def _nemotron_h() -> dict[str, Any]:
    from torch import bfloat16, float32

    shapes = ((3, 128 * 64 + 2 * 8 * 128), (128, 64, 128))
    full, state = _beside_states(lambda block: _full(8, 128, block_size=block), _BLOCK, shapes, (bfloat16, float32))
    return _layers([full] * 4 + [state] * 24)


def _scratch() -> dict[str, Any]:
    ring = _spec("CircularBufferSpec", num_kv_heads=1, head_size=128)
    return _layers([_full(1, 128)] * 4) | {f"model.layers.{number}.ring": ring for number in range(4)}


def _alternating(count: int, every: int, special: Callable[[], Any], others: Callable[[], Any]) -> dict[str, Any]:
    """Return layers of which each ``every``-th is ``special``."""
    return _layers([special() if number % every == every - 1 else others() for number in range(count)])


PUBLISHED: Final[dict[str, tuple[Callable[[], dict[str, Any]], str]]] = {
    "gpt-oss 120B": (
        lambda: _alternating(36, 2, lambda: _full(8, 64), lambda: _window(128, 8, 64)),
        "36 layers, every other one a window of 128; 8 heads of 64",
    ),
    "Gemma 3 27B": (
        lambda: _alternating(62, 6, lambda: _full(16, 128), lambda: _window(1024, 16, 128)),
        "62 layers, five of six a window of 1,024; 16 heads of 128",
    ),
    "Llama 4 Scout": (
        lambda: _alternating(48, 4, lambda: _full(8, 128), lambda: _local(8192, 8, 128)),
        "48 layers, three of four see their 8,192 tokens; 8 heads of 128",
    ),
    "DeepSeek V3, R1": (lambda: _layers([_latent() for _ in range(61)]), "61 layers of latents of 576"),
    "DeepSeek V3.2": (_deepseek_v32, "61 layers of latents of 656 bytes, each with an indexer of 132"),
    "DeepSeek V4 Flash": (_deepseek_v4, "43 layers: 2 of windows alone, 41 compressed by 4 and 128 in turns"),
    "Qwen3-Next 80B": (_qwen3_next, "48 layers, three of four GDN; 2 heads of 256"),
    "Kimi-Linear 48B": (_kimi_linear, "27 layers: 20 KDA, 7 of latents of 576"),
    "Nemotron-H 8B": (_nemotron_h, "24 layers of Mamba-2 states, 4 of attention; 8 heads of 128"),
    "a ring of scratch": (_scratch, "as GLM-5-next and Qwen4-exp have beside attention: no prefix is cached of it"),
}
"""Layer specs by model, with the configuration values that they come from."""


_PARALLEL: Final = ("pipeline_parallel_size", "tensor_parallel_size", "decode_context_parallel_size")


def _vllm_config() -> Any:
    """Return the part of vLLM's configuration that its rules for groups, and the plugin's, read."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    model = {"runner_type": "generate", "is_encoder_decoder": False, "is_prefix_caching_supported": True}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, hf_config=SimpleNamespace(model_type=""), max_model_len=131072),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLNHC
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(**dict.fromkeys(_PARALLEL, 1)),
        speculative_config=None,
        attention_config=None,
    )


def kv_cache_config(model: str) -> Any:
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    return SimpleNamespace(kv_cache_groups=get_kv_cache_groups(_vllm_config(), PUBLISHED[model][0]()))


def found(model: str) -> dict[str, Any]:
    """Return vLLM's groups of a model, and the plugin's verdict."""
    memory = kv_cache_config(model)
    off = uncacheable(_vllm_config(), memory) or ""
    return {
        "name": model,
        "of": PUBLISHED[model][1],
        "groups": groups(memory),
        "off": off,
        "kept": "" if off else _kept(Groups(_vllm_config(), memory, HostConfig())),
    }


def _kept(made: Groups) -> str:
    """Return the contents of a chunk's records by group."""
    held = collections.Counter(
        "a state" if group.kind == "state" else f"{group.record_blocks * group.block_tokens} tokens"
        for group in made.groups
    )
    return f"chunks of {made.chunk_tokens} tokens: " + ", ".join(f"{text} of {count}" for text, count in held.items())
