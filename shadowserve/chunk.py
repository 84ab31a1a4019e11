"""The chunk's description: what its elements are, how they lie in memory, and how they are stored.

All three programs mean this by a layout. A host describes its chunks so, the wire carries the description
(:mod:`shadowserve.proto.convert`), the data plane plans rounds by it, a record's header holds it, and the digest that
keys begin with is made of it, too (:mod:`shadowserve.keys`). Whatever describes no chunk that can be stored raises
here, so that a description that exists is sound: its numbers may come from a client that means ill.
"""

import enum
from dataclasses import dataclass, fields
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["DECODED_BYTES_MAX", "SLICES_MAX", "TOKENS_MAX", "ChunkLayout", "DType", "Quantizer"]

_NAMESPACE_BYTES: Final = 32
DECODED_BYTES_MAX: Final = 2 << 20
"""Largest slice, decoded: the accelerators of BlueField-2 and -3 take at most 2 MiB in one task."""
SLICES_MAX: Final = 26_210
"""Slices of one chunk: those that a record's head of at most 1 MiB names, far above 1,000 layers of K and V."""
TOKENS_MAX: Final = 65_536
"""Tokens of one chunk; beyond some thousand a prompt has hardly any whole ones."""

_Tokens = TypeVar("_Tokens", int, npt.NDArray[np.int64])


class _Labelled(enum.IntEnum):
    """Numbers of the C core and of records, which have names on the wire and in configurations."""

    @property
    def label(self) -> str:
        """The name on the wire, such as ``"bfloat16"``."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> Self:
        """Return the member of a name.

        Raises:
            ValueError: there is none.
        """
        member = cls.__members__.get(label.upper())
        if member is None or label != member.label:
            known = ", ".join(each.label for each in cls)
            raise ValueError(f"{cls.__name__.lower()} is {label[:40]!r}; it is one of {known}")
        return member


class Quantizer(_Labelled):
    """How elements become the symbols that are compressed (``enum ss_quantizer``)."""

    PASSTHROUGH = 0
    LOSSLESS = 1
    BINNED = 2


class DType(_Labelled):
    """Element types (``enum ss_dtype``); torch and numpy use the same names, where they have them."""

    UINT8 = 0
    """Bytes of any meaning, moved as they are."""
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    FLOAT8_E4M3 = 4
    """OCP's without infinities (torch's ``float8_e4m3fn``)."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return (1, 2, 2, 4, 1)[self]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Shape and treatment of one chunk's KV, as every record of one namespace has it.

    The bytes in memory are ``[layers, kinds, tokens, vector_length]`` elements of ``dtype``, C order.

    Attributes:
        namespace: whose KV it is, and which part of it: 32 bytes, zeros until a KVNamespace has named it.
        dtype: of the KV before quantizing.
        layers: layers in the chunk.
        kinds: 2 for K and V, 1 for a latent (MLA).
        vector_length: elements of one token, layer and kind: KV heads x head size.
        tokens: tokens in the chunk.
        quantizer: how elements become symbols.
        bins: for binned: even, 4 to 256; else 0.
        value_bins: for binned: those of V, where it has others than K; else 0.
        scale_tokens: for binned: so many tokens of a slice share one scale, the last of them perhaps fewer.

    Raises:
        ValueError: a combination that no record can hold; the message says which.
    """

    namespace: bytes = bytes(_NAMESPACE_BYTES)
    dtype: DType
    layers: int
    kinds: int
    vector_length: int
    tokens: int
    quantizer: Quantizer
    bins: int = 0
    value_bins: int = 0
    scale_tokens: int = 1

    def __post_init__(self) -> None:
        if len(self.namespace) != _NAMESPACE_BYTES:
            raise ValueError(f"a namespace digest has {_NAMESPACE_BYTES} bytes, this one {len(self.namespace)}")
        if self.kinds not in (1, 2):
            raise ValueError(f"kinds is {self.kinds}; it is 2 (K and V) or 1 (latent)")
        if min(self.layers, self.vector_length, self.tokens) < 1:
            raise ValueError("layers, vector_length and tokens are at least 1")
        if self.tokens > TOKENS_MAX:
            raise ValueError(f"tokens is {self.tokens}; a chunk has at most {TOKENS_MAX}")
        self._check_treatment()
        if self._group_decoded_bytes > DECODED_BYTES_MAX:
            raise ValueError(
                f"{self.scale_tokens} token of one layer takes {self._group_decoded_bytes} bytes; 2 MiB is the most"
            )
        if self.slice_count > SLICES_MAX:
            raise ValueError("the chunk has more slices than a head may name; use fewer tokens in a chunk")

    def described(self) -> dict[str, int | str]:
        """Return all of it but the namespace, by name, in plain values: element type and quantizer by their labels."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "namespace"}
        return values | {"dtype": self.dtype.label, "quantizer": self.quantizer.label}

    def _check_treatment(self) -> None:
        if self.quantizer is not Quantizer.BINNED:
            if self.bins or self.value_bins or self.scale_tokens != 1:
                raise ValueError(
                    f"bins is {self.bins}, value_bins {self.value_bins}, scale_tokens {self.scale_tokens}; "
                    f"{self.quantizer.name.lower()} has none: 0, 0 and 1"
                )
            return
        for name, bins in (("bins", self.bins), ("value_bins", self.value_bins or self.bins)):
            if bins % 2 or not 4 <= bins <= 256:
                raise ValueError(f"{name} is {bins}; binned takes an even number from 4 to 256")
        if self.value_bins and (self.kinds == 1 or self.value_bins == self.bins):
            raise ValueError(f"value_bins is {self.value_bins}; it is 0 where V has the bins of K, or is not there")
        if not 1 <= self.scale_tokens <= self.tokens:
            raise ValueError(f"scale_tokens is {self.scale_tokens}; it is from 1 to the chunk's {self.tokens} tokens")
        if self.dtype is DType.UINT8:
            raise ValueError("binned quantizes floating point, not bytes: use passthrough")

    @property
    def _group_decoded_bytes(self) -> int:
        """Bytes of symbols of the tokens that share a scale: what cannot be cut."""
        return self.token_decoded_bytes * self.scale_tokens

    @property
    def raw_bytes(self) -> int:
        """Bytes of the chunk in memory."""
        return self.layers * self.kinds * self.tokens * self.vector_length * self.dtype.itemsize

    @property
    def token_decoded_bytes(self) -> int:
        """Bytes of symbols of one token, layer and kind."""
        return self.vector_length * (1 if self.quantizer is Quantizer.BINNED else self.dtype.itemsize)

    def scales_bytes(self, tokens: _Tokens) -> _Tokens:
        """Return the bytes of scales of slices of so many tokens."""
        return -(-tokens // self.scale_tokens) * (4 if self.quantizer is Quantizer.BINNED else 0)

    def bins_of(self, kinds: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Return the bins of slices of these kinds."""
        return np.where((kinds == 1) & (self.value_bins != 0), self.value_bins, self.bins).astype(np.uint32)

    @property
    def slice_count(self) -> int:
        """Slices that a writer cuts the chunk into."""
        groups = -(-self.tokens // self.scale_tokens)
        return self.layers * self.kinds * -(-groups // (DECODED_BYTES_MAX // self._group_decoded_bytes))

    def cut(self, slice_bytes: int) -> list[int]:
        """Return the tokens of each slice that one (layer, kind) is cut into.

        Args:
            slice_bytes: most bytes of symbols in a slice; more where a slice would hold no token, or the head would
                name more slices than it may.
        """
        entries = SLICES_MAX // (self.layers * self.kinds)
        group = self.scale_tokens  # tokens of one scale stay together, so that where a writer cuts changes no value
        groups = -(-self.tokens // group)
        count = min(-(-groups // max(1, slice_bytes // self._group_decoded_bytes)), entries)
        ends = [min(self.tokens, group * -(-groups * (index + 1) // count)) for index in range(count)]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
