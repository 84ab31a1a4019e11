"""Measures how long a storage node takes to recover the contents of its devices at start.

Method: volumes of a quarter, half and all of a million objects are opened as at a server's start: the snapshot is
read past the page cache and replayed, then a log with a tenth as many changes, then extents and eviction queues are
restored. Once with records, and once with values of other keys ("named"), whose texts of 32 bytes the volume has.
Objects' bytes take no part: they are verified when they are read. Then a node learns as many records of a bucket from
its index objects, which are in memory here, after the list: with a segment in each object, and with one record. The
first row is what such records, one in each object, add to the process's resident size.

Prediction: 145 MB of metadata take 0.1 s to read and 0.1 s to check; inserting takes 0.5 s, order and extents as much
again: 1 s for a million records, 1.5 s for named keys. A bucket: 1.3 s for a million records in 250,000 objects, 3.5 s
in as many objects, which then take 94 bytes each.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, cast

import numpy as np

from shadowserve.errors import ShadowServeError
from shadowserve.keys import KEY_BYTES, SEGMENT_BYTES, SEGMENT_CHUNKS
from shadowserve.native import INDEX_RECORD_DTYPE, BlockDevice, Index, RecordFlag, RecordKind
from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.bucket import Bucket, Listed
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.index_objects import index_name, pack
from shadowserve.pool.cold.indexing import Indexer
from shadowserve.pool.cold.layout import Place, finish, parse_name
from shadowserve.pool.cold.part import Breakers, Shared
from shadowserve.pool.cold.shares import Shares
from shadowserve.pool.volume.format import pack_record
from shadowserve.pool.volume.volume import Volume
from shadowserve_tools.bench.parts.options import benchmark, folder_option, whole
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, resident_bytes, tracked

_OBJECT_BYTES: Final = 4096
_LOGGED_SHARE: Final = 0.1
_POOL: Final = bytes(16)
_NAMED: Final = "named"
_KINDS: Final = {"records": "seconds_per_million_objects", _NAMED: "seconds_per_million_named_objects"}
_BUCKETS: Final = {SEGMENT_CHUNKS: "cold_start_s_per_million", 1: "cold_start_s_per_million_alone"}
"""Records of each object, and the name of the ratio."""


@benchmark("keys", "objects", "log_records", "metadata_MB", "seconds", "us_per_object", bars=["seconds"])
@whole("--objects", 1_000_000, "Objects of the largest volume.")
@whole("--pairs", 3, "Restarts of each volume.")
@folder_option("Folder of the volume's file.", "--directory")
def recovery(report: Report, programs: Programs, objects: int, pairs: int, directory: Path | None) -> None:
    """Open volumes as at a server's start: read the snapshot, replay the log, be ready."""
    report.ratio("resident_bytes_per_cold_record", [_resident_each(objects)], "at most 100")
    for kind, ratio in _KINDS.items():
        for count in sorted({max(objects // 4, 1), max(objects // 2, 1), objects}):
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                path = Path(folder, "volume")
                _build(path, count, named=kind == _NAMED)
                taken = [_recovered(path, count) for _ in tracked(range(pairs), f"recovering {count:,} {kind}")]
            middle = statistics.median(each.seconds for each in taken)
            report.row(
                keys=kind,
                objects=count,
                log_records=taken[0].log_records,
                metadata_MB=(taken[0].snapshot_records + taken[0].log_records) * 132 / 1e6,
                seconds=middle,
                us_per_object=middle / count * 1e6,
            )
        report.ratio(ratio, [each.seconds / objects * 1e6 for each in taken], "at most 2")
    for of_object, ratio in _BUCKETS.items():
        parts = list(_parts(objects, of_object))
        seconds = [_learnt(objects, parts) for _ in tracked(range(pairs), f"learning objects of {of_object}")]
        middle = statistics.median(seconds)
        keys = f"of a bucket, {of_object} in an object"
        report.row(keys=keys, objects=objects, seconds=middle, us_per_object=middle / objects * 1e6)
        report.ratio(ratio, [each / objects * 1e6 for each in seconds], "at most 5")


class _Part(NamedTuple):
    """A partition of a bucket: the list of its objects, and its index object, which is ``listed``, too."""

    objects: list[Listed]
    listed: Listed
    body: bytes


def _parts(records: int, of_object: int) -> Iterator[_Part]:
    """Yield the partitions of a bucket with ``of_object`` records in each object."""
    chance = np.random.default_rng(2)
    for partition in range(PARTITIONS):
        first, last = (records * each // PARTITIONS for each in (partition, partition + 1))
        found = []
        for at in range(first, last, of_object):
            count = min(of_object, last - at)
            end = partition.to_bytes(2, "big") + chance.bytes(SEGMENT_BYTES - 2)
            keys = [chance.bytes(KEY_BYTES - SEGMENT_BYTES) + end for _ in range(count)]
            places = [(key, Place(number * _OBJECT_BYTES, _OBJECT_BYTES, 512)) for number, key in enumerate(keys)]
            found.append(finish(bytearray(count * _OBJECT_BYTES), "tenant", places))
        body = pack((0, each.footer) for each in found)
        objects = [Listed(each.name, each.size, 1.0) for each in found]
        yield _Part(objects, Listed(index_name(partition, body), len(body), 1.0), body)


class _Node:
    """A node that starts, and its bucket: index objects in memory."""

    def __init__(self, records: int) -> None:
        self.catalog = Catalog(Shares(records))
        self.bodies: dict[str, bytes] = {}
        config = S3Config.model_validate({"bucket": "bench"})
        breakers = Breakers(time.monotonic)
        self._indexer = Indexer(Shared(config, cast(Bucket, self), self.catalog, breakers, time.monotonic))

    def read(self, name: str, _begin: int, _end: int) -> bytes:
        return self.bodies[name]

    def wanted(self, part: _Part) -> dict[str, Listed]:
        """Return the objects of a partition that the node has to learn."""
        self.bodies[part.listed.name] = part.body
        parsed = ((each, parse_name(each.name)) for each in part.objects)
        return {each.name: each for each, name in parsed if name is not None and self.catalog.wants(each, name)}

    def learn(self, partition: int, part: _Part, wanted: dict[str, Listed]) -> None:
        self._indexer.learn(partition, [part.listed], wanted, inf)

    def check(self, records: int) -> None:
        if self.catalog.chunks != records:
            raise ShadowServeError(f"{self.catalog.chunks} of {records} records were learnt; please report this")


def _resident_each(records: int) -> float:
    """Return the growth of this process for each record if each is alone in its object."""
    before, node = resident_bytes(), _Node(records)
    for partition, part in enumerate(_parts(records, 1)):
        node.catalog.begin_list([partition])
        node.learn(partition, part, node.wanted(part))
        node.catalog.forget_wanted([partition])
        node.bodies.clear()
    del part
    node.check(records)
    return (resident_bytes() - before) / records


def _learnt(records: int, parts: list[_Part]) -> float:
    """Return the seconds in which a node learns all records after the list."""
    node = _Node(records)
    node.catalog.begin_list(range(PARTITIONS))
    wanted = [*map(node.wanted, parts)]
    begin = time.perf_counter()
    for partition, part in enumerate(parts):
        node.learn(partition, part, wanted[partition])
    seconds = time.perf_counter() - begin
    node.check(records)
    return seconds


class _Recovered(NamedTuple):
    seconds: float
    snapshot_records: int
    log_records: int


def _opened(device: BlockDevice, index: Index) -> Volume:
    volume = Volume.open(device, index, 0)
    index.replayed()
    volume.ready()
    return volume


def _recovered(path: Path, objects: int) -> _Recovered:
    with closing(BlockDevice(path)) as device:
        index = Index(2 * objects + 1024)
        begin = time.perf_counter()
        volume = _opened(device, index)
        seconds = time.perf_counter() - begin
        found = volume.report
        volume.close()
        index.close()
    if found.objects != objects or found.notes:
        raise ShadowServeError(f"recovery found {found.objects} of {objects} objects: {found.notes}; this is a bug")
    return _Recovered(seconds, found.snapshot_records, found.log_records)


def _build(path: Path, objects: int, *, named: bool = False) -> None:
    """Make a volume with the metadata of ``objects`` objects, without their bytes, in a sparse file."""
    log_records = int(objects * _LOGGED_SHARE)
    with path.open("wb") as file:
        file.truncate((16 << 20) + objects * (_OBJECT_BYTES * 2 + 1024))
    with closing(BlockDevice(path)) as device:
        log_bytes = max(4 * log_records // 31 * 4096, 2 << 20)
        superblock = Volume.format(device, pool_id=_POOL, objects_max=objects, log_bytes=log_bytes)
        index = Index(2 * objects + 1024)
        volume = _opened(device, index)
        keys = _fill(index, objects, superblock.layout.data_first, named=named)
        volume.snapshot()
        _settle(volume)
        for number in range(log_records):
            volume.log(pack_record(RecordKind.EXPIRE, 0, keys[32 * number : 32 * number + 32], expires_at_ms=1 << 62))
        _settle(volume)
        volume.close()
        index.close()


def _settle(volume: Volume) -> None:
    for step in itertools.count():
        for call in volume.step():
            call()
        if step and volume.idle:
            return


def _fill(index: Index, objects: int, first: int, *, named: bool) -> bytes:
    """Add objects to an index, on extents from ``first`` on; return their keys."""
    keys = np.random.default_rng(0).bytes(32 * objects)
    records = np.zeros(objects, INDEX_RECORD_DTYPE)
    records["kind"], records["flags"] = RecordKind.PUT, RecordFlag.NAMED if named else RecordFlag.RECORD
    records["extent"] = first + np.arange(objects)
    records["length"] = _OBJECT_BYTES - 2048
    records["generation"] = np.arange(objects)
    records["accessed_s"] = np.random.default_rng(1).permutation(objects)
    records["key"] = np.frombuffer(keys, np.uint8).reshape(objects, 32)
    index.replay(0, first + objects, records)
    if named:
        for slot in range(1, objects + 1):
            index.set_name(slot, b"%032d" % slot)
    index.replayed()
    return keys
