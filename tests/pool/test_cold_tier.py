"""A bucket below the pool: every node finds the records of the others, and faults of the bucket are misses."""

import contextlib
import threading
from pathlib import Path

import pytest
from cold_support import MIB, Chain, Node, Opens, nodes, written
from faulty_s3 import LIES, Answer, Asked, Fault, FaultyS3, faulty_s3
from machine import drive, wait_for

from shadowserve.errors import ConfigurationError
from shadowserve.placement import partition_of
from shadowserve.pool.cold.gathering import Gathering

CHAIN = Chain("prefix", 12)


def filled(open_node: Opens, chain: Chain = CHAIN) -> Node:
    """Return a node with a stored chain. The bucket has all of it in one object."""
    node = written(open_node, chain)
    node.await_known(len(chain.records))
    return node


def reader(open_node: Opens, **keys: object) -> Node:
    """Return another node that knows the records of :func:`filled`."""
    filled(open_node)
    other = open_node(**keys)
    other.await_known(12)
    return other


def endless_list(bucket: FaultyS3) -> Fault:
    """Return a fault of lists: each page has another continuation."""
    page = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%d</NextContinuationToken>"
    return lambda asked: Answer(200, body=(page % len(bucket.asked)).encode()) if asked.operation == "list" else None


# ---- Purpose


def test_an_empty_node_serves_records_of_another_node(bucket: FaultyS3, open_node: Opens) -> None:
    other = reader(open_node)
    asked = bucket.count("get")
    assert other.read_chain(CHAIN) == CHAIN.values
    assert bucket.count("get") - asked <= 6, "neighbouring records must share a few range requests"
    assert other.cold().read_records == 12
    requests = [each for each in bucket.asked if each.operation != "list"]
    assert other.read_chain(CHAIN) == CHAIN.values
    assert [each for each in bucket.asked if each.operation != "list"] == requests, "read records must stay in the node"


def test_a_chain_becomes_few_objects_and_lookups_need_no_request(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node(gather_s=0.3, index_ttl_s=3600.0)
    node.store_chain(CHAIN)
    node.await_written(1)
    assert len(bucket.objects) == 1
    wait_for(lambda: node.cold().lists)
    asked = len(bucket.asked)
    assert all(node.peek(key) is None for key in Chain("unknown", 100).keys)
    assert all(node.peek(key) is not None for key in CHAIN.keys)
    assert len(bucket.asked) == asked


def test_interleaved_chains_go_into_separate_objects(bucket: FaultyS3, open_node: Opens) -> None:
    one, two = Chain("one", 16, 1 << 17), Chain("two", 16, 1 << 17)
    node = open_node(gather_s=600.0, object_bytes=2 * MIB)
    for both in zip(one.records, two.records, strict=True):
        node.store_records(both)
    node.await_written(0)
    wait_for(lambda: len(bucket.objects) == 2)
    bodies = list(bucket.objects.values())
    assert [sum(value in body for value in one.values) for body in bodies] in ([16, 0], [0, 16])


@pytest.mark.parametrize("how", ["slow", "refusing"])
def test_write_evicted_waits_for_an_unwritable_bucket_until_its_deadline(
    bucket: FaultyS3, open_node: Opens, how: str
) -> None:
    node = open_node(write="evicted", memory_budget_bytes=2 * MIB, timeout_s=0.5)
    gate = threading.Event()
    bad = Answer(after=gate) if how == "slow" else Answer(status=503, code="SlowDown")
    bucket.fault = lambda asked: bad if asked.operation == "put" else None
    try:
        many = Chain("many", 60, 1 << 16)
        node.store_chain(many)
        found = node.read_chain(many)
        assert node.statistics().evicted_keys
        assert all(value in (None, wanted) for value, wanted in zip(found, many.values, strict=True))
        assert None in found and not bucket.objects
    finally:
        gate.set()


def test_tenants_do_not_find_each_others_records(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node()
    team, odd = node.tenant("team-a"), node.tenant("we/..%2F=x")
    node.store_chain(CHAIN, team)
    node.store_chain(Chain("theirs", 2), odd)
    node.await_written(2)
    other = open_node()
    other.await_known(14)
    others = other.tenant("team-b"), other.tenant("team-a")
    assert other.read_chain(CHAIN, others[0]) == [None] * 12 == other.read_chain(CHAIN)
    assert other.read_chain(CHAIN, others[1]) == CHAIN.values
    assert other.read_chain(Chain("theirs", 2), other.tenant("we/..%2F=x")) is not None


def test_two_nodes_write_the_same_chain_once(bucket: FaultyS3, open_node: Opens) -> None:
    gate = bucket.hold("put")
    both = [open_node(gather_s=0.3), open_node(gather_s=0.3)]
    for node in both:
        node.store_chain(CHAIN)
    wait_for(lambda: bucket.count("put") == 2)
    gate.set()
    for node in both:
        wait_for(lambda node=node: not node.cold().waiting_records)
        node.await_known(12)
    assert len(bucket.objects) == 1
    assert sorted(node.cold().written_objects for node in both) == [0, 1]
    assert sorted(node.cold().present_objects for node in both) == [0, 1]


def test_written_records_survive_a_crash(bucket: FaultyS3, open_node: Opens) -> None:
    gate = bucket.hold("put")
    node = open_node(gather_s=0.3)
    node.store_chain(CHAIN)
    wait_for(lambda: bucket.count("put"))
    crash = threading.Thread(target=node.store.close)  # without drain(), as in a crash
    crash.start()
    gate.set()
    crash.join()
    wait_for(lambda: bucket.objects)
    other = open_node()
    other.await_known(12)
    assert other.read_chain(CHAIN) == CHAIN.values


def test_write_never_writes_nothing(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node(write="never")
    node.store_chain(CHAIN)
    node.await_listed()
    assert not bucket.count("put")


# ---- Removal


def test_a_removed_record_is_gone_from_the_bucket_when_the_command_returns(bucket: FaultyS3, open_node: Opens) -> None:
    node = filled(open_node)
    assert node.remove(CHAIN.keys[3])
    assert not bucket.objects
    other = open_node()
    other.await_listed()
    assert other.peek(CHAIN.keys[3]) is None


def test_a_refused_deletion_is_an_error_and_is_repeated_later(bucket: FaultyS3, open_node: Opens) -> None:
    node = filled(open_node)
    bucket.fault = lambda asked: Answer(403, "AccessDenied") if asked.operation == "delete" else None
    with pytest.raises(Exception, match="cannot delete"):
        node.remove(CHAIN.keys[0])
    assert node.peek(CHAIN.keys[0]) is None
    asked = bucket.count("list")
    wait_for(lambda: bucket.count("list") > asked + 1)
    assert node.peek(CHAIN.keys[0]) is None, "a list must not restore a removed record"
    late = Chain("late", 3)
    open_node().store_chain(late)
    node.await_known(3)
    assert node.read_chain(late) == late.values, "failed deletions must not prevent reads"
    bucket.fault = lambda asked: None
    wait_for(lambda: len(bucket.objects) == 1)


def test_a_removal_ends_at_its_deadline_and_does_not_block_another_tenant(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node(gather_s=0.3, timeout_s=0.5)
    modest, short = node.tenant("modest"), Chain("short", 1)
    node.store_chain(CHAIN)
    node.store_chain(short, modest)
    node.await_known(13)
    gate = threading.Event()

    def stuck(asked: Asked) -> Answer | None:
        return Answer(after=gate) if asked.operation == "delete" and "tmodest" not in asked.name else None

    bucket.fault = stuck
    try:
        ticket = node.call(node.store.put, (0, CHAIN.keys[0]), b"another value")
        assert node.remove(short.keys[0], modest), "the tenant must get a turn"
        with pytest.raises(Exception, match="cannot delete"):
            node.settle(ticket)
    finally:
        gate.set()
    wait_for(lambda: not bucket.objects)


def test_a_removal_that_fails_at_once_is_an_error(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a removal succeeded if the bucket refused it before the caller waited for its end."""
    node = filled(open_node)
    bucket.fault = lambda asked: Answer(403, "AccessDenied") if asked.operation == "delete" else None
    assert node.call(node.store.remove, (0, CHAIN.keys[0]))
    wait_for(lambda: bucket.count("delete") > 2)  # later lists repeat the deletion
    with pytest.raises(Exception, match="cannot delete"):
        node.settle(node.call(node.store.barrier))
    assert node.call(node.store.barrier) is None, "the error must be reported only once"
    bucket.fault = lambda asked: None


def test_a_record_removed_during_its_write_is_not_in_the_bucket(bucket: FaultyS3, open_node: Opens) -> None:
    gate = bucket.hold("put")
    node = open_node(gather_s=0.3)
    node.store_chain(CHAIN)
    wait_for(lambda: bucket.count("put"))
    threading.Timer(0.05, gate.set).start()
    assert node.remove(CHAIN.keys[0])
    assert not bucket.objects
    node.await_listed()
    assert node.peek(CHAIN.keys[0]) is None


def test_a_removed_record_does_not_return_by_a_footer_read_before(bucket: FaultyS3, open_node: Opens) -> None:
    node = open_node(index_ttl_s=1.0, gather_s=0.5)  # enough time for the check before the next list repairs it
    gate = threading.Event()
    late: list[Asked] = []

    def first_tail_comes_late(asked: Asked) -> Answer | None:
        if asked.operation != "get" or late:
            return None
        late.append(asked)
        body = bucket.objects[asked.name]
        start, end = asked.range[0], min(asked.range[1], len(body))
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
        return Answer(206, headers=headers, body=body[start:end], after=gate)

    bucket.fault = first_tail_comes_late
    try:
        open_node(index_ttl_s=3600.0, gather_s=0.5).store_chain(CHAIN)
        wait_for(lambda: late)
        node.store_chain(CHAIN)
        node.await_known(12)
        lists = node.cold().lists
        assert node.remove(CHAIN.keys[3])
    finally:
        gate.set()
    wait_for(lambda: node.cold().lists > lists)
    assert node.peek(CHAIN.keys[3]) is None and not node.cold().objects


def test_clearing_a_tenant_deletes_exactly_its_objects_even_unknown_ones(bucket: FaultyS3, open_node: Opens) -> None:
    writer = open_node()
    mine, theirs = (writer.tenant(name) for name in ("mine", "theirs"))
    writer.store_chain(CHAIN, mine)
    writer.store_chain(CHAIN, theirs)
    writer.await_written(2)
    bucket.fault = lambda asked: Answer(503, "SlowDown") if asked.operation == "list" else None
    other = open_node()
    mine_there = other.tenant("mine")
    wait_for(lambda: other.cold().failed_reads)
    bucket.fault = lambda asked: None
    other.clear(mine_there)
    assert len(bucket.objects) == 1 and "ttheirs" in next(iter(bucket.objects))


def test_the_flushes_of_a_tenant_do_not_block_the_removals_of_others(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: FLUSHDB on four connections, also of a tenant without objects, made each DEL of others an error."""
    node = filled(open_node)
    idle = node.tenant("idle")
    bucket.fault = endless_list(bucket)
    for _ in range(5):
        node.call(lambda: (node.store.clear(idle), node.store.barrier()))
    assert node.remove(CHAIN.keys[0]), "while the bucket is listed"
    assert not bucket.objects
    assert node.cold().deleting <= 2, "one waits for the next list, with the ticket of all further ones"
    bucket.fault = lambda asked: None
    wait_for(lambda: not node.cold().deleting)


def test_values_with_an_expiry_or_without_a_header_are_not_written_and_replace_the_record(
    bucket: FaultyS3, open_node: Opens
) -> None:
    node = filled(open_node)
    short = Chain("short", 1)
    node.put(short.keys[0], short.values[0], header_bytes=short.records[0][2], expires_at_ms=1 << 50)
    node.put(b"plain", b"text" * 1000)
    node.await_listed()
    assert len(bucket.objects) == 1
    assert node.set_expiry(CHAIN.keys[5], 1 << 50)
    assert not bucket.objects
    assert node.value(CHAIN.keys[5]) == CHAIN.values[5]


def test_a_removal_waits_for_the_first_complete_list(bucket: FaultyS3, open_node: Opens) -> None:
    filled(open_node)
    gate = bucket.hold("get")
    other = open_node(timeout_s=0.3)  # it starts before the tail is in the bucket
    ticket = other.call(other.store.put, (0, CHAIN.keys[0]), b"another value")
    assert not ticket.settled
    gate.set()
    with contextlib.suppress(Exception):  # its deadline may pass before the tail arrives
        other.settle(ticket)
    wait_for(lambda: other.cold().lists)
    other.put(CHAIN.keys[0], b"a third value")
    assert not bucket.objects


def test_removal_deletes_an_object_whose_write_had_no_answer(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a write without an answer was complete, and DEL was answered without deleting its object."""
    node = open_node(index_ttl_s=3600.0)
    wait_for(lambda: node.cold().lists)
    arrived = bucket.objects

    def lost_answer(asked: Asked) -> Answer | None:
        return Answer(truncate=0, body=b"lost", headers={"Content-Length": "9"}) if asked.operation == "put" else None

    bucket.fault = lost_answer
    node.store_chain(CHAIN)
    wait_for(lambda: arrived and node.cold().failed_writes)
    bucket.fault = lambda asked: Answer(503, "SlowDown") if asked.operation == "put" else None
    for key in CHAIN.keys:
        node.remove(key)
    assert not bucket.objects


def test_removal_deletes_an_object_that_could_not_be_read(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a failed read made the node forget the object, and DEL was answered without deleting it."""
    other = reader(open_node, index_ttl_s=3600.0)
    bucket.fault = LIES["truncated"]
    assert other.read_chain(CHAIN) == [None] * 12
    bucket.fault = lambda asked: None
    assert other.peek(CHAIN.keys[0]) is None
    other.remove(CHAIN.keys[0])
    assert not bucket.objects


# ---- A bucket that is down, refuses, or returns wrong data


def test_a_wrong_list_forgets_nothing_and_a_clear_then_fails(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: FLUSHALL was never answered, because each page had another continuation."""
    node = filled(open_node)
    other = open_node(list_timeout_s=0.3)
    other.await_known(12)
    bucket.fault = endless_list(bucket)
    wait_for(lambda: other.cold().failing_s)
    assert not other.cold().up and "no end" in other.cold().last_error
    assert other.read_chain(CHAIN) == CHAIN.values, "known objects must be readable"
    with pytest.raises(Exception, match="cannot list|cannot delete all of it in time"):
        other.clear(0)
    bucket.fault = lambda asked: None
    node.await_listed()


@pytest.mark.parametrize("how", LIES)
def test_a_failing_or_lying_bucket_causes_misses_and_no_wrong_bytes(
    bucket: FaultyS3, open_node: Opens, how: str
) -> None:
    other = reader(open_node, index_ttl_s=3600.0)

    bucket.fault = LIES[how]
    assert other.read_chain(CHAIN) == [None] * 12
    assert sum(other.cold().failed_reads.values()) > 0
    assert other.read_chain(CHAIN) == [None] * 12, "nor later"


def test_an_object_that_was_swapped_for_another_is_a_miss(bucket: FaultyS3, open_node: Opens) -> None:
    other = reader(open_node, index_ttl_s=3600.0)
    writer = open_node()
    rejected = Chain("rejected", 12)
    writer.store_chain(rejected)
    wait_for(lambda: len(bucket.objects) > 1)
    ours, theirs = sorted(bucket.objects, key=lambda name: CHAIN.values[0] not in bucket.objects[name])[:2]
    bucket.objects[ours] = bucket.objects[theirs]
    found = other.read_chain(CHAIN)
    assert found == [None] * len(CHAIN.records)
    newcomer = open_node()
    newcomer.await_listed()
    assert newcomer.read_chain(CHAIN) == [None] * 12, "the tail must reveal another object"
    assert newcomer.cold().failed_reads["damaged"]


def test_a_flipped_bit_of_one_record_is_a_miss(bucket: FaultyS3, open_node: Opens) -> None:
    filled(open_node)
    (name,) = bucket.objects
    body = bytearray(bucket.objects[name])
    body[body.index(CHAIN.values[7]) + len(CHAIN.values[7]) - 1] ^= 1
    bucket.objects[name] = bytes(body)
    other = open_node(index_ttl_s=3600.0)
    other.await_known(12)
    found = other.read_chain(CHAIN)
    assert found[7] is None
    assert all(value is None or value == right for value, right in zip(found, CHAIN.values, strict=True))


def test_a_silent_bucket_costs_the_deadline_and_later_nothing(bucket: FaultyS3, open_node: Opens) -> None:
    other = reader(open_node, timeout_s=0.2, index_ttl_s=3600.0)
    gate = bucket.hold("get")
    assert other.read_chain(CHAIN) == [None] * 12
    drive(lambda: other.read_chain(CHAIN), lambda: other.cold().away)
    assert other.cold().failed_reads["timeout"]
    assert other.peek(CHAIN.keys[0]) is None, "no client must wait for a bucket that is down"
    other.put(b"key", b"value")
    assert other.value(b"key") == b"value"
    gate.set()


def test_a_bucket_that_was_away_at_the_start_is_used_later(bucket: FaultyS3, open_node: Opens) -> None:
    filled(open_node)
    bucket.fault = lambda asked: Answer(503, "SlowDown")
    other = open_node()
    assert other.read_chain(CHAIN) == [None] * 12
    wait_for(lambda: other.cold().failed_reads.get("busy", 0))
    bucket.fault = lambda asked: None
    other.await_known(12)
    wait_for(lambda: not other.cold().away)
    assert other.read_chain(CHAIN) == CHAIN.values


@pytest.mark.parametrize(("status", "code"), [(507, "QuotaExceeded"), (403, "AccessDenied"), (503, "SlowDown")])
def test_an_unwritable_bucket_is_read_and_gets_waiting_records_later(
    bucket: FaultyS3, open_node: Opens, status: int, code: str
) -> None:
    node = reader(open_node)
    bucket.fault = lambda asked: Answer(status, code) if asked.operation == "put" else None
    late = Chain("late", 4)
    node.store_chain(late)
    wait_for(lambda: node.cold().failed_writes)
    assert node.read_chain(CHAIN) == CHAIN.values
    bucket.fault = lambda asked: None
    node.await_written(1)
    node.await_known(16)


def test_a_wrong_clock_of_the_bucket_does_no_harm(bucket: FaultyS3, open_node: Opens) -> None:
    bucket.skew_s = 10 * 365 * 86_400.0
    other = reader(open_node)
    bucket.skew_s = -10 * 365 * 86_400.0
    other.await_listed()
    assert other.read_chain(CHAIN) == CHAIN.values


def test_objects_deleted_by_others_are_forgotten_with_the_next_list(bucket: FaultyS3, open_node: Opens) -> None:
    other = reader(open_node)
    bucket.objects.clear()
    other.await_known(0)
    assert other.read_chain(CHAIN) == [None] * 12


def test_a_list_of_very_many_objects_is_learnt_in_rounds(
    bucket: FaultyS3, open_node: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowserve.pool.cold.scanning._LISTED_MAX", 2)
    for number in range(9):
        name, body = Chain(f"round {number}", 1).object()
        bucket.objects[f"shadowserve/{name}"] = body
    node = open_node()
    node.await_known(9)
    wait_for(lambda: node.cold().lists)


def test_foreign_objects_under_the_prefix_are_left_alone(bucket: FaultyS3, open_node: Opens) -> None:
    foreign = {
        "shadowserve/readme.txt": b"hello",
        "shadowserve/000/t/" + 40 * "0" + ".kv": b"",
        "shadowserve/000/t/" + 40 * "1" + ".kv": b"no object of ours" * 10,
        "shadowserve/000/tx=zz/" + 40 * "2" + ".kv": b"x",
        "shadowserve/t/" + 40 * "3" + ".kv": b"no partition",
    }
    bucket.objects |= foreign
    node = filled(open_node)
    wait_for(lambda: node.cold().lists >= 16)
    lists = node.cold().lists
    assert node.read_chain(CHAIN) == CHAIN.values
    assert foreign.items() <= bucket.objects.items()
    looks = len([each for each in bucket.asked if each.name.endswith("1.kv")])
    assert 2 <= looks <= lists.bit_length(), "ever more rarely"


def test_an_object_damaged_in_transit_is_known_after_a_good_read(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a tail that was damaged in one answer was not read again until the node was restarted."""
    filled(open_node)
    bucket.fault = LIES["same_length"]
    other = open_node()
    wait_for(lambda: other.cold().failed_reads.get("damaged"))
    bucket.fault = lambda asked: None
    other.await_known(12)
    assert other.read_chain(CHAIN) == CHAIN.values


def test_a_new_node_lists_the_bucket_at_once(bucket: FaultyS3, open_node: Opens) -> None:
    """Symptom: a restarted node answered before it had listed the bucket, and reported no records."""
    filled(open_node)
    assert open_node(index_ttl_s=3600.0).read_chain(CHAIN) == CHAIN.values


# ---- Access control between tenants


def test_ca_file_is_trusted(bucket: FaultyS3, certificates: Path) -> None:
    with faulty_s3(certificates) as secure, nodes(secure) as opens:
        node = opens(ca_file=certificates / "ca.crt")
        node.store_chain(CHAIN)
        node.await_written(1)
        rejected = opens()
        wait_for(lambda: rejected.cold().failed_reads)
        assert rejected.cold().objects == 0


def test_renewed_credentials_of_a_file_are_used(
    bucket: FaultyS3, open_node: Opens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(key_id: str) -> None:
        text = f"[team]\naws_access_key_id = {key_id}\naws_secret_access_key = s\naws_session_token = t\n"
        (tmp_path / "credentials").write_text(text)

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setattr("shadowserve.pool.cold.credentials._FILE_S", 0.0)
    write("first")
    open_node()
    wait_for(lambda: any(asked.key_id == "first" for asked in bucket.asked))
    write("second")
    wait_for(lambda: any(asked.key_id == "second" for asked in bucket.asked))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigurationError, match="AWS_PROFILE"):
        open_node()


# ---- Waiting writes


def key_of(name: bytes, partition: int = 0) -> bytes:
    return name.ljust(24) + partition.to_bytes(2, "big") + bytes(6)


def test_the_backlog_is_limited_and_dropped_records_are_counted() -> None:
    gathering = Gathering(1000, 5.0, 100, backlog_max=10)
    for number in range(25):
        gathering.add((0, b"%d" % number), key_of(b"%d" % number), b"", 10, 0.0)
    assert (gathering.waiting, gathering.dropped) == (10, 15)
    assert gathering.take(1.0) is None, "the writes must wait for further ones"
    batch = gathering.take(6.0)
    assert [key for _, key in batch.records] == [key_of(b"%d" % number) for number in range(15, 25)]
    gathering.put_back(batch)
    gathering.forget(1)
    assert gathering.waiting == 10
    gathering.forget(0)
    assert gathering.waiting == 0 and gathering.take(6.0, hurry=True) is None


def test_a_record_stored_twice_is_gathered_once() -> None:
    gathering = Gathering(1000, 5.0, 100)
    for _ in range(2):
        gathering.add((0, b"a"), key_of(b"a"), b"", 10, 0.0)
    gathering.add((0, b"b"), key_of(b"b"), key_of(b"a"), 10, 0.0)
    batch = gathering.take(0.0, hurry=True)
    assert [key for _, key in batch.records] == [key_of(b"a"), key_of(b"b")] and gathering.waiting == 0


def test_a_prioritized_sequence_is_taken_next() -> None:
    gathering = Gathering(20, 5.0, 100)
    for key, parent in ((b"a", b""), (b"b", b"a"), (b"c", b""), (b"x", b""), (b"y", b"x")):
        gathering.add((0, key), key_of(key), key_of(parent), 10 if key != b"c" else 1, 0.0)
    assert gathering.prioritize(0, key_of(b"c")) and gathering.prioritize(0, key_of(b"x"))
    assert not gathering.prioritize(0, key_of(b"z"))
    taken = []
    while (batch := gathering.take(0.0)) is not None:
        taken.append([name for (_, name), _ in batch.records])
    assert taken == [[b"x", b"y"], [b"c"], [b"a", b"b"]] and gathering.waiting == 0
    assert not gathering.prioritize(0, key_of(b"x"))


def test_a_batch_has_records_of_one_partition() -> None:
    gathering, keys = Gathering(1000, 5.0, 100), [key_of(b"%d" % number, number // 2 % 2) for number in range(12)]
    for parent, key in zip([b"", *keys], keys, strict=False):
        gathering.add((0, key), key, parent, 10, 0.0)
    batches = [gathering.take(6.0), gathering.take(6.0)]
    of_each = [[key for key in keys if partition_of(key) == partition] for partition in (0, 1)]
    assert [[key for _, key in batch.records] for batch in batches] == of_each
    assert gathering.take(6.0) is None and gathering.waiting == 0
