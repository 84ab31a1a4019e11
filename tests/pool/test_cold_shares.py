"""Tenants of one bucket: shares of its bytes and of known records, and turns of reads and writes."""

import tracemalloc

import pytest
from cold_support import MIB, Chain, Opens
from faulty_s3 import FaultyS3
from machine import wait_for
from store_driver import taken

from shadowserve.fair_queue import FairQueue
from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.gathering import Gathering
from shadowserve.pool.cold.layout import Contents, Place
from shadowserve.pool.cold.shares import Shares, most_beyond

MINE = Chain("mine", 12)


def object_of(tenant: str, label: str, records: int = 1) -> Contents:
    keys = [f"{label} {number}".encode().ljust(32) for number in range(records)]
    places = [(key, Place(100 * number, 100, 10)) for number, key in enumerate(keys)]
    return Contents.of(tenant, 100 * records + 200, places)


# ---- Definition of a share


@pytest.mark.parametrize(
    ("quotas", "present", "shares"),
    [
        ({}, "a", {"a": 60}),
        ({}, "abc", {"a": 20, "b": 20, "c": 20}),
        ({"b": 8}, "ab", {"a": 52, "b": 8}),
        ({"b": 8}, "b", {"b": 8}),
        ({"b": 8, "x": 50}, "abc", {"a": 26, "b": 8, "c": 26}),
        ({"a": 300, "b": 100}, "ab", {"a": 45, "b": 15}),
        ({"a": 300, "b": 100}, "abc", {"a": 30, "b": 10, "c": 20}),
        ({"a": 0}, "a", {"a": 0}),
        ({}, "", {}),
    ],
)
def test_a_share_is_a_quota_or_an_equal_part_of_the_rest(
    quotas: dict[str, int], present: str, shares: dict[str, float]
) -> None:
    divided = Shares(60)
    for name, quota in quotas.items():
        divided.set_quota(name, quota)
    assert divided.among(list(present)) == shares
    for name in quotas:
        divided.set_quota(name, None)
    assert divided.among(list(present)) == {name: 60 / len(present) for name in present}


def test_the_tenant_furthest_beyond_its_share_is_the_same_on_each_node() -> None:
    assert most_beyond({"a": 10, "b": 3}, {"a": 20, "b": 2}) == "b"
    assert most_beyond({"a": 10, "b": 10}, {"a": 20, "b": 20}) == most_beyond({"b": 10, "a": 10}, {"b": 20, "a": 20})
    assert most_beyond({"a": 1, "b": 100}, {"a": 0, "b": 1}) == "a"


def test_objects_that_the_catalog_has_no_room_for_count_as_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: beyond 100,000 such objects a bucket grew over bytes_max."""
    monkeypatch.setattr("shadowserve.pool.cold.catalog._LEFT_OUT_MAX", 1)
    catalog = Catalog(Shares(1))
    known, *others = (object_of("a", str(number)) for number in range(4))
    assert catalog.add(known, 10.0)
    for _ in range(2):  # each list counts again
        number = catalog.begin_list(range(PARTITIONS))
        assert not any(catalog.wants(Listed(each.name, each.size, 1.0), each.parts) for each in (known, *others))
        catalog.end_list(number, range(PARTITIONS))
    assert not catalog.mark_excess(4 * known.size, Shares(1), range(PARTITIONS))
    assert catalog.mark_excess(4 * known.size - 1, Shares(1), range(PARTITIONS)) == [others[0].name]


# ---- The bucket


@pytest.mark.parametrize("quotas", [{}, {"greedy": (8 * MIB, None)}], ids=["equal parts", "a quota"])
def test_a_sweep_deletes_objects_of_the_tenant_beyond_its_share(
    quotas: dict[str, tuple[int, None]], bucket: FaultyS3, open_node: Opens
) -> None:
    """Symptom: 100 MiB of another tenant with a quota of 8 MiB left a tenant 0 of 12 records."""
    settings = {"memory_budget_bytes": 256 * MIB, "bytes_max": 64 * MIB, "quotas": quotas}
    node = open_node(**settings)
    second = open_node(**settings)
    node.store_chain(MINE, node.tenant("modest"))
    node.await_known(12)
    modest = set(bucket.objects)
    greedy = node.tenant("greedy")
    node.write_chains((Chain(f"greedy {number}", 8, MIB) for number in range(12)), greedy)
    wait_for(lambda: sum(map(len, list(bucket.objects.values()))) <= 64 * MIB)
    node.await_listed()
    second.await_listed()
    assert modest <= bucket.objects.keys()
    assert any("/tgreedy/" in name for name in bucket.objects), "a tenant must get the space that others do not need"
    other = open_node(**settings)
    wait_for(lambda: other.cold().objects == len(bucket.objects))
    assert other.read_chain(MINE, other.tenant("modest")) == MINE.values
    oldest, newest = (other.peek(Chain(f"greedy {n}", 1, MIB).keys[0], other.tenant("greedy")) for n in (0, 11))
    assert oldest is None and newest is not None
    assert node.cold().swept_objects + second.cold().swept_objects >= 5


def test_after_a_restart_each_tenant_has_its_share_of_known_records(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a tenant kept 0 of 12 records if another tenant had stored more than chunks_max since."""
    mine, *others = (Chain(label, 8, MIB // 8) for label in ("mine", *(f"greedy {number}" for number in range(10))))
    # The last record of a chain fills its object; no time ends one before.
    node = open_node(gather_s=600.0, object_bytes=MIB)
    node.write_chains([mine], node.tenant("modest"))
    node.write_chains(others, node.tenant("greedy"))
    again = open_node(chunks_max=24)
    again.await_known(24)
    assert again.read_chain(mine, again.tenant("modest")) == mine.values
    newest = others[-1]
    assert again.read_chain(newest, again.tenant("greedy")) == newest.values
    assert again.cold().left_out_objects == 8
    again.await_listed()
    asked = bucket.count("get")
    again.await_listed()
    assert bucket.count("get") == asked, "the tail of an object without space must not be read again"


def test_a_full_catalog_makes_room_for_a_tenant_that_has_less_than_its_share() -> None:
    catalog = Catalog(Shares(10))
    for number in range(10):
        assert catalog.add(object_of("greedy", str(number)), number)
    assert not catalog.add(object_of("greedy", "older"), -1.0), "the tenant's own newer objects must stay"
    assert catalog.add(object_of("greedy", "newer"), 10.0)
    assert catalog.find("greedy", b"0 0".ljust(32)) is None and catalog.find("greedy", b"1 0".ljust(32)) is not None
    for number in range(5):
        assert catalog.add(object_of("modest", str(number)), -10.0 - number)
    assert not catalog.add(object_of("modest", "more"), -20.0), "a tenant must not exceed its share"
    assert catalog.chunks == 10 and catalog.left_out == 8
    catalog.end_list(catalog.begin_list(range(PARTITIONS)), range(PARTITIONS))
    assert catalog.objects == catalog.chunks == catalog.left_out == 0, "a list that shows nothing"


def test_the_catalog_counts_a_record_of_two_objects_once() -> None:
    catalog = Catalog(Shares(4))
    keys = [b"shared".ljust(32), *(str(number).encode().ljust(32) for number in range(3))]
    one = Contents.of("a", 500, [(key, Place(0, 100, 10)) for key in keys[:2]])
    two = Contents.of("a", 500, [(key, Place(0, 100, 10)) for key in keys[::2]])
    assert catalog.add(one, 1.0) and catalog.add(two, 2.0)
    assert (catalog.chunks, catalog.objects) == (3, 2)
    assert catalog.add(object_of("b", "x", 2), 0.0)
    found = catalog.find("a", keys[0])
    assert catalog.chunks == 4 and found.digest.hex() in two.name and catalog.find("a", keys[1]) is None
    assert not catalog.wants(Listed(one.name, 500, 1.0), one.parts)


# ---- Turns


def test_tenants_and_their_clients_take_turns_of_equal_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add("greedy", number % 2, f"greedy {number}")
    taken: list[str] = []

    def take() -> None:
        owner, item = queue.peek()
        queue.charge(owner, 1.0 if item.startswith("modest") else 4.0)
        taken.append(item)

    for _ in range(10):
        take()
    for number in range(4):
        queue.add("modest", 7, f"modest {number}")
    queue.add("greedy", 9, "greedy's other client")
    for _ in range(7):
        take()
    behind = taken[10:]
    assert sum(item.startswith("modest") for item in behind) >= 4, "turns must count cost, not requests"
    assert "greedy's other client" in behind
    assert queue.waiting("greedy") + queue.waiting("modest") == 105 - len(taken)
    while queue:
        take()
    assert sorted(taken) == sorted(set(taken)) and len(taken) == 105 and queue.peek() is None


def test_clients_that_have_left_a_queue_take_bounded_memory() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("tenant", 0, "waits for a long time")
    tracemalloc.start()
    try:
        for client in range(1, 20_000):
            queue.add("tenant", client, "one item")
            queue.charge("tenant", 1.0, done=False)
            queue.discard("tenant", client, "one item")
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 512 << 10


def test_a_flood_of_reads_causes_no_miss_for_another_tenant(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a tenant's read waited behind all reads of another, and was a miss after timeout_s."""
    writer = open_node()
    floods = [Chain(f"flood {number}", 12) for number in range(20)]
    writer.write_chains(floods, writer.tenant("greedy"))
    writer.write_chains([MINE], writer.tenant("modest"))
    node = open_node(index_ttl_s=3600.0, reads_at_once=1, timeout_s=60.0)
    node.await_known(252)
    modest, greedy = node.tenant("modest"), node.tenant("greedy")
    gate, before = bucket.hold("get"), bucket.count("get")
    flooding = [node.open(key, tenant=greedy) for chain in floods for key in chain.keys]
    wait_for(lambda: bucket.count("get") > before)
    mine = [node.open(key, tenant=modest) for key in MINE.keys]
    gate.set()
    assert taken(mine) == MINE.values
    taken(flooding)
    order = [asked.name.split("/")[2] for asked in bucket.asked if asked.operation == "get"]
    assert "tmodest" in order[before : before + 3], "only running reads and one turn may come before"


def test_queued_reads_that_time_out_do_not_count_as_failures_of_the_bucket(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: too many reads of one tenant made the bucket count as down, and all reads of others were misses."""
    writer = open_node()
    chains = [Chain(f"chain {number}", 4) for number in range(8)]
    writer.write_chains(chains)
    node = open_node(index_ttl_s=3600.0, reads_at_once=1, timeout_s=0.5)
    node.await_known(32)
    gate = bucket.hold("get")
    readings = [node.open(key) for chain in chains for key in chain.keys]
    assert None not in readings and taken(readings) == [None] * len(readings)
    gate.set()
    wait_for(lambda: node.cold().crowded_out_reads > 0)
    assert not node.cold().away and node.cold().failed_reads.get("timeout", 0) <= 2


def test_a_full_backlog_drops_records_of_the_largest_tenant() -> None:
    """Symptom: a tenant's stores displaced another's records in the backlog, and they never reached the bucket."""
    gathering = Gathering(1000, 5.0, 100, backlog_max=10)
    for number in range(4):
        gathering.add((1, b"mine %d" % number), b"mine %d" % number, b"", 1000, 0.0)
    for number in range(100):
        gathering.add((2, b"%d" % number), b"%d" % number, b"", 1000, 0.0)
    assert (gathering.waiting, gathering.dropped) == (10, 94)
    turns = []
    while (batch := gathering.take(0.0)) is not None:
        turns.append(batch.tenant)
    assert sorted(turns) == [1] * 4 + [2] * 6 and 1 in turns[:2] and 2 in turns[:2]
