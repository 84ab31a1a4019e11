"""A minimal store on one volume, for tests of volumes."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from machine import drive
from simulated_device import SimulatedDevice

from shadowserve.block import Operation, Priority
from shadowserve.native import (
    ANY,
    NO_PARENT,
    Index,
    IndexEntry,
    RecordFlag,
    RecordKind,
    Result,
    check_object,
    object_units,
    seal_object,
)
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    Layout,
    Superblock,
    blocks_of,
    object_fields,
    pack_record,
)
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError, Ticket, when_settled
from shadowserve.pool.volume.volume import Volume

POOL = bytes(range(16))
HEADER = 2048
SMALL = 6 << 20
NOW_MS = 1_800_000_000_000


def device_of(capacity_bytes: int = SMALL, *, seed: int = 1, objects_max: int = 200) -> SimulatedDevice:
    """Return a formatted device."""
    device = SimulatedDevice(capacity_bytes, seed=seed)
    chance = random.Random(seed)
    Volume.format(
        device,
        pool_id=POOL,
        objects_max=objects_max,
        log_bytes=64 * BLOCK_BYTES,
        clock_ms=lambda: NOW_MS,
        entropy=chance.randbytes,
    )
    return device


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def layout_of(device: SimulatedDevice) -> Layout:
    """Return a volume's layout by whichever copy of its superblock is sound."""
    copies = (Superblock.unpack(device.peek(offset, BLOCK_BYTES)) for offset in SUPERBLOCK_OFFSETS)
    return next(found for found in copies if found is not None).layout


def numbered_device() -> SimulatedDevice:
    """Return a device of 4096 blocks, each full of its number in eight bytes."""
    device = SimulatedDevice(4096 * BLOCK_BYTES)
    for number in range(4096):
        device.set_block(number, number.to_bytes(8, "little") * (BLOCK_BYTES // 8))
    return device


def index_key(name: bytes) -> bytes:
    """Return the index's key of a named key."""
    return hashlib.sha256(name).digest()


@dataclass
class Store:
    """One volume with its own index, and buffers for its objects.

    Attributes:
        settled: Settled tickets in their order: (what, error).
    """

    device: Any  # a real or a simulated one
    seed: int = 0
    settled: list[tuple[object, Exception | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.index = Index(4096, seed=self.seed)
        self.volume = Volume.open(
            self.device, self.index, 3, pool_id=POOL, clock_ms=lambda: NOW_MS, entropy=chance.randbytes
        )
        self.index.replayed()
        self.volume.ready()
        self.generation = self.volume.generation_last

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        what: object = None,
        tenant: int = 0,
        flags: int = 0,
        name: bytes | None = None,
    ) -> Ticket | None:
        """Write a value; None if there is no room."""
        extent = self.volume.reserve(HEADER + len(value))
        if extent is None:
            return None
        self.generation += 1
        flags |= 0 if name is None else RecordFlag.NAMED
        entry = IndexEntry(
            RecordKind.PUT, flags, 3, 0, tenant, extent, len(value), 0, 7, 0, self.generation, 0, key, NO_PARENT
        )
        pages = Pages(blocks_of(len(value)) * BLOCK_BYTES)
        pages.view[HEADER : HEADER + len(value)] = value
        seal_object(pages.view, object_fields(entry))
        try:
            ticket = self.volume.write(pages.address, extent, entry.pack(), name=name)
        except (BusyError, OutOfBudgetError):
            self.volume.free(extent, HEADER + len(value))
            raise
        slot = self.index.find(tenant, key)
        old = self.index.read(slot) if slot else None
        self.index.insert(
            tenant,
            key,
            device=3,
            extent=extent,
            length=len(value),
            now_s=7,
            name=name,
            flags=flags,
            generation=self.generation,
        )
        if old is not None:
            self.volume.free(old.extent, HEADER + old.length)

        def settled(error: Exception | None) -> None:
            pages.view.release()  # held until now, like an engine's buffer
            slot = self.index.find(tenant, key)
            if error is not None and slot and self.index.read(slot).generation == entry.generation:
                self.index.remove(slot)
                self.volume.log(pack_record(RecordKind.REMOVE, tenant, key))
                self.volume.free(extent, HEADER + len(value))
            self.settled.append((what, error))

        ticket.then(settled)
        return ticket

    def remove(self, key: bytes, *, tenant: int = 0) -> bool:
        """Remove a value; barrier() makes that durable."""
        slot = self.index.find(tenant, key)
        if not slot:
            return False
        entry = self.index.read(slot)
        self.volume.log(pack_record(RecordKind.REMOVE, tenant, key))
        self.index.remove(slot)
        self.volume.free(entry.extent, HEADER + entry.length)
        return True

    def expire(self, key: bytes, at_ms: int, *, tenant: int = 0) -> bool:
        """Set an expiry; barrier() makes that durable."""
        slot = self.index.find(tenant, key)
        if slot:
            self.volume.log(pack_record(RecordKind.EXPIRE, tenant, key, expires_at_ms=at_ms))
            self.index.set_expiry(slot, at_ms)
        return slot != 0

    def barrier(self, what: object) -> None:
        """Settle ``what`` when all changes so far are durable."""
        when_settled(self.volume.barrier(), lambda error: self.settled.append((what, error)))

    def entry(self, key: bytes, *, tenant: int = 0) -> IndexEntry | None:
        slot = self.index.find(tenant, key)
        return self.index.read(slot) if slot else None

    def names(self) -> dict[tuple[int, bytes], bytes]:
        """Return the texts of keys."""
        found: dict[tuple[int, bytes], bytes] = {}
        for slot in self.index.scan(ANY, 0, 1 << 20, 1 << 20)[1]:
            entry, name = self.index.read(slot), self.index.name(slot)
            if name is not None:
                found[entry.tenant, entry.key] = name
        return found

    def get(self, key: bytes, *, tenant: int = 0) -> bytes | None:
        """Return a value; None if it is absent or damaged."""
        entry = self.entry(key, tenant=tenant)
        if entry is None:
            return None
        pages = Pages(blocks_of(entry.length) * BLOCK_BYTES)
        ended: list[Operation] = []
        self.volume.read(entry.extent, 0, pages.size, pages.address, Priority.FOREGROUND, ended.append)
        self.until(lambda: ended)
        if ended[0].error is not None:
            return None
        value = pages.view[HEADER : HEADER + entry.length]
        first, count = object_units(entry.length, 0, entry.length)
        if check_object(pages.view, object_fields(entry), value, first, count) is not Result.OK:
            return None
        return bytes(value)

    def step(self) -> None:
        for call in self.volume.step():
            call()

    def until(self, condition: Callable[[], object]) -> None:
        """Drive the volume until a condition holds."""
        drive(self.step, condition)

    def drain(self) -> None:
        """Drive the volume until it is idle."""
        self.until(lambda: self.volume.idle)
        self.step()

    def keep(self, key: bytes, value: bytes, **how: Any) -> None:
        """Write a value and make it durable."""
        self.put(key, value, **how)
        self.drain()

    def snapshot(self) -> None:
        self.volume.snapshot()
        self.step()
        self.drain()

    def crashed(self, **how: bool) -> "Store":
        """Return the store after a power cut."""
        return Store(self.device.crash(**how), seed=self.seed + 1)

    def restarted(self) -> "Store":
        """Return the store after the process was killed."""
        return Store(self.device.restart(), seed=self.seed + 1)
