"""The inputs of a request to the key, other than tokens: salt, epoch, adapter, images and other non-token inputs.

Images and adapters are identified by their content, hashed here, never by the names that users or vLLM give them.
Hashing is slow, so it is deferred to the lookup's thread.
"""

import functools
import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from host_control.vllm.identity.adapters import Adapters
from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.support import UncacheableError
from shadowserve.keys import Extra, Input, request_inputs

_IDENTIFIERS_MAX: Final = 65_536
"""More than the engine's encoder cache can hold: each of its entries has at least one token."""


class RequestInputs:
    """Identifies the inputs of one engine's requests."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self._adapters = adapters
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, str] = OrderedDict()

    def extra(self, request: Any, epoch: str) -> Extra | Callable[[], Extra]:
        """Return a request's extra inputs, or a function that returns them if they must be hashed.

        Called on the engine's thread. A non-token input only affects the chunks from its position on, so text before an
        image is shared with prompts without the image.

        Raises:
            UncacheableError: An input cannot be identified. The returned function raises it, too.
        """
        lora, features = request.lora_request, request.mm_features or ()
        plain = {"salt": request.cache_salt, "epoch": epoch}
        if lora is None and not features:
            return _extra(plain)
        if lora is not None and self._adapters is None:
            raise UncacheableError("the request has an adapter, and the engine is not configured for adapters")
        if lora is not None and self._adapters is not None:
            self._adapters.register(lora)
        return functools.cache(lambda: self._named(plain, lora, features))  # hashed once

    def _named(self, plain: dict[str, Any], lora: Any, features: Sequence[Any]) -> Extra:
        if lora is not None and self._adapters is not None:
            plain = {**plain, "adapter": self._adapters.described(lora)}
        return replace(_extra(plain), inputs=tuple(self._input(feature) for feature in features))

    def _input(self, feature: Any) -> Input:
        position = feature.mm_position
        content = hash_tensors(feature.data)
        with self._lock:
            known = self._contents.setdefault(feature.identifier, content)
            self._contents.move_to_end(feature.identifier)
            if known != content:
                # vLLM may use the cached encoder output of the identifier instead of the request's input.
                self._contents[feature.identifier] = ""
            if len(self._contents) > _IDENTIFIERS_MAX:
                self._contents.popitem(last=False)
        if known != content:
            raise UncacheableError(
                f"{feature.modality} identifier '{feature.identifier:.40}' was used for other content before"
            )
        mask = getattr(position, "is_embed", None)
        described = {
            "modality": feature.modality,
            "content": content,
            "mask": hash_tensors(mask) if mask is not None else None,
        }
        return Input(position.offset, position.length, bytes.fromhex(digest(described)))


def _extra(described: dict[str, Any]) -> Extra:
    return Extra(request_inputs(**canonical(described)))


def hash_tensors(value: Any) -> str:
    """Return the SHA-256 of a processed input: names, types, shapes and bytes of its tensors."""
    sha = hashlib.sha256()
    if value is None or (hasattr(value, "keys") and "address" in value.keys()):
        raise UncacheableError("the tensors of an input are only in a worker's memory (mm_processor_cache_type)")
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UncacheableError(f"the tensors of an input are in memory of type '{value.device.type}', not 'cpu'")
        _frame(sha, "tensor", f"{value.dtype}{list(value.shape)}".encode())
        sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        _frame(sha, "array", f"{value.dtype}{list(value.shape)}".encode())
        sha.update(np.ascontiguousarray(value))
    elif hasattr(value, "keys"):
        _frame(sha, "mapping", struct.pack("<q", len(value)))
        for key in sorted(value.keys()):
            _frame(sha, "key", str(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        _frame(sha, "sequence", struct.pack("<q", len(value)))
        for item in value:
            _feed(sha, item)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        _frame(sha, type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
    elif hasattr(value, "data") and hasattr(value, "field"):  # vLLM's MultiModalFieldElem
        _frame(sha, "field", type(value.field).__name__.encode())
        _feed(sha, value.data)
    else:
        raise UncacheableError(f"an input contains a value of unknown type {type(value).__name__}")


def _frame(sha: Any, kind: str, data: bytes) -> None:
    sha.update(struct.pack("<8sq", kind.encode()[:8], len(data)))
    sha.update(data)
