"""A typical client: it connects, authenticates, sends commands, waits until its deadline, and retries.

A state machine that the world drives. The network cuts sent bytes into pieces. The client reads with
``shadowserve.resp``'s reader, large bulks in place.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_network import Link
from simulated_server import SimulatedServer
from world import MS, US, S, World

from shadowserve.resp import NEED_DATA, LargeBulk, ReplyReader, Value, encode_command

DEADLINE_S = 30


@dataclass(eq=False)
class Call:
    """A command and its outcome.

    Attributes:
        end_ns: Time of the complete reply, or of the client's timeout; None before.
        reply: Reply, bulks as bytes; meaningless unless ``answered``.
    """

    arguments: tuple[Any, ...]
    done: Callable[["Call"], None]
    begin_ns: int = 0
    end_ns: int | None = None
    answered: bool = False
    timed_out: bool = False
    reply: Value = None
    link: Link | None = None
    client: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class SimulatedClient:
    """One client with at most one connection. The trace has its name."""

    def __init__(self, world: World, server: Callable[[], SimulatedServer], name: str, login: tuple[Any, ...]) -> None:
        self.world = world
        self.name = name
        self._server = server
        self._login = login
        self.link: Link | None = None
        self._reader = ReplyReader()
        self._out = bytearray()
        self._waiting: deque[Call] = deque()
        self._reads_slowly = world.chance(0.15)
        self._paused = False

    @property
    def idle(self) -> bool:
        return not self._waiting

    def send(self, calls: list[Call]) -> None:
        """Send commands in a pipeline. Connect first if needed."""
        if self.link is None:
            self._connect()
        for call in calls:
            call.begin_ns = self.world.now_ns
            call.link, call.client = self.link, self.name
            self._waiting.append(call)
            self._out += encode_command(*call.arguments)
            self.world.after(DEADLINE_S * S, self.name, lambda call=call: self._expire(call))  # type: ignore[misc]
        self._step()

    def _connect(self) -> None:
        link = self.link = Link(self.world, lambda: self._step_of(link))
        self._reader = ReplyReader()
        self._out.clear()
        self._server().connect(link)
        if self._login:
            login = Call(self._login, lambda call: None, self.world.now_ns, link=link)
            self._waiting.append(login)
            self._out += encode_command(*login.arguments)

    def close(self) -> None:
        """End the connection. Commands in progress get no reply."""
        link, self.link = self.link, None
        if link is not None:
            link.close_client()
        self._fail()

    def _expire(self, call: Call) -> None:
        if call.end_ns is None:
            call.timed_out = True
            self.close()

    def _fail(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.end_ns = self.world.now_ns
            call.done(call)

    def _step_of(self, link: Link) -> None:
        if link is self.link:
            self._step()

    def _step(self) -> None:
        link = self.link
        if link is None:
            return
        if link.reset:
            self.close()
            return
        room = link.to_server.room
        if self._out and room > 0:
            data = bytes(self._out[:room])
            del self._out[: len(data)]
            link.to_server.send(data)
        self._receive(link)

    def _receive(self, link: Link) -> None:
        stream = link.to_client
        while stream.arrived and not self._paused and link is self.link:
            view = self._reader.get_buffer()
            size = len(view) if view is not None else 1 << 16
            if self._reads_slowly:
                size = min(size, self.world.random.randint(1, 16384))
                self._paused = True
                self.world.after(self.world.random.randrange(100 * US, 3 * MS), self.name, lambda: self._resume(link))
            data = stream.take(size)
            if view is not None:
                view[: len(data)] = data
                self._reader.advance(len(data))
            else:
                self._reader.feed(data)
            self._read_replies(link)
        if stream.ended and not stream.arrived and link is self.link:
            self.close()

    def _resume(self, link: Link) -> None:
        self._paused = False
        self._step_of(link)

    def _read_replies(self, link: Link) -> None:
        while link is self.link and (value := self._reader.next_value()) is not NEED_DATA:
            if isinstance(value, LargeBulk):
                continue
            assert self._waiting, f"a reply without a request: {value!r}"
            call = self._waiting.popleft()
            call.end_ns = self.world.now_ns
            call.answered = True
            call.reply = bytes(value) if isinstance(value, memoryview) else value  # type: ignore[assignment]
            call.done(call)
