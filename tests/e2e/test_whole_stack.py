"""Real vLLM with a real data plane and a real storage node in their own processes: faults of each process."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from kit import add, assert_all_free
from machine import WAIT_MAX_S, wait_for
from stack import Process

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (240, 256, 300, 512, 700, 1000)


@pytest.fixture(scope="module")
def first_outputs(daemon: Process, make_engine: Callable[..., Any], prompt: Any, reference: Any) -> list[list[int]]:
    with closing(make_engine(daemon.address)) as engine:
        outputs = []
        for length in LENGTHS:
            outputs += engine.outputs([prompt(length)])
            engine.flush()  # otherwise the next prompt, with the same prefix, may store the same chunks
        engine.outputs([prompt(2)])  # vLLM collects counters in a step
        assert engine.counters()["stored_chunks"] == 1000 // 256
    return outputs


@pytest.fixture(scope="module")
def shared_engine(daemon: Process, make_engine: Callable[..., Any], first_outputs: Any) -> Iterator[Any]:
    with closing(make_engine(daemon.address)) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Any, serve: Any) -> Any:
    """The second engine, after all processes are connected and all chunks are stored."""

    def connected() -> bool:
        shared_engine.forget()
        cached = serve(shared_engine, 1000)
        shared_engine.flush()
        return bool(cached == 768)

    wait_for(connected, 2 * WAIT_MAX_S)
    shared_engine.forget()
    shared_engine.counted = shared_engine.counters()
    return shared_engine


def failures(engine: Any) -> set[str]:
    return {name for name in engine.counted_since() if "failures" in name}


def test_a_second_engine_loads_what_the_first_stored(
    shared_engine: Any, first_outputs: Any, reference: Any, prompt: Any, serve: Any
) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    assert first_outputs == reference(prompts)
    for length in LENGTHS:
        shared_engine.forget()
        assert serve(shared_engine, length) == min(length // 256 * 256, length - 1)
    shared_engine.forget()
    assert shared_engine.outputs(prompts) == reference(prompts), "all at once"


@pytest.mark.parametrize("process", ["daemon", "storage"])
def test_a_killed_process_costs_recomputation(engine: Any, process: str, request: Any, serve: Any) -> None:
    """A storage node restarts empty."""
    killed = request.getfixturevalue(process)
    killed.kill()
    try:
        serve(engine, 1000)
        assert failures(engine)
    finally:
        killed.restart()


@pytest.mark.parametrize("process", ["daemon", "storage"])
def test_a_frozen_process_costs_a_deadline(engine: Any, process: str, request: Any, serve: Any) -> None:
    frozen = request.getfixturevalue(process)
    frozen.freeze(frozen=True)
    try:
        begin = time.monotonic()
        with engine.impatient():
            serve(engine, 1000)
        assert time.monotonic() - begin < WAIT_MAX_S
        assert failures(engine)
    finally:
        frozen.freeze(frozen=False)


def test_a_data_plane_killed_during_a_load_costs_recomputation(
    engine: Any, daemon: Process, reference: Any, prompt: Any
) -> None:
    llm_engine = engine.llm.llm_engine
    add(engine, "r", prompt(1000))
    ends = time.monotonic() + WAIT_MAX_S
    requests = engine.scheduler.requests
    while not any(str(request.status).endswith("WAITING_FOR_REMOTE_KVS") for request in requests.values()):
        if not engine.connector._scheduler._loads:
            present = engine.connector._scheduler._lookup.present(next(iter(requests), ""))
            daemon.freeze(frozen=present is not None and bool(present[0].any()))
        llm_engine.step()
        assert time.monotonic() < ends
    daemon.freeze(frozen=False)
    daemon.kill()
    try:
        finished = []
        while not finished:
            finished = [output for output in llm_engine.step() if output.finished]
            assert time.monotonic() < ends
        assert list(finished[0].outputs[0].token_ids) == reference([prompt(1000)])[0]
        assert_all_free(engine)
    finally:
        daemon.restart()


def test_wrong_kv_changes_outputs(engine: Any, reference: Any, prompt: Any) -> None:
    """The control for the other tests, which compare outputs."""
    worker = engine.worker
    manager = worker.loads.managers[0]
    scatter, manager._batches._scatter = manager._batches._scatter, lambda job, part, first, chunks: None
    try:
        prompts = [prompt(length) for length in LENGTHS]
        assert engine.outputs(prompts) != reference(prompts)
    finally:
        manager._batches._scatter = scatter


def test_an_absent_data_plane_is_not_an_error(engine: Any, make_engine: Any, reference: Any, prompt: Any) -> None:
    """It closes the engine of the tests above, because a process can only have one."""
    engine.close()
    engine.close = lambda: None
    with closing(make_engine("127.0.0.1:1", extra={"connect_timeout_s": 0.5})) as alone:
        prompts = [prompt(512), prompt(700)]
        assert alone.outputs(prompts) == reference(prompts)
        assert any(name.startswith("dropped_stores") for name in alone.counters())


def test_nothing_is_left_in_shared_memory() -> None:
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"shadowserve-05e1f00d{os.getpid():08x}")] == []
