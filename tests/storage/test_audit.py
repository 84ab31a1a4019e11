"""The audit log: its content, its limits, and failures of its disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import wait_for
from storage_support import TIMEOUT_S, Child

from storage_kv.access.audit import AuditLog

SECRET = "sesame-open"


class Somebody:
    address = "10.0.0.1:1234"
    user_name = b"ali\xffce"


def entries_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_authentications_denials_and_changes_are_audited(start: Callable[..., Child], tmp_path: Path) -> None:
    log, users = tmp_path / "audit.log", tmp_path / "users.acl"
    users.write_text(f"user root on >{SECRET} ~* +@all\nuser ann on >{SECRET} ~a* +@read tenant=team-a\n")
    child = start("--audit-log", str(log), "--users-file", str(users))
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
        info = root.call("INFO", "shadowserve")
        assert isinstance(info, bytes)
    assert child.stop() == 0
    entries = entries_of(log)
    told = [(entry["event"], entry["user"], entry["outcome"], entry.get("command")) for entry in entries]
    assert told == [
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


def test_repeated_denials_do_not_crowd_out_other_events(start: Callable[..., Child], tmp_path: Path) -> None:
    log, users = tmp_path / "audit.log", tmp_path / "users.acl"
    users.write_text(f"user root on >{SECRET} ~* +@all\nuser ann on >{SECRET} ~a* +@read +auth tenant=team-a\n")
    child = start("--audit-log", str(log), "--audit-log-bytes-max", "65536", "--users-file", str(users))
    with child.client() as ann, child.client() as root:
        assert root.call("AUTH", "root", SECRET) == b"OK" and root.call("FLUSHALL") == b"OK"
        assert ann.call("AUTH", "ann", SECRET) == b"OK"
        for commands in ([("SET", "a", "1")] * 2000, [("AUTH", "ann", SECRET)] * 500):
            for command in commands:
                ann.send(*command)
            for _ in commands:
                ann.receive()
        assert root.call("CONFIG", "GET", "save") != b""
    assert child.stop() == 0
    entries = entries_of(log)
    assert [entry["command"] for entry in entries if entry["user"] == "root" and entry["event"] == "command"] == [
        "flushall",
        "config|get",
    ]
    told = [entry for entry in entries if entry["event"] == "denied"]
    assert len(told) < 100 and sum(entry.get("times", 1) for entry in told) == 2000


def test_the_audit_log_is_rotated_by_size(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path), 4096)
    for number in range(100):
        log.write("command", Somebody(), outcome="ok", each=True, command="x" * 500, number=number)
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
    log.write("command", Somebody(), outcome="ok")
    wait_for(lambda: log.lost == 1)
    folder.mkdir()
    log.write("command", Somebody(), outcome="ok")
    wait_for(lambda: log.written == 1)
    log.close()
    assert len(entries_of(folder / "audit.log")) == 1
    full = AuditLog("/dev/full")
    full.write("command", Somebody(), outcome="ok")
    wait_for(lambda: full.lost == 1)
    full.close()


def test_lines_beyond_the_disks_speed_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import threading

    still = threading.Event()
    log = AuditLog(str(tmp_path / "audit.log"))
    monkeypatch.setattr(log, "_append", lambda line: still.wait(TIMEOUT_S))
    for _ in range(6000):
        log.write("command", Somebody(), outcome="ok", each=True)
    assert 1900 <= log.lost <= 1904
    still.set()
    log.close()
    assert log.written + log.lost == 6000
