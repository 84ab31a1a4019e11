"""``shadowserve drain``: the records of a node are on the members that stay."""

import hashlib
import json
from typing import Any

import pytest
from click.testing import CliRunner
from cold_support import CREDENTIALS, Chain
from faulty_s3 import FaultyS3
from machine import wait_for
from storage_support import Child, Start, bucket_flags, login, make_record

from shadowserve.placement import Placement, partition_of
from shadowserve_tools import main
from shadowserve_tools.storage_client import StorageClient

CHAIN = Chain("moved", 40)
RECORDS = dict(make_record(hashlib.sha256(b"%d" % number).digest()) for number in range(40))
"""Records of many segments."""


def drained(node: Child, *others: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of the command, and its result."""
    done = CliRunner().invoke(main, ["drain", f"127.0.0.1:{node.port}", ",".join(others), "--json"])
    return done.exit_code, json.loads(done.stdout)


def counts(found: dict[str, Any], *names: str) -> list[int]:
    return [found[name] for name in names]


def test_records_are_on_the_next_choices_and_a_second_run_copies_what_is_new(start: Start) -> None:
    nodes = [start(), start(), start()]
    old, *clients = [node.client() for node in nodes]
    keys = list(RECORDS)
    old.store(RECORDS.items())
    assert old.call("PEXPIREAT", keys[0], 1 << 42) == 1
    assert old.call("SET", "plain", "value") == b"OK"
    weights = {f"127.0.0.1:{nodes[0].port}": 1.0, f"127.0.0.1:{nodes[1].port}": 2.0, f"127.0.0.1:{nodes[2].port}": 1.0}
    given = [f"{address}={weight}" for address, weight in weights.items()]
    code, found = drained(nodes[0], *given)
    assert code == 0 and counts(found, "copied", "present", "failed", "other_values") == [40, 0, 0, 1]
    placement = Placement(dict(list(weights.items())[1:]))
    by_address = dict(zip(list(weights)[1:], clients, strict=True))
    for number, (key, value) in enumerate(RECORDS.items()):
        client = by_address[placement.ranking(partition_of(bytes.fromhex(key[3:].decode())))[0]]
        assert client.call("GET", key) == value
        assert client.call("PEXPIRETIME", key) == (1 << 42 if number == 0 else -1)
    assert sum(int(client.info()["records"]) for client in clients) == 40, "each record is on one of them"
    assert clients[0].call("DEL", *keys) > 0
    code, again = drained(nodes[0], *given)
    assert code == 0 and again["copied"] + again["present"] == 40 and 0 < again["copied"] < 40
    nodes[2].kill()
    code, broken = drained(nodes[0], *given)
    assert code == 1 and broken["failed"] > 0 and broken["failed"] + broken["present"] == 40
    assert "cannot reach the storage node" in broken["errors"][0]


def test_what_the_bucket_has_is_prefetched_and_the_rest_is_copied(start: Start, faulty: FaultyS3) -> None:
    flags = bucket_flags(faulty.endpoint, write="at_once")
    old = start(*flags, environment=CREDENTIALS)
    client = old.client()
    client.store(zip(CHAIN.keys, CHAIN.values, strict=True))
    wait_for(lambda: client.info("s3")["records"] == "40")
    new = start(*flags, environment=CREDENTIALS)
    target = new.client()
    wait_for(lambda: target.info("s3")["records"] == "40")
    code, found = drained(old, f"127.0.0.1:{new.port}")
    assert code == 0 and counts(found, "copied", "in_bucket") == [0, 40]
    wait_for(lambda: target.info()["records"] == "40")


def test_the_node_itself_by_another_name_is_no_member_that_stays(start: Start) -> None:
    """Otherwise all its records would count as present, and would be lost with it."""
    node, other = start(), start()
    node.client().store(RECORDS.items())
    command = ["drain", f"127.0.0.1:{node.port}", f"localhost:{node.port},127.0.0.1:{other.port}"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "is the node itself" in done.output


def test_a_record_that_is_refused_keeps_no_other_from_its_copy(start: Start) -> None:
    node, small = start(), start("--memory-budget-bytes", "1 MiB")
    client = node.client()
    client.store(RECORDS.items())
    large = make_record(b"k" * 32, body_bytes=2 << 20)
    client.store([large])
    code, found = drained(node, f"127.0.0.1:{small.port}")
    assert code == 1 and counts(found, "copied", "failed") == [40, 1]
    assert len(found["errors"]) == 1 and "refused SET" in found["errors"][0]


def test_the_result_counts_what_was_copied_before_the_node_ended(start: Start) -> None:
    node, other = start(), start()
    node.client().store(RECORDS.items())
    copy = StorageClient.call

    def call(client: StorageClient, *arguments: str | bytes) -> Any:
        reply = copy(client, *arguments)
        if arguments[0] == "SET":
            node.kill()
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StorageClient, "call", call)
        code, found = drained(node, f"127.0.0.1:{other.port}")
    assert code == 1 and found["copied"] >= 1 and found["copied"] + found["failed"] == 40 and found["errors"]


def test_tenants_whose_records_are_not_copied_are_counted(start: Start, start_tenants: Start) -> None:
    node, other = start_tenants(), start()
    for user in ("ann", "bob"):
        login(node, user).store(RECORDS.items())
    command = ["drain", f"127.0.0.1:{node.port}", f"127.0.0.1:{other.port}", "--user", "root", "--password", "r"]
    done = CliRunner().invoke(main, command)
    assert "has records of 2 other tenants" in done.output


def test_a_drain_needs_a_member_that_stays(start: Start) -> None:
    done = CliRunner().invoke(main, ["drain", "127.0.0.1:1", "127.0.0.1:1=2"])
    assert done.exit_code == 2 and "no member stays" in done.output
