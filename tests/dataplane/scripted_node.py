"""A storage node with its records in a dict, and with a load that a test chooses."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dataplane_support import Client, Server, keys_of, layout, listening, make_record, serving

from dpu_dataplane.server import Daemon
from shadowserve.chunk import ChunkLayout
from shadowserve.keys import storage_key
from shadowserve.placement import Placement, partition_of
from shadowserve.record import header_length
from shadowserve.resp import NEED_DATA, CommandReader, Limits

_LIMITS = Limits(bulk_bytes_max=1 << 26, total_bytes_max=1 << 27, large_bulk_bytes=1 << 27)


class ScriptedNode:
    """A node that knows the commands of a data plane, except for KV.LAYERS and publications."""

    def __init__(self) -> None:
        self.address = ""
        self.records: dict[bytes, bytes] = {}
        self.lifetimes: dict[bytes, int] = {}  # milliseconds to the expiry of records that have one, by name
        self.load: int | None = 0  # the answer to KV.LOAD; None for a node that does not know it
        self.asked: Counter[str] = Counter()  # number of commands by name
        self.refused: Sequence[str] = ()  # commands that get an error
        self.held: Sequence[str] = ()  # commands that get no answer until :meth:`free`
        self.waiting = 0  # commands of ``held`` without an answer
        self.cuts_at: int | None = None  # number of range requests after which it closes all connections
        self.lie: Callable[[list[bytes]], bytes | None] = lambda words: None  # its result, unless None, is the answer
        self.part_bytes: int | None = None  # bytes of the answer to a range request after which it closes
        self._free = asyncio.Event()
        self._writers: dict[asyncio.StreamWriter, set[str]] = {}  # with the commands that came over each

    def fill(self, shape: ChunkLayout, keys: Sequence[bytes], codec: str = "kvrans") -> None:
        self.records |= {storage_key(key): make_record(shape, key, index, codec) for index, key in enumerate(keys)}

    def hold(self, *commands: str) -> None:
        """Give these commands no answer from now on."""
        self.held = commands
        self._free.clear()

    def free(self) -> None:
        """Answer all commands again."""
        self.held = ()
        self._free.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = CommandReader(_LIMITS)
        came = self._writers[writer] = set[str]()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                commands.feed(data)
                while (command := commands.next_command()) is not NEED_DATA:
                    assert isinstance(command, list)
                    words = [bytes(word) for word in command]
                    name = words[0].decode()
                    self.asked[name] += 1
                    came.add(name)
                    if name in self.held:
                        self.waiting += 1
                        await self._free.wait()
                        self.waiting -= 1
                    if self.cuts_at is not None and self.asked["GETRANGE"] > self.cuts_at:
                        self.cut()
                    lie = b"-OOM too full\r\n" if name in self.refused else self.lie(words)
                    answer = self.answer(words) if lie is None else lie
                    if name == "GETRANGE" and self.part_bytes is not None:
                        writer.write(answer[: self.part_bytes])
                        return writer.close()
                    writer.write(answer)
        self._writers.pop(writer, None)
        writer.close()

    @property
    def connections(self) -> int:
        return len(self._writers)

    def cut(self, command: str = "PING") -> None:
        """Close the connections over which a command has come, by default all."""
        for writer in [writer for writer, came in self._writers.items() if command in came]:
            writer.transport.abort()
            self._writers.pop(writer, None)

    def answer(self, words: list[bytes]) -> bytes:
        """Return the right answer to a command."""
        match words:
            case [b"PING"]:
                return b"+PONG\r\n"
            case [b"KV.LOAD"] if self.load is not None:
                return b":%d\r\n" % self.load
            case [b"KV.META", *names]:
                return b"*%d\r\n" % len(names) + b"".join(map(self._meta, names))
            case [b"GETRANGE", key, first, last]:
                part = self.records.get(key, b"")[int(first) : int(last) + 1]
                return b"$%d\r\n%b\r\n" % (len(part), part)
            case [b"SET", key, value]:
                self.records.setdefault(key, value)
                return b"+OK\r\n"
            case [b"PTTL", key]:
                return b":%d\r\n" % self.lifetimes.get(key, -1 if key in self.records else -2)
            case [b"DEL", key]:
                return b":%d\r\n" % (self.records.pop(key, None) is not None)
        return b"-ERR unknown command '%b'\r\n" % words[0]

    def _meta(self, name: bytes) -> bytes:
        if (record := self.records.get(name)) is None:
            return b"$-1\r\n"
        size = header_length(record)
        return b"*2\r\n:%d\r\n$%d\r\n%b\r\n" % (len(record), size, record[:size])


@contextlib.asynccontextmanager
async def scripted_nodes(count: int) -> AsyncIterator[list[ScriptedNode]]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [ScriptedNode() for _ in range(count)]
        for node in nodes:
            stack.callback(node.cut)
            node.address = await stack.enter_async_context(listening(node.serve))
        yield nodes


@contextlib.asynccontextmanager
async def fleet(
    count: int, chunks: int, shape: ChunkLayout | None = None, **changes: Any
) -> AsyncIterator[tuple[list[ScriptedNode], Daemon, Client]]:
    """Scripted nodes, a data plane over them, and a client with memory for some chunks."""
    async with scripted_nodes(count) as nodes:
        options = {"storage_nodes": addresses(nodes)} | changes
        async with serving(shape or layout(), chunks, "127.0.0.1:1", **options) as (daemon, client):
            yield nodes, daemon, client


# ---- Chains and the nodes that have them


def addresses(nodes: Sequence[Server | ScriptedNode]) -> list[str]:
    return [node.address for node in nodes]


def choices(nodes: Sequence[Server | ScriptedNode], key: bytes) -> tuple[str, ...]:
    return Placement(dict.fromkeys(addresses(nodes), 1.0)).ranking(partition_of(key))


def own_chain(
    nodes: Sequence[Server | ScriptedNode],
    node: Server | ScriptedNode,
    first_seed: int = 0,
    chunks: int = 6,
    seconds: int = 1,
) -> list[bytes]:
    """Return the keys of a chain whose first choice is a node, with at least ``seconds`` second choices."""
    for seed in range(first_seed, first_seed + 1000):
        keys = keys_of(layout(), chunks, seed)
        firsts, others = ({choices(nodes, key)[place] for key in keys} for place in (0, 1))
        if firsts == {node.address} and len(others) >= seconds:
            return keys
    raise AssertionError("no such chain")


def spread_chain(
    nodes: Sequence[Server | ScriptedNode], chunks: int, shape: ChunkLayout | None = None, within: int | None = None
) -> list[bytes]:
    """Return the keys of a chain whose first ``within`` chunks, by default all, are on all nodes."""
    chains = (keys_of(shape or layout(), chunks, seed) for seed in range(1000))
    return next(keys for keys in chains if len({choices(nodes, key)[0] for key in keys[:within]}) == len(nodes))
