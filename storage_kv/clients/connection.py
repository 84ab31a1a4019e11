"""One client's socket: receives bytes, lets the executor run commands, sends replies, and ends.

asyncio's transports copy a large reply and then move it dozens of times, its stream readers copy input twice, and a
future for each wait costs as much as ten small commands. So the event loop's readiness callbacks drive non-blocking
sockets directly. The kernel copies a large value from the socket into the buffer in which it stays (``recv_into``), and
from there into the sockets that fetch it (``sendmsg``); only a start of at most ``_RECEIVE_BYTES`` is copied once more.

Nothing is executed while more than ``output_buffer_bytes_max`` waits for the client, and nothing is read while commands
wait for execution. So a client that does not read makes the node hold at most that much and one value.

The call stack is in executor.py, TLS in secure_connection.py. The phases, from each of which an error leads to CLOSED:

    HANDSHAKE --TLS handshake done--> OPEN --replies sent, closing--> LINGERING --client closes, timeout--> CLOSED
"""

import contextlib
import enum
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Final

from storage_kv.clients.event_loop import READ, WRITE, EventLoop, Signal
from storage_kv.clients.executor import CommandExecutor
from storage_kv.clients.transport import Transport, limit_unsent, window_limited_s
from storage_kv.clients.workers import Workers
from storage_kv.node import Node
from storage_kv.reply import Continuation, ValueSlice
from storage_kv.session import ConnectionHooks, Session

_log = logging.getLogger(__name__)

_RECEIVE_BYTES: Final = 32 << 10
"""Bytes of one receive for small input: 1,000 commands. They are parsed with the node's lock held."""

_RECEIVE_FEW_BYTES: Final = 4 << 10
"""The same for a client that sends less than this at a time: freeing most of a 64 KiB buffer is slow in malloc."""

_LINGER_S: Final = 1.0
"""How long a closed connection reads and drops input, so that a reset does not destroy the last reply (RFC 1122)."""


class Phase(enum.Enum):
    """Phase of a connection."""

    HANDSHAKE = "TLS handshake"
    OPEN = "open"
    LINGERING = "sending side closed"
    CLOSED = "closed"


HANDSHAKE: Final = Phase.HANDSHAKE
OPEN: Final = Phase.OPEN
LINGERING: Final = Phase.LINGERING
CLOSED: Final = Phase.CLOSED


class Connection:
    """A client's connection, from acceptance to its end."""

    first_phase: ClassVar[Phase] = OPEN

    def __init__(
        self,
        node: Node,
        workers: Workers,
        on_closed: Callable[[Session], None],
        transport: Transport,
        session: Session,
        loop: EventLoop,
    ) -> None:
        """Begin to receive. ``on_closed`` is called at the end, in the loop's thread, without the node's lock."""
        self.session = session
        self._transport = transport
        self._loop = loop
        self._lane = loop.enter(session.share)
        self._descriptor = transport.socket.fileno()
        self._interest = 0  # events that the loop waits for
        self._phase = self.first_phase
        self._node = node
        self._workers = workers
        self._on_closed = on_closed
        self._reply_signal = Signal(loop, self._lane, self._on_reply_known)
        self._room_signal = Signal(loop, self._lane, self._on_store_has_room)
        self._executor = CommandExecutor(
            node,
            session,
            self,
            notify_reply=self._reply_signal.send,
            notify_room=self._room_signal.send,
            start_work=self._start_work,
            abort_soon=self._abort_in_this_turn,
        )
        self._paused = False  # nothing is read or executed before a certain time
        self._holds_replies = False  # and nothing is sent
        self._is_turn_scheduled = False  # a turn follows without any event
        self._is_flush_scheduled = False  # replies are sent at the end of the loop's turn
        self._receive_bytes = _RECEIVE_FEW_BYTES
        self._at_end = False  # the client has closed its sending side
        session.hooks = ConnectionHooks(self._finish_soon, self._abort_soon, self._executor.accounts.admit_apart)
        if session.closing:  # evicted since it was accepted
            self._abort_soon()
        self._update_interest()

    # ---- Events

    def _on_event(self, events: int) -> None:
        """Read or write. An error or the peer's end counts as both: the call on the socket then reports it."""
        interest = self._interest
        try:
            if events & ~WRITE and interest & READ:
                if self._phase is LINGERING:
                    self._on_lingering()
                else:
                    self._on_readable()
            if events & ~READ and interest & WRITE and self._phase is not CLOSED:
                self._on_writable()
        except Exception:
            self._fail_by_bug()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. A bug costs this client its connection, not all clients the server."""
        try:
            step()
        except Exception:
            self._fail_by_bug()

    def _fail_by_bug(self) -> None:
        _log.exception("connection_failed address=%s", self.session.address)
        self.abort()

    def _update_interest(self) -> None:
        self._watch(self._interest_now())

    def _watch(self, interest: int) -> None:
        if interest == self._interest:
            return
        if self._interest == 0:
            self._loop.add(self._descriptor, interest, self._on_event, self._lane)
        elif interest:
            self._loop.modify(self._descriptor, interest)
        else:  # a descriptor without interest would still be reported at the peer's end, again and again
            self._loop.remove(self._descriptor)
        self._interest = interest

    # ---- Receiving

    def _on_readable(self) -> None:
        executor, session = self._executor, self.session
        try:
            view = executor.reader.get_buffer() if executor.body.in_place else None
            if view is not None:
                size = self._transport.recv_into(view)
                executor.reader.advance(size)
                if 0 < size < len(view) and session.limiter is None:  # nothing can be executed yet
                    executor.received_bytes += size
                    session.info.last_active_s = time.monotonic()
                    return
            else:
                data = self._transport.recv(self._receive_bytes)
                size = len(data)
                if size >= _RECEIVE_FEW_BYTES and session.authenticated:
                    self._receive_bytes = _RECEIVE_BYTES
                else:
                    self._receive_bytes = _RECEIVE_FEW_BYTES
                executor.reader.feed(data)
        except (BlockingIOError, InterruptedError):
            self._update_interest()
            return
        except OSError:
            self.abort()
            return
        executor.received_bytes += size
        session.info.last_active_s = time.monotonic()
        if size == 0:
            self._at_end = True
            session.closing = True
            self._send_and_wait()
            return
        self._execute_turn()
        # Sending wakes a client that sleeps, which costs as much as a few commands, or takes this thread's core. So
        # replies are sent when all clients of this turn are served.
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._send_at_turn_end, self._lane)

    # ---- Turns

    def _execute_turn(self) -> None:
        if self._phase is not OPEN or self._executor.working or self._paused:
            return
        session = self.session
        self._executor.execute_turn()
        if session.pause_until_s:
            self._pause()
        if session.share != self._lane.tenant:  # it has authenticated
            self._lane = self._loop.move(self._descriptor, self._lane, session.share)
            self._reply_signal.lane = self._room_signal.lane = self._lane

    def _execute_and_send(self) -> None:
        if self._phase is OPEN and not self._executor.working:
            self._execute_turn()
            self._send_and_wait()

    def _run_scheduled_turn(self) -> None:
        self._is_turn_scheduled = False
        self._guarded(self._execute_and_send)

    def _pause(self) -> None:
        """Read and execute nothing for a while: the client's own buffers fill, and it waits."""
        session, self._paused = self.session, True
        self._holds_replies = session.pause_holds_replies
        self._loop.call_at(session.pause_until_s, lambda: self._guarded(self._end_pause), self._lane)
        session.pause_until_s, session.pause_holds_replies = 0.0, False

    def _end_pause(self) -> None:
        self._paused = self._holds_replies = False
        self.session.info.last_active_s = time.monotonic()
        self._execute_and_send()

    # ---- Notifications

    def _on_reply_known(self) -> None:
        self._guarded(self._send_known_replies)

    def _send_known_replies(self) -> None:
        if self._phase is not OPEN:
            return
        with self._node.lock:
            self._executor.replies.advance()
        self.session.info.last_active_s = time.monotonic()
        if self._executor.working:
            self._send_and_wait()
        else:
            self._execute_and_send()

    def _on_store_has_room(self) -> None:
        self._executor.blocked = False
        self._guarded(self._execute_and_send)

    @property
    def moved_bytes(self) -> int:
        """Bytes received and sent while the client held memory."""
        return self._executor.moved_bytes + self._executor.received_bytes

    def on_room(self) -> None:
        """Try again: the memory budget may have room. From any thread."""
        self._room_signal.send()

    def evict(self, held_bytes: int) -> None:
        """End soon: other clients need the memory that this one holds. From any thread, with the node's lock."""
        self._node.counters.clients_evicted += 1
        self._node.warn_limited("client_evicted", self.session.address, "it held more than its share, or for too long")
        self._node.audit.write("memory", self.session, outcome="closed", bytes=held_bytes)
        self.session.closing = True
        self._abort_soon()

    # ---- Work in another thread

    def _start_work(self, continuation: Continuation) -> None:
        assert continuation.work is not None

        def done(future: "Future[Any]") -> None:
            self._loop.call_threadsafe(lambda: self._guarded(lambda: self._end_work(continuation, future)), self._lane)

        self._workers.submit(self.session, continuation.work).add_done_callback(done)

    def _end_work(self, continuation: Continuation, future: "Future[Any]") -> None:
        executor = self._executor
        executor.working = False
        self.session.info.last_active_s = time.monotonic()
        if self._phase is CLOSED:
            with self._node.lock:
                executor.body.release()
        elif future.cancelled():  # the server is stopping
            self.abort()
        else:
            executor.continue_reply(continuation, future)
            self._execute_and_send()

    # ---- Sending

    def _send(self) -> None:
        if self._holds_replies:
            return
        replies = self._executor.replies
        sent_bytes, layer_bytes = 0, replies.layer_bytes
        sent_slices: list[ValueSlice] = []
        is_broken = False
        try:
            while replies.out:
                sent_bytes += replies.send_to(self._transport, sent_slices)
                if replies.out and replies.is_partly_sent:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            is_broken = True
        if sent_bytes or sent_slices:  # a slice may be empty
            self._count_sent(sent_bytes, replies.layer_bytes - layer_bytes, sent_slices)
        executor = self._executor
        if self.session.spans is not None and not (
            executor.has_unsent_replies or executor.has_input or executor.working
        ):
            self.session.spans.end()
        if is_broken:  # at last: it clears what counting sets
            self.abort()

    def _count_sent(self, sent_bytes: int, layer_bytes: int, sent_slices: list[ValueSlice]) -> None:
        node, executor, session = self._node, self._executor, self.session
        session.info.last_active_s = now_s = time.monotonic()
        with node.lock:
            node.counters.sent_bytes += sent_bytes
            if session.limiter is not None:
                session.limiter.charge(0, sent_bytes)
            if sent_bytes > layer_bytes and node.streams is not None:
                node.streams.others.charge(session, sent_bytes - layer_bytes, now_s)
            for part in sent_slices:
                node.lent.unpin(part.pin_key)
                part.release(node.store)
            executor.replies.count_load()
            if executor.accounts.counted:
                executor.moved_bytes += sent_bytes
                executor.update_accounts()

    def limit_unsent(self) -> None:
        """Let bytes that cannot be sent yet wait here, where the node's load counts them."""
        with contextlib.suppress(OSError):  # it has just ended
            limit_unsent(self._transport.socket)

    def _on_writable(self) -> None:
        self._send()
        if self._phase is CLOSED:
            return
        self.session.info.pending_output_bytes = self._executor.replies.out_bytes
        if not self._paused and self._executor.may_execute():
            self._execute_and_send()
        else:
            self._update_interest()
            self._close_if_done()

    def _send_at_turn_end(self) -> None:
        self._is_flush_scheduled = False
        if self._phase is not CLOSED:
            try:
                self._send_and_wait()
            except Exception:
                self._fail_by_bug()

    def _send_and_wait(self) -> None:
        """Send the known replies, then wait for the next event: input, room, or a turn of its own."""
        session, executor = self.session, self._executor
        replies = executor.replies
        if replies.out:
            self._send()
            if self._phase is CLOSED:
                return
        session.info.pending_output_bytes = replies.out_bytes
        if executor.has_input:
            if not self._is_turn_scheduled and not self._paused and executor.may_execute():
                self._is_turn_scheduled = True
                self._loop.call_soon(self._run_scheduled_turn, self._lane)
        elif self._interest == READ and not (replies.out or executor.working or self._paused or session.closing):
            return  # most often: it waits for input already
        self._update_interest()
        if session.closing:
            self._close_if_done()

    def _interest_now(self) -> int:
        executor = self._executor
        is_idle = not (executor.has_input or executor.working or self._paused or self.session.closing)
        reads = is_idle or self._phase is LINGERING
        return (READ if reads else 0) | (WRITE if executor.replies.out and not self._holds_replies else 0)

    # ---- The end

    def _close_if_done(self) -> None:
        executor = self._executor
        if not self.session.closing or executor.working or self._phase is not OPEN or executor.has_unsent_replies:
            return
        if self._at_end:
            self.abort()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close the sending side, and read and drop until the client closes its own; a reset may overtake the reply."""
        self._phase = LINGERING
        try:
            self._transport.end()
        except OSError:
            self.abort()
            return
        self.session.info.last_active_s = time.monotonic()
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
        self.session.closing = True
        self._send_and_wait()

    def _finish_soon(self) -> None:
        self._loop.call_threadsafe(lambda: self._guarded(self.finish), self._lane)

    def _abort_soon(self) -> None:
        self._loop.call_threadsafe(lambda: self._guarded(self.abort), self._lane)

    def _abort_in_this_turn(self) -> None:
        self._loop.call_soon(self.abort, self._lane)

    def abort(self) -> None:
        if self._phase is CLOSED:
            return
        self._phase = CLOSED
        self._watch(0)
        self._loop.leave(self._lane)
        self._transport.socket.close()
        self._reply_signal.disconnect()
        self._room_signal.disconnect()
        if self.session.spans is not None:
            self.session.spans.end()
        with self._node.lock:
            self._node.leave(self.session)
            self._executor.close()
        self.session.hooks = ConnectionHooks()  # they refer to this connection: a cycle
        self._on_closed(self.session)

    def check_time(self, now_s: float) -> None:
        config, counters, info, executor = self._node.config, self._node.counters, self.session.info, self._executor
        still_s = now_s - info.last_active_s
        if self._phase is LINGERING:
            if still_s > _LINGER_S:
                self.abort()
            return
        if not self.session.authenticated and now_s - info.unauthenticated_since_s > config.authentication_timeout_s:
            with self._node.lock:
                counters.unauthenticated_closed += 1
                self._node.warn_limited("client_unknown", self.session.address, "it has not authenticated in time")
            self.abort()
            return
        if executor.working or self._paused:
            return
        if executor.blocked_since_s:
            if now_s - executor.blocked_since_s > config.stall_timeout_s:
                self._guarded(self._give_up_waiting)
            return
        # A client that waits for a device, or is not read for that reason, is not the one that stalls.
        if executor.replies.out or (executor.reader.in_progress and self._interest & READ):
            if executor.replies.out:
                limited_s = window_limited_s(self._transport.socket)
                with self._node.lock:
                    executor.replies.note_window(limited_s, now_s)
            if still_s > config.stall_timeout_s:
                with self._node.lock:
                    counters.clients_stalled += 1
                action = "reading its replies" if executor.replies.out else "sending its request"
                _log.info("client_stalled address=%s still_s=%.1f while=%r", self.session.address, still_s, action)
                self.abort()
        elif config.idle_timeout_s and not executor.replies.waiting and still_s > config.idle_timeout_s:
            with self._node.lock:
                counters.clients_idle += 1
            _log.info("client_idle address=%s idle_s=%.1f", self.session.address, still_s)
            self.abort()

    def _give_up_waiting(self) -> None:
        self._executor.give_up_waiting()
        self.session.info.last_active_s = time.monotonic()
        self._execute_and_send()
