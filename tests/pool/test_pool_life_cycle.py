"""The life of objects: memory, eviction, restarts, back-pressure."""

import logging
import select
import threading
from pathlib import Path

import pytest
from machine import wait_for
from pool_support import MIB, chunk, drop_copies, entry_of, file_pool, reopened, start_pool
from store_driver import Clock, Driver, taken

from shadowserve.keys import storage_key
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError


def in_memory(driver: Driver, key: bytes) -> bool:
    return driver.peek(key).value is not None


def reads_of(driver: Driver) -> int:
    return sum(device.reads for device in driver.statistics().devices)


def test_a_restart_keeps_objects_names_tenants_expiries_and_pins() -> None:
    clock = Clock()
    pool, devices = start_pool(2, clock_ms=clock)
    one = pool.tenant("one")
    for number in range(20):
        pool.put(storage_key(chunk(number)), b"%d" % number * 5_000, parent=chunk(number - 1) if number else b"")
    pool.put(b"name \xff", b"of the default tenant", header_bytes=3)
    pool.put(b"name", b"of one", one)
    pool.put(b"", b"of the empty key")
    pool.put(b"short", b"x", expires_at_ms=clock.now_ms + 100)
    pool.put(b"long", b"x", expires_at_ms=clock.now_ms + 100)
    pool.set_expiry(b"long", clock.now_ms + 10**9)
    pool.put(b"pinned", b"x")
    pool.pin(b"pinned", clock.now_ms + 10**6)
    pool.put(b"gone", b"x")
    pool.remove(b"gone")
    pool.put(b"twice", b"first")
    pool.put(b"twice", b"second")
    before = pool.keys()
    pool.stop()
    clock.now_ms += 200
    pool = reopened(*(device.restart() for device in devices), clock_ms=clock)
    assert pool.keys() == before - {b"short"} and pool.keys(one) == {b"name"}
    assert pool.tenant("one") == one and pool.tenant("two") != one
    assert pool.value(b"name", tenant=one) == b"of one" and pool.value(b"twice") == b"second"
    assert pool.value(b"name \xff") == b"of the default tenant" and pool.statistics().record_bytes == 21
    assert pool.value(b"") == b"of the empty key"
    for number in range(20):
        assert pool.value(storage_key(chunk(number))) == b"%d" % number * 5_000
    assert pool.peek(b"long").expires_at_ms == clock.now_ms - 200 + 10**9
    assert pool.statistics().pinned_keys == 1


def test_a_pool_of_files_keeps_its_objects(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    pool = Driver(file_pool(paths))
    for number in range(10):
        pool.put(b"%d" % number, bytes([number]) * 300_000)
    pool.stop()
    pool = Driver(file_pool(paths, measure=True))
    assert [pool.value(b"%d" % number, 1_000, 2_000) for number in range(10)] == [
        bytes([number]) * 1_000 for number in range(10)
    ]
    assert pool.value(b"5") == bytes([5]) * 300_000
    found = pool.statistics()
    assert found.partial_reads and found.orchestration_ns and all(device.read_bytes for device in found.devices)


def test_memory_is_registered_while_the_pool_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shadowserve.pool.arena")
    pool = Driver(file_pool([tmp_path / "one", tmp_path / "two"]))
    pool.put(b"a", b"x" * 300_000)
    message = wait_for(lambda: [record.getMessage() for record in caplog.records])[0]
    assert message.startswith(("memory_registered", "memory_not_registered"))  # the latter with a small lock limit
    assert pool.value(b"a") == b"x" * 300_000


def test_a_pool_can_be_closed_during_memory_registration(tmp_path: Path) -> None:
    for _ in range(3):
        Driver(file_pool([tmp_path / "one"], memory_budget_bytes=256 * MIB)).stop()


def test_gets_of_one_object_share_one_read_and_the_copy_stays() -> None:
    pool, _ = start_pool()
    pool.put(b"a", b"x" * 50_000)
    drop_copies(pool)
    assert taken([pool.open(b"a") for _ in range(5)]) == [b"x" * 50_000] * 5
    found = pool.statistics()
    assert reads_of(pool) == 1 and found.shared_reads == 4 and in_memory(pool, b"a")


def test_entries_read_twice_stay_in_memory_during_a_large_scan() -> None:
    pool, _ = start_pool(size=64 * MIB)
    pool.put_each(range(200), b"x" * 100_000)
    drop_copies(pool)
    for _ in range(2):
        assert pool.value(b"7") is not None
    for number in range(100, 200):  # more than the memory holds
        assert pool.value(b"%d" % number) is not None
    assert in_memory(pool, b"7") and not in_memory(pool, b"100")
    assert pool.statistics().promotions and pool.statistics().copies_dropped


def test_reads_that_wait_for_memory_begin_eight_at_a_time_while_their_device_is_busy() -> None:
    pool, devices = start_pool(clock_ms=Clock())  # a stopped clock, so that the pool does no periodic work
    values = {b"%d" % number: b"%03d" % number * 30_000 for number in range(200)}
    for key, value in values.items():
        pool.put(key, value)
    drop_copies(pool)
    devices[0].automatic = False
    readings = {key: pool.open(key) for key in values}
    begun = len(devices[0].waiting)
    assert 32 < begun < len(values) - 32
    for released in range(1, 25):
        assert devices[0].complete() is not None
        pool.store.poll()
        key = next(key for key, reading in readings.items() if reading.finished)
        assert taken([readings.pop(key)]) == [values[key]]
        assert len(devices[0].waiting) == begun - released % 8
    devices[0].automatic = True
    for key, reading in readings.items():
        assert taken([reading]) == [values[key]]


@pytest.mark.parametrize("change", ["remove", "put", "clear", "evict", "make way"])
def test_an_entry_removed_during_a_read_is_read_completely_and_its_extent_is_freed_later(change: str) -> None:
    pool, devices = start_pool()
    pool.put(b"a", b"old" * 20_000)
    drop_copies(pool)
    free = pool.store._core.disks[0].free_bytes
    devices[0].automatic = False
    reading = pool.open(b"a")
    assert not reading.finished
    later = None
    with pool.lock:
        if change in ("remove", "make way"):
            assert pool.store.remove((0, b"a"))
        elif change == "clear":
            pool.store.clear(None)
        elif change == "evict":
            assert pool.store._space.evict(cause="budget")
    if change == "put":
        later = pool.put_soon(b"a", b"new" * 20_000)
    elif change == "make way":  # another object takes its place in the index
        later = pool.put_soon(b"b", b"new" * 20_000)
    devices[0].automatic = True
    assert taken([reading]) == [b"old" * 20_000]
    assert later is None or later.wait() is None
    assert pool.value(b"a") == (b"new" * 20_000 if change == "put" else None)
    assert pool.value(b"b") == (b"new" * 20_000 if change == "make way" else None)
    core, cache = pool.store._core, pool.store._core.memory_cache
    disk = core.disks[0]
    pool.pump(lambda: not disk.is_freeing)
    assert core.arenas.used_bytes == cache.copy_bytes + cache.kept_bytes
    assert all(core.entry(slot) is not None for slot in (*cache._kept, *cache._main, *cache._probation))
    assert disk.volume.free_blocks * 4096 == free + (0 if later is not None else 61_440 + 4_096)


def test_poll_resets_a_wake_and_the_next_one_counts() -> None:
    pool, _ = start_pool()
    core = pool.store._core
    pool.pump(lambda: not pool.store.busy)

    def is_awake() -> bool:
        return bool(select.select([core.waker.descriptor], [], [], 0)[0])

    pool.store.poll()
    assert not is_awake()
    for times in (1, 3, 1):
        for _ in range(times):
            core.waker.wake()
        assert is_awake()
        pool.store.poll()
        assert not is_awake()


def test_the_only_object_that_a_device_may_hold_is_overwritten_without_being_evicted_first() -> None:
    pool, _ = start_pool(options=[{"objects_max": 1}])
    disk = pool.store._core.disks[0]
    free = disk.volume.free_blocks
    for settles in (True, False, False, True):
        changes = [pool.put_soon(b"a", b"%d" % number * 20_000) for number in range(3)]
        if settles:
            assert [change.wait() for change in changes] == [None] * 3
            assert pool.value(b"a") == b"2" * 20_000
    assert not any(pool.statistics().evictions.values())
    assert pool.remove(b"a")
    pool.pump(lambda: not disk.is_freeing and not pool.store.busy)
    assert disk.volume.free_blocks == free


def test_the_extent_of_an_object_that_was_evicted_for_its_own_successor_is_freed_once() -> None:
    pool, _ = start_pool(2)
    disks = pool.store._core.disks
    free = [disk.volume.free_blocks for disk in disks]
    homes: dict[int, list[bytes]] = {0: [], 1: []}
    for number in range(4):
        key = b"%d" % number
        pool.put(key, b"x" * 20_000)
        homes[entry_of(pool, key).device].append(key)
    number, (pinned, key, *_) = max(homes.items(), key=lambda home: len(home[1]))
    pool.pin(pinned, 1 << 40)
    disks[number].set_budget(None, 1)  # so the device must drop its objects
    pool.put(key, b"y" * 20_000)
    assert entry_of(pool, key).device == 1 - number and pool.value(key) == b"y" * 20_000
    for number in range(4):
        pool.remove(b"%d" % number)
    pool.pump(lambda: not pool.store.busy and not any(disk.is_freeing for disk in disks))
    assert [disk.volume.free_blocks for disk in disks] == free


def test_expiry_and_pin_of_what_is_being_written_are_not_lost() -> None:
    pool, devices = start_pool()
    clock = pool.clock
    change = pool.put_soon(b"a", b"x")
    pool.call(pool.store.set_expiry, (0, b"a"), clock.now_ms + 10**8)
    devices[0].automatic = False
    pool.store.poll()  # the write is in flight
    pool.call(pool.store.pin, (0, b"a"), clock.now_ms + 10**7)
    devices[0].automatic = True
    assert change.wait() is None
    pool.settle(pool.call(pool.store.barrier))
    pool = reopened(*(device.restart() for device in devices), clock_ms=clock)
    assert pool.peek(b"a").expires_at_ms == clock.now_ms + 10**8
    assert pool.statistics().pinned_keys == 1


def test_second_hit_admission_writes_entries_that_are_read() -> None:
    pool, devices = start_pool(admission="second_hit")
    pool.settle(pool.call(pool.store.barrier))
    for number in range(10):
        assert pool.put_soon(b"%d" % number, b"x" * 1000).outcomes == [None]  # in memory, and done
    assert pool.statistics().held_back == 10 and pool.statistics().devices[0].objects == 0
    assert pool.value(b"3") == b"x" * 1000
    pool.pump(lambda: not pool.store.busy)
    assert pool.statistics().devices[0].objects == 1
    pool.put_each(range(10, 3000), b"x" * 1000)  # more than the memory holds
    assert pool.peek(b"0") is None
    pool.put(b"0", b"y" * 1000)  # the key exists, so it is written at once
    assert pool.statistics().devices[0].objects == 2
    pool = reopened(*(device.restart() for device in devices), admission="second_hit")
    assert pool.value(b"3") == b"x" * 1000 and pool.value(b"0") == b"y" * 1000 and pool.count() == 2


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "frequency"])
def test_a_full_device_evicts_in_time_and_loses_nothing_else(policy: str) -> None:
    pool, _ = start_pool(eviction=policy)
    for number in range(600):
        pool.put(b"%d" % number, b"%d" % number * 20_000)
        pool.store.poll()
    found = pool.statistics()
    assert found.evicted_keys == found.evictions["device"] > 0
    assert found.devices[0].used_bytes <= found.devices[0].capacity_bytes
    kept = [number for number in range(600) if (value := pool.value(b"%d" % number)) is not None
            and value == b"%d" % number * 20_000]  # fmt: skip
    assert len(kept) == found.keys and 599 in kept


def test_a_device_full_of_pinned_objects_refuses() -> None:
    pool, _ = start_pool(size=6 * MIB, options=[{"objects_max": 64}])
    with pytest.raises(OutOfBudgetError, match="pinned|may be evicted"):
        for number in range(100):
            pool.put(b"%d" % number, b"x" * 200_000)
            pool.pin(b"%d" % number, pool.clock.now_ms + 10**6)
    assert pool.value(b"0") == b"x" * 200_000


def test_writers_wait_while_too_many_writes_are_in_progress() -> None:
    pool, devices = start_pool(write_bytes_under_way_max=1 * MIB)
    devices[0].automatic = False
    ready = threading.Event()
    first = pool.call(pool.store.allocate, 600_000, ready.set)
    assert first is not None and pool.call(pool.store.allocate, 600_000, ready.set) is None
    with pytest.raises(MemoryError, match="memory_budget_bytes"):
        pool.call(pool.store.allocate, 8 * MIB, ready.set)
    change = pool.put_soon(b"a", first)
    del first
    with pytest.raises(BusyError) as busy:
        pool.call(pool.store.put, (0, b"b"), b"x" * 600_000)
    assert pool.call(pool.store.settling, (0, b"a")) is not None and not change.outcomes
    devices[0].automatic = True
    assert change.wait() is None
    pool.pump(lambda: ready.is_set() and busy.value.again.settled)
    assert pool.call(pool.store.settling, (0, b"a")) is None
    assert pool.value(b"a", 0, 5) == bytes(5)
    pool.put(b"b", b"x" * 600_000)
    assert pool.statistics().writing_bytes == 0


def test_an_abandoned_buffer_is_freed() -> None:
    pool, _ = start_pool()
    buffer = pool.call(pool.store.allocate, 2 * MIB, lambda: None)
    assert pool.statistics().memory_used_bytes
    del buffer  # its client has disconnected
    pool.store.poll()
    assert pool.statistics().memory_used_bytes == 0


def test_a_long_prefix_that_uses_all_memory_evicts_no_memory_only_object() -> None:
    """Otherwise the rest of its chain would be removed, from devices too."""
    pool, _ = start_pool(bandwidths=[3 * MIB], memory_bandwidth=MIB, memory_homes=True)
    for number in range(16):
        value = bytes([number]) * 1_000_000
        pool.put(storage_key(chunk(number)), value, parent=chunk(number - 1) if number else b"")
    assert pool.statistics().devices[0].objects == 12
    drop_copies(pool)
    readings = [pool.open(storage_key(chunk(number))) for number in range(16)]
    for number, reading in enumerate(readings):
        assert taken([reading]) == [bytes([number]) * 1_000_000]
    assert pool.statistics().evicted_keys == 0


def test_colliding_keys_are_never_confused() -> None:
    pool, _ = start_pool()
    pool.put(b"name", b"by name")
    forged = storage_key(entry_of(pool, b"name").key)  # the chunk whose name is the digest of that key
    assert pool.value(forged) is None and pool.value(b"name") == b"by name"
    pool.put(forged, b"by digest")
    assert pool.value(forged) == b"by digest" and pool.value(b"name") is None
    assert pool.keys() == {forged}
