"""Objects in a device's image: functions that find, damage and exchange them without the server."""

import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BLOCK: Final = 4096
SECTOR: Final = 512
HEADER: Final = 2048
_MAGIC: Final = b"SSOBJECT"
_FIELDS: Final = struct.Struct("<8sIIHHIII32sQII")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of docs/reference/volume-format.md. Removed objects are included until new data overwrites
    them.

    Attributes:
        length: Bytes of the value.
        generation: Number of the put.
        name: The client's key; empty if ``key`` contains it.
    """

    file: Path
    offset: int
    length: int
    key: bytes
    generation: int
    name: bytes

    @property
    def size(self) -> int:
        """Bytes of header, value and name."""
        return HEADER + self.length + len(self.name)


def objects(files: list[Path]) -> Iterator[StoredObject]:
    """Yield the objects in images of devices, in order."""
    for file in files:
        data = file.read_bytes()
        offset = data.find(_MAGIC)
        while offset >= 0:
            if offset % BLOCK == 0 and offset + HEADER <= len(data):
                fields = _FIELDS.unpack_from(data, offset)
                length, key, generation, name_length = fields[6], fields[8], fields[9], fields[10]
                begin = offset + HEADER + length
                yield StoredObject(file, offset, length, key, generation, data[begin : begin + name_length])
            offset = data.find(_MAGIC, offset + 1)


def write(file: Path, offset: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def flip(file: Path, offset: int, bit: int) -> None:
    """Invert one bit."""
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1 << bit]))


def rot(chosen: StoredObject, chance: random.Random) -> None:
    """Invert one bit of an object: in its header, its value or its name."""
    flip(chosen.file, chosen.offset + chance.randrange(chosen.size), chance.randrange(8))


def rot_some(found: Iterable[StoredObject], count: int, chance: random.Random) -> None:
    """Invert one bit of each of ``count`` objects."""
    for chosen in chance.sample(list(found), count):
        rot(chosen, chance)


def tear(chosen: StoredObject, chance: random.Random) -> None:
    """Keep only some sectors of an object, as after an interrupted write."""
    sectors = -(-chosen.size // SECTOR)
    for number in sorted(chance.sample(range(sectors), chance.randint(1, sectors))):
        begin = number * SECTOR
        size = min(SECTOR, chosen.size - begin)
        write(chosen.file, chosen.offset + begin, chance.choice([bytes(size), chance.randbytes(size)]))


def exchange(one: StoredObject, other: StoredObject) -> None:
    """Exchange two objects as far as both have space. This simulates misdirected reads."""
    size = min(one.size, other.size)
    with open(one.file, "rb") as first, open(other.file, "rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        data, replacement = first.read(size), second.read(size)
    write(one.file, one.offset, replacement)
    write(other.file, other.offset, data)
