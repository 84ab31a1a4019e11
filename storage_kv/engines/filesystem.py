"""The engine that keeps each value in a file: for people without a device to spare, and as a measure for the pool.

The table of entries is in memory, as :class:`~storage_kv.engines.memory.MemoryEngine` has it; the values are in files
(``_object_files.py``) and, while they are being written, in memory as well. The kernel's page cache holds what is read
often. The budget counts the files' bytes.

Three groups of threads wait for the file system: readers, writers, and one that removes files and notes changed
expiries and pins, as many as there are at a time before it synchronizes the folders. They take the node's lock when
they are done; poll() has nothing to do.

An entry whose file cannot be read, or holds anything but what was written, is dropped and counted.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from shadowserve.errors import ConfigurationError, NativeError, is_passing
from shadowserve.native import OBJECT_HEADER_BYTES
from storage_kv.engine import (
    TENANT_BYTES,
    BusyError,
    EngineStatistics,
    Item,
    Lease,
    Ticket,
    qualified,
    tenant_of,
    wall_clock_ms,
)
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


class FileItem(MemoryItem):
    """An entry whose value is in a file.

    Attributes:
        key: qualified.
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
        self._changes: dict[int, None] = {}  # under way, oldest first
        self._change_numbers = itertools.count(1)
        self._queue: list[tuple[int, FileItem]] = []  # of them, what the thread can begin
        self._barriers: list[tuple[int, Ticket]] = []
        self._failed_changes: list[tuple[int, Exception]] = []
        self._lost = {"io_error": 0, "rotten": 0}
        self._failed_writes = 0
        self._idle = threading.Condition()

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Engine.start`."""
        self._lock = lock
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
        self._readers = Workers(_READERS, "read")
        self._writers = Workers(_WRITERS, "write")
        self._changer = Workers(1, "change")
        keys = sum(len(account.items) for account in self._accounts.values())
        _log.info("recovered path=%s keys=%d seconds=%.3f", self._root, keys, time.monotonic() - began_s)

    def _recover(self) -> None:
        newest: dict[bytes, FoundObject] = {}
        now_ms = self._clock_ms()
        for found in self._files.find():
            key = qualified(found.name.tenant, found.name.key)
            other = newest.get(key, found)
            newest[key] = max(found, other, key=lambda each: each.name.generation)
            if other is not found:
                self._files.remove(min(found, other, key=lambda each: each.name.generation).name)
        ordered = sorted(newest.items(), key=lambda pair: pair[1].name.generation)
        for key, found in ordered:
            attributes, name = found.attributes, found.name
            if 0 < attributes.expires_at_ms <= now_ms or name.stored_bytes > self._budget_bytes:
                self._files.remove(name)
                continue
            account = self._accounts.get(key[:TENANT_BYTES]) or self._open_account(key[:TENANT_BYTES])
            self._uses = used = self._uses + 1
            item = FileItem(account, key, name, attributes.expires_at_ms or None, attributes.parent, used)
            self._enter(key, item, None)
            if attributes.pinned_until_ms > now_ms:
                item.pinned_until_ms = attributes.pinned_until_ms
                account.pinned_keys += 1
        if ordered:
            self._generations = itertools.count(ordered[-1][1].name.generation + 1)
        missing = self._used_bytes - self._budget_bytes
        for walk in self._plan(missing, None)[0]:
            for key, victim in walk.taken:
                assert isinstance(victim, FileItem)
                self._files.remove(victim.name)
                del victim.account.items[key]
                victim.account.index.remove(victim.serial)
                super()._forget(victim)

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Engine.drain`."""
        with self._idle:
            if not self._idle.wait_for(lambda: not self._writing_bytes and not self._changes, timeout_s):
                _log.warning("drain_cut_off path=%s timeout_s=%g", self._root, timeout_s)

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        ended = [workers.stop(1.0) for workers in (self._readers, self._writers, self._changer)]
        if all(ended):  # else somebody still writes: the folder stays this process's until it ends
            self._files.close()

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
                if item.stored:
                    self._drop(item.key, item)
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
        key: bytes,
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
        name = ObjectName(tenant_of(key), key[TENANT_BYTES:], next(self._generations), len(value), head_bytes)
        account = self._accounts.get(key[:TENANT_BYTES]) or self._open_account(key[:TENANT_BYTES])
        old = account.items.get(key)
        self._make_room(account, name.stored_bytes, old)
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
                if item.stored:
                    self._drop(item.key, item)
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

    def settling(self, key: bytes) -> Ticket | None:
        """See :meth:`Engine.settling`."""
        item = self.peek(key)
        return item.ticket if isinstance(item, FileItem) else None

    def set_expiry(self, key: bytes, expires_at_ms: int | None) -> bool:
        """See :meth:`Engine.set_expiry`."""
        return super().set_expiry(key, expires_at_ms) and self._note_change(key)

    def pin(self, key: bytes, until_ms: int) -> bool:
        """See :meth:`Engine.pin`."""
        return super().pin(key, until_ms) and self._note_change(key)

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

    def statistics(self, tenant: int | None = None) -> EngineStatistics:
        """See :meth:`Engine.statistics`."""
        found = super().statistics(tenant)
        if tenant is not None:
            return found
        lost = dict(self._lost)
        return replace(found, lost_keys=sum(lost.values()), lost=lost, failed_writes=self._failed_writes)

    # ---- Changes: removed files, changed attributes

    def _forget(self, item: MemoryItem) -> None:
        super()._forget(item)
        assert isinstance(item, FileItem)
        item.removal = next(self._change_numbers)
        self._changes[item.removal] = None
        self._remove_if_unused(item)

    def _remove_if_unused(self, item: FileItem) -> None:
        """Begin to remove the file of what has left the table, unless it is still being written or read."""
        if item.removal and item.ticket is None and item.reads == 0:
            number, item.removal = item.removal, 0
            self._queue_change(number, item)

    def _note_change(self, key: bytes) -> bool:
        """Have the attributes of an entry written down, if it is still there."""
        item = self.peek(key)
        if isinstance(item, FileItem):
            if item.ticket is None:
                self._queue_change(next(self._change_numbers), item)
            elif not item.changed:  # its writer sees to it
                item.changed = next(self._change_numbers)
                self._changes[item.changed] = None
        return True

    def _queue_change(self, number: int, item: FileItem) -> None:
        self._changes[number] = None
        self._queue.append((number, item))
        if len(self._queue) == 1:
            self._changer.submit(self._change_some)

    def _change_some(self) -> None:
        """Do everything that is queued, then synchronize the folders that it touched."""
        with self._lock:
            queue, self._queue = self._queue, []
            items: dict[FileItem, list[int]] = {}
            for number, item in queue:
                items.setdefault(item, []).append(number)
            wanted = [(item.name, item.attributes() if item.stored else None, items[item]) for item in items]
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
        with self._lock:
            for number, _ in queue:
                del self._changes[number]
            self._failed_changes += sorted(failed.items())
            settled = self._settled_barriers()
        for ticket, failure in settled:
            ticket.settle(failure)
        self._tell_idle()

    def _settled_barriers(self) -> list[tuple[Ticket, Exception | None]]:
        settled: list[tuple[Ticket, Exception | None]] = []
        while self._barriers and not any(number <= self._barriers[0][0] for number in self._changes):
            last, ticket = self._barriers.pop(0)
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
