"""Fixtures of the tools' tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHADOWSERVE_") and "NATIVE" not in name]:
        monkeypatch.delenv(variable)
