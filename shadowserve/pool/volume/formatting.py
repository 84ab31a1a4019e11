"""Formatting a device as a volume, checks whether a device may be formatted or opened, and growth with the device.

Objects are the last part of a volume, so a larger device has more blocks for them and nothing moves. The most objects
stay as formatted. A volume never shrinks.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError, DeviceError
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.device import BlockDevice, Pages
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    FormatError,
    Layout,
    SnapshotHeader,
    Superblock,
)
from shadowserve.pool.volume.signature_check import (
    DAMAGED_VOLUME,
    UNKNOWN,
    describe_beginning,
    describe_content,
    used_by,
)
from shadowserve.sizes import human_size


class Objection(NamedTuple):
    """Reason why a volume with a sound superblock cannot be used: the part, and a message."""

    part: str
    what: str


def format_volume(
    device: BlockDevice,
    *,
    pool_id: bytes,
    objects_max: int,
    log_bytes: int | None = None,
    force: bool = False,
    clock_ms: Callable[[], int] | None = None,
    entropy: Callable[[int], bytes] = os.urandom,
) -> Superblock:
    """Make an empty volume on a device that no other program uses; all its content is lost.

    Args:
        pool_id: 16 bytes, the same for all devices of a pool.
        log_bytes: Bytes of each copy of the log; None for a size that suits ``objects_max``.
        force: Do not check for present content.

    Raises:
        FormatError: The device is too small, has content, or is in use.
        OSError: The device has failed.
    """
    user = used_by(device.name)
    if user is not None:
        raise FormatError(f"{device.name} is used by {user}; nothing was changed. End that, or name another device")
    if not force:
        _check_no_volume(device)
        check_empty(device)
    superblock = Superblock(
        volume_id=entropy(16),
        pool_id=pool_id,
        device_bytes=device.capacity_bytes // BLOCK_BYTES * BLOCK_BYTES,
        created_ms=(clock_ms or wall_clock_ms)(),
        layout=Layout.plan(device.capacity_bytes, objects_max, log_bytes),
    )
    first = SnapshotHeader(
        generation=1, blocks=0, records=0, log_first=1, log_epoch=0, log_last=0, created_ms=superblock.created_ms
    )
    # The order: both superblocks are erased, so two volumes never have one at once; then the empty
    # snapshot's header; last both superblocks.
    reader = BlockReader(device)
    page = bytes(BLOCK_BYTES)
    write_blocks(reader, [(offset, page) for offset in SUPERBLOCK_OFFSETS])
    place = superblock.layout.snapshot_firsts[1] * BLOCK_BYTES
    write_blocks(reader, [(place, first.pack(superblock.volume_id))])
    write_blocks(reader, [(offset, superblock.pack()) for offset in SUPERBLOCK_OFFSETS])
    return superblock


def _check_no_volume(device: BlockDevice) -> None:
    """Raise FormatError, with what to do, if a device has the superblock of a volume."""
    superblock, _ = read_superblocks(BlockReader(device), device)
    if superblock is not None:
        raise FormatError(
            f"device {device.name} holds a volume of ShadowServe, of pool {superblock.pool_id.hex()}; nothing was "
            f"changed. Name another device, or drop all its objects: shadowserve pool format --force {device.name}"
        )


def check_empty(device: BlockDevice) -> None:
    """Raise FormatError, with what to do, if a device without a superblock may not be formatted."""
    found = describe_content(device)
    if found is None:
        return
    if found != UNKNOWN and DAMAGED_VOLUME not in found:
        raise FormatError(
            f"device {device.name} holds {found}, and no volume of a pool; nothing was changed. Name another "
            f"device, or drop all that is on this one: shadowserve pool format --force {device.name}"
        )
    raise FormatError(
        f"device {device.name} holds {found}, but no superblock that is sound; nothing was changed. If it was a "
        f"volume, restore one of its first 4 KiB or its 4 KiB at 1 MiB; to drop all that is on it: shadowserve pool "
        f"format --force {device.name}"
    )


def check_superblock(
    superblock: Superblock | None, damaged: Sequence[int], device: BlockDevice, pool_id: bytes | None
) -> Superblock:
    """Return the superblock of a usable volume, otherwise raise FormatError with what to do. ``damaged``: copies of it
    that are not sound; ``pool_id``: the required pool, None for any."""
    if superblock is None:
        check_empty(device)
        raise FormatError(f"device {device.name} is empty; format it first: shadowserve pool format {device.name}")
    if pool_id is not None and superblock.pool_id != pool_id:
        raise FormatError(
            f"device {device.name} belongs to pool {superblock.pool_id.hex()}, not to {pool_id.hex()}; take it out of "
            f"the configuration, or drop its objects: shadowserve pool format --force {device.name}"
        )
    objection = find_objection(superblock, damaged, device)
    if objection is not None:
        raise FormatError(objection.what)
    return superblock


def find_objection(superblock: Superblock, damaged: Sequence[int], device: BlockDevice) -> Objection | None:
    """Return why a volume with a sound superblock cannot be used; None if it can be."""
    if superblock.device_bytes > device.capacity_bytes:
        return Objection(
            "size",
            f"device {device.name} has {device.capacity_bytes} bytes, was formatted with {superblock.device_bytes}: "
            "give it back its size, or format it again, which drops all its objects",
        )
    other = describe_beginning(device) if 0 in damaged else None
    if other is not None:
        return Objection(
            "superblock",
            f"device {device.name} holds {other}, and behind its beginning, at 1 MiB, the superblock of a volume; "
            f"nothing was changed. To go on with the volume, erase the other's signature: wipefs -a {device.name}; to "
            f"keep the other, name another device",
        )
    return None


def write_blocks(reader: BlockReader, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Write blocks at offsets, and flush."""
    page = Pages(BLOCK_BYTES)
    for offset, content in blocks:
        page.view[:BLOCK_BYTES] = content
        reader.write(offset // BLOCK_BYTES, 1, page.address)
    reader.flush()


_BLOCKS_MAX: Final = 0xFFFF_FFFF
_Device = TypeVar("_Device", bound=BlockDevice)


def grown(superblock: Superblock, device: BlockDevice) -> Superblock:
    """Return the superblock of a volume that uses all of its device."""
    blocks = min(device.capacity_bytes // BLOCK_BYTES, _BLOCKS_MAX)
    if blocks * BLOCK_BYTES <= superblock.device_bytes:
        return superblock
    layout = replace(superblock.layout, data_blocks=blocks - superblock.layout.data_first)
    return replace(superblock, device_bytes=blocks * BLOCK_BYTES, layout=layout)


def fit_file(path: Path, wanted_bytes: int, open_device: Callable[[int], _Device]) -> _Device:
    """Open an existing file, not empty, with the configured size; ``open_device(0)`` keeps the present one.

    A volume's file grows, unless a part of the volume is missing. A file that was never formatted, as after a failed
    first start, takes any size. A file with other content is opened unchanged: opening the pool then refuses it.

    Raises:
        ConfigurationError: The volume in it is larger.
        DeviceError, NativeError: It cannot be opened, or there is no room for it.
    """
    device = open_device(0)
    if device.capacity_bytes == wanted_bytes:
        return device
    try:
        superblock, _ = read_superblocks(BlockReader(device), device)
        if superblock is None:
            check_empty(device)
    except (FormatError, DeviceError, OSError):
        return device
    used_bytes = 0 if superblock is None else superblock.device_bytes
    if used_bytes > device.capacity_bytes:
        return device  # truncated: a longer file would look intact, with zeros at its end
    device.close()
    if used_bytes > wanted_bytes:
        raise ConfigurationError(
            f"size of device {path} is {human_size(wanted_bytes)}, and the volume in it has {human_size(used_bytes)}: "
            f"a volume grows, and does not shrink. Set size to {used_bytes}, limit it with bytes_max, or drop "
            f"all that is in it: remove the file"
        )
    if superblock is None:
        os.truncate(path, min(path.stat().st_size, wanted_bytes))
    return open_device(wanted_bytes)
