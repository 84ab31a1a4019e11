"""A network of byte streams: bytes arrive in pieces, late, or never, and a connection may end in order or not.

A link has two directions, each with a bounded buffer. Only the bytes of one direction keep their order. A half-open
link loses all bytes without a sign to either side, as if a machine had lost power.
"""

import itertools
from collections.abc import Callable, Sequence

from world import MS, US, World


class Stream:
    """One direction of a link.

    Attributes:
        ended: True if the receiver knows that no more bytes follow.
    """

    def __init__(self, world: World, link: "Link", capacity: int, notify: Callable[[], None]) -> None:
        self._world = world
        self._link = link
        self._capacity = capacity
        self._notify_receiver = notify
        self.notify_sender: Callable[[], None] = lambda: None
        self.arrived = bytearray()
        self.ended = False
        self._in_flight = 0
        self._last_ns = 0
        self._shut = False

    @property
    def room(self) -> int:
        """Number of bytes that may be sent now."""
        return 0 if self._shut else self._capacity - self._in_flight - len(self.arrived)

    def send(self, data: bytes) -> None:
        self._in_flight += len(data)
        while data:
            size = len(data) if self._world.chance(0.7) else self._world.random.randint(1, len(data))
            piece, data = data[:size], data[size:]
            self._deliver(lambda piece=piece: self._arrive(piece))  # type: ignore[misc]

    def shut(self) -> None:
        """Stop sending. The receiver sees the end behind the last byte."""
        if not self._shut:
            self._shut = True
            self._deliver(self._end)

    def _deliver(self, function: Callable[[], None]) -> None:
        due = self._world.now_ns + self._link.delay_ns()
        self._last_ns = max(self._last_ns, due)
        self._world.after(self._last_ns - self._world.now_ns, "network", function)

    def _arrive(self, piece: bytes) -> None:
        if self._link.is_lost:
            return
        self._in_flight -= len(piece)
        self.arrived += piece
        self._notify_receiver()

    def _end(self) -> None:
        if not self._link.is_lost:
            self.ended = True
            self._notify_receiver()

    def take(self, size: int) -> bytes:
        taken = bytes(self.arrived[:size])
        del self.arrived[:size]
        if taken and not self._link.is_lost:
            self._world.soon("network", self.notify_sender)
        return taken

    def drop(self) -> None:
        self.arrived.clear()


class Link:
    """A connection between a client and a server.

    Attributes:
        reset: True if both ends get an error.
        is_lost: True if it loses all bytes silently.
        server_gone_ns: Time when the server's end was closed; later bytes of the client have no effect.
    """

    _numbers = itertools.count(1)

    def __init__(self, world: World, on_client: Callable[[], None]) -> None:
        self.world = world
        self.on_client = on_client
        self.on_server: Callable[[], None] = lambda: None
        self.reset = False
        self.half_open = False
        self.server_gone_ns: int | None = None
        self._slow = world.random.choice((1, 1, 1, 20))
        capacity = world.random.choice((4 << 10, 32 << 10, 64 << 10, 256 << 10))
        self.to_server = Stream(world, self, capacity, lambda: self.on_server())
        self.to_client = Stream(world, self, capacity, lambda: self.on_client())
        self.to_server.notify_sender = lambda: self.on_client()
        self.to_client.notify_sender = lambda: self.on_server()

    @property
    def is_lost(self) -> bool:
        return self.half_open or self.reset

    def delay_ns(self) -> int:
        chance = self.world.random
        late = chance.random() < 0.02
        return self._slow * (chance.randrange(10 * US, 200 * US) + (chance.randrange(20 * MS) if late else 0))

    def break_(self) -> None:
        """Reset it: both ends get an error, and bytes in transit are lost."""
        if not self.reset:
            self.reset = True
            self.to_server.drop()
            self.to_client.drop()
            self.world.soon("network", lambda: self.on_server())
            self.world.soon("network", lambda: self.on_client())

    def close_client(self) -> None:
        """Close the client's side. With unread bytes, or after a crash of the client, this is a reset."""
        if self.to_client.arrived:
            self.break_()
        self.to_server.shut()

    def close_server(self) -> None:
        if self.server_gone_ns is None:
            self.server_gone_ns = self.world.now_ns
        if self.to_server.arrived and not self.half_open:
            self.break_()
        self.to_client.shut()
        self.to_server.drop()


class ServerSocket:
    """The server's end of a link: a non-blocking socket and its transport."""

    is_secure = False
    read_wants_write = False
    write_wants_read = False

    def __init__(self, link: Link, descriptor: int) -> None:
        self.link = link
        self.socket = self
        self._descriptor = descriptor
        self._world = link.world
        self.closed = False

    def fileno(self) -> int:
        return self._descriptor

    def getsockopt(self, *_: int) -> bytes:
        """Return nothing: an older kernel."""
        return b""

    @property
    def readable(self) -> bool:
        """True if recv() would not raise BlockingIOError."""
        stream = self.link.to_server
        return bool(stream.arrived) or stream.ended or self.link.reset

    @property
    def writable(self) -> bool:
        """True if send() would not raise BlockingIOError."""
        return self.link.to_client.room > 0 or self.link.reset

    def recv(self, size: int) -> bytes:
        assert not self.closed
        if self.link.reset:
            raise ConnectionResetError("reset by peer")
        stream = self.link.to_server
        if not stream.arrived:
            if stream.ended:
                return b""
            raise BlockingIOError
        size = min(size, len(stream.arrived))
        if self._world.chance(0.2):
            size = self._world.random.randint(1, size)
        return stream.take(size)

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        assert not self.closed
        if self.link.reset:
            raise ConnectionResetError("reset by peer")
        stream = self.link.to_client
        room = stream.room
        if room <= 0:
            raise BlockingIOError
        if self._world.chance(0.2):
            room = self._world.random.randint(1, room)
        pieces = []
        for part in parts:
            pieces.append(bytes(part[:room]))
            room -= len(pieces[-1])
            if room <= 0:
                break
        data = b"".join(pieces)
        stream.send(data)
        return len(data)

    def pending(self) -> int:
        return 0

    def shake_hands(self) -> bool:
        return True

    def user_name(self) -> str:
        return ""

    def end(self) -> None:
        if self.link.reset:
            raise OSError("not connected")
        self.link.to_client.shut()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.link.close_server()
