"""One simulation, completely determined by its seed: server, clients, and faults."""

import atexit
import functools
import gc
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from data_plane import DataPlane, simulated_modules
from invariants import Invariants
from plan import Plan
from reference_model import Model, Violation
from simulated_client import SimulatedClient
from simulated_device import SimulatedDevice
from simulated_network import Link
from simulated_server import SimulatedServer
from start_trouble import PowerCutError, StartTrouble
from workload import Workload
from world import MS, S, World, virtual_time

from shadowserve.block import OperationKind, Priority
from shadowserve.errors import ConfigurationError
from shadowserve.pool.config import DeviceConfig
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.types import ENTRIES_PER_HOLD
from shadowserve.pool.volume.format import Superblock
from storage_kv.access.rules import hash_password
from storage_kv.config import StorageConfig

TENANTS: Final = ("", "one", "two")
_CAPACITY: Final = 24 << 20
_QUIET_S: Final = 400
_LOOK_EVENTS: Final = 100
_PASSWORD: Final = "sesame"
_HARMS: Final = ("read error", "write error", "flush error", "rot", "misread", "miswrite", "lost", "gone")


@dataclass
class Result:
    """The result of a seed."""

    trace: str
    events: int
    reads: int
    misses: int
    lives: int
    profile: str
    log: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.profile}, {self.lives} lives, {self.events} events, {self.reads} reads, {self.misses} misses, "
            f"{self.trace}"
        )


class _Problems(logging.Handler):
    """Collects logged tracebacks of the product: bugs that it survived."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)

    def check(self) -> None:
        """Raise the first traceback's exception."""
        if self.found:
            record = self.found[0]
            assert record.exc_info is not None
            raise Violation(f"logged: {record.getMessage()}") from record.exc_info[1]


class Simulation:
    """One run."""

    def __init__(self, seed: int, folder: Path, verbose: bool = False) -> None:
        self.world = World(seed)
        self.world.log = [] if verbose else None
        self.plan = Plan.of(self.world)
        self.config = _configuration(self.world, self.plan, folder)
        self.absent: list[SimulatedDevice] = []
        self._anchor = f"disk{self.world.random.randrange(self.plan.devices or 1)}"
        self.devices = [
            SimulatedDevice(
                _CAPACITY,
                seed=self.world.random.randrange(1 << 32),
                name=f"disk{number}",
                clock_ns=lambda: self.world.now_ns,
            )
            for number in range(self.plan.devices)
        ]
        self.model = Model(must_hit=not (self.plan.tight or self.plan.disks or self.plan.quota))
        self.lives = 0
        self.paid = 0
        self.trusts_counts = not self.plan.disks
        self.server: SimulatedServer
        self.workload = Workload(self.world, self.model, self._client, self.plan)
        self._clients: list[SimulatedClient] = []
        self.data_plane: DataPlane | None = None
        self.invariants = Invariants(
            self.world, self.model, TENANTS, lambda: self.workload.wall_between(0, self.world.now_ns)
        )
        self._other_links: list[Link] = []
        self._over = False
        self._crash_armed = False
        self._awaited = self._is_flushing
        self._lied = False  # a device has damaged or lost bytes in this life of the server

    def _client(self, number: int, tenant: str) -> SimulatedClient:
        login = ("AUTH", f"user{TENANTS.index(tenant)}", _PASSWORD)
        client = SimulatedClient(self.world, lambda: self.server, f"client {number} {tenant}", login)
        self._clients.append(client)
        return client

    def _start_data_plane(self) -> None:
        number = self.world.random.randrange(len(TENANTS))
        login = TENANTS[number], f"user{number}", _PASSWORD
        self.data_plane = DataPlane(
            self.world, self.model, lambda: self.server, self.workload, login, links=self._other_links
        )

    @property
    def _finished(self) -> bool:
        return self.workload.finished and (self.data_plane is None or self.data_plane.finished)

    # ---- The server's lives

    def start_server(self) -> None:
        """Start a server on the present devices."""
        self.lives += 1
        if self.plan.absent:
            self._choose_absent()
        troubled = self.plan.starts and self.lives > 1 and not self._over
        while True:
            for device in self.devices:
                device.automatic = True
            self.server = SimulatedServer(self.world, self.config, self._engine(), self.devices)
            self.world.note(f"server {self.lives} starts with {len(self.devices)} devices")
            trouble = StartTrouble(self.world, self.devices) if troubled and self.world.chance(0.6) else None
            if self._starts(trouble):
                break
        self._check_start()
        if troubled and self.world.chance(0.5):  # extra snapshots, as after damage
            for disk in self.server.store._core.disks:  # type: ignore[attr-defined]
                disk.volume.snapshot()
            self._crash_armed = self._crash_armed or self.world.chance(0.5)
            self._awaited = self._is_snapshotting

    def _check_start(self) -> None:
        """Check that no object was dropped: a start damages at most one of two copies."""
        if self.plan.disks or not isinstance(self.server.store, DevicePool):
            return
        for disk in self.server.store._core.disks:
            if disk.volume.report.dropped:
                raise Violation(f"dropped: {disk.name} lost objects at a start: {disk.volume.report}")

    def _starts(self, trouble: StartTrouble | None) -> bool:
        """Start the server. Return True if it runs."""
        if trouble is None:
            self.server.start()
            return True
        preempts, self.world.preempts = self.world.preempts, 0.0  # other actors are no part of the start
        try:
            with trouble:
                self.server.start()
        except PowerCutError:
            self.world.note("power fails at the start")
            self.server.die()
            self.devices = [device.crash() for device in self.devices]
        except ConfigurationError as error:  # an operator starts it again
            self.world.note("the start fails")
            assert trouble.is_met, error
            self.server.die()
            self.devices = [device.restart() for device in self.devices]
        else:
            return True
        finally:
            self.world.preempts = preempts
        if self.server.is_started:
            self.server.store.close()
        return False

    def _choose_absent(self) -> None:
        """Remove devices or bring them back.

        One is always present: a pool without any device of its last session cannot know of that session.
        """
        devices = sorted([*self.devices, *self.absent], key=lambda device: device.name)
        chance = self.world.chance
        # A device formatted in the absence of the others belongs to another pool, which refuses the returning ones.
        formatted = all(Superblock.unpack(device.peek(0, 4096)) is not None for device in devices)
        here = devices
        if not (self._over or not formatted or chance(0.5)):
            here = [device for device in devices if device.name == self._anchor or chance(0.6)]
        self.devices, self.absent = here, [device for device in devices if device not in here]
        if self.absent:
            self.world.note(f"without {[device.name for device in self.absent]}")
            self.model.lose_all()

    def _engine(self) -> DevicePool:
        known = {str(entry.path): entry for entry in self.config.devices}
        entries = [(known[device.name], device) for device in self.devices]
        return DevicePool(
            self.config,
            devices=lambda: list(entries),
            clock_ms=self.world.wall_ms,
            seed=self.world.random.randrange(1 << 32),
            measure=False,
            entropy=self.world.random.randbytes,
        )

    def _count_losses(self) -> None:
        found = self.server.store.statistics()
        self.paid += found.evicted_keys + found.lost_keys + found.failed_writes

    def _end_life(self, how: str) -> None:
        """End the server: by a power cut, by SIGKILL, or in order."""
        self.world.note(f"server ends: {how}")
        if how == "stop":
            self.server.stop()
        else:
            self.server.die()
        self._count_losses()
        after = []
        for device in self.devices:
            if how == "kill":  # the kernel completes submitted operations
                while device.waiting and self.world.chance(0.8):
                    device.complete()
            after.append(device.crash() if how == "power" else device.restart())
        for old, new in zip(self.devices, after, strict=True):
            new.faults = [fault for fault in old.faults if fault.times is None or fault.met < fault.times]
        self.devices = after
        self.server.store.close()
        if self.plan.engine == "memory" or self.plan.volatile:
            self.model.lose_all()
        if self._lied:  # volume-format.md: such an object of the log's last group looks cut short, and is undone
            self.model.doubt_all()
            self._lied = False

    def restart_server(self, how: str) -> None:
        self._end_life(how)
        for device in self.devices:
            device.faults.clear()
        self.start_server()

    # ---- Faults

    def misfortune(self) -> None:
        if self._over:
            return
        chance, plan = self.world.random, self.plan
        choices: list[Callable[[], None]] = []
        if plan.crashes:
            choices += [self._crash] * 2
        if plan.network:
            choices += [self._break_link] * 3
        if plan.disks:
            choices += [self._harm_device] * 3
        if plan.clocks:
            choices += [self._jump]
        if choices:
            chance.choice(choices)()
            self.world.after(chance.expovariate(1 / (100 * MS)), "world", self.misfortune)

    def _crash(self) -> None:
        if self.world.chance(0.5):
            self._crash_armed = True
            self._awaited = self._is_flushing
        else:
            self.restart_server(self.world.random.choice(("power", "power", "kill", "kill", "stop")))

    def _is_flushing(self) -> bool:
        """Return True if a flush is in progress: the worst moment for a crash."""
        return any(operation.kind is OperationKind.FLUSH for device in self.devices for operation in device.waiting)

    def _is_snapshotting(self) -> bool:
        return any(operation.priority is Priority.BACKGROUND for device in self.devices for operation in device.waiting)

    def _shun(self) -> None:
        """Make random devices slow for a while, so that the pool avoids them."""
        if self._over:
            return
        now_ms = self.world.wall_ms()
        for disk in self.server.store._core.disks:  # type: ignore[attr-defined]
            shunned = self.world.chance(0.5)
            disk.avoided_until_ms = now_ms + 1000 if shunned and self.plan.moves else 0
            device = disk.volume.device
            assert isinstance(device, SimulatedDevice)
            self.server.slow_down(device, 500 if shunned else 1)
        self.world.after(self.world.random.expovariate(1 / (30 * MS)), "world", self._shun)

    def _break_link(self) -> None:
        links = [client.link for client in self._clients if client.link is not None]
        links += [link for link in self._other_links if not link.is_lost]
        if not links:
            return
        link = self.world.random.choice(links)
        if self.world.chance(0.7):
            self.world.note("link breaks")
            link.break_()
        else:
            self.world.note("link goes silent")
            link.half_open = True
            self.workload.silent.append(link)

    def _harm_device(self) -> None:
        chance = self.world.random
        device = chance.choice(self.devices)
        what = chance.choice(_HARMS)
        self.world.note(f"{device.name}: {what}")
        after = chance.randrange(4)
        self._lied |= what in ("rot", "miswrite", "lost")
        if what == "gone":
            device.remove()
        elif what == "read error":
            device.fail(OperationKind.READ, times=chance.randint(1, 3))
        elif what == "write error":
            device.fail(OperationKind.WRITE, after=after)
        elif what == "flush error":
            device.fail(OperationKind.FLUSH, after=after)
        elif what == "misread":
            device.fail(OperationKind.READ, error=0, moved_blocks=chance.choice((-1, 1, 5)), first_block=64)
        elif what == "miswrite":
            device.fail(OperationKind.WRITE, error=0, moved_blocks=chance.choice((1, 3)), after=after, **self._data())
        elif what == "lost":
            device.fail(OperationKind.WRITE, error=0, lost=True, after=after, **self._data())
        else:
            first = self._data()["first_block"] * 4096
            written = [block for block, _ in device.blocks() if block * 4096 >= first]
            if written:
                device.rot(chance.choice(written) * 4096 + chance.randrange(4096), bit=chance.randrange(8))

    def _data(self) -> dict[str, Any]:
        """Return the range of objects. Damage there is always detected; the log depends on its two copies."""
        disks = self.server.store._core.disks  # type: ignore[attr-defined]
        return {"first_block": disks[0].volume.superblock.layout.data_first}

    def _jump(self) -> None:
        chance = self.world.random
        self.world.wall_offset_ns += chance.choice((-1, 1)) * chance.choice((100 * MS, 2 * S, 3600 * S))
        self.workload.note_wall()
        self.world.note("the clock jumps")

    # ---- The run

    def run(self) -> Result:
        world = self.world
        with _problems() as problems, virtual_time(world), simulated_modules(world):
            self.start_server()
            self.workload.begin(TENANTS)
            world.after(world.random.expovariate(1 / (80 * MS)), "world", self.misfortune)
            if self.plan.moves or self.plan.volatile:
                self._shun()
            if self.plan.dataplane:
                self._start_data_plane()
            self._go_on(problems, lambda: self._finished)
            self._calm_down(problems)
            self._check_end(problems)
        return Result(
            world.trace, world.events, self.model.reads, self.model.misses, self.lives, str(self.plan), world.log or []
        )

    def _go_on(self, problems: _Problems, condition: Callable[[], bool]) -> None:
        def step() -> bool:
            self.server.look()
            problems.check()
            if self.world.events % _LOOK_EVENTS == 0:
                self.invariants.check(self.server, loses=self.plan.disks)
            if self._crash_armed and self._awaited() and self.world.chance(0.3):
                self._crash_armed = False
                self.restart_server("power")
            return condition()

        if not self.world.run(step, _QUIET_S):
            raise Violation(f"hang: {self.workload.describe()} have not ended after {_QUIET_S} s")

    def _calm_down(self, problems: _Problems) -> None:
        self._over = True
        self._crash_armed = False
        self.world.note("calm")
        for device in self.devices:
            device.faults.clear()
        self.workload.read_all()
        if self.data_plane is not None:
            self.data_plane.recover()
        self._go_on(problems, lambda: self._finished)
        if self.devices and self.world.chance(0.5):
            self.restart_server(self.world.random.choice(("stop", "power", "kill")))
            self.workload.read_all()
            self._go_on(problems, lambda: self._finished)

    def _check_end(self, problems: _Problems) -> None:
        """Check that no resources are left after the end of all clients."""
        for client in self._clients:
            client.close()
        if self.data_plane is not None:
            self.data_plane.close()
            self._go_on(problems, lambda: self.data_plane is None or self.data_plane.closed)
        node = self.server.node
        self._go_on(problems, lambda: not node.sessions)
        self.world.run(lambda: False, 2.0)
        problems.check()
        self._count_losses()
        if self.trusts_counts and len(self.model.unpaid) > self.paid:
            raise Violation(f"lost: {len(self.model.unpaid)} misses, {self.paid} counted: {self.model.unpaid}")
        found = self.server.store.statistics()
        if found.held_bytes:
            raise Violation(f"leak: {found.held_bytes} bytes are held without a user")
        engine = self.server.store
        if isinstance(engine, DevicePool):
            gc.collect(0)
            if engine.busy:
                raise Violation("leak: the engine is still busy")
            engine._core.arenas.settle()
            if engine._core.arenas.lent_bytes:
                raise Violation(f"leak: {engine._core.arenas.lent_bytes} bytes are lent without a user")
        self.server.stop()
        self.server.store.close()


@contextmanager
def _problems() -> Iterator[_Problems]:
    handler = _Problems()
    loggers = [logging.getLogger(name) for name in ("storage_kv", "dpu_dataplane", "asyncio")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield handler
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _configuration(world: World, plan: Plan, folder: Path) -> StorageConfig:
    users = folder / "users"
    if not users.exists():
        lines = [
            f"user user{number} on #{hash_password(_PASSWORD.encode()).decode()} ~* +@all"
            + (f" tenant={name}" if name else "")
            for number, name in enumerate(TENANTS)
        ]
        users.write_text("\n".join(lines) + "\n")
    chance = world.random
    keys: dict[str, Any] = {
        "users_file": str(users),
        "memory_budget_bytes": chance.choice((2, 4)) << 20 if plan.engine == "pool" or plan.tight else 64 << 20,
        "scrub_bytes_per_s": chance.choice((0, 16 << 20)),
        "idle_timeout_s": 60,
        "stall_timeout_s": 10,
        "output_buffer_bytes_max": chance.choice((4 << 10, 1 << 20)),
        "read_ahead_bytes_max": chance.choice((4 << 10, 32 << 20)),
        "pipeline_commands_max": chance.choice((1, 4, 1024)),
    }
    if plan.quota:
        keys["tenants"] = {"one": {"keys_max": chance.randint(3, 10)}, "two": {"bytes_max": 1 << 20}}
    if plan.engine == "pool":
        keys |= {
            "memory_bandwidth": chance.choice((1, 1 << 30)),
            "eviction": chance.choice(("lru", "s3fifo")),
            "write_bytes_under_way_max": chance.choice((1 << 20, 256 << 20)),
        }
        if plan.volatile:
            keys |= {"admission": chance.choice(("all", "second_hit")), "memory_homes": chance.choice((True, False))}
        keys["devices"] = [
            DeviceConfig(
                path=Path(f"disk{number}"),
                bandwidth=chance.choice((1, 2, 4)) << 30,
                objects_max=chance.choice((64, 256)),
                bytes_max=(1 << 20) if plan.tight else None,
            )
            for number in range(plan.devices)
        ]
    return StorageConfig.load(flags=keys, environment={})


def plan_of(seed: int) -> Plan:
    return Plan.of(World(seed))


@functools.cache
def _folder() -> Path:
    """Return a folder with files that all runs of this process share."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


_HOLDS: Final = (2, 7, ENTRIES_PER_HOLD, ENTRIES_PER_HOLD)
"""Values of ENTRIES_PER_HOLD by seed: with small ones, most work is split."""


@contextmanager
def _holds(entries: int) -> Iterator[None]:
    names = ("ENTRIES_PER_HOLD", "KEYS_AT_A_TIME")
    found = [(module, name) for module in list(sys.modules.values()) for name in names if name in vars(module)]
    before = [(module, name, getattr(module, name)) for module, name in found if module.__name__ != __name__]
    for module, name, _ in before:
        setattr(module, name, entries)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def simulate(seed: int, *, verbose: bool = False) -> Result:
    """Run a seed. Violations include the command that replays it."""
    simulation = Simulation(seed, _folder(), verbose)
    try:
        with _holds(_HOLDS[seed % len(_HOLDS)]):
            return simulation.run()
    except BaseException as error:
        again = f".venv/bin/python tests/simulation/simulate.py {seed}"
        error.add_note(f"seed {seed} ({simulation.plan}); to see it again: {again}")
        if simulation.world.log is not None:
            error.add_note("".join(simulation.world.log[-200:]))
        raise
    finally:
        if simulation.data_plane is not None:
            simulation.data_plane.abandon()
