"""How much memory this machine has for a process, and whether a configuration asks for more."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shadowserve.errors import ConfigurationError
from shadowserve.sizes import human_size

__all__ = ["MemoryLimit", "check_memory", "memory_limit"]

_THIS_MACHINE: Final = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """The most memory that a process can have.

    Attributes:
        size: bytes.
        what: sets it, for messages: the machine, or the limit of a control group with its file.
    """

    size: int
    what: str


def memory_limit(root: Path = _THIS_MACHINE) -> MemoryLimit | None:
    """Return the least of the machine's memory and the limits of the control groups that this process is in.

    Args:
        root: of the system whose /proc and /sys are read.

    Returns:
        None where the system does not say.
    """
    limits = [*_of_machine(root), *_of_groups(root)]
    return min(limits, key=lambda limit: limit.size, default=None)


def check_memory(budgets: Mapping[str, int], root: Path = _THIS_MACHINE) -> None:
    """Refuse a configuration that asks for more memory than a process can have here.

    Args:
        budgets: bytes by the key of the configuration that sets them; they are wanted all together.
        root: of the system whose /proc and /sys are read.

    Raises:
        ConfigurationError: they are more; the message names the keys and the limit.
    """
    limit, total = memory_limit(root), sum(budgets.values())
    if limit is None or total <= limit.size:
        return
    wanted = " and ".join(f"{key} ({human_size(size)})" for key, size in budgets.items() if size)
    together = f", {human_size(total)} together," if len(budgets) > 1 else ""
    raise ConfigurationError(f"{wanted}{together} is more memory than {limit.what}; write less")


def _of_machine(root: Path) -> Iterator[MemoryLimit]:
    match = re.search(r"^MemTotal: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        size = int(match[1]) << 10
        yield MemoryLimit(size, f"the {human_size(size)} that this machine has")


def _of_groups(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control group and of those that it lies in, of version 1 and version 2.

    In a container the path may be one that only the host has: then the mount's root is the container's own group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            text = _text(folder / name)
            if text.isdigit():  # else it is "max", or there is no such file
                file = f"/{(folder / name).relative_to(root)}"
                yield MemoryLimit(int(text), f"the {human_size(int(text))} of this control group ({file})")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
