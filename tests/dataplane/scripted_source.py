"""A source with its records in a dict. A test decides when and how it answers.

The bytes go through the real pipeline. It requests ranges over a socket pair, and this module answers at the other end.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from dpu_dataplane.jobs import Job
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Found, Stored
from dpu_dataplane.sources.source import Delivered, Encoded, Failure, Resources, Source
from shadowserve.errors import StorageError
from shadowserve.keys import storage_key
from shadowserve.native import Result
from shadowserve.record import header_length
from shadowserve.resp import NEED_DATA, CommandReader, Limits

_LIMITS = Limits(bulk_bytes_max=1 << 26, total_bytes_max=1 << 27, large_bulk_bytes=1 << 27)


class ScriptedSource(Source):
    """Records by key."""

    def __init__(self, resources: Resources) -> None:
        self.name = "a script"
        self.records: dict[bytes, bytes] = {}
        self.copies: dict[bytes, bytes] = {}  # records that a non-authoritative plan reads instead; empty for none
        self.away: StorageError | None = None  # why the source is unreachable
        self.free = asyncio.Event()  # while it is cleared, the source does not answer
        self.free.set()
        self.asked: list[bytes] = []  # received commands for bytes
        self.damaged: list[bytes] = []  # keys whose next bytes are damaged
        self.cuts = 0  # number of connections to close at their next command
        self.recovered = 0  # number of plans that were followed by an update of the map of nodes
        self._pipeline = resources.pipeline
        self._fetching = resources.fetching
        self._storing = resources.storing

    @property
    def connected(self) -> bool:
        return self.away is None

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.away is not None:
            raise self.away

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        self._check()
        await self.free.wait()
        found = (self.records.get(key) for key in keys)
        return [None if data is None else Stored(len(data), data[: header_length(data) or 64]) for data in found]

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        self._check()
        self.asked.append(b"GETRANGE")
        await job.within(self._freed(), "waiting for the script")
        if key in self.damaged:
            self.damaged.remove(key)
            memory[:] = bytes(len(memory))
            return Result.OK
        part = self.records.get(key, b"")[first : first + len(memory)]
        if len(part) < len(memory):
            return Result.NOT_FOUND
        memory[:] = part
        return Result.OK

    async def _freed(self) -> None:
        await self.free.wait()

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        self._check()
        values = self.records | ({} if plan.authoritative else self.copies)
        async with self._connection({storage_key(key): data for key, data in values.items()}) as sock:
            batch_ = plan.batch(range(len(plan.pieces)))
            try:
                with job.interruptible(batch_.cancel):
                    await self._on(self._fetching, self._pipeline.fetch, batch_, [sock.fileno()])
            finally:
                batch_.release()
        done = Delivered(plan.pieces["result"], received_bytes=batch_.received_bytes)
        for index, result in enumerate(batch_.results):
            if result not in (Result.OK, Result.SKIPPED):
                done.failures[index] = Failure(
                    result,
                    from_replica=result is Result.NOT_FOUND and plan.keys[index] in self.copies,
                    recover=self._recover if result is Result.DISCONNECTED else None,
                )
        return done

    async def _recover(self) -> None:
        self.recovered += 1

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        self._check()
        values: dict[bytes, bytes] = {}
        async with self._connection(values) as sock:
            with job.interruptible(functools.partial(sock.shutdown, socket.SHUT_RDWR)):
                result, text = await self._on(
                    self._storing, self._pipeline.put, record.batch, record.position, record.header, sock.fileno(),
                    job.deadline_ns,
                )  # fmt: skip
        if result is Result.OK:
            self.records.setdefault(key, values[storage_key(key)])
            if record.lasts_ms:
                asyncio.get_running_loop().call_later(record.lasts_ms / 1000, self.records.pop, key, None)
        return result, text

    async def delete(self, key: bytes) -> None:
        self._check()
        self.records.pop(key, None)

    async def _on(self, executor: Executor, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)

    @contextlib.asynccontextmanager
    async def _connection(self, values: dict[bytes, bytes]) -> AsyncIterator[socket.socket]:
        near, far = socket.socketpair()
        near.setblocking(False)
        answering = asyncio.create_task(self._answer(far, values))
        try:
            yield near
        finally:
            near.close()
            answering.cancel()
            await asyncio.wait({answering})

    async def _answer(self, sock: socket.socket, values: dict[bytes, bytes]) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        reader = CommandReader(_LIMITS)
        with sock, contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(sock, 1 << 20):
                reader.feed(data)
                while (command := reader.next_command()) is not NEED_DATA:
                    assert isinstance(command, list)
                    self.asked.append(bytes(command[0]))
                    await self.free.wait()
                    if self.cuts > 0:
                        self.cuts -= 1
                        return
                    answer = _execute(values, *(bytes(word) for word in command))
                    for key in [key for key in self.damaged if storage_key(key) == command[1]]:
                        self.damaged.remove(key)
                        answer = answer[:-3] + bytes([answer[-3] ^ 4]) + answer[-2:]
                    await loop.sock_sendall(sock, answer)


def _execute(values: dict[bytes, bytes], name: bytes, key: bytes, *words: bytes) -> bytes:
    if name == b"SET":
        values[key] = words[0]
        return b"+OK\r\n"
    assert name == b"GETRANGE"
    part = values.get(key, b"")[int(words[0]) : int(words[1]) + 1]
    return b"$%d\r\n%b\r\n" % (len(part), part)
