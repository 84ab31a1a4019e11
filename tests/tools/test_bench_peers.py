"""The peers of benchmarks: their verification, end, links and explanation."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from machine import NEVER_S

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.peers import installed
from shadowserve_tools.bench.peers.contender import Contender, Field
from shadowserve_tools.bench.peers.driver import Values
from shadowserve_tools.bench.peers.network import Link, linked
from shadowserve_tools.bench.peers.sockets import Memory, filled_redis, plain_reader, plain_sockets, redis_reader

CHUNK_BYTES = 3 << 20  # more than one piece, and not a whole number of pieces
CHUNKS = 3


@pytest.fixture
def values_file(tmp_path: Path) -> Path:
    file = tmp_path / "values"
    file.write_bytes(np.random.default_rng(3).bytes(CHUNK_BYTES))
    return file


@pytest.fixture
def memory(values_file: Path) -> Memory:
    return Memory(Values(values_file), CHUNKS)


@pytest.fixture
def link() -> Iterator[Link]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(linked())
        except ShadowServeError as error:
            if "cannot make a network namespace" not in str(error):
                raise
            pytest.skip(str(error))


def test_chunks_differ_and_a_wrong_byte_is_found(values_file: Path, memory: Memory) -> None:
    values = Values(values_file)
    for index, row in enumerate(memory.rows):
        values.write(index, row)
        assert values.matches(index, row) and not values.matches(index + 1, row)
    memory.verify(CHUNKS)
    memory.rows[1, -1] ^= 1
    memory.verify(1)
    with pytest.raises(ShadowServeError, match="chunk 1 in memory is not what was stored"):
        memory.verify(CHUNKS)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("pieces", [True, False])
def test_redis_is_read_into_the_chunks_places(
    tmp_path: Path, values_file: Path, memory: Memory, connections: int, pieces: bool
) -> None:
    with filled_redis(tmp_path, Values(values_file), CHUNKS, tuned=True) as server:
        reader = redis_reader(server.address, connections, memory, pieces=pieces)
        with contextlib.closing(reader):
            reader.fetch(2)
            memory.verify(2)
            assert (memory.rows[2] == memory.rows[2, 0]).all()
            reader.fetch(CHUNKS)
            memory.verify(CHUNKS)


def test_a_missing_value_is_an_error(tmp_path: Path, values_file: Path, memory: Memory) -> None:
    with filled_redis(tmp_path, Values(values_file), 1, tuned=False) as server:
        with contextlib.closing(redis_reader(server.address, 1, memory, pieces=False)) as reader:
            with pytest.raises(ShadowServeError, match="the server answered"):
                reader.fetch(2)


def test_plain_sockets_serve_through_an_isolated_link(
    tmp_path: Path, values_file: Path, memory: Memory, link: Link
) -> None:
    with plain_sockets(tmp_path, values_file, CHUNKS, link) as server:
        link.limit(8)
        host, _, port = server.address.rpartition(":")
        assert host == link.host
        with link.client_side():
            reader = plain_reader(server.address, 2, memory)
        with contextlib.closing(reader):
            reader.fetch(CHUNKS)
            memory.verify(CHUNKS)
        with link.store_side(), socket.create_connection((host, int(port)), NEVER_S):
            pass
        with pytest.raises(OSError), socket.create_connection((host, int(port)), 0.2):
            pass


def test_a_limited_link_delivers_no_more_than_its_rate(link: Link) -> None:
    size = 8 << 20
    link.limit(0.5)
    with link.store_side():
        listener = socket.create_server((link.host, 0))
    with link.client_side():
        receiving = socket.create_connection(listener.getsockname())
    sending, _ = listener.accept()
    with listener, receiving, sending:
        thread = threading.Thread(target=sending.sendall, args=(bytes(size),))
        begin = time.perf_counter()
        thread.start()
        assert len(receiving.recv(size, socket.MSG_WAITALL)) == size
        # A tenth for the burst; a slow machine only increases the time.
        assert time.perf_counter() - begin > 0.9 * size * 8 / 0.5e9
        thread.join()


def test_a_thread_leaves_a_namespace_at_the_contexts_end(link: Link) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with link.store_side():
        store = os.readlink("/proc/thread-self/ns/net")
        with link.client_side():
            client = os.readlink("/proc/thread-self/ns/net")
        assert os.readlink("/proc/thread-self/ns/net") == store
    assert os.readlink("/proc/thread-self/ns/net") == before
    assert len({before, store, client}) == 3


def contender(memory: Memory, fetch: Callable[[int], None]) -> Contender:
    return Contender(name="x", kind="raw", fetch=fetch, clear=memory.clear, verify=memory.verify)


def test_a_fetch_that_delivers_nothing_is_an_error(values_file: Path, memory: Memory) -> None:
    values = Values(values_file)

    def fetch(count: int) -> None:
        for index in range(count):
            values.write(index, memory.rows[index])

    assert contender(memory, fetch).run(CHUNKS).wall_s > 0
    with pytest.raises(ShadowServeError, match="is not what was stored"):
        contender(memory, lambda count: None).run(CHUNKS)


@pytest.mark.parametrize("python", ["/nonexistent/python", sys.executable])
def test_an_environment_without_peers_has_none(python: str) -> None:
    assert installed.installed(Path(python)) == {}


def test_an_absent_peer_has_a_reason(tmp_path: Path, values_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed", lambda _: {"lmcache": "0"})
    bed = installed.Bed(Path(sys.executable), tmp_path, values_file, 1)
    field = Field()
    with contextlib.ExitStack() as stack:
        starts = {"A": ("lmcache", installed.lmcache), "B": ("mooncake", installed.mooncake)}
        assert installed.add_installed(field, stack, bed, starts) == set()
    assert field.contenders == []
    assert "does not run here" in field.absent["A"]
    assert field.absent["B"] == "not installed (scripts/setup-peers)"
