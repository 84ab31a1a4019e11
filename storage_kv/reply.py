"""Replies of commands: bytes, slices of stored values, parts that are not known yet, and replies made in steps.

A command's handler returns a :data:`Reply`. Nothing here does I/O.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from shadowserve.errors import ShadowServeError
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import ENTRIES_PER_HOLD, Item, Lease

REFERENCE_BYTES_MIN: Final = 16 << 10
"""Values from this size on are sent from where they are stored. Smaller ones are copied into the reply: a buffer of its
own in the gathering write costs about as much as copying 16 KiB."""

_STEP_BYTES: Final = 64 << 10
"""Bytes of a reply with many values that are made in one step: about a quarter of a millisecond."""

T = TypeVar("T")


class CommandError(ShadowServeError):
    """A command fails. The message is the error reply with its code: ``ERR syntax error``."""


class ValueSlice:
    """Bytes of a stored value in a reply, sent from where they are stored; held or leased until they are sent.

    ``is_layer``: it belongs to a reply to KV.LAYERS.
    """

    __slots__ = ("source", "view")

    is_layer: ClassVar[bool] = False

    def __init__(self, view: memoryview, source: Item | Lease) -> None:
        self.view = view
        self.source = source

    @property
    def size(self) -> int:
        return len(self.view)

    def buffers(self, offset: int, count: int) -> "list[bytes | memoryview]":
        """Return the bytes behind ``offset``, or the first of them, in at most ``count`` buffers."""
        return [self.view[offset:] if offset else self.view]

    @property
    def pin_key(self) -> int:
        """Identity of the memory that is kept for these bytes."""
        return id(self.source.kept)

    @property
    def pinned_bytes(self) -> int:
        """Size of the memory that is kept so that these bytes can be sent."""
        return self.source.length if isinstance(self.source, Item) else len(self.source.view)

    def hold(self, store: Pool) -> None:
        """Keep the bytes until release(). A lease already does. Needs the node's lock."""
        if isinstance(self.source, Item):
            store.hold(self.source)

    def release(self, store: Pool) -> None:
        if isinstance(self.source, Item):
            store.release(self.source)
        else:
            self.source.release()


Ready: TypeAlias = bytes | ValueSlice


class DeferredReply:
    """A part of a reply that is not known yet. It keeps its position: the parts behind it wait.

    The producer calls resolve() from any thread. The connection calls attach() to be notified, or abandon() when it no
    longer needs the part. The parts given to resolve() are held.
    """

    __slots__ = ("_abandoned", "_lock", "_node_lock", "_notify", "_store", "expected_bytes", "failed", "lost", "parts")

    is_lent: ClassVar[bool] = True  # the connection counts the expected bytes as lent; else the producer has

    def __init__(self, node_lock: threading.Lock, store: Pool, expected_bytes: int) -> None:
        self._node_lock = node_lock
        self._store = store
        self._lock = threading.Lock()
        self._notify: Callable[[], None] | None = None
        self._abandoned = False
        self.expected_bytes = expected_bytes
        self.failed = False  # set before resolve(): the part is an error
        self.lost = False  # set before resolve(): a value that was counted as a hit could not be read
        self.parts: list[Ready] | None = None  # the resolved parts; None before

    def resolve(self, parts: list[Ready]) -> None:
        """Set the parts, once. Must not be called with the node's lock, except before abandon() is possible."""
        with self._lock:
            self.parts = parts
            if self._notify is not None:
                self._notify()  # with the lock held, so that it is never called after abandon()
            abandoned = self._abandoned
        if abandoned:
            with self._node_lock:
                drop_parts(parts, self._store)

    def attach(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` on resolve(), in any thread, or at once if it is resolved. ``notify`` must not block."""
        with self._lock:
            self._notify = notify
            if self.parts is not None:
                notify()

    def abandon(self) -> None:
        """Release the parts, now or when they are resolved. Needs the node's lock."""
        with self._lock:
            self._abandoned = self.parts is None
            self._notify = None
            parts, self.parts = self.parts, []
        if parts:
            drop_parts(parts, self._store)


Part: TypeAlias = bytes | ValueSlice | DeferredReply


@dataclass(slots=True)
class Continuation:
    """A reply of which at most the beginning is made; the rest is made later.

    So the lock is held for some keys at a time, a client that asks for everything and reads nothing costs little
    memory, and long work runs in another thread. The client's next commands wait; other clients' commands run in
    between.

    ``rest`` makes the next part of the reply from the result of ``work``, with the node's lock held. It raises
    BusyError if it has done nothing and must be called again later.
    """

    parts: "list[Part]"  # the beginning
    rest: "Callable[[Any], Reply]"
    work: Callable[[], Any] | None = None  # runs first, in another thread, and uses only its own arguments

    @classmethod
    def of(
        cls, parts: "list[Part]", items: Iterator[T], reply_to: "Callable[[T], bytes | list[Part]]"
    ) -> "list[Part] | Continuation":
        """Return ``parts`` and the reply to each item, made some items at a time."""
        size = count = 0
        for item in items:
            reply = reply_to(item)
            count += 1
            if isinstance(reply, bytes):
                parts.append(reply)
                size += len(reply)
            else:
                parts += reply
                size += _STEP_BYTES // 4  # counts like copying a quarter of what may be copied
            if size >= _STEP_BYTES or count == ENTRIES_PER_HOLD:
                return cls(parts, lambda _: cls.of([], items, reply_to))
        return parts


Reply: TypeAlias = bytes | list[Part] | Continuation


def drop_parts(parts: Iterable[Part], store: Pool) -> None:
    """Release held parts that will not be sent. Needs the node's lock."""
    for part in parts:
        if isinstance(part, ValueSlice):
            part.release(store)
        elif isinstance(part, DeferredReply):
            part.abandon()
