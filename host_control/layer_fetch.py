"""Fetches layer by layer: each layer is scattered as it arrives, while later layers are still on their way.

The registered memory is a ring of two halves. A *window* is the pieces that one half holds: some layers of all chunks,
or, of a prompt whose layers are larger, a run of chunks of one layer. Two windows are in flight, in the order in which
the engine computes. A half is used again once its window is scattered, so the memory bounds how many layers are ahead,
not the length of the prompt. A prompt that fits the memory is one window.

Several fetches that one step waits for share the ring as *streams*: some layers of the first, the same layers of the
second, and so on. Each has an outcome of its own. A stream that brings nothing while others wait is put aside: its
calls are cancelled, and it goes on after the others, as soon as the data plane has ended these calls.

The records may be of another shard layout. A window then has a part for each shard that holds its layers, and it ends
where a pipeline stage of those records ends, so all parts of a window have the same layers.

The data plane tells how many leading layers of a window are in place (:mod:`host_control.progress`), so a layer costs
no call. Layers that were reported stay valid, whatever the answer is; the answer reports the rest. Where the data
plane's buffers hold less than a window, another call fetches what is left of it.

Chunks are useful as a prefix only. After a failure, the later windows have the chunks before it only.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall, FetchPart
from host_control.fetch import Fetch, FetchJob
from host_control.movers import BatchMover
from host_control.progress import Progress, WordProgress, cancel_if, follow
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from host_control.transfer import Reason
from shadowserve import spans
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, leading, leading_chunks, leading_layers

_logger = logging.getLogger(__name__)
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at the call's end and at cancellation, while no layer arrives."""
_PATIENCE: Final = 1.0
"""A stream is put aside once it has brought nothing for its share of the time that is left, multiplied by this."""
_PATIENCE_MIN_S: Final = 0.25
_WINDOW_BYTES_MAX: Final = 32 << 20
"""Largest window of several streams: the first layers of each come behind a window of every other."""
_LOOKUP_KEYS: Final = 8192
"""Records that the data plane looks up together: it delivers those of a larger window without the order of layers."""


class LayerWindow(NamedTuple):
    """Pieces that are fetched together: half-open ranges of the engine's layers and of chunks."""

    layer: int
    layers_end: int
    chunk: int
    chunks_end: int


ScatterLayers = Callable[[FetchJob, int, Any, LayerWindow, tuple[int, int]], None]
"""Moves some layers of the leading chunks of a window from registered memory into paged memory.

Arguments: the job, the shard, the chunks' bytes, the window, and the half-open range of layers to move.
"""


@dataclass
class LayerMover:
    """Fetches all chunks of some fetches layer by layer, side by side.

    Args:
        registration: Registered memory, the ring.
        scatter: Moves layers of chunks into paged memory.
        batches: Mover that ends fetches, and whose chunks are scattered first.
        tell: Receives the number of leading layers of a fetch that are in place.
    """

    client: DataPlaneClient
    registration: RegisteredMemory
    scatter: ScatterLayers
    batches: BatchMover
    tell: Callable[[Fetch, int], None]

    def move(self, fetches: Sequence[Fetch]) -> None:
        """Fetch everything that is left, and end each fetch.

        After its end nothing writes into pages for a fetch any more, nor into registered memory that is still in use.
        """
        self.batches.flush()  # layers arrive in both halves
        for fetch in fetches:
            if fetch.all_delivered:
                self.batches.end(fetch, Reason.COMPLETE)
        if left := [fetch for fetch in fetches if not fetch.ending]:
            _Ring(self, left).run()


class _Ended(Exception):
    """No further call of a stream follows."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class _Slot(NamedTuple):
    """A half of the ring, and the offset of its progress word."""

    offset: int
    word: int | None


class _Shard(NamedTuple):
    """A shard of the records: its number, the engine's layers that it holds, and where a record has them."""

    number: int
    keys: Sequence[bytes]
    first: int
    end: int
    before: int  # layers of a record before number 0 of the engine; may be negative
    record_layers: int
    piece_bytes: int


class _Stream:
    """A fetch in the ring.

    Attributes:
        edges: Layers at which a shard of its records begins or ends.
        count: Number of its chunks.
        placed: Pieces that are scattered, by layer and chunk.
        chunks: Leading chunks that can still be complete.
        retried: The memory was registered again for it, after a restart of the data plane.
        stalls: How often it was put aside.
    """

    def __init__(self, fetch: Fetch, mover: LayerMover) -> None:
        self.fetch = fetch
        self._shards = list(self._find_shards(mover))
        self.edges = {edge for shard in self._shards for edge in (shard.first, shard.end)}
        self.count = self.chunks = len(self._shards[0].keys)
        self.placed: Flags = np.zeros((max(self.edges), self.count), np.bool_)
        self.reason, self.detail = str(Reason.COMPLETE), ""
        self.retried, self.stalls = False, 0

    def _find_shards(self, mover: LayerMover) -> Iterator[_Shard]:
        job = self.fetch.job
        for number, (shape, keys) in enumerate(zip(mover.registration.shapes, job.keys, strict=True)):
            if keys:
                begin, end, _ = mover.batches.layers[number].indices(shape.layers)
                first = job.first_layers[number] if job.first_layers else 0
                piece_bytes = shape.raw_bytes // shape.layers
                yield _Shard(number, keys, first, first + end - begin, begin - first, shape.layers, piece_bytes)

    def _held(self, layer: int) -> list[_Shard]:
        """Return the shards that hold a layer."""
        return [shard for shard in self._shards if shard.first <= layer < shard.end]

    def row_bytes(self, layer: int) -> int:
        """Return the bytes of a layer of one chunk, of all shards."""
        return sum(shard.piece_bytes for shard in self._held(layer))

    def most_chunks(self, layer: int) -> int:
        """Return the most chunks of a window, whose records of all shards the data plane looks up together."""
        return max(_LOOKUP_KEYS // len(self._held(layer)), 1)

    def before(self, window: LayerWindow) -> int:
        """Return the layers of a record before number 0 of the engine, the same in all shards of a window."""
        (before,) = {shard.before for shard in self._held(window.layer)}
        return before

    def parts(self, window: LayerWindow, memory_id: int, offset: int) -> Iterator[FetchPart]:
        """Yield the part of each shard that a window has, in regions from ``offset`` on."""
        for shard in self._held(window.layer):
            keys = shard.keys[window.chunk : window.chunks_end]
            layers = (window.layer + shard.before, window.layers_end + shard.before)
            wanted: Flags = np.zeros((shard.record_layers, len(keys)), np.bool_)
            wanted[slice(*layers)] = True
            length = len(keys) * (layers[1] - layers[0]) * shard.piece_bytes
            yield FetchPart(memory_id, offset, length, keys, wanted, shard.number, layers)
            offset += length

    @property
    def layers(self) -> int:
        """Leading layers that are in place."""
        return leading_layers(self.placed, np.ones_like(self.placed))

    def usable(self, window: LayerWindow) -> LayerWindow:
        """Return the part of a window whose chunks can still be complete; there may be none."""
        return window._replace(chunks_end=min(window.chunks_end, max(self.chunks, window.chunk)))

    def rest(self, window: LayerWindow) -> list[LayerWindow]:
        """Return windows of the pieces of a window that are not in place and can still be used."""
        window = self.usable(window)
        if window.chunk == window.chunks_end:
            return []
        placed = self.placed[window.layer : window.layers_end, window.chunk : window.chunks_end]
        layer = window.layer + leading_layers(placed, np.ones_like(placed))
        if layer == window.layers_end:
            return []
        if not (count := leading(self.placed[layer, window.chunk : window.chunks_end])):
            return [window._replace(layer=layer)]
        row = LayerWindow(layer, layer + 1, window.chunk + count, window.chunks_end)
        return [row, *([window._replace(layer=layer + 1)] if layer + 1 < window.layers_end else [])]

    def fall_short(self, chunks: int, reason: str, detail: str) -> None:
        self.chunks = min(self.chunks, chunks)
        if self.reason == Reason.COMPLETE:
            self.reason, self.detail = reason, detail


@dataclass
class _Call:
    stream: _Stream
    window: LayerWindow
    slot: _Slot
    memory: Memory
    job_id: str
    parts: Sequence[FetchPart]
    before: int  # layers of a record before number 0 of the engine
    call: FetchCall
    progress: Progress
    has_company: bool = False  # another call was in flight beside it
    is_put_aside: bool = False  # it is cancelled because its stream brings nothing
    reported: int = 0  # end of the window's leading layers that the data plane has reported
    scattered: int = 0  # end of its layers that are scattered, for all its chunks
    grown_s: float = 0.0  # when a layer arrived last, or the calls before it ended


class _Ring:
    def __init__(self, mover: LayerMover, fetches: Sequence[Fetch]) -> None:
        self._mover, self._client, self._registration = mover, mover.client, mover.registration
        self._streams = [_Stream(fetch, mover) for fetch in fetches]
        self._all_chunks = sum(stream.count for stream in self._streams)
        self._ahead = True  # two windows are in flight, until a call does not bring all of its window
        words, size = mover.registration.progress_offsets or (None, None), mover.registration.size
        edges, first = sorted({edge for stream in self._streams for edge in stream.edges}), self._streams[0]
        several = len(fetches) > 1
        fits = not several and len(edges) == 2 and first.placed.size * first.row_bytes(0) <= size
        self._free = deque([_Slot(0, words[0])] if fits else [_Slot(0, words[0]), _Slot(size // 2, words[1])])
        self._windows = deque(self._split(edges, size if fits else size // 2, _WINDOW_BYTES_MAX if several else size))
        self._calls: deque[_Call] = deque()

    def _split(self, edges: Sequence[int], room: int, aim: int) -> Iterator[tuple[_Stream, LayerWindow]]:
        """Yield the windows in the order in which the engine computes: ``aim`` bytes, at most ``room``.

        None crosses an edge.
        """
        for begin, end in itertools.pairwise(edges):
            largest = max(stream.count * stream.row_bytes(begin) for stream in self._streams)
            whole = all(stream.count <= stream.most_chunks(begin) for stream in self._streams)
            layers = max(min(room, aim) // largest, 1) if whole else 1
            for layer in range(begin, end, layers):
                for stream in self._streams:
                    count, most = stream.count, min(room // stream.row_bytes(begin), stream.most_chunks(begin))
                    chunks = min(most, count)
                    for chunk in range(0, count, chunks):
                        window = LayerWindow(layer, min(layer + layers, end), chunk, min(chunk + chunks, count))
                        yield stream, window

    def run(self) -> None:
        """Fetch all windows; end each stream's fetch as soon as nothing of it is left."""
        try:
            while self._calls or self._windows:
                while self._free and self._windows and (self._ahead or not self._calls):
                    self._start_next()
                if self._calls:
                    self._finish_first()
                self._end_streams()
        finally:
            for call in self._calls:
                self._stop(call)

    def _end_streams(self) -> None:
        left = {call.stream for call in self._calls} | {stream for stream, window in self._windows if stream.chunks}
        for stream in [stream for stream in self._streams if stream not in left]:
            self._streams.remove(stream)
            fetch, chunks = stream.fetch, leading_chunks(stream.placed, np.ones_like(stream.placed))
            fetch.placed = [chunks if keys else 0 for keys in fetch.job.keys]
            # By bytes: calls of several streams overlap.
            fetch.others_s = (time.monotonic() - fetch.started_at) * (1 - stream.count / self._all_chunks)
            self._mover.batches.end(fetch, stream.reason, stream.detail)

    def _put_back(self, windows: Sequence[tuple[_Stream, LayerWindow]]) -> None:
        """Fetch windows, or what is left of them, before others of the same layers; streams that stalled come last."""
        ordered = [(stream, left) for stream, window in windows for left in stream.rest(window)] + [*self._windows]
        self._windows = deque(sorted(ordered, key=lambda each: (each[0].stalls, each[1].layer)))

    # ---- Calls

    def _start_next(self) -> None:
        stream, window = self._windows.popleft()
        if (window := stream.usable(window)).chunk == window.chunks_end:
            return
        try:
            with spans.use(stream.fetch.span.context):
                self._calls.append(self._start(stream, window, self._free[0]))
            self._free.popleft()
            for call in self._calls if len(self._calls) > 1 else ():
                call.has_company = True
        except _Ended as end:
            stream.fall_short(0, end.reason, end.detail)

    def _start(self, stream: _Stream, window: LayerWindow, slot: _Slot) -> _Call:
        fetch = stream.fetch
        if fetch.cancelled or fetch.left_s <= 0:
            raise _Ended(Reason.CANCELLED if fetch.cancelled else Reason.DEADLINE)
        job_id, left = f"layers-{secrets.token_hex(8)}", max(fetch.left_s, 0.001)
        # The engine computes a layer of all chunks of all streams in that time.
        window_s = fetch.job.window_s * (window.chunks_end - window.chunk) / self._all_chunks
        before = stream.before(window)
        progress: Progress
        try:
            memory = self._registration.acquire(left)
            parts = list(stream.parts(window, self._registration.memory_id, slot.offset))
            how: dict[str, Any] = {"layerwise": True, "window_s": window_s}
            if slot.word is None:
                progress = call = self._client.start_fetch(job_id, parts, left, streamed=True, **how)
            else:
                # Before the call writes there.
                progress = WordProgress(memory.memory[slot.word : slot.word + PROGRESS_BYTES])
                call = self._client.start_fetch(job_id, parts, left, progress=slot.word, **how)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        first = window.layer
        return _Call(
            stream,
            window,
            slot,
            memory,
            job_id,
            parts,
            before,
            call,
            progress,
            reported=first,
            scattered=first,
        )

    def _finish_first(self) -> None:
        """Follow the first call to its end. Start the other ones again if the memory was given up."""
        call, again = self._calls[0], []
        call.grown_s = time.monotonic()
        try:
            if self._take(call, self._follow(call)):
                again = [(call.stream, call.window)]
        except _Ended as end:
            call.stream.fall_short(0, end.reason, end.detail)
        self._free.append(self._calls.popleft().slot)
        if self._calls and self._calls[0].memory is not self._registration.current:
            for other in self._calls:
                self._stop(other)
                self._free.append(other.slot)
                again.append((other.stream, other.window))
            self._calls.clear()
        self._put_back(again)

    def _take(self, call: _Call, answer: FetchAnswer) -> bool:
        """Scatter what an answer adds to the layers that were reported; return True if another call follows."""
        stream, window = call.stream, call.window
        stream.fetch.count_moved(answer)
        held = slice(window.layer + call.before, window.layers_end + call.before)
        delivered: Flags = np.logical_and.reduce([each[held] for each in answer.delivered])
        delivered[: call.reported - window.layer] = True
        self._place(call, window.layer + leading_layers(delivered, np.ones_like(delivered)))
        if answer.reason == Reason.UNKNOWN_MEMORY and not stream.retried:
            stream.retried = True  # the data plane has restarted
            return True
        if window.chunk >= stream.chunks:
            return False  # nothing of it can be used any more
        if answer.reason == Reason.CANCELLED and call.is_put_aside and not stream.fetch.cancelled:
            if call.scattered < window.layers_end:
                self._place_row(call, leading(delivered[call.scattered - window.layer]))
            return True
        if answer.reason == Reason.REFUSED and call.has_company:  # the queue of calls is full
            self._ahead = False
            return True
        if answer.reason == Reason.BATCH_FULL:
            self._ahead = False
            if call.scattered < window.layers_end:
                self._place_row(call, leading(delivered[call.scattered - window.layer]))
            if not stream.placed[window.layer, window.chunk]:
                text = "the data plane's buffers are full, and the first chunk did not come"
                raise _Ended(Reason.INVALID_ANSWER, text)
            return True
        if answer.reason != Reason.COMPLETE:
            chunks = leading_chunks(delivered, np.ones_like(delivered))
            stream.fall_short(window.chunk + chunks, answer.reason, answer.detail)
            self._place(call, window.layers_end)
            if not answer.quiet:
                raise _Ended(answer.reason, answer.detail)
        return False

    def _follow(self, call: _Call) -> FetchAnswer:
        """Place layers as they arrive; return the call's answer."""
        most = call.window.layers_end + call.before
        try:
            cancels = cancel_if(self._client, call.job_id, lambda: self._is_useless(call))
            for layers in follow(call.call, call.progress, most, _LOOK_INTERVAL_S, cancels):
                self._arrived(call, layers - call.before)
            self._arrived(call, min(call.progress.wait(call.reported + call.before, 0.0), most) - call.before)
            ended = threading.Event()
            call.call.on_done(ended.set)
            while not ended.wait(_LOOK_INTERVAL_S):
                cancels()
        except _Ended:
            self._client.cancel(call.job_id)
            raise
        finally:
            answer = self._settle(call)
        return answer

    def _is_useless(self, call: _Call) -> bool:
        """Tell if a call should end; put its stream aside if it brings nothing while others wait."""
        stream = call.stream
        if stream.fetch.cancelled or call.window.chunk >= stream.chunks:
            return True
        others = len(self._streams) - 1
        # As much of the time that is left remains for each of the others, and for the rest of this one.
        patience_s = _PATIENCE * max(stream.fetch.left_s / (others + 2), _PATIENCE_MIN_S)
        if others and not call.is_put_aside and time.monotonic() - call.grown_s > patience_s:
            _logger.warning("shadowserve: the load of request %s stalls: others go first", stream.fetch.job.request_id)
            stream.stalls += 1
            for each in self._calls:
                each.is_put_aside |= each.stream is stream
        return call.is_put_aside and others > 0

    def _arrived(self, call: _Call, layers: int) -> None:
        if layers > call.reported:
            call.reported, call.grown_s = layers, time.monotonic()
        self._place(call, call.reported)

    def _settle(self, call: _Call) -> FetchAnswer:
        answer = call.call.result()
        if self._registration.current is call.memory:  # else it was given up already
            self._registration.settle(answer)
        return answer

    def _stop(self, call: _Call) -> None:
        """End a call whose layers are not used; then nothing writes into the memory for it."""
        while not call.call.done():  # a Cancel may overtake the call that it is for
            self._client.cancel(call.job_id)
            call.progress.wait(call.reported + call.before, _LOOK_INTERVAL_S)
        self._settle(call)

    # ---- Scattering

    def _place(self, call: _Call, layers: int) -> None:
        """Scatter a call's layers that are not scattered yet, of the chunks that can still be complete."""
        stream = call.stream
        chunks = min(call.window.chunks_end, stream.chunks)
        if layers > call.scattered and chunks > call.window.chunk:
            self._scatter(call, (call.scattered, layers), chunks)
            call.scattered = layers
            self._mover.tell(stream.fetch, stream.layers)

    def _place_row(self, call: _Call, chunks: int) -> None:
        """Scatter the leading chunks of the layer that a call has delivered in part."""
        if (chunks := min(chunks, call.stream.chunks - call.window.chunk)) > 0:
            self._scatter(call, (call.scattered, call.scattered + 1), call.window.chunk + chunks)

    def _scatter(self, call: _Call, layers: tuple[int, int], chunks_end: int) -> None:
        stream, window, memory = call.stream, call.window, call.memory
        try:
            memory.flush()
            for part in call.parts:
                length = part.length // len(part.keys) * (chunks_end - window.chunk)
                data = memory.memory[part.offset : part.offset + length]
                self._mover.scatter(stream.fetch.job, part.layout, data, window, layers)
        except Exception as error:
            _logger.exception("scattering layers failed")
            raise _Ended(Reason.SCATTER_FAILED, f"{type(error).__name__}: {error}") from error
        if lost := self._registration.check(memory):
            raise _Ended(Reason.SCATTER_FAILED, lost)
        stream.placed[slice(*layers), window.chunk : chunks_end] = True
