"""Outages of storage: log lines and delays, for each kind of failure."""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_support import cluster_config
from dataplane_support import config, started
from machine import WAIT_MAX_S, free_port, until
from tls_support import TlsServer, showing, trusting

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources import outage
from dpu_dataplane.sources.outage import BACKOFF_FIRST_S, BACKOFF_MAX_S, CAUSES_LOGGED_MAX, STABLE_S, Outage
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.server import OneServer
from shadowserve.addresses import split_address
from shadowserve.errors import StorageUnavailableError
from shadowserve.resp_client import RespClient


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that passes each connection to ``answer``, and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(ConnectionError):
                    answer(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_MAX_S)
        listener.close()


async def test_a_server_that_closes_each_connection_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connection lasts for a moment; together they are one outage."""
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(Outage, "next_delay_s", lambda self: 0.0)

    def hang_up(sock: socket.socket) -> None:
        if sock.recv(1 << 12):
            sock.sendall(b"+PONG\r\n")

    with serving(hang_up) as address:
        metrics = Metrics()
        async with started(OneServer(DataPlaneConfig(storage=address), metrics)):
            await until(lambda: metrics.totals["storage_connections"] > 2 * CAUSES_LOGGED_MAX)
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == len(set(warnings)) <= CAUSES_LOGGED_MAX, warnings


async def test_each_cause_is_logged_once_in_each_outage(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    known = Outage(logging.getLogger("dpu_dataplane.sources.resp.server"), "no cause", lambda: now[0])
    first, second = StorageUnavailableError("away"), StorageUnavailableError("of another authority")

    def logged() -> list[str]:
        texts = [entry.getMessage().partition(" (trying again")[0] for entry in caplog.records]
        caplog.clear()
        return texts

    for error in (first, first, second, first):
        known.fail(error)
    assert logged() == ["away", "of another authority"]
    known.recover()
    now[0] += STABLE_S / 2
    assert not known.disconnect()
    known.fail(first)
    assert logged() == [], "the connection did not last: the same outage"
    known.recover()
    known.check()
    now[0] += STABLE_S
    assert known.disconnect()
    known.fail(first)
    assert logged() == ["away"]
    for number in range(2 * CAUSES_LOGGED_MAX):
        known.fail(StorageUnavailableError(f"cause {number}"))
    assert len(logged()) == CAUSES_LOGGED_MAX - 1
    with pytest.raises(StorageUnavailableError, match=f"cause {2 * CAUSES_LOGGED_MAX - 1}"):
        known.check()


def is_pause(seconds: float, number: int) -> bool:
    """Return True if the time can be the pause of that number in an outage."""
    planned = min(BACKOFF_FIRST_S * 2 ** min(number, 16), BACKOFF_MAX_S)
    return 0.8 * planned <= seconds <= 1.2 * planned


def test_delays_grow_to_a_bound_and_restart_after_a_stable_connection() -> None:
    now = [0.0]
    known = Outage(logging.getLogger(), "no cause", lambda: now[0])
    assert all(is_pause(known.next_delay_s(), number) for number in range(20))
    known.recover()
    assert not known.disconnect()
    assert is_pause(known.next_delay_s(), 20), "the connection did not last"
    known.recover()
    now[0] += STABLE_S
    assert known.disconnect()
    assert all(is_pause(known.next_delay_s(), number) for number in range(20))
    delays = {known.next_delay_s() for _ in range(20)}
    assert len(delays) > 1, "data planes must not reconnect to a server at the same time"


async def test_a_cancelled_connection_attempt_ends_at_once(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the connection stayed open for half a minute and waited for the server's end of TLS."""
    context, ended = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), threading.Event()
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")

    def say_nothing(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True):
            ended.wait(WAIT_MAX_S)

    client = RespClient("the server", WAIT_MAX_S)
    made = client.connection_made

    def give_up(transport: asyncio.BaseTransport) -> None:
        made(transport)
        opening.cancel()

    monkeypatch.setattr(client, "connection_made", give_up)
    with serving(say_nothing) as address:
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        opening = asyncio.create_task(client.open(*split_address(address), [], trusted, "127.0.0.1"))
        try:
            with pytest.raises(asyncio.CancelledError):
                await opening
            for _ in range(10):
                await asyncio.sleep(0)
            assert client.closed.done()
        finally:
            ended.set()
            client.abort("the test is over")
            await client.closed


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[TlsServer]:
    """A storage server that requires a certificate and a password."""
    folder = tmp_path_factory.mktemp("guarded")
    with TlsServer("storage_kv", folder, certificates, mutual=True, password="both") as server:
        yield server


@pytest.mark.parametrize("clustered", [False, True], ids=["server", "cluster"])
@pytest.mark.parametrize("refused", ["connection", "no TLS", "no certificate", "wrong password", "no password"])
async def test_delays_grow_for_every_kind_of_failure(
    refused: str, clustered: bool, guarded: TlsServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a data plane with a wrong certificate reconnected twice a second, without end."""
    pauses: list[float] = []
    pause = Outage.next_delay_s

    def note(self: Outage) -> float:
        pauses.append(pause(self))
        return 0.0

    monkeypatch.setattr(Outage, "next_delay_s", note)
    address = f"127.0.0.1:{free_port()}" if refused == "connection" else guarded.address
    changes: dict[str, Any] = {"storage_password": {"wrong password": "wrong", "no password": ""}.get(refused, "both")}
    if refused != "no TLS":
        changes |= trusting(certificates)
    if refused.endswith("password"):
        changes |= showing(certificates)
    if clustered:
        client: Any = ServerCluster(cluster_config([address], **changes), Metrics())
    else:
        client = OneServer(config(address, **changes), Metrics())
    async with started(client):
        await until(lambda: len(pauses) >= 9)
    assert all(is_pause(seconds, number) for number, seconds in enumerate(pauses)), pauses
    assert max(pauses) > 2.0
