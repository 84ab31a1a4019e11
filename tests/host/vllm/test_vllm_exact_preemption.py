"""With a quantizer, a preempted request is saved in lossless records that only it can load."""

from typing import Any

import pytest
from machine import wait_for
from scheduler_support import BLOCK, CHUNK, TOKENS, Request, arrive, chunk_keys, keys, matched, report, step
from scheduler_support import saved_namespace_of as namespace_of
from scripted import ScriptedDataPlane

from shadowserve.keys import chain_of, record_keys

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = TOKENS[: 2 * CHUNK + BLOCK + 9]
END = len(PROMPT)


@pytest.fixture
def side(make_side: Any) -> Any:
    return make_side(quantized=True)


def preempted(side: Any, plane: ScriptedDataPlane, stored: int = 0, name: str = "r") -> tuple[Request, list[Any]]:
    """Return a request that has computed its prompt and is preempted, and its saved chunks."""
    request = arrive(side, plane, PROMPT, name=name)
    matched(side, request)
    side.step(step(new={name: (0, END)}))
    request.all_token_ids.append(7)
    return request, preempt(side, request)


def preempt(side: Any, request: Request) -> list[Any]:
    request.num_preemptions += 1
    return list(side.step(step(preempted=[request.request_id])).saves.get(request.request_id, []))


def names_of(saves: list[Any]) -> list[bytes]:
    return [chunk_key for each in saves for chunk_key in each.chunk_keys]


def settle(side: Any, plane: ScriptedDataPlane, saves: list[Any], name: str = "r") -> None:
    """Store all saved chunks."""
    plane.records.update(dict.fromkeys(record_keys(namespace_of(0, 0), names_of(saves)), b""))
    side.worker_output(None, report(saved={name: 1}))


def test_all_that_it_holds_is_saved_though_its_chunks_are_stored(side: Any, plane: ScriptedDataPlane) -> None:
    """Symptom: with quantizer: binned, a preempted request continued after quantized KV of its own."""
    request, saves = preempted(side, plane)
    plane.records.update(dict.fromkeys(keys(0, PROMPT), b""))
    chunks, tail = saves
    assert chunks.exact and tail.exact and chunks.lasts_s == tail.lasts_s > 0
    assert chunks.blocks == list(range(1000, 1008)) and tail.tail_tokens == BLOCK + 9
    assert chunks.previous is None and tail.previous == chunks.chunk_keys[-1]


def test_its_names_are_its_own(side: Any, plane: ScriptedDataPlane) -> None:
    """Another request with these tokens may have loaded the KV that this one has computed."""
    _, saves = preempted(side, plane)
    _, others = preempted(side, plane, name="other")
    assert not {*names_of(saves), *chunk_keys(PROMPT)} & set(names_of(others))
    assert len({chain_of(name) for name in names_of(saves)}) == 1, "evicted from its end, like a prompt"


def test_a_preempted_request_loads_only_its_save(side: Any, plane: ScriptedDataPlane) -> None:
    request, saves = preempted(side, plane)
    plane.records.update(dict.fromkeys(keys(0, PROMPT), b""))
    assert side.matched_tokens(request, 0) == END, "offered while it is being stored"
    settle(side, plane, saves)
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert plane.asked_keys[-1] == record_keys(namespace_of(0, 0), names_of(saves))
    assert side.matched_tokens(request, 0) == END
    side.allocated(request, [list(range(200, 240))], END)
    (load,) = side.step(step()).loads
    assert load.groups[0].chunk_keys == names_of(saves)
    assert load.shard_layout == side._requests["r"].current_save.expected_answer.shard_layout < 0 and not load.layerwise


@pytest.mark.parametrize("lost", ["all", "tail", "second chunk"])
def test_dropped_chunks_of_a_save_are_computed_even_if_stored_quantized(
    lost: str, side: Any, plane: ScriptedDataPlane
) -> None:
    request, saves = preempted(side, plane)
    plane.records.update(dict.fromkeys(keys(0, PROMPT), b""))
    kept = {"all": [], "tail": names_of(saves)[:2], "second chunk": names_of(saves)[:1]}[lost]
    plane.records.update(dict.fromkeys(record_keys(namespace_of(0, 0), kept), b""))
    side.worker_output(None, report(saved={"r": 1}))
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert side.matched_tokens(request, 0) == len(kept) * CHUNK


def test_a_request_of_which_nothing_could_be_saved_is_computed(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(quantized=True, store=False)
    request = arrive(side, plane, PROMPT)
    matched(side, request)
    side.step(step(new={"r": (0, END)}))
    plane.records.update(dict.fromkeys(keys(0, PROMPT), b""))
    assert preempt(side, request) == []
    assert matched(side, request) == 0


def test_chunks_completed_after_a_preemption_are_stored_for_all(side: Any, plane: ScriptedDataPlane) -> None:
    """Saved chunks do not count as stored, because other requests do not look them up."""
    request, saves = preempted(side, plane)
    request.all_token_ids += range(900, 900 + CHUNK)
    settle(side, plane, saves)
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert matched(side, request) == END
    side.allocated(request, [list(range(1000, 1040))], END)
    resumed = step(cached={"r": (END, CHUNK)})
    resumed.scheduled_cached_reqs.new_block_ids = [(list(range(1000, 1040)),)]
    resumed.scheduled_cached_reqs.resumed_req_ids = {"r"}
    (store,) = side.step(resumed).stores
    assert store.chunk_keys == chunk_keys(request.all_token_ids)[2:3] and not store.exact and not store.lasts_s


def test_a_second_preemption_saves_only_new_chunks(side: Any, plane: ScriptedDataPlane) -> None:
    request, saves = preempted(side, plane)
    settle(side, plane, saves)
    assert matched(side, request) == END
    wait_for(lambda: side._lookup.poll("r"))
    side.allocated(request, [list(range(200, 240))], END)
    resumed = step(cached={"r": (END, 1)})
    resumed.scheduled_cached_reqs.new_block_ids = [(list(range(200, 240)),)]
    resumed.scheduled_cached_reqs.resumed_req_ids = {"r"}
    side.step(resumed)
    request.all_token_ids.append(8)
    (tail,) = preempt(side, request)
    assert tail.previous == names_of(saves)[1] and tail.anchored and tail.chunk_keys != saves[1].chunk_keys


def test_without_quantizing_chunks_that_are_stored_are_saved(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, PROMPT, stored=2)
    matched(side, request)
    side.step(step(new={"r": (0, END)}))
    request.all_token_ids.append(7)
    (tail,) = preempt(side, request)
    assert not tail.exact and tail.previous == chunk_keys(PROMPT)[1]
