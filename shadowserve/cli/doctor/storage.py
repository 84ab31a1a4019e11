"""The storage node's side: how its devices can be accessed here (docs/storage-devices.md)."""

import os
from collections.abc import Iterator

from shadowserve.cli.doctor.finding import Finding, Machine

__all__ = ["device_access", "namespaces"]


def device_access() -> Iterator[Finding]:
    """Whether this build and the running kernel have io_uring, which devices are best accessed by."""
    from shadowserve import native

    access = native.BlockAccess.URING
    if native.block_access_available(access):
        yield Finding("device access", "ok", "io_uring, and threads where a device does not take it")
    elif native.block_access_built(access):
        mend = (
            "allow it (sysctl kernel.io_uring_disabled=0; in a container a seccomp profile with io_uring_setup, "
            "io_uring_enter and io_uring_register): threads cost more CPU time for each read"
        )
        yield Finding("device access", "warning", "threads alone: the kernel refuses io_uring", mend)
    else:
        mend = "install liburing-dev (2.2 or newer), then 'make setup': threads cost more CPU time for each read"
        yield Finding("device access", "warning", "threads alone: io_uring was not built in", mend)


def namespaces(machine: Machine) -> Iterator[Finding]:
    """NVMe namespaces: whether this user may give them commands, which is the shortest way to them."""
    for device in machine.find("/dev/ng[0-9]*n[0-9]*"):
        block = device.with_name("nvme" + device.name.removeprefix("ng"))
        allowed = all(os.access(path, os.R_OK | os.W_OK) for path in (device, block))
        yield Finding(
            f"NVMe {block.name}",
            "ok" if allowed else "warning",
            "takes commands from this user" if allowed else "this user may not read and write it",
            "" if allowed else f"if it is to be used: give the server's user {block} and {device}",
        )
