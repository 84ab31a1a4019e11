"""Tiny models of vLLM's families, with random weights so wide that outputs distinguish one KV from another.

vLLM's own dummy weights are too small and too similar: any prefix gives the same output, and a test that compares
outputs finds nothing. The same holds for a trained model on unknown text.
"""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ASSET: Final = Path(__file__).parents[1] / "assets" / "model"
CHUNK: Final = 256
_VOCABULARY: Final = 264
_SEED: Final = 7


@dataclass(frozen=True)
class Family:
    """Construction of a family's tiny model, and the options that vLLM's CPU build needs.

    Attributes:
        like: Published models that it represents.
        engine: Options of vLLM without which it does not run, or runs as another model.
        draft: Draft layers: ``eagle`` or ``mtp``; empty without them.
    """

    like: str
    model_type: str
    options: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    draft: str = ""

    @property
    def window(self) -> int:
        """Tokens in a window of a layer, including the current one; 0 without a window."""
        return int(self.options.get("sliding_window") or self.options.get("attention_chunk_size") or 0)

    def engine_options(self, folder: Path) -> dict[str, Any]:
        """Return vLLM's options for a model of the family in ``folder``."""
        if not self.draft:
            return dict(self.engine)
        model = {"model": str(folder / "draft")} if self.draft == "eagle" else {}
        return {**self.engine, "speculative_config": {"method": self.draft, "num_speculative_tokens": 1, **model}}


_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "initializer_range": 0.2,
}
_ROPE_HALF: Final = 16
_STATES: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
_WITHOUT_HEAD_DIM: Final = {key: value for key, value in _SMALL.items() if key != "head_dim"}
_LLAMA: Final = Family(
    # As large as the project's own model, whose tokenizer it uses.
    "Llama 3, Mistral Small, MiniMax-M2",
    "llama",
    _SMALL | {"hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 4, "head_dim": 64},
)

FAMILIES: Final[dict[str, Family]] = {
    "llama": _LLAMA,
    "qwen3": Family("Qwen 3, dense", "qwen3", _SMALL | {"num_hidden_layers": 4}),
    "phi3": Family(
        "Phi-3 and Phi-4-mini, LongRoPE",
        "phi3",
        _SMALL
        | {"num_hidden_layers": 4, "original_max_position_embeddings": 1024}
        | {
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 1024},
                "short_factor": [1.0 + 0.01 * part for part in range(_ROPE_HALF)],
                "long_factor": [1.5 + 0.2 * part for part in range(_ROPE_HALF)],
            }
        },
    ),
    "gemma3": Family(
        "Gemma 3: five layers of six see a window",
        "gemma3_text",
        _SMALL
        | {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 32}
        | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "gpt_oss": Family(
        "gpt-oss: windows with sinks, experts",
        "gpt_oss",
        _SMALL
        | {"num_hidden_layers": 4, "sliding_window": 31, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"truncate": False, "original_max_position_embeddings": 4096},
            }
        },
    ),
    "gemma4": Family(
        "Gemma 4: windows, and heads of two sizes",
        "gemma4_text",
        _SMALL
        | {"num_hidden_layers": 6, "sliding_window": 32, "global_head_dim": 64, "num_kv_shared_layers": 0}
        | {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "llama4": Family(
        "Llama 4: chunked local attention",
        "llama4_text",
        _SMALL
        | {"num_hidden_layers": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 256}
        | {"attention_chunk_size": 64, "interleave_moe_layer_step": 2},
    ),
    "deepseek": Family(
        "DeepSeek V3, Kimi K2: latents (MLA)",
        "deepseek_v2",
        _WITHOUT_HEAD_DIM
        | {"num_hidden_layers": 3, "first_k_dense_replace": 3, "moe_intermediate_size": 64, "num_key_value_heads": 4}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"kv_lora_rank": 512, "q_lora_rank": None}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        engine={"attention_backend": "CPU_MLA"},
        why="on a CPU with AMX vLLM would else take kernels of bfloat16 alone",
    ),
    # Recurrent state beside attention. vLLM's CPU kernels need bfloat16 and these sizes of a state's heads. Attention's
    # heads are large, so that a block, which is as large as a state, has few tokens. With attention only behind the
    # recurrent layers, the model would forget the start of a prompt.
    "qwen3_next": Family(
        "Qwen3-Next, Qwen3.5: GDN states beside attention",
        "qwen3_next",
        _SMALL
        | {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2, "initializer_range": 0.4}
        | {"num_key_value_heads": 4, "head_dim": 128, "decoder_sparse_step": 1}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        engine={"dtype": "bfloat16"},
        why="vLLM's CPU kernel for GDN takes bfloat16 alone",
    ),
    "lfm2": Family(
        "LFM2: short convolutions beside attention",
        "lfm2",
        _SMALL
        | {"num_hidden_layers": 4, "layer_types": ["full_attention", "conv"] * 2, "conv_L_cache": 3}
        | {"block_dim": 128, "conv_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
        | {
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_norm_eps": 1e-5,
            "conv_use_xavier_init": True,
        },
    ),
    "granite4": Family(
        "Granite 4, Nemotron-H, Bamba: Mamba-2 states beside attention",
        "granitemoehybrid",
        _SMALL
        | _STATES
        | {"num_hidden_layers": 4, "layer_types": ["attention", "mamba"] * 2, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256}
        | {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 0.18,
        },
        engine={"enable_prefix_caching": False},
        why="its CPU kernel for Mamba-2 has no states but the last, and fails where prefix caching asks for others "
        "(IndexError in mamba_mixer2.py)",
    ),
    "jamba": Family(
        "Jamba: Mamba-1 states beside attention",
        "jamba",
        _SMALL
        | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8},
    ),
    "eagle": Family("Llama with an EAGLE draft", "llama", _LLAMA.options, draft="eagle"),
    "mtp": Family(
        "MiMo: a draft layer of its own (MTP)",
        "qwen2",
        _SMALL | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]},
        draft="mtp",
    ),
}
"""Families by name."""


def write_model(family: str, folder: Path) -> Path:
    """Write a model of the family into ``folder``, with the same weights each time, and return the folder."""
    made = FAMILIES[family]
    model = _model(made.model_type, made.options)
    if made.draft == "mtp":
        model.save_pretrained(folder, state_dict=dict(model.state_dict()) | _mtp_layer(made))
        _set_architecture(folder, "MiMoForCausalLM")
    else:
        model.save_pretrained(folder)
    if made.draft == "eagle":
        _write_eagle(made, folder / "draft")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSET / name, folder)
    return folder


def _model(model_type: str, options: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"vocab_size": _VOCABULARY, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    config = AutoConfig.for_model(model_type, **options, **tokens, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _layer(options: dict[str, Any], model_type: str) -> dict[str, Any]:
    model = _model(model_type, options | {"num_hidden_layers": 1, "initializer_range": 0.15})
    prefix = "model.layers.0."
    return {name.removeprefix(prefix): weight for name, weight in model.state_dict().items() if name.startswith(prefix)}


def _projection(options: dict[str, Any]) -> Any:
    import torch

    size = int(options["hidden_size"])
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return torch.randn(size, 2 * size) * 0.1


def _mtp_layer(made: Family) -> dict[str, Any]:
    import torch

    size = int(made.options["hidden_size"])
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights = _layer(made.options, made.model_type) | {f"{norm}.weight": torch.ones(size) for norm in norms}
    weights["input_proj.weight"] = _projection(made.options)
    return {f"model.mtp_layers.0.{name}": weight for name, weight in weights.items()}


def _write_eagle(made: Family, folder: Path) -> None:
    from safetensors.torch import save_file

    draft = _model(made.model_type, made.options | {"num_hidden_layers": 1})
    folder.mkdir()
    draft.config.save_pretrained(folder)
    _set_architecture(folder, "LlamaForCausalLM")
    layer = _layer(made.options, made.model_type)
    del layer["input_layernorm.weight"]  # the projection's output needs no norm
    weights = {f"layers.0.{name}": weight.contiguous() for name, weight in layer.items()}
    save_file(weights | {"fc.weight": _projection(made.options)}, folder / "model.safetensors")


def _set_architecture(folder: Path, name: str) -> None:
    import json

    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}, indent=1))


def random_tokens(count: int, seed: object) -> list[int]:
    """Return tokens of a vocabulary that all families share. Equal seeds give equal beginnings at any length."""
    generator = random.Random(f"{seed}")
    return [generator.randrange(_VOCABULARY) for _ in range(count)]


def with_another_first_chunk(prompt: list[int], chunk: int = CHUNK) -> list[int]:
    """Return the prompt with another first chunk and the same rest. Outputs must distinguish the two."""
    return random_tokens(chunk, "another first chunk") + prompt[chunk:]
