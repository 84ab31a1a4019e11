"""The order of a volume's writes: each barrier of docs/reference/volume-format.md."""

from volume_support import Store, device_of, key

from shadowserve.block import Operation, OperationKind
from shadowserve.pool.volume.format import BLOCK_BYTES


def run(store: Store, steps: int = 50) -> None:
    """Complete all operations except writes of objects."""
    first = store.volume.superblock.layout.data_first * BLOCK_BYTES
    for _ in range(steps):
        while store.device.complete(lambda each: each.kind is not OperationKind.WRITE or each.offset < first):
            pass
        store.step()


def test_object_log_flush_and_acknowledgement_come_in_this_order() -> None:
    store = Store(device_of())
    device = store.device
    store.drain()
    device.automatic = False
    device.trace.clear()
    store.put(key(1), b"value", what="put")
    seen = []
    while not store.settled:
        assert len({operation.kind for operation in device.waiting}) == 1
        seen.append(len(device.waiting))
        while device.complete():
            pass
        store.step()
    assert seen == [1, 2, 1]  # the object; both copies of the block; the flush
    data_first = store.volume.superblock.layout.data_first
    kinds = [(kind, first >= data_first) for kind, first, _ in device.trace]
    write = OperationKind.WRITE
    assert kinds == [(write, True), (write, False), (write, False), (OperationKind.FLUSH, False)]


def test_a_block_of_the_log_is_written_once_in_each_round() -> None:
    store = Store(device_of())
    device = store.device
    for number in range(20):
        store.keep(key(number), b"x")
    layout = store.volume.superblock.layout
    for first in layout.log_firsts:
        blocks = [at for kind, at, _ in device.trace if kind is OperationKind.WRITE and first <= at < first + 64]
        assert len(blocks) == len(set(blocks)) == 20


def test_a_barrier_waits_for_an_expiry_that_waits_for_its_object() -> None:
    store = Store(device_of())
    store.device.automatic = False
    store.put(key(1), b"value", what="put")
    store.expire(key(1), 1234)
    store.barrier("barrier")
    run(store)
    assert not store.settled
    store.device.automatic = True
    store.drain()
    assert {what for what, _ in store.settled} == {"put", "barrier"}


def test_a_snapshot_is_completed_after_the_writes_that_it_names() -> None:
    store = Store(device_of())
    store.keep(key(1), b"old")
    store.device.automatic = False
    store.put(key(1), b"new")
    store.volume.snapshot()
    run(store)
    assert store.volume.snapshots.completed == 0
    store.device.automatic = True
    store.drain()
    assert store.volume.snapshots.completed == 1


def test_slices_are_flushed_before_the_header_and_the_header_before_its_use() -> None:
    store = Store(device_of())
    device = store.device
    for number in range(40):
        store.put(key(number), b"x")
    store.drain()
    device.trace.clear()
    store.volume.snapshot()
    store.until(lambda: store.volume.snapshots.completed == 1)
    layout = store.volume.superblock.layout
    region = layout.snapshot_firsts[0]
    trace = [
        "flush" if kind is OperationKind.FLUSH else "header" if at == region else "slice"
        for kind, at, _ in device.trace
        if kind is OperationKind.FLUSH or region <= at < region + layout.snapshot_blocks
    ]
    assert trace == ["slice", "flush", "header", "flush"]


def test_a_failed_replacement_frees_the_old_extent_after_the_durable_removal() -> None:
    store = Store(device_of())
    store.keep(key(1), b"old")
    device = store.device
    device.automatic = False
    device.fail(OperationKind.WRITE)
    store.put(key(1), b"new")
    device.complete()
    calls = store.volume.step()
    assert store.volume.freeing_blocks == 1, "a crash now would find the old object in the log"
    assert device.waiting, "the removal must be written without a further request"
    for call in calls:
        call()


def test_blocks_of_a_crashed_run_do_not_follow_blocks_that_fill_the_gap() -> None:
    store = Store(device_of())
    for number in range(62):
        store.put(key(number), b"stays")
        if number % 8 == 0:
            store.drain()
    store.drain()
    device = store.device
    before = device.copy()
    sequence = store.volume._log.sequence
    for number in range(62):
        store.remove(key(number))
    store.drain()  # a group of two blocks; the first of them is lost in both copies
    assert store.volume._log.sequence == sequence + 2
    for first in store.volume.superblock.layout.log_firsts:
        place = first + (sequence + 1) % 64
        before.set_block(place, device.peek(place * BLOCK_BYTES, BLOCK_BYTES))
    again = Store(before, seed=1)
    assert again.volume.report.objects == 62 and not again.volume.report.log_blocks_damaged
    again.keep(key(100), b"into the gap")
    third = again.restarted()
    assert third.get(key(100)) == b"into the gap"
    assert all(third.get(key(number)) == b"stays" for number in range(62))


def test_reads_have_priority_and_snapshots_come_last() -> None:
    store = Store(device_of())
    device = store.device
    seen: list[Operation] = []
    submit = device.submit
    device.submit = lambda operations: (seen.extend(operations), submit(operations))[1]
    store.put(key(1), b"x")
    store.volume.snapshot()
    store.drain()
    store.get(key(1))
    layout = store.volume.superblock.layout
    for operation in seen:
        at = operation.offset // BLOCK_BYTES
        in_snapshot = any(first <= at < first + layout.snapshot_blocks for first in layout.snapshot_firsts)
        expected = "FOREGROUND" if operation.kind is OperationKind.READ else "BACKGROUND" if in_snapshot else "WRITE"
        assert operation.priority.name == expected
