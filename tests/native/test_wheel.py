"""The wheel for 64-bit Arm, cross-compiled: its tag, its contents, and the Arm code of its C core."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from machine import NEVER_S

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("shadowserve", "host_control", "dpu_dataplane", "storage_kv", "shadowserve_tools")
ELF_64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
MACHINE_AARCH64 = 183


@pytest.mark.timeout(600)
def test_the_wheel_for_arm_is_one(arm_tools: None, tmp_path: Path) -> None:
    command = [str(REPOSITORY / "scripts/build-wheel-aarch64"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    assert done.stdout.split() == [str(path)]
    assert path.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Tag: py3-none-linux_aarch64" in wheel.read(about).decode().splitlines()
        core = wheel.read("shadowserve/libshadowserve.so")
        bindings = wheel.read("shadowserve/_cffi.py")
    # The same contents as any other wheel: all sources, and the two files of the C core (tests/test_layout.py).
    sources = {path for package in PACKAGES for path in (REPOSITORY / package).rglob("*") if path.is_file()}
    kept = {str(path.relative_to(REPOSITORY)) for path in sources if "__pycache__" not in path.parts}
    kept |= {f"shadowserve_tools/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "configs").rglob("*.*")}
    assert names == kept | {"shadowserve/libshadowserve.so", "shadowserve/_cffi.py"}
    assert b"ss_isa_force" in bindings
    assert core.startswith(ELF_64_LITTLE_ENDIAN)
    assert int.from_bytes(core[18:20], "little") == MACHINE_AARCH64
    # Ubuntu 22.04, the system of DPUs, has 2.35.
    needed = {tuple(map(int, version)) for version in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", core)}
    assert max(needed) <= (2, 34), f"needs a newer C library than scripts/build-wheel-aarch64 states: {max(needed)}"
