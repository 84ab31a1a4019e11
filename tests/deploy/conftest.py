"""Shared fixtures of the deployment tests: machines made of files (``machines.py``)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py

from throwaway import Throwaway, make_wheels, throwaway

collect_ignore = [] if "CHART_TOOLS" in os.environ else ["test_chart.py"]  # scripts/test-chart sets it


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHADOWSERVE_") and "NATIVE" not in name]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Throwaway]:
    """This machine's system as a temporary copy, which is removed after the module's tests."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    question = f"import ensurepip, sys; sys.exit(sys.version[:{len(version)}] != '{version}')"
    if not Path("/usr/bin/apt-get").exists() or shutil.which("systemctl") is None:
        pytest.skip("this is no Debian or Ubuntu with systemd's tools")
    if subprocess.run(["/usr/bin/python3", "-c", question], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"the system's own Python is not {version} with venv, which the wheels made here are for")
    try:
        with throwaway(tmp_path_factory.mktemp("system")) as made:
            yield made
    except PermissionError as error:
        pytest.skip(str(error))
