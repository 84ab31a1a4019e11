"""Fixtures of all tests: certificates, Hypothesis profiles, tests in parallel, and the import of ``machine``.

pytest imports by path, so folders need no __init__.py.
"""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent))

MAKE = Path(__file__).parents[1] / "scripts" / "make-certificates"

# A paused machine must not fail an example, so there is no deadline. The examples are the same in each run, so results
# are reproducible. --hypothesis-profile=search tries new examples.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")

# This must precede the import of PyTorch by a collected test file. The models are tiny: with a second thread, each of
# the hundred operations of an engine's step would busy-wait for that thread when other tests use the cores.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests start programs of the project two thousand times: Python must keep its compiled files in any environment.
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep half a million objects of modules and tests, which stay to the end, out of later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from side_by_side import begin_with_the_longest

        begin_with_the_longest(items)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket instead of systemd's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Started processes handle SIGINT, even if a script runs these tests in its background (a setting they inherit)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def background() -> Iterator[None]:
    """Started processes ignore SIGINT, like processes in a script's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def make_certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that creates a folder of certificates, signed by another folder's authority if one is given."""

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
