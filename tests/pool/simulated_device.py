"""A block device in memory, with faults that a seed or the test selects.

Operations end when the test ends them, in any order. A crash keeps for every block of 4 KiB one of these: the content
before the last flush, any later write, or sectors of 512 bytes of several writes. An honest device may do the same.
Faults are worse: errors, damaged bits, misdirected or lost bytes, a device that is gone or never answers.
"""

import contextlib
import ctypes
import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation, OperationKind
from shadowserve.latency import LatencyHistogram
from shadowserve.native import OBJECT_HEADER_BYTES, Result, check_object

BLOCK_BYTES: Final = 4096
SECTOR_BYTES: Final = 512
_ZEROS: Final = bytes(BLOCK_BYTES)


@dataclass(slots=True)
class Fault:
    """A fault of operations of one kind."""

    kind: OperationKind
    error: int = errno.EIO  # errno of the operation; 0 for success, whatever the real result
    after: int = 0  # matching operations that succeed first
    times: int | None = 1  # matching operations that fail; None for all
    first_block: int = 0  # first block of the affected range
    last_block: int | None = None  # end of the range, exclusive; None for the device's end
    lost: bool = False  # the bytes are not written, or not read
    moved_blocks: int = 0  # the bytes are written, or read, this many blocks further on
    stuck: bool = False  # the operation never ends
    met: int = 0  # operations that have failed so far

    def meets(self, operation: Operation) -> bool:
        """Return True if an operation fails, and count it."""
        if operation.kind is not self.kind or (self.times is not None and self.met >= self.times):
            return False
        if operation.kind is not OperationKind.FLUSH:
            first, last = operation.offset // BLOCK_BYTES, (operation.offset + operation.length) // BLOCK_BYTES
            if last <= self.first_block or (self.last_block is not None and first >= self.last_block):
                return False
        if self.after:
            self.after -= 1
            return False
        self.met += 1
        return True


@dataclass(slots=True)
class _Version:
    """One write of a block since the last flush; ``completed`` is its place in the order of completions, or None."""

    content: bytes
    completed: int | None


class SimulatedDevice:
    """Implements ``shadowserve.pool.volume.device.BlockDevice``. It checks every second read that has an expectation.

    Attributes:
        automatic: completed() first ends all operations in a random order: for opening and formatting.
        trace: (kind, first block, blocks) of each operation in the order of completion.
        before: Called before an operation ends; its exception leaves completed().
        forgets: A power cut loses all writes since the last flush.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        seed: int = 0,
        name: str = "simulated",
        automatic: bool = True,
        operations_max: int = 1024,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        self.name = name
        self.latencies: dict[str, LatencyHistogram] = {}
        self.capacity_bytes = capacity_bytes
        self.automatic = automatic
        self.faults: list[Fault] = []  # active faults; append to it
        self.trace: list[tuple[OperationKind, int, int]] = []
        self.submitted: Callable[[int], None] = lambda count: None  # called with the number of queued operations
        self.before: Callable[[], None] | None = None
        self.forgets = False
        self.successes: Counter[OperationKind] = Counter()  # operations that have succeeded
        self.bytes: Counter[OperationKind] = Counter()  # bytes of these
        self.errors: Counter[OperationKind] = Counter()  # operations that have failed
        self.random = random.Random(seed)
        self._operations_max = operations_max
        self._clock_ns = clock_ns or (lambda: self._completions)
        self._durable: dict[int, bytes] = {}
        self._dirty: dict[int, list[_Version]] = {}
        self._waiting: list[tuple[Operation, int, bytes]] = []  # with completions at submission, bytes to be written
        self._stuck: list[tuple[Operation, int, bytes]] = []
        self._ended: list[Operation] = []
        self._completions = 0
        self._gone = False
        self._descriptor = os.eventfd(1, os.EFD_NONBLOCK)

    # ---- Interface of a volume

    def register(self, memory: memoryview) -> None:
        """No-op."""

    def submit(self, operations: Sequence[Operation]) -> None:
        if len(self._waiting) + len(self._ended) + len(operations) > self._operations_max:
            raise AssertionError(f"more than {self._operations_max} operations at a time")
        for operation in operations:
            assert operation.offset % BLOCK_BYTES == operation.length % BLOCK_BYTES == 0, "not aligned"
            assert operation.address % SECTOR_BYTES == 0, "memory is not aligned"
            assert operation.offset + operation.length <= self.capacity_bytes, "beyond the device's end"
            assert (operation.kind is OperationKind.FLUSH) == (operation.length == 0)
            content = b""
            if operation.kind is OperationKind.WRITE:
                content = ctypes.string_at(operation.address, operation.length)
            self._waiting.append((operation, self._completions, content))
        self.submitted(len(operations))

    def completed(self) -> list[Operation]:
        while self.automatic and self._waiting:
            self.complete()
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        """Return a descriptor that is always readable."""
        return self._descriptor

    def close(self) -> None:
        """Drop operations in progress."""
        self._waiting.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()

    # ---- Interface of a test

    @property
    def waiting(self) -> list[Operation]:
        """Operations in progress, in the order of submission."""
        return [operation for operation, _, _ in self._waiting]

    def complete(self, chosen: Callable[[Operation], bool] | None = None) -> Operation | None:
        """End a random operation among those that ``chosen`` accepts; return it, None if there is none."""
        if self.before is not None:
            self.before()
        candidates = [at for at, (operation, _, _) in enumerate(self._waiting) if chosen is None or chosen(operation)]
        if not candidates:
            return None
        operation, submitted, content = entry = self._waiting.pop(self.random.choice(candidates))
        fault = next((fault for fault in self.faults if fault.meets(operation)), None)
        if fault is not None and fault.stuck:
            self._stuck.append(entry)
            return operation
        operation.begin_ns = self._clock_ns()
        error = errno.ENODEV if self._gone else self._perform(operation, submitted, content, fault)
        self._completions += 1
        operation.end_ns = self._clock_ns()
        operation.error = OSError(error, os.strerror(error)) if error else None
        if operation.expected is not None and not error and self._completions % 2:
            operation.verdict = _checked(operation)
        (self.errors if error else self.successes)[operation.kind] += 1
        self.bytes[operation.kind] += 0 if error else operation.length
        self.trace.append((operation.kind, operation.offset // BLOCK_BYTES, operation.length // BLOCK_BYTES))
        self._ended.append(operation)
        return operation

    def crash(self, *, torn: bool = True, seed: int | None = None) -> "SimulatedDevice":
        """Return the device after a power cut; this one cannot be used any longer.

        Of each block written since the last flush any version survives; with ``torn``, sectors of several.
        """
        chance = self.random if seed is None else random.Random(seed)
        after = self._successor(self._durable, chance.randrange(1 << 32))
        for operation, _, content in [*self._waiting, *self._stuck]:
            if operation.kind is OperationKind.WRITE:
                self._write(operation.offset // BLOCK_BYTES, content, None)
        mood = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))  # share of surviving writes, also nearly all or none
        for block, versions in [] if self.forgets else sorted(self._dirty.items()):
            old = self._durable.get(block, _ZEROS)
            contents = [version.content for version in versions]
            survivor = chance.choice(contents) if chance.random() < mood else old
            if torn and chance.random() < 0.1:
                other = chance.choice([old, *contents])
                survivor = b"".join(
                    (survivor if chance.random() < 0.5 else other)[at : at + SECTOR_BYTES]
                    for at in range(0, BLOCK_BYTES, SECTOR_BYTES)
                )
            after._durable[block] = survivor
        self._waiting.clear()
        self._gone = True
        return after

    def restart(self) -> "SimulatedDevice":
        """Return the device after a SIGKILL without a power cut: all completed writes are present."""
        current = {block: self._current(block) for block in self._dirty}
        after = self._successor(self._durable | current, self.random.randrange(1 << 32))
        self._waiting.clear()
        self._gone = True
        return after

    def fail(self, kind: OperationKind, **how: int | bool | None) -> Fault:
        """Add a fault: ``fail(OperationKind.WRITE, after=2)`` for an EIO of the third write."""
        fault = Fault(kind, **how)
        self.faults.append(fault)
        return fault

    def remove(self) -> None:
        """Make all operations fail with ENODEV from now on."""
        self._gone = True

    def rot(self, offset: int, *, bit: int = 0) -> None:
        """Flip one bit of the durable content and of every later version."""
        block, at = divmod(offset, BLOCK_BYTES)
        self._durable[block] = _flipped(self._durable.get(block, _ZEROS), at, bit)
        for version in self._dirty.get(block, ()):
            version.content = _flipped(version.content, at, bit)

    def peek(self, offset: int, length: int) -> bytes:
        """Return the bytes that a read would return, aligned or not."""
        first, last = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        content = b"".join(self._current(block) for block in range(first, last))
        return content[offset - first * BLOCK_BYTES :][:length]

    def poke(self, offset: int, content: bytes) -> None:
        """Change durable bytes, aligned or not, as another program might."""
        for at, byte in enumerate(content):
            block, place = divmod(offset + at, BLOCK_BYTES)
            old = self._durable.get(block, _ZEROS)
            if old[place] != byte:
                self._durable[block] = old[:place] + bytes([byte]) + old[place + 1 :]

    def set_block(self, number: int, content: bytes) -> None:
        """Set the durable content of a block."""
        assert len(content) == BLOCK_BYTES
        self._durable[number] = content

    def copy(self) -> "SimulatedDevice":
        """Return a device with the content that reads return now."""
        return self._successor(dict(self.blocks()), 0)

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and content of each block that is not all zeros."""
        for block in sorted({*self._durable, *self._dirty}):
            if (content := self._current(block)) != _ZEROS:
                yield block, content

    # ---- Internal methods

    def _successor(self, durable: dict[int, bytes], seed: int) -> "SimulatedDevice":
        after = SimulatedDevice(self.capacity_bytes, seed=seed, name=self.name, operations_max=self._operations_max)
        after._durable = dict(durable)
        return after

    def _perform(self, operation: Operation, submitted: int, content: bytes, fault: Fault | None) -> int:
        error = fault.error if fault is not None else 0
        block = operation.offset // BLOCK_BYTES + (fault.moved_blocks if fault is not None else 0)
        lost = fault is not None and fault.lost
        if operation.kind is OperationKind.WRITE:
            now = ctypes.string_at(operation.address, operation.length)
            assert now == content, "memory changed while it was being written"
            if error and content:  # a failed write may be partly complete
                count = self.random.randrange(len(content) // BLOCK_BYTES + 1)
                self._write(block, content[: count * BLOCK_BYTES], self._completions)
            elif not lost:
                self._write(block, content, self._completions)
        elif operation.kind is OperationKind.READ and not error and not lost:
            count = operation.length // BLOCK_BYTES
            ctypes.memset(operation.address, 0, operation.length)
            durable, dirty = self._durable, self._dirty
            for each in range(block, block + count):
                if each in durable or each in dirty:  # most blocks of a device were never written
                    ctypes.memmove(operation.address + (each - block) * BLOCK_BYTES, self._current(each), BLOCK_BYTES)
        elif operation.kind is OperationKind.FLUSH and not error and not lost:
            self._flush(submitted)
        return error

    def _write(self, block: int, content: bytes, completed: int | None) -> None:
        for at in range(0, len(content), BLOCK_BYTES):
            version = _Version(content[at : at + BLOCK_BYTES], completed)
            self._dirty.setdefault(block + at // BLOCK_BYTES, []).append(version)

    def _flush(self, submitted: int) -> None:
        """Make all operations durable that were complete when the flush was submitted."""
        for block, versions in list(self._dirty.items()):
            covered = [
                version for version in versions if version.completed is not None and version.completed < submitted
            ]
            if covered:
                self._durable[block] = covered[-1].content
                rest = versions[len(covered) :]
                if rest:
                    self._dirty[block] = rest
                else:
                    del self._dirty[block]

    def _current(self, block: int) -> bytes:
        versions = self._dirty.get(block)
        return versions[-1].content if versions else self._durable.get(block, _ZEROS)


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def _checked(operation: Operation) -> Result:
    content = memoryview((ctypes.c_uint8 * operation.length).from_address(operation.address)).cast("B")
    header, data = content[:OBJECT_HEADER_BYTES], content[OBJECT_HEADER_BYTES:]
    return check_object(header, operation.expected, data, 0, operation.expected_units)
