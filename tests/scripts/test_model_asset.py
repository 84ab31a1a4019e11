# SPDX-License-Identifier: Apache-2.0
"""The project's own small model: the asset that is kept, and the script that makes it."""

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
import model_text  # noqa: E402
import train_model  # noqa: E402


@pytest.fixture(scope="module")
def held_out() -> list[model_text.Document]:
    return model_text.load_documents(HELD_OUT)


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_the_asset_is_small_enough_to_keep() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000
    assert HELD_OUT.stat().st_size <= 120_000


def test_the_model_has_learned_something(held_out: list[model_text.Document]) -> None:
    model = train_model.load_model(MODEL)
    documents = [model_text.Document(name=item.name, text=item.text[:4096]) for item in held_out[:4]]
    entropy = model_text.order_zero_entropy(documents)
    measured = train_model.bits_per_byte(model, documents, 1024)
    assert measured < 2.6 < entropy - 1.5 < 8.0


def test_a_wrong_chunk_anywhere_in_the_prefix_changes_the_likeliest_bytes_after_it(
    transformers_model: Any, held_out: list[model_text.Document]
) -> None:
    # Else equal outputs would prove nothing about the keys and values that were fetched.
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


def test_transformers_computes_the_same_logits(transformers_model: Any, held_out: list[model_text.Document]) -> None:
    tokens = torch.tensor([train_model.encode_document(held_out[1].text)[:700]])
    with torch.no_grad():
        ours = train_model.load_model(MODEL)(tokens)
        theirs = transformers_model(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_heads_and_sizes_suit_vllm_on_a_cpu_and_two_ranks(transformers_model: Any) -> None:
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


def test_every_held_out_document_survives_the_tokenizer(tokenizer: Any, held_out: list[model_text.Document]) -> None:
    for document in held_out:
        ids = tokenizer(document.text)["input_ids"]
        assert ids == list(document.text.encode())
        assert tokenizer.decode(ids) == document.text


def test_special_tokens_are_not_bytes(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == train_model.END_TOKEN
    assert len(tokenizer) == train_model.VOCABULARY_SIZE
    assert tokenizer("a<|end|>b")["input_ids"] == [97, train_model.END_TOKEN, 98]


def test_a_chat_becomes_plain_text(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is a list?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "What is a list?\n\nAnswer: "


def write_library(root: Path) -> None:
    (root / "package").mkdir()
    (root / "package" / "__init__.py").write_text('"""About the package."""\n')
    (root / "broken.py").write_text("print 'two'\n")
    (root / "silent.py").write_text("x = 1\n")
    (root / "alpha.py").write_text(
        'import no_such_module\nclass A(B):\n    """What A is."""\n'
        '    def run(self, x, *, y=1):\n        """Run it."""\n'
        'try:\n    def late():\n        """Run it."""\nexcept ImportError:\n    pass\n'
    )
    (root / "test").mkdir()
    (root / "test" / "support.py").write_text('"""Not documentation."""\n')
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The if statement\\n\\nIt decides.'}\n")


def test_text_is_gathered_in_order_without_importing_or_repeating_anything(tmp_path: Path) -> None:
    write_library(tmp_path)
    documents = model_text.gather_documents(tmp_path)
    assert [document.name for document in documents] == ["alpha.py", "package/__init__.py", "topics/if"]
    assert documents[0].text == (
        "Help on module alpha:\n\n\nclass A(B)\n    What A is.\n\n    run(self, x, *, y=1)\n        Run it.\n"
    )
    assert model_text.gather_documents(tmp_path) == documents


def test_the_same_documents_are_held_out_whatever_else_there_is() -> None:
    documents = [model_text.Document(name=f"m{index}.py", text="text " * 2000) for index in range(200)]
    train_part, held_out = model_text.split_documents(documents)
    assert 2 <= len(held_out) <= 40
    assert len(train_part) + len(held_out) == 200
    assert model_text.split_documents(documents[50:])[1] == [item for item in held_out if item in documents[50:]]
    sample = model_text.held_out_sample(held_out)
    assert sample and sum(len(item.text) for item in sample) <= 100_000


def test_paragraphs_of_the_held_out_text_are_not_trained_on() -> None:
    shared, own = "a paragraph that stands in both of the two documents, word by word", "short"
    documents = [model_text.Document(name="a", text=f"{own}\n\n{shared}\n\n{own}")]
    held_out = [model_text.Document(name="b", text=f"{shared}\n\n{own}")]
    assert [item.text for item in model_text.without_paragraphs(documents, held_out)] == [f"{own}\n\n{own}"]
    assert model_text.without_paragraphs(documents, []) == documents


def tiny_run(documents: list[model_text.Document]) -> tuple[train_model.Llama, list[float]]:
    shape = train_model.ModelShape(hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1, head_size=32)
    phases = (train_model.Phase(steps=30, context=64, rows=4), train_model.Phase(steps=2, context=128, rows=1))
    return train_model.train(shape, documents, phases, seed=3, report_every=0)


def test_a_few_steps_lower_the_loss_and_repeat_bit_by_bit(held_out: list[model_text.Document]) -> None:
    model, losses = tiny_run(held_out)
    assert losses[0] > 7.5
    assert sum(losses[-5:]) / 5 < 5.5
    again, losses_again = tiny_run(held_out)
    assert losses_again == losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_saved_model_is_what_was_trained_rounded_to_bfloat16(
    held_out: list[model_text.Document], tmp_path: Path
) -> None:
    model, _ = tiny_run(held_out)
    train_model.save_model(model, tmp_path)
    loaded = train_model.load_model(tmp_path)
    assert loaded.shape == model.shape
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.bfloat16().float(), loaded.state_dict()[name]), name


def test_windows_score_every_byte_once(held_out: list[model_text.Document]) -> None:
    # With a window longer than the document there is one pass; shorter windows may only cost context, not bytes.
    model, _ = tiny_run(held_out)
    document = [model_text.Document(name="cut", text=held_out[0].text[:500])]
    whole = train_model.bits_per_byte(model, document, 501)
    assert train_model.bits_per_byte(model, document, 4096) == pytest.approx(whole, abs=1e-6)
    assert train_model.bits_per_byte(model, document, 64) == pytest.approx(whole, abs=0.3)
