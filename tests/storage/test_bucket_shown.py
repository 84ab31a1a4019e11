"""A bucket in /readyz, the metrics, ``shadowserve stats``, INFO, the log and errors at the start."""

import json

import pytest
from click.testing import CliRunner
from cold_support import CREDENTIALS, Chain
from faulty_s3 import Answer, FaultyS3
from machine import wait_for
from storage_support import Child, Start, bucket_flags

from shadowserve_tools import main

CHAIN = Chain("document", 4)
ODD = ("a//b", "./x", "../x", "a\tb", "a\nb", "readme.txt")


@pytest.fixture
def start_node(start: Start, faulty: FaultyS3) -> Start:
    return lambda: start("--metrics-port", "0", *bucket_flags(faulty.endpoint), environment=CREDENTIALS)


def stats(child: Child, *flags: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["stats", "--port", str(child.port), *flags])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_state_of_a_bucket_is_shown_before_during_and_after_an_outage(faulty: FaultyS3, start_node: Start) -> None:
    """Symptom: neither output contained the faulty."""
    child = start_node()
    client = child.client()
    client.store(zip(CHAIN.keys, CHAIN.values, strict=True))
    wait_for(lambda: client.info("s3")["records"] == "4")
    assert child.http("/readyz")[0] == 200
    assert "ok bucket: reachable: 4 records in" in child.http("/readyz")[1]
    assert "0 reads, 0 writes and 0 removals wait" in child.http("/readyz")[1]
    assert child.samples()["shadowserve_storage_s3_up"] == 1
    shown = json.loads(stats(child, "--json"))["bucket"]
    assert (shown["up"], shown["state"], shown["records"], shown["last_error"]) == (1, "ok", 4, "")
    assert shown["bytes"] > 0 and shown["objects"] >= 1 and shown["failed_reads"] == {}
    assert "reachable" in stats(child) and "waiting removals" in stats(child)

    faulty.fault = lambda asked: Answer(503, "SlowDown [/]")
    wait_for(lambda: child.samples()["shadowserve_storage_s3_up"] == 0)
    assert child.samples()["shadowserve_storage_s3_failing_s"] > 0
    status, text = child.http("/readyz")
    assert status == 200, "the node must serve records from memory"
    assert "bucket: away for" in text and "503 SlowDown" in text
    shown = json.loads(stats(child, "--json"))["bucket"]
    assert shown["up"] == 0 and shown["failing_s"] > 0 and "cannot list" in shown["last_error"]
    assert "unreachable for" in stats(child) and "last error of the bucket: cannot list" in stats(child)

    faulty.fault = lambda asked: None
    wait_for(lambda: child.samples()["shadowserve_storage_s3_up"] == 1)
    assert "ok bucket: reachable" in child.http("/readyz")[1]


def test_a_node_without_a_bucket_shows_none(start: Start) -> None:
    child = start("--metrics-port", "0")
    assert "bucket" not in child.http("/readyz")[1]
    assert json.loads(stats(child, "--json"))["bucket"] is None


def test_a_bucket_that_was_never_listed_is_shown_as_such(faulty: FaultyS3, start_node: Start) -> None:
    faulty.fault = lambda asked: Answer(403, "AccessDenied")
    child = start_node()
    wait_for(lambda: "bucket: away for" in child.http("/readyz")[1])
    assert "403 AccessDenied" in child.http("/readyz")[1]
    assert child.samples()["shadowserve_storage_s3_up"] == 0


def test_foreign_objects_are_left_alone_counted_and_logged_once(faulty: FaultyS3, start_node: Start) -> None:
    """Symptom: with one such name the node found no records, and FLUSHALL failed."""
    client = start_node().client()
    client.store(zip(CHAIN.keys, CHAIN.values, strict=True))
    wait_for(lambda: client.info("s3")["records"] == "4")
    faulty.objects |= {f"shadowserve/{name}": b"x" for name in ODD}
    again = start_node()
    reader = again.client()
    wait_for(lambda: int(reader.info("s3")["lists"]) > 2)
    assert reader.call("MGET", *CHAIN.keys) == CHAIN.values
    assert again.samples()["shadowserve_storage_s3_foreign_objects"] == len(ODD)
    assert sum("s3_foreign_objects" in line for line in again.log) == 1
    assert reader.call("FLUSHALL") == b"OK"
    assert set(faulty.objects) == {f"shadowserve/{name}" for name in ODD}
