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
from collections.abc import Iterable
from typing import Final, NamedTuple

from shadowserve.pool.cold.layout import ColdObjectError, Contents, folder_of, read_footers

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


class IndexEntry(NamedTuple):
    """Entry of an object."""

    contents: Contents
    used_h: int
    footer: bytes


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


def parse_index(name: IndexName, body: bytes) -> list[IndexEntry]:
    """Return the entries of an index object; ColdObjectError: it is unsound, or of another version."""
    if _digest(body) != name.digest:
        raise ColdObjectError("its bytes do not have the digest in its name")
    if not body.startswith(_MAGIC):
        raise ColdObjectError("it is of another version")
    used_h, footers, at = [], [], len(_MAGIC)
    while at < len(body):
        if at + _ENTRY.size > len(body):
            raise ColdObjectError("it ends within an entry")
        hour, size = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size + size
        used_h.append(hour)
        footers.append(body[at - size : at])
    if at > len(body):
        raise ColdObjectError("it ends within a footer")
    found = read_footers(footers)
    if any(contents.parts.partition != name.partition for contents in found):
        raise ColdObjectError("it has an entry of another partition")
    return [*map(IndexEntry, found, used_h, footers)]


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=20).hexdigest()
