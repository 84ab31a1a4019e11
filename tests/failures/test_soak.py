"""Tests of the soak: its definition of growth, its parts, which must run and count, and its report of a failed seed."""

import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import soak
from machine import NEVER_S

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(("grows", "passes"), [(0.0, True), (4 * MIB, True), (40 * MIB, False)])
def test_growth_is_distinguished_from_noise(grows: float, passes: bool) -> None:
    noise = [0, 3 * MIB, -2 * MIB, MIB, 900 * MIB]  # one outlier
    samples = [(float(i), 100 * MIB + grows * i / 300 + noise[4 if i % 50 == 7 else i % 4]) for i in range(400)]
    assert soak.verdict(samples, 16 * MIB)["passed"] is passes


Part = Callable[[Path, float, int], dict[str, Any]]


def _passes(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    return {"seconds": seconds, "passed": True}


def _fails(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    return {"passed": False}


def _breaks(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    raise OSError("a server did not start")


@pytest.fixture(autouse=True)
def _no_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)


@pytest.mark.parametrize("bad", [_fails, _breaks])
@pytest.mark.parametrize("part", list(soak.PARTS))
def test_a_part_that_fails_or_cannot_run_fails_the_soak_and_the_others_run(
    part: str, bad: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, (share, _) in soak.PARTS.items():
        monkeypatch.setitem(soak.PARTS, name, (share, bad if name == part else _passes))
    assert soak.main(["--hours", "0.1", "--seed", "7", "--json", str(tmp_path / "soak.json")]) == 1
    report = json.loads((tmp_path / "soak.json").read_text())
    assert {name: report[name]["passed"] for name in soak.PARTS} == {name: name != part for name in soak.PARTS}
    assert report["passed"] is False
    said = capsys.readouterr()
    assert f"{part}: failed" in said.out and f"again: scripts/soak --parts {part} --seed 7" in said.err


def test_parts_share_the_time_and_no_part_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (share, _) in soak.PARTS.items():
        monkeypatch.setitem(soak.PARTS, name, (share, _passes))
    path = tmp_path / "soak.json"
    assert soak.main(["--hours", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [report[name]["seconds"] for name in soak.PARTS] == [1440, 720, 720, 720] and report["passed"]
    assert soak.main(["--hours", "1", "--parts", "simulation", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["simulation"]["seconds"] == 3600
    for wrong in (["--parts", "leak"], ["--parts", ""], ["--hours", "0"]):
        with pytest.raises(SystemExit, match="2"):
            soak.main(wrong)
    assert "there is no 'leak'; there are leaks, crashes, simulation, engines" in capsys.readouterr().err


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/soak-simulation as a module."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("soak_simulation", str(REPOSITORY / "scripts" / "soak-simulation"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("soak_simulation", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_however_short_the_time_real_seeds_are_run(
    seeds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "BATCH", 2)
    path = tmp_path / "report.json"
    assert seeds.main(["--hours", "0", "--first", "1", "--processes", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["seeds"] == 2 and report["first_seed"] == 1 and report["failures"] == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "print('seed 43: AssertionError: lost; again: simulate.py 43'); raise SystemExit(1)",
            "seed 43: AssertionError: lost; again: simulate.py 43",
        ),
        ("raise SystemExit(3)", "seeds from 42 on: the program ended with 3: ''; again: {again} 42-{last}"),
        ("import time; time.sleep({never})", "seeds from 42 on: one of them does not end; again: {again} 42-{last}"),
    ],
    ids=["fails", "ends", "hangs"],
)
def test_a_seed_that_fails_is_printed_with_the_command_that_repeats_it(
    program: str,
    expected: str,
    seeds: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "simulate.py").write_text(program.format(never=NEVER_S))
    monkeypatch.setattr(seeds, "SIMULATE", tmp_path / "simulate.py")
    if "sleep" in program:
        monkeypatch.setattr(seeds, "BATCH_S", 0.1)
    path = tmp_path / "report.json"
    assert seeds.main(["--hours", "0", "--first", "42", "--processes", "1", "--json", str(path)]) == 1
    line = expected.format(again=seeds.AGAIN, last=42 + seeds.BATCH - 1)
    assert json.loads(path.read_text())["failures"] == [line]
    assert line in capsys.readouterr().out.splitlines()
