"""The memory that one client makes the node hold, counted against the node's budgets (access/memory.py)."""

from typing import Final

from storage_kv.access.memory import Account, Client
from storage_kv.node import Node
from storage_kv.session import Session

UNCOUNTED_BYTES: Final = 16 << 10
"""A client that holds no more than this is not counted: partial pipelines, small replies."""


class MemoryAccounts:
    """The two memory accounts of a client. Needs the node's lock.

    Attributes:
        memory: Memory for requests and copied replies.
        lent: Stored values that are being sent.
        counted: One of the accounts is not empty.
    """

    def __init__(self, node: Node, session: Session, client: Client) -> None:
        self._session = session
        self.memory = Account(node.memory, client, session.share)
        self.lent = Account(node.lent, client, session.share)
        self.counted = False

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
        self.memory.transfer(account, size)
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
