"""Values of a pool: how they are found, read, received, stored and changed."""

from collections import deque
from collections.abc import Callable
from typing import Final

from shadowserve.native import NO_PARENT, Index, IndexFlag
from shadowserve.pool import buffers
from shadowserve.pool.arena import BLOCK_BYTES, HEADER_BYTES, Buffer, object_blocks
from shadowserve.pool.bounds import Bounds
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.disk import Place
from shadowserve.pool.entries import MEMORY_ONLY, Entry, PoolItem
from shadowserve.pool.heap import ENTRY_OVERHEAD_BYTES, Heap, HeapItem
from shadowserve.pool.homes import Home, Homes
from shadowserve.pool.keys import ParsedKey, parse_key
from shadowserve.pool.reads import Reader
from shadowserve.pool.terms import Address, Item, Lease
from shadowserve.pool.volume.changes import BusyError, OutOfBudgetError, Ticket
from shadowserve.pool.writing import Left

__all__ = ["Values"]

_NAMED: Final = int(IndexFlag.NAMED)  # a flag's own operators are functions of Python
_RECORD: Final = int(IndexFlag.RECORD)
_USES_MAX: Final = 1_000
"""Uses of entries in memory that the index hears of together: 50 us."""
_WRITABLE_SHARE: Final = 2
"""Of the memory, at most a half receives values and waits to be written: the other half is for readers."""


class Values(Bounds):
    """The part of a pool that has to do with one value at a time."""

    _config: PoolConfig
    _index: Index
    _homes: Homes
    _reader: Reader
    _ready: deque[Callable[[], None]]
    _busy: list[Ticket]
    _free_blocks: int
    _peak_bytes: int

    # ---- Reading

    def get(self, address: Address) -> Item | None:
        """See :meth:`Store.get`."""
        heap = self._core.heap
        if heap is None:
            return self._find(address, use=True)
        if len(heap.uses) >= _USES_MAX:
            heap.count_uses()
        names = heap.tenants.get(address[0])
        item = None if names is None else names.get(address[1])
        if item is None or (item.expires_at_ms is not None and self._is_expired(item)):
            return None
        heap.uses.append(item.slot)
        return item

    def peek(self, address: Address) -> Item | None:
        """See :meth:`Store.peek`."""
        return self._find(address, use=False) if self._core.heap is None else self._item_of(self._core.heap, address)

    def _item_of(self, heap: Heap, address: Address) -> HeapItem | None:
        """Return the item of a key, unless it has expired, which removes it."""
        item = heap.find(address)
        return None if item is None or (item.expires_at_ms is not None and self._is_expired(item)) else item

    def _is_expired(self, item: HeapItem) -> bool:
        """Return whether an item's time has come, which removes it."""
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        self._core.expire(Entry(item.slot, self._index.read(item.slot)))
        return True

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

    def _entry_of(self, address: Address) -> Entry | None:
        """Return the entry of a client's key, unless it has expired, which removes it."""
        if self._core.heap is None:
            return self._entry(parse_key(address))
        item = self._item_of(self._core.heap, address)
        return None if item is None else self._core.entry(item.slot)

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
        """See :meth:`Store.read`."""
        if item.value is not None:
            done(Lease(memoryview(item.value)[start:end]))
            return
        assert isinstance(item, PoolItem)
        buffer = self._core.copies.peek(item.entry.slot)
        if buffer is not None and self._core.is_current(item.entry):  # it has come since
            buffer.users += 1
            done(Lease(buffer.value(start, end), self._release, buffer))
            return
        self._reader.read(item.entry, start, end, done)

    def hold(self, item: Item) -> None:
        """See :meth:`Store.hold`."""
        item.kept.users += 1

    def release(self, item: Item) -> None:
        """See :meth:`Store.release`."""
        if self._core.heap is not None:
            assert isinstance(item, HeapItem)
            self._core.heap.release(item)
        else:
            assert isinstance(item, PoolItem) and item.buffer is not None
            self._release(item.buffer)

    def _release(self, buffer: Buffer) -> None:
        self._core.arenas.release(buffer)
        self._reader.pump()
        if self._ready or self._busy:
            self._core.waker.wake()

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """See :meth:`Store.allocate`."""
        if self._core.heap is not None:
            if size + ENTRY_OVERHEAD_BYTES > self._space.capacity_bytes:
                raise MemoryError("command not allowed when used memory > 'maxmemory'.")
            return buffers.allocate(size)
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
        """See :meth:`Store.discard`."""
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
        """See :meth:`Store.put`."""
        core = self._core
        heap = core.heap
        if heap is not None:
            tenant, key = address
            names = heap.tenants.get(tenant)
            item = None if names is None else names.get(key)
            if item is not None and item.is_plain and not (item.users > 1 or head_bytes or parent or expires_at_ms):
                # Another value is much less work than another entry in its place.
                if item.length == len(value) or self._resize(heap, tenant, item, len(value)):
                    item.value = value
                    heap.uses.append(item.slot)
                    if len(heap.uses) >= _USES_MAX:
                        heap.count_uses()
                    return None
            self._put_in_heap(heap, address, item, HeapItem(key, value, head_bytes, expires_at_ms, parent), parent)
            return None
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

    def _put_in_heap(self, heap: Heap, address: Address, found: HeapItem | None, item: HeapItem, parent: bytes) -> None:
        """Store an item in place of the one that was found, which may have expired, or not at all."""
        tenant, space = address[0], self._space
        heap.count_uses()
        parsed = parse_key(address)
        old = self._present(parsed) if found is not None or self._core.clears.under_way else None
        used = self._used_bytes() + item.size
        if used > space.capacity_bytes or len(heap) >= space.objects_max or tenant in space.quotas:
            space.begin_hold()
            if not space.make_room_for(tenant, item.size, old):
                raise self._busy_error("more has to be evicted than is at a time")
            used = self._used_bytes() + item.size
            if old is not None and not self._core.is_current(old):
                old = None  # making room has evicted it
        home = Home(None, item.size - item.length, True)
        slot, _, _ = self._enter(parsed, home, old, item.length, item.head_bytes, item.expires_at_ms, parent)
        heap.keep(tenant, slot, item)
        if used > self._peak_bytes:
            self._peak_bytes = self._used_bytes()

    def _resize(self, heap: Heap, tenant: int, item: HeapItem, length: int) -> bool:
        """Give an entry another length, if there is room without further ado."""
        more = length - item.length
        used = self._used_bytes() + more
        if tenant in self._space.quotas or (more > 0 and used > self._space.capacity_bytes):
            return False
        self._index.resize(item.slot, length)
        self._core.weigh(tenant)
        item.length, item.size = length, item.size + more
        self._peak_bytes = max(self._peak_bytes, used)
        return True

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
        if disk is None:
            home = home._replace(extent=buffer.size - length)
        try:
            slot, replaced, left = self._enter(parsed, home, old, length, head_bytes, expires_at_ms, parent)
        except BaseException:
            if disk is not None:
                disk.free((home.extent, object_blocks(length) * BLOCK_BYTES))
            raise
        core.copies.keep(slot, buffer)
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        if disk is None:
            core.leave(tenant, key, left)
            return self._writer.memory_alone(slot, tenant, key)
        entry = Entry(slot, self._index.read(slot))
        return self._writer.begin(entry, disk, buffer, name, placed=home.placed, replaced=replaced, left=left)

    def _enter(
        self,
        parsed: ParsedKey,
        home: Home,
        old: Entry | None,
        length: int,
        head_bytes: int,
        expires_at_ms: int | None,
        parent: bytes,
    ) -> tuple[int, Place | None, list[Left]]:
        """Have the index know of a value; return its slot, and what :meth:`Core.replace` says of the old one."""
        core, disk = self._core, home.disk
        tenant, key, name = parsed
        slot = self._index.insert(
            tenant,
            key,
            device=MEMORY_ONLY if disk is None else disk.number,
            extent=home.extent,
            length=length,
            now_s=core.now_s(),
            head_length=head_bytes,
            name=name,
            flags=_RECORD if head_bytes else 0,
            expires_at_ms=expires_at_ms or 0,
            generation=core.next_generation(),
            parent=parent or NO_PARENT,
        )
        replaced, left = (None, []) if old is None else core.replace(old, disk)
        if head_bytes:
            for counters in core.counters.of(tenant):
                counters.record_bytes += length
        if old is None and core.clears.under_way:
            core.clears.count_change(tenant, 1)
        core.weigh(tenant)
        return slot, replaced, left

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
        """See :meth:`Store.settling`."""
        entry = self._present(parse_key(address))
        writer = self._writer
        return None if entry is None else writer.ticket(entry.slot) or writer.sure(entry.tenant, entry.key)

    # ---- Changing one

    def remove(self, address: Address) -> bool:
        """See :meth:`Store.remove`."""
        entry = self._entry_of(address)
        if entry is None:
            return False
        self._core.forget(entry)
        return True

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """See :meth:`Store.set_expiry`."""
        entry = self._entry_of(address)
        if entry is None:
            return False
        if expires_at_ms is not None and expires_at_ms <= self._clock_ms():
            self._core.forget(entry)
            return True
        self._index.set_expiry(entry.slot, expires_at_ms or 0)
        if self._core.heap is not None:
            item = self._core.heap.at(entry.slot)
            item.expires_at_ms, item.is_plain = expires_at_ms, False
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log_expiry(entry.tenant, entry.key, expires_at_ms or 0)
        return True

    def _used_bytes(self) -> int:
        return self._index.used_bytes() + self._core.held_bytes

    def _count_free_blocks(self) -> int:
        return sum(disk.volume.free_blocks for disk in self._core.disks if disk.gone is None)
