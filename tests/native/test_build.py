"""Builds the C core with its own tests: plain, with sanitizers, each Deflate decoder, fuzzed, for Arm by emulation.

'make test-native' runs these tests side by side and in this order, the longest first; 'make test' does not run them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import NEVER_S

# The first compilation takes a while, and sanitizers slow the tests down.
pytestmark = pytest.mark.timeout(1800)

REPOSITORY = Path(__file__).parents[2]


def passed(output: str) -> int:
    """Return the number of tests in CTest's output, all of which passed."""
    match = re.search(r"100% tests passed(?:, 0 tests failed)? out of (\d+)", output)
    assert match is not None, output[-4000:]
    return int(match[1])


def test_c_tests_pass_under_address_and_undefined_behaviour_sanitizers(native_build: Callable[..., Any]) -> None:
    build = native_build("sanitized")
    assert passed(build.ctest()) >= 25


def test_threads_share_nothing_by_the_thread_sanitizer(native_build: Callable[..., Any]) -> None:
    build = native_build("threads")
    assert passed(build.ctest()) >= 16


def test_a_short_fuzz_finds_nothing(native_build: Callable[..., Any]) -> None:
    if shutil.which("clang") is None:
        pytest.skip("the fuzzers need clang (libFuzzer)")
    build = native_build("fuzz")
    assert passed(build.ctest()) >= 3


def test_c_tests_pass(native_build: Callable[..., Any]) -> None:
    assert passed(native_build("plain").ctest()) >= 16


def test_c_tests_pass_on_the_oldest_arm_cpu_under_emulation(arm_build: Callable[..., Any]) -> None:
    assert passed(arm_build().ctest()) == 13


@pytest.mark.parametrize("decoder", ["zlib", *(["libdeflate"] if os.environ.get("TEST_NIGHTLY") else [])])
def test_the_core_stands_on_one_deflate_decoder_alone(native_build: Callable[..., Any], decoder: str) -> None:
    build = native_build(decoder)
    output = build.ctest()
    assert passed(output) == 7 and "uring: not here" in output and "threads, direct" in output
    assert f"{decoder} " in output and "lz4 " not in output and "zstd " not in output
    linked = subprocess.run(
        ["ldd", str(build.directory / "native/libshadowserve.so")], check=True, capture_output=True, text=True
    ).stdout
    assert ("libz.so" in linked) == (decoder == "zlib")
    assert not re.search(r"libisal|liblz4|libzstd|liburing", linked)


def configure(directory: Path, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run CMake's configuration in a separate build, and return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    command = [shutil.which("cmake", path=path) or "cmake", "-S", str(REPOSITORY), "-B", str(directory)]
    everything = {**os.environ, "PATH": path, **environment}
    return subprocess.run(
        [*command, *generator, *options], env=everything, capture_output=True, text=True, timeout=NEVER_S, check=False
    )


def test_the_core_defines_no_symbol_of_doca(native_build: Callable[..., Any]) -> None:
    build = native_build("plain")
    symbols = build.run("nm", "--dynamic", "--defined-only", str(build.directory / "native/libshadowserve.so"))
    assert " ss_abi_version" in symbols and "doca_" not in symbols


def test_the_sdk_of_doca_is_taken_where_pkg_config_finds_it(tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    emulator = REPOSITORY / "native/doca_emulator/include"
    for folder, version in (("", "3.0.0"), ("old", "2.9.1")):
        (tmp_path / folder).mkdir(exist_ok=True)
        for module in ("doca-common", "doca-compress", "doca-dma"):
            text = f"Name: {module}\nDescription: as the SDK has it\nVersion: {version}\nCflags: -I{emulator}\n"
            (tmp_path / folder / f"{module}.pc").write_text(text, encoding="utf-8")
    found = configure(tmp_path / "found", "-DSHADOWSERVE_DOCA=sdk", PKG_CONFIG_PATH=str(tmp_path))
    assert found.returncode == 0 and "DOCA: TRUE, emulated FALSE" in found.stdout, found.stdout + found.stderr
    nowhere = {"PKG_CONFIG_PATH": str(tmp_path / "nowhere"), "PKG_CONFIG_LIBDIR": str(tmp_path / "nowhere")}
    missing = configure(tmp_path / "missing", "-DSHADOWSERVE_DOCA=sdk", **nowhere)
    assert missing.returncode != 0 and "pkg-config does not find doca-common" in missing.stderr
    older = {"PKG_CONFIG_PATH": str(tmp_path / "old"), "PKG_CONFIG_LIBDIR": str(tmp_path / "old")}
    old = configure(tmp_path / "too-old", **older)
    assert old.returncode == 0 and "DOCA: FALSE" in old.stdout, "DOCA 2.9 lacks a function of the backend"
    asked = configure(tmp_path / "asked", "-DSHADOWSERVE_DOCA=emulator", PKG_CONFIG_PATH=str(tmp_path))
    assert asked.returncode == 0 and "DOCA: TRUE, emulated TRUE" in asked.stdout
