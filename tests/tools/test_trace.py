"""``shadowserve trace``: a document for timeline viewers, without missing, duplicate or misplaced spans."""

import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from host_control.client import DataPlaneClient
from host_control.fetch_policy import Decided, Decision
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier
from shadowserve_tools import main
from shadowserve_tools.processes import free_port, start_data_plane, start_storage
from shadowserve_tools.timeline import chrome_trace, lanes, stage_times

SLICES = 64
"""Slices of a chunk with 32 layers of K and V."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments])


def span(step: str, begin: int, end: int, *, thread: int = 0, core: int = 0, **more: int) -> pb.TraceSpan:
    return pb.TraceSpan(step=step, begin_ns=begin, end_ns=end, thread=thread, core=core, **more)


@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_fetch_becomes_a_timeline(tmp_path: Path, fused: str) -> None:
    file = tmp_path / "fetch.json"
    buffers = ("decompression", "dequantization", "dma_source", "store")
    small = [word for name in buffers for word in ("--set", f"{name}_buffer_bytes=64MiB")]
    done = run("-o", str(file), "--chunks", "2", "--set", f"fused={fused}", *small)
    assert done.exit_code == 0, done.output
    stages = ["decompress", "dequantize"] if fused == "true" else ["decompress", "dequantize", "dma"]
    assert all(re.search(rf"│ {stage} +│ \d+ +│ 128 +│", done.output) for stage in stages), done.output
    document = json.loads(file.read_text())
    check_tracks(document)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    seen = Counter((event["cat"], event["args"]["slice"]) for event in spans if "slice" in event["args"])
    assert seen == Counter((stage, index) for stage in stages for index in range(2 * SLICES))
    received = sum(event["args"]["output_bytes"] for event in spans if event["cat"] == "net")
    decoded = sum(event["args"]["input_bytes"] for event in spans if event["cat"] == "decompress")
    assert decoded < received < decoded + 1000
    assert {event["name"] for event in spans if event["pid"] == 1} == {"turn", "headers", "plan", "batch", "fetch"}
    assert document["otherData"]["dropped"] == 0


def check_tracks(document: dict[str, Any]) -> None:
    """Every track has a name; times start at 0; on one track, spans are nested or separate."""
    events = document["traceEvents"]
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["pid"] for event in spans} == processes
    assert {(event["pid"], event["tid"]) for event in spans} == named
    assert min(event["ts"] for event in spans) == 0 and all(event["dur"] >= 0 for event in spans)
    tracks = defaultdict(list)
    for event in spans:
        begin = round(event["ts"] * 1000)
        tracks[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    for track in tracks.values():
        open_ends: list[int] = []
        for begin, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_an_unreachable_data_plane_exits_with_1_and_the_command_to_start_one(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "x.json"), "--data-plane", f"127.0.0.1:{free_port()}", "--seconds", "0.1")
    assert done.exit_code == 1
    assert "no data plane answers" in done.output and "shadowserve dpu" in done.output


@pytest.mark.parametrize(
    "arguments", [["--set", "fused"], ["--set", "fused=false", "--data-plane", "127.0.0.1:1"]], ids=" ".join
)
def test_invalid_settings_exit_with_2(tmp_path: Path, arguments: list[str]) -> None:
    done = run("-o", str(tmp_path / "x.json"), *arguments)
    assert done.exit_code == 2 and "--set" in done.output


def test_overlapping_spans_are_in_separate_lanes() -> None:
    nested = [span("dma", 0, 10), span("dma", 2, 10), span("dma", 10, 12)]
    crossing = span("dma", 5, 15)
    assert [len(lane) for lane in lanes(nested)] == [3]
    assert [len(lane) for lane in lanes([*nested, crossing])] == [3, 1]
    check_tracks(chrome_trace([*nested, crossing], {}))


def test_a_decision_has_a_track_with_predicted_and_measured_times() -> None:
    decision = pb.Decision(
        kind="compute", tokens=600, loaded_tokens=0, predicted={"fetch": 0.25, "compute": 0.1}, predicted_seconds=0.1,
        seconds=0.125, stored_bytes=4_000_000, cold_seconds=0.05, queued_seconds=0.01,
        tier_bytes={"memory": 1_000_000, "cold": 3_000_000},
        layer_waits=[pb.LayerWait(begin_s=3e-6 * layer, seconds=2e-6, ahead=layer) for layer in range(2)],
    )  # fmt: skip
    decided = span("decision", 10_000, 20_000, core=-1, slice=-1)
    decided.decision.CopyFrom(decision)
    document = chrome_trace([decided, span("fetch", 0, 30, core=-1, slice=-1)], {})
    check_tracks(document)
    (shown,) = [event for event in document["traceEvents"] if event.get("cat") == "decision"]
    assert shown["name"] == "compute"
    assert shown["args"] == {
        "tokens": 600, "loaded_tokens": 0, "predicted_compute_ms": 100.0, "predicted_fetch_ms": 250.0,
        "predicted_ms": 100.0, "came_ms": 125.0, "stored_bytes": 4_000_000,
        "cold_bytes": 3_000_000, "memory_bytes": 1_000_000, "cold_ms": 50.0, "queued_ms": 10.0,
    }  # fmt: skip
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"decisions", "Fetch call", "waits for layers"}
    waits = [event for event in document["traceEvents"] if event["name"].startswith("layer ")]
    assert [(each["name"], each["args"], each["dur"]) for each in waits] == [
        (f"layer {layer}", {"layers_ahead": layer}, 2.0) for layer in range(2)
    ]
    assert waits[1]["ts"] == pytest.approx(waits[0]["ts"] + 3)


def test_decisions_of_a_running_data_plane_are_printed(tmp_path: Path, data_plane: tuple[str, Any]) -> None:
    """If all is computed, there are no other spans."""
    address, decide = data_plane
    file = tmp_path / "trace.json"
    thread = threading.Thread(target=decide)
    thread.start()
    done = run("-o", str(file), "--data-plane", address, "--seconds", "3")
    thread.join()
    assert done.exit_code == 0, done.output
    said = "decision: compute, 0 of 600 tokens loaded: 125.0 ms to the first token; 100.0 ms predicted"
    assert said in " ".join(done.output.split())
    assert "compute 100.0 ms, fetch 250.0 ms" in " ".join(done.output.split())
    store = (
        "stored: 4.0 MB, 3.0 MB of it in cold, 1.0 MB of it in memory, 50.0 ms to load cold records, "
        "behind 10.0 ms of other loads"
    )
    assert store in " ".join(done.output.split())


@pytest.fixture
def data_plane(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A data plane, and a client that reports decisions to it while it records."""
    stop = threading.Event()
    with start_storage(tmp_path) as storage, start_data_plane(tmp_path, storage.address) as plane:
        with closing(DataPlaneClient(plane.address)) as client:
            client.connect(30.0)

            def decide() -> None:
                done = Decision(
                    way="compute", end_tokens=0, kind="compute", predicted={"fetch": 0.25, "compute": 0.1}, seconds=0.1,
                    tier_bytes={Tier.MEMORY: 1e6, Tier.COLD: 3e6}, cold_seconds=0.05, queued_seconds=0.01,
                )  # fmt: skip
                while not stop.wait(0.05):
                    client.decided(Decided(request_id="r", decision=done, tokens=600, seconds=0.125))

            yield plane.address, lambda: (threading.Timer(2.0, stop.set).start(), decide())


def test_time_counts_once_for_each_thread() -> None:
    spans = [
        span("net", 0, 10, batch=1),
        span("decompress", 10, 40, batch=1, input_bytes=5, output_bytes=7),
        span("decompress", 20, 40, batch=1),
        span("dequantize", 40, 50, batch=1),
        span("decompress", 10, 30, thread=1, batch=1),
        span("fetch", 0, 1000, core=-1),
    ]
    net, decompress, dequantize = stage_times(spans)
    assert (net.busy_ns, net.waiting_ns, net.share) == (10, 40, 0.2)
    assert (decompress.busy_ns, decompress.threads, decompress.share) == (50, 2, 0.5)
    assert (decompress.input_bytes, decompress.output_bytes, decompress.spans) == (5, 7, 3)
    assert decompress.waiting_ns == 2 * 50 - 50 - 10  # the same threads dequantize
    assert (dequantize.busy_ns, dequantize.waiting_ns) == (10, 0)
