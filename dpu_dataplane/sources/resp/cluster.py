"""A Redis Cluster or Valkey Cluster: who has which key, questions to all nodes at the same time, and what sends us on.

Heads are asked of each node in one pipeline, so a node that is away costs its own keys and no others. What a connection
is told (MOVED, ASK) counts at once, and the whole map is read again behind it.
"""

import asyncio
import binascii
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import HEAD_GUESS, MetaAnswer, head_question, stored_of
from dpu_dataplane.sources.resp.links import Dialer, Node
from dpu_dataplane.sources.resp.servers import REDIRECTIONS_MAX, Redirect
from dpu_dataplane.sources.source import Found, Stored, Unanswered, head_size
from shadowserve import resp
from shadowserve.addresses import split_address
from shadowserve.errors import StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.pieces import Flags
from shadowserve.resp_client import RespClient, refuse_error

__all__ = ["ServerCluster", "slot_of"]

_SLOTS: Final = 16384
_REFRESH_TIME: Final = 15.0
"""Seconds between two looks at who has what, when nothing has told us to look."""
_AVOID_TIME: Final = 2.0
"""Seconds for which a node that failed is not read from where another one has the same slots."""
_HEADS: Final = 2
"""Tries at asking for heads: the second one after the map was read again."""

_Answer = resp.Value | MetaAnswer | StorageError

logger = logging.getLogger(__name__)


class _Question(NamedTuple):
    """A command on its way; ``asking``: it goes with ASKING before it."""

    position: int
    command: Sequence[bytes]
    asking: bool = False


class _Map:
    """Who has which slots, as one node sees it: an answer to CLUSTER SLOTS.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, answer: object, asked: Node) -> None:
        if not isinstance(answer, list) or not answer:
            raise ValueError("it has no slots")
        ranges = sorted((_slot_range(entry, asked) for entry in answer), key=lambda each: each[0])
        self._begins = [begin for begin, _, _ in ranges]
        self._ranges = ranges
        self.nodes = frozenset(node for _, _, nodes in ranges for node in nodes)

    def of(self, slot: int) -> list[Node]:
        """Return who has a slot, the master first."""
        position = bisect_right(self._begins, slot) - 1
        if position < 0 or self._ranges[position][1] < slot:
            return []
        return self._ranges[position][2]


def _slot_range(entry: object, asked: Node) -> tuple[int, int, list[Node]]:
    """Return first and last slot, and who has them."""
    match entry:
        case [int(begin), int(end), *nodes] if 0 <= begin <= end < _SLOTS and nodes:
            return begin, end, [_member(node, asked, replica=index > 0) for index, node in enumerate(nodes)]
    raise ValueError("an entry has no range of slots and who has them")


def _member(entry: object, asked: Node, *, replica: bool) -> Node:
    """Return a node; one without a name is where we have asked."""
    match entry:
        case [(bytes() | None) as host, int(port), *_] if 0 < port < 65536:
            return Node((host or b"").decode() or asked.host, port, replica)
    raise ValueError("a node has no address")


class ServerCluster:
    """Knows who has which key, and asks them questions.

    Raises:
        ConfigurationError: TLS is wanted and cannot be had.
    """

    clustered = True
    not_by_layers = "cluster"

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = f"cluster {','.join(config.storage_cluster)}"
        self.dialer = Dialer(config)
        self._seeds = [Node(*split_address(address)) for address in config.storage_cluster]
        self._replicas = config.storage_cluster_replicas
        self._metrics = metrics
        self._map: _Map | None = None
        self._controls: dict[Node, asyncio.Task[RespClient]] = {}
        self._outage = Outage(logger, "every call is a miss")  # until the map is known
        self._look = asyncio.Event()  # something says that the map has changed
        self._refreshing: asyncio.Task[None] | None = None
        self._moved: dict[int, Node] = {}  # slots that nodes have told of since the map was read
        self._avoided: dict[tuple[str, int], float] = {}  # to the time of its end
        self._turn = 0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to learn who has what; does not wait for it."""
        self._task = asyncio.create_task(self._keep_known(), name="storage cluster")

    async def close(self) -> None:
        """Close the connections and stop trying."""
        self._stopping = True
        for task in (self._task, self._refreshing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._hang_up(list(self._controls), "the data plane is stopping")

    @property
    def connected(self) -> bool:
        """Whether the map is known."""
        return self._map is not None

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        self._outage.check()

    # ---- Who has what

    def nodes(self) -> Sequence[Node]:
        """Return all nodes that are known, as masters and as replicas."""
        if self._map is None:
            return []
        known = {node._replace(replica=False) for node in (*self._map.nodes, *self._moved.values())}
        return [*known, *(node._replace(replica=True) for node in known)]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return who has each key, ``None`` where nobody is known to.

        Replicas, where they may be read, take turns with their masters, slot by slot.
        """
        self._turn += 1
        master = master or not self._replicas
        return [self._node_of(slot_of(storage_key(key)), turn=None if master else self._turn) for key in keys]

    def _node_of(self, slot: int, *, turn: int | None) -> Node | None:
        """Return the master of a slot, or with a turn whose it is of those that have not just failed."""
        moved = self._moved.get(slot)
        if moved is not None:
            return moved
        several = self._map.of(slot) if self._map is not None else []
        if not several:
            return None
        if turn is None:
            return several[0]
        sound = [node for node in several if not self._is_avoided(node)] or several
        return sound[(turn + slot) % len(sound)]

    def _is_avoided(self, node: Node) -> bool:
        end = self._avoided.get((node.host, node.port))
        return end is not None and end > time.monotonic()

    def _is_member(self, node: Node) -> bool:
        members = self._map.nodes if self._map is not None else frozenset()
        return node in members or node._replace(replica=True) in members

    def _avoid(self, node: Node) -> None:
        self._avoided[node.host, node.port] = time.monotonic() + _AVOID_TIME

    def redirect(self, asked: Node, text: str) -> Redirect | None:
        """Return where a node's error sends us; MOVED also changes the map, and has it read again."""
        words = text.split()
        if len(words) != 3 or words[0] not in ("MOVED", "ASK") or not words[1].isdigit():
            return None
        try:
            host, port = split_address(
                words[2] if not words[2].startswith(":") else f"{_bracket(asked.host)}{words[2]}"
            )
        except ValueError:
            return None
        node = Node(host, port)
        if words[0] == "MOVED":
            self._moved[int(words[1]) % _SLOTS] = node
            self._look.set()
        return Redirect(node, words[0] == "ASK")

    async def recover(self, node: Node | None) -> None:
        """Learn who has what now, after a node failed; for a while leave that node alone where another one will do."""
        if node is not None:
            self._avoid(node)
            self._moved = {slot: moved for slot, moved in self._moved.items() if moved != node}
        with contextlib.suppress(StorageError):
            await self._refresh()

    async def _refresh(self) -> None:
        """Read the map again; who asks while it is being read gets that reading."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read_map())
            self._refreshing.add_done_callback(_retrieve)
        await asyncio.shield(self._refreshing)

    async def _read_map(self) -> None:
        """Ask one node after the other, until one knows.

        Raises:
            StorageError: none does; the last one's, or why one refuses us.
        """
        told = dict(self._moved)  # counts until the new map is there, and what is told meanwhile after it
        failure: StorageError = StorageUnavailableError("it has no nodes")
        for node in self._who_may_know():
            try:
                [answer] = await (await self._control(node)).ask([[b"CLUSTER", b"SLOTS"]])
                refuse_error("CLUSTER SLOTS", answer)
                self._map = _Map(answer, node)
                break
            except StorageError as error:
                self._avoid(node)
                failure = failure if isinstance(failure, StorageRefusedError) else error
            except ValueError as error:
                failure = StorageUnavailableError(f"{node} answered CLUSTER SLOTS with something else: {error}")
        else:
            raise type(failure)(
                f"storage {self.name}: {failure}; are its nodes running, in cluster mode, and do they take our user "
                "and password?"
            )
        self._moved = {slot: node for slot, node in self._moved.items() if told.get(slot) != node}
        self._avoided = {address: end for address, end in self._avoided.items() if end > time.monotonic()}
        known = {*self.nodes(), *self._seeds}
        await self._hang_up(
            [node for node in self._controls if node not in known], "the node is in the cluster no more"
        )

    def _who_may_know(self) -> list[Node]:
        """Return whom to ask for the map, those that have just failed last; another one first each time."""
        known = sorted({node._replace(replica=False) for node in self._map.nodes}) if self._map is not None else []
        self._turn += 1
        first = self._turn % max(1, len(known))
        asked = dict.fromkeys([*known[first:], *known[:first], *self._seeds])
        return sorted(asked, key=self._is_avoided)

    async def _keep_known(self) -> None:
        while True:
            try:
                await self._refresh()
                assert self._map is not None
                self._outage.end()
                self._metrics.storage_connections += 1
                logger.info("storage %s: %d nodes", self.name, len(self._map.nodes))
                while True:  # until no node answers
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_REFRESH_TIME):
                            await self._look.wait()
                    self._look.clear()
                    await self._refresh()
            except StorageError as error:
                self._outage.begin(error)
            finally:
                self._map = None
            await asyncio.sleep(self._outage.pause())

    async def _known(self) -> None:
        """Wait for the attempt in progress if there has been no failure since the last."""
        while self._map is None:
            self.check()
            await self._outage.settled()

    # ---- Connections

    async def _control(self, node: Node) -> RespClient:
        """Return the connection to a node, made if there is none; who asks meanwhile waits for the same.

        Raises:
            StorageUnavailableError, StorageRefusedError: as :meth:`Dialer.open_questions`.
        """
        if self._stopping:
            raise StorageUnavailableError(f"storage {self.name}: the data plane is stopping")
        task = self._controls.get(node)
        if task is None or (task.done() and not _stands(task)):
            task = self._controls[node] = asyncio.create_task(self.dialer.open_questions(node))
            task.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            raise StorageUnavailableError(f"storage {node}: the connection was given up") from None

    async def _hang_up(self, nodes: Sequence[Node], reason: str) -> None:
        """Close the connections to some nodes."""
        tasks = [self._controls.pop(node) for node in nodes]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if _stands(task):
                task.result().abort(reason)
                await task.result().closed

    # ---- Questions

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what storage holds under each key, in one round trip to all nodes, rarely a second one.

        Raises:
            StorageUnavailableError, StorageRefusedError: no key was answered for.
        """
        await self._known()
        names = [storage_key(key) for key in keys]
        found: list[Found] = [Unanswered("not asked")] * len(names)
        left: Sequence[int] = range(len(names))
        for attempt in range(_HEADS):
            if attempt:
                await self.recover(None)
            await self._ask_for_heads(names, left, found, HEAD_GUESS)
            left = [index for index in left if isinstance(found[index], Unanswered)]
            if not left:
                break
        longer = {
            index: size
            for index, entry in enumerate(found)
            if isinstance(entry, Stored) and (size := head_size(entry)) > len(entry.head)
        }
        if longer:
            await self._ask_for_heads(names, list(longer), found, max(longer.values()))
        if found and all(isinstance(entry, Unanswered) for entry in found):
            first = found[0]
            assert isinstance(first, Unanswered)
            kind = StorageRefusedError if first.refused else StorageUnavailableError
            raise kind(f"storage {self.name}: {first.reason}")
        return found

    async def _ask_for_heads(
        self, names: Sequence[bytes], indexes: Sequence[int], found: list[Found], size: int
    ) -> None:
        """Ask the nodes for lengths and first bytes; write what they answer into ``found``."""
        commands = [command for index in indexes for command in head_question(names[index], size)]
        slots = [slot_of(names[index]) for index in indexes]
        nodes = [self._node_to_ask(slot) for slot in slots]
        answers = await self._ask(commands, [node for node in nodes for _ in (0, 1)])
        for position, (index, node) in enumerate(zip(indexes, nodes, strict=True)):
            length, head = answers[2 * position : 2 * position + 2]
            found[index] = _found(node, length, head)

    def _node_to_ask(self, slot: int) -> Node | None:
        """Return the master of a slot, whose answer is the last word, or who may be read where it has just failed."""
        node = self._node_of(slot, turn=None)
        return self._node_of(slot, turn=0) if node is not None and self._replicas and self._is_avoided(node) else node

    async def _ask(self, commands: Sequence[Sequence[bytes]], nodes: Sequence[Node | None]) -> list[_Answer]:
        """Send each command to its node, one pipeline to each, and return their answers; errors are values.

        What another node has is asked for there at once, as a chunk's bytes are: the map, which is read again behind a
        MOVED, may come from a node that has not heard of it yet. But only of nodes that are in the map: one that means
        ill could name as many others as there are keys.
        """
        nowhere = StorageUnavailableError("no node of the cluster has the slot of this key")
        answers: list[_Answer] = [nowhere] * len(commands)
        asked: dict[Node, list[_Question]] = {}
        for position, (node, command) in enumerate(zip(nodes, commands, strict=True)):
            if node is not None:
                asked.setdefault(node, []).append(_Question(position, command))
        for _ in range(REDIRECTIONS_MAX + 1):
            sent = await asyncio.gather(*(self._send(*group) for group in asked.items()))
            redirected: dict[Node, list[_Question]] = {}
            for (node, questions), results in zip(asked.items(), sent, strict=True):
                for question, answer in zip(questions, results, strict=True):
                    answers[question.position] = answer
                    text = answer.decode("utf-8", "replace") if isinstance(answer, resp.ErrorReply) else ""
                    redirect = self.redirect(node, text)
                    if redirect is not None and self._is_member(redirect.node):
                        redirected.setdefault(redirect.node, []).append(question._replace(asking=redirect.asking))
            if not redirected:
                break
            asked = redirected
        return answers

    async def _send(self, node: Node, questions: Sequence[_Question]) -> Iterator[_Answer]:
        """Return one node's answers; a StorageError for each that does not come."""
        sent = [part for each in questions for part in ([[b"ASKING"]] if each.asking else []) + [each.command]]
        try:
            answers = iter(await (await self._control(node)).ask(sent))
        except StorageError as error:
            self._avoid(node)
            self._look.set()
            return iter([error] * len(questions))
        return iter([[next(answers) for _ in range(1 + each.asking)][-1] for each in questions])

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Return False: no server that can be part of a cluster takes publications."""
        return False

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return None, likewise."""
        return None

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what find() does: nothing is cold in a cluster."""
        return await self.find(keys)

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Do nothing, likewise."""

    async def delete(self, key: bytes) -> None:
        """Delete a record.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        await self._change(b"DEL", storage_key(key))

    async def expire(self, key: bytes, lasts_ms: int) -> None:
        """Have a record end by itself after so long.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        await self._change(b"PEXPIRE", storage_key(key), b"%d" % lasts_ms)

    async def _change(self, verb: bytes, name: bytes, *more: bytes) -> None:
        """Have the node that takes a key's writes change it."""
        await self._known()
        for last in (False, True):
            [answer] = await self._ask([[verb, name, *more]], [self._node_of(slot_of(name), turn=None)])
            if last and isinstance(answer, StorageError):
                raise answer
            if last:
                refuse_error(verb.decode(), answer)
            if not isinstance(answer, StorageError | resp.ErrorReply):
                return
            await self.recover(None)


def _found(node: Node | None, length: _Answer, head: _Answer) -> Found:
    """Return what the answers to a head_question say."""
    error = length if isinstance(length, StorageError | resp.ErrorReply) else head
    if isinstance(error, StorageError):
        return Unanswered(str(error), refused=isinstance(error, StorageRefusedError))
    if isinstance(error, resp.ErrorReply) and error.code != "WRONGTYPE":
        text = error.decode("utf-8", "replace")[:200]
        if error.code in ("MOVED", "ASK"):
            return Unanswered(f"{node} and its like send us on, last with: {text}")
        return Unanswered(f"{node} refused STRLEN or GETRANGE: {text}", refused=True)
    entry = stored_of(length, head)
    return Unanswered(f"{node} answered STRLEN or GETRANGE with another type") if entry is False else entry


def slot_of(name: bytes) -> int:
    """Return the slot of a key, by its hash tag if it has one (Redis Cluster specification, "Hash tags")."""
    begin = name.find(b"{") + 1
    end = name.find(b"}", begin) if begin else -1
    return binascii.crc_hqx(name[begin:end] if end > begin else name, 0) % _SLOTS


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _stands(task: "asyncio.Task[RespClient]") -> bool:
    """Return whether an attempt to connect has ended with a connection that is still there."""
    return not task.cancelled() and task.exception() is None and not task.result().closed.done()


def _retrieve(task: "asyncio.Task[None] | asyncio.Task[RespClient]") -> None:
    if not task.cancelled():
        task.exception()  # whoever waits has it; if nobody does, the next attempt will tell
