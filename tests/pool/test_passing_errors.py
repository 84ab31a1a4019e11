"""Transient errors: a busy device, or a block that is unreadable once. No object may be lost because of them."""

import errno
import os
import resource
import threading
from pathlib import Path

import pytest
from pool_support import configuration, drop_copies, file_pool, start_pool
from simulated_device import SimulatedDevice
from store_driver import Driver
from test_pool_faults import place_of
from volume_support import Store, device_of, index_key, layout_of

from shadowserve.block import OperationKind
from shadowserve.errors import ConfigurationError
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.volume import block_reader
from shadowserve.pool.volume.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS, Layout
from shadowserve.pool.volume.verification import verify_volume

PASSING = [errno.EBUSY, errno.EAGAIN, errno.ENOMEM, errno.ETIMEDOUT]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "_PAUSES_S", 0.1)
    monkeypatch.setattr("shadowserve.pool.volume.device._READ_NS", 500_000_000)


def filled(count: int = 12) -> tuple[SimulatedDevice, Layout]:
    """Return a volume with values of named keys, which only its log records."""
    store = Store(device_of())
    for number in range(count):
        store.keep(index_key(b"%d" % number), b"%d" % number * 2000)
    device = store.device.restart()
    return device, layout_of(device)


def check_all(device: SimulatedDevice, count: int = 12) -> None:
    store = Store(device)
    assert [n for n in range(count) if store.get(index_key(b"%d" % n)) != b"%d" % n * 2000] == []


# ---- During the start


@pytest.mark.parametrize("error", [errno.EIO, *PASSING])
@pytest.mark.parametrize("which", [1, 5, 12], ids=["first", "middle", "last"])
def test_an_unreadable_block_of_the_log_drops_nothing(which: int, error: int) -> None:
    """Symptom: one EIO made a block look like a gap, or the log's end; the records behind it were dropped."""
    device, layout = filled()
    for block in (first + which for first in layout.log_firsts):
        device.fail(OperationKind.READ, error=error, times=None, first_block=block, last_block=block + 1)
    with pytest.raises(OSError, match=os.strerror(error)):
        Store(device)
    findings = [finding.what for finding in verify_volume(device).findings]
    assert findings and os.strerror(error) in findings[-1]
    device.faults.clear()
    check_all(device)


def test_an_unreadable_snapshot_drops_nothing() -> None:
    store = Store(filled()[0])
    for turn in range(3):  # so that the log wraps around once
        for _ in range(60):
            store.expire(index_key(b"1"), 4_000_000_000_000 + turn)
            store.drain()
        store.snapshot()
    device = store.device.restart()
    for first in layout_of(device).snapshot_firsts:
        device.fail(OperationKind.READ, times=None, first_block=first + 1, last_block=first + 2)
    with pytest.raises(OSError, match="cannot be read"):
        Store(device)
    device.faults.clear()
    check_all(device)


def test_an_unreadable_object_of_the_last_group_stays() -> None:
    """Symptom: the put counted as incomplete, and its removal was logged."""
    device, layout = filled()
    fault = device.fail(OperationKind.READ, times=None, first_block=layout.data_first)
    store = Store(device)
    assert fault.met and store.volume.report.torn == 0
    store.drain()
    check_all(device.restart())


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_a_superblock_that_cannot_be_read_once_is_read_the_second_time(copies: tuple[int, ...]) -> None:
    device, _ = filled()
    for copy in copies:
        block = SUPERBLOCK_OFFSETS[copy] // BLOCK_BYTES
        device.fail(OperationKind.READ, times=1, first_block=block, last_block=block + 1)
    assert Store(device).volume.report.superblocks_damaged == 0
    check_all(device.restart())


def test_a_start_without_descriptors_for_a_device_fails(tmp_path: Path) -> None:
    """Symptom: the pool continued without the device, and dropped its objects as stale at its return."""
    paths = [tmp_path / "one", tmp_path / "two"]
    pool = Driver(file_pool(paths))
    pool.put_each(range(20), b"x" * 5000)
    pool.stop()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    devices = [{"path": str(path), "access": "threads"} for path in paths]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] <= highest:  # so that later descriptors have higher numbers
        taken.append(os.open("/dev/null", os.O_RDONLY))
    message, spare = "", 0
    try:
        while str(paths[1]) not in message:
            spare += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + spare, before[1]))
            with pytest.raises((ConfigurationError, OSError)) as refused:
                DevicePool(configuration(devices=devices), measure=False).start(threading.Lock())
            message = str(refused.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
    assert "The device is there" in message
    pool = Driver(file_pool(paths))
    assert pool.count() == 20


# ---- During operation


@pytest.mark.parametrize("error", PASSING)
def test_a_read_of_a_busy_device_is_retried(error: int) -> None:
    """Symptom: the object was dropped as io_error, and its extent quarantined."""
    pool, devices = start_pool()
    pool.put(b"a", b"x" * 100_000)
    drop_copies(pool)
    devices[0].fail(OperationKind.READ, error=error, times=3)
    assert pool.value(b"a") == b"x" * 100_000
    drop_copies(pool)
    fault = devices[0].fail(OperationKind.READ, error=error, times=None)
    assert pool.value(b"a") is None and fault.met > 3
    devices[0].faults.clear()
    assert pool.value(b"a") == b"x" * 100_000
    found = pool.statistics()
    assert found.lost_keys == 0 and found.devices[0].quarantined_bytes == 0
    assert found.devices[0].state == "ok" and found.devices[0].errors == 0 and found.devices[0].busy == fault.met + 3


@pytest.mark.parametrize("error", PASSING)
def test_a_write_to_a_busy_device_is_retried(error: int) -> None:
    """Symptom: one EBUSY of an object's write delayed others for a second; one of the log's closed the device."""
    pool, devices = start_pool()
    devices[0].fail(OperationKind.WRITE, error=error, times=4)
    pool.put(b"a", b"x" * 10_000)
    assert place_of(pool, b"a")[0] == 0
    data = pool.store._core.disks[0].volume.superblock.layout.data_first
    devices[0].fail(OperationKind.WRITE, error=error, times=3, last_block=data)  # writes of the log
    pool.put(b"b", b"y" * 10_000)
    found = pool.statistics().devices[0]
    assert found.state == "ok" and found.errors == 0 and found.busy == 7


def test_a_failed_flush_is_retried_only_if_it_has_not_begun() -> None:
    pool, devices = start_pool(2)
    devices[0].fail(OperationKind.FLUSH, error=errno.EBUSY, times=2)
    pool.put(b"a", b"x")
    pool.put(b"b", b"x")
    assert [device.state for device in pool.statistics().devices] == ["ok", "ok"]
    devices[0].fail(OperationKind.FLUSH, error=errno.ENOMEM, times=1)
    for number in range(8):
        pool.put_soon(b"%d" % number, b"x").wait()
    assert [device.state for device in pool.statistics().devices] == ["gone", "ok"]


def test_a_device_that_stays_busy_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowserve.pool.volume.device._WRITE_NS", 100_000_000)
    pool, devices = start_pool()
    data = pool.store._core.disks[0].volume.superblock.layout.data_first
    devices[0].fail(OperationKind.WRITE, error=errno.EBUSY, times=None, first_block=data)
    assert pool.put_soon(b"a", b"x" * 10_000).wait() is not None
    assert pool.peek(b"a") is None
    devices[0].faults.clear()
    pool.put(b"a", b"x" * 10_000)
    found = pool.statistics().devices[0]
    assert found.state == "avoided" and found.errors == 0 and found.quarantined_bytes == 0


# ---- Quarantine


def quarantined(pool: Driver, devices: list[SimulatedDevice], key: bytes = b"a", size: int = 100_000) -> int:
    """Quarantine the extent of an object. Return its offset."""
    pool.put(key, b"x" * size)
    drop_copies(pool)
    _, offset = place_of(pool, key)
    devices[0].rot(offset + 77)
    assert pool.value(key) is None
    assert pool.statistics().devices[0].quarantined_bytes
    return offset


def pass_time(pool: Driver, seconds: int) -> None:
    for _ in range(seconds):
        pool.clock.now_ms += 1000
        pool.store.poll()
        pool.store.poll()


def test_quarantined_extents_are_tested_without_scrubbing() -> None:
    """Symptom: with scrub_bytes_per_s 0 the extent was never checked again."""
    pool, devices = start_pool()
    quarantined(pool, devices)
    pass_time(pool, 50)
    assert pool.statistics().devices[0].quarantined_bytes
    pass_time(pool, 30)
    found = pool.statistics().devices[0]
    assert not found.quarantined_bytes and found.scrubbed_bytes == 0


def test_quarantined_extents_are_tested_while_all_memory_is_in_use() -> None:
    pool, devices = start_pool()
    quarantined(pool, devices)
    number = 0
    while pool.store._core.arenas.take(24) is not None:
        number += 1
    assert number
    pass_time(pool, 80)
    assert not pool.statistics().devices[0].quarantined_bytes


@pytest.mark.parametrize("kind", [OperationKind.WRITE, OperationKind.READ])
def test_a_test_of_an_extent_is_repeated_if_the_device_was_busy(kind: OperationKind) -> None:
    """Symptom: the extent was unused until the next start, because its check had failed."""
    pool, devices = start_pool()
    extent = quarantined(pool, devices) // BLOCK_BYTES
    fault = devices[0].fail(kind, error=errno.EBUSY, times=None, first_block=extent, last_block=extent + 20)
    pass_time(pool, 90)
    assert fault.met and pool.statistics().devices[0].quarantined_bytes
    devices[0].faults.clear()
    pass_time(pool, 130)
    assert not pool.statistics().devices[0].quarantined_bytes


@pytest.mark.parametrize("kind", [OperationKind.WRITE, OperationKind.READ])
def test_an_extent_that_fails_its_test_stays_out_of_use(kind: OperationKind) -> None:
    pool, devices = start_pool()
    extent = quarantined(pool, devices) // BLOCK_BYTES
    fault = devices[0].fail(kind, times=1, first_block=extent, last_block=extent + 20)
    pass_time(pool, 80)
    assert fault.met == 1
    pass_time(pool, 1000)
    assert pool.statistics().devices[0].quarantined_bytes


def test_tests_of_extents_use_a_bounded_part_of_a_device() -> None:
    pool, devices = start_pool()
    for number in range(30):
        quarantined(pool, devices, b"%d" % number, 200_000)
    pass_time(pool, 59)
    counted = devices[0].bytes
    before = counted[OperationKind.WRITE]
    pass_time(pool, 10)
    assert 0 < counted[OperationKind.WRITE] - before <= 12 * (256 << 10)
    pass_time(pool, 60)
    assert not pool.statistics().devices[0].quarantined_bytes


def test_scrubbing_continues_while_all_memory_is_in_use() -> None:
    """Symptom: with copies in all of the memory, the normal state of a cache, no object was ever checked."""
    pool, devices = start_pool(scrub_bytes_per_s=64 << 20)
    pool.put_each(range(30), b"x" * 30_000)
    drop_copies(pool)
    devices[0].rot(place_of(pool, b"7")[1] + 12_345)
    arenas = pool.store._core.arenas
    while arenas.take(1) is not None:
        pass
    pass_time(pool, 20)
    assert pool.statistics().lost == {"rotten": 1} and arenas.used_bytes <= arenas.budget_bytes
