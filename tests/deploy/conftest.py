"""What the tests of deployment share: machines made of files (``machines.py``)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHADOWSERVE_") and "NATIVE" not in name]:
        monkeypatch.delenv(variable)
