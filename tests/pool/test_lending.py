"""Lending of records in their extents on devices."""

from typing import Any

import pytest
from pool_support import chunk, drop_copies, entry_of, start_pool
from store_driver import Driver

from shadowserve.keys import storage_key

CHAIN = [chunk(number) for number in range(6)]
LENGTHS = [10_000 + number for number in range(6)]


def stored(pool: Driver) -> list[tuple[int, int]]:
    """Store the chain; return device and extent of each."""
    changes = [pool.put_soon(storage_key(name), b"x" * length) for name, length in zip(CHAIN, LENGTHS, strict=True)]
    assert {change.wait() for change in changes} == {None}
    entries = [entry_of(pool, storage_key(name)) for name in CHAIN]
    return [(entry.device, entry.extent) for entry in entries]


def lend(pool: Driver, lengths: list[int] = LENGTHS) -> list[Any]:
    return pool.call(pool.store.lend_extents, CHAIN, lengths)


def give_back(pool: Driver, lent: list[Any]) -> None:
    pool.call(pool.store.return_extents, lent)


def used(pool: Driver) -> int:
    return sum(len(disk._uses) for disk in pool.store._core.disks)


def test_a_chain_is_lent_in_place_several_times() -> None:
    pool, _ = start_pool(2)
    places = stored(pool)
    assert {device for device, _ in places} == {0, 1}
    pool.clock.now_ms += 50_000
    first, second = lend(pool), lend(pool)
    assert [(place.device, place.extent) for place in first] == places and used(pool) == len(CHAIN)
    accessed = [pool.store._index.get(0, name)[1].accessed_s for name in CHAIN]
    assert accessed == [pool.clock.now_ms // 1000] * len(CHAIN)
    give_back(pool, first)
    assert used(pool) == len(CHAIN), "the other device must have all records"
    give_back(pool, second)
    assert used(pool) == 0


@pytest.mark.parametrize("why", ["absent", "length", "expired", "cleared", "not durable", "gone"])
def test_lending_ends_before_the_first_unavailable_record(why: str) -> None:
    pool, devices = start_pool(2)
    places, third = stored(pool), storage_key(CHAIN[2])
    expected, lengths = 2, list(LENGTHS)
    if why == "absent":
        pool.remove(third)
    elif why == "length":
        lengths[2] += 1
    elif why == "expired":
        pool.set_expiry(third, pool.clock.now_ms + 1)
        pool.clock.now_ms += 1
    elif why == "cleared":
        core = pool.store._core
        core.step_clears = lambda looks: 0
        pool.clear(0)
        expected = 0
    elif why == "not durable":
        for device in devices:
            device.automatic = False
        change = pool.put_soon(third, b"y" * LENGTHS[2])
    elif why == "gone":
        drop_copies(pool)  # memory would serve its copies
        pool.store._core.disks[places[2][0]].give_up("the device was removed")
        expected = next(at for at, (device, _) in enumerate(places) if device == places[2][0])
    lent = lend(pool, lengths)
    assert len(lent) == expected and used(pool) == expected + (why == "not durable")
    give_back(pool, lent)
    if why in ("expired", "gone"):
        assert pool.store._index.find(0, CHAIN[expected]) == 0, "lending removes it, as a read does"
    if why == "not durable":
        for device in devices:
            device.automatic = True
        assert change.wait() is None and len(give := lend(pool)) == 6
        give_back(pool, give)


def test_records_in_memory_alone_are_not_lent() -> None:
    pool, _ = start_pool(2, admission="second_hit")
    stored(pool)
    assert lend(pool, list(LENGTHS)) == []
    assert used(pool) == 1, "lending counts as a use, which writes the first record to a device"


def test_a_named_key_with_a_chunks_digest_is_not_lent() -> None:
    pool, _ = start_pool()
    pool.put(b"name", b"x" * 100)
    key = entry_of(pool, b"name").key
    assert pool.call(pool.store.lend_extents, [key], [100]) == []


@pytest.mark.parametrize("change", ["remove", "evict", "rewrite", "clear"])
def test_a_lent_extent_is_not_reused_before_it_is_returned(change: str) -> None:
    pool, _ = start_pool()
    places = stored(pool)
    disk = pool.store._core.disks[0]
    lent = lend(pool)
    if change == "rewrite":
        stored(pool)
    else:
        with pool.lock:
            for name in CHAIN:
                if change == "remove":
                    assert pool.store.remove((0, storage_key(name)))
                elif change == "evict":
                    assert pool.store._space.evict(cause="budget")
            if change == "clear":
                pool.store.clear(None)
    pool.pump(lambda: not pool.store._core.clears.under_way)
    before = {extent for _, extent in places}
    assert set(disk._freed_later) == before, "freed extents must wait for their readers"
    for number in range(20):
        pool.put(b"new%d" % number, b"z" * 10_000)
        assert entry_of(pool, b"new%d" % number).extent not in before
    give_back(pool, lent)
    pool.pump(lambda: not disk.is_freeing)
    assert not disk._freed_later and not disk._uses
