"""What a connection needs of what drives it."""

from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol

from storage_kv.node import Node

if TYPE_CHECKING:
    from storage_kv.clients.connection import Connection

__all__ = ["Host"]


class Host(Protocol):
    """What a connection needs of the server that accepted it."""

    @property
    def node(self) -> Node:
        """The node that it serves."""

    @property
    def workers(self) -> Executor:
        """Threads for work that is too long for the event loop."""

    def forget(self, connection: "Connection") -> None:
        """Take note that a connection has ended; called in the connection's thread, without the node's lock."""
