"""Index objects: footers of many objects in one, so that a node learns them without reading the end of each.

All numbers are little-endian::

    magic        "SSINDX01"
    objects      of each: the hour in which it was used last (u32, since 1970), bytes of its footer (u32), its footer

An index object is about one partition. Its name is made from its bytes, so that a torn or forged one is noticed, it
never changes, and two nodes that write the same write it once. It says nothing that the objects do not say themselves,
so it may be lost; and two nodes may replace index objects by others at the same time, as each deletes only what it has
read and written again.

A node that writes objects of a partition that another node serves leaves an index object for it in the folder ``new/``.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowserve.native import COLD_OBJECT, COLD_OBJECT_DTYPE, read_cold_index
from shadowserve.pool.cold.layout import (
    DIGEST_BYTES,
    ENTRY_BYTES,
    FOOTER_BYTES,
    ColdObjectError,
    Contents,
    ObjectName,
    folder_of,
    tenant_folder,
)

_MAGIC: Final = b"SSINDX01"
_ENTRY: Final = struct.Struct("<II")
_NAME: Final = re.compile(r"(?P<news>new/)?(?P<partition>[0-9a-f]{3})/(?P<digest>[0-9a-f]{40})\.ix")
NEWS_FOLDER: Final = "new/"
INDEX_BYTES_MAX: Final = 4 << 20
"""Most bytes of an index object; a larger one is not read."""


class IndexName(NamedTuple):
    """Parts of an index object's name."""

    partition: int
    digest: str
    is_news: bool


class IndexEntries:
    """Entries of an index object, in its order.

    Attributes:
        body: Its bytes.
        objects: Descriptions of the objects (:data:`shadowserve.native.COLD_OBJECT_DTYPE`).
        names: Their names, without the prefix.
        tenants: Their tenants.
        used_h: The hour in which each was used last.
    """

    def __init__(self, partition: int, body: bytes, objects: npt.NDArray[np.void]) -> None:
        self.partition = partition
        self.body = body
        self.objects = objects
        self.used_h: list[int] = objects["used_h"].tolist()
        begins = (objects["begin"] + objects["records"] * np.uint32(ENTRY_BYTES)).tolist()
        ends = zip(begins, objects["tenant_length"].tolist(), strict=True)
        self.tenants = [body[begin : begin + size].decode("ascii") for begin, size in ends]
        folders = {tenant: tenant_folder(partition, tenant) for tenant in set(self.tenants)}
        digits = 2 * DIGEST_BYTES
        digests = objects["digest"].tobytes().hex()
        self.names = [
            f"{folders[tenant]}{digests[at : at + digits]}.kv"
            for tenant, at in zip(self.tenants, range(0, len(digests), digits), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.objects)

    def __iter__(self) -> Iterator[tuple[Contents, int]]:
        """Yield each object's contents, and the hour in which it was used last."""
        return zip(map(self.contents, range(len(self))), self.used_h, strict=True)

    def contents(self, at: int) -> Contents:
        size, begin, records, tenant_length, _, *rest = COLD_OBJECT.unpack(self.objects[at].tobytes())
        end = begin + records * ENTRY_BYTES + tenant_length + FOOTER_BYTES
        parts = ObjectName(self.partition, self.tenants[at], rest[-1])
        described = COLD_OBJECT.pack(size, 0, records, tenant_length, 0, *rest)
        return Contents(self.names[at], parts, described, self.body[begin:end])


NO_ENTRIES: Final = IndexEntries(0, b"", np.empty(0, COLD_OBJECT_DTYPE))


def pack(entries: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the bytes of an index object with objects' last hours and footers."""
    return _MAGIC + b"".join(_ENTRY.pack(used_h, len(footer)) + footer for used_h, footer in entries)


def index_name(partition: int, body: bytes, *, is_news: bool = False) -> str:
    """Return the name of an index object with these bytes."""
    return f"{NEWS_FOLDER if is_news else ''}{folder_of(partition)}{_digest(body)}.ix"


def parse_index_name(name: str) -> IndexName | None:
    """Return the parts of an index object's name; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else IndexName(int(match["partition"], 16), match["digest"], bool(match["news"]))


def parse_index(name: IndexName, body: bytes) -> IndexEntries:
    """Return the entries of an index object; ColdObjectError: it is unsound, or of another version."""
    if _digest(body) != name.digest:
        raise ColdObjectError("its bytes do not have the digest in its name")
    objects = read_cold_index(body, name.partition)
    if isinstance(objects, str):
        raise ColdObjectError(objects)
    return IndexEntries(name.partition, body, objects)


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=20).hexdigest()
