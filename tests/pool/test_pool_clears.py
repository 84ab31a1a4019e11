"""Clears in progress, and power cuts during them."""

import pytest
from pool_support import disks_of, reopened, start_pool
from store_driver import Driver

from shadowserve.pool.types import ENTRIES_PER_HOLD

MANY = 5 * ENTRIES_PER_HOLD


def filled(pool: Driver, tenant: int = 0) -> None:
    changes = [pool.put_soon(b"%d" % number, b"old", tenant) for number in range(MANY)]
    assert {change.wait() for change in changes} == {None}


def cut(pool: Driver) -> Driver:
    """Cut the power and start again."""
    after = [disk.volume.device.crash(torn=False, seed=1) for disk in disks_of(pool)]
    pool.store.close()
    return reopened(*after)


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("everybodys", [False, True])
def test_a_power_cut_during_a_clear_brings_no_entry_back(snapshot: bool, everybodys: bool) -> None:
    pool = start_pool(2)[0]
    one = pool.tenant("one")
    filled(pool, one)
    pool.put(b"a", b"another's")
    core = pool.store._core
    step_clears, core.step_clears = core.step_clears, lambda looks: 0
    pool.clear(None if everybodys else one)
    assert core.index.totals(one).objects == MANY and pool.count(one) == 0
    pool.put(b"7", b"new", one)
    if snapshot:
        for disk in core.disks:
            before = disk.volume.snapshots.completed
            disk.volume.snapshot()
            pool.pump(lambda disk=disk, before=before: disk.volume.snapshots.completed > before)
    core.step_clears = step_clears
    pool = cut(pool)
    assert pool.keys(one) == {b"7"} and pool.value(b"7", tenant=one) == b"new"
    assert pool.value(b"a") == (None if everybodys else b"another's")


def test_a_queued_write_of_a_cleared_key_does_not_return() -> None:
    pool = start_pool(2)[0]
    filled(pool)
    late = [pool.put_soon(b"late%d" % number, b"x") for number in range(100)]
    with pool.lock:
        pool.store.clear(0)
        waiting = pool.store.barrier()
    later = [pool.put_soon(b"later%d" % number, b"x") for number in range(100)]
    assert {change.wait() for change in (*late, *later)} == {None}
    pool.settle(waiting)
    assert pool.keys() == {b"later%d" % number for number in range(100)}
    pool = cut(pool)
    assert pool.keys() == {b"later%d" % number for number in range(100)}


def test_cleared_entries_are_freed_before_others_are_evicted() -> None:
    pool = start_pool()[0]
    one = pool.tenant("one")
    filled(pool, one)
    pool.put(b"mine", b"x")
    pool.call(pool.store.set_budget, (MANY + 2) * 4096)
    with pool.lock:
        pool.store.clear(one)
    for number in range(ENTRIES_PER_HOLD):
        pool.put_soon(b"%d" % number, b"x")
    pool.pump(lambda: pool.statistics(one).used_bytes == 0)
    assert pool.statistics().evicted_keys == 0 and pool.count() == ENTRIES_PER_HOLD + 1


def test_overlapping_clears_end() -> None:
    pool = start_pool(2)[0]
    one, two = (pool.tenant(name) for name in ("one", "two"))
    filled(pool, one)
    for number in range(20):
        pool.put(b"%d" % number, b"x", two)
        with pool.lock:
            pool.store.clear((one, two, None)[number % 3])
        pool.put(b"again", b"x", one)
        assert pool.keys(one) == {b"again"} and pool.count(one) == 1
        assert pool.statistics().keys == pool.count(one) + pool.count(two) == len(pool.keys(two)) + 1
    pool.pump(lambda: not pool.store._core.clears.under_way)
    assert pool.keys(one) == {b"again"} and pool.store._index.totals(one).objects == 1
    assert pool.call(pool.store.get, (two, b"0")) is None
