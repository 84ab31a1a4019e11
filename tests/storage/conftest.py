"""Fixtures of the storage tests."""

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machine import WAIT_MAX_S, free_port, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "pool"))
sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py

from storage_support import Child, Client


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start servers with flags. They end with the test."""
    with contextlib.ExitStack() as children:

        def start_child(*flags: str, environment: dict[str, str] | None = None) -> Child:
            return children.enter_context(Child("--io-threads", "2", *flags, environment=environment))

        yield start_child


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
    program = shutil.which("redis-server")
    assert program, "these tests compare with redis-server: install the system package redis-server"
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    process = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, "redis-server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_MAX_S):
                return True
            return False

        wait_for(listens)  # redis-server sends no ready message
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_MAX_S)
