"""A store whose reads and writes end on a test's call, and a server with it in this process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from machine import WAIT_MAX_S, wait_for
from storage_support import Client

from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import BusyError, Ticket
from storage_kv.config import StorageConfig
from storage_kv.server import StorageServer


class Away(Item):
    """An item whose value is not in memory."""

    __slots__ = ("bytes_",)

    def __init__(self, found: Item) -> None:
        self.length, self.header_bytes, self.expires_at_ms = found.length, found.header_bytes, found.expires_at_ms
        self.value = None
        self.bytes_ = bytes(found.value)


class SlowStore(MemoryPool):
    """A store whose reads and writes wait for the test.

    Attributes:
        away: True if values are not in memory.
        lazy: True if writes become durable in settle().
        full: True if writes and receive buffers have no space.
        crowded: True if writes have no space.
    """

    def __init__(self) -> None:
        super().__init__(StorageConfig(memory_budget_bytes=1 << 30))
        self.away = self.lazy = self.full = self.crowded = False
        self.reads: list[tuple[Away, int, int, Callable[[Lease | None], None]]] = []
        self.tickets: list[Ticket] = []
        self.ready: list[Callable[[], None]] = []
        self.refused_writes: list[Ticket] = []
        self.leases = 0
        self.buffers: list[memoryview] = []  # lent, and neither stored nor returned
        self.drained = self.closed = False

    def get(self, address: Address) -> Any:
        found = super().get(address)
        return Away(found) if found is not None and self.away else found

    def peek(self, address: Address) -> Any:
        found = super().peek(address)
        return Away(found) if found is not None and self.away else found

    def read(
        self, item: Item, start: int, end: int, done: Callable[[Lease | None], None], *, in_parts: bool = False,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        assert isinstance(item, Away) and 0 <= start < end <= item.length
        self.reads.append((item, start, end, done))

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        if self.full:
            self.ready.append(ready)
            return None
        self.buffers.append(memoryview(bytearray(size)))
        return self.buffers[-1]

    def discard(self, buffer: memoryview) -> None:
        self.buffers = [other for other in self.buffers if other is not buffer]

    def put(self, address: Address, value: bytes | memoryview, **named: Any) -> Ticket | None:
        if self.full or self.crowded:
            self.refused_writes.append(Ticket())
            raise BusyError("too many writes", self.refused_writes[-1])
        super().put(address, value, **named)
        return self._ticket()

    def barrier(self) -> Ticket | None:
        return self._ticket()

    def _ticket(self) -> Ticket | None:
        if not self.lazy:
            return None
        self.tickets.append(Ticket())
        return self.tickets[-1]

    def drain(self, timeout_s: float) -> None:
        self.drained = True

    def close(self) -> None:
        super().close()
        self.closed = True

    # ---- Interface of a test

    def finish_read(self, number: int = 0, *, lost: bool = False) -> None:
        item, start, end, done = self.reads.pop(number)
        if lost:
            done(None)
            return
        self.leases += 1

        def released() -> None:
            self.leases -= 1

        done(Lease(memoryview(item.bytes_)[start:end], released))

    def settle(self, error: Exception | None = None) -> None:
        """End the oldest write."""
        self.tickets.pop(0).settle(error)

    def make_room(self, *, crowded: bool = False) -> None:
        """Let all waiting clients try again."""
        self.full, self.crowded = False, crowded
        ready, self.ready = self.ready, []
        busy, self.refused_writes = self.refused_writes, []
        for call in ready:
            call()
        for ticket in busy:
            ticket.settle()


class Served:
    """A server of a SlowStore in a thread of this process."""

    def __init__(self, **config: Any) -> None:
        self.store = SlowStore()
        self._config = StorageConfig(port=0, **({"shutdown_timeout_s": WAIT_MAX_S} | config))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._clients: list[Client] = []

    def make_server(self) -> StorageServer:
        return StorageServer(self._config, self.store)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = self.make_server()
        await self.server.start()
        self._ready.set()
        await self.server.wait_stopped()

    def client(self, receive_buffer: int | None = None) -> Client:
        self._clients.append(Client(self.server.addresses[0][1], receive_buffer=receive_buffer))
        return self._clients[-1]

    def wait_for_reads(self, count: int) -> None:
        wait_for(lambda: len(self.store.reads) == count)

    def request_stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.request_stop)

    def wait(self) -> None:
        self._thread.join(WAIT_MAX_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT_MAX_S)
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        for _ in range(2):  # the second signal ends pending requests of a failed test
            if self._thread.is_alive():
                self.request_stop()
        self.wait()
