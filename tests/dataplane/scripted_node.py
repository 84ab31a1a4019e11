"""A storage node with its records in a dict, and with a load that a test chooses."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from dataplane_support import listening, make_record

from shadowserve.chunk import ChunkLayout
from shadowserve.keys import storage_key
from shadowserve.record import header_length
from shadowserve.resp import NEED_DATA, CommandReader, Limits

_LIMITS = Limits(bulk_bytes_max=1 << 26, total_bytes_max=1 << 27, large_bulk_bytes=1 << 27)


class ScriptedNode:
    """A node that knows the commands of a data plane, except for KV.LAYERS and publications.

    Attributes:
        load: The answer to KV.LOAD; None for a node that does not know it.
        lifetimes: Milliseconds to the expiry of records that have one, by name.
        asked: Number of commands by name.
        refused: Commands that get an error.
        free: Event; while it is cleared, commands of ``held`` get no answer.
        cuts_at: Number of range requests after which it closes all connections; None for never.
    """

    def __init__(self) -> None:
        self.address = ""
        self.records: dict[bytes, bytes] = {}
        self.lifetimes: dict[bytes, int] = {}
        self.load: int | None = 0
        self.asked: Counter[str] = Counter()
        self.refused: Sequence[str] = ()
        self.free = asyncio.Event()
        self.free.set()
        self.held: Sequence[str] = ()
        self.waiting = 0  # commands that wait for ``free``
        self.cuts_at: int | None = None
        self._writers: dict[asyncio.StreamWriter, set[str]] = {}  # with the commands that came over each

    def fill(self, shape: ChunkLayout, keys: Sequence[bytes], codec: str = "kvrans") -> None:
        self.records |= {storage_key(key): make_record(shape, key, index, codec) for index, key in enumerate(keys)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = CommandReader(_LIMITS)
        came = self._writers[writer] = set[str]()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                commands.feed(data)
                while (command := commands.next_command()) is not NEED_DATA:
                    assert isinstance(command, list)
                    name, *words = (bytes(word) for word in command)
                    self.asked[name.decode()] += 1
                    came.add(name.decode())
                    if name.decode() in self.held:
                        self.waiting += 1
                        await self.free.wait()
                        self.waiting -= 1
                    if self.cuts_at is not None and self.asked["GETRANGE"] > self.cuts_at:
                        self.cut()
                    is_refused = name.decode() in self.refused
                    writer.write(b"-OOM too full\r\n" if is_refused else self._answer(name, words))
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

    def _answer(self, name: bytes, words: list[bytes]) -> bytes:
        match name, words:
            case b"PING", []:
                return b"+PONG\r\n"
            case b"KV.LOAD", [] if self.load is not None:
                return b":%d\r\n" % self.load
            case b"KV.META", names:
                return b"*%d\r\n" % len(names) + b"".join(map(self._meta, names))
            case b"GETRANGE", [key, first, last]:
                part = self.records.get(key, b"")[int(first) : int(last) + 1]
                return b"$%d\r\n%b\r\n" % (len(part), part)
            case b"SET", [key, value]:
                self.records.setdefault(key, value)
                return b"+OK\r\n"
            case b"PTTL", [key]:
                return b":%d\r\n" % self.lifetimes.get(key, -1 if key in self.records else -2)
            case b"DEL", [key]:
                return b":%d\r\n" % (self.records.pop(key, None) is not None)
        return b"-ERR unknown command '%b'\r\n" % name

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
