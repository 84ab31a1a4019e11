"""PCI functions as the kernel shows them under /sys: the functions, and the path between two of them."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shadowserve_tools.doctor.finding import Machine

BLUEFIELDS: Final = {0xA2DC: "BlueField-3", 0xA2D6: "BlueField-2"}
"""Network functions of the cards, by PCI device; the vendor is MELLANOX."""

_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI Express base specification: extended capabilities begin at 0x100; ACS is number 0x0D, its control register is 6
# bytes in, and bits 2 and 3 of that send peer-to-peer requests and completions to the root complex.
_EXTENDED_BEGIN: Final = 0x100
_ACS_ID: Final = 0x0D
_ACS_CONTROL: Final = 6
_ACS_REDIRECT: Final = 0b1100


@dataclass(frozen=True)
class Function:
    """One PCI function; the folders above its ``path`` under /sys/devices are the bridges on the way to it."""

    address: str
    vendor: int
    device: int
    class_code: int
    path: Path

    @property
    def is_bluefield(self) -> bool:
        """True for a network function that is not virtual."""
        return self.vendor == 0x15B3 and self.device in BLUEFIELDS and not (self.path / "physfn").exists()

    @property
    def is_gpu(self) -> bool:
        """True for a display or 3D controller of NVIDIA."""
        return self.vendor == 0x10DE and self.class_code >> 16 == 0x03

    @property
    def bridges(self) -> list[Path]:
        """The bridges on the way from the root complex, the root port first."""
        return [folder for folder in reversed(self.path.parents) if _ADDRESS.fullmatch(folder.name)]

    def text(self, name: str) -> str:
        """Return one of its attributes; empty where there is none."""
        try:
            return (self.path / name).read_text(encoding="utf-8").strip()
        except OSError:
            return ""


def functions(machine: Machine) -> list[Function]:
    """Return all PCI functions, by address."""
    found = []
    for link in machine.find("/sys/bus/pci/devices/*"):
        path = link.resolve()
        vendor, device, class_code = (
            int((path / name).read_text(encoding="utf-8"), 16) for name in ("vendor", "device", "class")
        )
        found.append(Function(link.name, vendor, device, class_code, path))
    return found


def relation(one: Function, other: Function) -> Literal["switch", "root complex", "processors"]:
    """Return the farthest part between two functions; ``processors``: the link between them, or parts of one."""
    if set(one.bridges) & set(other.bridges):
        return "switch"
    return "root complex" if one.text("numa_node") == other.text("numa_node") else "processors"


def redirecting_bridges(one: Function, other: Function) -> list[str]:
    """Return the bridges between two functions that send what is for a peer up to the root complex.

    PermissionError: only root may read that.
    """
    shared = set(one.bridges) & set(other.bridges)
    between = [bridge for bridge in [*one.bridges, *other.bridges] if bridge not in shared]
    return [bridge.name for bridge in between if _acs_control(bridge) & _ACS_REDIRECT]


def _acs_control(bridge: Path) -> int:
    """Return a bridge's ACS control register; 0 without one."""
    config = (bridge / "config").read_bytes()
    if len(config) <= _EXTENDED_BEGIN:  # the kernel gives others than root the first 64 bytes
        raise PermissionError(f"{bridge.name}: its extended configuration cannot be read")
    offset = _EXTENDED_BEGIN
    seen: set[int] = set()
    while _EXTENDED_BEGIN <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_ID:
            return int(struct.unpack_from("<H", config, offset + _ACS_CONTROL)[0])
        offset = header >> 20
    return 0
