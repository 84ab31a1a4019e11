"""One storage server. While it is known to be away, calls fail at once and a task keeps trying to reach it, ever less
often (``outage.py``), so that an outage costs a request nothing and ends within some 5 s of the server's return, a
short one sooner.

Where ``KV.META`` is unknown, the same question is asked as one pipeline of STRLEN and GETRANGE. Where ``KV.PUBLISH``
is, nothing is published; where ``KV.PREFETCH`` is, nothing is cold.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import HEAD_GUESS, MetaAnswer, head_question, stored_of
from dpu_dataplane.sources.resp.links import Dialer, Node
from dpu_dataplane.sources.resp.servers import Redirect
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Cold, Found, Stored, head_size
from shadowserve import resp
from shadowserve.addresses import split_address
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.pieces import Flags
from shadowserve.resp_client import RespClient, refuse_error

__all__ = ["OneServer"]

META_KEYS_MAX: Final = 1024
"""Keys in one command: twice a prompt of 128K tokens, and some 3 MB of answer for 32 layers."""
logger = logging.getLogger(__name__)


class OneServer:
    """Knows whether the storage server can be reached, and asks it questions.

    Args:
        config: of the daemon.
        metrics: to count in.
        address: of the server, host:port; ``storage`` of the configuration by default.
        meanwhile: what the log says of a time when it is away.

    Raises:
        ConfigurationError: TLS is wanted and cannot be had.
    """

    clustered = False
    not_by_layers = ""

    def __init__(
        self, config: DataPlaneConfig, metrics: Metrics, address: str = "", meanwhile: str = "every call is a miss"
    ) -> None:
        self.name = address or config.storage
        self._node = Node(*split_address(self.name))
        self.dialer = Dialer(config)
        self._metrics = metrics
        self._control: RespClient | None = None
        self._has_meta = True  # of the connection in hand
        self._unknown: set[bytes] = set()  # commands of ours that it does not know, likewise
        self._outage = Outage(logger, meanwhile)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; does not wait for it, since storage may be absent when the daemon starts."""
        self._task = asyncio.create_task(self._keep_connected(), name="storage connection")

    async def close(self) -> None:
        """Close the connection and stop trying."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def connected(self) -> bool:
        """Whether the control connection stands."""
        return self._control is not None

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        self._outage.check()

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what storage holds under each of up to QUESTION_KEYS_MAX keys, in one round trip.

        Raises:
            StorageUnavailableError, StorageRefusedError: no connection, or an error as answer.
        """
        assert len(keys) <= QUESTION_KEYS_MAX
        control = await self._connected()
        names = [storage_key(key) for key in keys]
        if self._has_meta:
            parts = [names[first : first + META_KEYS_MAX] for first in range(0, len(names), META_KEYS_MAX)]
            answers = await control.ask([[b"KV.META", *part] for part in parts])
            if not any(_is_unknown_command(answer) for answer in answers):
                found: list[Found] = []
                for part, answer in zip(parts, answers, strict=True):
                    found += self._check_meta(control, answer, len(part))
                return found
            logger.info("storage %s does not know KV.META; asking it with STRLEN and GETRANGE instead", self.name)
            self._has_meta = False
        return await self._meta_by_ranges(control, names)

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Publish keys; see :meth:`Source.publish`."""
        return await self._ask_some([b"KV.PUBLISH", b"%d" % lasts_ms], keys) is not None

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return which keys are published; see :meth:`Source.published`."""
        left = await self._numbers(b"KV.PUBLISHED", keys)
        return None if left is None else left > 0

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return as find() does, but wait for what the server reads from object storage.

        Over a connection of its own: answers on one connection come in order, and lookups do not wait for a bucket.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        found = list(await self.find(keys))
        cold = [index for index, each in enumerate(found) if isinstance(each, Cold)]
        if not cold:
            return found
        slow = await self.dialer.open_questions(self._node)
        try:
            brought = await self._meta_by_ranges(slow, [storage_key(keys[index]) for index in cold])
        finally:
            slow.abort("what was asked of object storage is answered, or was given up")
        for index, each in zip(cold, brought, strict=True):
            found[index] = each
        return found

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have it begin to bring what is cold; see :meth:`Source.prefetch`."""
        await self._ask_some([b"KV.PREFETCH"], keys)

    async def _numbers(self, name: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.int64] | None:
        """Return the number that a command answers of each key; None of a server that does not know it."""
        answers = await self._ask_some([name], keys)
        if answers is None:
            return None
        found = [each for answer in answers for each in (answer if isinstance(answer, list) else [None])]
        if len(found) != len(keys) or not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
            raise StorageUnavailableError(f"storage {self.name} answered {name.decode()} in an unknown form")
        return np.array(found, np.int64)

    async def _ask_some(self, command: list[bytes], keys: Sequence[bytes]) -> list[Any] | None:
        """Return the answers to a command about some keys at a time; None of a server that does not know it."""
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

    async def _change(self, *command: bytes) -> None:
        control = await self._connected()
        [answer] = await control.ask([list(command)])
        refuse_error(command[0].decode(), answer)

    def nodes(self) -> Sequence[Node]:
        """Return the one there is."""
        return [self._node]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return the one node for each key."""
        return [self._node] * len(keys)

    def redirect(self, asked: Node, text: str) -> Redirect | None:
        """Return ``None``: who names one node of a cluster as ``storage`` gets its refusal."""
        return None

    async def recover(self, node: Node | None) -> None:
        """Do nothing: the control connection is watched, and data connections are made when they are needed."""

    async def _connected(self) -> RespClient:
        """Return the connection, waiting for the attempt in progress if there has been no failure since the last."""
        while True:
            if self._control is not None:
                return self._control
            self.check()
            await self._outage.settled()

    async def _keep_connected(self) -> None:
        while True:
            try:
                control = await self.dialer.open_questions(self._node)
            except StorageError as error:
                self._outage.begin(error)
            else:
                self._metrics.storage_connections += 1
                logger.info("connected to storage %s", self.name)
                if await self._serve(control):
                    continue
            await asyncio.sleep(self._outage.pause())

    async def _serve(self, control: RespClient) -> bool:
        """Let callers use the connection until it closes; return whether it held, and may be made again at once."""
        self._control, self._has_meta = control, True
        self._unknown.clear()
        self._outage.end()
        try:
            reason = await asyncio.shield(control.closed)
        finally:
            self._control = None
            held = self._outage.lose()
            control.abort("the data plane is stopping")
        if held:
            logger.warning("%s; reconnecting", reason)
        else:
            self._outage.begin(StorageUnavailableError(reason))
        return held

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
        reason = f"storage {self.name} answered KV.META in a form that this build does not know"
        control.abort(reason)
        raise StorageUnavailableError(reason)

    async def _meta_by_ranges(self, control: RespClient, names: list[bytes]) -> list[Found]:
        """Ask a server without KV.META: sizes and first bytes of all keys in one pipeline, rarely a second one."""
        answers = await control.ask([command for name in names for command in head_question(name, HEAD_GUESS)])
        found: list[Found] = []
        for length, head in zip(answers[::2], answers[1::2], strict=True):
            if not (isinstance(length, resp.ErrorReply) and length.code == "WRONGTYPE"):
                refuse_error("STRLEN", length)
                refuse_error("GETRANGE", head)
            entry = stored_of(length, head)
            if entry is False:
                raise StorageUnavailableError(f"storage {self.name} answered STRLEN or GETRANGE with another type")
            found.append(entry)
        longer = {
            index: size
            for index, entry in enumerate(found)
            if isinstance(entry, Stored) and (size := head_size(entry)) > len(entry.head)
        }
        if longer:
            ranges = [[b"GETRANGE", names[index], b"0", b"%d" % (size - 1)] for index, size in longer.items()]
            for index, head in zip(longer, await control.ask(ranges), strict=True):
                refuse_error("GETRANGE", head)
                known = found[index]
                if isinstance(known, Stored) and isinstance(head, bytes):
                    found[index] = Stored(known.length, head)
        return found


def _stored(length: Any, head: Any) -> Stored | Cold:
    if type(length) is int and type(head) is int and 0 < length < 1 << 62 and 0 < head < 1 << 62:
        return Cold(length, head)
    if type(length) is not int or not isinstance(head, bytes):
        raise TypeError
    return Stored(length, head)


def _is_unknown_command(answer: object) -> bool:
    return isinstance(answer, resp.ErrorReply) and answer.startswith(b"ERR unknown command")
