"""Reads blocks of a device that no pool uses yet: for opening, checking and repairing a volume."""

import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import is_passing
from shadowserve.pool.volume.device import BlockDevice, Pages, wait_for_operations
from shadowserve.pool.volume.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS, FormatError, Superblock

ANSWER_S: Final = 60.0
_PAUSE_FIRST_S: Final = 0.01
_PAUSES_S: Final = 10.0
"""Longest sum of all pauses of one reader. Each pause is twice as long as the one before."""
_PIECE_BLOCKS: Final = 256
_DEPTH: Final = 4

Bytes = npt.NDArray[np.uint8]


class BlockReader:
    """Reads blocks of a device that no pool uses, several requests at a time.

    A failed block is read once more; while the device is only busy, again and again, and then it is an error. Blocks
    that cannot be read for another reason are returned as zeros, and are in ``unreadable``.
    """

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self._buffers = [Pages(_PIECE_BLOCKS * BLOCK_BYTES) for _ in range(_DEPTH)]
        self._single = Pages(BLOCK_BYTES)
        self._ended: set[int] = set()
        self.unreadable: set[int] = set()
        self._error: OSError | None = None
        self._pause_s, self._paused_s = _PAUSE_FIRST_S, 0.0

    def run(self, operation: Operation) -> None:
        """Run one operation and wait for it. OSError: it has failed; DeviceError: the device does not answer."""
        while True:
            operation.error = None
            self._submit(operation)
            self._wait(operation)
            if operation.error is None:
                return
            self._pause(operation)

    def write(self, first: int, blocks: int, address: int) -> None:
        offset, length = first * BLOCK_BYTES, blocks * BLOCK_BYTES
        self.run(Operation(OperationKind.WRITE, offset, length, address, Priority.WRITE, self._done))

    def flush(self) -> None:
        self.run(Operation(OperationKind.FLUSH, 0, 0, 0, Priority.WRITE, self._done))

    def block(self, number: int) -> bytes:
        """Return one block; zeros if it cannot be read. Allowed during pieces(), which uses other buffers."""
        operation = self._read(number, 1, self._single.address)
        self._wait(operation)
        if operation.error is not None and not self._read_again(number, self._single.address):
            return bytes(BLOCK_BYTES)
        return bytes(self._single.view[:BLOCK_BYTES])

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, Bytes]]:
        """Yield (number of the first block, bytes) in order, zeros for unreadable blocks. Valid until the next one."""
        return self.runs([(first, count)])

    def array(self, first: int, count: int) -> Bytes:
        """Return consecutive blocks, zeros for unreadable ones."""
        return np.concatenate([data.copy() for _, data in self.pieces(first, count)])

    def runs(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Bytes]]:
        parts = [
            (start, min(_PIECE_BLOCKS, first + count - start))
            for first, count in runs
            for start in range(first, first + count, _PIECE_BLOCKS)
        ]
        waiting: list[Operation] = []
        try:
            for turn in range(len(parts) + _DEPTH - 1):
                if turn < len(parts):
                    waiting.append(self._read(*parts[turn], self._buffers[turn % _DEPTH].address))
                if turn >= _DEPTH - 1 and waiting:
                    yield self._take(waiting.pop(0), turn - _DEPTH + 1)
        except GeneratorExit:
            # The caller has stopped early. Wait for the reads in progress: later reads reuse their buffers, and the
            # ids of their operations.
            for operation in waiting:
                self._wait(operation)
            raise

    def _take(self, operation: Operation, turn: int) -> tuple[int, Bytes]:
        self._wait(operation)
        first, blocks = operation.offset // BLOCK_BYTES, operation.length // BLOCK_BYTES
        if operation.error is not None:
            for block in range(blocks):
                if not self._read_again(first + block, operation.address + block * BLOCK_BYTES):
                    self._buffers[turn % _DEPTH].view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes(
                        BLOCK_BYTES
                    )
        return first, self._buffers[turn % _DEPTH].array[: operation.length]

    def _read_again(self, number: int, address: int) -> bool:
        """Read a block again after a failure; return whether that has succeeded."""
        while True:
            single = self._read(number, 1, address)
            self._wait(single)
            if single.error is None:
                return True
            if not is_passing(single.error):
                self.unreadable.add(number)
                self._error = self._error or single.error
                return False
            self._pause(single)

    def _pause(self, operation: Operation) -> None:
        """Wait before a failed operation is tried again; raise its error if that would not help."""
        error = operation.error
        assert error is not None
        flushing = operation.kind is OperationKind.FLUSH
        if not is_passing(error, flushing=flushing) or self._paused_s + self._pause_s > _PAUSES_S:
            raise error
        time.sleep(self._pause_s)
        self._paused_s += self._pause_s
        self._pause_s = min(2 * self._pause_s, 1.0)

    def unreadable_error(self) -> OSError:
        assert self._error is not None
        return self._error

    def must_have_read(self, blocks: Iterable[int]) -> None:
        """Check that blocks without sound content were really read, and not only taken for zeros.

        Raises:
            OSError: One was not read; the message says what to do.
        """
        missing = self.unreadable.intersection(blocks)
        if missing:
            error = self.unreadable_error()
            raise OSError(
                error.errno,
                f"block {min(missing)} of device {self._device.name} cannot be read ({error.strerror}), and there is "
                "no sound copy of it; nothing was dropped. Try again: what was stored may be there then. If it never "
                "can be read, take the device out of the configuration, or drop what is on it: shadowserve pool "
                f"format --force {self._device.name}",
            )

    def _read(self, first: int, blocks: int, address: int) -> Operation:
        operation = Operation(
            OperationKind.READ, first * BLOCK_BYTES, blocks * BLOCK_BYTES, address, Priority.FOREGROUND, self._done
        )
        self._submit(operation)
        return operation

    def _submit(self, operation: Operation) -> None:
        self._device.submit([operation])

    def _wait(self, operation: Operation) -> None:
        while id(operation) not in self._ended:
            for ended in wait_for_operations(self._device, ANSWER_S):
                self._ended.add(id(ended))
        self._ended.discard(id(operation))

    def _done(self, operation: Operation) -> None:
        """No-op: _wait() takes completions."""


def read_superblocks(reader: BlockReader, device: BlockDevice) -> tuple[Superblock | None, list[int]]:
    """Return the superblock of the sound copies, and the copies that are not sound.

    Raises:
        FormatError: It is of a newer version, or two sound copies differ.
        OSError: There is no sound copy, and one could not be read.
    """
    sound: dict[int, Superblock] = {}
    for number, offset in enumerate(SUPERBLOCK_OFFSETS):
        if offset + BLOCK_BYTES <= device.capacity_bytes:
            found = Superblock.unpack(reader.block(offset // BLOCK_BYTES))
            if found is not None:
                sound[number] = found
    largest = max(sound.values(), key=lambda each: each.device_bytes, default=None)
    for number, found in list(sound.items()):
        if largest is not None and found != largest and found.with_size_of(largest) == largest:
            del sound[number]  # the volume was growing: this copy was not written yet
    damaged = [number for number in range(len(SUPERBLOCK_OFFSETS)) if number not in sound]
    if not sound:
        reader.must_have_read(offset // BLOCK_BYTES for offset in SUPERBLOCK_OFFSETS)
    if len(set(sound.values())) > 1:
        raise FormatError(
            f"device {device.name} has the superblocks of two volumes; parts of another device were copied onto it: "
            "restore it, or format it again, which drops all its objects"
        )
    return next(iter(sound.values()), None), damaged
