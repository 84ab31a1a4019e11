"""Certificates for all tests that need some; how Hypothesis works; tests side by side; ``machine``, for all to import.

pytest imports by path, so that folders need no __init__.py.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent))

MAKE = Path(__file__).parents[1] / "scripts" / "make-certificates"

# An example may take as long as the machine stands still. And they are the same each time, so that a suite that has
# passed passes again; --hypothesis-profile=search tries those that nobody has tried yet.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")

# Before a file of tests that is collected imports PyTorch, which looks only then. The models are tiny; beside other
# tests a second thread is waited for, core in hand, at each of the hundred operations of an engine's step.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests start our programs two thousand times: whatever the environment says, Python keeps what it has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    from side_by_side import processes

    return processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from side_by_side import SideBySide

    return SideBySide(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from side_by_side import begin_with_the_longest

        begin_with_the_longest(items)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whatever the test starts heeds SIGINT, even where these tests run in a script's background: that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def background() -> Iterator[None]:
    """Whatever the test starts has SIGINT ignored, as what a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def make_certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a folder of certificates, of another folder's authority where one is given."""

    def make(*arguments: str, authority: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp("certificates")
        for name in ("ca.crt", "ca.key") if authority else ():
            shutil.copy(authority / name, folder)
        subprocess.run([sys.executable, MAKE, folder, *arguments], check=True, stdout=subprocess.DEVNULL)
        return folder

    return make


@pytest.fixture(scope="session")
def certificates(make_certificates: Callable[..., Path]) -> Path:
    """Return a folder of certificates for loopback."""
    return make_certificates()


@pytest.fixture(scope="session")
def expired(make_certificates: Callable[..., Path], certificates: Path) -> Path:
    """Return a folder of certificates of the same authority that have expired."""
    return make_certificates("--days=-1", authority=certificates)


@pytest.fixture(scope="session")
def foreign(make_certificates: Callable[..., Path]) -> Path:
    """Return a folder of certificates of another authority."""
    return make_certificates()
