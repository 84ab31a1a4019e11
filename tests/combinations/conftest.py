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


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a tiny model of a family."""
    from tiny_models import write_model

    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(scope="session")
def references(family: Callable[[str], Path]) -> Any:
    """Return the outputs of engines without a cache."""
    from runner import References

    return References(family)
