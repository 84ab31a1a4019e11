"""Traces of fetches: the spans of the C core's threads, and the steps of the calls around them.

One recording at a time. Without one, a step costs the check of a flag. The steps of a traced request are spans, too.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import grpc

from dpu_dataplane.jobs import CallError
from shadowserve import native, spans
from shadowserve.errors import NativeError
from shadowserve.proto import dataplane_pb2 as pb

STEPS_MAX: Final = 4096
"""Most steps of calls in a recording: with five for each batch, more than the threads' logs can fill."""
SPANS_IN_MESSAGE: Final = 8192  # some 600 KB, far below the limit on a message
_NO_SLICE: Final = 0xFFFFFFFF


class RecordingError(CallError):
    """A recording cannot be made; the message says why."""

    code = grpc.StatusCode.FAILED_PRECONDITION


@dataclass
class _Recording:
    owner: str
    fetches_left: int
    decides: bool  # the host reports its decisions: the one after the last fetch is waited for
    done: asyncio.Event = field(default_factory=asyncio.Event)
    spans: list[pb.TraceSpan] = field(default_factory=list)
    dropped: int = 0


class Tracer:
    """Records fetches on request. Used on the event loop's thread only."""

    def __init__(self, pipeline: native.Pipeline) -> None:
        self._pipeline = pipeline
        self._recording: _Recording | None = None

    @contextlib.contextmanager
    def fetch(self, owner: str, chunks: int) -> Iterator[None]:
        """Record a host's Fetch call while in this context."""
        recording = self._of(owner)
        try:
            with self.step(owner, "fetch", chunks):
                yield
        finally:
            if recording is not None:
                recording.fetches_left -= 1
                if recording.fetches_left <= 0 and not recording.decides:
                    recording.done.set()

    def decided(self, owner: str, decision: pb.Decision) -> None:
        """Record a host's decision for a prompt that has its first token now."""
        if (recording := self._of(owner)) is None:
            return
        end = time.monotonic_ns()
        begin = max(end - int(decision.seconds * 1e9), 0)
        self._note(recording, pb.TraceSpan(step="decision", begin_ns=begin, end_ns=end, decision=decision))
        if recording.fetches_left <= 0:
            recording.done.set()

    def _note(self, recording: _Recording, span: pb.TraceSpan) -> None:
        span.core, span.slice = -1, -1
        if len(recording.spans) < STEPS_MAX:
            recording.spans.append(span)
        else:
            recording.dropped += 1

    @contextlib.contextmanager
    def step(self, owner: str, name: str, count: int = 0) -> Iterator[None]:
        """Record a step of a host's Fetch call while in this context; ``count`` is its number of chunks or pieces."""
        recording = self._of(owner)
        traced = bool(spans.current()) and name != "fetch"  # the call has a span already
        if recording is None and not traced:
            yield
            return
        begin = time.monotonic_ns()
        try:
            with spans.span(f"dpu.{name}", count=count) if traced else contextlib.nullcontext():
                yield
        finally:
            if recording is not None:
                end = time.monotonic_ns()
                self._note(recording, pb.TraceSpan(step=name, begin_ns=begin, end_ns=end, piece=count))

    def _of(self, owner: str) -> _Recording | None:
        recording = self._recording
        return recording if recording is not None and recording.owner == owner else None

    @contextlib.contextmanager
    def recording(self, owner: str, fetches: int, *, decides: bool) -> Iterator[_Recording]:
        """Record a host's fetches while in this context. ``done`` is set when ``fetches`` of them have ended.

        If the host ``decides``, one of its decisions must follow. RecordingError if another recording is in progress.
        """
        if self._recording is not None:
            raise RecordingError("another recording is in progress; try again when it is over")
        try:
            self._pipeline.trace_start()
        except NativeError as error:
            raise RecordingError("trace_events is 0: there is no room to record anything") from error
        self._recording = _Recording(owner, fetches, decides)
        try:
            yield self._recording
        finally:
            self._pipeline.trace_stop()
            self._recording = None

    def result(self, recording: _Recording) -> Iterator[pb.TraceResponse]:
        """Yield the messages of a recording that has just ended, before another one begins."""
        events, dropped = self._pipeline.trace_read()
        # Batches run one at a time: all that the threads did during a batch of this host was for this host.
        batches = [(span.begin_ns, span.end_ns) for span in recording.spans if span.step == "batch"]
        spans = recording.spans + [
            _span(*event)
            for event in events.tolist()
            if any(begin <= event[0] and event[1] <= end for begin, end in batches)
        ]
        for first in range(0, max(1, len(spans)), SPANS_IN_MESSAGE):
            last = first + SPANS_IN_MESSAGE >= len(spans)
            yield pb.TraceResponse(
                spans=spans[first : first + SPANS_IN_MESSAGE], dropped=recording.dropped + dropped if last else 0
            )


def _span(
    begin_ns: int, end_ns: int, input_bytes: int, output_bytes: int, batch_: int, piece: int, slice_: int, core: int,
    stage: int, thread: int,
) -> pb.TraceSpan:  # fmt: skip
    """Convert a ``native.TRACE_DTYPE`` row; the arguments are its fields."""
    return pb.TraceSpan(
        step=native.Stage(stage).name.lower(),
        thread=thread,
        core=core,
        begin_ns=begin_ns,
        end_ns=end_ns,
        batch=batch_,
        piece=piece,
        slice=-1 if slice_ == _NO_SLICE else slice_,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
    )
