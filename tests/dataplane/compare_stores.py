"""Lookup and fetch of a prompt from each kind of store, on this machine (docs/guides/stores.md).

    python tests/dataplane/compare_stores.py [--chunks 24] [--repeats 5]

All processes share one machine's cores. So the numbers show the cost of each store's path, not the rate of a cluster.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from cluster_support import Cluster, cluster_config  # noqa: E402
from dataplane_support import Server, config, keys_of, kv, layout, serving  # noqa: E402
from machine import WAIT_MAX_MS  # noqa: E402
from tls_support import TlsServer  # noqa: E402

from dpu_dataplane import catalog  # noqa: E402
from shadowserve.proto import dataplane_pb2 as pb  # noqa: E402

SHAPE = layout("binned", layers=32, vector_length=1024, tokens=256)
BUFFERS = {"decompression_buffer_bytes": "512MiB", "store_buffer_bytes": "64MiB"}
catalog.HEADER_CACHE_BYTES = 0  # each fetch requests its headers


async def measure(name: str, values: Any, chunks: int, repeats: int) -> None:
    keys = keys_of(SHAPE, chunks)
    async with serving(SHAPE, chunks, values) as (_, client):
        client.write([kv(SHAPE, index % 4) for index in range(chunks)])
        stored = await client.store(keys, timeout_ms=WAIT_MAX_MS)
        assert stored.outcome == pb.OUTCOME_COMPLETE, stored.detail
        lookups, fetches = [], []
        for _ in range(repeats):
            begin = time.perf_counter()
            assert (await client.lookup(keys)).hits == [chunks]
            lookups.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            answer = await client.fetch(keys)
            fetches.append(time.perf_counter() - begin)
            assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        print(f"| {name} | {1000 * min(lookups):.1f} | {answer.fetched_bytes / min(fetches) / 1e9:.2f} |", flush=True)


async def compare(chunks: int, repeats: int, folder: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make-certificates"
    certificates = folder / "certificates"
    certificates.mkdir()
    subprocess.run([sys.executable, script, certificates], check=True, stdout=subprocess.DEVNULL)
    trusting = {"storage_tls_ca": str(certificates / "ca.crt")}
    ways: list[tuple[str, Callable[[Path], Any], Callable[[Any], Any]]] = [
        ("our server", lambda at: Server("storage_kv", at), lambda s: config(s, **BUFFERS)),
        ("our server, TLS", lambda at: TlsServer("storage_kv", at, certificates),
         lambda s: config(s, **BUFFERS, **trusting)),
        ("one Redis", lambda at: Server("redis", at), lambda s: config(s, **BUFFERS)),
        ("one Redis, TLS", lambda at: TlsServer("redis", at, certificates), lambda s: config(s, **BUFFERS, **trusting)),
        ("Redis Cluster, 3 masters", lambda at: Cluster(at, replicas=0), lambda c: cluster_config(c, **BUFFERS)),
    ]  # fmt: skip
    print("| store | lookup, ms | fetch, GB/s received |\n|---|---|---|")
    for number, (name, make, configure) in enumerate(ways):
        at = folder / str(number)
        at.mkdir()
        with make(at) as store:
            await measure(name, configure(store), chunks, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(arguments.chunks, arguments.repeats, Path(folder)))


if __name__ == "__main__":
    main()
