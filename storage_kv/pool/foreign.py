"""What is on a device that is no volume of ours, so that nobody formats another's data by mistake."""

from typing import Final

from storage_kv.pool.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS
from storage_kv.pool.recovery import Reader

__all__ = ["DAMAGED_VOLUME", "UNKNOWN", "describe_content"]

DAMAGED_VOLUME: Final = "a volume of ShadowServe, perhaps damaged"
UNKNOWN: Final = "something that is not known here"

_BLOCKS: Final = SUPERBLOCK_OFFSETS[1] // BLOCK_BYTES + 1

_SIGNATURES: Final = (
    (0, b"SSVOLUME", DAMAGED_VOLUME),
    (SUPERBLOCK_OFFSETS[1], b"SSVOLUME", DAMAGED_VOLUME),
    (0, b"LUKS\xba\xbe", "an encrypted LUKS volume"),
    (0, b"XFSB", "an XFS file system"),
    (512, b"LABELONE", "an LVM physical volume"),
    (512, b"EFI PART", "a GPT partition table"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (65600, b"_BHRfS_M", "a Btrfs file system"),
    (510, b"\x55\xaa", "an MBR partition table, or a FAT or NTFS file system"),
)


def describe_content(reader: Reader, capacity_bytes: int) -> str | None:
    """Return what a device's first MiB seems to hold; None if that is all zeros."""
    blocks = min(_BLOCKS, capacity_bytes // BLOCK_BYTES)
    content = b"".join(data.tobytes() for _, data in reader.pieces(0, blocks))
    for offset, magic, meaning in _SIGNATURES:
        if content[offset : offset + len(magic)] == magic:
            return meaning
    return UNKNOWN if content.count(0) < len(content) else None
