"""An object of the bucket: records one after the other, what they are behind them, and a footer.

All numbers are little-endian::

    records      each as it was stored (docs/record-format.md), without gaps
    entries      of each record, in their order: key (32 bytes), offset (u64), length (u32), length of its head (u32)
    tenant       the name of whom the records belong to, ASCII
    footer       magic "SSCOLD01", entries (u32), bytes of the tenant's name (u32), bytes of the object (u64), then
                 16 bytes of BLAKE2b over the entries, the tenant's name and the footer up to here

An object is named by its tenant and its keys, so two nodes that pack the same records write the same name, and it never
changes. What is read from a bucket may be anything: nothing of it is believed before it agrees with itself, with its
name, and with its size. The records are checked by whoever reads them.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from shadowserve.errors import ShadowServeError

_MAGIC: Final = b"SSCOLD01"
_ENTRY: Final = struct.Struct("<32sQII")
_FOOTER: Final = struct.Struct("<8sIIQ")
_SUM_BYTES: Final = 16
ENTRY_BYTES: Final = _ENTRY.size
FOOTER_BYTES: Final = _FOOTER.size + _SUM_BYTES
RECORDS_MAX: Final = 4_096
"""Of one object: forgetting it takes the catalog some milliseconds then. Records of 8 KiB still fill 32 MiB."""
_OBJECT_BYTES_MAX: Final = 5 << 30  # what S3 takes in one request
_TENANT_BYTES_MAX: Final = 128
_NAME: Final = re.compile(r"t(?P<tenant>(?:[A-Za-z0-9_-]|=[0-9A-F]{2})*)/(?P<digest>[0-9a-f]{40})\.kv")


class ColdObjectError(ShadowServeError):
    """An object of the bucket is not what its name, its size or its own entries say."""


class Place(NamedTuple):
    """Where a record lies in an object; in bytes."""

    offset: int
    length: int
    head_bytes: int


class Contents(NamedTuple):
    """What an object has.

    Attributes:
        name: of the object, behind the prefix.
        tenant: the name of whom the records belong to.
        size: bytes of the object.
        places: of each record, by key, in the order of their offsets.
    """

    name: str
    tenant: str
    size: int
    places: Mapping[bytes, Place]


def name_of(tenant: str, keys: Iterable[bytes]) -> str:
    """Return the name of the object that has a tenant's records of these keys, in this order."""
    return f"{folder_of(tenant)}{_digest(tenant, keys)}.kv"


def folder_of(tenant: str) -> str:
    """Return what the names of all objects of a tenant begin with."""
    shown = "".join(
        character if re.match(r"[A-Za-z0-9_-]", character) else f"={ord(character):02X}" for character in tenant
    )
    return f"t{shown}/"


def _digest(tenant: str, keys: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    digest.update(len(tenant).to_bytes(4, "little") + tenant.encode("ascii"))
    for key in keys:
        digest.update(key)
    return digest.hexdigest()


def parse_name(name: str) -> str | None:
    """Return the tenant of an object of ours; None where its name is none that name_of() gives."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    tenant = re.sub("=(..)", lambda found: chr(int(found[1], 16)), match["tenant"])
    return tenant if len(tenant) <= _TENANT_BYTES_MAX and all("!" <= each <= "~" for each in tenant) else None


def finish(body: bytearray, tenant: str, records: Sequence[tuple[bytes, Place]]) -> Contents:
    """Append to ``body``, which is the records, what they are; return the same."""
    keys = [key for key, _ in records]
    tail = b"".join(_ENTRY.pack(key, *place) for key, place in records) + tenant.encode("ascii")
    size = len(body) + len(tail) + FOOTER_BYTES
    tail += _FOOTER.pack(_MAGIC, len(records), len(tenant), size)
    body += tail
    body += hashlib.blake2b(tail, digest_size=_SUM_BYTES).digest()
    return Contents(name_of(tenant, keys), tenant, size, dict(records))


def tail_bytes(data: bytes, size: int) -> int:
    """Return how many bytes from an object's end parse_tail() needs; ``data`` is its end, a footer at least.

    Raises:
        ColdObjectError: it does not end in a footer of an object of ``size`` bytes.
    """
    if len(data) < FOOTER_BYTES or len(data) > size:
        raise ColdObjectError(f"an object of {size} bytes with {len(data)} at its end is none of ours: it is too short")
    magic, count, tenant_bytes, said = _FOOTER.unpack_from(data, len(data) - FOOTER_BYTES)
    if magic != _MAGIC:
        raise ColdObjectError("it does not end as an object of ours")
    if said != size or size > _OBJECT_BYTES_MAX:
        raise ColdObjectError(f"it has {size} bytes, its footer says {said}")
    if not 1 <= count <= RECORDS_MAX or tenant_bytes > _TENANT_BYTES_MAX:
        raise ColdObjectError(f"its footer names {count} records and a tenant of {tenant_bytes} bytes")
    needed = count * ENTRY_BYTES + tenant_bytes + FOOTER_BYTES
    if needed >= size:
        raise ColdObjectError(f"{count} records do not fit {size} bytes")
    return int(needed)


def parse_tail(name: str, data: bytes, size: int) -> Contents:
    """Return what an object has.

    Args:
        name: that it was found under.
        data: its last bytes, as many as tail_bytes() says or more.
        size: bytes of all of it.

    Raises:
        ColdObjectError: its tail is not sound, or that of another object.
    """
    needed = tail_bytes(data, size)
    if len(data) < needed:
        raise ColdObjectError(f"of {needed} bytes at its end only {len(data)} came")
    tail = data[len(data) - needed :]
    _, count, tenant_bytes, _ = _FOOTER.unpack_from(tail, needed - FOOTER_BYTES)
    if hashlib.blake2b(tail[:-_SUM_BYTES], digest_size=_SUM_BYTES).digest() != tail[-_SUM_BYTES:]:
        raise ColdObjectError("the checksum of its entries is wrong")
    begin = count * ENTRY_BYTES
    raw_tenant = tail[begin : begin + tenant_bytes]
    places: dict[bytes, Place] = {}
    position = 0
    for key, *numbers in _ENTRY.iter_unpack(tail[:begin]):
        place = Place(*numbers)
        if place.offset != position or not 0 < place.head_bytes <= place.length:
            raise ColdObjectError(f"its entry {len(places)} says {place}, behind {position} bytes of records")
        position += place.length
        places[key] = place
    if len(places) != count or position != size - needed:
        raise ColdObjectError("its entries do not cover its records, each once")
    tenant = parse_name(name)
    if tenant is None or raw_tenant != tenant.encode("ascii") or name_of(tenant, places) != name:
        raise ColdObjectError("it has the contents of another object")
    return Contents(name, tenant, size, places)
