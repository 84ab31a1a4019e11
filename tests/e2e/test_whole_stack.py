"""Real vLLM, the real data plane daemon and the real storage server, each a process of its own that can be killed."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import WAIT_MAX_S, free_port, wait_for
from stack import Process, data_plane

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (240, 256, 300, 512, 700, 1000)


@pytest.fixture(scope="module")
def storage() -> Iterator[Process]:
    process = Process("storage", "--port", str(free_port()))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def daemon(storage: Process) -> Iterator[Process]:
    process = data_plane(storage.address)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def first_outputs(daemon: Process, make_engine: Callable[..., Any], prompt: Any, reference: Any) -> list[list[int]]:
    engine = make_engine(daemon.address)
    try:
        outputs = []
        for length in LENGTHS:
            outputs += engine.outputs([prompt(length)])
            engine.flush()  # else the next one, which begins alike, may store the same chunks again
        engine.outputs([prompt(2)])  # counts are taken with a step
        assert engine.counters()["stored_chunks"] == 1000 // 256
    finally:
        engine.close()
    return outputs


@pytest.fixture(scope="module")
def shared_engine(daemon: Process, make_engine: Callable[..., Any], first_outputs: Any) -> Iterator[Any]:
    engine = make_engine(daemon.address)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Any, prompt: Any) -> Any:
    """The second engine, with everything stored and everything running."""
    ends = time.monotonic() + 2 * WAIT_MAX_S
    while True:
        shared_engine.forget()
        (output,) = shared_engine.generate([prompt(1000)])
        shared_engine.flush()
        if output.num_cached_tokens == 768:
            break
        assert time.monotonic() < ends, "the parts do not find each other again"
    shared_engine.forget()
    shared_engine.counted = shared_engine.counters()
    return shared_engine


def failures(engine: Any) -> set[str]:
    return {name for name in engine.counted_since() if "failures" in name}


def test_second_engine_loads_what_the_first_stored(
    shared_engine: Any, first_outputs: Any, reference: Any, prompt: Any
) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    assert first_outputs == reference(prompts)
    for length, expected in zip(LENGTHS, reference(prompts), strict=True):
        shared_engine.forget()
        (output,) = shared_engine.generate([prompt(length)])
        assert list(output.outputs[0].token_ids) == expected
        assert output.num_cached_tokens == min(length // 256 * 256, length - 1)
    shared_engine.forget()
    assert shared_engine.outputs(prompts) == reference(prompts), "all at once"


def test_daemon_is_killed_and_comes_back(engine: Any, daemon: Process, reference: Any, prompt: Any) -> None:
    daemon.kill()
    try:
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        assert failures(engine)
    finally:
        daemon.restart()


def test_daemon_is_killed_while_it_loads(engine: Any, daemon: Process, reference: Any, prompt: Any) -> None:
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm_engine.add_request("r", {"prompt_token_ids": prompt(1000)}, parameters)
    ends = time.monotonic() + WAIT_MAX_S
    while not any(str(request.status).endswith("WAITING_FOR_REMOTE_KVS") for request in _requests(engine)):
        if not engine.connector._scheduler._loading:
            present = engine.connector._scheduler._lookup.present(_id(engine))
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
        assert engine.free_blocks() == engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    finally:
        daemon.restart()


def _requests(engine: Any) -> list[Any]:
    return list(engine.scheduler.requests.values())


def _id(engine: Any) -> str:
    return next(iter(engine.scheduler.requests), "")


def test_frozen_daemon_costs_a_deadline(engine: Any, daemon: Process, reference: Any, prompt: Any) -> None:
    daemon.freeze(frozen=True)
    try:
        begin = time.monotonic()
        with engine.impatient():
            assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        assert time.monotonic() - begin < WAIT_MAX_S
        assert failures(engine)
    finally:
        daemon.freeze(frozen=False)


def test_storage_is_killed_and_comes_back_empty(engine: Any, storage: Process, reference: Any, prompt: Any) -> None:
    storage.kill()
    try:
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        assert failures(engine)
    finally:
        storage.restart()


def test_frozen_storage_costs_a_deadline(engine: Any, storage: Process, reference: Any, prompt: Any) -> None:
    storage.freeze(frozen=True)
    try:
        begin = time.monotonic()
        with engine.impatient():
            assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        assert time.monotonic() - begin < WAIT_MAX_S
        assert failures(engine)
    finally:
        storage.freeze(frozen=False)


@pytest.mark.parametrize("value", [b"", b"no record", bytes(4096)], ids=["empty", "text", "zeros"])
def test_value_that_is_no_record_is_recomputed_and_replaced(
    engine: Any, storage: Process, reference: Any, prompt: Any, value: bytes
) -> None:
    """Damaged records cannot be put there: the server refuses them. Those are the data plane's tests' business."""
    import redis

    host, _, port = storage.address.rpartition(":")
    with redis.Redis(host, int(port)) as client:
        names = list(client.scan_iter())
        for name in names:
            client.delete(name)
            client.set(name, value)
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        engine.flush()
        assert all(len(client.get(name)) > 4096 for name in names)


def test_wrong_kv_would_be_seen(engine: Any, reference: Any, prompt: Any) -> None:
    """The other tests compare outputs; this one shows that outputs do tell right KV from wrong."""
    worker = engine.worker
    manager = worker._managers[0]
    scatter, manager._scatter = manager._scatter, lambda job, part, first, chunks: None
    try:
        prompts = [prompt(length) for length in LENGTHS]
        assert engine.outputs(prompts) != reference(prompts)
    finally:
        manager._scatter = scatter


def test_absent_daemon_is_no_error(engine: Any, make_engine: Any, reference: Any, prompt: Any) -> None:
    """Last: it ends the engine of the other tests, for one process holds one engine."""
    engine.close()
    alone = make_engine("127.0.0.1:1", extra={"connect_timeout_s": 0.5})
    try:
        prompts = [prompt(512), prompt(700)]
        assert alone.outputs(prompts) == reference(prompts)
        assert any(name.startswith("dropped_stores") for name in alone.counters())
    finally:
        alone.close()
        engine.close = lambda: None


def test_binned_records_are_several_times_smaller(daemon: Process, make_engine: Any, prompt: Any) -> None:
    engine = make_engine(daemon.address, extra={"quantizer": "binned"})
    try:
        engine.outputs([prompt(1000)])
        engine.flush()
        engine.forget()
        (output,) = engine.generate([prompt(1000)])
        assert output.num_cached_tokens == 768
        counters = engine.counters()
        assert counters["stored_bytes"] * 4 < counters["stored_raw_bytes"]
    finally:
        engine.close()


@pytest.fixture
def redis_address(tmp_path: Path) -> Iterator[str]:
    """A real Redis, which keeps whatever it is given: our own server would refuse damaged records."""
    import redis

    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with contextlib.suppress(redis.ConnectionError), redis.Redis("127.0.0.1", port) as client:
            return bool(client.ping())
        return False

    wait_for(answers)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait()


def _flip(record: bytes, position: float) -> bytes:
    """Return the record with one bit flipped, at a fraction of its length."""
    index = int(position * (len(record) - 1))
    return record[:index] + bytes([record[index] ^ 0x10]) + record[index + 1 :]


def test_damaged_records_are_recomputed(redis_address: str, make_engine: Any, reference: Any, prompt: Any) -> None:
    import redis

    host, _, port = redis_address.rpartition(":")
    plane = data_plane(redis_address)
    engine = make_engine(plane.address)
    try:
        prompts = [prompt(1000)]
        with redis.Redis(host, int(port)) as client:
            assert engine.outputs(prompts) == reference(prompts)
            engine.flush()
            names = sorted(client.scan_iter(match="kv:*"))
            records = [client.get(name) for name in names]
            assert len(records) == 3
            for position in (0.0, 0.01, 0.3, 0.7, 1.0):
                for name, record in zip(names, records, strict=True):
                    client.set(name, _flip(record, position))
                engine.forget()
                assert engine.outputs(prompts) == reference(prompts), f"a bit flipped at {position}"
                engine.flush()
            for name, record in zip(names, records, strict=True):
                client.set(name, record[: len(record) // 2])
            engine.forget()
            assert engine.outputs(prompts) == reference(prompts), "cut in half"
            first, second, third = records
            for name, record in zip(names, (second, third, first), strict=True):
                client.set(name, record)
            engine.forget()
            assert engine.outputs(prompts) == reference(prompts), "each under another's key"
    finally:
        engine.close()
        plane.stop()


def test_full_storage_server_is_no_error(make_engine: Any, reference: Any, prompt: Any) -> None:
    small = Process("storage", "--port", "0", "--memory-budget-bytes", "1MiB")
    plane = data_plane(small.address)
    engine = make_engine(plane.address)
    try:
        # One chunk's record takes nearly the whole budget: each that is stored drives another out.
        for length in (1000, 700, 512, 1000):
            assert engine.outputs([prompt(length)]) == reference([prompt(length)])
            engine.flush()
            engine.forget()
    finally:
        engine.close()
        plane.stop()
        small.stop()


def test_nothing_is_left_in_shared_memory() -> None:
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"shadowserve-05e1f00d{os.getpid():08x}")] == []
