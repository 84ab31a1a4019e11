"""Storage of a storage node or a data plane: memory and devices, and how devices can be accessed here."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shadowserve.errors import NotInstalledError
from shadowserve.memory_limit import memory_limit
from shadowserve.pool.config import DeviceConfig
from shadowserve.sizes import human_size
from shadowserve_tools.doctor.finding import Finding, Machine


def device_access() -> Iterator[Finding]:
    """Check that this build and the running kernel have io_uring, the best access to devices."""
    try:
        from shadowserve import native
    except NotInstalledError:
        return  # native_core() reports it
    access = native.BlockAccess.URING
    if native.block_access_available(access):
        yield Finding("device access", "ok", "io_uring, and threads where a device does not take it")
    elif native.block_access_built(access):
        remedy = (
            "allow it (sysctl kernel.io_uring_disabled=0; in a container a seccomp profile with io_uring_setup, "
            "io_uring_enter and io_uring_register): threads cost more CPU time for each read"
        )
        yield Finding("device access", "warning", "threads alone: the kernel refuses io_uring", remedy)
    else:
        remedy = "install liburing-dev (2.2 or newer), then 'make setup': threads cost more CPU time for each read"
        yield Finding("device access", "warning", "threads alone: io_uring was not built in", remedy)


def namespaces(machine: Machine) -> Iterator[Finding]:
    """NVMe namespaces: whether this user may give them commands, which is the shortest way to them."""
    for device in machine.find("/dev/ng[0-9]*n[0-9]*"):
        block = device.with_name("nvme" + device.name.removeprefix("ng"))
        allowed = all(os.access(path, os.R_OK | os.W_OK) for path in (device, block))
        found = "takes commands from this user" if allowed else "this user may not read and write it"
        remedy = f"to use it, give the server's user access to {block} and {device}"
        yield Finding.of(f"NVMe {block.name}", allowed, found, remedy)


def memory(machine: Machine, budgets: Mapping[str, int]) -> Iterator[Finding]:
    """Check that the machine has the memory that a program is configured to use, in bytes by configuration key."""
    match = re.search(r"^MemAvailable: +(\d+) kB$", machine.text("/proc/meminfo"), re.MULTILINE)
    limit = memory_limit(machine.root)
    if match is None or limit is None:
        return
    free, total = int(match[1]) << 10, sum(budgets.values())
    found = f"{human_size(total)} to use, {human_size(free)} available of {limit.what}"
    remedy = f"make {' or '.join(key for key, size in budgets.items() if size)} smaller"
    if total > limit.size:
        yield Finding("memory", "failed", found, f"{remedy}: otherwise the program does not start")
    elif total > free:
        remedy += ", or free some; a program that runs here has it already"
        yield Finding("memory", "warning", found, remedy)
    else:
        yield Finding("memory", "ok", found)


def devices(machine: Machine, configured: Sequence[DeviceConfig]) -> Iterator[Finding]:
    """Check that the configured devices exist and are accessible to this user, or that files can be made."""
    for entry in configured:
        path = entry.path if machine.is_this_one else machine.path(str(entry.path))
        problem, remedy = _problem(path, 0 if entry.size is None else int(entry.size))
        if problem:
            yield Finding(f"device {entry.path}", "failed", problem, remedy)
        elif path.is_file():
            yield Finding(f"device {entry.path}", "ok", f"a file of {path.stat().st_size:,} bytes")
        else:
            yield Finding(f"device {entry.path}", "ok", "there" if path.exists() else "a file that will be made")


def _problem(path: Path, size: int) -> tuple[str, str]:
    """Return the problem of a device or file, empty for none, and its remedy."""
    folder = path.absolute().parent
    if path.is_dir():
        return "it is a folder", "name a block device, or a file and its size"
    if path.exists():
        usable = os.access(path, os.R_OK | os.W_OK)
        return ("", "") if usable else ("this user may not read and write it", "give it to the server's user")
    if not folder.is_dir():
        return f"there is no folder {folder}", f"mkdir -p {folder}"
    if not size:
        return "it is not there", "check the path; to have a file made, give its size"
    if not os.access(folder, os.W_OK):
        return f"this user may not make files in {folder}", f"give {folder} to the server's user"
    free = shutil.disk_usage(folder).free
    if free < size:
        return f"{size:,} bytes are to be reserved, {free:,} are free", "make it smaller, or make room"
    return "", ""
