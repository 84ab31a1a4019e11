"""Objects as files: how the engine ``filesystem`` lays them out, writes and reads them, and finds them again.

    ROOT/lock                           held by the server that uses the folder
    ROOT/tenants.json                   ids by names
    ROOT/cleared.json                   up to which generation each tenant's objects were removed
    ROOT/objects/ab/NAME.GENERATION     one object; NAME is the SHA-256 of tenant and key, "ab" its first two digits
    ROOT/objects/ab/NAME.GENERATION.changed     its expiry and pin, where they have changed since it was written

A file is an object as on a device: header, value, name, padding (docs/storage-format.md); its name is the expiry, the
pin and the parent, as :data:`_ATTRIBUTES` packs them, and the client's key. Files appear whole, by renaming what has
been synchronized, and are never written to again: a new value is a new generation in a new file. So a crash leaves at
most a file with a temporary name, or an older generation beside a newer one; both go at the next start.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shadowserve.errors import ConfigurationError, NativeError, is_passing
from shadowserve.native import (
    OBJECT_HEADER_BYTES,
    ObjectFields,
    Result,
    check_object,
    check_object_name,
    object_bytes,
    object_header,
    object_unit,
    object_units,
    seal_object,
)
from storage_kv.engines import buffers

__all__ = ["Attributes", "FoundObject", "ObjectFiles", "ObjectName"]

_ATTRIBUTES: Final = struct.Struct("<QQ32s")  # expiry, end of pin (Unix ms, 0: none), parent (zeros: none)
_CHANGED: Final = ".changed"
_TEMPORARY: Final = ".new"
_PAUSES_S: Final = (0.0, 0.01, 0.1, 1.0)
"""Before a file that could not be read at the start is read again; but for the first, only if the error passes."""
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is kept of an object beside its value.

    Attributes:
        expires_at_ms: Unix time in milliseconds, 0 for none.
        pinned_until_ms: likewise.
        parent: the name of the chunk before it, or empty.
    """

    expires_at_ms: int = 0
    pinned_until_ms: int = 0
    parent: bytes = b""

    def pack(self) -> bytes:
        """Return them as bytes."""
        return _ATTRIBUTES.pack(self.expires_at_ms, self.pinned_until_ms, self.parent)

    @classmethod
    def unpack(cls, data: bytes) -> "Attributes":
        """Return what pack() has made."""
        expires_at_ms, pinned_until_ms, parent = _ATTRIBUTES.unpack_from(data)
        return cls(expires_at_ms, pinned_until_ms, parent if any(parent) else b"")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Which object: what its file's name and its header say.

    Attributes:
        tenant: whose it is.
        key: the client's.
        generation: of the write.
        length: bytes of the value.
        head_bytes: bytes of the record's head, or 0.
    """

    tenant: int
    key: bytes
    generation: int
    length: int
    head_bytes: int

    @property
    def digest(self) -> bytes:
        """What names it in the header and in the file's name."""
        return hashlib.sha256(self.tenant.to_bytes(2, "big") + self.key).digest()

    @property
    def stored_bytes(self) -> int:
        """The size of its file."""
        return int(object_bytes(self.length, bytes(_ATTRIBUTES.size) + self.key))

    def fields(self) -> ObjectFields:
        """Return what its header has to say."""
        return ObjectFields(
            key=self.digest,
            tenant=self.tenant,
            length=self.length,
            generation=self.generation,
            head_length=self.head_bytes,
            name_length=_ATTRIBUTES.size + len(self.key),
        )


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object that was there at the start."""

    name: ObjectName
    attributes: Attributes


class ObjectFiles:
    """The files in one folder. Every method but the constructor may wait for a device; any thread may call them."""

    def __init__(self, root: Path) -> None:
        """Take a folder, which is made if it is not there, for this process alone.

        Raises:
            ConfigurationError: it cannot be had.
        """
        self._root = root
        self._objects = root / "objects"
        try:
            self._objects.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"cannot keep values in {root}: {error.strerror}; choose a folder that this user may write to"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigurationError(
                f"cannot keep values in {root}: another server uses it; stop that, or choose another filesystem_path"
            ) from error

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def tenants(self) -> dict[str, int]:
        """Return the tenants' ids by their names.

        Raises:
            ConfigurationError: the file of them cannot be read.
        """
        return self._numbers("tenants.json", "nobody knows whose values these are")

    def _numbers(self, file_name: str, without: str) -> dict[str, int]:
        path = self._root / file_name
        try:
            return {str(name): int(number) for name, number in json.loads(path.read_text("utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"cannot read {path}: {error}; without it {without}: restore it, or remove "
                f"{self._root} with everything in it"
            ) from error

    def keep_tenants(self, names: dict[str, int]) -> None:
        """Write the tenants' ids down.

        Raises:
            OSError: they could not be written.
        """
        self._write(self._root, "tenants.json", memoryview(json.dumps(names, indent=1).encode()))
        self.synchronize(self._root)

    def cleared(self) -> dict[int, int]:
        """Return the generations up to which objects are gone, by tenants' ids; -1 for all tenants.

        Raises:
            ConfigurationError: the file of them cannot be read.
        """
        found = self._numbers("cleared.json", "values that were removed may come back")
        try:
            return {int(tenant): generation for tenant, generation in found.items()}
        except ValueError as error:
            raise ConfigurationError(
                f"cannot read {self._root / 'cleared.json'}: {error}; restore it, or remove {self._root} with "
                "everything in it"
            ) from error

    def keep_cleared(self, generations: dict[int, int]) -> None:
        """Write down up to which generations objects are gone.

        Raises:
            OSError: they could not be written.
        """
        self._write(self._root, "cleared.json", memoryview(json.dumps(generations).encode()))
        self.synchronize(self._root)

    def write(self, name: ObjectName, attributes: Attributes, memory: memoryview) -> None:
        """Write an object durably; ``memory`` has its value from OBJECT_HEADER_BYTES on, and as much as its file needs.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        seal_object(memory, name.fields(), attributes.pack() + name.key)
        path = self._path(name)
        self._write(path.parent, path.name, memory[: name.stored_bytes])
        self.synchronize(path.parent)

    def change(self, name: ObjectName, attributes: Attributes) -> Path:
        """Write changed attributes of an object; return the folder, which is to be synchronized then.

        Raises:
            OSError: they could not be written.
        """
        path = self._path(name)
        packed = attributes.pack()
        fields = ObjectFields(name.digest, name.tenant, 0, name.generation, name_length=len(packed))
        memory = bytearray(object_bytes(0, packed))
        seal_object(memory, fields, packed)
        self._write(path.parent, path.name + _CHANGED, memoryview(memory))
        return path.parent

    def remove(self, name: ObjectName) -> Path:
        """Remove an object; return the folder, which is to be synchronized then.

        Raises:
            OSError: it could not be removed.
        """
        path = self._path(name)
        for victim in (path, path.with_name(path.name + _CHANGED)):
            victim.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)  # of what was never written
        return path.parent

    def read(self, name: ObjectName, start: int, end: int) -> memoryview | None:
        """Return the bytes ``[start, end)`` of an object's value; None if they are not what was written.

        Raises:
            OSError: they could not be read.
        """
        first, count = object_units(name.length, start, end)
        unit = object_unit(name.length)
        begin, stop = first * unit, min((first + count) * unit, name.length)
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = bytearray(OBJECT_HEADER_BYTES)
            data = buffers.allocate(stop - begin)
            if begin == 0:  # header and value lie together
                whole = os.preadv(descriptor, [header, data], 0) - OBJECT_HEADER_BYTES
            else:
                os.preadv(descriptor, [header], 0)
                whole = os.preadv(descriptor, [data], OBJECT_HEADER_BYTES + begin)
            while 0 < whole < len(data):  # the kernel reads 2 GiB at most, and less when it is interrupted
                more = os.preadv(descriptor, [data[whole:]], OBJECT_HEADER_BYTES + begin + whole)
                whole = whole + more if more else -1
        finally:
            os.close(descriptor)
        if whole < len(data) or check_object(header, name.fields(), data, first, count) is not Result.OK:
            return None
        return data[start - begin : end - begin]

    def find(self) -> Iterator[FoundObject]:
        """Return every object that is sound as far as header and name tell; what was read and is not is removed.

        Raises:
            OSError: a folder or a file cannot be read, so that nobody knows.
        """
        for folder in sorted(self._objects.iterdir()):
            present = set(os.listdir(folder))
            for file_name in present:
                path = folder / file_name
                if file_name.endswith(_CHANGED):
                    if file_name.removesuffix(_CHANGED) not in present:
                        path.unlink(missing_ok=True)
                    continue
                found = None if file_name.endswith(_TEMPORARY) else self._inspect(path, file_name + _CHANGED in present)
                if found is None:
                    for victim in (path, path.with_name(file_name + _CHANGED)):
                        victim.unlink(missing_ok=True)
                else:
                    yield found

    def synchronize(self, folder: Path) -> None:
        """Make what was renamed and removed in a folder durable.

        Raises:
            OSError: it could not be.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, name: ObjectName) -> Path:
        digest = name.digest.hex()
        return self._objects / digest[:2] / f"{digest}.{name.generation:016x}"

    def _write(self, folder: Path, file_name: str, data: memoryview) -> None:
        """Write a file under a temporary name, synchronize and rename it."""
        temporary = folder / (file_name + _TEMPORARY)
        try:
            try:
                descriptor = os.open(temporary, _CREATE, 0o600)
            except FileNotFoundError:  # the first of its folder
                folder.mkdir(exist_ok=True)
                self.synchronize(folder.parent)
                descriptor = os.open(temporary, _CREATE, 0o600)
            try:
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(folder / file_name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _inspect(self, path: Path, changed: bool) -> FoundObject | None:
        """Return the object in a file; None if it is none that can be used.

        Raises:
            OSError: it cannot be read.
        """
        try:
            fields, text, size = _read_edges(path)
            name = ObjectName(
                fields.tenant, text[_ATTRIBUTES.size :], fields.generation, fields.length, fields.head_length
            )
            if name.fields() != fields or name.stored_bytes != size or self._path(name) != path:
                return None
            attributes = Attributes.unpack(text)
            if changed:
                other, packed, _ = _read_edges(path.with_name(path.name + _CHANGED))
                if (other.key, other.generation) == (fields.key, fields.generation):
                    attributes = Attributes.unpack(packed)
        except (FileNotFoundError, NativeError, ValueError, struct.error):
            return None
        return FoundObject(name, attributes)


def _read_edges(path: Path) -> tuple[ObjectFields, bytes, int]:
    """Return what an object's file says before and behind the value, checked, and its size; raise if it is wrong.

    What cannot be read is tried again: once, and for longer where the system was short of something.
    """
    for pause_s in _PAUSES_S:
        try:
            return _read_edges_once(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or (pause_s and not is_passing(error)):
                raise
            time.sleep(pause_s)
    return _read_edges_once(path)


def _read_edges_once(path: Path) -> tuple[ObjectFields, bytes, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, OBJECT_HEADER_BYTES, 0)
        if len(header) < OBJECT_HEADER_BYTES:
            raise ValueError("too short for a header")
        fields = object_header(header)
        text = os.pread(descriptor, fields.name_length, OBJECT_HEADER_BYTES + fields.length)
    finally:
        os.close(descriptor)
    if check_object_name(header, text) is not Result.OK:
        raise ValueError("the name is not what was written")
    return fields, text, size
