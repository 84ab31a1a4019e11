"""Hints of requests, from real vLLM to a real storage node that has too little memory for all prompts."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from kit import greedy
from machine import free_port, wait_for
from redis import Redis
from stack import Process

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTH, CHUNKS = 600, 2
CACHED = 512
PINNED, PLAIN, BRIEF, ABSURD = 1, 2, 3, 4
"""Seeds of prompts."""


@pytest.fixture(scope="module")
def storage() -> Iterator[Process]:
    process = Process("storage", "--port", str(free_port()), "--memory-budget-bytes", "16MiB")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def engine(daemon: Process, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    with closing(make_engine(daemon.address)) as made:
        yield made


@pytest.fixture
def node(storage: Process) -> Iterator[Redis]:
    with Redis(port=int(storage.address.rpartition(":")[2]), decode_responses=True) as client:
        yield client


@pytest.fixture
def serve_hinted(engine: Any, prompt: Any, reference: Any) -> Callable[..., int]:
    """Return a function that serves a prompt with hints, checks its output, and returns the number of cached tokens."""

    def served(seed: int, hints: Any = None, **more: Any) -> int:
        parameters = greedy()
        if hints is not None:
            parameters.extra_args = {"kv_transfer_params": {"shadowserve_hints": hints}}
        engine.forget()
        llm_engine = engine.llm.llm_engine
        llm_engine.add_request("r", {"prompt_token_ids": prompt(LENGTH, seed)}, parameters, **more)
        outputs = [output for output in iter_steps(llm_engine) if output.finished]
        engine.flush()
        assert [list(each.outputs[0].token_ids) for each in outputs] == reference([prompt(LENGTH, seed)])
        return int(outputs[0].num_cached_tokens or 0)

    return served


def iter_steps(llm_engine: Any) -> Iterator[Any]:
    while llm_engine.has_unfinished_requests():
        yield from llm_engine.step()


@pytest.fixture
def press(engine: Any, prompt: Any, node: Redis) -> Callable[[], None]:
    """Return a function that stores more than the node's memory holds."""

    def pressed() -> None:
        before = int(node.info("stats")["evicted_keys"])
        for seed in range(100, 130):
            engine.forget()
            engine.outputs([prompt(1000, seed)])
            engine.flush()
            if int(node.info("stats")["evicted_keys"]) - before > 24:
                return
        raise AssertionError("the node evicted too little")

    return pressed


def pins(node: Redis) -> int:
    return sum(int(tenant["keys"]) for tenant in node.execute_command("KV.PINS"))


def test_a_pinned_prefix_survives_pressure_until_it_is_released(
    serve_hinted: Callable[..., int], press: Callable[[], None], node: Redis
) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    assert serve_hinted(PINNED, {"pin_s": 300}, session_id="s") == serve_hinted(PLAIN) == 0
    wait_for(lambda: pins(node) == CHUNKS)
    press()
    assert (serve_hinted(PINNED), serve_hinted(PLAIN)) == (CACHED, 0)
    release = KvHintsEnvelope("1", "m", [KvHintAction("1", "release", "1", {})])
    assert serve_hinted(PINNED, session_id="s", kv_hints=release) == CACHED
    wait_for(lambda: pins(node) == 0)
    press()
    assert serve_hinted(PINNED) == 0


def test_what_a_request_stores_with_a_ttl_is_gone_after_it(serve_hinted: Callable[..., int], node: Redis) -> None:
    before = set(node.scan_iter(count=1000))
    assert serve_hinted(BRIEF, {"ttl_s": 1}) == 0
    wait_for(lambda: not any(node.ttl(key) >= 0 for key in set(node.scan_iter(count=1000)) - before))
    assert serve_hinted(BRIEF) == 0
    assert serve_hinted(BRIEF) == CACHED, "stored again, without an end"


def test_absurd_hints_change_nothing(serve_hinted: Callable[..., int], engine: Any, node: Redis) -> None:
    counted = engine.counters().get("slower_paths/hint_invalid", 0)
    for hints in ({"pin_s": -1}, {"ttl_s": 1e12}, {"release": "yes"}, {str(n): n for n in range(10_000)}, "all"):
        serve_hinted(ABSURD, hints)
    assert pins(node) == 0 and serve_hinted(ABSURD) == CACHED
    assert engine.counters()["slower_paths/hint_invalid"] == counted + 5
