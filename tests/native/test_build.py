"""Builds the C core with its own tests: plain, with sanitizers, with each Deflate decoder, fuzzed, and for Arm."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import NEVER_S

# Compiling takes a while the first time, and sanitizers slow the tests down.
pytestmark = pytest.mark.timeout(900)

REPOSITORY = Path(__file__).parents[2]
SANITIZE = "address,undefined"


def passed(output: str) -> int:
    """Return how many tests CTest ran, all of which passed."""
    match = re.search(r"100% tests passed(?:, 0 tests failed)? out of (\d+)", output)
    assert match is not None, output[-4000:]
    return int(match[1])


def test_c_tests_pass(native_build: Callable[..., Any]) -> None:
    assert passed(native_build("plain", {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_BENCH": "ON"}).ctest()) >= 4


def test_c_tests_pass_under_address_and_undefined_behaviour_sanitizers(native_build: Callable[..., Any]) -> None:
    build = native_build("sanitized", {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": SANITIZE})
    assert passed(build.ctest()) >= 4


def test_threads_share_nothing_by_the_thread_sanitizer(native_build: Callable[..., Any]) -> None:
    build = native_build("threads", {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": "thread"})
    assert passed(build.ctest("--tests-regex", "^test_(codec|pipeline_.*)$")) >= 6


@pytest.mark.parametrize("decoder", ["libdeflate", "zlib"])
def test_the_core_stands_on_one_deflate_decoder_alone(native_build: Callable[..., Any], decoder: str) -> None:
    options = {
        "SHADOWSERVE_TESTS": "ON",
        "SHADOWSERVE_DEFLATE": decoder,
        "SHADOWSERVE_LZ4": "OFF",
        "SHADOWSERVE_ZSTD": "OFF",
    }
    build = native_build(decoder, options)
    output = build.ctest("--verbose", "--tests-regex", "^test_(codec|crc32|huffman_deflate)$")
    assert passed(output) == 3
    assert f"{decoder} " in output and "lz4 " not in output and "zstd " not in output
    linked = subprocess.run(
        ["ldd", str(build.directory / "native/libshadowserve.so")], check=True, capture_output=True, text=True
    ).stdout
    assert ("libz.so" in linked) == (decoder == "zlib")
    assert not re.search(r"libisal|liblz4|libzstd", linked)


def test_a_short_fuzz_finds_nothing(native_build: Callable[..., Any]) -> None:
    if shutil.which("clang") is None:
        pytest.skip("the fuzzers need clang (libFuzzer)")
    build = native_build("fuzz", {"SHADOWSERVE_FUZZ": "ON"}, compiler="clang")
    assert passed(build.ctest("--parallel", "2")) >= 3


def test_the_benchmark_runs(native_build: Callable[..., Any]) -> None:
    build = native_build("plain", {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_BENCH": "ON"})
    output = build.run(str(build.directory / "native/bench_kernels"), "0.001")
    assert "binned       bfloat16" in output and "binned       float8_e4m3" in output and "crc32: " in output


@pytest.mark.parametrize("kernels", ["quantize", "kvrans_kernels"])
def test_neon_kernels_match_scalar_ones_under_emulation(tmp_path: Path, kernels: str) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    native, program = REPOSITORY / "native", tmp_path / "test"
    of_streams = {"kvrans.c", "kvrans_encode.c", "kvrans_plan.c"}  # these need the rest of the library
    kernel_sources = sorted((native / "src").glob(f"{kernels.split('_')[0]}*.c"))
    sources = [native / f"tests/test_{kernels}.c", native / "src/cpu.c"]
    sources += [source for source in kernel_sources if source.name not in of_streams]
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-static", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{native / 'include'}", f"-I{native / 'src'}"]
    command = [compiler, *flags, *includes, *map(str, sources), "-lm", "-o", str(program)]
    subprocess.run(command, check=True, timeout=NEVER_S)
    output = subprocess.run(
        [emulator, str(program)], check=True, capture_output=True, text=True, timeout=NEVER_S
    ).stdout
    assert "neon (the default here)" in output or "neon: own, neon" in output
