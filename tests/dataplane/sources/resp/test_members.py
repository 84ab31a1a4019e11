"""A list of storage nodes that changes while the data plane runs."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dataplane_support import Server, keys_of, kvs, layout, serving
from machine import until
from tls_support import TlsServer, trusting

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
CHUNKS = 6
KEYS = keys_of(SHAPE, CHUNKS)
NAME = "storage.test"


def connections(server: Server) -> int:
    """Return the number of connections to a server beside this one."""
    from redis import Redis

    with Redis(port=server.port) as client:
        return int(client.info("clients")["connected_clients"]) - 1


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    """Two storage nodes with the same records, and no bucket."""
    servers = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        servers.append(Server("storage_kv", tmp_path / str(number)).start())
        servers[-1].fill(SHAPE, KEYS)
    yield servers
    for server in servers:
        server.kill()


async def test_nodes_come_and_go_by_the_file_and_an_empty_file_changes_nothing(
    nodes: list[Server], tmp_path: Path
) -> None:
    one, two = nodes
    file = tmp_path / "members"

    def write(*lines: str) -> None:
        file.with_suffix(".new").write_text("\n".join(lines))
        os.replace(file.with_suffix(".new"), file)

    write("# the fleet", one.address)
    changes = {"storage_nodes": f"file:{file}", "storage_nodes_ttl_s": 0.05}
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **changes) as (daemon, client):
        assert (await client.lookup(KEYS)).hits == [CHUNKS]
        assert not connections(two)
        write(f"{one.address}=0.5", f"{two.address}=2 # a larger one")
        await until(lambda: connections(two) > 0)
        write(two.address)
        await until(lambda: not connections(one))
        one.kill()
        write("")
        await until(lambda: daemon.metrics.totals["storage_nodes_refused"] > 1)
        assert daemon.metrics.gauges["storage_nodes_away"][1]() == 0
        answer = await client.fetch(KEYS)
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        assert client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)


@pytest.mark.parametrize("named", [True, False])
async def test_nodes_of_a_name_show_certificates_for_that_name(
    named: bool, make_certificates: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The addresses behind a name change, so certificates hold the name."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve(host and host.replace(NAME, "127.0.0.1"), *rest, **more),
    )
    folder = make_certificates(*[NAME] * named)
    server = TlsServer("storage_kv", tmp_path, folder).start()
    try:
        nodes = {"storage_nodes": f"dns:{NAME}:{server.port}"}
        async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **nodes, **trusting(folder)) as (_, client):
            answer = await client.lookup(KEYS)
    finally:
        server.kill()
    if named:
        assert (answer.outcome, answer.hits) == (pb.OUTCOME_COMPLETE, [0]), answer.detail
    else:
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE and NAME in answer.detail
