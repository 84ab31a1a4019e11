"""Saved KV of preempted requests in the connector's scheduler half, and the offers when the requests return."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    TOKENS,
    Request,
    Scene,
    chunk_keys,
    full,
    keys,
    names_of,
    namespace_of,
    put,
    saved_namespace_of,
    state,
    tail_of,
    window,
)
from scripted import ScriptedDataPlane

from host_control.layouts import NOWHERE
from shadowserve.keys import record_keys, segment_of

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPT = TOKENS[: 2 * CHUNK + 10]
GENERATED = list(range(900, 900 + BLOCK))
END = len(PROMPT) + len(GENERATED) - 1
"""Number of tokens that a running request has computed; it ends within a block."""


def running(scene: Scene, **attributes: Any) -> Request:
    """Return a request that has computed its prompt and all generated tokens except the last one."""
    request = scene.arrive(PROMPT, **attributes)
    scene.matched()
    scene.begin(len(PROMPT))
    request.all_token_ids += GENERATED
    scene.go_on(END - 1, 1)
    return request


def save(scene: Scene) -> list[bytes]:
    """Preempt the request and store its save; return the chunk keys."""
    names = names_of(scene.preempt())
    put(scene.plane, names)
    scene.report(saved={scene.name: 1})
    return names


# ---- One group -------------------------------------------------------------------------------------------------------


def test_a_save_has_everything_not_stored_up_to_the_last_token(scene: Scene) -> None:
    """Symptom: each resumed request computed half a block, 1.6 % of an engine's time."""
    request = running(scene)
    (chunks, tail) = scene.preempt()
    assert chunks.chunk_keys == chunk_keys(PROMPT) and chunks.blocks == list(range(1000, 1008))
    assert chunks.previous is None, "the worker knows which chunks are stored already"
    assert tail.chunk_keys == [tail_of(request.all_token_ids, END)] and tail.tail_tokens == BLOCK + 9
    assert tail.blocks == [1008, 1009, NOWHERE, NOWHERE] and tail.previous == chunk_keys(PROMPT)[-1]
    assert tail.lasts_s > 0 == chunks.lasts_s, "no other request looks the tail up"


def test_of_a_save_with_a_ttl_only_the_tail_may_stay_in_local_tiers(scene: Scene) -> None:
    running(scene, kv_transfer_params={"shadowserve_hints": {"ttl_s": 90}})
    chunks, tail = scene.preempt()
    assert (chunks.own, chunks.lasts_s) == (False, 90.0) and tail.own


@pytest.mark.parametrize(
    ("prompt", "computed", "most", "chunks", "end"),
    [
        pytest.param(TOKENS, CHUNK + BLOCK + 5, None, 1, CHUNK + BLOCK + 5, id="a prompt in part"),
        pytest.param(TOKENS, CHUNK + BLOCK - 1, None, 1, CHUNK, id="less than a block is computed again"),
        pytest.param(TOKENS, 2 * CHUNK - 1, None, 1, 2 * CHUNK - 1, id="just before a chunk's end"),
        pytest.param(TOKENS, 2 * CHUNK, None, 2, 2 * CHUNK, id="at a chunk's end"),
        pytest.param(TOKENS[: CHUNK + BLOCK], CHUNK + BLOCK + 4, None, 1, CHUNK + BLOCK, id="four wrong drafts"),
        pytest.param(PROMPT, len(PROMPT), CHUNK + BLOCK + 3, 1, CHUNK + BLOCK + 3, id="no more than may be stored"),
    ],
)
def test_a_save_ends_with_the_computed_tokens_and_is_found_again(
    scene: Scene, prompt: list[int], computed: int, most: int | None, chunks: int, end: int
) -> None:
    request = scene.arrive(prompt, kv_transfer_params={"max_offload_tokens": most} if most else None)
    scene.matched()
    scene.begin(computed)
    request.all_token_ids.append(7)
    names = save(scene)
    assert names == chunk_keys(prompt)[:chunks] + ([tail_of(prompt, end)] if end % CHUNK else [])
    scene.look_up()
    assert scene.plane.asked_keys[-1][: len(names)] == record_keys(namespace_of(0, 0), names)
    assert scene.ask() == end


def test_blocks_are_followed_through_later_steps_and_preemptions(scene: Scene) -> None:
    request = scene.arrive(PROMPT)
    scene.matched()
    scene.begin(len(PROMPT), tables={"r": (list(range(1000, 1009)),)})
    request.all_token_ids += GENERATED
    scene.go_on(END - 1, 1, blocks=[77])
    (chunks, tail) = scene.preempt()
    assert chunks.blocks == list(range(1000, 1008)) and tail.blocks == [1008, 77, NOWHERE, NOWHERE]
    scene.resume(0, END, range(300, 320))
    chunks, tail = scene.preempt()
    assert chunks.blocks == list(range(300, 308)) and tail.blocks[:2] == [308, 309]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_is_offered_while_it_is_still_being_stored(make_scene: Callable[..., Scene], ranks: int) -> None:
    """Otherwise vLLM would give its place in the queue, and its blocks, to later requests."""
    scene = make_scene(ranks=ranks)
    request = running(scene)
    scene.preempt()
    lookups = scene.plane.calls.count("Lookup")
    assert scene.ask() == END
    load = scene.load([range(200, 240)])
    assert load.groups[0].chunk_keys == [*chunk_keys(PROMPT), tail_of(request.all_token_ids, END)]
    assert load.groups[0].blocks[8:] == [208, 209, NOWHERE, NOWHERE]
    assert load.available is not None and (load.available.chunks, load.available.ended) == (0, "")
    for _ in range(ranks):
        assert scene.available() is None, "not all ranks have reported it"
        scene.report(saved={"r": 1})
    assert scene.available() == (3, "complete") and scene.available() is None
    assert scene.plane.calls.count("Lookup") == lookups


def test_saved_chunks_are_looked_up_and_offered(scene: Scene) -> None:
    running(scene)
    names = save(scene)
    assert scene.ask() == END, "offered, until the lookup has its answer"
    scene.look_up()
    assert scene.ask(CHUNK) == END - CHUNK
    assert scene.ask(END) == 0, "the engine's own prefix cache has all blocks"
    load = scene.load([range(200, 240)])
    assert load.available is None and load.groups[0].chunk_keys == names


def test_a_load_that_ends_within_a_block_does_not_go_layer_by_layer(make_scene: Callable[..., Scene]) -> None:
    """Symptom: wrong tokens after a preemption. vLLM writes the KV of the next token before it waits for the layer."""
    scene = make_scene(layer_order=True)
    scene.side.ways.by_layers = True
    running(scene, status=None)
    put(scene.plane, names_of(scene.preempt()))
    scene.report(saved={"r": 1})
    scene.look_up()
    assert scene.ask() == END and END % BLOCK
    assert not scene.load([range(200, 240)]).layerwise
    assert scene.counted("slower_paths") == {"slower_paths/partial_block": 1}


def test_dropped_chunks_of_a_save_are_not_offered(scene: Scene) -> None:
    running(scene)
    scene.preempt()
    put(scene.plane, chunk_keys(PROMPT)[:1])
    scene.report(saved={"r": 1})
    scene.look_up()
    assert scene.ask() == CHUNK


def test_a_request_waits_for_its_save_no_longer_than_a_load_may_take(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(fetch_timeout_s=0.2)
    running(scene)
    scene.preempt()
    lookups = scene.plane.calls.count("Lookup")
    wait_for(lambda: scene.ask() == 0)
    assert scene.plane.calls.count("Lookup") == lookups + 1


def test_where_a_load_that_falls_short_fails_a_request_nothing_is_promised(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(recomputes=False)
    running(scene)
    names = names_of(scene.preempt())
    assert scene.ask() is None
    put(scene.plane, names)
    scene.report(saved={"r": 1})
    assert scene.matched() == END


def test_nothing_is_saved_of_a_load_that_fell_short(make_scene: Callable[..., Scene]) -> None:
    """Symptom: garbage KV under a valid key, because vLLM takes back tokens that were computed on such a load."""
    scene = make_scene(asynchronous_fetch=False)
    request = scene.arrive(stored=4)
    scene.load([range(1000, 1040)])
    scene.begin(10, 4 * CHUNK)
    assert scene.preempt() == [], "no worker has reported the result yet"
    request.num_preemptions = 0
    scene.begin(10, 4 * CHUNK)
    scene.report({"r": 1})
    assert scene.preempt() == [], "it was computed on garbage"
    request.num_preemptions = 0
    scene.begin(3 * CHUNK + 10, CHUNK)
    assert scene.preempt(), "computed again"


def test_kv_of_earlier_weights_is_not_saved_under_the_name_of_later_ones(scene: Scene) -> None:
    """Symptom: reset_prefix_cache(reset_running_requests=True, reset_connector=True) preempts, and then restarts."""
    running(scene)
    scene.side.reset()
    assert scene.preempt() == []
    running(scene)
    scene.preempt()
    assert scene.ask() == END
    scene.side.reset()
    assert scene.matched() == 0, "and KV that was saved before is not offered"


@pytest.mark.parametrize(
    "change", [{"new_block_ids_to_zero": [1005]}, {"kv_cache_block_copies": [SimpleNamespace(dst_block_id=1005)]}]
)
def test_blocks_that_a_worker_writes_before_it_saves_are_left_out(scene: Scene, change: dict[str, Any]) -> None:
    """vLLM's second model runner zeroes and copies blocks before it calls connectors to save."""
    running(scene)
    (chunks, tail) = scene.preempt(**change)
    assert chunks.blocks == list(range(1000, 1004)) and tail.blocks[:2] == [1004, NOWHERE]


def test_a_request_may_be_preempted_and_planned_in_one_step(scene: Scene) -> None:
    """Like reset_prefix_cache(reset_running_requests=True)."""
    request = running(scene)
    request.num_preemptions = 1
    assert scene.matched() == 0, "looked up before any save"
    (chunks, _) = scene.resume(0, len(request.all_token_ids), range(300, 320), preempted=["r"]).saves["r"]
    assert chunks.blocks == list(range(1000, 1008)), "in its earlier blocks"
    (chunks, _) = scene.preempt()
    assert chunks.blocks == list(range(300, 308))


def test_a_prompt_that_is_handed_over_keeps_its_own_tail(make_scene: Callable[..., Scene]) -> None:
    scene, prompt = make_scene(pd_role="prefill"), TOKENS[: 2 * CHUNK + BLOCK + 10]
    scene.arrive(prompt)
    scene.matched()
    scene.begin(CHUNK + BLOCK)
    assert scene.preempt() == [] and scene.matched() == 0
    (store, tail) = scene.begin(len(prompt))
    assert store.chunk_keys == chunk_keys(prompt)[1:] and tail.chunk_keys == [tail_of(prompt, 2 * CHUNK + BLOCK)]
    assert tail.published and not tail.lasts_s


def test_a_request_that_ends_while_it_is_saved_is_forgotten(scene: Scene) -> None:
    running(scene)
    scene.preempt()
    scene.finish()
    scene.report(saved={"r": 1})
    assert not scene.side._requests


# ---- Several groups --------------------------------------------------------------------------------------------------

FULL, OTHER = 0, 1
"""Groups: full attention, and a window or states."""
HELD = 2 * CHUNK + BLOCK + 5
"""Number of tokens that a preempted request has computed."""
SECOND = chunk_keys(TOKENS)[1]
KINDS: dict[str, tuple[Callable[[], Any], ...]] = {
    # The window needs three blocks of four. Groups with states have blocks of a chunk, as in vLLM.
    "windows": (full, lambda: window(3 * BLOCK)),
    "states": (lambda: full(block_size=CHUNK), lambda: state(block_size=CHUNK)),
    "states and windows": (
        lambda: full(block_size=CHUNK),
        lambda: state(block_size=CHUNK),
        lambda: window(3 * BLOCK),
    ),
}
TAIL = {"windows": HELD - 5, "states": HELD}
"""Tokens that are saved: whole blocks with windows, all with states."""


def several(make_scene: Callable[..., Scene], kind: str, **options: Any) -> Scene:
    return make_scene(*(make() for make in KINDS[kind]), **options)


def preempted(scene: Scene, held: int = HELD, changes: dict[str, Any] | None = None, **attributes: Any) -> list[Any]:
    """Compute a request's tokens and preempt it; return its saves."""
    scene.arrive(**attributes)
    scene.matched()
    scene.begin(held, tables={"r": tuple(list(range(first, first + 40)) for first in (1000, 2000, 3000))})
    return scene.preempt(**(changes or {}))


WINDOWS_SAVED = {
    (FULL, SECOND): list(range(1000, 1008)),
    (OTHER, tail_of(TOKENS, HELD - 5)): [2006, 2007, 2008],
    (FULL, tail_of(TOKENS, HELD - 5)): [1008, NOWHERE, NOWHERE, NOWHERE],
}
"""The window's second chunk was stored when it was complete; by now the window has freed some of its blocks."""
STATES_SAVED = {
    (FULL, SECOND): [1000, 1001],
    (OTHER, tail_of(TOKENS, HELD)): [2002],
    (FULL, tail_of(TOKENS, HELD)): [1002],
}
"""Symptom: a resumed request with states computed up to a block, which has hundreds of tokens."""


@pytest.mark.parametrize(
    ("kind", "held", "given", "expected"),
    [
        pytest.param("windows", HELD, {}, WINDOWS_SAVED, id="whole blocks that windows keep"),
        # The window has freed the first block of a shorter hit, or the tail after the last chunk is less than a block.
        ("windows", 2 * CHUNK + BLOCK - 1, {}, {(FULL, SECOND): list(range(1000, 1008))}),
        ("windows", 2 * CHUNK + 2 * BLOCK - 1, {}, {(FULL, SECOND): list(range(1000, 1008))}),
        # The window has freed blocks that a shorter hit needs; freed blocks may be overwritten.
        ("windows", HELD, {"changes": {"new_block_ids_to_zero": [1008]}}, {}),
        ("windows", HELD, {"changes": {"new_block_ids_to_zero": [2001]}}, WINDOWS_SAVED),
        pytest.param("states", HELD, {}, STATES_SAVED, id="the state as it is"),
        # Symptom: a chunk's end was offered although its state was not stored. Only this request had that state.
        ("states", 2 * CHUNK + 3, {}, {}),
        ("states", 2 * CHUNK, {}, {(FULL, SECOND): [1000, 1001], (OTHER, SECOND): [2001]}),
        # A state after more tokens cannot be used for fewer.
        ("states", HELD, {"kv_transfer_params": {"max_offload_tokens": HELD - 1}}, {}),
        # A window's blocks and a state end elsewhere. Only the worker knows the effect of drafts on states.
        ("states and windows", HELD, {}, {}),
        ("states", HELD, {"drafts": True}, {}),
    ],
)
def test_saves_of_several_groups(
    make_scene: Callable[..., Scene], kind: str, held: int, given: dict[str, Any], expected: dict[Any, list[int]]
) -> None:
    scene = several(make_scene, kind, drafts=given.pop("drafts", False))
    saves = preempted(scene, held, **given)
    assert {(each.group, each.chunk_keys[-1]): each.blocks for each in saves} == expected
    last_groups = [each.group for each in saves if each.chunk_keys[-1] != SECOND]
    assert last_groups in ([], [OTHER, FULL]), "the group that keeps every chunk is stored last"
    assert all((each.lasts_s > 0) == (each.chunk_keys[-1] != SECOND) for each in saves)
    partial = {each.group: each.tail_tokens for each in saves if each.tail_tokens}
    assert partial in ({}, {FULL: TAIL.get(kind, 0) - 2 * CHUNK}), "a window's blocks and a state are stored whole"


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.parametrize(
    ("kind", "tables", "of_full", "of_other"),
    [
        ("windows", [range(300, 310), [0] * 6 + [406, 407, 408, 409]], [*range(300, 309)], [406, 407, 408]),
        ("states", [[300, 301, 302], [0, 0, 402]], [300, 301, 302], [402]),
    ],
)
def test_a_save_of_several_groups_is_loaded(
    make_scene: Callable[..., Scene],
    kind: str,
    tables: Any,
    of_full: list[int],
    of_other: list[int],
    under_way: bool,
) -> None:
    scene, names = several(make_scene, kind), [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, TAIL[kind])]
    preempted(scene)
    if not under_way:
        put(scene.plane, names, FULL)
        put(scene.plane, names[2 - (kind == "windows") :], OTHER)
        scene.report(saved={"r": 1})
    assert scene.matched() == TAIL[kind]
    load = scene.load(tables)
    assert (load.groups[FULL].chunk_keys, load.groups[OTHER].chunk_keys) == (names, names[2:])
    assert load.groups[FULL].blocks == of_full + [NOWHERE] * (-len(of_full) % (4 if kind == "windows" else 1))
    assert load.groups[OTHER].blocks == of_other and load.groups[OTHER].chunks == [2]
    assert (load.available is not None) is under_way


@pytest.mark.parametrize(("kind", "gone"), [("windows", OTHER), ("states", FULL), ("states", OTHER)])
def test_a_tail_that_a_group_lacks_is_computed(make_scene: Callable[..., Scene], kind: str, gone: int) -> None:
    """The group that is stored last marks them as stored. But another group's record may be evicted or dropped."""
    scene, names = several(make_scene, kind), [*chunk_keys(TOKENS)[:2], tail_of(TOKENS, TAIL[kind])]
    preempted(scene)
    for group in (FULL, OTHER):
        put(scene.plane, names[:-1] if group == gone else names, group)
    scene.report(saved={"r": 1})
    scene.look_up()
    assert scene.ask() == 2 * CHUNK


def test_a_state_waits_for_the_token_that_is_on_its_way(make_scene: Callable[..., Scene]) -> None:
    """With overlapping steps, the last step's token arrives after the preemption."""
    scene = several(make_scene, "states")
    request = scene.arrive(TOKENS[:HELD])
    scene.matched()
    scene.begin(HELD, tables={"r": (list(range(1000, 1040)), list(range(2000, 2040)))})
    assert {each.group for each in scene.preempt()} == {FULL, OTHER}
    assert scene.matched() == 0, "the state contains the last known token"
    request.all_token_ids.append(7)
    assert scene.matched() == HELD


# ---- With a quantizer, saves are lossless records that only their request can load -----------------------------------

EXACT = TOKENS[: 2 * CHUNK + BLOCK + 9]


@pytest.fixture
def exact(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(quantized=True)


def exactly_saved(scene: Scene, **attributes: Any) -> list[Any]:
    """Return the saves of a request that has computed its prompt; all chunks are stored quantized meanwhile."""
    request = scene.arrive(EXACT, **attributes)
    scene.matched()
    scene.begin(len(EXACT))
    request.all_token_ids.append(7)
    saves = scene.preempt()
    scene.plane.records.update(dict.fromkeys(keys(0, EXACT), b""))
    return saves


def settle(scene: Scene, names: list[bytes]) -> None:
    """Store saved chunks, and look them up."""
    put(scene.plane, names, namespace=saved_namespace_of)
    scene.report(saved={scene.name: 1})
    scene.look_up()


def test_all_that_it_holds_is_saved_under_names_of_its_own(exact: Scene) -> None:
    """Symptom: with quantizer: binned, a preempted request continued after quantized KV of its own."""
    saves = chunks, tail = exactly_saved(exact)
    assert chunks.exact and tail.exact and chunks.lasts_s == tail.lasts_s > 0
    assert chunks.blocks == list(range(1000, 1008)) and tail.tail_tokens == BLOCK + 9
    assert chunks.previous is None and tail.previous == chunks.chunk_keys[-1]
    assert len({segment_of(name) for name in names_of(saves)}) == 1, "evicted from its end, like a prompt"
    exact.plane.records.clear()
    others = exactly_saved(exact, name="other")
    assert not {*names_of(saves), *chunk_keys(EXACT)} & set(names_of(others)), (
        "another request with these tokens may have loaded the KV that this one has computed"
    )


@pytest.mark.parametrize("kept", [3, 2, 1, 0])
def test_a_preempted_request_loads_only_its_save(exact: Scene, kept: int) -> None:
    names = names_of(exactly_saved(exact))
    assert exact.ask() == len(EXACT), "offered while it is being stored"
    settle(exact, names[:kept])
    assert exact.plane.asked_keys[-1] == record_keys(saved_namespace_of(0, 0), names)
    assert exact.ask() == (len(EXACT) if kept == 3 else kept * CHUNK), "computed, although it is stored quantized"
    if kept == 3:
        load = exact.load([range(200, 240)])
        assert load.groups[0].chunk_keys == names and load.shard_layout < 0 and not load.layerwise


def test_a_request_of_which_nothing_could_be_saved_is_computed(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(quantized=True, store=False)
    assert exactly_saved(scene) == [] and scene.matched() == 0


def test_chunks_completed_after_a_preemption_are_stored_for_all(exact: Scene) -> None:
    """Saved chunks do not count as stored, because other requests do not look them up."""
    saves = exactly_saved(exact)
    exact.request.all_token_ids += range(900, 900 + CHUNK)
    settle(exact, names_of(saves))
    assert exact.matched() == len(EXACT)
    exact.load([range(1000, 1040)])
    (store,) = exact.resume(len(EXACT), CHUNK, range(1000, 1040)).stores
    assert store.chunk_keys == chunk_keys(exact.request.all_token_ids)[2:3] and not store.exact and not store.lasts_s


def test_a_second_preemption_saves_only_new_chunks(exact: Scene) -> None:
    saves = exactly_saved(exact)
    settle(exact, names_of(saves))
    exact.load([range(200, 240)])
    exact.resume(len(EXACT), 1, range(200, 240))
    exact.request.all_token_ids.append(8)
    (tail,) = exact.preempt()
    assert tail.previous == names_of(saves)[1] and tail.anchored and tail.chunk_keys != saves[1].chunk_keys


def test_without_quantizing_chunks_that_are_stored_are_not_saved_again(scene: Scene, plane: ScriptedDataPlane) -> None:
    put(plane, chunk_keys(EXACT))
    (tail,) = exactly_saved(scene)
    assert not tail.exact and tail.previous == chunk_keys(EXACT)[1]
