"""Recordings of fetches: what each of the C core's threads did when, and the steps of the calls around it.

One recording at a time. While none runs, a step costs a look at a flag.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shadowserve import native
from shadowserve.errors import NativeError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["NotTraceable", "Tracer"]

STEPS_MAX: Final = 4096
"""Steps of calls in one recording: five for each batch, so far over what the threads' logs hold."""
SPANS_IN_MESSAGE: Final = 8192
"""Some 600 KB, far under the limit on a message."""
_NO_SLICE: Final = 0xFFFFFFFF


class NotTraceable(Exception):
    """A recording that cannot be made; the message says why."""


@dataclass
class _Recording:
    """One recording in progress, of one host's fetches."""

    owner: str
    fetches_left: int
    decides: bool  # the host says what it has decided, so that what is behind the last fetch is waited for
    done: asyncio.Event = field(default_factory=asyncio.Event)
    spans: list[pb.TraceSpan] = field(default_factory=list)
    dropped: int = 0


class Tracer:
    """Records fetches on request. Used on the event loop's thread alone."""

    def __init__(self, pipeline: native.Pipeline) -> None:
        self._pipeline = pipeline
        self._recording: _Recording | None = None

    @contextlib.contextmanager
    def fetch(self, owner: str, chunks: int) -> Iterator[None]:
        """Note a host's Fetch call of so many chunks from its beginning to its end."""
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
        """Note what a host had decided for a prompt that has its first token now."""
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
        """Note a step of a host's Fetch call; ``count`` is how many chunks or pieces it is about."""
        recording = self._of(owner)
        if recording is None:
            yield
            return
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            self._note(recording, pb.TraceSpan(step=name, begin_ns=begin, end_ns=end, piece=count))

    def _of(self, owner: str) -> _Recording | None:
        recording = self._recording
        return recording if recording is not None and recording.owner == owner else None

    @contextlib.contextmanager
    def recording(self, owner: str, fetches: int, *, decides: bool) -> Iterator[_Recording]:
        """Record a host's fetches while in this context; ``done`` is set when so many that began meanwhile are over.

        Of a host that ``decides``, one of its decisions has to follow.

        Raises:
            NotTraceable: another recording runs, or the pipeline has no room for events.
        """
        if self._recording is not None:
            raise NotTraceable("another recording is in progress; try again when it is over")
        try:
            self._pipeline.trace_start()
        except NativeError as error:
            raise NotTraceable("trace_events is 0: there is no room to record anything") from error
        self._recording = _Recording(owner, fetches, decides)
        try:
            yield self._recording
        finally:
            self._pipeline.trace_stop()
            self._recording = None

    def result(self, recording: _Recording) -> Iterator[pb.TraceResponse]:
        """Yield the parts of a recording that has just ended, before there is another."""
        events, dropped = self._pipeline.trace_read()
        # Batches run one at a time, so that what the threads did within a batch of this host was done for it.
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
    """Return what one ``native.TRACE_DTYPE`` row says; arguments in the order of its fields."""
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
