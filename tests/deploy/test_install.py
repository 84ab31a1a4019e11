"""``scripts/bluefield/install`` on a temporary copy of this machine's system, with a card made of files.

Only the card is synthetic: its functions in /sys are files, and XLIO is a library that only prints a line. apt, Python,
pip, useradd, systemd's tools and the installed daemon are real.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import NEVER_S
from machines import bluefield
from throwaway import OWN, Throwaway

from shadowserve_tools.processes import started

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "scripts" / "bluefield"
INSTALL = FOLDER / "install"
UNIT = "/etc/systemd/system/shadowserve-dpu.service"

needs_shellcheck = pytest.mark.skipif(
    shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None,
    reason="shellcheck is not installed",
)


@pytest.fixture(scope="module")
def installed(system: Throwaway, wheels: Path) -> Throwaway:
    add_card(system)
    install(system, "--wheels", wheels)
    return system


@pytest.fixture(scope="module")
def secured(installed: Throwaway) -> Throwaway:
    """The installation, with certificates that its user can read."""
    keys = installed.root / "etc/shadowserve/tls"
    installed.outside(sys.executable, REPOSITORY / "scripts/make-certificates", keys)
    installed.inside("chgrp", "-R", "shadowserve", "/etc/shadowserve/tls")
    installed.inside("chmod", "640", "/etc/shadowserve/tls/server.key")
    return installed


def has_card(system: Throwaway) -> bool:
    return (system.view / "usr/lib/libxlio.so").exists()


def add_card(system: Throwaway) -> None:
    """Add a card to the system, and an XLIO that prints a line when it is loaded."""
    if has_card(system):
        return
    made = bluefield(system.view.parent / "card")
    for name in ("sys", "etc", "usr", "opt"):
        shutil.copytree(made / name, system.view / name, symlinks=True, dirs_exist_ok=True)
    source, library = system.view / "xlio.c", system.view / "usr/lib/libxlio.so"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) static void load(void)"
        '{ if (write(2, "XLIO is loaded\\n", 15)) {} }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=NEVER_S)
    source.unlink()


def install(system: Throwaway, *arguments: str | Path, code: int = 0) -> str:
    """Run the installer for a card with 16 cores."""
    return system.install(INSTALL, "--cores", "16", *arguments, code=code)


# ---- Before the first change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--nothing"], ["--cores"], ["--cores", "many"], ["--purge"], ["--root", "/nowhere"]], ids=" ".join
)
def test_a_command_line_that_cannot_be_used_ends_with_2(arguments: list[str]) -> None:
    done = subprocess.run([INSTALL, *arguments], capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert done.returncode == 2 and done.stderr.startswith("install: ")


def test_without_a_card_nothing_is_changed_and_the_reason_is_printed(system: Throwaway, wheels: Path) -> None:
    if has_card(system):
        pytest.fail("this test must come before those with a card")
    before = system.files()
    said = install(system, "--wheels", wheels, code=1)
    assert "failed   card: this is not a BlueField's own system" in said and "Nothing was changed" in said
    assert system.files() == before


def test_a_dry_run_changes_nothing_and_says_what_it_would(system: Throwaway, wheels: Path) -> None:
    add_card(system)
    before = system.files()
    said = install(system, "--dry-run", "--wheels", wheels)
    assert "ok       card: BlueField-3 at 0000:03:00.0" in said
    assert f"would write: {UNIT}" in said and "would run: useradd" in said
    assert system.files() == before


CARD_LACKS = {
    "no function": ("mv {root}/sys/bus/pci/devices {root}/hidden", "mv {root}/hidden {root}/sys/bus/pci/devices",
        "failed   card: no BlueField function on PCI; is it in DPU mode?"),
    "no DOCA": ("mv {root}/opt/mellanox {root}/hidden", "mv {root}/hidden {root}/opt/mellanox",
        "failed   DOCA: /opt/mellanox/doca has no libdoca_common.so"),
    "an old DOCA": ("sed -i s/3.0.0/2.9.1/ {root}/opt/mellanox/doca/lib/*/pkgconfig/*.pc",
        "sed -i s/2.9.1/3.0.0/ {root}/opt/mellanox/doca/lib/*/pkgconfig/*.pc",
        "failed   DOCA: 2.9.1, and 3.0 is needed"),
}  # fmt: skip


@pytest.mark.parametrize("lack", CARD_LACKS)
def test_what_is_missing_is_said_before_anything_is_changed(system: Throwaway, wheels: Path, lack: str) -> None:
    add_card(system)
    harm, repair, message = CARD_LACKS[lack]
    system.outside("sh", "-c", harm.format(root=system.root))
    try:
        before = system.files()
        assert message in install(system, "--wheels", wheels, code=1)
        assert system.files() == before
    finally:
        system.outside("sh", "-c", repair.format(root=system.root))


def test_a_folder_without_our_wheel_is_no_source(system: Throwaway, tmp_path: Path) -> None:
    add_card(system)
    assert "failed   wheels: no shadowserve-*.whl" in install(system, "--wheels", tmp_path, code=1)


# ---- The installed files ---------------------------------------------------------------------------------------------


def test_it_puts_everything_where_it_belongs(installed: Throwaway) -> None:
    files = installed.own_files()
    for name in ("dpu.yaml", "dpu.env", "xlio.env", "libxlio.conf"):
        assert files[f"/etc/shadowserve/{name}"]
    assert files["/etc/shadowserve/dpu.yaml"] == (REPOSITORY / "configs/bluefield.yaml").read_bytes()
    assert files[UNIT] == (FOLDER / "shadowserve-dpu.service").read_bytes()
    assert files["/etc/systemd/system/multi-user.target.wants/shadowserve-dpu.service"] == UNIT
    for unit, section in (("system.slice", "Slice"), ("user.slice", "Slice"), ("init.scope", "Scope")):
        dropped = files[f"/etc/systemd/system/{unit}.d/60-shadowserve.conf"]
        assert isinstance(dropped, bytes) and dropped.endswith(f"[{section}]\nAllowedCPUs=0-13\n".encode())
    assert not [name for name in files if name.startswith(("/var", "/tmp"))]
    mode = installed.inside("stat", "-c", "%a %U:%G", "/etc/shadowserve/dpu.env", "/etc/shadowserve/tls").stdout
    assert mode.split("\n")[:2] == ["640 root:root", "750 root:shadowserve"]


def test_installing_again_changes_nothing_and_keeps_what_was_edited(installed: Throwaway, wheels: Path) -> None:
    edited = installed.view / "etc/shadowserve/libxlio.conf"
    installed.outside("sed", "-i", "s/6380/6381/", installed.root / "etc/shadowserve/libxlio.conf")
    before = installed.own_files()
    said = install(installed, "--wheels", wheels)
    after = installed.own_files()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not {name for name in changed if "/opt/shadowserve/venv/lib" not in name}, changed
    assert b"6381" in edited.read_bytes()
    assert "kept: /etc/shadowserve/dpu.yaml" in said and f"unchanged: {UNIT}" in said and "writing" not in said


def test_systemd_takes_the_units_without_a_word(installed: Throwaway) -> None:
    units = [UNIT, "/etc/systemd/system/shadowserve.slice", "system.slice", "user.slice"]
    done = installed.inside("systemd-analyze", "verify", "--man=no", *units)
    # systemd-analyze may report problems of a distribution's other units.
    assert not [line for line in (done.stdout + done.stderr).splitlines() if OWN.search(line)], done.stderr


def test_the_unit_leaves_the_daemon_little_to_harm(installed: Throwaway) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", UNIT]
    done = installed.inside(*command, check=False)
    assert done.returncode == 0, done.stdout[-400:]


def test_the_unit_lets_the_daemon_reach_the_card() -> None:
    """Options that forbid devices prevent access. Options that allow one device (a clock) also forbid all others."""
    text = (FOLDER / "shadowserve-dpu.service").read_text()
    assert not re.findall(r"^(?:PrivateDevices|DevicePolicy|DeviceAllow|ProtectClock)=", text, re.MULTILINE)


def test_the_daemon_that_is_installed_runs_as_the_unit_runs_it(secured: Throwaway, tmp_path: Path) -> None:
    """With the unit's user, capability and environment files, and XLIO preloaded, but with this machine's cores."""
    unit = (secured.view / UNIT.lstrip("/")).read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    environment = {}
    for name in re.findall(r"^EnvironmentFile=-(\S+)$", unit, re.MULTILINE):
        text = (secured.view / name.lstrip("/")).read_text()
        environment |= dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert environment["LD_PRELOAD"] == "libxlio.so"
    here = {
        f"SHADOWSERVE_DPU_{stage.upper()}_CORES": "auto"
        for stage in ("net", "decompress", "dequantize", "dma", "store")
    }
    here |= {
        "SHADOWSERVE_DPU_LISTEN": "127.0.0.1:0",
        "SHADOWSERVE_DPU_STORAGE": "127.0.0.1:1",
        "SHADOWSERVE_DPU_METRICS_PORT": "0",
    }
    settings = [f"{name}={value}" for name, value in (environment | here).items()]
    rights = ["--reuid=shadowserve", "--regid=shadowserve", "--clear-groups", "--no-new-privs"]
    rights += ["--inh-caps=-all,+net_raw", "--ambient-caps=-all,+net_raw", "--bounding-set=-all,+net_raw"]
    whole = [*secured.enter, "chroot", str(secured.root), "setpriv", *rights, "env", "-i", *settings]
    with started("data-plane", [*whole, *shlex.split(command)], tmp_path, timeout_s=120) as child:
        status = Path(f"/proc/{child.process.pid}/status").read_text()
        assert re.search(r"^CapAmb:\s0*2000$", status, re.MULTILINE), status  # CAP_NET_RAW is bit 13
        assert "XLIO is loaded" in child.log.read_text()
    assert child.process.returncode == 0, child.log.read_text()


def test_the_doctor_that_is_installed_finds_all_that_was_installed(secured: Throwaway) -> None:
    command = ["/opt/shadowserve/venv/bin/shadowserve", "doctor", "--json", "--config", "/etc/shadowserve/dpu.yaml"]
    nowhere = ["--storage", "127.0.0.1:1", "--data-plane", "127.0.0.1:1"]
    report = json.loads(secured.inside(*command, *nowhere, check=False).stdout)
    assert report["role"] == "bluefield"
    states = {finding["what"]: finding["state"] for finding in report["findings"]}
    sound = {"C core", "configuration", "image", "card", "DOCA", "huge pages", "XLIO", "tls_cert", "unit"}
    assert {what: states[what] for what in sound} == dict.fromkeys(sound, "ok")
    assert states["accelerators"] == "failed"  # a wheel from here contains DOCA's emulator


def test_fewer_cores_are_divided_otherwise(installed: Throwaway, wheels: Path) -> None:
    """This test runs after all tests that need the original files."""
    installed.outside("rm", installed.root / "etc/shadowserve/dpu.yaml")
    install(installed, "--wheels", wheels, "--cores", "8")
    files = installed.own_files()
    text = str(files["/etc/shadowserve/dpu.yaml"])
    assert "net_cores: [6, 7]" in text and "dequantize_cores: [0, 1, 2, 3, 4, 5]" in text
    assert "CPUAffinity=0-7" in str(files[UNIT])
    assert "AllowedCPUs=0-5" in str(files["/etc/systemd/system/system.slice.d/60-shadowserve.conf"])


# ---- Removal ---------------------------------------------------------------------------------------------------------


def test_uninstalling_keeps_the_configuration_and_purging_nothing(installed: Throwaway) -> None:
    """This test runs last."""
    said = install(installed, "--uninstall")
    assert "kept: /etc/shadowserve" in said
    left = {name for name in installed.own_files() if not name.startswith("/etc/shadowserve/")}
    assert not left
    install(installed, "--uninstall", "--purge")
    assert not installed.own_files()
    assert installed.inside("id", "shadowserve", check=False).returncode != 0
    assert "Nothing" not in install(installed, "--uninstall", "--purge")  # again: no file is left, no error


@needs_shellcheck
def test_scripts_are_clean() -> None:
    folders = (FOLDER, FOLDER.parent / "storage")
    scripts = [path for folder in folders for path in folder.iterdir() if path.read_bytes().startswith(b"#!")]
    scripts.append(FOLDER.parent / "install-common")
    shellcheck = Path(sys.executable).with_name("shellcheck")
    command = [str(shellcheck) if shellcheck.exists() else "shellcheck", "--external-sources", *scripts]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert done.returncode == 0 and len(scripts) >= 3, done.stdout
