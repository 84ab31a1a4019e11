"""The replies of one client that have not been sent, in order, while parts of them are not known yet."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from storage_kv.clients.transport import Transport
from storage_kv.node import Node
from storage_kv.reply import DeferredReply, Part, Ready, ValueSlice, drop_parts
from storage_kv.session import Session

_IOVEC_MAX: Final = 64
"""Number of buffers in one sendmsg(); far below Linux's 1,024, and enough to make the call's own cost negligible."""


def iovec_of(parts: Iterable[Ready], offset: int) -> list[bytes | memoryview]:
    """Return the first buffers of parts that wait to be sent, without the first ``offset`` bytes."""
    iovec: list[bytes | memoryview] = []
    for part in parts:
        if isinstance(part, bytes):
            iovec.append(memoryview(part)[offset:] if offset else part)
        else:
            buffers = part.buffers(offset, _IOVEC_MAX - len(iovec))
            iovec += buffers
            if part.is_layer and sum(map(len, buffers)) < part.size - offset:
                break
        offset = 0
        if len(iovec) >= _IOVEC_MAX:
            break
    return iovec


class Replies:
    """A queue of reply parts. Needs the node's lock, except send_to()."""

    def __init__(self, node: Node, session: Session, notify: Callable[[], None]) -> None:
        """``notify`` is called from any thread when advance() may move parts."""
        self._node = node
        self._session = session
        self._notify = notify
        self._offset = 0  # sent bytes of the first part
        self.out: deque[Ready] = deque()  # parts that may be sent
        self.out_bytes = 0  # size of ``out`` without the sent bytes of its first part
        self.lent_bytes = 0  # bytes of stored values in both queues, in memory or expected
        self.layer_bytes = 0  # bytes of layers that were ever sent
        self._counted_bytes = 0  # part of ``out_bytes`` that the node's load includes
        self._reads_slowly, self._window = False, (0.0, 0.0)
        self.waiting: deque[Part] = deque()  # parts that may not be sent yet; the first of them is deferred
        self.waiting_bytes = 0  # approximate size of ``waiting``
        self.deferred = 0  # number of deferred parts in ``waiting``

    # ---- Adding

    def extend(self, parts: list[Part]) -> None:
        """Append parts: small ones are joined, stored values are held."""
        small: list[bytes] = []
        for part in parts:
            if isinstance(part, bytes):
                small.append(part)
                continue
            if small:
                self.append(b"".join(small))
                small = []
            if isinstance(part, DeferredReply):
                self._append_deferred(part)
            else:
                part.hold(self._node.store)
                self.append(part)
        if small:
            self.append(b"".join(small))

    def append(self, part: Ready) -> None:
        """Append bytes, or a stored value that is held already."""
        size = len(part) if isinstance(part, bytes) else self._pin(part)
        if self.waiting:
            self.waiting.append(part)
            self.waiting_bytes += size
        else:
            self.out.append(part)
            self.out_bytes += size

    def _pin(self, part: ValueSlice) -> int:
        """Count a slice of a stored value as lent; return its size."""
        size = part.size
        self.lent_bytes += size
        self._node.lent.pin(part.pin_key, part.pinned_bytes, self._session.share)
        return size

    def _append_deferred(self, part: DeferredReply) -> None:
        self.waiting.append(part)
        self.waiting_bytes += part.expected_bytes
        self.lent_bytes += part.expected_bytes
        if part.is_lent:  # counted before it is in memory
            self._node.lent.pin(id(part), part.expected_bytes, self._session.share)
        self.deferred += 1
        if part.parts is None:
            part.attach(self._notify)
        self.advance()

    def advance(self) -> None:
        """Move the parts that are known now from ``waiting`` to ``out``."""
        waiting = self.waiting
        while waiting:
            first = waiting[0]
            if not isinstance(first, DeferredReply):
                size = len(first) if isinstance(first, bytes) else first.size
                self.waiting_bytes -= size
                self.out_bytes += size
                self.out.append(first)
            elif first.parts is None:
                return
            else:
                self._move_resolved(first, first.parts)
            waiting.popleft()

    def _move_resolved(self, deferred: DeferredReply, parts: list[Ready]) -> None:
        counters = self._node.counters
        if deferred.lost:  # it was not a hit after all
            counters.hits -= 1
            counters.misses += 1
            counters.lost_values += 1
        counters.command_errors += deferred.failed
        self.deferred -= 1
        self.waiting_bytes -= deferred.expected_bytes
        self.lent_bytes -= deferred.expected_bytes
        self.out.extend(parts)
        for part in parts:
            self.out_bytes += len(part) if isinstance(part, bytes) else self._pin(part)
        if deferred.is_lent:
            self._node.lent.unpin(id(deferred))

    # ---- Sending

    def send_to(self, transport: Transport, sent_slices: list[ValueSlice]) -> int:
        """Send as much as the transport takes in one call; return the number of bytes. Raises OSError of the socket.

        ``sent_slices`` receives the slices that are sent completely; the caller releases them.
        """
        out = self.out
        first = out[0]
        if len(out) == 1 and isinstance(first, bytes) and self._offset == 0:
            sent = transport.send(first)
            if sent == len(first):  # most often
                out.clear()
                self.out_bytes = 0
                return sent
        else:
            sent = transport.sendmsg(iovec_of(out, self._offset))
        self._remove_sent(sent, sent_slices)
        return sent

    def _remove_sent(self, sent: int, sent_slices: list[ValueSlice]) -> None:
        self.out_bytes -= sent
        sent += self._offset
        out, begin = self.out, self._offset
        while out:
            first = out[0]
            size = len(first) if isinstance(first, bytes) else first.size
            if not isinstance(first, bytes) and first.is_layer:
                self.layer_bytes += min(sent, size) - begin
            begin = 0
            if sent < size:
                break
            sent -= size
            out.popleft()
            if not isinstance(first, bytes):
                self.lent_bytes -= size
                sent_slices.append(first)
        self._offset = sent

    @property
    def is_partly_sent(self) -> bool:
        """True if some bytes of the first part are sent: the kernel's buffer was full."""
        return self._offset > 0

    def drop(self) -> None:
        for queue in (self.out, self.waiting):
            for part in queue:
                if isinstance(part, ValueSlice):
                    self._node.lent.unpin(part.pin_key)
                elif isinstance(part, DeferredReply) and part.is_lent:
                    self._node.lent.unpin(id(part))
            drop_parts(queue, self._node.store)
            queue.clear()
        self.out_bytes = self.waiting_bytes = self.lent_bytes = self.deferred = 0
        self.count_load()

    def note_window(self, limited_s: float, now_s: float) -> None:
        """Note for how long the kernel has waited for the client to read, in all: half of the time is slow reading."""
        limited_before_s, before_s = self._window
        self._window = limited_s, now_s
        self._reads_slowly = limited_s - limited_before_s > (now_s - before_s) / 2
        self.count_load()

    def count_load(self) -> None:
        """Add what has come to the node's load, and subtract what was sent.

        A client that reads slowly has no load: its bytes do not wait for the link, and do not tell its rate.
        """
        size = 0 if self._reads_slowly else self.out_bytes
        self._node.load.replies_bytes += size - self._counted_bytes
        self._counted_bytes = size
