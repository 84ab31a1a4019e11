"""Tests of ``make fuzz``: it counts inputs, and it keeps and reports a finding of any fuzzer."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import changed, fuzz, main, run_program
from targets import TARGETS, Target

REPOSITORY = Path(__file__).parents[2]


def refusing(data: bytes) -> None:
    """Simulate a parser with a missing check."""
    if b"\xff\xff" in data:
        raise IndexError("behind the end")


def program(folder: Path, name: str, words: str) -> Path:
    """Return a program with the output of a libFuzzer program."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_parser_takes_its_corpus_and_what_is_made_of_it(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, TARGETS[name], 0.5, 1, tmp_path)
    assert outcome.finding is None, outcome.output
    assert outcome.inputs >= max(64, len(TARGETS[name].corpus()))


def test_inputs_are_the_same_for_the_same_seed_and_no_larger_than_they_may_be() -> None:
    target = TARGETS["users"]
    corpus = target.corpus()
    one, other = random.Random(3), random.Random(3)
    made = [changed(one, target, corpus) for _ in range(500)]
    assert made == [changed(other, target, corpus) for _ in range(500)]
    assert len(set(made)) > 300 and max(map(len, made)) <= target.size_max


def test_input_that_a_parser_fails_with_is_kept_and_reported(tmp_path: Path) -> None:
    outcome = fuzz("planted", Target(refusing, lambda: [b"abc"], (b"\xff\xff",)), 60, 1, tmp_path)
    assert outcome.finding is not None and "IndexError: behind the end" in outcome.output
    assert b"\xff\xff" in Path(outcome.finding).read_bytes() and Path(outcome.finding).parent == tmp_path


def test_a_finding_is_reported_with_the_path_of_its_input(tmp_path: Path) -> None:
    done = "echo 'stat::number_of_executed_units: 4711' >&2"
    sound = run_program(program(tmp_path, "fuzz_sound", done), 1, tmp_path, tmp_path)
    assert sound.inputs == 4711 and sound.finding is None
    crash = program(
        tmp_path, "fuzz_bad", f"{done}; echo 'Test unit written to {tmp_path}/fuzz_bad-crash-1' >&2; exit 77"
    )
    found = run_program(crash, 1, tmp_path, tmp_path)
    assert found.finding == f"{tmp_path}/fuzz_bad-crash-1" and found.inputs == 4711
    died = run_program(program(tmp_path, "fuzz_dead", "kill -9 $$"), 1, tmp_path, tmp_path)
    assert died.finding == "the process ended with -9" and died.inputs == 0


def test_the_command_counts_all_and_fails_where_something_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert main(["--python-only", "--seconds", "2", "--seed", "5", "--json", str(report), "users", "record"]) == 0
    found = json.loads(report.read_text())
    assert {each["name"] for each in found["fuzzers"]} == {"users", "record"}
    assert found["inputs"] == sum(each["inputs"] for each in found["fuzzers"]) > 100
    shown = capsys.readouterr().out
    assert re.search(rf"^all +{found['inputs']:,} inputs; 0 findings", shown, re.M)
    monkeypatch.setattr(
        "fuzz._run_target", lambda name, *_: fuzz(name, Target(refusing, lambda: [b"\xff\xff"]), 1, 1, tmp_path)
    )
    assert main(["--python-only", "--seconds", "1", "users"]) == 1
    assert f"FOUND: {tmp_path}/users-" in capsys.readouterr().out


def test_every_fuzzer_of_the_core_is_built_and_run() -> None:
    programs = {path.stem for path in (REPOSITORY / "native" / "fuzz").glob("fuzz_*.c")}
    assert set(re.findall(r"\bfuzz_\w+", (REPOSITORY / "native/fuzz/CMakeLists.txt").read_text())) >= programs
    listed = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "fuzz", "--list"], capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.split()) == programs | set(TARGETS)
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "fuzz", "FUZZ_SECONDS=7"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "scripts/fuzz --seconds 7" in planned.stdout
