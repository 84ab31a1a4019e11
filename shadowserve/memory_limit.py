"""Memory limit of this process, and the check of configured memory budgets against it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shadowserve.errors import ConfigurationError
from shadowserve.sizes import human_size

_THIS_MACHINE: Final = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """Upper limit of a process's memory."""

    size: int  # limit in bytes
    what: str  # origin of the limit, for messages: the machine, or a control group and its file


def memory_limit(root: Path = _THIS_MACHINE) -> MemoryLimit | None:
    """Return the smallest of the machine's memory and the limits of this process's control groups; None if unknown."""
    limits = [*_of_machine(root), *_of_groups(root)]
    return min(limits, key=lambda limit: limit.size, default=None)


def check_memory(budgets: Mapping[str, int], root: Path = _THIS_MACHINE) -> None:
    """Raise ConfigurationError if memory budgets, in bytes by key, exceed this process's limit in total."""
    limit, total = memory_limit(root), sum(budgets.values())
    if limit is None or total <= limit.size:
        return
    wanted = " and ".join(f"{key} ({human_size(size)})" for key, size in budgets.items() if size)
    together = f", {human_size(total)} together," if len(budgets) > 1 else ""
    raise ConfigurationError(f"{wanted}{together} is more memory than {limit.what}; set less")


def _of_machine(root: Path) -> Iterator[MemoryLimit]:
    match = re.search(r"^MemTotal: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        size = int(match[1]) << 10
        yield MemoryLimit(size, f"the {human_size(size)} that this machine has")


def _of_groups(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control group and its parents, for cgroup versions 1 and 2.

    In a container the path may exist only on the host: then the mount's root is the container's group.
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
            if text.isdigit():  # else it is "max", or the file does not exist
                file = f"/{(folder / name).relative_to(root)}"
                yield MemoryLimit(int(text), f"the {human_size(int(text))} of this control group ({file})")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
