"""A pool over devices: they hold the values, and memory caches some."""

from collections.abc import Callable, Sequence

from shadowserve.keys import storage_key
from shadowserve.native import NO_PARENT, OBJECT_HEADER_BYTES, IndexPlace, RecordFlag
from shadowserve.pool.arena import Buffer
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import MEMORY_ONLY, NAMED, Entry, ParsedKey, PoolItem, parse_key
from shadowserve.pool.placement import Location
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import DEFAULT_TENANT, Address, Item, Lease
from shadowserve.pool.volume.format import BLOCK_BYTES, blocks_of
from shadowserve.pool.volume.tickets import OutOfBudgetError, Ticket, joined
from shadowserve.pool.writes import WRITABLE_SHARE


class DevicePool(Pool):
    """A pool over one device or more."""

    core_class = Core

    def hold_back(self, may_write: Callable[[int], bool], may_scrub: Callable[[int], bool]) -> None:
        """Ask the callbacks before writing, or scrubbing, a number of bytes; after False, ask again when woken."""
        self._core.may_write, self._core.may_scrub = may_write, may_scrub

    def wake(self) -> None:
        self._core.waker.wake()

    # ---- Reading

    def get(self, address: Address) -> Item | None:
        return self._find(address, use=True)

    def peek(self, address: Address) -> Item | None:
        return self._find(address, use=False)

    def _find(self, address: Address, *, use: bool) -> Item | None:
        core = self._core
        began = core.ticks()
        core.counters.lookups += 1
        entry = self._entry(parse_key(address), core.now_s() if use else 0)
        if entry is None:
            core.counters.lookup_ns += core.ticks() - began
            return self._find_in_lower_tier(address)
        if use:
            buffer = core.memory_cache.get(entry.slot)
        else:
            buffer = core.memory_cache.peek(entry.slot)
        if buffer is None:
            disk = core.disk_of(entry)
            if disk is None or disk.gone is not None:
                core.drop_lost(entry, "device_gone" if disk is not None else "no_memory")
                return self._find_in_lower_tier(address)
        elif use and entry.device == MEMORY_ONLY and core.admission != "all":
            self._give_home(entry, buffer)
        core.counters.lookup_ns += core.ticks() - began
        return PoolItem(entry, buffer)

    def _entry_of(self, address: Address) -> Entry | None:
        return self._entry(parse_key(address))

    def _entry(self, parsed: ParsedKey, now_s: int = 0) -> Entry | None:
        """Return the entry of a key; None if it is absent or has expired, which removes it."""
        tenant, key, name = parsed
        found = self._index.get(tenant, key, now_s)
        if found is None:
            return None
        entry = self._unless_cleared(Entry(*found))
        # A client can make a chunk key from another key's digest.
        if entry is None or (entry.fields.flags & NAMED == 0) != (name is None):
            return None
        expires_at_ms = entry.fields.expires_at_ms
        if expires_at_ms and expires_at_ms <= self._clock_ms():
            self._core.expire(entry)
            return None
        return entry

    def read(
        self, item: Item, start: int, end: int, done: Callable[[Lease | None], None], *, in_parts: bool = False,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        if item.value is not None or item.is_cold:
            super().read(item, start, end, done, in_parts=in_parts, ahead=ahead)
            return
        assert isinstance(item, PoolItem)
        buffer = self._core.memory_cache.peek(item.entry.slot)
        if buffer is not None and self._core.is_current(item.entry):  # it was read in the meantime
            buffer.users += 1
            done(Lease(buffer.value(start, end), self._release, buffer))
            return
        self._reader.read(item.entry, start, end, done, in_parts=in_parts, ahead=ahead)

    def release(self, item: Item) -> None:
        assert isinstance(item, PoolItem) and item.buffer is not None
        self._release(item.buffer)

    def _release(self, buffer: Buffer) -> None:
        self._core.arenas.release(buffer)
        self._reader.pump()
        if self._waiting:
            self._core.waker.wake()

    # ---- Reading into memory of others

    def register(self, memory: memoryview) -> None:
        """Register memory with all devices, as far as they accept it; without the lock."""
        for disk in self._core.disks:
            disk.volume.device.register(memory)

    def unregister(self, memory: memoryview) -> None:
        """Unregister memory that no read uses; without the lock."""
        for disk in self._core.disks:
            disk.volume.device.unregister(memory)

    def lend_extents(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[IndexPlace]:
        """Protect the extents of records until return_extents(), even if the records are removed. Counts a use of each.

        The reader checks the bytes.

        Args:
            keys: Chunk keys of :data:`DEFAULT_TENANT`, 32 bytes each, at most :data:`ENTRIES_PER_HOLD`.
            lengths: Expected lengths.

        Returns:
            Places of the leading records: up to the first that is absent, has another length, is on no working device,
            or is not durable there yet.
        """
        core, ticket, lent = self._core, self._writer.ticket, list[IndexPlace]()
        disks, clears = core.disks, core.clears
        began = core.ticks()
        for place in self._index.places(DEFAULT_TENANT, b"".join(keys), lengths, self._clock_ms()):
            slot, extent, generation, device = place
            if disks[device].gone is not None or ticket(slot) is not None:
                break
            if clears.under_way and clears.covers(DEFAULT_TENANT, generation):
                break
            disks[device].use(extent)
            lent.append(place)
        core.counters.lookups += len(lent)
        core.counters.lookup_ns += core.ticks() - began
        if len(lent) < len(keys):  # removes the entry if it has expired
            self.get((DEFAULT_TENANT, storage_key(keys[len(lent)])))
        return lent

    def return_extents(self, lent: Sequence[IndexPlace]) -> None:
        """Undo lend_extents() for at most :data:`ENTRIES_PER_HOLD` records that no operation reads any more."""
        disks = self._core.disks
        for entry in lent:
            disks[entry.device].unuse(entry.extent)

    @property
    def disks(self) -> Sequence[Disk]:
        return self._core.disks

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        blocks = blocks_of(size)
        if blocks * BLOCK_BYTES > self._core.arenas.largest_bytes // WRITABLE_SHARE:
            raise MemoryError(
                f"a value of {size} bytes is more than half of an arena; give memory_budget_bytes more for such values"
            )
        buffer = self._space.memory(blocks) if self._waiting.may_receive(blocks * BLOCK_BYTES) else None
        if buffer is None:
            self._waiting.await_memory(ready)
            if self._space.wants_poll:
                self._core.waker.wake()
            return None
        return self._core.arenas.lend(buffer, size)

    def discard(self, buffer: memoryview) -> None:
        self._core.arenas.end_loan(buffer)
        self._reader.pump()
        if self._waiting:
            self._core.waker.wake()

    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        header_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        core = self._core
        began = core.ticks()
        if (refusal := core.refusal()) is not None:  # a restart would bring the old value back
            return self._writer.refused(refusal)
        parsed = parse_key(address)
        old = self._present(parsed)
        blocks = blocks_of(len(value))
        self._check_size(len(value), blocks)
        under_way = self._writer.bytes_under_way
        if under_way and under_way + blocks * BLOCK_BYTES > self._config.write_bytes_under_way_max:
            raise self._waiting.busy_error("as many bytes as write_bytes_under_way_max wait to be written")
        self._space.begin_hold()
        if not self._space.make_room_for(parsed[0], blocks * BLOCK_BYTES, old):
            raise self._waiting.busy_error("more has to be evicted than is at a time")
        buffer = core.arenas.lent(value) if isinstance(value, memoryview) else None
        if buffer is not None:
            buffer.users += 1
        else:
            buffer = self._space.memory(blocks, parent, parsed[1])
            if buffer is None:
                raise self._waiting.busy_error("all of the pool's memory is in use")
            buffer.view(OBJECT_HEADER_BYTES, OBJECT_HEADER_BYTES + len(value))[:] = value
        try:
            ticket = self._store(parsed, buffer, len(value), header_bytes, expires_at_ms, parent)
        except BaseException:
            core.arenas.release(buffer)
            raise
        core.counters.placement_ns += core.ticks() - began
        return joined(
            (ticket, self._put_in_lower_tier(address, len(value), header_bytes, expires_at_ms is not None, parent))
        )

    def _check_size(self, length: int, blocks: int) -> None:
        if blocks * BLOCK_BYTES > self._core.arenas.largest_bytes or length >= 1 << 32:
            raise OutOfBudgetError(
                f"a value of {length} bytes does not fit the pool's memory; give memory_budget_bytes more"
            )

    def _store(
        self,
        parsed: ParsedKey,
        buffer: Buffer,
        length: int,
        header_bytes: int,
        expires_at_ms: int | None,
        parent: bytes,
    ) -> Ticket | None:
        core = self._core
        tenant, key, name = parsed
        old = self._present(parsed)  # make_room_for() may have evicted it
        home = self._home(parsed, length, parent, old)
        if old is not None and not core.is_current(old):
            old = None  # evicted while a device was chosen
        disk = home.disk
        extent = buffer.size - length if disk is None else home.extent
        try:
            slot = self._index.insert(
                tenant,
                key,
                device=MEMORY_ONLY if disk is None else disk.number,
                extent=extent,
                length=length,
                now_s=core.now_s(),
                header_length=header_bytes,
                name=name,
                flags=RecordFlag.RECORD if header_bytes else 0,
                expires_at_ms=expires_at_ms or 0,
                generation=core.next_generation(),
                parent=parent,
            )
            replaced, old_copies = (None, []) if old is None else core.replace(old, disk)
            self._entered(parsed, length, header_bytes, old)
        except BaseException:
            if disk is not None:
                disk.free((extent, blocks_of(length) * BLOCK_BYTES))
            raise
        core.memory_cache.keep(slot, buffer)
        self._peak_bytes = max(self._peak_bytes, core.used_bytes())
        if disk is None:
            core.free_old_copies(tenant, key, old_copies)
            return self._writer.finish_memory_only(slot, tenant, key)
        entry = Entry(slot, self._index.read(slot))
        return self._writer.begin(
            entry, disk, buffer, name, placed=home.placed, replaced=replaced, old_copies=old_copies
        )

    def _home(self, parsed: ParsedKey, length: int, parent: bytes, old: Entry | None) -> Location:
        core = self._core
        tenant, key, _ = parsed
        if not core.admits(tenant, key):
            return Location(None, 0, True)
        home = self._opened.placement.choose(length, tenant, parent, key, old)
        if home is not None:
            return home
        if self._space.evictions_left <= 0 or any(disk.is_freeing for disk in core.disks):
            raise self._waiting.busy_error("the devices are full, and what was evicted is not free yet")
        raise OutOfBudgetError(f"no device has room for {length} bytes, and nothing on them may be evicted")

    def _give_home(self, entry: Entry, buffer: Buffer) -> None:
        """Write an object that is in memory alone to a device, since it was read."""
        fields = entry.fields
        parent = b"" if fields.parent == NO_PARENT else fields.parent
        if not self._waiting.may_receive(entry.size):
            return  # try again with the next read
        home = self._opened.placement.choose(entry.length, entry.tenant, parent, entry.key, None)
        if home is None or home.disk is None:
            return
        current = self._core.entry(entry.slot)
        if current is None or current.generation != entry.generation:  # evicted while a device was chosen
            home.disk.free((home.extent, entry.size))
            return
        self._index.insert(
            entry.tenant,
            entry.key,
            device=home.disk.number,
            extent=home.extent,
            length=entry.length,
            now_s=self._core.now_s(),
            header_length=fields.header_length,
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
        entry = self._present(parse_key(address))
        writer = self._writer
        own = None if entry is None else writer.ticket(entry.slot) or writer.await_old_removed(entry.tenant, entry.key)
        return joined((own, None if self._lower_tier is None else self._lower_tier.settling(address)))

    def _bound_memory(self, size: int) -> None:
        arenas = self._core.arenas  # the mappings keep their size
        arenas.budget_bytes = min(size, arenas.size)
