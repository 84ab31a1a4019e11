"""Drives a pool in tests like the server: with a lock, and a caller of poll()."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from machine import wait_for

from shadowserve.pool.pool import Pool
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.types import Item, Lease
from shadowserve.pool.volume.tickets import BusyError, Ticket, when_settled

T = TypeVar("T")


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class Reading:
    """A read of an item, from memory or from a device; the bytes stay until release()."""

    def __init__(self, driver: "Driver", item: Item, start: int, end: int, *, ahead: bool = False) -> None:
        self._driver = driver
        self._item: Item | None = None
        self._lease: Lease | None = None
        self.finished = False
        self.view: memoryview | None = None
        if item.value is not None:
            driver.store.hold(item)
            self._item = item
            self.finished, self.view = True, memoryview(item.value)[start:end]
        elif start == end:
            self.finished, self.view = True, memoryview(b"")
        else:
            driver.store.read(item, start, end, self._on_done, ahead=ahead)

    def _on_done(self, lease: Lease | None) -> None:
        assert not self.finished, "a read was finished twice"
        self._lease = lease
        self.view = None if lease is None else lease.view
        self.finished = True

    def wait(self) -> bytes | None:
        """Return the bytes, or None after a failure."""
        self._driver.pump(lambda: self.finished)
        return None if self.view is None else bytes(self.view)

    def release(self) -> None:
        self._driver.pump(lambda: self.finished)
        with self._driver.lock:
            if self._item is not None:
                self._driver.store.release(self._item)
            if self._lease is not None:
                self._lease.release()


def taken(readings: Iterable[Reading | None]) -> list[bytes | None]:
    """Return the values of reads once all have ended, and release them; None for those that failed or began not."""
    held = list(readings)
    found = [None if reading is None else reading.wait() for reading in held]
    for reading in held:
        if reading is not None:
            reading.release()
    return found


class Change:
    """A change and its outcome."""

    def __init__(self, driver: "Driver", ticket: Ticket | None) -> None:
        self._driver = driver
        self.outcomes: list[Exception | None] = []
        when_settled(ticket, self.outcomes.append)

    def wait(self) -> Exception | None:
        """Return the error, or None once it is durable."""
        self._driver.pump(lambda: bool(self.outcomes))
        assert len(self.outcomes) == 1
        return self.outcomes[0]


class Driver:
    """A pool with its lock. Keys are clients' keys, by default of tenant 0.

    ``clock`` is the pool's, if tests move it.
    ``opened`` has the pools that were not stopped: a test that ends closes them, as a crash would.
    """

    opened: ClassVar[list["Driver"]] = []

    def __init__(self, store: Pool, *, start: bool = True, lock: Any = None, clock: Any = None) -> None:
        self.store = store
        self.clock = clock
        self.lock = threading.Lock() if lock is None else lock
        if start:
            store.start(self.lock)
            self.opened.append(self)

    # ---- Waiting

    def pump(self, condition: Callable[[], Any]) -> None:
        """Call poll() until a condition holds."""

        def step() -> Any:
            for _ in range(8):  # a change of a device takes some: data, log, flush
                self.store.poll()
                if found := condition():
                    return found
            return None

        if not condition():
            wait_for(step)

    def call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a method with the lock held."""
        with self.lock:
            return function(*arguments, **named)

    def settle(self, ticket: Ticket | None) -> None:
        """Wait until a change is durable; raise its error."""
        error = Change(self, ticket).wait()
        if error is not None:
            raise error

    # ---- The engine's methods, with waiting

    def put_soon(self, key: bytes, value: bytes | memoryview, tenant: int = 0, **named: Any) -> Change:
        """Store a value without waiting for durability; wait while the pool is busy."""
        while True:
            again: list[Exception | None] = []
            try:
                return Change(self, self.call(self.store.put, (tenant, key), value, **named))
            except BusyError as error:
                error.again.then(again.append)
            self.pump(lambda again=again: bool(again))

    def put(self, key: bytes, value: bytes | memoryview, tenant: int = 0, **named: Any) -> None:
        error = self.put_soon(key, value, tenant, **named).wait()
        if error is not None:
            raise error

    def put_each(self, numbers: Iterable[int], value: bytes, tenant: int = 0, *, name: bytes = b"") -> None:
        """Store the same value under numbered keys."""
        for number in numbers:
            self.put(name + b"%d" % number, value, tenant)

    def get(self, key: bytes, tenant: int = 0) -> Item | None:
        return self.call(self.store.get, (tenant, key))

    def peek(self, key: bytes, tenant: int = 0) -> Item | None:
        return self.call(self.store.peek, (tenant, key))

    def open(
        self, key: bytes, start: int = 0, end: int | None = None, tenant: int = 0, *, ahead: bool = False
    ) -> Reading | None:
        """Begin to read a value or a range of it; None if it is absent."""
        with self.lock:
            item = self.store.get((tenant, key))
            end = item.length if item is not None and end is None else end
            return None if item is None or end is None else Reading(self, item, start, end, ahead=ahead)

    def value(self, key: bytes, start: int = 0, end: int | None = None, tenant: int = 0) -> bytes | None:
        """Return a value or a range of it; None if it is absent."""
        return taken([self.open(key, start, end, tenant)])[0]

    def remove(self, key: bytes, tenant: int = 0) -> bool:
        return self._settled(self.store.remove, (tenant, key))

    def set_expiry(self, key: bytes, expires_at_ms: int | None, tenant: int = 0) -> bool:
        return self._settled(self.store.set_expiry, (tenant, key), expires_at_ms)

    def pin(self, key: bytes, until_ms: int, tenant: int = 0) -> bool:
        return self._settled(self.store.pin, (tenant, key), until_ms)

    def clear(self, tenant: int | None = None) -> None:
        self._settled(self.store.clear, tenant)

    def _settled(self, function: Callable[..., T], *arguments: Any) -> T:
        result = self.call(function, *arguments)
        self.settle(self.call(self.store.barrier))
        return result

    def tenant(self, name: str) -> int:
        return self.call(self.store.tenant, name)

    def scan(self, cursor: int, count: int, tenant: int = 0) -> tuple[int, list[bytes]]:
        return self.call(self.store.scan, tenant, cursor, count)

    def keys(self, tenant: int = 0) -> set[bytes]:
        cursor, found = self.scan(0, 1000, tenant)
        while cursor:
            cursor, more = self.scan(cursor, 1000, tenant)
            found += more
        return set(found)

    def count(self, tenant: int = 0) -> int:
        return self.call(self.store.count, tenant)

    def sweep(self, keys_max: int) -> int:
        return self.call(self.store.sweep, keys_max)

    def statistics(self, tenant: int | None = None) -> Statistics:
        return self.call(self.store.statistics, tenant)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Drain and close, as the server does."""
        if self in self.opened:
            self.opened.remove(self)
        self.store.drain(timeout_s)
        self.store.close()
