"""Copies of hot records on other nodes.

A record that is read from a busy node, while another node has little to do and lacks it, is copied there. With a bucket
the other node would read it from there; without one, it stays here. Copies take a small share of the time, one
record at a time, at the lowest precedence. A record is verified before it is copied.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple

from dpu_dataplane.jobs import ENDINGS, Job
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.source import Resources
from shadowserve.errors import RecordError
from shadowserve.keys import storage_key
from shadowserve.native import Result
from shadowserve.record import verify
from shadowserve.resp import encode_command

_WAITING_MAX: Final = 256  # most records that wait; further ones are not copied
_RECORD_BYTES_MAX: Final = 64 << 20  # larger records are not copied: each is in memory meanwhile
_PART_BYTES: Final = 1 << 20  # bytes of a turn: others have theirs between two parts, also at the lowest rate
_PAUSE: Final = 9  # a pause after each copy, as a multiple of its time: copies take a tenth of the time
_JITTER_S: Final = 0.2
"""Longest delay before a copy: of several data planes that read a record, the first one copies it, the others find it
there."""

logger = logging.getLogger(__name__)

_Receive = Callable[[Job, OneServer, bytes, int, memoryview], Awaitable[Result]]


class _Copy(NamedTuple):
    key: bytes
    size: int
    source: OneServer
    target: OneServer


class HotCopies:
    """The queue of records to copy, and the task that copies them; ``receive`` fills memory with a part of one."""

    def __init__(self, resources: Resources, receive: _Receive, timeout_s: float) -> None:
        self._resources = resources
        self._counts = resources.metrics.storage_nodes_copies
        self._receive = receive
        self._timeout_s = timeout_s
        self._waiting: dict[bytes, _Copy] = {}
        self._added = asyncio.Event()
        self._job: Job | None = None  # of the copy in progress
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="copies of hot records")

    async def close(self) -> None:
        """End the copy in progress; its thread must not use a connection that is closed."""
        self._closing = True
        if self._task is None:
            return
        if self._job is not None:
            self._job.cancel()
        else:
            self._task.cancel()
        await asyncio.wait({self._task})

    def add(self, key: bytes, size: int, source: OneServer, target: OneServer) -> None:
        """Copy a record later, unless too many wait."""
        if key in self._waiting:
            return
        if len(self._waiting) >= _WAITING_MAX or size > _RECORD_BYTES_MAX:
            self._counts["dropped"] += 1
            return
        self._waiting[key] = _Copy(key, size, source, target)
        self._added.set()

    async def _run(self) -> None:
        while not self._closing:
            await self._added.wait()
            await asyncio.sleep(random.uniform(0, _JITTER_S))
            copy = next(iter(self._waiting.values()))
            began_s = time.monotonic()
            self._job = Job("", "", self._timeout_s)
            try:
                result = await self._copy(copy, self._job)
            except (*ENDINGS, RecordError, TimeoutError) as error:
                logger.debug("record %s is not copied to %s: %s", copy.key.hex(), copy.target.name, error)
                result = "failed"
            except Exception:  # a bug may cost copies, and nothing else
                logger.exception("a bug in copying records, please report it")
                result = "failed"
            self._job = None
            self._counts[result] += 1
            del self._waiting[copy.key]
            if not self._waiting:
                self._added.clear()
            if not self._closing:
                await asyncio.sleep(_PAUSE * (time.monotonic() - began_s))

    async def _copy(self, copy: _Copy, job: Job) -> str:
        """Copy a record, and return the label of the result."""
        [there] = await job.within(copy.target.find([copy.key]), "asking the other node")
        if there is not None:
            return "present"
        if not await job.within(copy.source.is_lasting(copy.key), "asking for its expiry"):
            return "dropped"  # a copy would not expire with it
        data, turn = bytearray(copy.size), self._resources.budget.turn
        for first, part in _parts(data):
            async with turn(Mover.COPY, len(part), job):
                if await self._receive(job, copy.source, copy.key, first, part) is not Result.OK:
                    return "failed"
        command = await asyncio.to_thread(_verified_command, copy.key, data)
        link = await job.within(copy.target.dialer.open(copy.target.node), "connecting to storage")
        try:
            for first, part in _parts(command):
                async with turn(Mover.COPY, len(part), job):
                    is_last = first + len(part) == len(command)
                    if is_last and not await job.within(copy.source.is_lasting(copy.key), "asking for its expiry"):
                        return "dropped"  # it has received an expiry, or was deleted meanwhile
                    await job.within(link.send(bytes(part)), "copying")
            [answer] = await job.within(link.answers(1), "copying")
        finally:
            link.close()
        return "copied" if answer == b"OK" else "failed"


def _verified_command(key: bytes, data: bytearray) -> bytes:
    """Return the command that stores a record; RecordError if it is unsound. It takes milliseconds."""
    verify(data, key)
    return encode_command(b"SET", storage_key(key), data)


def _parts(data: bytes | bytearray) -> Iterator[tuple[int, memoryview]]:
    """Yield parts of one turn each, with their positions."""
    for first in range(0, len(data), _PART_BYTES):
        yield first, memoryview(data)[first : first + _PART_BYTES]
