"""Faults: false results of a process's disk operations and its clock (faults.c, preloaded); damaged images of devices;
a network between a client and a server.
"""

import contextlib
import mmap
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("faults.c")
_FIELDS: Final = {
    "clock_offset_ns": (0, "<q"),
    "read_error": (8, "<i"),
    "write_error": (12, "<i"),
    "flush_error": (16, "<i"),
    "one_in": (20, "<I"),
    "met": (24, "<Q"),
    "hold": (32, "<I"),
    "held": (36, "<I"),
}


class Faults:
    """Faults of one process and its successors with the same environment. They can change while the process runs."""

    def __init__(self, folder: Path, path: Path) -> None:
        """Create faults of operations on files whose path begins like ``path``. Initially there are no faults."""
        library = folder / "faults.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler, "the failure matrix needs a C compiler"
        subprocess.run([compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
        control = folder / "faults"
        control.write_bytes(bytes(4096))
        with open(control, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTS_CONTROL": str(control),
            "FAULTS_PATH": str(path.resolve()),
        }

    def set(self, **values: int) -> None:
        """Set fields: errors as errno (0: none); ``clock_offset_ns``; ``one_in``: one of this number of operations
        fails; ``hold``: reads wait."""
        for name, value in values.items():
            offset, form = _FIELDS[name]
            struct.pack_into(form, self._map, offset, value)

    def clear(self) -> None:
        self.set(read_error=0, write_error=0, flush_error=0, one_in=0, clock_offset_ns=0, hold=0)

    @property
    def met(self) -> int:
        return self._get("met")

    @property
    def held(self) -> int:
        return self._get("held")

    def _get(self, name: str) -> int:
        offset, form = _FIELDS[name]
        return int(struct.unpack_from(form, self._map, offset)[0])

    def close(self) -> None:
        self._map.close()


def is_root() -> bool:
    return os.geteuid() == 0


# ---- Objects in a device's image, without the server

BLOCK: Final = 4096
SECTOR: Final = 512
HEADER: Final = 2048
_MAGIC: Final = b"SSOBJECT"
_HEADER_FIELDS: Final = struct.Struct("<8sIIHHIII32sQII")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of docs/reference/volume-format.md, also a removed one until new data overwrites it."""

    file: Path
    offset: int
    length: int  # bytes of the value
    key: bytes
    generation: int  # number of the put
    name: bytes  # the client's key; empty if ``key`` contains it

    @property
    def size(self) -> int:
        return HEADER + self.length + len(self.name)


def objects(files: list[Path]) -> Iterator[StoredObject]:
    """Yield the objects in images of devices, in order."""
    for file in files:
        data = file.read_bytes()
        offset = data.find(_MAGIC)
        while offset >= 0:
            if offset % BLOCK == 0 and offset + HEADER <= len(data):
                fields = _HEADER_FIELDS.unpack_from(data, offset)
                length, key, generation, name_length = fields[6], fields[8], fields[9], fields[10]
                begin = offset + HEADER + length
                yield StoredObject(file, offset, length, key, generation, data[begin : begin + name_length])
            offset = data.find(_MAGIC, offset + 1)


def write(file: Path, offset: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def flip(file: Path, offset: int, bit: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1 << bit]))


def rot(chosen: StoredObject, chance: random.Random) -> None:
    """Invert one bit of an object: in its header, its value or its name."""
    flip(chosen.file, chosen.offset + chance.randrange(chosen.size), chance.randrange(8))


def rot_some(found: Iterable[StoredObject], count: int, chance: random.Random) -> None:
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


# ---- Networks

_PIECE: Final = 64 << 10


class Proxy:
    """Forwards TCP connections to a port of loopback. Its faults can change at any time."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.silent = False  # it forwards no bytes and does not close: a half-open connection
        self.flip_one_in = 0  # average number of pieces for one inverted bit; 0 for no faults
        self.flips = "both"  # direction of the faults: "up" (to the server), "down", or "both"
        self.flipped = 0  # number of inverted bits
        self.bytes_per_s = 0  # rate limit of each direction of each connection; 0 for no limit
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                client.close()
                continue
            self._sockets |= {client, server}
            thread = threading.Thread(target=self._forward, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward bytes in both directions until one side ends or this proxy ends."""
        other = {client: server, server: client}
        try:
            while not self._stopped.is_set():
                readable = select.select([client, server], [], [], 0.1)[0]
                if self.silent:
                    self._stopped.wait(0.05)
                    continue
                for sock in readable:
                    data = sock.recv(_PIECE if not self.bytes_per_s else max(1, self.bytes_per_s // 20))
                    if not data:
                        return
                    self._send(other[sock], self._harmed(data, "up" if sock is client else "down"))
        except OSError:
            pass
        finally:
            for sock in (client, server):
                sock.close()
                self._sockets.discard(sock)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.settimeout(1.0)
        view = memoryview(data)
        while view and not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                view = view[sock.send(view) :]
        if self.bytes_per_s:
            time.sleep(len(data) / self.bytes_per_s)

    def _harmed(self, data: bytes, direction: str) -> bytes:
        if not self.flip_one_in or self.flips not in (direction, "both"):
            return data
        if self._chance.randrange(self.flip_one_in):
            return data
        harmed = bytearray(data)
        harmed[self._chance.randrange(len(harmed))] ^= 1 << self._chance.randrange(8)
        self.flipped += 1
        return bytes(harmed)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Forward nothing until the context ends."""
        self.silent = True
        yield
        self.silent = False

    def cut(self) -> None:
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopped.set()
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(10)
