"""``shadowserve size`` agrees with vLLM's own rules, and says what it cannot compute."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from published import found

from shadowserve_tools import main

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss 120B": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    },
    "Gemma 3 27B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        },
    },
    "DeepSeek V3, R1": {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512},
    "Qwen3-Next 80B": {"model_type": "qwen3_next", "num_hidden_layers": 48},
    "Kimi-Linear 48B": {
        "model_type": "kimi_linear", "num_hidden_layers": 27,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [n for n in range(1, 28) if n % 4 and n != 27], "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
"""The keys of these models' config.json that count; transformers' defaults are theirs."""


def size(folder: Path, config: dict[str, Any], *flags: str) -> Any:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return CliRunner().invoke(main, ["size", "--model", str(file), "--link", "10Gbps", *flags])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_bytes_and_chunks_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    done = size(tmp_path, CONFIGS[name], "--json", "--stored-share", "1")
    assert done.exit_code == 0, done.output
    computed = json.loads(done.output)
    rules = found(name)
    attention = [group for group in rules["groups"] if group["kind"] != "Mamba"]
    token_bytes = sum(group["block_bytes"] / group["block_tokens"] for group in attention)
    assert computed["kv_bytes_per_1000_tokens"] == pytest.approx(1000 * token_bytes)
    assert rules["kept"].startswith(f"chunks of {computed['chunk_tokens']} tokens")
    states = sum(group["layers"] for group in rules["groups"] if group["kind"] == "Mamba")
    assert sum(each["count"] for each in computed["layers"] if each["kind"] == "state") == states


def test_a_window_bounds_what_is_loaded_and_held_but_not_what_is_stored(tmp_path: Path) -> None:
    config = {"model_type": "none of transformers", "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 64,
              "hidden_size": 64, "num_attention_heads": 1, "sliding_window": 512,
              "layer_types": ["full_attention", "sliding_attention"]}  # fmt: skip
    flags = ("--json", "--stored-share", "0.5", "--prompt-tokens", "4096", "--users", "3")
    computed = json.loads(size(tmp_path, config, *flags, "--prefill-tokens-per-s", "1000").output)
    token = 2 * 64 * 2
    assert computed["storage_bytes"] == 3 * (4096 + 4096) * token // 2
    assert computed["fetched_bytes"] == (4096 + 512) * token // 2
    assert computed["engine_bytes"] == 3 * (4096 + 512) * token
    assert computed["fetch_s"] == pytest.approx(computed["fetched_bytes"] * 8 / 10e9)
    assert computed["prefill_s"] == pytest.approx(4.096)


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({"model_type": "new", "num_hidden_layers": 1, "head_dim": 64}, (), "no number 'num_key_value_heads'.*default"),
        ({"model_type": "new", "layer_types": ["full_atention"]}, (), "did you mean 'full_attention'"),
        (
            {"model_type": "new", "num_hidden_layers": 1, "sliding_window": 8},
            (),
            "has sliding_window, but no 'layer_types'",
        ),
        ({"model_type": "llama"}, ("--link", "10"), "write it like 10Gbps"),
        ({"model_type": "llama"}, ("--model", "/nowhere"), "give a model's config.json"),
    ],
    ids=["key", "layer type", "no layer types", "rate", "file"],
)
def test_what_cannot_be_computed_exits_with_2_and_says_what_to_do(
    config: dict[str, Any], flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = size(tmp_path, config, *flags)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split())), done.output
