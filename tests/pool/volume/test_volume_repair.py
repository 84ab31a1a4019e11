"""Repair of the log's two copies at the start."""

import errno

import pytest
from simulated_device import SimulatedDevice
from volume_support import POOL, Store, device_of, index_key, layout_of, numbered_device

from shadowserve.block import OperationKind
from shadowserve.errors import DeviceError
from shadowserve.pool.volume.block_reader import BlockReader
from shadowserve.pool.volume.format import BLOCK_BYTES, SnapshotHeader
from shadowserve.pool.volume.verification import verify_volume
from shadowserve.pool.volume.volume import Volume

KEYS = [index_key(b"%d" % number) for number in range(12)]
COPIES = (0, 1)


def place_of(device: SimulatedDevice, copy: int, sequence: int) -> int:
    """Return the device's block with one copy of a block of the log."""
    layout = layout_of(device)
    return layout.log_firsts[copy] + sequence % layout.log_blocks


def written() -> SimulatedDevice:
    """Return a device with twelve values in the blocks 1 to 12 of its log."""
    store = Store(device_of())
    for key in KEYS:
        store.keep(key, b"value of " + key)
    return store.device.restart()


def tear(device: SimulatedDevice, copy: int, *sequences: int) -> None:
    """Simulate a power cut that loses the second half of blocks in one copy."""
    for sequence in sequences:
        device.poke(place_of(device, copy, sequence) * BLOCK_BYTES + BLOCK_BYTES // 2, b"\xff" * (BLOCK_BYTES // 2))


def without(device: SimulatedDevice, copy: int) -> SimulatedDevice:
    """Make one copy of the log unreadable."""
    first = layout_of(device).log_firsts[copy]
    device.fail(OperationKind.READ, times=None, first_block=first, last_block=first + layout_of(device).log_blocks)
    return device


def check_all(store: Store) -> None:
    report = store.volume.report
    assert not report.unproven and not report.log_blocks_damaged, report
    assert [key for key in KEYS if store.get(key) != b"value of " + key] == []


def log_writes(device: SimulatedDevice) -> list[tuple[int, int]]:
    """Return (copy, block number) of the written blocks of the log."""
    layout = layout_of(device)
    return [
        (copy, block - first)
        for kind, begin, blocks in device.trace
        if kind is OperationKind.WRITE
        for block in range(begin, begin + blocks)
        for copy, first in enumerate(layout.log_firsts)
        if first <= block < first + layout.log_blocks
    ]


@pytest.mark.parametrize("torn", [((4, 7, 8, 12), ()), ((), (4, 7, 8, 12)), ((3, 5, 6), (4, 7))])
def test_losing_one_copy_and_later_the_other_loses_no_object(torn: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Symptom: a log block torn in one copy was not repaired; later the other copy could be unreadable."""
    device = written()
    for copy in COPIES:
        tear(device, copy, *torn[copy])
    first = Store(device)
    assert device.trace[-1][0] is OperationKind.FLUSH, "before the volume is used"
    check_all(first)
    assert first.volume.report.log_blocks_repaired == len(torn[0] + torn[1])
    assert sorted(log_writes(device)) == [(copy, number) for copy in COPIES for number in torn[copy]]
    assert not verify_volume(device).findings
    device = device.crash()
    for copy in COPIES:
        check_all(Store(without(device.copy(), copy)))


def test_sound_blocks_and_blocks_behind_the_end_are_not_written() -> None:
    device = written()
    check_all(Store(device))
    assert log_writes(device) == []
    # A run that was cut short left block 14 without block 13, in one copy, and a torn block 13.
    stray = device.peek(place_of(device, 0, 12) * BLOCK_BYTES, BLOCK_BYTES)
    device.set_block(place_of(device, 0, 14), stray)
    tear(device, 1, 13)
    device = device.restart()
    check_all(Store(device))
    assert log_writes(device) == []


def test_a_block_of_an_abandoned_run_is_not_taken_for_a_copy() -> None:
    """It has the right sequence and checksum, and follows the same block. Only its epoch identifies it."""
    device = written()
    before = device.copy()
    other = Store(before, seed=9)  # another run's block 13
    other.keep(KEYS[0], b"came to nothing")
    stray = before.peek(place_of(before, 0, 13) * BLOCK_BYTES, BLOCK_BYTES)
    store = Store(device)
    for key in KEYS[:2]:  # 13 and 14
        store.keep(key, b"value of " + key)
    device = device.restart()
    device.set_block(place_of(device, 1, 13), stray)
    assert [finding.where for finding in verify_volume(device).findings] == ["block 13, copy 1"]
    store = Store(device)
    check_all(store)
    assert store.volume.report.log_blocks_repaired == 1
    check_all(Store(without(device.restart(), 0)))


def test_a_block_of_another_run_in_the_first_copy_does_not_hide_the_second() -> None:
    """A run left block 14 in both copies, not 13; the next run's block 14 replaced only one of them before the cut."""
    device = written()
    before = device.copy()
    other = Store(before, seed=9)
    for value in (b"came", b"to nothing"):
        other.keep(KEYS[0], value)
    stray = before.peek(place_of(before, 0, 14) * BLOCK_BYTES, BLOCK_BYTES)
    store = Store(device)
    for key in KEYS[:2]:
        store.keep(key, b"value of " + key)
    device = device.restart()
    device.set_block(place_of(device, 0, 14), stray)
    store = Store(device)
    check_all(store)
    assert store.volume.report.log_blocks == 14 and store.volume.report.log_blocks_repaired == 1


@pytest.mark.parametrize("copy", COPIES)
def test_a_wrapped_log_is_repaired(copy: int) -> None:
    store = Store(device_of())
    for turn in range(150):
        key = KEYS[turn % len(KEYS)]
        store.keep(key, b"value of " + key)
    device = store.device.restart()
    found = verify_volume(device)
    tear(device, copy, *range(151 - found.log_blocks_used, 151))
    assert found.log_blocks_used > 1 and len(verify_volume(device).findings) == found.log_blocks_used
    store = Store(device)
    check_all(store)
    assert store.volume.report.log_blocks_repaired == found.log_blocks_used
    check_all(Store(without(device.restart(), 1 - copy)))


def test_a_volume_opens_although_a_copy_cannot_be_written() -> None:
    device = written()
    tear(device, 0, 4, 5, 9)
    device.fail(OperationKind.WRITE, times=None, first_block=place_of(device, 0, 4), last_block=place_of(device, 0, 5))
    store = Store(device)
    check_all(store)
    report = store.volume.report
    assert report.log_blocks_repaired == 2 and report.log_blocks_unrepaired == 1
    assert "1 blocks of the log are sound in one copy only" in report.notes[0] and "Input/output" in report.notes[0]
    store.step()
    store.drain()
    assert store.volume.snapshots.completed == 1, "no reader must need the block afterwards"
    check_all(Store(without(device.restart(), 1)))


def test_a_read_only_device_gets_a_bounded_number_of_repairs() -> None:
    device = written()
    first = layout_of(device).log_firsts[0]
    device.poke(first * BLOCK_BYTES, b"\xff" * BLOCK_BYTES * layout_of(device).log_blocks)
    device.fail(OperationKind.WRITE, times=None, error=errno.EROFS)
    store = Store(device)
    assert device.errors[OperationKind.WRITE] == 9, "one write of all blocks, and eight single writes"
    assert store.volume.report.log_blocks_unrepaired == 12 and not store.volume.report.log_blocks_repaired
    check_all(store)


def test_a_failed_repair_is_retried_once() -> None:
    device = written()
    tear(device, 0, 4)
    device.fail(OperationKind.WRITE)
    store = Store(device)
    assert store.volume.report.log_blocks_repaired == 1 and not store.volume.report.notes
    check_all(Store(without(device.restart(), 1)))


def test_a_device_that_does_not_answer_a_repair_is_refused() -> None:
    device = written()
    tear(device, 0, 4)
    device.fail(OperationKind.WRITE, stuck=True)
    with pytest.raises(DeviceError, match="has not answered"):
        Store(device)


def test_a_header_that_becomes_readable_again_does_not_match_another_snapshots_blocks() -> None:
    """Symptom: the next snapshot had the same number, so a power cut left parts of both under the old header."""
    store = Store(written())
    store.snapshot()
    device, layout = store.device, layout_of(store.device)
    place = layout.snapshot_firsts[0]
    block, volume_id = device.peek(place * BLOCK_BYTES, BLOCK_BYTES), store.volume.superblock.volume_id
    assert SnapshotHeader.unpack(block, volume_id, layout, 0).generation == 2
    device = device.restart()
    device.fail(OperationKind.READ, first_block=place, last_block=place + 1, times=None)
    store = Store(device)
    check_all(store)
    store.remove(KEYS[0])
    device.fail(OperationKind.WRITE, error=0, lost=True, first_block=place, last_block=place + 1)  # as if cut there
    store.snapshot()
    found = Store(device.restart())
    assert found.volume.report.snapshots_damaged == 1
    assert [found.get(key) for key in KEYS] == [None, *(b"value of " + key for key in KEYS[1:])]


def test_many_torn_blocks_in_a_long_log_are_repaired() -> None:
    device = SimulatedDevice(64 << 20, seed=3)
    Volume.format(device, pool_id=POOL, objects_max=200, log_bytes=24 << 20)
    store = Store(device)
    for number in range(1700):
        store.volume.note(b"count", b"%d" % number)
        store.drain()
    device = device.restart()
    tear(device, 0, *range(257, 1500, 7))
    store = Store(device)
    report = store.volume.report
    assert report.log_blocks == 1700 and not report.log_blocks_damaged and not report.notes
    assert store.volume.notes[b"count"] == b"1699"
    assert report.log_blocks_repaired == len(range(257, 1500, 7))


def test_one_block_can_be_read_during_pieces() -> None:
    """Symptom: a repair read the other copy into memory that a read of a later piece was using."""
    reader = BlockReader(numbered_device())
    for first, data in reader.pieces(0, 4096):
        assert int.from_bytes(reader.block(4095 - first)[:8], "little") == 4095 - first
        for at in range(len(data) // BLOCK_BYTES):
            assert int.from_bytes(data[at * BLOCK_BYTES : at * BLOCK_BYTES + 8].tobytes(), "little") == first + at
