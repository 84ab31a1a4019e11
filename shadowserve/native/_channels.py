"""Steps of the channels of a group, for the quantizer ``weighted``."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shadowserve.native._library import ffi

__all__ = ["Channels", "Place", "shifts"]

_HEAD_MAX: Final = 1024
_SHIFTS: Final = 4
_MAGNITUDE_MAX: Final = 2.0**100
"""Largest step and centre: 128 steps stay finite in single precision."""


def shifts(tokens: int, length: int) -> NDArray[np.float32]:
    """Return the shift of the values of each token and channel of a slice, in steps: -3/8, -1/8, 1/8 or 3/8.

    Without shifts, channels that vary by less than a step are always rounded to their centre: an error that is the same
    for all tokens, which attention adds up. With shifts such errors cancel out.
    """
    numbers = (np.arange(tokens)[:, None] + 3 * np.arange(length)) % _SHIFTS
    return ((numbers - (_SHIFTS - 1) / 2) / _SHIFTS).astype(np.float32)


class Channels:
    """Steps and centres of the channels of all layers and kinds of a group, and the rotation of its keys.

    The centres of consecutive tokens are shifted (:func:`shifts`).

    Args:
        steps, centres: [layers x kinds, vector length]; a row is one layer and kind.
        frequencies: Radians per token of each rotated pair: in each head of the first kind, channel ``c`` with channel
            ``c + len(frequencies)``. Empty: keys are not rotated.
        kinds: 2 for K and V.
        head_length: Channels of a head.
        tokens: Most tokens of a slice.

    Raises:
        ValueError: A number is out of range, or sizes do not fit each other.
    """

    def __init__(
        self, steps: ArrayLike, centres: ArrayLike, frequencies: ArrayLike, *, kinds: int, head_length: int, tokens: int
    ) -> None:
        self._steps = _numbers("steps", steps, np.float32, 2)
        self._centres = _numbers("centres", centres, np.float32, 2)
        self._frequencies = _numbers("frequencies", frequencies, np.float64, 1)
        (rows, length), pairs = self._steps.shape, len(self._frequencies)
        if self._centres.shape != self._steps.shape or not rows or not length:
            raise ValueError(f"steps have the shape {self._steps.shape}, centres {self._centres.shape}")
        if not (self._steps > 0).all():
            raise ValueError("a step is not positive")
        if kinds < 1 or rows % kinds:
            raise ValueError(f"{rows} rows of steps are not whole layers of {kinds} kinds")
        if not 0 < head_length <= _HEAD_MAX or length % head_length:
            raise ValueError(f"head_length is {head_length}: up to {_HEAD_MAX}, and a divisor of {length}")
        if 2 * pairs > head_length:
            raise ValueError(f"{pairs} frequencies are more than half of a head's {head_length} channels")
        self._centres = self._centres + shifts(_SHIFTS, length)[:, None] * self._steps
        angles = np.arange(tokens)[:, None] * self._frequencies
        self._turns = np.ascontiguousarray(np.hstack([np.cos(angles), np.sin(angles)]), np.float32)
        self.vector_length = length
        self.rows = rows
        self.struct = self._struct(kinds, head_length, pairs, tokens)

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes + self._centres.nbytes + self._frequencies.nbytes + self._turns.nbytes

    def _struct(self, kinds: int, head_length: int, pairs: int, tokens: int) -> Any:
        struct = ffi.new("struct ss_channels *")
        struct.steps = ffi.cast("float *", self._steps.ctypes.data)
        struct.centres = ffi.cast("float *", self._centres.ctypes.data)
        struct.frequencies = ffi.cast("double *", self._frequencies.ctypes.data)
        struct.turns = ffi.cast("float *", self._turns.ctypes.data)
        struct.rows, struct.kinds, struct.vector_length = self.rows, kinds, self.vector_length
        struct.head_length, struct.pairs, struct.tokens = head_length, pairs, tokens
        return struct


class Place(NamedTuple):
    """Row of the channels of a slice, and, to quantize it, the position of its first token in its prompt."""

    channels: Channels
    row: int
    position: int = 0


def _numbers(name: str, values: ArrayLike, dtype: Any, dimensions: int) -> NDArray[Any]:
    array = np.array(values, dtype, order="C")
    if array.ndim != dimensions:
        raise ValueError(f"{name} have {array.ndim} dimensions, not {dimensions}")
    if not np.isfinite(array).all() or (np.abs(array) > _MAGNITUDE_MAX).any():
        raise ValueError(f"one of the {name} is not finite, or too large")
    return array
