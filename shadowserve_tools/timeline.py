"""A recorded fetch as a timeline in Chrome's trace event format, and a summary of its stages.

ui.perfetto.dev and chrome://tracing open the JSON. A core is a process there, and each thread of a stage on it a track;
the steps of the Fetch call have a process of their own. Times are microseconds from the first event.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shadowserve.proto import dataplane_pb2 as pb

STAGES: Final = ("net", "decompress", "dequantize", "dma")
"""Steps of the pipeline's threads, in the order of the data."""
DECISION: Final = "decision"
"""Step of a host's fetch-or-recompute decision: from the decision to the first token."""
_CALL: Final = "Fetch call"
_DECISIONS: Final = "decisions"
_LAYERS: Final = "waits for layers"


@dataclass(frozen=True)
class StageTime:
    """Time use of one stage's threads.

    Attributes:
        spans: Number of slices, or for ``net`` of system calls that received bytes.
        busy_ns: Time in spans, summed over the threads; nested spans count once.
        waiting_ns: Time outside of all spans of its threads, between the first and the last event of a batch.
        share: Part of the threads' time in this stage's spans.
    """

    stage: str
    threads: int
    spans: int
    busy_ns: int
    waiting_ns: int
    share: float
    input_bytes: int
    output_bytes: int


def lanes(spans: Sequence[pb.TraceSpan]) -> list[list[pb.TraceSpan]]:
    """Distribute a track's spans over the fewest lanes in which spans nest or do not overlap.

    A CPU's track has one lane. Tasks of an accelerator may overlap in other ways.
    """
    found: list[list[pb.TraceSpan]] = []
    open_spans: list[list[pb.TraceSpan]] = []  # open spans of each lane, the innermost last
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        for lane, stack in zip(found, open_spans, strict=True):
            while stack and stack[-1].end_ns <= span.begin_ns:
                stack.pop()
            if not stack or span.end_ns <= stack[-1].end_ns:
                lane.append(span)
                stack.append(span)
                break
        else:
            found.append([span])
            open_spans.append([span])
    return found


def chrome_trace(spans: Sequence[pb.TraceSpan], about: dict[str, Any]) -> dict[str, Any]:
    """Return the whole document for at least one span; ``about`` describes the machine and the fetch."""
    start = min(span.begin_ns for span in spans)
    tracks: dict[tuple[int, str, int], list[pb.TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.decision.layer_waits:
            tracks[-1, _LAYERS, 0] += _layer_waits(span)
        call = _DECISIONS if span.step == DECISION else _CALL
        place = (span.core, span.step, span.thread) if span.step in STAGES else (-1, call, 0)
        tracks[place].append(span)
    events: list[dict[str, Any]] = []
    for core in sorted({core for core, _, _ in tracks}):
        events += _names("process", core + 2, 0, _CALL if core < 0 else f"core {core}", core + 1)
    number = 0
    for core, step, thread in sorted(tracks, key=lambda track: (track[0], _order(track[1]), track[2])):
        for index, lane in enumerate(lanes(tracks[core, step, thread])):
            number += 1
            name = f"{step} {thread}" if step in STAGES else step
            events += _names("thread", core + 2, number, f"{name} ({index + 1})" if index else name, number)
            events += [_complete(span, core + 2, number, start) for span in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _layer_waits(span: pb.TraceSpan) -> Iterator[pb.TraceSpan]:
    """Yield a span for each wait of an engine's step for a layer; ``slice`` is the layer, ``piece`` those ahead."""
    for layer, wait in enumerate(span.decision.layer_waits):
        begin = span.begin_ns + int(wait.begin_s * 1e9)
        end = begin + int(wait.seconds * 1e9)
        yield pb.TraceSpan(step=_LAYERS, core=-1, begin_ns=begin, end_ns=end, slice=layer, piece=wait.ahead)


def _order(step: str) -> int:
    return STAGES.index(step) if step in STAGES else -1


def _names(what: str, process: int, thread: int, name: str, position: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": process, "tid": thread}
    return [
        {"name": f"{what}_name", **place, "args": {"name": name}},
        {"name": f"{what}_sort_index", **place, "args": {"sort_index": position}},
    ]


def _complete(span: pb.TraceSpan, process: int, thread: int, start: int) -> dict[str, Any]:
    arguments: dict[str, int | float | str] = {}
    name = f"{span.step} {span.slice}" if span.slice >= 0 else span.step
    if span.step == _LAYERS:
        name, arguments = f"layer {span.slice}", {"layers_ahead": span.piece}
    elif span.step == DECISION:
        decision = span.decision
        name = decision.kind
        arguments = {"tokens": decision.tokens, "loaded_tokens": decision.loaded_tokens}
        arguments |= {f"predicted_{way}_ms": 1e3 * decision.predicted[way] for way in sorted(decision.predicted)}
        arguments |= {"predicted_ms": 1e3 * decision.predicted_seconds, "came_ms": 1e3 * decision.seconds}
        arguments |= {"stored_bytes": decision.stored_bytes}
        arguments |= {f"{tier}_bytes": decision.tier_bytes[tier] for tier in sorted(decision.tier_bytes)}
        arguments |= {"cold_ms": 1e3 * decision.cold_seconds, "queued_ms": 1e3 * decision.queued_seconds}
        arguments |= {"not_layerwise": decision.not_layerwise} if decision.not_layerwise else {}
    elif span.step in STAGES:
        arguments = {"batch": span.batch, "piece": span.piece}
        if span.slice >= 0:
            arguments["slice"] = span.slice
        arguments |= {"input_bytes": span.input_bytes, "output_bytes": span.output_bytes}
    elif span.piece:
        arguments = {"count": span.piece}
    return {
        "name": name,
        "cat": span.step,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": (span.begin_ns - start) / 1000,
        "dur": (span.end_ns - span.begin_ns) / 1000,
        "args": arguments,
    }


def stage_times(spans: Iterable[pb.TraceSpan]) -> list[StageTime]:
    """Return the time use of each stage's threads, over all batches of a recording."""
    own: dict[str, list[pb.TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.step in STAGES:
            own[span.step].append(span)
    window = _window([span for each in own.values() for span in each])
    busy = {stage: _busy(each) for stage, each in own.items()}
    threads = {stage: len({span.thread for span in each}) for stage, each in own.items()}
    times = []
    for stage in STAGES:
        if stage not in own:
            continue
        # Fused, the decompress threads dequantize, too.
        together = [stage] if "dma" in own or stage == "net" else [each for each in ("decompress", "dequantize")]
        available = window * threads[stage]
        times.append(
            StageTime(
                stage=stage,
                threads=threads[stage],
                spans=len(own[stage]),
                busy_ns=busy[stage],
                waiting_ns=max(0, available - sum(busy.get(each, 0) for each in together)),
                share=busy[stage] / available if available else 0.0,
                input_bytes=sum(span.input_bytes for span in own[stage]),
                output_bytes=sum(span.output_bytes for span in own[stage]),
            )
        )
    return times


def _window(spans: Sequence[pb.TraceSpan]) -> int:
    """Return the nanoseconds from each batch's first event to its last, summed."""
    batches: dict[int, tuple[int, int]] = {}
    for span in spans:
        begin, end = batches.get(span.batch, (span.begin_ns, span.end_ns))
        batches[span.batch] = (min(begin, span.begin_ns), max(end, span.end_ns))
    return sum(end - begin for begin, end in batches.values())


def _busy(spans: Sequence[pb.TraceSpan]) -> int:
    """Nanoseconds that any span covers, thread by thread."""
    total = 0
    covered: dict[int, int] = {}  # end of the covered time, by thread
    for span in sorted(spans, key=lambda span: span.begin_ns):
        until = covered.get(span.thread, 0)
        total += max(0, span.end_ns - max(span.begin_ns, until))
        covered[span.thread] = max(until, span.end_ns)
    return total
