"""Block devices through Python: each access in turn, on files, on tmpfs, on a loop device where one may be made."""

import errno
import mmap
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import PATIENCE_S

from shadowserve import native
from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import BusyError, DeviceError, NativeError
from shadowserve.native import BlockAccess, BlockDevice
from shadowserve.native._library import ffi

SIZE = 16 << 20
ACCESSES = [access for access in (BlockAccess.URING, BlockAccess.THREADS) if native.block_access_available(access)]


class Memory:
    """Memory at a page's start, as arenas are."""

    def __init__(self, size: int) -> None:
        self.mapping = mmap.mmap(-1, size)
        self.view = memoryview(self.mapping)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.mapping)))


@pytest.fixture
def memory() -> Memory:
    return Memory(8 << 20)


@pytest.fixture(params=["file", "tmpfs", "loop"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """What is opened: a file on disk, one in memory, a block device."""
    if request.param == "file":
        yield tmp_path / "device"
        return
    if request.param == "tmpfs":
        file = Path("/dev/shm", f"shadowserve-test-{os.getpid()}")
        yield file
        file.unlink(missing_ok=True)
        return
    backing = tmp_path / "backing"
    backing.write_bytes(b"")
    os.truncate(backing, SIZE)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True, timeout=PATIENCE_S)


@pytest.fixture(params=ACCESSES, ids=lambda access: access.name.lower())
def device(request: pytest.FixtureRequest, path: Path) -> Iterator[BlockDevice]:
    with BlockDevice(path, size=SIZE, access=request.param, busy_wait_s=PATIENCE_S) as opened:
        yield opened


def operation(
    kind: OperationKind, offset: int = 0, length: int = 0, address: int = 0, priority: Priority = Priority.FOREGROUND
) -> Operation:
    return Operation(kind, offset, length, address, priority, lambda _: None)


def perform(device: BlockDevice, *operations: Operation) -> list[Operation]:
    """Submit, and return in the order of completion, once ``fileno()`` said that there are some."""
    device.submit(operations)
    ended: list[Operation] = []
    while len(ended) < len(operations):
        readable, _, _ = select.select([device.fileno()], [], [], PATIENCE_S)
        assert readable, "nothing ended"
        ended += device.completed()
    return ended


def test_what_was_written_is_read(device: BlockDevice, memory: Memory) -> None:
    assert device.capacity_bytes == SIZE
    content = os.urandom(3 << 20)
    memory.view[: len(content)] = content
    write = operation(OperationKind.WRITE, 4096, len(content), memory.address, Priority.WRITE)
    read = operation(OperationKind.READ, 4096, len(content), memory.address + (4 << 20))
    assert perform(device, write) == [write] and write.error is None
    assert perform(device, operation(OperationKind.FLUSH))[0].error is None
    assert perform(device, read) == [read] and read.error is None
    assert memory.view[4 << 20 : 7 << 20] == content
    assert 0 < read.begin_ns < read.end_ns
    counted = device.statistics()
    assert counted.operations == (1, 1, 1, 0) and counted.bytes == (len(content), len(content), 0, 0)
    assert counted.errors == (0, 0, 0, 0) and counted.in_flight == 0 and counted.busy_ns > 0


def test_registered_memory_is_used_like_any_other(device: BlockDevice, memory: Memory) -> None:
    other = Memory(1 << 20)
    took = [device.register(memory.view), device.register(other.view)]
    assert all(took) == device.access_name.startswith("io_uring")
    memory.view[:4096] = b"a" * 4096
    outside = Memory(4096)
    perform(device, operation(OperationKind.WRITE, 0, 4096, memory.address))
    for target in (other, outside):
        perform(device, operation(OperationKind.READ, 0, 4096, target.address))
        assert target.view[:4096] == b"a" * 4096
    assert device.statistics().registered == 2 * all(took)


def test_a_device_is_one_processs_alone(device: BlockDevice) -> None:
    for access in ACCESSES:
        with pytest.raises(DeviceError, match="another process has it") as caught:
            BlockDevice(device.name, access=access, busy_wait_s=0)
        assert caught.value.errno == errno.EBUSY


def test_a_discard_is_advice(device: BlockDevice, memory: Memory) -> None:
    discard = operation(OperationKind.DISCARD, 0, 1 << 20, priority=Priority.BACKGROUND)
    assert perform(device, discard)[0].error is None


def test_what_is_not_aligned_or_outside_is_refused(device: BlockDevice, memory: Memory) -> None:
    wrong = [
        (OperationKind.READ, 0, 100, memory.address),
        (OperationKind.READ, 512, 4096, memory.address),
        (OperationKind.READ, SIZE, 4096, memory.address),
        (OperationKind.WRITE, SIZE - 4096, 8192, memory.address),
        (OperationKind.WRITE, 0, 4096, memory.address + 8),
        (OperationKind.WRITE, 0, 4096, 0),
        (OperationKind.READ, 0, 0, memory.address),
    ]
    for arguments in wrong:
        with pytest.raises(NativeError, match=r"submitting 2 operations \(flush 0 at 0, "):
            device.submit([operation(OperationKind.FLUSH), operation(*arguments)])
    assert device.completed() == [], "all or none"


def test_too_many_operations_are_refused_at_once(path: Path, memory: Memory) -> None:
    with BlockDevice(path, size=SIZE, operations_max=4, busy_wait_s=PATIENCE_S) as device:
        reads = [operation(OperationKind.READ, 0, 4096, memory.address + 4096 * i) for i in range(5)]
        with pytest.raises(BusyError):
            device.submit(reads)
        assert len(perform(device, *reads[:4])) == 4
        assert len(perform(device, *reads[:1])) == 1


def test_closing_gives_back_every_operation(path: Path, memory: Memory) -> None:
    for access in ACCESSES:
        device = BlockDevice(path, size=SIZE, access=access, queue_depth=1, busy_wait_s=PATIENCE_S)
        reads = [operation(OperationKind.READ, 0, 1 << 20, memory.address) for _ in range(200)]
        device.submit(reads)
        device.close()
        ended = device.completed()
        assert set(map(id, ended)) == set(map(id, reads)) and device.completed() == []
        assert {item.error.errno for item in ended if item.error is not None} <= {errno.ECANCELED}
        with pytest.raises(DeviceError, match="is closed"):
            device.submit(reads[:1])
        device.close()


@pytest.mark.parametrize("access", ACCESSES)
def test_what_cannot_be_opened_says_why(access: BlockAccess, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file.*only where a size is configured") as caught:
        BlockDevice(tmp_path / "absent", access=access)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(DeviceError, match="no file or block device"):
        BlockDevice(tmp_path, access=access)
    (tmp_path / "short").write_bytes(b"x" * 4095)
    with pytest.raises(DeviceError, match="at least 4096 bytes"):
        BlockDevice(tmp_path / "short", access=access)
    with pytest.raises(DeviceError, match="no file or block device"):
        BlockDevice("/dev/null", access=access)
    with pytest.raises(DeviceError, match="File too large|No space") as caught:
        BlockDevice(tmp_path / "huge", size=1 << 60, access=access)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    with pytest.raises(DeviceError, match="nvme access"):
        BlockDevice(tmp_path / "short", access=BlockAccess.NVME)
