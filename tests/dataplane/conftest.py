"""Fixtures of the data plane's tests."""

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py

from dataplane_support import BACKENDS, Client, Server, StartServer, running
from scripted_source import ScriptedSource

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.sources.source import Resources


@pytest.fixture(scope="session")
def session_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A storage server that several tests share, if they do not damage it."""
    with Server("storage_kv", tmp_path_factory.mktemp("storage")) as server:
        yield server


@pytest.fixture
def storage(session_storage: Server) -> Server:
    """The shared storage server, emptied."""
    session_storage.command(b"FLUSHALL")
    return session_storage


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers for this test alone, which may kill and stop them."""
    with contextlib.ExitStack() as servers:
        numbers = itertools.count()

        def start(*options: str, kind: str = "storage_kv", **more: Any) -> Server:
            (folder := tmp_path / f"server-{next(numbers)}").mkdir()
            return servers.enter_context(Server(kind, folder, options=options, **more))

        yield start


@pytest.fixture
def mortal_storage(start_server: StartServer) -> Server:
    """A started storage server for this test alone."""
    return start_server()


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("redis", tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(session_redis: Server) -> Server:
    """A plain Redis, emptied."""
    session_redis.command(b"FLUSHALL")
    return session_redis


@pytest.fixture(params=BACKENDS)
async def client(storage: Server, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of a daemon on the shared storage server."""
    async with running(storage, backend=request.param) as (_, client):
        yield client


@pytest.fixture
async def script(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ScriptedSource, Client]]:
    """A scripted source, and a client of a daemon over it."""
    made: list[ScriptedSource] = []

    def source_of(configuration: DataPlaneConfig, resources: Resources) -> ScriptedSource:
        made.append(ScriptedSource(resources))
        return made[-1]

    monkeypatch.setattr("dpu_dataplane.server.source_of", source_of)
    async with running("127.0.0.1:1") as (_, client):
        yield made[0], client
