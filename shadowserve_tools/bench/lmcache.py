"""Measures the serde ``shadowserve`` of LMCache: size, speed of one core, and retrieving over a slow link.

Method: an object of real KV of the project's own small model, in the shape of 32 layers, is encoded, and decoded in
CPU time on one core. Then LMCache's server retrieves chunks of Llama-3.1-8B's shape from Redis over a link, from a
Redis with values of the serde and from one with raw values, in turns. A retrieval is LOOKUP, which brings all chunks
into the server's memory, and RETRIEVE into the worker's. This needs the rights of ``bench link``.

Prediction: real KV needs 0.64, the serde stores 0.675 of the bytes. A core decodes 5 GB/s with all checks.
``serde_retrieve_over_naive`` is 0.675 plus the decoding that LMCache does after the last byte: 0.70 at 1 Gbit/s.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from host_control.lmcache import objects
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.codecs import real_kv
from shadowserve_tools.bench.fetch import peers_option, raw_values
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.workload import llama_8b
from shadowserve_tools.bench.peers.contender import Contender, Field, add_row
from shadowserve_tools.bench.peers.installed import Bed, Serde, Starts, add_installed, lmcache_server
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.processes import Programs, start_redis
from shadowserve_tools.report import Report, over, walls

LAYERS: Final = 32
OBJECTS: Final = 16
"""Objects that are decoded in turn, so that neither sources nor targets are in a cache."""
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
    for each in field.contenders:
        add_row(report, workload.raw_bytes, costs[each.name], system=each.name, note=each.note)
    for name, reason in field.absent.items():
        report.row(system=name, note=reason)
    if len(field.contenders) == len(serdes):
        gains = over(walls(costs[SERDE]), walls(costs[NAIVE]))
        report.ratio("serde_retrieve_over_naive", gains, f"at most 0.72; at {rate:g} Gbit/s")


@contextlib.contextmanager
def _server(bed: Bed, name: str, serde: Serde) -> Iterator[Contender]:
    """LMCache's server with a Redis of its own: values of all serdes have the same keys."""
    with contextlib.ExitStack() as stack:
        with bed.network.store_side():
            redis = stack.enter_context(start_redis(bed.logs, host=bed.network.host, tuned=True))
        yield stack.enter_context(lmcache_server(bed, name, redis=redis, serde=serde))


def _kernel(report: Report, repeats: int) -> None:
    """Add size and decoding speed of one object of real KV."""
    slices = real_kv()
    kv = np.tile(slices, (-(-2 * LAYERS // len(slices)), 1, 1))[: 2 * LAYERS]
    array = objects.Array((2, LAYERS, *kv.shape[1:]), "bfloat16")
    stored = np.empty((OBJECTS, objects.stored_bytes([array])), np.uint8)
    decoded = np.zeros((OBJECTS, kv.nbytes), np.uint8)
    source = memoryview(kv).cast("B")
    for value in stored:
        objects.encode(_Key, [array], source, memoryview(value))
    speeds = []
    for _ in range(repeats):
        begin_s = time.thread_time()
        for value, target in zip(stored, decoded, strict=True):
            objects.decode(_Key, [array], memoryview(value), memoryview(target))
        speeds.append(decoded.nbytes / (time.thread_time() - begin_s) / 1e9)
    if not (decoded == np.frombuffer(source, np.uint8)).all():
        raise ShadowServeError("the serde did not decode what it encoded")
    share = stored.shape[1] / kv.nbytes
    name = "serde shadowserve, real KV, one core decodes"
    report.row(system=name, stored_over_raw=share, GB_per_s=statistics.median(speeds), runs=repeats)
    report.ratio("serde_bytes_over_raw", [share], "at most 0.68")
    report.ratio("serde_decode_GB_per_s", speeds, "at least 4")
