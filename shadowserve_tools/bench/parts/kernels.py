"""Kernels of the C core alone, on one core, without Python's share of the time.

Every argument is prepared beforehand, so that a run is nothing but calls; what the calls themselves cost is measured
with the same calls that are given nothing to do, and taken off. Time is the thread's own CPU time. Runs go over data
that no cache holds, as a fetch does: streams come from memory, elements go to memory.
"""

import copy
import functools
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.native._library import check, ffi, lib
from shadowserve_tools.report import repeat

TOGETHER_MAX: Final = 3
"""Streams that codecs/literal_inflate.c decodes together (SS_LITERAL_INFLATE_LANES)."""
TAKEN: Final = 4
"""Slices that a thread of the pipeline takes at a time (SS_POP_MAX); while it decodes one, it asks for the next."""
PASS_S: Final = 0.02
"""Shortest time that is measured at once: a thousand times the clock's grain."""


@dataclass(frozen=True)
class Run:
    """A measured operation.

    Attributes:
        size: Bytes of one call of ``work``, for the speed.
        idle: Makes the same calls without data; its cost is subtracted.
        isa: Instruction set of the kernels; None for the active one.
        keeps: Owner of the memory that the calls point to.
    """

    size: int
    work: Callable[[], None]
    idle: Callable[[], None]
    isa: native.Isa | None = None
    keeps: object = None


def together(codec: native.Codec) -> int:
    """Return the number of slices of a codec that the software backend decodes together on one core."""
    return TOGETHER_MAX if codec is native.Codec.DEFLATE else 1


def nothing() -> None:
    """The idle half of a run whose calls are few and long."""


def speeds_in_turns(runs: Sequence[Run], repeats: int, description: str = "measuring") -> list[list[float]]:
    """Measure all runs in turns, ``repeats`` times after a warm-up; return the GB/s of each, one list for each run.

    Short runs are repeated within their turn, so that clock and scheduler do not matter.
    """
    return repeat(repeats, *(functools.partial(_speed, run) for run in runs), description=description)


def _speed(run: Run) -> float:
    active = native.isa_active()
    native.isa_force(run.isa if run.isa is not None else active)
    try:
        elapsed, count = 0.0, 0
        while elapsed < PASS_S:
            elapsed += _cpu_s(run.work)
            count += 1
        idle = min(_cpu_s(run.idle) for _ in range(3)) if run.idle is not nothing else 0.0
    finally:
        native.isa_force(active)
    return run.size * count / max(elapsed - idle * count, 1e-9) / 1e9


def _cpu_s(work: Callable[[], None]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def memory(size: int) -> npt.NDArray[np.uint8]:
    """Return ``size`` bytes of memory of their own that begin with a page, in huge pages where the system has some.

    As the pipeline's buffers are. Where the allocator puts an array decides otherwise whether a copy runs at full speed
    or at a quarter of it.
    """
    # Private memory: shared memory has huge pages only if the system is configured so.
    region = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(region, np.uint8)[:size]
    array.fill(0xA5)  # touches every page
    return array


def memcpy(size: int, piece: int) -> Run:
    """Return a copy of ``size`` bytes, ``piece`` bytes at a time; speed counts the bytes copied, once."""
    source, target = memory(size), memory(size)
    copies = [
        (ffi.from_buffer("uint8_t[]", target[at : at + piece]), ffi.from_buffer("uint8_t[]", source[at : at + piece]))
        for at in range(0, size - piece + 1, piece)
    ]
    move: Any = ffi.memmove

    def run(count: int) -> None:
        for to, origin in copies:
            move(to, origin, count)

    return Run(len(copies) * piece, lambda: run(piece), lambda: run(0))


class Treated:
    """Slices of KV after quantization, repeated until they fill more memory than the caches.

    Args:
        elements: Bit patterns (slices, vectors, vector length).
        bins: Bins of ``BINNED``; 0 for ``LOSSLESS``.
        places: Channels of each slice, for ``WEIGHTED``, in which no vector is exact.
        output_bytes: Bytes of elements in one run; at least one slice.

    Attributes:
        distinct: Distinct slices; the others repeat them in memory of their own.
        symbols: Bytes of all slices, concatenated.
        scales: Scales (slices, vectors), or positions in bytes; empty if lossless.
        symbol_bytes: Symbol bytes of one slice.
        raw_bytes: Element bytes of one slice.
    """

    def __init__(
        self,
        elements: npt.NDArray[Any],
        bins: int,
        output_bytes: int,
        dtype: DType = DType.BFLOAT16,
        places: Sequence[native.Place] = (),
    ) -> None:
        self.quantizer = Quantizer.WEIGHTED if places else Quantizer.BINNED if bins else Quantizer.LOSSLESS
        self.places = places
        self.dtype = dtype
        self.distinct, self.vectors, self.vector_length = elements.shape
        self.raw_bytes = elements[0].nbytes
        self.count = max(1, output_bytes // self.raw_bytes)
        treated = [
            native.quantize(
                self.quantizer,
                dtype,
                slice_.tobytes(),
                vectors=self.vectors,
                vector_length=self.vector_length,
                bins=bins,
                place=self.place(index),
            )
            for index, slice_ in enumerate(elements)
        ]
        self.symbol_bytes = treated[0][0].nbytes
        self.symbols = memory(self.count * self.symbol_bytes)
        np.concatenate([treated[index % self.distinct][0] for index in range(self.count)], out=self.symbols)
        self.scales = np.stack([treated[index % self.distinct][1] for index in range(self.count)])
        self.sources = [symbols.tobytes() for symbols, _ in treated]
        self.decoded = memory(len(self.symbols))
        self.target = memory(self.count * self.raw_bytes)
        self.scratch = memory(max(TAKEN, TOGETHER_MAX) * self.symbol_bytes)

    def place(self, index: int) -> native.Place | None:
        """Return the channels of a slice."""
        return self.places[index % self.distinct] if self.places else None

    @property
    def elements_each(self) -> int:
        return int(self.vectors * self.vector_length)

    @property
    def scale_bits(self) -> float:
        return float(8 * self.scales[0].nbytes / self.elements_each)

    def verify(self, what: str) -> None:
        """Raise ShadowServeError unless the target has the reference's result."""
        for index in range(min(self.count, self.distinct)):
            wanted = native.dequantize(
                self.quantizer,
                self.dtype,
                self.sources[index],
                self.scales[index].tobytes(),
                vectors=self.vectors,
                vector_length=self.vector_length,
                place=self.place(index),
            )
            if not np.array_equal(self.target[index * self.raw_bytes : (index + 1) * self.raw_bytes], wanted):
                raise ShadowServeError(f"{what} did not give back slice {index}; please report this")
        self.target.fill(0xA5)


class Slices:
    """Streams of one codec, with prepared calls for all operations on them.

    Args:
        compress: Encoder of the streams; None for the C core's.
    """

    def __init__(self, treated: Treated, codec: native.Codec, compress: Callable[[bytes], bytes] | None = None) -> None:
        self.treated = treated
        self.codec = codec
        streams = [(compress or self._compress)(symbols) for symbols in treated.sources]
        self.stream_bytes = [len(stream) for stream in streams]
        """Of each distinct slice."""
        self.streams = []
        dealt = [streams[index % treated.distinct] for index in range(treated.count)]
        received, position = memory(sum(map(len, dealt))), 0
        for stream in dealt:
            place = received[position : position + len(stream)]
            place[:] = np.frombuffer(stream, np.uint8)
            self.streams.append(place)
            position += len(stream)
        self._kept: list[Any] = []

    @property
    def bits(self) -> float:
        """Bits of streams for each element; scales are not in it."""
        return 8 * sum(self.stream_bytes) / self.treated.elements_each / len(self.stream_bytes)

    def _compress(self, symbols: bytes) -> bytes:
        return native.compress(self.codec, symbols, self.treated.vector_length)

    def _pointer(self, array: npt.NDArray[Any]) -> Any:
        pointer = ffi.from_buffer("uint8_t[]", array.view(np.uint8).reshape(-1))
        self._kept.append(pointer)
        return pointer

    def _jobs(self, targets: Sequence[Any]) -> Any:
        jobs = ffi.new("struct ss_stream[]", len(targets))
        for job, stream, target in zip(jobs, self.streams, targets, strict=True):
            job.source, job.source_size = self._pointer(stream), len(stream)
            job.target, job.target_size = target, self.treated.symbol_bytes
        self._kept.append(jobs)
        return jobs

    def _elements(self) -> Any:
        """Return the dequantization of each slice and its target."""
        treated = self.treated
        target, scales = self._pointer(treated.target), self._pointer(treated.scales)
        elements = ffi.new("struct ss_elements[]", treated.count)
        for index, wanted in enumerate(elements):
            wanted.scales = scales + index * treated.scales[0].nbytes
            wanted.target = target + index * treated.raw_bytes
            wanted.vectors, wanted.vector_length, wanted.scale_vectors = treated.vectors, treated.vector_length, 1
            wanted.quantizer, wanted.dtype = int(treated.quantizer), int(treated.dtype)
            if place := treated.place(index):
                wanted.channels, wanted.row = place.channels.struct, place.row
                wanted.scales_length = treated.scales[0].nbytes
        self._kept.append(elements)
        return elements

    def _group_spans(self, step: int) -> list[tuple[int, int]]:
        """Return first slice and number of the slices that are decoded by one call, ``step`` at most."""
        count = self.treated.count
        return [(first, min(step, count - first)) for first in range(0, count, step)]

    def _verified(self, size: int, run: Callable[[int], None], jobs: Any, verify: Callable[[str], None]) -> Run:
        """Run all calls once and check their results; return calls with a share of 1 and, idle, of 0."""
        run(1)
        for job in jobs:
            check(job.result, f"decoding a slice with {self.codec.name}")
        verify(self.codec.name)
        return Run(size, lambda: run(1), lambda: run(0), keeps=self)

    def decompress(self, cached: bool = False) -> Run:
        """Return decoding alone, some slices together as in the pipeline; the speed counts symbol bytes.

        Args:
            cached: The symbols go to memory that a cache holds, as before dequantization.
        """
        treated = self.treated
        base, places = self._pointer(treated.scratch if cached else treated.decoded), TAKEN if cached else treated.count
        jobs = self._jobs([base + index % places * treated.symbol_bytes for index in range(treated.count)])
        groups = [(jobs + first, count) for first, count in self._group_spans(together(self.codec))]
        many, codec = lib.ss_decompress_many, int(self.codec)

        def run(share: int) -> None:
            for group, count in groups:
                many(codec, group, count * share)

        def verify(what: str) -> None:
            if not cached and not np.array_equal(treated.decoded, treated.symbols):
                raise ShadowServeError(f"{what} did not decode what was encoded; please report this")

        treated.decoded.fill(0xA5)
        return self._verified(len(treated.symbols), run, jobs, verify)

    def first_planes(self) -> Run:
        """Return decoding of the first byte planes of lossless slices, into a cache; speed counts bytes of elements."""
        planes = copy.copy(self.treated)
        planes.symbol_bytes = self.treated.elements_each
        planes.sources = [symbols[: planes.symbol_bytes] for symbols in self.treated.sources]
        run = Slices(planes, self.codec).decompress(cached=True)
        return replace(run, size=len(self.treated.target))

    def dequantize(self) -> Run:
        """Return dequantization alone, from symbols in memory; speed counts bytes of elements."""
        treated = self.treated
        symbols, target, scales = map(self._pointer, (treated.symbols, treated.target, treated.scales))
        step = treated.scales[0].nbytes
        calls = [
            (symbols + index * treated.symbol_bytes, scales + index * step, target + index * treated.raw_bytes)
            for index in range(treated.count)
        ]
        dequantize, length, vectors = lib.ss_dequantize, treated.vector_length, treated.vectors
        unweigh = lib.ss_dequantize_weighted
        quantizer, dtype = int(treated.quantizer), int(treated.dtype)
        places = [(place.channels.struct, place.row) for place in treated.places]

        def run(share: int) -> None:
            for index, (symbol, scale, to) in enumerate(calls):
                if places:
                    channels, row = places[index % len(places)]
                    unweigh(dtype, channels, row, symbol, scale, step, vectors * share, to)
                else:
                    dequantize(quantizer, dtype, symbol, scale, vectors * share, length, to)

        return self._verified(len(treated.target), run, (), treated.verify)

    def decode(self) -> Run:
        """Return decoding to elements as a fused pipeline does it; speed counts bytes of elements."""
        treated = self.treated
        base = self._pointer(treated.scratch)
        step = TAKEN if self.codec is native.Codec.KVRANS else together(self.codec)
        places = [base + index % step * treated.symbol_bytes for index in range(treated.count)]
        jobs, elements = self._jobs(places), self._elements()
        groups = [(jobs + at, elements + at, count) for at, count in self._group_spans(step)]
        many, codec = lib.ss_decode_many, int(self.codec)

        def run(share: int) -> None:
            for group, wanted, count in groups:
                many(codec, group, wanted, count * share)

        return self._verified(len(treated.target), run, jobs, treated.verify)

    def encode(self) -> Run:
        """Return encoding of one slice after the other; speed counts bytes of symbols."""
        size = self.treated.symbol_bytes
        bound = native.compress_bound(self.codec, size)
        target, written = self._pointer(memory(bound)), ffi.new("size_t *")
        base = self._pointer(self.treated.symbols)
        sources = [base + index * size for index in range(min(self.treated.distinct, self.treated.count))]
        compress, codec, row = lib.ss_compress, int(self.codec), self.treated.vector_length

        def run() -> None:
            for source in sources:
                compress(codec, source, size, row, target, bound, written)

        return Run(len(sources) * size, run, nothing, keeps=self)

    def weigh_and_encode(self, elements: npt.NDArray[Any]) -> Run:
        """Return both steps of a store of ``WEIGHTED``, one slice after the other; speed counts bytes of elements."""
        treated, size = self.treated, self.treated.symbol_bytes
        bound = native.compress_bound(self.codec, size)
        target, symbols, written = self._pointer(memory(bound)), self._pointer(memory(size)), ffi.new("size_t *")
        dtype, vectors = int(treated.dtype), treated.vectors
        exact = self._pointer(memory(lib.ss_weighted_exact_max(dtype, vectors, treated.vector_length)))
        sources = [(place, self._pointer(slice_)) for place, slice_ in zip(treated.places, elements, strict=True)]
        weigh, compress, codec, row = lib.ss_quantize_weighted, lib.ss_compress, int(self.codec), treated.vector_length

        def run() -> None:
            for (channels, number, position), source in sources:
                weigh(dtype, channels.struct, number, position, source, vectors, symbols, exact, written)
                compress(codec, symbols, size, row, target, bound, written)

        return Run(len(sources) * treated.raw_bytes, run, nothing, keeps=self)
