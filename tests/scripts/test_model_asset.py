# SPDX-License-Identifier: Apache-2.0
"""The project's own small model: the asset in the repository."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shadowserve_tools.bench.parts.real_model import RealModel

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "tests" / "assets" / "model"
HELD_OUT = REPOSITORY / "tests" / "assets" / "heldout.jsonl"


@pytest.fixture(scope="module")
def model() -> RealModel:
    return RealModel(MODEL)


@pytest.fixture(scope="module")
def held_out(model: RealModel) -> list[list[int]]:
    return [model.tokens(json.loads(line)["text"]) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]


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


@torch.no_grad()
def test_the_model_predicts_held_out_text(model: RealModel, held_out: list[list[int]]) -> None:
    bits = []
    for document in held_out[:4]:
        predicted = model.predict(model.prefill(document[:512]), document[512:1535])
        bits.append(-float(predicted.gather(1, torch.tensor(document[513:1536])[:, None]).mean()) / math.log(2))
    assert sum(bits) / len(bits) < 2.6  # a uniform prediction has 8, and counting bytes gives 4.7


@torch.no_grad()
def test_a_wrong_chunk_in_the_prefix_changes_the_prediction(model: RealModel, held_out: list[list[int]]) -> None:
    # Otherwise equal outputs would prove nothing about the fetched keys and values.
    right, wrong = [document[: 2048 + 161] for document in held_out if len(document) >= 2048 + 161][:2]
    kv, other = model.prefill(right[:2048]), model.prefill(wrong[:2048])
    likeliest = model.predict(kv, right[2048:])
    for first in range(0, 2048, 256):
        mixed = kv.clone()
        mixed[:, :, first : first + 256] = other[:, :, first : first + 256]
        assert not torch.equal(likeliest, model.predict(mixed, right[2048:])), first


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


def test_every_held_out_document_survives_the_tokenizer(tokenizer: Any, held_out: list[list[int]]) -> None:
    for document in held_out:
        ids = tokenizer(bytes(document).decode())["input_ids"]
        assert ids == list(document)
        assert tokenizer.decode(ids) == bytes(document).decode()


def test_special_tokens_are_not_bytes(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == 264
    assert tokenizer("a<|end|>b")["input_ids"] == [97, 256, 98]


def test_a_chat_becomes_plain_text(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is a list?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "What is a list?\n\nAnswer: "
