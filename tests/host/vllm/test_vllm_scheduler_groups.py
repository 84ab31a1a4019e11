"""The connector's scheduler half with three groups: the loads and stores of each group, and the cost of a step."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import BLOCK, CHUNK, TOKENS, Request, Scene, chunk_keys, full, keys, put, state, step, window

from host_control.layouts import NOWHERE

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

FULL, WINDOW, STATE = 0, 1, 2
BLOCKS = len(TOKENS) // BLOCK + 1
TABLES = (list(range(1000, 1000 + BLOCKS)), list(range(2000, 2000 + BLOCKS)), list(range(3000, 3006)))
CHAIN = chunk_keys(TOKENS)


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    """Full attention, a window that needs three blocks of four, and states at the ends of chunks."""
    scene = make_scene(full(), window(2 * BLOCK + 8), state(block_size=CHUNK), load_tokens_min=1)
    groups = scene.side._engine.groups.groups
    assert [(group.kind, group.record_blocks) for group in groups] == [("full", 4), ("window", 3), ("state", 1)]
    return scene


def hold(scene: Scene, *chunks: Any) -> None:
    """Store the records of chunks, given for each group."""
    for group, numbers in enumerate(chunks):
        put(scene.plane, [CHAIN[number] for number in numbers], group)


def null_before(table: list[int], first: int) -> list[int]:
    """Return a window's table as in vLLM, without the blocks before ``first``."""
    return [0] * first + table[first:]


def by_group(stores: list[Any]) -> list[tuple[int, list[bytes], list[int]]]:
    """Return the stores by group; the group that keeps every chunk is last, so its records imply the other groups'."""
    kinds = [each.group == FULL for each in stores]
    assert kinds == sorted(kinds)
    return sorted((each.group, each.chunk_keys, each.blocks) for each in stores)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (((0, 1, 2, 3), (3,), (3,)), 4),
        (((0, 1, 2, 3, 4), (1, 3), (1, 2, 4)), 2),
        (((0, 1), (0, 1, 2), (0, 1, 2)), 2),
        (((0, 1, 2), (1,), (2,)), 0),
        (((1, 2), (2,), (2,)), 0),
    ],
)
def test_a_hit_ends_where_all_groups_have_their_records(scene: Scene, held: Any, expected: int) -> None:
    hold(scene, *held)
    scene.arrive()
    assert scene.matched() == expected * CHUNK
    assert scene.plane.calls.count("Lookup") == 1


def test_a_load_takes_the_chunks_that_vllm_has_blocks_for_in_each_group(scene: Scene) -> None:
    hold(scene, range(4), range(5), range(5))
    request = scene.arrive()
    assert scene.matched(CHUNK) == 3 * CHUNK and scene.side.waits(request)
    load = scene.load((TABLES[0], null_before(TABLES[1], 13), [0, 0, 0, 3003, 3004]), CHUNK)
    assert {index: (group.chunk_keys, group.blocks) for index, group in load.groups.items()} == {
        FULL: (CHAIN[1:4], list(range(1004, 1016))),
        WINDOW: (CHAIN[3:4], [2013, 2014, 2015]),
        STATE: (CHAIN[3:4], [3003]),
    }
    scene.report(finished=["r"])
    assert not scene.side._loads


def test_blocks_of_the_engine_s_own_prefix_are_not_loaded_in_any_group(scene: Scene) -> None:
    hold(scene, *[range(5)] * 3)
    scene.arrive()
    local = 4 * CHUNK + 2 * BLOCK  # attention has computed tokens after its last state, and so has the window
    assert scene.matched(local) == 5 * CHUNK - local
    load = scene.load((TABLES[0], null_before(TABLES[1], 17), [0, 0, 0, 0, 3004, 3005]), local)
    assert [load.groups[group].blocks for group in (FULL, WINDOW, STATE)] == [
        [NOWHERE, NOWHERE, 1018, 1019], [NOWHERE, 2018, 2019], [3004],
    ]  # fmt: skip


def test_a_load_that_no_record_can_fill_fails_and_is_not_offered_again(scene: Scene, caplog: Any) -> None:
    """An unknown rule of vLLM: the group must load no block, because the block may contain another request's KV."""
    hold(scene, *[range(5)] * 3)
    scene.arrive()
    assert scene.load(TABLES).groups == {} and "blocks that are in no stored record" in caplog.text
    scene.report({"r": 0}, finished=["r"])
    assert scene.ask() == 0


@pytest.mark.parametrize(
    ("first", "end", "chunks", "kept"),
    [
        # The window has freed a block of chunk 2.
        (10, len(TOKENS), slice(3, 5), [2000 + 4 * chunk + block for chunk in (3, 4) for block in (1, 2, 3)]),
        (9, 3 * CHUNK, slice(2, 3), [2009, 2010, 2011]),
    ],
)
def test_each_group_is_stored_as_far_as_the_engine_keeps_it(
    scene: Scene, first: int, end: int, chunks: slice, kept: list[int]
) -> None:
    scene.arrive()
    assert scene.matched() == 0
    stores = scene.begin(end, tables={"r": (TABLES[0], null_before(TABLES[1], first), [0, 0, 0, 3003, 3004])})
    whole = end // CHUNK
    assert by_group(stores) == [
        (FULL, CHAIN[:whole], list(range(1000, 1000 + 4 * whole))), (WINDOW, CHAIN[chunks], kept),
    ]  # fmt: skip


def test_states_are_stored_where_vllm_says_that_they_lie(scene: Scene) -> None:
    scene.arrive()
    scene.matched()
    offered = [(STATE, 77, 2 * CHUNK), (STATE, 0, 3 * CHUNK), (STATE, 78, CHUNK + 1), (WINDOW, 79, CHUNK)]
    states = {"r": offered, "gone": [(STATE, 80, CHUNK)]}
    stores = by_group(scene.begin(3 * CHUNK, tables={"r": TABLES}, states=states))
    assert [each for each in stores if each[0] == STATE] == [(STATE, CHAIN[1:2], [77])]
    between = scene.go_on(3 * CHUNK, 1, tables={"r": TABLES}, states={"r": [(STATE, 81, 3 * CHUNK)]})
    assert by_group(between) == [(STATE, CHAIN[2:3], [81])], "also in a step that completes no chunk"


def test_a_state_behind_generated_tokens_has_the_name_of_those(scene: Scene) -> None:
    request = scene.arrive(TOKENS[: CHUNK + 20])
    scene.matched()
    request.all_token_ids += list(range(900, 900 + CHUNK))
    stores = scene.go_on(2 * CHUNK - 1, 1, tables={"r": TABLES}, states={"r": [(STATE, 77, 2 * CHUNK)]})
    assert (STATE, chunk_keys(request.all_token_ids)[1:2], [77]) in by_group(stores)


def test_chunks_that_storage_has_are_not_stored_again(scene: Scene) -> None:
    hold(scene, (0, 1, 3), (0, 4))
    scene.arrive()
    assert scene.matched() == 0, "there is no state"
    stores = scene.begin(len(TOKENS), tables={"r": TABLES})
    found = [(each.group, each.chunk_keys, each.previous, each.anchored) for each in stores]
    assert sorted(found, key=lambda each: (each[0], CHAIN.index(each[1][0]))) == [
        (FULL, CHAIN[2:3], CHAIN[1], True),
        (FULL, CHAIN[4:5], CHAIN[3], False),
        (WINDOW, CHAIN[1:4], CHAIN[0], True),
    ]


def test_a_draft_layer_costs_a_block_of_a_hit_and_not_all_of_it(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(full(), window(2 * BLOCK + 8), full(head_size=16), drafts=True, eagle=(2,))
    hold(scene, *[range(4)] * 3)
    scene.arrive()
    assert scene.matched() == 4 * CHUNK - BLOCK
    last = 4 * CHUNK // BLOCK - 1
    load = scene.load((TABLES[0], null_before(TABLES[1], last - 3), TABLES[0]))
    assert load.groups[0].blocks == [*range(1000, 1000 + last), NOWHERE] == load.groups[2].blocks
    assert load.groups[1].chunk_keys in (CHAIN[2:4], CHAIN[3:4])
    assert [block for block in load.groups[1].blocks if block != NOWHERE] == list(range(2000 + last - 3, 2000 + last))


def test_a_step_of_256_requests_of_three_groups_looks_at_each_once(scene: Scene) -> None:
    side, names = scene.side, [f"request-{number}" for number in range(256)]
    for number, name in enumerate(names):
        side.on_new_request(Request(name, [number] * (CHUNK + 1)))
    wait_for(lambda: all(side._lookup.poll(name) is not None for name in names))
    tables = dict.fromkeys(names, TABLES)
    assert len(side.step(step(cached={name: (CHUNK, 1) for name in names}, tables=tables)).stores) == 2 * 256
    wait_for(lambda: not side._timing.reports._differs())  # else the next step wakes the reporting thread
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


@pytest.mark.parametrize("late", [False, True])
def test_only_the_records_that_a_hit_needs_of_windows_and_states_are_prefetched(
    scene: Scene, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the queue was faster than the lookup."""
    hold(scene, *[range(4)] * 3)
    looked = threading.Event()
    chains, submit = scene.side.waiting._look, scene.side._lookup.submit

    def look(request_id: str) -> Any:
        try:
            return chains(request_id)
        finally:
            looked.set()

    def submit_late(*arguments: Any, **options: Any) -> None:
        looked.wait(0.3)
        submit(*arguments, **options)

    if late:
        monkeypatch.setattr(scene.side.waiting, "_look", look)
        monkeypatch.setattr(scene.side._lookup, "submit", submit_late)
    scene.arrive()
    wait_for(lambda: scene.plane.expected)
    [arrival] = scene.plane.expected[-1].arrivals
    assert [list(chain.keys) for chain in arrival.chains] == [
        keys(0, TOKENS, FULL)[:4], keys(0, TOKENS, WINDOW)[3:4], keys(0, TOKENS, STATE)[3:4],
    ]  # fmt: skip
