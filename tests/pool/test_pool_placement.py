"""Placement by bandwidth along each chain of chunks, and devices that cannot store objects."""

import random
from collections import Counter
from pathlib import Path

import pytest
from pool_support import DEVICE_BYTES, MIB, chunk, configuration, entry_of, reopened, simulated_pool, start_pool
from simulated_device import SimulatedDevice
from store_driver import Clock, Driver

from shadowserve.block import OperationKind
from shadowserve.errors import ConfigurationError
from shadowserve.keys import storage_key
from shadowserve.pool import opening
from shadowserve.pool.arena import Arena, Arenas, memory_nodes
from shadowserve.pool.disk import WriteBudget
from shadowserve.pool.interleaver import BandwidthMeter, BandwidthShares, Interleaver
from shadowserve.pool.volume.device import Pages
from storage_kv.config import StorageConfig


def test_shares_are_kept_within_one_percent_and_chains_within_two_objects() -> None:
    chance = random.Random(1)
    for shares in ([1.0, 1.0], [5.0, 3.0, 2.0], [10.0, 1.0], [0.9, 0.05, 0.03, 0.02], [1.0] * 8):
        interleaver = Interleaver(shares)
        every = [True] * len(shares)
        tails = [b""] * 20
        placed = [[0] * len(shares) for _ in tails]
        for number in range(10_000):
            chain = chance.randrange(len(tails))
            size = (2 << 20) - chance.choice([0, 0, chance.randrange(100_000)])
            key = b"%d" % number
            device = interleaver.order(size, tails[chain], every)[0]
            interleaver.place(device, size, tails[chain], key, every)
            placed[chain][device] += size
            owed = [share * sum(placed[chain]) for share in interleaver.shares]
            assert all(abs(a - b) < 2 * (2 << 20) for a, b in zip(placed[chain], owed, strict=True))
            tails[chain] = key
            if chance.random() < 0.01:
                tails[chain], placed[chain] = b"", [0] * len(shares)
        total = sum(interleaver.placed_bytes)
        for got, share in zip(interleaver.placed_bytes, interleaver.shares, strict=True):
            assert abs(got / total - share) <= 0.01 * share


def test_unavailable_devices_get_no_objects_and_others_keep_their_proportions() -> None:
    interleaver = Interleaver([2.0, 1.0, 1.0])
    for number in range(400):
        device = interleaver.order(1000, b"", [True, False, True])[0]
        interleaver.place(device, 1000, b"", b"%d" % number, [True, False, True])
    assert interleaver.placed_bytes[1] == 0
    assert abs(interleaver.placed_bytes[0] / 400_000 - 2 / 3) < 0.01
    for shares in ([1.0], [1.0, 1.0, -1.0], [0.0, 0.0, 0.0]):
        with pytest.raises(ValueError, match="no shares"):
            interleaver.set_shares(shares)


def test_a_pool_places_by_the_bandwidths_of_its_devices() -> None:
    pool, _ = start_pool(3, bandwidths=[600, 300, 100])
    placed: Counter[int] = Counter()
    for number in range(300):
        key = storage_key(chunk(number))
        pool.put(key, b"x" * 30_000, parent=chunk(number - 1) if number else b"")
        placed[entry_of(pool, key).device] += 1
    assert abs(placed[0] - 180) <= 1.8 and abs(placed[1] - 90) <= 0.9 and abs(placed[2] - 30) <= 0.3
    found = pool.statistics().devices
    assert [round(device.share, 3) for device in found] == [0.599, 0.3, 0.1]  # memory has one of 1,001
    assert sum(device.placed_bytes for device in found) == 300 * 32_768


@pytest.mark.parametrize(("alone", "homes"), [(False, {0: 32, 1: 32}), (True, {0: 16, 1: 16, 255: 32})])
def test_objects_of_memorys_share_are_on_a_device_too_unless_memory_is_their_home(
    alone: bool, homes: dict[int, int]
) -> None:
    pool, _ = start_pool(2, bandwidths=[100, 100], memory_bandwidth=200, memory_homes=alone)
    for number in range(64):
        pool.put(storage_key(chunk(number)), b"x" * 2000, parent=chunk(number - 1) if number else b"")
    assert Counter(entry_of(pool, storage_key(chunk(number))).device for number in range(64)) == homes
    assert pool.statistics().memory_share == 0.5 and (alone or pool.statistics().promotions == 32)


def test_a_full_device_is_avoided_and_then_evicts_its_oldest_object() -> None:
    small, large = SimulatedDevice(6 * MIB, name="small"), SimulatedDevice(DEVICE_BYTES, name="large")
    pool = Driver(simulated_pool([small, large], options=[{"objects_max": 64}, {}], clock_ms=Clock()))
    pool.call(pool.store.follow, configuration(devices=[{"path": "small", "bytes_max": MIB}]))
    pool.put_each(range(40), b"x" * 100_000)
    used = {device.name: device for device in pool.statistics().devices}
    assert used["small"].used_bytes <= MIB and used["large"].objects >= 20
    with pytest.raises(ConfigurationError, match="no device"):
        pool.call(pool.store.follow, configuration(devices=["none"]))


def test_a_device_beyond_its_write_budget_gets_no_objects_until_midnight() -> None:
    clock, options = Clock(), [{"write_bytes_per_day": 1 * MIB}, {}]
    pool, given = start_pool(2, options=options, clock_ms=clock)
    pool.put_each(range(60), b"x" * 60_000)
    first, second = pool.statistics().devices
    assert first.objects < 16 < second.objects and first.wear_refused and first.written_today_bytes <= 2 * MIB
    pool.stop()
    # The count of the day survives a restart.
    pool = reopened(*(device.restart() for device in given), options=options, clock_ms=clock)
    assert pool.statistics().devices[0].written_today_bytes >= MIB / 2
    pool.put(b"more", b"x" * 60_000)
    assert entry_of(pool, b"more").device == 1
    clock.now_ms += 24 * 3600 * 1000
    pool.put_each(range(4), b"x" * 60_000, name=b"tomorrow")
    assert {entry_of(pool, b"tomorrow%d" % number).device for number in range(4)} == {0, 1}


def test_a_device_that_fails_a_write_is_avoided_for_a_while() -> None:
    pool, given = start_pool(2)
    pool.put(b"before", b"x" * 10_000)
    data = pool.store._core.disks[0].volume.superblock.layout.data_first
    given[0].fail(OperationKind.WRITE, first_block=data, times=1)
    given[1].fail(OperationKind.WRITE, first_block=data, times=0)
    failed = [pool.put_soon(b"%d" % number, b"x" * 10_000).wait() for number in range(2)]
    assert sum(error is not None for error in failed) == 1
    assert pool.store.statistics().failed_writes == 1
    for number in range(10):
        pool.put(b"later%d" % number, b"x" * 10_000)
        assert entry_of(pool, b"later%d" % number).device == 1
    states = [device.state for device in pool.statistics().devices]
    assert states == ["avoided", "ok"]
    pool.clock.now_ms += 2_000
    pool.put_each(range(10), b"x" * 10_000, name=b"trusted")
    assert {entry_of(pool, b"trusted%d" % number).device for number in range(10)} == {0, 1}


def test_the_write_budget_counts_by_days_even_if_the_clock_goes_back() -> None:
    day = 24 * 3600 * 1000
    wear = WriteBudget(budget_bytes=100)
    wear.note(60, 10 * day)
    assert wear.allows(40, 10 * day + 5) and not wear.allows(41, 10 * day)
    assert not wear.allows(41, 9 * day)
    assert wear.allows(100, 11 * day) and wear.total_bytes == 60
    assert WriteBudget().allows(1 << 60, 0)


def test_bandwidth_is_measured_on_busy_devices_and_small_changes_keep_the_shares() -> None:
    fast, slow = BandwidthMeter(), BandwidthMeter()
    organizer = BandwidthShares([fast, slow])
    assert organizer.shares == [0.5, 0.5]  # without measurements
    for meter, rate in ((fast, 3), (slow, 1)):
        now = 0
        for _ in range(200):  # of a MiB each, one after another, rate bytes a nanosecond
            meter.note(MIB, now, now + MIB // rate, depth=8)
            now += MIB // rate
    assert organizer.update() and abs(organizer.shares[0] - 0.75) < 0.01
    assert not organizer.update()
    idle = BandwidthMeter()
    for number in range(200):
        idle.note(MIB, number * 10**9, number * 10**9 + 10**6, depth=1)
    assert idle.samples == 0  # one read at a time shows no bandwidth
    fixed = BandwidthMeter(5.0)
    fixed.sample(100.0)
    assert fixed.bytes_per_s == 5.0


def test_a_measurement_that_fails_waits_for_all_of_its_reads() -> None:
    """Symptom: after one failed read the memory of the others was given out while they still wrote into it."""
    device, pages = SimulatedDevice(MIB, automatic=False), Pages(4 * 4096)
    device.fail(OperationKind.READ)
    device.completed = lambda: [device.complete()]
    reads = [opening._operation(OperationKind.READ, number, 4096, pages.address) for number in range(4)]
    with pytest.raises(OSError, match="Input/output"):
        opening._run(device, reads)
    assert not device.waiting


def test_arenas_use_the_numa_nodes_with_memory(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == [0]
    (tmp_path / "has_memory").write_text("0-1,3\n")
    assert memory_nodes(tmp_path) == [0, 1, 3]
    arena = Arena(3 * MIB, memory_nodes()[0])
    assert arena.size == 4 * MIB and arena.pages in ("huge", "transparent", "small")
    arena.measure()
    assert arena.bytes_per_s > 0


def test_lent_memory_returns_with_its_last_view() -> None:
    arenas = Arenas(4 * MIB, [0, 0])
    buffer = arenas.take(10)
    view = arenas.lend(buffer, 30_000)
    part = view[10:20]
    assert arenas.lent(view) is buffer and arenas.lent(part) is None and arenas.lent_bytes == 40_960
    del view
    assert not arenas.settle()  # a view of it is in use
    del part
    assert arenas.settle() and arenas.used_bytes == arenas.lent_bytes == 0
    view = arenas.lend(arenas.take(1), 100)
    arenas.end_loan(view)
    arenas.end_loan(view)
    assert arenas.used_bytes == 0
    taken = [arenas.take(256) for _ in range(5)]
    assert taken.count(None) == 1 and {item.arena for item in taken if item is not None} == {*arenas.arenas}


def test_devices_are_configured_as_paths_or_mappings() -> None:
    config = StorageConfig.load(flags={"devices": ["/dev/one", {"path": "/dev/two", "bandwidth": "2 GiB"}]})
    assert [str(entry.path) for entry in config.devices] == ["/dev/one", "/dev/two"]
    assert config.devices[1].bandwidth == 2 << 30 and config.devices[0].size is None
    for wrong, message in (
        (["/dev/one", "/dev/one"], "twice"),
        ([{"path": "/dev/one", "sise": 1}], "sise"),
        ([f"/dev/{number}" for number in range(300)], "at most 255"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            StorageConfig.load(flags={"devices": wrong})
