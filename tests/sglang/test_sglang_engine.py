"""ShadowServe's storage backend in SGLang's engine: hits, equal outputs, and faults that cost a hit at most."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import wait_for
from nodes import DataPlane, Storage
from tiny_models import random_tokens

from host_control.sglang.blocks import Pages, levels
from shadowserve_tools.bench.peers.sglang import SGLang

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

PROMPT, PAGE = random_tokens(600, "sglang"), 16
PAGES = len(PROMPT) // PAGE


def records(first: int, end: int, page: int = PAGE) -> int:
    """Return the number of records of a prompt's pages that SGLang stores in one call."""
    return len(Pages([""] * end, first).cover(levels(page, 256)))


OTHER = random_tokens(16, "another page") + PROMPT[16:]


def fill(engine: SGLang, storage: Storage, page: int = PAGE, ranks: int = 1) -> dict[str, Any]:
    """Compute the prompt, wait until it is stored, and empty the engine's pools."""
    before = storage.stored()
    answer = engine.generate(PROMPT)
    wait_for(lambda: storage.stored() >= before + ranks * records(0, len(PROMPT) // page, page))
    engine.flush()
    return answer


def redis(storage: Storage, *words: bytes) -> bytes:
    """Send a command to a storage node and return the answer."""
    with socket.create_connection(("127.0.0.1", storage.port), timeout=10) as sock:
        sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        data = sock.recv(1 << 16)
        if data.startswith(b"$") and not data.startswith(b"$-1"):
            length, _, data = data.partition(b"\r\n")
            while len(data) < int(length[1:]) + 2:
                data += sock.recv(1 << 16)
            return data[:-2]
        return data


@pytest.fixture(scope="module")
def reference(start: Callable[..., SGLang]) -> dict[str, Any]:
    """Return the answers of an engine that computes everything."""
    engine = start(address=None, enable_hierarchical_cache=False, disable_radix_cache=True)
    answers = {"prompt": engine.generate(PROMPT), "other": engine.generate(OTHER)}
    assert answers["prompt"]["tokens"] != answers["other"]["tokens"]  # another prefix changes the output
    return answers


@pytest.fixture(scope="module")
def filled(reference: Any, start: Callable[..., SGLang], storage: Storage) -> SGLang:
    """Return an engine that has stored the prompt, with empty pools."""
    engine = start()
    assert fill(engine, storage)["tokens"] == reference["prompt"]["tokens"]
    return engine


def assert_same(answer: Any, expected: Any, cached: int | None = None) -> None:
    assert answer["tokens"] == expected["tokens"]
    assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert cached is None or answer["cached"].get("storage", 0) == cached, answer


def test_a_prompt_comes_from_storage_after_a_flush_and_only_after_its_prefix(filled: SGLang, reference: Any) -> None:
    assert_same(filled.generate(PROMPT), reference["prompt"], PAGES * PAGE)
    assert_same(filled.generate(OTHER), reference["other"], 0)


def test_after_pages_in_memory_the_rest_comes_from_storage(filled: SGLang, reference: Any) -> None:
    filled.flush()
    filled.generate(PROMPT[: 19 * PAGE + 1])
    assert_same(filled.generate(PROMPT), reference["prompt"], (PAGES - 19) * PAGE)


def test_turns_of_a_conversation_come_from_storage_with_any_number_of_pages(filled: SGLang, storage: Storage) -> None:
    prompt, known = list(PROMPT), PAGES
    filled.flush()
    for turn in range(4):
        prompt += random_tokens(50 + 23 * turn, f"turn {turn}")
        before = storage.stored()
        answer = filled.generate(prompt)
        assert answer["cached"]["storage"] == known * PAGE
        prompt += answer["tokens"]
        first, known = known, (len(prompt) - 1) // PAGE  # the last token has no KV
        wait_for(lambda before=before, first=first, end=known: storage.stored() == before + records(first, end))
        filled.flush()


def test_a_salt_separates_requests_with_the_same_tokens(filled: SGLang, reference: Any) -> None:
    filled.flush()
    assert_same(filled.generate(PROMPT, extra_key="someone else"), reference["prompt"], 0)


@pytest.fixture
def recovered(filled: SGLang, reference: Any) -> Iterator[None]:
    """After a fault, the same engine finds the prompt again."""
    filled.flush()
    yield
    filled.flush()

    def hit() -> bool:
        answer = filled.generate(PROMPT)
        filled.flush()
        assert_same(answer, reference["prompt"])
        return bool(answer["cached"].get("storage", 0) == PAGES * PAGE)

    wait_for(hit)


def test_without_its_data_plane_the_engine_computes(
    filled: SGLang, plane: DataPlane, reference: Any, recovered: None
) -> None:
    plane.kill()
    assert_same(filled.generate(PROMPT), reference["prompt"], 0)
    plane.start()


def test_a_data_plane_that_does_not_answer_costs_its_deadline(
    filled: SGLang, plane: DataPlane, reference: Any, recovered: None
) -> None:
    with plane.frozen():
        began = time.monotonic()
        assert_same(filled.generate(PROMPT), reference["prompt"], 0)
        assert time.monotonic() - began < 30
    assert plane.alive


def test_without_its_storage_node_the_engine_computes(
    filled: SGLang, storage: Storage, reference: Any, recovered: None
) -> None:
    storage.signal(signal.SIGSTOP)
    try:
        assert_same(filled.generate(PROMPT), reference["prompt"], 0)
    finally:
        storage.signal(signal.SIGCONT)


def test_a_damaged_record_is_computed_again(filled: SGLang, storage: Storage, reference: Any) -> None:
    filled.flush()
    keys = [word for word in redis(storage, b"KEYS", b"kv:*").split(b"\r\n") if word.startswith(b"kv:")]
    assert len(keys) >= records(0, PAGES)
    for key in keys:
        record = bytearray(redis(storage, b"GET", key))
        record[-100] ^= 1
        redis(storage, b"DEL", key)
        redis(storage, b"SET", key, bytes(record))
    assert_same(filled.generate(PROMPT), reference["prompt"], 0)


def test_another_engine_after_a_restart_finds_the_prompt(
    filled: SGLang, start: Callable[..., SGLang], storage: Storage, reference: Any
) -> None:
    filled.flush()  # the test before may have left the prompt there
    redis(storage, b"FLUSHALL")
    fill(filled, storage)
    assert_same(start().generate(PROMPT), reference["prompt"], PAGES * PAGE)


def test_an_engine_with_another_page_size_finds_nothing_of_it(
    start: Callable[..., SGLang], storage: Storage, reference: Any
) -> None:
    engine = start(page_size=32)
    assert_same(fill(engine, storage, 32), reference["prompt"], 0)
    assert_same(engine.generate(PROMPT), reference["prompt"], 600 // 32 * 32)


@pytest.mark.parametrize("ranks", ["tp_size", "pp_size"])
def test_two_ranks_store_and_find_their_own_heads_or_layers(
    start: Callable[..., SGLang], storage: Storage, reference: Any, ranks: str
) -> None:
    engine = start(**{ranks: 2})
    assert_same(fill(engine, storage, ranks=2), reference["prompt"], 0)
    assert_same(engine.generate(PROMPT), reference["prompt"], PAGES * PAGE)
    assert_same(engine.generate(OTHER), reference["other"], 0)


def test_new_weights_turn_the_cache_off(
    start: Callable[..., SGLang], storage: Storage, model: Path, reference: Any
) -> None:
    redis(storage, b"FLUSHALL")
    engine = start()
    fill(engine, storage)
    assert_same(engine.generate(PROMPT), reference["prompt"], PAGES * PAGE)
    engine.flush()  # waits for copies, during which SGLang does not empty its pools, and says that the update failed
    assert engine.ask("update_weights", path=str(model))["updated"]
    engine.flush()
    assert_same(engine.generate(PROMPT), reference["prompt"], 0)
    engine.flush()
    assert_same(engine.generate(PROMPT), reference["prompt"], 0)


def test_sglang_and_vllm_share_a_data_plane_and_no_record(
    start: Callable[..., SGLang], plane: DataPlane, storage: Storage, reference: Any, model: Path
) -> None:
    from engine import Engine

    redis(storage, b"FLUSHALL")
    engine = start()
    fill(engine, storage)
    before = storage.stored()
    vllm = Engine(model, plane.address)
    try:
        assert vllm.outputs([PROMPT]) == [reference["prompt"]["tokens"]]
        vllm.flush()
        assert storage.stored() == before + len(PROMPT) // 256  # it has stored its own: nothing was found
        vllm.llm.reset_prefix_cache()
        (again,) = vllm.generate([PROMPT])
        assert list(again.outputs[0].token_ids) == reference["prompt"]["tokens"]
        assert again.num_cached_tokens == 512
    finally:
        vllm.close()
    assert_same(engine.generate(PROMPT), reference["prompt"], PAGES * PAGE)
