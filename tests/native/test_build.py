"""Builds the C core with its own tests: plain, with sanitizers, each Deflate decoder, fuzzed, for Arm by emulation."""

import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

# Compiling takes a while the first time, and sanitizers slow the tests down.
pytestmark = pytest.mark.timeout(900)

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


def test_c_tests_pass_on_arm_under_emulation(arm_build: Callable[..., Any]) -> None:
    output = arm_build().ctest("--parallel", "2")
    assert passed(output) >= 17


def test_an_arm_cpu_without_the_newer_instructions_does_without(arm_build: Callable[..., Any]) -> None:
    # Cortex-A72, BlueField-2's, has neither Armv8.1's atomics nor fp16 arithmetic nor dot products: any one that the
    # compiler or we took for granted ends the program with SIGILL.
    build = arm_build()
    for name in ("codec", "crc32", "decode", "quantize", "kvrans_kernels", "pipeline_resp"):
        program = str(build.directory / f"native/tests/test_{name}")
        build.run("qemu-aarch64", "-cpu", "cortex-a72", "-L", "/usr/aarch64-linux-gnu", program)


def test_clang_builds_for_arm_without_a_warning(arm_build: Callable[..., Any]) -> None:
    if shutil.which("clang") is None:
        pytest.skip("needs clang")
    build = arm_build(compiler="clang")
    assert passed(build.ctest("--tests-regex", "^test_(crc32|quantize|kvrans_kernels)$")) == 3
