"""A volume on a simulated device: durability, full volumes, failures."""

import pytest
from volume_support import Store, device_of, index_key, key

from shadowserve.block import OperationKind, Priority
from shadowserve.native import Index
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError
from shadowserve.pool.volume.volume import Volume, VolumeError

KEY = bytes([7]) * 32


def test_many_writers_share_one_group() -> None:
    store = Store(device_of())
    before = store.device.successes[OperationKind.FLUSH]
    for number in range(50):
        store.put(key(number), b"x" * 100, what=number)
    store.drain()
    assert len(store.settled) == 50
    assert store.device.successes[OperationKind.FLUSH] - before <= 3
    again = store.restarted()
    assert all(again.get(key(number)) == b"x" * 100 for number in range(50))


def test_the_log_wraps_without_losing_objects() -> None:
    store = Store(device_of())
    for turn in range(300):
        assert store.put(key(turn % 40), bytes([turn % 251]) * 500) is not None
        store.drain()
    assert store.volume.snapshots.completed > 3
    again = store.restarted()
    assert again.volume.report.snapshot_records
    assert not again.volume.report.notes
    for number in range(40):
        last = max(turn for turn in range(300) if turn % 40 == number)
        assert again.get(key(number)) == bytes([last % 251]) * 500
    assert again.volume.free_blocks == again.volume.data_blocks - 40


def test_names_tenants_and_notes_are_recovered_from_log_and_snapshot() -> None:
    store = Store(device_of(objects_max=2000))
    long = bytes(range(256)) * 200
    for snapshot in (False, True):
        store.volume.name_tenant(5, b"blue")
        store.volume.note(b"wear", b"%d" % snapshot * 100)
        store.put(index_key(long), b"of a long name", name=long, tenant=5, what="long")
        store.put(index_key(b"short"), b"of a short one", name=b"short")
        store.drain()
        if snapshot:
            store.snapshot()
        store = store.crashed()
        assert store.volume.report.snapshot_records > 0 if snapshot else store.volume.report.log_records > 0
        assert store.names() == {(5, index_key(long)): long, (0, index_key(b"short")): b"short"}
        assert store.volume.tenants == {5: b"blue"} and store.volume.notes == {b"wear": b"%d" % snapshot * 100}
        assert store.get(index_key(long), tenant=5) == b"of a long name"
        assert store.get(index_key(long)) is None


def test_an_object_of_an_unknown_tenant_is_dropped() -> None:
    store = Store(device_of())
    store.keep(KEY, b"whose?", tenant=9)
    again = store.crashed()
    assert again.get(KEY, tenant=9) is None and again.volume.report.unnamed == 1


def test_a_nearly_full_log_refuses_writes_until_a_snapshot_is_complete() -> None:
    store = Store(device_of())
    device = store.device
    device.automatic = False
    with pytest.raises(BusyError) as busy:
        for number in range(1000):  # snapshots make no progress without the lowest priority
            store.put(key(number % 40), b"x")
            for _ in range(20):
                device.complete(lambda operation: operation.priority is not Priority.BACKGROUND)
                store.step()
    again = busy.value.again
    assert not again.settled
    device.automatic = True
    store.until(lambda: again.settled)
    assert not again.failed
    store.keep(key(0), b"again", what="again")
    assert ("again", None) in store.settled
    assert store.crashed().get(key(0)) == b"again"


def test_removals_and_expiries_behind_a_write_in_progress_are_applied() -> None:
    store = Store(device_of())
    device = store.device
    device.automatic = False
    store.put(key(1), b"removed", what="removed")
    store.put(key(2), b"expires", what="expires")
    store.put(key(3), b"first", what="first")
    store.put(key(3), b"second", what="second")
    store.remove(key(1))
    store.expire(key(2), 1234)
    store.barrier("barrier")
    store.step()
    device.automatic = True
    store.drain()
    assert all(error is None for _, error in store.settled) and len(store.settled) == 5
    store = store.crashed()
    assert store.get(key(1)) is None
    assert store.get(key(2)) == b"expires" and (entry := store.entry(key(2))) and entry.expires_at_ms == 1234
    assert store.get(key(3)) == b"second"


def test_a_failed_write_is_an_error_for_its_writer_only() -> None:
    store = Store(device_of())
    device = store.device
    store.keep(key(1), b"old" * 2000)
    data_first = store.volume.superblock.layout.data_first
    device.fail(OperationKind.WRITE, first_block=data_first)
    store.put(key(1), b"new" * 2000, what="refused")
    store.until(lambda: store.settled[1:])
    store.keep(key(2), b"x", what="well")
    outcome = dict(store.settled)
    assert isinstance(outcome["refused"], VolumeError) and outcome["well"] is None
    assert store.get(key(1)) is None and store.get(key(2)) == b"x"
    assert store.volume.error is None
    again = store.crashed()
    assert again.get(key(1)) is None and again.get(key(2)) == b"x"


@pytest.mark.parametrize("kind", [OperationKind.WRITE, OperationKind.FLUSH])
def test_after_a_failed_log_write_or_flush_nothing_is_acknowledged(kind: OperationKind) -> None:
    store = Store(device_of())
    device = store.device
    store.keep(key(1), b"before", what="before")
    fault = device.fail(kind, last_block=store.volume.superblock.layout.data_first)
    store.put(key(2), b"during", what="during")
    store.until(lambda: len(store.settled) == 2)
    assert fault.met == 1  # a later flush would succeed: it must not be asked
    assert isinstance(dict(store.settled)["during"], VolumeError)
    with pytest.raises(VolumeError, match="takes no more writes"):
        store.put(key(3), b"after")
    store.barrier("barrier")
    store.step()
    assert isinstance(dict(store.settled)["barrier"], VolumeError)
    assert store.get(key(1)) == b"before"
    assert store.restarted().get(key(1)) == b"before"


def test_a_failed_snapshot_is_repeated_and_the_log_waits_for_it() -> None:
    store = Store(device_of())
    layout = store.volume.superblock.layout
    last = layout.snapshot_firsts[1] + layout.snapshot_blocks
    store.device.fail(OperationKind.WRITE, times=3, first_block=layout.snapshot_firsts[0], last_block=last)
    for turn in range(200):
        store.until(lambda: store.volume._log.blocks_free > 0.2 * store.volume._log.blocks)
        store.keep(key(turn % 7), b"%d" % turn)
    assert store.volume.snapshots.failed == 3 and store.volume.snapshots.completed > 1
    store = store.crashed()
    assert [store.get(key(number)) for number in range(4)] == [b"196", b"197", b"198", b"199"]


def test_a_full_volume_has_room_again_after_a_durable_removal() -> None:
    store = Store(device_of(objects_max=8))
    count = 0
    while store.put(key(count), bytes(500_000)) is not None:
        count += 1
        store.drain()
    assert store.volume.reserve(500_000) is None and store.remove(key(0))
    assert store.volume.reserve(500_000) is None and store.volume.freeing_blocks == 123
    store.drain()
    assert store.volume.reserve(500_000) is not None


def test_a_volume_never_has_more_objects_than_a_snapshot_holds() -> None:
    store = Store(device_of(objects_max=8))
    with pytest.raises(OutOfBudgetError):
        for number in range(1000):
            store.keep(key(number), b"x")
    store.snapshot()
    assert store.volume.snapshots.failed == 0


def test_a_later_put_on_another_device_wins_whichever_is_opened_first() -> None:
    stores = [Store(device_of(seed=1)), Store(device_of(seed=2))]
    stores[0].put(KEY, b"old")
    stores[1].generation = 5
    stores[1].put(KEY, b"new")
    for store in stores:
        store.drain()
    devices = [store.device.restart() for store in stores]
    for order in ([0, 1], [1, 0]):
        index = Index(100)
        volumes = {number: Volume.open(devices[number], index, number) for number in order}
        index.replayed()
        for volume in volumes.values():
            volume.ready()
        assert index.read(index.find(0, KEY)).device == 1
        assert [volumes[number].report.objects for number in (0, 1)] == [0, 1]
        assert volumes[0].free_blocks == volumes[0].data_blocks
