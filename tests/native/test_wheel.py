"""The files that ``make wheels`` writes: their contents, and the libraries and CPU that the C core is for.

``scripts/test-nightly`` makes them and names their folder in WHEELS.
"""

import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("shadowserve", "host_control", "dpu_dataplane", "storage_kv", "shadowserve_tools")
C_LIBRARY = r"(ld-linux-.*|lib(c|m|dl|pthread|rt))\.so\.\d"

if "WHEELS" in os.environ:
    WHEELS = Path(os.environ["WHEELS"])

    @pytest.mark.parametrize(("architecture", "machine"), [("x86_64", "X86-64"), ("aarch64", "AArch64")])
    def test_a_wheel_has_all_that_its_c_core_needs(architecture: str, machine: str, tmp_path: Path) -> None:
        (path,) = WHEELS.glob(f"shadowserve-*_{architecture}.whl")
        glibc = re.search(r"-py3-none-manylinux_2_(\d+)_", path.name)
        assert glibc and int(glibc[1]) <= 34, f"{path.name}: not for Ubuntu 22.04 or RHEL 9"
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(tmp_path)
        names = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
        libraries = {name for name in names if name.startswith("shadowserve.libs/")}
        sources = {each for package in PACKAGES for each in (REPOSITORY / package).rglob("*") if each.is_file()}
        kept = {str(each.relative_to(REPOSITORY)) for each in sources if "__pycache__" not in each.parts}
        kept |= {f"shadowserve_tools/{each.relative_to(REPOSITORY)}" for each in (REPOSITORY / "configs").rglob("*.*")}
        built = {"shadowserve/libshadowserve.so", "shadowserve/_cffi.py"}
        assert {name for name in names - libraries if ".dist-info/" not in name} == kept | built
        assert "ss_isa_force" in (tmp_path / "shadowserve/_cffi.py").read_text()

        bundled = {Path(name).name for name in libraries}
        for library in ("isal", "lz4", "zstd", "uring", "ssl", "crypto"):
            assert [name for name in bundled if name.startswith(f"lib{library}-")]
        for name in (*libraries, "shadowserve/libshadowserve.so"):
            command = ["readelf", "-hd", tmp_path / name]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", shown))
            assert machine in shown
            assert {each for each in needed - bundled if not re.fullmatch(C_LIBRARY, each)} == set()
        licenses = {Path(name).stem for name in names if "/licenses/" in name}
        assert licenses == {"LICENSE", "libisal2", "libdeflate0", "liblz4-1", "libzstd1", "liburing2", "libssl3"}

    def test_the_source_distribution_has_what_a_build_needs_and_nothing_else() -> None:
        """The wheels are built from it, so that nothing is missing."""
        (path,) = WHEELS.glob("shadowserve-*.tar.gz")
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        top = {name.partition("/")[0] for name in names}
        files = {"CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
        assert top == {*PACKAGES, *files, "configs", "native", "proto", "scripts"}
        assert {name for name in names if name.startswith("scripts/")} == {"scripts/gen-proto"}
        assert not [name for name in names if re.match("native/(tests|fuzz|bench)/", name)]
        assert path.stat().st_size < 2 << 20
