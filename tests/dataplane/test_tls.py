"""TLS of the daemon: certificate errors at the start, renewed files, and hosts with certificates."""

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from dataplane_support import EXHAUSTED, FAILED, Client, Server, config, keys_of, kv, layout, refused
from dataplane_support import client_of as plain_client_of

from dpu_dataplane.server import Daemon
from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 2)


def keys(folder: Path, **changes: Any) -> dict[str, Any]:
    """TLS configuration of the daemon."""
    named = {"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "ca.crt"}
    return {key: str(folder / name) for key, name in named.items()} | changes


class TlsClient(Client):
    """A client that sends the certificate of a folder, if any."""

    def __init__(self, address: str, authority: Path, own: Path | None) -> None:
        certificate, key = ((own / name).read_bytes() if own else None for name in ("client.crt", "client.key"))
        secret = grpc.ssl_channel_credentials((authority / "ca.crt").read_bytes(), key, certificate)
        super().__init__(address, grpc.aio.secure_channel(address, secret, [("grpc.use_local_subchannel_pool", 1)]))


@contextlib.asynccontextmanager
async def serving(server: Server, folder: Path, **changes: Any) -> AsyncIterator[Daemon]:
    async with Daemon(config(server, **keys(folder, **changes))) as daemon:
        yield daemon


@contextlib.asynccontextmanager
async def client_of(daemon: Daemon, authority: Path, own: Path | None) -> AsyncIterator[TlsClient]:
    client = TlsClient(daemon.address, authority, own)
    try:
        yield client
    finally:
        await client.close()


async def turned_away(daemon: Daemon, authority: Path, own: Path | None) -> None:
    async with client_of(daemon, authority, own) as client:
        await refused(client.hello(), grpc.StatusCode.UNAVAILABLE)


async def test_only_hosts_with_a_certificate_of_the_authority_are_served(
    storage: Server, certificates: Path, expired: Path, foreign: Path
) -> None:
    storage.fill(SHAPE, KEYS)
    async with serving(storage, certificates) as daemon:
        await turned_away(daemon, certificates, None)
        await turned_away(daemon, certificates, expired)
        await turned_away(daemon, certificates, foreign)
        await turned_away(daemon, foreign, certificates)
        async with client_of(daemon, certificates, certificates) as client:
            await client.register(SHAPE, 2)
            assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
            assert client.chunk(1) == kv(SHAPE, 1)


async def test_without_an_authority_hosts_need_no_certificate(storage: Server, certificates: Path) -> None:
    async with serving(storage, certificates, tls_client_ca="") as daemon:
        async with client_of(daemon, certificates, None) as client:
            await client.hello()


async def test_certificates_are_read_again_when_they_change(
    storage: Server, certificates: Path, foreign: Path, expired: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tmp_path / "in use"
    shutil.copytree(certificates, folder)
    async with serving(storage, folder) as daemon:
        async with client_of(daemon, certificates, certificates) as client:
            await client.hello()
        for bad in (expired / "server.crt", foreign / "server.crt", foreign / "client.key"):
            shutil.copy(bad, folder / "server.crt")  # expired, with another key, or not a certificate
            caplog.clear()
            async with client_of(daemon, certificates, certificates) as client:
                await client.hello()
            assert "cannot be used; the old ones stay in use: tls_" in caplog.text
        for name in ("server.crt", "server.key", "ca.crt"):
            shutil.copy(foreign / name, folder)
        await turned_away(daemon, certificates, certificates)
        text = daemon.metrics.gauges["tls_certificate_expiry_timestamp_seconds"]
        assert text[1]() > 0


async def test_another_certificate_is_another_host(
    storage: Server, certificates: Path, make_certificates: Callable[..., Path]
) -> None:
    other = make_certificates("--client-name", "gpu-8", authority=certificates)
    async with (
        serving(storage, certificates) as daemon,
        client_of(daemon, certificates, certificates) as client,
        client_of(daemon, certificates, other) as second,
    ):
        await client.register(SHAPE, 1)
        await refused(second.hello(), EXHAUSTED, "certificate of 'host'")
        second.stub = client.stub.over(second.plain)  # with another host's session
        await refused(second.stub.Lookup(pb.LookupRequest(timeout_ms=1000)), FAILED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tls_cert": "{expired}/server.crt", "tls_key": "{expired}/server.key"}, ["tls_cert", "has expired on 20"]),
        ({"tls_key": "{foreign}/server.key"}, ["tls_key", "is not the key of the certificate"]),
        ({"tls_key": "{good}/absent.key"}, ["tls_key", "cannot read", "No such file"]),
        ({"tls_cert": "{good}/server.key"}, ["tls_cert", "no certificate"]),
        ({"tls_key": "{good}/server.crt"}, ["tls_key", "no private key"]),
        ({"tls_client_ca": "{good}/server.key"}, ["tls_client_ca", "no certificate"]),
        ({"tls_key": "{secret}"}, ["tls_key", "passphrase"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_unusable_certificate_files_are_named_at_the_start(
    storage: Server, certificates: Path, expired: Path, foreign: Path, tmp_path: Path, changes: dict[str, str],
    words: list[str],
) -> None:  # fmt: skip
    secret = tmp_path / "secret.key"
    key = load_pem_private_key((certificates / "server.key").read_bytes(), None)
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")))
    places = {"good": certificates, "expired": expired, "foreign": foreign, "secret": secret}
    given = {key: value.format(**places) for key, value in changes.items()}
    with pytest.raises(ConfigurationError) as error:
        async with Daemon(config(storage, **keys(certificates, **given))):
            pass
    assert all(word in str(error.value) for word in words), error.value


async def test_a_host_without_tls_is_refused(storage: Server, certificates: Path) -> None:
    async with serving(storage, certificates) as daemon:
        with pytest.raises(grpc.aio.AioRpcError):
            async with plain_client_of(daemon):
                pass
