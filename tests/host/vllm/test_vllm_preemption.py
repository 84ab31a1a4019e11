"""Saved KV of preempted requests in the connector's scheduler half, and the offers when the requests return."""

from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    MODEL,
    TOKENS,
    Request,
    arrive,
    chunk_keys,
    full,
    groups_of,
    keys,
    kv_cache_manager,
    matched,
    namespace_of,
    report,
    state,
    step,
    window,
)
from scripted import ScriptedDataPlane

from host_control.layouts import NOWHERE
from shadowserve.keys import record_keys, tail_chunk_key

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = TOKENS[: 2 * CHUNK + 10]
GENERATED = list(range(900, 900 + BLOCK))


def tail_of(tokens: list[int], end: int) -> bytes:
    """Return the chunk key of the tail after the last whole chunk of the tokens up to ``end``."""
    before = chunk_keys(tokens[:end])
    return tail_chunk_key(MODEL, tokens, end - len(before) * CHUNK, chunk_tokens=CHUNK, after=before)


def running(side: Any, plane: ScriptedDataPlane, prompt: list[int] = PROMPT, **attributes: Any) -> Request:
    """Return a request that has computed its prompt and all generated tokens except the last one."""
    request = arrive(side, plane, prompt, **attributes)
    matched(side, request)
    side.step(step(new={"r": (0, len(prompt))}))
    request.all_token_ids += GENERATED
    side.step(step(cached={"r": (len(prompt) + len(GENERATED) - 2, 1)}))
    return request


def preempt(side: Any, request: Request, **more: Any) -> Any:
    """Return the metadata of the step that preempts a request."""
    request.num_preemptions += 1
    return side.step(step(preempted=["r"], **more))


def saved(plane: ScriptedDataPlane, tokens: list[int], end: int, rank: int = 0) -> None:
    """Store the saved chunks."""
    names = [*chunk_keys(tokens[:end]), tail_of(tokens, end)]
    plane.records.update(dict.fromkeys(record_keys(namespace_of(rank, 0), names), b""))


END = len(PROMPT) + len(GENERATED) - 1
"""Number of tokens that such a request has computed; it ends within a block."""


def test_a_save_has_everything_not_stored_up_to_the_last_token(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Symptom: each resumed request computed half a block, 1.6 % of an engine's time."""
    side = make_side()
    request = running(side, plane)
    (chunks, tail) = preempt(side, request).saves["r"]
    assert chunks.chunk_keys == chunk_keys(PROMPT) and chunks.blocks == list(range(1000, 1008))
    assert chunks.previous is None, "the worker knows which chunks are stored already"
    assert tail.chunk_keys == [tail_of(request.all_token_ids, END)] and tail.tail_tokens == BLOCK + 9
    assert tail.blocks == [1008, 1009, NOWHERE, NOWHERE] and tail.previous == chunk_keys(PROMPT)[-1]
    assert tail.lasts_s > 0 == chunks.lasts_s, "no other request looks the tail up"
    assert side.step(step()).saves == {}


def test_blocks_of_later_steps_are_followed(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane)
    request.all_token_ids += range(BLOCK)
    later = step(cached={"r": (END, BLOCK)})
    later.scheduled_cached_reqs.new_block_ids = [([77],)]
    (table,) = side._requests["r"].held.blocks
    del table[10:]
    side.step(later)
    (_, tail) = preempt(side, request).saves["r"]
    assert tail.blocks == [1008, 1009, 77, NOWHERE]


def test_a_resumed_request_is_saved_from_its_new_blocks(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane)
    preempt(side, request)
    resumed = step(cached={"r": (0, len(request.all_token_ids))})
    resumed.scheduled_cached_reqs.new_block_ids = [(list(range(300, 320)),)]
    resumed.scheduled_cached_reqs.resumed_req_ids = {"r"}
    side.step(resumed)
    chunks, tail = preempt(side, request).saves["r"]
    assert chunks.blocks == list(range(300, 308)) and tail.blocks[:2] == [308, 309]


def test_a_prompt_that_is_computed_in_part_is_saved_as_far_as_it_is_computed(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    side.step(step(new={"r": (0, CHUNK + BLOCK + 5)}))
    chunks, tail = preempt(side, request).saves["r"]
    assert chunks.chunk_keys == chunk_keys(TOKENS)[:1] and tail.chunk_keys == [tail_of(TOKENS, CHUNK + BLOCK + 5)]
    saved(plane, TOKENS, CHUNK + BLOCK + 5)
    side.worker_output(None, report(saved={"r": 1}))
    assert matched(side, request) == CHUNK + BLOCK + 5


@pytest.mark.parametrize("tokens", [2 * CHUNK - 1, 2 * CHUNK])
def test_a_save_that_ends_at_or_just_before_a_chunk_is_found_again(
    make_side: Any, plane: ScriptedDataPlane, tokens: int
) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    side.step(step(new={"r": (0, tokens)}))
    operations = preempt(side, request).saves["r"]
    names = [chunk_key for operation in operations for chunk_key in operation.chunk_keys]
    assert len(names) == 2 and (tokens == 2 * CHUNK or operations[1].tail_tokens == CHUNK - 1)
    plane.records.update(dict.fromkeys(record_keys(namespace_of(0, 0), names), b""))
    side.worker_output(None, report(saved={"r": 1}))
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert plane.asked_keys[-1] == record_keys(namespace_of(0, 0), names)
    assert side.matched_tokens(request, 0) == tokens


def test_a_few_tokens_behind_a_chunk_get_no_record(make_side: Any, plane: ScriptedDataPlane) -> None:
    """A record is always fetched as a whole: computing less than a block is faster."""
    side = make_side()
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    side.step(step(new={"r": (0, CHUNK + BLOCK - 1)}))
    (chunks,) = preempt(side, request).saves["r"]
    assert chunks.chunk_keys == chunk_keys(TOKENS)[:1] and not chunks.tail_tokens


def test_drafts_that_came_to_nothing_are_not_saved(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    prompt = TOKENS[: CHUNK + BLOCK]
    request = arrive(side, plane, prompt)
    matched(side, request)
    side.step(step(new={"r": (0, len(prompt) + 4)}))  # four drafts, all of them wrong
    request.all_token_ids.append(7)
    (chunks, tail) = preempt(side, request).saves["r"]
    assert chunks.chunk_keys == chunk_keys(prompt) and tail.chunk_keys == [tail_of(prompt, len(prompt))]
    assert tail.tail_tokens == BLOCK


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_is_offered_while_it_is_still_being_stored(make_side: Any, plane: ScriptedDataPlane, ranks: int) -> None:
    """Otherwise vLLM would give its place in the queue, and its blocks, to later requests."""
    side = make_side(ranks=ranks)
    request = running(side, plane)
    preempt(side, request)
    lookups = plane.calls.count("Lookup")
    assert side.matched_tokens(request, 0) == END
    side.allocated(request, [list(range(200, 240))], END)
    (load,) = side.step(step()).loads
    assert load.groups[0].chunk_keys == [*chunk_keys(PROMPT), tail_of(request.all_token_ids, END)]
    assert load.groups[0].blocks[8:] == [208, 209, NOWHERE, NOWHERE]
    assert load.available is not None and (load.available.chunks, load.available.ended) == (0, "")
    for _ in range(ranks):
        assert side.step(step()).available == {}, "not all ranks have reported it"
        side.worker_output(None, report(saved={"r": 1}))
    assert side.step(step()).available == {"r": (3, "complete")}
    assert side.step(step()).available == {}
    assert plane.calls.count("Lookup") == lookups


def test_saved_chunks_are_looked_up_and_offered(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane)
    (chunks, tail) = preempt(side, request).saves["r"]
    saved(plane, request.all_token_ids, END)
    side.worker_output(None, report(saved={"r": 1}))
    lookups = plane.calls.count("Lookup")
    assert side.matched_tokens(request, 0) == END, "offered, until the lookup has its answer"
    plane.wait_for_call("Lookup", lookups + 1)
    assert plane.asked_keys == [record_keys(namespace_of(0, 0), [*chunks.chunk_keys, *tail.chunk_keys])]
    wait_for(lambda: side._lookup.poll("r"))
    assert side.matched_tokens(request, CHUNK) == END - CHUNK
    assert side.matched_tokens(request, END) == 0, "the engine's own prefix cache has all blocks"
    assert side.matched_tokens(request, 0) == END
    side.allocated(request, [list(range(200, 240))], END)
    (load,) = side.step(step()).loads
    assert load.available is None and load.groups[0].chunk_keys == [*chunks.chunk_keys, *tail.chunk_keys]


def test_dropped_chunks_of_a_save_are_not_offered(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane)
    preempt(side, request)
    plane.records.update(dict.fromkeys(keys(0, PROMPT)[:1], b""))
    side.worker_output(None, report(saved={"r": 1}))
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert side.matched_tokens(request, 0) == CHUNK


def test_a_request_waits_for_its_save_no_longer_than_a_load_may_take(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(fetch_timeout_s=0.2)
    request = running(side, plane)
    preempt(side, request)
    lookups = plane.calls.count("Lookup")
    wait_for(lambda: side.matched_tokens(request, 0) == 0)
    assert plane.calls.count("Lookup") == lookups + 1


def test_where_a_load_that_falls_short_fails_a_request_nothing_is_promised(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side(recomputes=False)
    request = running(side, plane)
    preempt(side, request)
    assert side.matched_tokens(request, 0) is None
    saved(plane, request.all_token_ids, END)
    side.worker_output(None, report(saved={"r": 1}))
    assert matched(side, request) == END


def test_nothing_is_saved_of_a_load_that_fell_short(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Symptom: garbage KV under a valid key, because vLLM takes back tokens that were computed on such a load."""
    side = make_side(asynchronous_fetch=False)
    request = arrive(side, plane, TOKENS, stored=4)
    side.allocated(request, [list(range(1000, 1040))], matched(side, request))
    side.step(step(new={"r": (4 * CHUNK, 10)}))
    assert preempt(side, request).saves == {}, "no worker has reported the result yet"
    request.num_preemptions = 0
    side.step(step(new={"r": (4 * CHUNK, 10)}))
    side.worker_output(None, report({"r": 1}))
    assert preempt(side, request).saves == {}, "it was computed on garbage"
    request.num_preemptions = 0
    side.step(step(new={"r": (CHUNK, 3 * CHUNK + 10)}))
    assert preempt(side, request).saves["r"], "computed again"


def test_kv_of_earlier_weights_is_not_saved_under_the_name_of_later_ones(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """Symptom: reset_prefix_cache(reset_running_requests=True, reset_connector=True) preempts, and then restarts."""
    side = make_side()
    request = running(side, plane)
    side.reset()
    assert preempt(side, request).saves == {}
    again = running(side, plane, name="r")
    assert again is not request
    preempt(side, again)
    assert side.matched_tokens(again, 0) == END
    side.reset()
    assert matched(side, again) == 0, "and KV that was saved before is not offered"


def test_blocks_that_a_worker_writes_before_it_saves_are_left_out(make_side: Any, plane: ScriptedDataPlane) -> None:
    """vLLM's second model runner zeroes and copies blocks before it calls connectors to save."""
    for change in ({"new_block_ids_to_zero": [1005]}, {"kv_cache_block_copies": [SimpleNamespace(dst_block_id=1005)]}):
        side = make_side()
        request = running(side, plane)
        output = step(preempted=["r"])
        vars(output).update(change)
        request.num_preemptions = 1
        (chunks, tail) = side.step(output).saves["r"]
        assert chunks.blocks == list(range(1000, 1004)) and tail.blocks[:2] == [1004, NOWHERE]


def test_a_request_may_be_preempted_and_planned_in_one_step(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Like reset_prefix_cache(reset_running_requests=True)."""
    side = make_side()
    request = running(side, plane)
    request.num_preemptions = 1
    assert matched(side, request) == 0, "looked up before any save"
    resumed = step(cached={"r": (0, len(request.all_token_ids))}, preempted=["r"])
    resumed.scheduled_cached_reqs.new_block_ids = [(list(range(300, 320)),)]
    resumed.scheduled_cached_reqs.resumed_req_ids = {"r"}
    (chunks, _) = side.step(resumed).saves["r"]
    assert chunks.blocks == list(range(1000, 1008)), "in its earlier blocks"
    (chunks, _) = preempt(side, request).saves["r"]
    assert chunks.blocks == list(range(300, 308))


def test_no_more_is_saved_than_may_be_stored(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane, kv_transfer_params={"max_offload_tokens": CHUNK + BLOCK + 3})
    (chunks, tail) = preempt(side, request).saves["r"]
    assert chunks.chunk_keys == chunk_keys(PROMPT)[:1] and tail.chunk_keys == [tail_of(PROMPT, CHUNK + BLOCK + 3)]


def test_a_prompt_that_is_handed_over_keeps_its_own_tail(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(pd_role="prefill")
    prompt = TOKENS[: 2 * CHUNK + BLOCK + 10]
    request = arrive(side, plane, prompt)
    matched(side, request)
    side.step(step(new={"r": (0, CHUNK + BLOCK)}))
    assert preempt(side, request).saves == {}
    assert matched(side, request) == 0
    (store, tail) = side.step(step(new={"r": (0, len(prompt))})).stores
    assert store.chunk_keys == chunk_keys(prompt)[1:] and tail.chunk_keys == [tail_of(prompt, 2 * CHUNK + BLOCK)]
    assert tail.published and not tail.lasts_s


FULL, WINDOW = 0, 1
HELD = 2 * CHUNK + BLOCK + 5
"""Number of tokens that a preempted request has computed, with a window that needs three blocks of four."""


def windowed(make_side: Any, **options: Any) -> Any:
    """Return the scheduler half of an engine with full attention and a window, with vLLM's rules."""
    specs = full(), window(3 * BLOCK)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    return make_side(groups=groups, **options)


def preempted(side: Any, plane: ScriptedDataPlane, held: int = HELD, **more: Any) -> tuple[Request, Any]:
    """Return a request that is preempted after the given number of tokens, and its saves by group and chunk key."""
    tables = {"r": (list(range(1000, 1040)), list(range(2000, 2040)), list(range(3000, 3040)))}
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    assert side.step(step(new={"r": (0, held)}, tables=tables)).stores
    request.num_preemptions += 1
    output = step(preempted=["r"])
    vars(output).update(more)
    saves = side.step(output).saves.get("r", [])
    return request, {(each.group, each.chunk_keys[-1]): each for each in saves}


def test_with_windows_the_whole_blocks_that_remain_are_saved(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Symptom: with windows, a resumed request computed all tokens after its last chunk."""
    request, saves = preempted(windowed(make_side), plane)
    end = HELD - 5
    tail = tail_of(TOKENS, end)
    assert saves[FULL, tail].blocks == [1008, NOWHERE, NOWHERE, NOWHERE]
    assert saves[WINDOW, tail].blocks == [2006, 2007, 2008], "all blocks of the window that a hit with this end needs"
    assert saves[FULL, tail].lasts_s == saves[WINDOW, tail].lasts_s > 0
    assert saves[FULL, chunk_keys(TOKENS)[1]].blocks == list(range(1000, 1008))
    assert list(saves)[1:] == [(WINDOW, tail), (FULL, tail)], "the group that keeps every chunk is stored last"
    assert (WINDOW, chunk_keys(TOKENS)[1]) not in saves, (
        "it was stored when it was complete, and the window has freed some of its blocks"
    )


@pytest.mark.parametrize("under_way", [True, False])
def test_with_windows_a_save_is_loaded_to_the_end_of_its_last_block(
    make_side: Any, plane: ScriptedDataPlane, under_way: bool
) -> None:
    side = windowed(make_side)
    request, saves = preempted(side, plane)
    end, names = HELD - 5, [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, HELD - 5)]
    if not under_way:
        for group, held in ((FULL, names), (WINDOW, names[1:])):
            plane.records.update(dict.fromkeys(record_keys(namespace_of(0, group), held), b""))
        side.worker_output(None, report(saved={"r": 1}))
    assert matched(side, request) == end
    side.allocated(request, [list(range(300, 310)), [0] * 6 + list(range(406, 410))], end)
    (load,) = side.step(step()).loads
    assert (load.groups[FULL].chunk_keys, load.groups[WINDOW].chunk_keys) == (names, names[2:])
    assert load.groups[FULL].blocks == [*range(300, 309), NOWHERE, NOWHERE, NOWHERE]
    assert load.groups[WINDOW].blocks == [406, 407, 408] and load.groups[WINDOW].chunks == [2]
    assert (load.available is not None) is under_way


def test_with_windows_a_tail_that_a_group_lacks_is_computed(make_side: Any, plane: ScriptedDataPlane) -> None:
    """The group that is stored last marks them as stored. But another group's record may be evicted or dropped."""
    side = windowed(make_side)
    request, _ = preempted(side, plane)
    names = [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, HELD - 5)]
    plane.records.update(dict.fromkeys(record_keys(namespace_of(0, FULL), names), b""))
    plane.records.update(dict.fromkeys(record_keys(namespace_of(0, WINDOW), names[:2]), b""))
    side.worker_output(None, report(saved={"r": 1}))
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert side.matched_tokens(request, 0) == 2 * CHUNK


@pytest.mark.parametrize("held", [2 * CHUNK + BLOCK - 1, 2 * CHUNK + 2 * BLOCK - 1])
def test_with_windows_freed_blocks_are_not_saved(make_side: Any, plane: ScriptedDataPlane, held: int) -> None:
    """The window has freed the first block of a shorter hit, or the tail after the last chunk is less than a block."""
    _, saves = preempted(windowed(make_side), plane, held)
    assert {group: each.chunk_keys for (group, _), each in saves.items()} == {FULL: chunk_keys(TOKENS)[:2]}, (
        "whole chunks"
    )


def test_with_windows_nothing_is_saved_where_a_worker_has_written_before(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """The window has freed blocks that a shorter hit needs; freed blocks may be overwritten."""
    _, saves = preempted(windowed(make_side), plane, new_block_ids_to_zero=[1008])
    assert saves == {}
    _, saves = preempted(windowed(make_side), plane, new_block_ids_to_zero=[2001])
    assert len(saves) == 3


STATE = 1


def stateful(make_side: Any, *more: Any, **options: Any) -> Any:
    """Return the scheduler half of an engine with full attention and states, both in blocks of a chunk, as in vLLM."""
    specs = full(block_size=CHUNK), state(block_size=CHUNK), *more
    groups = groups_of(*specs, **options)
    groups.bind(kv_cache_manager(*specs))
    return make_side(groups=groups)


def test_states_are_saved_as_they_are(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Symptom: a resumed request with states computed up to a block, which has hundreds of tokens."""
    _, saves = preempted(stateful(make_side), plane)
    tail = tail_of(TOKENS, HELD)
    assert saves[FULL, tail].blocks == [1002] and saves[FULL, tail].tail_tokens == HELD - 2 * CHUNK
    assert saves[STATE, tail].blocks == [2002] and saves[STATE, tail].tail_tokens == 0, (
        "the whole state, independent of the number of tokens"
    )
    assert saves[FULL, tail].lasts_s == saves[STATE, tail].lasts_s > 0
    assert saves[FULL, chunk_keys(TOKENS)[1]].blocks == [1000, 1001]
    assert (STATE, chunk_keys(TOKENS)[1]) not in saves, "earlier states are no longer needed"


@pytest.mark.parametrize("under_way", [True, False])
def test_with_states_a_save_is_loaded_to_the_last_token(
    make_side: Any, plane: ScriptedDataPlane, under_way: bool
) -> None:
    side = stateful(make_side)
    request, _ = preempted(side, plane)
    names = [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, HELD)]
    if not under_way:
        for group, held in ((FULL, names), (STATE, names[2:])):
            plane.records.update(dict.fromkeys(record_keys(namespace_of(0, group), held), b""))
        side.worker_output(None, report(saved={"r": 1}))
    assert matched(side, request) == HELD
    side.allocated(request, [[300, 301, 302], [0, 0, 402]], HELD)
    (load,) = side.step(step()).loads
    assert (load.groups[FULL].chunk_keys, load.groups[STATE].chunk_keys) == (names, names[2:])
    assert load.groups[FULL].blocks == [300, 301, 302]
    assert load.groups[STATE].blocks == [402] and load.groups[STATE].chunks == [2]
    assert (load.available is not None) is under_way


@pytest.mark.parametrize("gone", [FULL, STATE])
def test_with_states_a_tail_that_a_group_lacks_is_computed(make_side: Any, plane: ScriptedDataPlane, gone: int) -> None:
    side = stateful(make_side)
    request, _ = preempted(side, plane)
    names = [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, HELD)]
    for group, held in ((FULL, names), (STATE, names[1:])):
        there = held[:-1] if group == gone else held
        plane.records.update(dict.fromkeys(record_keys(namespace_of(0, group), there), b""))
    side.worker_output(None, report(saved={"r": 1}))
    side.matched_tokens(request, 0)
    wait_for(lambda: side._lookup.poll("r"))
    assert side.matched_tokens(request, 0) == 2 * CHUNK, "the end with a stored state"


def test_a_state_waits_for_the_token_that_is_on_its_way(make_side: Any, plane: ScriptedDataPlane) -> None:
    """With overlapping steps, the last step's token arrives after the preemption."""
    side = stateful(make_side)
    request = arrive(side, plane, TOKENS[:HELD])
    matched(side, request)
    side.step(step(new={"r": (0, HELD)}, tables={"r": (list(range(1000, 1040)), list(range(2000, 2040)))}))
    assert {each.group for each in preempt(side, request).saves["r"]} == {FULL, STATE}
    assert matched(side, request) == 0, "the state contains the last known token"
    request.all_token_ids.append(7)
    assert matched(side, request) == HELD


@pytest.mark.parametrize(("held", "ends"), [(2 * CHUNK + 3, set()), (2 * CHUNK, {chunk_keys(TOKENS)[1]})])
def test_with_states_no_tail_is_made_of_a_few_tokens(
    make_side: Any, plane: ScriptedDataPlane, held: int, ends: set[bytes]
) -> None:
    """Symptom: a chunk's end was offered although its state was not stored. Only this request had that state."""
    _, saves = preempted(stateful(make_side), plane, held)
    assert set(saves) == {(group, end) for group in (FULL, STATE) for end in ends}


def test_with_states_nothing_is_saved_of_more_than_may_be_stored(make_side: Any, plane: ScriptedDataPlane) -> None:
    """A state after more tokens cannot be used for fewer."""
    side = stateful(make_side)
    request = arrive(side, plane, TOKENS, kv_transfer_params={"max_offload_tokens": HELD - 1})
    matched(side, request)
    side.step(step(new={"r": (0, HELD)}))
    assert preempt(side, request).saves == {}


def test_engines_with_states_and_windows_or_drafts_save_nothing(make_side: Any, plane: ScriptedDataPlane) -> None:
    """A window's blocks and a state end elsewhere. Only the worker knows the effect of drafts on states."""
    _, saves = preempted(stateful(make_side, window(3 * BLOCK)), plane)
    assert saves == {}
    _, saves = preempted(stateful(make_side, drafts=True), plane)
    assert saves == {}


def test_a_request_that_ends_while_it_is_saved_is_forgotten(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = running(side, plane)
    preempt(side, request)
    side.finished(request)
    side.worker_output(None, report(saved={"r": 1}))
    assert not side._requests


def test_ranks_report_together() -> None:
    first, second = report(saved={"a": 1, "b": 1}), report(saved={"a": 1})
    assert first.aggregate(second).saved == {"a": 2, "b": 1}
