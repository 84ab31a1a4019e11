"""An asyncio event loop with the world's time and the simulated network's connections.

Tasks, futures and timers are asyncio's own. ``simulated_network`` replaces the kernel's sockets; instead of sleeping,
the loop lets the world continue.
"""

import asyncio
import heapq
import socket
from collections.abc import Callable
from typing import Any

from reference_model import Violation
from simulated_network import Link
from world import S, World

Connect = Callable[[Link], bool]
"""Function that connects a link to the server. It returns True if a server listens."""


class SimulatedEventLoop(asyncio.BaseEventLoop):
    """An actor of the world."""

    def __init__(self, world: World, name: str, connect: Connect) -> None:
        self._world = world
        self._name = name
        self._connect = connect
        self._awake = False
        super().__init__()
        self.set_exception_handler(self._fail)

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failure = Violation(f"asyncio: {context['message']}")
        failure.__cause__ = context.get("exception")
        self._world.failure = self._world.failure or failure

    def _check_closed(self) -> None:
        """No-op: remaining tasks of a failed run may still call it."""

    # ---- Time

    def time(self) -> float:
        return self._world.now_ns / S + 1000

    def call_at(self, when: float, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
        handle = super().call_at(when, *arguments, **named)
        self._world.after((when - self.time()) * S + 1, self._name, self._turn)
        return handle

    def call_soon(self, *arguments: Any, **named: Any) -> asyncio.Handle:
        handle = super().call_soon(*arguments, **named)
        self._wake()
        return handle

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._world.soon(self._name, self._turn)

    def _turn(self) -> None:
        """Run one iteration of ``run_forever``."""
        self._awake = False
        if self.is_closed():
            return
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        ready = self._ready  # type: ignore[attr-defined]
        while scheduled and (scheduled[0]._cancelled or scheduled[0].when() <= self.time()):  # type: ignore[attr-defined]
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        if ready:
            self._wake()

    def _write_to_self(self) -> None:
        self._wake()

    # ---- Connections

    async def _link(self, on_client: Callable[[], None]) -> Link:
        link = Link(self._world, on_client)
        await asyncio.sleep(link.delay_ns() / S)
        if not self._connect(link):
            raise ConnectionRefusedError(111, "Connection refused")
        return link

    async def create_connection(self, protocol_factory: Any, *_: Any, **named: Any) -> Any:
        """See :meth:`asyncio.loop.create_connection`; without TLS."""
        assert named.get("ssl") is None
        transport = _Transport(self._world, self, protocol_factory())
        transport.begin(await self._link(transport.step))
        return transport, transport.protocol

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.254", 6380))]

    async def sock_connect(self, sock: Any, address: Any) -> None:
        sock.link = await self._link(sock.wake)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        while data:
            sent = sock.send(bytes(data))
            data = data[sent:]
            if data:
                await sock.changed()

    async def sock_recv(self, sock: Any, size: int) -> bytes:
        while True:
            try:
                return bytes(sock.recv(size))
            except BlockingIOError:
                await sock.changed()


class _Transport(asyncio.Transport):
    """A client's end of a link."""

    def __init__(self, world: World, loop: SimulatedEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": SimulatedSocket()})
        self.protocol = protocol
        self._world = world
        self._loop = loop
        self._out = bytearray()
        self._closing = False
        self._link: Link | None = None

    def begin(self, link: Link) -> None:
        self._link = link
        self.protocol.connection_made(self)
        self.step()

    def step(self) -> None:
        """Process the link in the loop; called by the network."""
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        link = self._link
        if link is None or self._closing:
            return
        if link.reset:
            self._end(ConnectionResetError(104, "Connection reset by peer"))
            return
        if self._out and link.to_server.room > 0:
            data = bytes(self._out[: link.to_server.room])
            del self._out[: len(data)]
            link.to_server.send(data)
        while link.to_client.arrived and not self._closing:
            self.protocol.data_received(link.to_client.take(self._world.random.choice((100, 4096, 1 << 18))))
        if link.to_client.ended and not link.to_client.arrived and not self._closing:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._closing = True
        if self._link is not None:
            self._link.close_client()
        self._loop.call_soon(self.protocol.connection_lost, error)

    def write(self, data: Any) -> None:
        self._out += data
        self.step()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closing:
            self._end(None)


class SimulatedSocket:
    """A client's socket, with the methods that ``links.py`` uses."""

    def __init__(self, *_: Any) -> None:
        self.link: Link | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def setblocking(self, flag: bool) -> None:
        """No-op."""

    def setsockopt(self, *_: int) -> None:
        """No-op."""

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def send(self, data: bytes) -> int:
        assert self.link is not None
        if self.link.reset:
            raise ConnectionResetError(104, "Connection reset by peer")
        taken = data[: max(self.link.to_server.room, 0)]
        self.link.to_server.send(taken)
        return len(taken)

    def recv(self, size: int, flags: int = 0) -> bytes:
        assert self.link is not None
        if self.link.reset:
            raise ConnectionResetError(104, "Connection reset by peer")
        stream = self.link.to_client
        if not stream.arrived and not stream.ended:
            raise BlockingIOError
        return bytes(stream.arrived[:size]) if flags & socket.MSG_PEEK else stream.take(size)

    def shutdown(self, how: int) -> None:
        if self.link is not None:
            self.link.to_server.shut()

    def close(self) -> None:
        if self.link is not None:
            self.link.close_client()
