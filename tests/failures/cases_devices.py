"""Failing devices: I/O errors, a missing device, a full device, torn and damaged objects, misdirected reads."""

import contextlib
import errno
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import images
from cases import KEYS, Context, Unavailable, case
from faults import is_root
from images import StoredObject
from nodes import MIB, Storage

from shadowserve.pool.volume.format import BLOCK_BYTES


def _cold(context: Context, **options: object) -> Storage:
    """Return a server that has every key, none of them in memory."""
    storage = context.storage(**options)
    context.fill(storage)
    assert storage.stop()
    return storage.start()


def _during(context: Context, why: str) -> None:
    """Allow from now on that any key is absent for this reason."""
    context.expected.losable = why


def _after(context: Context) -> None:
    """End the fault: values written from now on must stay; values written before may be present or absent."""
    context.expected.all_may_be_lost(context.expected.losable)
    context.expected.losable = ""


@case(
    "device I/O error",
    "one read in three fails with EIO, of values that are not in memory",
    engines=("pool",),
    repetitions=2,
)
def reads_fail(context: Context) -> None:
    storage = _cold(context, faulty=True)
    storage.faults.set(read_error=errno.EIO, one_in=3)
    _during(context, "the device fails to read")
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.3, 0.6)
    assert storage.faults.met, "no read has failed"
    storage.faults.clear()
    _after(context)
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.2)


def _failing_writes(context: Context, **faults: int) -> None:
    """Write with failing writes, then restart with a sound device, and check that every acknowledged value is present.

    Exception: objects on a device that the pool closed while another continued may be stale, so the pool drops them.
    """
    alone = bool(context.seed % 2)
    storage = context.storage(faulty=True, devices=1 if alone else 2)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
        storage.faults.set(**faults)
        context.expected.losable = "its device is closed until the next start"
        context.pause(0.4, 0.8)
    assert storage.faults.met, "nothing has failed"
    storage.kill()
    storage.faults.clear()
    context.expected.losable = "" if alone else "stale: its device was closed while the other continued"
    storage.start()
    context.verify(storage)
    if not alone:
        context.expected.all_may_be_lost(context.expected.losable)
        context.expected.losable = ""
    with context.load(storage.port):
        context.pause(0.1, 0.2)


@case(
    "device I/O error",
    "one write in four fails with EIO; then a restart",
    engines=("pool",),
    repetitions=3,
    short=("pool",),
)
def writes_fail(context: Context) -> None:
    _failing_writes(context, write_error=errno.EIO, one_in=4)


@case("device I/O error", "one write in two hundred fails with EIO; then a restart", engines=("pool",), repetitions=2)
def writes_fail_rarely(context: Context) -> None:
    _failing_writes(context, write_error=errno.EIO, one_in=200)


@case("device I/O error", "every flush fails; then a restart", engines=("pool",), repetitions=2)
def flushes_fail(context: Context) -> None:
    _failing_writes(context, flush_error=errno.EIO)


@case("disk full", "every write fails with ENOSPC; then a restart", engines=("pool",), repetitions=2)
def no_space(context: Context) -> None:
    _failing_writes(context, write_error=errno.ENOSPC)


@case("disk full", "the devices are full: what was used longest ago goes", engines=("pool",), repetitions=2)
def evicting(context: Context) -> None:
    storage = context.storage(device_bytes=16 * MIB)
    _during(context, "evicted to make room")
    context.expected.sizes = (150, 300_000, 900_000)
    with context.load(storage.port, keys=[f"key {number}" for number in range(300)], threads=4):
        context.pause(1.5, 2.5)
    context.verify(storage)
    storage.kill()
    storage.start()
    context.verify(storage)


@case(
    "device gone",
    "every operation fails with ENODEV, under load; then a restart with it",
    engines=("pool",),
    repetitions=3,
)
def vanished(context: Context) -> None:
    _failing_writes(context, read_error=errno.ENODEV, write_error=errno.ENODEV, flush_error=errno.ENODEV)


@case(
    "device gone",
    "a loop device's backing file is cut to nothing under load, which fails its I/O; then a restart without it",
    engines=("pool",),
    repetitions=2,
)
def cut_loop_device(context: Context) -> None:
    with _loop_devices(context.folder, 2) as pairs:
        storage = context.storage(paths=[device for device, _ in pairs])
        context.fill(storage)
        assert list(images.objects([pairs[0][1]])), "the device to remove has no objects"
        with context.load(storage.port):
            context.pause(0.1, 0.3)
            _during(context, "its device is gone")
            pairs[0][1].write_bytes(b"")
            context.pause(0.5, 0.8)
        context.verify(storage)
        storage.kill()
        _after(context)
        storage.devices = storage.devices[1:]
        storage.start()
        context.verify(storage)
        with context.load(storage.port):
            context.pause(0.1, 0.3)
        assert storage.stop()


@case("device gone", "one of two files is removed and replaced by an empty one, between two runs", engines=("pool",))
def replaced(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    assert storage.stop()
    for entry in images.objects([storage.paths[0]]):
        context.expected.may_be_lost(_name(entry), "its device was replaced by an empty one")
    storage.paths[0].unlink()
    storage.start()
    context.verify(storage)


Damage = Callable[[Sequence[StoredObject], Random], None]


def _damaged_while_down(context: Context, damage: Damage) -> None:
    """Damage objects between a SIGKILL and the next start. Only those objects may be absent."""
    storage = context.storage()
    context.fill(storage)
    storage.kill()
    _harm(context, storage, damage)
    storage.start()
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
    context.verify(storage)


def _damaged_while_up(context: Context, damage: Damage) -> None:
    """Damage objects on the devices while clients read them. Only those objects may be absent."""
    storage = _cold(context)
    _harm(context, storage, damage)
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
    context.verify(storage)


def _harm(context: Context, storage: Storage, damage: Damage) -> None:
    whole = storage.objects()
    assert len(whole) >= len(KEYS)
    chosen = context.chance.sample(whole, 12)
    damage(chosen, context.chance)
    for entry in chosen:
        context.expected.may_be_lost(_name(entry), "damaged on its device")


def _name(chosen: StoredObject) -> str:
    """Return the client's key, one of KEYS, for a digest from a device."""
    return _DIGESTS[chosen.key]


_DIGESTS = {hashlib.sha256(key.encode()).digest(): key for key in KEYS}


def _tear(chosen: Sequence[StoredObject], chance: Random) -> None:
    for entry in chosen:
        images.tear(entry, chance)


def _rot(chosen: Sequence[StoredObject], chance: Random) -> None:
    for entry in chosen:
        images.rot(entry, chance)


def _exchange(chosen: Sequence[StoredObject], chance: Random) -> None:
    ordered = sorted(chosen, key=lambda entry: entry.size)
    for one, other in zip(ordered[::2], ordered[1::2], strict=True):
        images.exchange(one, other)


@case(
    "torn write",
    "twelve objects keep only some of their sectors after a SIGKILL, as if their writes had been cut off",
    engines=("pool",),
    short=("pool",),
)
def torn(context: Context) -> None:
    _damaged_while_down(context, _tear)


@case("torn write", "the log's last block is torn in one of its two copies after a SIGKILL", engines=("pool",))
def torn_log(context: Context) -> None:
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.2, 0.5)
        storage.kill()
    for path in storage.paths:
        blocks = _log_blocks(path, context.chance.randrange(2))
        last = max(blocks, default=None, key=lambda block: block[1])
        if last is not None:
            images.write(path, last[0] + 512 * context.chance.randrange(1, 7), context.chance.randbytes(512))
    storage.start()
    context.verify(storage)


@case("bit rot on disk", "a bit of each of twelve objects, while the server is down", engines=("pool",))
def rotten_while_down(context: Context) -> None:
    _damaged_while_down(context, _rot)


@case("bit rot on disk", "a bit of each of twelve objects, while the server runs", engines=("pool",), short=("pool",))
def rotten_while_up(context: Context) -> None:
    _damaged_while_up(context, _rot)


@case(
    "bit rot on disk",
    "twenty bits of the log and a superblock, each in one of two copies, while the server is down",
    engines=("pool",),
)
def rotten_log(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    storage.kill()
    for path in storage.paths:
        copy = context.chance.randrange(2)
        images.flip(path, copy << 20 | context.chance.randrange(BLOCK_BYTES), context.chance.randrange(8))
        for offset, _ in context.chance.choices(_log_blocks(path, copy) or [(copy << 20, 0)], k=20):
            images.flip(path, offset + context.chance.randrange(BLOCK_BYTES), context.chance.randrange(8))
            break
    storage.start()
    context.verify(storage)


@case("bit rot on disk", "anything outside of objects: bits of log, snapshots, superblocks", engines=("pool",))
def rotten_metadata(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    assert storage.stop()
    for path in storage.paths:
        first = min(entry.offset for entry in images.objects([path]))
        for _ in range(context.chance.randint(1, 40)):
            images.flip(path, context.chance.randrange(1 << 20, first), context.chance.randrange(8))
    _during(context, "log or snapshot rotten beyond repair")
    storage.start()
    _after(context)
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
    assert storage.stop()


@case("misdirected read", "twelve objects lie in each other's places, after a SIGKILL", engines=("pool",))
def exchanged_while_down(context: Context) -> None:
    _damaged_while_down(context, _exchange)


@case(
    "misdirected read",
    "twelve objects lie in each other's places, while the server runs",
    engines=("pool",),
    short=("pool",),
)
def exchanged_while_up(context: Context) -> None:
    _damaged_while_up(context, _exchange)


# ---- Devices and their content


def _log_blocks(path: Path, copy: int) -> list[tuple[int, int]]:
    """Return offset and sequence of each written block of one log copy, at its place according to the superblock."""
    data = path.read_bytes()
    begins = [int.from_bytes(data[at : at + 8], "little") for at in (80, 88)]
    blocks = int.from_bytes(data[96:104], "little")
    found = []
    for number in range(blocks):
        offset = (begins[copy] + number) * BLOCK_BYTES
        if data[offset : offset + 4] == b"SSLG":
            found.append((offset, int.from_bytes(data[offset + 32 : offset + 40], "little")))
    return found


@contextlib.contextmanager
def _loop_devices(folder: Path, count: int, size: int = 48 * MIB) -> Iterator[list[tuple[Path, Path]]]:
    """Yield loop devices and their backing files."""
    if not is_root() or shutil.which("losetup") is None:
        raise Unavailable("loop devices need root and losetup")
    pairs: list[tuple[Path, Path]] = []
    try:
        for number in range(count):
            file = folder / f"loop{number}.img"
            with open(file, "wb") as image:
                image.truncate(size)
            done = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True)
            if done.returncode:
                raise Unavailable(f"losetup: {done.stderr.strip()}")
            pairs.append((Path(done.stdout.strip()), file))
        yield pairs
    finally:
        for device, _ in pairs:
            subprocess.run(["losetup", "--detach", device], check=False)
