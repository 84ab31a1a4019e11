"""A BlueField's own system: its image, cores, memory, XLIO, and what scripts/bluefield installs."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shadowserve.errors import NativeError
from shadowserve_tools.doctor.finding import Finding, Machine
from shadowserve_tools.doctor.host import cards
from shadowserve_tools.doctor.pci import BLUEFIELDS

CORES_FULL: Final = 16
"""Of the BlueField-3 that the paper measured, and configs/bluefield.yaml is written for."""
XLIO_HUGE_BYTES: Final = 1 << 30
"""XLIO_MEMORY_LIMIT in scripts/bluefield/xlio.env."""
_TRIAL_BYTES: Final = 4 << 20
ETC: Final = "/etc/shadowserve"

# Arm's part number for A78 and A78AE (the paper says A78AE, NVIDIA A78), and the features that the NEON kernels need.
_PARTS: Final = {"0xd41": "Cortex-A78", "0xd42": "Cortex-A78AE"}
_FEATURES: Final = ("asimdhp", "asimddp", "crc32")


def card(machine: Machine) -> Iterator[Finding]:
    """Check the card's image and functions, from inside."""
    image = machine.text("/etc/mlnx-release")
    pretty = re.search(r'^PRETTY_NAME="(.*)"', machine.text("/etc/os-release"), re.MULTILINE)
    found = ", ".join(part for part in (pretty[1] if pretty else "", image) if part)
    remedy = "this is not a BlueField's own system: run the doctor on the card, or with --role host here"
    yield Finding.of("image", machine.is_bluefield, found or "unknown", remedy, "failed")
    own = cards(machine)
    if not own:
        remedy = "set DPU mode on the host (docs/guides/bluefield.md, step 2), and switch it off and on"
        yield Finding("card", "failed", "no BlueField function on PCI", remedy)
        return
    names = ", ".join(function.address for function in own)
    remedy = "only BlueField-3 also decompresses LZ4; this card has not been tested"
    yield Finding.of("card", own[0].device == 0xA2DC, f"{BLUEFIELDS[own[0].device]} at {names}", remedy)


def arm_cores(machine: Machine) -> Iterator[Finding]:
    """Check the type of the cores and the instructions that the NEON kernels use."""
    text = machine.text("/proc/cpuinfo")
    parts = re.findall(r"^CPU part\s*: (\S+)", text, re.MULTILINE)
    features = re.search(r"^Features\s*: (.*)", text, re.MULTILINE)
    if not parts or features is None:
        found = "none: /proc/cpuinfo is not that of an Arm machine"
        yield Finding("Arm cores", "warning", found, "run the doctor on the card")
        return
    missing = [feature for feature in _FEATURES if feature not in features[1].split()]
    name = _PARTS.get(parts[0], f"part {parts[0]}")
    if missing:
        remedy = "the fastest NEON kernels are unavailable: dequantizing is slower"
        yield Finding("Arm cores", "warning", f"{len(parts)} x {name} without {', '.join(missing)}", remedy)
        return
    remedy = f"divide them in {ETC}/dpu.yaml, which is for {CORES_FULL} cores"
    yield Finding.of("Arm cores", len(parts) >= CORES_FULL, f"{len(parts)} x {name}", remedy)


def accelerators(machine: Machine, device: str) -> Iterator[Finding]:
    """Check that the card's accelerators can be opened, by opening them; also while a daemon uses them."""
    from shadowserve import native

    backend = native.backends().get("doca")
    if backend is None or backend.emulated:
        remedy = "run scripts/bluefield/install with DOCA installed: it builds the C core with it"
        found = "the C core was built without DOCA: the accelerators would not be used"
        yield Finding("accelerators", "failed" if machine.is_bluefield else "warning", found, remedy)
        return
    try:
        pipeline = native.Pipeline(
            backend="doca", device=device, fused=False, decompression_bytes=_TRIAL_BYTES, store_bytes=_TRIAL_BYTES,
            dequantization_bytes=_TRIAL_BYTES, dma_source_bytes=_TRIAL_BYTES, dequantize_cores=(-1,), dma_cores=(-1,),
        )  # fmt: skip
    except NativeError as error:
        remedy = "see 'card' above; as root, or with rights to /dev/infiniband"
        yield Finding("accelerators", "failed", str(error), remedy)
        return
    with contextlib.closing(pipeline):
        yield Finding("accelerators", "ok", f"{backend.description}, on {pipeline.device}")


def huge_pages(machine: Machine) -> Iterator[Finding]:
    """Huge pages for XLIO (reserved, or available on demand) and for our own buffers (transparent ones)."""
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    free, extra = machine.number(f"{folder}/free_hugepages"), machine.number(f"{folder}/nr_overcommit_hugepages")
    enough = (free + extra) << 21 >= XLIO_HUGE_BYTES
    remedy = "sysctl vm.nr_overcommit_hugepages=640: XLIO falls back to small pages, and is slower"
    yield Finding.of("huge pages", enough, f"{free} free, {extra} on demand, of 2 MiB", remedy)
    setting = machine.text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", setting)
    name = chosen[1] if chosen else "not there"
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: the buffers' pages are small"
    yield Finding.of("transparent huge pages", name in ("always", "madvise"), name, remedy)


def xlio(machine: Machine, storage_port: int) -> Iterator[Finding]:
    """Check that XLIO is installed, preloaded, and handles the connections to storage only."""
    libraries = machine.find("/usr/lib/libxlio.so*", "/usr/lib/*/libxlio.so*", "/usr/lib64/libxlio.so*")
    preloaded = re.search(r"^LD_PRELOAD=.*libxlio\.so", machine.text(f"{ETC}/xlio.env"), re.MULTILINE)
    if not libraries:
        remedy = "apt-get install libxlio (of the card's image), then scripts/bluefield/install again"
        if preloaded:
            remedy += f"; until then take LD_PRELOAD out of {ETC}/xlio.env"
        yield Finding("XLIO", "warning", "no libxlio.so: the kernel carries the connections", remedy)
        return
    if not preloaded:
        remedy = f"scripts/bluefield/install writes {ETC}/xlio.env, which preloads it"
        yield Finding("XLIO", "warning", f"{libraries[-1].name}, not preloaded", remedy)
        return
    yield Finding("XLIO", "ok", libraries[-1].name)
    rules = machine.text(f"{ETC}/libxlio.conf")
    ports = [int(port) for port in re.findall(r"^\s*use xlio tcp_client [^:\s]+:(\d+)", rules, re.MULTILINE)]
    others = re.search(r"^\s*use os tcp_server \*:\*", rules, re.MULTILINE) is not None
    if storage_port in ports and others:
        yield Finding("XLIO's rules", "ok", f"connections to port {storage_port}, no others")
    elif not others:
        remedy = f"write 'use os tcp_server *:*' into {ETC}/libxlio.conf"
        yield Finding("XLIO's rules", "warning", "gRPC's connections also go through XLIO", remedy)
    else:
        remedy = f"write 'use xlio tcp_client *:{storage_port}:*:*' into {ETC}/libxlio.conf, before the others"
        yield Finding("XLIO's rules", "warning", f"storage is on port {storage_port}, XLIO handles {ports}", remedy)


def core_lists(machine: Machine, lists: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Check that the configured cores, -1 for any, exist. The doctor itself may have fewer."""
    there = _cores(machine.text("/sys/devices/system/cpu/online"))
    for key, cores in lists.items():
        absent = sorted(set(cores) - there - {-1})
        if absent:
            remedy = f"divide the {len(there)} existing cores again"
            yield Finding(key, "failed", f"there is no core {absent[0]}", remedy)


def isolation(machine: Machine, net_cores: list[int]) -> Iterator[Finding]:
    """Check that nothing but the data plane may run on the network threads' cores."""
    if not net_cores:
        yield Finding("isolated cores", "warning", "net_cores are not pinned", "name two in net_cores")
        return
    wanted = set(net_cores)
    booted = wanted <= _cores(machine.text("/sys/devices/system/cpu/isolated"))
    slices = ("system.slice", "user.slice")
    allowed = {name: machine.text(f"/sys/fs/cgroup/{name}/cpuset.cpus.effective") for name in slices}
    loose = [name for name, cores in allowed.items() if not cores or wanted & _cores(cores)]
    if booted or not loose:
        how = "by the kernel's isolcpus" if booted else "by slices"
        yield Finding("isolated cores", "ok", f"{net_cores}, {how}")
        return
    remedy = "scripts/bluefield/install sets AllowedCPUs; control groups must be of version 2"
    yield Finding("isolated cores", "warning", f"{net_cores} are also used by {', '.join(loose)}", remedy)


def unit(machine: Machine) -> Iterator[Finding]:
    """Check that the daemon is installed, and started at boot."""
    folder = "/etc/systemd/system"
    if not machine.path(f"{folder}/shadowserve-dpu.service").exists():
        yield Finding("unit", "warning", "no shadowserve-dpu.service", "scripts/bluefield/install")
        return
    link = machine.path(f"{folder}/multi-user.target.wants/shadowserve-dpu.service")
    enabled = link.is_symlink()  # its target is a path of that system
    found = "enabled" if enabled else "not started at boot"
    yield Finding.of("unit", enabled, found, "systemctl enable shadowserve-dpu")


def _cores(text: str) -> set[int]:
    """Return the cores of a list as the kernel writes it: ``0-3,8``."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
