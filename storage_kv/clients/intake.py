"""A client's large arguments on their way in: whether they may come at all, when, and where to.

What is refused is refused when its length is known, and dropped as it arrives, so that the connection goes on and
nothing of it is ever held. What may come is counted with its whole length before there is memory for it, and waits for
its turn where there is no room: with its client, who is not read.

A value is received where it stays: in the store's memory, as long as it is executed at once. Of several in one command
those for which the store has no room stay in memory of their own until then, lest clients that hold some of theirs
wait for each other.
"""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from shadowserve.pool import buffers
from shadowserve.resp import NEED_DATA, CommandReader, LargeBulk, NeedData, encode_error
from storage_kv.clients.holdings import Holdings
from storage_kv.commands import find
from storage_kv.commands._arguments import OUT_OF_MEMORY
from storage_kv.node import Node
from storage_kv.session import Argument, Session

Event: TypeAlias = list[Argument] | LargeBulk | Literal[NeedData.NEED_DATA]

_ARGUMENT_BYTES_MAX: Final = 1 << 20
"""Of what is no value: keys, which have far less, and what is echoed."""


def _nothing() -> None:
    pass


class Intake:
    """Provides for one client's large arguments; used with the node's lock held.

    Attributes:
        bytes: admitted for the command that is arriving or being executed.
        in_place: a large argument is being received.
        refusal: what the command that is arriving will be answered, since a part of it was refused; empty for nothing.
    """

    __slots__ = (
        "_admitted",
        "_buffers",
        "_holdings",
        "_node",
        "_ready",
        "_reader",
        "_session",
        "_wanted_bytes",
        "bytes",
        "in_place",
        "refusal",
    )

    def __init__(
        self, node: Node, session: Session, reader: CommandReader, holdings: Holdings, ready: Callable[[], None]
    ) -> None:
        """``ready`` is called, from any thread, when the store may have room."""
        self._node = node
        self._session = session
        self._reader = reader
        self._holdings = holdings
        self._ready = ready
        self._wanted_bytes = -1  # of a large argument for which there is no room yet
        self._admitted = False  # by the bound; the store has no room
        self._buffers: list[memoryview] = []  # the store's
        self.bytes = 0
        self.in_place = False
        self.refusal = b""

    @property
    def waits(self) -> bool:
        return self._wanted_bytes >= 0

    def next_command(self) -> Event:
        """Return what the reader has, with large arguments provided for; NEED_DATA too where one waits for room.

        LargeBulk says that another large argument is next: call it again.

        Raises:
            ProtocolError: the client cannot be followed any more.
        """
        event: Event = LargeBulk(self._wanted_bytes) if self.waits else self._reader.next_command()
        if isinstance(event, LargeBulk):
            if not self._provide(event.size):
                return NEED_DATA
            event = self._reader.next_command()
        if isinstance(event, list):
            self.in_place = False
            if self.bytes:  # only values are worth their buffers
                command = find(event[0])
                event = [
                    each if isinstance(each, bytes) or (command and command.takes_value(at)) else bytes(each)
                    for at, each in enumerate(event)
                ]
        return event

    def _provide(self, size: int) -> bool:
        """Have a large argument received or dropped; return False where it has to wait."""
        arguments = self._reader.arguments
        command = find(arguments[0]) if arguments else None
        is_value = command is not None and command.takes_value(len(arguments))
        if not self.refusal:
            self.refusal = self._refusal(size, is_value)
        if self.refusal or not (self._admitted or self._holdings.admit(size)):
            return self._drop() if self.refusal else self._wait(size)
        self.bytes += 0 if self._admitted else size
        view: memoryview | None = None
        waits = command is not None and is_value and command.values[0] == command.values[1]
        try:
            if is_value and self._session.transaction is None:
                view = self._node.store.allocate(size, self._ready if waits else _nothing)
            if view is not None:
                self._buffers.append(view)
            elif not waits or self._session.transaction is not None:
                view = buffers.allocate(size)
        except MemoryError as error:
            self.refusal = encode_error(f"OOM {error}")
            return self._drop()
        if view is None:
            self._admitted = True
            return self._wait(size)
        self._admitted, self._wanted_bytes = False, -1
        self._reader.provide(view)
        self.in_place = True
        return True

    def _wait(self, size: int) -> bool:
        self._wanted_bytes = size
        return False

    def _drop(self) -> bool:
        self._admitted, self._wanted_bytes = False, -1
        self._reader.drop()
        return True

    def _refusal(self, size: int, is_value: bool) -> bytes:
        """Return why an argument will never do, as a reply; empty if it may."""
        config = self._node.config
        limits = config.tenants.get(self._session.user.tenant)
        quota = None if limits is None else limits.bytes_max
        if not is_value:
            if size <= _ARGUMENT_BYTES_MAX:
                return b""
            most = _ARGUMENT_BYTES_MAX
            text = f"ERR an argument of {size} bytes is too long: at most {most} are allowed, but for values"
        elif quota is not None and size > quota:
            text = OUT_OF_MEMORY
        elif size > config.clients_memory_bytes:
            text = f"OOM a value of {size} bytes is more than clients_memory_bytes_max, {config.clients_memory_bytes}"
        else:
            return b""
        return encode_error(text)

    def refuse(self, reply: bytes) -> None:
        """Drop what waits for room, and have its command answered so."""
        self.refusal = reply
        self._drop()

    def let_go(self) -> None:
        """Hold nothing of the command that has been executed, or never will be; what was stored stays stored."""
        for buffer in self._buffers:
            self._node.store.discard(buffer)
        self._buffers.clear()
        self.bytes, self.refusal = 0, b""
