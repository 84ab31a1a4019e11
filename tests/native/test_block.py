"""Block devices through Python: each access method, on files, on tmpfs, and on a loop device if possible."""

import errno
import mmap
import os
import re
import select
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import WAIT_MAX_S, wait_for

from shadowserve import native
from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import BusyError, DeviceError, NativeError
from shadowserve.native import BlockAccess, BlockDevice, ObjectFields, Result
from shadowserve.native._library import ffi

SIZE = 16 << 20
ACCESSES = [access for access in (BlockAccess.URING, BlockAccess.THREADS) if native.block_access_available(access)]


class Memory:
    """Memory at a page boundary, like an arena."""

    def __init__(self, size: int) -> None:
        self.mapping = mmap.mmap(-1, size)
        self.view = memoryview(self.mapping)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.mapping)))


@pytest.fixture
def memory() -> Memory:
    return Memory(8 << 20)


@pytest.fixture(params=["file", "tmpfs", "loop"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The opened path: a file on disk, one in memory, a block device."""
    if request.param == "file":
        yield tmp_path / "device"
        return
    if request.param == "tmpfs":
        file = Path("/dev/shm", f"shadowserve-test-{os.getpid()}")
        yield file
        file.unlink(missing_ok=True)
        return
    yield request.getfixturevalue("loop")


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A block device."""
    backing = tmp_path / "backing"
    backing.write_bytes(b"")
    os.truncate(backing, SIZE)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, timeout=WAIT_MAX_S, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True, timeout=WAIT_MAX_S)


@pytest.fixture(params=ACCESSES, ids=lambda access: access.name.lower())
def device(request: pytest.FixtureRequest, path: Path) -> Iterator[BlockDevice]:
    with BlockDevice(path, size=SIZE, access=request.param, busy_wait_s=WAIT_MAX_S) as opened:
        yield opened


def operation(
    kind: OperationKind, offset: int = 0, length: int = 0, address: int = 0, priority: Priority = Priority.FOREGROUND
) -> Operation:
    return Operation(kind, offset, length, address, priority, lambda _: None)


def perform(device: BlockDevice, *operations: Operation) -> list[Operation]:
    """Submit operations. Wait for ``fileno()``, and return them in the order of completion."""
    device.submit(operations)
    ended: list[Operation] = []
    while len(ended) < len(operations):
        readable, _, _ = select.select([device.fileno()], [], [], WAIT_MAX_S)
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
    assert {kind: histogram.count for kind, histogram in device.latencies.items() if histogram.count} == {
        kind: count
        for kind, count in zip(("read", "write", "flush", "discard"), device.statistics().operations, strict=True)
        if count
    }
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


def test_what_is_outside_is_refused(device: BlockDevice, memory: Memory) -> None:
    with pytest.raises(NativeError, match=r"submitting 2 operations \(flush 0 at 0, write 8192 at"):
        wrong = operation(OperationKind.WRITE, SIZE - 4096, 8192, memory.address)
        device.submit([operation(OperationKind.FLUSH), wrong])
    assert device.completed() == [], "all or none"


def test_too_many_operations_are_refused_at_once(path: Path, memory: Memory) -> None:
    with BlockDevice(path, size=SIZE, operations_max=4, busy_wait_s=WAIT_MAX_S) as device:
        reads = [operation(OperationKind.READ, 0, 4096, memory.address + 4096 * i) for i in range(5)]
        with pytest.raises(BusyError):
            device.submit(reads)
        assert len(perform(device, *reads[:4])) == 4
        assert len(perform(device, *reads[:1])) == 1


def test_closing_gives_back_every_operation(path: Path, memory: Memory) -> None:
    for access in ACCESSES:
        device = BlockDevice(path, size=SIZE, access=access, queue_depth=1, busy_wait_s=WAIT_MAX_S)
        reads = [operation(OperationKind.READ, 0, 1 << 20, memory.address) for _ in range(200)]
        device.submit(reads)
        device.close()
        ended = device.completed()
        assert set(map(id, ended)) == set(map(id, reads)) and device.completed() == []
        assert {item.error.errno for item in ended if item.error is not None} <= {errno.ECANCELED}
        with pytest.raises(DeviceError, match="is closed"):
            device.submit(reads[:1])
        device.close()


def test_threads_may_go_on_while_a_device_is_closed(device: BlockDevice, memory: Memory) -> None:
    submitted: list[list[Operation]] = [[] for _ in range(3)]
    taken: list[Operation] = []
    begun = threading.Barrier(4)

    def read_on(mine: list[Operation]) -> None:
        begun.wait(WAIT_MAX_S)
        while True:
            read = operation(OperationKind.READ, 0, 4096, memory.address)
            try:
                device.submit([read])
            except BusyError:
                taken.extend(device.completed())
            except DeviceError:
                return
            else:
                mine.append(read)

    threads = [threading.Thread(target=read_on, args=(mine,)) for mine in submitted]
    for thread in threads:
        thread.start()
    begun.wait(WAIT_MAX_S)
    wait_for(lambda: all(len(mine) > 20 for mine in submitted))
    device.close()
    for thread in threads:
        thread.join(WAIT_MAX_S)
    taken += device.completed()
    assert {id(item) for item in taken} == {id(item) for mine in submitted for item in mine}
    assert len(taken) == sum(map(len, submitted)), "each once"


@pytest.mark.parametrize("access", ACCESSES)
def test_what_cannot_be_opened_says_why(access: BlockAccess, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file.*give its size") as caught:
        BlockDevice(tmp_path / "absent", access=access)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(DeviceError, match="it is a folder; name a block device"):
        BlockDevice(tmp_path, access=access)
    (tmp_path / "short").write_bytes(b"x" * 4095)
    with pytest.raises(DeviceError, match="at least 4096 bytes"):
        BlockDevice(tmp_path / "short", access=access)
    with pytest.raises(DeviceError, match="no file or block device"):
        BlockDevice("/dev/null", access=access)
    with pytest.raises(DeviceError, match="File too large|No space") as caught:
        BlockDevice(tmp_path / "huge", size=1 << 60, access=access)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    with pytest.raises(DeviceError, match="access by NVMe"):
        BlockDevice(tmp_path / "short", access=BlockAccess.NVME)


def test_a_file_that_finds_no_room_is_not_left_behind(small_file_system: Path) -> None:
    kept = small_file_system / "kept"
    kept.write_bytes(b"x" * 4096)
    for access in ACCESSES:
        for name in ("new", "kept"):
            with pytest.raises(DeviceError, match="No space left.*make it smaller") as caught:
                BlockDevice(small_file_system / name, size=64 << 20, access=access)
            assert caught.value.errno == errno.ENOSPC
    assert [file.name for file in small_file_system.iterdir()] == ["kept"] and kept.stat().st_size == 4096


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=WAIT_MAX_S)


def test_a_device_that_is_mounted_is_refused(loop: Path, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", str(loop)], check=True, timeout=WAIT_MAX_S)
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", str(loop), str(folder)], check=True, timeout=WAIT_MAX_S)
    try:
        for access in (BlockAccess.AUTO, *ACCESSES):
            with pytest.raises(DeviceError, match="it is mounted") as caught:
                BlockDevice(loop, access=access, busy_wait_s=0)
            assert caught.value.errno == errno.EBUSY
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=WAIT_MAX_S)


def test_a_device_is_not_larger_than_it_is(loop: Path) -> None:
    with pytest.raises(DeviceError, match="No space left"):
        BlockDevice(loop, size=SIZE + 4096)
    with BlockDevice(loop, size=SIZE // 2, busy_wait_s=WAIT_MAX_S) as device:
        assert device.capacity_bytes == SIZE // 2


HOLDER = """
import sys
from shadowserve.native import BlockAccess, BlockDevice, ObjectFields, Result
device = BlockDevice(sys.argv[1], access=BlockAccess[sys.argv[2]], busy_wait_s=60)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_device_can_be_opened_after_its_process_was_killed(device: BlockDevice, path: Path) -> None:
    name = "URING" if device.access_name.startswith("io_uring") else "THREADS"
    device.close()
    command = [sys.executable, "-c", HOLDER, str(path), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        holder.kill()
    with BlockDevice(path, access=BlockAccess[name], busy_wait_s=WAIT_MAX_S) as again:
        assert again.capacity_bytes == SIZE


NOBODY = """
import mmap, os, resource, select, sys
from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.native import BlockDevice
from shadowserve.native._library import ffi

resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
memory = mmap.mmap(-1, 32 << 20)
address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
with BlockDevice(sys.argv[1], size=16 << 20) as device:
    print(device.access_name, device.register(memoryview(memory)), device.statistics().registered)
    device.submit([Operation(OperationKind.READ, 0, 1 << 20, address, Priority.FOREGROUND, lambda operation: None)])
    select.select([device.fileno()], [], [], 60)
    print(device.completed()[0].error)
"""


def test_memory_that_may_not_be_locked_is_used_unregistered() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without the right to lock memory")
    path = Path("/dev/shm", f"shadowserve-test-nobody-{os.getpid()}")
    path.touch()
    try:
        os.chown(path, 65534, 65534)
        command = [sys.executable, "-c", NOBODY, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S, check=False)
    finally:
        path.unlink()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(io_uring|threads), (direct|buffered) False 0\nNone\n", done.stdout), done.stdout


# ---- Objects ---------------------------------------------------------------------------------------------------------


def sealed(length: int, name: bytes = b"", **fields: int) -> tuple[bytearray, ObjectFields]:
    memory = bytearray(native.object_bytes(length, name))
    memory[2048 : 2048 + length] = os.urandom(length)
    expected = ObjectFields(key=os.urandom(32), tenant=3, length=length, name_length=len(name), **fields)
    native.seal_object(memory, expected, name)
    return memory, expected


def test_an_object_says_what_it_is() -> None:
    memory, expected = sealed(70_000, "schlüssel".encode(), generation=9, header_length=100, flags=5)
    assert native.object_header(memory) == expected
    value = memoryview(memory)[2048 : 2048 + 70_000]
    assert native.check_object(memory, expected, value, 0, 2) is Result.OK
    assert native.check_object(memory, expected) is Result.OK
    assert native.check_object_name(memory, "schlüssel".encode()) is Result.OK
    assert native.check_object_name(memory, b"another name") is Result.CHECKSUM
    other = expected._replace(tenant=4)
    assert native.check_object(memory, other) is Result.NOT_FOUND
    memory[2048 + 65536] ^= 1
    assert native.check_object(memory, expected, value[:65536], 0, 1) is Result.OK
    assert native.check_object(memory, expected, value[65536:], 1, 1) is Result.CHECKSUM
    memory[50] ^= 1
    assert native.check_object(memory, expected) is Result.CHECKSUM
    with pytest.raises(NativeError, match="reading an object's header") as caught:
        native.object_header(bytes(4096))
    assert caught.value.result == Result.BAD_DATA


def test_a_device_checks_what_is_expected_of_a_read(device: BlockDevice, memory: Memory) -> None:
    content, expected = sealed(200_000, generation=7)
    memory.view[: len(content)] = content
    perform(device, operation(OperationKind.WRITE, 4096, len(content), memory.address, Priority.WRITE))
    content[2048 + 150_000] ^= 1
    memory.view[: len(content)] = content
    perform(device, operation(OperationKind.WRITE, 1 << 20, len(content), memory.address, Priority.WRITE))

    def verdict(offset: int, fields: ObjectFields | None, units: int, length: int = len(content)) -> Result | None:
        read = operation(OperationKind.READ, offset, length, memory.address)
        read.expected, read.expected_units = fields, units
        (ended,) = perform(device, read)
        assert ended.error is None
        return ended.verdict

    assert verdict(4096, expected, 4) is Result.OK
    assert verdict(4096, None, 0) is None
    assert verdict(4096, expected._replace(generation=8), 4) is Result.NOT_FOUND
    assert verdict(1 << 20, expected, 4) is Result.CHECKSUM
    assert verdict(1 << 20, expected, 2, 36 * 4096) is Result.OK
    assert verdict(8192, expected, 4) is Result.BAD_DATA
    with pytest.raises(NativeError, match="submitting"):
        verdict(4096, expected, 4, 36 * 4096)


def test_the_checksum_is_the_one_that_is_documented() -> None:
    memory, expected = sealed(100_000)
    assert [int.from_bytes(memory[256 + 4 * i : 260 + 4 * i], "little") for i in range(3)] == [
        zlib.crc32(memory[2048 : 2048 + 65536]),
        zlib.crc32(memory[2048 + 65536 : 2048 + 100_000]),
        0,
    ]
    header = bytearray(memory[:2048])
    header[12:16] = bytes(4)
    assert int.from_bytes(memory[12:16], "little") == zlib.crc32(header)
    assert memory[:8] == b"SSOBJECT" and memory[32:64] == expected.key


def test_a_range_is_checked_by_the_units_that_have_it() -> None:
    assert native.object_units(200_000, 0, 1) == (0, 1)
    assert native.object_units(200_000, 65_535, 65_537) == (0, 2)
    assert native.object_units(200_000, 196_607, 200_000) == (2, 2)
    assert native.object_units(200_000, 10, 10) == (0, 0)
    assert native.object_unit(30 << 20) == 131_072


def test_what_cannot_be_an_object_is_refused() -> None:
    fields = ObjectFields(key=bytes(32), tenant=0, length=5000)
    memory = bytearray(8192)
    with pytest.raises(NativeError, match="too few"):
        native.seal_object(memoryview(memory)[:8000], fields)
    with pytest.raises(NativeError, match="32 bytes"):
        native.seal_object(memory, fields._replace(key=b"short"))
    with pytest.raises(NativeError, match="name's length"):
        native.seal_object(memory, fields, b"name")
    native.seal_object(memory, fields)
    with pytest.raises(NativeError, match="a header has 2048 bytes"):
        native.check_object(memory[:2047], fields)
    with pytest.raises(NativeError, match="1 units have 5000 bytes, 4999 were given"):
        native.check_object(memory, fields, bytes(4999), 0, 1)
    with pytest.raises(NativeError, match="checking units 0 to 2"):
        native.check_object(memory, fields, bytes(5000), 0, 2)
