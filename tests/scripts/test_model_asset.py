# SPDX-License-Identifier: Apache-2.0
"""The project's own small model: the asset in the repository."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "tests" / "assets" / "model"
HELD_OUT = REPOSITORY / "tests" / "assets" / "heldout.jsonl"

sys.path.insert(0, str(REPOSITORY / "scripts"))

import measure_quality  # noqa: E402


@pytest.fixture(scope="module")
def held_out() -> list[bytes]:
    return measure_quality.load_documents(HELD_OUT)


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_the_asset_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000
    assert HELD_OUT.stat().st_size <= 120_000


def test_the_model_predicts_held_out_text(transformers_model: Any, held_out: list[bytes]) -> None:
    bits = []
    for document in held_out[:4]:
        cache = measure_quality.prefill(transformers_model, list(document[:512]))
        bits.append(measure_quality.score(transformers_model, cache, list(document[512:1536]))[0])
    assert sum(bits) / len(bits) < 2.6  # a uniform prediction has 8, and counting bytes gives 4.7


def test_a_wrong_chunk_in_the_prefix_changes_the_prediction(transformers_model: Any, held_out: list[bytes]) -> None:
    # Otherwise equal outputs would prove nothing about the fetched keys and values.
    right, wrong = list(measure_quality.windows(held_out, 2048 + 161))[:2]
    cache, other = (measure_quality.prefill(transformers_model, tokens[:2048]) for tokens in (right, wrong))
    _, likeliest = measure_quality.score(transformers_model, cache, right[2048:])
    for first in range(0, 2048, 256):
        mixed = [tuple(tensor.clone() for tensor in layer) for layer in cache]
        for layer, layer_other in zip(mixed, other, strict=True):
            for tensor, tensor_other in zip(layer, layer_other, strict=True):
                tensor[:, :, first : first + 256] = tensor_other[:, :, first : first + 256]
        _, changed = measure_quality.score(transformers_model, mixed, right[2048:])
        assert not torch.equal(likeliest, changed), first


def test_heads_fit_vllm_on_a_cpu_and_two_ranks(transformers_model: Any) -> None:
    config = transformers_model.config
    assert config.head_dim % 32 == 0
    assert config.num_key_value_heads % 2 == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.max_position_embeddings >= 16384


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "def f(a, *, b=1):\n    return  a\t+ b\r\n\n",
        " leading and trailing ",
        "naïve 漢字 🧪 e\u0301",
        "\x00\x01\x7f",
    ],
)
def test_a_token_is_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_held_out_document_survives_the_tokenizer(tokenizer: Any, held_out: list[bytes]) -> None:
    for document in held_out:
        ids = tokenizer(document.decode())["input_ids"]
        assert ids == list(document)
        assert tokenizer.decode(ids) == document.decode()


def test_special_tokens_are_not_bytes(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == 264
    assert tokenizer("a<|end|>b")["input_ids"] == [97, 256, 98]


def test_a_chat_becomes_plain_text(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is a list?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "What is a list?\n\nAnswer: "
