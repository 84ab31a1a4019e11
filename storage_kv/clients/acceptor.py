"""What a connection needs of the server that accepted it."""

from typing import Protocol

from storage_kv.clients.workers import Workers
from storage_kv.node import Node
from storage_kv.session import Session


class Acceptor(Protocol):
    """The server that accepted a connection."""

    @property
    def node(self) -> Node:
        """The node that it serves."""

    @property
    def workers(self) -> Workers:
        """Threads for work that is too long for the event loop."""

    def forget(self, session: Session) -> None:
        """Take note that a client's connection has ended; called in its thread, without the node's lock."""
