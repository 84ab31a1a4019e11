"""Calibration of a model: steps, centres and rotary frequencies of the ``weighted`` quantizer, as one file.

``shadowserve calibrate`` writes it. It is a safetensors file: ``steps/PRESET`` and ``centres`` are float32 [layers,
kinds, heads, head size], ``frequencies`` is float64 [rotated pairs of a head], and ``shadowserve`` in the metadata
describes them as JSON.
"""

import functools
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.errors import ConfigurationError, NotInstalledError, ShadowServeError

if TYPE_CHECKING:
    from shadowserve import native

PRESETS: Final = ("near_lossless", "small", "tiny")
"""From the smallest loss to the largest."""
KINDS: Final = 2
FILE_BYTES_MAX: Final = 256 << 20
_VERSION: Final = 1
_NAME: Final = "shadowserve"
_HEADER_MAX: Final = 1 << 16
_TEXT_MAX: Final = 1024

Floats = npt.NDArray[np.float32]
Range = tuple[int, int]
"""First, and one behind the last."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps and centres of one preset, for the channels of a model or of some of its layers and heads.

    Attributes:
        steps, centres: float32 [layers, kinds, heads, head size].
        frequencies: Radians per token of each rotated pair of a head's key: channel ``c`` and ``c + len(frequencies)``.
    """

    steps: Floats
    centres: Floats
    frequencies: npt.NDArray[np.float64]

    def shard(self, layers: Range, heads: Range) -> "Steps":
        """Return the numbers of some layers and heads, such as those of one rank.

        Raises:
            ValueError: There are no such layers or heads.
        """
        for name, (first, end), axis in (("layers", layers, 0), ("heads", heads, 2)):
            count = self.steps.shape[axis]
            if not 0 <= first < end <= count:
                raise ValueError(f"there are no {name} {first} to {end}: the calibration has {count}")
        cut = slice(*layers), slice(None), slice(*heads)
        return replace(self, steps=self.steps[cut], centres=self.centres[cut])

    def channels(self, tokens: int) -> "native.Channels":
        """Return the channels for slices of up to ``tokens`` tokens.

        Raises:
            ValueError: A number is out of range.
        """
        from shadowserve import native  # engines load the C core only if they need it

        layers, kinds, _, size = self.steps.shape
        steps, centres = (array.reshape(layers * kinds, -1) for array in (self.steps, self.centres))
        return native.Channels(steps, centres, self.frequencies, kinds=kinds, head_length=size, tokens=tokens)


@dataclass(frozen=True, eq=False)
class PlacedSteps:
    """Steps of a model, and the first layer and head of the chunks of each chunk layout."""

    steps: Steps
    starts: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Steps and centres of all channels of a model.

    Raises:
        ValueError: A tensor is missing, or has another shape or type, or a number out of range.
    """

    model: str
    architecture: str
    rope: str  # the model's rotary embedding: ``rope_parameters`` of its configuration, as JSON; empty without any
    steps: Mapping[str, Floats]  # for each preset, [layers, kinds, heads, head size]; ``centres`` likewise
    centres: Floats
    frequencies: npt.NDArray[np.float64]  # as in :class:`Steps`

    def __post_init__(self) -> None:
        for name, text in (("model", self.model), ("architecture", self.architecture), ("rope", self.rope)):
            if not isinstance(text, str) or len(text) > _TEXT_MAX or not text.isprintable():
                raise ValueError(f"the {name} is no printable text of up to {_TEXT_MAX} characters")
        shape = self.centres.shape
        if len(shape) != 4 or shape[1] != KINDS or not all(shape):
            raise ValueError(f"centres have the shape {shape}, not [layers, {KINDS}, heads, head size]")
        for name, array in self._tensors().items():
            if array.dtype != (np.float64 if name == "frequencies" else np.float32):
                raise ValueError(f"{name} has the type {array.dtype}")
            if name != "frequencies" and array.shape != shape:
                raise ValueError(f"{name} has the shape {array.shape}, centres have {shape}")
        for preset in PRESETS:
            try:
                self.preset(preset).channels(tokens=1)  # checks the numbers
            except ValueError as error:
                raise ValueError(f"{preset}: {error}") from error

    @property
    def layers(self) -> int:
        return int(self.centres.shape[0])

    @property
    def kinds(self) -> int:
        return int(self.centres.shape[1])

    @property
    def heads(self) -> int:
        return int(self.centres.shape[2])

    @property
    def head_size(self) -> int:
        return int(self.centres.shape[3])

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of names, types, shapes and numbers of the tensors; 32 bytes."""
        total = hashlib.sha256(f"shadowserve calibration {_VERSION}\n".encode())
        for name, array in sorted(self._tensors().items()):
            total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
            total.update(array.astype(array.dtype.newbyteorder("<"), order="C").tobytes())
        return total.digest()

    def preset(self, name: str) -> Steps:
        return Steps(self.steps[name], self.centres, self.frequencies)

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ShadowServeError: It cannot be written, or would be larger than ``FILE_BYTES_MAX``.
        """
        tensors = {name: np.ascontiguousarray(array) for name, array in self._tensors().items()}
        data = _safetensors().save(tensors, {_NAME: json.dumps(self._described())})
        if len(data) > FILE_BYTES_MAX:
            raise ShadowServeError(f"{path} would have {len(data):,d} bytes: at most {FILE_BYTES_MAX:,d} can be read")
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ShadowServeError(f"cannot write {path}: {error.strerror}") from error

    def _tensors(self) -> dict[str, npt.NDArray[Any]]:
        steps = {f"steps/{preset}": self.steps[preset] for preset in PRESETS}
        return {**steps, "centres": self.centres, "frequencies": self.frequencies}

    def _described(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "model": self.model,
            "architecture": self.architecture,
            "rope": self.rope,
            "layers": self.layers,
            "kinds": self.kinds,
            "heads": self.heads,
            "head_size": self.head_size,
            "rotary_pairs": len(self.frequencies),
        }


def read(path: Path) -> Calibration:
    """Return the calibration of a file.

    Raises:
        ConfigurationError: There is no such file, or it is no valid calibration.
    """
    package = _safetensors()
    try:
        data = _contents(path)
        described = _description(data)
        return _parse(described, package.load(data))
    except OSError as error:
        raise ConfigurationError(f"cannot read the calibration {path}: {error.strerror}") from error
    except Exception as error:  # the package raises errors of many types for a damaged file
        reason = " ".join(str(error).split())[:_TEXT_MAX]
        raise ConfigurationError(f"{path} is no valid calibration: {reason}; run 'shadowserve calibrate'") from error


def _contents(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a pipe must not block
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > FILE_BYTES_MAX:
            raise ValueError(f"it has {status.st_size:,d} bytes, more than {FILE_BYTES_MAX:,d}")
        return file.read(FILE_BYTES_MAX)


def _description(data: bytes) -> dict[str, Any]:
    """Return the description in a safetensors file, which begins with the length of its header and this as JSON."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(_HEADER_MAX, len(data) - 8):
        raise ValueError("it is no safetensors file, or is cut off, or another program wrote it")
    metadata = dict(json.loads(data[8 : 8 + length])).get("__metadata__")
    if not isinstance(metadata, dict) or _NAME not in metadata:
        raise ValueError("another program wrote it")
    described = dict(json.loads(metadata[_NAME]))
    if described.get("version") != _VERSION:
        raise ValueError(f"it has the version {str(described.get('version')):.20}, this build reads {_VERSION}")
    return described


def _parse(described: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Calibration:
    names = {f"steps/{preset}": preset for preset in PRESETS}
    if tensors.keys() != {*names, "centres", "frequencies"}:
        raise ValueError(f"its tensors are not {', '.join(names)}, centres, frequencies")
    steps = {preset: tensors[name] for name, preset in names.items()}
    model, architecture, rope = (described.get(key, "") for key in ("model", "architecture", "rope"))
    found = Calibration(model, architecture, rope, steps, tensors["centres"], tensors["frequencies"])
    if found._described() != described:
        raise ValueError("its description does not fit its tensors")
    return found


def _safetensors() -> ModuleType:
    try:
        from safetensors import numpy as package
    except ModuleNotFoundError as error:
        raise NotInstalledError(
            "a calibration needs the Python package safetensors, which is not installed", "pip install safetensors"
        ) from error
    return package
