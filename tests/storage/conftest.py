"""Fixtures of the storage tests."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pool"))
sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py

from faulty_s3 import FaultyS3, faulty_s3
from slow_store import Served
from storage_support import USERS, Child, Client, Start, running_redis


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers with flags. They end with the test."""
    with contextlib.ExitStack() as children:

        def start_child(*flags: str, environment: dict[str, str] | None = None) -> Child:
            return children.enter_context(Child("--io-threads", "2", *flags, environment=environment))

        yield start_child


@pytest.fixture
def start_tenants(start: Start, tmp_path: Path) -> Start:
    """Start servers with an operator and users of three tenants; login() authenticates them."""

    def start_child(*flags: str, users: str = USERS, **more: Any) -> Child:
        file = tmp_path / "users.acl"
        file.write_text(users)
        return start("--users-file", str(file), *flags, **more)

    return start_child


@pytest.fixture
def served() -> Iterator[Served]:
    """A server whose store the test controls."""
    with Served(io_threads=2) as served:
        yield served


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    """A bucket that fails as the test says."""
    with faulty_s3() as server:
        yield server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Child]:
    """A server with the default configuration, for tests that leave it unchanged."""
    with Child("--io-threads", "2") as child:
        yield child


@pytest.fixture
def client(shared_server: Child) -> Iterator[Client]:
    """A client of the shared server, without keys."""
    with shared_server.client() as client:
        assert client.call("FLUSHALL") == b"OK"
        yield client


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A redis-server, the reference."""
    with running_redis(tmp_path_factory.mktemp("redis")) as port:
        yield port
