"""Memory budgets in comparison with the memory of the machine and its control groups."""

import subprocess
import sys
from pathlib import Path

import pytest
from machine import NEVER_S

from shadowserve.errors import ConfigurationError
from shadowserve.memory_limit import check_memory, memory_limit

GIB = 1 << 30


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine of 24 GiB whose control groups have no limits."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {24 * GIB >> 10} kB\nMemFree: 1 kB")
    write(tmp_path, "proc/self/cgroup", "4:memory,cpu:/a/b\n0::/c/d")
    write(tmp_path, "sys/fs/cgroup/c/d/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", str((1 << 63) - 4096))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "size"),
    [
        ("sys/fs/cgroup/c/d/memory.max", 4),
        ("sys/fs/cgroup/c/memory.max", 5),
        ("sys/fs/cgroup/memory.max", 6),
        ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 7),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", 8),
    ],
)
def test_the_least_limit_of_all_control_groups_holds(machine: Path, file: str, size: int) -> None:
    limit = memory_limit(machine)
    assert limit.size == 24 * GIB and "this machine" in limit.what
    write(machine, file, str(size * GIB))
    limit = memory_limit(machine)
    assert limit.size == size * GIB and f"/{file}" in limit.what


def test_a_control_group_of_another_controller_does_not_count(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:cpu:/a/b")
    write(machine, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "1")
    limit = memory_limit(machine)
    assert limit.size == 24 * GIB


def test_a_budget_beyond_the_machine_is_refused_with_its_keys(machine: Path) -> None:
    check_memory({"memory_budget_bytes": 24 * GIB}, machine)
    with pytest.raises(ConfigurationError, match=r"^memory_budget_bytes \(200 GiB\) is more memory than the 24 GiB"):
        check_memory({"memory_budget_bytes": 200 * GIB}, machine)
    with pytest.raises(ConfigurationError, match=r"a \(12 GiB\) and b \(13 GiB\), 25 GiB together, is more"):
        check_memory({"a": 12 * GIB, "b": 13 * GIB}, machine)


def test_a_machine_that_does_not_say_has_no_limit(tmp_path: Path) -> None:
    check_memory({"memory_budget_bytes": 1 << 60}, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("storage", "--port", "0", "--memory-budget-bytes", "900TiB"), "memory_budget_bytes (900 TiB)"),
        (("dpu", "--listen", "127.0.0.1:0", "--dma-source-buffer-bytes", "900TiB", "--fused", "true"), ""),
        (
            ("dpu", "--listen", "127.0.0.1:0", "--tiers", "{memory_budget_bytes: 900 TiB}"),
            "tiers.memory_budget_bytes (900 TiB)",
        ),
        (
            ("dpu", "--listen", "127.0.0.1:0", "--fused", "false", "--dma-source-buffer-bytes", "900TiB"),
            "dma_source_buffer_bytes (900 TiB)",
        ),
    ],
)
def test_a_program_does_not_start_with_more_memory_than_the_machine_has(
    arguments: tuple[str, ...], message: str
) -> None:
    """Symptom: a budget of 200 GiB started silently on a machine of 24 GiB."""
    command = [sys.executable, "-m", "shadowserve_tools", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        if not message:  # a buffer that is not used takes no memory
            assert process.stdout.readline().startswith("ready ")
            process.terminate()
            return
        _, errors = process.communicate(timeout=NEVER_S)
    assert process.returncode == 2 and message in errors and "is more memory than" in errors
