"""Fetches layer by layer: each layer is scattered as it arrives, while later layers are still on their way.

The registered memory is a ring of two halves. A *window* is the pieces that one half holds: some layers of all chunks,
or, of a prompt whose layers are larger, a run of chunks of one layer. Two windows are in flight, in the order in which
the engine computes. A half is used again once its window is scattered, so the memory bounds how many layers are ahead,
not the length of the prompt. A prompt that fits the memory is one window.

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
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, leading, leading_chunks, leading_layers

_logger = logging.getLogger(__name__)
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at the call's end and at cancellation, while no layer arrives."""


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
    """Fetches all chunks of one fetch layer by layer.

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

    def move(self, fetch: Fetch) -> bool:
        """Fetch everything that is left, and end the fetch.

        Afterwards nothing writes into pages any more, nor into registered memory that is still in use.
        """
        self.batches.flush()  # layers arrive in both halves
        if fetch.all_delivered:
            self.batches.end(fetch, Reason.COMPLETE)
        else:
            chunks, reason, detail = _LayerFetch(self, fetch).run()
            fetch.placed = [chunks if keys else 0 for keys in fetch.job.keys]
            self.batches.end(fetch, reason, detail)
        return False


class _Ended(Exception):
    """No further call follows."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class _Forgotten(Exception):
    """The data plane has restarted and does not know the memory."""


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


@dataclass
class _Call:
    window: LayerWindow
    slot: _Slot
    memory: Memory
    job_id: str
    parts: Sequence[FetchPart]
    before: int  # layers of a record before number 0 of the engine
    call: FetchCall
    progress: Progress
    is_second: bool = False  # it was started while another call was in flight
    reported: int = 0  # end of the window's leading layers that the data plane has reported
    scattered: int = 0  # end of its layers that are scattered, for all its chunks


class _LayerFetch:
    def __init__(self, mover: LayerMover, fetch: Fetch) -> None:
        self._mover, self._fetch = mover, fetch
        self._client, self._registration = mover.client, mover.registration
        self._shards = list(self._find_shards())
        self._count = len(self._shards[0].keys)
        self._placed: Flags = np.zeros((max(shard.end for shard in self._shards), self._count), np.bool_)
        self._chunks = self._count  # leading chunks that can still be complete
        self._reason, self._detail = str(Reason.COMPLETE), ""
        self._retried = False
        self._ahead = True  # two windows are in flight, until a call does not bring all of its window
        words = self._registration.progress_offsets or (None, None)
        size, half = self._registration.size, self._registration.size // 2
        edges = sorted({edge for shard in self._shards for edge in (shard.first, shard.end)})
        fits = len(edges) == 2 and self._count * self._row_bytes(0) * edges[1] <= size
        self._free = deque([_Slot(0, words[0])] if fits else [_Slot(0, words[0]), _Slot(half, words[1])])
        self._windows = deque(self._split(edges, size if fits else half))

    def _find_shards(self) -> Iterator[_Shard]:
        job = self._fetch.job
        for number, (shape, keys) in enumerate(zip(self._registration.shapes, job.keys, strict=True)):
            if keys:
                begin, end, _ = self._mover.batches.layers[number].indices(shape.layers)
                first = job.first_layers[number] if job.first_layers else 0
                piece_bytes = shape.raw_bytes // shape.layers
                yield _Shard(number, keys, first, first + end - begin, begin - first, shape.layers, piece_bytes)

    def _held(self, layer: int) -> list[_Shard]:
        """Return the shards that hold a layer."""
        return [shard for shard in self._shards if shard.first <= layer < shard.end]

    def _row_bytes(self, layer: int) -> int:
        """Return the bytes of a layer of one chunk, of all shards."""
        return sum(shard.piece_bytes for shard in self._held(layer))

    def _split(self, edges: Sequence[int], room: int) -> Iterator[LayerWindow]:
        """Yield the windows of at most ``room`` bytes, in the engine's order of layers. None crosses an edge."""
        for begin, end in itertools.pairwise(edges):
            count, rows = self._count, room // self._row_bytes(begin)
            layers, chunks = max(rows // count, 1), min(rows, count)
            for layer in range(begin, end, layers):
                for chunk in range(0, count, chunks):
                    yield LayerWindow(layer, min(layer + layers, end), chunk, min(chunk + chunks, count))

    def run(self) -> tuple[int, str, str]:
        """Return how many leading chunks are in place with all layers, a reason, and a detail of it."""
        calls: deque[_Call] = deque()
        try:
            while calls or self._windows:
                while self._free and self._windows and (self._ahead or not calls):
                    window = self._windows.popleft()
                    window = window._replace(chunks_end=min(window.chunks_end, self._chunks))
                    if window.chunk < window.chunks_end:
                        calls.append(self._start(window, self._free[0], is_second=bool(calls)))
                        self._free.popleft()
                if not calls:
                    break
                try:
                    self._finish(calls[0])
                except _Forgotten:
                    self._begin_again(calls)
                else:
                    self._free.append(calls.popleft().slot)
        except _Ended as end:
            self._fall_short(0, end.reason, end.detail)
        finally:
            for call in calls:
                self._stop(call)
        return leading_chunks(self._placed, np.ones_like(self._placed)), self._reason, self._detail

    def _begin_again(self, calls: deque[_Call]) -> None:
        """Give up the calls, and fetch the rest of their windows again, into new memory."""
        self._retried = True
        for call in reversed(calls):
            self._stop(call)
            self._windows.extendleft(reversed(self._rest(call.window)))
            self._free.appendleft(call.slot)
        calls.clear()

    def _rest(self, window: LayerWindow) -> list[LayerWindow]:
        """Return windows of the pieces of a window that are not in place and can still be used."""
        window = window._replace(chunks_end=min(window.chunks_end, self._chunks))
        if window.chunk >= window.chunks_end:
            return []
        placed = self._placed[window.layer : window.layers_end, window.chunk : window.chunks_end]
        layer = window.layer + leading_layers(placed, np.ones_like(placed))
        if layer == window.layers_end:
            return []
        if not (count := leading(self._placed[layer, window.chunk : window.chunks_end])):
            return [window._replace(layer=layer)]
        row = LayerWindow(layer, layer + 1, window.chunk + count, window.chunks_end)
        return [row, *([window._replace(layer=layer + 1)] if layer + 1 < window.layers_end else [])]

    def _fall_short(self, chunks: int, reason: str, detail: str) -> None:
        self._chunks = min(self._chunks, chunks)
        if self._reason == Reason.COMPLETE:
            self._reason, self._detail = reason, detail

    # ---- Calls

    def _start(self, window: LayerWindow, slot: _Slot, *, is_second: bool) -> _Call:
        if self._fetch.cancelled or self._fetch.left_s <= 0:
            raise _Ended(Reason.CANCELLED if self._fetch.cancelled else Reason.DEADLINE)
        job_id, left = f"layers-{secrets.token_hex(8)}", max(self._fetch.left_s, 0.001)
        window_s, (before,) = self._fetch.job.window_s, {shard.before for shard in self._held(window.layer)}
        progress: Progress
        try:
            memory = self._registration.acquire(left)
            parts = list(self._parts(window, slot.offset))
            if slot.word is None:
                progress = call = self._client.start_fetch_layers(job_id, parts, left, window_s)
            else:
                # Before the call writes there.
                progress = WordProgress(memory.memory[slot.word : slot.word + PROGRESS_BYTES])
                call = self._client.start_fetch(
                    job_id, parts, left, layerwise=True, progress=slot.word, window_s=window_s
                )
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        return _Call(window, slot, memory, job_id, parts, before, call, progress, is_second, window.layer, window.layer)

    def _parts(self, window: LayerWindow, offset: int) -> Iterator[FetchPart]:
        """Yield the part of each shard that a window has, in regions from ``offset`` on."""
        for shard in self._held(window.layer):
            keys = shard.keys[window.chunk : window.chunks_end]
            layers = (window.layer + shard.before, window.layers_end + shard.before)
            wanted: Flags = np.zeros((shard.record_layers, len(keys)), np.bool_)
            wanted[slice(*layers)] = True
            length = len(keys) * (layers[1] - layers[0]) * shard.piece_bytes
            yield FetchPart(self._registration.memory_id, offset, length, keys, wanted, shard.number, layers)
            offset += length

    def _finish(self, call: _Call) -> None:
        """Scatter the layers of a call as they arrive, and what its answer adds to them."""
        window, answer = call.window, self._follow(call)
        self._fetch.count_moved(answer)
        held = slice(window.layer + call.before, window.layers_end + call.before)
        delivered: Flags = np.logical_and.reduce([each[held] for each in answer.delivered])
        delivered[: call.reported - window.layer] = True
        self._place(call, window.layer + leading_layers(delivered, np.ones_like(delivered)))
        if answer.reason == Reason.UNKNOWN_MEMORY and not self._retried:
            raise _Forgotten
        if window.chunk >= self._chunks:
            return  # nothing of it can be used any more
        if answer.reason == Reason.REFUSED and call.is_second:  # the queue of calls is full
            self._ahead = False
            self._windows.extendleft(reversed(self._rest(window)))
        elif answer.reason == Reason.BATCH_FULL:
            self._ahead = False
            if call.scattered < window.layers_end:
                self._place_row(call, leading(delivered[call.scattered - window.layer]))
            if not self._placed[window.layer, window.chunk]:
                text = "the data plane's buffers are full, and the first chunk did not come"
                raise _Ended(Reason.INVALID_ANSWER, text)
            self._windows.extendleft(reversed(self._rest(window)))
        elif answer.reason != Reason.COMPLETE:
            chunks = leading_chunks(delivered, np.ones_like(delivered))
            self._fall_short(window.chunk + chunks, answer.reason, answer.detail)
            self._place(call, window.layers_end)
            if not answer.quiet:
                raise _Ended(answer.reason, answer.detail)

    def _follow(self, call: _Call) -> FetchAnswer:
        """Place layers as they arrive; return the call's answer."""
        most = call.window.layers_end + call.before
        try:
            cancels = cancel_if(self._client, call.job_id, lambda: self._is_useless(call))
            for layers in follow(call.call, call.progress, most, _LOOK_INTERVAL_S, cancels):
                self._arrived(call, layers - call.before)
            self._arrived(call, min(call.progress.wait(call.reported + call.before, 0.0), most) - call.before)
        except _Ended:
            self._client.cancel(call.job_id)
            raise
        finally:
            answer = self._settle(call)
        return answer

    def _is_useless(self, call: _Call) -> bool:
        return self._fetch.cancelled or call.window.chunk >= self._chunks

    def _arrived(self, call: _Call, layers: int) -> None:
        call.reported = max(call.reported, layers)
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
        chunks = min(call.window.chunks_end, self._chunks)
        if layers > call.scattered and chunks > call.window.chunk:
            self._scatter(call, (call.scattered, layers), chunks)
            call.scattered = layers
            self._mover.tell(self._fetch, leading_layers(self._placed, np.ones_like(self._placed)))

    def _place_row(self, call: _Call, chunks: int) -> None:
        """Scatter the leading chunks of the layer that a call has delivered in part."""
        if (chunks := min(chunks, self._chunks - call.window.chunk)) > 0:
            self._scatter(call, (call.scattered, call.scattered + 1), call.window.chunk + chunks)

    def _scatter(self, call: _Call, layers: tuple[int, int], chunks_end: int) -> None:
        window, memory = call.window, call.memory
        try:
            memory.flush()
            for part in call.parts:
                length = part.length // len(part.keys) * (chunks_end - window.chunk)
                data = memory.memory[part.offset : part.offset + length]
                self._mover.scatter(self._fetch.job, part.layout, data, window, layers)
        except Exception as error:
            _logger.exception("scattering layers failed")
            raise _Ended(Reason.SCATTER_FAILED, f"{type(error).__name__}: {error}") from error
        if lost := self._registration.check(memory):
            raise _Ended(Reason.SCATTER_FAILED, lost)
        self._placed[slice(*layers), window.chunk : chunks_end] = True
