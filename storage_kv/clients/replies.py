"""What a client is to be sent, in order, while some of it is not known yet."""

from collections import deque
from collections.abc import Callable

from storage_kv.clients.gather import gather
from storage_kv.clients.transport import Transport
from storage_kv.node import Node, Outgoing, Part, Pending, Ready
from storage_kv.session import Session


class Replies:
    """The replies of one client that have not been sent; used with the node's lock held, but for send_to().

    Attributes:
        out: what may be sent.
        out_bytes: of it, less what is sent of its first part.
        lent_bytes: of both, those of stored values, in memory or on their way there: they are not ours.
        layer_bytes: that were sent of layers, ever.
        pendings: parts in ``waiting`` that are pending.
        waiting: what may not be sent yet; the first of it is pending.
        waiting_bytes: about how many they are.
    """

    __slots__ = (
        "_node",
        "_notify",
        "_offset",
        "_session",
        "layer_bytes",
        "lent_bytes",
        "out",
        "out_bytes",
        "pendings",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, node: Node, session: Session, notify: Callable[[], None]) -> None:
        """Make an empty queue; ``notify`` is called, from any thread, when advance() may find that more is known."""
        self._node = node
        self._session = session
        self._notify = notify
        self._offset = 0  # bytes of the first part that are sent
        self.out: deque[Ready] = deque()
        self.out_bytes = 0
        self.lent_bytes = 0
        self.layer_bytes = 0
        self.waiting: deque[Part] = deque()
        self.waiting_bytes = 0
        self.pendings = 0

    # ---- Coming

    def extend(self, parts: list[Part]) -> None:
        """Append parts, joining the small ones and holding the items of the others."""
        small: list[bytes] = []
        for part in parts:
            if isinstance(part, bytes):
                small.append(part)
                continue
            if small:
                self.append(b"".join(small))
                small = []
            if isinstance(part, Pending):
                self._wait_for(part)
            else:
                part.hold(self._node.store)
                self.append(part)
        if small:
            self.append(b"".join(small))

    def append(self, part: Ready) -> None:
        """Append a part that is held already, if it has to be."""
        if isinstance(part, bytes):
            size = len(part)
        else:
            size = self._pin(part)
        if self.waiting:
            self.waiting.append(part)
            self.waiting_bytes += size
        else:
            self.out.append(part)
            self.out_bytes += size

    def _pin(self, part: Outgoing) -> int:
        """Count a stored value that is to be sent, or a part of it; return how many bytes are to be sent."""
        size = part.size
        self.lent_bytes += size
        self._node.lent.pin(part.pinned, part.pinned_bytes, self._session.share)
        return size

    def _wait_for(self, pending: Pending) -> None:
        self.waiting.append(pending)
        self.waiting_bytes += pending.expects
        self.lent_bytes += pending.expects
        if pending.is_lent:  # it counts before it is in memory
            self._node.lent.pin(id(pending), pending.expects, self._session.share)
        self.pendings += 1
        if pending.parts is None:
            pending.attach(self._notify)
        self.advance()

    def advance(self) -> None:
        """Move what is known by now from what waits to what may be sent."""
        waiting = self.waiting
        while waiting:
            first = waiting[0]
            if not isinstance(first, Pending):
                size = len(first) if isinstance(first, bytes) else first.size
                self.waiting_bytes -= size
                self.out_bytes += size
                self.out.append(first)
            elif first.parts is None:
                return
            else:
                self.pendings -= 1
                self.waiting_bytes -= first.expects
                self.lent_bytes -= first.expects
                self._count(first)
                self.out.extend(first.parts)
                for part in first.parts:
                    self.out_bytes += len(part) if isinstance(part, bytes) else self._pin(part)
                if first.is_lent:
                    self._node.lent.unpin(id(first))
            waiting.popleft()

    def _count(self, pending: Pending) -> None:
        counters = self._node.counters
        if pending.lost:  # it was not a hit after all
            counters.hits -= 1
            counters.misses += 1
            counters.lost += 1
        counters.errors += pending.failed

    # ---- Going

    def send_to(self, transport: Transport, whole: list[Outgoing]) -> int:
        """Send as much as the transport takes at a time, not all if it is much; return how many bytes.

        Args:
            transport: where to.
            whole: parts of values that have been sent are added to it, to be released.

        Raises:
            OSError: BlockingIOError where the kernel has no room, others where the client is gone.
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
            sent = transport.sendmsg(gather(out, self._offset))
        self._consume(sent, whole)
        return sent

    def _consume(self, sent: int, whole: list[Outgoing]) -> None:
        """Take ``sent`` bytes off the front."""
        self.out_bytes -= sent
        sent += self._offset
        out, begun = self.out, self._offset
        while out:
            first = out[0]
            size = len(first) if isinstance(first, bytes) else first.size
            if not isinstance(first, bytes) and first.is_layer:
                self.layer_bytes += min(sent, size) - begun
            begun = 0
            if sent < size:
                break
            sent -= size
            out.popleft()
            if not isinstance(first, bytes):
                self.lent_bytes -= size
                whole.append(first)
        self._offset = sent

    @property
    def is_cut(self) -> bool:
        """Whether the first part has been sent in part: the kernel was full."""
        return self._offset > 0

    def drop(self) -> None:
        for queue in (self.out, self.waiting):
            for part in queue:
                if isinstance(part, Outgoing):
                    self._node.lent.unpin(part.pinned)
                elif isinstance(part, Pending) and part.is_lent:
                    self._node.lent.unpin(id(part))
        self._node.drop(self.out)
        self._node.drop(self.waiting)
        self.out.clear()
        self.waiting.clear()
        self.out_bytes = self.waiting_bytes = self.lent_bytes = self.pendings = 0
