"""The format of an object in the bucket: records one after the other, an entry for each, and a footer.

All numbers are little-endian::

    records      each as it was stored (docs/reference/record-format.md), without gaps
    entries      of each record, in their order: key (32 bytes), offset (u64), length (u32), length of its header (u32)
    tenant       the tenant's name, ASCII
    footer       magic "SSCOLD01", entries (u32), bytes of the tenant's name (u32), bytes of the object (u64), then
                 16 bytes of BLAKE2b over the entries, the tenant's name and the footer up to here

All records of an object are of one partition of the key space (:mod:`shadowserve.placement`), and its name begins with
it: a list with that prefix returns the objects of the partition. The rest of the name is made from the tenant and the
keys, so two nodes that pack the same records write the same name, and an object never changes. Readers check the
records.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from shadowserve.errors import ShadowServeError
from shadowserve.placement import partition_of, partitions_of

_MAGIC: Final = b"SSCOLD01"
_ENTRY: Final = struct.Struct("<32sQII")
_ENTRIES: Final = np.dtype([("key", "V32"), ("offset", "<u8"), ("length", "<u4"), ("header_bytes", "<u4")])
_FOOTER: Final = struct.Struct("<8sIIQ")
_SUM_BYTES: Final = 16
ENTRY_BYTES: Final = _ENTRY.size
FOOTER_BYTES: Final = _FOOTER.size + _SUM_BYTES
RECORDS_MAX: Final = 4_096
"""Most records of one object, so that the catalog forgets it in some milliseconds; 8 KiB each still fill 32 MiB."""
_OBJECT_BYTES_MAX: Final = (1 << 32) - 1
_TENANT_BYTES_MAX: Final = 128
_NAME: Final = re.compile(
    r"(?P<partition>[0-9a-f]{3})/t(?P<tenant>(?:[A-Za-z0-9_-]|=[0-9A-F]{2})*)/(?P<digest>[0-9a-f]{40})\.kv"
)


class ColdObjectError(ShadowServeError):
    """An object's bytes do not agree with its name, its size or its own entries."""


class Place(NamedTuple):
    """Position of a record in an object, in bytes."""

    offset: int
    length: int
    header_bytes: int


class ObjectName(NamedTuple):
    """Parts of an object's name."""

    partition: int
    tenant: str
    digest: bytes


class Contents(NamedTuple):
    """Contents of an object: of each record its key, its position, and the length of its header."""

    name: str  # name of the object, without the prefix
    parts: ObjectName
    size: int  # bytes of the object
    keys: tuple[bytes, ...]
    offsets: tuple[int, ...]  # they ascend
    lengths: tuple[int, ...]
    header_bytes: tuple[int, ...]

    @classmethod
    def of(cls, tenant: str, size: int, places: Iterable[tuple[bytes, Place]]) -> "Contents":
        """Return the contents of a tenant's object with these records."""
        keys, positions = zip(*places, strict=True)
        parts = _parts(partition_of(keys[0]), tenant, keys)
        return cls(join_name(parts), parts, size, keys, *zip(*positions, strict=True))

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        return self.parts.tenant

    @property
    def places(self) -> dict[bytes, Place]:
        """Position of each record by key."""
        return dict(zip(self.keys, map(Place, self.offsets, self.lengths, self.header_bytes), strict=True))


def name_of(tenant: str, keys: Iterable[bytes]) -> str:
    """Return the name of the object with a tenant's records of these keys, in this order."""
    first, *others = keys
    return join_name(_parts(partition_of(first), tenant, (first, *others)))


def _parts(partition: int, tenant: str, keys: Sequence[bytes]) -> ObjectName:
    data = len(tenant).to_bytes(4, "little") + tenant.encode("ascii") + b"".join(keys)
    return ObjectName(partition, tenant, hashlib.blake2b(data, digest_size=20).digest())


def join_name(parts: ObjectName) -> str:
    """Return the name of an object."""
    return f"{folder_of(parts.partition)}t{_shown(parts.tenant)}/{parts.digest.hex()}.kv"


def folder_of(partition: int) -> str:
    """Return the beginning of the names of all objects of a partition."""
    return f"{partition:03x}/"


def partition_in(name: str) -> int:
    """Return the partition of an object's name."""
    return int(name[:3], 16)


def parse_name(name: str) -> ObjectName | None:
    """Return the parts of an object's name; None for a name that join_name() does not make."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    partition, shown, digest = match.groups()
    tenant = _tenant(shown)
    return None if tenant is None else ObjectName(int(partition, 16), tenant, bytes.fromhex(digest))


@lru_cache(1024)
def _tenant(shown: str) -> str | None:
    tenant = re.sub("=(..)", lambda found: chr(int(found[1], 16)), shown)
    is_sound = len(tenant) <= _TENANT_BYTES_MAX and all("!" <= each <= "~" for each in tenant)
    return tenant if is_sound else None


@lru_cache(1024)
def _shown(tenant: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: f"={ord(found[0]):02X}", tenant)


def finish(body: bytearray, tenant: str, records: Sequence[tuple[bytes, Place]]) -> Contents:
    """Append entries and footer to ``body``, which has the records, of one partition; return the object's contents."""
    size = len(body) + len(records) * ENTRY_BYTES + len(tenant) + FOOTER_BYTES
    contents = Contents.of(tenant, size, records)
    body += footer_of(contents)
    return contents


def footer_of(contents: Contents) -> bytes:
    """Return the entries and the footer of an object."""
    entries = b"".join(map(_ENTRY.pack, contents.keys, contents.offsets, contents.lengths, contents.header_bytes))
    tenant = contents.tenant.encode("ascii")
    footer = entries + tenant + _FOOTER.pack(_MAGIC, len(contents.keys), len(tenant), contents.size)
    return footer + _sum(footer)


def _sum(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=_SUM_BYTES).digest()


def footer_bytes(data: bytes, size: int) -> int:
    """Return the bytes at an object's end that parse_footer() needs; ``data`` is its end, with the footer at least.

    Raises:
        ColdObjectError: It does not end in a footer of an object of ``size`` bytes.
    """
    if len(data) < FOOTER_BYTES or len(data) > size:
        raise ColdObjectError(f"an object of {size} bytes with {len(data)} at its end is too short")
    magic, count, tenant_bytes, declared = _FOOTER.unpack_from(data, len(data) - FOOTER_BYTES)
    if magic != _MAGIC:
        raise ColdObjectError("it does not end in a footer of ShadowServe")
    if declared != size or size > _OBJECT_BYTES_MAX:
        raise ColdObjectError(f"it has {size} bytes, its footer says {declared}")
    if not 1 <= count <= RECORDS_MAX or tenant_bytes > _TENANT_BYTES_MAX:
        raise ColdObjectError(f"its footer names {count} records and a tenant of {tenant_bytes} bytes")
    needed = count * ENTRY_BYTES + tenant_bytes + FOOTER_BYTES
    if needed >= size:
        raise ColdObjectError(f"{count} records do not fit {size} bytes")
    return int(needed)


def parse_footer(name: str, data: bytes, size: int) -> Contents:
    """Return the contents of an object by its last bytes, at least as many as footer_bytes() returns.

    Raises:
        ColdObjectError: The entries or the footer are unsound, or those of another object.
    """
    needed = footer_bytes(data, size)
    if len(data) < needed:
        raise ColdObjectError(f"of {needed} bytes at its end only {len(data)} came")
    contents = read_footer(data[len(data) - needed :])
    if contents.name != name:
        raise ColdObjectError("it has the contents of another object")
    return contents


def read_footer(footer: bytes) -> Contents:
    """Return the contents of the object that has these entries and this footer.

    Raises:
        ColdObjectError: They are unsound.
    """
    [contents] = read_footers([footer])
    if _sum(footer[:-_SUM_BYTES]) != footer[-_SUM_BYTES:]:
        raise ColdObjectError("the checksum of its entries is wrong")
    return contents


def read_footers(footers: Sequence[bytes]) -> list[Contents]:
    """Return the contents of the objects that have these entries and footers. It does not check their checksums.

    Raises:
        ColdObjectError: One of them is unsound.
    """
    if not footers:
        return []
    counts, tenants, sizes = zip(*map(_unpacked, footers), strict=True)
    pairs = zip(footers, counts, strict=True)
    entries = np.frombuffer(b"".join(footer[: count * ENTRY_BYTES] for footer, count in pairs), _ENTRIES)
    offsets, lengths, header_bytes = (entries[field].astype(np.int64) for field in ("offset", "length", "header_bytes"))
    limits = np.cumsum((0, *counts))
    ends = np.cumsum((0, *lengths.tolist()))
    begins = ends[limits[:-1]]
    is_placed = (offsets == ends[:-1] - np.repeat(begins, counts)) & (header_bytes > 0) & (header_bytes <= lengths)
    if not is_placed.all():
        raise ColdObjectError("its entries do not say where its records begin, without gaps")
    if not np.array_equal(ends[limits[1:]] - begins, np.subtract(sizes, [*map(len, footers)])):
        raise ColdObjectError("its entries do not cover its records, each once")
    partitions = partitions_of(entries["key"])
    firsts = partitions[limits[:-1]]
    if (partitions != np.repeat(firsts, counts)).any():
        raise ColdObjectError("its records are of several partitions")
    keys = entries["key"].tolist()
    columns = (keys, offsets.tolist(), lengths.tolist(), header_bytes.tolist())
    return [
        _contents(partition, tenant, size, *[tuple(column[begin:end]) for column in columns])
        for partition, tenant, size, (begin, end) in zip(
            firsts.tolist(), tenants, sizes, pairwise(limits.tolist()), strict=True
        )
    ]


def _unpacked(footer: bytes) -> tuple[int, bytes, int]:
    """Return the number of records, the tenant's name and the bytes of an object."""
    if len(footer) < FOOTER_BYTES:
        raise ColdObjectError(f"a footer of {len(footer)} bytes is too short")
    _, count, tenant_bytes, size = _FOOTER.unpack_from(footer, len(footer) - FOOTER_BYTES)
    if footer_bytes(footer, size) != len(footer):
        raise ColdObjectError(f"{count} entries do not fit a footer of {len(footer)} bytes")
    begin = count * ENTRY_BYTES
    return count, footer[begin : begin + tenant_bytes], size


def _contents(
    partition: int, tenant: bytes, size: int, keys: tuple[bytes, ...], offsets: tuple[int, ...],
    lengths: tuple[int, ...], header_bytes: tuple[int, ...],
) -> Contents:  # fmt: skip
    if len(set(keys)) < len(keys):
        raise ColdObjectError("its entries do not cover its records, each once")
    parts = _parts(partition, _tenant_of(tenant), keys)
    return Contents(join_name(parts), parts, size, keys, offsets, lengths, header_bytes)


@lru_cache(1024)
def _tenant_of(name: bytes) -> str:
    try:
        tenant = name.decode("ascii")
    except UnicodeDecodeError:
        raise ColdObjectError("the name of its tenant is not ASCII") from None
    if _tenant(_shown(tenant)) != tenant:
        raise ColdObjectError(f"no tenant has the name {tenant!r}")
    return tenant
