"""Making a volume of a device, and telling whether one may be opened: what may be lost is only lost when asked for."""

import os
from collections.abc import Callable

from storage_kv.engine import wall_clock_ms
from storage_kv.pool.device import BlockDevice, Operation, OperationKind, Priority
from storage_kv.pool.foreign import DAMAGED_VOLUME, UNKNOWN, describe_content
from storage_kv.pool.format import (
    BLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    FormatError,
    Layout,
    SnapshotHeader,
    Superblock,
)
from storage_kv.pool.pages import Pages
from storage_kv.pool.recovery import Reader

__all__ = ["check_superblock", "format_volume", "write_blocks"]


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
    """Make an empty volume of a device, for good; everything that is on it is lost.

    Args:
        device: nobody else uses it.
        pool_id: 16 bytes; devices of one pool have the same.
        objects_max: most objects that it shall hold.
        log_bytes: of each copy of the log; by default what suits ``objects_max``.
        force: also if something is there already.
        clock_ms: Unix time.
        entropy: gives random bytes.

    Raises:
        FormatError: it is too small, or something is there.
        OSError: the device failed.
    """
    reader = Reader(device)
    found = describe_content(reader, device.capacity_bytes)
    if found is not None and not force:
        raise FormatError(
            f"device {device.name} holds {found}; nothing was changed. To drop that for good, ask for it: --force"
        )
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
    # Zeros first: at no moment are there the superblocks of two volumes. Both copies come last.
    page = bytes(BLOCK_BYTES)
    write_blocks(reader, [(offset, page) for offset in SUPERBLOCK_OFFSETS])
    place = superblock.layout.snapshot_firsts[1] * BLOCK_BYTES
    write_blocks(reader, [(place, first.pack(superblock.volume_id))])
    write_blocks(reader, [(offset, superblock.pack()) for offset in SUPERBLOCK_OFFSETS])
    return superblock


def check_superblock(
    superblock: Superblock | None, device: BlockDevice, reader: Reader, pool_id: bytes | None
) -> Superblock:
    """Return the superblock if the volume can be used; raise FormatError with what to do if not."""
    if superblock is None:
        found = describe_content(reader, device.capacity_bytes)
        if found is None:
            raise FormatError(f"device {device.name} is empty; format it first: shadowserve pool format {device.name}")
        if found not in (DAMAGED_VOLUME, UNKNOWN):
            raise FormatError(
                f"device {device.name} holds {found}, and no volume of a pool; nothing was changed. Name another "
                f"device, or drop all that is on this one: shadowserve pool format --force {device.name}"
            )
        raise FormatError(
            f"device {device.name} holds {found}, but no superblock that is sound. If it was a volume, restore "
            f"one of its first 4 KiB or its 4 KiB at 1 MiB; to drop all that is on it: "
            f"shadowserve pool format --force {device.name}"
        )
    if pool_id is not None and superblock.pool_id != pool_id:
        raise FormatError(
            f"device {device.name} belongs to pool {superblock.pool_id.hex()}, not to {pool_id.hex()}; take it out of "
            f"the configuration, or drop its objects: shadowserve pool format --force {device.name}"
        )
    if superblock.device_bytes > device.capacity_bytes:
        raise FormatError(
            f"device {device.name} has {device.capacity_bytes} bytes, was formatted with {superblock.device_bytes}: "
            "give it back its size, or format it again, which drops all its objects"
        )
    return superblock


def write_blocks(reader: Reader, blocks: list[tuple[int, bytes]]) -> None:
    """Write blocks at offsets, and flush."""
    page = Pages(BLOCK_BYTES)
    for offset, content in blocks:
        page.view[:BLOCK_BYTES] = content
        reader.run(Operation(OperationKind.WRITE, offset, BLOCK_BYTES, page.address, Priority.WRITE, _nothing))
    reader.run(Operation(OperationKind.FLUSH, 0, 0, 0, Priority.WRITE, _nothing))


def _nothing(_operation: Operation) -> None:
    """Nothing: whoever runs an operation by a Reader waits for it."""
