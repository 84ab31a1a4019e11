"""Storage nodes over one bucket, of a test server and of Ceph."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cold_support import CREDENTIALS, Chain
from faulty_s3 import BUCKET, Answer, FaultyS3
from machine import wait_for
from storage_support import REPOSITORY, Child, Client, Start, bucket_flags

from shadowserve_tools.bench.peers.buckets import CREDENTIALS as CEPH_CREDENTIALS
from shadowserve_tools.bench.peers.buckets import MISSING, ceph_gateway

CHAIN = Chain("document", 24, 1 << 16)
Nodes = Callable[..., tuple[Child, Client]]


@pytest.fixture(scope="module")
def ceph() -> Iterator[str]:
    if MISSING:
        pytest.skip(f"{MISSING}: apt-get install ceph-mon ceph-osd radosgw")
    with ceph_gateway(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(params=["own", "ceph"])
def bucket(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """Endpoint and credentials of a bucket."""
    if request.param == "own":
        return request.getfixturevalue("faulty").endpoint, CREDENTIALS
    return request.getfixturevalue("ceph"), CEPH_CREDENTIALS


@pytest.fixture
def node(start: Start, request: pytest.FixtureRequest) -> Nodes:
    """Start a node over a bucket with a separate prefix."""
    prefix = "".join(each if each.isalnum() else "_" for each in request.node.name)

    def start_node(endpoint: str, credentials: dict[str, str], *flags: str, **keys: Any) -> tuple[Child, Client]:
        bucket = bucket_flags(endpoint, **({"prefix": prefix, "gather_s": 0.2} | keys))
        child = start("--memory-budget-bytes", "64 MiB", *flags, *bucket, environment=credentials)
        return child, child.client()

    return start_node


def s3(client: Client) -> dict[str, str]:
    return client.info("s3")


def store_chain(client: Client) -> None:
    """Store the chain, and wait until the bucket has it."""
    client.store(zip(CHAIN.keys, CHAIN.values, strict=True))
    wait_for(lambda: s3(client)["records"] == "24")


def second_node(node: Nodes, bucket: tuple[str, dict[str, str]], *flags: str, **keys: Any) -> tuple[Child, Client]:
    """Store the chain through one node; return another node that knows it."""
    store_chain(node(*bucket)[1])
    child, client = node(*bucket, *flags, **keys)
    wait_for(lambda: s3(client)["records"] == "24")
    return child, client


def test_an_empty_node_answers_for_what_another_one_stored(bucket: tuple[str, dict[str, str]], node: Nodes) -> None:
    _, two = second_node(node, bucket, reads_at_once=2)  # the others wait, so that they are neighbours
    assert two.call("EXISTS", *CHAIN.keys) == 24
    assert two.call("STRLEN", CHAIN.keys[1]) == len(CHAIN.values[1])
    ranges = two.calls(*(("GETRANGE", key, 1000, 1999) for key in CHAIN.keys))
    assert ranges == [value[1000:2000] for value in CHAIN.values]
    assert int(s3(two)["requests"]) <= 12, "neighbours come together"
    found = two.call("KV.META", *CHAIN.keys, b"kv:" + b"0" * 64)
    assert found[:-1] == [[len(value), value[:head]] for _, value, head, _ in CHAIN.records] and found[-1] is None
    assert two.call("MGET", *CHAIN.keys) == CHAIN.values
    assert two.call("DBSIZE") == 24, "read records must stay in the node"


def test_a_node_with_devices_keeps_what_comes_from_the_bucket_on_them(
    bucket: tuple[str, dict[str, str]], node: Nodes, tmp_path: Any
) -> None:
    _, one = node(*bucket)
    store_chain(one)
    devices = json.dumps([{"path": str(tmp_path / "values.pool"), "size": 64 << 20, "bandwidth": 1 << 30}])
    child, two = node(*bucket, "--devices", devices)
    wait_for(lambda: s3(two)["records"] == "24")
    assert two.call("MGET", *CHAIN.keys) == CHAIN.values
    assert two.call("MGET", *CHAIN.keys) == CHAIN.values
    assert child.stop() == 0
    _, again = node("http://127.0.0.1:1", bucket[1], "--devices", devices)
    assert again.call("MGET", *CHAIN.keys) == CHAIN.values, "the node must serve them without the bucket"


def test_deleted_and_flushed_keys_are_gone_from_the_bucket(bucket: tuple[str, dict[str, str]], node: Nodes) -> None:
    _, one = node(*bucket)
    store_chain(one)
    assert one.call("DEL", CHAIN.keys[0]) == 1
    assert one.call("EXISTS", CHAIN.keys[0]) == 0
    assert one.call("FLUSHALL") == b"OK"
    _, two = node(*bucket)
    wait_for(lambda: int(s3(two)["lists"]) > 1)
    assert two.call("EXISTS", *CHAIN.keys) == 0


def test_two_nodes_that_are_given_the_same_chain_agree(bucket: tuple[str, dict[str, str]], node: Nodes) -> None:
    clients = [node(*bucket)[1], node(*bucket)[1]]
    for key, value in zip(CHAIN.keys, CHAIN.values, strict=True):
        for client in clients:
            client.send("SET", key, value)
    for client in clients:
        assert [client.receive() for _ in CHAIN.keys] == [b"OK"] * 24
    for client in clients:
        wait_for(lambda client=client: s3(client)["records"] == "24" and s3(client)["waiting_records"] == "0")
    _, three = node(*bucket)
    wait_for(lambda: s3(three)["records"] == "24")
    assert three.call("MGET", *CHAIN.keys) == CHAIN.values


@pytest.mark.parametrize("wrong", ["secret", "bucket"])
def test_wrong_credentials_or_a_missing_bucket_leave_a_node_that_works_without(
    ceph: str, node: Nodes, wrong: str
) -> None:
    credentials = CEPH_CREDENTIALS | ({"AWS_SECRET_ACCESS_KEY": "wrong"} if wrong == "secret" else {})
    _, client = node(ceph, credentials, **({"bucket": "not-there"} if wrong == "bucket" else {}))
    wait_for(lambda: s3(client)["state"] == "away")
    assert ("denied=" if wrong == "secret" else "no_bucket=") in s3(client)["failed_reads"]
    assert client.call("SET", CHAIN.keys[0], CHAIN.values[0]) == b"OK"
    assert client.call("GET", CHAIN.keys[0]) == CHAIN.values[0]
    wait_for(lambda: s3(client)["failed_writes"])


def test_a_blocked_bucket_does_not_delay_other_clients(faulty: FaultyS3, node: Nodes) -> None:
    child, two = second_node(node, (faulty.endpoint, CREDENTIALS), timeout_s=60.0, index_ttl_s=3600.0)
    gate = faulty.hold("get")
    two.send("GET", CHAIN.keys[0])
    other = child.client()
    wait_for(lambda: s3(other)["reading"] == "1")
    assert other.call("SET", "key", "value") == b"OK"
    assert other.call("GET", "key") == b"value"
    gate.set()
    assert two.receive() == CHAIN.values[0]


def test_kv_meta_of_cold_records_tells_length_and_time_without_a_read(faulty: FaultyS3, node: Nodes) -> None:
    _, two = second_node(node, (faulty.endpoint, CREDENTIALS), index_ttl_s=3600.0)
    asked = faulty.count("get")
    found = two.call("KV.META", *CHAIN.keys[:2], b"kv:" + b"0" * 64, *CHAIN.keys[2:], "plain")
    assert found[2] is None and found[-1] is None
    del found[2], found[-1]
    lengths, times = zip(*found, strict=True)
    assert list(lengths) == [len(value) for value in CHAIN.values]
    assert 0 < times[0] <= times[23] and list(times) == sorted(times), "earlier records must be read, too"
    assert faulty.count("get") == asked
    assert two.call("MGET", *CHAIN.keys) == CHAIN.values
    assert two.call("KV.META", *CHAIN.keys) == [[len(value), value[:head]] for _, value, head, _ in CHAIN.records]


def test_kv_prefetch_reads_cold_records_without_waiting(faulty: FaultyS3, node: Nodes) -> None:
    _, one = node(faulty.endpoint, CREDENTIALS)
    store_chain(one)
    assert one.call("KV.PREFETCH", *CHAIN.keys, "plain") == 0
    child, two = node(faulty.endpoint, CREDENTIALS, index_ttl_s=3600.0)
    wait_for(lambda: s3(two)["records"] == "24")
    gate = faulty.hold("get")
    first = two.call("KV.PREFETCH", *CHAIN.keys, b"kv:" + b"0" * 64)
    assert 0 < first <= 24
    assert two.call("KV.PREFETCH", *CHAIN.keys[:first]) == first, "the reads must be in flight"
    reading = int(s3(two)["reading"])
    assert reading == first, "a second request must not read them again"
    gate.set()

    def near() -> bool:
        two.call("KV.PREFETCH", *CHAIN.keys)
        found = two.call("KV.META", *CHAIN.keys)
        return all(isinstance(head, bytes) for _, head in found)

    wait_for(near)
    assert two.call("KV.PREFETCH", *CHAIN.keys) == 0
    read = faulty.count("get")
    assert two.call("MGET", *CHAIN.keys) == CHAIN.values
    assert faulty.count("get") == read
    assert child.stop() == 0, "no lease must be left"


def test_prefetches_use_at_most_a_second_of_a_slow_bucket(faulty: FaultyS3, node: Nodes) -> None:
    _, two = second_node(node, (faulty.endpoint, CREDENTIALS), index_ttl_s=3600.0)
    faulty.bytes_per_s = 16 * 1024  # a record takes four seconds
    assert two.call("GET", CHAIN.keys[0]) == CHAIN.values[0]
    count = two.call("KV.PREFETCH", *CHAIN.keys[1:])
    assert count < 23
    assert int(s3(two)["reading"]) == count
    faulty.bytes_per_s = 0


def test_a_bucket_that_never_answers_is_a_miss_for_its_client(faulty: FaultyS3, node: Nodes) -> None:
    _, two = second_node(node, (faulty.endpoint, CREDENTIALS), timeout_s=0.3, index_ttl_s=3600.0)
    gate = faulty.hold("get")
    assert two.call("GET", CHAIN.keys[0]) is None
    assert two.call("MGET", CHAIN.keys[1]) == [None]
    assert two.call("GETRANGE", CHAIN.keys[2], 0, 10) == b""
    assert "timeout=" in s3(two)["failed_reads"]
    gate.set()


def test_stopping_writes_queued_records_and_does_not_wait_for_a_blocked_bucket(faulty: FaultyS3, node: Nodes) -> None:
    child, client = node(faulty.endpoint, CREDENTIALS, gather_s=600.0)
    assert client.call("SET", CHAIN.keys[0], CHAIN.values[0]) == b"OK"
    assert child.stop() == 0
    assert len(faulty.objects) == 1
    gate = threading.Event()
    faulty.fault = lambda asked: Answer(after=gate)
    child, client = node(faulty.endpoint, CREDENTIALS, "--shutdown-timeout-s", "0.2", timeout_s=0.5)
    assert client.call("SET", CHAIN.keys[1], CHAIN.values[1]) == b"OK"
    try:
        assert child.stop() == 0
    finally:
        gate.set()


def test_a_node_without_a_bucket_has_nothing_to_prefetch(client: Client) -> None:
    assert client.call("KV.PREFETCH", *CHAIN.keys) == 0


def test_metrics_include_the_bucket(faulty: FaultyS3, node: Nodes) -> None:
    child, client = node(faulty.endpoint, CREDENTIALS, "--metrics-port", "0")
    store_chain(client)
    samples = child.samples()
    there = set(re.findall(r"^# TYPE shadowserve_storage_(s3_\S+) ", child.http("/metrics")[1], re.MULTILINE))
    assert there == set(
        re.findall(r"`(s3_[a-z_]+)(?:{reason})?`", (REPOSITORY / "docs" / "reference" / "metrics.md").read_text())
    )
    assert samples["shadowserve_storage_s3_records"] == 24
    assert samples["shadowserve_storage_s3_written_objects_total"] >= 1
    assert samples["shadowserve_storage_s3_away"] == 0


def test_invalid_bucket_settings_are_errors_at_the_start(start: Start, tmp_path: Any) -> None:
    for keys, words in (
        ({"bucket": "UPPER"}, "s3.bucket.*such as kv-cache"),
        ({"bucket": BUCKET, "endpoint": "minio:9000"}, "s3.endpoint.*such as https://minio.example:9000"),
        ({"bucket": BUCKET, "ca_file": str(tmp_path / "none.pem")}, "ca_file"),
        ({"bucket": BUCKET, "object_bytes": "1 GiB"}, "object_bytes"),
        ({"bucket": BUCKET, "secret": "x"}, "there is no such key"),
    ):
        with pytest.raises(AssertionError, match=words):
            start("--s3", json.dumps(keys), environment=CREDENTIALS)
