"""Tiny models of the families that vLLM knows, with random weights so wide that outputs tell one KV from another.

vLLM's own dummy weights will not do: they are small and alike, so any prefix gives the same output, and a test that
compares outputs sees nothing. Nor will a trained model on text that it does not know.
"""

import random
import shutil
from pathlib import Path
from typing import Any, Final

__all__ = ["CHUNK", "FAMILIES", "random_tokens", "with_another_first_chunk", "write_model"]

ASSET: Final = Path(__file__).parents[1] / "assets" / "model"
CHUNK: Final = 256
_VOCABULARY: Final = 264

_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # As large as the project's own model, whose tokenizer it gets.
    "llama": (
        "llama",
        _SMALL
        | {"hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 4, "head_dim": 64}
        | {"max_position_embeddings": 16384},
    ),
    # Five layers of six see a window.
    "gemma3": (
        "gemma3_text",
        _SMALL
        | {"num_hidden_layers": 6, "sliding_window": 64, "query_pre_attn_scalar": 32}
        | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    # Windows with sinks, experts.
    "gpt_oss": (
        "gpt_oss",
        _SMALL
        | {"num_hidden_layers": 4, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"truncate": False, "original_max_position_embeddings": 1024},
            }
        },
    ),
    # A state beside attention. vLLM's CPU kernels want bfloat16 and these head sizes; with attention behind the states
    # only, the start of a prompt would be forgotten.
    "qwen3_next": (
        "qwen3_next",
        _SMALL
        | {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2, "initializer_range": 0.4}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "decoder_sparse_step": 1}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
    # Latents (MLA).
    "deepseek": (
        "deepseek_v2",
        {key: value for key, value in _SMALL.items() if key != "head_dim"}
        | {"num_hidden_layers": 3, "first_k_dense_replace": 3, "moe_intermediate_size": 64, "num_key_value_heads": 4}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"kv_lora_rank": 512, "q_lora_rank": None}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
}
"""Name -> model type and configuration, as transformers has them."""


def write_model(family: str, folder: Path) -> Path:
    """Write a model of the family into ``folder``, the same each time, and return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = FAMILIES[family]
    tokens = {"vocab_size": _VOCABULARY, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    config = AutoConfig.for_model(model_type, **options, **tokens, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSET / name, folder)
    return folder


def random_tokens(count: int, seed: object) -> list[int]:
    """Return tokens that a model of any family knows; the same seed's begin alike, however many."""
    generator = random.Random(f"{seed}")
    return [generator.randrange(_VOCABULARY) for _ in range(count)]


def with_another_first_chunk(prompt: list[int]) -> list[int]:
    """Return the prompt with the first chunk of another and the same rest: what outputs must be able to tell."""
    return random_tokens(CHUNK, "another first chunk") + prompt[CHUNK:]
