"""Real vLLM, a real data plane, and a storage node whose records are only in a bucket behind a slow link."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Event
from typing import Any

import pytest
from collector import Collector, collector
from faulty_s3 import BUCKET, Answer, FaultyS3, faulty_s3
from kit import add, greedy
from machine import NEVER_S, PATIENT, free_port, wait_for
from redis import Redis
from stack import Process

from host_control.client import DataPlaneClient

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS, CHUNKS = 1000, 3
SEEDS = range(1, 4)
"""Seeds of other stored prompts with two chunks each."""
RATE = 400_000
"""Bytes per second of the bucket's link: a chunk takes about a second."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultyS3]:
    with faulty_s3() as server:
        yield server


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(storage: Process, spans: Collector) -> Iterator[Process]:
    listen = f"127.0.0.1:{free_port()}"
    process = Process(
        "dpu", "--listen", listen, "--storage", storage.address, "--otlp-endpoint", spans.endpoint, *PATIENT
    )
    yield process
    process.stop()


@pytest.fixture(scope="module")
def storage(bucket: FaultyS3, spans: Collector) -> Iterator[Process]:
    """A storage node with memory and a bucket."""
    s3 = {"bucket": BUCKET, "endpoint": bucket.endpoint, "gather_s": 0.1, "timeout_s": NEVER_S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        process = Process(
            "storage", "--port", str(free_port()), "--s3", json.dumps(s3), "--otlp-endpoint", spans.endpoint
        )
        yield process
        process.stop()


def of_bucket(storage: Process) -> dict[str, Any]:
    with Redis(port=int(storage.address.rpartition(":")[2])) as client:
        return dict(client.info("s3"))


@pytest.fixture(scope="module")
def engine(
    make_engine: Callable[..., Any],
    daemon: Process,
    storage: Process,
    bucket: FaultyS3,
    spans: Collector,
    prompt: Any,
    reference: Any,
) -> Iterator[Any]:
    """A second engine, after a first one has stored all prompts and the node has restarted with empty memory."""
    with closing(make_engine(daemon.address)) as first:
        for tokens in [prompt(TOKENS), *(prompt(600, seed) for seed in SEEDS)]:
            assert first.outputs([tokens]) == reference([tokens])
        first.flush()
    stored = CHUNKS + 2 * len(SEEDS)
    wait_for(lambda: of_bucket(storage)["records"] == stored and not of_bucket(storage)["waiting_records"])
    storage.kill()
    storage.restart()
    wait_for(lambda: of_bucket(storage)["records"] == stored)
    second = make_engine(daemon.address, extra={"otlp_endpoint": spans.endpoint})
    client = DataPlaneClient(daemon.address)
    wait_for(lambda: client.wait_ready(1.0) and client.statistics().storage_connected)
    second.client = client
    yield second
    client.close()
    second.close()


def test_a_cold_prompt_is_loaded_while_others_run(
    engine: Any, bucket: FaultyS3, storage: Process, prompt: Any, reference: Any
) -> None:
    """The bucket sends nothing until another request has ended: no lookup waits for it."""
    gate, tokens, other = Event(), prompt(TOKENS), prompt(240)
    read = of_bucket(storage)["read_records"]
    expected, expected_other = reference([tokens])[0], reference([other])[0]
    before, core = engine.client.statistics(), engine.llm.llm_engine
    engine.counted = engine.counters()
    bucket.fault = lambda asked: Answer(after=gate) if asked.operation == "get" else None
    bucket.bytes_per_s = RATE
    done: dict[str, Any] = {}

    def step_until(name: str) -> None:
        def stepped() -> bool:
            done.update({output.request_id.partition("-")[0]: output for output in core.step() if output.finished})
            return name in done

        wait_for(stepped)

    try:
        add(engine, "cold", tokens)
        wait_for(lambda: core.step() == [] and engine.connector._scheduler._loads)
        add(engine, "other", other)
        step_until("other")
        assert "cold" not in done
        assert list(done["other"].outputs[0].token_ids) == expected_other
    finally:
        gate.set()
    step_until("cold")
    assert list(done["cold"].outputs[0].token_ids) == expected
    assert done["cold"].num_cached_tokens == CHUNKS * 256, "not all stored chunks were loaded"
    engine.flush()
    counted = engine.counted_since()
    assert counted["tier_hit_tokens/cold"] == CHUNKS * 256 == counted["loaded_tokens"]
    assert not any("failures" in name for name in counted)
    assert engine.client.statistics().stored_raw_bytes == before.stored_raw_bytes, "chunks were stored again"
    assert of_bucket(storage)["read_records"] - read == CHUNKS, "a record was read twice"


def test_a_cold_prompt_is_computed_after_its_deadline(
    engine: Any, bucket: FaultyS3, prompt: Any, reference: Any
) -> None:
    gate, tokens = Event(), prompt(600, SEEDS[0])
    before = engine.client.statistics()
    engine.counted = engine.counters()
    bucket.fault = lambda asked: Answer(after=gate) if asked.operation == "get" else None
    try:
        with engine.impatient(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.connector._scheduler._lookup, "_load_timeout", 1.0)
            assert engine.outputs([tokens]) == reference([tokens])
    finally:
        gate.set()
    engine.flush()
    counted = engine.counted_since()
    assert counted.get("load_failures/cold_late", 0) + counted.get("load_failures/deadline", 0) == 1, counted
    assert engine.client.statistics().stored_raw_bytes == before.stored_raw_bytes, "chunks were stored again"


def test_a_load_is_one_trace_from_the_request_to_the_bucket(
    engine: Any,
    bucket: FaultyS3,
    spans: Collector,
    prompt: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller, trace, core = "c" * 16, "7" * 32, engine.llm.llm_engine
    bucket.fault, bucket.bytes_per_s = lambda asked: None, 0.0
    # It knows the bucket as slow.
    monkeypatch.setattr(engine.connector._scheduler, "_policy_runner", None)
    with caplog.at_level(logging.DEBUG, "vllm.shadowserve"):
        headers = {"traceparent": f"00-{trace}-{caller}-01"}
        core.add_request("traced", {"prompt_token_ids": prompt(600, 3)}, greedy(), trace_headers=headers)
        add(engine, "unknown", prompt(513, 77))
        wait_for(lambda: core.step() is not None and not core.has_unfinished_requests())
        add(engine, "partial", prompt(256, 3) + prompt(400, 77))
        engine.forget()
        wait_for(lambda: core.step() is not None and not core.has_unfinished_requests())
    (line,) = (line for line in caplog.messages if "request traced" in line)
    assert "512 of 600 prompt tokens loaded, 0 in vLLM's own cache; reason: complete; chunks: 2 cold" in line
    (line,) = (line for line in caplog.messages if "request unknown" in line)
    assert "0 of 513 prompt tokens loaded" in line and "reason: absent" in line
    (line,) = (line for line in caplog.messages if "request partial" in line)
    assert "256 of 656 prompt tokens loaded" in line and "reason: absent; chunks: 1 storage" in line
    path = ["request", "transfer", "dpu.fetch", "dpu.batch", "storage.getrange"]
    found = spans.trace(
        trace, caller, *path, "lookup", "dpu.lookup", "storage.kv.meta", "storage.kv.prefetch", "s3.read"
    )
    by_id = {span.id: span for span in found}
    tree = {(by_id[span.parent].name if span.parent != caller else "", span.name) for span in found}
    assert {("", "request"), *zip(path, path[1:], strict=False)} <= tree
    assert {("request", "lookup"), ("lookup", "dpu.lookup"), ("dpu.lookup", "storage.kv.meta")} <= tree
    assert ("storage.kv.prefetch", "s3.read") in tree
    (request,) = (span for span in found if span.name == "request")
    assert request.service == "shadowserve-engine" and request.attributes["loaded_tokens"] == 512
    assert (request.attributes["reason"], request.attributes["tiers"]) == ("complete", "2 cold")
    assert 0 < request.attributes["waited_s"] <= request.seconds + 0.1
    others = [span for span in spans.spans if span.name == "request" and span.trace != trace]
    assert all(not span.parent for span in others), "a request without a caller's context begins a trace"
