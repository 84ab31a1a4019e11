"""Opening a pool: open the devices, recover their objects and tenants, map memory, measure bandwidths."""

import contextlib
import errno
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import ConfigurationError, DeviceError, NativeError, is_passing
from shadowserve.native import BlockAccess, Index, IndexPolicy, RecordFlag
from shadowserve.native import BlockDevice as NativeDevice
from shadowserve.pool.arena import Arenas, Registration
from shadowserve.pool.clears import SCAN_LINES, Clears
from shadowserve.pool.config import DeviceConfig, PoolConfig
from shadowserve.pool.core import Core, Waker
from shadowserve.pool.disk import Disk
from shadowserve.pool.interleaver import BUSY_DEPTH, BandwidthMeter
from shadowserve.pool.placement import Placement
from shadowserve.pool.space import Space
from shadowserve.pool.types import ENTRIES_PER_HOLD, ENTRY_OVERHEAD_BYTES, TENANTS_MAX
from shadowserve.pool.volume.block_reader import ANSWER_S, BlockReader, read_superblocks
from shadowserve.pool.volume.device import BlockDevice, wait_for_operations
from shadowserve.pool.volume.format import BLOCK_BYTES, FormatError
from shadowserve.pool.volume.formatting import check_empty, fit_file
from shadowserve.pool.volume.tickets import OutOfBudgetError
from shadowserve.pool.volume.volume import Volume


class Tenants:
    """Names and ids of tenants."""

    def __init__(self, disks: list[Disk]) -> None:
        """Recover names and ids from the devices.

        Where one was missing when another one logged a new tenant, the first one in the list counts.
        """
        self._disks = disks
        self._next_id = 1
        self._ids: dict[str, int] = {"": 0}
        self.conflicts: list[tuple[Disk, int]] = []  # devices and ids whose objects there belong to another tenant
        names = self._names = {0: ""}
        for disk in disks:
            for tenant, text in disk.volume.tenants.items():
                name = text.decode(errors="surrogateescape")
                known = names.get(tenant)
                if known is None and name not in self._ids:
                    names[tenant] = name
                    self._ids[name] = tenant
                elif known != name:
                    self.conflicts.append((disk, tenant))
        for disk in disks:
            for name, tenant in self._ids.items():
                if tenant:
                    disk.log.name_tenant(tenant, name)

    def by_name(self) -> Mapping[str, int]:
        return self._ids

    def name_of(self, tenant: int) -> str | None:
        return self._names.get(tenant)

    def ids(self) -> set[int]:
        return set(self._ids.values())

    def id_of(self, name: str) -> int:
        """Return a tenant's id; assign one if needed. OutOfBudgetError if all ids are assigned."""
        tenant = self._ids.get(name)
        if tenant is None:
            while self._next_id in self._names:
                self._next_id += 1
            tenant = self._next_id if self._next_id < TENANTS_MAX else 0
            if not tenant:
                raise OutOfBudgetError(f"there are {TENANTS_MAX} tenants already; use fewer tenants")
            self._ids[name] = tenant
            self._names[tenant] = name
            for disk in self._disks:
                disk.log.name_tenant(tenant, name)
        return tenant


_log = logging.getLogger(__name__)

_BYTES_PER_OBJECT: Final = 64 << 10
_OBJECTS_MIN: Final = 1024
_INDEX_OBJECTS_MAX: Final = 1 << 30
_CENSUS_OBJECTS: Final = 16_384
_READ_BYTES: Final = 1 << 20
_MEASURED_READS: Final = 64
_MEASURED_S: Final = 0.25
"""Size and time limit of a bandwidth measurement."""
_ACCESS: Final = {
    "auto": BlockAccess.AUTO,
    "nvme": BlockAccess.NVME,
    "io_uring": BlockAccess.URING,
    "threads": BlockAccess.THREADS,
}

Found = list[tuple[DeviceConfig, BlockDevice]]


def _begin_session(clock_ms: Callable[[], int], disks: Sequence[Disk]) -> None:
    """Begin a new session on all working devices: a period in which the same devices belong to the pool (``disk_log``).

    A device that is missing, or was given up, does not log what is removed or replaced from now on. When it returns,
    its log has an older session than the others', so its objects may be stale and are dropped. A session is a number
    (the time where possible, so the later one counts), a digest of its members and their earlier sessions, which
    distinguishes two pools that went on without each other, and the list of members, since a power cut may come when
    only some logs have it.
    """
    present = [disk for disk in disks if disk.gone is None]
    newest = max((disk.log.session for disk in disks), default=b"")
    members = b"".join(member for disk in present for member in disk.log.memberships)
    parts = hashlib.sha256(clock_ms().to_bytes(8, "big", signed=True) + members)
    number = max(int.from_bytes(newest[:8], "big") + 1, clock_ms())
    for disk in present:
        disk.log.enter_session(number.to_bytes(8, "big") + parts.digest()[:8] + members)


@dataclass(slots=True)
class Opened:
    """The parts of an open pool."""

    core: Core
    space: Space
    placement: Placement
    tenants: Tenants
    absent: list[tuple[str, str]]  # devices of the configuration that could not be opened, with the reason
    registration: Registration
    seconds: float  # duration of opening, measurements included

    def close(self) -> None:
        self.registration.stop()
        for disk in self.core.disks:
            disk.volume.device.close()
        for disk in self.core.disks:
            disk.volume.close()
        self.core.waker.close()


def open_devices(config: PoolConfig) -> tuple[Found, list[tuple[str, str]]]:
    """Open the devices of the configuration; return them, and those that cannot be opened with the reason.

    Raises:
        ConfigurationError: No device can be opened; or one is present but busy or not permitted (without it, all its
            objects would be dropped); or one has not the configured size.
    """
    found: Found = []
    absent: list[tuple[str, str]] = []
    with contextlib.ExitStack() as opened:
        for entry in config.devices:
            try:
                device = _open_device(entry, strict=config.strict_order)
            except (DeviceError, NativeError) as error:
                _log.error("device_not_opened device=%s error=%r", entry.path, str(error))
                if is_passing(error) or getattr(error, "errno", None) in (errno.EACCES, errno.EPERM):
                    raise ConfigurationError(
                        f"{error}. The device is there: the server does not start without it, which would drop all its "
                        "objects. Free the device, or take it out of 'devices'"
                    ) from error
                absent.append((str(entry.path), str(error)))
                continue
            opened.callback(device.close)
            access, size = device.access_name, device.capacity_bytes
            _log.info("device_opened device=%s access=%r bytes=%d", device.name, access, size)
            found.append((entry, device))
        if config.devices and not found:
            raise ConfigurationError("; ".join(reason for _, reason in absent))
        opened.pop_all()  # they stay open
    return found, absent


def _open_device(entry: DeviceConfig, *, strict: bool) -> NativeDevice:
    """Open a device. A file is created, or resized to the configured size."""

    def opened(size: int) -> NativeDevice:
        core = -1 if entry.core is None else entry.core
        return NativeDevice(entry.path, size=size, access=_ACCESS[entry.access], strict=strict, core=core)

    if entry.size is None:
        return opened(0)
    if entry.path.is_block_device() or entry.path.is_char_device():
        raise ConfigurationError(f"device {entry.path} is used whole: leave size out, or limit it with bytes_max")
    wanted_bytes = int(entry.size) // BLOCK_BYTES * BLOCK_BYTES
    try:
        is_there = entry.path.is_file() and entry.path.stat().st_size > 0
    except OSError:  # opening the file reports the error
        is_there = False
    return fit_file(entry.path, wanted_bytes, opened) if is_there else opened(wanted_bytes)


def open_parts(
    config: PoolConfig,
    found: Found,
    absent: list[tuple[str, str]],
    *,
    core_class: type[Core],
    clock_ms: Callable[[], int],
    ticks: Callable[[], int],
    seed: int | None,
    measure: bool,
    entropy: Callable[[int], bytes],
) -> Opened:
    """Recover the objects of the devices, map memory, and measure bandwidths.

    Raises:
        ConfigurationError: A device holds something else, or there is not as much memory.
    """
    began = time.monotonic()
    memory_bytes = int(config.memory_budget_bytes)
    arenas = Arenas(memory_bytes if found else 0, None if config.arena_nodes == "auto" else config.arena_nodes)
    disks: list[Disk] = []
    waker, begin_session = Waker(), partial(_begin_session, clock_ms, disks)
    recover = partial(_recover, found, waker.wake, begin_session, clock_ms, entropy)
    try:
        objects_max = _prepare(found, clock_ms, entropy)
        in_memory = memory_bytes // BLOCK_BYTES if found else config.objects_max or memory_bytes // ENTRY_OVERHEAD_BYTES
        objects_max = min(objects_max + max(in_memory, _OBJECTS_MIN), _INDEX_OBJECTS_MAX)
        stale: list[int] = []
        lost: dict[int, int] = {}
        while True:
            index = Index(objects_max, IndexPolicy[config.eviction.upper()], seed)
            clears = Clears(index)
            disks[:] = recover(clears, index, stale, lost)
            if stale or not (stale := _find_stale(disks)):
                break
            for disk in disks:
                disk.volume.close()
            index.close()
        memory = BandwidthMeter(config.memory_bandwidth)
        if measure and disks:
            _measure_all(memory, disks, arenas)
    except (FormatError, NativeError, DeviceError, OSError) as error:
        waker.close()
        for _, device in found:
            device.close()
        raise ConfigurationError(f"the pool cannot be opened: {error}") from error
    core = core_class(index, clears, arenas, disks, config.admission, waker, clock_ms, ticks)
    core.generation = max((disk.volume.generation_last for disk in disks), default=0)
    _count_entries(core)
    space = Space(
        core,
        budget_bytes=None if found else memory_bytes,
        objects_max=min(config.objects_max or objects_max, objects_max),
        memory_homes=config.memory_homes,
    )
    tenants = Tenants(sorted(disks, key=lambda disk: disk.number in stale))
    for tenant in tenants.ids():
        core.usage_ranking.note(tenant)
    _drop_foreign_objects(core, tenants)
    _count_losses(core, lost)
    for disk in disks:
        disk.log.log_recovered(index.superseded(disk.number), stale=disk.number in stale)
    begin_session()
    placement = Placement(core, space, [memory, *(disk.meter for disk in disks)], memory_homes=config.memory_homes)
    registration = Registration(arenas.arenas, [disk.volume.device for disk in disks])
    opened = Opened(core, space, placement, tenants, absent, registration, time.monotonic() - began)
    _log.info("pool_opened devices=%d objects=%d seconds=%.2f", len(disks), len(index), opened.seconds)
    return opened


def _prepare(found: Found, clock_ms: Callable[[], int], entropy: Callable[[int], bytes]) -> int:
    """Format empty devices, if no device holds foreign data; return the most objects that all devices may hold."""
    superblocks = [read_superblocks(BlockReader(device), device)[0] for _, device in found]
    pool_id = next((superblock.pool_id for superblock in superblocks if superblock is not None), None)
    for (_, device), superblock in zip(found, superblocks, strict=True):
        if superblock is None:
            check_empty(device)
    total = 0
    for (entry, device), superblock in zip(found, superblocks, strict=True):
        if superblock is None:
            pool_id = pool_id or entropy(16)
            wanted = entry.objects_max or max(device.capacity_bytes // _BYTES_PER_OBJECT, _OBJECTS_MIN)
            superblock = Volume.format(
                device, pool_id=pool_id, objects_max=wanted, force=True, clock_ms=clock_ms, entropy=entropy
            )
            _log.info("device_formatted device=%s objects_max=%d", device.name, wanted)
        total += superblock.layout.objects_max
    return total


def _recover(
    found: Found,
    wake: Callable[[], None],
    on_gone: Callable[[], None],
    clock_ms: Callable[[], int],
    entropy: Callable[[int], bytes],
    clears: Clears,
    index: Index,
    stale: Sequence[int],
    lost: dict[int, int],
) -> list[Disk]:
    """Open all volumes; drop the objects of ``stale`` ones, counted by tenant in ``lost``.

    Stale volumes come first: their records must not win over current ones, whatever their generations are.
    """
    volumes: dict[int, Volume] = {}
    pool_id: bytes | None = None
    for number in sorted(range(len(found)), key=lambda number: number not in stale):
        device = found[number][1]
        volume = Volume.open(
            device, index, number, pool_id=pool_id, living=clears.living, clock_ms=clock_ms, entropy=entropy
        )
        pool_id = volume.superblock.pool_id
        volumes[number] = volume
        if number in stale:
            _drop_stale(index, volume, lost)
    index.replayed()
    disks: list[Disk] = []
    for number, (entry, _) in enumerate(found):
        volume = volumes[number]
        volume.ready()
        _log_recovery(volume)
        disks.append(Disk(volume, entry, wake=wake, on_gone=on_gone))
    return disks


def _log_recovery(volume: Volume) -> None:
    name, report = volume.device.name, volume.report
    _log.info("volume_recovered device=%s objects=%d seconds=%.2f", name, report.objects, report.seconds)
    if report.grown_bytes:
        sizes = report.grown_bytes, volume.superblock.device_bytes, volume.objects_max
        _log.info("volume_grown device=%s more_bytes=%d bytes=%d objects_max=%d", name, *sizes)
    for note in report.notes:
        _log.warning("volume_note device=%s note=%r", name, note)
    if report.log_blocks_repaired:
        _log.warning("log_repaired device=%s blocks=%d", name, report.log_blocks_repaired)
    if report.dropped:
        lost = report.unproven, report.unnamed, report.overlapping
        _log.warning("objects_lost device=%s unproven=%d unnamed=%d overlapping=%d", name, *lost)


def _count_entries(core: Core) -> None:
    """Count what the index does not sum up: bytes of records, and pins."""
    now_s = core.now_s()
    for some in core.index.dump_all(_CENSUS_OBJECTS):
        heads = some[(some["flags"] & RecordFlag.RECORD) != 0]
        for tenant in np.unique(heads["tenant"]):
            lengths = heads["length"][heads["tenant"] == tenant]
            for counters in core.counters.of(int(tenant)):
                counters.record_bytes += int(lengths.sum(dtype=np.uint64))
        for pinned in some[some["pinned_until_s"] > now_s]:
            slot = core.index.find(int(pinned["tenant"]), pinned["key"].tobytes())
            entry = core.entry(slot)
            if entry is not None:
                core.pins.add(entry.tenant, slot, entry.size, 1000 * int(pinned["pinned_until_s"]))


def _drop_foreign_objects(core: Core, tenants: Tenants) -> None:
    """Drop objects whose tenant's id has another meaning on the other devices."""
    for disk, tenant in tenants.conflicts:
        cursor = -1
        while cursor:
            cursor, slots = core.index.scan(tenant, max(cursor, 0), ENTRIES_PER_HOLD, SCAN_LINES)
            for slot in slots:
                entry = core.entry(slot)
                if entry is not None and entry.device == disk.number:
                    core.drop_lost(entry, "reassigned")


def _find_stale(disks: list[Disk]) -> list[int]:
    """Return the devices that were missing in the last session: their objects may have been replaced since."""
    newest = max((disk.log.session for disk in disks), default=b"")
    return [disk.number for disk in disks if not disk.log.took_part(newest)]


def _drop_stale(index: Index, volume: Volume, lost: dict[int, int]) -> None:
    dropped = 0
    for tenant in (0, *volume.tenants):
        count = index.clear(tenant, volume.number)
        lost[tenant] = lost.get(tenant, 0) + count
        dropped += count
    dropped += index.clear(-1, volume.number)
    if dropped:
        _log.warning("device_was_away device=%s objects_dropped=%d", volume.device.name, dropped)


def _count_losses(core: Core, stale: dict[int, int]) -> None:
    """Count objects that recovery has dropped, and those of stale devices."""
    for tenant, count in stale.items():
        if count:
            core.count_lost("stale", tenant, count)
    for disk in core.disks:
        for reason, tenants in disk.volume.report.lost.items():
            for tenant, count in tenants.items():
                core.count_lost(reason, tenant, count)


def _measure_all(memory: BandwidthMeter, disks: list[Disk], arenas: Arenas) -> None:
    arenas.measure()
    memory.sample(sum(arena.bytes_per_s for arena in arenas.arenas))
    for disk in disks:
        _measure(disk, arenas)


def _measure(disk: Disk, arenas: Arenas) -> None:
    """Read from the device for a moment, several reads at a time; written before, if there is room: file systems and
    many SSDs do not read from the medium what was never written."""
    if disk.meter.fixed:
        return
    device = disk.volume.device
    size = min(_READ_BYTES, arenas.largest_bytes // (2 * BUSY_DEPTH), disk.capacity_bytes // 4)
    size = size // BLOCK_BYTES * BLOCK_BYTES
    buffer = arenas.take(2 * BUSY_DEPTH * size // BLOCK_BYTES) if size else None
    place = disk.volume.reserve(size) if size else None
    if buffer is None:
        return
    try:
        first = place if place is not None else disk.capacity_bytes // BLOCK_BYTES // 2
        if place is not None:
            _run(device, [_operation(OperationKind.WRITE, first, size, buffer.address)])
        reads, length, began = 0, 0, time.monotonic()
        while reads < _MEASURED_READS and time.monotonic() - began < _MEASURED_S:
            turn = [
                _operation(OperationKind.READ, first, size, buffer.address + number * size)
                for number in range(2 * BUSY_DEPTH)
            ]
            length += _run(device, turn)
            reads += len(turn)
        disk.meter.sample(length / max(time.monotonic() - began, 1e-6))
    except OSError as error:
        _log.warning("device_not_measured device=%s error=%r", disk.name, str(error))
    finally:
        arenas.release(buffer)
        if place is not None:
            disk.volume.free(place, size)


def _operation(kind: OperationKind, first: int, size: int, address: int) -> Operation:
    return Operation(kind, first * BLOCK_BYTES, size, address, Priority.FOREGROUND, lambda operation: None)


def _run(device: BlockDevice, operations: list[Operation]) -> int:
    """Run operations and wait for all of them; return their bytes, or raise the first error."""
    device.submit(operations)
    left = len(operations)
    while left:
        left -= len(wait_for_operations(device, ANSWER_S))
    for operation in operations:
        if operation.error is not None:
            raise operation.error
    return sum(operation.length for operation in operations)
