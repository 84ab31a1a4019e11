"""TLS from the data plane to storage: real servers, and error messages."""

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_support import Cluster, cluster_config
from dataplane_support import (
    WAYS,
    Server,
    config,
    keys_of,
    kvs,
    layout,
    listening,
    make_record,
    running,
    serving,
    way_name,
)
from machine import NEVER_S, WAIT_MAX_S, until
from tls_support import TlsServer, showing, trusting

from dpu_dataplane.jobs import Job
from dpu_dataplane.server import Daemon
from dpu_dataplane.sources.resp.links import Dialer, Node
from shadowserve import native
from shadowserve.addresses import split_address
from shadowserve.errors import ConfigurationError, StorageUnavailableError
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(layers=8)
KEYS = keys_of(SHAPE, 12)
RECORDS = [make_record(SHAPE, key, seed) for seed, key in enumerate(KEYS)]
WANTED = kvs(SHAPE, len(KEYS))


class Proxy:
    """A TLS server in front of a plain one. It cuts answers off without close_notify."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.address = ""
        self.cut_after = 0  # bytes of one connection's answers; 0: never
        self.cuts_left = 0
        self.cuts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asking = await asyncio.open_connection("127.0.0.1", self._target)
        relay = asyncio.create_task(self._relay(reader, asking))
        with contextlib.suppress(ConnectionError), contextlib.closing(writer), contextlib.closing(asking):
            total = 0
            while data := await answers.read(65536):
                if self.cut_after and self.cuts_left and total + len(data) > self.cut_after:
                    writer.write(data[: self.cut_after - total])
                    await writer.drain()
                    self.cuts_left -= 1
                    self.cuts += 1
                    writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # not of TLS: no close_notify
                    break
                total += len(data)
                writer.write(data)
                await writer.drain()
        relay.cancel()
        await asyncio.wait({relay})

    async def _relay(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
            target.close()


@contextlib.asynccontextmanager
async def proxied(folder: Path, port: int) -> AsyncIterator[Proxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    proxy = Proxy(port)
    async with listening(proxy.serve, ssl=context) as proxy.address:
        yield proxy


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[TlsServer]:
    """A storage server with TLS and a password that has the records."""
    with TlsServer("storage_kv", tmp_path_factory.mktemp("tls"), certificates, password="of tls") as server:
        server.fill(SHAPE, KEYS)
        yield server


@pytest.fixture
async def proxy(storage: Server, certificates: Path) -> AsyncIterator[Proxy]:
    storage.fill(SHAPE, KEYS)
    async with proxied(certificates, storage.port) as proxy:
        yield proxy


async def fails(server: "Server | str", *words: str, **changes: Any) -> None:
    """Check that a fetch and a lookup are misses with this reason."""
    async with serving(SHAPE, len(KEYS), server, **changes) as (daemon, client):
        answer = await client.fetches(KEYS, 0, pb.OUTCOME_STORAGE_UNAVAILABLE)
        assert all(word in answer.detail for word in words), answer.detail
        assert not daemon._source.connected


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_bytes_are_encrypted_and_arrive_unchanged(
    encrypted: TlsServer, certificates: Path, way: dict[str, Any]
) -> None:
    async with serving(SHAPE, len(KEYS), encrypted, **trusting(certificates), **way) as (_, client):
        assert (await client.lookup(KEYS)).hits == [len(KEYS)]
        for _ in range(2):
            assert await client.fetched(KEYS) == WANTED


async def test_records_are_received_over_tls_as_they_are_stored(encrypted: TlsServer, certificates: Path) -> None:
    async with running(encrypted, **trusting(certificates)) as (daemon, _):
        for key, record in zip(KEYS, RECORDS, strict=True):
            for first in (0, 1000):
                memory = bytearray(len(record) - first)
                job = Job("a test", "a job", WAIT_MAX_S)
                assert await daemon._source.receive(job, key, first, memoryview(memory)) is native.Result.OK
                assert memory == record[first:]


@pytest.mark.parametrize("kind", ["storage_kv", "redis"])
async def test_mutual_tls_works(tmp_path: Path, certificates: Path, kind: str) -> None:
    with TlsServer(kind, tmp_path, certificates, mutual=True, password="both") as server:
        async with serving(SHAPE, len(KEYS), server, **trusting(certificates), **showing(certificates)) as (_, client):
            await client.stores(KEYS)
            assert await client.fetched(KEYS) == WANTED
        await fails(server, "storage_tls_cert", **trusting(certificates))  # without a client certificate


@pytest.mark.parametrize(
    ("server", "authority", "name", "words"),
    [
        ("trusted", "foreign", "", "not signed by an authority in storage_tls_ca"),
        ("trusted", "own", "another.example", "is not for 'another.example'"),
        ("trusted", "own", "10.0.0.1", "is not for '10.0.0.1'"),
        ("expired", "own", "", "expired"),
        ("plain", "own", "", "does not speak TLS"),
    ],
)
async def test_a_server_that_is_not_trusted_is_named_by_control_and_data_connections(
    encrypted: TlsServer, storage: Server, certificates: Path, foreign: Path, expired: Path,
    server: str, authority: str, name: str, words: str,
) -> None:  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        where: Server | str = {"trusted": encrypted, "plain": storage}.get(server, "")
        if server == "expired":
            where = (await stack.enter_async_context(proxied(expired, storage.port))).address
        changes = trusting(foreign if authority == "foreign" else certificates, storage_server_name=name)
        await fails(where, words, **changes)
        configuration = config(where, **changes)
        with pytest.raises(StorageUnavailableError, match=words):  # the C core finds the same errors
            await Dialer(configuration).open(Node(*split_address(configuration.storage)))


async def test_a_name_of_the_certificate_is_trusted(encrypted: TlsServer, certificates: Path) -> None:
    async with running(encrypted, **trusting(certificates, storage_server_name="localhost")) as (_, client):
        await client.register(SHAPE, len(KEYS))
        assert (await client.fetch(KEYS)).chunks == len(KEYS)


async def test_the_error_tells_a_tls_server_from_a_stalled_one(encrypted: TlsServer, certificates: Path) -> None:
    await fails(encrypted, "storage")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        changes = trusting(certificates, connect_timeout_s=0.2)
        await fails(f"127.0.0.1:{silent.getsockname()[1]}", "no answer for 0.2 s", **changes)


@pytest.mark.parametrize("after", [1, 5000])
async def test_a_truncated_tls_stream_is_not_complete(proxy: Proxy, certificates: Path, after: int) -> None:
    async with serving(SHAPE, len(KEYS), proxy.address, connections=1, **trusting(certificates)) as (_, client):
        await client.lookup(KEYS)
        proxy.cut_after, proxy.cuts_left = len(b"+PONG\r\n") + after, 1
        assert await client.fetched(KEYS) == WANTED  # one failure: the daemon connects again
        assert proxy.cuts == 1
    async with serving(SHAPE, len(KEYS), proxy.address, connections=1, **trusting(certificates)) as (_, client):
        await client.lookup(KEYS)
        proxy.cuts_left = 1000
        answer = await client.fetch(KEYS)  # permanent failure
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
        assert answer.chunks < len(KEYS)
        assert client.chunks(answer.chunks) == WANTED[: answer.chunks]


async def test_a_handshake_does_not_outlive_the_call_that_waits_for_it(
    encrypted: TlsServer, certificates: Path
) -> None:
    """The deadline of the data connections: the control connection stays open."""
    async with running(encrypted, connect_timeout_s=WAIT_MAX_S, **trusting(certificates)) as (daemon, client):
        await client.register(SHAPE, len(KEYS))
        await client.lookup(KEYS)
        encrypted.freeze()
        try:
            await client.fetches(KEYS, 0, pb.OUTCOME_DEADLINE, timeout_ms=300)
            request = client.fetch_request(KEYS, timeout_ms=int(1000 * NEVER_S))
            call = asyncio.ensure_future(client.stub.Fetch(request))
            await until(encrypted.asked)
            await client.stub.Cancel(pb.CancelRequest(job_id=request.job_id))
            assert (await call).outcome == pb.OUTCOME_CANCELLED
        finally:
            encrypted.thaw()
        assert await client.fetched(KEYS) == WANTED
        assert daemon._source.connected


async def test_a_replaced_authority_is_read_again(
    encrypted: TlsServer, certificates: Path, foreign: Path, tmp_path: Path
) -> None:
    shutil.copy(foreign / "ca.crt", tmp_path / "ca.crt")
    async with serving(SHAPE, len(KEYS), encrypted, **trusting(tmp_path)) as (daemon, client):
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
        (tmp_path / "ca.crt").write_text("nothing of the kind")
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
        shutil.copy(certificates / "ca.crt", tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "ca.crt")
        await until(lambda: daemon._source.connected)
        assert (await client.fetch(KEYS)).chunks == len(KEYS)


async def test_a_wrong_password_is_refused_over_tls(encrypted: TlsServer, certificates: Path) -> None:
    changes = trusting(certificates, storage_username="default", storage_password="not that")
    async with serving(SHAPE, len(KEYS), encrypted, **changes) as (_, client):
        answer = await client.fetch(KEYS)
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_STORAGE_REFUSED, 0) and "AUTH" in answer.detail
        assert (await client.lookup(KEYS)).outcome == pb.OUTCOME_STORAGE_REFUSED


async def test_a_cluster_can_use_tls(tmp_path: Path, certificates: Path) -> None:
    with Cluster(tmp_path, replicas=0, certificates=certificates) as cluster:
        cluster.never_fail_over()
        for key, record in zip(KEYS, RECORDS, strict=True):
            cluster.put(key, record)
        settings = cluster_config(cluster, **trusting(certificates), **showing(certificates))
        async with serving(SHAPE, len(KEYS), settings) as (_, client):
            assert await client.fetched(KEYS) == WANTED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"storage_tls_ca": "/nowhere/ca.crt"}, "storage_tls_ca: cannot read"),
        ({"storage_tls_ca": "{folder}/ca.key"}, "storage_tls_ca: .* holds no certificate"),
        (
            {"storage_tls_ca": "{folder}/ca.crt", "storage_tls_cert": "{folder}/client.crt",
             "storage_tls_key": "{folder}/server.key"},
            "storage_tls_key: .* is not the key",
        ),
    ],
)  # fmt: skip
async def test_unusable_tls_files_stop_the_daemon(
    storage: Server, certificates: Path, changes: dict[str, str], words: str
) -> None:
    changes = {key: value.format(folder=certificates) for key, value in changes.items()}
    with pytest.raises(ConfigurationError, match=words):
        async with Daemon(config(storage, **changes)):
            pass


async def test_a_build_without_tls_refuses_to_start_with_the_missing_part(
    storage: Server, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: Callable[[], str] = str
    monkeypatch.setattr(native, "tls_library", absent)
    with pytest.raises(ConfigurationError, match="libssl-dev"):
        async with Daemon(config(storage, **trusting(certificates))):
            pass
