"""Measures memory and time of the index of stored objects.

Method: ten million objects of four tenants on four devices, in chains of 128, one in ten with an expiry. 200,000 are
evicted and inserted again from Python; then the process's resident size counts, less that before. Other 200,000 are
looked up in random order, by a loop in C and one by one from Python. The last row recovers a million objects in
random order, which is the worst one. ``step_us`` is the cost of an engine step in the policies for tiers, with 256
requests in the queue. Times are CPU time of one thread.

Prediction: 97.9 bytes for each object (88 for the entry, 6.7 for the table, 2 for the ghost queue, 1.2 for expiries).
A lookup in C is two cache misses, 0.2 to 0.3 us; from Python 1.8 us. Recovery 1 s for a million. A step 35 us.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve.pool.next_use import NextUse
from shadowserve.pool.prefetch_policy import Hop, PrefetchPolicy, Waiting
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, resident_bytes, timed, tracked

_PART: Final = 250_000
"""Records that are made at a time: 32 MB."""
_SAMPLE: Final = 200_000
"""Objects that are looked up, evicted and inserted: too many for a cache."""
_CHAIN: Final = 128
"""Objects in a chain of parents: a prompt of 32K tokens."""
_DEVICES: Final = 4
_TENANTS: Final = 4
_LENGTH: Final = 500_000
_DISK_BLOCKS: Final = 0xFFFF_FFFE
_NOW_S: Final = 1_800_000_000
_WAITING: Final = 256
"""Requests in an engine's queue, and objects of each."""
_STEPS: Final = 200

Records = NDArray[np.void]
_timed = functools.partial(timed, clock=time.thread_time)


@benchmark("operation", "objects", "us_each", bars=["us_each"])
@whole("--objects", 10_000_000, "Number of objects.", 1000, 1 << 28)
@repeats_option(5, "Repeats of a measurement.")
def index(report: Report, programs: Programs, objects: int, repeats: int) -> None:
    """Measure memory and times of the index of stored objects."""
    before = resident_bytes()
    table = native.Index(objects, native.IndexPolicy.LRU, seed=1)
    fill_s = _timed(lambda: _fill(table, objects))
    report.row(operation="replay in C, with making the records", objects=objects, us_each=fill_s / objects * 1e6)
    _evict_and_put(report, table, min(_SAMPLE, objects // 2))
    resident = resident_bytes() - before
    if len(table) != objects:
        raise ShadowServeError(f"{len(table)} objects of {objects} are in the index; please report this")
    report.ratio("resident_bytes_each", [resident / objects], "at most 100")
    report.ratio("counted_bytes_each", [table.memory_bytes() / objects], "at most 100")
    _find(report, table, objects, min(_SAMPLE, objects), repeats)
    table.close()
    _recover(report, min(objects, 1_000_000), repeats)
    _step(report, repeats)


def _keys(numbers: "NDArray[np.uint64]") -> "NDArray[np.uint8]":
    """Return 32 bytes for each number, as good as random (the finalizer of SplitMix64)."""
    words = np.empty((len(numbers), 4), np.uint64)
    for word in range(4):
        value = numbers * np.uint64(4) + np.uint64(word + 1)
        value = value * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[:, word] = value ^ (value >> np.uint64(31))
    return words.view(np.uint8)


def _records(begin: int, end: int) -> Records:
    """Return the snapshot records of the objects from ``begin`` to before ``end``."""
    numbers = np.arange(begin, end, dtype=np.uint64)
    records = np.zeros(end - begin, native.INDEX_RECORD_DTYPE)
    records["kind"] = native.RecordKind.PUT
    records["flags"] = native.RecordFlag.RECORD
    records["tenant"] = numbers // _CHAIN % _TENANTS
    records["extent"] = numbers * native.blocks_of(_LENGTH) % (_DISK_BLOCKS - native.blocks_of(_LENGTH))
    records["length"] = _LENGTH
    records["accessed_s"] = _NOW_S - (numbers * 7919 % 1_000_003).astype(np.uint32)
    records["expires_at_ms"] = np.where(numbers % 10 == 0, (_NOW_S + numbers % 86_400 + 1) * 1000, 0)
    records["key"] = _keys(numbers)
    first = numbers % _CHAIN == 0
    records["parent"][~first] = _keys(numbers[~first] - np.uint64(1))
    return records


def _fill(table: native.Index, objects: int) -> None:
    for begin in tracked(range(0, objects, _PART), "putting objects in"):
        records = _records(begin, min(begin + _PART, objects))
        for device in range(_DEVICES):
            table.replay(device, _DISK_BLOCKS, np.ascontiguousarray(records[device::_DEVICES]))
    table.replayed()


def _evict_and_put(report: Report, table: native.Index, count: int) -> None:
    """Evict objects and insert them again, from Python; this also fills the ghost queue."""
    evicted: list[native.IndexEntry] = []

    def evict() -> None:
        for _ in range(count):
            slot = table.victim(_NOW_S)
            evicted.append(table.read(slot))
            table.evict(slot)

    def put() -> None:
        for entry in reversed(evicted):
            table.insert(
                entry.tenant,
                entry.key,
                device=entry.device,
                extent=entry.extent,
                length=entry.length,
                flags=entry.flags,
                expires_at_ms=entry.expires_at_ms,
                parent=entry.parent,
                now_s=_NOW_S,
            )

    report.row(operation="victim, read and evict from Python", objects=count, us_each=_timed(evict) / count * 1e6)
    report.row(operation="insert from Python", objects=count, us_each=_timed(put) / count * 1e6)


def _find(report: Report, table: native.Index, objects: int, count: int, repeats: int) -> None:
    random = np.random.default_rng(1)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in tracked(range(repeats), "finding"):
        # Keys of one tenant, because a call is for one; other keys each time.
        chains = random.choice(objects // _CHAIN // _TENANTS or 1, max(count // _CHAIN, 1)) * _TENANTS
        numbers = (chains[:, None] * _CHAIN + np.arange(_CHAIN)).ravel().astype(np.uint64)
        numbers = random.permutation(numbers[numbers < objects])
        wanted = np.ascontiguousarray(_keys(numbers))
        others = np.ascontiguousarray(_keys(numbers + np.uint64(1 << 40)))
        single = [bytes(key) for key in wanted]
        runs: dict[str, Callable[[], object]] = {
            "find in C": functools.partial(table.find_many, 0, wanted),
            "find in C, absent": functools.partial(table.find_many, 0, others),
            "find from Python": lambda: [table.find(0, key) for key in single],  # noqa: B023
            "find and read from Python": lambda: [table.get(0, key) for key in single],  # noqa: B023
        }
        for operation, run in runs.items():
            times[operation].append(_timed(run) / len(numbers) * 1e6)
        if not table.find_many(0, wanted).all() or table.find_many(0, others).any():
            raise ShadowServeError("the index did not find what is in it, or found what is not; please report this")
    for operation, own in times.items():
        report.row(operation=operation, objects=objects, us_each=float(np.median(own)))
    report.ratio("find_us_in_c", times["find in C"], "at most 1")
    report.ratio("find_us_from_python", times["find and read from Python"], "at most 5, with reading the entry")


def _recover(report: Report, objects: int, repeats: int) -> None:
    """Replay, order and reserve in C alone, in a random order, which is the worst one of a snapshot."""
    blocks = objects * native.blocks_of(_LENGTH)
    # A million objects of this length need 0.5 TB.
    records = _records(0, objects)
    np.random.default_rng(2).shuffle(records)
    times = []
    for _ in tracked(range(repeats), "recovering"):
        table = native.Index(objects)
        extents = native.Extents(blocks)

        def recover(table: native.Index = table, extents: native.Extents = extents) -> None:
            table.replay(0, blocks, records)
            table.replayed()
            if table.reserve(0, extents):
                raise ShadowServeError("objects overlap that do not; please report this")

        times.append(_timed(recover))
        table.close()
        extents.close()
    us_each = float(np.median(times)) / objects * 1e6
    report.row(operation="replay, order, reserve in C", objects=objects, us_each=us_each)
    report.ratio("recovery_s_per_million", [each / objects * 1e6 for each in times], "at most 2")


def _step(report: Report, repeats: int) -> None:
    """Measure ordering waiting requests and planning their prefetches, as in each step of an engine."""
    keys = [bytes(key) for key in _keys(np.arange(_WAITING**2, dtype=np.uint64))]
    table = native.Index(len(keys))
    for key in keys:
        table.insert(0, key, device=0, length=_LENGTH, now_s=_NOW_S)
    next_use, prefetch = NextUse(table), PrefetchPolicy()
    chains = [keys[first : first + _WAITING] for first in range(0, len(keys), _WAITING)]
    waiting = [Waiting(request, 0.01 * (request + 1), (1e9, 1e9)) for request in range(_WAITING)]
    hops, order = (Hop(64e9, 1e-6), Hop(7e9, 1e-5)), [each.request for each in waiting]

    def publish() -> None:
        for request, chain in enumerate(chains):
            next_use.publish(request, 0, chain, _NOW_S + 60)

    def step() -> None:
        for _ in range(_STEPS):
            next_use.order(order[::-1])
            prefetch.plan(waiting, hops, (0, 0))

    published = [_timed(publish) / _WAITING * 1e6 for _ in tracked(range(repeats), "publishing")]
    steps = [_timed(step) / _STEPS * 1e6 for _ in tracked(range(repeats), "ordering")]
    report.row(operation="publish a request of 256", objects=len(keys), us_each=float(np.median(published)))
    report.row(operation="a step of 256 requests", objects=len(keys), us_each=float(np.median(steps)))
    report.ratio("step_us", steps, "at most 100")
    table.close()
