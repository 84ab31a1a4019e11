"""A source's answers for keys, the checks of record headers, and the cache of headers."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeVar

from shadowserve.chunk import ChunkLayout
from shadowserve.errors import (
    CorruptRecordError,
    NotARecordError,
    RecordError,
    StorageError,
    StorageRefusedError,
    StorageUnavailableError,
)
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import Header, HeaderPeek, header_length, parse_header, peek_header
from shadowserve.tier import Tier

HEADER_CACHE_BYTES: Final = 32 << 20
"""Bytes of headers cached between a lookup and the fetches that follow; as many for the local tiers."""
_ENTRY_OVERHEAD: Final = 400  # bytes of Python objects around one cached header

_Entry = TypeVar("_Entry")


class Stored(NamedTuple):
    """A stored value: its length in bytes, at least its header if it is a record, and its tier."""

    length: int
    header: bytes
    tier: Tier = Tier.STORAGE

    @property
    def header_bytes(self) -> int:
        """Length of the header; 0 if the value is no record, or if its header claims more bytes than the value has."""
        size = header_length(self.header)
        return size if size <= self.length else 0


class Cold(NamedTuple):
    """A record in object storage behind the source: its length, and the milliseconds until the source expects it.

    The time is that of a request made now, after those for the earlier keys of the same call.
    """

    length: int
    ms: int


class Unanswered(NamedTuple):
    """No answer for a key: the reason, and whether the server refused to answer."""

    reason: str
    refused: bool = False

    @classmethod
    def of(cls, error: StorageError) -> Self:
        """Convert the error of a failed request."""
        return cls(str(error), isinstance(error, StorageRefusedError))

    def error(self, what: str) -> StorageError:
        """Return the error of a request of which this is the answer."""
        return (StorageRefusedError if self.refused else StorageUnavailableError)(f"{what}: {self.reason}")


Found = Stored | Cold | Unanswered | None  # A source's answer for one key; None if it has no record there


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a stored value cannot be used.

    A Store may replace it, but not a record of another namespace, or in a codec that this build lacks: others use it.
    """

    outcome: pb.Outcome  # CORRUPT, MISMATCH, NOT_A_RECORD or UNSUPPORTED_CODEC
    reason: str  # one sentence
    replaceable: bool = True


def fault_of(error: RecordError) -> Fault:
    """Convert an error of :mod:`shadowserve.record`."""
    if isinstance(error, NotARecordError):
        return Fault(pb.OUTCOME_NOT_A_RECORD, str(error))
    if isinstance(error, CorruptRecordError):
        return Fault(pb.OUTCOME_CORRUPT, str(error))
    return Fault(pb.OUTCOME_MISMATCH, str(error))


def inspect_header(stored: Stored, key: bytes, namespace: bytes, codecs: Collection[int]) -> Fault | HeaderPeek:
    """Check a header as far as a lookup must: it is whole, of this key and namespace, and this build decodes it."""
    try:
        peek = peek_header(stored.header)
    except RecordError as error:
        return fault_of(error)
    if fault := _truncated(stored, peek.record_length):
        return fault
    if peek.key != key:
        return Fault(pb.OUTCOME_MISMATCH, f"it is the record of key {peek.key.hex()}")
    if peek.namespace != namespace:
        return Fault(pb.OUTCOME_MISMATCH, "it is a record of another namespace", replaceable=False)
    return _undecodable(peek.codec, codecs) or peek


def check_header(
    stored: Stored, key: bytes, layout: ChunkLayout, body_max: int, codecs: Collection[int]
) -> Fault | Header:
    """Check all of a header but its manifest, as a fetch must; ``body_max`` bounds the encoded bytes of the chunk."""
    try:
        header = parse_header(stored.header)
        header.expect(key, layout)
    except RecordError as error:
        return fault_of(error)
    if fault := _truncated(stored, header.record_length) or _undecodable(header.codec, codecs):
        return fault
    if header.record_length - header.header_length > body_max:
        return Fault(pb.OUTCOME_CORRUPT, "its body is larger than any encoding of such a chunk")
    return header


def _truncated(stored: Stored, record_length: int) -> Fault | None:
    if record_length == stored.length:
        return None
    reason = f"the value has {stored.length} bytes, its header says {record_length}: it was truncated"
    return Fault(pb.OUTCOME_CORRUPT, reason)


def _undecodable(codec: int, codecs: Collection[int]) -> Fault | None:
    if codec in codecs:
        return None
    return Fault(pb.OUTCOME_UNSUPPORTED_CODEC, f"this build does not decode codec {codec}", replaceable=False)


class HeaderCache(Generic[_Entry]):
    """Headers by key with a bound on their bytes; the least recently used are evicted."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self._entries: OrderedDict[bytes, tuple[_Entry, int]] = OrderedDict()

    def get(self, key: bytes) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, entry: _Entry, header_bytes: int) -> None:
        self.drop(key)
        size = header_bytes + _ENTRY_OVERHEAD
        self._entries[key] = entry, size
        self._bytes_left -= size
        while self._bytes_left < 0:
            self.drop(next(iter(self._entries)))

    def drop(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes_left += entry[1]
