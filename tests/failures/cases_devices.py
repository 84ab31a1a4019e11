"""Failing devices: I/O errors, a missing device, a full device, torn and damaged objects, misdirected reads."""

import contextlib
import errno
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import faults
from cases import KEYS, POOL, Context, Unavailable, add, case
from faults import StoredObject, is_root
from nodes import MIB, Storage

from shadowserve.pool.volume.format import BLOCK_BYTES


def _cold(context: Context, **options: object) -> Storage:
    """Return a server that has every key, none of them in memory."""
    storage = context.storage(**options, filled=KEYS)
    assert storage.stop()
    return storage.start()


def _after(context: Context) -> None:
    """End the fault: values written from now on must stay; values written before may be present or absent."""
    context.expected.all_may_be_lost(context.expected.losable)
    context.expected.losable = ""


@case("device I/O error", POOL)
def reads_fail(context: Context) -> None:
    """One read in three fails with EIO, of values that are not in memory."""
    storage = _cold(context, faulty=True)
    storage.faults.set(read_error=errno.EIO, one_in=3)
    context.expected.losable = "the device fails to read"
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.3, 0.6)
    assert storage.faults.met, "no read has failed"
    storage.faults.clear()
    _after(context)
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.2)


def _failing_writes(context: Context, errors: dict[str, int]) -> None:
    """Write with failing writes, then restart with a sound device, and check that every acknowledged value is present.

    Exception: objects on a device that the pool closed while another continued may be stale, so the pool drops them.
    """
    alone = bool(context.seed % 2)
    storage = context.storage(faulty=True, devices=1 if alone else 2)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
        storage.faults.set(**errors)
        context.expected.losable = "its device is closed until the next start"
        context.pause(0.4, 0.8)
    assert storage.faults.met, "nothing has failed"
    storage.kill()
    storage.faults.clear()
    context.expected.losable = "" if alone else "stale: its device was closed while the other continued"
    storage.start()
    context.verify(storage)
    if not alone:
        _after(context)
    with context.load(storage.port):
        context.pause(0.1, 0.2)


for _name, _fault, _what, _errors in (
    ("writes_fail", "device I/O error", "One write in four fails with EIO", {"write_error": errno.EIO, "one_in": 4}),
    ("writes_fail_rarely", "device I/O error", "One write in 200 fails", {"write_error": errno.EIO, "one_in": 200}),
    ("flushes_fail", "device I/O error", "Every flush fails", {"flush_error": errno.EIO}),
    ("no_space", "disk full", "Every write fails with ENOSPC", {"write_error": errno.ENOSPC}),
    ("vanished", "device gone", "Every operation fails with ENODEV, under load",
        dict.fromkeys(("read_error", "write_error", "flush_error"), errno.ENODEV)),
):  # fmt: skip
    _short = POOL if _name == "writes_fail" else ()
    _run = partial(_failing_writes, errors=_errors)
    add(_name, _fault, f"{_what}; then a restart with a sound device.", POOL, _run, repetitions=3, short=_short)


@case("disk full", POOL)
def evicting(context: Context) -> None:
    """The devices are full: what was used longest ago goes."""
    storage = context.storage(device_bytes=16 * MIB)
    context.expected.losable = "evicted to make room"
    context.expected.sizes = (150, 300_000, 900_000)
    with context.load(storage.port, keys=[f"key {number}" for number in range(300)], threads=4):
        context.pause(1.5, 2.5)
    context.verify(storage)
    storage.kill()
    storage.start()
    context.verify(storage)


@case("device gone", POOL)
def cut_loop_device(context: Context) -> None:
    """A loop device's backing file is cut to nothing under load, which fails its I/O; then a restart without it."""
    with _loop_devices(context.folder, 2) as pairs:
        storage = context.storage(paths=[device for device, _ in pairs], filled=KEYS)
        assert list(faults.objects([pairs[0][1]])), "the device to remove has no objects"
        with context.load(storage.port):
            context.pause(0.1, 0.3)
            context.expected.losable = "its device is gone"
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


@case("device gone", POOL)
def replaced(context: Context) -> None:
    """One of two files is removed and replaced by an empty one, between two runs."""
    storage = context.storage(filled=KEYS)
    assert storage.stop()
    for entry in faults.objects([storage.paths[0]]):
        context.expected.may_be_lost(_key_of(entry), "its device was replaced by an empty one")
    storage.paths[0].unlink()
    storage.start()
    context.verify(storage)


Damage = Callable[[list[StoredObject], Random], None]


def _damaged(context: Context, damage: Damage, *, down: bool) -> None:
    """Damage objects between a SIGKILL and the next start, or while clients read. Only they may be absent."""
    storage = context.storage(filled=KEYS) if down else _cold(context)
    if down:
        storage.kill()
    whole = storage.objects()
    assert len(whole) >= len(KEYS)
    chosen = context.chance.sample(whole, 12)
    damage(chosen, context.chance)
    for entry in chosen:
        context.expected.may_be_lost(_key_of(entry), "damaged on its device")
    if down:
        storage.start()
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
    context.verify(storage)


def _key_of(chosen: StoredObject) -> str:
    """Return the client's key, one of KEYS, for a digest from a device."""
    return _DIGESTS[chosen.key]


_DIGESTS = {hashlib.sha256(key.encode()).digest(): key for key in KEYS}


def _tear(chosen: list[StoredObject], chance: Random) -> None:
    for entry in chosen:
        faults.tear(entry, chance)


def _rot(chosen: list[StoredObject], chance: Random) -> None:
    faults.rot_some(chosen, len(chosen), chance)


def _exchange(chosen: list[StoredObject], chance: Random) -> None:
    ordered = sorted(chosen, key=lambda entry: entry.size)
    for one, other in zip(ordered[::2], ordered[1::2], strict=True):
        faults.exchange(one, other)


for _name, _fault, _what, _damage, _down in (
    ("torn", "torn write", "Twelve objects keep only some of their sectors after a SIGKILL", _tear, True),
    ("rotten_while_down", "bit rot on disk", "A bit of each of twelve objects, while the server is down", _rot, True),
    ("rotten_while_up", "bit rot on disk", "A bit of each of twelve objects, while the server runs", _rot, False),
    ("exchanged_while_down", "misdirected read", "Twelve objects are exchanged, after a SIGKILL", _exchange, True),
    ("exchanged_while_up", "misdirected read", "Twelve objects are exchanged, while the server runs", _exchange, False),
):
    _short = POOL if _name == "rotten_while_up" else ()
    add(_name, _fault, f"{_what}.", POOL, partial(_damaged, damage=_damage, down=_down), short=_short)


@case("torn write", POOL)
def torn_log(context: Context) -> None:
    """The log's last block is torn in one of its two copies after a SIGKILL."""
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.2, 0.5)
        storage.kill()
    for path in storage.paths:
        blocks = _log_blocks(path, context.chance.randrange(2))
        last = max(blocks, default=None, key=lambda block: block[1])
        if last is not None:
            faults.write(path, last[0] + 512 * context.chance.randrange(1, 7), context.chance.randbytes(512))
    storage.start()
    context.verify(storage)


@case("bit rot on disk", POOL)
def rotten_log(context: Context) -> None:
    """Twenty bits of the log and a superblock, each in one of two copies, while the server is down."""
    storage = context.storage(filled=KEYS)
    storage.kill()
    for path in storage.paths:
        copy = context.chance.randrange(2)
        faults.flip(path, copy << 20 | context.chance.randrange(BLOCK_BYTES), context.chance.randrange(8))
        for offset, _ in context.chance.choices(_log_blocks(path, copy) or [(copy << 20, 0)], k=20):
            faults.flip(path, offset + context.chance.randrange(BLOCK_BYTES), context.chance.randrange(8))
            break
    storage.start()
    context.verify(storage)


@case("bit rot on disk", POOL)
def rotten_metadata(context: Context) -> None:
    """Anything outside of objects: bits of log, snapshots, superblocks."""
    storage = context.storage(filled=KEYS)
    assert storage.stop()
    for path in storage.paths:
        first = min(entry.offset for entry in faults.objects([path]))
        for _ in range(context.chance.randint(1, 40)):
            faults.flip(path, context.chance.randrange(1 << 20, first), context.chance.randrange(8))
    context.expected.losable = "log or snapshot rotten beyond repair"
    storage.start()
    _after(context)
    context.verify(storage)
    with context.load(storage.port):
        context.pause(0.1, 0.3)
    assert storage.stop()


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
