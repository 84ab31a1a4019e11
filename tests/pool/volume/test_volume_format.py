"""The format of a volume: version 1 stays readable, damage is detected, and foreign bytes are refused."""

import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import golden_volume
import pytest
from golden_volume import NAME, VALUES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from volume_support import POOL, SMALL, Store, device_of, index_key, layout_of, numbered_device

from shadowserve.block import OperationKind
from shadowserve.errors import DeviceError
from shadowserve.native import RecordKind
from shadowserve.pool.volume.block_reader import BlockReader
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    LOG_MAGIC,
    RECORD_BYTES,
    RECORDS_PER_BLOCK,
    SNAPSHOT_MAGIC,
    SUPERBLOCK_OFFSETS,
    FormatError,
    Layout,
    SnapshotHeader,
    Superblock,
    pack_name,
    pack_record,
    unpack_block,
    unpack_name,
)
from shadowserve.pool.volume.verification import verify_volume
from shadowserve.pool.volume.volume import Volume

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "volume").glob("*.bin"))
KEYS = list(VALUES)


@pytest.fixture
def golden() -> SimulatedDevice:
    return golden_volume.load()


def check_all(store: Store, *, missing: int = 0) -> None:
    found = {key: store.get(key) for key in VALUES}
    assert all(value in (None, VALUES[key]) for key, value in found.items())
    assert sum(value is None for value in found.values()) == missing


# ---- Compatibility


def test_the_golden_volume_can_be_opened(golden: SimulatedDevice) -> None:
    store = Store(golden)
    check_all(store)
    assert not store.volume.report.notes and store.volume.report.objects == 41
    assert store.names() == {(5, index_key(NAME)): NAME}
    assert store.volume.tenants == {5: b"five"} and store.volume.notes == {b"wear": b"12345"}
    assert store.get(index_key(NAME), tenant=5) == b"named" and store.get(bytes(32)) is None
    first, second = store.entry(KEYS[0]), store.entry(KEYS[1])
    assert first and first.expires_at_ms == 2_000_000_000_000
    assert second and second.pinned_until_s == 2_000_000_000


def test_the_golden_volume_is_written_byte_for_byte(golden: SimulatedDevice) -> None:
    written = dict(golden_volume.make().blocks())
    kept = dict(golden.blocks())
    assert written.keys() == kept.keys()
    assert not [number for number, block in kept.items() if written[number] != block]


def test_the_golden_volume_is_sound(golden: SimulatedDevice) -> None:
    found = verify_volume(golden)
    assert found.sound and found.objects == 41
    assert all(kind is OperationKind.READ for kind, _, _ in golden.trace)


# ---- Refused volumes


def test_an_unformatted_device_is_refused_and_the_message_says_how_to_format() -> None:
    with pytest.raises(FormatError, match="is empty; format it first: shadowserve pool format"):
        Store(SimulatedDevice(SMALL))


def test_a_volume_is_not_formatted_over_unless_forced(golden: SimulatedDevice) -> None:
    """Symptom: the message called a sound volume damaged, and advised to restore its superblock."""
    with pytest.raises(FormatError, match="a volume of ShadowServe, of pool [0-9a-f]{32}; .*--force") as refused:
        Volume.format(golden, pool_id=POOL, objects_max=100)
    assert "damaged" not in str(refused.value) and "restore" not in str(refused.value)
    check_all(Store(golden))
    Volume.format(golden, pool_id=POOL, objects_max=100, force=True)
    check_all(Store(golden), missing=len(VALUES))


@pytest.mark.parametrize(("offset", "value"), [(8, 2), (64, 1)], ids=["version", "feature"])
def test_a_newer_version_is_not_taken_for_damage(golden: SimulatedDevice, offset: int, value: int) -> None:
    block = bytearray(golden.peek(0, BLOCK_BYTES))
    block[offset] = value
    for copy in SUPERBLOCK_OFFSETS:
        golden.poke(copy, resealed(block, 12))
    with pytest.raises(FormatError, match="use the build that wrote it"):
        Store(golden)


def test_a_device_that_never_answers_is_an_error(golden: SimulatedDevice) -> None:
    golden.fail(OperationKind.READ, stuck=True, times=None)
    with pytest.raises(DeviceError, match="has not answered"):
        Store(golden)


@pytest.mark.parametrize("capacity", [BLOCK_BYTES, 1 << 20, 2 << 20])
def test_a_device_that_is_too_small_cannot_be_formatted(capacity: int) -> None:
    with pytest.raises(FormatError, match="give it more room, or set objects_max lower"):
        Volume.format(SimulatedDevice(capacity), pool_id=POOL, objects_max=1000)


# ---- Damaged volumes


def test_a_reader_that_stops_early_does_not_confuse_later_reads() -> None:
    """Symptom: verify reported a sound object as absent, the first one behind the log's end."""
    reader = BlockReader(numbered_device())
    for number in range(2048, 2112):
        next(iter(reader.pieces(0, 2048)))  # the end of the log was in its first piece
        [(first, data)] = reader.pieces(number, 1)
        assert first == number and data.tobytes()[:8] == number.to_bytes(8, "little")


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_superblock_is_repaired_from_its_copy(golden: SimulatedDevice, copy: int) -> None:
    golden.poke(SUPERBLOCK_OFFSETS[copy], b"\xff" * 200)
    assert [finding.part for finding in verify_volume(golden).findings] == ["superblock"]
    store = Store(golden)
    assert store.volume.report.superblocks_damaged == 1
    check_all(store)
    assert verify_volume(golden).sound


def test_two_damaged_superblocks_are_an_error_that_says_what_to_do(golden: SimulatedDevice) -> None:
    for offset in SUPERBLOCK_OFFSETS:
        golden.rot(offset + 20)
    with pytest.raises(FormatError, match="no superblock that is sound.*restore"):
        Store(golden)
    assert [finding.what for finding in verify_volume(golden).findings] == [
        "there is no volume; the device holds a volume of ShadowServe, perhaps damaged; neither copy of its superblock "
        "is sound"
    ]


@pytest.mark.parametrize("copy", [0, 1])
def test_one_copy_of_the_log_is_enough(golden: SimulatedDevice, copy: int) -> None:
    layout = layout_of(golden)
    golden.poke(layout.log_firsts[copy] * BLOCK_BYTES, b"\xff" * BLOCK_BYTES * layout.log_blocks)
    assert {finding.part for finding in verify_volume(golden).findings} == {"log"}
    store = Store(golden)
    check_all(store)
    assert not store.volume.report.notes


def test_a_gap_in_the_log_keeps_later_objects_and_no_stale_ones() -> None:
    store = Store(device_of())
    for number in range(12):
        flags = 1 if number < 3 else 0
        store.keep(KEYS[number], VALUES[KEYS[number]], flags=flags)
    store.put(KEYS[5], b"a newer value")  # sequence 13: the block to damage
    store.drain()
    for number in range(20, 25):
        store.keep(KEYS[number], VALUES[KEYS[number]])
    device = store.device
    for first in layout_of(device).log_firsts:
        device.rot((first + 13) * BLOCK_BYTES + 1000)
    after = Store(device.restart())
    report = after.volume.report
    assert report.log_blocks_damaged == 1 and report.unproven == 9
    assert [number for number in range(40) if after.get(KEYS[number]) is not None] == [0, 1, 2, *range(20, 25)]
    after.drain()
    again = after.crashed()
    assert not again.volume.report.notes, "a new snapshot has made the volume sound"
    assert again.get(KEYS[0]) == VALUES[KEYS[0]] and again.get(KEYS[5]) is None


def test_the_older_snapshot_and_the_log_replace_a_damaged_one() -> None:
    store = Store(device_of())
    for number, (key, value) in enumerate(VALUES.items()):
        store.keep(key, value[:3000])
        if number in (10, 20):
            store.snapshot()
    device = store.device.restart()
    generation, layout = store.volume.snapshots.completed + 1, layout_of(device)
    device.rot((layout.snapshot_firsts[generation % 2] + 1) * BLOCK_BYTES + 300)
    after = Store(device)
    assert after.volume.report.snapshots_damaged == 1 and after.volume.report.dropped == 0
    assert all(after.get(key) == value[:3000] for key, value in VALUES.items())
    after.step()
    after.drain()
    assert not after.restarted().volume.report.notes


def test_without_a_usable_snapshot_proven_objects_are_kept() -> None:
    store = Store(device_of())
    for turn in range(400):
        store.keep(KEYS[turn % 40], b"%d" % turn, flags=turn % 40 < 10)
    device = store.device.restart()
    for first in layout_of(device).snapshot_firsts:
        device.rot(first * BLOCK_BYTES + 50)
    after = Store(device)
    assert any("does not reach back to a sound snapshot" in note for note in after.volume.report.notes)
    assert all(after.get(KEYS[turn % 40]) == b"%d" % turn for turn in range(360, 400))


def test_a_damaged_object_is_detected(golden: SimulatedDevice) -> None:
    entries = [entry for key in KEYS if (entry := Store(golden.copy()).entry(key))]
    chance = random.Random(1)
    for entry in chance.sample(entries, 10):
        golden.rot(entry.extent * BLOCK_BYTES + chance.randrange(2048 + entry.length), bit=chance.randrange(8))
    found = verify_volume(golden)
    assert [finding.part for finding in found.findings] == ["object"] * 10
    check_all(Store(golden), missing=10)


def test_a_misdirected_read_and_a_lost_write_are_misses(golden: SimulatedDevice) -> None:
    store = Store(golden)
    golden.fail(OperationKind.READ, error=0, moved_blocks=1)
    assert store.get(KEYS[9]) is None and store.get(KEYS[9]) == VALUES[KEYS[9]]
    data_first = store.volume.superblock.layout.data_first
    golden.fail(OperationKind.WRITE, error=0, lost=True, first_block=data_first)
    store.keep(KEYS[9], VALUES[KEYS[9]][::-1] + b"!")
    assert store.get(KEYS[9]) is None
    golden.fail(OperationKind.WRITE, error=0, moved_blocks=3, first_block=data_first)
    store.keep(KEYS[8], b"elsewhere")
    assert store.get(KEYS[8]) is None


# ---- Arbitrary bytes


def resealed(block: bytes | bytearray, crc_at: int) -> bytes:
    """Return a block with a right checksum, so that the code behind the checksum is tested, too."""
    data = bytearray(block)
    data[crc_at : crc_at + 4] = bytes(4)
    struct.pack_into("<I", data, crc_at, zlib.crc32(data))
    return bytes(data)


def parse(block: bytes) -> None:
    """Pass a block to every parser. Each must return, or raise its own error."""
    volume_id = block[16:32]
    for seal in (None, 8, 12):
        data = block if seal is None else resealed(block, seal)
        try:
            superblock = Superblock.unpack(data)
        except FormatError:
            superblock = None
        layout = superblock.layout if superblock is not None else Layout.plan(SMALL, 100)
        assert superblock is None or layout.check(superblock.device_bytes)
        for magic in (LOG_MAGIC, SNAPSHOT_MAGIC):
            header = unpack_block(magic, volume_id, data)
            assert header is None or header.count <= RECORDS_PER_BLOCK
        for region in (0, 1):
            found = SnapshotHeader.unpack(data, volume_id, layout, region)
            assert found is None or found.blocks < layout.snapshot_blocks
    for at in range(128, BLOCK_BYTES, RECORD_BYTES):
        unpack_name(block[at : at + RECORD_BYTES])


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_parsers_survive_the_corpus(path: Path) -> None:
    parse(path.read_bytes())


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example(seed=0, changes=[])
@given(
    seed=st.integers(0, 200),
    changes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=8),
)
def test_parsers_survive_mutated_blocks(seed: int, changes: list[tuple[int, int]]) -> None:
    blocks = _metadata()
    block = bytearray(blocks[seed % len(blocks)])
    for at, value in changes:
        block[at] = value
    parse(bytes(block))


@settings(max_examples=100)
@given(
    name=st.binary(max_size=400), kind=st.sampled_from([RecordKind.NAME, RecordKind.TENANT]), key=st.binary(max_size=32)
)
def test_names_of_any_length_are_recovered(name: bytes, kind: RecordKind, key: bytes) -> None:
    records = pack_name(kind, 7, key, name)
    pieces = [unpack_name(records[at : at + RECORD_BYTES]) for at in range(0, len(records), RECORD_BYTES)]
    assert all(piece is not None and piece[:3] == (kind, 7, key.ljust(32, b"\0")) for piece in pieces)
    assert b"".join(piece[5] for piece in pieces if piece is not None) == name


@pytest.mark.parametrize("seed", range(60))
def test_a_volume_with_random_damage_is_refused_or_serves_no_wrong_byte(seed: int) -> None:
    chance = random.Random(seed)
    device = golden_volume.load()
    metadata = layout_of(device).data_first
    blocks = [number for number, _ in device.blocks() if number < metadata]
    damages = [chance.choice(_DAMAGES) for _ in range(chance.randrange(1, 8))]
    for damage in damages:
        damage(device, chance.choice(blocks), chance)
    try:
        store = Store(device, seed=seed)
    except FormatError:
        return
    for key, value in VALUES.items():
        assert store.get(key) in (None, value)
    if _reseal not in damages:
        assert store.get(bytes(32)) is None, "it was removed"
    store.step()
    store.drain()
    store.keep(KEYS[0], b"goes on", what="goes on")
    assert ("goes on", None) in store.settled
    assert store.crashed().get(KEYS[0]) == b"goes on"


def _rot(device: SimulatedDevice, block: int, chance: random.Random) -> None:
    device.rot(block * BLOCK_BYTES + chance.randrange(BLOCK_BYTES), bit=chance.randrange(8))


def _zero(device: SimulatedDevice, block: int, chance: random.Random) -> None:
    device.set_block(block, bytes(BLOCK_BYTES))


def _swap(device: SimulatedDevice, block: int, chance: random.Random) -> None:
    device.set_block(block, device.peek((block + chance.choice((-2, -1, 1, 2))) * BLOCK_BYTES % SMALL, BLOCK_BYTES))


def _reseal(device: SimulatedDevice, block: int, chance: random.Random) -> None:
    """A wrong field under a right checksum: a bug of a writer, or synthetic bytes."""
    content = bytearray(device.peek(block * BLOCK_BYTES, BLOCK_BYTES))
    content[chance.randrange(16, 128)] = chance.randrange(256)
    device.set_block(block, resealed(content, 12 if content[:8] == b"SSVOLUME" else 8))


_DAMAGES: list[Callable[[SimulatedDevice, int, random.Random], None]] = [_rot, _zero, _swap, _reseal]


@cache
def _metadata() -> list[bytes]:
    device = golden_volume.load()
    return [block for number, block in device.blocks() if number < layout_of(device).data_first]


def test_records_with_impossible_extents_are_dropped() -> None:
    store = Store(device_of())
    extents = [5, 10_000_000, 600, 601]  # the log's, beyond the end, and two that overlap
    for number, extent in enumerate(extents):
        record = pack_record(RecordKind.PUT, 0, KEYS[number], extent=extent, length=9000, generation=number + 1)
        store.volume.log(record)
    store.drain()
    store.volume.log(pack_record(RecordKind.REMOVE, 0, KEYS[5]))  # a later record makes the earlier ones valid
    store.drain()
    after = store.crashed()
    assert [after.entry(KEYS[number]) is not None for number in range(4)] == [False, False, False, True]
    assert after.volume.report.refused == 1 and after.volume.report.overlapping == 2
    assert after.volume.free_blocks == after.volume.data_blocks - 3


def test_pieces_of_an_old_text_are_not_mixed_with_new_ones() -> None:
    store = Store(device_of())
    for text in (b"a" * 200, b"b" * 200, b"c" * 170):
        store.volume.note(b"note", text)
        store.drain()
    assert store.crashed().volume.notes == {b"note": b"c" * 170}
