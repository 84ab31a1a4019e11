"""The pipeline executor, the tables of its batches, and the batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Required, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native._channels import Channels
from shadowserve.native._library import Closing, MemoryKind, Origin, Result, Stage, check, ffi, lib, numpy_dtype
from shadowserve.native._memory import Region
from shadowserve.native._tls import TlsSession

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "BACKENDS",
    "KEY_SIZE_MAX",
    "PIECE_DTYPE",
    "SLICE_DTYPE",
    "TRACE_DTYPE",
    "Backend",
    "Group",
    "Pipeline",
    "Progress",
    "Batch",
    "StageStatistics",
    "backends",
]

KEY_SIZE_MAX: Final = 96
"""Bytes of the longest key that a piece can hold (``struct ss_piece``)."""
LAYERS_MAX: Final = 4096
"""Most layers whose progress a batch can report."""
_ERROR_TEXT_SIZE: Final = 512


SLICE_DTYPE: Final = numpy_dtype("struct ss_slice")
"""``struct ss_slice`` as a numpy dtype: an array of it goes to the C core without a copy."""

PIECE_DTYPE: Final = numpy_dtype("struct ss_piece")
"""``struct ss_piece`` as a numpy dtype. ``key`` is padded with zero bytes; ``key_length`` is its length.

``origin`` is an :class:`Origin`: SERVER, or any other one for a piece whose body :meth:`Batch.supply` supplies.
:class:`Batch` fills in ``memory``, an address.
"""

TRACE_DTYPE: Final = numpy_dtype("struct ss_trace_event")
"""``struct ss_trace_event`` as a numpy dtype. Times are those of ``time.monotonic_ns()``."""


BACKENDS: Final = ("software", "doca")
"""Names of all backends, including those that this build does not have."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend of the pipeline: the CPU, or an accelerator, such as ``"DOCA 3.0.0"`` or ``"DOCA emulator 3.0.0"``.

    ``name`` is the option of :class:`Pipeline`.
    """

    name: str
    description: str
    emulated: bool

    @property
    def label(self) -> str:
        """Name for messages; it marks an emulated backend."""
        return f"{self.name} (emulated)" if self.emulated else self.name


def backends() -> dict[str, Backend]:
    """Return the backends of this build, by name."""
    found = {}
    for name in BACKENDS:
        description = lib.ss_backend_description(name.encode())
        if description != ffi.NULL:
            emulated = bool(lib.ss_backend_emulated(name.encode()))
            found[name] = Backend(name, ffi.string(description).decode(), emulated)
    return found


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Counters of one stage since the pipeline was created; ``busy_ns`` is the sum over its threads."""

    items: int
    input_bytes: int
    output_bytes: int
    busy_ns: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Elements of a group's pieces, and the memory that they are delivered to or stored from (``struct ss_group``).

    ``scale_vectors`` vectors of a slice share one scale, for ``Quantizer.BINNED``; ``channels`` are for
    ``Quantizer.WEIGHTED``. ``memory`` is a region of registered
    memory, or, except for a fetch with an accelerator, any buffer; writable for a fetch.
    """

    quantizer: Quantizer
    dtype: DType
    vector_length: int
    scale_vectors: int = 1
    channels: Channels | None = None
    memory: "ReadableBuffer | Region"

    @classmethod
    def of(cls, layout: ChunkLayout, memory: "ReadableBuffer | Region", channels: Channels | None = None) -> Self:
        """Return the group for chunks of this layout."""
        return cls(
            quantizer=layout.quantizer,
            dtype=layout.dtype,
            vector_length=layout.vector_length,
            scale_vectors=layout.scale_tokens,
            channels=channels,
            memory=memory,
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress word of a fetch: the number of leading layers in place (``struct ss_batch``).

    It counts chunks if the pieces' ``layer`` is the number of a chunk. ``word`` is 4 bytes of memory of this process,
    at a multiple of 4; waiting threads read it with ``progress_wait``. ``first`` and ``end`` are the numbers of layers
    in place before and after the batch, which has all missing pieces of the layers from ``first`` on.
    """

    word: Region
    first: int
    end: int


class Batch:
    """One batch: pieces of some groups, between their sources and the groups' memory (``struct ss_batch``).

    A batch keeps its buffers alive and exported: a memory map cannot be closed before ``release()``.

    Args:
        pieces: Array of ``PIECE_DTYPE``, in the order of the requests; the call writes each ``result`` there.
        slices: Array of ``SLICE_DTYPE``.
        groups: Groups; a piece's ``group`` is an index into them.
        deadline_ns: Deadline, as a time of ``time.monotonic_ns()``.
        progress: Progress word; each piece then belongs to one layer, its ``layer``.
        rate: Most bytes to deliver per second; 0: no limit.
    """

    def __init__(
        self,
        *,
        pieces: NDArray[np.void],
        slices: NDArray[np.void],
        groups: Sequence[Group],
        deadline_ns: int,
        progress: Progress | None = None,
        rate: int = 0,
    ) -> None:
        for name, array, wanted in (("pieces", pieces, PIECE_DTYPE), ("slices", slices, SLICE_DTYPE)):
            if array.dtype != wanted or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
                raise NativeError(
                    f"{name} must be a writable, contiguous array of native.{name[:-1].upper()}_DTYPE",
                    Result.BAD_ARGUMENT,
                )
        self.pieces = pieces
        self.slices = slices
        self.writable = True
        self._channels: list[Channels] = []  # kept alive
        self._held: list[Any] = []  # memory of bodies and groups, kept alive
        self._batch = ffi.new("struct ss_batch *")
        self._layers: Any = ffi.NULL
        self._batch.pieces = ffi.cast("struct ss_piece *", pieces.ctypes.data)
        self._batch.slices = ffi.cast("struct ss_slice *", slices.ctypes.data)
        self._batch.piece_count = len(pieces)
        self._batch.slice_count = len(slices)
        self._batch.deadline_ns = deadline_ns
        self._batch.rate = rate
        pieces["memory"] = 0  # the batch alone sets the addresses, and keeps their memory alive
        pieces["origin"][pieces["origin"] != Origin.SERVER] = Origin.AWAITED
        self._groups = ffi.new("struct ss_group[]", len(groups))
        self._batch.groups = self._groups
        self._batch.group_count = len(groups)
        for index, group in enumerate(groups):
            self._place(self._groups[index], group)
        if progress is not None:
            self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        memory, offset = progress.word.registered, progress.word.offset
        if memory.kind is not MemoryKind.LOCAL or progress.word.length < ffi.sizeof("uint32_t"):
            raise NativeError("the progress word needs 4 bytes of this process' own memory", Result.BAD_ARGUMENT)
        self._batch.progress = ffi.cast("uint32_t *", memory.address + offset)
        self._batch.layers_first = progress.first
        self._batch.layers_end = min(progress.end, progress.first + LAYERS_MAX)

    def ask_by_layers(self, requests: Mapping[int, tuple[bytes, int, int]]) -> None:
        """Request all pieces at some nodes with one command each (``struct ss_layers``), over one socket to each node.

        For a node's index, a request is KV.LAYERS in its wire format, its number of layers, and its number of keys. The
        node's pieces are one row for each layer. A row has one piece for each key, in the same order.
        """
        self._layers = ffi.new("struct ss_layers[]", len(requests))
        at_node = np.where(self.pieces["origin"] == Origin.SERVER, self.pieces["node"].astype(np.int64), -1)
        for target, (node, (request, layers, keys)) in zip(self._layers, sorted(requests.items()), strict=True):
            target.pieces = ffi.cast("uint32_t *", self._hold(np.flatnonzero(at_node == node).astype(np.uint32)))
            target.request = self._hold(request)
            target.request_size = len(request)
            target.node, target.layers, target.keys = node, layers, keys
        self._batch.layers, self._batch.layers_count = self._layers, len(requests)

    @property
    def refusals(self) -> dict[int, str]:
        """Errors of nodes for their KV.LAYERS requests; their pieces were then requested by ranges."""
        requests = () if self._layers == ffi.NULL else self._layers
        return {
            each.node: bytes(ffi.string(each.error)).decode("utf-8", "replace") for each in requests if each.refused
        }

    def _hold(self, buffer: "ReadableBuffer", *, writable: bool = False) -> Any:
        memory = ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)
        self._held.append(memory)
        return memory

    def _address(self, index: int, body: "ReadableBuffer", *, writable: bool = False) -> int:
        """Return the address of a piece's body, and keep the body alive from now on."""
        memory = self._hold(body, writable=writable)
        if len(memory) != self.pieces[index]["body_length"]:
            raise NativeError(
                f"a body of {len(memory)} bytes for piece {index}, which has {self.pieces[index]['body_length']}",
                Result.BAD_ARGUMENT,
            )
        return int(ffi.cast("uintptr_t", memory))

    def leave(self, index: int, memory: "WriteableBuffer") -> None:
        """Keep the body of a server's piece in ``memory``, too.

        It is valid if the piece is OK. Call before the batch.
        """
        self.pieces[index]["memory"] = self._address(index, memory, writable=True)

    def supply(self, index: int, body: "ReadableBuffer | None") -> None:
        """Supply the body of an awaited piece. None: the body is not available.

        Call this once for each piece, from any thread, before or during the batch, but not during or after
        ``release()``. The body must not change until the fetch returns.
        """
        address = 0 if body is None else self._address(index, body)
        lib.ss_batch_supply(self._batch, index, ffi.cast("uint8_t *", address))

    def _place(self, target: Any, group: Group) -> None:
        target.quantizer = group.quantizer
        target.dtype = group.dtype
        target.scale_vectors = group.scale_vectors
        target.vector_length = group.vector_length
        if group.channels is not None:
            self._channels.append(group.channels)
            target.channels = group.channels.struct
        if isinstance(group.memory, Region):
            registered = group.memory.registered
            target.registered = registered._registered
            target.memory = ffi.cast("uint8_t *", registered.address + group.memory.offset)
            target.memory_size = group.memory.length
        else:
            self.writable &= not memoryview(group.memory).readonly
            target.memory = memory = self._hold(group.memory)
            target.memory_size = len(memory)

    def cancel(self) -> None:
        """Make the batch end soon with ``Result.CANCELLED``; from any thread."""
        lib.ss_batch_cancel(self._batch)

    @property
    def received_bytes(self) -> int:
        return int(self._batch.received_bytes)

    @property
    def delivered_bytes(self) -> int:
        return int(self._batch.delivered_bytes)

    @property
    def sockets_in_sync(self) -> bool:
        """True if, after a fetch, no socket has half an answer; then all sockets can be used again."""
        return bool(self._batch.sockets_in_sync)

    @property
    def results(self) -> list[Result]:
        """Result of each piece, after the batch: pieces with ``Result.OK`` are in place."""
        return [Result(int(result)) for result in self.pieces["result"]]

    def release(self) -> None:
        """Release the memory of groups and bodies. The batch must have ended, and cannot run again."""
        self._batch.groups = ffi.NULL
        self._batch.group_count = 0
        self._batch.progress = ffi.NULL
        self._batch.layers, self._batch.layers_count = ffi.NULL, 0
        self.pieces["memory"] = 0
        while self._held:
            ffi.release(self._held.pop())


class PipelineOptions(TypedDict, total=False):
    """Options of a pipeline: ``struct ss_pipeline_options`` in native/include/shadowserve.h explains each.

    A list of cores has one entry for each thread of the stage.
    """

    backend: str
    device: str
    poll_interval_us: int
    fused: bool
    queue_depth: int
    requests_in_flight: int
    pin_memory: bool
    decompression_bytes: Required[int]
    dequantization_bytes: int
    dma_source_bytes: int
    store_bytes: Required[int]
    net_cores: Sequence[int]
    decompress_cores: Sequence[int]
    dequantize_cores: Sequence[int]
    dma_cores: Sequence[int]
    store_cores: Sequence[int]
    trace_events: int
    nodes_max: int
    device_timeout_ms: int


_DEFAULTS: Final[dict[str, Any]] = {
    "backend": "software",
    "device": "",
    "poll_interval_us": 10,
    "fused": True,
    "queue_depth": 64,
    "requests_in_flight": 8,
    "pin_memory": True,
    "net_cores": (-1,),
    "decompress_cores": (-1,),
    "dequantize_cores": (),
    "dma_cores": (),
    "store_cores": (-1,),
    "nodes_max": 1,
    "device_timeout_ms": 10_000,
}
"""All other options are 0 by default."""


class Pipeline(Closing):
    """The pipeline executor: pinned buffers and threads, made once (``struct ss_pipeline``)."""

    def __init__(self, **given: Unpack[PipelineOptions]) -> None:
        self._pipeline: Any = ffi.NULL
        self._given_up = False
        chosen = {**_DEFAULTS, **given}
        self.backend = backend = str(chosen["backend"])
        device = chosen["device"]
        options = ffi.new("struct ss_pipeline_options *")
        options.options_size = ffi.sizeof("struct ss_pipeline_options")
        alive = []  # memory that the struct points to, until the call returns
        for name, value in chosen.items():
            if isinstance(value, str):
                alive.append(ffi.new("char[]", value.encode()))
                value = alive[-1]
            elif name.endswith("_cores"):
                setattr(options, f"{name.removesuffix('_cores')}_threads", len(value))
                alive.append(ffi.new("int32_t[]", list(value)))
                value = alive[-1]
            setattr(options, name, value)
        pointer = ffi.new("struct ss_pipeline **")
        on = f"backend {backend!r}" + (f" on device {device!r}" if device else "")
        code = lib.ss_pipeline_create(options, pointer)
        check(code, f"creating a pipeline with {on}", device=backend != "software")
        self._pipeline = pointer[0]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and free the buffers; no call may be in progress. A second call does nothing.

        If the device was abandoned, the memory that it may still use is kept until the process ends.
        """
        pipeline, self._pipeline = self._pipeline, ffi.NULL
        if pipeline != ffi.NULL:
            self._given_up = bool(lib.ss_pipeline_given_up(pipeline))
            lib.ss_pipeline_destroy(pipeline)

    def _open(self) -> Any:
        if self._pipeline == ffi.NULL:
            raise NativeError("the pipeline is closed; create another one", Result.BAD_ARGUMENT)
        return self._pipeline

    def fetch(
        self, batch: Batch, sockets: Sequence[int] = (), *, sessions: Sequence[TlsSession | None] = (), nodes: int = 1
    ) -> Result:
        """Fetch a batch over connected, authenticated, non-blocking sockets (their file descriptors); blocks.

        Sockets are in node order, the same number for each node; none if all bodies are in this process. ``sessions``
        are their TLS sessions. Return ``Result.OK``, or the result of the first piece that failed; a failed piece
        raises no exception. Close the sockets unless ``sockets_in_sync`` of the batch is true.
        """
        if not batch.writable:
            raise NativeError("fetching into read-only memory", Result.BAD_ARGUMENT)
        if sessions and len(sessions) != len(sockets):
            raise NativeError(f"{len(sessions)} TLS sessions for {len(sockets)} sockets", Result.BAD_ARGUMENT)
        descriptors = ffi.new("int32_t[]", list(sockets))
        handles = [ffi.NULL if session is None else session.handle for session in sessions]
        table = ffi.new("struct ss_tls_session *[]", handles) if handles else ffi.NULL
        batch._batch.sessions = table
        batch._batch.node_count = nodes
        return Result(lib.ss_pipeline_fetch(self._open(), batch._batch, descriptors, len(sockets)))

    def encode(self, batch: Batch) -> Result:
        """Quantize and compress a batch's pieces from their groups' memory into the store buffer; blocks.

        Return ``Result.OK``, or the result of the first piece that failed.
        """
        return Result(lib.ss_pipeline_encode(self._open(), batch._batch))

    def put(
        self,
        batch: Batch,
        piece_index: int,
        head: "ReadableBuffer",
        socket: int,
        deadline_ns: int,
        *,
        lasts_ms: int = 0,
        session: TlsSession | None = None,
    ) -> tuple[Result, str]:
        """Send ``head`` and one encoded piece's body as a SET on a connected, non-blocking socket; blocks.

        A record with ``lasts_ms`` expires then, and an existing value stays as it is, which is a success.

        Return the result, and the server's error text for ``Result.REFUSED``. After any other failure close the socket.
        """
        if not 0 <= piece_index < len(batch.pieces):
            raise NativeError(f"the batch has {len(batch.pieces)} pieces, not {piece_index + 1}", Result.BAD_ARGUMENT)
        error = ffi.new("char[]", _ERROR_TEXT_SIZE)
        with ffi.from_buffer("uint8_t[]", head) as head_bytes:
            result = lib.ss_pipeline_put(
                self._open(),
                batch._batch.pieces + piece_index,
                head_bytes,
                len(head_bytes),
                lasts_ms,
                socket,
                ffi.NULL if session is None else session.handle,
                deadline_ns,
                error,
                _ERROR_TEXT_SIZE,
            )
        return Result(result), ffi.string(error).decode("utf-8", "replace")

    def copy_body(self, batch: Batch, piece_index: int, target: "WriteableBuffer") -> None:
        """Copy the body of a piece that ``encode()`` has made, without the interpreter's lock."""
        with ffi.from_buffer("uint8_t[]", target, require_writable=True) as memory:
            if len(memory) != batch.pieces[piece_index]["body_length"]:
                raise NativeError(f"a target of {len(memory)} bytes for a body of another length", Result.BAD_ARGUMENT)
            check(lib.ss_pipeline_copy_body(self._open(), batch._batch.pieces + piece_index, memory), "copying a body")

    def statistics(self) -> dict[Stage, StageStatistics]:
        """Return each stage's counters since creation; from any thread."""
        array = ffi.new("struct ss_stage_statistics[]", len(Stage))
        lib.ss_pipeline_statistics(self._open(), array)
        return {
            stage: StageStatistics(
                array[stage].items, array[stage].input_bytes, array[stage].output_bytes, array[stage].busy_ns
            )
            for stage in Stage
        }

    def trace_start(self) -> None:
        """Start a recording of the threads' work in fetch batches; end the previous recording."""
        check(lib.ss_pipeline_trace_start(self._open()), "recording a trace")

    def trace_stop(self) -> None:
        lib.ss_pipeline_trace_stop(self._open())

    def trace_read(self) -> tuple[NDArray[np.void], int]:
        """Return the last recording, an array of ``TRACE_DTYPE``, and the number of events that did not fit into a log.

        Do not call this during ``trace_start()``.
        """
        dropped = ffi.new("uint64_t *")
        count = lib.ss_pipeline_trace_read(self._open(), ffi.NULL, 0, dropped)
        events = np.zeros(count, TRACE_DTYPE)
        pointer = ffi.cast("struct ss_trace_event *", events.ctypes.data)
        lib.ss_pipeline_trace_read(self._open(), pointer, count, dropped)
        return events, int(dropped[0])

    @property
    def device(self) -> str:
        """Name of the device; empty for a CPU."""
        return str(ffi.string(lib.ss_pipeline_device(self._open())).decode())

    @property
    def given_up(self) -> bool:
        """True if the device did not finish its work in time, and the pipeline no longer uses it.

        The device may still read and write the memory of the failed batches until this process ends.
        """
        return self._given_up if self._pipeline == ffi.NULL else bool(lib.ss_pipeline_given_up(self._pipeline))

    @property
    def memory_kinds(self) -> frozenset[MemoryKind]:
        """Kinds of memory that can be registered (:class:`RegisteredMemory`)."""
        kinds = int(lib.ss_pipeline_memory_kinds(self._open()))
        return frozenset(kind for kind in MemoryKind if kinds >> kind & 1)

    def unlimit(self) -> None:
        """Remove the rate of the batch that is running, if any; from any thread."""
        lib.ss_pipeline_unlimit(self._open())

    @property
    def locked_bytes(self) -> int:
        """Bytes of the buffers that are locked in memory."""
        return lib.ss_pipeline_locked_bytes(self._open())
