"""A volume grows with its device. It never shrinks, since objects may be at its end.

Objects are the last part of a volume, so a larger device has more blocks for them and nothing moves. The most objects
stay as formatted.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from shadowserve.errors import ConfigurationError, DeviceError
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.device import BlockDevice
from shadowserve.pool.volume.format import BLOCK_BYTES, FormatError, Superblock
from shadowserve.pool.volume.formatting import check_empty
from shadowserve.sizes import human_size

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
