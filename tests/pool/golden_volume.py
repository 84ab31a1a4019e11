"""The golden volume: an image of version 1 in tests/assets that must stay readable.

``python tests/pool/golden_volume.py FILE`` writes the image of this code: for a new version, beside the old one.
"""

import struct
import sys
import zlib
from pathlib import Path

from simulated_device import BLOCK_BYTES, SimulatedDevice
from volume_support import SMALL, Store, device_of, index_key

from shadowserve.native import RecordKind
from shadowserve.pool.volume.format import pack_record

GOLDEN = Path(__file__).parents[1] / "assets" / "volumes" / "version-1.bin"
NAME = b"a name that is longer than one piece of eighty bytes, so that its text takes two records of the log"
VALUES = {number.to_bytes(32, "little"): bytes([number]) * (1000 * number) for number in range(1, 41)}
"""Values besides a named key of tenant 5. The first twenty are in the snapshot, the others only in the log."""


def make() -> SimulatedDevice:
    """Return a device with the golden volume, written by this code."""
    store = Store(device_of(objects_max=100))
    store.volume.name_tenant(5, b"five")
    store.volume.note(b"wear", b"12345")
    for number, (key, value) in enumerate(VALUES.items()):
        store.keep(key, value)
        if number == 19:
            store.put(bytes(32), b"removed later")
            store.snapshot()
    store.put(index_key(NAME), b"named", name=NAME, tenant=5)
    store.expire((1).to_bytes(32, "little"), 2_000_000_000_000)
    store.volume.log(pack_record(RecordKind.PIN, 0, (2).to_bytes(32, "little"), pinned_until_s=2_000_000_000))
    store.remove(bytes(32))
    store.drain()
    return store.device.restart()


def save(device: SimulatedDevice, path: Path) -> None:
    """Write the nonzero blocks, each behind its number, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(b"".join(struct.pack("<Q", at) + block for at, block in device.blocks()), 9))


def load(path: Path = GOLDEN) -> SimulatedDevice:
    """Return a device with the volume of a file."""
    device = SimulatedDevice(SMALL)
    content = zlib.decompress(path.read_bytes())
    for at in range(0, len(content), 8 + BLOCK_BYTES):
        device.set_block(struct.unpack_from("<Q", content, at)[0], content[at + 8 : at + 8 + BLOCK_BYTES])
    return device


if __name__ == "__main__":
    save(make(), Path(sys.argv[1]))
