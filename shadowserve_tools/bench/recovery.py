"""Measures how long a storage node takes to recover the contents of its devices at start.

Method: volumes of a quarter, half and all of a million objects are opened as at a server's start: the snapshot is
read past the page cache and replayed, then a log with a tenth as many changes, then extents and eviction queues are
restored. Once with records, and once with values of other keys ("named"), whose texts of 32 bytes the volume has.
Objects' bytes take no part: they are verified when they are read.

Prediction: 145 MB of metadata take 0.1 s to read and 0.1 s to check; inserting takes 0.5 s, order and extents as much
again: 1 s for a million records, 1.5 s for named keys.
"""

import itertools
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from shadowserve.errors import ShadowServeError
from shadowserve.native import INDEX_RECORD_DTYPE, BlockDevice, Index, IndexFlag, IndexRecordKind
from shadowserve.pool.volume.format import RecordKind, pack_record
from shadowserve.pool.volume.volume import Volume
from shadowserve_tools.bench.parts.options import benchmark, folder_option, whole
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, tracked

_OBJECT_BYTES: Final = 4096
_LOGGED_SHARE: Final = 0.1
_POOL: Final = bytes(16)
_NAMED: Final = "named"
_KINDS: Final = {"records": "seconds_per_million_objects", _NAMED: "seconds_per_million_named_objects"}


@benchmark("keys", "objects", "log_records", "metadata_MB", "seconds", "us_per_object", bars=["seconds"])
@whole("--objects", 1_000_000, "Objects of the largest volume.")
@whole("--pairs", 3, "Restarts of each volume.")
@folder_option("Folder of the volume's file.", "--directory")
def recovery(report: Report, programs: Programs, objects: int, pairs: int, directory: Path | None) -> None:
    """Open volumes as at a server's start: read the snapshot, replay the log, be ready."""
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
    records["kind"], records["flags"] = IndexRecordKind.PUT, IndexFlag.NAMED if named else IndexFlag.RECORD
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
