"""A hundred engines that start at once ask a node for records that only the bucket has."""

from concurrent.futures import ThreadPoolExecutor

from cold_support import CREDENTIALS, Chain
from faulty_s3 import FaultyS3
from machine import wait_for
from storage_support import Child, Client, Start, bucket_flags, login

CLIENTS = 100
READS = 2
COMMON, OTHER = Chain("common", 40, 1 << 18), Chain("other", 2, 1 << 18)


def fill(child: Child) -> None:
    """Store a chain of two tenants; wait until the bucket has them."""
    for name, chain in (("ann", COMMON), ("bob", OTHER)):
        login(child, name).store(zip(chain.keys, chain.values, strict=True))
    root = login(child, "root")
    wait_for(lambda: root.info("s3")["records"] == "42" and root.info("s3")["waiting_records"] == "0")


def test_each_record_is_read_once_and_another_tenant_does_not_wait_for_the_storm(
    start_tenants: Start, faulty: FaultyS3
) -> None:
    flags = ["--memory-budget-bytes", "512 MiB"]
    flags += bucket_flags(
        faulty.endpoint, gather_s=0.2, object_bytes=1 << 20, index_ttl_s=3600.0, reads_at_once=READS, timeout_s=60.0
    )
    first = start_tenants(*flags, environment=CREDENTIALS)
    fill(first)
    first.kill()
    child = start_tenants(*flags, environment=CREDENTIALS)
    root = login(child, "root")
    wait_for(lambda: root.info("s3")["records"] == "42")
    begin = len(faulty.asked)
    gate = faulty.hold("get")
    storm = [login(child, "ann") for _ in range(CLIENTS)]
    parts = [slice(4 * (number % 10), 4 * (number % 10) + 4) for number in range(CLIENTS)]
    for client, part in zip(storm, parts, strict=True):
        client.send("MGET", *COMMON.keys[part])
    wait_for(lambda: root.info("s3")["reading"] == "40")
    bob = login(child, "bob")
    bob.send("MGET", *OTHER.keys)
    wait_for(lambda: root.info("s3")["reading"] == "42")
    gate.set()
    with ThreadPoolExecutor(CLIENTS) as receiving:  # clients that read nothing would be closed: others need memory
        answers = list(receiving.map(Client.receive, storm))
    assert answers == [COMMON.values[part] for part in parts]
    assert bob.receive() == OTHER.values
    asked = [each for each in faulty.asked[begin:] if each.operation == "get" and each.range is not None]
    read = sum(last - first for first, last in (each.range for each in asked if each.range is not None))
    assert read == sum(map(len, (*COMMON.values, *OTHER.values))), "every record once for all clients"
    of_bob = ["/tb/" in each.name for each in asked]
    assert len(of_bob) > 8 and of_bob.index(True) <= 2 * READS, "the other tenant has the next turn"
