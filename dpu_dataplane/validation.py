"""Checks of gRPC messages, before any of their work is done. Every error names the field."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from dpu_dataplane.jobs import CallError
from dpu_dataplane.plan import PROGRESS_BYTES, FetchPart
from dpu_dataplane.registrations import ChannelsOfLayouts, Registration
from dpu_dataplane.shared_rate import RATE_MIN
from dpu_dataplane.sources.source import Chain
from shadowserve import __version__, native
from shadowserve.calibration import KINDS, Steps
from shadowserve.chunk import DECODED_BYTES_MAX, TOKENS_MAX, ChunkLayout, Quantizer
from shadowserve.keys import KEY_BYTES, RECORD_VERSION, SCHEMA_VERSION
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import PROTOCOL_VERSION
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_from_message, steps_from_message

KEYS_MAX: Final = 65536  # most keys in a call
TIMEOUT_MAX_S: Final = 600.0  # longest deadline of a call
_CHAINS_MAX = 4096
_JOB_ID_MAX = 128
_HOST_MAX = 64
_PROCESS_MAX = 256
_QUANTIZER_MAX = 64
_MODEL_MAX = 256
_INSTANCE_MAX = 128
_SECONDS_MAX = 1e6
_NAME_MAX = 32
_WAYS_MAX = 8
_TIERS_MAX = 4
_LAYER_WAITS_MAX = 4096
_PARTS_MAX = 64  # limit of the C core
_LAYOUTS_MAX = 256  # of a registration: a worker needs one for each KV cache group and each shard layout
_QUEUE_NAME_MAX = 32
_PIN_SESSION_MAX = 32
_QUEUE_LASTS_MS_MAX = 600_000
_ENGINE_MAX = 32
_STEPS_LAST_MS_MAX = 10_000
_CHANNELS_BYTES_MAX = 64 << 20  # of a registration: 19 times those of a model of 80 layers with 8 heads of 128
_POSITION_MAX = (1 << 31) - 1
_PIECES_MAX = 1 << 22  # eight times those of a prompt of 1 Mi tokens with 128 layers


class InvalidCall(CallError):
    """A call that a correct client does not make, or that exceeds a limit."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


class Validator:
    """Checks messages. Methods raise InvalidCall."""

    def timeout(self, timeout_ms: int) -> float:
        if not 1 <= timeout_ms <= 1000 * TIMEOUT_MAX_S:
            raise InvalidCall(
                f"timeout_ms is {timeout_ms}; every call has a deadline, 1 to {1000 * TIMEOUT_MAX_S:.0f} ms"
            )
        return timeout_ms / 1000

    def count(self, name: str, count: int) -> int:
        if count < 1:
            raise InvalidCall(f"{name} is {count}; it is at least 1")
        return count

    def job_id(self, job_id: str) -> str:
        _count("job_id", len(job_id), 1, _JOB_ID_MAX, "characters")
        return job_id

    def keys(self, name: str, keys: "list[bytes]", *, count_min: int = 1) -> list[bytes]:
        _count(name, len(keys), count_min, KEYS_MAX)
        for index, key in enumerate(keys):
            if len(key) != KEY_BYTES:
                raise InvalidCall(f"{name}[{index}] has {len(key)} bytes; a key has {KEY_BYTES}")
        return keys

    def fetch(
        self, request: pb.FetchRequest, memory: Callable[[int], Registration], *, streamed: bool = False
    ) -> list[FetchPart]:
        """Return the parts of a fetch; ``memory`` returns the registration of an id, or raises Stop."""
        self._enum("order", request.order, pb.Order)
        self._enum("purpose", request.purpose, pb.Purpose)
        _count("parts", len(request.parts), 1, _PARTS_MAX)
        keys = [self.keys(f"parts[{index}].keys", list(part.keys)) for index, part in enumerate(request.parts)]
        if sum(map(len, keys)) > KEYS_MAX:
            raise InvalidCall(f"parts hold {sum(map(len, keys))} keys together; at most {KEYS_MAX} fit one call")
        registrations = [memory(part.memory_id) for part in request.parts]
        layouts = [
            self.layout_of(registration, part.layout)
            for registration, part in zip(registrations, request.parts, strict=True)
        ]
        windows = [_window(index, *each) for index, each in enumerate(zip(request.parts, layouts, strict=True))]
        pieces = sum(layout.layers * len(mine) for layout, mine in zip(layouts, keys, strict=True))
        if pieces > _PIECES_MAX:
            raise InvalidCall(f"parts name {pieces} layers of chunks; at most {_PIECES_MAX} fit one call")
        parts = []
        for index, part in enumerate(request.parts):
            layout, window = layouts[index], windows[index]
            self.offset(layout, part.offset)
            if part.length < (chunk_bytes := layout.raw_bytes // layout.layers * len(window)):
                raise InvalidCall(f"parts[{index}].length is {part.length}; a chunk takes {chunk_bytes} bytes")
            try:
                args = (registrations[index], layout, part.offset, part.length, keys[index], part.wanted, window)
                parts.append(FetchPart(*args))
            except ValueError as error:
                raise InvalidCall(f"parts[{index}].wanted: {error}") from error
        _check_disjoint(parts)
        _check_progress(request, parts, streamed=streamed)
        return parts

    def pages(
        self, request: pb.FetchPagesRequest, registration: Registration
    ) -> tuple[list[bytes], npt.NDArray[np.uint32]]:
        """Return the keys of chunks of pages, and the blocks that receive them."""
        keys = self.keys("keys", list(request.keys))
        if registration.paging is None:
            raise InvalidCall("memory_id: this memory was registered without pages")
        (layout,) = registration.layouts
        if layout.layers * len(keys) > _PIECES_MAX:
            raise InvalidCall(f"keys name {layout.layers * len(keys)} layers; at most {_PIECES_MAX} fit one call")
        word = request.progress
        if request.HasField("progress") and (word % PROGRESS_BYTES or word + PROGRESS_BYTES > registration.size):
            raise InvalidCall(
                f"progress is {word}; it is a multiple of {PROGRESS_BYTES} within {registration.size} bytes"
            )
        return keys, registration.paging.rows(request.blocks, len(keys), layout.tokens)

    def purpose(self, purpose: int) -> None:
        self._enum("purpose", purpose, pb.Purpose)

    def keep(self, keep: int) -> int:
        self._enum("keep", keep, pb.Keep)
        return keep

    @staticmethod
    def _enum(name: str, value: int, kind: Any) -> None:
        if value not in kind.values():
            raise InvalidCall(f"{name} is {value}; it is one of {', '.join(kind.keys())}")

    def steps(self, report: pb.StepReport) -> None:
        _count("engine", len(report.engine), 1, _ENGINE_MAX, "bytes")
        if report.rate and report.rate < RATE_MIN:
            raise InvalidCall(f"rate is {report.rate}; it is 0, or at least {RATE_MIN}")
        if not 0 <= report.interference_budget <= 1:  # nor NaN
            raise InvalidCall(f"interference_budget is {report.interference_budget}; it is 0 to 1")
        if not 1 <= report.lasts_ms <= _STEPS_LAST_MS_MAX:
            raise InvalidCall(f"lasts_ms is {report.lasts_ms}; a report of steps lasts 1 to {_STEPS_LAST_MS_MAX} ms")

    def decision(self, decision: pb.Decision) -> None:
        """Check a host's decision: a recording keeps it, so its size is bounded."""
        if len(decision.predicted) > _WAYS_MAX or any(len(name) > _NAME_MAX for name in decision.predicted):
            raise InvalidCall(f"predicted has up to {_WAYS_MAX} names of up to {_NAME_MAX} characters")
        if len(decision.tier_bytes) > _TIERS_MAX or any(len(name) > _NAME_MAX for name in decision.tier_bytes):
            raise InvalidCall(f"tier_bytes has up to {_TIERS_MAX} names of up to {_NAME_MAX} characters")
        _count("kind", len(decision.kind), 0, _NAME_MAX, "characters")
        seconds = [decision.predicted_seconds, decision.seconds, *decision.predicted.values()]
        seconds += [decision.cold_seconds, decision.queued_seconds]
        _count("layer_waits", len(decision.layer_waits), 0, _LAYER_WAITS_MAX, "entries")
        _count("not_layerwise", len(decision.not_layerwise), 0, _NAME_MAX, "characters")
        seconds += [each for wait in decision.layer_waits for each in (wait.begin_s, wait.seconds)]
        if not all(0 <= each <= _SECONDS_MAX for each in seconds):  # nor NaN
            raise InvalidCall(f"a decision has times of {seconds} s; they are 0 to {_SECONDS_MAX:.0f} s")

    def parents(self, parents: "list[bytes]", keys: int) -> list[bytes]:
        if len(parents) not in (0, keys):
            raise InvalidCall(f"parents has {len(parents)} entries; it has one for each of {keys} keys, or none")
        for index, parent in enumerate(parents):
            if len(parent) not in (0, KEY_BYTES):
                raise InvalidCall(f"parents[{index}] has {len(parent)} bytes; a key has {KEY_BYTES}, or is empty")
        return parents

    def chains(self, given: Sequence[pb.KeyChain]) -> list[Chain]:
        _count("chains", len(given), 0, _CHAINS_MAX)
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
        if total > KEYS_MAX:
            raise InvalidCall(f"chains hold {total} keys together; at most {KEYS_MAX} fit one call")
        return chains

    def expected(self, request: pb.ExpectRequest) -> list[tuple[int, list[Chain]]]:
        """Return the new waiting requests, with the chains that each will fetch."""
        _count("queue", len(request.queue), 1, _QUEUE_NAME_MAX, "bytes")
        if not 1 <= request.lasts_ms <= _QUEUE_LASTS_MS_MAX:
            raise InvalidCall(f"lasts_ms is {request.lasts_ms}; the message lasts 1 to {_QUEUE_LASTS_MS_MAX} ms")
        for name in ("arrivals", "gone", "order", "begins_in_ms"):
            _count(name, len(getattr(request, name)), 0, REQUESTS_MAX)
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

    def pins(self, request: pb.PinRequest) -> tuple[list[bytes], bytes]:
        """Return the keys to pin, and the session that pins them."""
        _count("session", len(request.session), 0, _PIN_SESSION_MAX, "bytes")
        return self.keys("keys", list(request.keys)), request.session

    def hello(self, request: pb.HelloRequest) -> None:
        """Refuse a host of an incompatible release."""
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
        _count("host", len(request.host), 1, _HOST_MAX, "characters")
        _count("process", len(request.process), 0, _PROCESS_MAX, "characters")
        if request.HasField("engine"):
            self._engine(request.engine)

    @staticmethod
    def _engine(engine: pb.Engine) -> None:
        if len(engine.model) != KEY_BYTES or not 1 <= engine.chunk_tokens <= TOKENS_MAX:
            raise InvalidCall(f"engine: model has {KEY_BYTES} bytes, and chunk_tokens is 1 to {TOKENS_MAX}")
        if not engine.quantizer.isprintable() or not 1 <= len(engine.quantizer) <= _QUANTIZER_MAX or engine.process:
            raise InvalidCall(f"engine: quantizer has 1 to {_QUANTIZER_MAX} printable characters, and process none")
        if engine.HasField("index"):
            index = engine.index
            _count("engine.index.model", len(index.model), 1, _MODEL_MAX, "characters")
            _count("engine.index.instance", len(index.instance), 1, _INSTANCE_MAX, "characters")
            digests = [*index.namespaces, *index.last_namespaces]
            _count("engine.index", len(digests), 1, _LAYOUTS_MAX, "namespaces")
            if any(len(digest) != KEY_BYTES for digest in (index.chain, *digests)):
                raise InvalidCall(f"engine.index: a chain and a namespace have {KEY_BYTES} bytes")
            if len(index.last_chunks) != len(index.last_namespaces) or not all(
                1 <= chunks <= TOKENS_MAX for chunks in index.last_chunks
            ):
                raise InvalidCall(f"engine.index: last_chunks has 1 to {TOKENS_MAX} for each of last_namespaces")

    def layout(self, layout: pb.ChunkLayout) -> ChunkLayout:
        try:
            return layout_from_message(layout)
        except ValueError as error:
            raise InvalidCall(f"layout: {error}") from error

    def layouts(self, layouts: Sequence[pb.ChunkLayout]) -> list[ChunkLayout]:
        _count("layouts", len(layouts), 1, _LAYOUTS_MAX)
        return [self.layout(layout) for layout in layouts]

    def channels(self, request: pb.RegisterMemoryRequest, layouts: Sequence[ChunkLayout]) -> ChannelsOfLayouts:
        """Return how to make the channels of the layouts of ``weighted``."""
        weighted = {layout: index for index, layout in enumerate(layouts) if layout.quantizer is Quantizer.WEIGHTED}
        if not weighted:
            return ChannelsOfLayouts()
        if len(request.shards) != len(layouts):
            raise InvalidCall(f"shards has {len(request.shards)} entries; with weighted it has one for each layout")
        if len(weighted) < sum(layout.quantizer is Quantizer.WEIGHTED for layout in layouts):
            raise InvalidCall("layouts has the same weighted layout twice; its steps would be ambiguous")
        slice_tokens = {layout: min(layout.tokens, DECODED_BYTES_MAX // layout.vector_length) for layout in weighted}
        pairs = len(request.steps.frequencies)
        size = sum(
            4 * (5 * layout.layers * layout.kinds * layout.vector_length + 2 * pairs * (tokens + 1))
            for layout, tokens in slice_tokens.items()
        )
        if size > _CHANNELS_BYTES_MAX:
            raise InvalidCall(f"steps of these layouts take {size} bytes; at most {_CHANNELS_BYTES_MAX}")

        def make() -> dict[ChunkLayout, native.Channels]:
            try:
                steps = steps_from_message(request.steps)
                return {
                    layout: _shard(steps, request.shards[index], layout).channels(slice_tokens[layout])
                    for layout, index in weighted.items()
                }
            except ValueError as error:
                raise InvalidCall(f"steps: {error}") from error

        return ChannelsOfLayouts(size, make)

    def positions(self, positions: Sequence[int], layout: ChunkLayout, keys: int) -> Sequence[int]:
        """Return the positions of a store's chunks in their prompts."""
        if len(positions) != (keys if layout.quantizer is Quantizer.WEIGHTED else 0):
            raise InvalidCall(
                f"positions has {len(positions)} entries; it has one for each of {keys} keys with weighted, else none"
            )
        if positions and max(positions) > _POSITION_MAX:
            raise InvalidCall(f"positions has {max(positions)}; the largest position is {_POSITION_MAX}")
        return positions

    def layout_of(self, registration: Registration, index: int) -> ChunkLayout:
        if index >= len(registration.layouts):
            raise InvalidCall(f"layout is {index}; this memory was registered with {len(registration.layouts)} layouts")
        return registration.layouts[index]

    def offset(self, layout: ChunkLayout, offset: int) -> int:
        if offset % layout.dtype.itemsize:
            raise InvalidCall(
                f"offset is {offset}; it is a multiple of {layout.dtype.itemsize}, the size of an element"
            )
        return offset


def _count(name: str, count: int, least: int, most: int, unit: str = "entries") -> None:
    if not least <= count <= most:
        bounds = f"{least} to {most}" if least else f"at most {most}"
        raise InvalidCall(f"{name} has {count} {unit}; it has {bounds}")


def _shard(steps: Steps, place: pb.Shard, layout: ChunkLayout) -> Steps:
    heads, rest = divmod(layout.vector_length, steps.steps.shape[3])
    if rest or layout.kinds != KINDS:
        raise ValueError(f"a layout of {layout.kinds} kinds and {layout.vector_length} elements has no whole heads")
    layers = (place.first_layer, place.first_layer + layout.layers)
    return steps.shard(layers, (place.first_head, place.first_head + heads))


def _window(index: int, part: pb.FetchPart, layout: ChunkLayout) -> range:
    if part.first_layer + part.layers > layout.layers or (part.first_layer and not part.layers):
        raise InvalidCall(
            f"parts[{index}] has a window of {part.layers} layers from {part.first_layer} on; chunks have "
            f"{layout.layers} layers"
        )
    return range(part.first_layer, part.first_layer + (part.layers or layout.layers))


def _check_progress(request: pb.FetchRequest, parts: Sequence[FetchPart], *, streamed: bool) -> None:
    layerwise, has_word = request.order == pb.ORDER_LAYERS, request.HasField("progress")
    if streamed and not layerwise:
        raise InvalidCall("a stream reports layers, in the order of layers")
    if streamed and has_word:
        raise InvalidCall("progress: this call reports its layers in its stream, not in a word")
    if layerwise and (has_word or streamed) and any(part.window != parts[0].window for part in parts):
        raise InvalidCall("progress: in the order of layers it is for parts with the same window of layers")
    if not has_word:
        return
    word, registration = request.progress, parts[0].registration
    if not registration.shared:
        raise InvalidCall("progress: it needs shared memory")
    same_memory = [part for part in parts if part.registration.identity == registration.identity]
    outside = all(word + PROGRESS_BYTES <= part.offset or word >= part.offset + part.length for part in same_memory)
    if word % PROGRESS_BYTES or word + PROGRESS_BYTES > registration.size or not outside:
        raise InvalidCall(
            f"progress is {word}; it is a multiple of {PROGRESS_BYTES}, at least {PROGRESS_BYTES} bytes before the "
            f"end of the {registration.size} registered bytes, and outside the regions of the parts"
        )


def _check_disjoint(parts: Sequence[FetchPart]) -> None:
    regions: dict[object, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        regions.setdefault(part.registration.identity, []).append((part.offset, part.length, index))
    for of_one_memory in regions.values():
        for (offset, length, index), (next_offset, _, other) in itertools.pairwise(sorted(of_one_memory)):
            if next_offset < offset + length:
                raise InvalidCall(f"parts[{index}] and parts[{other}] share bytes of registered memory")
