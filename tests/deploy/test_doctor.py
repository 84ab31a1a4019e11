"""``shadowserve doctor`` on synthetic machines: a host with a card and a GPU, a card, and a machine without either."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from machine import NEVER_S
from machines import CARD, GPU, acs, bluefield, doca, host_with_card, write

from shadowserve import native
from shadowserve_tools import main
from shadowserve_tools.doctor import host
from shadowserve_tools.doctor.finding import Machine
from shadowserve_tools.doctor.pci import functions

REPOSITORY = Path(__file__).parents[2]
DEPLOYED = REPOSITORY / "scripts" / "bluefield"


def doctor(root: Path, *arguments: str) -> dict[str, Any]:
    """Return the report. tests/tools/test_cli.py covers findings about this process and running programs."""
    done = CliRunner().invoke(main, ["doctor", "--json", "--root", str(root), *arguments])
    report: dict[str, Any] = json.loads(done.output)
    assert done.exit_code == any(finding["state"] == "failed" for finding in report["findings"])
    report["findings"] = {finding["what"]: finding for finding in report["findings"]}
    return report


def finding(root: Path, what: str, *arguments: str) -> tuple[str, str, str]:
    found = doctor(root, *arguments)["findings"][what]
    return found["state"], found["found"], found["remedy"]


def deployed(root: Path) -> Path:
    bluefield(root)
    for name in ("xlio.env", "libxlio.conf"):
        write(root, f"etc/shadowserve/{name}", (DEPLOYED / name).read_text())
    for name in ("system.slice", "user.slice"):
        write(root, f"sys/fs/cgroup/{name}/cpuset.cpus.effective", "0-13")
    write(root, "etc/systemd/system/shadowserve-dpu.service", "")
    link = root / "etc/systemd/system/multi-user.target.wants/shadowserve-dpu.service"
    link.parent.mkdir()
    link.symlink_to("/etc/systemd/system/shadowserve-dpu.service")
    return root


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The part of the card's configuration that the doctor compares with the machine."""
    path = tmp_path / "dpu.yaml"
    path.write_text("dpu: {net_cores: [14, 15], storage: '127.0.0.1:6380'}\n")
    return path


# ---- Roles -----------------------------------------------------------------------------------------------------------


def test_a_bare_machine_is_a_host_whose_data_plane_is_emulated(tmp_path: Path) -> None:
    report = doctor(tmp_path)
    assert report["role"] == "host"
    assert report["findings"]["card"]["state"] == "ok" and "no BlueField" in report["findings"]["card"]["found"]
    assert not {"GPU", "DOCA", "card's mode", "XLIO"} & set(report["findings"])


def test_the_role_of_a_bluefield_is_detected_and_can_be_configured(tmp_path: Path) -> None:
    card = bluefield(tmp_path / "card")
    assert doctor(card)["role"] == "bluefield"
    assert {"XLIO", "image"} & set(doctor(card, "--role", "storage")["findings"]) == set()
    (tmp_path / "bare").mkdir()
    state, _, remedy = finding(tmp_path / "bare", "image", "--role", "bluefield")
    assert state == "failed" and "on the card" in remedy


def test_a_configuration_that_cannot_be_used_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("dpu: {storrage: a}\n")
    state, found, _ = finding(tmp_path, "configuration", "--role", "bluefield", "--config", str(path))
    assert state == "failed" and "did you mean 'storage'" in found


def test_without_a_file_the_doctor_reads_that_of_the_installed_service(tmp_path: Path) -> None:
    """scripts/storage/install prints this command."""
    write(tmp_path, "etc/shadowserve/storage.yaml", "storage: {port: 1}")
    write(tmp_path, "etc/systemd/system/shadowserve-storage.service", "")
    found = doctor(tmp_path, "--role", "storage")["findings"]
    assert found["configuration"]["found"].endswith("/etc/shadowserve/storage.yaml")
    assert "127.0.0.1:1:" in found["storage server"]["found"]
    assert found["storage server"]["remedy"] == "systemctl start shadowserve-storage"


# ---- A storage node --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "built", "state", "text"),
    [
        (True, True, "ok", "io_uring"),
        (False, True, "warning", "io_uring_disabled"),
        (False, False, "warning", "liburing-dev"),
    ],
)
def test_how_devices_are_accessed_is_reported(
    available: bool, built: bool, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "block_access_available", lambda _: available)
    monkeypatch.setattr(native, "block_access_built", lambda _: built)
    found = finding(tmp_path, "device access", "--role", "storage")
    assert found[0] == state and text in found[1] + found[2]


def test_nvme_namespaces_are_there_with_the_rights_to_use_them(tmp_path: Path) -> None:
    for name in ("ng0n1", "nvme0n1", "ng0n2"):
        write(tmp_path, f"dev/{name}", "")
    assert finding(tmp_path, "NVMe nvme0n1", "--role", "storage")[0] == "ok"
    state, _, remedy = finding(tmp_path, "NVMe nvme0n2", "--role", "storage")
    assert state == "warning" and "nvme0n2" in remedy


def test_devices_and_memory_that_a_server_could_not_have_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:  2097152 kB")
    write(tmp_path, "dev/nvme1n1", "")
    (tmp_path / "var").mkdir()
    places = {"there": "/dev/nvme1n1", "made": "{path: /var/pool, size: 1 MiB}", "folder": "/var"}
    places |= {"absent": "/dev/nvme2n1", "nowhere": "{path: /srv/pool, size: 1 MiB}"}
    places |= {"large": "{path: /var/large, size: 900 PiB}"}
    path = tmp_path / "storage.yaml"

    def state(what: str, devices: str = "[]", budget: str = "1 GiB") -> tuple[str, str]:
        path.write_text(f"storage: {{memory_budget_bytes: {budget}, devices: {devices}}}")
        found, _, remedy = finding(tmp_path, what, "--role", "storage", "--config", str(path))
        return found, remedy

    assert [state("memory", budget=f"{size} GiB")[0] for size in (1, 3, 9)] == ["ok", "warning", "failed"]
    found = {
        name: state(f"device {place.removeprefix('{path: ').partition(',')[0]}", f"[{place}]")
        for name, place in places.items()
    }
    assert [name for name, (what, _) in found.items() if what == "ok"] == ["there", "made"]
    assert "mkdir -p" in found["nowhere"][1] and "give its size" in found["absent"][1]
    assert "make room" in found["large"][1]


# ---- A host with a card ----------------------------------------------------------------------------------------------


def test_a_host_that_is_as_it_should_be(tmp_path: Path) -> None:
    findings = doctor(host_with_card(tmp_path))["findings"]
    about_the_card = {
        "card", "card's driver", "card's link", "way to the card", "IOMMU", "DOCA", "GPU", "GPU memory",
        f"path to GPU {GPU}", f"ACS to GPU {GPU}",
    }  # fmt: skip
    assert {what: findings[what]["state"] for what in about_the_card} == dict.fromkeys(about_the_card, "ok")
    assert findings["card"]["found"] == f"BlueField-3 at {CARD}, NUMA node 0"  # and not its virtual function
    assert findings["GPU memory"]["found"] == "DMA-BUF, nvidia-peermem"
    assert "on the card" in findings["data plane"]["remedy"] and "storage server" not in findings


def remove(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    return change


def text(name: str, value: str) -> Callable[[Path], None]:
    return lambda root: write(root, name, value)


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda root: [change(root) for change in changes] and None


OF_CARD = f"sys/bus/pci/devices/{CARD}"
PROPRIETARY = text("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15")
NO_PEERMEM = remove("sys/module/nvidia_peermem")
OLD_KERNEL = text("proc/sys/kernel/osrelease", "5.4.0-1-generic")
HOST_FAULTS = {
    "no driver": (remove(f"{OF_CARD}/driver"), "card's driver", "failed", "DOCA-Host"),
    "half a link": (text(f"{OF_CARD}/current_link_width", "8"), "card's link", "warning", "slot"),
    "no rshim": (remove("sys/class/net/tmfifo_net0"), "way to the card", "warning", "rshim"),
    "IOMMU translates": (text(f"{OF_CARD}/iommu_group/type", "DMA-FQ"), "IOMMU", "warning", "iommu=pt"),
    "no DOCA": (remove("opt/mellanox"), "DOCA", "failed", "libdoca-sdk-common-dev"),
    "no NVIDIA driver": (remove("proc/driver/nvidia"), "GPU memory", "warning", "install it"),
    "no way into the GPU": (both(PROPRIETARY, NO_PEERMEM), "GPU memory", "warning", "modprobe nvidia-peermem"),
    "an old kernel": (both(OLD_KERNEL, NO_PEERMEM), "GPU memory", "warning", "modprobe nvidia-peermem"),
    "nvidia-peermem alone": (PROPRIETARY, "GPU memory", "ok", "nvidia-peermem"),
    "another system, whose mode is not asked of this one": (lambda _: None, "card's mode", "warning", ""),
}


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_the_doctor_says_what_to_do_about_a_host_that_lacks_something(tmp_path: Path, fault: str) -> None:
    change, what, state, remedy = HOST_FAULTS[fault]
    change(host_with_card(tmp_path))
    found = finding(tmp_path, what)
    assert found[0] == state and remedy in found[1 if state == "ok" else 2], found


def test_a_gpu_below_another_root_port_is_reached_by_the_processor(tmp_path: Path) -> None:
    host_with_card(tmp_path, gpu_below_switch=False)
    assert finding(tmp_path, f"path to GPU {GPU}")[:2] == ("warning", "through the processor's root complex")
    write(tmp_path / "sys/bus/pci/devices" / GPU, "numa_node", "1")
    assert finding(tmp_path, f"path to GPU {GPU}")[:2] == ("warning", "through the link between processors")


@pytest.mark.parametrize(
    ("control", "redirects"), [(0x00, False), (0x01, False), (0x04, True), (0x08, True), (0x1D, True)]
)
def test_acs_redirection_is_found_in_the_switch_between_card_and_gpu(
    tmp_path: Path, control: int, redirects: bool
) -> None:
    host_with_card(tmp_path, control=control)
    state, found, remedy = finding(tmp_path, f"ACS to GPU {GPU}")
    assert state == ("warning" if redirects else "ok")
    for bridge in ("0000:3b:10.0", "0000:3b:11.0"):
        assert (bridge in found and f"setpci -s {bridge}" in remedy) == redirects


@pytest.mark.parametrize(
    ("bridge", "space", "expected"),
    [
        ("3a:00.0", acs(0x1D), ("ok", "")),  # above the switch that both are below
        ("3b:10.0", acs(0)[:64], ("warning", "run the doctor as root")),  # only root may read the rest
        ("3b:10.0", b"\0" * 4096, ("ok", "")),
        ("3b:10.0", b"\xff" * 4096, ("ok", "")),
        ("3b:10.0", acs(0x1D)[:0x148], ("ok", "")),
        ("3b:10.0", acs(0)[:0x100] + b"\1\0\1\x10" * 64, ("ok", "")),
    ],
    ids=["above the switch", "only root may read it", "zeros", "ones", "cut off", "endless"],
)
def test_acs_that_does_not_matter_or_is_not_there_is_none_and_unreadable_acs_is_not_taken_for_off(
    tmp_path: Path, bridge: str, space: bytes, expected: tuple[str, str]
) -> None:
    host_with_card(tmp_path)
    (tmp_path / f"sys/bus/pci/devices/0000:{bridge}/config").write_bytes(space)
    assert finding(tmp_path, f"ACS to GPU {GPU}")[::2] == expected


MODES = {
    "DPU mode": ("INTERNAL_CPU_OFFLOAD_ENGINE  ENABLED(0)", "ok"),
    "NIC mode: its cores and accelerators are off": ("INTERNAL_CPU_OFFLOAD_ENGINE  DISABLED(1)", "failed"),
    "unknown: mlxconfig printed '-E- Failed to open device'": ("-E- Failed to open device", "warning"),
}


@pytest.mark.parametrize("found", MODES)
def test_the_mode_of_the_card_is_what_mlxconfig_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    answer, state = MODES[found]
    host_with_card(tmp_path / "machine")
    tool = tmp_path / "bin" / "mlxconfig"
    write(
        tmp_path, "bin/mlxconfig", f'#!/bin/sh\n[ "$*" = "-d {CARD} q INTERNAL_CPU_OFFLOAD_ENGINE" ] && echo "{answer}"'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(Machine, "is_this_one", True)
    modes = [each for each in host.card(Machine(tmp_path / "machine")) if each.what == "card's mode"]
    assert [(each.state, each.found) for each in modes] == [(state, found)]


def test_the_functions_of_this_very_machine_can_be_read() -> None:
    found = functions(Machine(Path("/")))
    assert len(found) == len(list(Path("/sys/bus/pci/devices").glob("*")))


# ---- A card ----------------------------------------------------------------------------------------------------------


def test_a_card_that_is_as_it_should_be(tmp_path: Path, config: Path) -> None:
    findings = doctor(deployed(tmp_path), "--config", str(config))["findings"]
    about_the_card = {
        "configuration", "image", "card", "Arm cores", "DOCA", "huge pages", "transparent huge pages", "XLIO",
        "XLIO's rules", "isolated cores", "unit",
    }  # fmt: skip
    assert {what: findings[what]["state"] for what in about_the_card} == dict.fromkeys(about_the_card, "ok")
    assert findings["card"]["found"] == "BlueField-3 at 0000:03:00.0, 0000:03:00.1"
    assert findings["Arm cores"]["found"] == "16 x Cortex-A78AE"
    assert findings["DOCA"]["found"] == "3.0.0"
    assert findings["data plane"]["remedy"] == "systemctl start shadowserve-dpu"


HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
CARD_FAULTS = {
    "NIC mode": (remove("sys/bus/pci/devices"), "card", "failed", "DPU mode"),
    "an old DOCA": (lambda root: doca(root, "aarch64", "2.9.1"), "DOCA", "failed", "3.0 or newer"),
    "a BlueField-2": (text("sys/bus/pci/devices/0000:03:00.0/device", "0xa2d6"), "card", "warning", "not been tested"),
    "old cores": (
        text("proc/cpuinfo", "Features\t: fp asimd crc32\nCPU part\t: 0xd08"), "Arm cores", "warning", "NEON"
    ),
    "fewer cores": (
        text("proc/cpuinfo", "Features\t: crc32 asimdhp asimddp\nCPU part\t: 0xd42"), "Arm cores", "warning", "divide"
    ),
    "no DOCA": (remove("opt/mellanox"), "DOCA", "failed", "apt-get install libdoca-sdk-common-dev"),
    "no huge pages": (text(f"{HUGE}/nr_overcommit_hugepages", "0"), "huge pages", "warning", "=640"),
    "reserved huge pages": (
        both(text(f"{HUGE}/nr_overcommit_hugepages", "0"), text(f"{HUGE}/free_hugepages", "512")),
        "huge pages", "ok", "",
    ),
    "a huge page too few": (
        both(text(f"{HUGE}/nr_overcommit_hugepages", "0"), text(f"{HUGE}/free_hugepages", "511")),
        "huge pages", "warning", "=640",
    ),
    "small pages": (
        text("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
        "transparent huge pages", "warning", "madvise",
    ),
    "no XLIO": (remove("usr/lib/libxlio.so"), "XLIO", "warning", "take LD_PRELOAD out"),
    "XLIO not preloaded": (remove("etc/shadowserve/xlio.env"), "XLIO", "warning", "scripts/bluefield/install"),
    "XLIO commented out": (
        text("etc/shadowserve/xlio.env", "#LD_PRELOAD=libxlio.so"), "XLIO", "warning", "scripts/bluefield/install"
    ),
    "XLIO takes gRPC": (
        text("etc/shadowserve/libxlio.conf", "use xlio tcp_client *:6380:*:*"), "XLIO's rules", "warning", "use os"
    ),
    "a slice on the cores": (
        text("sys/fs/cgroup/user.slice/cpuset.cpus.effective", "0-15"), "isolated cores", "warning", "AllowedCPUs"
    ),
    "no cpusets": (remove("sys/fs/cgroup"), "isolated cores", "warning", "version 2"),
    "isolcpus instead": (
        both(remove("sys/fs/cgroup"), text("sys/devices/system/cpu/isolated", "12,14-15")), "isolated cores", "ok", ""
    ),
    "too few cores": (text("sys/devices/system/cpu/online", "0-7"), "net_cores", "failed", "divide the 8 existing"),
    "not installed": (remove("etc/systemd/system/shadowserve-dpu.service"), "unit", "warning", "install"),
    "not enabled": (remove("etc/systemd/system/multi-user.target.wants"), "unit", "warning", "systemctl enable"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CARD_FAULTS)
def test_the_doctor_says_what_to_do_about_a_card_that_lacks_something(tmp_path: Path, config: Path, fault: str) -> None:
    change, what, state, remedy = CARD_FAULTS[fault]
    change(deployed(tmp_path))
    found = finding(tmp_path, what, "--config", str(config))
    assert found[0] == state and remedy in found[2], found


def test_xlio_must_know_the_port_that_storage_is_on(tmp_path: Path, config: Path) -> None:
    deployed(tmp_path)
    config.write_text("dpu: {storage: '127.0.0.1:7000'}\n")
    state, found, remedy = finding(tmp_path, "XLIO's rules", "--config", str(config))
    assert state == "warning" and "[6380]" in found and "*:7000:*:*" in remedy


# ---- Engines ---------------------------------------------------------------------------------------------------------


def test_a_card_whose_c_core_only_emulates_doca_is_no_use(tmp_path: Path) -> None:
    state, found, remedy = finding(bluefield(tmp_path / "card"), "accelerators")
    assert state == "failed" and "without DOCA" in found and "scripts/bluefield/install" in remedy
    (tmp_path / "bare").mkdir()
    assert finding(tmp_path / "bare", "accelerators", "--role", "bluefield")[0] == "warning"


@pytest.mark.parametrize(("profile", "state"), [("bf3", "ok"), ("none", "failed")])
def test_accelerators_are_opened_to_see_that_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, state: str
) -> None:
    """The emulator stands in for a card's DOCA."""
    backend = dataclasses.replace(native.backends()["doca"], emulated=False)
    monkeypatch.setattr("shadowserve.native.backends", lambda: {"doca": backend})
    monkeypatch.setenv("DOCA_EMULATOR_PROFILE", profile)
    found = finding(bluefield(tmp_path), "accelerators")
    assert found[0] == state and (backend.description in found[1]) == (state == "ok"), found


# ---- Certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> tuple[Path, Path]:
    """A card with certificates, and a configuration with their paths."""
    root = bluefield(tmp_path / "card")
    make_certificates(root / "etc/tls")
    config = tmp_path / "dpu.yaml"
    config.write_text(
        "dpu: {tls_cert: /etc/tls/server.crt, tls_key: /etc/tls/server.key, tls_client_ca: /etc/tls/ca.crt}"
    )
    return root, config


def make_certificates(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, REPOSITORY / "scripts/make-certificates", folder, *arguments], check=True, timeout=NEVER_S
    )


def test_certificates_that_are_as_they_should_be(secured: tuple[Path, Path]) -> None:
    root, config = secured
    findings = doctor(root, "--config", str(config))["findings"]
    assert findings["tls_client_ca"]["state"] == findings["tls_cert"]["state"] == "ok"
    assert re.search(r"for another 36\d days$", findings["tls_cert"]["found"]) and "tls_key" not in findings


def test_a_certificate_that_ends_soon_and_a_key_that_everyone_can_read_are_reported(secured: tuple[Path, Path]) -> None:
    root, config = secured
    for days, state in ((29, "warning"), (-1, "failed")):
        make_certificates(root / "etc/tls", f"--days={days}")
        assert finding(root, "tls_cert", "--config", str(config))[0] == state
    (root / "etc/tls/server.key").chmod(0o644)
    assert finding(root, "tls_key", "--config", str(config))[::2] == ("warning", "chmod o= /etc/tls/server.key")


@pytest.mark.parametrize(
    ("name", "content", "what", "message"),
    [
        ("ca.crt", None, "tls_client_ca", "cannot read"),
        ("ca.crt", "nothing", "tls_client_ca", "ca.crt"),
        ("server.key", None, "tls_cert", "cannot read"),
        ("server.crt", "client.crt", "tls_cert", "is not the key of"),
    ],
)
def test_certificates_that_are_missing_or_mixed_up_are_reported(
    secured: tuple[Path, Path], name: str, content: str | None, what: str, message: str
) -> None:
    root, config = secured
    (root / "etc/tls" / name).unlink()
    if content is not None:
        other = root / "etc/tls" / content
        (root / "etc/tls" / name).write_bytes(other.read_bytes() if other.exists() else content.encode())
    state, found, remedy = finding(root, what, "--config", str(config))
    assert state == "failed" and message in found and "scripts/make-certificates" in remedy


# ---- Printed report --------------------------------------------------------------------------------------------------


def test_what_people_see_is_never_cut(tmp_path: Path) -> None:
    host_with_card(tmp_path, control=0x1D)
    environment = {**os.environ, "COLUMNS": "60"}
    command = [sys.executable, "-m", "shadowserve_tools", "doctor", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=False, env=environment)
    assert "\u2026" not in done.stdout and "ECAP_ACS+6.w=0000" in done.stdout
