"""Executes one client's commands, in turns, and queues their replies. No sockets.

The call stack of a turn::

    Connection._on_readable        bytes -> CommandReader
    CommandExecutor.execute_turn   takes the node's lock; the link's and the tenant's rates
      _execute_commands            until input, turn or output buffer is used up
        _execute_one               RequestBody.next_command, then commands.execute
        _queue_reply               Replies; starts work of a Continuation
    Connection._send_and_wait      sends what is known, then waits for the next event

Some commands cannot end in their turn:

- A :class:`DeferredReply` keeps its position in the queue; the commands behind it are executed, within limits.
- A :class:`Continuation` makes its reply in steps. The client's next commands wait until it ends.
- Where the store has no room (BusyError, or no buffer for a value) the command is kept and executed again when the
  store notifies. Meanwhile the client is not read, so TCP makes it wait. After ``stall_timeout_s`` it gets an error.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, Final

from shadowserve.errors import ForeignProtocolError, ProtocolError
from shadowserve.pool.volume.tickets import BusyError
from shadowserve.resp import CommandReader, LargeBulk, encode_error
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import Client
from storage_kv.clients.replies import Replies
from storage_kv.clients.request_body import UNCOUNTED_BYTES, Event, MemoryAccounts, RequestBody, limits_of
from storage_kv.command_spans import CommandSpans
from storage_kv.commands import execute, find
from storage_kv.node import Node
from storage_kv.reply import Continuation, DeferredReply, Part, Reply
from storage_kv.session import Argument, Session
from storage_kv.shaper import Others

_log = logging.getLogger(__name__)

_DEFERRED_MAX: Final = 256
"""Deferred parts of one client beyond which no more of its commands are executed: enough to keep every device busy."""

_UNAUTHENTICATED_OUTPUT_BYTES_MAX: Final = 16 << 10
"""Size limit of the replies that wait for a client that has not authenticated."""

_NO_ROOM: Final = "OOM no room to write for too long: writes arrive faster than the devices take them; try again later"


class CommandExecutor:
    """The commands of one client. Used by its connection's thread."""

    def __init__(
        self,
        node: Node,
        session: Session,
        client: Client,
        *,
        notify_reply: Callable[[], None],
        notify_room: Callable[..., None],
        start_work: Callable[[Continuation], None],
        abort_soon: Callable[[], None],
    ) -> None:
        """Execute nothing yet.

        Args:
            client: Owner of the memory accounts.
            notify_reply: Called from any thread when a deferred reply is known.
            notify_room: Called from any thread when the store may have room.
            start_work: Runs a continuation's work in another thread, then calls :meth:`continue_reply`.
            abort_soon: Ends the connection before it sends anything more.
        """
        self._node = node
        self._session = session
        self._notify_room = notify_room
        self._start_work = start_work
        self._abort_soon = abort_soon
        self.reader = CommandReader(limits_of(node, session))
        self.replies = Replies(node, session, notify_reply)
        self.accounts = MemoryAccounts(node, session, client)
        self.body = RequestBody(node, session, self.reader, self.accounts, notify_room)
        self.has_input = False  # there may be another command to execute, or a reply to continue
        self.working = False  # another thread works on a reply
        self.blocked = False  # the store has no room; nothing is executed until it notifies
        self.blocked_since_s = 0.0  # since when the client has been blocked without progress; 0.0 if it is not
        self.received_bytes = 0  # that the node's counters do not have yet
        self.moved_bytes = 0  # received and sent while the client held memory, without ``received_bytes``
        self._command_name: Argument = b""  # of the command in progress, or the last one
        self._begun = False  # that command has a place in a client's span
        self._retry: Callable[[], Reply] | None = None  # executes the command again that found no room
        self._continuation: Callable[[], Reply] | None = None  # makes the next part of a reply that has begun
        self._is_reply_begun = False  # a part of that reply is queued
        self._kept_bytes = 0  # size of the small arguments of a command that is kept

    # ---- A turn

    def execute_turn(self) -> None:
        """Execute commands until there are none, the turn is over, or the client must wait."""
        node, session = self._node, self._session
        with node.lock:
            streams = node.streams
            if streams is not None and streams.others.rate != inf and self._exceeds_link_share(streams.others):
                self.has_input = True
                self.update_accounts()
            elif session.limiter is None:
                self._execute_commands()
            else:
                self._execute_within_rates(session.limiter)

    def _exceeds_link_share(self, others: Others) -> bool:
        """Pause a client that was sent more than its share of the link, replies to KV.LAYERS not counted."""
        session, now_s = self._session, time.monotonic()
        wait_s = others.wait_s(session, now_s)
        if wait_s:
            session.pause_until_s = max(session.pause_until_s, now_s + wait_s)
        return wait_s > 0.0

    def _execute_within_rates(self, limiter: RateLimiter) -> None:
        session, counters, received_bytes = self._session, self._node.counters, self.received_bytes
        commands = counters.commands
        if not limiter.wait_s(time.monotonic()):
            self._execute_commands()
            limiter.charge(counters.commands - commands, received_bytes)
        else:
            self.update_accounts()
        if wait_s := limiter.wait_s(time.monotonic()):
            counters.throttled += 1
            limiter.throttled += 1
            self.has_input = True
            session.pause_until_s = max(session.pause_until_s, time.monotonic() + wait_s)

    def _execute_commands(self) -> None:
        node, session, reader, replies, body = self._node, self._session, self.reader, self.replies, self.body
        received_bytes, self.received_bytes = self.received_bytes, 0
        node.counters.received_bytes += received_bytes
        output_max = self.output_bytes_max
        left = node.config.pipeline_commands_max
        small: list[bytes] = []  # replies that are joined
        small_bytes = 0
        in_progress = self.has_input = True
        while left > 0 and not session.pause_until_s:
            in_progress = self.has_input = reader.in_progress or bool(
                self._retry or self._continuation or session.executing
            )
            if not in_progress or (session.closing and self._continuation is None):
                break
            if replies.out_bytes + small_bytes >= output_max or (replies.deferred and self.is_far_ahead()):
                break
            left -= 1
            queued = len(session.executing)
            reply = self._execute_one(small)
            if reply is None:
                break
            if len(session.executing) > queued:  # EXEC: what fits a turn is executed in this one
                left = max(left, min(len(session.executing), node.config.pipeline_commands_max))
            if isinstance(reply, bytes) and session.replies and not session.skip:  # most often
                small.append(reply)
                small_bytes += len(reply)
                self._continuation, self._is_reply_begun, self._kept_bytes = None, False, 0
                if body.bytes or body.refusal:
                    body.release()
                continue
            if small:
                replies.append(b"".join(small))
                small, small_bytes = [], 0
            left -= self._queue_reply(reply, left)
            if self.working:
                break
        if small:
            replies.append(b"".join(small))
        if in_progress or self._holds_memory():
            self.moved_bytes += received_bytes
            self.update_accounts()

    def _holds_memory(self) -> bool:
        """Return True if the accounts may have changed: the client holds memory, or held some."""
        session, replies = self._session, self.replies
        return bool(
            session.transaction
            or session.executing
            or replies.lent_bytes
            or replies.out_bytes + replies.waiting_bytes > UNCOUNTED_BYTES
            or self.accounts.counted
        )

    def _execute_one(self, last_words: list[bytes]) -> Reply | None:
        """Execute one command; return None if nothing more can be executed now.

        The last reply to a client whose connection must end is added to ``last_words``.
        """
        node, session = self._node, self._session
        was_authenticated = session.authenticated
        step = self._continuation or self._retry
        command: Event | None = None
        try:
            if step is None:
                command = session.executing.popleft() if session.executing else self.body.next_command()
                if not isinstance(command, list):
                    self._wait_for_argument(command)
                    return None
                if self.body.refusal:
                    return self._refused()
                self.blocked_since_s, self._command_name, self._begun = 0.0, command[0], False
            if node.lent.is_tight and not self._may_lend():
                self._keep(step, command)
                self._block(None)
                return None
            node.store.client = session.id
            if session.spans is None:
                reply = step() if step is not None else execute(node, session, command)  # type: ignore[arg-type]
            else:
                reply = self._execute_traced(session.spans, step, command)
            if isinstance(reply, Continuation) and isinstance(command, list):
                self._set_kept_bytes(command)
        except (ProtocolError, MemoryError) as error:
            self._end_with(error, last_words)
            return None
        except BusyError as error:
            self._keep(step, command)
            self._block(error)
            return None
        self._retry, self.blocked_since_s = None, 0.0
        if session.authenticated is not was_authenticated:
            self.reader.limits = limits_of(node, session)
        return reply

    def _execute_traced(self, traced: CommandSpans, step: Callable[[], Reply] | None, command: Event | None) -> Reply:
        known = find(self._command_name)
        run = step or partial(execute, self._node, self._session, command)  # type: ignore[arg-type]
        begins, self._begun = not self._begun, True
        return traced.run(known.name if known else "unknown", run, begins=begins)

    def _refused(self) -> bytes:
        self._node.counters.command_errors += 1
        if self._session.transaction is not None:
            self._session.transaction.fail()
        return self.body.refusal

    def _may_lend(self) -> bool:
        """Return True if the command may send stored values now, or sends none; otherwise on_room() is called later."""
        command = find(self._command_name)
        return command is None or not command.lends or self.accounts.may_lend()

    def _queue_reply(self, reply: Reply, left: int = 0) -> int:
        """Queue a reply unless the client has switched replies off.

        Returns:
            The number of commands that it counts as; ``left`` for a step of a command on many keys, to end the turn.
        """
        session = self._session
        parts: list[Part] = (
            [reply] if isinstance(reply, bytes) else reply.parts if isinstance(reply, Continuation) else reply
        )
        if session.replies and not session.skip:
            self.replies.extend(parts)
        else:
            for part in parts:
                if isinstance(part, DeferredReply):
                    part.abandon()
        if not isinstance(reply, Continuation):
            session.skip = max(session.skip - 1, 0)
            self._continuation, self._is_reply_begun, self._kept_bytes = None, False, 0
            self.body.release()
            return len(parts)
        self._is_reply_begun = self._is_reply_begun or bool(parts)
        if reply.work is None:
            self._continuation = partial(reply.rest, None)
        else:
            self._continuation = None
            self.working = True
            self._start_work(reply)
        return len(parts) or left

    def continue_reply(self, continuation: Continuation, future: "Future[Any]") -> None:
        self._continuation = partial(continuation.rest, future.result())

    # ---- No room

    def _wait_for_argument(self, event: Event) -> None:
        """Wait for the rest of a command, for room for its next argument, or go on with the next large argument."""
        if self.body.waits:
            self._block(None)
        else:
            self.blocked_since_s = 0.0
        self.has_input = self.blocked or isinstance(event, LargeBulk)

    def _keep(self, step: Callable[[], Reply] | None, command: Event | None) -> None:
        """Keep a command to execute it again; a continuation is kept already."""
        if step is None:
            self._retry = partial(execute, self._node, self._session, command)  # type: ignore[arg-type]
        elif self._continuation:
            self._retry = None
        if isinstance(command, list):
            self._set_kept_bytes(command)

    def _set_kept_bytes(self, command: list[Argument]) -> None:
        """Count the arguments of a kept command, except large ones, which ``body`` counts."""
        self._kept_bytes = max(0, sum(map(len, command)) - self.body.bytes) + 64 * len(command)

    def _block(self, error: BusyError | None) -> None:
        """Execute nothing until the store has room. Without ``error``, a notification is requested already."""
        self.blocked = True
        self.blocked_since_s = self.blocked_since_s or time.monotonic()
        if error is not None:
            error.again.then(self._notify_room)

    def give_up_waiting(self) -> None:
        _log.info("client_refused address=%s reason='the store had no room for too long'", self._session.address)
        with self._node.lock:
            error = encode_error(_NO_ROOM)
            if self.body.waits:
                self.body.refuse(error)
            elif self._is_reply_begun:
                self._abort_soon()
            else:
                self._retry = None
                self._node.counters.command_errors += 1
                self._queue_reply(error)
        self.blocked, self.blocked_since_s = False, 0.0

    def _end_with(self, error: Exception, last_words: list[bytes]) -> None:
        """End a client whose input cannot be parsed, or for whose input there is no memory."""
        node, session = self._node, self._session
        session.closing = True
        node.warn_limited("client_refused", session.address, str(error)[:128])
        if isinstance(error, ProtocolError):
            node.counters.protocol_errors += 1
            node.audit.write("protocol", session, outcome="refused", reason=str(error))
        if isinstance(error, ForeignProtocolError) and error.protocol == "HTTP":
            # An HTTP client, maybe a browser that was tricked, gets no byte: unsent replies are dropped too.
            node.counters.http_refused += 1
            last_words.clear()
            self._abort_soon()
            return
        last_words.append(encode_error(f"{'ERR' if isinstance(error, ProtocolError) else 'OOM'} {error}"))

    # ---- State

    def may_execute(self) -> bool:
        if not self.has_input or self.working or self.blocked:
            return False
        if self._session.closing and self._continuation is None:
            return False
        return self.replies.out_bytes < self.output_bytes_max and not self.is_far_ahead()

    @property
    def output_bytes_max(self) -> int:
        most = self._node.config.output_buffer_bytes_max
        return most if self._session.authenticated else min(most, _UNAUTHENTICATED_OUTPUT_BYTES_MAX)

    def is_far_ahead(self) -> bool:
        replies = self.replies
        return replies.deferred >= _DEFERRED_MAX or replies.waiting_bytes >= self._node.config.read_ahead_bytes_max

    @property
    def has_unsent_replies(self) -> bool:
        return bool(self.replies.out or self.replies.waiting or self._continuation)

    def update_accounts(self) -> None:
        """Set the client's memory accounts to what it holds now. Needs the node's lock."""
        replies = self.replies
        replies.count_load()
        held = self.body.bytes + self.reader.held_bytes + replies.out_bytes + replies.waiting_bytes
        held += self._session.queued_bytes + self._kept_bytes
        self.accounts.set_held(held - replies.lent_bytes, replies.lent_bytes)

    def close(self) -> None:
        """Release everything. Needs the node's lock."""
        self._node.counters.received_bytes += self.received_bytes
        self.replies.drop()
        if not self.working:  # otherwise the work's end does
            self.body.release()
        self.accounts.close()
        self._retry = self._continuation = None
        # They refer to the connection: without this only a full collection would free the two.
        self._start_work = lambda continuation: None
        self._abort_soon = lambda: None
