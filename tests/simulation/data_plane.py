"""The data plane's client of storage on a simulated bad network.

The product's code runs: the control connection with its requests, watchdog and back-off, the catalog of record headers,
and the data connections up to the C core. With any network, a request ends within its deadline with a right answer, a
miss with a reason, or an error. When the network works again, the client works again.
"""

import asyncio
import random
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from reference_model import FOREVER, Change, Model, Violation
from simulated_asyncio import SimulatedEventLoop, SimulatedSocket
from simulated_network import Link
from simulated_server import SimulatedServer
from workload import CHAIN_LENGTH, CHAINS, NAMESPACE, Workload, chunk_name
from world import S, World

from dpu_dataplane.catalog import Catalog
from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources import outage
from dpu_dataplane.sources.found import Stored
from dpu_dataplane.sources.resp import links
from dpu_dataplane.sources.resp.links import DataLinks
from dpu_dataplane.sources.resp.server import OneServer
from shadowserve.errors import StorageError
from shadowserve.keys import storage_key

_DEADLINE_S: Final = 12
"""At most 2 s to connect and 5 s of silence. A slow network may send at intervals."""
_RECOVERY_S: Final = 10


class DataPlane:
    """One data plane that sends a number of requests."""

    def __init__(
        self,
        world: World,
        model: Model,
        server: Callable[[], SimulatedServer],
        workload: Workload,
        login: tuple[str, str, str],
        *,
        links: list[Link],
    ) -> None:
        self._world = world
        self._model = model
        self._server = server
        self._workload = workload
        self._tenant, user, password = login
        self._links = links
        self._asking = 0
        self._turns = world.random.randint(3, 12)
        self._loop = SimulatedEventLoop(world, "data plane", self._connect)
        self._config = DataPlaneConfig.load(
            flags={"storage": "10.0.0.254:6380", "storage_username": user, "storage_password": password},
            environment={},
        )
        self._metrics = Metrics()
        self._client: OneServer
        self._catalog: Catalog
        self._data: DataLinks
        self._round = asyncio.Lock()
        self._closed = False
        self._loop.call_soon(self._loop.create_task, self._run())

    @property
    def finished(self) -> bool:
        """True if no request is running or planned."""
        return not self._turns and not self._asking

    @property
    def closed(self) -> bool:
        """True if it has ended, with all its tasks."""
        return self._closed and not asyncio.all_tasks(self._loop)

    def _connect(self, link: Link) -> bool:
        server = self._server()
        if not server.alive:
            return False
        server.connect(link)
        self._links.append(link)
        return True

    # ---- Life

    async def _run(self) -> None:
        self._client = OneServer(self._config, self._metrics)
        self._catalog = Catalog(self._client, self._metrics, self._config)
        self._data = DataLinks(self._client.dialer, 2, self._metrics)
        await self._client.start()
        chance = self._world.random
        while self._turns:
            await asyncio.sleep(chance.expovariate(1 / 0.02))
            count = chance.choice((1, 1, 3))
            self._asking += count
            self._turns -= 1
            await asyncio.gather(*(self._in_time(chance.choice(self._questions())) for _ in range(count)))

    def _questions(self) -> list[Callable[[], Awaitable[object]]]:
        return [self._meta, self._meta, self._meta_by_ranges, self._lookup, self._delete, self._open_data]

    async def _in_time(self, question: Callable[[], Awaitable[object]]) -> None:
        began = self._world.now_ns
        name = getattr(question, "__name__", "")
        try:
            outcome = str(await question())[:60]
        except StorageError as error:
            outcome = type(error).__name__
        self._asking -= 1
        self._world.note(f"data plane {began} {name} -> {outcome}")
        if self._world.now_ns - began > _DEADLINE_S * S:
            raise Violation(f"hang: the data plane waited for {name} from {began} until {self._world.now_ns}")

    def recover(self) -> None:
        """Connect it to storage again, over a working network and server."""
        self._asking += 1
        self._loop.call_soon(self._loop.create_task, self._recover())

    async def _recover(self) -> None:
        ends = self._world.now_ns + _RECOVERY_S * S
        while True:
            try:
                await self._meta()
                await self._open_data()
                break
            except StorageError as error:
                if self._world.now_ns > ends:
                    raise Violation(f"hang: the data plane does not reconnect to storage: {error}") from error
                await asyncio.sleep(0.1)
        self._asking -= 1

    def close(self) -> None:
        self._loop.call_soon(self._loop.create_task, self._close())

    def abandon(self) -> None:
        self._loop.close()

    async def _close(self) -> None:
        await self._catalog.close()
        await self._client.close()
        self._data.close()
        self._closed = True

    # ---- Requests

    def _keys(self) -> list[bytes]:
        chain = self._world.random.randrange(CHAINS)
        return [chunk_name(chain, number) for number in range(CHAIN_LENGTH)]

    async def _meta(self) -> object:
        keys, began = self._keys(), self._world.now_ns
        found = await self._client.find(keys)
        for key, stored in zip(keys, found, strict=True):
            self._check(key, stored, began, "meta")
        return [stored is not None for stored in found]

    async def _meta_by_ranges(self) -> object:
        """Reply of a server without KV.META."""
        keys, began = self._keys(), self._world.now_ns
        control = await self._client._connected()
        found = await self._client._meta_by_ranges(control, [storage_key(key) for key in keys])
        for key, stored in zip(keys, found, strict=True):
            if stored is None:
                self._check(key, None, began, "meta by ranges")
            else:  # two commands: another client may replace the value between them
                assert isinstance(stored, Stored)
                length, head, _ = stored
                self._compare(key, lambda write, of=length: len(write.value) == of, began, "length by ranges")
                self._compare(key, lambda write, of=head: write.value.startswith(of), began, "head by ranges")
        return [stored is not None for stored in found]

    async def _lookup(self) -> object:
        keys, began = self._keys(), self._world.now_ns
        [found] = await self._catalog.lookup([(NAMESPACE, keys)])
        for key, there in zip(keys, found.present.tolist(), strict=True):
            if there:
                self._compare(key, lambda write: True, began, "lookup")
            elif not self._catalog.is_quarantined(NAMESPACE, key):
                self._check(key, None, began, "lookup")
        return found.present.tolist()

    async def _delete(self) -> object:
        key = self._world.random.choice(self._keys())
        change = Change("remove", self._world.now_ns, lambda: FOREVER)
        self._model.add(self._name(key), change)
        await self._client.delete(key)
        ended = self._world.now_ns
        change.end = lambda: ended
        change.acknowledged = True
        return "deleted"

    async def _open_data(self) -> object:
        """Open data connections and check them: there are two, alive, and silent without a request."""
        async with self._round:  # with exclusive use of the links
            links = await self._data.open(self._client.nodes()[0])
        if len(links) != 2:
            raise Violation(f"the data plane has {len(links)} data connections, not 2")
        return "open"

    # ---- Answers

    def _name(self, key: bytes) -> tuple[str, bytes]:
        return self._tenant, b"kv:" + key.hex().encode()

    def _check(self, key: bytes, stored: Any, began: int, what: str) -> None:
        if stored is None:
            wall = self._workload.wall_between(0, self._world.now_ns)
            self._model.check_miss(self._name(key), began, self._world.now_ns, wall, f"the data plane's {what}")
            return
        assert isinstance(stored, Stored)
        self._compare(
            key,
            lambda write: len(write.value) == stored.length and write.value[: write.header_bytes] == stored.header,
            began,
            what,
        )

    def _compare(self, key: bytes, matches: Callable[..., bool], began: int, what: str) -> None:
        ended = self._world.now_ns
        wall = self._workload.wall_between(began, ended)
        self._model.check_value(self._name(key), matches, began, ended, wall, f"the data plane's {what}")


@contextmanager
def simulated_modules(world: World) -> Iterator[None]:
    fake = types.SimpleNamespace(**{**vars(links.socket), "socket": SimulatedSocket})
    before = links.socket
    setattr(links, "socket", fake)  # noqa: B010
    setattr(outage, "random", world.random)  # noqa: B010
    try:
        yield
    finally:
        setattr(links, "socket", before)  # noqa: B010
        setattr(outage, "random", random)  # noqa: B010
