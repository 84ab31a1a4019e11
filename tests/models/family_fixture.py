"""The fixture ``family``: tiny models by family."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function (family) -> folder of a tiny model (see tiny_models.py)."""
    from tiny_models import write_model

    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of
