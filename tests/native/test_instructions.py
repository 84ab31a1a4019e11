"""The hot kernels execute the instruction counts in native/bench/instructions.json."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import NEVER_S

# The first compilation takes a while, and a step takes up to 20 us in some virtual machines.
pytestmark = pytest.mark.timeout(1800)

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "count-instructions"
KEPT: dict[str, dict[str, Any]] = json.loads((REPOSITORY / "native/bench/instructions.json").read_text())


def compare(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *command], capture_output=True, text=True, timeout=NEVER_S)


@pytest.fixture
def count_instructions(native_build: Callable[..., Any]) -> str:
    return str(native_build("plain").directory / "native/count_instructions")


def test_kernels_run_as_many_instructions_as_is_kept(count_instructions: str) -> None:
    result = compare(count_instructions)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "dequantize-bfloat16" in result.stdout


def test_arm_kernels_run_as_many_instructions_as_is_kept(arm_build: Callable[..., Any]) -> None:
    program = str(arm_build().directory / "native/count_instructions")
    result = compare("--emulator", "qemu-aarch64 -cpu neoverse-n1 -L /usr/aarch64-linux-gnu", program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kvrans-decode          neon" in result.stdout and "crc32                  any" in result.stdout


def test_stepping_from_outside_counts_the_same(count_instructions: str) -> None:
    command = [count_instructions, "crc32"]
    inside = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=True).stdout
    outside = subprocess.run([*command, "--ptrace"], capture_output=True, text=True, timeout=NEVER_S)
    if outside.returncode == 2:
        assert "SYS_PTRACE" in outside.stderr
        return
    counts = [int(re.search(r"crc32 \S+ (\d+) ", output)[1]) for output in (inside, outside.stdout)]
    assert abs(counts[0] - counts[1]) <= 8  # the instructions between the two marks


@pytest.fixture
def pretend(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Compare the kept counts of gcc 12, some of them multiplied by a factor, as if another program had run."""

    def run(factor: float = 1.0, compiler: str = "gcc-12 x86_64", without: str = "") -> Any:
        lines = [f"compiler {compiler}"]
        for name, (instructions, size) in KEPT["gcc-12 x86_64"].items():
            if name != without:
                lines.append(f"{name} {round(instructions * factor)} {size}")
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
        program.chmod(0o755)
        return compare(str(program))

    return run


def test_a_change_of_the_counts_is_noticed_in_both_directions(pretend: Callable[..., Any]) -> None:
    assert pretend().returncode == 0
    assert pretend(1.02).returncode == 0 and pretend(0.98).returncode == 0
    worse, better = pretend(1.05), pretend(0.95)
    assert worse.returncode == better.returncode == 1
    assert "deflate-decode any: +5.0% instructions; it became slower" in worse.stderr
    assert "deflate-decode any: -5.0% instructions; it became better: keep that" in better.stderr
    assert "--update" in worse.stderr and "--update" in better.stderr


def test_a_kernel_that_is_no_longer_counted_is_noticed(pretend: Callable[..., Any]) -> None:
    result = pretend(without="dequantize-bfloat16 avx2")
    assert result.returncode == 1 and "dequantize-bfloat16 avx2: kept, but was not counted" in result.stderr


def test_another_compiler_may_take_up_to_twice_as_many(pretend: Callable[..., Any]) -> None:
    assert pretend(1.9, compiler="gcc-99 x86_64").returncode == 0
    assert pretend(0.5, compiler="gcc-99 x86_64").returncode == 0
    result = pretend(2.2, compiler="gcc-99 x86_64")
    assert result.returncode == 1 and "+120.0% instructions against gcc-12 x86_64" in result.stderr


def test_an_architecture_without_counts_does_not_pass(pretend: Callable[..., Any]) -> None:
    result = pretend(compiler="gcc-12 other")
    assert result.returncode == 1 and "no counts are kept for other" in result.stderr


def test_a_program_that_cannot_count_says_why(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'ptrace: Operation not permitted' >&2\nexit 2\n")
    program.chmod(0o755)
    result = compare(str(program))
    assert result.returncode == 1 and "exited with 2: ptrace: Operation not permitted" in result.stderr
