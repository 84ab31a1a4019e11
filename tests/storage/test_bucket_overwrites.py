"""Commands that replace or remove a record of a bucket are acknowledged after its deletion in the faulty."""

import json
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cold_support import CREDENTIALS, Chain
from faulty_s3 import Answer, Asked, FaultyS3
from machine import wait_for
from storage_support import Child, Client, Start, bucket_flags

from shadowserve.resp import ErrorReply
from storage_kv.commands import TABLE

NEW = b"new value"
Words = Callable[[bytes], list[tuple[bytes | str | int, ...]]]

REPLACING: dict[str, Words] = {
    "set": lambda key: [("SET", key, NEW)],
    "set px": lambda key: [("SET", key, NEW, "PX", 10**9)],
    "set xx": lambda key: [("SET", key, NEW, "XX")],
    "set get": lambda key: [("SET", key, NEW, "GET")],
    "setex": lambda key: [("SETEX", key, 10**6, NEW)],
    "psetex": lambda key: [("PSETEX", key, 10**9, NEW)],
    "getset": lambda key: [("GETSET", key, NEW)],
    "mset": lambda key: [("MSET", "another", "x", key, NEW)],
    "set set": lambda key: [("SET", key, NEW), ("SET", key, NEW)],
    "del setnx": lambda key: [("DEL", key), ("SETNX", key, NEW)],
    "del msetnx": lambda key: [("DEL", key), ("MSETNX", key, NEW)],
    "exec": lambda key: [("MULTI",), ("SET", key, NEW), ("EXEC",)],
}
REMOVING: dict[str, Words] = {
    "del": lambda key: [("DEL", key)],
    "unlink": lambda key: [("UNLINK", key)],
    "getdel": lambda key: [("GETDEL", key)],
    "flushdb": lambda key: [("FLUSHDB",)],
    "flushall": lambda key: [("FLUSHALL",)],
}
EXPIRING: dict[str, Words] = {
    "expire": lambda key: [("EXPIRE", key, 10**6)],
    "pexpire": lambda key: [("PEXPIRE", key, 10**9)],
    "expireat": lambda key: [("EXPIREAT", key, 4 * 10**9)],
    "pexpireat": lambda key: [("PEXPIREAT", key, 4 * 10**12)],
    "getex": lambda key: [("GETEX", key, "PX", 10**9)],
    "expire persist": lambda key: [("EXPIRE", key, 10**6), ("PERSIST", key)],
}
ALL = {**REPLACING, **EXPIRING, **REMOVING}
CHANGES_NO_VALUE = {"kv.publish", "kv.pin", "kv.unpin"}
RECORDS = {what: Chain(f"record of {what}", 1) for what in ALL}


@pytest.fixture(params=["memory", "device"])
def start_node(
    start: Start, faulty: FaultyS3, request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[], tuple[Child, Client]]:
    def start_one() -> tuple[Child, Client]:
        flags = ["--memory-budget-bytes", "64 MiB", *bucket_flags(faulty.endpoint, index_ttl_s=3600.0)]
        if request.param == "device":
            device = {"path": str(tmp_path / "values.pool"), "size": 64 << 20, "bandwidth": 1 << 30}
            flags += ["--devices", json.dumps([device])]
        child = start(*flags, environment=CREDENTIALS)
        return child, child.client()

    return start_one


def store(client: Client, faulty: FaultyS3, what: str) -> bytes:
    """Store the record of a command, wait until the bucket has it in a separate object, and return its key."""
    key, value = RECORDS[what].keys[0], RECORDS[what].values[0]
    before = len(faulty.objects)
    assert client.call("SET", key, value) == b"OK"
    wait_for(lambda: len(faulty.objects) > before and client.info("s3")["waiting_records"] == "0")
    wait_for(lambda: int(client.info("s3")["records"]) > before)
    return key


def in_bucket(faulty: FaultyS3, what: str) -> bool:
    return any(RECORDS[what].values[0] in body for body in list(faulty.objects.values()))


def test_every_writing_command_is_covered() -> None:
    covered = {word for what in ALL for word in what.split()}
    assert {
        command.name for command in TABLE.commands if "write" in command.flags.split()
    } - CHANGES_NO_VALUE <= covered


def test_no_command_is_acknowledged_before_the_bucket_has_deleted_the_old_record(
    faulty: FaultyS3, start_node: Callable[[], tuple[Child, Client]]
) -> None:
    """Symptom: SET, GETSET, MSET, SET PX and EXEC were answered first, and a killed node served the old record."""
    child, client = start_node()
    other = child.client()
    for what, words in ALL.items():
        key, gate = store(client, faulty, what), threading.Event()

        def late(asked: Asked, gate: threading.Event = gate) -> Answer | None:
            return Answer(after=gate) if asked.operation == "delete" else None

        faulty.fault = late
        asked = faulty.count("delete")
        commands = words(key)
        for command in commands:
            client.send(*command)
        if what == "exec":  # the server sends the header of its replies at once
            assert client.receive_raw(18) == b"+OK\r\n+QUEUED\r\n*1\r\n"
        wait_for(lambda asked=asked: faulty.count("delete") > asked)
        assert other.call("PING") == b"PONG", "no other client waits"
        assert other.call("SET", "free", "value") == b"OK"
        assert not select.select([client.socket], [], [], 0)[0], (
            f"{what} was answered before the deletion in the bucket"
        )
        gate.set()
        replies = [client.receive() for _ in (commands[:1] if what == "exec" else commands)]
        assert not in_bucket(faulty, what), what
        assert not any(isinstance(reply, ErrorReply) for reply in replies), (what, replies)
    child.stop(signal.SIGKILL)
    faulty.fault = lambda asked: None
    _, client = start_node()
    for what in [*REPLACING, *REMOVING]:
        assert client.call("GET", RECORDS[what].keys[0]) != RECORDS[what].values[0], what


def test_a_bucket_that_refuses_makes_an_error_of_each_such_command_again_and_again(
    faulty: FaultyS3, start_node: Callable[[], tuple[Child, Client]]
) -> None:
    """Symptom: while the bucket refused deletions, SET was answered OK and the second DEL of a key 0."""
    child, client = start_node()
    keys = {what: store(client, faulty, what) for what in ALL if what not in ("expire persist", "set xx")}
    faulty.fault = lambda asked: Answer(403, "AccessDenied") if asked.operation == "delete" else None
    for what, key in keys.items():
        for turn in ("first", "second"):
            if turn == "second" and what in ("getdel", "getex", *EXPIRING, "set xx", "del setnx", "del msetnx"):
                continue  # the key has no record any more, so the command changes nothing
            replies = [client.call(*command) for command in ALL[what](key)]
            last = replies[-1][0] if isinstance(replies[-1], list) else replies[-1]
            assert isinstance(last, ErrorReply) and "IOERR" in str(last), (what, turn, replies)
        assert in_bucket(faulty, what)
    child.stop(signal.SIGKILL)
    faulty.fault = lambda asked: None
    _, client = start_node()
    for what in ("set", "getset", "mset"):
        assert client.call("GET", keys[what]) in (NEW, RECORDS[what].values[0])


def test_a_removal_before_the_first_list_waits_for_it(
    faulty: FaultyS3, start_node: Callable[[], tuple[Child, Client]]
) -> None:
    """Symptom: DEL before the first listing was answered 0, and later the record was found."""
    child, client = start_node()
    key = store(client, faulty, "del")
    child.stop(signal.SIGKILL)
    faulty.fault = lambda asked: Answer(503, "SlowDown") if asked.operation == "list" else None
    child, client = start_node()
    wait_for(lambda: client.info("s3")["state"] == "away")
    assert "not listed" in str(client.refused("DEL", key))
    faulty.fault = lambda asked: None
    wait_for(lambda: client.info("s3")["state"] == "ok")
    assert client.call("DEL", key) == 1
    assert not in_bucket(faulty, "del")
