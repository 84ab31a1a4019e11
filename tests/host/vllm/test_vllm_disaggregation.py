"""P/D disaggregation in the connector's scheduler half: parameters of proxies, tails and limits."""

from typing import Any

import numpy as np
import pytest
import torch
from machine import WAIT_MAX_S, wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    MODEL,
    NAMESPACES,
    Request,
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

from host_control.disaggregation import Available
from host_control.layouts import NOWHERE
from shadowserve.keys import record_keys, tail_chunk_key

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = list(range(3 * CHUNK + 2 * BLOCK + 5))
WHOLE, TAIL = 3 * CHUNK, 2 * BLOCK
GIVES = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
TAKES = {"do_remote_prefill": True, "do_remote_decode": False}
BLOCKS = list(range(1000, 1100))


def tail_of(tokens: list[int], size: int = TAIL) -> bytes:
    return tail_chunk_key(MODEL, tokens, size, chunk_tokens=CHUNK, after=chunk_keys(tokens))


def tail_key(tokens: list[int], size: int = TAIL, rank: int = 0) -> bytes:
    return record_keys(NAMESPACES[rank], [tail_of(tokens, size)])[0]


def arrive(side: Any, params: Any = None, tokens: list[int] = TOKENS, name: str = "r") -> Request:
    request = Request(name, tokens, kv_transfer_params=params)
    side.on_new_request(request)
    return request


def padded(blocks: list[int], before: int = 0) -> list[int]:
    """Return the blocks of records: none for stored records, and none after a tail."""
    chunk = CHUNK // BLOCK
    return [NOWHERE] * before + blocks + [NOWHERE] * (-(before + len(blocks)) % chunk)


def part(load: Any) -> Any:
    """Return a load's chunks and blocks of the only group."""
    (only,) = load.groups.values()
    return only


def hold(plane: ScriptedDataPlane, *, chunks: int = 3, tail: bool = True, tokens: list[int] = TOKENS) -> None:
    plane.records.update(dict.fromkeys(keys(0, tokens)[:chunks], b""))
    if tail:
        plane.records[tail_key(tokens)] = b""


def test_a_prompt_that_is_to_be_handed_over_is_stored_to_its_last_block(make_side: Any) -> None:
    side = make_side()
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    store, tail = side.step(step({"r": (0, len(TOKENS))})).stores
    assert store.chunk_keys == chunk_keys(TOKENS) and store.published
    assert store.blocks == BLOCKS[: WHOLE // BLOCK]
    assert tail.chunk_keys == [tail_of(TOKENS)] and tail.previous == chunk_keys(TOKENS)[-1] and tail.published
    assert tail.blocks == padded(BLOCKS[WHOLE // BLOCK : (WHOLE + TAIL) // BLOCK])
    assert side.finished(request) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "shadowserve": {"v": 1, "tokens": WHOLE + TAIL, "deadline_ms": 5000},
    }


def test_a_prompt_that_is_computed_in_parts_stores_each_part_and_the_tail_once(make_side: Any) -> None:
    side = make_side()
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    stored = []
    for begin in range(0, len(TOKENS), CHUNK // 2):
        size = min(CHUNK // 2, len(TOKENS) - begin)
        steps = step({"r": (begin, size)}) if begin == 0 else step(cached={"r": (begin, size)})
        stored += [(each.chunk_keys, each.previous) for each in side.step(steps).stores]
    one, two, three = chunk_keys(TOKENS)
    assert stored == [([one], None), ([two], one), ([three], two), ([tail_of(TOKENS)], three)]
    request.all_token_ids += range(CHUNK)
    (store,) = side.step(step(cached={"r": (len(TOKENS), CHUNK)})).stores
    assert store.chunk_keys == chunk_keys(request.all_token_ids)[3:], "generated tokens continue after the last chunk"


def test_a_prompt_shorter_than_a_chunk_is_a_tail(make_side: Any, plane: ScriptedDataPlane) -> None:
    side, tokens = make_side(load_tokens_min=1), TOKENS[: 3 * BLOCK + 3]
    giving = arrive(side, GIVES, tokens)
    assert matched(side, giving) == 0
    (store,) = side.step(step({"r": (0, len(tokens))})).stores
    assert store.chunk_keys == [tail_of(tokens, 3 * BLOCK)] and store.previous is None
    assert store.blocks == padded(BLOCKS[:3])
    plane.records[tail_key(tokens, 3 * BLOCK)] = b""
    taking = arrive(side, TAKES, tokens, "taking")
    assert matched(side, taking) == 3 * BLOCK
    side.allocated(taking, [BLOCKS[:4]], 3 * BLOCK)
    (load,) = side.step(step()).loads
    assert part(load).chunk_keys == [tail_of(tokens, 3 * BLOCK)] and part(load).blocks == padded(BLOCKS[:3])


def test_a_decode_engine_computes_only_the_prompts_last_block(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    hold(plane)
    request = arrive(side, TAKES)
    assert matched(side, request) == WHOLE + TAIL
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], WHOLE + TAIL)
    (load,) = side.step(step()).loads
    assert part(load).chunk_keys == [*chunk_keys(TOKENS), tail_of(TOKENS)]
    assert part(load).blocks == padded(BLOCKS[: (WHOLE + TAIL) // BLOCK])
    assert not side.step(step({"r": (WHOLE + TAIL, 5)})).stores, "all chunks are stored already"


def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed(make_side: Any, plane: ScriptedDataPlane) -> None:
    tokens = TOKENS[: WHOLE + TAIL]
    hold(plane, tokens=tokens)
    side = make_side()
    request = arrive(side, TAKES, tokens)
    assert matched(side, request) == WHOLE + TAIL - 1
    side.allocated(request, [BLOCKS[: (WHOLE + TAIL) // BLOCK]], WHOLE + TAIL - 1)
    (load,) = side.step(step()).loads
    assert part(load).blocks == padded(BLOCKS[: (WHOLE + TAIL) // BLOCK])


def test_a_tail_behind_the_engines_own_prefix_is_loaded_alone(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(load_tokens_min=1)
    hold(plane)
    request = arrive(side, TAKES)
    assert matched(side, request, local=WHOLE + BLOCK) == BLOCK
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], BLOCK)
    (load,) = side.step(step()).loads
    assert part(load).chunk_keys == [tail_of(TOKENS)]
    assert part(load).blocks == padded(BLOCKS[WHOLE // BLOCK + 1 : (WHOLE + TAIL) // BLOCK], before=1)


def test_a_request_without_parameters_stores_whole_chunks_and_gets_no_reply(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side()
    request = arrive(side)
    assert matched(side, request) == 0
    (store,) = side.step(step({"r": (0, len(TOKENS))})).stores
    assert store.chunk_keys == chunk_keys(TOKENS) and not store.published
    assert side.finished(request) is None and "Publish" not in plane.calls


@pytest.mark.parametrize("disaggregation", ["prefill", "decode"])
def test_behind_a_proxy_that_says_nothing_the_configuration_does(
    make_side: Any, plane: ScriptedDataPlane, disaggregation: str
) -> None:
    side = make_side(pd_role=disaggregation)
    if disaggregation == "decode":
        hold(plane)
    request = arrive(side)
    assert matched(side, request) == (WHOLE + TAIL if disaggregation == "decode" else 0)
    stores = side.step(step({"r": (0, len(TOKENS))})).stores
    if disaggregation == "prefill":
        assert stores[-1].chunk_keys[-1] == tail_of(TOKENS)
        wait_for(lambda: set(plane.published or ()) == {*keys(0, TOKENS), tail_key(TOKENS)})
    assert side.finished(request) is None


def test_a_request_waits_for_chunks_that_the_prefill_engine_stores(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    assert plane.published is not None
    plane.published.update(dict.fromkeys([*keys(0, TOKENS), tail_key(TOKENS)], 60_000))
    request = arrive(side, TAKES)
    plane.wait_for_call("Lookup", 3)
    assert side.matched_tokens(request, 0) is None
    hold(plane)
    assert matched(side, request) == WHOLE + TAIL
    assert side.counts.take().data.get("lookup_failures/published_late") is None


def come(plane: ScriptedDataPlane, *, chunks: int) -> None:
    """Store the given number of chunks in the other engine, and publish the rest."""
    assert plane.published is not None
    plane.published.update(dict.fromkeys([*keys(0, TOKENS), tail_key(TOKENS)], 60_000))
    hold(plane, chunks=chunks, tail=False)


@pytest.mark.parametrize(("local", "there"), [(0, 1), (CHUNK, 0), (CHUNK + BLOCK, 0)])
def test_a_load_starts_with_available_chunks_and_the_workers_learn_of_the_rest(
    make_side: Any, plane: ScriptedDataPlane, local: int, there: int
) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    assert matched(side, request, local) == WHOLE + TAIL - local
    assert side.waits(request), "no computing while the request waits"
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], WHOLE + TAIL - local)
    begun = side.step(step())
    (load,) = begun.loads
    assert load.available == Available(there, "") and not begun.available
    assert part(load).chunk_keys == [*chunk_keys(TOKENS)[local // CHUNK :], tail_of(TOKENS)]
    hold(plane, tail=False)
    assert wait_for(lambda: side.step(step()).available) == {"r": Available(there + 2, "")}
    hold(plane)
    assert wait_for(lambda: side.step(step()).available) == {"r": Available(there + 3, "complete")}
    assert not side.step(step()).available, "reported once"
    side.worker_output({"r"}, report({}))
    assert not side.step(step({"r": (WHOLE + TAIL, 5)})).stores, "all chunks are stored already"


def test_chunks_that_a_load_waited_for_in_vain_are_computed_and_stored(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], matched(side, request))
    side.step(step())
    assert plane.published is not None
    plane.published.clear()
    assert wait_for(lambda: side.step(step()).available) == {"r": Available(1, "published_gone")}
    side.worker_output({"r"}, report({"r": 1}))
    assert matched(side, request, CHUNK) == 0, "no second offer"
    stores = side.step(step({"r": (CHUNK, len(TOKENS) - CHUNK)})).stores
    assert [chunk_key for store in stores for chunk_key in store.chunk_keys] == [
        *chunk_keys(TOKENS)[1:],
        tail_of(TOKENS),
    ]


def test_a_load_that_waits_is_given_up_when_the_weights_change(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], matched(side, request))
    side.step(step())
    side.reset()
    assert side.step(step()).available == {"r": Available(1, "weights_changed")}


def test_a_request_that_is_aborted_while_its_load_waits_is_cancelled(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], matched(side, request))
    side.step(step())
    side.finished(request)
    hold(plane)
    last = side.step(step())
    assert (last.cancels, last.available) == (["r"], {})


@pytest.mark.parametrize(
    "options",
    [
        {"asynchronous_fetch": False},
        {"recomputes": False},
    ],
    ids=["the engine would stand still", "the request would fail"],
)
def test_where_no_load_may_fall_short_the_lookup_waits_for_all(
    make_side: Any, plane: ScriptedDataPlane, options: dict[str, Any]
) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S, **options)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    plane.wait_for_call("Lookup", 4)
    assert side.matched_tokens(request, 0) is None
    assert side.finished(request) is None


FULL, WINDOW = 0, 1


def several(make_side: Any) -> Any:
    """Return the half of an engine with full attention, and a window that needs three blocks of four."""
    specs = full(), window(2 * BLOCK + 8)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    return make_side(groups=groups, load_tokens_min=1, pd_timeout_s=WAIT_MAX_S)


def begin(side: Any, request: Request, tokens: int) -> Any:
    """Load a hit of two groups."""
    end = -(-tokens // BLOCK)
    window_blocks = [0] * (end - 3) + list(range(2000 + end - 3, 2000 + end))
    side.allocated(request, (BLOCKS[:end], window_blocks), tokens)
    (load,) = side.step(step()).loads
    return load


def test_a_load_of_several_groups_starts_with_available_chunks(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = several(make_side)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    assert matched(side, request) == WHOLE + TAIL, "chunks of windows are stored together with the published chunks"
    assert side.waits(request)
    load = begin(side, request, WHOLE + TAIL)
    assert load.available == Available(1, "")
    assert load.groups[FULL].chunks == [0, 1, 2, 3] and load.groups[WINDOW].chunks == [3]
    assert load.groups[WINDOW].chunk_keys == [tail_of(TOKENS)]
    hold(plane)
    assert wait_for(lambda: side.step(step()).available) == {"r": Available(4, "complete")}
    side.worker_output({"r"}, report({}))
    assert not side.step(step({"r": (WHOLE + TAIL, 5)})).stores, "all chunks are stored already"


def test_several_groups_still_load_the_stored_chunks_when_pending_ones_never_come(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = several(make_side)
    come(plane, chunks=1)
    request = arrive(side, TAKES)
    begin(side, request, matched(side, request))
    plane.records |= dict.fromkeys([*keys(0, TOKENS)[:2], keys(0, TOKENS, WINDOW)[1]], b"")
    assert plane.published is not None
    plane.published.clear()
    assert wait_for(lambda: side.step(step()).available) == {"r": Available(2, "published_gone")}
    side.worker_output({"r"}, report({"r": 0}))
    assert matched(side, request) == 2 * CHUNK, "vLLM has allocated no block for it, and calls again"
    assert begin(side, request, 2 * CHUNK).available is None, "no wait for stored chunks"
    side.worker_output({"r"}, report({"r": 0}))
    assert matched(side, request) == 0, "no third offer"
    stores = side.step(step({"r": (0, WHOLE)}, tables={"r": (BLOCKS, list(range(2000, 2100)))})).stores
    assert sum(len(store.chunk_keys) for store in stores if store.group == FULL) == 3, (
        "chunks that cannot be loaded are stored again"
    )


def test_with_a_window_a_prompt_is_stored_to_its_last_block_in_every_group(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """Symptom: with several groups, the decode engine computed all tokens after the last whole chunk."""
    side = several(make_side)
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    stores = side.step(step({"r": (0, len(TOKENS))}, tables={"r": (BLOCKS, list(range(2000, 2100)))})).stores
    end = (WHOLE + TAIL) // BLOCK
    tails = [store for store in stores if store.chunk_keys == [tail_of(TOKENS)]]
    assert [tail.group for tail in tails] == [WINDOW, FULL], "the group that keeps every chunk is stored last"
    assert stores[-2:] == tails
    assert tails[0].blocks == list(range(2000 + end - 3, 2000 + end)) and not tails[0].tail_tokens
    assert tails[1].blocks == padded(BLOCKS[WHOLE // BLOCK : end]) and tails[1].tail_tokens == TAIL
    assert wait_for(lambda: plane.published and len(plane.published) >= 4)
    assert side.finished(request)["shadowserve"]["tokens"] == WHOLE + TAIL
    assert "slower_paths" not in str(side.counts.take())


def test_with_a_window_a_decode_engine_computes_only_the_prompts_last_block(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = several(make_side)
    hold(plane)
    tail = tail_of(TOKENS)
    plane.records |= dict.fromkeys(record_keys(NAMESPACES[0][:31] + bytes([WINDOW]), [*chunk_keys(TOKENS), tail]), b"")
    request = arrive(side, TAKES)
    assert matched(side, request) == WHOLE + TAIL
    load = begin(side, request, WHOLE + TAIL)
    end = (WHOLE + TAIL) // BLOCK
    assert load.groups[FULL].chunk_keys == [*chunk_keys(TOKENS), tail]
    assert load.groups[FULL].blocks == padded(BLOCKS[:end])
    assert load.groups[WINDOW].chunk_keys == [tail] and load.groups[WINDOW].chunks == [3]
    assert load.groups[WINDOW].blocks == list(range(2000 + end - 3, 2000 + end))


def test_with_a_window_no_tail_holds_the_prompts_last_token(make_side: Any) -> None:
    """vLLM computes the last token again, and needs one more token of the window for it."""
    side = several(make_side)
    tokens = TOKENS[: WHOLE + TAIL]
    request = arrive(side, GIVES, tokens)
    assert matched(side, request) == 0
    stores = side.step(step({"r": (0, len(tokens))}, tables={"r": (BLOCKS, list(range(2000, 2100)))})).stores
    tails = [store.chunk_keys for store in stores if store.chunk_keys[0] not in chunk_keys(tokens)]
    assert tails == [[tail_of(tokens, TAIL - BLOCK)]] * 2


def test_with_a_window_that_was_let_go_of_no_tail_is_stored_and_that_is_counted(make_side: Any) -> None:
    side = several(make_side)
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    let_go = [0] * (WHOLE // BLOCK + 1) + list(range(2000, 2100))
    stores = side.step(step({"r": (0, len(TOKENS))}, tables={"r": (BLOCKS, let_go)})).stores
    assert all(chunk_key in chunk_keys(TOKENS) for store in stores for chunk_key in store.chunk_keys)
    assert side.finished(request)["shadowserve"]["tokens"] == WHOLE
    assert "prompt_tail_not_shared" in str(side.counts.take())


def test_two_groups_of_full_attention_share_a_prompt_to_its_last_block(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    specs = full(), full(block_size=2 * BLOCK)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    side = make_side(groups=groups)
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    tables = {"r": (BLOCKS, list(range(2000, 2100)))}
    stores = side.step(step({"r": (0, len(TOKENS))}, tables=tables)).stores
    tails = [store for store in stores if store.chunk_keys == [tail_of(TOKENS)]]
    assert [tail.blocks for tail in tails] == [padded(BLOCKS[12:14]), [2006, NOWHERE]]
    plane.records |= dict.fromkeys(
        key for rank in (0, 1) for key in record_keys(bytes(31) + bytes([rank]), [*chunk_keys(TOKENS), tail_of(TOKENS)])
    )
    taking = arrive(side, TAKES, name="taking")
    assert matched(side, taking) == WHOLE + TAIL


def test_with_states_a_tail_that_is_not_shared_is_counted(make_side: Any) -> None:
    specs = full(block_size=CHUNK), state(block_size=CHUNK)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    side = make_side(groups=groups)
    arrive(side, name="not handed over")
    assert "prompt_tail_not_shared" not in str(side.counts.take())
    arrive(side, GIVES)
    assert "prompt_tail_not_shared" in str(side.counts.take())


def test_with_a_window_a_prompt_that_ends_with_a_chunk_is_counted(make_side: Any) -> None:
    """No hit ends with the prompt, and the chunk before is the last one that vLLM accepts."""
    side = several(make_side)
    arrive(side, GIVES, TOKENS[:WHOLE])
    assert "prompt_tail_not_shared" in str(side.counts.take())


def test_published_chunks_that_are_never_stored_are_computed_and_counted(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side(pd_timeout_s=0.2)
    assert plane.published is not None
    plane.published.update(dict.fromkeys(keys(0, TOKENS), 60_000))
    request = arrive(side, TAKES)
    assert matched(side, request) == 0
    assert side.counts.take().data["lookup_failures/published_late"] == 1


def test_publications_of_an_aborted_request_are_withdrawn(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    request = arrive(side, GIVES)
    matched(side, request)
    wait_for(lambda: len(plane.published or ()) == 4)
    side.step(step({"r": (0, CHUNK)}))
    assert side.finished(request) == {
        **{"do_remote_prefill": True, "do_remote_decode": False},
        "shadowserve": {"v": 1, "tokens": CHUNK, "deadline_ms": int(1000 * WAIT_MAX_S)},
    }
    wait_for(lambda: set(plane.published or ()) == set(keys(0, TOKENS)[:1]))


@pytest.mark.parametrize(
    ("most", "tokens"),
    [(0, 0), (CHUNK - 1, 0), (2 * CHUNK + 7, 2 * CHUNK), (WHOLE + TAIL - 1, WHOLE), (WHOLE + TAIL, WHOLE + TAIL)],
)
def test_no_more_is_loaded_than_the_cap(make_side: Any, plane: ScriptedDataPlane, most: int, tokens: int) -> None:
    side = make_side()
    hold(plane)
    request = arrive(side, TAKES | {"max_load_tokens": most})
    assert matched(side, request) == tokens
    if tokens:
        side.allocated(request, [BLOCKS[: -(-tokens // BLOCK)]], tokens)
        (load,) = side.step(step()).loads
        assert len([block for block in part(load).blocks if block != NOWHERE]) == tokens // BLOCK


def test_the_cap_on_loads_counts_from_the_engines_own_prefix(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(load_tokens_min=1)
    hold(plane)
    request = arrive(side, {"max_load_tokens": CHUNK})
    assert matched(side, request, local=CHUNK) == CHUNK
    assert matched(side, request, local=CHUNK + BLOCK) == CHUNK - BLOCK


@pytest.mark.parametrize(
    ("most", "chunks", "tail"),
    [
        (0, 0, False),
        (CHUNK, 1, False),
        (3 * CHUNK - 1, 2, False),
        (WHOLE + TAIL - 1, 3, False),
        (WHOLE + TAIL, 3, True),
    ],
)
def test_no_more_is_stored_or_published_than_the_cap(
    make_side: Any, plane: ScriptedDataPlane, most: int, chunks: int, tail: bool
) -> None:
    side = make_side()
    request = arrive(side, GIVES | {"max_offload_tokens": most})
    assert matched(side, request) == 0
    stored = [chunk_key for store in side.step(step({"r": (0, len(TOKENS))})).stores for chunk_key in store.chunk_keys]
    assert stored == [*chunk_keys(TOKENS)[:chunks], *([tail_of(TOKENS)] if tail else [])]
    wait_for(lambda: len(plane.published or ()) == len(stored))
    told = side.finished(request)
    assert (told or {}).get("shadowserve", {}).get("tokens", 0) == chunks * CHUNK + tail * TAIL


@pytest.mark.parametrize(
    "params",
    [
        "do_remote_decode",
        ["do_remote_decode"],
        {"do_remote_decode": "true", "do_remote_prefill": 1},
        {"shadowserve": 7, "max_load_tokens": "many", "max_offload_tokens": -1, "anything": {"else": None}},
        {"shadowserve": {"v": 2, "tokens": WHOLE}, "max_load_tokens": True},
        {"shadowserve": {"v": 1, "tokens": 1 << 70, "deadline_ms": 1e9}},
        {},
    ],
)
def test_params_that_make_no_sense_are_passed_over(make_side: Any, plane: ScriptedDataPlane, params: Any) -> None:
    side = make_side()
    hold(plane)
    request = arrive(side, params)
    assert matched(side, request) == WHOLE
    assert side.finished(request) is None and "Publish" not in plane.calls


def test_without_publications_the_other_engines_word_is_waited_for(make_side: Any, plane: ScriptedDataPlane) -> None:
    plane.published = None
    side = make_side(pd_timeout_s=WAIT_MAX_S)
    told = TAKES | {"shadowserve": {"v": 1, "tokens": WHOLE + TAIL, "deadline_ms": int(1000 * WAIT_MAX_S)}}
    request = arrive(side, told)
    plane.wait_for_call("Lookup", 3)
    assert side.matched_tokens(request, 0) is None
    hold(plane)
    assert matched(side, request) == WHOLE + TAIL
    assert matched(side, arrive(side, TAKES, [9, *TOKENS], "cold")) == 0
    assert side.counts.take().data["slower_paths/no_publishing"] == 1, "no parameter says how long to wait for this one"


@pytest.mark.parametrize(
    ("params", "takes_none", "plain", "reason"),
    [
        (GIVES, True, False, "no_publishing"),
        (GIVES, False, True, "pages_stay_here"),
        (TAKES, False, True, ""),
        (GIVES, False, False, ""),
    ],
)
def test_engines_that_do_not_hear_of_each_other_are_counted(
    make_side: Any, plane: ScriptedDataPlane, params: Any, takes_none: bool, plain: bool, reason: str
) -> None:
    plane.published = None if takes_none else {}
    side = make_side()
    side._lookup._plain = plain
    request = arrive(side, params)
    assert matched(side, request) == 0
    if params is GIVES:
        plane.wait_for_call("Publish")
        wait_for(lambda: side._lookup.reach or not reason)
    side.finished(request)
    counted = str(side.counts.take())
    assert (reason in counted) if reason else ("slower_paths" not in counted)
    plain_request = arrive(side, name="stays here")
    side.finished(plain_request)
    assert "slower_paths" not in str(side.counts.take())


def test_a_tail_that_could_not_be_loaded_is_stored_again(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    hold(plane)
    request = arrive(side, TAKES)
    assert matched(side, request) == WHOLE + TAIL
    side.allocated(request, [BLOCKS[: WHOLE // BLOCK + 3]], WHOLE + TAIL)
    side.step(step())
    side.worker_output({"r"}, report({"r": 3}))
    (store,) = side.step(step({"r": (WHOLE, TAIL + 5)})).stores
    assert store.chunk_keys == [tail_of(TOKENS)] and store.previous == chunk_keys(TOKENS)[-1]


def test_new_weights_hand_nothing_old_over(make_side: Any) -> None:
    side = make_side()
    request = arrive(side, GIVES)
    assert matched(side, request) == 0
    request.num_computed_tokens = CHUNK
    side.reset()
    assert not side.step(step({"r": (0, len(TOKENS))})).stores
    assert side.finished(request) is None


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("skip", [0, 1, 5])
def test_a_tails_blocks_come_back_and_nothing_behind_them_is_touched(blocks: int, skip: int) -> None:
    from host_control.layouts import NOWHERE, PagedLayout

    each = 4
    generator = torch.Generator().manual_seed(blocks)
    caches = [torch.rand((12, 2, 16, 2 * 32), generator=generator) for _ in range(3)]
    there = [cache.clone() for cache in caches]
    layout = PagedLayout(caches, "cpu_pages")
    size = layout.chunk_bytes(each * layout.block_tokens)
    held = bytearray(b"\x07" * (size * -(-blocks // each)))
    for first in range(0, blocks, each):
        mine = [block if block < blocks else NOWHERE for block in range(first, first + each)]
        layout.gather(memoryview(held)[first // each * size :][:size], mine)
    last = np.frombuffer(held, np.uint8)[-size:].reshape(3 * 2, each, -1)
    assert not last[:, (blocks - 1) % each + 1 :].any(), "zeros after the tail"
    for cache in caches:
        cache.zero_()
    padded = -(-blocks // each) * each
    layout.scatter(memoryview(held), [block if skip <= block < blocks else NOWHERE for block in range(padded)], each)
    for cache, before in zip(caches, there, strict=True):
        assert torch.equal(cache[min(skip, blocks) : blocks], before[min(skip, blocks) : blocks])
        assert not cache[blocks:].any() and not cache[: min(skip, blocks)].any()
