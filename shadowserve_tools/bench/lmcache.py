"""Measures the serde ``shadowserve`` of LMCache: size, speed of one core, and retrieving over a slow link.

Method: objects of real KV of SmolLM2-135M (whose size counts) and of Llama-3.1-8B's shape (whose speed
counts), with 32 layers, are decoded in CPU time on one core. Then LMCache's server retrieves chunks of that shape over
a link, from a Redis with values of the serde and from one with raw values, in turns. A retrieval is LOOKUP, which
brings all chunks into the server's memory, and RETRIEVE into the worker's. This needs the rights of ``bench link``.

Prediction: the serde stores 0.675 of the bytes, of which real KV needs 0.64. A core decodes 6 GB/s with all checks,
half of that with vectors of 128. ``serde_retrieve_over_naive`` is 0.675 plus the decoding, which LMCache begins after
the last byte: 0.70 at 1 Gbit/s.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from host_control.lmcache import objects
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.codecs import real_kv
from shadowserve_tools.bench.fetch import peers_option, raw_values
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.workload import llama_8b, made_up_slices
from shadowserve_tools.bench.peers.contender import Contender, Field
from shadowserve_tools.bench.peers.installed import L2, Bed, Serde, Starts, add_installed, lmcache_server
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.processes import Programs, start_redis
from shadowserve_tools.report import Report, over, repeat, walls

LAYERS: Final = 32
OBJECTS: Final = 8
"""Objects that are decoded in turn, so that neither sources nor targets are in a cache."""
_LMCACHE_ALIGNMENT: Final = 4096
NAIVE, SERDE = "LMCache server, Redis tuned", "LMCache server, serde shadowserve, Redis tuned"


class _Key:
    chunk_hash, model_name, kv_rank, object_group_id, cache_salt = bytes(32), "bench", 0, 0, ""


@benchmark("system", "stored_over_raw", "GB_per_s", "cpu_s_per_GB", "wall_s", "runs", "note", bars=["GB_per_s"])
@real("--rate", 1.0, "Rate of the link, in Gbit/s.", 0.1, 100)
@whole("--chunks", 4, "Chunks of 256 tokens to retrieve.", most=64)
@repeats_option(5)
@peers_option
def lmcache(report: Report, programs: Programs, rate: float, chunks: int, repeats: int, peers_python: Path) -> None:
    """Measure LMCache's serde 'shadowserve', and LMCache with it over a link.

    Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2, as 'bench link'.
    """
    _kernel(report, repeats)
    network = programs.enter_context(linked())
    workload = llama_8b(chunks)
    bed = Bed(peers_python, programs.logs, raw_values(programs.logs, workload), chunks, network)
    field = Field()
    serdes: dict[str, Serde] = {NAIVE: "", SERDE: "shadowserve"}
    starts: Starts = {name: ("lmcache", functools.partial(_server, serde=serde)) for name, serde in serdes.items()}
    add_installed(field, programs, bed, starts)
    network.limit(rate)
    costs = field.measure(repeats, chunks)
    field.add_rows(report, costs, workload.raw_bytes)
    if len(field.contenders) == len(serdes):
        gains = over(walls(costs[SERDE]), walls(costs[NAIVE]))
        report.ratio("serde_retrieve_over_naive", gains, f"at most 0.72; at {rate:g} Gbit/s")


@contextlib.contextmanager
def _server(bed: Bed, name: str, serde: Serde) -> Iterator[Contender]:
    """LMCache's server with a Redis of its own: values of all serdes have the same keys."""
    with contextlib.ExitStack() as stack:
        with bed.network.store_side():
            redis = stack.enter_context(start_redis(bed.logs, host=bed.network.host, tuned=True))
        yield stack.enter_context(lmcache_server(bed, name, L2(redis=redis, serde=serde)))


def _kernel(report: Report, repeats: int) -> None:
    """Add size and decoding speed of one object of real KV, and of Llama-3.1-8B's shape."""
    slices = real_kv()
    real_object = np.tile(slices, (-(-2 * LAYERS // len(slices)), 1, 1))[: 2 * LAYERS]
    share, speeds = _decoded(report, "real KV, SmolLM2-135M", real_object, repeats)
    report.ratio("serde_bytes_over_raw", [share], "at most 0.68")
    report.ratio("serde_decode_real_GB_per_s", speeds, "none; vectors of 192")
    _, speeds = _decoded(report, "Llama-8B's shape", made_up_slices(LAYERS, 1024), repeats)
    report.ratio("serde_decode_GB_per_s", speeds, "at least 4")


def _aligned(objects: int, size: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins where LMCache's allocator begins an object: at a multiple of 4,096 bytes."""
    memory = np.ones(objects * size + _LMCACHE_ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _LMCACHE_ALIGNMENT
    return memory[first : first + objects * size].reshape(objects, size)


def _decoded(report: Report, data: str, kv: npt.NDArray[np.uint16], repeats: int) -> tuple[float, list[float]]:
    """Return the stored share of an object, and the speeds of decoding it on one core in CPU time."""
    array = objects.Array((2, len(kv) // 2, *kv.shape[1:]), "bfloat16")
    stored = np.empty((OBJECTS, objects.stored_bytes([array])), np.uint8)
    decoded = _aligned(OBJECTS, kv.nbytes)
    source = memoryview(kv).cast("B")
    objects.encode(_Key, [array], source, memoryview(stored[0]))
    stored[1:] = stored[0]

    def run() -> float:
        begin_s = time.thread_time()
        for value, target in zip(stored, decoded, strict=True):
            objects.decode(_Key, [array], memoryview(value), memoryview(target))
        return decoded.nbytes / (time.thread_time() - begin_s) / 1e9

    (speeds,) = repeat(repeats, run, description=data)
    if not (decoded == np.frombuffer(source, np.uint8)).all():
        raise ShadowServeError("the serde did not decode what it encoded")
    share = stored.shape[1] / kv.nbytes
    report.row(system=f"one core decodes, {data}", stored_over_raw=share, GB_per_s=statistics.median(speeds))
    return share, speeds
