"""A Redis Cluster or Valkey Cluster: the map of slots, requests to all nodes at the same time, and redirections.

A lookup is one pipeline to each node, so an unreachable node costs its own keys only. A redirection (MOVED, ASK) counts
at once, and the whole map is read again after it.
"""

import asyncio
import binascii
import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import Found, Unanswered
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import Answer, find_by_ranges
from dpu_dataplane.sources.resp.links import Node
from dpu_dataplane.sources.resp.ranges import REDIRECTIONS_MAX, Redirect
from dpu_dataplane.sources.resp.source import AvoidedNodes, RespSource
from shadowserve import resp
from shadowserve.addresses import split_address
from shadowserve.errors import StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.resp_client import RespClient, refuse_error

_SLOTS: Final = 16384
_REFRESH_S: Final = 15.0  # seconds between two reads of the map, without a reason to read it earlier
_LOOKUPS: Final = 2  # attempts of a lookup: the second one after the map was read again


logger = logging.getLogger(__name__)


class _Command(NamedTuple):
    """A command and its position in the request; ``asking``: it is sent after ASKING."""

    position: int
    command: Sequence[bytes]
    asking: bool = False


class _Map:
    """The nodes of each slot: one node's answer to CLUSTER SLOTS; ValueError if it has another format."""

    def __init__(self, answer: object, source: Node) -> None:
        if not isinstance(answer, list) or not answer:
            raise ValueError("it has no slots")
        ranges = sorted((_slot_range(entry, source) for entry in answer), key=lambda each: each[0])
        self._begins = [begin for begin, _, _ in ranges]
        self._ranges = ranges
        self.nodes = frozenset(node for _, _, nodes in ranges for node in nodes)

    def of(self, slot: int) -> list[Node]:
        """Return the nodes of a slot, the master first."""
        position = bisect_right(self._begins, slot) - 1
        if position < 0 or self._ranges[position][1] < slot:
            return []
        return self._ranges[position][2]


def _slot_range(entry: object, source: Node) -> tuple[int, int, list[Node]]:
    match entry:
        case [int(begin), int(end), *nodes] if 0 <= begin <= end < _SLOTS and nodes:
            return begin, end, [_member(node, source, replica=index > 0) for index, node in enumerate(nodes)]
    raise ValueError("an entry has no range of slots with its nodes")


def _member(entry: object, source: Node, *, replica: bool) -> Node:
    """Return a node; one without a name is the node that has answered."""
    match entry:
        case [(bytes() | None) as host, int(port), *_] if 0 < port < 65536:
            return Node((host or b"").decode() or source.host, port, replica)
    raise ValueError("a node has no address")


class ServerCluster(RespSource):
    """The nodes of a cluster, with a control connection to each, and the map of slots."""

    clustered = True

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        super().__init__(f"cluster {','.join(config.storage_cluster)}", config, metrics)
        self._seeds = [Node(*split_address(address)) for address in config.storage_cluster]
        self._replicas = config.storage_cluster_replicas
        self._map: _Map | None = None
        self._controls: dict[Node, asyncio.Task[RespClient]] = {}
        self._outage = Outage(logger, "every call is a miss")  # of the map
        self._map_changed = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None
        self._moved: dict[int, Node] = {}  # slots with a MOVED since the map was read
        self._avoided = AvoidedNodes()
        self._turn = 0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_known(), name="storage cluster")

    async def _disconnect(self) -> None:
        self._stopping = True
        for task in (self._task, self._refreshing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._close_controls(list(self._controls), "the data plane is stopping")

    @property
    def connected(self) -> bool:
        """True if the map is known."""
        return self._map is not None

    def check(self) -> None:
        self._outage.check()

    # ---- Routing

    def nodes(self) -> Sequence[Node]:
        """Return all known nodes, each as master and as replica."""
        if self._map is None:
            return []
        known = {node._replace(replica=False) for node in (*self._map.nodes, *self._moved.values())}
        return [*known, *(node._replace(replica=True) for node in known)]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return the node of each key. If replicas may be read, they and their masters take turns, slot by slot."""
        self._turn += 1
        master = master or not self._replicas
        return [self._node_of(slot_of(storage_key(key)), turn=None if master else self._turn) for key in keys]

    def _node_of(self, slot: int, *, turn: int | None) -> Node | None:
        """Return the master of a slot; with a ``turn``, one of its nodes that have not just failed."""
        moved = self._moved.get(slot)
        if moved is not None:
            return moved
        several = self._map.of(slot) if self._map is not None else []
        if not several:
            return None
        if turn is None:
            return several[0]
        sound = [node for node in several if node not in self._avoided] or several
        return sound[(turn + slot) % len(sound)]

    def _is_member(self, node: Node) -> bool:
        members = self._map.nodes if self._map is not None else frozenset()
        return node in members or node._replace(replica=True) in members

    def redirect(self, source: Node, text: str) -> Redirect | None:
        """Return the redirection in an error; MOVED also changes the map, which is then read again."""
        words = text.split()
        if len(words) != 3 or words[0] not in ("MOVED", "ASK") or not words[1].isdigit():
            return None
        try:
            host, port = split_address(
                words[2] if not words[2].startswith(":") else f"{_bracket(source.host)}{words[2]}"
            )
        except ValueError:
            return None
        node = Node(host, port)
        if words[0] == "MOVED":
            self._moved[int(words[1]) % _SLOTS] = node
            self._map_changed.set()
        return Redirect(node, words[0] == "ASK")

    async def recover(self, node: Node | None) -> None:
        """Read the map again, after a node failed; avoid that node for a while."""
        if node is not None:
            self._avoided.add(node)
            self._moved = {slot: moved for slot, moved in self._moved.items() if moved != node}
        with contextlib.suppress(StorageError):
            await self._refresh()

    async def _refresh(self) -> None:
        """Read the map again; concurrent callers share one read."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read_map())
            self._refreshing.add_done_callback(_retrieve)
        await asyncio.shield(self._refreshing)

    async def _read_map(self) -> None:
        """Read the map from one node after the other, until one answers; the error of a node that refuses us counts."""
        moved = dict(self._moved)  # superseded by the new map, unlike those that come meanwhile
        failure: StorageError = StorageUnavailableError("it has no nodes")
        for node in self._nodes_to_ask():
            try:
                [answer] = await (await self._control(node)).ask([[b"CLUSTER", b"SLOTS"]])
                refuse_error("CLUSTER SLOTS", answer)
                self._map = _Map(answer, node)
                break
            except StorageError as error:
                self._avoided.add(node)
                failure = failure if isinstance(failure, StorageRefusedError) else error
            except ValueError as error:
                failure = StorageUnavailableError(f"{node} answered CLUSTER SLOTS with something else: {error}")
        else:
            raise type(failure)(
                f"storage {self.name}: {failure}; are its nodes running, in cluster mode, and do they accept our "
                "user and password?"
            )
        self._moved = {slot: node for slot, node in self._moved.items() if moved.get(slot) != node}
        known = {*self.nodes(), *self._seeds}
        await self._close_controls(
            [node for node in self._controls if node not in known], "the node has left the cluster"
        )

    def _nodes_to_ask(self) -> list[Node]:
        """Return the nodes to ask for the map: another one first each time, those that failed last."""
        known = sorted({node._replace(replica=False) for node in self._map.nodes}) if self._map is not None else []
        self._turn += 1
        first = self._turn % max(1, len(known))
        candidates = dict.fromkeys([*known[first:], *known[:first], *self._seeds])
        return sorted(candidates, key=self._avoided.__contains__)

    async def _keep_known(self) -> None:
        while True:
            try:
                await self._refresh()
                assert self._map is not None
                self._outage.recover()
                self._metrics.totals["storage_connections"] += 1
                logger.info("storage %s: %d nodes", self.name, len(self._map.nodes))
                while True:  # until no node answers
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_REFRESH_S):
                            await self._map_changed.wait()
                    self._map_changed.clear()
                    await self._refresh()
            except StorageError as error:
                self._outage.fail(error)
            finally:
                self._map = None
            await asyncio.sleep(self._outage.next_delay_s())

    async def _wait_for_map(self) -> None:
        """Wait for an attempt in progress, unless one has failed since the map was known."""
        while self._map is None:
            self.check()
            await self._outage.wait_known()

    # ---- Connections

    async def _control(self, node: Node) -> RespClient:
        """Return the control connection to a node; concurrent callers share one attempt to connect."""
        if self._stopping:
            raise StorageUnavailableError(f"storage {self.name}: the data plane is stopping")
        task = self._controls.get(node)
        if task is None or (task.done() and not _is_open(task)):
            task = self._controls[node] = asyncio.create_task(self.dialer.open_control(node))
            task.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            raise StorageUnavailableError(f"storage {node}: the connection was given up") from None

    async def _close_controls(self, nodes: Sequence[Node], reason: str) -> None:
        tasks = [self._controls.pop(node) for node in nodes]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if _is_open(task):
                task.result().abort(reason)
                await task.result().closed

    # ---- Requests

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look keys up in one round trip to all nodes, rarely a second one."""
        await self._wait_for_map()
        names = [storage_key(key) for key in keys]
        found: list[Found] = [Unanswered("not requested")] * len(names)
        left: Sequence[int] = range(len(names))
        for attempt in range(_LOOKUPS):
            if attempt:
                await self.recover(None)
            nodes = {name: self._node_to_ask(slot_of(name)) for name in names}

            async def ask(
                commands: Sequence[Sequence[bytes]], of: Sequence[bytes], nodes: dict[bytes, Node | None] = nodes
            ) -> Sequence[Answer]:
                return await self._ask(commands, [nodes[name] for name in of])

            await find_by_ranges(names, left, found, ask, nodes.__getitem__)
            left = [index for index in left if isinstance(found[index], Unanswered)]
            if not left:
                break
        if found and all(isinstance(entry, Unanswered) for entry in found):
            assert isinstance(found[0], Unanswered)
            raise found[0].error(f"storage {self.name}")
        return found

    def _node_to_ask(self, slot: int) -> Node | None:
        """Return the master of a slot; if it has just failed, a replica that may be read."""
        node = self._node_of(slot, turn=None)
        return self._node_of(slot, turn=0) if node is not None and self._replicas and node in self._avoided else node

    async def _ask(self, commands: Sequence[Sequence[bytes]], nodes: Sequence[Node | None]) -> list[Answer]:
        """Send each command to its node, one pipeline to each, and return the answers; errors are values.

        Redirections are followed at once: the map, which is read again after a MOVED, may come from a node that does
        not know of the move yet. They are followed to nodes of the map only: a malicious node could name any address.
        """
        nowhere = StorageUnavailableError("no node of the cluster has the slot of this key")
        answers: list[Answer] = [nowhere] * len(commands)
        pending: dict[Node, list[_Command]] = {}
        for position, (node, command) in enumerate(zip(nodes, commands, strict=True)):
            if node is not None:
                pending.setdefault(node, []).append(_Command(position, command))
        for _ in range(REDIRECTIONS_MAX + 1):
            sent = await asyncio.gather(*(self._send(*group) for group in pending.items()))
            redirected: dict[Node, list[_Command]] = {}
            for (node, sent_to_node), results in zip(pending.items(), sent, strict=True):
                for sent_command, answer in zip(sent_to_node, results, strict=True):
                    answers[sent_command.position] = answer
                    text = answer.decode("utf-8", "replace") if isinstance(answer, resp.ErrorReply) else ""
                    redirect = self.redirect(node, text)
                    if redirect is not None and self._is_member(redirect.node):
                        redirected.setdefault(redirect.node, []).append(sent_command._replace(asking=redirect.asking))
            if not redirected:
                break
            pending = redirected
        return answers

    async def _send(self, node: Node, commands: Sequence[_Command]) -> Iterator[Answer]:
        """Return one node's answers; a StorageError for each if it is unreachable."""
        sent = [part for each in commands for part in ([[b"ASKING"]] if each.asking else []) + [each.command]]
        try:
            answers = iter(await (await self._control(node)).ask(sent))
        except StorageError as error:
            self._avoided.add(node)
            self._map_changed.set()
            return iter([error] * len(commands))
        return iter([[next(answers) for _ in range(1 + each.asking)][-1] for each in commands])

    async def delete(self, key: bytes) -> None:
        name = storage_key(key)
        await self._wait_for_map()
        for last in (False, True):
            [answer] = await self._ask([[b"DEL", name]], [self._node_of(slot_of(name), turn=None)])
            if last and isinstance(answer, StorageError):
                raise answer
            if last:
                refuse_error("DEL", answer)
            if not isinstance(answer, StorageError | resp.ErrorReply):
                return
            await self.recover(None)


def slot_of(name: bytes) -> int:
    """Return the slot of a key, by its hash tag if it has one (Redis Cluster specification, "Hash tags")."""
    begin = name.find(b"{") + 1
    end = name.find(b"}", begin) if begin else -1
    return binascii.crc_hqx(name[begin:end] if end > begin else name, 0) % _SLOTS


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_open(task: "asyncio.Task[RespClient]") -> bool:
    """Return whether an attempt to connect has ended with a connection that is still open."""
    return not task.cancelled() and task.exception() is None and not task.result().closed.done()


def _retrieve(task: "asyncio.Task[None] | asyncio.Task[RespClient]") -> None:
    if not task.cancelled():
        task.exception()  # mark as retrieved: without a waiter, the next attempt reports it
