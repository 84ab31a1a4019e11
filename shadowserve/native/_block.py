"""Block devices and files that bypass the page cache, and the objects that are stored on them.

:class:`BlockDevice` implements the protocol of ``shadowserve.pool.volume.device`` with a real device.
docs/guides/storage-devices.md describes how devices are accessed and which rights this requires.
"""

import enum
import errno
import itertools
import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from shadowserve.block import BlockStatistics, ObjectFields, Operation, Pages
from shadowserve.errors import BusyError, DeviceError, NativeError
from shadowserve.latency import LatencyHistogram
from shadowserve.native._library import Closing, Result, check, ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "OBJECT_HEADER_BYTES",
    "BlockAccess",
    "BlockDevice",
    "ObjectFields",
    "block_access_available",
    "block_access_built",
    "check_object",
    "check_object_name",
    "object_bytes",
    "object_header",
    "object_unit",
    "object_units",
    "seal_object",
]

OBJECT_HEADER_BYTES: Final = 2048
"""Bytes of the header in front of every value on a device."""

_COMPLETIONS_MAX: Final = 256
_KINDS: Final = ("read", "write", "flush", "discard")
_BUSY_PAUSE_S: Final = 0.02
_RESULTS: Final = {int(result): result for result in Result}


class BlockAccess(enum.IntEnum):
    """How a device is accessed (``enum ss_block_access``)."""

    AUTO = 0
    """The first of NVME, URING and THREADS that the device, the build and the kernel support."""
    URING = 1
    THREADS = 2
    NVME = 3


def block_access_built(access: BlockAccess) -> bool:
    """Return whether this build has ``access``."""
    return bool(lib.ss_block_access_built(access))


def block_access_available(access: BlockAccess) -> bool:
    """Return whether this build and the running kernel have ``access``; a device may still not support it."""
    return bool(lib.ss_block_access_available(access))


class BlockDevice(Closing):
    """A file or device that only this process uses. It checks the content of reads that have an expected object.

    Safe to use from several threads. After :meth:`close` only :meth:`completed` returns results. A missing file is
    created, and its blocks are reserved.

    Args:
        path: A file, a block device, or an NVMe namespace's character device.
        size: Bytes to use, a multiple of 4096; 0: the present size.
        queue_depth: Number of requests that the device has at a time; 0: 32.
        operations_max: Number of operations that are submitted and not yet taken back; 0: 1024.
        strict: No reads beside writes, and no operations of different priorities at the same time.
        core: Core of the device's threads; -1: any.
        busy_wait_s: Time to wait until another process releases the device. After a process was killed, the kernel
            may hold its devices until their outstanding work is done.

    Raises:
        DeviceError: ``errno`` has the cause, EBUSY if the device is mounted or in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int = 0,
        access: BlockAccess = BlockAccess.AUTO,
        queue_depth: int = 0,
        operations_max: int = 0,
        strict: bool = False,
        core: int = -1,
        busy_wait_s: float = 3.0,
    ) -> None:
        self.name = os.fspath(path)
        text = ffi.new("char[]", os.fsencode(path))
        options = ffi.new("struct ss_block_options *")
        options.options_size = ffi.sizeof("struct ss_block_options")
        options.path = text
        options.size, options.access, options.core = size, access, core
        options.queue_depth, options.operations_max = queue_depth, operations_max
        options.strict = strict
        self._block: Any = ffi.NULL
        self._block = _opened(options, self.name, access, busy_wait_s)
        self.capacity_bytes = int(lib.ss_block_size(self._block))
        self.access_name = ffi.string(lib.ss_block_access_name(self._block)).decode()
        self._completions = ffi.new("struct ss_block_completion[]", _COMPLETIONS_MAX)
        self._tags = itertools.count(1)
        self.latencies = {name: LatencyHistogram() for name in _KINDS}
        self._operations: dict[int, Operation] = {}
        self._registered: list[Any] = []
        self._left: list[Operation] = []
        self._tables: dict[int, list[Any]] = {}  # of reads into pages, by tag
        # The lock prevents calls into the C core while the block is freed. Only one thread at a time takes completions.
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._last_statistics = BlockStatistics()

    def register(self, memory: memoryview) -> bool:
        """Register memory with the kernel until the device is closed; operations on it are then cheaper.

        Return False if the kernel refuses (mostly because of the limit of locked memory, or because the access method
        does not use registration). Operations on the memory work in both cases.
        """
        buffer = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
        with self._lock:
            code = lib.ss_block_register(self._open(), buffer, len(buffer))
            if code == Result.OK:
                self._registered.append(buffer)
        if code in (Result.NO_MEMORY, Result.NO_SPACE, Result.NOT_SUPPORTED, Result.OS_ERROR):
            ffi.release(buffer)
            return False
        check(code, f"registering {len(buffer)} bytes of memory with device {self.name}")
        return True

    def unregister(self, memory: memoryview) -> None:
        """Remove a registration of :meth:`register`. No operation in flight may use the memory."""
        with self._lock, ffi.from_buffer("uint8_t[]", memory) as buffer:
            if self._block != ffi.NULL:
                lib.ss_block_unregister(self._block, buffer, len(buffer))
            kept = [each for each in self._registered if each != buffer]
            for each in self._registered:
                if each == buffer:
                    ffi.release(each)
            self._registered = kept

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue operations, all or none; never blocks.

        Raises:
            BusyError: Too many operations are submitted already.
            DeviceError: The device is closed.
            NativeError: An operation is outside the device, not aligned, or too short for the expected object.
        """
        described = ffi.new("struct ss_block_operation[]", len(operations))
        tags = list(itertools.islice(self._tags, len(operations)))
        tables: list[Any] = []
        for entry, operation, tag in zip(described, operations, tags, strict=True):
            entry.kind, entry.priority = operation.kind, operation.priority
            entry.offset, entry.length = operation.offset, operation.length
            entry.memory = ffi.cast("void *", operation.address)
            entry.tag = tag
            if operation.expected is not None:
                entry.expected = operation.expected._asdict()
                entry.expected_units, entry.is_checked = operation.expected_units, 1
            if operation.pages is not None:
                tables.append(_table(operation.pages))
                entry.pages = tables[-1]
        with self._lock:
            block = self._open()
            self._operations.update(zip(tags, operations, strict=True))
            self._tables.update((tag, tables) for tag in tags if tables)
            code = lib.ss_block_submit(block, described, len(operations))
            if code != Result.OK:
                for tag in tags:
                    del self._operations[tag]
                    self._tables.pop(tag, None)
        if code != Result.OK:
            _refused(code, self.name, operations)

    def completed(self) -> list[Operation]:
        """Return the operations that have ended, with ``error`` set; the caller calls ``done``. Never blocks."""
        with self._lock:
            if self._block != ffi.NULL:
                return self._take()
            left, self._left = self._left, []
            return left

    def _take(self) -> list[Operation]:
        ended = []
        count = _COMPLETIONS_MAX
        while count == _COMPLETIONS_MAX:
            count = lib.ss_block_completions(self._block, self._completions, _COMPLETIONS_MAX)
            for index in range(count):
                completion = self._completions[index]
                operation = self._operations.pop(completion.tag)
                if operation.pages is not None:
                    del self._tables[completion.tag]
                operation.begin_ns, operation.end_ns = completion.begin_ns, completion.end_ns
                self.latencies[_KINDS[operation.kind]].add(completion.end_ns - completion.begin_ns)
                if completion.error:
                    operation.error = self._error(completion.error, operation)
                elif operation.expected is not None or operation.pages is not None:
                    operation.verdict = _RESULTS[completion.verdict]
                ended.append(operation)
        return ended

    def fileno(self) -> int:
        """Return a descriptor that is readable while completed operations are waiting. Do not read from it."""
        with self._lock:
            return int(lib.ss_block_descriptor(self._open()))

    def statistics(self) -> BlockStatistics:
        """Return the counters since the device was opened; after closing, the last ones."""
        with self._lock:
            return self._count()

    def _count(self) -> BlockStatistics:
        if self._block == ffi.NULL:
            return self._last_statistics
        found = ffi.new("struct ss_block_statistics *")
        lib.ss_block_statistics(self._block, found)
        counters = {name: getattr(found, name) for name, _ in ffi.typeof("struct ss_block_statistics").fields}
        each: dict[str, Any] = {
            name: value if isinstance(value, int) else tuple(value) for name, value in counters.items()
        }
        return BlockStatistics(**each | {"gone": bool(found.gone)})

    def close(self, timeout_s: float = 10.0) -> None:
        """Close the device: cancel waiting operations, wait for those in flight. A second call does nothing.

        :meth:`completed` then returns the last operations, with ECANCELED for those that had not begun. If the device
        does not answer for ``timeout_s``, its operations end with ETIMEDOUT. The device may still write to their
        memory, so this memory must exist until the process ends. Registered memory is kept automatically.
        """
        with self._closing:
            if self._block == ffi.NULL:
                return
            # Without the lock: other threads continue. Their submissions fail, and they can take completions.
            stuck = lib.ss_block_stop(self._block, int(timeout_s * 1000)) != Result.OK
            with self._lock:
                self._left = self._take()
                self._last_statistics = self._count()
                block, self._block = self._block, ffi.NULL
                for operation in self._operations.values():
                    operation.error = self._error(errno.ETIMEDOUT, operation)
                    self._left.append(operation)
                self._operations.clear()
            lib.ss_block_close(block)
            if stuck:
                _kept_for_ever.extend(self._registered)
            else:
                for buffer in self._registered:
                    ffi.release(buffer)
            self._registered.clear()

    def _open(self) -> Any:
        if self._block == ffi.NULL:
            raise DeviceError(f"device {self.name} is closed; open it again", errno.EBADF)
        return self._block

    def _error(self, code: int, operation: Operation) -> OSError:
        what = f"{operation.kind.name.lower()} of {operation.length} bytes at {operation.offset}"
        return OSError(code, f"{os.strerror(code)} ({what})", self.name)


def _table(pages: Pages) -> Any:
    """Return the C core's table of the pages; keep it until the read has ended."""
    table = ffi.new("struct ss_block_pages *")
    table.size, table.stride = pages.size, pages.stride
    for name in ("layers", "extents"):
        setattr(table, name, ffi.cast("uint64_t *", getattr(pages, name).ctypes.data))
    for name in ("blocks", "checksums", "verdicts", "left", "stop"):
        setattr(table, name, ffi.cast("uint32_t *", getattr(pages, name).ctypes.data))
    table.word = ffi.cast("uint32_t *", pages.word)
    table.layer_count = len(pages.layers)
    table.extent_count, table.extent_blocks = pages.blocks.shape
    return table


_kept_for_ever: list[Any] = []
"""Memory that an unresponsive device may still write to."""

_ACCESS_NAMES: Final = {BlockAccess.URING: "io_uring", BlockAccess.NVME: "NVMe"}
_OPEN_ADVICE: Final = {
    errno.EBUSY: "it is mounted, part of a volume, or another process has it: stop that, or name another device",
    errno.EACCES: "give the server's user the right to read and write it (docs/guides/storage-devices.md)",
    errno.EPERM: "give the server's user the right to read and write it (docs/guides/storage-devices.md)",
    errno.ENOSPC: "there is no room for the configured size: make it smaller, or make room",
    errno.EROFS: "it cannot be written to",
}


def _opened(options: Any, name: str, access: BlockAccess, busy_wait_s: float) -> Any:
    pointer = ffi.new("struct ss_block **")
    until = time.monotonic() + busy_wait_s
    while (code := lib.ss_block_open(options, pointer)) != Result.OK:
        number = ffi.errno if code == Result.OS_ERROR else 0
        if number != errno.EBUSY or time.monotonic() >= until:
            raise _not_opened(code, number, name, access)
        time.sleep(_BUSY_PAUSE_S)
    return pointer[0]


def _not_opened(code: int, number: int, name: str, access: BlockAccess) -> DeviceError:
    match Result(code):
        case Result.OS_ERROR:
            cause = os.strerror(number)
            advice = _OPEN_ADVICE.get(number, "see the kernel's log")
            if number == errno.ENOENT:
                advice = _absent_advice(name)
        case Result.NOT_SUPPORTED:
            wanted = _ACCESS_NAMES.get(access, access.name.lower())
            cause = f"this build, kernel or device does not have access by {wanted}"
            advice = "take 'auto'; 'shadowserve doctor --role storage' lists the available ones"
        case Result.BAD_ARGUMENT:
            cause = "it is no file or block device of at least 4096 bytes, or an option is out of range"
            if os.path.isdir(name):
                cause = "it is a folder"
            advice = "name a block device, or a file and its size"
        case _:
            cause, advice = "no memory", "make queue_depth or operations_max smaller"
    return DeviceError(f"opening device {name} failed: {cause}; {advice}", number)


def _absent_advice(name: str) -> str:
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder):
        return f"make the folder {folder}"
    if folder.startswith("/dev"):
        return "see 'lsblk' for the existing devices"
    return "check the path; to create a file there, give its size"


def _refused(code: int, name: str, operations: Sequence[Operation]) -> None:
    """Raise the exception for a refused submission."""
    if code == Result.NO_SPACE:
        raise BusyError(f"device {name} has as many operations as it takes; try again when some have ended")
    if code == Result.CANCELLED:
        raise DeviceError(f"device {name} is closed; open it again", errno.EBADF)
    asked = ", ".join(f"{item.kind.name.lower()} {item.length} at {item.offset}" for item in operations[:4])
    check(code, f"submitting {len(operations)} operations ({asked}) to device {name}")


# ---- Objects --------------------------------------------------------------------------------------------------------


def object_bytes(length: int, name: bytes = b"") -> int:
    """Return the size of an object with a value of ``length`` bytes and the key's text ``name``; a multiple of 4096."""
    return int(lib.ss_object_bytes(length, len(name)))


@lru_cache(64)
def object_unit(length: int) -> int:
    """Return the number of bytes that share one checksum, in a value of ``length`` bytes."""
    return int(lib.ss_object_unit(length))


def object_units(length: int, start: int, end: int) -> tuple[int, int]:
    """Return the first and the number of units with bytes ``start`` to ``end`` of a value of ``length`` bytes."""
    unit = object_unit(length)
    first = start // unit
    return first, -(-min(end, length) // unit) - first if end > start else 0


def seal_object(memory: "WriteableBuffer", fields: ObjectFields, name: bytes = b"") -> None:
    """Write header, ``name`` and padding around a value that is already at OBJECT_HEADER_BYTES of ``memory``."""
    if len(name) != fields.name_length or len(fields.key) != 32:
        raise NativeError("name_length is not the name's length, or the key has not 32 bytes", Result.BAD_ARGUMENT)
    with ffi.from_buffer("uint8_t[]", memory, require_writable=True) as target:
        if len(target) < object_bytes(fields.length, name):
            raise NativeError(
                f"{len(target)} bytes of memory are too few for an object of {fields.length}", Result.BAD_ARGUMENT
            )
        ffi.memmove(target + (OBJECT_HEADER_BYTES + fields.length), name, len(name))
        code = lib.ss_object_seal(target, len(target), _described(fields))
    check(code, f"sealing an object of {fields.length} bytes")


def object_header(header: "ReadableBuffer") -> ObjectFields:
    """Return the fields of a header, of at least OBJECT_HEADER_BYTES.

    NativeError with ``Result.BAD_DATA``: the bytes are no header; with ``Result.CHECKSUM``: they were changed.
    """
    found = ffi.new("struct ss_object_fields *")
    with ffi.from_buffer("uint8_t[]", header) as source:
        _has_header(len(source))
        check(lib.ss_object_read(source, found), "reading an object's header")
    return ObjectFields(**{name: getattr(found, name) for name in ObjectFields._fields} | {"key": bytes(found.key)})


def check_object(
    header: "ReadableBuffer", expected: ObjectFields, data: "ReadableBuffer" = b"", first: int = 0, count: int = 0
) -> Result:
    """Check a header against the expected object, and ``data`` against ``count`` units of its value from ``first``.

    Return ``OK``; ``BAD_DATA``: no object; ``CHECKSUM``: not the sealed bytes; ``NOT_FOUND``: another object, because a
    read or write used a wrong address, or a write was lost.
    """
    unit = object_unit(expected.length)
    needed = max(0, min((first + count) * unit, expected.length) - first * unit)
    with ffi.from_buffer("uint8_t[]", header) as head, ffi.from_buffer("uint8_t[]", data) as source:
        _has_header(len(head))
        if len(source) < needed:
            raise NativeError(f"{count} units have {needed} bytes, {len(source)} were given", Result.BAD_ARGUMENT)
        code = lib.ss_object_check(head, _described(expected), first, count, source)
    result = Result(code)
    if result is Result.BAD_ARGUMENT:
        check(code, f"checking units {first} to {first + count} of a value of {expected.length} bytes")
    return result


def check_object_name(header: "ReadableBuffer", name: "ReadableBuffer") -> Result:
    """Return ``OK`` if ``name`` is the text that was sealed with this header, else ``CHECKSUM`` or ``BAD_DATA``."""
    with ffi.from_buffer("uint8_t[]", header) as head, ffi.from_buffer("uint8_t[]", name) as text:
        _has_header(len(head))
        found = ffi.new("struct ss_object_fields *")
        code = lib.ss_object_read(head, found)
        if code == Result.OK and found.name_length != len(text):
            return Result.CHECKSUM
        return Result(code if code != Result.OK else lib.ss_object_check_name(head, text))


def _described(fields: ObjectFields) -> Any:
    return ffi.new("struct ss_object_fields *", fields._asdict())


def _has_header(size: int) -> None:
    if size < OBJECT_HEADER_BYTES:
        raise NativeError(f"a header has {OBJECT_HEADER_BYTES} bytes, not {size}", Result.BAD_ARGUMENT)
