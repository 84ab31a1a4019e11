"""Batches through a pipeline in this process, and the same work stage by stage."""

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import psutil

from dpu_dataplane.batches import Buffers, plan_fetch
from dpu_dataplane.config import CORE_ANY
from dpu_dataplane.plan import FetchPart, FetchPlan
from dpu_dataplane.sources.found import Found, Stored
from shadowserve import native
from shadowserve.chunk import ChunkLayout, Quantizer
from shadowserve.cores import usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve.native._library import check, ffi, lib
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.kernels import memory, together
from shadowserve_tools.bench.parts.lean import receive
from shadowserve_tools.bench.parts.workload import Workload
from shadowserve_tools.report import Cost, measure

DEADLINE_NS: Final = 60_000_000_000
ROOM_BYTES: Final = 4096
"""Space for each chunk in addition to its bytes: more than the alignment."""


def _stored_bytes(workload: Workload, chunks: int) -> int:
    """Return the buffer bytes for the bodies of ``chunks`` chunks; the workload repeats."""
    distinct = len(workload.records)
    return sum(len(workload.records[index % distinct]) + ROOM_BYTES for index in range(chunks))


def _decoded_bytes(layout: ChunkLayout, raw_bytes: int) -> int:
    """Return the bytes between codec and quantizer: one symbol for each element, or the element's bytes."""
    return raw_bytes // (layout.dtype.itemsize if layout.quantizer is Quantizer.BINNED else 1)


def _plan(workload: Workload, chunks: int, buffers: Buffers) -> FetchPlan:
    """Plan a batch of ``chunks`` chunks.

    The workload repeats, and each chunk goes to the place of its first occurrence.
    """
    order = [index % len(workload.keys) for index in range(chunks)]
    found: dict[int, Found] = {
        position: Stored(len(workload.records[index]), workload.records[index]) for position, index in enumerate(order)
    }
    keys = [workload.keys[index] for index in order]
    part = FetchPart(None, workload.layout, 0, chunks * workload.layout.raw_bytes, keys, b"")  # type: ignore[arg-type]
    part.start(chunks, workload.layout.layers)
    part.found = found
    plan = plan_fetch([part], False, buffers, set(native.Codec))
    if len(plan.pieces) != chunks:
        raise ShadowServeError(f"{len(plan.pieces)} of {chunks} chunks fit the buffers; please report this")
    plan.slices["memory_offset"] %= workload.raw_bytes
    return plan


class Batches:
    """A pipeline, and batches of up to ``chunks_max`` chunks.

    Threads are placed as in a data plane of up to four cores.

    Args:
        workload: Stored chunks. Longer batches fetch them again, to the same places.
        connections: Connections to the storage node, one for each network thread.
        cores: Threads of each stage.
    """

    def __init__(
        self, workload: Workload, connections: list[socket.socket], *, chunks_max: int, cores: int, fused: bool
    ) -> None:
        self._workload = workload
        self._sockets = connections
        layout = workload.layout
        raw = chunks_max * layout.raw_bytes
        decoded = _decoded_bytes(layout, raw) + chunks_max * ROOM_BYTES
        room = _stored_bytes(workload, chunks_max)
        anywhere = [CORE_ANY] * cores
        usable = usable_cores()
        self._pipeline = native.Pipeline(
            fused=fused,
            decompression_bytes=room,
            dequantization_bytes=0 if fused else decoded,
            dma_source_bytes=0 if fused else raw,
            store_bytes=1 << 20,
            net_cores=[usable[index % len(usable)] for index in range(len(connections))],
            decompress_cores=anywhere,
            dequantize_cores=anywhere,
            dma_cores=[CORE_ANY],
        )
        buffers = Buffers(
            decompression=room, dequantization=None if fused else decoded, dma_source=None if fused else raw, store=0
        )
        self._plan = _plan(workload, chunks_max, buffers)
        self._target = memory(
            workload.raw_bytes
        )  # page-aligned, like an engine's: otherwise kvrans decodes in two steps

    def close(self) -> None:
        self._pipeline.close()

    def statistics(self) -> dict[native.Stage, native.StageStatistics]:
        return self._pipeline.statistics()

    def verified(self, chunks: int, parties: list[psutil.Process]) -> Cost:
        """Run one batch and compare its bytes outside of the measurement."""
        distinct = min(chunks, len(self._workload.keys))
        size = self._workload.layout.raw_bytes
        self._target[: distinct * size].fill(0xA5)
        last = self._plan.pieces[chunks - 1]
        table = self._plan.pieces[:chunks].copy()
        slices = self._plan.slices[: int(last["slice_first"]) + int(last["slice_count"])]
        cost = measure(lambda: self._run_batch(table, slices), parties)
        self._workload.check(self._target, distinct)
        return cost

    def _run_batch(self, pieces: "np.typing.NDArray[np.void]", slices: "np.typing.NDArray[np.void]") -> None:
        for connection in self._sockets:
            connection.setblocking(False)
        layout = self._workload.layout
        batch = native.Batch(
            pieces=pieces,
            slices=slices,
            groups=[native.Group.of(layout, self._target)],
            deadline_ns=time.monotonic_ns() + DEADLINE_NS,
        )
        result = self._pipeline.fetch(batch, [connection.fileno() for connection in self._sockets])
        if result is not native.Result.OK:
            raise ShadowServeError(f"the batch ended with {result.name}")


class StagesAlone:
    """The stages one at a time, each on the data of one batch, with prepared calls and without checks."""

    def __init__(self, workload: Workload, connections: list[socket.socket], chunks_max: int) -> None:
        self._workload = workload
        self._sockets = connections
        room = _stored_bytes(workload, chunks_max)
        self._plan = _plan(
            workload, chunks_max, Buffers(decompression=room, dequantization=None, dma_source=None, store=0)
        )
        layout, distinct = workload.layout, len(workload.keys)
        self._received = memory(_stored_bytes(workload, distinct))
        self._symbols = memory(_decoded_bytes(layout, workload.raw_bytes))
        self._elements = memory(workload.raw_bytes)
        self._target = memory(workload.raw_bytes)
        self._kept: list[Any] = []
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the calls for the slices of the distinct chunks, in order."""
        layout, workload = self._workload.layout, self._workload
        symbols, target, elements = (self._pointer(part) for part in (self._symbols, self._target, self._elements))
        slices = list(self._slices())
        self._slices_each = len(slices) // len(workload.keys)
        self._jobs = ffi.new("struct ss_stream[]", len(slices))
        self._dequantize_calls: list[tuple[Any, ...]] = []
        self._copies: list[tuple[Any, Any, int]] = []
        position = to = 0
        for job, (record, begin, entry) in zip(self._jobs, slices, strict=True):
            middle, size = begin + int(entry["scales_length"]), int(entry["decoded_length"])
            job.source, job.source_size = record + middle, int(entry["encoded_length"])
            job.target, job.target_size = symbols + position, size
            raw = int(entry["vectors"]) * layout.vector_length * layout.dtype.itemsize
            self._dequantize_calls.append(
                (
                    int(layout.quantizer),
                    int(layout.dtype),
                    symbols + position,
                    record + begin,
                    int(entry["vectors"]),
                    layout.vector_length,
                    target + to,
                )
            )
            self._copies.append((target + to, elements + to, raw))
            position, to = position + size, to + raw
        self.decompress(len(workload.keys))
        for job in self._jobs:
            check(job.result, "decoding a slice alone")

    def _pointer(self, data: Any) -> Any:
        pointer = ffi.from_buffer("uint8_t[]", data)
        self._kept.append(pointer)
        return pointer

    def _slices(self) -> Iterator[tuple[Any, int, np.void]]:
        """Yield the record, the offset in it and the table row of each slice of the distinct chunks."""
        for chunk, record in zip(self._plan.pieces, self._workload.records, strict=False):
            pointer = self._pointer(record)
            first = int(chunk["slice_first"])
            for entry in self._plan.slices[first : first + int(chunk["slice_count"])]:
                yield pointer, int(chunk["record_offset"]) + int(entry["offset"]), entry

    def _parts(self, chunks: int) -> Iterator[int]:
        """Yield numbers of slices that add up to ``chunks`` chunks."""
        left, most = chunks * self._slices_each, len(self._jobs)
        while left:
            count = min(left, most)
            yield count
            left -= count

    def decompress(self, chunks: int) -> None:
        """Decompress the slices of ``chunks`` chunks on this thread."""
        many, codec, step = lib.ss_decompress_many, int(self._workload.codec), together(self._workload.codec)
        for slices in self._parts(chunks):
            for first in range(0, slices, step):
                many(codec, self._jobs + first, min(step, slices - first))

    def dequantize(self, chunks: int) -> None:
        """Dequantize the slices of ``chunks`` chunks on this thread."""
        dequantize = lib.ss_dequantize
        for slices in self._parts(chunks):
            for call in self._dequantize_calls[:slices]:
                dequantize(*call)

    def deliver(self, chunks: int) -> None:
        """Copy the elements of ``chunks`` chunks on this thread."""
        move: Any = ffi.memmove
        for slices in self._parts(chunks):
            for to, origin, size in self._copies[:slices]:
                move(to, origin, size)

    def net(self, chunks: int) -> None:
        """Receive the bodies of ``chunks`` chunks, with a thread and an equal share for each connection."""
        with ThreadPoolExecutor(len(self._sockets)) as pool:
            list(pool.map(self._receive, range(len(self._sockets)), itertools.repeat(chunks)))

    def _receive(self, index: int, chunks: int) -> None:
        connection, share = self._sockets[index], len(self._sockets)
        connection.setblocking(True)
        view, distinct = memoryview(self._received), len(self._workload.keys)
        for position, chunk in enumerate(self._plan.pieces[:chunks]):
            place = int(self._plan.pieces[position % distinct]["decompression_offset"])
            length = int(chunk["body_length"])
            begin, end = length * index // share, length * (index + 1) // share
            key = bytes(chunk["key"])[: int(chunk["key_length"])]
            offset, size = int(chunk["record_offset"]), end - begin
            connection.sendall(encode_command("GETRANGE", key, offset + begin, offset + end - 1))
            # The few bytes around the body are stored next to it, which does not matter here.
            receive(connection, view[place + begin :][: len(encode_bulk_header(size)) + size + 2])

    def output_bytes(self, chunks: int) -> dict[str, int]:
        raw = chunks * self._workload.layout.raw_bytes
        decoded = _decoded_bytes(self._workload.layout, raw)
        received = int(self._plan.pieces[:chunks]["body_length"].sum())
        return {"net": received, "decompress": decoded, "dequantize": raw, "deliver": raw}

    def runs(self, fused: bool) -> dict[str, Callable[[int], None]]:
        stages: dict[str, Callable[[int], None]] = {
            "net": self.net,
            "decompress": self.decompress,
            "dequantize": self.dequantize,
        }
        if not fused:
            stages["deliver"] = self.deliver
        return stages
