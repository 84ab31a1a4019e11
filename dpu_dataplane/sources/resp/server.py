"""One storage server: a control connection that is made again after an outage (``outage.py``).

Servers that do not know our commands: without ``KV.META``, a lookup is a pipeline of STRLEN and GETRANGE; without
``KV.PUBLISH``, nothing is published; without ``KV.PIN``, nothing is pinned; without ``KV.PREFETCH``, nothing is cold;
without ``KV.LOAD``, no load is known.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import Cold, Found, Stored, Unanswered
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import MetaAnswer, find_by_ranges
from dpu_dataplane.sources.resp.links import Node
from dpu_dataplane.sources.resp.source import RespSource
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX
from shadowserve import resp
from shadowserve.addresses import split_address
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.pieces import Flags
from shadowserve.resp_client import RespClient, refuse_error

META_KEYS_MAX: Final = 1024
"""Most keys in one command: twice a prompt of 128K tokens; the answer has some 3 MB for 32 layers."""
_NUMBER_END: Final = 1 << 62
"""Numbers in answers are smaller: they fit C's signed 64-bit integers with room to add."""
_LOAD_S: Final = 2.0  # seconds for which a reported load counts
_LOAD_US_MAX: Final = 60_000_000  # a server that reports more is wrong, or lies: it has this load

logger = logging.getLogger(__name__)


class OneServer(RespSource):
    """One storage server, by default ``storage`` of the configuration; ``meanwhile`` is for the log of an outage."""

    clustered = False

    def __init__(
        self, config: DataPlaneConfig, metrics: Metrics, address: str = "", meanwhile: str = "every call is a miss"
    ) -> None:
        super().__init__(address or config.storage, config, metrics)
        self.node = Node(*split_address(self.name))
        self.asks_load = False  # each lookup also asks for the server's load
        self.on_lost: set[Callable[[], None]] = set()  # called when the control connection is lost
        self._load = 0, -_LOAD_S  # microseconds, and the time of the report
        self._control: RespClient | None = None
        self._has_meta = True  # on the current connection
        self._unknown: set[bytes] = set()  # commands of ours that the server does not know, likewise
        self._outage = Outage(logger, meanwhile)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_connected(), name="storage connection")

    async def _disconnect(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def connected(self) -> bool:
        return self._control is not None

    def check(self) -> None:
        self._outage.check()

    @property
    def is_away(self) -> bool:
        return self._outage.failure is not None

    @property
    def takes_load(self) -> bool:
        """True if the server knows KV.LOAD, as far as is known."""
        return b"KV.LOAD" not in self._unknown

    @property
    def load_us(self) -> int | None:
        """Microseconds that the bytes queued at the server need; None if it has not reported them a moment ago."""
        load_us, reported_at = self._load
        return load_us if time.monotonic() - reported_at < _LOAD_S else None

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        assert len(keys) <= QUESTION_KEYS_MAX
        control = await self._connected()
        names = [storage_key(key) for key in keys]
        if self._has_meta:
            parts = [names[first : first + META_KEYS_MAX] for first in range(0, len(names), META_KEYS_MAX)]
            also = [[b"KV.LOAD"]] if self.asks_load and self.takes_load else []
            answers = await control.ask([*([b"KV.META", *part] for part in parts), *also])
            if also:
                self._note_load(answers.pop())
            if not any(_is_unknown_command(answer) for answer in answers):
                found: list[Found] = []
                for part, answer in zip(parts, answers, strict=True):
                    found += self._check_meta(control, answer, len(part))
                return found
            logger.info("storage %s does not know KV.META; using STRLEN and GETRANGE instead", self.name)
            self._has_meta = False
        return await self._meta_by_ranges(control, names)

    def _note_load(self, answer: object) -> None:
        if type(answer) is int:
            self._load = min(max(answer, 0), _LOAD_US_MAX), time.monotonic()
        else:
            self._unknown.add(b"KV.LOAD")

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        return await self._send_for_keys([b"KV.PUBLISH", b"%d" % lasts_ms], keys) is not None

    async def pin(self, keys: Sequence[bytes], seconds: int) -> bool:
        return await self._send_for_keys([b"KV.PIN", b"%d" % seconds], keys) is not None

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        answers = await self._send_for_keys([b"KV.PENDING"], keys)
        if answers is None:
            return None
        left = [each for answer in answers for each in (answer if isinstance(answer, list) else [None])]
        if len(left) != len(keys) or not all(type(each) is int and 0 <= each < _NUMBER_END for each in left):
            raise StorageUnavailableError(f"storage {self.name} answered KV.PENDING in an unknown format")
        return np.array(left, np.int64) > 0

    async def find_warm(self, keys: Sequence[bytes], *, headers: bool) -> Sequence[Found]:
        """Look keys up, and wait for cold records on a connection of its own: lookups must not wait behind it."""
        found = list(await self.find(keys))
        cold = [index for index, each in enumerate(found) if isinstance(each, Cold)]
        if not cold:
            return found
        slow = await self.dialer.open_control(self.node)
        names = [storage_key(keys[index]) for index in cold]
        try:
            if not headers:  # the last byte comes when the record is whole
                await slow.ask([[b"GETRANGE", name, b"-1", b"-1"] for name in names])
            brought = await self._meta_by_ranges(slow, names)
        finally:
            slow.abort("the lookup of cold records has ended")
        for index, each in zip(cold, brought, strict=True):
            found[index] = each
        return found

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        await self._send_for_keys([b"KV.PREFETCH"], keys)

    async def _send_for_keys(self, command: list[bytes], keys: Sequence[bytes]) -> list[Any] | None:
        """Send a command for all keys, some at a time; return None if the server does not know it."""
        control = await self._connected()
        if command[0] in self._unknown:
            return None
        names = [storage_key(key) for key in keys]
        parts = [names[first : first + META_KEYS_MAX] for first in range(0, len(names), META_KEYS_MAX)]
        answers = await control.ask([[*command, *part] for part in parts])
        if any(_is_unknown_command(answer) for answer in answers):
            self._unknown.add(command[0])
            return None
        for answer in answers:
            refuse_error(command[0].decode(), answer)
        return answers

    async def delete(self, key: bytes) -> None:
        control = await self._connected()
        [answer] = await control.ask([[b"DEL", storage_key(key)]])
        refuse_error("DEL", answer)

    async def is_lasting(self, key: bytes) -> bool:
        """Return True if a record is there and has no expiry."""
        control = await self._connected()
        [answer] = await control.ask([[b"PTTL", storage_key(key)]])
        return bool(answer == -1)

    def nodes(self) -> Sequence[Node]:
        return [self.node]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        return [self.node] * len(keys)

    async def _connected(self) -> RespClient:
        """Return the connection; wait for an attempt in progress, unless one has failed since the last connection."""
        while True:
            if self._control is not None:
                return self._control
            self.check()
            await self._outage.wait_known()

    async def _keep_connected(self) -> None:
        while True:
            try:
                control = await self.dialer.open_control(self.node)
            except StorageError as error:
                self._outage.fail(error)
            else:
                self._metrics.totals["storage_connections"] += 1
                logger.info("connected to storage %s", self.name)
                if await self._serve(control):
                    continue
            await asyncio.sleep(self._outage.next_delay_s())

    async def _serve(self, control: RespClient) -> bool:
        """Use a connection until it closes; return True if it was stable: then it is made again at once."""
        self._control, self._has_meta = control, True
        self._unknown.clear()
        self._outage.recover()
        try:
            reason = await asyncio.shield(control.closed)
        finally:
            self._control = None
            for call in list(self.on_lost):
                call()
            stable = self._outage.disconnect()
            control.abort("the data plane is stopping")
        if stable:
            logger.warning("%s; reconnecting", reason)
        else:
            self._outage.fail(StorageUnavailableError(reason))
        return stable

    def _check_meta(
        self, control: RespClient, answer: "resp.Value | MetaAnswer", count: int
    ) -> Sequence[Stored | Cold | None]:
        if isinstance(answer, MetaAnswer) and len(answer) == count:
            return answer
        refuse_error("KV.META", answer)
        if isinstance(answer, list) and len(answer) == count:
            try:
                return [None if entry is None else _stored(*entry) for entry in answer]  # type: ignore[misc]
            except (TypeError, ValueError):
                pass
        reason = f"storage {self.name} answered KV.META in an unknown format"
        control.abort(reason)
        raise StorageUnavailableError(reason)

    async def _meta_by_ranges(self, control: RespClient, names: list[bytes]) -> list[Found]:
        found: list[Found] = [None] * len(names)
        where = f"storage {self.name}"

        async def ask(commands: Sequence[Sequence[bytes]], _: Sequence[bytes]) -> Sequence[Any]:
            answers = await control.ask([list(command) for command in commands])
            for answer in answers:
                if not (isinstance(answer, resp.ErrorReply) and answer.code == "WRONGTYPE"):
                    refuse_error("STRLEN or GETRANGE", answer)
            return answers

        await find_by_ranges(names, range(len(names)), found, ask, lambda _: "the server")
        for each in found:
            if isinstance(each, Unanswered):
                raise each.error(where)
        return found


def _stored(length: Any, header: Any) -> Stored | Cold:
    """Convert an entry of KV.META's answer: a length and a header, or a length and milliseconds."""
    if type(length) is int and type(header) is int and 0 < length < _NUMBER_END and 0 < header < _NUMBER_END:
        return Cold(length, header)
    if type(length) is not int or not 0 <= length < _NUMBER_END or not isinstance(header, bytes):
        raise TypeError
    return Stored(length, header)


def _is_unknown_command(answer: object) -> bool:
    return isinstance(answer, resp.ErrorReply) and answer.startswith(b"ERR unknown command")
