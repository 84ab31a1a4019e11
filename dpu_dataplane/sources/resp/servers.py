"""What bytes have to know of servers, one or the nodes of a cluster: who has what, and how to get there.

Questions that servers answer themselves, such as for heads, go through the same object.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from dpu_dataplane.sources.resp.links import Dialer, Node
from dpu_dataplane.sources.source import Found
from shadowserve.pieces import Flags

__all__ = ["REDIRECTIONS_MAX", "Redirect", "Servers"]

REDIRECTIONS_MAX: Final = 5
"""Of one key in one plan: as many as a slot that moves, and moves on, makes of it; Redis's own clients take 16."""


class Redirect(NamedTuple):
    """Where a cluster's node sends us for a key; ``asking``: this once only, and with ASKING before the command."""

    node: Node
    asking: bool


class Servers(Protocol):
    """One server, or the nodes of a cluster. Its questions are those of :class:`~dpu_dataplane.sources.source.Source`.

    Attributes:
        name: for people.
        dialer: makes data connections.
        clustered: keys are spread over nodes; otherwise there is one node, and no other to try.
        not_by_layers: reason for which no fetch is asked for layer by layer in one request; empty where one may be.
    """

    name: str
    dialer: Dialer
    clustered: bool
    not_by_layers: str

    @property
    def connected(self) -> bool:
        """Whether questions can be asked, as far as is known."""
        ...

    async def start(self) -> None:
        """Begin to connect."""
        ...

    async def close(self) -> None:
        """Close the connections and stop trying."""
        ...

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        ...

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what is stored under each key."""
        ...

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Tell it that keys will be stored; return whether it takes publications."""
        ...

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return which keys are published; None where it is not told."""
        ...

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return as find() does, but wait for what is cold."""
        ...

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have it begin to bring what is cold."""
        ...

    async def delete(self, key: bytes) -> None:
        """Delete a record."""
        ...

    async def expire(self, key: bytes, lasts_ms: int) -> None:
        """Have a record end by itself after so long."""
        ...

    def nodes(self) -> Sequence[Node]:
        """Return all nodes that :meth:`route` may name."""
        ...

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return who has each key: with ``master`` who takes its writes; ``None`` where nobody is known to have it."""
        ...

    def redirect(self, asked: Node, text: str) -> Redirect | None:
        """Return where a node's error sends us, and remember it; ``None`` where it is no redirection."""
        ...

    async def recover(self, node: Node | None) -> None:
        """Learn who has what now, after a node failed."""
        ...
