"""One client's socket: bytes in, commands executed, replies out.

asyncio's transports on Python 3.11 copy a large reply and then move it dozens of times, its stream readers copy what
arrives twice, and a future for every wait costs as much as ten small commands. So sockets are non-blocking and driven
by the event loop's readiness callbacks directly.

Where the bytes of a large value are copied: by the kernel from the socket into the buffer in which the value stays
(``recv_into``), and by the kernel from that buffer into the sockets that fetch it (``sendmsg``). Nowhere in between,
but for at most ``_RECEIVE_BYTES`` of its start, which may have arrived together with the command's other arguments.

Some parts of replies are not known yet when their command has been executed (``Pending``): a value that is on its way
from a device, an OK that waits until a write is durable. They keep their place; the commands behind them are executed,
within limits, and nothing behind a pending part is sent before it. Word that one is known comes from other threads
(signal.py).

A store may have no room: for a buffer to receive a value in, or for one more write. Then the connection reads and
executes nothing until the store says when to try again, which the client feels as TCP's back-pressure; after
``stall_timeout_s`` of that it is told that there is no memory.

How bytes cross the wire is the transport's business (transport.py, secure_connection.py).

Replies to small commands that arrived together leave together. Nothing is executed while more than
``output_buffer_bytes_max`` waits for the client, nor read while commands wait to be executed: a client that does not
read stops itself, and holds at most that much and one value, since a reply of many is made as it is taken (``More``).
What all clients cost together is bounded in access/memory.py.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, Final

from shadowserve.errors import ForeignProtocolError, ProtocolError
from shadowserve.pool.volume.changes import BusyError
from shadowserve.resp import CommandReader, LargeBulk, encode_error
from storage_kv.access.limits import RateLimiter
from storage_kv.clients.acceptor import Acceptor
from storage_kv.clients.event_loop import READ, WRITE, EventLoop
from storage_kv.clients.holdings import UNCOUNTED_BYTES, Holdings
from storage_kv.clients.intake import Event, Intake
from storage_kv.clients.replies import Replies
from storage_kv.clients.requests import limits_of
from storage_kv.clients.signal import Signal
from storage_kv.clients.transport import Transport
from storage_kv.clients.watched import Watched
from storage_kv.commands import execute, find
from storage_kv.node import More, Outgoing, Part, Pending, Reply
from storage_kv.session import Argument, Session

_log = logging.getLogger(__name__)

_RECEIVE_BYTES: Final = 32 << 10
"""Asked of the kernel at most for small things at a time: 1,000 commands, or 4,700 arguments of a byte. These are read
with the node's lock held."""

_RECEIVE_FEW_BYTES: Final = 4 << 10
"""Asked of a client that sends less than this at a time: giving back most of 64 KiB takes malloc a while."""

_LINGER_S: Final = 1.0
"""How long a closed connection still reads and drops, so that the last reply is not lost to a reset (RFC 1122)."""

_PENDING_MAX: Final = 256
"""Pending parts of one client beyond which no more of its commands are executed: enough to keep every device busy."""

_STRANGERS_OUTPUT_BYTES_MAX: Final = 16 << 10
"""Of replies that wait for a client that has yet to authenticate."""

_NO_ROOM: Final = "no room to write for too long: devices are slower than those who write; try again later"


class Connection(Watched):
    """A client's connection, from acceptance to its end."""

    __slots__ = (
        "_acceptor",
        "_at_end",
        "_blocked",
        "_blocked_since_s",
        "_ends_turn",
        "_store",
        "_holdings",
        "_holds_replies",
        "_intake",
        "_kept_bytes",
        "_last_progress_s",
        "_more",
        "_moved_bytes",
        "_name",
        "_node",
        "_partly",
        "_paused",
        "_reader",
        "_receive_bytes",
        "_received_bytes",
        "_replies",
        "_rest",
        "_retry",
        "_room",
        "_scheduled",
        "_signal",
        "_transport",
        "_working",
    )

    def __init__(self, acceptor: Acceptor, transport: Transport, session: Session, loop: EventLoop) -> None:
        self._acceptor = acceptor
        self._node = acceptor.node
        self._store = acceptor.node.store
        super().__init__(transport.socket, loop, loop.enter(session.share))
        self._transport, self.session = transport, session
        self._reader = CommandReader(limits_of(acceptor.node, session))
        self._signal = Signal(loop, self._lane, self._on_signal)
        self._room = Signal(loop, self._lane, self._on_room)
        self._replies = Replies(acceptor.node, session, self._signal.send)
        self._holdings = Holdings(acceptor.node, session, self)
        self._intake = Intake(acceptor.node, session, self._reader, self._holdings, self._room.send)
        self._moved_bytes = 0  # while anything was held, but for those received and not yet counted
        self._paused = False  # nothing is read or executed before a certain time
        self._holds_replies = False  # and nothing sent
        self._working = False  # another thread works on a reply
        self._more = False  # there may be whole commands in the reader
        self._blocked = False  # the store has no room: until the signal
        self._blocked_since_s = 0.0  # without having got on since
        self._retry: Callable[[], Reply] | None = None  # a command for which there was no room
        self._rest: Callable[[], Reply] | None = None  # what follows of a reply that has begun
        self._kept_bytes = 0  # of the arguments of the command that one of them goes on with
        self._name: Argument = b""  # of the command that was executed last, or is being
        self._partly = False  # a part of that reply is on its way
        self._scheduled = False  # the next turn will come without any event
        self._ends_turn = False  # this turn's end is still to come
        self._receive_bytes = _RECEIVE_FEW_BYTES
        self._received_bytes = 0  # not yet in the node's counters
        self._at_end = False  # the client has finished sending
        self._last_progress_s = time.monotonic()
        session.finish = self._finish_soon
        session.cut = self._cut_soon
        session.admit = self._holdings.admit_apart
        if session.closing:  # since it was accepted, there was another use for its place
            self._cut_soon()
        self._update_interest()

    # ---- Reading and executing

    def _on_readable(self) -> None:
        try:
            view = self._reader.get_buffer() if self._intake.in_place else None
            if view is not None:
                size = self._transport.recv_into(view)
                self._reader.advance(size)
                if 0 < size < len(view) and self.session.limiter is None:  # nothing can be executed yet
                    self._received_bytes += size
                    self._last_progress_s = time.monotonic()
                    return
            else:
                data = self._transport.recv(self._receive_bytes)
                size = len(data)
                if size >= _RECEIVE_FEW_BYTES and self.session.authenticated:
                    self._receive_bytes = _RECEIVE_BYTES
                else:
                    self._receive_bytes = _RECEIVE_FEW_BYTES
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
        # Sending wakes a client that sleeps, which costs as much as a few commands, or takes this thread's core. So all
        # clients that have sent something are served first.
        if not self._ends_turn:
            self._ends_turn = True
            self._loop.call_soon(self._end_turn, self._lane)

    # ---- Turns

    def _take_turn(self) -> None:
        self._scheduled = False
        self._guarded(self._process)

    def _pause(self) -> None:
        """Read and execute nothing for a while: the client's own buffers fill, and it waits."""
        session, self._paused = self.session, True
        self._holds_replies = session.pause_holds_replies
        self._loop.call_at(session.pause_until_s, lambda: self._guarded(self._end_pause), self._lane)
        session.pause_until_s, session.pause_holds_replies = 0.0, False

    def _end_pause(self) -> None:
        self._paused = self._holds_replies = False
        self._last_progress_s = time.monotonic()
        if not self._closed:
            self._process()

    def _process(self) -> None:
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
                if self._is_beyond_link():
                    self._more = True
                    self._account()
                elif session.limiter is None:
                    self._execute_some()
                else:
                    self._execute_within(session.limiter)
            if session.pause_until_s:
                self._pause()
            if session.share != self._lane.tenant:  # it has authenticated
                self._lane = self._loop.move(self._descriptor, self._lane, session.share)
                self._signal.lane = self._room.lane = self._lane

    def _is_beyond_link(self) -> bool:
        """Return whether this client was sent more, in replies that are no layers, than is its part; then it waits."""
        streams = self._node.streams
        if streams is None or streams.others.rate == inf:
            return False
        now_s = time.monotonic()
        wait_s = streams.others.wait_s(self.session, now_s)
        if wait_s:
            self.session.pause_until_s = max(self.session.pause_until_s, now_s + wait_s)
        return wait_s > 0.0

    def _execute_within(self, limiter: RateLimiter) -> None:
        """Execute and charge the tenant for it; beyond its rates, its clients first wait until they have earned it."""
        node, received_bytes, commands = self._node, self._received_bytes, self._node.counters.commands
        if not limiter.wait_s(time.monotonic()):
            self._execute_some()
            limiter.charge(node.counters.commands - commands, received_bytes)
        else:
            self._account()
        if wait_s := limiter.wait_s(time.monotonic()):
            node.counters.throttled += 1
            limiter.throttled += 1
            self._more = True
            self.session.pause_until_s = max(self.session.pause_until_s, time.monotonic() + wait_s)

    def _execute_some(self) -> None:
        node, session, reader, queue = self._node, self.session, self._reader, self._replies
        received_bytes, self._received_bytes = self._received_bytes, 0
        node.counters.input_bytes += received_bytes
        output_max = self._output_bytes_max
        left = node.config.pipeline_commands_max
        small: list[bytes] = []
        small_bytes = 0
        in_progress = self._more = True
        while left > 0 and not session.pause_until_s:
            # What has begun goes on before what the client sends.
            in_progress = self._more = reader.in_progress or bool(self._retry or self._rest or session.executing)
            if not self._more or (session.closing and self._rest is None):
                break
            if queue.out_bytes + small_bytes >= output_max or (queue.pendings and self._is_far_ahead()):
                break
            left -= 1
            is_within = bool(session.executing)
            reply = self._execute_next(small)
            if reply is None:
                break
            if session.executing and not is_within:  # EXEC: what fits a turn is executed in this one
                left = max(left, min(len(session.executing), node.config.pipeline_commands_max))
            if isinstance(reply, bytes) and session.replies and not session.skip:  # most often
                small.append(reply)
                small_bytes += len(reply)
                self._rest, self._partly, self._kept_bytes = None, False, 0
                if self._intake.bytes or self._intake.refusal:
                    self._intake.let_go()
                continue
            if small:
                queue.append(b"".join(small))
                small, small_bytes = [], 0
            left -= self._take(reply, left)
            if self._working:
                break
        if small:
            queue.append(b"".join(small))
        if (
            in_progress
            or session.transaction
            or session.executing
            or queue.lent_bytes
            or queue.out_bytes + queue.waiting_bytes > UNCOUNTED_BYTES
            or self._holdings.counted
        ):
            self._moved_bytes += received_bytes
            self._account()

    def _take(self, reply: Reply, left: int = 0) -> int:
        """Queue what there is of a reply, unless the client does not want it; return for how many commands it counts.

        What follows of it goes on later: not in this turn if it was many keys' work, for which ``left`` is returned.
        """
        session, is_wanted = self.session, self.session.replies and not self.session.skip
        parts: list[Part] = [reply] if isinstance(reply, bytes) else reply.parts if isinstance(reply, More) else reply
        if is_wanted:
            self._replies.extend(parts)
        else:
            for part in parts:
                if isinstance(part, Pending):
                    part.abandon()
        if not isinstance(reply, More):
            session.skip = max(session.skip - 1, 0)
            self._rest, self._partly, self._kept_bytes = None, False, 0
            self._intake.let_go()
            return len(parts)
        self._partly = self._partly or bool(parts)
        if reply.work is None:
            self._rest = partial(reply.rest, None)
        else:
            self._rest = None
            self._start_work(reply)
        return len(parts) or left

    def _account(self) -> None:
        """Say what this client makes the node hold; with the node's lock held."""
        replies = self._replies
        held = self._intake.bytes + self._reader.held_bytes + replies.out_bytes + replies.waiting_bytes
        held += self.session.queued_bytes + self._kept_bytes
        self._holdings.settle(held - replies.lent_bytes, replies.lent_bytes)

    @property
    def _output_bytes_max(self) -> int:
        most = self._node.config.output_buffer_bytes_max
        return most if self.session.authenticated else min(most, _STRANGERS_OUTPUT_BYTES_MAX)

    def _execute_next(self, small: list[bytes]) -> Reply | None:
        """Execute one command, whatever it is; None if nothing more is to be executed now.

        Last words to a client that is given up are added to ``small``.
        """
        session, was_authenticated = self.session, self.session.authenticated
        step, command = self._rest or self._retry, None
        try:
            if step is None:
                command = session.executing.popleft() if session.executing else self._intake.next_command()
                if not isinstance(command, list):
                    # The next argument may be large as well, or there is no buffer for this one.
                    if self._intake.waits:
                        self._block(None)
                    else:
                        self._blocked_since_s = 0.0
                    self._more = self._blocked or isinstance(command, LargeBulk)
                    return None
                if self._intake.refusal:
                    self._node.counters.errors += 1
                    if session.transaction is not None:
                        session.transaction.fail()
                    return self._intake.refusal
                self._blocked_since_s, self._name = 0.0, command[0]
                step = partial(execute, self._node, session, command)
            if self._node.lent.is_tight and not self._may_lend():
                self._keep(step, command)
                self._block(None)
                return None
            self._node.store.client = session.id
            reply = step()
            if isinstance(reply, More) and isinstance(command, list):
                self._weigh(command)
        except (ProtocolError, MemoryError) as error:
            self._give_up(error, small)
            return None
        except BusyError as error:
            assert step is not None
            self._keep(step, command)
            self._block(error)
            return None
        self._retry, self._blocked_since_s = None, 0.0
        if session.authenticated is not was_authenticated:
            self._reader.limits = limits_of(self._node, session)
        return reply

    def _keep(self, step: Callable[[], Reply], command: Event | None) -> None:
        """Take note of what is to be tried again; what follows of a reply is known already."""
        self._retry = None if self._rest else step
        if isinstance(command, list):
            self._weigh(command)

    def _weigh(self, command: list[Argument]) -> None:
        """Count the arguments of a command that goes on later, but for the large ones, which are counted already."""
        self._kept_bytes = max(0, sum(map(len, command)) - self._intake.bytes) + 64 * len(command)

    def _may_lend(self) -> bool:
        """Return whether the command may send stored values now, or sends none; else we hear when to try again."""
        command = find(self._name)
        return command is None or not command.lends or self._holdings.lends or self._holdings.may_lend()

    def _is_far_ahead(self) -> bool:
        """Return whether as much waits behind pending parts as may."""
        return (
            self._replies.pendings >= _PENDING_MAX
            or self._replies.waiting_bytes >= self._node.config.read_ahead_bytes_max
        )

    def _block(self, error: BusyError | None) -> None:
        """Stop until the store has room; without an error, it was given the signal already."""
        self._blocked = True
        self._blocked_since_s = self._blocked_since_s or time.monotonic()
        if error is not None:
            error.again.then(self._room.send)

    def _on_room(self) -> None:
        """Try what there was no room for."""
        self._blocked = False
        self._guarded(self._process)

    @property
    def moved_bytes(self) -> int:
        """Received and sent while it held anything."""
        return self._moved_bytes + self._received_bytes

    def on_memory(self) -> None:
        """Try again: there may be room for what this client wants held."""
        self._room.send()

    def end_for_memory(self, held_bytes: int) -> None:
        """End, soon: others need what this one holds. With the node's lock held, in any thread."""
        self._node.counters.greedy_clients += 1
        self._node.tell("client_greedy", self.session.address, "it held more than its share, or for too long")
        self._node.audit.write("memory", self.session, outcome="closed", bytes=held_bytes)
        self.session.closing = True
        self._cut_soon()

    def _stop_waiting_for_room(self) -> None:
        _log.info("client_refused address=%s reason='no room in the store'", self.session.address)
        with self._node.lock:
            error = encode_error(f"OOM {_NO_ROOM}")
            if self._intake.waits:
                self._intake.refuse(error)
            elif self._partly:
                self._loop.call_soon(self.abort, self._lane)
            else:
                self._retry = None
                self._node.counters.errors += 1
                self._take(error)
        self._blocked, self._blocked_since_s, self._last_progress_s = False, 0.0, time.monotonic()
        self._process()

    def _give_up(self, error: Exception, last: list[bytes]) -> None:
        """End a client that cannot be followed or served any further; what it is still told is added to ``last``."""
        node, session = self._node, self.session
        session.closing = True
        node.tell("client_refused", session.address, str(error)[:128])
        if isinstance(error, ProtocolError):
            node.counters.protocol_errors += 1
            node.audit.write("protocol", session, outcome="refused", reason=str(error))
        if isinstance(error, ForeignProtocolError) and error.protocol == "HTTP":
            # Who asked is told nothing, and what is unsent of its commands' replies goes.
            node.counters.http_refused += 1
            last.clear()
            self._loop.call_soon(self.abort, self._lane)
            return
        last.append(encode_error(f"{'ERR' if isinstance(error, ProtocolError) else 'OOM'} {error}"))

    def _start_work(self, more: More) -> None:
        assert more.work is not None
        self._working = True

        def done(future: "Future[Any]") -> None:
            self._loop.call_threadsafe(lambda: self._guarded(lambda: self._end_work(more, future)), self._lane)

        self._acceptor.workers.submit(self.session, more.work).add_done_callback(done)

    def _end_work(self, more: More, future: "Future[Any]") -> None:
        self._working = False
        self._last_progress_s = time.monotonic()
        if self._closed:
            with self._node.lock:
                self._intake.let_go()
        elif future.cancelled():  # the server is stopping
            self.abort()
        else:
            self._rest = partial(more.rest, future.result())
            self._process()

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
        sent_bytes, layer_bytes = 0, replies.layer_bytes
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
        if sent_bytes or sent_parts:  # a part may be empty
            self._last_progress_s = time.monotonic()
            with self._node.lock:
                self._node.counters.output_bytes += sent_bytes
                if self.session.limiter is not None:
                    self.session.limiter.charge(0, sent_bytes)
                others_bytes = sent_bytes - (replies.layer_bytes - layer_bytes)
                if others_bytes and self._node.streams is not None:
                    self._node.streams.others.charge(self.session, others_bytes, self._last_progress_s)
                for part in sent_parts:
                    self._node.lent.unpin(part.pinned)
                    part.release(self._store)
                if self._holdings.counted:
                    self._moved_bytes += sent_bytes
                    self._account()

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
        session, replies = self.session, self._replies
        session.pending_output_bytes = replies.out_bytes
        if self._more:
            if not self._scheduled and self._may_execute():
                self._scheduled = True
                self._loop.call_soon(self._take_turn, self._lane)
        elif self._interest == READ and not (replies.out or self._working or self._paused or session.closing):
            return  # most often: it waits for what it waits for
        self._update_interest()
        if session.closing:
            self._close_if_done()

    def _may_execute(self) -> bool:
        """Return whether there may be a command, and nothing keeps it from being executed."""
        if not self._more or self._working or self._blocked or self._paused:
            return False
        if self.session.closing and self._rest is None:
            return False
        return self._replies.out_bytes < self._output_bytes_max and not self._is_far_ahead()

    def _interest_now(self) -> int:
        reads = self._lingering or not (self._more or self._working or self._paused or self.session.closing)
        return (READ if reads else 0) | (WRITE if self._replies.out and not self._holds_replies else 0)

    def _close_if_done(self) -> None:
        if not self.session.closing or self._working or self._lingering or self._closed:
            return
        if self._replies.out or self._replies.waiting or self._rest:
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
        self._loop.call_threadsafe(lambda: self._guarded(self.finish), self._lane)

    def _cut_soon(self) -> None:
        self._loop.call_threadsafe(lambda: self._guarded(self.abort), self._lane)

    def abort(self) -> None:
        """End at once, whatever is under way."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._signal.cut()
        self._room.cut()
        with self._node.lock:
            self._node.counters.input_bytes += self._received_bytes
            self._node.unwatch(self.session)
            self._node.publications.leave(self.session.id)
            if self._node.streams is not None:
                self._node.streams.others.leave(self.session)
            self._replies.drop()
            if not self._working:  # else its end does
                self._intake.let_go()
            self._holdings.close()
        self._retry = self._rest = None
        # They led back here: nothing but a full collection would have freed the two.
        self.session.finish = self.session.cut = lambda: None
        self.session.admit = lambda size: None
        self._acceptor.forget(self.session)

    def check_time(self, now_s: float) -> None:
        """End the connection if it has stood still for longer than the configuration allows."""
        config, counters, session = self._node.config, self._node.counters, self.session
        still_s = now_s - self._last_progress_s
        if self._lingering:
            if still_s > _LINGER_S:
                self.abort()
            return
        if not session.authenticated and now_s - session.stranger_since_s > config.authentication_timeout_s:
            with self._node.lock:
                counters.strangers_closed += 1
                self._node.tell("client_unknown", session.address, "it has not authenticated in time")
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
