"""Keys that move between devices: no older value returns, wherever a log ends."""

from typing import Any

import pytest
from pool_support import disks_of, entry_of, reopened, start_pool
from simulated_device import SimulatedDevice
from store_driver import Change, Clock, Driver

from shadowserve.pool.disk import Disk

KEY = b"key"
POLLS = 24
"""Number of completions after which a device has made anything durable: object, log, flush, and log of a removal."""


def device_of(disk: Disk) -> SimulatedDevice:
    return disk.volume.device


def home_of(pool: Driver, key: bytes = KEY) -> Disk:
    return disks_of(pool)[entry_of(pool, key).device]


def avoid(pool: Driver, *disks: Disk) -> None:
    """Exclude some devices from new objects."""
    for disk in disks_of(pool):
        disk.avoided_until_ms = 1 << 60 if disk in disks else 0


def poll(pool: Driver) -> None:
    for _ in range(POLLS):
        pool.store.poll()


def evict(pool: Driver, disk: Disk) -> None:
    with pool.lock:
        assert pool.store._space.evict(cause="device", device=disk.number)


def crash(pool: Driver, missing: tuple[int, ...] = ()) -> Driver:
    """Cut the power and start again without some devices."""
    after = [device_of(disk).crash(torn=False, seed=0) for disk in disks_of(pool)]
    pool.store.close()
    return reopened(*(device for number, device in enumerate(after) if number not in missing))


def survive_nothing(*disks: Disk) -> None:
    """Let the next power cut lose all unflushed writes."""
    for disk in disks:
        device_of(disk).forgets = True


def stored(**keys: Any) -> tuple[Driver, Disk, Disk]:
    """Return a pool with an acknowledged value; the device that has it, and another one."""
    pool = start_pool(2, **keys)[0]
    pool.put(KEY, b"old")
    poll(pool)
    first = home_of(pool)
    return pool, first, disks_of(pool)[1 - first.number]


def moved(**keys: Any) -> tuple[Driver, Disk, Disk, Change]:
    """Return a pool with an acknowledged value on one device and its successor on the other. The first device hangs."""
    pool, first, second = stored(**keys)
    avoid(pool, first)
    device_of(first).automatic = False
    survive_nothing(first, second)
    change = pool.put_soon(KEY, b"new")
    poll(pool)
    assert home_of(pool) is second
    return pool, first, second, change


@pytest.mark.parametrize("missing", [False, True])
def test_a_value_replaced_on_another_device_does_not_return_after_its_successors_eviction(missing: bool) -> None:
    pool, _, second, change = moved()
    acknowledged = bool(change.outcomes)
    if not missing:
        evict(pool, second)
        poll(pool)
    after = crash(pool, (second.number,) if missing else ())
    assert after.value(KEY) in ([None, b"new"] if acknowledged else [b"old", b"new", None])
    assert not acknowledged, "the first device's log has no removal of its value yet"


def test_an_evicted_value_does_not_win_over_a_later_one_elsewhere() -> None:
    pool, first, second = stored()
    device_of(first).automatic = False
    survive_nothing(first, second)
    evict(pool, first)
    avoid(pool, first)
    change = pool.put_soon(KEY, b"new")
    poll(pool)
    assert home_of(pool) is second and not change.outcomes
    after = crash(pool, (second.number,))
    assert after.value(KEY) == b"old", "the new value was not acknowledged"


def test_cleared_values_do_not_return_after_new_ones_elsewhere() -> None:
    pool, first, _ = stored()
    device_of(first).automatic = False
    pool.call(pool.store.clear, 0)
    avoid(pool, first)
    change = pool.put_soon(KEY, b"new")
    poll(pool)
    assert not change.outcomes
    device_of(first).automatic = True
    assert change.wait() is None


def test_a_value_found_twice_after_a_power_cut_does_not_return_when_the_newer_one_is_removed() -> None:
    pool, _, _, _ = moved()
    pool = crash(pool)
    assert pool.value(KEY) == b"new"
    assert pool.remove(KEY)
    survive_nothing(*disks_of(pool))
    for _ in range(2):
        pool = crash(pool)
        assert pool.value(KEY) is None and not pool.keys()


def test_a_value_found_twice_after_a_power_cut_does_not_return_when_the_newer_ones_device_is_missing_later() -> None:
    pool, first, second, _ = moved()
    numbers = first.number, second.number
    pool = crash(pool)
    pool.put(b"other", b"x")
    pool.put(KEY, b"newer")
    survive_nothing(*disks_of(pool))
    pool = crash(pool, (numbers[1],))
    assert pool.value(KEY) is None


def test_a_returning_device_drops_nothing_of_the_others() -> None:
    """Symptom: the device's puts had higher numbers than later puts of the pool without it, and counted as newer."""
    pool = start_pool(2)[0]
    pool.put(b"other", b"x")
    pool.put(KEY, b"old")
    first = home_of(pool)
    second = disks_of(pool)[1 - first.number]
    avoid(pool, second)
    pool.put_each(range(20), b"x")
    pool.put(KEY, b"old again")
    pool.stop()
    away, here = device_of(first).restart(), device_of(second).restart()
    pool = reopened(here)
    pool.put(KEY, b"new")
    pool.stop()
    here = device_of(disks_of(pool)[0]).restart()
    for devices in ([away, here], [here, away]):
        pool = reopened(*(device.copy() for device in devices))
        assert pool.value(KEY) == b"new"
        assert pool.remove(KEY)
        pool.stop()
        again = [device_of(disk).restart() for disk in disks_of(pool)]
        pool = reopened(*again)
        assert pool.value(KEY) is None
        pool.stop()


def test_no_value_is_acknowledged_before_all_devices_log_that_one_is_missing() -> None:
    """Otherwise the next start could treat a device that missed a session as complete."""
    pool = start_pool(3)[0]
    pool.put(KEY, b"old")
    first = home_of(pool)
    pool.stop()
    devices = [device_of(disk).restart() for disk in disks_of(pool)]
    here = [device for number, device in enumerate(devices) if number != first.number]
    pool = reopened(*here)
    avoid(pool, disks_of(pool)[1])
    here[1].automatic = False
    change = pool.put_soon(KEY, b"new")
    poll(pool)
    assert not change.outcomes
    here[1].automatic = True
    assert change.wait() is None
    survive_nothing(*disks_of(pool))
    after = [device_of(disk).crash() for disk in disks_of(pool)]
    pool.store.close()
    pool = reopened(devices[first.number], after[1])
    assert pool.value(KEY) is None


@pytest.mark.parametrize("between", ["a value in memory", "a removal", "a value on its way"])
def test_a_value_kept_in_memory_alone_is_not_acknowledged_while_an_older_one_may_return(between: str) -> None:
    pool = start_pool(1, admission="second_hit")[0]
    for _ in range(2):
        pool.put(KEY, b"old")
        pool.value(KEY)
    poll(pool)
    disk = home_of(pool)
    device_of(disk).automatic = False
    core = pool.store._core
    changes = []
    if between == "a removal":
        pool.call(pool.store.remove, (0, KEY))
    elif between == "a value on its way":
        core.admission = "all"
        changes.append(pool.put_soon(KEY, b"newer"))
    core.admits = lambda tenant, key: False
    changes += [pool.put_soon(KEY, value) for value in (b"new", b"newest")]
    for _ in range(8):
        pool.store.poll()
    assert not any(change.outcomes for change in changes)
    device_of(disk).automatic = True
    assert [change.wait() for change in changes] == [None] * len(changes)
    survive_nothing(disk)
    after = crash(pool)
    assert after.value(KEY) is None


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_power_cut_during_a_move_keeps_the_old_value(snapshot: bool) -> None:
    """The first device's log and snapshots must keep the value until the other device's log has the new one."""
    pool, first, second = stored()
    avoid(pool, first)
    device_of(second).automatic = False
    survive_nothing(first, second)
    change = pool.put_soon(KEY, b"new")
    if snapshot:
        first.volume.snapshot()
    poll(pool)
    assert home_of(pool) is second and not change.outcomes
    assert first.volume.snapshots.completed == snapshot
    after = crash(pool)
    assert after.value(KEY) == b"old"


def test_a_value_that_moves_back_and_forth_is_the_last_one_and_frees_all_extents() -> None:
    pool = start_pool(3)[0]
    changes = []
    for number in range(60):
        with pool.lock:
            avoid(pool, disks_of(pool)[number % 3], disks_of(pool)[(number // 5) % 3])
        changes.append(pool.put_soon(KEY, b"%d" % number))
        for _ in range(number % 4):
            pool.store.poll()
    assert [change.wait() for change in changes] == [None] * 60
    for disk in disks_of(pool):
        disk.volume.snapshot()
    pool.pump(lambda: not any(disk.is_freeing or not disk.volume.idle for disk in disks_of(pool)))
    free = [disk.volume.data_blocks - disk.volume.free_blocks for disk in disks_of(pool)]
    assert sorted(free) == [0, 0, 1] and not any(disk.volume._held for disk in disks_of(pool))
    pool = crash(pool)
    assert pool.value(KEY) == b"59" and pool.statistics().keys == 1


def test_of_two_devices_used_without_each_other_the_later_one_wins() -> None:
    """Each device in turn: the number of its session alone could make it look like the first absent one."""
    for order in ([0, 1], [1, 0]):
        pool = start_pool(2)[0]
        pool.stop()
        devices = [device_of(disk).restart() for disk in disks_of(pool)]
        clock = Clock()
        for turn, number in enumerate(order):
            for _ in range(3 - 2 * turn):  # the first device has more sessions
                clock.now_ms += 60_000
                pool = reopened(devices[number], clock_ms=clock)
                pool.put(KEY, b"of %d" % turn)
                pool.stop()
                devices[number] = device_of(disks_of(pool)[0]).restart()
        pool = reopened(*devices, clock_ms=clock)
        assert pool.value(KEY) == b"of 1"
        pool.stop()
