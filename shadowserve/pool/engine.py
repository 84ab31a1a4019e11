"""The pool engine: memory arenas and SSDs as one store (docs/pool.md).

This is where its users meet the pool. What happens when is told by the parts: ``homes`` where an object goes,
``space`` what goes for it, ``writes`` and ``reads`` how bytes travel, ``volume`` what survives, ``scrub`` who looks
after what nobody asks for.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Self

from shadowserve.clock import wall_clock_ms
from shadowserve.native import ANY, NO_PARENT, IndexFlag
from shadowserve.pool.arena import BLOCK_BYTES, HEADER_BYTES, Buffer, object_blocks
from shadowserve.pool.bounds import Bounds
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.entries import MEMORY_ONLY, Entry, PoolItem
from shadowserve.pool.homes import Home, Homes
from shadowserve.pool.keys import ParsedKey, parse_key
from shadowserve.pool.opening import Found, Opened, open_devices, open_parts
from shadowserve.pool.reads import Reader, Told
from shadowserve.pool.reports import pool_statistics, tenant_statistics
from shadowserve.pool.scanning import Cursors, scan_keys
from shadowserve.pool.scrub import Scrubber
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address, Item, Lease
from shadowserve.pool.volume.changes import BusyError, OutOfBudgetError, Ticket
from shadowserve.pool.volume.volume import Call
from shadowserve.pool.writes import Writer, joined

__all__ = ["PoolEngine"]

_TURN_MS: Final = 100
_NAMED: Final = int(IndexFlag.NAMED)  # a flag's own operators are functions of Python
_WRITABLE_SHARE: Final = 2
"""Of the memory, at most a half receives values and waits to be written: the other half is for readers."""


class PoolEngine(Bounds):
    """An :class:`Engine` over memory and any number of devices, none included."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        devices: Callable[[], Found] | None = None,
        budget_bytes: int | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        seed: int | None = None,
        measure: bool = True,
        ticks: Callable[[], int] = time.perf_counter_ns,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Make an engine that start() opens.

        Args:
            config: of the storage node.
            devices: opens devices in place of those that ``config`` names; for simulation.
            budget_bytes: of all objects; None for what devices, or without them memory, have room for.
            clock_ms: Unix time.
            seed: of the index; by default random.
            measure: whether to measure bandwidths; else all are the same but for configured ones.
            ticks: clock of the counters of time, in ns.
            entropy: gives random bytes.
        """
        self._config = config
        self._devices = devices
        self._budget_bytes = budget_bytes
        self._clock_ms = clock_ms
        self._ticks = ticks
        self._entropy = entropy
        self._open_parts = partial(open_parts, config, clock_ms=clock_ms, seed=seed, measure=measure, entropy=entropy)
        self._lock: threading.Lock | None = None
        self._ready: deque[Callable[[], None]] = deque()
        self._busy: list[Ticket] = []
        self._free_blocks = 0
        self._barriers: list[Ticket] = []
        self._next_turn_ms = 0
        self._peak_bytes = 0
        self._closed = False
        self._opened: Opened

    @classmethod
    def open(cls, config: PoolConfig, clock_ms: Callable[[], int] = wall_clock_ms) -> Self:
        """Return a started engine with a lock of its own, for programs without a server.

        Raises:
            ConfigurationError: a device cannot be used.
        """
        engine = cls(config, clock_ms=clock_ms)
        engine.start(threading.Lock())
        return engine

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Engine.start`: opens the devices, recovers what is on them, measures their bandwidths."""
        self._lock = lock
        found, absent = open_devices(self._config) if self._devices is None else (self._devices(), [])
        opened = self._open_parts(found, absent)
        self._opened = opened
        self._core = opened.core
        self._core.ticks = self._ticks
        self._index = opened.core.index
        self._space = opened.space
        self._space.budget_bytes = self._budget_bytes
        self._homes: Homes = opened.homes
        self._reader = Reader(opened.core, opened.space)
        self._writer = Writer(opened.core)
        self._scrubber = Scrubber(opened.core, self._config.scrub_bytes_per_s)
        self._tenants = opened.tenants
        self._cursors = Cursors(self._entropy(16))

    def descriptors(self) -> list[int]:
        """See :meth:`Engine.descriptors`."""
        return [self._core.waker.descriptor, *(disk.volume.device.fileno() for disk in self._core.disks)]

    def poll(self) -> bool:
        """See :meth:`Engine.poll`."""
        lock, core, reader = self._lock, self._core, self._reader
        assert lock is not None, "start() comes first"
        core.waker.calm()
        tell: list[Told] = []
        reading = reader.under_way > 0
        with lock:
            began, now_ms = core.ticks(), self._clock_ms()
            calls = core.step_disks(now_ms)
            stepped = core.ticks()
            reader.take_ended(tell)
            if reading:
                core.counters.submission_ns += stepped - began
                core.counters.grouping_ns += core.ticks() - stepped
            more = self._has_more(now_ms)
        for done, lease in tell:
            done(lease)
        if calls or more:
            self._go_on(lock, calls)
        return self._work_on(lock)

    def _work_on(self, lock: threading.Lock) -> bool:
        """Go on with what takes long, in a hold of the lock of its own; return whether there is more."""
        core, space = self._core, self._space
        if not (core.clears.under_way or space.is_beyond):
            return False
        with lock:
            space.begin_hold()
            if core.clears.under_way:
                space.left -= core.step_clears(ENTRIES_PER_HOLD)
            space.trim()
            return core.clears.under_way or space.is_beyond

    def _has_more(self, now_ms: int) -> bool:
        """Return whether there is more to do than to hand on what devices have read and found sound."""
        waiting = self._barriers or self._busy or self._ready or self._space.wants_turn or self._reader.wants_turn
        more = self._writer.has_more or self._reader.unsure or self._scrubber.has_read
        return bool(waiting or more or self._is_turn(now_ms))

    def _go_on(self, lock: threading.Lock, calls: list[Call]) -> None:
        """Check reads that are not known to be sound, go on with writes, take a turn, tell those who wait."""
        core, reader, writer, scrubber = self._core, self._reader, self._writer, self._scrubber
        for call in calls:
            call()
        with lock:
            reads, scrubbed, unsealed = reader.take_unsure(), scrubber.take_read(), writer.take_unsealed()
        reader.verify(reads)
        scrubber.verify(scrubbed)
        writer.seal(unsealed)
        tell: list[Told] = []
        with lock:
            began, reading = core.ticks(), reader.under_way > 0
            # Where nothing but sound reads has ended, there is nothing to hand on, and no memory has become free.
            changed = bool(scrubbed or len(writer) or self._barriers) or any(read.failure for read in reads)
            reader.finish(reads, tell)
            scrubber.finish(scrubbed)
            calls = []
            if changed:
                writer.submit(unsealed)
                calls = core.step_disks(self._clock_ms())
                writer.finish()
                self._pass_barriers()
            core.arenas.settle()
            changed |= self._turn() | self._space.wants_turn | reader.wants_turn
            self._space.wants_turn = False
            if reading:
                core.counters.grouping_ns += core.ticks() - began
            if changed:
                reader.pump()
            settled = [*writer.take_settled(), *((ticket, None) for ticket in self._take_busy())]
            ready = self._take_ready()
            if writer.waiting or reader.has_ended:
                core.waker.wake()
        for call in calls:
            call()
        for done, lease in tell:
            done(lease)
        for ticket, error in settled:
            ticket.settle(error)
        for callback in ready:
            callback()

    def _is_turn(self, now_ms: int) -> bool:
        return now_ms >= self._next_turn_ms or now_ms <= self._next_turn_ms - 10 * _TURN_MS

    def _turn(self) -> bool:
        """Do what is to be done ten times a second; return whether it was time."""
        now_ms = self._clock_ms()
        if not self._is_turn(now_ms):
            return False
        self._next_turn_ms = now_ms + _TURN_MS
        self._homes.update()
        self._space.begin_hold()
        self._space.keep_headroom()
        self._end_pins()
        self._scrubber.turn(now_ms)
        return True

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Engine.drain`."""
        ends = time.monotonic() + timeout_s
        self._drain_until(ends, lambda: not self.busy)
        lock = self._lock
        assert lock is not None
        with lock:
            waiting = self.barrier()
            for disk in self._core.disks:
                disk.remember_wear()
                disk.volume.snapshot()
        self._drain_until(ends, lambda: waiting is None or waiting.settled)
        self._drain_until(ends, lambda: all(disk.gone or disk.volume.idle for disk in self._core.disks))

    def _drain_until(self, ends: float, condition: Callable[[], bool]) -> None:
        while not condition() and time.monotonic() < ends:
            self.poll()
            if not condition():
                select.select(self.descriptors(), [], [], _TURN_MS / 1000)

    @property
    def busy(self) -> bool:
        """Whether something is still on its way to a device, or back."""
        return bool(len(self._writer) or self._reader.under_way)

    def close(self) -> None:
        """See :meth:`Engine.close`. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._opened.close()

    # ---- Reading

    def get(self, address: Address) -> Item | None:
        """See :meth:`Engine.get`."""
        return self._find(address, use=True)

    def peek(self, address: Address) -> Item | None:
        """See :meth:`Engine.peek`."""
        return self._find(address, use=False)

    def _find(self, address: Address, *, use: bool) -> PoolItem | None:
        core = self._core
        began = core.ticks()
        core.counters.lookups += 1
        entry = self._entry(parse_key(address), core.now_s() if use else 0)
        if entry is None:
            core.counters.lookup_ns += core.ticks() - began
            return None
        if use:
            buffer = core.copies.get(entry.slot)
        else:
            buffer = core.copies.peek(entry.slot)
        if buffer is None:
            disk = core.disk_of(entry)
            if disk is None or disk.gone is not None:
                core.lose(entry, "device_gone" if disk is not None else "no_memory")
                return None
        elif use and entry.device == MEMORY_ONLY and core.admission.policy != "all":
            self._give_home(entry, buffer)
        core.counters.lookup_ns += core.ticks() - began
        return PoolItem(entry, buffer)

    def _entry(self, parsed: ParsedKey, now_s: int = 0) -> Entry | None:
        """Return the entry of a key, unless it has expired, which removes it. ``now_s`` as of :meth:`Index.get`."""
        found = self._index.get(parsed.tenant, parsed.key, now_s)
        if found is None:
            return None
        entry = self._unless_cleared(Entry(*found))
        # A chunk's key may be made from another key's digest, or the reverse.
        if entry is None or (entry.fields.flags & _NAMED == 0) != (parsed.name is None):
            return None
        expires_at_ms = entry.fields.expires_at_ms
        if expires_at_ms and expires_at_ms <= self._clock_ms():
            self._core.expire(entry)
            return None
        return entry

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """See :meth:`Engine.read`."""
        assert isinstance(item, PoolItem)
        buffer = self._core.copies.peek(item.entry.slot)
        if buffer is not None and self._core.is_current(item.entry):  # it has come since
            buffer.users += 1
            done(Lease(buffer.value(start, end), self._release, buffer))
            return
        self._reader.read(item.entry, start, end, done)

    def hold(self, item: Item) -> None:
        """See :meth:`Engine.hold`."""
        assert isinstance(item, PoolItem) and item.buffer is not None
        item.buffer.users += 1

    def release(self, item: Item) -> None:
        """See :meth:`Engine.release`."""
        assert isinstance(item, PoolItem) and item.buffer is not None
        self._release(item.buffer)

    def _release(self, buffer: Buffer) -> None:
        self._core.arenas.release(buffer)
        self._reader.pump()
        if self._ready or self._busy:
            self._core.waker.wake()

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """See :meth:`Engine.allocate`."""
        blocks = object_blocks(size)
        if blocks * BLOCK_BYTES > self._core.arenas.largest_bytes // _WRITABLE_SHARE:
            raise MemoryError(
                f"a value of {size} bytes is more than half of an arena; give memory_budget_bytes more for such values"
            )
        buffer = self._space.memory(blocks) if self._may_receive(blocks * BLOCK_BYTES) else None
        if buffer is None:
            self._ready.append(ready)
            if self._space.wants_turn:
                self._core.waker.wake()
            return None
        return self._core.arenas.lend(buffer, size)

    def discard(self, buffer: memoryview) -> None:
        """See :meth:`Engine.discard`."""
        self._core.arenas.end_loan(buffer)
        self._reader.pump()
        if self._ready:
            self._core.waker.wake()

    def _may_receive(self, size: int) -> bool:
        """Return whether writers may take ``size`` bytes of memory more; one always may."""
        self._core.arenas.settle()
        under_way = self._core.arenas.lent_bytes + self._writer.bytes_under_way
        bound = min(self._config.write_bytes_under_way_max, self._core.arenas.size // _WRITABLE_SHARE)
        return under_way == 0 or under_way + size <= bound

    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """See :meth:`Engine.put`."""
        core = self._core
        began = core.ticks()
        if (refusal := core.refusal()) is not None:  # after a restart, what was there before would be there again
            return self._writer.refused(refusal)
        parsed = parse_key(address)
        old = self._present(parsed)
        blocks = object_blocks(len(value))
        self._check_size(len(value), blocks)
        under_way = self._writer.bytes_under_way
        if under_way and under_way + blocks * BLOCK_BYTES > self._config.write_bytes_under_way_max:
            raise self._busy_error("as many bytes as write_bytes_under_way_max wait to be written")
        self._space.begin_hold()
        if not self._space.make_room_for(parsed.tenant, blocks * BLOCK_BYTES, old):
            raise self._busy_error("more has to be evicted than is at a time")
        buffer = core.arenas.lent(value) if isinstance(value, memoryview) else None
        if buffer is not None:
            buffer.users += 1
        else:
            buffer = self._space.memory(blocks, parent, parsed.key)
            if buffer is None:
                raise self._busy_error("all of the pool's memory is in use")
            buffer.view(HEADER_BYTES, HEADER_BYTES + len(value))[:] = value
            core.counters.copied_bytes += len(value)
        try:
            ticket = self._store(parsed, buffer, len(value), head_bytes, expires_at_ms, parent)
        except BaseException:
            core.arenas.release(buffer)
            raise
        core.counters.placement_ns += core.ticks() - began
        return ticket

    def _present(self, parsed: ParsedKey) -> Entry | None:
        found = self._index.get(parsed.tenant, parsed.key)
        return None if found is None else self._unless_cleared(Entry(*found))

    def _unless_cleared(self, entry: Entry) -> Entry | None:
        """Return an entry; None for what was cleared, which then goes at once."""
        if self._core.clears.under_way and self._core.clears.covers(entry.tenant, entry.generation):
            self._core.forget(entry)
            return None
        return entry

    def _check_size(self, length: int, blocks: int) -> None:
        if blocks * BLOCK_BYTES > self._core.arenas.largest_bytes or length >= 1 << 32:
            raise OutOfBudgetError(
                f"a value of {length} bytes does not fit the pool's memory; give memory_budget_bytes more"
            )

    def _busy_error(self, why: str) -> BusyError:
        self._core.counters.busy_writes += 1
        again = Ticket()
        self._busy.append(again)
        self._free_blocks = self._count_free_blocks()
        self._core.waker.wake()
        return BusyError(f"too many writes are under way: {why}", again)

    def _store(
        self, parsed: ParsedKey, buffer: Buffer, length: int, head_bytes: int, expires_at_ms: int | None, parent: bytes
    ) -> Ticket | None:
        """Make an entry of a value in memory, and begin to write it."""
        core = self._core
        tenant, key, name = parsed
        old = self._present(parsed)  # making room may have evicted it
        home = self._home(parsed, length, parent, old)
        if old is not None and not core.is_current(old):
            old = None  # and so has finding a home
        disk = home.disk
        generation = core.next_generation()
        try:
            slot = self._index.insert(
                tenant,
                key,
                device=MEMORY_ONLY if disk is None else disk.number,
                extent=home.extent,
                length=length,
                now_s=core.now_s(),
                head_length=head_bytes,
                name=name,
                flags=IndexFlag.RECORD if head_bytes else 0,
                expires_at_ms=expires_at_ms or 0,
                generation=generation,
                parent=parent or NO_PARENT,
            )
        except BaseException:
            if disk is not None:
                disk.free((home.extent, object_blocks(length) * BLOCK_BYTES))
            raise
        replaced, left = (None, []) if old is None else core.replace(old, disk)
        if head_bytes:
            for counters in core.counters.of(tenant):
                counters.record_bytes += length
        if old is None and core.clears.under_way:
            core.clears.count_change(tenant, 1)
        core.weigh(tenant)
        core.copies.keep(slot, buffer)
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        if disk is None:
            core.leave(tenant, key, left)
            return self._writer.memory_alone(slot, tenant, key)
        entry = Entry(slot, self._index.read(slot))
        return self._writer.begin(entry, disk, buffer, name, placed=home.placed, replaced=replaced, left=left)

    def _home(self, parsed: ParsedKey, length: int, parent: bytes, old: Entry | None) -> Home:
        core = self._core
        if not core.disks or not core.admission.admits(parsed.tenant, parsed.key):
            return Home(None, 0, True)
        home = self._homes.choose(length, parsed.tenant, parent, parsed.key, old)
        if home is not None:
            return home
        if self._space.left <= 0 or any(disk.is_freeing for disk in core.disks):
            raise self._busy_error("the devices are full, and what was evicted is not free yet")
        raise OutOfBudgetError(f"no device has room for {length} bytes, and nothing on them may be evicted")

    def _give_home(self, entry: Entry, buffer: Buffer) -> None:
        """Write an object that is in memory alone to a device: it was asked for."""
        fields = entry.fields
        parent = b"" if fields.parent == NO_PARENT else fields.parent
        if not self._may_receive(entry.size):
            return  # the next time that it is asked for
        home = self._homes.choose(entry.length, entry.tenant, parent, entry.key, None)
        if home is None or home.disk is None:
            return
        current = self._core.entry(entry.slot)
        if current is None or current.generation != entry.generation:  # making room has evicted it
            home.disk.free((home.extent, entry.size))
            return
        self._core.admission.admitted_later += 1
        self._index.insert(
            entry.tenant,
            entry.key,
            device=home.disk.number,
            extent=home.extent,
            length=entry.length,
            now_s=self._core.now_s(),
            head_length=fields.head_length,
            flags=fields.flags,
            expires_at_ms=fields.expires_at_ms,
            pinned_until_s=fields.pinned_until_s,
            generation=entry.generation,
            parent=fields.parent,
        )
        moved = Entry(entry.slot, self._index.read(entry.slot))
        name = self._index.name(entry.slot)
        self._writer.begin(moved, home.disk, buffer, name, placed=home.placed)

    def settling(self, address: Address) -> Ticket | None:
        """See :meth:`Engine.settling`."""
        entry = self._present(parse_key(address))
        writer = self._writer
        return None if entry is None else writer.ticket(entry.slot) or writer.sure(entry.tenant, entry.key)

    # ---- Changing

    def remove(self, address: Address) -> bool:
        """See :meth:`Engine.remove`."""
        entry = self._entry(parse_key(address))
        if entry is None:
            return False
        self._core.forget(entry)
        return True

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """See :meth:`Engine.set_expiry`."""
        entry = self._entry(parse_key(address))
        if entry is None:
            return False
        if expires_at_ms is not None and expires_at_ms <= self._clock_ms():
            self._core.forget(entry)
            return True
        self._index.set_expiry(entry.slot, expires_at_ms or 0)
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log_expiry(entry.tenant, entry.key, expires_at_ms or 0)
        return True

    def pin(self, address: Address, until_ms: int) -> bool:
        """See :meth:`Engine.pin`. The index counts in seconds: pins are rounded up."""
        entry = self._entry(parse_key(address))
        if entry is None:
            return False
        until_s = -(-until_ms // 1000) if until_ms > self._clock_ms() else 0
        if until_s:
            self._end_pins()
            quota_bytes, budget_bytes = self._space.bounds(entry.tenant)
            self._core.pins.check(
                entry.tenant, entry.slot, entry.size, quota_bytes=quota_bytes, budget_bytes=budget_bytes
            )
        self._pin(entry, until_s)
        return True

    def _pin(self, entry: Entry, until_s: int) -> None:
        self._index.pin(entry.slot, until_s)
        if until_s:
            self._core.pins.add(entry.tenant, entry.slot, entry.size, 1000 * until_s)
        else:
            self._core.pins.drop(entry.tenant, entry.slot)
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log_pin(entry.tenant, entry.key, until_s)

    def unpin_some(self, tenant: int | None) -> int:
        """See :meth:`Engine.unpin_some`."""
        some = self._core.pins.some(tenant, ENTRIES_PER_HOLD)
        for _, slot in some:
            entry = self._core.entry(slot)
            assert entry is not None, "a pin outlived its entry"
            self._pin(entry, 0)
        return len(some)

    def clear(self, tenant: int | None) -> None:
        """See :meth:`Engine.clear`. Few entries go at once."""
        self._core.clear(tenant)
        if self._index.totals(ANY if tenant is None else tenant).objects <= self._space.left:
            self._space.left -= self._core.step_clears(ENTRIES_PER_HOLD)
        if self._core.clears.under_way:
            self._core.waker.wake()

    def barrier(self) -> Ticket | None:
        """See :meth:`Engine.barrier`."""
        if (refusal := self._core.refusal()) is not None:
            return self._writer.refused(refusal)
        if any(disk.is_logging for disk in self._core.disks):  # some are not even in a log
            ticket = Ticket()
            self._barriers.append(ticket)
            self._core.waker.wake()
            return ticket
        return self._durable()

    def _durable(self) -> Ticket | None:
        """Return a ticket for what is in the logs. The volumes' own settle in poll(), like ours."""
        return joined(disk.barrier() for disk in self._core.disks)

    def _pass_barriers(self) -> None:
        """Go on with barriers that waited for room in a log."""
        if not self._barriers or any(disk.is_logging for disk in self._core.disks):
            return
        waiting = self._durable()
        for ticket in self._barriers:
            if waiting is None:
                self._writer.settle_later(ticket)
            else:
                waiting.then(partial(self._writer.settle_later, ticket))
        self._barriers.clear()

    def sweep(self, keys_max: int) -> int:
        """See :meth:`Engine.sweep`."""
        slots = self._index.expired(self._clock_ms(), keys_max)
        for slot in slots:
            entry = self._core.entry(slot)
            if entry is not None:
                self._core.expire(entry)
        return len(slots)

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """See :meth:`Engine.scan`."""
        position, keys = scan_keys(self._core, tenant, self._cursors.position(cursor), count)
        return self._cursors.shown(position), keys

    def count(self, tenant: int) -> int:
        """See :meth:`Engine.count`."""
        living = self._core.clears.count(tenant) if self._core.clears.under_way else None
        return self._index.totals(tenant).objects if living is None else living

    def _used_bytes(self) -> int:
        held = 0 if self._core.disks else self._core.arenas.held_bytes
        return self._index.totals().bytes + held

    def statistics(self, tenant: int | None = None) -> Statistics:
        """See :meth:`Engine.statistics`."""
        keys = self._core.clears.count_all() if tenant is None else self.count(tenant)
        if tenant is None:
            found = pool_statistics(self._opened, self._reader, self._writer, self._peak_bytes)
            return replace(found, keys=keys, scrub_passes=self._scrubber.rounds, scrub_rotten=self._scrubber.found)
        quota = self._space.quotas.get(tenant)
        budget = self._space.capacity_bytes
        if quota is not None and quota.bytes_max is not None:
            budget = quota.bytes_max
        return replace(tenant_statistics(self._core, tenant, budget), keys=keys)

    # ---- Those that wait

    def _take_ready(self) -> list[Callable[[], None]]:
        if not self._ready or not self._may_receive(0):
            return []
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _take_busy(self) -> list[Ticket]:
        """Return whose writes may be tried again: bytes have been written, or extents have become free."""
        if not self._busy or self._writer.bytes_under_way >= self._config.write_bytes_under_way_max:
            return []
        if self._count_free_blocks() <= self._free_blocks and any(disk.is_freeing for disk in self._core.disks):
            return []
        taken, self._busy = self._busy, []
        return taken

    def _count_free_blocks(self) -> int:
        return sum(disk.volume.free_blocks for disk in self._core.disks if disk.gone is None)
