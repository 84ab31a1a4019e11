"""Devices that fail, return wrong bytes, or vanish: reads are right, or misses with a reason."""

import random
from pathlib import Path
from typing import Any

import pytest
from pool_support import (
    DEVICE_BYTES,
    MIB,
    configuration,
    drop_copies,
    entry_of,
    file_pool,
    reopened,
    simulated_pool,
    start_pool,
)
from simulated_device import SimulatedDevice
from store_driver import Clock, Driver, taken

from shadowserve.block import OperationKind
from shadowserve.errors import ConfigurationError
from shadowserve.native import Index, Result, check_object
from shadowserve.pool import reads
from shadowserve.pool.clears import SCAN_LINES
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.entries import MEMORY_ONLY
from shadowserve.pool.volume.volume import VolumeError


def place_of(driver: Driver, key: bytes) -> tuple[int, int]:
    """Return the device of an object, and the offset of its value."""
    entry = entry_of(driver, key)
    return entry.device, entry.extent * 4096 + 2048


@pytest.mark.parametrize(
    ("fault", "reason"), [("rot", "rotten"), ("header", "rotten"), ("misdirected", "misdirected"), ("eio", "io_error")]
)
def test_a_failed_read_is_a_miss_dropped_counted_and_quarantined(fault: str, reason: str) -> None:
    pool, devices = start_pool()
    for key in (b"a", b"b"):
        pool.put(key, key * 100_000)
    drop_copies(pool)
    _, offset = place_of(pool, b"a")
    if fault == "rot":
        devices[0].rot(offset + 77_777)
    elif fault == "header":
        devices[0].rot(offset - 2_000)
    elif fault == "misdirected":
        _, other = place_of(pool, b"b")
        devices[0].fail(OperationKind.READ, error=0, moved_blocks=(other - offset) // 4096)
    else:
        devices[0].fail(OperationKind.READ)
    assert pool.value(b"a") is None and pool.peek(b"a") is None
    assert pool.value(b"b") == b"b" * 100_000
    found = pool.statistics()
    assert found.lost == {reason: 1} and found.lost_keys == 1
    assert found.devices[0].quarantined_bytes == 102_400 + (0 if 2048 + 100_000 <= 102_400 else 4096)
    for number in range(50):
        pool.put(b"new%d" % number, b"x" * 100_000)
        assert place_of(pool, b"new%d" % number)[1] != offset
    pool.stop()
    pool = reopened(devices[0].restart())
    assert pool.peek(b"a") is None and pool.value(b"b") == b"b" * 100_000  # the loss is durable


@pytest.mark.parametrize("fault", ["", "rot", "eio"])
def test_an_object_that_is_read_in_order_gives_its_beginning_before_its_end_is_read(fault: str) -> None:
    pool, devices = start_pool()
    value = random.Random(1).randbytes(4 * MIB)
    pool.put(b"a", value)
    drop_copies(pool)
    _, offset = place_of(pool, b"a")
    if fault == "rot":
        devices[0].rot(offset + 2 * MIB + 77_777)
    begin, middle, whole = (pool.open(b"a", 0, end, ahead=True) for end in (100, 3 * MIB, 4 * MIB))
    assert begin.wait() == value[:100] and not whole.finished
    if fault == "eio":
        devices[0].fail(OperationKind.READ)
    wanted = [None, None] if fault else [value[: 3 * MIB], value]
    assert taken([middle, whole]) == wanted
    begin.release()
    found = pool.statistics()
    assert found.lost == ({} if not fault else {"rotten" if fault == "rot" else "io_error": 1})
    reads_before = found.devices[0].read_bytes
    assert pool.value(b"a") == (None if fault else value), "it is kept"
    assert pool.statistics().devices[0].read_bytes == reads_before
    pool.stop()


def test_a_real_device_checks_reads_and_the_pool_checks_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Driver(file_pool([tmp_path / "device"]))
    checked: list[int] = []

    def checking(header: Any, expected: Any, data: Any, first: int, count: int) -> Result:
        checked.append(first)
        return check_object(header, expected, data, first, count)

    monkeypatch.setattr(reads, "check_object", checking)
    value = bytes(range(250)) * 4_000
    for key in (b"sound", b"rotten", b"part"):
        pool.put(key, value)
    with (tmp_path / "device").open("r+b") as file:
        for key in (b"rotten", b"part"):
            file.seek(place_of(pool, key)[1] + 900_000)
            file.write(b"\xff")  # never a byte of the value
    drop_copies(pool)
    assert pool.value(b"sound") == value and pool.value(b"rotten") is None
    assert pool.value(b"part", 0, 50_000) == value[:50_000]
    assert checked == []
    assert pool.value(b"part", 400_000, 450_000) == value[400_000:450_000]
    assert pool.value(b"part", 890_000, 910_000) is None
    assert checked == [6, 13]  # parts behind the header, read in two operations
    assert pool.statistics().lost == {"rotten": 2}


def test_a_reader_of_changes_learns_that_a_device_is_lost() -> None:
    pool, devices = start_pool(2)
    keys = [b"kv:%064x" % number for number in range(40)]
    pool.call(pool.store.log_changes, 1 << 20)
    name, _, _ = pool.call(pool.store.read_changes, 0, b"", 0)
    for key in keys:
        pool.put(key, key * 300)
    drop_copies(pool)
    name, position, entries = pool.call(pool.store.read_changes, 0, name, 0)
    assert position == 40 and entries == b"".join(b"+" + bytes.fromhex(key[3:].decode()) for key in keys)
    kept = {key for key in keys if place_of(pool, key)[0] == 1}
    devices[0].remove()
    assert any(pool.value(key) is None for key in keys if key not in kept) and 0 < len(kept) < 40
    after = pool.call(pool.store.read_changes, 0, name, position)
    assert after.name != name and after.entries is None
    cursor, found = pool.call(pool.store.scan, 0, 0, 100)
    assert not cursor and set(found) == kept
    assert not pool.call(pool.store.read_changes, 0, after.name, after.position).entries.count(b"+")


def test_a_pool_continues_without_a_lost_device() -> None:
    pool, devices = start_pool(2)
    for number in range(40):
        pool.put(b"%d" % number, b"%d" % number * 20_000)
    drop_copies(pool)
    homes = [place_of(pool, b"%d" % number)[0] for number in range(40)]
    assert set(homes) == {0, 1}
    devices[0].remove()
    values = [pool.value(b"%d" % number) for number in range(40)]
    assert values == [b"%d" % number * 20_000 if home else None for number, home in enumerate(homes)]
    for number in range(40, 60):
        pool.put(b"%d" % number, b"%d" % number * 20_000)
        assert place_of(pool, b"%d" % number)[0] == 1
    found = pool.statistics()
    assert [device.state for device in found.devices] == ["gone", "ok"] and found.devices[0].reason
    assert found.lost == {"device_gone": homes.count(0)}
    assert pool.remove(b"50") and pool.call(pool.store.barrier) is None
    pool.clear()


def test_memory_serves_copies_of_a_lost_device() -> None:
    pool, devices = start_pool()
    pool.put(b"warm", b"x" * 1000)
    pool.put(b"cold", b"x" * 1000)
    drop_copies(pool)
    assert pool.value(b"warm") is not None
    devices[0].remove()
    assert pool.value(b"cold") is None
    assert pool.value(b"warm") == b"x" * 1000
    with pytest.raises(VolumeError, match="no device is left"):  # a restart would bring it back
        pool.remove(b"warm")


def test_an_old_value_does_not_return_if_all_devices_were_lost_when_it_was_replaced() -> None:
    pool, devices = start_pool(2)
    pool.put(b"a", b"old")
    for device in devices:
        device.remove()
    for key in (b"a", b"b"):
        errors = [pool.put_soon(key, b"new").wait() for _ in range(3)]  # the first writes detect the failure
        assert None not in errors and "no device is left" in str(errors[-1])
    pool.store.close()
    again = reopened(*(device.restart() for device in devices))
    assert again.value(b"a") in (b"old", None) and again.value(b"b") is None


def test_a_failed_write_is_an_error_and_a_write_after_it_goes_to_the_device() -> None:
    pool, devices = start_pool()
    data_first = pool.store._core.disks[0].volume.superblock.layout.data_first
    devices[0].fail(OperationKind.WRITE, times=1, first_block=data_first)  # the log write of the start may be in flight
    error = pool.put_soon(b"a", b"x").wait()
    assert error is not None and "simulated0" in str(error)
    assert pool.peek(b"a") is None and pool.statistics().failed_writes == 1
    pool.put(b"b", b"y")
    assert place_of(pool, b"b")[0] == 0


def test_a_memory_only_value_keeps_the_older_one_from_returning_after_a_crash() -> None:
    pool, devices = start_pool(options=[{"write_bytes_per_day": MIB}])
    pool.put(b"a", b"old")
    while not pool.statistics().devices[0].wear_refused:
        pool.put(b"filler", b"x" * 4000)  # the whole write budget of the day
    pool.put(b"a", b"new")
    assert pool.value(b"a") == b"new" and place_of(pool, b"a")[0] == 255
    again = reopened(devices[0].crash())
    assert again.value(b"a") is None


def test_the_scrubber_finds_damage() -> None:
    pool, devices = start_pool(scrub_bytes_per_s=64 * MIB)
    for number in range(30):
        pool.put(b"%d" % number, b"%d" % number * 30_000)
    devices[0].rot(place_of(pool, b"7")[1] + 12_345)
    scrubber = pool.store._scrubber

    def turn() -> bool:
        pool.clock.now_ms += 200
        return bool(scrubber.rounds >= 2 and scrubber.found)

    pool.pump(turn)
    assert pool.peek(b"7") is None and pool.statistics().lost == {"rotten": 1}
    found = pool.statistics().devices[0]
    assert found.quarantined_bytes and found.scrubbed_bytes and found.reads == 0


def test_a_pool_that_cannot_be_opened_says_what_to_do() -> None:
    foreign = SimulatedDevice(DEVICE_BYTES)
    foreign.poke(1024 + 56, b"\x53\xef")  # the mark of an ext4
    with pytest.raises(ConfigurationError, match="simulated"):
        Driver(simulated_pool([foreign]))
    one, two = start_pool()[1][0].restart(), start_pool()[1][0].restart()
    with pytest.raises(ConfigurationError, match="belongs to pool"):
        Driver(simulated_pool([one, two]))
    with pytest.raises(ConfigurationError, match="opening device"):
        Driver(DevicePool(configuration(devices=["/nowhere/to/be/found"])))


def test_a_pool_starts_without_a_missing_device(tmp_path: Any) -> None:
    devices = [{"path": str(tmp_path / "there"), "size": 8 * MIB}, {"path": str(tmp_path / "not there")}]
    pool = Driver(DevicePool(configuration(devices=devices), measure=False))
    pool.put(b"a", b"x")
    assert [device.state for device in pool.statistics().devices] == ["ok", "gone"]


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
def test_a_returning_device_brings_no_removed_object_back(when: str) -> None:
    pool, devices = start_pool(2)
    pool.put_each(range(20), b"old")
    if when == "at the start":
        pool.stop()
        away = devices[0].restart()
        pool = reopened(devices[1].restart())
    else:
        drop_copies(pool)
        devices[0].remove()
        away = devices[0]
        for number in range(20):
            pool.value(b"%d" % number)
    kept = pool.keys()
    pool.put_each(range(20), b"new")
    for number in range(10):
        pool.remove(b"%d" % number)
    pool.stop()
    here = pool.store._core.disks[-1].volume.device
    pool = reopened(away.restart(), here.restart())
    for number in range(20):
        assert pool.value(b"%d" % number) == (None if number < 10 else b"new")
    assert pool.statistics().lost["stale"] <= 20 - len(kept) or when == "while it runs"


def test_a_value_removed_before_it_was_written_is_acknowledged_with_its_removal() -> None:
    """A write acknowledged at once could be followed by a crash that restores the value before both."""
    pool, (device,) = start_pool()
    pool.put(b"key", b"old")
    device.automatic = False
    change = pool.put_soon(b"key", b"new")
    assert pool.call(pool.store.remove, (0, b"key"))
    for _ in range(8):
        pool.store.poll()
    assert not change.outcomes
    device.automatic = True
    assert change.wait() is None
    after = reopened(device.crash())
    assert after.value(b"key") is None
    after.stop()


def test_objects_dropped_for_a_damaged_block_of_the_log_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: objects were absent after a start, without a counter or a log line."""
    pool, devices = start_pool()
    pool.put_each(range(10), b"x" * 1000)
    layout = pool.store._core.disks[0].volume.superblock.layout
    device = devices[0].restart()  # killed: a snapshot at the end would have made the log unneeded
    pool.stop()
    first, second = layout.log_firsts
    middle = max(number for number, _ in device.blocks() if number < first + layout.log_blocks) - first - 3
    for damaged in (first + middle, second + middle, second + middle - 2):
        device.rot(damaged * 4096 + 1000)
    pool = reopened(device)
    present = sum(pool.peek(b"%d" % number) is not None for number in range(10))
    found = pool.statistics()
    assert 0 < present < 10
    assert found.lost["unproven"] == found.lost_keys > 0
    messages = [record.getMessage() for record in caplog.records]
    assert f"objects_lost device=simulated0 unproven={found.lost_keys} unnamed=0 overlapping=0" in messages
    assert "log_repaired device=simulated0 blocks=1" in messages
    pool.stop()
    pool = reopened(device.restart())
    assert not pool.statistics().lost, "counters are since the start"


def test_a_power_cut_at_the_start_does_not_drop_a_devices_objects() -> None:
    """Symptom: a log without the newest session number made its device look absent in that session."""
    pool, _ = start_pool(2)
    for number in range(20):
        pool.put(b"%d" % number, b"%d" % number)
    pool.stop()
    for _ in range(3):  # once more before the other log has the session
        devices = [disk.volume.device.restart() for disk in pool.store._core.disks]
        pool = reopened(*devices)
        devices[1].automatic = False
        for _ in range(8):
            pool.store.poll()
        devices = [device.crash(torn=False) for device in devices]
        pool = reopened(*devices)
        assert pool.keys() == {b"%d" % number for number in range(20)}
        devices[0].automatic = devices[1].automatic = False


@pytest.mark.parametrize("first", [0, 1])
def test_objects_of_a_conflicting_tenant_id_are_dropped(first: int) -> None:
    pool, devices = start_pool(2)
    pool.stop()
    devices = [device.restart() for device in devices]
    clock, ids = Clock(), []
    for number, name in ((first, "one"), (1 - first, "other")):  # each while the other one is absent
        clock.now_ms += 1
        pool = reopened(devices[number], clock_ms=clock)
        ids.append(pool.tenant(name))
        pool.put(b"secret of " + name.encode(), b"x", ids[-1])
        pool.stop()
        devices[number] = pool.store._core.disks[0].volume.device.restart()
    assert ids[0] == ids[1]
    pool = reopened(*devices, clock_ms=clock)
    # The later put is valid, with its tenant's value; one tenant never gets the other's object.
    assert pool.keys(pool.tenant("other")) == {b"secret of other"}
    assert pool.keys(pool.tenant("one")) == set()
    assert pool.statistics().lost["stale"] == 1


def test_a_scrub_of_an_emptied_pool_scans_a_bounded_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a step visited all free slots, possibly millions, with the lock held."""
    pool, _ = start_pool(size=64 * MIB, options=[{"objects_max": 50_000}], scrub_bytes_per_s=MIB)
    core = pool.store._core
    slots = [
        core.index.insert(0, number.to_bytes(32, "big"), device=MEMORY_ONLY, extent=0, length=1, now_s=1)
        for number in range(40_000)
    ]
    for slot in slots:
        core.index.remove(slot)
    pool.put(b"a", b"x" * 5000)
    pool.pump(lambda: not pool.store.busy)
    looked, scan = list[int](), Index.scan
    monkeypatch.setattr(Index, "scan", lambda index, *asked: (looked.append(asked[3]), scan(index, *asked))[1])

    def is_scrubbed() -> bool:
        pool.clock.now_ms += 100
        return pool.statistics().scrubbed_bytes > 0

    pool.pump(is_scrubbed)
    assert looked and max(looked) <= SCAN_LINES
