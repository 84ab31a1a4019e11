"""The files in ``side_by_side.py`` exist, and its lists are complete."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from machine import NEVER_S
from side_by_side import APART, LINES, LONGEST

TESTS = Path(__file__).parent
NAMED = [*(file for line in LINES for file in line), *APART, *LONGEST]

EACH = """
import os
import machine
import pytest

@pytest.mark.parametrize("number", range(4))
def test(number, request):
    worker, count = os.environ["PYTEST_XDIST_WORKER"], int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    assert (machine.free_port() - 10_000) % count == int(worker.removeprefix("gw"))
    with open(request.config.rootpath / worker, "a") as file:
        print(request.node.nodeid.removeprefix("tests/"), file=file)
"""


def test_each_file_is_there_and_named_once() -> None:
    assert len(set(NAMED)) == len(NAMED)
    assert [name for name in NAMED if not (TESTS / f"{name}.py").exists()] == []


def test_every_file_that_imports_vllm_stands_in_a_line() -> None:
    """Symptom: a third process with an engine, and additional seconds in each process."""
    marked = {
        str(path.relative_to(TESTS).with_suffix(""))
        for path in TESTS.rglob("test_*.py")
        if re.search(r"^pytestmark.*\bmark\.engine\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert marked <= {file for line in LINES for file in line}


def test_a_line_or_a_file_is_one_process_s_and_what_takes_longest_comes_first(tmp_path: Path) -> None:
    short, line, apart = "a/test_short", LINES[0][:2], APART[0]
    for name in (short, *line, apart):
        (tmp_path / f"tests/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"tests/{name}.py").write_text(EACH)
    for name in ("conftest.py", "machine.py", "side_by_side.py"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "--rootdir", tmp_path, tmp_path / "tests"]
    command += ["--numprocesses", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [[test.partition(".")[0] for test in (tmp_path / name).read_text().splitlines()] for name in ("gw0", "gw1")]
    assert {tests[0] for tests in ran} == {line[0], apart}, "each process starts with the first remaining unit"
    order = [*line, apart, short]
    assert all(tests == sorted(tests, key=order.index) for tests in ran)
    assert [ran[0].count(file) + ran[1].count(file) for file in order] == [4] * 4
    (with_line,) = [tests for tests in ran if line[0] in tests]
    assert with_line[:8] == [line[0]] * 4 + [line[1]] * 4
    assert sorted(tests.count(short) for tests in ran) == [0, 4]
