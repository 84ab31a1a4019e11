"""Compares the storage node's transfer of large values with Redis and with plain sockets.

Method: GET of values of 2, 8 and 32 MiB and GETRANGE of 2 MiB, over 1, 2 and 4 connections on loopback, from the node
with memory alone and with a pool, from redis-server as installed and tuned for large values, and from a program that
only sends, blocking or polled; the faster of these two is the floor. The client is the same for all: a thread for
each connection receives into prepared memory and wakes for 256 KiB at a time. 64 MiB of values take turns, so that
they come from memory and not from a cache. The CPU times of server and client are counted apart. Redis is left out if
it is not installed.

Prediction: copying into sockets takes 0.12 to 0.17 CPU s/GB; commands and events add 50 to 80 us an answer. Redis
copies each answer once more: 1.3 to 1.8 times our CPU time. Expected ratios: 0.9 to the plain socket, 0.98 for the
pool to memory alone.
"""

import functools
import itertools
import json
import shutil
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple

import click
import psutil

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve.pool.buffers import allocate
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.lean import connect, receive
from shadowserve_tools.bench.parts.options import benchmark, listed, numbers_option, one_of, repeats_option, whole
from shadowserve_tools.bench.parts.plain_sender import plain_request, start_sender
from shadowserve_tools.bench.parts.workload import client
from shadowserve_tools.processes import Child, Programs, start_redis, start_storage
from shadowserve_tools.report import Report, cpu_s, in_turns, measure, tracked

OURS: Final = {"memory": "shadowserve", "pool": "shadowserve, pool"}
"""ShadowServe's server by engine."""
FLOORS: Final = {"blocking": "plain socket", "polled": "plain socket, polled"}
"""A program that only sends, by method; the faster one in a turn is the floor."""
REDIS: Final = "redis"
TUNED: Final = "redis tuned"

_WAKE_BYTES: Final = 256 << 10
"""A client that wakes for each few segments of 64 KiB costs both ends more than copying."""
_MEMORY_BYTES: Final = 64 << 20
"""Bytes of distinct values, and of a client's receive memory: twice this machine's last-level cache."""
_ROOM: Final = 4
"""Space of ShadowServe's engines in all values, in memory and on devices: nothing is evicted."""
_ROOM_MIN: Final = 256 << 20
"""Least memory of the pool: no value may take more than half of it."""
_POOL_DEVICES: Final = 2


@dataclass(frozen=True)
class Case:
    """Requests of one kind: values, and answers that are smaller than the value for GETRANGE."""

    name: str
    value_bytes: int
    piece_bytes: int

    @property
    def values(self) -> int:
        return max(1, _MEMORY_BYTES // self.value_bytes)

    def requests(self) -> list[bytes]:
        whole = self.piece_bytes == self.value_bytes
        return [
            encode_command(*(("GET", key) if whole else ("GETRANGE", key, begin, begin + self.piece_bytes - 1)))
            for key in map(self.key, range(self.values))
            for begin in range(0, self.value_bytes, self.piece_bytes)
        ]

    def key(self, number: int) -> str:
        return f"value:{self.value_bytes}:{number}"

    def value(self, number: int) -> memoryview:
        """Return a value of 64-bit numbers, in which no two parts are equal."""
        value = allocate(self.value_bytes)
        words = value.cast("Q")
        block = memoryview(bytearray(1 << 16)).cast("Q")
        for begin in range(0, len(words), len(block)):
            block[0] = number << 32 | begin
            words[begin : begin + len(block)] = block[: len(words) - begin]
        return value


@dataclass(frozen=True)
class System:
    """A server and its protocol."""

    name: str
    child: Child
    speaks_resp: bool = True

    def requests(self, case: Case) -> list[bytes]:
        if self.speaks_resp:
            return case.requests()
        places = range(0, max(_MEMORY_BYTES - case.piece_bytes + 1, 1), case.piece_bytes)
        return [plain_request(place, case.piece_bytes) for place in places]

    def answer_bytes(self, case: Case) -> int:
        size = case.piece_bytes
        return len(encode_bulk_header(size)) + size + 2 if self.speaks_resp else size

    def store(self, case: Case) -> None:
        if not self.speaks_resp:
            return
        with connect(self.child.address) as sock:
            for number in range(case.values):
                key = case.key(number).encode()
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, case.value_bytes))
                sock.sendall(case.value(number))
                sock.sendall(b"\r\n")
                if (answer := sock.recv(100)) != b"+OK\r\n":
                    raise ShadowServeError(f"{self.name} answered SET with {answer!r}")


class Run(NamedTuple):
    """Cost of a transfer."""

    GB_per_s: float
    server_s_per_GB: float
    client_s_per_GB: float


class LeanClient:
    """Connections that receive into prepared memory."""

    def __init__(self, system: System, case: Case, connections: int) -> None:
        self._system, self._case = system, case
        self._requests = system.requests(case)
        self._answer_bytes = system.answer_bytes(case)
        self._wake_bytes = min(_WAKE_BYTES, self._answer_bytes)
        self._sockets = [connect(system.child.address) for _ in range(connections)]
        # The same number of places for all systems: with one less, because of a header, they would stay in the cache.
        places = max(1, _MEMORY_BYTES // connections // case.piece_bytes)
        self._memory = [allocate(places * self._answer_bytes) for _ in self._sockets]
        for memory in self._memory:
            memory[:] = bytes(len(memory))

    def move(self, answers: int) -> Run:
        """Receive ``answers`` answers, with all connections at the same time and one request in flight on each."""
        count = max(1, answers // len(self._sockets))
        server = psutil.Process(self._system.child.process.pid)
        indexes = range(len(self._sockets))
        before_s = cpu_s(server)
        with ThreadPoolExecutor(len(indexes)) as pool:
            own = measure(lambda: list(pool.map(self._move, indexes, [count] * len(indexes))))
        gigabytes = count * len(indexes) * self._answer_bytes / 1e9
        return Run(gigabytes / own.wall_s, (cpu_s(server) - before_s) / gigabytes, own.cpu_s / gigabytes)

    def _move(self, index: int, count: int) -> None:
        sock, memory, size = self._sockets[index], self._memory[index], self._answer_bytes
        places = len(memory) // size
        for number in range(count):
            sock.sendall(self._requests[(number * len(self._sockets) + index) % len(self._requests)])
            place = memory[number % places * size :][:size]
            for part, wake_bytes in ((place[: -self._wake_bytes], self._wake_bytes), (place[-self._wake_bytes :], 1)):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
                try:
                    receive(sock, part)
                except ShadowServeError as error:
                    log = self._system.child.log.read_text(errors="replace")[-2000:]
                    raise ShadowServeError(f"{self._system.name}: {error}; its log: {log}") from error

    def verify(self) -> None:
        """Compare the bytes of the first place with the stored ones."""
        if not self._system.speaks_resp:
            return
        self.move(1)
        body = self._memory[0][: self._answer_bytes][len(encode_bulk_header(self._case.piece_bytes)) : -2]
        if native.crc32(body) != native.crc32(self._case.value(0)[: self._case.piece_bytes]):
            raise ShadowServeError(
                f"{self._system.name} answered {self._case.name} with other bytes; please report this"
            )

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@benchmark("case", "connections", "system", *Run._fields, bars=["GB_per_s", "server_s_per_GB"])
@numbers_option("--sizes", "2,8,32", "Sizes of the values in MiB, with commas between.")
@numbers_option("--connections", "1,2,4", "Numbers of connections, with commas between.")
@whole("--mebibytes", 512, "MiB of a run.", most=1 << 16)
@repeats_option(5)
@listed("--engines", "memory,pool", f"Engines of ShadowServe's server: {', '.join(OURS)}.", one_of(OURS))
def storage(
    report: Report, programs: Programs, sizes: list[int], connections: list[int], mebibytes: int, repeats: int,
    engines: list[str],
) -> None:  # fmt: skip
    """Read whole values with GET, and parts with GETRANGE, on loopback."""
    cases = [Case(f"GET {size} MiB", size << 20, size << 20) for size in sizes]
    largest, smallest = max(sizes), min(sizes)
    if largest > smallest:
        cases.append(Case(f"GETRANGE {smallest} of {largest} MiB", largest << 20, smallest << 20))
    systems = _systems(programs, engines, _ROOM * _MEMORY_BYTES * len(sizes))
    for case, system in tracked(list(itertools.product(cases, systems)), "storing"):
        system.store(case)
    measured: dict[tuple[str, int, str], list[Run]] = {}
    for case, number in itertools.product(cases, connections):
        read_before = _read_from_devices(systems)
        answers = max(1, (mebibytes << 20) // case.piece_bytes)
        for name, runs in _take_turns(systems, case, number, answers, repeats).items():
            measured[case.name, number, name] = runs
            medians = map(statistics.median, zip(*runs, strict=True))
            report.row(case=case.name, connections=number, system=name, **Run(*medians)._asdict())
        if _read_from_devices(systems) != read_before:
            raise ShadowServeError(f"the pool read values of {case.name} from its devices; please report this")
    _add_ratios(report, measured, engines)


def _systems(programs: Programs, engines: Sequence[str], room: int) -> list[System]:
    """Start all; ShadowServe's engines have space for ``room`` bytes."""
    systems = []
    for engine in dict.fromkeys(engines):
        folder = programs.logs / engine
        folder.mkdir()
        flags = ["--memory-budget-bytes", str(max(room, _ROOM_MIN))]
        if engine == "pool":
            paths = [str(folder / f"{number}.pool") for number in range(_POOL_DEVICES)]
            flags += ["--devices", json.dumps([{"path": path, "size": room // _POOL_DEVICES} for path in paths])]
        systems.append(System(OURS[engine], programs.enter_context(start_storage(folder, *flags))))
    for way, name in FLOORS.items():
        systems.append(System(name, start_sender(programs, _MEMORY_BYTES >> 20, way), speaks_resp=False))
    if shutil.which("redis-server"):
        for name in (REDIS, TUNED):
            systems.append(System(name, programs.enter_context(start_redis(programs.logs, tuned=name == TUNED))))
    else:
        click.echo("redis-server is not installed: its rows and get_cpu_gain_over_redis are left out", err=True)
    return systems


def _read_from_devices(systems: Sequence[System]) -> int:
    """Return the bytes that storage nodes have read from devices for clients."""
    total = 0
    for system in systems:
        if system.name == OURS["pool"]:
            with client(system.child.address) as server:
                devices = server.info("devices")
            total += sum(int(devices[f"device{number}"]["read_bytes"]) for number in range(_POOL_DEVICES))
    return total


def _take_turns(
    systems: Sequence[System], case: Case, connections: int, answers: int, repeats: int
) -> dict[str, list[Run]]:
    with ExitStack() as stack:
        clients = {system.name: LeanClient(system, case, connections) for system in systems}
        for each in clients.values():
            stack.callback(each.close)
            each.verify()
        runs = {name: functools.partial(each.move, answers) for name, each in clients.items()}
        return in_turns(repeats, runs, f"{case.name}, {connections} connections")


Measured = Mapping[tuple[str, int, str], Sequence[Run]]
"""Runs by case, number of connections and system. Those of one case and number took turns."""


def _add_ratios(report: Report, measured: Measured, engines: Sequence[str]) -> None:
    def add(
        verb: str, ours: str, others: Sequence[str], name: str, figure: Callable[[Run, Run], float], goal: str
    ) -> None:
        """Add a ratio: the geometric mean over all cases of a verb; the lowest of several others counts."""
        settings = [key[:2] for key in measured if key[2] == ours and key[0].startswith(f"{verb} ")]
        turns: list[list[float]] = [
            [
                min(figure(own, their) for their in theirs)
                for own, *theirs in zip(*(measured[*key, system] for system in (ours, *others)), strict=True)
            ]
            for key in settings
        ]
        if turns:
            pairs = [statistics.geometric_mean(values) for values in zip(*turns, strict=True)]
            report.ratio(f"{verb.lower()}_{name}", pairs, goal)

    def gain(own: Run, theirs: Run) -> float:
        return theirs.server_s_per_GB / own.server_s_per_GB

    def speed(own: Run, theirs: Run) -> float:
        return own.GB_per_s / theirs.GB_per_s

    verbs = ("GET", "GETRANGE")
    for engine in engines:
        ours, suffix = OURS[engine], "" if engine == "memory" else f"_{engine}"
        if TUNED in {key[2] for key in measured}:
            for verb in verbs:
                add(verb, ours, [TUNED], f"cpu_gain_over_redis{suffix}", gain, "at least 1.2")
        for verb in verbs:
            add(verb, ours, [*FLOORS.values()], f"over_socket_floor{suffix}", speed, "at least 0.85")
    for engine in engines:
        if engine != "memory" and "memory" in engines:
            for verb in verbs:
                name, goal = f"cpu_gain_over_memory_{engine}", "none; the engine alone"
                add(verb, OURS[engine], [OURS["memory"]], name, gain, goal)
