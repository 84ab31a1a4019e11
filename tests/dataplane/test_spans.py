"""Spans of traced calls, from a data plane and a storage node in processes of their own."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from collector import Collector, collector
from dataplane_support import Client, DaemonProcess, Server, client_of, keys_of, layout
from machine import WAIT_MAX_S
from redis import Redis

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
PARENT = "c" * 16


def caused_by(client: Client, context: str) -> Client:
    """Send this context with each further call."""
    client.stub._metadata = (client.stub._metadata[0], ("traceparent", context))
    return client


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


async def test_a_trace_continues_through_data_plane_and_storage_node(spans: Collector, tmp_path: Path) -> None:
    storage = Server("storage_kv", tmp_path, options=("--otlp-endpoint", spans.endpoint)).start()
    daemon = DaemonProcess(storage, tmp_path, otlp_endpoint=spans.endpoint, fused=True)
    try:
        storage.fill(SHAPE, KEYS)
        async with client_of(daemon) as client:
            await client.register(SHAPE, len(KEYS))
            caused_by(client, f"00-{'1' * 32}-{PARENT}-01")
            assert (await client.lookup([*KEYS, bytes(32)])).hits == [len(KEYS)]
            await client.fetches(KEYS, len(KEYS))
            for context in ("", "00-zz", f"00-{'2' * 32}-{'0' * 16}-01", f"00-{'2' * 32}-{PARENT}-00", "x" * 4000):
                await caused_by(client, context).fetches(KEYS, len(KEYS))
            await caused_by(client, f"00-{'3' * 32}-{PARENT}-01").fetches(KEYS, len(KEYS))
            for trace in "13":
                names = ["dpu.fetch", "dpu.batch", "storage.getrange"]
                await asyncio.to_thread(spans.trace, trace * 32, PARENT, *names)
    finally:
        daemon.close()
        storage.kill()
    assert {span.trace[0] for span in spans.spans} == {"1", "3"}, "an invalid or unsampled context began a trace"
    found = await asyncio.to_thread(spans.trace, "1" * 32, PARENT, "dpu.lookup", "storage.kv.meta")
    by_id = {span.id: span for span in found}
    parents = {(span.name, by_id[span.parent].name if span.parent != PARENT else "") for span in found}
    assert {("dpu.lookup", ""), ("dpu.fetch", ""), ("storage.kv.meta", "dpu.lookup")} <= parents
    assert ("storage.getrange", "dpu.batch") in parents
    (lookup,) = (span for span in found if span.name == "dpu.lookup")
    assert (lookup.service, lookup.attributes["outcome"]) == ("shadowserve-dpu", "complete")
    assert lookup.attributes["chunks.storage"] == len(KEYS)
    reads = [span for span in found if span.name == "storage.getrange"]  # one for each connection
    assert {span.service for span in reads} == {"shadowserve-storage"}
    assert sum(span.attributes["commands"] for span in reads) >= len(KEYS)


async def test_other_servers_get_no_command_of_ours_and_a_lost_collector_costs_nothing(
    redis: Server, tmp_path: Path
) -> None:
    redis.fill(SHAPE, KEYS)
    with Redis(port=redis.port) as connection:
        connection.config_resetstat()
        with closing(DaemonProcess(redis, tmp_path, otlp_endpoint="http://127.0.0.1:9")) as daemon:
            async with asyncio.timeout(WAIT_MAX_S), client_of(daemon) as client:
                await client.register(SHAPE, len(KEYS))
                caused_by(client, f"00-{'1' * 32}-{PARENT}-01")
                for _ in range(40):
                    await client.fetches(KEYS, len(KEYS))
        assert connection.info("commandstats")["cmdstat_command|info"]["calls"] > 2
        assert connection.info("errorstats")["errorstat_ERR"]["count"] == 1, "more than KV.META was unknown"
    assert "Traceback" not in (tmp_path / "daemon.log").read_text()
