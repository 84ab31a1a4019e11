"""KV.LAYERS of large records that are on a device or in a bucket: layers are sent while later ones are read."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cold_support import CREDENTIALS
from faulty_s3 import Answer, Asked, FaultyS3
from machine import WAIT_MAX_S, wait_for
from slow_store import Served
from storage_support import Child, Client, Start, bucket_flags
from test_layers import LAYERS, check, layer_of, lent, pieces, record_of, stored

from shadowserve.keys import storage_key

MIB = 1 << 20
LARGE = {"layer_bytes": MIB}
"""Four layers of 1 MiB: the least part of an ordered read, so each layer is a part."""
Restarted = Callable[..., tuple[Client, dict[bytes, bytes]]]


@pytest.fixture(params=["device", "bucket"])
def restarted(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Restarted:
    """Start a node whose records are on a device, or in a bucket; none is in memory."""

    def start_node(count: int, memory: str = "64 MiB") -> tuple[Client, dict[bytes, bytes]]:
        if request.param == "device":
            below = ["--devices", f'[{{"path": "{tmp_path}/device", "size": "256 MiB"}}]']
        else:
            below = bucket_flags(request.getfixturevalue("faulty").endpoint, gather_s=0.2)
        child = start("--memory-budget-bytes", "128 MiB", *below, environment=CREDENTIALS)
        client = child.client()
        records = stored(client, count, **LARGE)
        if request.param == "bucket":
            wait_for(lambda: client.info("s3")["records"] == str(count))
        assert child.stop() == 0
        client = start("--memory-budget-bytes", memory, *below, environment=CREDENTIALS).client()
        wait_for(lambda: request.param == "device" or client.info("s3")["records"] == str(count))
        return client, records

    return start_node


def reads(client: Client) -> int:
    """Return the bytes read from a device, or the number of requests to the bucket."""
    device = re.search(r"read_bytes=(\d+)", client.info("devices").get("device0", ""))
    return int(client.info("s3")["requests"] if device is None else device[1])


def test_all_layers_arrive_and_records_are_kept_for_the_next_time(restarted: Restarted) -> None:
    client, records = restarted(3)
    small, value = record_of(9, layer_bytes=2048)
    client.call("SET", small, value)
    asked = [*records, small, storage_key(b"?" * 32)]
    records[small] = value
    check(client.call("KV.LAYERS", "0-1", 0, 0, *asked), asked, records, range(2))
    check(client.call("KV.LAYERS", "3,1-2", 0, 0, *asked), asked, records, [3, 1, 2])
    before = reads(client)
    check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    assert reads(client) == before > 0
    wait_for(lambda: lent(client) == 0)


def test_records_that_do_not_fit_memory_pass_through_it(restarted: Restarted) -> None:
    client, records = restarted(12, "32 MiB")  # 48 MiB, of which 16 may be lent
    asked = list(records)
    for layers in ("0-3", "2-3"):
        first, last = map(int, layers.split("-"))
        check(client.call("KV.LAYERS", layers, 0, 0, *asked), asked, records, range(first, last + 1))
    wait_for(lambda: lent(client) == 0)
