"""TLS and mutual TLS: values, failures, and other clients meanwhile."""

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from machine import NEVER_S, wait_for
from storage_support import TIMEOUT_S, Child, Client, Start, make_certificates, make_record, tls_flags

from shadowserve.errors import ConfigurationError
from shadowserve.resp import encode_command
from storage_kv.clients.transport import Certificates
from storage_kv.config import StorageConfig

MIB = 1 << 20


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an authority, a server, alice, and mallory, who is not a user."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "--user", "alice", "--user", "mallory")
    return folder


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority."""
    folder = tmp_path_factory.mktemp("other_authority")
    make_certificates(folder, "--user", "alice")
    return folder


def context_of(folder: Path, user: str = "", certificates_of: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
    if user:
        own = certificates_of or folder
        context.load_cert_chain(f"{own}/{user}.crt", f"{own}/{user}.key")
    return context


class TlsClient(Client):
    """A plain blocking client over TLS."""

    def __init__(self, port: int, context: ssl.SSLContext, receive_buffer: int | None = None) -> None:
        super().__init__(port, receive_buffer=receive_buffer)
        plain = self.socket
        try:
            self.socket = context.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise


@pytest.fixture
def secure(start: Start, certificates: Path) -> Child:
    return start(*tls_flags(certificates))


@pytest.fixture
def client(secure: Child, certificates: Path) -> Iterator[TlsClient]:
    with TlsClient(secure.port, context_of(certificates)) as client:
        yield client


@pytest.mark.parametrize("size", [1, 4095, 16384, 100_000, MIB + 1, 20 * MIB])
def test_values_of_any_size_come_back_whole(size: int, client: TlsClient) -> None:
    value = bytes(bytearray(number % 251 for number in range(1000))) * (size // 1000 + 1)
    value = value[:size]
    assert client.call("SET", "a", value) == b"OK"
    assert client.call("GET", "a") == value
    assert client.call("GETRANGE", "a", size // 2, -1) == value[size // 2 :]
    client.send("MGET", "a", "none", "a")
    assert client.receive() == [value, None, value]


def test_a_slow_reader_gets_every_byte(secure: Child, certificates: Path) -> None:
    """The kernel accepts parts of records. OpenSSL must get the same bytes when it continues."""
    values = [bytes([number]) * (3 * MIB + 4000 * number) for number in range(8)]
    with TlsClient(secure.port, context_of(certificates), receive_buffer=1 << 14) as client:
        for number, value in enumerate(values):
            assert client.call("SET", number, value) == b"OK"
        expected = bytearray()
        for number, value in enumerate(values):
            for command in (["GET", number], ["PING", "x" * 100 * number], ["STRLEN", number]):
                client.socket.sendall(encode_command(*command))
            expected += b"$%d\r\n%b\r\n" % (len(value), value)
            expected += b"$%d\r\n%b\r\n:%d\r\n" % (100 * number, b"x" * 100 * number, len(value))
        found = bytearray()
        while len(found) < len(expected):
            data = client.socket.recv(7777)
            assert data
            found += data
        assert found == expected


def test_commands_that_come_byte_by_byte_and_many_in_one_record(client: TlsClient) -> None:
    for byte in encode_command("SET", "a", "1"):
        client.socket.sendall(bytes([byte]))
    assert client.receive() == b"OK"
    client.socket.sendall(encode_command("GET", "a") * 5000)
    assert all(client.receive() == b"1" for _ in range(5000))


def test_quit_ends_tls_in_order(client: TlsClient) -> None:
    client.socket.sendall(encode_command("PING") + encode_command("QUIT"))
    assert client.receive_to_end() == b"+PONG\r\n+OK\r\n"


def test_replies_in_flight_when_the_server_stops_are_sent(secure: Child, client: TlsClient) -> None:
    value = b"v" * (8 * MIB)
    assert client.call("SET", "a", value) == b"OK"
    client.send("GET", "a")
    assert client.receive_raw(1) == b"$"
    secure.process.terminate()
    assert client.receive_raw(len(value) + 11) == b"%d\r\n%b\r\n" % (len(value), value)
    assert client.socket.recv(1) == b""
    assert secure.wait() == 0


def test_a_plain_client_at_a_tls_port_gets_an_error(secure: Child) -> None:
    with secure.client() as client:
        client.send("PING")
        assert client.receive_to_end().startswith(b"-ERR this server speaks TLS only")
    wait_for(lambda: any("tls_failed" in line and "does not speak TLS" in line for line in secure.log))


def test_repeated_tls_failures_are_logged_with_a_count(
    start: Start, certificates: Path, other_authority: Path, tmp_path: Path
) -> None:
    """The log has few lines. The counter and the audit log have every failure."""
    audit_log = tmp_path / "audit.log"
    child = start(*tls_flags(certificates, mutual=True), "--audit-log", str(audit_log))
    foreign = context_of(certificates, "alice", certificates_of=other_authority)
    for _ in range(20):
        with contextlib.suppress(OSError, EOFError), TlsClient(child.port, foreign) as client:
            client.call("PING")  # a server checks its client after the handshake of TLS 1.3

    def failures() -> int:
        with TlsClient(child.port, context_of(certificates, "alice")) as client:
            return int(client.info()["tls_failures"])

    wait_for(lambda: failures() == 20)
    assert child.stop() == 0
    at_once = [line for line in child.log if "tls_failed address=127.0.0.1:" in line]
    later = [line for line in child.log if "tls_failed_again address=127.0.0.1 times=" in line]
    counts = [int(line.partition("times=")[2].partition(" ")[0]) for line in later]
    assert len(at_once) + sum(counts) == 20, "the end logs the remaining count"
    assert len(at_once) + len(later) < 20 and all("not accepted" in line for line in at_once + later)
    assert sum(json.loads(line)["event"] == "tls" for line in audit_log.read_text().splitlines()) == 20


def test_a_tls_client_at_a_plain_port_is_refused(start: Start, certificates: Path) -> None:
    child = start()  # a separate server, because the log lines of an address are limited
    with pytest.raises(ssl.SSLError) as caught:
        TlsClient(child.port, context_of(certificates))
    assert caught.value.reason == "WRONG_VERSION_NUMBER"
    wait_for(lambda: any("client_refused" in line and "speaks TLS" in line for line in child.log))


def test_old_versions_and_renegotiation_are_refused(secure: Child, certificates: Path) -> None:
    for version, accepted in (("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)):
        context = context_of(certificates)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning) if not accepted else open("/dev/null"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        if accepted:
            with TlsClient(secure.port, context) as client:
                assert client.call("PING") == b"PONG"
        else:
            with pytest.raises(ssl.SSLError):
                TlsClient(secure.port, context)
    ran = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{secure.port}", "-tls1_2", "-CAfile", f"{certificates}/ca.crt"],
        input=b"R\n",  # requests a renegotiation
        capture_output=True,
        timeout=NEVER_S,
    )
    assert b"no renegotiation" in ran.stderr, ran.stderr
    with TlsClient(secure.port, context_of(certificates)) as client:
        assert client.call("PING") == b"PONG"


def test_an_unfinished_handshake_delays_no_other_client(start: Start, certificates: Path) -> None:
    child = start(*tls_flags(certificates), "--authentication-timeout-s", "0.5")

    def answered() -> str:
        """Return the number of failed handshakes, through a fast client: a client with TLS may itself be late."""
        with contextlib.suppress(OSError, EOFError), TlsClient(child.port, context_of(certificates)) as client:
            return client.info()["tls_failures"]
        return ""

    silent = [socket.create_connection(("127.0.0.1", child.port), TIMEOUT_S) for _ in range(20)]
    for sock in silent[10:]:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a greeting
    wait_for(answered)
    for sock in silent:  # each connection ends only if the server keeps its deadline
        assert sock.recv(1) == b""
        sock.close()
    assert int(wait_for(answered)) >= 20


def test_a_renewed_certificate_is_used_without_a_restart(start: Start, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    child = start(*tls_flags(tmp_path))

    def shown() -> bytes | None:
        with TlsClient(child.port, context_of(tmp_path)) as client:
            assert isinstance(client.socket, ssl.SSLSocket)
            assert client.call("PING") == b"PONG"
            return client.socket.getpeercert(binary_form=True)

    before = shown()
    with TlsClient(child.port, context_of(tmp_path)) as old:
        make_certificates(tmp_path)
        assert shown() != before
        (tmp_path / "server.crt").write_text("nothing that could be used")
        assert shown() != before
        assert old.call("PING") == b"PONG"
    wait_for(lambda: any("certificates_unusable" in line for line in child.log))


def test_mutual_tls_accepts_only_certificates_of_its_authority(
    start: Start, certificates: Path, other_authority: Path
) -> None:
    child = start(*tls_flags(certificates, mutual=True))
    with TlsClient(child.port, context_of(certificates, "mallory")) as client:
        assert client.call("PING") == b"PONG" and client.call("ACL", "WHOAMI") == b"default"
    for context in (context_of(certificates), context_of(certificates, "alice", other_authority)):
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)), TlsClient(child.port, context) as client:
            client.call("PING")  # a server checks its client after the handshake of TLS 1.3
    wait_for(lambda: any("has sent no certificate" in line for line in child.log))
    wait_for(lambda: any("certificate is not accepted" in line for line in child.log))


def test_a_certificate_names_its_user(start: Start, certificates: Path, tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user alice on ~a:* +@all tenant=team-a\nuser bob on >pw ~* +@all\nuser default off\n")
    child = start(*tls_flags(certificates, mutual=True), "--tls-users", "cn", "--users-file", str(users))
    with TlsClient(child.port, context_of(certificates, "alice")) as client:
        assert client.call("ACL", "WHOAMI") == b"alice"
        assert client.call("SET", "a:1", "x" * 30_000) == b"OK"  # more than an unauthenticated client may send
        assert client.call("GET", "b").startswith(b"NOPERM")
        assert client.call("AUTH", "bob", "pw") == b"OK" and client.call("ACL", "WHOAMI") == b"bob"
    with TlsClient(child.port, context_of(certificates, "mallory")) as client:
        assert client.call("PING") == b"NOAUTH Authentication required."
    wait_for(lambda: any("certificate_names_no_user" in line and "mallory" in line for line in child.log))


def test_invalid_tls_files_are_errors_at_the_start() -> None:
    with pytest.raises(ValueError, match="tls_client_ca is given without tls_cert"):
        StorageConfig(tls_client_ca="x")
    with pytest.raises(ValueError, match="tls_users needs tls_client_ca"):
        StorageConfig(tls_users="cn")
    with pytest.raises(ConfigurationError, match="tls_cert: cannot read none.crt"):
        Certificates(StorageConfig(tls_cert="none.crt", tls_key="none.key"))


def test_layers_are_sent_through_tls_unchanged(start: Start, certificates: Path) -> None:
    child = start(*tls_flags(certificates))
    records = [make_record(bytes([number]) * 32, body_bytes=MIB, fill=number) for number in range(1, 7)]
    with contextlib.closing(
        redis.Redis("localhost", child.port, ssl=True, ssl_ca_certs=f"{certificates}/ca.crt")
    ) as client:
        for key, value in records:
            client.set(key, value)
        there, *layers = client.execute_command("KV.LAYERS", "0-1", 0, 0, *(key for key, _ in records))
    assert len(layers) == 2 and all(len(layer) > 3 * MIB for layer in layers)
    for layer in layers:
        table, pieces = layer[: 4 * len(records)], layer[4 * len(records) :]
        lengths = [int.from_bytes(table[at : at + 4], "little") for at in range(0, len(table), 4)]
        assert [2 * length for length in lengths] == there
        assert pieces == b"".join(bytes([number]) * length for number, length in enumerate(lengths, 1))
