"""Several nodes over one bucket: index objects, partitions of a fleet, and eviction by use."""

import threading
import time

import pytest
from cold_support import MIB, Chain, Node, Opens
from faulty_s3 import Answer, Asked, FaultyS3
from machine import drive, wait_for

from shadowserve.pool.cold.index_objects import index_name, pack, parse_index, parse_index_name
from shadowserve.pool.cold.layout import footer_bytes
from shadowserve.pool.cold.partitions import Partitions

PREFIX = "shadowserve/"
HOME, ELSEWHERE = 7, 8


def put(bucket: FaultyS3, chains: list[Chain], *, indexed: bool = False, is_news: bool = False) -> None:
    """Put an object for each chain of a partition into the bucket, and one index object or news for all of them."""
    entries = []
    for chain in chains:
        name, body = chain.object()
        bucket.objects[PREFIX + name] = body
        entries.append((0, body[-footer_bytes(body, len(body)) :]))
    if indexed or is_news:
        body = pack(entries)
        bucket.objects[PREFIX + index_name(int(name[:3], 16), body, is_news=is_news)] = body


def chains_of(partition: int, count: int, label: str = "chain") -> list[Chain]:
    return [Chain(f"{label} {partition} {number}", 2, partition=partition) for number in range(count)]


def index_objects(bucket: FaultyS3) -> dict[str, bytes]:
    return {name: body for name, body in list(bucket.objects.items()) if name.endswith(".ix")}


def described(name: str, body: bytes) -> set[str]:
    parts = parse_index_name(name.removeprefix(PREFIX))
    return set(parse_index(parts, body).names)


def tails(bucket: FaultyS3) -> int:
    return sum(asked.operation == "get" and asked.name.endswith(".kv") for asked in list(bucket.asked))


def news(bucket: FaultyS3, operation: str = "get") -> int:
    """Return the number of requests about news."""
    return sum(asked.operation == operation and "/new/" in asked.name for asked in list(bucket.asked))


def store_for_tenants(node: Node, count: int, partition: int, label: str = "of") -> None:
    """Let a node write one object for each of some tenants."""
    before = node.cold().written_objects
    for number in range(count):
        chain = Chain(f"{label} {number}", 1, partition=partition)
        node.store_chain(chain, node.tenant(f"tenant-{number}"))
    node.await_written(before + count)


# ---- Index objects


def test_a_node_learns_many_records_from_index_objects(bucket: FaultyS3, open_node: Opens) -> None:
    for partition in range(8):
        put(bucket, chains_of(partition, 50 if partition == HOME else 5), indexed=True)
    node = open_node(index_ttl_s=3600.0)
    node.await_known(2 * (50 + 7 * 5))
    assert bucket.count("get") == 8 and not tails(bucket), "one request for each partition"
    last = chains_of(HOME, 50)[-1]
    assert node.read_chain(last) == last.values


def test_a_node_that_writes_many_objects_writes_an_index_object(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node()
    store_for_tenants(node, 15, HOME)
    node.await_listed()
    assert not index_objects(bucket), "a few tails cost less than an index object"
    store_for_tenants(node, 1, HOME, "more")
    wait_for(lambda: index_objects(bucket))
    asked = tails(bucket)
    other = open_node(write="never")
    other.await_known(16)
    assert tails(bucket) == asked


@pytest.mark.parametrize("status", [403, 500])
def test_records_are_known_although_one_index_object_is_unreadable(
    bucket: FaultyS3, open_node: Opens, status: int
) -> None:
    """Symptom: the node read no tails, and tried again forever."""
    put(bucket, chains_of(HOME, 2), indexed=True)
    put(bucket, chains_of(HOME, 2, "others"), indexed=True)
    unreadable = min(index_objects(bucket))
    bucket.fault = lambda asked: Answer(status) if asked.name == unreadable else None
    node = open_node(serves=HOME.__eq__)
    node.await_known(8)
    wait_for(lambda: node.cold().lists)
    assert tails(bucket) == 2


@pytest.mark.parametrize("how", ["lost", "torn", "forged", "newer", "foreign footer", "oversized"])
def test_records_are_known_without_a_sound_index_object(
    bucket: FaultyS3, open_node: Opens, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    chains = chains_of(HOME, 3)
    put(bucket, chains, indexed=True)
    ((name, body),) = index_objects(bucket).items()
    del bucket.objects[name]
    match how:
        case "torn":
            bucket.objects[name] = body[:-10]
        case "forged":
            bucket.objects[name] = bytes([*body[:60], body[60] ^ 1, *body[61:]])
        case "newer":
            bucket.objects[PREFIX + index_name(HOME, b"SSINDX02" + body[8:])] = b"SSINDX02" + body[8:]
        case "foreign footer":
            bucket.objects[PREFIX + index_name(ELSEWHERE, body)] = body
            put(bucket, chains_of(ELSEWHERE, 1))
        case "oversized":
            bucket.objects[name] = bytes(9 * MIB)
    left = index_objects(bucket)
    node = open_node()
    node.await_known(8 if how == "foreign footer" else 6)
    assert node.read_chain(chains[0]) == chains[0].values
    known = node.cold().objects
    put(bucket, chains_of(HOME, 1, "late"))
    wait_for(lambda: node.cold().objects == known + 1)
    lines = [record for record in caplog.records if "s3_index_refused" in record.message]
    assert len(lines) == len(left), "one line for each"
    assert index_objects(bucket) == left, "it may be of a newer version, and is left alone"


def test_two_nodes_that_claim_a_partition_merge_its_index_without_loss(bucket: FaultyS3, open_node: Opens) -> None:
    chains = chains_of(HOME, 20)
    for begin in range(0, 20, 2):
        put(bucket, chains[begin : begin + 2], indexed=True)
    stale = chains_of(HOME, 2, "deleted since")
    put(bucket, stale, indexed=True)
    for chain in stale:
        del bucket.objects[PREFIX + chain.object()[0]]
    before = index_objects(bucket).keys()
    first = sorted(before)[0]
    gate = threading.Event()

    def one_deletes_late(asked: Asked) -> Answer | None:
        return Answer(after=gate) if asked.operation == "delete" and asked.name == first else None

    bucket.fault = one_deletes_late
    for node in [open_node(serves=HOME.__eq__), open_node(serves=HOME.__eq__)]:
        node.await_known(40)
    gate.set()
    wait_for(lambda: not before & index_objects(bucket).keys())
    names = {name for name, body in index_objects(bucket).items() for name in described(name, body)}
    assert names == {chain.object()[0] for chain in chains}, "exactly what exists"
    asked = tails(bucket)
    newcomer = open_node()
    newcomer.await_known(40)
    assert tails(bucket) == asked


def test_flushall_deletes_index_objects_after_its_list(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: it deleted each between two pages of the list, and so exceeded the list's deadline."""
    for partition in range(8):
        put(bucket, chains_of(partition, 1), indexed=True)
    node = open_node(index_ttl_s=3600.0)
    node.await_known(16)
    pages, is_listed = bucket.count("list"), threading.Event()

    def later(asked: Asked) -> Answer | None:
        if bucket.count("list") == 2 * pages:
            is_listed.set()
        return Answer(after=is_listed) if asked.operation == "delete" else None

    bucket.fault = later
    node.clear()
    assert not bucket.objects


# ---- Partitions of a fleet


def test_a_node_lists_what_it_serves_and_other_partitions_when_asked(bucket: FaultyS3, open_node: Opens) -> None:
    now = [0.0]
    own, foreign = chains_of(HOME, 1)[0], chains_of(ELSEWHERE, 1)[0]
    put(bucket, [own])
    put(bucket, [foreign])
    node = open_node(serves=HOME.__eq__, index_ttl_s=60.0, clock_s=lambda: time.monotonic() + now[0])
    assert node.cold().records == 2 and node.peek(own.keys[0]) is not None
    assert node.peek(foreign.keys[0]) is None, "no question waits for the bucket"
    wait_for(lambda: node.cold().records == 4)
    assert node.read_chain(foreign) == foreign.values
    lists = bucket.count("list")
    assert all(node.peek(key) is not None for key in foreign.keys)
    assert bucket.count("list") == lists, "it remembers the partition"
    now[0] += 3600.0
    assert node.peek(chains_of(ELSEWHERE + 1, 1)[0].keys[0]) is None
    node.await_known(2)


def test_a_removal_in_another_nodes_partition_waits_for_its_list(bucket: FaultyS3, open_node: Opens) -> None:
    foreign = chains_of(ELSEWHERE, 1)[0]
    put(bucket, [foreign])
    node = open_node(serves=HOME.__eq__)
    node.put(foreign.keys[0], b"another value")
    assert not bucket.objects


def test_the_node_of_a_partition_learns_what_another_wrote(
    bucket: FaultyS3, open_node: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "owner")
    owner = open_node(serves=HOME.__eq__, index_ttl_s=2.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
    writer = open_node(serves=ELSEWHERE.__eq__, index_ttl_s=0.2)
    wait_for(lambda: owner.cold().lists)  # its first list does not find the object
    chain = chains_of(HOME, 1)[0]
    writer.store_chain(chain)
    owner.await_known(2)
    gets = [asked for asked in list(bucket.asked) if asked.operation == "get" and asked.key_id == "owner"]
    assert gets and not any(asked.name.endswith(".kv") for asked in gets), "it knows the records from the news"
    assert owner.read_chain(chain) == chain.values
    wait_for(lambda: [name.split("/")[1] for name in index_objects(bucket)] == ["007"])  # no news left


def test_an_object_that_was_deleted_does_not_come_back_with_news(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: EXISTS and KV.META returned a record for an hour that the bucket did not have."""
    deleted, left = chains_of(HOME, 2)
    put(bucket, [deleted, left], is_news=True)
    del bucket.objects[PREFIX + deleted.object()[0]]
    node = open_node(serves=HOME.__eq__, index_ttl_s=3600.0)
    wait_for(lambda: not any("/new/" in name for name in bucket.objects) and node.cold().records == 2)
    assert node.read_chain(left) == left.values


@pytest.mark.parametrize("right", ["put", "delete"])
def test_news_that_cannot_be_replaced_are_read_once(bucket: FaultyS3, open_node: Opens, right: str) -> None:
    """Symptom: each node read them in each interval, and refused deletions stopped writes."""
    put(bucket, chains_of(HOME, 1), is_news=True)
    bucket.fault = lambda asked: Answer(403, "AccessDenied") if asked.operation == right else None
    node = open_node(serves=HOME.__eq__, write="never" if right == "put" else "at_once")
    node.await_known(2)
    for _ in range(3):
        node.await_listed()
    assert news(bucket) <= 2 and news(bucket, "delete") <= 1
    if right == "delete":
        node.store_chain(Chain("later", 1, partition=HOME))
        node.await_written(1)
        assert not node.cold().failing_s


def test_slow_news_delay_no_other_list(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: after an outage a node read thousands of news first, and listed no partition in the meantime."""
    node = open_node(serves=HOME.__eq__, timeout_s=300.0)
    node.await_listed()
    foreign, gate = chains_of(ELSEWHERE, 1)[0], threading.Event()
    bucket.fault = lambda asked: Answer(after=gate) if asked.operation == "get" and "/new/" in asked.name else None
    try:
        put(bucket, chains_of(HOME, 1), is_news=True)
        wait_for(lambda: news(bucket))
        put(bucket, [foreign])
        drive(lambda: node.peek(foreign.keys[0]), lambda: node.peek(foreign.keys[0]), timeout=20.0)
    finally:
        gate.set()


def test_a_node_that_ends_leaves_its_news(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: the partition's node did not find what another had written just before its end."""
    node = open_node(serves=ELSEWHERE.__eq__, index_ttl_s=3600.0)
    wait_for(lambda: node.cold().lists)
    node.store_chain(chains_of(HOME, 1)[0])
    node.await_written(1)
    assert not index_objects(bucket)
    node.store.drain(30.0)
    assert [name.split("/")[1] for name in index_objects(bucket)] == ["new"]


def test_requests_do_not_grow_with_the_number_of_nodes(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: each node listed the whole bucket in each interval, and read the end of each object.

    This is an interval with 96 writes. Each further node adds one request: the list of news.
    """
    counts = {}
    for nodes in (1, 8):
        bucket.asked.clear()
        bucket.objects.clear()
        fleet = [
            open_node(serves=lambda each, n=number, m=nodes: each < 32 and each % m == n, index_ttl_s=3600.0)
            for number in range(nodes)
        ]
        for node in fleet:
            wait_for(lambda node=node: node.cold().lists)
        for number in range(3):
            for partition in range(32):
                fleet[partition % nodes].store_chain(Chain(f"{number}", 1, partition=partition))
            for node in fleet:
                node.await_known((number + 1) * 32 // nodes)
        counts[nodes] = len(bucket.asked)
    assert counts[8] <= 1.2 * counts[1], counts


def test_a_small_bucket_is_listed_as_a_whole(bucket: FaultyS3, open_node: Opens) -> None:
    put(bucket, chains_of(HOME, 1))
    put(bucket, chains_of(4000, 1))
    node = open_node(serves=lambda each: each < 512, index_ttl_s=3600.0)
    wait_for(lambda: node.cold().lists)
    assert node.cold().records == 2 and bucket.count("list") == 2, "of the bucket, and of the news"


def test_a_bucket_that_throttles_lists_is_asked_more_rarely(bucket: FaultyS3, open_node: Opens) -> None:
    chain = chains_of(HOME, 1)[0]
    put(bucket, [chain])
    bucket.fault = lambda asked: Answer(503, "SlowDown") if asked.operation == "list" else None
    node = open_node(serves=lambda each: each < 512)
    wait_for(lambda: node.cold().state == "away")
    lists = bucket.count("list")
    assert lists < 300, "of 512 partitions"
    bucket.fault = lambda asked: None
    drive(lambda: node.peek(chain.keys[0]), lambda: node.cold().records == 2)
    assert node.read_chain(chain) == chain.values


def test_questions_about_a_partition_that_cannot_be_listed_cause_no_flood_of_lists() -> None:
    """Symptom: while its list failed, each question caused another one."""
    partitions = Partitions(HOME.__eq__, 60.0, lambda: 0.0)
    partitions.follow()
    partitions.ask(ELSEWHERE)
    assert partitions.changed.is_set() and ELSEWHERE in partitions.due()
    partitions.changed.clear()
    partitions.note_failed([ELSEWHERE])
    partitions.ask(ELSEWHERE)
    assert not partitions.changed.is_set() and ELSEWHERE not in partitions.due()


def test_many_partitions_of_other_nodes_are_listed_more_rarely() -> None:
    now_s = [0.0]
    partitions = Partitions(HOME.__eq__, 1.0, lambda: now_s[0])
    partitions.follow()
    lists = 0
    for _ in range(8):
        for partition in range(1000, 3048):
            partitions.ask(partition)
        due = set(partitions.due()) - {HOME}
        partitions.note_listed(due, now_s[0])
        lists += len(due)
        now_s[0] += 1.0
    assert lists == 2 * 2048, "the first list of each is not delayed"


def test_a_question_during_a_change_of_the_fleet_does_not_break_the_schedule() -> None:
    """Symptom: from then on each turn of the thread that lists ended with a KeyError."""
    now_s, served, during = [0.0], set(), []

    def clock_s() -> float:
        if during:
            during.pop()()
        return now_s[0]

    partitions = Partitions(served.__contains__, 1.0, clock_s)
    partitions.follow()
    served.add(HOME)
    during.append(partitions.follow)
    partitions.ask(HOME)
    now_s[0] += 100.0
    assert not partitions.follow()
    assert not partitions.is_complete


# ---- Eviction


def test_the_node_of_a_partition_deletes_what_was_not_used_for_longest(bucket: FaultyS3, open_node: Opens) -> None:
    """It serves 1/64 of the partitions, and so has 36 MiB."""
    chains = [Chain(f"large {number}", 8, MIB, partition=HOME) for number in range(4)]
    foreign = [Chain(f"foreign {number}", 8, MIB, partition=4000) for number in range(4)]
    put(bucket, [*foreign, *chains])
    bucket.written = {PREFIX + chain.object()[0]: float(at) for at, chain in enumerate([*foreign, *chains])}
    settings = {"memory_budget_bytes": 256 * MIB, "serves": lambda each: each < 64, "bytes_max": 64 * 36 * MIB}
    node = open_node(**settings)
    node.await_known(32)
    assert node.read_chain(chains[0]) == chains[0].values
    assert node.peek(foreign[0].keys[0]) is None
    node.await_known(64)
    node.store_chain(Chain("newest", 8, MIB, partition=HOME))
    wait_for(lambda: node.cold().swept_objects)
    left = {name for name in bucket.objects if name.endswith(".kv")}
    assert {PREFIX + chain.object()[0] for chain in [*foreign, chains[0], *chains[2:]]} < left
    assert PREFIX + chains[1].object()[0] not in left


def test_the_last_use_survives_a_restart_in_the_index(bucket: FaultyS3, open_node: Opens) -> None:
    chains, day_s = chains_of(HOME, 3), [0.0]
    put(bucket, chains, indexed=True)
    bucket.written = {PREFIX + chain.object()[0]: float(abs(at - 1)) for at, chain in enumerate(chains)}
    (before,) = index_objects(bucket)
    settings = {"serves": HOME.__eq__, "bytes_max": 64 * 4096 * MIB}
    clock = {"clock_s": lambda: time.monotonic() + day_s[0]}
    node = open_node(**settings, **clock)
    node.await_known(6)
    assert node.read_chain(chains[1]) == chains[1].values
    day_s[0] += 2 * 86_400.0
    wait_for(lambda: before not in index_objects(bucket))
    wait_for(lambda: len(index_objects(bucket)) == 1)
    ((name, body),) = index_objects(bucket).items()
    parts = parse_index_name(name.removeprefix(PREFIX))
    used = {contents.name for contents, used_h in parse_index(parts, body) if used_h}
    assert used == {chains[1].object()[0]}
    node.store.close()
    other = open_node(serves=HOME.__eq__, bytes_max=64 * MIB)  # room for one
    wait_for(lambda: other.cold().swept_objects == 2)
    assert [name for name in bucket.objects if name.endswith(".kv")] == [PREFIX + chains[1].object()[0]]
