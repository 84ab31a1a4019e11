"""The pool: memory arenas and SSDs as one store (docs/pool.md).

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
from shadowserve.native import ANY
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.homes import Homes
from shadowserve.pool.opening import Found, Opened, open_devices, open_parts
from shadowserve.pool.reads import Reader, Told
from shadowserve.pool.reports import pool_statistics, tenant_statistics
from shadowserve.pool.scanning import Cursors, scan_keys
from shadowserve.pool.scrub import Scrubber
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import ENTRIES_PER_HOLD
from shadowserve.pool.values import Values
from shadowserve.pool.volume.changes import Ticket
from shadowserve.pool.volume.volume import Call
from shadowserve.pool.writes import Writer, joined

__all__ = ["Pool"]

_TURN_MS: Final = 100


class Pool(Values):
    """An :class:`Store` over memory and any number of devices, none included."""

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
        """Make a store that start() opens.

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
        """Return a started store with a lock of its own, for programs without a server.

        Raises:
            ConfigurationError: a device cannot be used.
        """
        store = cls(config, clock_ms=clock_ms)
        store.start(threading.Lock())
        return store

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Store.start`: opens the devices, recovers what is on them, measures their bandwidths."""
        self._lock = lock
        found, absent = open_devices(self._config) if self._devices is None else (self._devices(), [])
        opened = self._open_parts(found, absent)
        self._opened = opened
        self._core = opened.core
        self._core.ticks = self._ticks
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

    def descriptors(self) -> list[int]:
        """See :meth:`Store.descriptors`."""
        return [self._core.waker.descriptor, *(disk.volume.device.fileno() for disk in self._core.disks)]

    def poll(self) -> bool:
        """See :meth:`Store.poll`."""
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
        if self._core.heap is not None:
            self._core.heap.now_s = self._core.now_s()
        self._space.begin_hold()
        self._space.keep_headroom()
        self._end_pins()
        self._scrubber.turn(now_ms)
        return True

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Store.drain`."""
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
        """See :meth:`Store.close`. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._opened.close()

    # ---- Changing much

    def clear(self, tenant: int | None) -> None:
        """See :meth:`Store.clear`. Few entries go at once."""
        self._core.clear(tenant)
        if self._index.totals(ANY if tenant is None else tenant).objects <= self._space.left:
            self._space.left -= self._core.step_clears(ENTRIES_PER_HOLD)
        if self._core.clears.under_way:
            self._core.waker.wake()

    def barrier(self) -> Ticket | None:
        """See :meth:`Store.barrier`."""
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
        """See :meth:`Store.sweep`."""
        slots = self._index.expired(self._clock_ms(), keys_max)
        for slot in slots:
            entry = self._core.entry(slot)
            if entry is not None:
                self._core.expire(entry)
        return len(slots)

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """See :meth:`Store.scan`."""
        position, keys = scan_keys(self._core, tenant, self._cursors.position(cursor), count)
        return self._cursors.shown(position), keys

    def count(self, tenant: int) -> int:
        """See :meth:`Store.count`."""
        living = self._core.clears.count(tenant) if self._core.clears.under_way else None
        return self._index.totals(tenant).objects if living is None else living

    def statistics(self, tenant: int | None = None) -> Statistics:
        """See :meth:`Store.statistics`."""
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
