"""Machines made of files: the parts of /sys, /proc, /etc and /opt that the doctor and the installer read."""

import os
import struct
from pathlib import Path

CARD = "0000:3c:00.0"
GPU = "0000:3d:00.0"
_NIC_CLASS, _GPU_CLASS, _BRIDGE_CLASS = 0x020000, 0x030200, 0x060400


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def acs(control: int) -> bytes:
    """Return a bridge's configuration space: a capability of another kind (AER, 1), then ACS (13) with ``control``."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x001F, control)
    return bytes(space)


def pci(root: Path, path: str, vendor: int, device: int, class_code: int, node: int = 0, control: int = 0) -> Path:
    """Add one function at ``path`` below /sys/devices, such as ``pci0000:3a/0000:3a:00.0``."""
    folder = root / "sys/devices" / path
    write(folder, "vendor", f"{vendor:#06x}")
    write(folder, "device", f"{device:#06x}")
    write(folder, "class", f"{class_code:#08x}")
    write(folder, "numa_node", str(node))
    for name, value in (("speed", "32.0 GT/s PCIe"), ("width", "16")):
        write(folder, f"current_link_{name}", value)
        write(folder, f"max_link_{name}", value)
    (folder / "config").write_bytes(acs(control))
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(folder, link.parent))  # like the kernel
    return folder


def driver(root: Path, folder: Path, name: str) -> None:
    (root / "sys/bus/pci/drivers" / name).mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(root / "sys/bus/pci/drivers" / name)


def doca(root: Path, machine: str, version: str = "3.0.0") -> None:
    folder = f"opt/mellanox/doca/lib/{machine}-linux-gnu"
    for module in ("common", "dma", "compress"):
        write(root, f"{folder}/pkgconfig/doca-{module}.pc", f"Name: doca-{module}\nVersion: {version}")
    write(root, f"{folder}/libdoca_common.so.2", "")


def host_with_card(root: Path, *, gpu_below_switch: bool = True, control: int = 0) -> Path:
    """A host with a BlueField-3 and a GPU below one PCIe switch (or not), correctly set up.

    ``control``: ACS control bits of the switch's ports.
    """
    upstream = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    pci(root, "pci0000:3a/0000:3a:00.0", 0x8086, 0x352A, _BRIDGE_CLASS)
    pci(root, upstream, 0x1000, 0xC030, _BRIDGE_CLASS)
    pci(root, f"{upstream}/0000:3b:10.0", 0x1000, 0xC030, _BRIDGE_CLASS, control=control)
    card = pci(root, f"{upstream}/0000:3b:10.0/{CARD}", 0x15B3, 0xA2DC, _NIC_CLASS)
    driver(root, card, "mlx5_core")
    virtual = pci(root, f"{upstream}/0000:3b:10.0/0000:3c:00.3", 0x15B3, 0xA2DC, _NIC_CLASS)
    (virtual / "physfn").symlink_to(card)
    if gpu_below_switch:
        pci(root, f"{upstream}/0000:3b:11.0", 0x1000, 0xC030, _BRIDGE_CLASS, control=control)
        pci(root, f"{upstream}/0000:3b:11.0/{GPU}", 0x10DE, 0x26B9, _GPU_CLASS)
    else:
        pci(root, "pci0000:5a/0000:5a:00.0", 0x8086, 0x352A, _BRIDGE_CLASS, control=control)
        pci(root, f"pci0000:5a/0000:5a:00.0/{GPU}", 0x10DE, 0x26B9, _GPU_CLASS)
    write(card, "iommu_group/type", "identity")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    write(root, "proc/driver/nvidia/version", version)
    write(root, "proc/sys/kernel/osrelease", "6.8.0-51-generic")
    write(root, "sys/module/nvidia_peermem/initstate", "live")
    write(root, "sys/class/net/tmfifo_net0/address", "00:1a:ca:ff:ff:02")
    doca(root, "x86_64")
    return root


def bluefield(root: Path) -> Path:
    """A BlueField-3's own system with all packages except ours."""
    write(root, "sys/bus/platform/devices/MLNXBF04:00/modalias", "acpi:MLNXBF04:")
    write(root, "etc/mlnx-release", "bf-bundle-3.0.0-135_25.04_ubuntu-22.04_prod")
    pci(root, "pci0000:00/0000:00:00.0", 0x15B3, 0x1978, _BRIDGE_CLASS)
    for number in (0, 1):
        pci(root, f"pci0000:00/0000:00:00.0/0000:03:00.{number}", 0x15B3, 0xA2DC, _NIC_CLASS)
    core = "BogoMIPS\t: 400.00\nFeatures\t: fp asimd aes crc32 atomics fphp asimdhp asimddp\nCPU part\t: 0xd42\n"
    write(root, "proc/cpuinfo", "\n".join(f"processor\t: {number}\n{core}" for number in range(16)))
    write(root, "sys/devices/system/cpu/online", "0-15")
    write(root, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0")
    write(root, "sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages", "640")
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write(root, "usr/lib/libxlio.so", "")
    doca(root, "aarch64")
    return root
