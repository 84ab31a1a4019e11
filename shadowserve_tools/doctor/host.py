"""Checks of a host with a BlueField: the card, GPUs, and the path between them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Final

from shadowserve_tools.doctor.finding import Finding, Machine
from shadowserve_tools.doctor.pci import BLUEFIELDS, Function, functions, redirecting_bridges, relation

DOCA_MAJOR_MIN: Final = 3
"""The first with doca_mmap_enable_thread_safety()."""
DMABUF_KERNEL: Final = (5, 12)
"""The first whose RDMA drivers take memory as a DMA-BUF."""


def cards(machine: Machine) -> list[Function]:
    """Return the network functions of the BlueFields on PCIe."""
    return [function for function in functions(machine) if function.is_bluefield]


def card(machine: Machine) -> Iterator[Finding]:
    """Check the card from the host."""
    own = cards(machine)
    if not own:
        found = "no BlueField on PCIe; 'shadowserve dpu' runs on CPU cores here (docs/guides/cores.md)"
        yield Finding("card", "ok", found)
        return
    first = own[0]
    node = first.text("numa_node")
    yield Finding("card", "ok", f"{BLUEFIELDS[first.device]} at {first.address}, NUMA node {node or 'unknown'}")
    yield _driver(first)
    yield _link(first)
    yield _mode(machine, first)
    sound = machine.path("/sys/class/net/tmfifo_net0").exists()
    remedy = "start rshim, of DOCA-Host: 'systemctl enable --now rshim'; or reach the card by its own port"
    yield Finding.of("way to the card", sound, "tmfifo_net0" if sound else "no interface tmfifo_net0", remedy)
    yield from _iommu(first)


def doca(machine: Machine) -> Iterator[Finding]:
    """DOCA's libraries: on the card to drive its accelerators, on the host to open memory for them."""
    if not machine.is_bluefield and not cards(machine):
        return
    modules = {path.stem: path for path in machine.find("/opt/mellanox/doca/lib/*/pkgconfig/doca-*.pc")}
    missing = [name for name in ("doca-common", "doca-dma", "doca-compress") if name not in modules]
    if not missing:
        version = re.search(r"^Version:\s*((\d+)\S*)", modules["doca-common"].read_text(), re.MULTILINE)
        if version is None or int(version[2]) >= DOCA_MAJOR_MIN:
            yield Finding("DOCA", "ok", version[1] if version else "of unknown version")
        else:
            yield Finding("DOCA", "failed", version[1], f"flash an image with DOCA {DOCA_MAJOR_MIN}.0 or newer")
    elif machine.find("/opt/mellanox/doca/lib/*/libdoca_common.so*"):
        yield Finding("DOCA", "ok", "libraries, without what is needed to build with them")
    else:
        where = "the card's image" if machine.is_bluefield else "DOCA-Host"
        packages = " ".join(f"lib{name.replace('doca-', 'doca-sdk-')}-dev" for name in missing)
        yield Finding("DOCA", "failed", f"no {', '.join(missing)}", f"install {where}, then apt-get install {packages}")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Check GPUs, the card's access to their memory, and the path to them."""
    own = cards(machine)
    found = [function for function in functions(machine) if function.is_gpu]
    if not own:
        return
    if not found:
        yield Finding("GPU", "ok", "none: KV is delivered to host memory")
        return
    yield Finding("GPU", "ok", ", ".join(function.address for function in found))
    yield _peer_memory(machine)
    for gpu in found:
        yield _path(own[0], gpu)
        yield _redirection(own[0], gpu)


def _driver(card: Function) -> Finding:
    driver = card.path / "driver"
    name = driver.resolve().name if driver.exists() else "none"
    remedy = "install DOCA-Host; while the card boots (minutes), the driver waits: see dmesg"
    return Finding.of("card's driver", name == "mlx5_core", name, remedy, "failed")


def _link(card: Function) -> Finding:
    speed, width = card.text("current_link_speed"), card.text("current_link_width")
    speed_max, width_max = card.text("max_link_speed"), card.text("max_link_width")
    sound = (speed, width) == (speed_max, width_max)
    found = f"{speed or '?'} x{width or '?'}" + ("" if sound else f", of {speed_max} x{width_max}")
    return Finding.of("card's link", sound, found, "use another slot, or change the BIOS settings of this one")


def _mode(machine: Machine, card: Function) -> Finding:
    """Check for DPU mode or NIC mode: a setting of the firmware, which only NVIDIA's tool reads."""
    question = f"mlxconfig -d {card.address} q INTERNAL_CPU_OFFLOAD_ENGINE"
    if not machine.is_this_one or shutil.which("mlxconfig") is None:
        found = "unknown: mlxconfig is not installed"
        return Finding("card's mode", "warning", found, f"install mft, then, as root: {question}")
    done = subprocess.run(question.split(), capture_output=True, text=True, timeout=60, check=False)
    answer = re.search(r"INTERNAL_CPU_OFFLOAD_ENGINE\s+(ENABLED|DISABLED)", done.stdout)
    if answer is None:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        return Finding("card's mode", "warning", f"unknown: mlxconfig printed {said!r}", f"as root: {question}")
    if answer[1] == "ENABLED":
        return Finding("card's mode", "ok", "DPU mode")
    remedy = f"as root: mlxconfig -d {card.address} s INTERNAL_CPU_OFFLOAD_ENGINE=0, then switch the host off and on"
    return Finding("card's mode", "failed", "NIC mode: its cores and accelerators are off", remedy)


def _iommu(card: Function) -> Iterator[Finding]:
    kind = card.text("iommu_group/type")
    found = {"": "off", "identity": "on, passing through"}.get(kind, f"on, translating ({kind})")
    remedy = "boot with iommu=pt: the card's writes to a GPU go to the processor to be translated"
    yield Finding.of("IOMMU", kind in ("", "identity"), found, remedy)


def _peer_memory(machine: Machine) -> Finding:
    """Check the two ways to open a GPU's memory for the card; one is enough, and the first is tried first."""
    ways = []
    driver = machine.text("/proc/driver/nvidia/version")
    kernel = re.match(r"(\d+)\.(\d+)", machine.text("/proc/sys/kernel/osrelease"))
    if "Open Kernel Module" in driver and kernel and (int(kernel[1]), int(kernel[2])) >= DMABUF_KERNEL:
        ways.append("DMA-BUF")
    if machine.path("/sys/module/nvidia_peermem").exists():
        ways.append("nvidia-peermem")
    if not driver:
        remedy = "install it: without it the card cannot reach the GPU"
        return Finding("GPU memory", "warning", "no NVIDIA driver is loaded", remedy)
    remedy = "modprobe nvidia-peermem, or use NVIDIA's open kernel modules; until then KV passes through host memory"
    return Finding.of("GPU memory", bool(ways), ", ".join(ways) or "neither DMA-BUF nor nvidia-peermem", remedy)


def _path(card: Function, gpu: Function) -> Finding:
    between = relation(card, gpu)
    found = {
        "switch": "one PCIe switch",
        "root complex": "through the processor's root complex",
        "processors": "through the link between processors",
    }[between]
    slot = "put both below one PCIe switch, or accept a lower bandwidth (docs/guides/bluefield.md has the measurement)"
    return Finding.of(f"path to GPU {gpu.address}", between == "switch", found, slot)


def _redirection(card: Function, gpu: Function) -> Finding:
    what = f"ACS to GPU {gpu.address}"
    try:
        bridges = redirecting_bridges(card, gpu)
    except PermissionError:
        return Finding(what, "warning", "unknown: only root may read it", "run the doctor as root")
    if not bridges:
        return Finding(what, "ok", "no bridge redirects")
    commands = "; ".join(f"setpci -s {address} ECAP_ACS+6.w=0000" for address in bridges)
    remedy = f"switch ACS off in the BIOS, or as root after each boot, unless it isolates virtual machines: {commands}"
    return Finding(what, "warning", f"redirected to the root complex by {', '.join(bridges)}", remedy)
