"""Access to the server: passwords, protected mode, ``shadowserve doctor``, and the audit log."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from machine import NEVER_S, wait_for
from storage_support import TIMEOUT_S, Child, Start, make_certificates, tls_flags

from shadowserve.resp import encode_command
from shadowserve_tools import main
from storage_kv.access.audit import AuditLog

PASSWORD = "correct horse"


def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    found = subprocess.run(
        ["hostname", "-I"], capture_output=True, text=True, check=True, timeout=NEVER_S
    ).stdout.split()
    addresses = [address for address in found if ":" not in address and not address.startswith("127.")]
    assert addresses, "this test needs a machine with an IPv4 address that is not loopback"
    return addresses[0]


@pytest.fixture
def guarded(start: Start) -> Child:
    return start(environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})


def test_unauthenticated_clients_can_only_authenticate(guarded: Child) -> None:
    with guarded.client() as client:
        for command in (["GET", "a"], ["PING"], ["INFO"], ["KV.META", "a"], ["CLIENT", "ID"], ["COMMAND"]):
            assert client.call(*command) == b"NOAUTH Authentication required."
        assert client.refused("HELLO", 3).startswith(b"NOAUTH HELLO must be called with")
        wrong = b"WRONGPASS invalid username-password pair or user is disabled."
        assert client.call("AUTH", "wrong") == wrong
        assert client.call("AUTH", "") == wrong
        assert client.call("AUTH", "nobody", PASSWORD) == wrong
        assert client.call("HELLO", 3, "AUTH", "default", "wrong") == wrong
        assert client.call("GET", "a") == b"NOAUTH Authentication required."
        assert client.call("AUTH", PASSWORD) == b"OK"
        assert client.call("SET", "a", "1") == b"OK"
        assert client.call("RESET") == b"RESET"
        assert client.call("GET", "a") == b"NOAUTH Authentication required."
        assert client.call("HELLO", 2, "AUTH", "default", PASSWORD, "SETNAME", "me") != wrong
        assert client.call("CLIENT", "GETNAME") == b"me"
        assert client.info()["acl_access_denied_auth"] == "4"


def test_before_the_password_a_client_may_send_little(guarded: Child) -> None:
    with guarded.client() as client:
        client.socket.sendall(encode_command("SET", "a", b"x" * 20_000))
        assert client.receive_to_end() == b"-ERR Protocol error: unauthenticated bulk length\r\n"
    with guarded.client() as client:
        client.socket.sendall(encode_command("DEL", *["a"] * 10))
        assert client.receive_to_end() == b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    with guarded.client() as client:  # and the commands after it in the same packet
        client.socket.sendall(encode_command("AUTH", PASSWORD) + encode_command("SET", "a", b"x" * 20_000))
        assert client.receive() == b"OK" and client.receive() == b"OK"
        assert client.call("EXISTS", *["a"] * 20) == 20


def test_the_password_is_written_nowhere(guarded: Child) -> None:
    with guarded.client() as client:
        client.call("AUTH", PASSWORD)
        assert PASSWORD.encode() not in bytes(client.call("INFO", "everything"))
        assert client.call("CONFIG", "GET", "*pass*") == []
    assert guarded.stop() == 0
    assert PASSWORD not in "\n".join(guarded.log)


def test_other_machines_are_denied_without_a_password(start: Start) -> None:
    child = start("--host", "0.0.0.0")
    with child.client(own_address()) as outside:
        answer = outside.receive_to_end()
    assert answer.startswith(b"-DENIED ") and answer.endswith(b"\r\n") and answer.count(b"\n") == 1
    with child.client() as inside:
        assert inside.call("PING") == b"PONG"
        assert inside.info()["connections_denied"] == "1"
    with (
        redis.Redis(own_address(), child.port) as client,
        pytest.raises(redis.exceptions.RedisError, match="protected mode"),
    ):
        client.ping()
    assert child.stop() == 0
    assert any("no_password" in line for line in child.log) and any("client_denied" in line for line in child.log)


def test_other_machines_connect_with_a_password_or_without_protected_mode(start: Start) -> None:
    child = start("--host", "0.0.0.0", environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"NOAUTH Authentication required."
        assert outside.call("AUTH", PASSWORD) == b"OK" and outside.call("PING") == b"PONG"
    child = start("--host", "0.0.0.0", "--protected-mode", "false")
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"PONG"


def test_by_default_other_machines_cannot_connect_at_all(shared_server: Child) -> None:
    with pytest.raises(ConnectionRefusedError):
        shared_server.client(own_address())


@pytest.fixture
def users(tmp_path: Path) -> Path:
    file = tmp_path / "users.acl"
    file.write_text("user ann on >pa ~* +@all\n")
    file.chmod(0o600)
    return file


def test_protected_mode_depends_on_users_and_certificates(start: Start, users: Path, tmp_path: Path) -> None:
    child = start("--host", "0.0.0.0", "--users-file", str(users))
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"NOAUTH Authentication required."
        assert outside.call("AUTH", "ann", "pa") == b"OK"
        assert outside.call("ACL", "SETUSER", "default", "on", "nopass", "+@all", "~*") == b"OK"
    with child.client(own_address()) as outside:  # protected mode refuses clients without a password
        assert outside.receive_to_end().startswith(b"-DENIED ")
    wait_for(lambda: any("no_tls" in line for line in child.log))
    make_certificates(tmp_path)
    child = start("--host", "0.0.0.0", *tls_flags(tmp_path))
    with child.client(own_address()) as outside:
        assert outside.receive_to_end().startswith(b"-DENIED ")  # TLS alone does not identify clients
    assert not any("no_tls" in line for line in child.log)
    child = start("--host", "0.0.0.0", *tls_flags(tmp_path, mutual=True))
    with child.client(own_address()) as outside:
        outside.send("PING")
        assert outside.receive_to_end().startswith(b"-ERR this server speaks TLS only")


def findings(config: Path, text: str) -> dict[str, list[str]]:
    config.write_text(f"storage:\n  port: 1\n{text}")
    result = CliRunner().invoke(main, ["doctor", "--role", "storage", "--config", str(config), "--json"])
    found: dict[str, list[str]] = {}
    for finding in json.loads(result.output)["findings"]:
        found.setdefault(finding["what"], []).append(finding["state"])
    return found


def test_doctor_looks_at_users_protection_and_certificates(users: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    assert findings(config, "")["protection"] == ["ok"]
    found = findings(config, "  host: 0.0.0.0\n")
    assert found["protection"] == ["warning"] and found["TLS"] == ["warning"]
    found = findings(config, f"  host: 0.0.0.0\n  users_file: {users}\n")
    assert found["protection"] == ["ok"] and found["users_file"] == ["ok"] and found["TLS"] == ["warning"]
    users.chmod(0o644)
    assert findings(config, f"  users_file: {users}\n")["users_file"] == ["ok", "warning"]
    users.write_text("user ann +nosuch\n")
    assert findings(config, f"  users_file: {users}\n")["users_file"] == ["failed"]
    make_certificates(tmp_path)
    files = f"  tls_cert: {tmp_path}/server.crt\n  tls_key: {tmp_path}/server.key\n  tls_client_ca: {tmp_path}/ca.crt\n"
    found = findings(config, "  host: 0.0.0.0\n" + files)
    assert (
        found["protection"] == ["ok"] and found["tls_cert"] == found["tls_client_ca"] == ["ok"] and "TLS" not in found
    )
    (tmp_path / "server.key").write_text("nothing")
    assert findings(config, files)["tls_cert"] == ["failed"]


SECRET = "sesame-open"


class LoggedClient:
    address = "10.0.0.1:1234"
    user_name = b"ali\xffce"


def entries_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_authentications_denials_and_changes_are_audited(start_tenants: Start, tmp_path: Path) -> None:
    log, users = tmp_path / "audit.log", f"user root on >{SECRET} ~* +@all\nuser ann on >{SECRET} ~a* +@read tenant=a\n"
    child = start_tenants("--audit-log", str(log), users=users)
    with child.client() as ann, child.client() as root:
        ann.call("AUTH", "ann", "wrong-guess")
        assert ann.call("AUTH", "ann", SECRET) == b"OK"
        ann.call("GET", "private-key")
        ann.call("SET", "a", "private-value")
        assert root.call("HELLO", 3, "AUTH", "root", SECRET) is not None
        root.call("ACL", "SETUSER", "ann", ">another-secret")
        root.call("CONFIG", "GET", "save")
        root.call("FLUSHALL")
        root.call("GET", "private-key")
    assert child.stop() == 0
    entries = entries_of(log)
    logged = [(entry["event"], entry["user"], entry["outcome"], entry.get("command")) for entry in entries]
    assert logged == [
        ("authentication", "ann", "failed", None), ("authentication", "ann", "ok", None),
        ("denied", "ann", "denied", "get"), ("denied", "ann", "denied", "set"),
        ("authentication", "root", "ok", None), ("command", "root", "allowed", "acl|setuser"),
        ("command", "root", "allowed", "config|get"), ("command", "root", "allowed", "flushall"),
    ]  # fmt: skip
    assert all(entry["address"].startswith("127.0.0.1:") and entry["time"].endswith("+00:00") for entry in entries)
    for text in (log.read_text(), "\n".join(child.log)):
        for secret in (SECRET, "another-secret", "wrong-guess", "private-key", "private-value"):
            assert secret not in text
    assert log.stat().st_mode & 0o777 == 0o600


def test_repeated_denials_do_not_crowd_out_other_events(start_tenants: Start, tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    users = f"user root on >{SECRET} ~* +@all\nuser ann on >{SECRET} ~a* +@read +auth tenant=a\n"
    child = start_tenants("--audit-log", str(log), "--audit-log-bytes-max", "65536", users=users)
    with child.client() as ann, child.client() as root:
        assert root.call("AUTH", "root", SECRET) == b"OK" and root.call("FLUSHALL") == b"OK"
        assert ann.call("AUTH", "ann", SECRET) == b"OK"
        ann.calls(*[("SET", "a", "1")] * 2000)
        ann.calls(*[("AUTH", "ann", SECRET)] * 500)
        assert root.call("CONFIG", "GET", "save") != b""
    assert child.stop() == 0
    entries = entries_of(log)
    assert [entry["command"] for entry in entries if entry["user"] == "root" and entry["event"] == "command"] == [
        "flushall",
        "config|get",
    ]
    logged = [entry for entry in entries if entry["event"] == "denied"]
    assert len(logged) < 100 and sum(entry.get("times", 1) for entry in logged) == 2000


def test_the_audit_log_is_rotated_by_size(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path), 4096)
    for number in range(100):
        log.write("command", LoggedClient(), outcome="ok", each=True, command="x" * 500, number=number)
    log.close()
    assert log.written == 100 and log.lost == 0
    assert path.stat().st_size <= 4096 and (tmp_path / "audit.log.1").stat().st_size <= 4096
    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.log", "audit.log.1"]
    last = entries_of(path)[-1]
    assert last["number"] == 99 and last["user"] == "ali\\xffce" and len(last["command"]) == 256


def test_the_audit_log_recovers_from_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from storage_kv.access import audit

    monkeypatch.setattr(audit, "_RETRY_S", 0.0)
    folder = tmp_path / "mounted"
    log = AuditLog(str(folder / "audit.log"))
    log.write("command", LoggedClient(), outcome="ok")
    wait_for(lambda: log.lost == 1)
    folder.mkdir()
    log.write("command", LoggedClient(), outcome="ok")
    wait_for(lambda: log.written == 1)
    log.close()
    assert len(entries_of(folder / "audit.log")) == 1
    full = AuditLog("/dev/full")
    full.write("command", LoggedClient(), outcome="ok")
    wait_for(lambda: full.lost == 1)
    full.close()


def test_lines_beyond_the_disks_speed_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import threading

    still = threading.Event()
    log = AuditLog(str(tmp_path / "audit.log"))
    monkeypatch.setattr(log, "_append", lambda line: still.wait(TIMEOUT_S))
    for _ in range(6000):
        log.write("command", LoggedClient(), outcome="ok", each=True)
    assert 1900 <= log.lost <= 1904
    still.set()
    log.close()
    assert log.written + log.lost == 6000


def test_lost_audit_lines_are_counted_and_serving_continues(start: Start, tmp_path: Path) -> None:
    child = start("--audit-log", str(tmp_path / "nowhere" / "audit.log"))
    with child.client() as client:
        for _ in range(20):
            assert client.call("CONFIG", "GET", "save") != b""
        wait_for(lambda: int(client.info()["audit_lines_lost"]) == 20)
        assert client.call("SET", "a", "1") == b"OK"
    assert child.stop() == 0 and sum("audit_log_failed" in line for line in child.log) == 1
