"""What distinguishes a request's KV beside its tokens: salt, epoch, adapter, inputs that are no tokens.

Only content counts, and only content that was hashed here: the names that users and vLLM give to images and adapters
are words. Hashing takes time, so what needs it is handed on as something to be called, on the lookup's thread.
"""

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
from host_control.vllm.identity.canonical import digest
from host_control.vllm.support import UncacheableError
from shadowserve.keys import Extra, Input

_IDENTIFIERS_MAX: Final = 65_536
"""More than the engine's encoder cache can hold, of which each entry takes room for at least one token."""


class RequestInputs:
    """What is known of the inputs of one engine's requests. :meth:`extra` is called on the engine's thread.

    Args:
        adapters: of this engine; ``None`` where it serves none.
    """

    def __init__(self, adapters: Adapters | None = None) -> None:
        self._adapters = adapters
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, str] = OrderedDict()

    def extra(self, request: Any, epoch: str) -> Extra | Callable[[], Extra]:
        """Return what distinguishes a request's KV, or what returns it, which takes longer and raises what this does.

        An input that is no tokens counts where it stands: text before an image is shared with prompts without it.

        Args:
            request: of vLLM.
            epoch: of the weights (:mod:`host_control.vllm.epochs`).

        Raises:
            UncacheableError: what it is computed from cannot be known.
        """
        lora, features = request.lora_request, request.mm_features or ()
        plain = {"salt": request.cache_salt, "epoch": epoch}
        if lora is None and not features:
            return _of_all(plain)
        if lora is not None and self._adapters is None:
            raise UncacheableError("an adapter in an engine that is configured for none")
        if lora is not None and self._adapters is not None:
            self._adapters.arrived(lora)
        return _Once(lambda: self._named(plain, lora, features))

    def _named(self, plain: dict[str, Any], lora: Any, features: Sequence[Any]) -> Extra:
        if lora is not None and self._adapters is not None:
            plain = {**plain, "adapter": self._adapters.described(lora)}
        return replace(_of_all(plain), inputs=tuple(self._input(feature) for feature in features))

    def _input(self, feature: Any) -> Input:
        place = feature.mm_position
        content = hash_tensors(feature.data)
        with self._lock:
            known = self._contents.setdefault(feature.identifier, content)
            self._contents.move_to_end(feature.identifier)
            if known != content:
                # vLLM may compute with what it keeps under this name, whatever the request brings.
                self._contents[feature.identifier] = ""
            if len(self._contents) > _IDENTIFIERS_MAX:
                self._contents.popitem(last=False)
        if known != content:
            raise UncacheableError(
                f"{feature.modality} '{feature.identifier:.40}' has stood for another content before"
            )
        mask = getattr(place, "is_embed", None)
        described = {
            "modality": feature.modality,
            "content": content,
            "mask": hash_tensors(mask) if mask is not None else None,
        }
        return Input(place.offset, place.length, bytes.fromhex(digest(described)))


def _of_all(described: dict[str, Any]) -> Extra:
    return Extra(bytes.fromhex(digest(described)) if any(described.values()) else b"")


class _Once:
    """Calls at most once, and gives everybody what came of it."""

    def __init__(self, make: Callable[[], Extra]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Extra | None = None

    def __call__(self) -> Extra:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


def hash_tensors(value: Any) -> str:
    """Return the SHA-256 of what a processor has made of an input: names, types, shapes and bytes of its tensors.

    Raises:
        UncacheableError: it is not in this process's memory, or is of a kind that is not known.
    """
    sha = hashlib.sha256()
    if value is None or (hasattr(value, "keys") and "address" in value.keys()):
        raise UncacheableError("an input whose tensors are in a worker's memory alone (mm_processor_cache_type)")
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UncacheableError(f"an input whose tensors are in memory of kind '{value.device.type}'")
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
        raise UncacheableError(f"an input of a kind that is not known here, {type(value).__name__}")


def _frame(sha: Any, kind: str, data: bytes) -> None:
    sha.update(struct.pack("<8sq", kind.encode()[:8], len(data)))
    sha.update(data)
