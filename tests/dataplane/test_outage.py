"""What the log has of an outage of storage, and how soon it is tried again, whatever it fails for."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from machine import until

from dpu_dataplane import outage
from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.outage import CAUSES_TOLD_MAX, STABLE_TIME, Outage
from dpu_dataplane.storage import StorageClient
from shadowserve.errors import StorageUnavailableError


@contextlib.asynccontextmanager
async def hanging_up() -> AsyncIterator[str]:
    """A server that answers the greeting and ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def test_a_server_that_hangs_up_on_whoever_has_come_in_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connection stood for a moment: it is one outage all the same."""
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(Outage, "pause", lambda self: 0.0)
    async with hanging_up() as address:
        metrics = Metrics()
        client = StorageClient(DataPlaneConfig(storage=address), metrics)
        await client.start()
        try:
            await until(lambda: metrics.storage_connections > 2 * CAUSES_TOLD_MAX)
        finally:
            await client.close()
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == len(set(warnings)) <= CAUSES_TOLD_MAX, warnings


async def test_each_cause_is_told_once_in_an_outage_and_again_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    known = Outage(logging.getLogger("dpu_dataplane.storage"), lambda: now[0])
    first, second = StorageUnavailableError("away"), StorageUnavailableError("of another authority")

    def told() -> list[str]:
        texts = [entry.getMessage().partition(" (trying again")[0] for entry in caplog.records]
        caplog.clear()
        return texts

    for error in (first, first, second, first):
        known.begin(error)
    assert told() == ["away", "of another authority"]
    known.end()
    now[0] += STABLE_TIME / 2
    assert not known.lose()
    known.begin(first)
    assert told() == [], "it did not hold: the same outage"
    known.end()
    known.check()
    now[0] += STABLE_TIME
    assert known.lose()
    known.begin(first)
    assert told() == ["away"]
    for number in range(2 * CAUSES_TOLD_MAX):
        known.begin(StorageUnavailableError(f"cause {number}"))
    assert len(told()) == CAUSES_TOLD_MAX - 1
    with pytest.raises(StorageUnavailableError, match=f"cause {2 * CAUSES_TOLD_MAX - 1}"):
        known.check()
