"""Checks of what a gRPC message says, before anything is done about it. Every failure names the field."""

import itertools
from collections.abc import Callable, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.fetching import FetchPart
from dpu_dataplane.paging import PagingError
from dpu_dataplane.progress import PROGRESS_BYTES
from dpu_dataplane.registrations import Registration
from dpu_dataplane.shared_rate import RATE_MIN
from dpu_dataplane.sources.source import Chain
from shadowserve import __version__
from shadowserve.chunk import TOKENS_MAX, ChunkLayout
from shadowserve.errors import ShadowServeError
from shadowserve.keys import KEY_BYTES, RECORD_VERSION, SCHEMA_VERSION
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import PROTOCOL_VERSION
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_from_message

__all__ = ["InvalidCall", "Validator"]

_CHAINS_MAX = 4096
_JOB_ID_MAX = 128
_HOST_MAX = 64
_PROCESS_MAX = 256
_QUANTIZER_MAX = 64
_SECONDS_MAX = 1e6
_NAME_MAX = 32
_WAYS_MAX = 8
_TIERS_MAX = 4
_PARTS_MAX = 64  # the C core's limit
_LAYOUTS_MAX = 256  # of one registration: each worker needs one for each KV cache group, and for each shard layout
_QUEUE_NAME_MAX = 32
_QUEUE_LASTS_MS_MAX = 600_000
_ENGINE_MAX = 32
_STEPS_LAST_MS_MAX = 10_000
_PIECES_MAX = 1 << 22  # eight times those of a prompt of 1 Mi tokens with 128 layers


class InvalidCall(ShadowServeError):
    """A call that no correct client makes, or that the limits do not allow.

    Attributes:
        code: gRPC status.
        metadata: sent after it.
    """

    metadata: tuple[tuple[str, str], ...] = ()

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


class Validator:
    """Checks messages against the configured limits."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._keys_max = config.keys_max
        self._timeout_ms_max = int(config.timeout_max_s * 1000)

    def timeout(self, timeout_ms: int) -> float:
        """Return the call's time in seconds."""
        if not 1 <= timeout_ms <= self._timeout_ms_max:
            raise InvalidCall(f"timeout_ms is {timeout_ms}; every call has a deadline, 1 to {self._timeout_ms_max} ms")
        return timeout_ms / 1000

    def count(self, name: str, count: int) -> int:
        """Return how many of something a call asks for."""
        if count < 1:
            raise InvalidCall(f"{name} is {count}; it is at least 1")
        return count

    def job_id(self, job_id: str) -> str:
        """Return the job's id."""
        if not 1 <= len(job_id) <= _JOB_ID_MAX:
            raise InvalidCall(f"job_id has {len(job_id)} characters; it has 1 to {_JOB_ID_MAX}")
        return job_id

    def keys(self, name: str, keys: "list[bytes]", *, count_min: int = 1) -> list[bytes]:
        """Return the keys of a call."""
        if not count_min <= len(keys) <= self._keys_max:
            raise InvalidCall(f"{name} has {len(keys)} entries; it has {count_min} to {self._keys_max}")
        for index, key in enumerate(keys):
            if len(key) != KEY_BYTES:
                raise InvalidCall(f"{name}[{index}] has {len(key)} bytes; a key has {KEY_BYTES}")
        return keys

    def parts(
        self, request: pb.FetchRequest, registration_of: Callable[[int], Registration | None], *, streamed: bool = False
    ) -> list[FetchPart] | int:
        """Return what a fetch wants; or the id of a registration that there is not (any more).

        Args:
            request: of the fetch.
            registration_of: returns who has an id.
            streamed: the call says itself how far the layers are.
        """
        if request.order not in pb.Order.values():
            raise InvalidCall(f"order is {request.order}; it is one of {', '.join(pb.Order.keys())}")
        if not 1 <= len(request.parts) <= _PARTS_MAX:
            raise InvalidCall(f"parts has {len(request.parts)} entries; it has 1 to {_PARTS_MAX}")
        self.purpose(request.purpose)
        keys = [self.keys(f"parts[{index}].keys", list(part.keys)) for index, part in enumerate(request.parts)]
        if sum(map(len, keys)) > self._keys_max:
            raise InvalidCall(f"parts hold {sum(map(len, keys))} keys together; at most {self._keys_max} fit one call")
        registrations = []
        for part in request.parts:
            if (registration := registration_of(part.memory_id)) is None:
                return int(part.memory_id)
            registrations.append(registration)
        layouts = [
            self.layout_of(registration, part.layout)
            for registration, part in zip(registrations, request.parts, strict=True)
        ]
        pieces = sum(layout.layers * len(mine) for layout, mine in zip(layouts, keys, strict=True))
        if pieces > _PIECES_MAX:
            raise InvalidCall(f"parts name {pieces} layers of chunks; at most {_PIECES_MAX} fit one call")
        parts = []
        for index, (part, registration, mine) in enumerate(zip(request.parts, registrations, keys, strict=True)):
            layout = layouts[index]
            self.offset(layout, part.offset)
            if part.length < layout.raw_bytes:
                raise InvalidCall(f"parts[{index}].length is {part.length}; a chunk takes {layout.raw_bytes} bytes")
            try:
                parts.append(FetchPart(registration, layout, part.offset, part.length, mine, part.wanted))
            except ValueError as error:
                raise InvalidCall(f"parts[{index}].wanted: {error}") from error
        _check_apart(parts)
        layerwise = request.order == pb.ORDER_LAYERS
        if streamed and (not layerwise or len(parts) > 1):
            raise InvalidCall("progress is told in a stream of one part, in the order of layers")
        if streamed and request.HasField("progress"):
            raise InvalidCall("progress is told in the stream of this call, and in no word")
        if request.HasField("progress") and layerwise and len(parts) > 1:
            raise InvalidCall("progress is told of one part in the order of layers")
        if request.HasField("progress"):
            _check_progress(request, parts)
        return parts

    def pages(
        self, request: pb.FetchPagesRequest, registration: Registration
    ) -> tuple[list[bytes], npt.NDArray[np.uint32]]:
        """Return keys of chunks of pages, and which blocks they go to."""
        keys = self.keys("keys", list(request.keys))
        if registration.paging is None:
            raise InvalidCall("memory_id is of memory that was registered without pages")
        (layout,) = registration.layouts
        if layout.layers * len(keys) > _PIECES_MAX:
            raise InvalidCall(f"keys name {layout.layers * len(keys)} layers; at most {_PIECES_MAX} fit one call")
        word = request.progress
        if request.HasField("progress") and (word % PROGRESS_BYTES or word + PROGRESS_BYTES > registration.size):
            raise InvalidCall(
                f"progress is {word}; it is a multiple of {PROGRESS_BYTES} within {registration.size} bytes"
            )
        try:
            return keys, registration.paging.rows(request.blocks, len(keys), layout.tokens)
        except PagingError as error:
            raise InvalidCall(str(error)) from error

    def purpose(self, purpose: int) -> None:
        """Check what bytes are moved for."""
        if purpose not in pb.Purpose.values():
            raise InvalidCall(f"purpose is {purpose}; it is one of {', '.join(pb.Purpose.keys())}")

    def steps(self, report: pb.StepReport) -> None:
        """Check what an engine reports of its steps."""
        if not 1 <= len(report.engine) <= _ENGINE_MAX:
            raise InvalidCall(f"engine has {len(report.engine)} bytes; it has 1 to {_ENGINE_MAX}")
        if report.rate and report.rate < RATE_MIN:
            raise InvalidCall(f"rate is {report.rate}; it is 0, or at least {RATE_MIN}")
        if not 0 <= report.interference_budget <= 1:  # nor NaN
            raise InvalidCall(f"interference_budget is {report.interference_budget}; it is 0 to 1")
        if not 1 <= report.lasts_ms <= _STEPS_LAST_MS_MAX:
            raise InvalidCall(f"lasts_ms is {report.lasts_ms}; a report of steps lasts 1 to {_STEPS_LAST_MS_MAX} ms")

    def decision(self, decision: pb.Decision) -> None:
        """Check what a host says to have decided: what a recording keeps is bounded."""
        if len(decision.predicted) > _WAYS_MAX or any(len(name) > _NAME_MAX for name in decision.predicted):
            raise InvalidCall(f"predicted has up to {_WAYS_MAX} names of up to {_NAME_MAX} characters")
        if len(decision.tier_bytes) > _TIERS_MAX or any(len(name) > _NAME_MAX for name in decision.tier_bytes):
            raise InvalidCall(f"tier_bytes has up to {_TIERS_MAX} names of up to {_NAME_MAX} characters")
        if len(decision.kind) > _NAME_MAX:
            raise InvalidCall(f"kind has {len(decision.kind)} characters; it has up to {_NAME_MAX}")
        seconds = [decision.predicted_seconds, decision.seconds, *decision.predicted.values()]
        seconds += [decision.cold_seconds, decision.queued_seconds]
        if not all(0 <= each <= _SECONDS_MAX for each in seconds):  # nor NaN
            raise InvalidCall(f"a decision is predicted, or came, to take {seconds} s; 0 to {_SECONDS_MAX}")

    def parents(self, parents: "list[bytes]", keys: int) -> list[bytes]:
        """Return the chunks before those of a call: none at all, or one for each of its ``keys`` keys."""
        if len(parents) not in (0, keys):
            raise InvalidCall(f"parents has {len(parents)} entries; it has one for each of {keys} keys, or none")
        for index, parent in enumerate(parents):
            if len(parent) not in (0, KEY_BYTES):
                raise InvalidCall(f"parents[{index}] has {len(parent)} bytes; a key has {KEY_BYTES}, or is empty")
        return parents

    def chains(self, given: Sequence[pb.KeyChain]) -> list[Chain]:
        """Return namespace and keys of each chain of a call."""
        if len(given) > _CHAINS_MAX:
            raise InvalidCall(f"chains has {len(given)} entries; it has at most {_CHAINS_MAX}")
        chains: list[Chain] = []
        total = 0
        for index, chain in enumerate(given):
            if len(chain.namespace) != KEY_BYTES:
                raise InvalidCall(
                    f"chains[{index}].namespace has {len(chain.namespace)} bytes; a digest has {KEY_BYTES}"
                )
            keys = self.keys(f"chains[{index}].keys", list(chain.keys), count_min=0)
            total += len(keys)
            chains.append((chain.namespace, keys))
        if total > self._keys_max:
            raise InvalidCall(f"chains hold {total} keys together; at most {self._keys_max} fit one call")
        return chains

    def expected(self, request: pb.ExpectRequest) -> list[tuple[int, list[Chain]]]:
        """Return the requests that arrive, and the namespaces and keys of what each will fetch."""
        if not 1 <= len(request.queue) <= _QUEUE_NAME_MAX:
            raise InvalidCall(f"queue has {len(request.queue)} bytes; it has 1 to {_QUEUE_NAME_MAX}")
        if not 1 <= request.lasts_ms <= _QUEUE_LASTS_MS_MAX:
            raise InvalidCall(f"lasts_ms is {request.lasts_ms}; what is expected lasts 1 to {_QUEUE_LASTS_MS_MAX} ms")
        for name in ("arrivals", "gone", "order", "begins_in_ms"):
            if len(getattr(request, name)) > REQUESTS_MAX:
                raise InvalidCall(f"{name} has {len(getattr(request, name))} entries; it has at most {REQUESTS_MAX}")
        if len(request.begins_in_ms) not in (0, len(request.order)):
            raise InvalidCall(
                f"begins_in_ms has {len(request.begins_in_ms)} entries; it has one for each of {len(request.order)} in "
                "the order, or none"
            )
        chains = self.chains([chain for arrival in request.arrivals for chain in arrival.chains])
        ends = list(itertools.accumulate(len(arrival.chains) for arrival in request.arrivals))
        return [
            (arrival.request, chains[end - len(arrival.chains) : end])
            for arrival, end in zip(request.arrivals, ends, strict=True)
        ]

    def hello(self, request: pb.HelloRequest) -> None:
        """Refuse a host of another release, where that makes a difference."""
        for what, theirs, ours in (
            ("protocol version", request.protocol_version, PROTOCOL_VERSION),
            ("record version", request.record_version, RECORD_VERSION),
            ("key schema", request.key_schema, SCHEMA_VERSION),
        ):
            if theirs != ours:
                release = request.version[:40] or "of an unknown version"
                raise InvalidCall(
                    f"the host has {what} {theirs} (ShadowServe {release}), this data plane {what} {ours} (ShadowServe "
                    f"{__version__}); install the same release of ShadowServe on both sides",
                    grpc.StatusCode.FAILED_PRECONDITION,
                )
        if not 1 <= len(request.host) <= _HOST_MAX:
            raise InvalidCall(f"host has {len(request.host)} characters; it has 1 to {_HOST_MAX}")
        if len(request.process) > _PROCESS_MAX:
            raise InvalidCall(f"process has {len(request.process)} characters; it has at most {_PROCESS_MAX}")
        if request.HasField("engine"):
            self._engine(request.engine)

    @staticmethod
    def _engine(engine: pb.Engine) -> None:
        if len(engine.model) != KEY_BYTES or not 1 <= engine.chunk_tokens <= TOKENS_MAX:
            raise InvalidCall(f"engine: model has {KEY_BYTES} bytes, and chunk_tokens is 1 to {TOKENS_MAX}")
        if not engine.quantizer.isprintable() or not 1 <= len(engine.quantizer) <= _QUANTIZER_MAX or engine.process:
            raise InvalidCall(f"engine: quantizer has 1 to {_QUANTIZER_MAX} printable characters, and process none")

    def layout(self, layout: pb.ChunkLayout) -> ChunkLayout:
        """Return the layout of chunks that a host moves."""
        try:
            return layout_from_message(layout)
        except ValueError as error:
            raise InvalidCall(f"layout: {error}") from error

    def layouts(self, layouts: Sequence[pb.ChunkLayout]) -> list[ChunkLayout]:
        """Return the layouts of a registration."""
        if not 1 <= len(layouts) <= _LAYOUTS_MAX:
            raise InvalidCall(f"layouts has {len(layouts)} entries; it has 1 to {_LAYOUTS_MAX}")
        return [self.layout(layout) for layout in layouts]

    def layout_of(self, registration: Registration, index: int) -> ChunkLayout:
        """Return the layout of registered memory that a call names."""
        if index >= len(registration.layouts):
            raise InvalidCall(f"layout is {index}; this memory was registered with {len(registration.layouts)} layouts")
        return registration.layouts[index]

    def offset(self, layout: ChunkLayout, offset: int) -> int:
        """Return where a region of chunks of a layout begins."""
        if offset % layout.dtype.itemsize:
            raise InvalidCall(
                f"offset is {offset}; it is a multiple of {layout.dtype.itemsize}, the size of an element"
            )
        return offset


def _check_progress(request: pb.FetchRequest, parts: Sequence[FetchPart]) -> None:
    """Refuse a word of progress where there can be none."""
    word, registration = request.progress, parts[0].registration
    if not registration.shared:
        raise InvalidCall("progress is told in shared memory only")
    there = [part for part in parts if part.registration.identity == registration.identity]
    outside = all(word + PROGRESS_BYTES <= part.offset or word >= part.offset + part.length for part in there)
    if word % PROGRESS_BYTES or word + PROGRESS_BYTES > registration.size or not outside:
        raise InvalidCall(
            f"progress is {word}; it is a multiple of {PROGRESS_BYTES} with {PROGRESS_BYTES} bytes behind it in the "
            f"registration of {registration.size}, outside the part's region"
        )


def _check_apart(parts: Sequence[FetchPart]) -> None:
    """Refuse parts that go to the same bytes."""
    regions: dict[object, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        regions.setdefault(part.registration.identity, []).append((part.offset, part.length, index))
    for of_one_memory in regions.values():
        for (offset, length, index), (behind, _, other) in itertools.pairwise(sorted(of_one_memory)):
            if behind < offset + length:
                raise InvalidCall(f"parts[{index}] and parts[{other}] share bytes of a registration")
