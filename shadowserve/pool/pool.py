"""What is asked of a pool, and what pools over devices and those of memory alone do alike (docs/pool.md).

What happens when is told by the parts: ``homes`` where an object goes, ``space`` what goes for it, ``writes`` and
``reads`` how bytes travel, ``volume`` what survives, ``scrub`` who looks after what nobody asks for.
"""

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, Self

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError
from shadowserve.native import ANY
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.core import Core
from shadowserve.pool.entries import Entry
from shadowserve.pool.homes import Homes
from shadowserve.pool.keys import ParsedKey
from shadowserve.pool.next_use import NextUse
from shadowserve.pool.opening import Found, Opened, open_devices, open_parts
from shadowserve.pool.reads import Reader, Told
from shadowserve.pool.reports import pool_statistics, tenant_statistics
from shadowserve.pool.scanning import Cursors, scan_keys
from shadowserve.pool.scrub import Scrubber
from shadowserve.pool.space import Quota
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address, Below, Item, Lease, PinnedEntries
from shadowserve.pool.volume.changes import BusyError, Ticket
from shadowserve.pool.volume.volume import Call
from shadowserve.pool.writes import Writer, joined

_TURN_MS: Final = 100
WRITABLE_SHARE: Final = 2
"""Of the memory, at most a half receives values and waits to be written: the other half is for readers."""


class Pool(ABC):
    """A store: it maps keys to :class:`Item` within budgets, and knows nothing of connections or commands.

    A key comes with its tenant's id (:data:`Address`): whoever serves several chooses it for them, so that another
    tenant's key is another key. Absent and expired are the same to every method.

    All methods but start(), poll(), drain(), close() and descriptors() are called with the pool's lock held, and never
    wait for a device; what takes longer comes later: a read through its callback, a write's durability through its
    :class:`Ticket`, room for more through ``ready`` and :class:`BusyError`. Nor does a method take longer as more is
    stored: what concerns many entries is done :data:`ENTRIES_PER_HOLD` at a time, the rest in poll(), which gives the
    lock up in between. Callbacks are called once, from any thread, without the lock; those of read() may also come
    inside the call.

    Eviction takes the least recently used (or what the policy takes for it) with these rules: a tenant beyond its own
    quota evicts its own entries only; beyond the whole budget, whoever uses most of it gives first. An entry with
    present children (entries put with its name as ``parent``) never goes before them, unless these are pinned and
    nothing else is left; a pinned one never goes before its pin ends.

    Every kind of pool passes ``tests/pool/store_conformance.py``.
    """

    core_class: ClassVar[type[Core]]
    client = 0
    """Who calls, set with the lock held: a tenant's clients have turns in the tier below."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        devices: Callable[[], Found] | None = None,
        budget_bytes: int | None = None,
        below: Below | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        seed: int | None = None,
        measure: bool = True,
        ticks: Callable[[], int] = time.perf_counter_ns,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Make what start() opens.

        Args:
            config: of the storage node.
            devices: opens devices in place of those that ``config`` names; for simulation.
            budget_bytes: of all objects; None for what devices, or without them memory, have room for.
            below: has what this pool does not have any more.
            clock_ms: Unix time.
            seed: of the index; by default random.
            measure: whether to measure bandwidths; else all are the same but for configured ones.
            ticks: clock of the counters of time, in ns.
            entropy: gives random bytes.
        """
        self._config = config
        self._devices = devices
        self._budget_bytes = budget_bytes
        self._below = below
        self._clock_ms = clock_ms
        self._entropy = entropy
        self._open_parts = partial(
            open_parts,
            config,
            core_class=self.core_class,
            clock_ms=clock_ms,
            ticks=ticks,
            seed=seed,
            measure=measure,
            entropy=entropy,
        )
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
        """Return a started pool with a lock of its own, for programs without a server.

        Raises:
            ConfigurationError: a device cannot be used.
        """
        pool = cls(config, clock_ms=clock_ms)
        pool.start(threading.Lock())
        return pool

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """Begin; before any other call, without the lock. ``lock`` is the node's, for poll() and threads to take.

        Raises:
            ConfigurationError: a device or folder cannot be used.
        """
        self._lock = lock
        found, absent = open_devices(self._config) if self._devices is None else (self._devices(), [])
        opened = self._open_parts(found, absent)
        self._opened = opened
        self._core = opened.core
        self._index = opened.core.index
        self._space = opened.space
        if self._budget_bytes is not None:
            self._space.budget_bytes = self._budget_bytes
        self._homes: Homes = opened.homes
        self._reader = Reader(opened.core, opened.space)
        self._writer = Writer(opened.core)
        self._scrubber = Scrubber(opened.core, self._config.scrub_bytes_per_s)
        self._tenants = opened.tenants
        self._cursors = Cursors(self._entropy(16))
        if self._below is not None:
            self._space.held_back = self._below.holds_back
            self._below.start(self, lock)

    def descriptors(self) -> list[int]:
        """Return what to wait for: poll() is called when one of them is readable. After start(), always the same."""
        return [self._core.waker.descriptor, *(disk.volume.device.fileno() for disk in self._core.disks)]

    def poll(self) -> bool:
        """Deal with what devices have completed. Called without the lock, from the one thread that drives the store.

        It comes when a descriptor is readable and at least every 100 ms.

        Returns:
            Whether it has left something undone so that others get the lock: it is called again a moment later.
        """
        lock, core, reader = self._lock, self._core, self._reader
        assert lock is not None, "start() comes first"
        core.waker.reset()
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
        self._core.turn()
        self._space.waits_below = False
        self._homes.update()
        self._space.begin_hold()
        self._space.keep_headroom()
        self._end_pins()
        self._scrubber.turn(now_ms)
        return True

    def drain(self, timeout_s: float) -> None:
        """Make everything durable and leave what makes the next start quick; no calls but poll()'s own come any more.

        Called without the lock, from the thread that called poll(), which this does for itself from now on. It returns
        within ``timeout_s`` whatever devices do.
        """
        ends = time.monotonic() + timeout_s
        self._drain_until(ends, lambda: not self.busy)
        if (below := self._below) is not None:
            below.hurry()
            self._drain_until(ends, lambda: below.idle)
        lock = self._lock
        assert lock is not None
        with lock:
            waiting = self.barrier()
            for disk in self._core.disks:
                disk.log_write_budget()
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
        """Give everything back; from the same thread, after drain() or without it (then as after a crash)."""
        if not self._closed:
            self._closed = True
            if self._below is not None and self._lock is not None:
                self._below.close()
                with self._lock:
                    """Whoever of it had the lock before close() is done with this pool."""
            self._opened.close()
            if self._below is not None:
                self._below.join()

    # ---- Reading

    @abstractmethod
    def get(self, address: Address) -> Item | None:
        """Return the item of ``address`` and count this as a use of it; None if absent."""

    @abstractmethod
    def peek(self, address: Address) -> Item | None:
        """Return the item of ``address`` without counting this as a use."""

    @abstractmethod
    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """Bring the bytes ``[start, end)`` of an item whose value is None, 0 <= start < end <= length.

        Whatever happens to the entry meanwhile, ``done`` gets what the item's value was, or None: the bytes are not to
        be had (a device error, a failed check); the store has counted why and dropped the entry. Never wrong bytes.
        Never refused: a store that can only do so many at a time lets the others wait.
        """

    def expected_s(self, size: int) -> float | None:
        """Return how many seconds cold items of so many bytes are expected to take, asked for now; None: none is."""
        return None if self._below is None else self._below.expected_s(size)

    def hold(self, item: Item) -> None:
        """Keep the bytes of an item with a value valid, and counted, until as many calls of release()."""
        assert item.kept is not None
        item.kept.users += 1

    @abstractmethod
    def release(self, item: Item) -> None:
        """Undo one hold()."""

    # ---- Writing

    @abstractmethod
    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """Return a writable buffer to receive a value of ``size`` bytes in, which put() then takes.

        None: there is no room now; ``ready`` is called when to try again.

        Raises:
            MemoryError: there will never be.
        """

    @abstractmethod
    def discard(self, buffer: memoryview) -> None:
        """Take a buffer of allocate() back unless put() has taken it; its user is done with it in either case."""

    @abstractmethod
    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """Store a value in place of what is there, evicting others if need be; a pin goes with the old.

        The store keeps ``value`` itself: the caller does not change it afterwards. It can be read at once.

        Args:
            address: where to.
            value: what.
            head_bytes: length of the record's head, 0 if the value is no record.
            expires_at_ms: Unix time in milliseconds, or None.
            parent: the name (32 bytes) of the chunk before this one, of the same tenant; empty for none.

        Returns:
            None if it is as durable as this store makes it, and the record that it replaces is gone from the tier
            below; else a ticket: settled when that is so, or with an error. An entry that failed here is then gone.

        Raises:
            OutOfBudgetError: it does not fit; nothing has changed.
            BusyError: too many writes are under way, or more has to be evicted than one hold of the lock does; some
                may have been. Else nothing has changed.
        """

    @abstractmethod
    def settling(self, address: Address) -> Ticket | None:
        """Return the ticket of the entry of ``address`` while it is not settled: its value may yet be lost."""

    def _find_below(self, address: Address) -> Item | None:
        """Return the item of what is not here but in the tier below."""
        return None if self._below is None else self._below.find(address)

    def _present(self, parsed: ParsedKey) -> Entry | None:
        found = self._index.get(parsed[0], parsed[1])
        return None if found is None else self._unless_cleared(Entry(*found))

    def _unless_cleared(self, entry: Entry) -> Entry | None:
        """Return an entry; None for what was cleared, which then goes at once."""
        if self._core.clears.under_way and self._core.clears.covers(entry.tenant, entry.generation):
            self._core.forget(entry)
            return None
        return entry

    def _entered(self, tenant: int, length: int, head_bytes: int, *, is_new: bool) -> None:
        """Count an entry that the index has been given."""
        core = self._core
        if head_bytes:
            for counters in core.counters.of(tenant):
                counters.record_bytes += length
        if is_new and core.clears.under_way:
            core.clears.count_change(tenant, 1)
        core.usage_ranking.note(tenant)

    def _put_below(self, address: Address, size: int, head_bytes: int, expires: bool, parent: bytes) -> Ticket | None:
        """Give the tier below a value; return a ticket if the client has to wait for it."""
        if self._below is None:
            return None
        return self._below.stored(address, head_bytes=head_bytes, expires=expires, parent=parent, length=size)

    def _busy_error(self, why: str) -> BusyError:
        self._core.counters.busy_writes += 1
        again = Ticket()
        self._busy.append(again)
        self._free_blocks = self._count_free_blocks()
        self._core.waker.wake()
        return BusyError(f"too many writes are under way: {why}", again)

    # ---- Changing

    @abstractmethod
    def _entry_of(self, address: Address) -> Entry | None:
        """Return the entry of a client's key, unless it has expired, which removes it."""

    def remove(self, address: Address) -> bool:
        """Remove ``address``; return whether it was there."""
        was_below = self._below is not None and self._below.removed(address)
        entry = self._entry_of(address)
        if entry is None:
            return was_below
        self._core.forget(entry)
        return True

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """Set or clear the expiry of ``address``; return whether it was there. A time in the past removes it.

        What expires leaves the tier below; where it was there alone, at once.
        """
        was_below = expires_at_ms is not None and self._below is not None and self._below.removed(address)
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
        """Keep ``address`` from eviction until then (Unix time; 0 or the past unpins); return whether it was there.

        Raises:
            PinShareError: its tenant, or all together, would have too much pinned; nothing has changed.
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
        """Who waits for what, which goes after all else. Keys are :func:`parse_key`'s."""
        return self._core.next_use

    def unpin_some(self, tenant: int | None) -> int:
        """Unpin up to :data:`ENTRIES_PER_HOLD` entries of a tenant, or of all; return how many these were."""
        some = self._core.pins.some(tenant, ENTRIES_PER_HOLD)
        for _, slot in some:
            entry = self._core.entry(slot)
            assert entry is not None, "a pin outlived its entry"
            self._pin(entry, 0)
        return len(some)

    def pinned(self, tenant: int) -> PinnedEntries:
        """Return what a tenant has pinned."""
        quota_bytes, budget_bytes = self._space.bounds(tenant)
        return self._core.pins.entries(tenant, quota_bytes=quota_bytes, budget_bytes=budget_bytes)

    def pinning_tenants(self, count_max: int) -> list[int]:
        """Return ids of some tenants that have pinned something."""
        return self._core.pins.tenants(count_max)

    def _end_pins(self) -> None:
        """Let objects take part again whose pins have ended."""
        now_ms = self._clock_ms()
        for _ in range(ENTRIES_PER_HOLD):
            ended = self._core.pins.ended(now_ms)
            if ended is None:
                return
            tenant, slot = ended
            self._core.pins.drop(tenant, slot)
            self._core.index.pin(slot, 0)

    def set_pin_shares(self, of_tenant: float, of_all: float) -> None:
        """Bound what pins may take: shares of a tenant's quota (of the budget without one), and of the budget.

        What is pinned already stays so. Without a call both are 1.
        """
        self._core.pins.of_tenant, self._core.pins.of_all = of_tenant, of_all

    def clear(self, tenant: int | None) -> None:
        """Remove everything of a tenant, or of all: at once nobody finds it any more, and by and by it is gone."""
        self._core.clear(tenant)
        if self._below is not None:
            self._below.cleared(tenant)
        if self._index.totals(ANY if tenant is None else tenant).objects <= self._space.left:
            self._space.left -= self._core.step_clears(ENTRIES_PER_HOLD)
        if self._core.clears.under_way:
            self._core.waker.wake()

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when every remove, set_expiry, pin and clear so far is durable; None if all are.

        It settles with an error when one of them could not be written. What was cleared is then gone.
        """
        if (refusal := self._core.refusal()) is not None:
            return self._writer.refused(refusal)
        below = None if self._below is None else self._below.barrier()
        if any(disk.log.is_pending for disk in self._core.disks):  # some are not even in a log
            ticket = Ticket()
            self._barriers.append(ticket)
            self._core.waker.wake()
            return joined((ticket, below))
        return joined((self._durable(), below))

    def _durable(self) -> Ticket | None:
        """Return a ticket for what is in the logs. The volumes' own settle in poll(), like ours."""
        return joined(disk.log.barrier() for disk in self._core.disks)

    def _pass_barriers(self) -> None:
        """Go on with barriers that waited for room in a log."""
        if not self._barriers or any(disk.log.is_pending for disk in self._core.disks):
            return
        waiting = self._durable()
        for ticket in self._barriers:
            if waiting is None:
                self._writer.settle_later(ticket)
            else:
                waiting.then(partial(self._writer.settle_later, ticket))
        self._barriers.clear()

    def sweep(self, keys_max: int) -> int:
        """Remove at most ``keys_max`` expired entries that nobody asked for; return how many were looked at."""
        slots = self._index.expired(self._clock_ms(), keys_max)
        for slot in slots:
            entry = self._core.entry(slot)
            if entry is not None:
                self._core.expire(entry)
        return len(slots)

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and keys; as SCAN promises, whatever changes in between.

        A cursor depends on this tenant's keys alone, so that it tells nothing of others.
        """
        position, keys = scan_keys(self._core, tenant, self._cursors.position(cursor), count)
        return self._cursors.shown(position), keys

    def count(self, tenant: int) -> int:
        """Return a tenant's number of entries, expired ones that were not noticed yet included."""
        living = self._core.clears.count(tenant) if self._core.clears.under_way else None
        return self._index.totals(tenant).objects if living is None else living

    def tenant(self, name: str) -> int:
        """Return the id of a tenant, given out on first use and kept as long as the store keeps values; "" has 0."""
        return self._tenants.id_of(name)

    def tenants(self) -> Mapping[str, int]:
        """Return the ids of the tenants that have one, by their names."""
        return self._tenants.by_name()

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """Bound a tenant's bytes and keys, and its share below; None for no bound. Entries beyond it go soon."""
        if self._below is not None:
            self._below.set_quota(self._tenants.name_of(tenant), bytes_max, keys_max)
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
        """Change the budget. What is beyond it goes soon, as far as it may."""
        self._space.budget_bytes = budget_bytes
        self._bound()

    def follow(self, config: PoolConfig) -> None:
        """Take over what a new configuration says of memory, of devices' budgets, and of the scrub.

        Raises:
            ConfigurationError: it names a device that is not there.
        """
        disks = {disk.name: disk for disk in self._core.disks}
        present = set(disks).union(name for name, _ in self._opened.absent)
        unknown = [str(device.path) for device in config.devices if str(device.path) not in present]
        if unknown:
            raise ConfigurationError(f"there is no device {unknown[0]}; there are {sorted(present)}")
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
        """Change how much memory there may be."""

    def statistics(self, tenant: int | None = None) -> Statistics:
        """Return counters and sizes, of all or of one tenant."""
        keys = self._core.clears.count_all() if tenant is None else self.count(tenant)
        if tenant is None:
            found = pool_statistics(self._opened, self._reader, self._writer, self._peak_bytes)
            cold = None if self._below is None else self._below.statistics()
            return replace(
                found, keys=keys, cold=cold, scrub_passes=self._scrubber.rounds, scrub_rotten=self._scrubber.found
            )
        quota = self._space.quotas.get(tenant)
        budget = self._space.capacity_bytes
        if quota is not None and quota.bytes_max is not None:
            budget = quota.bytes_max
        return replace(tenant_statistics(self._core, tenant, budget), keys=keys)

    # ---- Those that wait

    def _may_receive(self, size: int) -> bool:
        """Return whether writers may take ``size`` bytes of memory more; one always may."""
        self._core.arenas.settle()
        under_way = self._core.arenas.lent_bytes + self._writer.bytes_under_way
        bound = min(self._config.write_bytes_under_way_max, self._core.arenas.size // WRITABLE_SHARE)
        return under_way == 0 or under_way + size <= bound

    def _take_ready(self) -> list[Callable[[], None]]:
        if not self._ready or not self._may_receive(0):
            return []
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _take_busy(self) -> list[Ticket]:
        """Return whose writes may be tried again: bytes have been written, or extents have become free."""
        full = self._writer.bytes_under_way >= self._config.write_bytes_under_way_max
        if not self._busy or full or self._space.waits_below:
            return []
        if self._count_free_blocks() <= self._free_blocks and any(disk.is_freeing for disk in self._core.disks):
            return []
        taken, self._busy = self._busy, []
        return taken

    def _count_free_blocks(self) -> int:
        return sum(disk.volume.free_blocks for disk in self._core.disks if disk.gone is None)
