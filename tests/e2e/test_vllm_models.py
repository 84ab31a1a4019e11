"""Other caches than a plain one: bfloat16, fp8, sliding windows beside full attention, latents (MLA)."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def dummy(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, {"dtype": "bfloat16"}),
        (None, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        (None, {"block_size": 128}),
        (GEMMA, {"dtype": "float32"}),
        (DEEPSEEK, {"dtype": "bfloat16", "block_size": 32}),
    ],
    ids=["bfloat16", "fp8", "large blocks", "sliding windows", "latents"],
)
def test_prompt_comes_back_from_the_store(
    config: dict[str, Any] | None,
    options: dict[str, Any],
    make_engine: Any,
    tmp_path: Path,
    data_plane: Any,
    prompt: Any,
) -> None:
    if config is not None:
        options = {**options, "model": dummy(tmp_path, config), "load_format": "dummy"}
    engine = make_engine(data_plane.address, **options)
    try:
        assert engine.connector._scheduler.problem == ""
        first = engine.outputs([prompt(1000)])
        engine.flush()
        assert len(data_plane.records) == 3, engine.counters()
        engine.forget()
        (output,) = engine.generate([prompt(1000)])
        assert output.num_cached_tokens == 768
        assert [list(output.outputs[0].token_ids)] == first
    finally:
        engine.close()
