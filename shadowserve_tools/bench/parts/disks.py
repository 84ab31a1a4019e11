"""Devices to measure on: loop devices over files in memory with capped reads, or plain files without the rights.

The cap is blk-throttle of cgroup v1: this process moves into its own group, in which each device reads a limited number
of bytes per second. It accounts in slices of 100 ms, so that a measurement takes a second or more.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from shadowserve.block import Operation
from shadowserve.errors import ShadowServeError
from shadowserve.native import BlockDevice
from shadowserve.pool.buffers import allocate
from shadowserve.pool.volume.device import wait_for_operations
from shadowserve_tools.processes import until

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")
_PIECE_BYTES: Final = 256 << 10
"""Size of a plain read. The kernel splits larger ones, and blk-throttle may then count them twice."""
_READ_AHEAD_KB: Final = 256
"""The same limit for reads through the page cache."""
_LET_GO_S: Final = 10.0
_ENDED_S: Final = 60.0


@dataclass(frozen=True)
class Disk:
    """One device.

    Attributes:
        path: Block device, or a file.
        number: Major and minor number as the kernel writes them; empty for a file.
        cap: Read rate while caps are on, in bytes per second.
    """

    path: Path
    number: str
    cap: int

    @property
    def read_bytes(self) -> int | None:
        """Bytes read since the device was made; None for a file."""
        if not self.number:
            return None
        return int(Path("/sys/dev/block", self.number, "stat").read_text().split()[2]) * 512


@contextmanager
def working_folder(bytes_needed: int, folder: Path | None) -> Iterator[Path]:
    """Make a folder with enough space: in memory if it fits there twice, else in the folder of temporary files."""
    if folder is None and _SHARED_MEMORY.is_dir():
        if min(psutil.virtual_memory().available // 2, shutil.disk_usage(_SHARED_MEMORY).free) >= bytes_needed:
            folder = _SHARED_MEMORY
    with tempfile.TemporaryDirectory(prefix="shadowserve-bench-", dir=folder) as name:
        if shutil.disk_usage(name).free < bytes_needed:
            raise ShadowServeError(
                f"{name} has no room for {bytes_needed >> 20} MiB; name another folder with --folder, or ask for fewer "
                "or smaller chunks"
            )
        yield Path(name)


class Disks(ExitStack):
    """Makes devices in a folder and removes them at the end of the context.

    Attributes:
        why_not: Reason for using files without caps; empty if there are devices.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._group: Path | None = None
        self._made: list[Disk] = []
        self.why_not = ""

    def __enter__(self) -> "Disks":
        try:
            self._group = self.enter_context(_own_group())
            probe = self._folder / "probe"
            probe.write_bytes(bytes(1 << 20))
            with _loop(probe):
                pass
            probe.unlink()
        except (OSError, ShadowServeError) as error:
            self.close()
            self._group = None
            self.why_not = str(error)
        return self

    def make(self, name: str, size: int, cap: int) -> Disk:
        """Make a device, or name a file, of ``size`` bytes."""
        image = self._folder / f"{name}.img"
        if self._group is None:
            return Disk(image, "", cap)
        with image.open("wb") as file:
            file.truncate(size)
        path = self.enter_context(_loop(image))
        queue = Path("/sys/block", path.name)
        (queue / "queue" / "read_ahead_kb").write_text(str(_READ_AHEAD_KB))
        disk = Disk(path, (queue / "dev").read_text().strip(), cap)
        self._made.append(disk)
        return disk

    def make_folder(self, name: str, size: int, cap: int) -> tuple[Path, Disk]:
        """Make a folder on a file system of its own device; without devices, a plain folder."""
        disk = self.make(name, size, cap)
        folder = self._folder / name
        folder.mkdir()
        if disk.number:
            _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(disk.path))
            _run("mount", "-o", "noatime", str(disk.path), str(folder))
            self.callback(_run, "umount", str(folder))
        return folder, disk

    @contextmanager
    def capped(self) -> Iterator[None]:
        self._throttle(on=True)
        try:
            yield
        finally:
            self._throttle(on=False)

    def _throttle(self, *, on: bool) -> None:
        if self._group is not None:
            for disk in self._made:
                limit = disk.cap if on else 0
                (self._group / "blkio.throttle.read_bps_device").write_text(f"{disk.number} {limit}")


@contextmanager
def _own_group() -> Iterator[Path]:
    """Move this process into its own cgroup while the context lasts."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    found = [line.split(":", 2)[2] for line in lines if "blkio" in line.split(":", 2)[1].split(",")]
    if not found or not _BLKIO.is_dir():
        raise ShadowServeError("there is no cgroup v1 with blkio")
    before = _BLKIO / found[0].lstrip("/")
    group = before / f"shadowserve-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield group
        finally:
            for process in (group / "cgroup.procs").read_text().split():  # programs that started since
                with contextlib.suppress(OSError):  # it has ended
                    (before / "cgroup.procs").write_text(process)
    finally:
        until(lambda: _removed(group), f"{group} is still in use", _LET_GO_S)


def _removed(folder: Path) -> bool:
    """Remove a folder; return False while the kernel uses it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@contextmanager
def _loop(image: Path) -> Iterator[Path]:
    path = Path(_run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip())
    try:
        yield path
    finally:
        _run("losetup", "--detach", str(path))


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ShadowServeError(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise ShadowServeError(f"{' '.join(command)}: {error.stderr.strip()}") from error
    return done.stdout


def plain_rate(disk: Disk, size: int) -> float:
    """Return the bytes per second of a plain sequential read of ``size`` bytes from the start of a device."""
    memory = allocate(1 << 20)[2048:]  # start of a page
    piece = memory[:_PIECE_BYTES]
    descriptor = os.open(disk.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END) // _PIECE_BYTES * _PIECE_BYTES
        done = 0
        begin = time.perf_counter()
        while done < size:
            done += os.preadv(descriptor, [piece], done % end)
        return done / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)


def drop_cached(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def run_operations(device: BlockDevice, operations: Sequence[Operation]) -> None:
    """Submit operations and wait until all have ended."""
    device.submit(operations)
    left = len(operations)
    while left:
        for operation in wait_for_operations(device, _ENDED_S):
            if operation.error is not None:
                raise ShadowServeError(f"reading failed: {operation.error}")
            left -= 1
