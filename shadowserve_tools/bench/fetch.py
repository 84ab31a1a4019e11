"""Compares a fetch through the whole data plane with other stores and their clients.

Method: 16 chunks of 256 tokens of Llama-3.1-8B's shape (537 MB) go from each system's store into memory of its
client, over loopback. Each store, server and client is a process of its own; all take turns. CPU time is that of all
processes of a system. Memory is overwritten before each fetch, and every byte compared after it, outside of the
measurement.

Peers: Redis with GET of 32 MiB and GETRANGE of 2 MiB, as installed and tuned (``MALLOC_CONF`` keeps the memory of
large replies); LMCache's engine with its own server and its multiprocess server with Redis; Mooncake's store over
TCP; plain sockets, which are the limit of raw transfers; redis-py with zlib and numpy, on the same records.
``scripts/setup-peers`` installs LMCache and Mooncake. ``lossless_`` ratios compare exact systems only; binned KV is
lossy.

Prediction: lossless stores 0.66 of the bytes: 0.46 to 0.6 CPU s/GB against 0.49 of the best raw peer, and 1.2 to 1.5
times its throughput. Binned: 0.22 CPU s/GB, 1.7 times the throughput. 16 times as cheap as the naive client.
"""

import functools
import secrets
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import psutil

from shadowserve import record
from shadowserve.chunk import ChunkLayout, Quantizer
from shadowserve.keys import storage_key
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import Workload, client, llama_8b, put, uncompressed
from shadowserve_tools.bench.peers.contender import Contender, Costs, Field
from shadowserve_tools.bench.peers.driver import CLEARED, Values
from shadowserve_tools.bench.peers.installed import (
    DEFAULT_PYTHON,
    L2,
    Bed,
    Starts,
    add_installed,
    lmcache,
    lmcache_server,
    mooncake,
)
from shadowserve_tools.bench.peers.sockets import (
    Memory,
    fastest,
    filled_redis,
    plain_reader,
    plain_sockets,
    redis_reader,
)
from shadowserve_tools.processes import Child, Programs, start_data_plane, start_storage
from shadowserve_tools.report import Report, cpus, over, walls

if TYPE_CHECKING:
    import redis

NAIVE: Final = "redis-py + zlib + numpy (lossy)"
UNCOMPRESSED: Final = "ShadowServe, uncompressed"
LIMIT: Final = "plain sockets"

peers_option: Final = click.option(
    "--peers-python",
    default=DEFAULT_PYTHON,
    show_default="that of scripts/setup-peers",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has LMCache and Mooncake.",
)


@benchmark("system", "GB_per_s", "cpu_s_per_GB", "wall_s", "runs", "note", bars=["GB_per_s", "cpu_s_per_GB"])
@whole("--chunks", 16, "Chunks of 256 tokens.", most=256)
@repeats_option(5)
@peers_option
def fetch(report: Report, programs: Programs, chunks: int, repeats: int, peers_python: Path) -> None:
    """Compare a fetch with those of other stores and clients."""
    lossless = llama_8b(chunks)
    binned = llama_8b(chunks, quantizer=Quantizer.BINNED)
    deflated = llama_8b(chunks, quantizer=Quantizer.BINNED, codec="deflate")
    bed = Bed(peers_python, programs.logs, raw_values(programs.logs, lossless), chunks)
    field = Field()
    stored = {name_of(lossless): lossless, name_of(binned): binned, f"{name_of(deflated)}, deflate": deflated}
    add_ours(field, programs, bed, stored, deflated)
    redis = add_raw(field, programs, bed, [(tuned, pieces) for tuned in (False, True) for pieces in (False, True)])
    starts: Starts = {
        "LMCache, lm://": ("lmcache", lmcache),
        "LMCache server, Redis tuned": ("lmcache", functools.partial(lmcache_server, l2=L2(redis=redis))),
        "Mooncake store, TCP": ("mooncake", mooncake),
    }
    add_installed(field, programs, bed, starts)
    costs = field.measure(repeats, chunks)
    field.add_rows(report, costs, lossless.raw_bytes)
    for prefix, workload, goals in (
        ("lossless_", lossless, ("at most 0.95", "at least 1.3")),
        ("", binned, ("at most 0.45", "at least 2.5")),
    ):
        _ratios(report, field, costs, workload, prefix, goals)
    own, simple = costs[name_of(binned)], costs[NAIVE]
    report.ratio("gb_per_cpu_s_over_naive", over(cpus(simple), cpus(own)), "at least 25")
    report.ratio("fetch_over_naive", over(walls(simple), walls(own)), "at least 6")
    report.ratio("cpu_over_naive", over(cpus(own), cpus(simple)), "at most 0.25")


def _ratios(
    report: Report, field: Field, costs: Costs, workload: Workload, prefix: str, goals: tuple[str, str]
) -> None:
    """Compare a workload with the best raw peer and with uncompressed records."""
    own, raw = costs[name_of(workload)], costs[UNCOMPRESSED]
    frugal, quick = field.best(costs, "raw", cpus), field.best(costs, "raw", walls)
    least_s, alone = cpus(costs[frugal]), "none; compression alone"
    report.ratio(f"{prefix}cpu_over_best_raw_peer", over(cpus(own), least_s), f"{goals[0]}; of {frugal}")
    gains = over(walls(costs[quick]), walls(own))
    report.ratio(f"{prefix}throughput_over_best_raw_peer", gains, f"{goals[1]}; of {quick}")
    report.ratio(f"{prefix}cpu_over_uncompressed", over(cpus(own), cpus(raw)), alone)
    report.ratio(f"{prefix}throughput_over_uncompressed", over(walls(raw), walls(own)), alone)
    report.ratio(f"{prefix}stored_over_raw", [workload.stored_bytes / workload.raw_bytes], "none; the compression")


def name_of(workload: Workload) -> str:
    """Return ShadowServe's name in tables, with this workload."""
    return f"ShadowServe, {workload.label}"


def raw_values(folder: Path, workload: Workload) -> Path:
    """Return a file with one chunk's KV in the engine's format, which uncompressed peers move."""
    file = folder / "values"
    file.write_bytes(record.decode(workload.records[0], workload.keys[0], workload.layout))
    return file


def _chunks(values: Values, count: int) -> Iterator[bytes]:
    row = np.empty(values.chunk_bytes, np.uint8)
    for index in range(count):
        values.write(index, row)
        yield row.tobytes()


def add_ours(field: Field, stack: ExitStack, bed: Bed, stored: dict[str, Workload], simple: Workload) -> None:
    """Start a storage node and a data plane; add each stored workload, an uncompressed one, and the naive client.

    Args:
        stored: Workloads by the names of the systems.
        simple: Binned records of codec ``deflate``, which the naive client reads.
    """
    network, password = bed.network, secrets.token_hex(16)  # required beyond loopback
    with network.store_side():
        environment = {"SHADOWSERVE_STORAGE_PASSWORD": password}
        storage = stack.enter_context(start_storage(bed.logs, "--host", network.host, environment=environment))
        # Stores are filled without the link.
        first = next(iter(stored.values()))
        stored = stored | {UNCOMPRESSED: uncompressed(first, _chunks(Values(bed.values_file), bed.chunks))}
        for workload in {id(each): each for each in (*stored.values(), simple)}.values():
            put(workload, storage.address, password)
    with network.client_side():
        # Clients in another namespace reach the data plane through a Unix socket.
        plane = stack.enter_context(
            start_data_plane(
                bed.logs, storage.address, "--listen", f"unix:{bed.logs}/dpu.sock",
                environment={"SHADOWSERVE_DPU_STORAGE_PASSWORD": password},
            )
        )  # fmt: skip
        server = stack.enter_context(client(storage.address, password))
        server.ping()
    for name, workload in stored.items():
        field.contenders.append(stack.enter_context(_ours(name, workload, storage, plane)))
    field.contenders.append(_naive(server, simple, storage))


@contextmanager
def _ours(name: str, workload: Workload, storage: Child, data_plane: Child) -> Iterator[Contender]:
    with Target.opened(data_plane.address, workload) as target:
        yield Contender(
            name=name,
            kind="ours",
            fetch=target.fetch,
            clear=target.clear,
            verify=target.verify,
            processes=[psutil.Process(storage.process.pid), psutil.Process(data_plane.process.pid)],
        )


def _naive(server: "redis.Redis", workload: Workload, storage: Child) -> Contender:
    """A straightforward client."""
    memory = np.empty((len(workload.keys), workload.layout.raw_bytes // 2), np.uint16)

    def fetch(count: int) -> None:
        for row, key in zip(memory[:count], workload.keys, strict=False):
            _naive_fetch(server, workload.layout, key, row)

    return Contender(
        name=NAIVE,
        kind="compressing",
        fetch=fetch,
        clear=lambda: memory.view(np.uint8).fill(CLEARED),
        verify=lambda count: workload.check(memory, count),
        processes=[psutil.Process(storage.process.pid)],
    )


def _naive_fetch(server: "redis.Redis", layout: ChunkLayout, key: bytes, target: "np.ndarray[Any, Any]") -> None:
    """Fetch a chunk with GET, zlib, and numpy for symbols times scales, rounded to bfloat16."""
    value: bytes = server.get(storage_key(key))
    position = 0
    for entry in record.parse_header(value).slices:
        begin = int(entry["offset"])
        middle = begin + int(entry["scales_length"])
        scales = np.frombuffer(value[begin:middle], np.float32)
        symbols = zlib.decompress(value[middle : middle + int(entry["encoded_length"])], -zlib.MAX_WBITS)
        vectors = np.frombuffer(symbols, np.int8).reshape(len(scales), layout.vector_length)
        bits = (vectors.astype(np.float32) * scales[:, None]).view(np.uint32).reshape(-1)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        target[position : position + len(rounded)] = rounded
        position += len(rounded)


def add_raw(field: Field, stack: ExitStack, bed: Bed, redis: list[tuple[bool, bool]]) -> Child:
    """Add plain sockets, and Redis, tuned or not, read in pieces or not; return the last Redis server."""
    network, values = bed.network, Values(bed.values_file)
    memory = Memory(values, bed.chunks)
    server = stack.enter_context(plain_sockets(bed.logs, bed.values_file, bed.chunks, network))
    field.contenders.append(fastest(stack, LIMIT, server, memory, plain_reader, network))
    stores = {
        tuned: stack.enter_context(filled_redis(bed.logs, values, bed.chunks, tuned=tuned, network=network))
        for tuned in sorted({tuned for tuned, _ in redis})
    }
    for tuned, pieces in redis:
        store = stores[tuned]
        name = f"Redis{' tuned' * tuned}, {'GETRANGE 2 MiB' if pieces else 'GET 32 MiB'}"
        field.contenders.append(fastest(stack, name, store, memory, redis_reader, network, kind="raw", pieces=pieces))
    return store
