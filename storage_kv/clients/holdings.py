"""What one client makes the node hold, told to the bounds (access/memory.py)."""

from typing import Final

from storage_kv.access.memory import Account, Client
from storage_kv.node import Node
from storage_kv.session import Session

UNCOUNTED_BYTES: Final = 16 << 10
"""What a client may hold without being counted: the ends of pipelines, replies under way."""


class Holdings:
    """The accounts of one client; used with the node's lock held.

    Attributes:
        memory: of what it costs beside what is stored.
        lent: of stored values that are sent to it.
        counted: something is.
    """

    __slots__ = ("_session", "counted", "lent", "memory")

    def __init__(self, node: Node, session: Session, client: Client) -> None:
        self._session = session
        self.memory = Account(node.memory, client, session.share)
        self.lent = Account(node.lent, client, session.share)
        self.counted = False

    @property
    def lends(self) -> bool:
        """Whether more stored values may be sent to clients of this tenant, without asking or waiting."""
        return self.lent.bound.is_open(self._session.share)

    def may_lend(self) -> bool:
        """Return whether a stored value may be sent now; else the client is told when to try again."""
        self._follow()
        return self.lent.admit(self.lent.bound.typical)

    def admit(self, size: int) -> bool:
        """Count a large argument if there is room; else the client is told when to try again."""
        self._follow()
        self.counted = True
        return self.memory.admit(size)

    def admit_apart(self, size: int) -> Account | None:
        """Count what a request holds for longer than its command is executed, in an account of its own.

        Returns None where there is no room; then the client is told when to try again.
        """
        if not self.admit(size):
            return None
        assert self.memory.client is not None, "nobody asks of a closed connection"
        account = Account(self.memory.bound, self.memory.client, self._session.share)
        self.memory.pass_on(account, size)
        return account

    def _follow(self) -> None:
        share = self._session.share
        if self.memory.tenant != share:
            self.memory.move(share)
            self.lent.move(share)

    def settle(self, held: int, lent: int) -> None:
        """Say how many bytes are held of each kind."""
        self._follow()
        if held <= UNCOUNTED_BYTES:
            held = 0
        self.counted = held > 0 or lent > 0
        if held != self.memory.held:
            self.memory.settle(held)
        if lent != self.lent.held:
            self.lent.settle(lent)

    def close(self) -> None:
        self.memory.close()
        self.lent.close()
