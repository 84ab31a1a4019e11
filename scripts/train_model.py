#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the project's own small Llama, byte by byte, on the documentation inside the Python standard library.

Tests, the demo and the quality figures need a model whose KV cache has real structure: equal outputs of a random
model prove little, and its keys and values quantize and compress unlike those of a model that has learned something.
This one is small enough to keep in the repository (under 8 MB) and to train in a few minutes on a CPU, from text
that every machine with Python holds.

    python scripts/train_model.py                       # writes tests/assets/model and tests/assets/heldout.jsonl
    python scripts/train_model.py --tiny --output DIR   # a run of a few steps, to see that all of it works

Everything follows from the seed, the text (so: the Python version) and the thread count. The steps are:

1. gather_documents() (in model_text.py) renders each module's docstrings as pydoc would, without importing anything,
   and takes the language reference out of pydoc_data/topics.py.
2. split_documents() holds out a few documents by the hash of their names.
3. train() runs the phases of PHASES, short contexts first, with Muon for the matrices and AdamW for the rest, then
   those of PHASES_LONG at a rate of their own.
4. save_model() rounds the weights to bfloat16 and writes a Hugging Face checkpoint with a byte tokenizer; what is
   measured afterwards is that checkpoint.
"""
# mypy: disallow-subclassing-any=False

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from model_text import (
    Document,
    gather_documents,
    held_out_sample,
    order_zero_entropy,
    save_documents,
    split_documents,
    without_paragraphs,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = [
    "ASSETS",
    "END_TOKEN",
    "PHASES",
    "PHASES_LONG",
    "PHASES_TINY",
    "RATES_LONG",
    "Llama",
    "ModelShape",
    "Phase",
    "Rates",
    "bits_per_byte",
    "encode_document",
    "load_model",
    "rotary_table",
    "save_model",
    "train",
]

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "tests" / "assets"

# Token ids 0 to 255 are the bytes themselves. The few after them stand between documents; 264 is the next multiple
# of 8, which keeps the rows of the embedding aligned.
END_TOKEN = 256
PAD_TOKEN = 257
VOCABULARY_SIZE = 264


# ---- Model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a Llama. vLLM's CPU attention wants a head size that is a multiple of 32."""

    hidden_size: int = 192
    intermediate_size: int = 640
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    positions_max: int = 16384
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square layer normalization with a learned gain."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x``."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def rotary_table(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (length, head_size), with the two halves alike as Hugging Face's Llama has it."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention with grouped queries. Names follow the Hugging Face checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Attend within each row of ``x``, (batch, length, hidden)."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_size)
        cosine, sine = (table.to(x.dtype) for table in rotary)
        query = _rotate(self.q_proj(x).view(heads).transpose(1, 2), cosine, sine)
        key = _rotate(self.k_proj(x).view(heads).transpose(1, 2), cosine, sine)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to each position by itself."""
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Add what attention and the feed-forward layer find to the residual stream ``x``."""
        # Norms hand bfloat16 to the matrices while the residual stream itself stays in single precision.
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), rotary)
        return x + self.mlp(self.post_attention_layernorm(x).to(dtype))


class Llama(nn.Module):
    """A Llama decoder whose parameters bear the names of transformers' LlamaModel, with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        """Initialize the weights from torch's random state."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self._rotary = rotary_table(shape, 0)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden_size**-0.5)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # so that every layer starts as the identity

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, (batch, length, vocabulary) in float32, that follow each of ``tokens``."""
        length = tokens.shape[1]
        if length > self._rotary[0].shape[0]:
            self._rotary = rotary_table(self.shape, length)
        rotary = (self._rotary[0][:length], self._rotary[1][:length])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rotary)
        logits: Tensor = F.linear(self.norm(x), self.embed_tokens.weight)
        return logits.float()


def encode_document(text: str) -> list[int]:
    """Return the token ids of ``text``: its UTF-8 bytes."""
    return list(text.encode())


# ---- Training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A run of steps with one context length; a step sees ``rows`` x ``context`` bytes."""

    steps: int
    context: int
    rows: int


# Small steps pay: at this size a step of 1 KiB teaches nearly as much as one of 4 KiB. Long contexts come last, when
# there is something to find in them.
PHASES = (
    Phase(steps=850, context=256, rows=4),
    Phase(steps=220, context=512, rows=4),
    Phase(steps=45, context=1024, rows=4),
    Phase(steps=12, context=4096, rows=1),
    Phase(steps=3, context=8192, rows=1),
)
# The first round's rate has fallen to nothing by the time of its long contexts, so a second round, at a rate of its
# own, teaches the model to use them: without it, anything beyond about 1 KiB of context only confuses it.
PHASES_LONG = (Phase(steps=8, context=8192, rows=1), Phase(steps=24, context=4096, rows=1))
PHASES_TINY = (Phase(steps=24, context=128, rows=8), Phase(steps=4, context=512, rows=2))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak learning rates; each rises over the first ``warmup`` of the steps, then falls to zero linearly."""

    matrices: float = 0.03
    embedding: float = 0.008
    gains: float = 0.008
    warmup: float = 0.03


RATES_LONG = Rates(matrices=0.006, embedding=0.0016, gains=0.0016, warmup=0.1)


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Push the singular values of ``matrix`` towards 1 by five Newton-Schulz steps (Jordan et al., Muon, 2024)."""
    # The quintic's coefficients are Muon's: steepest at zero, and good enough at 0.7 to 1.2 instead of exactly 1.
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum whose every update of a matrix is orthogonalized (Jordan et al., 2024).

    It needs about half the steps of AdamW here, which is what makes a few minutes on a CPU enough.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    def step(self, closure: None = None) -> None:
        """Update every matrix once."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._update(parameter, group["lr"], group["momentum"])

    def _update(self, parameter: nn.Parameter, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        update = _orthogonalize(parameter.grad.lerp(average, momentum))
        scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.add_(update, alpha=-lr * scale)


def _optimizers(model: Llama, rates: Rates) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    others = [
        {"params": [model.embed_tokens.weight], "lr": rates.embedding},
        {"params": gains, "lr": rates.gains},
    ]
    optimizers = [
        Muon(matrices, lr=rates.matrices),
        torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _batches(stream: Tensor, phases: Sequence[Phase], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield (rows, context + 1) tokens for each step: phases read on where the last one stopped, each in any order."""
    position = 0
    for phase in phases:
        count = phase.steps * phase.rows
        starts = (position + torch.arange(count) * phase.context) % (len(stream) - phase.context - 1)
        position += count * phase.context
        for step_starts in starts[torch.randperm(count, generator=generator)].split(phase.rows):
            yield torch.stack([stream[start : start + phase.context + 1] for start in step_starts.tolist()])


def train(
    start: ModelShape | Llama,
    documents: Sequence[Document],
    phases: Sequence[Phase] = PHASES,
    rates: Rates | None = None,
    *,
    seed: int = 0,
    report_every: int = 50,
) -> tuple[Llama, list[float]]:
    """Train a new model of a shape, or train on, with ``documents``.

    Returns:
        The model, and the loss of every step in bits per byte.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Llama(start) if isinstance(start, ModelShape) else start
    optimizers = _optimizers(model, rates or Rates())
    order = torch.randperm(len(documents), generator=generator).tolist()
    stream = torch.tensor(
        [token for index in order for token in [END_TOKEN, *encode_document(documents[index].text)]],
        dtype=torch.int64,
    )
    steps = sum(phase.steps for phase in phases)
    warmup = max(1, round(steps * (rates or Rates()).warmup))
    losses: list[float] = []
    started = time.monotonic()
    for step, batch in enumerate(_batches(stream, phases, generator)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min((step + 1) / warmup, (steps - step) / (steps - warmup))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() / math.log(2))
        if report_every and (step + 1) % report_every == 0:
            recent = sum(losses[-report_every:]) / report_every
            elapsed = time.monotonic() - started
            print(f"step {step + 1}/{steps}  {recent:.3f} bits/byte  {elapsed:.0f} s", flush=True)
    return model.eval(), losses


# ---- Measuring and saving --------------------------------------------------------------------------------------------


def bits_per_byte(model: Llama, documents: Sequence[Document], context: int) -> float:
    """Return the mean cross-entropy of ``documents``, each scored once in windows of ``context`` tokens.

    Windows overlap by half, so every byte but the first of a document is predicted from at least half a window, or
    from all that comes before it; the first from the end token alone.
    """
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.tensor([END_TOKEN, *encode_document(document.text)])
        scored = 0
        while scored < len(tokens) - 1:
            start = max(0, scored - context // 2)
            window = tokens[start : start + context + 1]
            skip = scored - start
            with torch.no_grad():
                log_probabilities = F.log_softmax(model(window[None, :-1])[0, skip:], dim=-1)
            total -= float(log_probabilities.gather(1, window[1 + skip :, None]).sum(dtype=torch.float64))
            count += len(window) - 1 - skip
            scored = start + len(window) - 1
    return total / count / math.log(2)


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_TOKEN,
        "eos_token_id": END_TOKEN,
        "pad_token_id": PAD_TOKEN,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.positions_max,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_epsilon,
        # Transformers 5 reads the first of these two, version 4 the second.
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY_SIZE,
    }


# A base model: a chat is only a text that goes on, which serves to run /v1/chat/completions.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()
    special = {"<|end|>": END_TOKEN, "<|pad|>": PAD_TOKEN}
    special |= {f"<|reserved_{index}|>": index for index in range(PAD_TOKEN + 1, VOCABULARY_SIZE)}
    vocabulary = {characters[byte]: byte for byte in range(256)} | special
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|end|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=ModelShape().positions_max,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # Transformers 5 writes a class name of its own; both it and version 4 know this one.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def save_model(model: Llama, folder: Path) -> None:
    """Write ``model`` as a Hugging Face checkpoint in bfloat16, with its tokenizer, to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    # The embeddings are tied, so the head is not stored a second time.
    state = {f"model.{name}": tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(_config(model.shape), indent=2) + "\n")
    generation = {"bos_token_id": END_TOKEN, "eos_token_id": END_TOKEN, "pad_token_id": PAD_TOKEN, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    _save_tokenizer(folder)


def load_model(folder: Path) -> Llama:
    """Return the model in ``folder``, as save_model() wrote it, in single precision."""
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        positions_max=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )
    model = Llama(shape)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in state.items()})
    model.eval()
    return model


def _model_card(model: Llama, figures: dict[str, float], corpus: dict[str, object]) -> str:
    shape = model.shape
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kv_elements = 2 * shape.layers * shape.kv_heads * shape.head_size
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in figures.items())
    facts = "\n".join(f"- {name}: {value}" for name, value in corpus.items())
    return f"""# The project's own small model

A byte-level Llama of {parameters:,} parameters that `scripts/train_model.py` trains in minutes on one CPU core. It
exists so that tests, the demo and quality figures run on a KV cache that means something. It is no good for anything
else: it has read some of the Python documentation once, and answers no questions.

- {shape.layers} layers, hidden size {shape.hidden_size}, feed-forward size {shape.intermediate_size}, \
{shape.heads} query heads and {shape.kv_heads} KV heads of {shape.head_size}, tied embeddings, RoPE with base \
{shape.rope_theta:.0f}
- {kv_elements} KV elements for each token: {2 * kv_elements} bytes in bfloat16, {4 * kv_elements} in float32
- one token for each UTF-8 byte (ids 0 to 255), `<|end|>` (256) between documents
- trained on contexts of up to 8192 tokens, a few steps only for the longest; up to {shape.positions_max} positions

| held-out text, bits per byte | |
|---|---|
{rows}

Measured after rounding the weights to bfloat16, in float32 arithmetic, on `tests/assets/heldout.jsonl`. Paragraphs that
also occur there were taken out of the training text. More than 1 KiB of context does not help this model.

{facts}

Made by `python scripts/train_model.py`. The same seed, thread count, versions and kind of CPU give the same weights.

## Licence

The training text and `heldout.jsonl` come from the documentation inside the CPython standard library, Copyright (c)
2001 Python Software Foundation; All Rights Reserved, under the PSF License Version 2
(<https://docs.python.org/3/license.html>). The weights are distributed with the project under Apache-2.0.
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder that gets model/ and heldout.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="part of what the weights depend on; more gain little")
    parser.add_argument("--tiny", action="store_true", help="a few steps only")
    options = parser.parse_args()
    if options.tiny and options.output == ASSETS:
        parser.error("--tiny would replace the kept model by one that has learned nothing: give it an --output")
    return options


def main() -> int:
    """Train, save, measure what was saved, and write the model card."""
    options = _arguments()
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    documents = gather_documents()
    train_part, held_out = split_documents(documents)
    sample = held_out_sample(held_out)
    train_part = without_paragraphs(train_part, sample)
    if not sample:
        print("train_model: no held-out documents: is the standard library's source installed?", file=sys.stderr)
        return 1
    corpus = hashlib.sha256(b"\0".join(document.text.encode() for document in train_part)).hexdigest()
    train_bytes = sum(len(document.text.encode()) for document in train_part)
    print(f"training on {len(train_part)} documents, {train_bytes:,} bytes; held out {len(sample)}", flush=True)
    report_every = 5 if options.tiny else 50
    phases = PHASES_TINY if options.tiny else PHASES
    folder = options.output / "model"
    trained, _ = train(ModelShape(), train_part, phases, seed=options.seed, report_every=report_every)
    save_model(trained, folder)
    if not options.tiny:
        # From what was saved, so that the second round can be repeated without the first.
        phases = (*phases, *PHASES_LONG)
        trained, _ = train(
            load_model(folder), train_part, PHASES_LONG, RATES_LONG, seed=options.seed + 1, report_every=4
        )
        save_model(trained, folder)
    save_documents(sample, options.output / "heldout.jsonl")
    model = load_model(folder)
    torch.set_num_threads(threads)
    figures = {
        "uniform guess": 8.0,
        "order-0 entropy": order_zero_entropy(sample),
        "this model, context 1024": bits_per_byte(model, sample, 1024),
        "this model, context 4096": bits_per_byte(model, sample, 4096),
        "this model, context 8192": bits_per_byte(model, sample, 8192),
    }
    facts: dict[str, object] = {
        "Held-out text": f"{len(sample)} documents, {sum(len(item.text.encode()) for item in sample):,} bytes",
        "Training text": f"{len(train_part)} documents, {train_bytes:,} bytes, SHA-256 `{corpus}`",
        "Trained on": f"{sum(item.steps * item.rows * item.context for item in phases):,} bytes, seed {options.seed}",
        "Python and PyTorch": f"{sys.version.split()[0]}, {torch.__version__}, training threads {options.threads}",
    }
    (folder / "README.md").write_text(_model_card(model, figures, facts))
    for name, value in figures.items():
        print(f"{name}: {value:.3f} bits per byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
