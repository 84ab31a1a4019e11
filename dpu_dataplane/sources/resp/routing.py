"""Routing of keys to storage nodes: the interface that transfers of bytes use, and a list of nodes to avoid."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from dpu_dataplane.sources.resp.links import Dialer, Node

REDIRECTIONS_MAX: Final = 5
"""Most redirections of one key in one plan: enough for a slot that moves twice; Redis's own clients allow 16."""
_AVOID_S: Final = 2.0
"""Seconds for which a failed node is avoided: by then its control connection knows whether it is down."""


class Redirect(NamedTuple):
    """A redirection by a cluster's node; ``asking``: only for this request, with ASKING before the command."""

    node: Node
    asking: bool


class Router(ABC):
    """One server, or the nodes of a cluster."""

    name: str  # name for messages
    dialer: Dialer  # makes data connections
    clustered: bool  # keys are spread over nodes. Otherwise there is one node, and no other one to try
    no_layers_reason: str  # why no fetch in layer order is one request; empty if it may be

    @abstractmethod
    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return all nodes that :meth:`route` may return."""

    @abstractmethod
    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return the node of each key, with ``master`` the one that accepts writes; None if no node is known."""

    def redirect(self, source: Node, text: str) -> Redirect | None:
        """Return the redirection in a node's error, and update the map; None if it is no redirection."""
        return None

    async def recover(self, node: Node | None) -> None:
        """Update the map of nodes after a node has failed."""
        return


class AvoidedNodes:
    """Nodes that failed a moment ago, by address."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int], float] = {}

    def add(self, node: Node) -> None:
        now = time.monotonic()
        self._until = {address: end for address, end in self._until.items() if end > now}
        self._until[node.host, node.port] = now + _AVOID_S

    def __contains__(self, node: Node) -> bool:
        return self._until.get((node.host, node.port), 0.0) > time.monotonic()
