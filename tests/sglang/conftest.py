"""Fixtures for SGLang's engine on a CPU, in processes of its own. scripts/test-sglang runs these tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("sglang", "failures", "models")]

from family_fixture import family  # noqa: E402, F401
from nodes import MIB, DataPlane, Storage  # noqa: E402

from shadowserve_tools.bench.peers.sglang import SGLang  # noqa: E402

collect_ignore_glob = [] if "SGLANG_PYTHON" in os.environ else ["test_*.py"]


@pytest.fixture(scope="module")
def model(family: Callable[[str], Path]) -> Path:  # noqa: F811
    return family("llama")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    node = Storage("memory", tmp_path_factory.mktemp("storage"), memory_bytes=256 * MIB).start()
    yield node
    node.close()


@pytest.fixture(scope="module")
def plane(storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    node = DataPlane(storage.port, tmp_path_factory.mktemp("plane")).start()
    yield node
    node.close()


@pytest.fixture(scope="module")
def start(model: Path, plane: DataPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SGLang]]:
    """Return a function that starts an engine; one runs at a time."""
    engines: list[SGLang] = []
    python = Path(os.environ.get("SGLANG_PYTHON", ""))

    def begin(**arguments: Any) -> SGLang:
        if engines:
            engines.pop().stop()
        log = tmp_path_factory.mktemp("engine") / "sglang.log"
        engines.append(SGLang(python, model, log, **{"address": plane.address} | arguments))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop()
