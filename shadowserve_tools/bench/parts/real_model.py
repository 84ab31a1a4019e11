"""A causal language model of a local folder: its KV cache as a tensor, and its predictions on top of a given cache."""

import inspect
import pydoc_data.topics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from shadowserve.errors import ShadowServeError

CHUNK_TOKENS: Final = 256
_REPOSITORY: Final = Path(__file__).parents[3]
_LICENCES: Final = Path("/usr/share/common-licenses")
_SOURCES: Final[dict[str, list[Any]]] = {
    "licences": [_LICENCES / name for name in ("GPL-3", "MPL-2.0", "GFDL-1.3", "Artistic")],
    "documents": sorted(_REPOSITORY.glob("docs/*/*.md")),
    "code": ["argparse", "tarfile", "ipaddress"],
}
_LEARNT: Final[dict[str, list[Any]]] = {
    "reference": [pydoc_data.topics],
    "code": ["asyncio.base_events", "statistics", "email.message"],
    "licence": [_REPOSITORY / "LICENSE"],
}
Tensor = Any
"""torch.Tensor: mypy does not follow torch."""


def texts() -> dict[str, str]:
    """Return long real texts that are on this machine, by kind: licences, the project's documents, Python's sources."""
    return {kind: text for kind, sources in _SOURCES.items() if (text := "\n".join(map(_text, sources)))}


def texts_to_learn() -> dict[str, str]:
    """Return texts for calibration, which every Python has, none of them among :func:`texts`."""
    return {kind: text for kind, sources in _LEARNT.items() if (text := "\n".join(map(_text, sources)))}


def _text(source: Any) -> str:
    if source is pydoc_data.topics:
        return "\n".join(pydoc_data.topics.topics.values())
    if isinstance(source, str):
        return inspect.getsource(import_module(source))
    return source.read_text(encoding="utf-8") if source.is_file() else ""


class RealModel:
    """Runs a model in float32 with a cache that was rounded to bfloat16, which a bfloat16 engine keeps.

    KV is a float32 tensor [layers, kinds, tokens, heads, head size]. In the *plain* form, keys are before RoPE.

    Attributes:
        name: Name of the model's folder.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ShadowServeError(f"{folder} is no model that transformers reads: {error}") from error
        self._model.eval().requires_grad_(False)
        self.name = folder.name

    @property
    def positions_max(self) -> int:
        """Most tokens of a prompt."""
        return int(self._model.config.max_position_embeddings)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens before and behind what a user says, in the model's chat template if it has one."""
        if not self._tokenizer.chat_template:
            return self.tokens(text + "\n\n"), []
        mark = "\0"
        messages = [{"role": "user", "content": text + mark}]
        before, _, behind = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        ).partition(mark)
        return self.tokens(before), self.tokens(behind)

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Return the KV of ``tokens``.

        Raises:
            ShadowServeError: The layers do not all have keys and values of every token and of one shape.
        """
        with torch.no_grad():
            cache = self._model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values
        pairs: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
        shapes = {getattr(each, "shape", None) for pair in pairs for each in pair}
        if len(shapes) != 1 or (shape := shapes.pop()) is None or shape[2] != len(tokens):
            raise ShadowServeError(f"{self.name} has layers without full attention, or of several shapes")
        kv = torch.stack([torch.stack([each[0].transpose(0, 1) for each in pair]) for pair in pairs])
        return kv.to(torch.bfloat16).float()

    def predict(self, kv: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the logarithms of the probabilities of the token behind each of ``tokens``, which follow ``kv``."""
        from transformers import DynamicCache

        cache = DynamicCache([(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in kv])
        logits = self._model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        return logits.float().log_softmax(dim=-1)

    def plain(self, kv: Tensor) -> Tensor:
        """Return KV with keys before RoPE; for a model without RoPE, ``kv``."""
        return self._turned(kv, -1)

    def rotated(self, plain: Tensor) -> Tensor:
        """Return plain KV with keys as they are cached."""
        return self._turned(plain, 1)

    def _turned(self, kv: Tensor, direction: int) -> Tensor:
        rotary = getattr(self._model.base_model, "rotary_emb", None)
        if rotary is None:
            return kv
        cos, sin = (each[0, :, None] for each in rotary(kv, torch.arange(kv.shape[2])[None]))
        keys, half = kv[:, 0, :, :, : cos.shape[-1]], cos.shape[-1] // 2
        if not torch.equal(cos[..., :half], cos[..., half:]):
            return kv  # pairs of neighbours: models such as GLM
        partners = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
        turned = keys * cos + direction * partners * sin
        if direction < 0:
            turned = turned / (cos.square() + sin.square())
        keys = torch.cat([turned, kv[:, 0, :, :, cos.shape[-1] :]], dim=-1)
        return torch.stack([keys, kv[:, 1]], dim=1)
