"""The simulated storage node: its real connections, commands and pools, with a simulated loop and threads.

It replaces only ``server.py``, ``io_threads.py``, ``event_loop.py`` and ``engine_thread.py``: the waits, and the order
of calls.
"""

import heapq
import itertools
import select
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from simulated_device import SimulatedDevice
from simulated_network import Link, ServerSocket
from world import MS, US, S, SimulatedLock, World

from shadowserve.pool.pool import Pool
from storage_kv.access.users import Users
from storage_kv.clients.connection import Connection
from storage_kv.clients.event_loop import READ, WRITE, Lane
from storage_kv.commands import BY_FULL_NAME
from storage_kv.config import StorageConfig
from storage_kv.node import Node
from storage_kv.reconfiguration import Reconfiguration
from storage_kv.session import ClientInfo, Session

_ENGINE_INTERVAL_NS: Final = 100 * MS
_SWEEP_KEYS_MAX: Final = 2_000


class SimulatedLoop:
    """Replaces ``EventLoop`` for connections: level-triggered readiness of sockets, and functions to call."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._sockets: dict[int, ServerSocket] = {}
        self._handlers: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._scheduled = False
        self.closed = False

    def know(self, socket: ServerSocket) -> None:
        self._sockets[socket.fileno()] = socket
        socket.link.on_server = self.wake

    # ---- As EventLoop

    def add(self, descriptor: int, events: int, handler: Callable[[int], None], lane: Lane | None = None) -> None:
        assert descriptor not in self._handlers
        self._handlers[descriptor] = events, handler
        self.wake()

    def modify(self, descriptor: int, events: int) -> None:
        self._handlers[descriptor] = events, self._handlers[descriptor][1]
        self.wake()

    def remove(self, descriptor: int) -> None:
        del self._handlers[descriptor]

    def call_soon(self, function: Callable[[], None], lane: Lane | None = None) -> None:
        self._soon.append(function)
        self.wake()

    def call_threadsafe(self, function: Callable[[], None], lane: Lane | None = None) -> None:
        self.call_soon(function)

    def call_at(self, time_s: float, function: Callable[[], None], lane: Lane | None = None) -> None:
        heapq.heappush(self._later, (time_s, next(self._numbers), function))
        self._world.after(time_s * S - self._world.now_ns - 1000 * S, self._name, self.wake)

    def enter(self, tenant: int) -> Lane:
        """No-op, like move() and leave(): the order is random, so lanes do not change it."""
        return Lane(tenant)

    def move(self, descriptor: int, old: Lane, tenant: int) -> Lane:
        return Lane(tenant)

    def leave(self, lane: Lane) -> None:
        """See :meth:`EventLoop.leave`."""

    # ---- As the thread in EventLoop.run()

    def wake(self) -> None:
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._world.soon(self._name, self._turn)

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for descriptor, (events, _) in self._handlers.items():
            socket = self._sockets[descriptor]
            now = (READ if socket.readable else 0) | (WRITE if socket.writable else 0)
            ready = now & events
            if socket.link.reset:
                ready = now | select.EPOLLERR | select.EPOLLHUP
            if ready:
                found.append((descriptor, ready))
        self._world.random.shuffle(found)
        return found

    def _turn(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        for descriptor, events in self._ready():
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler[1](events)
        now_s = self._world.now_ns / S + 1000
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        if self._soon or self._ready():
            self.wake()


class _Workers:
    """Threads that check large records."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, session: Session, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            future.set_result(function())

        self._world.soon(f"worker {self._world.random.random()}", run, 2 * MS)
        return future


class SimulatedServer:
    """One life of a server process, from its start to its end.

    Attributes:
        is_started: True if the pool is open.
    """

    def __init__(self, world: World, config: StorageConfig, store: Pool, devices: list[SimulatedDevice]) -> None:
        self.world = world
        self.store = store
        self.devices = devices
        self.alive = True
        self.is_started = False
        self.lock = SimulatedLock(world)
        self.workers = _Workers(world)
        users = Users(config, BY_FULL_NAME)
        self.node = Node(Reconfiguration(config), users, store, world.wall_ms, lock=self.lock, run_id="0" * 40)  # type: ignore[arg-type]
        self._loops = [SimulatedLoop(world, f"loop {number}") for number in range(world.random.randint(1, 2))]
        self._connections: dict[Session, tuple[Connection, SimulatedLoop]] = {}
        self._links: list[Link] = []
        self._ids = itertools.count(1)
        self._poll_due = False
        self._slowness = {id(device): world.random.choice((1, 1, 5, 50)) for device in devices}
        self._poller = select.poll()

    def start(self) -> None:
        """Open the pool, which recovers the devices' objects, and start to serve."""
        self.store.start(self.lock)  # type: ignore[arg-type]
        self.is_started = True
        self.node.apply_quotas()
        own = {device.fileno() for device in self.devices}
        for descriptor in self.store.descriptors():
            if descriptor not in own:
                self._poller.register(descriptor, select.POLLIN)
        for device in self.devices:
            device.automatic = False
            device.submitted = lambda count, device=device: self._schedule(device, count)  # type: ignore[misc]
            self._schedule(device, len(device.waiting))
        self._poll_always()
        self._watch()

    # ---- The network

    def connect(self, link: Link) -> None:
        if not self.alive:
            link.break_()
            return
        number = next(self._ids)
        socket = ServerSocket(link, 1000 + number)
        self._links.append(link)
        loop = self._loops[number % len(self._loops)]
        loop.know(socket)
        address = f"10.0.0.{number % 250}:{number}"
        session = Session(number, address=address, info=ClientInfo("10.0.0.254:6380", socket.fileno()))
        with self.lock:
            self.node.begin(session)
            self.node.sessions[session.id] = session
        loop.call_threadsafe(lambda: self._adopt(socket, session, loop))

    def _adopt(self, socket: ServerSocket, session: Session, loop: SimulatedLoop) -> None:
        self._connections[session] = Connection(self.node, self.workers, self.forget, socket, session, loop), loop  # type: ignore[arg-type]

    def forget(self, session: Session) -> None:
        self._connections.pop(session, None)
        with self.lock:
            self.node.sessions.pop(session.id, None)
            self.node.slots.leave(session)

    def _each(self, action: Callable[[Connection], None]) -> None:
        for connection, loop in list(self._connections.values()):
            loop.call_threadsafe(lambda connection=connection: action(connection))  # type: ignore[misc]

    # ---- The pool's thread, and the main one

    def _schedule(self, device: SimulatedDevice, count: int) -> None:
        slowness, chance = self._slowness[id(device)], self.world.random
        for _ in range(count):
            delay = slowness * chance.randrange(10 * US, 150 * US)
            if chance.random() < 0.01:
                delay += chance.randrange(100 * MS)
            self.world.after(delay, f"device {device.name}", lambda: self._complete(device))

    def slow_down(self, device: SimulatedDevice, factor: int) -> None:
        self._slowness[id(device)] = factor

    def _complete(self, device: SimulatedDevice) -> None:
        if self.alive and device.complete() is not None:
            self._poll_soon()

    def _poll_soon(self) -> None:
        if not self._poll_due:
            self._poll_due = True
            self.world.soon("engine", self._poll)

    def _poll(self) -> None:
        self._poll_due = False
        if self.alive:
            self.store.poll()
            self.look()

    def look(self) -> None:
        """Wake the pool's thread if it would be woken; called after each event."""
        if self.alive and not self._poll_due and self._poller.poll(0):
            self._poll_soon()

    def _poll_always(self) -> None:
        if self.alive:
            self._poll_soon()
            self.world.after(_ENGINE_INTERVAL_NS, "engine timer", self._poll_always)

    def _watch(self) -> None:
        if not self.alive:
            return
        with self.lock:
            self.store.sweep(_SWEEP_KEYS_MAX)
        now_s = self.world.now_ns / S + 1000
        self._each(lambda connection: connection.check_time(now_s))
        self.world.after(100 * MS, "main", self._watch)

    # ---- The end

    def die(self) -> None:
        """End at once, like a killed process."""
        self.alive = False
        for loop in self._loops:
            loop.closed = True
        for device in self.devices:
            device.submitted = lambda count: None
        for link in self._links:
            if link.server_gone_ns is None:
                link.server_gone_ns = self.world.now_ns
            link.break_()

    def stop(self) -> None:
        """Stop as on SIGTERM. The caller closes the pool."""
        self._each(Connection.finish)
        self.world.run(lambda: not self.node.sessions, self.node.config.shutdown_timeout_s)
        self._each(Connection.abort)
        self.world.run(lambda: not self.node.sessions, 1.0)
        self.alive = False
        for device in self.devices:
            device.automatic = True
            device.submitted = lambda count: None
        self.world.creeps = True
        try:
            self.store.drain(self.node.config.shutdown_timeout_s)
        finally:
            self.world.creeps = False
        self.die()
