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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import psutil

from host_control.client import DataPlaneClient, FetchPart
from host_control.registered_memory import RegisteredMemory
from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve_tools.bench.parts.steady import SteadySteps
from shadowserve_tools.bench.parts.workload import Workload, client, default_codec, llama_8b, put, uncompressed
from shadowserve_tools.bench.peers.contender import Contender
from shadowserve_tools.bench.peers.driver import CLEARED, Values
from shadowserve_tools.bench.peers.installed import (
    DEFAULT_PYTHON,
    Bed,
    Start,
    lmcache,
    lmcache_server,
    mooncake,
    start_installed,
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
from shadowserve_tools.report import Cost, Output, Report, output_options, repeat

if TYPE_CHECKING:
    import redis

CALL_TIMEOUT_S: Final = 60.0
NAIVE: Final = "redis-py + zlib + numpy (lossy)"
UNCOMPRESSED: Final = "ShadowServe, uncompressed"
LIMIT: Final = "plain sockets"

codec_option: Final = click.option(
    "--codec",
    default=default_codec(),
    show_default=True,
    type=click.Choice([codec.name.lower() for codec in native.Codec if codec is not native.Codec.NONE]),
    help="Codec of ShadowServe's records.",
)
peers_option: Final = click.option(
    "--peers-python",
    default=DEFAULT_PYTHON,
    show_default="that of scripts/setup-peers",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has LMCache and Mooncake.",
)


@click.command()
@click.option("--chunks", default=16, show_default=True, type=click.IntRange(1, 256), help="Chunks of 256 tokens.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@codec_option
@peers_option
@output_options
def fetch(chunks: int, repeats: int, codec: str, peers_python: Path, output: Output) -> None:
    """Compare a fetch with those of other stores and clients."""
    report = Report(
        "fetch", ["system", "GB_per_s", "cpu_s_per_GB", "wall_s", "runs", "note"], bars=["GB_per_s", "cpu_s_per_GB"]
    )
    lossless = llama_8b(chunks, codec=codec)
    binned = llama_8b(chunks, quantizer=Quantizer.BINNED, codec=codec)
    with Programs() as programs:
        bed = Bed(peers_python, programs.logs, raw_values(programs.logs, lossless), chunks)
        contenders = _ours_and_naive(programs, bed, lossless, binned)
        others, absent = _others(programs, bed)
        contenders += others
        costs = dict(zip(contenders, repeat(repeats, *(_run(each, chunks) for each in contenders)), strict=True))
    raw_bytes = lossless.raw_bytes
    for each, own in costs.items():
        add_row(report, raw_bytes, own, system=each.name, note=each.note)
    for name, reason in absent.items():
        report.row(system=name, note=reason)
    for prefix, workload in (("lossless_", lossless), ("", binned)):
        _ratios(report, costs, workload, prefix)
    _naive_ratios(report, costs, binned)
    report.finish(output)


def _run(contender: Contender, chunks: int) -> Callable[[], Cost]:
    return lambda: contender.run(chunks)


def _ours_and_naive(stack: ExitStack, bed: Bed, lossless: Workload, binned: Workload) -> list[Contender]:
    storage = stack.enter_context(start_storage(bed.logs))
    data_plane = stack.enter_context(start_data_plane(bed.logs, storage.address))
    deflated = llama_8b(bed.chunks, quantizer=Quantizer.BINNED, codec="deflate")
    workloads = {
        ours_name(lossless): lossless,
        ours_name(binned): binned,
        f"{ours_name(deflated)}, deflate": deflated,
        UNCOMPRESSED: uncompressed_like(lossless, Values(bed.values_file)),
    }
    contenders = []
    for name, workload in workloads.items():
        put(workload, storage.address)
        contenders.append(stack.enter_context(ours(name, workload, storage, data_plane)))
    server = stack.enter_context(client(storage.address))
    return [*contenders, naive(server, deflated, storage)]


def ours_name(workload: Workload) -> str:
    """Return ShadowServe's name in tables, with this workload."""
    return f"ShadowServe, {workload.label}"


def raw_values(folder: Path, workload: Workload) -> Path:
    """Return a file with one chunk's KV in the engine's format, which uncompressed peers move."""
    file = folder / "values"
    if not file.exists():
        file.write_bytes(record.decode(workload.records[0], workload.keys[0], workload.layout))
    return file


def uncompressed_like(workload: Workload, values: Values) -> Workload:
    """Return chunks of a workload's shape without compression, with the values of uncompressed peers."""

    def chunks() -> Iterator[bytes]:
        row = np.empty(values.chunk_bytes, np.uint8)
        for index in range(len(workload.keys)):
            values.write(index, row)
            yield row.tobytes()

    return uncompressed(workload, chunks())


def _others(stack: ExitStack, bed: Bed) -> tuple[list[Contender], dict[str, str]]:
    """Start the peers; return the running ones, and the reason of each absent one by name."""
    values = Values(bed.values_file)
    memory = Memory(values, bed.chunks)
    server = stack.enter_context(plain_sockets(bed.logs, bed.values_file, bed.chunks))
    contenders = [fastest(stack, LIMIT, server, memory, lambda count: plain_reader(server.address, count, memory))]
    for tuned in (False, True):
        store = stack.enter_context(filled_redis(bed.logs, values, bed.chunks, tuned=tuned))
        for pieces in (False, True):
            name = f"Redis{' tuned' * tuned}, {'GETRANGE 2 MiB' if pieces else 'GET 32 MiB'}"
            reader = functools.partial(redis_reader, store.address, memory=memory, pieces=pieces)
            contenders.append(fastest(stack, name, store, memory, reader, kind="raw"))
    starts: dict[str, tuple[str, Start]] = {
        "LMCache, lm://": ("lmcache", lmcache),
        "LMCache server, Redis tuned": ("lmcache", functools.partial(lmcache_server, redis=store)),
        "Mooncake store, TCP": ("mooncake", mooncake),
    }
    running, absent = start_installed(stack, bed, starts)
    return contenders + running, absent


def add_row(report: Report, raw_bytes: int, costs: list[Cost], **columns: Any) -> None:
    """Add a system's row, with the medians of its runs."""
    wall = float(np.median([cost.wall_s for cost in costs]))
    cpu = float(np.median([cost.cpu_s for cost in costs]))
    report.row(
        GB_per_s=raw_bytes / wall / 1e9,
        cpu_s_per_GB=cpu / raw_bytes * 1e9,
        wall_s=wall,
        runs=len(costs),
        **columns,
    )


def gigabytes_per_s(raw_bytes: int, costs: list[Cost]) -> float:
    """Return the median throughput."""
    return raw_bytes / float(np.median([cost.wall_s for cost in costs])) / 1e9


def best(
    costs: dict[Contender, list[Cost]], kind: str, figure: Callable[[Cost], float]
) -> tuple[Contender, list[Cost]]:
    """Return the contender of a kind with the lowest median of a figure, and its runs."""
    candidates = {each: own for each, own in costs.items() if each.kind == kind}
    winner = min(candidates, key=lambda each: float(np.median([figure(cost) for cost in candidates[each]])))
    return winner, candidates[winner]


def _ratios(report: Report, costs: dict[Contender, list[Cost]], workload: Workload, prefix: str) -> None:
    """Compare a workload with the best raw peer and with uncompressed records."""
    own, raw = runs_of(costs, ours_name(workload)), runs_of(costs, UNCOMPRESSED)
    goals = {"lossless_": ("at most 0.95", "at least 1.3"), "": ("at most 0.45", "at least 2.5")}[prefix]
    frugal, frugal_runs = best(costs, "raw", lambda cost: cost.cpu_s)
    quick, quick_runs = best(costs, "raw", lambda cost: cost.wall_s)
    report.ratio(f"{prefix}cpu_over_best_raw_peer", _cpu_ratios(own, frugal_runs), f"{goals[0]}; of {frugal.name}")
    report.ratio(f"{prefix}throughput_over_best_raw_peer", wall_gains(own, quick_runs), f"{goals[1]}; of {quick.name}")
    report.ratio(f"{prefix}cpu_over_uncompressed", _cpu_ratios(own, raw), "none; compression alone")
    report.ratio(f"{prefix}throughput_over_uncompressed", wall_gains(own, raw), "none; compression alone")
    report.ratio(f"{prefix}stored_over_raw", [workload.stored_bytes / workload.raw_bytes], "none; the compression")


def _naive_ratios(report: Report, costs: dict[Contender, list[Cost]], workload: Workload) -> None:
    own, simple = runs_of(costs, ours_name(workload)), runs_of(costs, NAIVE)
    cpus = _cpu_ratios(own, simple)
    report.ratio("gb_per_cpu_s_over_naive", [1 / ratio for ratio in cpus], "at least 25")
    report.ratio("fetch_over_naive", wall_gains(own, simple), "at least 6")
    report.ratio("cpu_over_naive", cpus, "at most 0.25")


def runs_of(costs: dict[Contender, list[Cost]], name: str) -> list[Cost]:
    """Return the runs of the contender with this name."""
    (found,) = (runs for each, runs in costs.items() if each.name == name)
    return found


def wall_gains(own: list[Cost], others: list[Cost]) -> list[float]:
    """Return the speed of each run over that of the other's run."""
    return [theirs.wall_s / mine.wall_s for mine, theirs in zip(own, others, strict=True)]


def _cpu_ratios(own: list[Cost], others: list[Cost]) -> list[float]:
    return [mine.cpu_s / theirs.cpu_s for mine, theirs in zip(own, others, strict=True)]


@contextmanager
def ours(name: str, workload: Workload, storage: Child, data_plane: Child) -> Iterator[Contender]:
    """ShadowServe with a workload that its storage node has."""
    with Target.opened(data_plane.address, workload) as target:
        yield Contender(
            name=name,
            kind="ours",
            fetch=target.fetch,
            clear=target.clear,
            verify=target.verify,
            processes=[psutil.Process(storage.process.pid), psutil.Process(data_plane.process.pid)],
        )


def naive(server: "redis.Redis", workload: Workload, storage: Child) -> Contender:
    """A straightforward client, on binned records of codec ``deflate``."""
    chunks = len(workload.keys)
    memory = np.empty((chunks, workload.layout.raw_bytes // 2), np.uint16)

    def fetch(count: int) -> None:
        for row, key in zip(memory[:count], workload.keys, strict=False):
            _naive_fetch(server, workload.layout, key, row)

    def verify(count: int) -> None:
        for index in range(count):
            if native.crc32(memoryview(memory[index]).cast("B")) != workload.crcs[index]:
                raise ShadowServeError(f"chunk {index} in memory is not what was stored; please report this")

    return Contender(
        name=NAIVE,
        kind="compressing",
        fetch=fetch,
        clear=lambda: memory.view(np.uint8).fill(CLEARED),
        verify=verify,
        processes=[psutil.Process(storage.process.pid)],
    )


class Target:
    """Memory that a data plane fetches a workload into, through an engine's client and registered memory.

    Attributes:
        rate: Bytes per second that the data plane keeps from the next fetch on, as beside decoding; 0 for no bound.
    """

    def __init__(self, client: DataPlaneClient, registration: RegisteredMemory, workload: Workload) -> None:
        self._client = client
        self._registration = registration
        self._workload = workload
        self._memory = registration.acquire(CALL_TIMEOUT_S).memory
        self.rate = 0
        self._steps = SteadySteps(client)

    @classmethod
    @contextmanager
    def opened(cls, address: str, workload: Workload, size: int | None = None) -> Iterator["Target"]:
        """Register shared memory of ``size`` bytes (by default for all chunks) with the data plane at ``address``."""
        shape = workload.layout
        with closing(DataPlaneClient(address, connect_timeout_s=CALL_TIMEOUT_S)) as plane:
            registration = RegisteredMemory(
                plane, [shape], size or workload.raw_bytes, connect_timeout_s=CALL_TIMEOUT_S
            )
            with closing(registration):
                yield cls(plane, registration, workload)

    def fetch(self, count: int | None = None) -> None:
        """Fetch the leading chunks, by default all, in as many batches as necessary."""
        self._steps.report(self.rate)
        done, last = 0, len(self._workload.keys) if count is None else count
        while done < last:
            done += self._round(done, done * self._workload.layout.raw_bytes, last)

    def touch(self, index: int, places: int | None = None) -> None:
        """Fetch one chunk to every place, or to the first ``places``, so that all memory has been used."""
        for place in range(len(self._workload.keys) if places is None else places):
            self._round(index, place * self._workload.layout.raw_bytes, index + 1)

    def fetch_through(self) -> None:
        """Fetch the whole workload through smaller memory; each batch is verified and then overwritten."""
        done = 0
        while done < len(self._workload.keys):
            count = self._round(done, 0, len(self._workload.keys))
            self._verify(done, count)
            done += count

    def _round(self, first: int, offset: int, last: int) -> int:
        """Fetch the chunks from ``first`` up to ``last`` that fit after ``offset``; return their number."""
        keys, room = self._workload.keys[first:last], len(self._memory) - offset
        part = FetchPart.whole(self._workload.layout, self._registration.memory_id, keys, offset, room)
        answer = self._client.start_fetch(secrets.token_hex(8), [part], CALL_TIMEOUT_S).result()
        (chunks,) = answer.chunks
        if not chunks or answer.reason not in ("complete", "batch_full"):
            raise ShadowServeError(f"fetching stopped at chunk {first + chunks}: {answer.reason}: {answer.detail}")
        return chunks

    def clear(self) -> None:
        """Overwrite the memory, so that an earlier run's bytes cannot pass the comparison."""
        np.frombuffer(self._memory, np.uint8).fill(CLEARED)

    def verify(self, count: int | None = None) -> None:
        """Compare the leading chunks in memory, by default all, with what was stored."""
        self._verify(0, len(self._workload.keys) if count is None else count)

    def _verify(self, first: int, count: int) -> None:
        size = self._workload.layout.raw_bytes
        for index, crc in enumerate(self._workload.crcs[first : first + count]):
            if native.crc32(self._memory[index * size : (index + 1) * size]) != crc:
                raise ShadowServeError(f"chunk {first + index} in memory is not what was stored; please report this")


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
