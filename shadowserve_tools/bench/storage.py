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

import json
import shutil
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import psutil

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve.pool.buffers import allocate
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.options import numbers_option
from shadowserve_tools.bench.parts.plain_sender import REQUEST_BYTES
from shadowserve_tools.bench.parts.workload import client
from shadowserve_tools.processes import Child, Programs, start_redis, start_storage, started
from shadowserve_tools.report import Cost, Output, Report, measure, output_options, tracked

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
    """Requests of one kind.

    Attributes:
        name: Name in the table and the chart.
        value_bytes: Bytes of each stored value.
        piece_bytes: Bytes of each answer; smaller than the value for GETRANGE.
    """

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


@dataclass(frozen=True)
class System:
    """A server and its protocol."""

    name: str
    child: Child
    address: tuple[str, int]
    speaks_resp: bool = True

    def requests(self, case: Case) -> list[bytes]:
        """Return the requests of a case."""
        return case.requests() if self.speaks_resp else [b"%*d" % (REQUEST_BYTES, case.piece_bytes)]

    def answer_bytes(self, case: Case) -> int:
        size = case.piece_bytes
        return len(encode_bulk_header(size)) + size + 2 if self.speaks_resp else size


@dataclass(frozen=True)
class Run:
    """Cost of a transfer."""

    GB_per_s: float
    server_s_per_GB: float
    client_s_per_GB: float


class LeanClient:
    """Connections that receive into prepared memory: the lowest cost of a client."""

    def __init__(self, system: System, case: Case, connections: int) -> None:
        self._system = system
        self._requests = system.requests(case)
        self._answer_bytes = system.answer_bytes(case)
        self._wake_bytes = min(_WAKE_BYTES, self._answer_bytes)
        self._sockets = [socket.create_connection(system.address) for _ in range(connections)]
        # The same number of places for all systems: with one less, because of a header, they would stay in the cache.
        places = max(1, _MEMORY_BYTES // connections // case.piece_bytes)
        self._memory = [allocate(places * self._answer_bytes) for _ in self._sockets]
        for sock, memory in zip(self._sockets, self._memory, strict=True):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            memory[:] = bytes(len(memory))

    def move(self, answers: int) -> Run:
        """Receive ``answers`` answers, with all connections at the same time and one request in flight on each."""
        count = max(1, answers // len(self._sockets))
        server = psutil.Process(self._system.child.process.pid)
        indexes = range(len(self._sockets))
        own: list[Cost] = []
        with ThreadPoolExecutor(len(indexes)) as pool:
            both = measure(
                lambda: own.append(measure(lambda: list(pool.map(self._move, indexes, [count] * len(indexes))))),
                [server],
            )
        gigabytes = count * len(indexes) * self._answer_bytes / 1e9
        cpu_s = own[0].cpu_s
        return Run(gigabytes / own[0].wall_s, (both.cpu_s - cpu_s) / gigabytes, cpu_s / gigabytes)

    def _move(self, index: int, count: int) -> None:
        sock, memory, size = self._sockets[index], self._memory[index], self._answer_bytes
        places = len(memory) // size
        for number in range(count):
            sock.sendall(self._requests[(number * len(self._sockets) + index) % len(self._requests)])
            place = memory[number % places * size :][:size]
            self._receive(sock, place[: -self._wake_bytes], self._wake_bytes)
            self._receive(sock, place[-self._wake_bytes :], 1)

    def _receive(self, sock: socket.socket, place: memoryview, wake_bytes: int) -> None:
        """Receive into ``place``; wake when ``wake_bytes`` bytes are there."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
        while place:
            received = sock.recv_into(place, len(place), socket.MSG_WAITALL)
            if not received:
                raise ShadowServeError(f"{self._system.name} closed the connection; its log: {self._log()}")
            place = place[received:]

    def _log(self) -> str:
        return self._system.child.log.read_text(errors="replace")[-2000:]

    def answer(self) -> bytes:
        """Return the first answer of the first connection's last run."""
        return bytes(self._memory[0][: self._answer_bytes])

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@click.command()
@numbers_option("--sizes", "2,8,32", "Sizes of the values in MiB, with commas between.")
@numbers_option("--connections", "1,2,4", "Numbers of connections, with commas between.")
@click.option("--mebibytes", default=512, show_default=True, type=click.IntRange(1, 1 << 16), help="MiB of a run.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@click.option(
    "--io-threads", default=0, show_default=True, type=click.IntRange(0, 128), help="Threads of ShadowServe's server."
)
@click.option(
    "--engines", default="memory,pool", show_default=True, help=f"Engines of ShadowServe's server: {', '.join(OURS)}."
)
@output_options
def storage(
    sizes: list[int],
    connections: list[int],
    mebibytes: int,
    repeats: int,
    io_threads: int,
    engines: str,
    output: Output,
) -> None:
    """Read whole values with GET, and parts with GETRANGE, on loopback."""
    chosen = list(dict.fromkeys(engines.split(",")))
    if not set(chosen) <= set(OURS):
        raise click.BadParameter(f"{engines!r} is no list of {', '.join(OURS)}", param_hint="--engines")
    cases = [Case(f"GET {size} MiB", size << 20, size << 20) for size in sizes]
    largest, smallest = max(sizes), min(sizes)
    if largest > smallest:
        cases.append(Case(f"GETRANGE {smallest} of {largest} MiB", largest << 20, smallest << 20))
    report = Report(
        "storage", ["case", "connections", "system", *Run.__annotations__], bars=["GB_per_s", "server_s_per_GB"]
    )
    measured: dict[tuple[str, int, str], list[Run]] = {}
    with Programs() as programs:
        systems = programs.enter_context(
            _systems(programs.logs, io_threads, chosen, _ROOM * _MEMORY_BYTES * len(sizes))
        )
        for case in tracked(cases, "storing"):
            _store(systems, case)
        for case in tracked(cases, "measuring"):
            for number in connections:
                answers = max(1, (mebibytes << 20) // case.piece_bytes)
                read_before = _read_from_devices(systems)
                for name, taken in _take_turns(systems, case, number, answers, repeats).items():
                    measured[case.name, number, name] = taken
                if _read_from_devices(systems) != read_before:
                    raise ShadowServeError(f"the pool read values of {case.name} from its devices; please report this")
    for (case_name, number, name), runs in measured.items():
        medians = {field: statistics.median(getattr(run, field) for run in runs) for field in Run.__annotations__}
        report.row(case=case_name, connections=number, system=name, **medians)
    _add_ratios(report, measured, chosen)
    report.finish(output)


@contextmanager
def _systems(logs: Path, io_threads: int, engines: Sequence[str], room: int) -> Iterator[list[System]]:
    with ExitStack() as stack:
        ours = [_start_ours(stack, logs / engine, engine, io_threads, room) for engine in engines]
        systems = [System(OURS[engine], own, _address(own.address)) for engine, own in zip(engines, ours, strict=True)]
        for way, name in FLOORS.items():
            sender = [sys.executable, "-m", "shadowserve_tools.bench.parts.plain_sender", str(_MEMORY_BYTES >> 20), way]
            floor = stack.enter_context(started(f"plain_sender-{way}", sender, logs))
            systems.append(System(name, floor, _address(floor.address), speaks_resp=False))
        if shutil.which("redis-server"):
            for name in (REDIS, TUNED):
                child = stack.enter_context(start_redis(logs, tuned=name == TUNED))
                systems.append(System(name, child, _address(child.address)))
        else:
            click.echo("redis-server is not installed: its rows and get_cpu_gain_over_redis are left out", err=True)
        yield systems


def _start_ours(stack: ExitStack, folder: Path, engine: str, io_threads: int, room: int) -> Child:
    """Run a storage node with an engine that has space for ``room`` bytes."""
    folder.mkdir()
    flags = ["--io-threads", str(io_threads), "--memory-budget-bytes", str(max(room, _ROOM_MIN))]
    if engine == "pool":
        size = room // _POOL_DEVICES
        devices = [{"path": str(folder / f"{number}.pool"), "size": size} for number in range(_POOL_DEVICES)]
        flags += ["--devices", json.dumps(devices)]
    return stack.enter_context(start_storage(folder, *flags))


def _read_from_devices(systems: Sequence[System]) -> int:
    """Return the bytes that storage nodes have read from devices for clients."""
    total = 0
    for system in systems:
        if system.name == OURS["pool"]:
            with client(":".join(map(str, system.address))) as server:
                devices = server.info("devices")
            total += sum(int(devices[f"device{number}"]["read_bytes"]) for number in range(_POOL_DEVICES))
    return total


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _value(case: Case, number: int) -> memoryview:
    """Return a value of 64-bit numbers, in which no two parts are equal."""
    value = allocate(case.value_bytes)
    words = value.cast("Q")
    block = memoryview(bytearray(1 << 16)).cast("Q")
    for begin in range(0, len(words), len(block)):
        block[0] = number << 32 | begin
        words[begin : begin + len(block)] = block[: len(words) - begin]
    return value


def _store(systems: Sequence[System], case: Case) -> None:
    for system in systems:
        if not system.speaks_resp:
            continue
        with socket.create_connection(system.address) as sock:
            for number in range(case.values):
                key = case.key(number).encode()
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, case.value_bytes))
                sock.sendall(_value(case, number))
                sock.sendall(b"\r\n")
                if (answer := sock.recv(100)) != b"+OK\r\n":
                    raise ShadowServeError(f"{system.name} answered SET with {answer!r}")


def _take_turns(
    systems: Sequence[System], case: Case, connections: int, answers: int, repeats: int
) -> dict[str, list[Run]]:
    """Return the runs of each system by name, in turns of both orders."""
    with ExitStack() as stack:
        clients = {}
        for system in systems:
            clients[system.name] = LeanClient(system, case, connections)
            stack.callback(clients[system.name].close)
        runs: dict[str, list[Run]] = {name: [] for name in clients}
        for client in clients.values():  # to warm up
            client.move(answers)
        for system in systems:
            if system.speaks_resp:
                _verify(system, case, clients[system.name])
        for number in range(repeats):
            for name in list(clients)[:: -1 if number % 2 else 1]:
                runs[name].append(clients[name].move(answers))
    return runs


def _verify(system: System, case: Case, client: LeanClient) -> None:
    """Compare the bytes of the first place with the stored ones."""
    client.move(1)
    body = memoryview(client.answer())[len(encode_bulk_header(case.piece_bytes)) : -2]
    expected = _value(case, 0)[: case.piece_bytes]
    if native.crc32(body) != native.crc32(expected):
        raise ShadowServeError(f"{system.name} answered {case.name} with other bytes; please report this")


Measured = Mapping[tuple[str, int, str], Sequence[Run]]
"""Runs by case, number of connections and system. Those of one case and number took turns."""


def _add_ratios(report: Report, measured: Measured, engines: Sequence[str]) -> None:
    def pairs(verb: str, ours: str, others: Sequence[str], ratio: Callable[[Run, Run], float]) -> list[float]:
        """Return, for each round, the geometric mean of ``ratio`` over all cases of a verb.

        With several others, the lowest ratio counts.
        """
        settings = [key[:2] for key in measured if key[2] == ours and key[0].startswith(f"{verb} ")]
        rounds: list[list[float]] = [
            [
                min(ratio(own, their) for their in theirs)
                for own, *theirs in zip(*(measured[*key, name] for name in (ours, *others)), strict=True)
            ]
            for key in settings
        ]
        return [statistics.geometric_mean(values) for values in zip(*rounds, strict=True)]

    def gain(own: Run, theirs: Run) -> float:
        return theirs.server_s_per_GB / own.server_s_per_GB

    def speed(own: Run, theirs: Run) -> float:
        return own.GB_per_s / theirs.GB_per_s

    systems = {key[2] for key in measured}
    verbs = [verb for verb in ("GET", "GETRANGE") if any(key[0].startswith(f"{verb} ") for key in measured)]
    for engine in engines:
        ours, suffix = OURS[engine], "" if engine == "memory" else f"_{engine}"
        if TUNED in systems:
            for verb in verbs:
                name = f"{verb.lower()}_cpu_gain_over_redis{suffix}"
                report.ratio(name, pairs(verb, ours, [TUNED], gain), "at least 1.2")
        for verb in verbs:
            name = f"{verb.lower()}_over_socket_floor{suffix}"
            report.ratio(name, pairs(verb, ours, [*FLOORS.values()], speed), "at least 0.85")
    for engine in engines:
        if engine != "memory" and "memory" in engines:
            for verb in verbs:
                name = f"{verb.lower()}_cpu_gain_over_memory_{engine}"
                report.ratio(name, pairs(verb, OURS[engine], [OURS["memory"]], gain), "none; the engine alone")
