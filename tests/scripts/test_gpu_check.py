"""scripts/gpu-check: its message when it cannot start, and its report when steps fail.

``scripts/gpu-check --rehearse`` in the checkout runs its steps; scripts/test-nightly runs it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import NEVER_S

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / "scripts"))


def run(script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(script.parents[1] / "packages")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=NEVER_S, check=False, cwd=script.parent, env=environment
    )


def test_missing_wheels_exit_with_2_and_the_command_that_gets_them(script: Path) -> None:
    done = run(script)
    assert done.returncode == 2 and "scripts/gpu-check --prepare" in done.stdout


def test_a_failed_step_is_recorded_and_the_others_run(script: Path) -> None:
    (script.parents[1] / "packages").mkdir()
    for name in ("pytest", "shadowserve_tools", "torch", "triton"):
        (script.parents[1] / "packages" / f"{name}.py").write_text("raise SystemExit('a broken package')")
    done = run(script, "--rehearse", "--output", "found.json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((script.parent / "found.json").read_text())
    assert not found["passed"] and found["rehearsed"]
    statuses = {step["step"]: step["status"] for step in found["steps"]}
    assert statuses.keys() >= {"build the C test", "the CUDA driver", "deliveries into GPU memory", "bench gpu"}
    assert "passed" not in statuses.values()
    assert [step["output"] for step in found["steps"]].count("a broken package\n") == 3
    assert "native/tests/test_cuda" in statuses["the CUDA driver"], "the message contains the missing program"
