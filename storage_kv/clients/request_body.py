"""Memory of one client: accounts of what it holds, and large arguments, whether, when and where they are received.

An argument is refused when its length is known; its bytes are dropped as they arrive. An admitted argument is counted
with its whole length before there is memory for it. Where there is no room it waits, and its client is not read.

A value that is executed at once is received into the store's memory, where it stays. If a command has several values, a
value for which the store has no room is received into memory of its own; otherwise clients that each hold some of their
values could wait for each other.
"""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from shadowserve.pool import buffers
from shadowserve.resp import NEED_DATA, CommandReader, LargeBulk, Limits, NeedData, encode_error
from storage_kv.access.memory import Account, Client
from storage_kv.commands import find
from storage_kv.commands._arguments import OUT_OF_MEMORY
from storage_kv.node import Node
from storage_kv.session import Argument, Session

Event: TypeAlias = list[Argument] | LargeBulk | Literal[NeedData.NEED_DATA]

UNCOUNTED_BYTES: Final = 16 << 10
"""A client that holds no more than this is not counted: partial pipelines, small replies."""

_ARGUMENT_BYTES_MAX: Final = 1 << 20  # size limit of an argument that is not a value: a key, or the text of ECHO

_UNAUTHENTICATED_ITEMS_MAX: Final = 10  # as Redis, like the next
_UNAUTHENTICATED_BULK_BYTES_MAX: Final = 16 << 10


def limits_of(node: Node, session: Session) -> Limits:
    """Return the parser limits of a client: small ones until it has authenticated."""
    config = node.config
    if not session.authenticated:
        return Limits(
            bulk_bytes_max=min(_UNAUTHENTICATED_BULK_BYTES_MAX, config.bulk_bytes_max),
            items_max=_UNAUTHENTICATED_ITEMS_MAX,
            line_bytes_max=_UNAUTHENTICATED_BULK_BYTES_MAX,
            total_bytes_max=2 * _UNAUTHENTICATED_BULK_BYTES_MAX,
            unauthenticated=True,
        )
    return Limits(
        bulk_bytes_max=config.bulk_bytes_max, items_max=config.arguments_max, total_bytes_max=config.request_bytes_max
    )


class MemoryAccounts:
    """The two memory accounts of a client. Needs the node's lock."""

    def __init__(self, node: Node, session: Session, client: Client) -> None:
        self._session = session
        self.memory = Account(node.memory, client, session.share)  # memory for requests and copied replies
        self.lent = Account(node.lent, client, session.share)  # stored values that are being sent
        self.counted = False  # one of the accounts is not empty

    def may_lend(self) -> bool:
        """Return True if a stored value may be sent now; otherwise the client is notified when to try again."""
        if self.lent.budget.is_open(self._session.share):
            return True
        self._follow_tenant()
        return self.lent.admit(self.lent.budget.mean_pin_bytes)

    def admit(self, size: int) -> bool:
        """Count a large argument if there is room; otherwise the client is notified when to try again."""
        self._follow_tenant()
        self.counted = True
        return self.memory.admit(size)

    def admit_apart(self, size: int) -> Account | None:
        """Count what a request holds after its command is executed, in an account of its own; None without room."""
        if not self.admit(size):
            return None
        assert self.memory.client is not None, "a closed connection executes nothing"
        account = Account(self.memory.budget, self.memory.client, self._session.share)
        self.memory.budget.transfer(self.memory, account, size)
        return account

    def _follow_tenant(self) -> None:
        share = self._session.share
        if self.memory.tenant != share:
            self.memory.move(share)
            self.lent.move(share)

    def set_held(self, held: int, lent: int) -> None:
        self._follow_tenant()
        if held <= UNCOUNTED_BYTES:
            held = 0
        self.counted = held > 0 or lent > 0
        self.memory.set_held(held)
        self.lent.set_held(lent)

    def close(self) -> None:
        self.memory.close()
        self.lent.close()


class RequestBody:
    """Provides memory for one client's large arguments. Needs the node's lock."""

    def __init__(
        self, node: Node, session: Session, reader: CommandReader, accounts: MemoryAccounts, notify: Callable[[], None]
    ) -> None:
        """``notify`` is called from any thread when the store may have room."""
        self._node = node
        self._session = session
        self._reader = reader
        self._accounts = accounts
        self._notify = notify
        self._waiting_bytes = -1  # size of a large argument that waits for room
        self._is_admitted = False  # the budget admits that argument; the store has no room
        self._buffers: list[memoryview] = []  # allocated by the store
        self.bytes = 0  # admitted bytes of the command that arrives or is executed
        self.in_place = False  # a large argument is being received
        self.refusal = b""  # reply to the command that arrives if an argument of it was refused; otherwise empty

    @property
    def waits(self) -> bool:
        return self._waiting_bytes >= 0

    def next_command(self) -> Event:
        """Return the reader's next event, with memory provided for large arguments.

        NEED_DATA also means that an argument waits for room. LargeBulk means that another large argument follows: call
        it again.
        """
        event: Event = LargeBulk(self._waiting_bytes) if self.waits else self._reader.next_command()
        if isinstance(event, LargeBulk):
            if not self._provide(event.size):
                return NEED_DATA
            event = self._reader.next_command()
        if isinstance(event, list):
            self.in_place = False
            if self.bytes:  # keep buffers for values only
                command = find(event[0])
                event = [
                    each if isinstance(each, bytes) or (command and command.takes_value(at)) else bytes(each)
                    for at, each in enumerate(event)
                ]
        return event

    def _provide(self, size: int) -> bool:
        """Receive or drop a large argument; return False if it has to wait."""
        arguments = self._reader.arguments
        command = find(arguments[0]) if arguments else None
        is_value = command is not None and command.takes_value(len(arguments))
        if not self.refusal:
            self.refusal = self._refusal(size, is_value)
        if self.refusal:
            return self._drop()
        if not (self._is_admitted or self._accounts.admit(size)):
            self._waiting_bytes = size
            return False
        self.bytes += 0 if self._is_admitted else size
        try:
            view = self._allocate(size, is_value, command is not None and command.values[0] == command.values[1])
        except MemoryError as error:
            self.refusal = encode_error(f"OOM {error}")
            return self._drop()
        if view is None:
            self._is_admitted, self._waiting_bytes = True, size
            return False
        self._is_admitted, self._waiting_bytes = False, -1
        self._reader.provide(view)
        self.in_place = True
        return True

    def _allocate(self, size: int, is_value: bool, is_only_value: bool) -> memoryview | None:
        """Return memory for an argument; None if it must wait for the store.

        A value goes to the store's memory unless MULTI queues its command. Only a command's single value waits.
        """
        waits = is_value and is_only_value and self._session.transaction is None
        if is_value and self._session.transaction is None:
            view = self._node.store.allocate(size, self._notify if waits else lambda: None)
            if view is not None:
                self._buffers.append(view)
                return view
        return None if waits else buffers.allocate(size)

    def _drop(self) -> bool:
        self._is_admitted, self._waiting_bytes = False, -1
        self._reader.drop()
        return True

    def _refusal(self, size: int, is_value: bool) -> bytes:
        """Return the error reply for an argument that can never be received; otherwise empty."""
        config = self._node.config
        limits = config.tenants.get(self._session.user.tenant)
        quota = None if limits is None else limits.bytes_max
        if not is_value:
            if size <= _ARGUMENT_BYTES_MAX:
                return b""
            text = f"ERR an argument of {size} bytes is too long: only values have more than {_ARGUMENT_BYTES_MAX}"
        elif quota is not None and size > quota:
            text = OUT_OF_MEMORY
        elif size > config.clients_memory_bytes:
            text = f"OOM a value of {size} bytes is more than clients_memory_bytes_max, {config.clients_memory_bytes}"
        else:
            return b""
        return encode_error(text)

    def refuse(self, reply: bytes) -> None:
        """Drop the argument that waits for room, and answer its command with ``reply``."""
        self.refusal = reply
        self._drop()

    def release(self) -> None:
        """Release the memory of the command that has been executed or will not be; stored values stay."""
        for buffer in self._buffers:
            self._node.store.discard(buffer)
        self._buffers.clear()
        self.bytes, self.refusal = 0, b""
