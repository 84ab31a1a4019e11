"""Connections: Hello at the start and again when it is due, refusals, and failed TLS handshakes."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from lookup_support import CHUNK, MODEL, asked, leading_tokens
from machine import WAIT_MAX_S
from scripted import ScriptedDataPlane, stored

import host_control.connection
from host_control.client import DataPlaneClient, FetchPart
from host_control.config import HostConfig
from host_control.lookup import PrefixLookup
from host_control.registered_memory import RegisteredMemory
from shadowserve import __version__
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.keys import ModelIdentity
from shadowserve.proto import PROTOCOL_VERSION
from shadowserve.proto.convert import engine_message, layout_message
from shadowserve.tls import Credentials, KeyPair

KEYS = [bytes([number]) * 32 for number in range(3)]
CHAINS = [(b"a" * 32, KEYS)]


# ---- Hello ---------------------------------------------------------------------------------------------------------


def test_hello_is_the_first_call_and_names_the_host(plane: ScriptedDataPlane, shape: ChunkLayout) -> None:
    with closing(DataPlaneClient(plane.address, connect_timeout_s=WAIT_MAX_S)) as client:
        assert client.peer is None
        assert not stored(client, CHAINS)[0].any()
        assert plane.calls == ["Hello", "Lookup"]
        assert not stored(client, CHAINS)[0].any()
        assert plane.calls == ["Hello", "Lookup", "Lookup"], "once for each connection"
        assert client.peer is not None and client.peer.memory_kinds == ["shared_memory"]
        RegisteredMemory(client, [shape], 1 << 16).acquire(WAIT_MAX_S)
    first, second = plane.hellos
    assert (first.protocol_version, first.version) == (PROTOCOL_VERSION, __version__)
    assert first.host == second.host and len(first.host) == 32, "all processes of a machine have the same identifier"
    assert not first.HasField("layout")
    assert (second.layout, second.chunk_bytes) == (layout_message(shape), shape.raw_bytes)


def test_hello_names_the_engine_and_returns_differences_to_other_engines(
    plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    engine = engine_message(ModelIdentity(model="a model", dtype="bfloat16"), shape, paged=False)
    plane.differences = ["another engine has other chunks"]
    with closing(HostConfig(data_plane=plane.address, connect_timeout_s=WAIT_MAX_S).client(0, engine)) as client:
        client.connect(WAIT_MAX_S)
        peer = client.connect(WAIT_MAX_S, shape)
    assert peer.differences == ["another engine has other chunks"]
    without, given = plane.hellos
    assert not without.HasField("engine") and given.engine == engine


def test_a_lookup_with_an_unknown_session_is_repeated_after_hello(
    client: DataPlaneClient, plane: ScriptedDataPlane
) -> None:
    plane.records[KEYS[0]] = b""
    assert stored(client, CHAINS)[0].tolist() == [True, False, False]
    plane.forget_hosts()
    plane.calls.clear()
    assert stored(client, CHAINS)[0].tolist() == [True, False, False]
    assert plane.calls == ["Lookup", "Hello", "Lookup"]


def test_a_fetch_and_a_store_of_an_unknown_host_have_an_unknown_memory(
    client: DataPlaneClient, plane: ScriptedDataPlane, registration: RegisteredMemory
) -> None:
    registration.acquire(WAIT_MAX_S)
    plane.forget_hosts()
    (shape,), memory_id = registration.shapes, registration.memory_id
    part = FetchPart.whole(shape, memory_id, KEYS)
    answer = client.start_fetch("job", [part], WAIT_MAX_S).result()
    assert (answer.reason, answer.quiet) == ("unknown_memory", True)
    stored = client.store("job", memory_id, 0, KEYS, [b""] * len(KEYS), WAIT_MAX_S)
    assert (stored.reason, stored.quiet) == ("unknown_memory", True)
    registration.retire(release=False)
    registration.acquire(WAIT_MAX_S)
    assert plane.calls[-2:] == ["Hello", "RegisterMemory"]
    part = FetchPart.whole(shape, registration.memory_id, KEYS)
    assert client.start_fetch("job", [part], WAIT_MAX_S).result().reason == "absent"


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_refused_hello_has_the_data_planes_reason(
    plane: ScriptedDataPlane, shape: ChunkLayout, code: grpc.StatusCode
) -> None:
    plane.script.abort["Hello"] = code
    with closing(DataPlaneClient(plane.address, connect_timeout_s=WAIT_MAX_S)) as client:
        assert not client.wait_ready(WAIT_MAX_S)
        for call in (
            lambda: stored(client, CHAINS),
            lambda: RegisteredMemory(client, [shape], 1 << 16, WAIT_MAX_S).acquire(WAIT_MAX_S),
        ):
            with pytest.raises(DataPlaneError, match="as the script says") as error:
                call()
            assert error.value.outcome == "refused" and plane.address in str(error.value)
        assert set(plane.calls) == {"Hello"}


def test_a_data_plane_without_hello_is_of_an_older_release(plane: ScriptedDataPlane) -> None:
    plane.script.abort["Hello"] = grpc.StatusCode.UNIMPLEMENTED
    with (
        closing(DataPlaneClient(plane.address)) as client,
        pytest.raises(DataPlaneError, match="older release") as error,
    ):
        client.connect(WAIT_MAX_S)
    assert error.value.outcome == "refused"


# ---- TLS -----------------------------------------------------------------------------------------------------------


def own(folder: Path, authority: Path | None = None, **changes: Any) -> Credentials:
    files: dict[str, Any] = {"certificate": str(folder / "client.crt"), "key": str(folder / "client.key")}
    return Credentials(**{"authorities": str((authority or folder) / "ca.crt")} | files | changes)


@contextmanager
def serving(folder: Path, authority: Path | None = None) -> Iterator[ScriptedDataPlane]:
    pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
    trusted = ((authority or folder) / "ca.crt").read_bytes()
    plane = ScriptedDataPlane(credentials=grpc.ssl_server_credentials([pair], trusted, require_client_auth=True))
    yield plane
    plane.stop()


@contextmanager
def connecting(plane: ScriptedDataPlane, credentials: Credentials | None) -> Iterator[DataPlaneClient]:
    with closing(DataPlaneClient(plane.address, credentials=credentials, connect_timeout_s=WAIT_MAX_S)) as client:
        yield client


def refusal(plane: ScriptedDataPlane, credentials: Credentials | None) -> str:
    """Return the reason for the failed connection."""
    with connecting(plane, credentials) as client, pytest.raises(DataPlaneError) as error:
        stored(client, CHAINS)
    assert error.value.outcome == "refused"
    return str(error.value)


def test_waiting_for_a_data_plane_fails_with_the_same_reason(certificates: Path, foreign: Path) -> None:
    with serving(certificates) as plane, connecting(plane, own(foreign)) as client:
        with pytest.raises(DataPlaneError) as error:
            client.connect(WAIT_MAX_S)
        assert error.value.outcome == "refused" and str(error.value) == refusal(plane, own(foreign))


def test_each_tls_failure_has_its_reason(
    certificates: Path, expired: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(certificates) as plane:
        assert "TLS: the data plane's certificate is not signed by an authority in tls_ca" in refusal(
            plane, own(certificates, foreign)
        )
        assert "its tls_client_ca did not sign it" in refusal(plane, own(foreign, certificates))
        assert "TLS: the data plane requires a client certificate: set tls_cert" in refusal(
            plane, own(certificates, certificate="", key="")
        )
        text = refusal(plane, own(certificates, server_name="dpu-of-another.example"))
        assert "is not for 'dpu-of-another.example'" in text and "tls_server_name" in text
        assert "TLS: the data plane uses TLS and this host does not: set tls_ca" in refusal(plane, None)
        # A certificate that expires while the engine runs.
        monkeypatch.setattr(
            host_control.connection,
            "read_key_pair",
            lambda certificate, key: KeyPair(Path(certificate).read_bytes(), Path(key).read_bytes(), datetime.max),
        )
        text = refusal(plane, own(expired))
        assert "TLS: the data plane rejects this host's certificate: tls_cert" in text and "has expired on" in text
    with serving(expired) as plane:
        assert "TLS: the data plane's certificate (its tls_cert) has expired" in refusal(plane, own(certificates))


def test_a_data_plane_without_tls_is_distinguished_from_an_unreachable_one(
    plane: ScriptedDataPlane, certificates: Path
) -> None:
    assert "does not use TLS" in refusal(plane, own(certificates))
    plane.stop()
    with connecting(plane, own(certificates)) as client:
        with pytest.raises(DataPlaneError, match="no data plane answers") as error:
            stored(client, CHAINS)
    assert error.value.outcome == "unreachable"


def test_a_silent_peer_is_unreachable_in_time(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and no process answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with closing(DataPlaneClient(address, credentials=own(certificates))) as client:
            with pytest.raises(DataPlaneError) as error:
                client.connect(0.4)
    assert error.value.outcome == "unreachable"


def test_renewed_files_are_used_for_the_next_connection(certificates: Path, foreign: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in use"
    shutil.copytree(foreign, folder)
    with serving(certificates) as plane, connecting(plane, own(folder)) as client:
        assert not client.wait_ready(1)
        for name in ("ca.crt", "client.crt", "client.key"):
            shutil.copy(certificates / name, folder)
        assert client.wait_ready(WAIT_MAX_S)
        (folder / "client.key").write_text("rubbish")
        for _ in range(2):
            with pytest.raises(DataPlaneError, match="TLS: tls_key") as error:
                client.connect(WAIT_MAX_S)
            assert error.value.outcome == "refused"


def test_files_that_cannot_be_used_are_named_at_the_start(certificates: Path, expired: Path) -> None:
    for credentials, words in (
        (own(expired), "tls_cert: .* has expired"),
        (own(certificates, key=str(expired / "client.key")), "tls_key: .* is not the key of"),
        (own(certificates, authorities=str(certificates / "absent")), "tls_ca: cannot read"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            DataPlaneClient("127.0.0.1:1", credentials=credentials)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_ca": "a", "tls_cert": "b"}, "tls_cert is given without tls_key"),
        ({"tls_ca": "a", "tls_key": "b"}, "tls_key is given without tls_cert"),
        ({"tls_server_name": "b"}, "without tls_ca"),
        ({"tls_cert": "a", "tls_key": "b"}, "without tls_ca"),
    ],
    ids=str,
)
def test_keys_that_do_not_fit_each_other_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HostConfig.load(flags=given, environment={})


def test_the_configuration_makes_the_client(certificates: Path) -> None:
    with serving(certificates) as plane:
        files = {"tls_ca": "ca.crt", "tls_cert": "client.crt", "tls_key": "client.key"}
        flags: dict[str, Any] = {key: str(certificates / name) for key, name in files.items()}
        host, port = plane.address.split(":")
        address, rank = f"{host}:{{rank}}{port[1:]}", int(port[0])
        config = HostConfig.load(flags=flags | {"data_plane": address}, environment={})
        with closing(config.client(rank)) as client:
            assert not stored(client, CHAINS)[0].any(), "lookups pass through TLS"


# ---- A data plane for each rank --------------------------------------------------------------------------------------


def test_a_lookup_goes_to_each_rank_s_data_plane_and_the_fewest_hits_count(
    client: DataPlaneClient, plane: ScriptedDataPlane
) -> None:
    second = ScriptedDataPlane()
    for each, hits in ((plane, 3), (second, 2)):
        each.script.lookup_hits = lambda found, hits=hits: [hits] * len(found)

    def lookup_of(*clients: DataPlaneClient) -> tuple[int, str]:
        held = list(zip(clients, [b"a" * 32, b"b" * 32], strict=True))
        lookup = PrefixLookup(MODEL, [held], leading_tokens, chunk_tokens=CHUNK, timeout=WAIT_MAX_S)
        try:
            answer = asked(lookup, "request", range(13))
            return answer.tokens // CHUNK, answer.reason
        finally:
            lookup.close()

    with closing(DataPlaneClient(second.address, backoff=60, backoff_max_s=60)) as other:
        assert lookup_of(client, other) == (2, "complete")
        assert lookup_of(client, client) == (3, "complete")
        second.stop()
        assert lookup_of(client, other) == (0, "unreachable"), "a hit needs every rank"
        for _ in range(3):
            hits, reason = lookup_of(client, other)
        assert (hits, reason) == (0, "breaker_open"), "an outage of one data plane has no cost"
        assert lookup_of(client, client) == (3, "complete"), "the other data plane has its own breaker"
