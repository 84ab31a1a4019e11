"""A Redis Cluster or Valkey Cluster: questions through redis-py's client, bytes through our own links.

redis-py knows who has which slot, and keeps the connections that questions go over. Heads are asked of each node in one
pipeline, all nodes at the same time, so a node that is away costs its own keys and no others. What a data connection is
told (MOVED, ASK) counts at once, and the whole map is read again behind it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from dpu_dataplane.config import DataPlaneConfig, split_address
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import HEAD_GUESS, stored_of
from dpu_dataplane.sources.resp.links import Dialer, Node
from dpu_dataplane.sources.resp.servers import REDIRECTIONS_MAX, Redirect
from dpu_dataplane.sources.source import Found, Stored, Unanswered, head_size
from shadowserve import resp
from shadowserve.errors import ConfigurationError, StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.keys import storage_key

if TYPE_CHECKING:
    from redis.asyncio.cluster import RedisCluster

__all__ = ["ServerCluster"]

_REFRESH_TIME: Final = 15.0
"""Seconds between two looks at who has what, when nothing has told us to look."""
_AVOID_TIME: Final = 2.0
"""Seconds for which a node that failed is not read from where another one has the same slots."""
_CANCEL_TIME: Final = 1.0
"""Seconds between two attempts at ending a task: long enough for one that closes its connections."""
_HEADS: Final = 2
"""Tries at asking for heads: the second one after the map was read again."""

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class _Question(NamedTuple):
    """A command on its way; ``asking``: it goes with ASKING before it."""

    position: int
    command: Sequence[Any]
    asking: bool = False


class ServerCluster:
    """Knows who has which key, and asks them questions.

    Raises:
        ConfigurationError: redis-py is not installed, or TLS is wanted and cannot be had.
    """

    clustered = True

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        try:
            import redis.asyncio.cluster  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "storage_cluster: the package 'redis' is missing; install it with: pip install 'shadowserve[cluster]'"
            ) from error
        self.name = f"cluster {','.join(config.storage_cluster)}"
        self.dialer = Dialer(config)
        self._seeds = [split_address(address) for address in config.storage_cluster]
        self._replicas = config.storage_cluster_replicas
        self._metrics = metrics
        self._client: RedisCluster | None = None
        self._outage = Outage(logger)  # until the map is known
        self._look = asyncio.Event()  # something says that the map has changed
        self._refreshing: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None  # of the last client
        self._moved: dict[int, Node] = {}  # slots that nodes have told of since the map was read
        self._avoided: dict[tuple[str, int], float] = {}  # to the time of its end
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to learn who has what; does not wait for it."""
        self._task = asyncio.create_task(self._keep_known(), name="storage cluster")

    async def close(self) -> None:
        """Close the connections and stop trying."""
        for task in [*self._questions, self._refreshing, self._task]:  # what uses connections before what closes them
            while task is not None and not task.done():
                task.cancel()  # again and again: redis-py swallows one that comes while it connects
                await asyncio.wait([task], timeout=_CANCEL_TIME)
        if self._closing is not None:  # where the last attempt came while it was waited for
            await asyncio.wait([self._closing])

    @property
    def connected(self) -> bool:
        """Whether the map is known."""
        return self._client is not None

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        self._outage.check()

    # ---- Who has what

    def nodes(self) -> Sequence[Node]:
        """Return all nodes that are known, as masters and as replicas."""
        if self._client is None:
            return []
        known = {Node(node.host, int(node.port)) for node in self._client.get_nodes()} | set(self._moved.values())
        return [*known, *(node._replace(replica=True) for node in known)]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return who has each key, ``None`` where nobody is known to.

        Replicas, where they may be read, take turns with their masters, slot by slot.
        """
        self._turn += 1
        return [self._node_of(_slot(storage_key(key)), master=master or not self._replicas) for key in keys]

    def _node_of(self, slot: int, *, master: bool) -> Node | None:
        moved = self._moved.get(slot)
        if moved is not None:
            return moved
        client = self._client
        nodes = client.nodes_manager.slots_cache.get(slot) if client is not None else None
        if not nodes:
            return None
        several = [Node(node.host, int(node.port), node is not nodes[0]) for node in nodes]
        if master:
            return several[0]
        sound = [node for node in several if not self._is_avoided(node)] or several
        return sound[(self._turn + slot) % len(sound)]

    def _is_avoided(self, node: Node) -> bool:
        end = self._avoided.get((node.host, node.port))
        return end is not None and end > time.monotonic()

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
            self._moved[int(words[1])] = node
            self._look.set()
        return Redirect(node, words[0] == "ASK")

    async def recover(self, node: Node | None) -> None:
        """Learn who has what now, after a node failed; for a while leave that node alone where another one will do."""
        if node is not None:
            self._avoided[node.host, node.port] = time.monotonic() + _AVOID_TIME
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
        client = self._client
        if client is None:
            return
        async with self._explained():
            told = dict(self._moved)  # counts until the new map is there, and what is told meanwhile after it
            await client.nodes_manager.initialize()
            self._moved = {slot: node for slot, node in self._moved.items() if told.get(slot) != node}

    @contextlib.asynccontextmanager
    async def _explained(self) -> Any:
        """Turn what redis-py raises into StorageError: also what it stumbles over, such as a cluster without slots."""
        from redis.exceptions import AuthenticationError

        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            kind = StorageRefusedError if isinstance(cause, AuthenticationError) else StorageUnavailableError
            raise kind(
                f"storage {self.name}: {error}; are its nodes running, in cluster mode, and do they take our user and "
                "password?"
            ) from error

    async def _keep_known(self) -> None:
        while True:
            client = self._make_client()
            try:
                async with self._explained():
                    await client.initialize()
                self._client = client
                self._outage.end()
                self._metrics.storage_connections += 1
                logger.info("storage %s: %d nodes", self.name, len(client.get_nodes()))
                await self._watch()
            except StorageError as error:
                self._outage.begin(error)
            finally:
                self._client = None
                self._outage.lose()
                self._closing = asyncio.create_task(self._let_go(client))
                await asyncio.shield(self._closing)
            await asyncio.sleep(self._outage.pause())

    async def _let_go(self, client: "RedisCluster") -> None:
        """Close a client after what uses it has ended, each within its deadline: what is opened later nobody closes."""
        using = [task for task in (*self._questions, self._refreshing) if task is not None]
        if using:
            await asyncio.wait(using)
        # The client's own leaves it to an attempt that failed to have closed what it opened; but such a one may have
        # been cancelled meanwhile.
        nodes = client.nodes_manager
        for close in (client.aclose, nodes.aclose, partial(nodes.aclose, "startup_nodes")):
            try:
                await close()
            except Exception as error:  # a peer that does not answer the end of TLS; the next attempt must come
                logger.info("storage %s: closing a connection failed: %s", self.name, error)

    async def _watch(self) -> None:
        """Read the map again and again, until no node answers."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_TIME):
                    await self._look.wait()
            self._look.clear()
            await self._refresh()

    def _make_client(self) -> "RedisCluster":
        from redis.asyncio.cluster import ClusterNode, RedisCluster
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.cluster import LoadBalancingStrategy

        dialer, encrypted = self.dialer, {}
        if dialer.tls is not None:
            encrypted = {"ssl": True, "ssl_ca_certs": dialer.tls.authorities}
            if dialer.tls.certificate:
                encrypted |= {"ssl_certfile": dialer.tls.certificate, "ssl_keyfile": dialer.tls.key}
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._seeds],
            require_full_coverage=False,  # a shard that is away is a miss for its keys alone
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN if self._replicas else None,
            username=dialer.username or None,
            password=dialer.password or None,
            socket_connect_timeout=dialer.connect_timeout,
            socket_timeout=dialer.command_timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **encrypted,
        )

    async def _known(self) -> "RedisCluster":
        """Return the client, waiting for the attempt in progress if there has been no failure since the last."""
        while True:
            if self._client is not None:
                return self._client
            self.check()
            await self._outage.settled()

    # ---- Questions

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what storage holds under each key, in one round trip to all nodes, rarely a second one.

        Raises:
            StorageUnavailableError, StorageRefusedError: no key was answered for.
        """
        await self._known()
        names = [storage_key(key) for key in keys]
        found: list[Found] = [Unanswered("not asked")] * len(names)
        left = list(range(len(names)))
        for last in (attempt == _HEADS for attempt in range(1, _HEADS + 1)):
            await self._ask_all(names, left, found, HEAD_GUESS)
            left = [index for index in left if isinstance(found[index], Unanswered)]
            if not left or last:
                break
            await self.recover(None)
        longer: dict[int, int] = {}
        for index, entry in enumerate(found):
            if isinstance(entry, Stored) and (size := head_size(entry)) > len(entry.head):
                longer[index] = size
        if longer:
            await self._ask_all(names, list(longer), found, max(longer.values()))
        if found and all(isinstance(entry, Unanswered) for entry in found):
            first = found[0]
            assert isinstance(first, Unanswered)
            kind = StorageRefusedError if first.refused else StorageUnavailableError
            raise kind(f"storage {self.name}: {first.reason}")
        return found

    async def _ask_all(self, names: Sequence[bytes], indexes: Sequence[int], found: list[Found], size: int) -> None:
        """Ask the nodes for lengths and first bytes; write what they answer into ``found``."""
        client = await self._known()
        groups: dict[Any, list[int]] = {}
        for index in indexes:
            node = self._node_to_ask(client, _slot(names[index]))
            if node is None:
                found[index] = Unanswered("no node of the cluster has the slot of this key")
            else:
                groups.setdefault(node, []).append(index)
        tasks = [self._shielded(self._ask(client, node, names, group, found, size)) for node, group in groups.items()]
        if tasks:
            await asyncio.shield(asyncio.gather(*tasks))

    def _node_to_ask(self, client: "RedisCluster", slot: int, *, master: bool = False) -> Any:
        """Return redis-py's node for a slot: the master, whose answer is the last word, unless it has just failed."""
        moved = self._moved.get(slot)
        known = client.get_node(moved.host, moved.port) if moved is not None else None
        if known is not None:
            return known
        nodes = client.nodes_manager.slots_cache.get(slot)
        if not nodes:
            return None
        if master or not self._replicas:
            return nodes[0]
        return next((node for node in nodes if not self._is_avoided(Node(node.host, int(node.port)))), nodes[0])

    async def _ask(
        self, client: "RedisCluster", node: Any, names: Sequence[bytes], group: list[int], found: list[Found], size: int
    ) -> None:
        """Ask one node, in one pipeline. Never raises: what goes wrong is what is found."""
        questions: list[Sequence[Any]] = [("STRLEN", names[index]) for index in group]
        questions += [("GETRANGE", names[index], 0, size - 1) for index in group]
        answers = await self._pipeline(client, node, questions)
        for index, length, head in zip(group, answers[: len(group)], answers[len(group) :], strict=True):
            found[index] = self._judge(node, length, head)

    async def _pipeline(self, client: "RedisCluster", node: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands to a node in one go and return their answers; errors are values.

        What another node has is asked for there at once, as a chunk's bytes are: the map, which is read again behind a
        MOVED, may come from a node that has not heard of it yet. redis-py follows ASK, too, but sends ASKING over one
        connection of its pool and the command over another one.
        """
        answers: list[Any] = [None] * len(commands)
        asked = {node: [_Question(position, command) for position, command in enumerate(commands)]}
        for _ in range(REDIRECTIONS_MAX + 1):
            sent = await asyncio.gather(*(self._send(*group) for group in asked.items()))
            redirected: dict[Any, list[_Question]] = {}
            for (target, questions), results in zip(asked.items(), sent, strict=True):
                for question, answer in zip(questions, results, strict=True):
                    answers[question.position] = answer
                    redirect = self._redirected(target, answer)
                    known = redirect and client.get_node(host=redirect.node.host, port=redirect.node.port)
                    if redirect and known:  # else the map is read again
                        redirected.setdefault(known, []).append(question._replace(asking=redirect.asking))
            if not redirected:
                break
            asked = redirected
        return answers

    async def _send(self, node: Any, questions: "Sequence[_Question]") -> list[Any]:
        """Return one node's answers; a StorageUnavailableError for each that does not come."""
        from redis.asyncio.cluster import PipelineCommand
        from redis.exceptions import ConnectionError as Lost
        from redis.exceptions import TimeoutError as Late

        sent = [PipelineCommand(each.position, *each.command) for each in questions]
        between = [[PipelineCommand(each.position, "ASKING")] if each.asking else [] for each in questions]
        try:
            await node.execute_pipeline(
                [one for pair in zip(between, sent, strict=True) for one in (*pair[0], pair[1])]
            )
            answers = [command.result for command in sent]
        except Exception as error:  # of redis-py, or what it stumbles over
            answers = [Lost(str(error) or type(error).__name__)] * len(sent)
        for position, answer in enumerate(answers):
            if isinstance(answer, Lost | Late | OSError):
                self._note_failure(node)
                answers[position] = StorageUnavailableError(f"{node.host}:{node.port} does not answer: {answer}")
        return answers

    def _redirected(self, node: Any, answer: Any) -> Redirect | None:
        from redis.exceptions import AskError, MovedError

        if not isinstance(answer, AskError):  # of which MovedError is one
            return None
        word = "MOVED" if isinstance(answer, MovedError) else "ASK"
        text = f"{word} {answer.slot_id} {_bracket(answer.host)}:{answer.port}"
        return self.redirect(Node(node.host, int(node.port)), text)

    def _judge(self, node: Any, length: Any, head: Any) -> Found:
        from redis.exceptions import AskError, RedisError

        error = length if isinstance(length, Exception) else head
        if isinstance(error, RedisError) and str(error).startswith("WRONGTYPE"):
            return stored_of(resp.ErrorReply(b"WRONGTYPE"), b"") or None
        where = f"{node.host}:{node.port}"
        if isinstance(error, AskError):
            return Unanswered(f"{where} and its like send us on, last to {error.host}:{error.port}")
        if isinstance(error, StorageError):
            return Unanswered(str(error))
        if isinstance(error, Exception):
            return Unanswered(f"{where} refused STRLEN or GETRANGE: {error}", refused=True)
        entry = stored_of(length, head)
        return Unanswered(f"{where} answered STRLEN or GETRANGE with another type") if entry is False else entry

    def _note_failure(self, node: Any) -> None:
        self._avoided[node.host, int(node.port)] = time.monotonic() + _AVOID_TIME
        self._look.set()

    async def delete(self, key: bytes) -> None:
        """Delete a record.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        name = storage_key(key)
        for last in (False, True):
            client = await self._known()
            node = self._node_to_ask(client, _slot(name), master=True)
            if node is not None:
                task = self._shielded(self._pipeline(client, node, [("DEL", name)]))
                async with self._explained():
                    [answer] = await asyncio.shield(task)
                    if not isinstance(answer, Exception):
                        return
                    if last:
                        raise answer
            elif last:
                raise StorageUnavailableError(f"storage {self.name}: no node has the slot of this key")
            await self.recover(None)

    def _shielded(self, question: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Start a question that is not cancelled with its caller: redis-py keeps the connection that it went over."""
        task = asyncio.create_task(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        return task


def _slot(name: bytes) -> int:
    from redis.crc import key_slot

    return int(key_slot(name))


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()  # whoever waits has it; if nobody does, the next reading will tell
