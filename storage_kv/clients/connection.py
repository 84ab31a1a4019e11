"""One client's socket: bytes in, commands executed, replies out.

Some facts. asyncio's transports on Python 3.11 join what is written into one bytearray and, after each partial send,
move what is left to its front: a reply of 32 MiB is copied once and then moved dozens of times. Its stream readers
copy what arrives twice. A future for every wait costs about 20 us, as much as executing ten small commands.

Consequence: sockets are non-blocking and driven by the event loop's readiness callbacks directly.

Where the bytes of a large value are copied: by the kernel from the socket into the buffer in which the value stays
(``recv_into``), and by the kernel from that buffer into the sockets that fetch it (``sendmsg``). Nowhere in between,
but for at most ``_RECEIVE_BYTES`` of its start, which may have arrived together with the command's other arguments.

Some parts of replies are not known yet when their command has been executed (``Pending``): a value that is on its way
from a device, an OK that waits until a write is durable. They keep their place; the commands behind them are executed,
within limits, and nothing behind a pending part is sent before it. So there are two queues (_replies.py): what
may be sent, and what begins with a pending part. Word that one is known comes from other threads, through the
connection's :class:`~storage_kv.clients.signal.Signal`.

An engine may have no room: for a buffer to receive a value in, or for one more write. Then the connection reads and
executes nothing until the engine says when to try again, which the client feels as TCP's back-pressure; after
``stall_timeout_s`` of that it is told that there is no memory.

How bytes cross the wire is the transport's business (transport.py); what TLS needs beyond is in secure_connection.py.

Replies to small commands that arrived together leave together. Nothing is executed while more than
``output_buffer_bytes_max`` waits for the client, nor read while commands wait to be executed, so that a client that
does not read stops itself, and holds at most that much and one reply.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from shadowserve.errors import ProtocolError
from shadowserve.resp import NEED_DATA, CommandReader, LargeBulk, NeedData, encode_error
from storage_kv.access.limits import RateLimiter
from storage_kv.clients.event_loop import READ, WRITE, EventLoop
from storage_kv.clients.host import Host
from storage_kv.clients.replies import Replies
from storage_kv.clients.requests import limits_of, with_bytes
from storage_kv.clients.signal import Signal
from storage_kv.clients.transport import Transport
from storage_kv.commands import execute, execute_run
from storage_kv.engine import BusyError
from storage_kv.engines import buffers
from storage_kv.node import Argument, Later, Outgoing, Part, Pending, Reply, Session

__all__ = ["Connection"]

_log = logging.getLogger(__name__)

_RECEIVE_BYTES: Final = 64 << 10
"""Asked of the kernel at most for small things at a time: 2,000 commands, and below what malloc maps anew each time."""

_RECEIVE_FEW_BYTES: Final = 4 << 10
"""Asked of a client that sends less than this at a time: giving back most of 64 KiB takes malloc a while."""

_LINGER_S: Final = 1.0
"""How long a closed connection still reads and drops, so that the last reply is not lost to a reset (RFC 1122)."""

_PENDING_MAX: Final = 256
"""Pending parts of one client beyond which no more of its commands are executed: enough to keep every device busy."""

_SET_VALUE: Final = 2  # the position of SET's value among its arguments

_NO_ROOM: Final = "no room to write for too long: devices are slower than those who write; try again later"

_Event: TypeAlias = list[Argument] | LargeBulk | Literal[NeedData.NEED_DATA]

_TLS_GREETING: Final = b"\x16\x03"  # how a TLS client's first record begins; no command does


class Connection:
    """A client's connection, from acceptance to its end."""

    __slots__ = (
        "_at_end",
        "_begun",
        "_blocked",
        "_blocked_since_s",
        "_buffer",
        "_closed",
        "_descriptor",
        "_ends_turn",
        "_engine",
        "_holds_replies",
        "_host",
        "_interest",
        "_last_progress_s",
        "_lingering",
        "_loop",
        "_more",
        "_node",
        "_paused",
        "_reader",
        "_receive_bytes",
        "_received_bytes",
        "_received_in_place",
        "_replies",
        "_retry",
        "_room",
        "_scheduled",
        "_signal",
        "_socket",
        "_transport",
        "_wanted_bytes",
        "_working",
        "session",
    )

    def __init__(self, host: Host, transport: Transport, session: Session, loop: EventLoop) -> None:
        """Take over a non-blocking socket, in its transport, and serve it until it ends."""
        self._host = host
        self._node = host.node
        self._engine = host.node.engine
        self._loop = loop
        self._transport = transport
        self._socket = transport.socket
        self._descriptor = transport.socket.fileno()
        self.session = session
        self._reader = CommandReader(limits_of(host.node, session))
        self._signal = Signal(loop, self._on_signal)
        self._room = Signal(loop, self._on_room)
        self._replies = Replies(host.node, self._signal.send)
        self._interest = 0  # what the loop waits for
        self._begun = False  # something has been read
        self._paused = False  # nothing is read or executed before a certain time
        self._holds_replies = False  # and nothing sent
        self._working = False  # a Later is under way
        self._more = False  # there may be whole commands in the reader
        self._blocked = False  # the engine has no room: until the signal
        self._blocked_since_s = 0.0  # without having got on since
        self._retry: Callable[[], Reply] | None = None  # what the engine had no room for
        self._wanted_bytes = -1  # of a large argument for which there is no buffer yet
        self._buffer: memoryview | None = None  # the engine's, of the command in progress
        self._scheduled = False  # the next turn will come without any event
        self._ends_turn = False  # this turn's end is still to come
        self._received_in_place = False
        self._receive_bytes = _RECEIVE_FEW_BYTES
        self._received_bytes = 0  # not yet in the node's counters
        self._at_end = False  # the client has finished sending
        self._lingering = False
        self._closed = False
        self._last_progress_s = time.monotonic()
        session.finish = self._finish_soon
        self._update_interest()

    # ---- Reading and executing

    def _on_event(self, events: int) -> None:
        """Read or write; an error or the peer's end wakes whatever waits, to find it out for itself."""
        interest = self._interest
        try:
            if events & ~WRITE and interest & READ:
                if self._lingering:
                    self._on_lingering()
                else:
                    self._on_readable()
            if events & ~READ and interest & WRITE and not self._closed:
                self._on_writable()
        except Exception:
            self._fail_by_bug()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step. A bug of ours must cost this client its connection, not all of them the server."""
        try:
            step()
        except Exception:
            self._fail_by_bug()

    def _fail_by_bug(self) -> None:
        _log.exception("connection_failed address=%s", self.session.address)
        self.abort()

    def _on_readable(self) -> None:
        try:
            view = self._reader.get_buffer() if self._received_in_place else None
            if view is not None:
                size = self._transport.recv_into(view)
                self._reader.advance(size)
            else:
                data = self._transport.recv(self._receive_bytes)
                size = len(data)
                self._receive_bytes = _RECEIVE_BYTES if size >= _RECEIVE_FEW_BYTES else _RECEIVE_FEW_BYTES
                if not self._begun:
                    self._begun = True
                    if data[:2] == _TLS_GREETING:
                        self._refuse_tls()
                        return
                self._reader.feed(data)
        except (BlockingIOError, InterruptedError):
            self._update_interest()
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
        self._execute()
        # Sending wakes a client that sleeps, which costs as much as a few commands and takes the core from this thread
        # where there is no other. So all clients that have sent something are served first.
        if not self._ends_turn:
            self._ends_turn = True
            self._loop.call_soon(self._end_turn)

    def _refuse_tls(self) -> None:  # the client's library says 'wrong version number'
        with self._node.lock:
            self._replies.append(self._give_up(ProtocolError("the client speaks TLS, this server does not")))
        self._after_step()

    # ---- Turns

    def _take_turn(self) -> None:
        self._scheduled = False
        self._guarded(self._process)

    def _pause(self) -> None:
        """Read and execute nothing for a while: the client's own buffers fill, and it waits."""
        session, self._paused = self.session, True
        self._holds_replies = session.pause_holds_replies
        self._loop.call_at(session.pause_until_s, lambda: self._guarded(self._end_pause))
        session.pause_until_s, session.pause_holds_replies = 0.0, False

    def _end_pause(self) -> None:
        self._paused = self._holds_replies = False
        self._last_progress_s = time.monotonic()
        if not self._closed:
            self._process()

    def _process(self) -> None:
        """Execute commands, and send."""
        if self._closed or self._working or self._lingering:
            return
        self._execute()
        self._after_step()

    def _execute(self) -> None:
        """Execute commands until the reader has none, the client's turn is over or its replies are too many."""
        if self._closed or self._working or self._lingering:
            return
        if not self._paused:
            session = self.session
            with self._node.lock:
                if session.limiter is None:
                    self._execute_some()
                else:
                    self._execute_within(session.limiter)
            if session.pause_until_s:
                self._pause()

    def _execute_within(self, limiter: RateLimiter) -> None:
        """Execute and charge the tenant for it; beyond its rates, its clients first wait until they have earned it."""
        node, received_bytes, commands = self._node, self._received_bytes, self._node.counters.commands
        if not limiter.wait_s(time.monotonic()):
            self._execute_some()
            limiter.charge(node.counters.commands - commands, received_bytes)
        if wait_s := limiter.wait_s(time.monotonic()):
            node.counters.throttled += 1
            limiter.throttled += 1
            self._more = True
            self.session.pause_until_s = max(self.session.pause_until_s, time.monotonic() + wait_s)

    def _execute_some(self) -> None:
        node, session, reader = self._node, self.session, self._reader
        node.counters.input_bytes += self._received_bytes
        self._received_bytes = 0
        output_max = node.config.output_buffer_bytes_max
        left = node.config.pipeline_commands_max
        small: list[bytes] = []
        small_bytes = 0
        self._more = True
        while left > 0:
            if session.pause_until_s:
                break
            room = output_max - self._replies.out_bytes - small_bytes
            if session.closing or room <= 0 or (self._replies.pendings and self._is_far_ahead()):
                self._more = reader.in_progress or self._retry is not None or bool(session.executing)
                break
            reply: Reply | None = None
            ready = reader.ready()
            if ready and self._retry is None and not session.executing:
                run = ready[0]
                executed, replies, reply = execute_run(node, session, run, left, room)
                if executed:
                    left -= executed
                    if executed * run[1] == len(run[0]):
                        ready.popleft()
                    else:
                        reader.skip_ready(executed)
                    small.append(replies)
                    small_bytes += len(replies)
                    if reply is None:
                        if reader.in_progress:
                            continue
                        self._more = False  # most often
                        break
            if reply is None:
                left -= 1
                is_within = bool(session.executing)
                reply = self._execute_next(small)
                if reply is None:
                    break
                if session.executing and not is_within:  # EXEC: what fits a turn is executed in this one
                    left = max(left, min(len(session.executing), node.config.pipeline_commands_max))
            if isinstance(reply, Later):
                self._start_work(reply)
                break
            if self._buffer is not None:
                self._discard_buffer()
            if not session.replies or session.skip:
                self._swallow(reply)
            elif isinstance(reply, bytes):
                small.append(reply)
                small_bytes += len(reply)
            else:
                if small:
                    self._replies.append(b"".join(small))
                    small, small_bytes = [], 0
                self._replies.extend(reply)
        if small:
            self._replies.append(b"".join(small))

    def _execute_next(self, small: list[bytes]) -> Reply | None:
        """Execute one command, whatever it is; None if nothing more is to be executed now.

        Last words to a client that is given up are added to ``small``.
        """
        session, reader = self.session, self._reader
        was_authenticated = session.authenticated
        try:
            if self._retry is not None:
                return self._try_again()
            command: _Event
            if session.executing:
                command = session.executing.popleft()
            else:
                command = reader.next_command() if self._wanted_bytes < 0 else LargeBulk(self._wanted_bytes)
            if isinstance(command, LargeBulk) or self._received_in_place:
                command = self._take_large(command)
            if not isinstance(command, list):
                # The next argument may be large as well, or there is no buffer for this one.
                self._more = self._blocked or isinstance(command, LargeBulk)
                return None
            reply = execute(self._node, session, command)
        except (ProtocolError, MemoryError) as error:
            small.append(self._give_up(error))
            return None
        except BusyError as error:
            if self._retry is None:
                assert isinstance(command, list)
                self._retry = partial(execute, self._node, session, command)
            self._block(error)
            return None
        if session.authenticated is not was_authenticated:
            reader.limits = limits_of(self._node, session)
        return reply

    def _is_far_ahead(self) -> bool:
        """Return whether as much waits behind pending parts as may."""
        return (
            self._replies.pendings >= _PENDING_MAX
            or self._replies.waiting_bytes >= self._node.config.read_ahead_bytes_max
        )

    def _take_large(self, command: _Event) -> _Event:
        """Provide for a large argument, or return the command that had one."""
        if isinstance(command, LargeBulk):
            view = self._allocate(command.size)
            if view is None:
                self._wanted_bytes = command.size
                self._block(None)
                return NEED_DATA
            self._wanted_bytes, self._blocked_since_s = -1, 0.0
            self._reader.provide(view)
            self._received_in_place = True
            command = self._reader.next_command()
        if isinstance(command, list):
            self._received_in_place = False
            command = with_bytes(command)
        return command

    def _allocate(self, size: int) -> memoryview | None:
        """Return a buffer for a large argument: the engine's, where it is a value to be stored now."""
        arguments, waits = self._reader.arguments, self.session.transaction is not None
        if waits or len(arguments) != _SET_VALUE or bytes(arguments[0][:4]).upper() != b"SET":
            return buffers.allocate(size)
        self._buffer = self._engine.allocate(size, self._room.send)
        return self._buffer

    def _discard_buffer(self) -> None:
        """Give the engine's buffer back, unless it has been stored; with the node's lock held."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._engine.discard(buffer)

    def _block(self, error: BusyError | None) -> None:
        """Stop until the engine has room; without an error, it was given the signal already."""
        self._blocked = True
        self._blocked_since_s = self._blocked_since_s or time.monotonic()
        if error is not None:
            error.again.then(self._room.send)

    def _try_again(self) -> Reply:
        assert self._retry is not None
        reply = self._retry()
        self._retry, self._blocked_since_s = None, 0.0
        return reply

    def _on_room(self) -> None:
        """Try what the engine had no room for."""
        self._blocked = False
        self._guarded(self._process)

    def _stop_waiting_for_room(self) -> None:
        """Tell the client that there was no room for too long."""
        _log.info("client_refused address=%s reason='no room in the engine'", self.session.address)
        with self._node.lock:
            if self._retry is None:
                self._replies.append(self._give_up(MemoryError(_NO_ROOM)))
            else:
                self._retry = None
                self._discard_buffer()
                self._node.counters.errors += 1
                self._answer(encode_error(f"OOM {_NO_ROOM}"))
        self._blocked, self._blocked_since_s, self._wanted_bytes = False, 0.0, -1
        self._last_progress_s = time.monotonic()
        self._process()

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
        finish = partial(later.finish, future.result())
        reply: Reply | None = None
        with self._node.lock:
            try:
                reply = finish()
            except BusyError as error:
                if not self._closed:
                    self._retry = finish
                    self._block(error)
            else:
                if not isinstance(reply, Later):
                    self._answer(reply)
            if self._closed or (self._retry is None and not isinstance(reply, Later)):
                self._discard_buffer()
        self._last_progress_s = time.monotonic()
        if isinstance(reply, Later) and not self._closed:
            self._start_work(reply)
        else:
            self._process()

    def _answer(self, reply: bytes | list[Part]) -> None:
        """Queue the reply of a command that has taken its time."""
        if self._closed or not self.session.replies or self.session.skip:
            self._swallow(reply)
        else:
            self._replies.extend([reply] if isinstance(reply, bytes) else reply)

    def _swallow(self, reply: bytes | list[Part]) -> None:
        """Drop a reply that the client does not want."""
        self.session.skip = max(self.session.skip - 1, 0)
        if not isinstance(reply, bytes):
            for part in reply:
                if isinstance(part, Pending):
                    part.abandon()

    # ---- Replies

    def _on_signal(self) -> None:
        """Send what is known by now."""
        self._guarded(self._resume)

    def _resume(self) -> None:
        if self._closed or self._lingering:
            return
        with self._node.lock:
            self._replies.advance()
        self._last_progress_s = time.monotonic()
        if self._working:
            self._after_step()
        else:
            self._process()

    def _flush(self) -> None:
        """Send what the kernel takes."""
        if self._holds_replies:
            return
        replies = self._replies
        sent_bytes = 0
        sent_parts: list[Outgoing] = []
        try:
            while replies.out:
                sent_bytes += replies.send_to(self._transport, sent_parts)
                if replies.out and replies.is_cut:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.abort()
        if sent_bytes:
            self._last_progress_s = time.monotonic()
            with self._node.lock:
                self._node.counters.output_bytes += sent_bytes
                if self.session.limiter is not None:
                    self.session.limiter.charge(0, sent_bytes)
                for part in sent_parts:
                    part.release(self._engine)

    def _on_writable(self) -> None:
        self._flush()
        if self._closed:
            return
        self.session.pending_output_bytes = self._replies.out_bytes
        if self._may_execute():
            self._process()
        else:
            self._update_interest()
            self._close_if_done()

    # ---- Turns and the end

    def _end_turn(self) -> None:
        self._ends_turn = False
        if not self._closed:
            try:
                self._after_step()
            except Exception:
                self._fail_by_bug()

    def _after_step(self) -> None:
        """Send what there is, then wait for what is missing: bytes, room, or the next turn."""
        if self._replies.out:
            self._flush()
            if self._closed:
                return
        self.session.pending_output_bytes = self._replies.out_bytes
        if self._more and not self._scheduled and self._may_execute():
            self._scheduled = True
            self._loop.call_soon(self._take_turn)
        self._update_interest()
        if self.session.closing:
            self._close_if_done()

    def _may_execute(self) -> bool:
        """Return whether there may be a command, and nothing keeps it from being executed."""
        if not self._more or self.session.closing or self._working or self._blocked or self._paused:
            return False
        return self._replies.out_bytes < self._node.config.output_buffer_bytes_max and not self._is_far_ahead()

    def _update_interest(self) -> None:
        """Tell the event loop what to wait for."""
        interest = self._interest_now()
        if interest != self._interest:
            self._watch(interest)

    def _interest_now(self) -> int:
        reads = self._lingering or not (self._more or self._working or self._paused or self.session.closing)
        return (READ if reads else 0) | (WRITE if self._replies.out and not self._holds_replies else 0)

    def _watch(self, interest: int) -> None:
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
        if (
            not self.session.closing
            or self._replies.out
            or self._replies.waiting
            or self._working
            or self._lingering
            or self._closed
        ):
            return
        if self._at_end:
            self.abort()
            return
        self._linger()

    def _linger(self) -> None:
        # Closing with unread bytes makes the kernel send a reset, which may overtake the last reply. So end our side,
        # and read and drop until the client ends its.
        self._lingering = True
        try:
            self._transport.end()
        except OSError:
            self.abort()
            return
        self._last_progress_s = time.monotonic()
        self._update_interest()

    def _on_lingering(self) -> None:
        try:
            if self._transport.recv(_RECEIVE_BYTES):
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

    def _finish_soon(self) -> None:
        """From any thread, finish()."""
        self._loop.call_threadsafe(lambda: self._guarded(self.finish))

    def abort(self) -> None:
        """End at once, whatever is under way."""
        if self._closed:
            return
        self._closed = True
        if self._interest:
            self._loop.remove(self._descriptor)
            self._interest = 0
        self._socket.close()
        self._signal.cut()
        self._room.cut()
        with self._node.lock:
            self._node.counters.input_bytes += self._received_bytes
            self._node.unwatch(self.session)
            self._replies.drop()
            if not self._working:  # else its end does
                self._discard_buffer()
        self._retry = None
        self.session.finish = lambda: None  # it led back here: nothing but a full collection would have freed the two
        self._host.forget(self)

    def check_time(self, now_s: float) -> None:
        """End the connection if it has stood still for longer than the configuration allows."""
        config, counters = self._node.config, self._node.counters
        still_s = now_s - self._last_progress_s
        if self._lingering:
            if still_s > _LINGER_S:
                self.abort()
            return
        if self._working or self._paused:
            return
        if self._blocked_since_s:
            if now_s - self._blocked_since_s > config.stall_timeout_s:
                self._guarded(self._stop_waiting_for_room)
            return
        # What waits for a device, and what is not read for that reason, is not the client's fault.
        if self._replies.out or (self._reader.in_progress and self._interest & READ):
            if still_s > config.stall_timeout_s:
                with self._node.lock:
                    counters.stalled_clients += 1
                what = "reading its replies" if self._replies.out else "sending its request"
                _log.info("client_stalled address=%s still_s=%.1f while=%r", self.session.address, still_s, what)
                self.abort()
        elif config.idle_timeout_s and not self._replies.waiting and still_s > config.idle_timeout_s:
            with self._node.lock:
                counters.idle_clients += 1
            _log.info("client_idle address=%s idle_s=%.1f", self.session.address, still_s)
            self.abort()
