"""The engine that keeps each value in a file: for people without a device to spare, and as a measure for the pool.

The table of entries is in memory, as :class:`~storage_kv.engines.memory.MemoryEngine` has it; the values are in files
(``_object_files.py``) and, while they are being written, in memory as well. The kernel's page cache holds what is read
often. The budget counts the files' bytes.

Three groups of threads wait for the file system: readers, writers, and one that removes files and notes changed
expiries and pins, as many as there are at a time before it synchronizes the folders. They take the node's lock when
they are done.

An entry whose file cannot be read, or holds anything but what was written, is dropped and counted.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError, NativeError, is_passing
from shadowserve.native import OBJECT_HEADER_BYTES
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address, Item, Lease
from shadowserve.pool.volume.changes import BusyError, Ticket
from storage_kv.engines import buffers
from storage_kv.engines.account import Account, MemoryItem
from storage_kv.engines.memory import MemoryEngine
from storage_kv.engines.object_files import Attributes, FoundObject, ObjectFiles, ObjectName
from storage_kv.engines.workers import Workers

__all__ = ["FilesystemEngine"]

_log = logging.getLogger(__name__)

_READERS: Final = 16
_WRITERS: Final = 8

_WRITING_BYTES_MAX: Final = 64 << 20
"""Of values that are being written; beyond it writers wait. More would only lie in memory."""

_READING_BYTES_MAX: Final = 256 << 20
"""Of values that are being read, or wait for their clients to take them; beyond it reads wait. Each client may have
``read_ahead_bytes_max`` of them, however slowly it takes them, and there may be thousands of clients."""

_KEY_ROOM: Final = 512
"""Bytes behind a buffer that a value is received in, for the name; with a longer key the value is copied once."""

_EVERYBODY: Final = -1
"""Among tenants' ids: all of them."""
_LITTER: Final = -1
"""Among the numbers of changes: one that nobody waits for."""


class FileItem(MemoryItem):
    """An entry whose value is in a file.

    Attributes:
        key: among its tenant's.
        name: which file.
        memory: the object while it is being written.
        reads: under way, of the file; what else needs the file counts too.
        ticket: of its write, until that is settled.
        removal: the change that its removal is, once it is out of the table.
        changed: the change of its expiry or pin while it is being written, or 0.
        old: the entry that it has replaced, whose file stays until this one's is durable.
    """

    __slots__ = ("changed", "key", "memory", "name", "old", "reads", "removal", "ticket")

    def __init__(
        self, account: Account, key: bytes, name: ObjectName, expires_at_ms: int | None, parent: bytes, used: int
    ) -> None:
        """Make one that is in no table yet."""
        super().__init__(account, name.length, name.head_bytes, expires_at_ms, None, name.stored_bytes, parent, used)
        self.key = key
        self.name = name
        self.memory: memoryview | None = None
        self.reads = 0
        self.ticket: Ticket | None = None
        self.removal = 0
        self.changed = 0
        self.old: FileItem | None = None

    def attributes(self) -> Attributes:
        """Return what is to be kept beside the value; with the node's lock held."""
        return Attributes(self.expires_at_ms or 0, self.pinned_until_ms, self.parent)


class FilesystemEngine(MemoryEngine):
    """One file an object, in a folder of a file system."""

    def __init__(self, root: Path, budget_bytes: int, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        """Make an engine that has not looked at its folder yet.

        Args:
            root: the folder.
            budget_bytes: most that the files may take together.
            clock_ms: Unix time in milliseconds.
        """
        super().__init__(budget_bytes, clock_ms)
        self._root = root
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._writing_bytes = 0
        self._waiting: list[Callable[[], None]] = []  # for room to write
        self._unread: deque[tuple[int, Callable[[], None]]] = deque()  # reads that wait for memory
        self._reading_bytes = 0
        self._buffers: dict[int, tuple[memoryview, memoryview]] = {}  # by id: what was given out, and all of it
        self._changes: OrderedDict[int, None] = OrderedDict()  # under way, oldest first
        self._change_numbers = itertools.count(1)
        self._queue: deque[tuple[int, FileItem | None]] = deque()  # of them, what the thread can begin
        self._litter: deque[FileItem] = deque()  # what was cleared: nobody waits until its files are removed
        self._cleared: dict[int, int] = {}  # by tenant, the generation up to which its objects are gone
        self._is_changing = False
        self._barriers: deque[tuple[int, Ticket]] = deque()
        self._failed_changes: list[tuple[int, Exception]] = []
        self._lost = {"io_error": 0, "rotten": 0}
        self._failed_writes = 0
        self._idle = threading.Condition()

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Engine.start`."""
        began_s = time.monotonic()
        self._files = ObjectFiles(self._root)
        try:
            self._names = {"": 0} | self._files.tenants()
            with lock:
                self._recover()
        except BaseException as error:
            self._files.close()
            if isinstance(error, OSError):
                raise ConfigurationError(
                    f"cannot read the values in {self._root}: {error}; nothing that could not be read was removed. Try "
                    "again: it may be possible then. If it never is, remove that file"
                ) from error
            raise
        super().start(lock)
        self._readers = Workers(_READERS, "read")
        self._writers = Workers(_WRITERS, "write")
        self._changer = Workers(1, "change")
        _log.info("recovered path=%s keys=%d seconds=%.3f", self._root, self._all.keys, time.monotonic() - began_s)
        with lock:  # what was left may be more than the budget of today
            self.set_budget(self._budget_bytes)

    def _recover(self) -> None:
        newest: dict[Address, FoundObject] = {}
        now_ms = self._clock_ms()
        self._cleared = self._files.cleared()
        everyones = self._cleared.get(_EVERYBODY, 0)
        for found in self._files.find():
            if found.name.generation <= max(everyones, self._cleared.get(found.name.tenant, 0)):
                self._files.remove(found.name)
                continue
            address = found.name.tenant, found.name.key
            other = newest.get(address, found)
            newest[address] = max(found, other, key=lambda each: each.name.generation)
            if other is not found:
                self._files.remove(min(found, other, key=lambda each: each.name.generation).name)
        ordered = sorted(newest.items(), key=lambda pair: pair[1].name.generation)
        for (tenant, key), found in ordered:
            attributes, name = found.attributes, found.name
            if 0 < attributes.expires_at_ms <= now_ms or name.stored_bytes > self._budget_bytes:
                self._files.remove(name)
                continue
            account = self._accounts.get(tenant) or self._open_account(tenant)
            self._uses = used = self._uses + 1
            item = FileItem(account, key, name, attributes.expires_at_ms or None, attributes.parent, used)
            self._enter(key, item, None)
            if attributes.pinned_until_ms > now_ms:
                self._pin(key, item, attributes.pinned_until_ms)
        last = ordered[-1][1].name.generation if ordered else 0
        self._generations = itertools.count(max(last, *self._cleared.values(), 0) + 1)

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Engine.drain`."""
        ends_s = time.monotonic() + timeout_s
        while self.poll() and time.monotonic() < ends_s:
            pass
        timeout_s = max(ends_s - time.monotonic(), 0.0)
        with self._idle:
            if not self._idle.wait_for(lambda: not self._writing_bytes and not self._changes, timeout_s):
                _log.warning("drain_cut_off path=%s timeout_s=%g", self._root, timeout_s)

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        ended = [workers.stop(1.0) for workers in (self._readers, self._writers, self._changer)]
        if all(ended):  # else somebody still writes: the folder stays this process's until it ends
            self._files.close()
        super().close()

    # ---- Reading

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """See :meth:`Engine.read`."""
        assert isinstance(item, FileItem)
        item.reads += 1
        self._unread.append((end - start, lambda: self._read(item, start, end, done)))
        self._begin_reads()

    def _begin_reads(self) -> None:
        """Hand reads to the readers as far as there is memory for them; one always may."""
        while self._unread:
            size, call = self._unread[0]
            if self._reading_bytes and self._reading_bytes + size > _READING_BYTES_MAX:
                return
            self._unread.popleft()
            self._reading_bytes += size
            self._readers.submit(call)

    def _drop_if_present(self, item: FileItem) -> None:
        if item.account.find(item.key) is item:  # else it was cleared, and poll() sees to it
            self._drop(item.key, item)

    def _end_read(self, size: int) -> None:
        self._reading_bytes -= size
        self._begin_reads()

    def _read(self, item: FileItem, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        data: memoryview | None = None
        lost: str | None = "rotten"
        try:
            data = self._files.read(item.name, start, end)
        except Exception as error:  # whatever it was, the reader hears of it
            lost = None if is_passing(error) else "io_error"  # else the client gets a miss, and the entry stays
            _log.warning("read_failed file=%s error=%r", item.name.digest.hex(), str(error))
        with self._lock:
            item.reads -= 1
            if data is None:
                self._end_read(end - start)
            if data is None and lost is not None:
                self._lost[lost] += 1
                _log.warning("value_lost file=%s reason=%s", item.name.digest.hex(), lost)
                self._drop_if_present(item)
            self._remove_if_unused(item)
        done(None if data is None else Lease(data, self._end_read, end - start))

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """See :meth:`Engine.allocate`."""
        if self._writing_bytes >= _WRITING_BYTES_MAX:
            self._waiting.append(ready)
            return None
        whole = buffers.allocate(ObjectName(0, bytes(_KEY_ROOM), 0, size, 0).stored_bytes)
        view = whole[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + size]
        self._buffers[id(view)] = (view, whole)
        return view

    def discard(self, buffer: memoryview) -> None:
        """See :meth:`Engine.discard`."""
        self._buffers.pop(id(buffer), None)

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
        if self._writing_bytes >= _WRITING_BYTES_MAX:
            again = Ticket()
            self._waiting.append(again.settle)
            raise BusyError(f"{self._writing_bytes} bytes are being written to {self._root}", again)
        tenant, key = address
        name = ObjectName(tenant, key, next(self._generations), len(value), head_bytes)
        account = self._accounts.get(tenant) or self._open_account(tenant)
        old = account.find(key)
        self._make_room(account, name.stored_bytes, key, old)
        self._uses = used = self._uses + 1
        item = FileItem(account, key, name, expires_at_ms, parent, used)
        item.value = value
        item.ticket = ticket = Ticket()
        given = self._buffers.pop(id(value), None)
        if given is not None and len(given[1]) >= name.stored_bytes:
            item.memory = given[1]
        self._writing_bytes += name.length
        if isinstance(old, FileItem):
            old.reads += 1
            item.old = old
        self._enter(key, item, old)
        attributes = item.attributes()
        self._writers.submit(lambda: self._write(item, value, attributes))
        return ticket

    def _write(self, item: FileItem, value: bytes | memoryview, attributes: Attributes) -> None:
        error: Exception | None = None
        try:
            if item.memory is None:
                item.memory = buffers.allocate(item.name.stored_bytes)
                item.memory[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + len(value)] = value
            self._files.write(item.name, attributes, item.memory)
        except Exception as failure:  # whatever it was, the writer hears of it
            _log.error("write_failed path=%s error=%r", self._root, str(failure))
            error = OSError(f"writing {item.length} bytes to {self._root}: {failure}")
        with self._lock:
            ticket, item.ticket = item.ticket, None
            self._writing_bytes -= item.length
            item.memory = item.value = None
            if error is not None:
                self._failed_writes += 1
                self._drop_if_present(item)
            if item.changed:
                self._queue_change(item.changed, item)
            self._remove_if_unused(item)
            if (old := item.old) is not None:
                item.old = None
                old.reads -= 1
                self._remove_if_unused(old)
            waiting, self._waiting = self._waiting, []
        assert ticket is not None
        ticket.settle(error)
        for ready in waiting:
            ready()
        self._tell_idle()

    def settling(self, address: Address) -> Ticket | None:
        """See :meth:`Engine.settling`."""
        item = self.peek(address)
        return item.ticket if isinstance(item, FileItem) else None

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """See :meth:`Engine.set_expiry`."""
        return super().set_expiry(address, expires_at_ms) and self._note_change(address)

    def pin(self, address: Address, until_ms: int) -> bool:
        """See :meth:`Engine.pin`."""
        return super().pin(address, until_ms) and self._note_change(address)

    def unpin_some(self, tenant: int | None) -> int:
        """See :meth:`Engine.unpin_some`."""
        some = self._pins.some(tenant, ENTRIES_PER_HOLD)
        for tenant_id, (key, item) in some:
            self._unpin(key, item)
            self._note_change((tenant_id, key))
        return len(some)

    def tenant(self, name: str) -> int:
        """See :meth:`Engine.tenant`; a new one is written down at once, which happens once for each."""
        known = name in self._names
        number = super().tenant(name)
        if not known:
            try:
                self._files.keep_tenants(self._names)
            except OSError:
                del self._names[name]
                raise
        return number

    def statistics(self, tenant: int | None = None) -> Statistics:
        """See :meth:`Engine.statistics`."""
        found = super().statistics(tenant)
        if tenant is not None:
            return found
        lost = dict(self._lost)
        return replace(found, lost_keys=sum(lost.values()), lost=lost, failed_writes=self._failed_writes)

    # ---- Changes: removed files, changed attributes

    def _forget(self, key: bytes, item: MemoryItem, *, cleared: bool = False) -> None:
        super()._forget(key, item, cleared=cleared)
        assert isinstance(item, FileItem)
        item.removal = _LITTER if cleared else next(self._change_numbers)
        if not cleared:
            self._changes[item.removal] = None
        self._remove_if_unused(item)

    def _remove_if_unused(self, item: FileItem) -> None:
        """Begin to remove the file of what has left the table, unless it is still being written or read."""
        if item.removal and item.ticket is None and item.reads == 0:
            number, item.removal = item.removal, 0
            if number == _LITTER:
                self._litter.append(item)
                self._begin_changes()
            else:
                self._queue_change(number, item)

    def clear(self, tenant: int | None) -> None:
        """See :meth:`Engine.clear`. That it was cleared is written down; files are removed when there is time."""
        self._cleared[_EVERYBODY if tenant is None else tenant] = next(self._generations)
        self._queue_change(next(self._change_numbers), None)
        super().clear(tenant)

    def _note_change(self, address: Address) -> bool:
        """Have the attributes of an entry written down, if it is still there."""
        item = self.peek(address)
        if isinstance(item, FileItem):
            if item.ticket is None:
                self._queue_change(next(self._change_numbers), item)
            elif not item.changed:  # its writer sees to it
                item.changed = next(self._change_numbers)
                self._changes[item.changed] = None
        return True

    def _queue_change(self, number: int, item: FileItem | None) -> None:
        """Have an entry's change done; None: what has been cleared is to be written down."""
        self._changes[number] = None
        self._queue.append((number, item))
        self._begin_changes()

    def _begin_changes(self) -> None:
        if not self._is_changing:
            self._is_changing = True
            self._changer.submit(self._change_some)

    def _change_some(self) -> None:
        """Do some of what is queued, then synchronize the folders that it touched."""
        with self._lock:
            queue = [self._queue.popleft() for _ in range(min(len(self._queue), ENTRIES_PER_HOLD))]
            items: dict[FileItem | None, list[int]] = {}
            for number, item in queue:
                items.setdefault(item, []).append(number)
            for _ in range(min(len(self._litter), ENTRIES_PER_HOLD - len(queue))):
                items.setdefault(self._litter.popleft(), [])
            cleared = dict(self._cleared) if None in items else None
            clears = items.pop(None, [])
            wanted = [
                (item.name, item.attributes() if item.stored else None, numbers)
                for item, numbers in items.items()
                if item is not None
            ]
        failed = {} if cleared is None else self._write_cleared(cleared, clears)
        failed |= self._write_changes(wanted)
        with self._lock:
            for number, _ in queue:
                del self._changes[number]
            self._failed_changes += sorted(failed.items())
            settled = self._settled_barriers()
            self._is_changing = False
            if self._queue or self._litter:
                self._begin_changes()
        for ticket, failure in settled:
            ticket.settle(failure)
        self._tell_idle()

    def _write_cleared(self, cleared: dict[int, int], numbers: list[int]) -> dict[int, Exception]:
        """Write down what has been cleared; return the changes that failed."""
        try:
            self._files.keep_cleared(cleared)
        except OSError as error:
            _log.error("change_failed file=cleared error=%r", str(error))
            return dict.fromkeys(numbers, error)
        return {}

    def _write_changes(self, wanted: list[tuple[ObjectName, Attributes | None, list[int]]]) -> dict[int, Exception]:
        """Remove files, or write changed attributes; return the changes that failed."""
        folders: dict[Path, list[int]] = {}
        failed: dict[int, Exception] = {}
        for name, attributes, numbers in wanted:
            try:
                folder = self._files.remove(name) if attributes is None else self._files.change(name, attributes)
                folders.setdefault(folder, []).extend(numbers)
            except (OSError, NativeError) as error:
                _log.error("change_failed file=%s error=%r", name.digest.hex(), str(error))
                failed |= dict.fromkeys(numbers, error)
        for folder, numbers in folders.items():
            try:
                self._files.synchronize(folder)
            except OSError as error:
                failed |= dict.fromkeys(numbers, error)
        return failed

    def _settled_barriers(self) -> list[tuple[Ticket, Exception | None]]:
        settled: list[tuple[Ticket, Exception | None]] = []
        while self._barriers and next(iter(self._changes), self._barriers[0][0] + 1) > self._barriers[0][0]:
            last, ticket = self._barriers.popleft()
            failed = [error for number, error in self._failed_changes if number <= last]
            settled.append((ticket, failed[0] if failed else None))
        if not self._barriers:
            self._failed_changes.clear()
        return settled

    def barrier(self) -> Ticket | None:
        """See :meth:`Engine.barrier`."""
        if not self._changes:
            return None
        ticket = Ticket()
        self._barriers.append((next(self._change_numbers), ticket))
        return ticket

    def _tell_idle(self) -> None:
        with self._idle:
            self._idle.notify_all()
