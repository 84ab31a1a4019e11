"""A node of a fleet without a bucket is drained and removed: no prompt is missed."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner
from dataplane_support import Server, keys_of, kvs, layout, serving
from machine import until

from shadowserve.proto import dataplane_pb2 as pb
from shadowserve_tools import main

SHAPE = layout()
CHUNKS = 48
KEYS = keys_of(SHAPE, CHUNKS)


def connections(server: Server) -> int:
    """Return the number of connections to a server beside this one."""
    from redis import Redis

    with Redis(port=server.port) as client:
        return int(client.info("clients")["connected_clients"]) - 1


async def test_a_drained_node_is_removed_without_a_miss(tmp_path: Path) -> None:
    nodes = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        nodes.append(Server("storage_kv", tmp_path / str(number)).start())
    file = tmp_path / "members"
    file.write_text("\n".join(node.address for node in nodes))
    try:
        changes = {"storage_nodes": f"file:{file}", "storage_nodes_ttl_s": 0.05}
        async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **changes) as (daemon, client):
            client.fill(CHUNKS)
            assert (await client.store(KEYS)).chunks == CHUNKS
            had = {node.address: sum(node.has(key) for key in KEYS) for node in nodes}
            nodes.sort(key=lambda node: -had[node.address])
            assert sum(had.values()) == CHUNKS > had[nodes[0].address], had
            done = await asyncio.to_thread(
                CliRunner().invoke, main, ["drain", nodes[0].address, f"file:{file}", "--json"]
            )
            assert done.exit_code == 0 and json.loads(done.stdout)["copied"] == had[nodes[0].address], done.output
            before = connections(nodes[0])
            file.with_suffix(".new").write_text("\n".join(node.address for node in nodes[1:]))
            file.with_suffix(".new").rename(file)
            await until(lambda: connections(nodes[0]) < before)
            nodes[0].kill()
            client.segment.memory[:] = 0
            answer = await client.fetch(KEYS)
            assert (answer.outcome, answer.chunks) == (pb.OUTCOME_COMPLETE, CHUNKS), answer.detail
            assert client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)
            assert (await client.lookup(KEYS)).hits == [CHUNKS]
    finally:
        for node in nodes:
            node.kill()
