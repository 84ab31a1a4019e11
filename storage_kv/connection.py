"""One client's socket: bytes in, commands executed, replies out.

Some facts. asyncio's transports on Python 3.11 join what is written into one bytearray and, after each partial send,
move what is left to its front: a reply of 32 MiB is copied once and then moved dozens of times. Its stream readers
copy what arrives twice. A future for every wait costs about 20 us, as much as executing ten small commands.

Consequence: sockets are non-blocking and driven by the event loop's readiness callbacks directly.

Where the bytes of a large value are copied: by the kernel from the socket into the buffer in which the value stays
(``recv_into``), and by the kernel from that buffer into the sockets that fetch it (``sendmsg``). Nowhere in between,
but for at most ``_RECEIVE_BYTES`` of its start, which may have arrived together with the command's other arguments.

Replies to small commands that arrived together leave together. Nothing is executed while more than
``output_buffer_bytes_max`` waits for the client, nor read while commands wait to be executed, so that a client that
does not read stops itself, and holds at most that much and one reply.
"""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, Protocol

from shadowserve.errors import ProtocolError
from shadowserve.resp import CommandReader, LargeBulk, Limits, encode_error
from storage_kv.buffers import allocate
from storage_kv.commands import execute
from storage_kv.engine import Item
from storage_kv.event_loop import READ, WRITE, EventLoop
from storage_kv.node import Argument, Later, Node, Part, Session

__all__ = ["Connection", "Host"]

_log = logging.getLogger(__name__)

_RECEIVE_BYTES: Final = 64 << 10
"""Asked of the kernel for small things at a time: 2,000 small commands, and below what malloc maps anew each time."""

_GATHER_PARTS_MAX: Final = 64
"""Buffers in one sendmsg(); far below Linux's 1,024, and enough that the call's own cost vanishes."""

_LINGER_S: Final = 1.0
"""How long a closed connection still reads and drops, so that the last reply is not lost to a reset (RFC 1122)."""

_UNAUTHENTICATED_ITEMS_MAX: Final = 10
_UNAUTHENTICATED_BULK_BYTES_MAX: Final = 16 << 10  # both as Redis


class Host(Protocol):
    """What a connection needs of the server that accepted it."""

    @property
    def node(self) -> Node:
        """The node that it serves."""

    @property
    def workers(self) -> Executor:
        """Threads for work that is too long for the event loop."""

    def forget(self, connection: "Connection") -> None:
        """Take note that a connection has ended; called in the connection's thread, without the node's lock."""


class Connection:
    """A client's connection, from acceptance to its end."""

    __slots__ = (
        "_at_end",
        "_closed",
        "_descriptor",
        "_engine",
        "_host",
        "_interest",
        "_last_progress_s",
        "_lingering",
        "_loop",
        "_more",
        "_node",
        "_offset",
        "_out",
        "_out_bytes",
        "_reader",
        "_received_bytes",
        "_received_in_place",
        "_scheduled",
        "_socket",
        "_working",
        "session",
    )

    def __init__(self, host: Host, sock: socket.socket, session: Session, loop: EventLoop) -> None:
        """Take over a non-blocking socket and serve it until it ends."""
        self._host = host
        self._node = host.node
        self._engine = host.node.engine
        self._loop = loop
        self._socket = sock
        self._descriptor = sock.fileno()
        self.session = session
        self._reader = CommandReader(limits_of(host.node, session))
        self._out: deque[bytes | Part] = deque()
        self._out_bytes = 0
        self._offset = 0  # bytes of the first part that are sent
        self._interest = 0  # what the loop waits for
        self._working = False  # a Later is under way
        self._more = False  # there may be whole commands in the reader
        self._scheduled = False  # the next turn will come without any event
        self._received_in_place = False
        self._received_bytes = 0  # not yet in the node's counters
        self._at_end = False  # the client has finished sending
        self._lingering = False
        self._closed = False
        self._last_progress_s = time.monotonic()
        self._update_interest()

    # ---- Reading and executing

    def _on_event(self, events: int) -> None:
        """Read or write; an error or the peer's end wakes whatever waits, to find it out for itself."""
        interest = self._interest
        if events & ~WRITE and interest & READ:
            self._guarded(self._on_lingering if self._lingering else self._on_readable)
        if events & ~READ and interest & WRITE and not self._closed:
            self._guarded(self._on_writable)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step. A bug of ours must cost this client its connection, not all of them the server."""
        try:
            step()
        except Exception:
            _log.exception("connection_failed address=%s", self.session.address)
            self.abort()

    def _on_readable(self) -> None:
        try:
            view = self._reader.get_buffer()
            if view is not None:
                size = self._socket.recv_into(view)
                self._reader.advance(size)
            else:
                data = self._socket.recv(_RECEIVE_BYTES)
                size = len(data)
                self._reader.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        self._received_bytes += size
        self._last_progress_s = time.monotonic()
        if size == 0:
            self._at_end = True
            self.session.closing = True
            self._after_step()
            return
        self._process()

    def _take_turn(self) -> None:
        self._scheduled = False
        self._guarded(self._process)

    def _process(self) -> None:
        """Execute commands until the reader has none, the client's turn is over or its replies are too many."""
        if self._closed or self._working or self._lingering:
            return
        with self._node.lock:
            self._execute_some()
        self._after_step()

    def _execute_some(self) -> None:
        node, session, reader = self._node, self.session, self._reader
        node.counters.input_bytes += self._received_bytes
        self._received_bytes = 0
        output_max = node.config.output_buffer_bytes_max
        small: list[bytes] = []
        small_bytes = 0
        self._more = True
        for _ in range(node.config.pipeline_commands_max):
            if session.closing or self._out_bytes + small_bytes >= output_max:
                self._more = reader.in_progress
                break
            try:
                command = reader.next_command()
                if isinstance(command, LargeBulk):
                    reader.provide(allocate(command.size))
                    self._received_in_place = True
                    command = reader.next_command()
            except (ProtocolError, MemoryError) as error:
                small.append(self._give_up(error))
                break
            if not isinstance(command, list):
                self._more = isinstance(command, LargeBulk)  # the next argument is large as well
                break
            if self._received_in_place:
                self._received_in_place = False
                command = _with_bytes(command)
            was_authenticated = session.authenticated
            reply = execute(node, session, command)
            if session.authenticated is not was_authenticated:
                reader.limits = limits_of(node, session)
            if isinstance(reply, Later):
                self._start_work(reply)
                break
            if not session.replies or session.skip:
                session.skip = max(session.skip - 1, 0)
                continue
            if isinstance(reply, bytes):
                small.append(reply)
                small_bytes += len(reply)
                continue
            if small:
                self._append(b"".join(small))
                small, small_bytes = [], 0
            self._enqueue(reply)
        if small:
            self._append(b"".join(small))

    def _give_up(self, error: Exception) -> bytes:
        """Return the last reply to a client that cannot be followed or served any further."""
        self._node.counters.protocol_errors += isinstance(error, ProtocolError)
        self.session.closing = True
        code = "ERR" if isinstance(error, ProtocolError) else "OOM"
        _log.info("client_refused address=%s reason=%r", self.session.address, str(error))
        return encode_error(f"{code} {error}")

    def _start_work(self, later: Later) -> None:
        self._working = True

        def done(future: "Future[Any]") -> None:
            self._loop.call_threadsafe(lambda: self._guarded(lambda: self._end_work(later, future)))

        self._host.workers.submit(later.work).add_done_callback(done)

    def _end_work(self, later: Later, future: "Future[Any]") -> None:
        self._working = False
        if future.cancelled():  # the server is stopping
            self.abort()
            return
        with self._node.lock:
            self._finish_work(later.finish(future.result()))
        self._last_progress_s = time.monotonic()
        self._process()

    def _finish_work(self, reply: bytes | list[Part]) -> None:
        if self._closed:
            return
        session = self.session
        if not session.replies or session.skip:
            session.skip = max(session.skip - 1, 0)
        else:
            self._enqueue([reply] if isinstance(reply, bytes) else reply)

    # ---- Replies

    def _enqueue(self, parts: list[Part]) -> None:
        """Append parts to what waits to be sent, joining the small ones and holding the items of the others."""
        small: list[bytes] = []
        for part in parts:
            if isinstance(part, bytes):
                small.append(part)
                continue
            if small:
                self._append(b"".join(small))
                small = []
            self._engine.hold(part.item)
            self._out.append(part)
            self._out_bytes += len(part.view)
        if small:
            self._append(b"".join(small))

    def _append(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)

    def _flush(self) -> None:
        """Send what the kernel takes."""
        out = self._out
        sent_bytes = 0
        sent_items: list[Item] = []
        while out:
            first = out[0]
            try:
                if len(out) == 1 and isinstance(first, bytes) and self._offset == 0:
                    sent = self._socket.send(first)
                else:
                    sent = self._socket.sendmsg(self._gather())
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.abort()
                break
            sent_bytes += sent
            if self._consume(sent, sent_items):
                break
        if sent_bytes:
            self._last_progress_s = time.monotonic()
            with self._node.lock:
                self._node.counters.output_bytes += sent_bytes
                for item in sent_items:
                    self._engine.release(item)

    def _gather(self) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = []
        for part in self._out:
            parts.append(part if isinstance(part, bytes) else part.view)
            if len(parts) == _GATHER_PARTS_MAX:
                break
        if self._offset:
            parts[0] = memoryview(parts[0])[self._offset :]
        return parts

    def _consume(self, sent: int, items: list[Item]) -> bool:
        """Take ``sent`` bytes off the front, adding the items of whole parts to ``items``.

        Returns:
            Whether a part is left half sent: the kernel is full.
        """
        self._out_bytes -= sent
        sent += self._offset
        out = self._out
        while out:
            first = out[0]
            size = len(first) if isinstance(first, bytes) else len(first.view)
            if sent < size:
                break
            sent -= size
            out.popleft()
            if not isinstance(first, bytes):
                items.append(first.item)
        self._offset = sent
        return sent > 0

    def _on_writable(self) -> None:
        self._flush()
        if self._closed:
            return
        self.session.pending_output_bytes = self._out_bytes
        if self._more and self._out_bytes < self._node.config.output_buffer_bytes_max:
            self._process()
        else:
            self._update_interest()
            self._close_if_done()

    # ---- Turns and the end

    def _after_step(self) -> None:
        """Send what there is, then wait for what is missing: bytes, room, or the next turn."""
        self._flush()
        if self._closed:
            return
        self.session.pending_output_bytes = self._out_bytes
        may_execute = not self.session.closing and not self._working
        if self._more and may_execute and self._out_bytes < self._node.config.output_buffer_bytes_max:
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._take_turn)
        self._update_interest()
        self._close_if_done()

    def _update_interest(self) -> None:
        """Tell the event loop what to wait for."""
        reads = self._lingering or not (self._more or self._working or self.session.closing)
        interest = (READ if reads else 0) | (WRITE if self._out else 0)
        if interest == self._interest:
            return
        if self._interest == 0:
            self._loop.add(self._descriptor, interest, self._on_event)
        elif interest:
            self._loop.modify(self._descriptor, interest)
        else:  # waiting for nothing, it would still be woken by the peer's end, over and over
            self._loop.remove(self._descriptor)
        self._interest = interest

    def _close_if_done(self) -> None:
        if not self.session.closing or self._out or self._working or self._lingering or self._closed:
            return
        if self._at_end:
            self.abort()
            return
        # Closing with unread bytes makes the kernel send a reset, which may overtake the last reply. So end our side,
        # and read and drop until the client ends its.
        self._lingering = True
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        self._last_progress_s = time.monotonic()
        self._update_interest()

    def _on_lingering(self) -> None:
        try:
            if self._socket.recv(_RECEIVE_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.abort()

    def finish(self) -> None:
        """Execute nothing more; end when what is under way has been answered and sent."""
        self.session.closing = True
        self._after_step()

    def abort(self) -> None:
        """End at once, whatever is under way."""
        if self._closed:
            return
        self._closed = True
        if self._interest:
            self._loop.remove(self._descriptor)
            self._interest = 0
        self._socket.close()
        with self._node.lock:
            self._node.counters.input_bytes += self._received_bytes
            for part in self._out:
                if not isinstance(part, bytes):
                    self._engine.release(part.item)
        self._out.clear()
        self._out_bytes = 0
        self._host.forget(self)

    def check_time(self, now_s: float) -> None:
        """End the connection if it has stood still for longer than the configuration allows."""
        config, counters = self._node.config, self._node.counters
        still_s = now_s - self._last_progress_s
        if self._lingering:
            if still_s > _LINGER_S:
                self.abort()
            return
        if self._working:
            return
        if self._out or self._reader.in_progress:
            if still_s > config.stall_timeout_s:
                with self._node.lock:
                    counters.stalled_clients += 1
                what = "reading its replies" if self._out else "sending its request"
                _log.info("client_stalled address=%s still_s=%.1f while=%r", self.session.address, still_s, what)
                self.abort()
        elif config.idle_timeout_s and still_s > config.idle_timeout_s:
            with self._node.lock:
                counters.idle_clients += 1
            _log.info("client_idle address=%s idle_s=%.1f", self.session.address, still_s)
            self.abort()


def limits_of(node: Node, session: Session) -> Limits:
    """Return what a client may send: little until it has authenticated."""
    config = node.config
    if not session.authenticated:
        return Limits(
            bulk_bytes_max=min(_UNAUTHENTICATED_BULK_BYTES_MAX, config.bulk_bytes_max),
            items_max=_UNAUTHENTICATED_ITEMS_MAX,
            unauthenticated=True,
        )
    return Limits(
        bulk_bytes_max=config.bulk_bytes_max,
        items_max=config.arguments_max,
        total_bytes_max=config.request_bytes_max,
    )


def _with_bytes(command: list[Argument]) -> list[Argument]:
    """Return the command with only SET's value left where it was received: nothing else is worth its buffer."""
    is_set = bytes(command[0][:4]).upper() == b"SET"
    return [
        argument if isinstance(argument, bytes) or (is_set and position == 2) else bytes(argument)
        for position, argument in enumerate(command)
    ]
