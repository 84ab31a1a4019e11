"""The interface of a pool, and what pools of all kinds have in common (docs/design/pool.md)."""

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Final, Self

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError
from shadowserve.native import ANY
from shadowserve.pool.changes import REMOVED, STORED, Changes, Read
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.core import Core
from shadowserve.pool.entries import NAMED, Entry, ParsedKey
from shadowserve.pool.next_use import NextUse
from shadowserve.pool.opening import Found, Opened, open_devices, open_parts
from shadowserve.pool.reads import Completion, Reader
from shadowserve.pool.scanning import Cursors, scan_keys
from shadowserve.pool.scrub import Scrubber
from shadowserve.pool.space import Quota
from shadowserve.pool.statistics import Statistics, entry_statistics, pool_statistics
from shadowserve.pool.types import ENTRIES_PER_HOLD, Address, Item, Lease, LowerTier, PinnedEntries
from shadowserve.pool.volume.tickets import Ticket, joined
from shadowserve.pool.volume.volume import Call
from shadowserve.pool.writes import WaitingWriters, Writer

_TURN_MS: Final = 100


class Pool(ABC):
    """A store: it maps keys to :class:`Item` within budgets, without any knowledge of connections or commands.

    An address (:data:`Address`) has the id of a tenant and a key of that tenant. An expired entry is absent.

    All methods but start(), poll(), drain(), close() and descriptors() are called with the pool's lock held and never
    wait for a device. Later results come by callback (reads), :class:`Ticket` (durability of writes), or ``ready`` and
    :class:`BusyError` (room). The time of a call does not grow with the number of entries: work on many entries is done
    :data:`ENTRIES_PER_HOLD` at a time, the rest in poll(). Each callback is called once, from any thread, without the
    lock; callbacks of read() also inside the call.

    Evicted is the least recently used entry (or the one that the policy chooses). A tenant beyond its quota evicts its
    own entries only; beyond the budget, the tenant that uses most evicts first. An entry is evicted after its children
    (put with its name as ``parent``), unless they are pinned and nothing else is left; a pinned one never.
    Every kind of pool passes ``tests/pool/store_conformance.py``.
    """

    core_class: ClassVar[type[Core]]
    client = 0
    """The caller's number, set with the lock held: the lower tier serves the clients of a tenant in turn."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        devices: Callable[[], Found] | None = None,
        budget_bytes: int | None = None,
        lower_tier: LowerTier | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        seed: int | None = None,
        measure: bool = True,
        ticks: Callable[[], int] = time.perf_counter_ns,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Prepare a pool; start() opens it.

        Args:
            devices: Opens other devices than those of ``config``; for simulation.
            budget_bytes: Most bytes of all objects; None for what devices, or memory without devices, have room for.
            measure: Measure bandwidths at the start; otherwise devices without a configured bandwidth are equal.
            ticks: Clock of the counters of time, in ns.
        """
        self._config = config
        self._lower_tier = lower_tier
        self._clock_ms = clock_ms

        def open_pool() -> Opened:
            found, absent = open_devices(config) if devices is None else (devices(), [])
            opened = open_parts(
                config,
                found,
                absent,
                core_class=self.core_class,
                clock_ms=clock_ms,
                ticks=ticks,
                seed=seed,
                measure=measure,
                entropy=entropy,
            )
            if budget_bytes is not None:
                opened.space.budget_bytes = budget_bytes
            self._cursors = Cursors(entropy(16))
            return opened

        self._open = open_pool
        self._opened: Opened
        self._lock: threading.Lock | None = None
        self._next_turn_ms = 0
        self._peak_bytes = 0
        self._closed = False

    @classmethod
    def open(cls, config: PoolConfig, clock_ms: Callable[[], int] = wall_clock_ms) -> Self:
        """Return a started pool with a lock of its own, for programs without a server.

        Raises:
            ConfigurationError: A device cannot be used.
        """
        pool = cls(config, clock_ms=clock_ms)
        pool.start(threading.Lock())
        return pool

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """Open the pool, before any other call and without the lock. poll() and the pool's threads take ``lock``.

        Raises:
            ConfigurationError: A device or folder cannot be used.
        """
        self._lock = lock
        opened = self._opened = self._open()
        core = self._core = opened.core
        self._index = core.index
        self._space = opened.space
        self._reader = Reader(core, opened.space)
        self._writer = Writer(core)
        self._waiting = WaitingWriters(core, self._writer, self._config.write_bytes_under_way_max)
        self._scrubber = Scrubber(core, self._config.scrub_bytes_per_s)
        if self._lower_tier is not None:
            self._space.held_back = self._lower_tier.holds_back
            self._lower_tier.start(self, lock)

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait for: poll() is due when one is readable. They never change after start()."""
        return [self._core.waker.descriptor, *(disk.volume.device.fileno() for disk in self._core.disks)]

    def poll(self) -> bool:
        """Process completions of devices, and all work that is due. Called without the lock, by one thread.

        Called when a descriptor is readable, and at least every 100 ms. With the lock, completions are taken, and reads
        that their device has found sound are finished. If there is more work, :meth:`_run_turn` does it. Last, some
        cleared entries, and some beyond a lowered quota or budget, are removed.

        Returns:
            True if work is left: call poll() again a moment later, so that others get the lock in between.
        """
        lock, core, reader = self._lock, self._core, self._reader
        assert lock is not None, "start() comes first"
        core.waker.reset()
        completions: list[Completion] = []
        reading = reader.under_way > 0
        with lock:
            began, now_ms = core.ticks(), self._clock_ms()
            calls = core.step_disks(now_ms)
            stepped = core.ticks()
            reader.take_ended(completions)
            if reading:
                core.counters.submission_ns += stepped - began
                core.counters.grouping_ns += core.ticks() - stepped
            has_work = self._has_work(now_ms)
        for done, lease in completions:
            done(lease)
        if calls or has_work:
            self._run_turn(lock, calls)
        return self._trim(lock)

    def _has_work(self, now_ms: int) -> bool:
        """Return whether more is due than completing sound reads."""
        waiting = self._waiting or self._space.wants_poll or self._reader.wants_poll
        more = self._writer.has_more or self._reader.unverified or self._scrubber.has_read
        return bool(waiting or more or self._is_turn_due(now_ms))

    def _run_turn(self, lock: threading.Lock, calls: list[Call]) -> None:
        """Verify and seal without the lock; then finish, evict and scrub with it; then tell clients without it."""
        reader, writer, scrubber = self._reader, self._writer, self._scrubber
        for call in calls:
            call()
        with lock:
            reads, scrubbed, unsealed = reader.take_unverified(), scrubber.take_read(), writer.take_unsealed()
        # Checksums take long: without the lock.
        reader.verify(reads)
        scrubber.verify(scrubbed)
        writer.seal(unsealed)
        completions: list[Completion] = []
        with lock:
            began, reading = self._core.ticks(), reader.under_way > 0
            # Where only sound reads have ended, there is nothing to write and no memory has become free.
            changed = bool(scrubbed or len(writer) or writer.has_barriers) or any(read.failure for read in reads)
            reader.finish(reads, completions)
            scrubber.finish(scrubbed)
            calls = []
            if changed:
                writer.submit(unsealed)
                calls = self._core.step_disks(self._clock_ms())
                writer.finish()
            self._core.arenas.settle()
            changed |= self._do_periodic_work() | self._space.wants_poll | reader.wants_poll
            self._space.wants_poll = False
            if reading:
                self._core.counters.grouping_ns += self._core.ticks() - began
            if changed:
                reader.pump()
            retried = [] if self._space.waits_for_lower_tier else self._waiting.take_busy()
            settled = [*writer.take_settled(), *((ticket, None) for ticket in retried)]
            ready = self._waiting.take_ready()
            if writer.waiting or reader.has_ended:
                self._core.waker.wake()
        for call in calls:
            call()
        for done, lease in completions:
            done(lease)
        for ticket, error in settled:
            ticket.settle(error)
        for callback in ready:
            callback()

    def _trim(self, lock: threading.Lock) -> bool:
        core, space = self._core, self._space
        if not (core.clears.under_way or space.is_beyond):
            return False
        with lock:
            space.begin_hold()
            if core.clears.under_way:
                space.evictions_left -= core.step_clears(ENTRIES_PER_HOLD)
            space.trim()
            return core.clears.under_way or space.is_beyond

    def _is_turn_due(self, now_ms: int) -> bool:
        return now_ms >= self._next_turn_ms or now_ms <= self._next_turn_ms - 10 * _TURN_MS

    def _do_periodic_work(self) -> bool:
        """Do the work of every 100 ms, if it is due; return whether it was."""
        now_ms = self._clock_ms()
        if not self._is_turn_due(now_ms):
            return False
        self._next_turn_ms = now_ms + _TURN_MS
        self._core.turn()
        self._space.waits_for_lower_tier = False
        self._opened.placement.update()
        self._space.begin_hold()
        self._space.keep_headroom()
        self._end_pins()
        self._scrubber.turn(now_ms)
        return True

    def drain(self, timeout_s: float) -> None:
        """Make everything durable, and write snapshots so that the next start is quick; within ``timeout_s``.

        Called without the lock, by the thread that has called poll(), which this calls itself from now on. No other
        calls come any more.
        """
        ends = time.monotonic() + timeout_s
        self._drain_until(ends, lambda: not self.busy)
        if (lower_tier := self._lower_tier) is not None:
            lower_tier.hurry()
            self._drain_until(ends, lambda: lower_tier.idle)
        lock = self._lock
        assert lock is not None
        with lock:
            barrier = self.barrier()
            for disk in self._core.disks:
                disk.log_write_budget()
                disk.volume.snapshot()
        self._drain_until(ends, lambda: barrier is None or barrier.settled)
        self._drain_until(ends, lambda: all(disk.gone or disk.volume.idle for disk in self._core.disks))

    def _drain_until(self, ends: float, condition: Callable[[], bool]) -> None:
        while not condition() and time.monotonic() < ends:
            self.poll()
            if not condition():
                select.select(self.descriptors(), [], [], _TURN_MS / 1000)

    @property
    def busy(self) -> bool:
        """True while bytes are on their way to a device, or back."""
        return bool(len(self._writer) or self._reader.under_way)

    def close(self) -> None:
        """Release everything, in the same thread. Without drain() before, the state is that after a crash."""
        if not self._closed:
            self._closed = True
            if self._lower_tier is not None and self._lock is not None:
                self._lower_tier.close()
                # A barrier: after it, no thread of the lower tier uses this pool any more.
                self._lock.acquire()
                self._lock.release()
            self._opened.close()
            if self._lower_tier is not None:
                self._lower_tier.join()

    # ---- Reading

    @property
    def memory_budget_bytes(self) -> int:
        """The configured memory at the start."""
        return int(self._config.memory_budget_bytes)

    @abstractmethod
    def get(self, address: Address) -> Item | None:
        """Return the item of ``address`` and count a use of it; None if absent."""

    @abstractmethod
    def peek(self, address: Address) -> Item | None:
        """Return the item of ``address`` without counting a use."""

    def read(
        self, item: Item, start: int, end: int, done: Callable[[Lease | None], None], *, in_parts: bool = False,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        """Read the bytes ``[start, end)`` of an item, 0 <= start < end <= length.

        ``in_parts``: the caller reads the item part by part, so no more than these bytes are read, and they are not
        kept. ``ahead``: the caller will read all of it, so it is read whole, from its beginning on, and these bytes are
        answered as soon as they are there. The caller checks what comes from a bucket ``in_parts``.
        ``done`` gets the item's bytes, whatever happens to the entry in the meantime; or None after a device error or a
        failed check, which the pool has counted and for which it has dropped the entry. Never wrong bytes. The read is
        never refused: it may wait for others.
        """
        if item.is_cold:
            assert self._lower_tier is not None
            self._lower_tier.read(item, start, end, done, in_parts=in_parts, ahead=ahead)
            return
        assert item.value is not None
        done(Lease(memoryview(item.value)[start:end]))

    def report_damage(self, item: Item) -> None:
        """Treat a cold item as damaged: its caller found wrong bytes, read ``in_parts``. Needs no lock."""
        assert self._lower_tier is not None
        self._lower_tier.report_damage(item)

    def expected_s(self, size: int) -> float | None:
        """Return the expected time to read ``size`` bytes from the lower tier now; None without a lower tier."""
        return None if self._lower_tier is None else self._lower_tier.expected_s(size)

    def hold(self, item: Item) -> None:
        """Keep the bytes of an item with a value valid, and counted, until release()."""
        assert item.kept is not None
        item.kept.users += 1

    @abstractmethod
    def release(self, item: Item) -> None:
        """Undo one hold()."""

    # ---- Writing

    @abstractmethod
    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """Return a writable buffer for a value of ``size`` bytes, to be passed to put().

        None: there is no memory now; ``ready`` is called when there may be some.

        Raises:
            MemoryError: There will never be as much.
        """

    @abstractmethod
    def discard(self, buffer: memoryview) -> None:
        """Return a buffer of allocate(), also after put(), which keeps what it needs of it."""

    @abstractmethod
    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        header_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """Store a value, evicting others if needed. It replaces the present value of the address and its pin.

        The pool keeps ``value`` itself, so the caller must not change it afterwards. The value can be read at once.

        Args:
            address: Tenant and key.
            value: The bytes.
            header_bytes: Length of the record's header; 0 if the value is no record.
            expires_at_ms: Unix time; None for no expiry.
            parent: Name (32 bytes) of the previous chunk, of the same tenant; empty for none.

        Returns:
            None if the value is as durable as this pool makes it, and no lower tier has a record that it replaces.
            Otherwise a ticket that settles when that is so, or with an error; then the entry is gone.

        Raises:
            OutOfBudgetError: The value does not fit; nothing has changed.
            BusyError: Too many writes are in progress, or more has to be evicted than one hold of the lock allows.
                Nothing has changed, except for evictions.
        """

    @abstractmethod
    def settling(self, address: Address) -> Ticket | None:
        """Return the ticket of the address's value while it is not settled: the value may still be lost."""

    def _find_in_lower_tier(self, address: Address) -> Item | None:
        return None if self._lower_tier is None else self._lower_tier.find(address)

    def _present(self, parsed: ParsedKey) -> Entry | None:
        found = self._index.get(parsed[0], parsed[1])
        return None if found is None else self._unless_cleared(Entry(*found))

    def _unless_cleared(self, entry: Entry) -> Entry | None:
        """Return an entry; None if it was cleared, after removing it."""
        if self._core.clears.under_way and self._core.clears.covers(entry.tenant, entry.generation):
            self._core.forget(entry)
            return None
        return entry

    def _entered(self, parsed: ParsedKey, length: int, header_bytes: int, old: Entry | None) -> None:
        core, (tenant, key, name) = self._core, parsed
        if core.changes is not None:
            was_chunk = old is not None and not old.fields.flags & NAMED
            if was_chunk != (name is None):
                core.changes.note(tenant, REMOVED if was_chunk else STORED, key)
        if header_bytes:
            for counters in core.counters.of(tenant):
                counters.record_bytes += length
        if old is None and core.clears.under_way:
            core.clears.count_change(tenant, 1)
        core.usage_ranking.note(tenant)

    def _put_in_lower_tier(
        self, address: Address, size: int, header_bytes: int, expires: bool, parent: bytes
    ) -> Ticket | None:
        if self._lower_tier is None:
            return None
        return self._lower_tier.stored(address, header_bytes=header_bytes, expires=expires, parent=parent, length=size)

    # ---- Changing

    @abstractmethod
    def _entry_of(self, address: Address) -> Entry | None:
        """Return the entry of an address; None if it is absent or has expired, which removes it."""

    def remove(self, address: Address) -> bool:
        """Remove an entry, here and in the lower tier; return whether it was present."""
        was_below = self._lower_tier is not None and self._lower_tier.removed(address)
        entry = self._entry_of(address)
        if entry is None:
            return was_below
        self._core.forget(entry)
        return True

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """Set or clear an expiry; return whether the entry was present. A time in the past removes the entry.

        A record with an expiry is removed from the lower tier, at once also where only the lower tier has it.
        """
        was_below = expires_at_ms is not None and self._lower_tier is not None and self._lower_tier.removed(address)
        entry = self._entry_of(address)
        if entry is None:
            return was_below
        if expires_at_ms is not None and expires_at_ms <= self._clock_ms():
            self._core.forget(entry)
            return True
        self._core.set_expiry(entry.slot, expires_at_ms)
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log.expire(entry.tenant, entry.key, expires_at_ms or 0)
        return True

    def pin(self, address: Address, until_ms: int) -> bool:
        """Protect an entry from eviction until a Unix time (0 or the past unpins); return whether it was present.

        Raises:
            PinShareError: Its tenant, or all tenants, would have too much pinned; nothing has changed.
        """
        entry = self._entry_of(address)
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
        self._core.pin(entry.slot, until_s)
        if until_s:
            self._core.pins.add(entry.tenant, entry.slot, entry.size, 1000 * until_s)
        else:
            self._core.pins.drop(entry.tenant, entry.slot)
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log.pin(entry.tenant, entry.key, until_s)

    @property
    def next_use(self) -> NextUse:
        """Entries that waiting requests need, which are evicted last. Its keys are those of :func:`parse_key`."""
        return self._core.next_use

    def unpin_some(self, tenant: int | None) -> int:
        """Unpin up to :data:`ENTRIES_PER_HOLD` entries of a tenant, or of all tenants; return their number."""
        some = self._core.pins.some(tenant, ENTRIES_PER_HOLD)
        for _, slot in some:
            entry = self._core.entry(slot)
            assert entry is not None, "a pin outlived its entry"
            self._pin(entry, 0)
        return len(some)

    def pinned(self, tenant: int) -> PinnedEntries:
        quota_bytes, budget_bytes = self._space.bounds(tenant)
        return self._core.pins.entries(tenant, quota_bytes=quota_bytes, budget_bytes=budget_bytes)

    def pinning_tenants(self, count_max: int) -> list[int]:
        return self._core.pins.tenants(count_max)

    def _end_pins(self) -> None:
        now_ms = self._clock_ms()
        for _ in range(ENTRIES_PER_HOLD):
            ended = self._core.pins.ended(now_ms)
            if ended is None:
                return
            tenant, slot = ended
            self._core.pins.drop(tenant, slot)
            self._core.index.pin(slot, 0)

    def set_pin_shares(self, of_tenant: float, of_all: float) -> None:
        """Limit pins: shares of a tenant's quota (without one, of the budget), and of the budget. Both begin as 1.

        Present pins stay.
        """
        self._core.pins.of_tenant, self._core.pins.of_all = of_tenant, of_all

    def log_changes(self, bytes_max: int) -> Changes:
        """Log from now on which chunk keys come and go, within ``bytes_max``; return the logs."""
        self._core.changes = Changes(bytes_max)
        return self._core.changes

    def read_changes(self, tenant: int, name: bytes, position: int) -> Read | None:
        """Return the changes of a tenant from a position of its log on; None without logs.

        When a device is lost, the log gets another name: its keys are found missing, and logged, one by one later.
        """
        gone = sum(disk.gone is not None for disk in self._core.disks)
        return None if self._core.changes is None else self._core.changes.read(tenant, name, position, gone)

    def clear(self, tenant: int | None) -> None:
        """Remove all entries of a tenant, or of all tenants. They are absent at once; poll() frees them."""
        self._core.clear(tenant)
        if self._lower_tier is not None:
            self._lower_tier.cleared(tenant)
        if self._index.totals(ANY if tenant is None else tenant).objects <= self._space.evictions_left:
            self._space.evictions_left -= self._core.step_clears(ENTRIES_PER_HOLD)
        if self._core.clears.under_way:
            self._core.waker.wake()

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when every remove, set_expiry, pin and clear so far is durable; None if all are.

        It settles with an error when one of them could not be written.
        """
        if (refusal := self._core.refusal()) is not None:
            return self._writer.refused(refusal)
        lower_tier = None if self._lower_tier is None else self._lower_tier.barrier()
        return joined((self._writer.barrier(), lower_tier))

    def sweep(self, keys_max: int) -> int:
        """Remove at most ``keys_max`` expired entries; return how many entries were examined."""
        slots = self._index.expired(self._clock_ms(), keys_max)
        for slot in slots:
            entry = self._core.entry(slot)
            if entry is not None:
                self._core.expire(entry)
        return len(slots)

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor (0 at the end) and some keys, with the guarantees of Redis' SCAN.

        A cursor depends on this tenant's keys alone, so it reveals nothing about other tenants.
        """
        position, keys = scan_keys(self._core, tenant, self._cursors.position(cursor), count)
        return self._cursors.shown(position), keys

    def count(self, tenant: int) -> int:
        """Return a tenant's number of entries, including those that have expired without notice."""
        living = self._core.clears.count(tenant) if self._core.clears.under_way else None
        return self._index.totals(tenant).objects if living is None else living

    def tenant(self, name: str) -> int:
        """Return the id of a tenant, assigned on first use and kept as long as the pool keeps values; "" has id 0."""
        return self._opened.tenants.id_of(name)

    def tenant_name(self, tenant: int) -> str | None:
        """Return the name of a tenant's id; None for an id that is not assigned."""
        return self._opened.tenants.name_of(tenant)

    def tenants(self) -> Mapping[str, int]:
        return self._opened.tenants.by_name()

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """Limit a tenant's bytes and keys, here and in the lower tier; None for no limit. Excess is evicted soon."""
        name = self.tenant_name(tenant)
        if self._lower_tier is not None and name is not None:
            self._lower_tier.set_quota(name, bytes_max, keys_max)
        if bytes_max is None and keys_max is None:
            self._space.quotas.pop(tenant, None)
        else:
            self._space.quotas[tenant] = Quota(bytes_max, keys_max)
            self._bound(tenant)

    def _bound(self, tenant: int | None = None) -> None:
        self._space.bound(tenant)
        if self._space.is_beyond:
            self._core.waker.wake()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; the excess is evicted soon, as far as it may be."""
        self._space.budget_bytes = budget_bytes
        self._bound()

    def follow(self, config: PoolConfig) -> None:
        """Apply a new configuration: memory, budgets of devices, and the scrub rate.

        Raises:
            ConfigurationError: It names a device that the pool does not have.
        """
        disks = {disk.name: disk for disk in self._core.disks}
        present = set(disks).union(name for name, _ in self._opened.absent)
        unknown = [str(device.path) for device in config.devices if str(device.path) not in present]
        if unknown:
            raise ConfigurationError(
                f"the pool has no device {unknown[0]}; it has {sorted(present)}. Restart the server to change devices"
            )
        self._bound_memory(int(config.memory_budget_bytes))
        self._bound()
        for device in config.devices:
            disk = disks.get(str(device.path))
            if disk is not None:
                self._space.set_device_budget(disk, device.bytes_max, device.objects_max)
                disk.write_budget.budget_bytes = device.write_bytes_per_day
        self._scrubber.bytes_per_s = int(config.scrub_bytes_per_s)

    @abstractmethod
    def _bound_memory(self, size: int) -> None:
        """Change the limit of memory."""

    def statistics(self, tenant: int | None = None) -> Statistics:
        keys = self._core.clears.count_all() if tenant is None else self.count(tenant)
        if tenant is None:
            found = pool_statistics(self._opened, self._reader, self._writer, keys, self._peak_bytes)
            cold = None if self._lower_tier is None else self._lower_tier.statistics()
            return replace(found, cold=cold, scrub_passes=self._scrubber.rounds, scrub_rotten=self._scrubber.found)
        quota_bytes, budget_bytes = self._space.bounds(tenant)
        return entry_statistics(self._core, tenant, keys, budget_bytes if quota_bytes is None else quota_bytes)
