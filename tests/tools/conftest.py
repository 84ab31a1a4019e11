"""Fixtures of the tools' tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shadowserve_tools import main


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHADOWSERVE_") and "NATIVE" not in name]:
        monkeypatch.delenv(variable)


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs ``shadowserve simulate``, which must end with ``code``, and returns what it writes."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "simulated.json"
        done = CliRunner().invoke(main, ["simulate", *arguments, "--json", str(file)], prog_name="shadowserve")
        assert done.exit_code == code, done.output
        return json.loads(file.read_text())

    return run
