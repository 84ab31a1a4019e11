"""Shared memory that another process truncates: the daemon survives accesses beyond its end, and serves all others."""

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dataplane_support import (
    INVALID,
    WAYS,
    Client,
    DaemonProcess,
    Server,
    client_of,
    keys_of,
    kvs,
    layout,
    refused,
    way_name,
)
from machine import NEVER_S, until

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
FRESH = keys_of(SHAPE, 4, seed=1)
SHORTER = "is shorter now; register it again"


class Shrinking:
    """Memory of a client that keeps a descriptor of its segment, to truncate it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        client.own(SHAPE, 4 * SHAPE.raw_bytes)
        self._file = os.open(client.segment.path, os.O_RDWR)

    async def register(self) -> "Shrinking":
        self._client.memory_id = (await self._client.stub.RegisterMemory(self._client.register_request())).memory_id
        return self

    def resize(self, size: int) -> None:
        os.truncate(self._file, size)

    async def is_removed(self) -> bool:
        os.close(self._file)
        return (await self._client.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_truncated_memory_is_removed_and_no_other(
    mortal_storage: Server, tmp_path: Path, way: dict[str, Any]
) -> None:
    storage = mortal_storage
    storage.fill(SHAPE, KEYS)
    with closing(DaemonProcess(storage, tmp_path, command_timeout_s=NEVER_S, **way)) as daemon:
        async with client_of(daemon) as bad, client_of(daemon) as good:
            await good.register(SHAPE, 4)

            memory = await Shrinking(bad).register()  # truncated before its first use
            memory.resize(SHAPE.raw_bytes * 2)
            await refused(bad.fetch(KEYS), INVALID, SHORTER)
            assert await memory.is_removed()

            memory = await Shrinking(bad).register()  # during a fetch
            await bad.lookup(KEYS)
            storage.freeze()
            fetch = asyncio.ensure_future(bad.fetch(KEYS))
            await until(storage.asked)
            memory.resize(0)
            storage.thaw()
            await refused(fetch, INVALID, SHORTER)
            assert await memory.is_removed()

            memory = await Shrinking(bad).register()  # during a store: no record may be stored
            storage.freeze()
            store = asyncio.ensure_future(bad.store(FRESH))
            await until(storage.asked)  # the lookup of existing keys: no chunk is encoded yet
            memory.resize(SHAPE.raw_bytes // 2)
            storage.thaw()
            await refused(store, INVALID, SHORTER)
            assert not any(storage.has(key) for key in FRESH)
            assert await memory.is_removed()

            memory = await Shrinking(bad).register()  # extended again: the first access creates pages of zeros
            memory.resize(0)
            memory.resize(bad.segment.size)
            assert (await bad.fetch(KEYS)).chunks == 4
            assert bad.chunks(4) == kvs(SHAPE, 4)
            memory.resize(SHAPE.raw_bytes)
            await refused(bad.fetch(KEYS), INVALID, "is shorter now")
            assert await memory.is_removed()

            assert (await good.fetch(KEYS)).chunks == 4
            assert good.chunks(4) == kvs(SHAPE, 4)
        assert daemon.stop() == 0
        log = daemon.log.read_text()
        assert "Traceback" not in log and log.count("is shorter now") == 4, "the log must have one line for each"
