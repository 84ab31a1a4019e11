"""A node of a fleet without a bucket is drained and removed: no prompt is missed."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner
from dataplane_support import Server, keys_of, kvs, layout, serving
from machine import until

from shadowserve.placement import Placement, partition_of
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve_tools import main

SHAPE = layout()
CHUNKS = 24


def keys_on_all(nodes: list[Server]) -> list[bytes]:
    """Return the keys of a chain that has segments on all nodes."""
    place = Placement(dict.fromkeys((node.address for node in nodes), 1.0))
    chains = (keys_of(SHAPE, CHUNKS, seed) for seed in range(1000))
    return next(keys for keys in chains if len({place.ranking(partition_of(key))[0] for key in keys}) == len(nodes))


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
    keys = keys_on_all(nodes)
    file = tmp_path / "members"
    file.write_text("\n".join(node.address for node in nodes))
    try:
        changes = {"storage_nodes": f"file:{file}", "storage_nodes_ttl_s": 0.05}
        async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **changes) as (daemon, client):
            client.fill(CHUNKS)
            assert (await client.store(keys)).chunks == CHUNKS
            had = [sum(node.has(key) for key in keys) for node in nodes]
            assert sum(had) == CHUNKS and all(had), had
            done = await asyncio.to_thread(
                CliRunner().invoke, main, ["drain", nodes[0].address, f"file:{file}", "--json"]
            )
            assert done.exit_code == 0 and json.loads(done.stdout)["copied"] == had[0], done.output
            before = connections(nodes[0])
            file.with_suffix(".new").write_text("\n".join(node.address for node in nodes[1:]))
            file.with_suffix(".new").rename(file)
            await until(lambda: connections(nodes[0]) < before)
            nodes[0].kill()
            client.segment.memory[:] = 0
            answer = await client.fetch(keys)
            assert (answer.outcome, answer.chunks) == (pb.OUTCOME_COMPLETE, CHUNKS), answer.detail
            assert client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)
            assert (await client.lookup(keys)).hits == [CHUNKS]
    finally:
        for node in nodes:
            node.kill()
