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
from typing import Final, NamedTuple

from shadowserve.errors import ShadowServeError
from shadowserve.native import COLD_OBJECT, read_cold_footer
from shadowserve.placement import partition_of

_MAGIC: Final = b"SSCOLD01"
_ENTRY: Final = struct.Struct("<32sQII")
_FOOTER: Final = struct.Struct("<8sIIQ")
_SUM_BYTES: Final = 16
ENTRY_BYTES: Final = _ENTRY.size
FOOTER_BYTES: Final = _FOOTER.size + _SUM_BYTES
DIGEST_BYTES: Final = 20
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
    """Contents of an object: its entries and its footer, and what they say."""

    name: str  # name of the object, without the prefix
    parts: ObjectName
    described: bytes  # COLD_OBJECT, about ``footer``
    footer: bytes

    @classmethod
    def of(cls, tenant: str, size: int, places: Iterable[tuple[bytes, Place]]) -> "Contents":
        """Return the contents of a tenant's object with these records."""
        keys, positions = zip(*places, strict=True)
        named = len(tenant).to_bytes(4, "little") + tenant.encode("ascii") + b"".join(keys)
        digest = hashlib.blake2b(named, digest_size=DIGEST_BYTES).digest()
        parts = ObjectName(partition_of(keys[0]), tenant, digest)
        longest = max(position.length for position in positions)
        described = COLD_OBJECT.pack(size, 0, len(keys), len(tenant), 0, longest, parts.partition, digest)
        entries = b"".join(_ENTRY.pack(key, *position) for key, position in zip(keys, positions, strict=True))
        footer = entries + tenant.encode("ascii") + _FOOTER.pack(_MAGIC, len(keys), len(tenant), size)
        return cls(join_name(parts), parts, described, footer + _sum(footer))

    @property
    def tenant(self) -> str:
        return self.parts.tenant

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return int(COLD_OBJECT.unpack(self.described)[0])

    @property
    def records(self) -> int:
        return int(COLD_OBJECT.unpack(self.described)[2])

    @property
    def longest(self) -> int:
        """Bytes of its longest record."""
        return int(COLD_OBJECT.unpack(self.described)[5])

    @property
    def places(self) -> dict[bytes, Place]:
        """Position of each record by key."""
        entries = self.footer[: self.records * ENTRY_BYTES]
        return {key: Place(*position) for key, *position in _ENTRY.iter_unpack(entries)}


def join_name(parts: ObjectName) -> str:
    """Return the name of an object."""
    return f"{tenant_folder(parts.partition, parts.tenant)}{parts.digest.hex()}.kv"


def tenant_folder(partition: int, tenant: str) -> str:
    """Return the beginning of the names of all objects of a tenant in a partition."""
    return f"{folder_of(partition)}t{_shown(tenant)}/"


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
    body += contents.footer
    return contents


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
    described = read_cold_footer(footer)
    if isinstance(described, str):
        raise ColdObjectError(described)
    if _sum(footer[:-_SUM_BYTES]) != footer[-_SUM_BYTES:]:
        raise ColdObjectError("the checksum of its entries is wrong")
    _, _, count, tenant_bytes, _, _, partition, digest = COLD_OBJECT.unpack(described)
    begin = count * ENTRY_BYTES
    parts = ObjectName(partition, footer[begin : begin + tenant_bytes].decode("ascii"), digest)
    return Contents(join_name(parts), parts, described, footer)
