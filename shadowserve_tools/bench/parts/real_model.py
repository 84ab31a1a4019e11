"""A causal language model of a local folder: its KV cache as a tensor, and its predictions on top of a given cache."""

import functools
import inspect
import json
import pydoc_data.topics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
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
_STATIC_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies do not depend on the prompt."""
_EQUAL_TOKENS: Final = 64
_EQUAL: Final = 0.05
"""Difference of keys by rounding to bfloat16, as a share of their norm, and some more."""
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
        architecture: Name of the model's class.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._folder = folder
        try:
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ShadowServeError(f"{folder} is no model that transformers reads: {error}") from error
        self._model.eval().requires_grad_(False)
        self.name = folder.resolve().name
        self.architecture = str((self._model.config.architectures or [type(self._model).__name__])[0])

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ShadowServeError(f"{self._folder} has no tokenizer that transformers reads: {error}") from error

    @property
    def rope(self) -> str:
        """``rope_parameters`` of the model's configuration, as JSON; empty without any."""
        parameters = getattr(self._model.config.get_text_config(), "rope_parameters", None)
        return json.dumps(parameters, sort_keys=True) if parameters else ""

    @property
    def positions_max(self) -> int:
        """Most tokens of a prompt."""
        return int(self._model.config.max_position_embeddings)

    @functools.cached_property
    def head_size(self) -> int:
        """Channels of a head."""
        return int(self.prefill(self.tokens("the")[:1]).shape[-1])

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
            answer = self._model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        layers = getattr(getattr(answer, "past_key_values", None), "layers", [])
        pairs: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
        shapes = {getattr(each, "shape", None) for pair in pairs for each in pair}
        sliding = any(getattr(layer, "is_sliding", False) for layer in layers)
        if sliding or len(shapes) != 1 or (shape := shapes.pop()) is None or shape[2] != len(tokens):
            raise ShadowServeError(f"{self.name} has layers without full attention, or of several shapes")
        kv = torch.stack([torch.stack([each[0].transpose(0, 1) for each in pair]) for pair in pairs])
        return kv.to(torch.bfloat16).float()

    def predict(self, kv: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the logarithms of the probabilities of the token behind each of ``tokens``, which follow ``kv``."""
        from transformers import DynamicCache

        cache = DynamicCache([(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in kv])
        logits = self._model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        return logits.float().log_softmax(dim=-1)

    @functools.cached_property
    def frequencies(self) -> npt.NDArray[np.float64]:
        """Radians per token of each rotated pair of a head's key: channels ``c`` and ``c + len(frequencies)``.

        It is empty for a model without RoPE.

        Raises:
            ShadowServeError: They depend on the layer, or on the prompt.
        """
        config, why = self._model.config.get_text_config(), ""
        modules = [each for each in self._model.modules() if any("inv_freq" in name for name in each._buffers)]
        parameters = getattr(config, "rope_parameters", None) or {}
        kind = parameters.get("rope_type", "default")
        if not modules:
            return np.empty(0)
        if len(modules) > 1 or not hasattr(modules[0], "inv_freq"):
            why = "rotates layers in several ways"
        elif "mrope_section" in parameters:
            why = "has multimodal rotary positions (mrope)"
        elif kind not in _STATIC_ROPE:
            why = f"has rotary positions of the type {kind}; {', '.join(_STATIC_ROPE)} can be un-rotated"
        if why:
            raise ShadowServeError(f"{self.name} {why}")
        found: npt.NDArray[np.float64] = modules[0].inv_freq.double().numpy()
        return found

    def check_plain(self) -> None:
        """Check that keys of equal tokens before RoPE are equal at all positions.

        Raises:
            ShadowServeError: They are not, or the model keeps other things than keys and values.
        """
        if getattr(self._model.config.get_text_config(), "kv_lora_rank", None):
            raise ShadowServeError(f"{self.name} has latent attention (MLA): it keeps no keys and values of heads")
        if not len(self.frequencies):
            return
        with torch.no_grad():
            keys = self.plain(self.prefill(self.tokens("the")[:1] * _EQUAL_TOKENS))[:, 0]
        if ((keys - keys[:, :1]).norm(dim=-1) > _EQUAL * keys.norm(dim=-1)).any():
            raise ShadowServeError(f"{self.name} does not rotate all keys in halves of a head (neighbour pairs?)")

    def plain(self, kv: Tensor) -> Tensor:
        """Return KV with keys before RoPE; for a model without RoPE, ``kv``."""
        return self._turned(kv, -1)

    def rotated(self, plain: Tensor) -> Tensor:
        """Return plain KV with keys as they are cached."""
        return self._turned(plain, 1)

    def _turned(self, kv: Tensor, direction: int) -> Tensor:
        if not (half := len(self.frequencies)):
            return kv
        angles = direction * torch.arange(kv.shape[2]).double()[:, None, None] * torch.from_numpy(self.frequencies)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second, rest = kv[:, 0].split([half, half, kv.shape[-1] - 2 * half], dim=-1)
        keys = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
        return torch.stack([keys, kv[:, 1]], dim=1)
