"""A node of a fleet without a bucket is drained and removed: no prompt is missed."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner
from dataplane_support import Server, StartServer, keys_of, kvs, layout, serving
from machine import until

from shadowserve.placement import Placement, partition_of
from shadowserve_tools import main

SHAPE = layout()
CHUNKS = 24


def keys_on_all(nodes: list[Server]) -> list[bytes]:
    """Return the keys of a chain that has segments on all nodes."""
    place = Placement(dict.fromkeys((node.address for node in nodes), 1.0))
    chains = (keys_of(SHAPE, CHUNKS, seed) for seed in range(1000))
    return next(keys for keys in chains if len({place.ranking(partition_of(key))[0] for key in keys}) == len(nodes))


async def test_a_drained_node_is_removed_without_a_miss(start_server: StartServer, tmp_path: Path) -> None:
    nodes = [start_server() for _ in range(3)]
    keys = keys_on_all(nodes)
    file = tmp_path / "members"
    file.write_text("\n".join(node.address for node in nodes))
    changes = {"storage_nodes": f"file:{file}", "storage_nodes_ttl_s": 0.05}
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", **changes) as (daemon, client):
        client.fill(CHUNKS)
        await client.stores(keys)
        had = [sum(node.has(key) for key in keys) for node in nodes]
        assert sum(had) == CHUNKS and all(had), had
        done = await asyncio.to_thread(CliRunner().invoke, main, ["drain", nodes[0].address, f"file:{file}", "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["copied"] == had[0], done.output
        before = nodes[0].connections()
        file.with_suffix(".new").write_text("\n".join(node.address for node in nodes[1:]))
        file.with_suffix(".new").rename(file)
        await until(lambda: nodes[0].connections() < before)
        nodes[0].kill()
        assert await client.fetched(keys) == kvs(SHAPE, CHUNKS)
        assert (await client.lookup(keys)).hits == [CHUNKS]
