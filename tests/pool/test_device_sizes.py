"""Sizes of devices: a file gets the configured size, and a volume may grow but never shrink."""

from pathlib import Path
from typing import Any

import pytest
from pool_support import MIB, configuration, file_pool
from store_driver import Driver

from shadowserve.errors import ConfigurationError
from shadowserve.native import BlockDevice
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.format import SUPERBLOCK_OFFSETS, Superblock
from shadowserve.pool.volume.formatting import grown

VALUE = bytes(MIB)


def start(path: Path, size: Any, **keys: Any) -> Driver:
    device = {"path": str(path), "bandwidth": 1 << 30, "objects_max": 100, **keys}
    return Driver(DevicePool(configuration(devices=[device | ({"size": size} if size else {})]), measure=False))


def room(pool: Driver) -> int:
    """Return the bytes that the device has for objects."""
    return pool.statistics().devices[0].capacity_bytes


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A file of 16 MiB with a volume that holds a key."""
    path = tmp_path / "values.pool"
    pool = start(path, "16 MiB")
    pool.put(b"kept", VALUE)
    pool.stop()
    return path


def test_a_file_grows_to_the_configured_size_and_keeps_its_objects(volume: Path) -> None:
    """Symptom: a later change of the size was ignored without a message."""
    before = start(volume, "16 MiB")
    less = room(before)
    before.stop()
    pool = start(volume, "32 MiB")
    assert room(pool) == less + 16 * MIB and volume.stat().st_size == 32 * MIB
    assert pool.value(b"kept") == VALUE
    pool.put_each(range(20), VALUE, name=b"more")  # more than there was room for
    pool.stop()
    again = start(volume, "32 MiB")
    assert room(again) == less + 16 * MIB
    assert again.value(b"kept") == VALUE and again.value(b"more19") == VALUE


def test_a_truncated_file_is_refused_and_not_changed(volume: Path) -> None:
    with volume.open("r+b") as file:
        file.truncate(8 * MIB)
    content = volume.read_bytes()
    for size in ("16 MiB", "32 MiB"):
        with pytest.raises(ConfigurationError, match="was formatted with"):
            start(volume, size)
        assert volume.read_bytes() == content


def test_a_larger_device_is_used_completely_without_a_size(volume: Path) -> None:
    with volume.open("r+b") as file:
        file.truncate(24 * MIB)
    pool = start(volume, None)
    assert room(pool) > 16 * MIB and pool.value(b"kept") == VALUE


def test_a_smaller_size_is_refused_with_advice(volume: Path) -> None:
    before = volume.read_bytes()
    with pytest.raises(ConfigurationError) as refused:
        start(volume, "8 MiB")
    message = str(refused.value)
    assert "is 8 MiB, and the volume in it has 16 MiB" in message and f"Set size to {16 * MIB}" in message
    assert volume.read_bytes() == before


def test_a_corrected_size_is_accepted_after_a_failed_first_start(tmp_path: Path) -> None:
    """Symptom: the corrected configuration failed in the same way until the user deleted the file."""
    path = tmp_path / "values.pool"
    with pytest.raises(ConfigurationError, match="cannot hold the log"):
        start(path, "1 MiB")
    pool = start(path, "16 MiB")
    pool.put(b"kept", VALUE)
    assert path.stat().st_size == 16 * MIB


def test_an_unformatted_file_can_shrink(tmp_path: Path) -> None:
    path = tmp_path / "values.pool"
    path.write_bytes(bytes(32 * MIB))
    start(path, "16 MiB")
    assert path.stat().st_size == 16 * MIB


@pytest.mark.parametrize("size", ["8 MiB", "32 MiB"])
def test_a_file_with_foreign_content_is_refused_and_keeps_its_size(tmp_path: Path, size: str) -> None:
    path = tmp_path / "photos"
    path.write_bytes(b"a photo" * (1 << 21))
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="nothing was changed"):
        start(path, size)
    assert path.read_bytes() == before


def test_a_size_of_a_block_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "is_block_device", lambda _: True)
    with pytest.raises(ConfigurationError, match="is used whole: leave size out"):
        start(tmp_path / "nvme1n1", "16 MiB")


@pytest.mark.parametrize("written", [0, 1])
def test_a_volume_whose_growth_was_cut_short_is_opened(volume: Path, written: int) -> None:
    """A crash can leave the new superblock at only one of its two places; each place is tested."""
    with volume.open("r+b") as file:
        file.truncate(32 * MIB)
    device = BlockDevice(volume)
    superblock, _ = read_superblocks(BlockReader(device), device)
    larger = grown(superblock, device)
    device.close()
    with volume.open("r+b") as file:
        file.seek(SUPERBLOCK_OFFSETS[written])
        file.write(larger.pack())
    pool = start(volume, "32 MiB")
    assert room(pool) > 24 * MIB and pool.value(b"kept") == VALUE
    pool.stop()
    content = volume.read_bytes()
    copies = {Superblock.unpack(content[offset : offset + 4096]) for offset in SUPERBLOCK_OFFSETS}
    assert copies == {larger}


def test_a_pool_with_two_files_grows_one_of_them(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    pool = Driver(file_pool(paths, 16 * MIB))
    pool.put(b"kept", VALUE)
    pool.stop()
    devices = [
        {"path": str(path), "bandwidth": 1 << 30, "size": size * MIB}
        for path, size in zip(paths, (16, 32), strict=True)
    ]
    pool = Driver(DevicePool(configuration(devices=devices), measure=False))
    first, second = (device.capacity_bytes for device in pool.statistics().devices)
    assert second == first + 16 * MIB and pool.value(b"kept") == VALUE
