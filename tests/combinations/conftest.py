"""Fixtures of the matrix of combinations."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(_TESTS / name) for name in ("host", "models", "pool", "dataplane")),
]

from family_fixture import family  # noqa: E402, F401


@pytest.fixture(scope="session")
def references(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    """Return the outputs of engines without a cache."""
    from runner import References

    return References(family, tmp_path_factory.mktemp("calibrations"))
