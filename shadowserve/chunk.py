"""Layout of a chunk: its elements, their order in memory, and how they are stored.

Hosts, the wire (:mod:`shadowserve.proto.convert`), the data plane, the record and the namespace digest
(:mod:`shadowserve.keys`) use the same description. The constructor refuses a layout that no record can hold: the
numbers may come from a malicious client.
"""

import enum
from dataclasses import dataclass, fields
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

_NAMESPACE_BYTES: Final = 32
DECODED_BYTES_MAX: Final = 2 << 20
"""Largest decoded slice: the accelerators of BlueField-2 and -3 decompress at most 2 MiB per task."""
SLICES_MAX: Final = 26_210
"""Most slices of one chunk: a record's header and manifest have at most 1 MiB. Enough for 1,000 layers of K and V."""
TOKENS_MAX: Final = 65_536
"""Most tokens of one chunk."""

_Tokens = TypeVar("_Tokens", int, npt.NDArray[np.int64])


class _Labelled(enum.IntEnum):
    """An enum of the C core and of records, with labels for the wire and for configurations."""

    @property
    def label(self) -> str:
        """Label on the wire, such as ``"bfloat16"``."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> Self:
        """Return the member with a label, otherwise raise ValueError."""
        member = cls.__members__.get(label.upper())
        if member is None or label != member.label:
            known = ", ".join(each.label for each in cls)
            raise ValueError(f"{cls.__name__.lower()} is {label[:40]!r}; it must be one of {known}")
        return member


class Quantizer(_Labelled):
    """Conversion of elements to the symbols that are compressed (``enum ss_quantizer``)."""

    PASSTHROUGH = 0
    LOSSLESS = 1
    BINNED = 2
    WEIGHTED = 3


class DType(_Labelled):
    """Element types (``enum ss_dtype``), with the names of torch and numpy."""

    UINT8 = 0
    """Opaque bytes."""
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    FLOAT8_E4M3 = 4
    """OCP's E4M3 without infinities (torch's ``float8_e4m3fn``)."""

    @property
    def itemsize(self) -> int:
        return (1, 2, 2, 4, 1)[self]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Shape and quantization of one chunk's KV, the same in all records of a namespace.

    In memory: elements of ``dtype`` of shape ``[layers, kinds, tokens, vector_length]``, in C order.

    Raises:
        ValueError: No record can hold such a chunk; the message names the field.
    """

    namespace: bytes = bytes(_NAMESPACE_BYTES)  # digest of the KVNamespace, 32 bytes; zeros until it is known
    dtype: DType  # element type before quantization
    layers: int
    kinds: int  # 2 for K and V, 1 for a latent (MLA)
    vector_length: int  # elements of one token, layer and kind: KV heads x head size
    tokens: int
    quantizer: Quantizer  # conversion of elements to symbols
    bins: int = 0  # number of bins of ``binned``: even, 4 to 256; else 0
    value_bins: int = 0  # number of bins of V if it differs from ``bins``; else 0
    scale_tokens: int = 1  # tokens of a slice that share one scale of ``binned``; else 1

    def __post_init__(self) -> None:
        if len(self.namespace) != _NAMESPACE_BYTES:
            raise ValueError(f"a namespace digest has {_NAMESPACE_BYTES} bytes, this one {len(self.namespace)}")
        if self.kinds not in (1, 2):
            raise ValueError(f"kinds is {self.kinds}; it is 2 (K and V) or 1 (latent)")
        if min(self.layers, self.vector_length, self.tokens) < 1:
            raise ValueError("layers, vector_length and tokens must be at least 1")
        if self.tokens > TOKENS_MAX:
            raise ValueError(f"tokens is {self.tokens}; a chunk has at most {TOKENS_MAX}")
        self._check_treatment()
        if self._group_decoded_bytes > DECODED_BYTES_MAX:
            raise ValueError(
                f"{self.scale_tokens} token of one layer has {self._group_decoded_bytes} bytes; the limit is 2 MiB"
            )
        if self.slice_count > SLICES_MAX:
            raise ValueError("the chunk has too many slices; use fewer tokens in a chunk")

    def described(self) -> dict[str, int | str]:
        """Return all fields except the namespace as plain values; element type and quantizer as labels."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "namespace"}
        return values | {"dtype": self.dtype.label, "quantizer": self.quantizer.label}

    def _check_treatment(self) -> None:
        if self.quantizer is Quantizer.WEIGHTED and self.dtype not in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32):
            raise ValueError(f"weighted quantizes float16, bfloat16 and float32, not {self.dtype.label}")
        if self.quantizer is not Quantizer.BINNED:
            if self.bins or self.value_bins or self.scale_tokens != 1:
                raise ValueError(
                    f"bins is {self.bins}, value_bins {self.value_bins}, scale_tokens {self.scale_tokens}; "
                    f"{self.quantizer.name.lower()} needs 0, 0 and 1"
                )
            return
        for name, bins in (("bins", self.bins), ("value_bins", self.value_bins or self.bins)):
            if bins % 2 or not 4 <= bins <= 256:
                raise ValueError(f"{name} is {bins}; binned needs an even number from 4 to 256")
        if self.value_bins and (self.kinds == 1 or self.value_bins == self.bins):
            raise ValueError(f"value_bins is {self.value_bins}; it must be 0 if V has the bins of K or does not exist")
        if not 1 <= self.scale_tokens <= self.tokens:
            raise ValueError(
                f"scale_tokens is {self.scale_tokens}; it must be from 1 to the chunk's {self.tokens} tokens"
            )
        if self.dtype is DType.UINT8:
            raise ValueError("binned quantizes floating point, not bytes: use passthrough")

    @property
    def _group_decoded_bytes(self) -> int:
        """Bytes of symbols of the tokens that share a scale; a slice holds a whole number of them."""
        return self.token_decoded_bytes * self.scale_tokens

    @property
    def raw_bytes(self) -> int:
        """Bytes of the chunk in memory."""
        return self.layers * self.kinds * self.tokens * self.vector_length * self.dtype.itemsize

    @property
    def token_decoded_bytes(self) -> int:
        """Bytes of symbols of one token, layer and kind."""
        one_byte = self.quantizer in (Quantizer.BINNED, Quantizer.WEIGHTED)
        return self.vector_length * (1 if one_byte else self.dtype.itemsize)

    def scales_bytes(self, tokens: _Tokens) -> _Tokens:
        """Return the size of the scales of slices, by their tokens, in bytes; of ``weighted``: their largest size.

        Before its symbols, a slice of ``weighted`` has its position, the number of exact tokens, their indexes, and
        their elements.
        """
        if self.quantizer is Quantizer.WEIGHTED:
            return 4 * (2 + (tokens + 1) // 2) + tokens * self.vector_length * self.dtype.itemsize
        return -(-tokens // self.scale_tokens) * (4 if self.quantizer is Quantizer.BINNED else 0)

    def scales_fit(self, lengths: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each slice whether its scales can have this size."""
        if self.quantizer is Quantizer.WEIGHTED:
            return (lengths >= 8) & (lengths <= self.scales_bytes(tokens))
        return np.equal(lengths, self.scales_bytes(tokens))

    def bins_of(self, kinds: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Return the number of bins of slices, by their kinds."""
        return np.where((kinds == 1) & (self.value_bins != 0), self.value_bins, self.bins).astype(np.uint32)

    @property
    def slice_count(self) -> int:
        """Smallest number of slices of the chunk."""
        groups = -(-self.tokens // self.scale_tokens)
        return self.layers * self.kinds * -(-groups // (DECODED_BYTES_MAX // self._group_decoded_bytes))

    def cut(self, slice_bytes: int) -> list[int]:
        """Return the number of tokens of each slice of one layer and kind, with at most ``slice_bytes`` of symbols.

        Slices get larger if one token does not fit, or if the chunk would have too many slices.
        """
        entries = SLICES_MAX // (self.layers * self.kinds)
        group = self.scale_tokens  # tokens of one scale stay in one slice: the slice size never changes a value
        groups = -(-self.tokens // group)
        count = min(-(-groups // max(1, slice_bytes // self._group_decoded_bytes)), entries)
        ends = [min(self.tokens, group * -(-groups * (index + 1) // count)) for index in range(count)]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
