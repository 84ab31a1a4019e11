"""Signature check: the content of a device without a volume, so that no user formats another program's data by mistake.

It looks for known signatures at their places, runs wipefs(8) where that is installed, and looks for bytes other than
zeros: in all of a small device; of a larger one at both ends, and in samples at a random place of each of many equal
slices. So data that fills a slice is always found, and data with the share s of a device, in any places, is overlooked
with a probability of at most (1 - s) ** SAMPLES.
"""

import contextlib
import json
import logging
import random
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

from shadowserve.pool.volume.block_reader import BlockReader
from shadowserve.pool.volume.device import BlockDevice
from shadowserve.pool.volume.format import BLOCK_BYTES, HEADER_MAGICS, SUPERBLOCK_OFFSETS

_log = logging.getLogger(__name__)

DAMAGED_VOLUME: Final = "a volume of ShadowServe, perhaps damaged"
UNKNOWN: Final = "something that is not known here"
SAMPLES: Final = 4096
"""A hundredth of a device is overlooked once in 10**17 times, a thousandth once in 60."""

_SAMPLE_BLOCKS: Final = 4
_WHOLE_BLOCKS: Final = (256 << 20) // BLOCK_BYTES
"""Devices up to this size are read as a whole."""
_END_BLOCKS: Final = (8 << 20) // BLOCK_BYTES
"""Blocks that are read at both ends of larger devices: most signatures are there, and the first blocks of our log."""
_LOG_S: Final = 2.0
_WIPEFS_S: Final = 30.0

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_UBERBLOCK: Final = bytes.fromhex("0cb1ba0000000000")
_LUKS: Final = "an encrypted LUKS volume"
_LVM: Final = "an LVM physical volume"
_GPT: Final = "a GPT partition table"
_EXT: Final = "an ext2, ext3 or ext4 file system"
_BTRFS: Final = "a Btrfs file system"
_MD: Final = "a member of an MD RAID"
_SWAP: Final = "swap space"
_ZFS: Final = "a member of a ZFS pool"

_SIGNATURES: Final = (
    (0, b"LUKS\xba\xbe", _LUKS),
    *((offset << 10, b"SKUL\xba\xbe", _LUKS) for offset in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
    (0, b"XFSB", "an XFS file system"),
    *((512 * sector, b"LABELONE", _LVM) for sector in range(4)),
    *((offset, b"EFI PART", _GPT) for offset in (512, 4096, -512, -4096)),
    *((1080 if at == 0 else at + 56, b"\x53\xef", _EXT) for at in (0, 32 * _MIB, 128 * _MIB, 384 * _MIB)),
    *((size - 10, b"SWAPSPACE2", _SWAP) for size in (4096, 8192, 16384, 65536)),
    *((at + 64, b"_BHRfS_M", _BTRFS) for at in (64 * _KIB, 64 * _MIB, 256 << 30)),
    *((offset, b"\xfc\x4e\x2b\xa9", _MD) for offset in (0, 4096, -8192, -65536)),
    *((at, _UBERBLOCK, _ZFS) for at in range(128 * _KIB, 256 * _KIB, _KIB)),
    *((at, _UBERBLOCK, _ZFS) for at in range(384 * _KIB, 512 * _KIB, _KIB)),
    *((at, _UBERBLOCK, _ZFS) for at in range(-384 * _KIB, -256 * _KIB, _KIB)),
    *((at, _UBERBLOCK, _ZFS) for at in range(-128 * _KIB, 0, _KIB)),
    (4120, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"), "a bcache device"),
    (4120, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef"), "a bcachefs file system"),
    (1 * _MIB, bytes.fromhex("0dd001c0"), "a VMFS volume"),
    (2 * _MIB, bytes.fromhex("5ef1ab2f"), "a VMFS volume"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (32, b"NXSB", "an APFS container"),
    (1024, b"H+", "an HFS+ file system"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (65588, b"ReIsEr", "a ReiserFS file system"),
    (65536, b"\x01\x16\x19\x70", "a GFS2 file system"),
    (0, b"hsqs", "a SquashFS file system"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (-512, b"\xde\x11\xde\x11", "a member of a firmware RAID"),
    (-1024, b"Intel Raid ISM Cfg Sig. ", "a member of a firmware RAID"),
    (510, b"\x55\xaa", "an MBR partition table, or a FAT or NTFS file system"),
)
"""Offset, signature and name. Negative offsets count from the device's end, and from that of its last whole 64 KiB."""


def describe_content(device: BlockDevice) -> str | None:
    """Return a description of a device's content; None if nothing was found. OSError: it cannot be read."""
    blocks = device.capacity_bytes // BLOCK_BYTES
    reader = BlockReader(device)
    names = _find(device, reader, _places(blocks))
    if not names and reader.unreadable:
        raise reader.unreadable_error()
    known = [name for name in names if name != UNKNOWN]
    if not any(name != DAMAGED_VOLUME for name in known):
        known += [f"what wipefs calls {kind}" for kind in _ask_wipefs(device.name)]
    return " and ".join(known) or (UNKNOWN if names else None)


def describe_beginning(device: BlockDevice) -> str | None:
    """Return the foreign signatures in front of the superblock's second copy, where a volume has none."""
    blocks = min(SUPERBLOCK_OFFSETS[1] // BLOCK_BYTES, device.capacity_bytes // BLOCK_BYTES)
    names = _find(device, BlockReader(device), [(0, blocks)])
    return " and ".join(name for name in names if name not in (DAMAGED_VOLUME, UNKNOWN)) or None


def _places(blocks: int) -> list[tuple[int, int]]:
    """Return (first block, count) of what is read."""
    if blocks <= _WHOLE_BLOCKS:
        return [(0, blocks)]
    last = blocks - _END_BLOCKS
    marks = sorted({offset // BLOCK_BYTES for offset, _, _ in _SIGNATURES if 0 <= offset < blocks * BLOCK_BYTES})
    places = [(0, _END_BLOCKS), (last, _END_BLOCKS)]
    places += [(mark, 1) for mark in marks if _END_BLOCKS <= mark < last]
    begins = [blocks * number // SAMPLES for number in range(SAMPLES + 1)]
    chance = random.SystemRandom()
    for begin, end in zip(begins, begins[1:], strict=False):
        places.append((chance.randrange(begin, end - _SAMPLE_BLOCKS + 1), _SAMPLE_BLOCKS))
    return places


def _find(device: BlockDevice, reader: BlockReader, places: list[tuple[int, int]]) -> list[str]:
    """Return the names of all found content; UNKNOWN among them for content without a signature."""
    signatures: dict[int, list[tuple[int, bytes, str]]] = defaultdict(list)
    for offset, magic, name in _SIGNATURES:
        for end in {device.capacity_bytes, device.capacity_bytes // 65536 * 65536} if offset < 0 else (0,):
            block, at = divmod(end + offset, BLOCK_BYTES)
            signatures[block].append((at, magic, name))
    found: dict[str, None] = {}
    logged = time.monotonic()
    for first, data in reader.runs(places):
        if time.monotonic() - logged > _LOG_S:
            logged = time.monotonic()
            _log.info("device_looked_at device=%s block=%d of=%d", device.name, first, device.capacity_bytes >> 12)
        if not data.any():
            continue
        found.setdefault(UNKNOWN)
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
            if data[at : at + 8].tobytes().startswith(HEADER_MAGICS):
                found.setdefault(DAMAGED_VOLUME)
            for begin, magic, name in signatures.get(number, ()):
                if data[at + begin : at + begin + len(magic)].tobytes() == magic:
                    found.setdefault(name)
    return list(found)


def _ask_wipefs(path: str) -> list[str]:
    """Return the types that wipefs(8) finds; none where it is not installed or fails."""
    program = shutil.which("wipefs") or shutil.which("wipefs", path="/usr/sbin:/sbin")
    if program is None or not (Path(path).is_file() or Path(path).is_block_device()):
        return []
    try:
        done = subprocess.run(
            [program, "--json", "--", path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WIPEFS_S,
            check=True,
        )
        return sorted({str(each["type"]) for each in json.loads(done.stdout or "{}").get("signatures", ())})
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("wipefs_not_used device=%s error=%r", path, str(error))
        return []


def used_by(path: str) -> str | None:
    """Return another user of a file, as far as the system tells; opening a block device in use fails (EBUSY)."""
    file = Path(path)
    if not file.is_file():
        return None
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if file.samefile(backing.read_text("utf-8").rstrip("\n")):
                return f"loop device /dev/{backing.parts[3]}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/swaps").read_text("utf-8").splitlines()[1:]:
            with contextlib.suppress(OSError, IndexError):
                if file.samefile(line.split()[0]):
                    return "the kernel, as swap space"
    return None
