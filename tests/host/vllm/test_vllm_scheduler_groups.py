"""The connector's scheduler half with three groups: the loads and stores of each group, and the cost of a step."""

import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    TOKENS,
    Request,
    arrive,
    chunk_keys,
    full,
    groups_of,
    keys,
    kv_cache_manager,
    matched,
    report,
    state,
    step,
    window,
)
from scripted import ScriptedDataPlane

from host_control.layouts import NOWHERE

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

FULL, WINDOW, STATE = 0, 1, 2
BLOCKS = len(TOKENS) // BLOCK + 1
TABLES = (list(range(1000, 1000 + BLOCKS)), list(range(2000, 2000 + BLOCKS)), list(range(3000, 3006)))


@pytest.fixture
def side(make_side: Any) -> Any:
    """Full attention, a window that needs three blocks of four, and states at the ends of chunks."""
    specs = full(), window(2 * BLOCK + 8), state(block_size=CHUNK)
    groups = groups_of(*specs)
    assert [(group.kind, group.record_blocks) for group in groups.groups] == [("full", 4), ("window", 3), ("state", 1)]
    groups.bind(kv_cache_manager(*specs))
    return make_side(groups=groups, load_tokens_min=1)


def put(plane: ScriptedDataPlane, group: int, *chunks: int) -> None:
    plane.records.update({keys(0, TOKENS, group)[chunk]: b"" for chunk in chunks})


def null_before(table: list[int], first: int) -> list[int]:
    """Return a window's table as in vLLM, without the blocks before ``first``."""
    return [0] * first + table[first:]


def stored(side: Any, output: Any) -> list[tuple[int, list[bytes], list[int]]]:
    """Return the stores by group; the group that keeps every chunk is last, so its records imply the other groups'."""
    stores = side.step(output).stores
    kinds = [each.group == FULL for each in stores]
    assert kinds == sorted(kinds)
    return sorted((each.group, each.chunk_keys, each.blocks) for each in stores)


@pytest.mark.parametrize(
    ("full_chunks", "windows", "states", "expected"),
    [
        ((0, 1, 2, 3), (3,), (3,), 4),
        ((0, 1, 2, 3, 4), (1, 3), (1, 2, 4), 2),
        ((0, 1), (0, 1, 2), (0, 1, 2), 2),
        ((0, 1, 2), (1,), (2,), 0),
        ((1, 2), (2,), (2,), 0),
    ],
)
def test_a_hit_ends_where_all_groups_have_their_records(
    side: Any, plane: ScriptedDataPlane, full_chunks: Any, windows: Any, states: Any, expected: int
) -> None:
    put(plane, FULL, *full_chunks)
    put(plane, WINDOW, *windows)
    put(plane, STATE, *states)
    assert matched(side, arrive(side, plane, TOKENS)) == expected * CHUNK
    assert plane.calls.count("Lookup") == 1


def test_a_load_takes_the_chunks_that_vllm_has_blocks_for_in_each_group(side: Any, plane: ScriptedDataPlane) -> None:
    put(plane, FULL, 0, 1, 2, 3)
    put(plane, WINDOW, *range(5))
    put(plane, STATE, *range(5))
    request = arrive(side, plane, TOKENS)
    local = CHUNK
    tokens = matched(side, request, local)
    assert tokens == 3 * CHUNK and side.waits(request)
    tables = (TABLES[0], null_before(TABLES[1], 13), [0, 0, 0, 3003, 3004])
    side.allocated(request, tables, tokens)
    (load,) = side.step(step()).loads
    chain = chunk_keys(TOKENS)
    assert {index: (group.chunk_keys, group.blocks) for index, group in load.groups.items()} == {
        FULL: (chain[1:4], list(range(1004, 1016))),
        WINDOW: (chain[3:4], [2013, 2014, 2015]),
        STATE: (chain[3:4], [3003]),
    }
    side.worker_output({"r"}, report())
    assert not side._loads


def test_blocks_of_the_engine_s_own_prefix_are_not_loaded_in_any_group(side: Any, plane: ScriptedDataPlane) -> None:
    for group in (FULL, WINDOW, STATE):
        put(plane, group, *range(5))
    request = arrive(side, plane, TOKENS)
    local = 4 * CHUNK + 2 * BLOCK  # attention has computed tokens after its last state, and so has the window
    tokens = matched(side, request, local)
    assert tokens == 5 * CHUNK - local
    side.allocated(request, (TABLES[0], null_before(TABLES[1], 17), [0, 0, 0, 0, 3004, 3005]), tokens)
    (load,) = side.step(step()).loads
    assert load.groups[FULL].blocks == [NOWHERE, NOWHERE, 1018, 1019]
    assert load.groups[WINDOW].blocks == [NOWHERE, 2018, 2019]
    assert load.groups[STATE].blocks == [3004]


def test_a_load_that_no_record_can_fill_fails_and_is_not_offered_again(
    side: Any, plane: ScriptedDataPlane, caplog: Any
) -> None:
    """An unknown rule of vLLM: the group must load no block, because the block may contain another request's KV."""
    for group in (FULL, WINDOW, STATE):
        put(plane, group, *range(5))
    request = arrive(side, plane, TOKENS)
    side.allocated(request, TABLES, matched(side, request))
    (load,) = side.step(step()).loads
    assert load.groups == {} and "blocks that are in no stored record" in caplog.text
    side.worker_output({"r"}, report({"r": 0}))
    assert side.matched_tokens(request, 0) == 0


def test_each_group_is_stored_as_far_as_the_engine_keeps_it(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS)
    assert matched(side, request) == 0
    chain = chunk_keys(TOKENS)
    tables = {"r": (TABLES[0], null_before(TABLES[1], 10), [0, 0, 0, 3003, 3004])}
    first, second = stored(side, step(new={"r": (0, len(TOKENS))}, tables=tables))
    assert first == (FULL, chain[:5], list(range(1000, 1020)))
    kept = [2000 + 4 * chunk + block for chunk in (3, 4) for block in (1, 2, 3)]
    assert second == (WINDOW, chain[3:5], kept), "the window has freed a block of chunk 2"
    assert not any(0 in blocks for _, _, blocks in (first, second))


def test_a_window_whose_last_blocks_alone_are_left_is_stored(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    tables = {"r": (TABLES[0], null_before(TABLES[1], 9), [])}
    stores = stored(side, step(new={"r": (0, 3 * CHUNK)}, tables=tables))
    assert stores[1:] == [(WINDOW, chunk_keys(TOKENS)[2:3], [2009, 2010, 2011])]


def test_states_are_stored_where_vllm_says_that_they_lie(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS)
    matched(side, request)
    chain = chunk_keys(TOKENS)
    tables = {"r": TABLES}
    offered = [(STATE, 77, 2 * CHUNK), (STATE, 0, 3 * CHUNK), (STATE, 78, CHUNK + 1), (WINDOW, 79, CHUNK)]
    output = step(new={"r": (0, 3 * CHUNK)}, tables=tables, states={"r": offered, "gone": [(STATE, 80, CHUNK)]})
    assert [each for each in stored(side, output) if each[0] == STATE] == [(STATE, chain[1:2], [77])]
    between = step(cached={"r": (3 * CHUNK, 1)}, tables=tables, states={"r": [(STATE, 81, 3 * CHUNK)]})
    assert stored(side, between) == [(STATE, chain[2:3], [81])], "also in a step that completes no chunk"


def test_a_state_behind_generated_tokens_has_the_name_of_those(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS[: CHUNK + 20])
    matched(side, request)
    request.all_token_ids += list(range(900, 900 + CHUNK))
    output = step(cached={"r": (2 * CHUNK - 1, 1)}, tables={"r": TABLES}, states={"r": [(STATE, 77, 2 * CHUNK)]})
    assert (STATE, chunk_keys(request.all_token_ids)[1:2], [77]) in stored(side, output)


def test_chunks_that_storage_has_are_not_stored_again(side: Any, plane: ScriptedDataPlane) -> None:
    put(plane, FULL, 0, 1, 3)
    put(plane, WINDOW, 0, 4)
    request = arrive(side, plane, TOKENS)
    assert matched(side, request) == 0, "there is no state"
    chain = chunk_keys(TOKENS)
    stores = side.step(step(new={"r": (0, len(TOKENS))}, tables={"r": TABLES})).stores
    found = sorted(
        ((each.group, each.chunk_keys, each.previous, each.anchored) for each in stores),
        key=lambda each: (each[0], chain.index(each[1][0])),
    )
    assert found == [
        (FULL, chain[2:3], chain[1], True),
        (FULL, chain[4:5], chain[3], False),
        (WINDOW, chain[1:4], chain[0], True),
    ]


def test_chunks_behind_guesses_are_not_stored_in_any_group(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS[: 2 * CHUNK - 2])
    matched(side, request)
    stores = stored(side, step(new={"r": (0, 2 * CHUNK - 2)}, tables={"r": TABLES}))
    assert [(group, chain) for group, chain, _ in stores] == [
        (group, chunk_keys(TOKENS)[:1]) for group in (FULL, WINDOW)
    ]
    request.all_token_ids.append(7)
    assert stored(side, step(cached={"r": (2 * CHUNK - 2, 5)}, tables={"r": TABLES})) == []


def test_a_draft_layer_costs_a_block_of_a_hit_and_not_all_of_it(make_side: Any, plane: ScriptedDataPlane) -> None:
    specs = full(), window(2 * BLOCK + 8), full(head_size=16)
    groups = groups_of(*specs, drafts=True)
    groups.bind(kv_cache_manager(*specs, eagle=[2], drafts=True))
    side = make_side(groups=groups)
    for group in range(3):
        put(plane, group, *range(4))
    request = arrive(side, plane, TOKENS)
    tokens = matched(side, request)
    assert tokens == 4 * CHUNK - BLOCK
    last = tokens // BLOCK
    side.allocated(request, (TABLES[0], null_before(TABLES[1], last - 3), TABLES[0]), tokens)
    (load,) = side.step(step()).loads
    assert load.groups[0].blocks == [*range(1000, 1000 + last), NOWHERE] == load.groups[2].blocks
    assert load.groups[1].chunk_keys == chunk_keys(TOKENS)[2:4] or load.groups[1].chunk_keys == chunk_keys(TOKENS)[3:4]
    assert [block for block in load.groups[1].blocks if block != NOWHERE] == list(range(2000 + last - 3, 2000 + last))


def test_a_step_of_256_requests_of_three_groups_looks_at_each_once(side: Any, plane: ScriptedDataPlane) -> None:
    names = [f"request-{number}" for number in range(256)]
    for number, name in enumerate(names):
        side.on_new_request(Request(name, [number] * (CHUNK + 1)))
    wait_for(lambda: all(side._lookup.poll(name) is not None for name in names))
    tables = dict.fromkeys(names, TABLES)
    assert len(side.step(step(cached={name: (CHUNK, 1) for name in names}, tables=tables)).stores) == 2 * 256
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    output = step(cached={name: (CHUNK + 1, 1) for name in names})
    output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads={})  # no call for a table
    sys.setprofile(count)
    try:
        metadata = side.step(output)
    finally:
        sys.setprofile(None)
    assert metadata.stores == []
    assert calls.pop("get") == 256, "one comparison for each request"
    assert sum(calls.values()) < 64, "independent of the number of requests: " + str(calls)


def test_only_the_records_that_a_hit_needs_of_windows_and_states_are_prefetched(
    side: Any, plane: ScriptedDataPlane
) -> None:
    for group in (FULL, WINDOW, STATE):
        put(plane, group, 0, 1, 2, 3)
    arrive(side, plane, TOKENS)
    wait_for(lambda: plane.expected)
    [arrival] = plane.expected[-1].arrivals
    assert [list(chain.keys) for chain in arrival.chains] == [
        keys(0, TOKENS, FULL)[:4], keys(0, TOKENS, WINDOW)[3:4], keys(0, TOKENS, STATE)[3:4],
    ]  # fmt: skip


def test_a_request_is_prefetched_even_if_the_queue_was_faster_than_its_lookup(
    side: Any, plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(plane, FULL, 0, 1, 2, 3)
    put(plane, WINDOW, 3)
    put(plane, STATE, 3)
    looked = threading.Event()
    chains, submit = side.waiting._look, side._lookup.submit

    def look(request_id: str) -> Any:
        try:
            return chains(request_id)
        finally:
            looked.set()

    def submit_late(*arguments: Any, **options: Any) -> None:
        looked.wait(0.3)
        submit(*arguments, **options)

    monkeypatch.setattr(side.waiting, "_look", look)
    monkeypatch.setattr(side._lookup, "submit", submit_late)
    arrive(side, plane, TOKENS)
    wait_for(lambda: plane.expected)
