"""``strict_order``: a device is never read while it is written."""

from pathlib import Path
from typing import Any

import pytest
from pool_support import drop_copies, file_pool
from store_driver import Driver, taken

from shadowserve.block import Operation, OperationKind

COUNT = 16
SIZE = 300_000


def value(number: int) -> bytes:
    return bytes([number]) * SIZE


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a pool with objects only on its device, and a list that records the device's operations."""
    pool = Driver(file_pool([tmp_path / "device"], 64 << 20, strict_order=True))
    for number in range(COUNT):
        pool.put(b"%d" % number, value(number))
    drop_copies(pool)
    device = pool.store._core.disks[0].volume.device
    done: list[Operation] = []
    completed = device.completed

    def noted() -> list[Operation]:
        ended: list[Operation] = completed()
        done.extend(ended)
        return ended

    monkeypatch.setattr(device, "completed", noted)
    yield pool, done
    pool.stop()


def test_reads_and_writes_of_a_device_never_overlap_and_both_progress(pool: tuple[Driver, list[Operation]]) -> None:
    driver, done = pool
    readings = []
    changes = []
    for number in range(COUNT):
        changes.append(driver.put_soon(b"new %d" % number, value(number)))
        readings.append(driver.open(b"%d" % number))
        driver.store.poll()
    assert taken(readings) == [value(each) for each in range(COUNT)]
    assert [change.wait() for change in changes] == [None] * COUNT
    driver.store.poll()
    ends = {True: 0, False: 0}
    counted = {True: 0, False: 0}
    for operation in sorted(done, key=lambda each: each.begin_ns):
        reads = operation.kind == OperationKind.READ
        assert operation.begin_ns >= ends[not reads], "it began during an operation of the other kind"
        ends[reads] = max(ends[reads], operation.end_ns)
        counted[reads] += 1
    assert counted[True] >= COUNT and counted[False] > COUNT
    assert [driver.value(b"new %d" % number) for number in range(COUNT)] == [value(each) for each in range(COUNT)]
