"""The storage node as a service: its unit and its installer (into a temporary system)."""

import configparser
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from throwaway import OWN, Throwaway

import shadowserve
from shadowserve_tools.processes import started

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "scripts" / "storage"
INSTALL = FOLDER / "install"
UNIT = "/etc/systemd/system/shadowserve-storage.service"


# ---- The unit --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (systemd)")
def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    text = (FOLDER / "shadowserve-storage.service").read_text()
    path = tmp_path / "shadowserve-storage.service"
    path.write_text(text.replace("/opt/shadowserve/venv/bin/shadowserve", sys.executable))  # an existing program
    for change, clean in ((text, True), (text.replace("ProtectHome=yes", "ProtectHome=maybe"), False)):
        path.write_text(change.replace("/opt/shadowserve/venv/bin/shadowserve", sys.executable))
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=False)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "shadowserve-storage" in line]
        assert (not said) is clean, said


def test_the_unit_waits_for_readiness_is_watched_and_may_lock_memory() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "shadowserve-storage.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and int(service["WatchdogSec"]) > 0
    assert service["LimitMEMLOCK"] == "infinity" and int(service["LimitNOFILE"]) > 10_000
    assert service["RestartPreventExitStatus"] == "2" and "HUP" in service["ExecReload"]
    assert service["User"] == "shadowserve" and service["NoNewPrivileges"] == "yes"


# ---- Packages --------------------------------------------------------------------------------------------------------

PACKAGE = re.compile(r"(?:lib|zlib)[a-z0-9.-]+")


def test_all_ways_to_install_know_the_same_libraries() -> None:
    """A missing header silently disables a feature in the build."""
    everywhere = (REPOSITORY / "scripts" / "install-system-packages").read_text()
    common = (REPOSITORY / "scripts" / "install-common").read_text()
    wanted = re.search(r'^build="([^"]*)"', everywhere, re.MULTILINE)
    built, run = re.search(r"needed=\(([^)]*)\)", common), re.search(r'\$wheels" \] \|\| needed=\(([^)]*)\)', common)
    assert wanted is not None and built is not None and run is not None
    headers = set(PACKAGE.findall(wanted[1])) - {"libc6-dev"}
    assert set(PACKAGE.findall(built[1])) == headers
    image = (REPOSITORY / "deploy" / "images" / "Containerfile.bluefield").read_text().replace("\\\n", "")
    lists = re.findall(r"apt-get install .*?&&", image)
    assert [set(PACKAGE.findall(packages)) for packages in lists] == [headers, set(PACKAGE.findall(run[1]))]


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="dpkg-query is not installed: not a Debian system")
def test_what_the_c_core_is_linked_with_is_installed_where_it_runs() -> None:
    common = (REPOSITORY / "scripts" / "install-common").read_text()
    library = next(
        path for path in (Path(place, "libshadowserve.so") for place in shadowserve.__path__) if path.exists()
    )
    found = subprocess.run(["ldd", library], capture_output=True, text=True, timeout=NEVER_S, check=True).stdout
    paths = [path for path in re.findall(r"=> (/\S+)", found) if not path.endswith("libdoca_emulator.so")]
    command = ["dpkg-query", "--search", *(f"*{path}" for path in paths)]
    owners = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=True).stdout
    packages = {line.split(":")[0] for line in owners.splitlines()}
    run = re.search(r'\$wheels" \] \|\| needed=\(([^)]*)\)', common)
    assert run is not None and len(paths) > 3
    assert {name.removesuffix("t64") for name in packages} - {"libc6"} <= set(run[1].split())


# ---- The installer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--nothing"], ["--root"], ["--purge"], ["--root", "/nowhere"]], ids=" ".join)
def test_a_command_line_that_cannot_be_used_ends_with_2(arguments: list[str]) -> None:
    done = subprocess.run([INSTALL, *arguments], capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert done.returncode == 2 and done.stderr.startswith("install: ")


def test_the_installer_from_the_first_look_to_the_last_trace(system: Throwaway, wheels: Path, tmp_path: Path) -> None:
    """One test, because each step needs the previous one and an installation takes seconds."""
    before = system.files()
    said = system.install(INSTALL, "--dry-run", "--wheels", wheels)
    assert f"would write: {UNIT}" in said and "would run: useradd" in said and system.files() == before
    assert "failed   wheels: no shadowserve-*.whl" in system.install(INSTALL, "--wheels", tmp_path, code=1)
    assert system.files() == before

    system.install(INSTALL, "--wheels", wheels)
    files = system.own_files()
    assert files["/etc/shadowserve/storage.yaml"] == (REPOSITORY / "configs" / "storage.yaml").read_bytes()
    assert files[UNIT] == (FOLDER / "shadowserve-storage.service").read_bytes()
    assert files["/etc/systemd/system/multi-user.target.wants/shadowserve-storage.service"] == UNIT
    mode = system.inside("stat", "-c", "%a %U:%G", "/etc/shadowserve/storage.env", "/etc/shadowserve/tls").stdout
    assert mode.split("\n")[:2] == ["640 root:root", "750 root:shadowserve"]
    verified = system.inside("systemd-analyze", "verify", "--man=no", UNIT, check=False)
    assert not [line for line in (verified.stdout + verified.stderr).splitlines() if OWN.search(line)]

    command = (FOLDER / "shadowserve-storage.service").read_text().partition("ExecStart=")[2].splitlines()[0]
    inside = [*system.enter, "chroot", str(system.root), *command.split(), "--port", "0"]
    with started("installed", inside, tmp_path, timeout_s=WAIT_MAX_S) as child:
        assert child.address.startswith("127.0.0.1:")
        child.process.send_signal(signal.SIGTERM)
        wait_for(lambda: child.process.poll() is not None)

    system.outside("sed", "-i", "s/^  port: .*/  port: 7000/", system.root / "etc/shadowserve/storage.yaml")
    said = system.install(INSTALL, "--wheels", wheels)
    assert "kept: /etc/shadowserve/storage.yaml" in said and f"unchanged: {UNIT}" in said
    assert b"port: 7000" in system.own_files()["/etc/shadowserve/storage.yaml"]  # type: ignore[operator]

    said = system.install(INSTALL, "--uninstall")
    assert "kept: /etc/shadowserve" in said
    assert {name for name in system.own_files() if not name.startswith("/etc/shadowserve/")} == set()
    system.install(INSTALL, "--uninstall", "--purge")
    assert not system.own_files()
    assert system.inside("id", "shadowserve", check=False).returncode != 0
