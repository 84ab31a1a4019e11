"""A list of storage nodes that changes while the data plane runs."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from dataplane_support import Server, StartServer, keys_of, kvs, layout, serving
from machine import until
from scripted_node import addresses, spread_chain
from tls_support import TlsServer, trusting

from shadowserve.proto import dataplane_pb2 as pb
from shadowserve_tools import main

SHAPE = layout()
CHUNKS = 6
KEYS = keys_of(SHAPE, CHUNKS)
NAME = "storage.test"


@pytest.fixture
def nodes(start_server: StartServer) -> list[Server]:
    """Two storage nodes with the same records, and no bucket."""
    servers = [start_server(), start_server()]
    for server in servers:
        server.fill(SHAPE, KEYS)
    return servers


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
        assert not two.connections()
        write(f"{one.address}=0.5", f"{two.address}=2 # a larger one")
        await until(lambda: two.connections() > 0)
        write(two.address)
        await until(lambda: not one.connections())
        one.kill()
        write("")
        await until(lambda: daemon.metrics.totals["storage_nodes_refused"] > 1)
        assert daemon.metrics.gauges["storage_nodes_away"][1]() == 0
        assert await client.fetched(KEYS) == kvs(SHAPE, CHUNKS)


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
    with TlsServer("storage_kv", tmp_path, folder) as server:
        nodes = {"storage_nodes": f"dns:{NAME}:{server.port}"}
        async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **nodes, **trusting(folder)) as (_, client):
            answer = await client.lookup(KEYS)
    if named:
        assert (answer.outcome, answer.hits) == (pb.OUTCOME_COMPLETE, [0]), answer.detail
    else:
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE and NAME in answer.detail


async def test_a_drained_node_is_removed_without_a_miss(start_server: StartServer, tmp_path: Path) -> None:
    nodes = [start_server() for _ in range(3)]
    keys = spread_chain(nodes, 24)
    file = tmp_path / "members"
    file.write_text("\n".join(addresses(nodes)))
    changes = {"storage_nodes": f"file:{file}", "storage_nodes_ttl_s": 0.05}
    async with serving(SHAPE, 24, "127.0.0.1:1", **changes) as (daemon, client):
        await client.stores(keys)
        had = [sum(node.has(key) for key in keys) for node in nodes]
        assert sum(had) == 24 and all(had), had
        done = await asyncio.to_thread(CliRunner().invoke, main, ["drain", nodes[0].address, f"file:{file}", "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["copied"] == had[0], done.output
        before = nodes[0].connections()
        file.with_suffix(".new").write_text("\n".join(addresses(nodes[1:])))
        file.with_suffix(".new").rename(file)
        await until(lambda: nodes[0].connections() < before)
        nodes[0].kill()
        assert await client.fetched(keys) == kvs(SHAPE, 24)
        assert (await client.lookup(keys)).hits == [24]
