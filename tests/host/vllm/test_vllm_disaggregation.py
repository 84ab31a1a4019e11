"""P/D disaggregation in the connector's scheduler half: parameters of proxies, tails and limits."""

from collections.abc import Callable
from typing import Any

import pytest
from machine import WAIT_MAX_S, wait_for
from scheduler_support import BLOCK, CHUNK, Scene, chunk_keys, full, keys, names_of, put, state, step, tail_of, window
from scheduler_support import namespace_of as of_group
from scripted import ScriptedDataPlane

from host_control.disaggregation import Available
from host_control.layouts import NOWHERE
from shadowserve.keys import record_keys

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = list(range(3 * CHUNK + 2 * BLOCK + 5))
WHOLE, TAIL = 3 * CHUNK, 2 * BLOCK
END = WHOLE + TAIL
NAMES = [*chunk_keys(TOKENS), tail_of(TOKENS, END)]
GIVES = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
TAKES = {"do_remote_prefill": True, "do_remote_decode": False}
BLOCKS = list(range(1000, 1100))
OTHERS = list(range(2000, 2100))
FULL, WINDOW = 0, 1


def asks(scene: Scene, params: Any = None, tokens: list[int] = TOKENS, **attributes: Any) -> Scene:
    """Let a request with parameters of a proxy arrive."""
    scene.arrive(tokens, kv_transfer_params=params, **attributes)
    return scene


def padded(blocks: list[int], before: int = 0) -> list[int]:
    """Return the blocks of records: none for stored records, and none after a tail."""
    chunk = CHUNK // BLOCK
    return [NOWHERE] * before + blocks + [NOWHERE] * (-(before + len(blocks)) % chunk)


def given(tokens: int) -> dict[str, Any]:
    """Return the reply to a proxy after the given number of stored tokens."""
    told = {"v": 1, "tokens": tokens, "deadline_ms": 5000}
    return {"do_remote_prefill": True, "do_remote_decode": False, "shadowserve": told}


def publish(plane: ScriptedDataPlane, *, chunks: int = 0) -> None:
    """Store the given number of chunks in the other engine, and publish the rest."""
    plane.published.update(dict.fromkeys(record_keys(of_group(0, 0), NAMES), 60_000))
    put(plane, NAMES[:chunks])


@pytest.fixture
def patient(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(pd_timeout_s=WAIT_MAX_S)


# ---- The prefill engine ----------------------------------------------------------------------------------------------


def test_a_prompt_that_is_to_be_handed_over_is_stored_to_its_last_block(scene: Scene) -> None:
    assert asks(scene, GIVES).matched() == 0
    store, tail = scene.begin(len(TOKENS))
    assert store.chunk_keys == NAMES[:3] and store.published and store.blocks == BLOCKS[: WHOLE // BLOCK]
    assert tail.chunk_keys == NAMES[3:] and tail.previous == NAMES[2] and tail.published
    assert tail.blocks == padded(BLOCKS[WHOLE // BLOCK : END // BLOCK])
    assert scene.finish() == given(END)


def test_a_prompt_that_is_computed_in_parts_stores_each_part_and_the_tail_once(scene: Scene) -> None:
    assert asks(scene, GIVES).matched() == 0
    stored = []
    for begin in range(0, len(TOKENS), CHUNK // 2):
        size = min(CHUNK // 2, len(TOKENS) - begin)
        stores = scene.go_on(begin, size) if begin else scene.begin(size)
        stored += [(each.chunk_keys, each.previous) for each in stores]
    one, two, three, tail = NAMES
    assert stored == [([one], None), ([two], one), ([three], two), ([tail], three)]
    scene.request.all_token_ids += range(CHUNK)
    (store,) = scene.go_on(len(TOKENS), CHUNK)
    assert store.chunk_keys == chunk_keys(scene.request.all_token_ids)[3:], "generated tokens follow the last chunk"


def test_a_prompt_shorter_than_a_chunk_is_a_tail(make_scene: Callable[..., Scene]) -> None:
    scene, tokens = make_scene(load_tokens_min=1), TOKENS[: 3 * BLOCK + 3]
    name = tail_of(tokens, 3 * BLOCK)
    assert asks(scene, GIVES, tokens).matched() == 0
    (store,) = scene.begin(len(tokens))
    assert store.chunk_keys == [name] and store.previous is None and store.blocks == padded(BLOCKS[:3])
    put(scene.plane, [name])
    asks(scene, TAKES, tokens, name="taking")
    (part,) = scene.load([BLOCKS[:4]]).groups.values()
    assert part.chunk_keys == [name] and part.blocks == padded(BLOCKS[:3])


def test_publications_of_an_aborted_request_are_withdrawn(patient: Scene) -> None:
    plane = patient.plane
    asks(patient, GIVES).matched()
    wait_for(lambda: len(plane.published or ()) == 4)
    patient.begin(CHUNK)
    assert patient.finish()["shadowserve"] == {"v": 1, "tokens": CHUNK, "deadline_ms": int(1000 * WAIT_MAX_S)}
    wait_for(lambda: set(plane.published or ()) == set(keys(0, TOKENS)[:1]))


@pytest.mark.parametrize(
    ("most", "chunks", "tail"),
    [(0, 0, 0), (CHUNK, 1, 0), (3 * CHUNK - 1, 2, 0), (END - 1, 3, 0), (END, 3, 1)],
)
def test_no_more_is_stored_or_published_than_the_cap(scene: Scene, most: int, chunks: int, tail: int) -> None:
    assert asks(scene, GIVES | {"max_offload_tokens": most}).matched() == 0
    stored = names_of(scene.begin(len(TOKENS)))
    assert stored == [*NAMES[:chunks], *NAMES[3 : 3 + tail]]
    wait_for(lambda: len(scene.plane.published or ()) == len(stored))
    assert (scene.finish() or {}).get("shadowserve", {}).get("tokens", 0) == chunks * CHUNK + tail * TAIL


def test_new_weights_hand_nothing_old_over(scene: Scene) -> None:
    assert asks(scene, GIVES).matched() == 0
    scene.request.num_computed_tokens = CHUNK
    scene.side.reset()
    assert not scene.begin(len(TOKENS)) and scene.finish() is None


# ---- The decode engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "local", "matched", "names", "blocks"),
    [
        pytest.param(TOKENS, 0, END, NAMES, padded(BLOCKS[: END // BLOCK]), id="all but the last tokens"),
        pytest.param(TOKENS[:END], 0, END - 1, NAMES, padded(BLOCKS[: END // BLOCK]), id="a prompt of whole blocks"),
        pytest.param(TOKENS, WHOLE + BLOCK, BLOCK, NAMES[3:], padded([BLOCKS[13]], before=1), id="a tail alone"),
    ],
)
def test_a_decode_engine_computes_only_the_prompts_last_block(
    make_scene: Callable[..., Scene], tokens: list[int], local: int, matched: int, names: Any, blocks: list[int]
) -> None:
    scene = make_scene(load_tokens_min=1)
    put(scene.plane, NAMES)
    assert asks(scene, TAKES, tokens).matched(local) == matched
    (part,) = scene.load([BLOCKS[: -(-len(tokens) // BLOCK)]], local).groups.values()
    assert part.chunk_keys == names and part.blocks == blocks
    assert not scene.begin(len(tokens) - matched - local, matched + local), "all chunks are stored already"


def test_a_request_without_parameters_stores_whole_chunks_and_gets_no_reply(scene: Scene) -> None:
    assert asks(scene).matched() == 0
    (store,) = scene.begin(len(TOKENS))
    assert store.chunk_keys == NAMES[:3] and not store.published
    assert scene.finish() is None and "Publish" not in scene.plane.calls


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_behind_a_proxy_that_says_nothing_the_configuration_does(make_scene: Callable[..., Scene], role: str) -> None:
    scene = make_scene(pd_role=role)
    if role == "decode":
        put(scene.plane, NAMES)
    assert asks(scene).matched() == (END if role == "decode" else 0)
    stores = scene.begin(len(TOKENS))
    if role == "prefill":
        assert stores[-1].chunk_keys == NAMES[3:]
        wait_for(lambda: set(scene.plane.published or ()) == set(record_keys(of_group(0, 0), NAMES)))
    assert scene.finish() is None


@pytest.mark.parametrize("options", [{"asynchronous_fetch": False}, {"recomputes": False}], ids=str)
def test_where_no_load_may_fall_short_the_lookup_waits_for_all(
    make_scene: Callable[..., Scene], options: dict[str, Any]
) -> None:
    """Otherwise the engine would stand still, or the request would fail."""
    scene = make_scene(pd_timeout_s=WAIT_MAX_S, **options)
    publish(scene.plane, chunks=1)
    asks(scene, TAKES)
    scene.plane.wait_for_call("Lookup", 4)
    assert scene.ask() is None
    put(scene.plane, NAMES)
    assert scene.matched() == END and scene.counted("lookup_failures") == {}


@pytest.mark.parametrize(("local", "there"), [(0, 1), (CHUNK, 0), (CHUNK + BLOCK, 0)])
def test_a_load_starts_with_available_chunks_and_the_workers_learn_of_the_rest(
    patient: Scene, local: int, there: int
) -> None:
    publish(patient.plane, chunks=1)
    assert asks(patient, TAKES).matched(local) == END - local
    assert patient.side.waits(patient.request), "no computing while the request waits"
    load = patient.load([BLOCKS[: WHOLE // BLOCK + 3]], local)
    assert load.available == Available(there, "") and load.groups[0].chunk_keys == NAMES[local // CHUNK :]
    put(patient.plane, NAMES[:3])
    assert wait_for(patient.available) == Available(there + 2, "")
    put(patient.plane, NAMES)
    assert wait_for(patient.available) == Available(there + 3, "complete")
    assert patient.available() is None, "reported once"
    patient.report(finished=["r"])
    assert not patient.begin(5, END), "all chunks are stored already"


def test_in_layer_order_a_load_that_waits_for_another_engine_goes_chunk_by_chunk(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(pd_timeout_s=WAIT_MAX_S, layer_order=True)
    scene.side.ways.by_layers = True
    publish(scene.plane, chunks=1)
    load = asks(scene, TAKES, status=None).load([BLOCKS[: WHOLE // BLOCK + 3]])
    assert not load.layerwise and load.available == Available(1, "")
    assert scene.counted("slower_paths") == {"slower_paths/pending_chunks": 1}


def test_chunks_that_a_load_waited_for_in_vain_are_computed_and_stored(patient: Scene) -> None:
    publish(patient.plane, chunks=1)
    asks(patient, TAKES).load([BLOCKS[: WHOLE // BLOCK + 3]])
    patient.plane.published.clear()
    assert wait_for(patient.available) == Available(1, "published_gone")
    patient.report({"r": 1}, finished=["r"])
    assert patient.matched(CHUNK) == 0, "no second offer"
    assert names_of(patient.begin(len(TOKENS) - CHUNK, CHUNK)) == NAMES[1:]


def test_a_load_that_waits_is_given_up_when_the_weights_change_and_cancelled_when_aborted(patient: Scene) -> None:
    publish(patient.plane, chunks=1)
    asks(patient, TAKES).load([BLOCKS[: WHOLE // BLOCK + 3]])
    patient.side.reset()
    assert patient.available() == Available(1, "weights_changed")
    patient.finish()
    put(patient.plane, NAMES)
    last = patient.side.step(step())
    assert (last.cancels, last.available) == (["r"], {})


def test_published_chunks_that_are_never_stored_are_computed_and_counted(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(pd_timeout_s=0.2)
    publish(scene.plane)
    assert asks(scene, TAKES).matched() == 0
    assert scene.counted()["lookup_failures/published_late"] == 1


@pytest.mark.parametrize(
    ("most", "local", "tokens"),
    [
        (0, 0, 0),
        (CHUNK - 1, 0, 0),
        (2 * CHUNK + 7, 0, 2 * CHUNK),
        (END - 1, 0, WHOLE),
        (END, 0, END),
        # Behind the engine's own prefix:
        (CHUNK, CHUNK, CHUNK),
        (CHUNK, CHUNK + BLOCK, CHUNK - BLOCK),
    ],
)
def test_no_more_is_loaded_than_the_cap(make_scene: Callable[..., Scene], most: int, local: int, tokens: int) -> None:
    scene = make_scene(load_tokens_min=1)
    put(scene.plane, NAMES)
    assert asks(scene, TAKES | {"max_load_tokens": most}).matched(local) == tokens
    if tokens:
        (part,) = scene.load([BLOCKS[: -(-(local + tokens) // BLOCK)]], local).groups.values()
        assert sum(block != NOWHERE for block in part.blocks) == tokens // BLOCK


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
def test_params_that_make_no_sense_are_passed_over(scene: Scene, params: Any) -> None:
    put(scene.plane, NAMES)
    assert asks(scene, params).matched() == WHOLE
    assert scene.finish() is None and "Publish" not in scene.plane.calls


def test_without_publications_the_other_engines_word_is_waited_for(patient: Scene) -> None:
    patient.plane.published = None
    told = TAKES | {"shadowserve": {"v": 1, "tokens": END, "deadline_ms": int(1000 * WAIT_MAX_S)}}
    asks(patient, told)
    patient.plane.wait_for_call("Lookup", 3)
    assert patient.ask() is None
    put(patient.plane, NAMES)
    assert patient.matched() == END
    assert asks(patient, TAKES, [9, *TOKENS], name="cold").matched() == 0
    assert patient.counted()["slower_paths/no_publishing"] == 1, "no parameter says how long to wait for this one"


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
    scene: Scene, params: Any, takes_none: bool, plain: bool, reason: str
) -> None:
    scene.plane.published = None if takes_none else {}
    scene.side._lookup._plain = plain
    assert asks(scene, params).matched() == 0
    if params is GIVES:
        scene.plane.wait_for_call("Publish")
        wait_for(lambda: scene.side._lookup.reach or not reason)
    scene.finish()
    assert scene.counted("slower_paths") == ({f"slower_paths/{reason}": 1} if reason else {})
    asks(scene, name="stays here").finish()
    assert scene.counted("slower_paths") == {}


def test_a_tail_that_could_not_be_loaded_is_stored_again(scene: Scene) -> None:
    put(scene.plane, NAMES)
    asks(scene, TAKES).load([BLOCKS[: WHOLE // BLOCK + 3]])
    scene.report({"r": 3}, finished=["r"])
    (store,) = scene.begin(TAIL + 5, WHOLE)
    assert store.chunk_keys == NAMES[3:] and store.previous == NAMES[2]


# ---- Several groups: a window that needs three blocks of four --------------------------------------------------------


@pytest.fixture
def windowed(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(full(), window(2 * BLOCK + 8), load_tokens_min=1, pd_timeout_s=WAIT_MAX_S)


def load(scene: Scene, tokens: int) -> Any:
    """Load a hit of both groups."""
    end = -(-tokens // BLOCK)
    return scene.load([BLOCKS[:end], [0] * (end - 3) + OTHERS[end - 3 : end]])


def test_a_load_of_several_groups_starts_with_available_chunks(windowed: Scene) -> None:
    publish(windowed.plane, chunks=1)
    assert asks(windowed, TAKES).matched() == END, "chunks of windows are stored together with the published chunks"
    found = load(windowed, END)
    assert found.available == Available(1, "")
    assert found.groups[FULL].chunks == [0, 1, 2, 3] and found.groups[WINDOW].chunks == [3]
    assert found.groups[WINDOW].chunk_keys == NAMES[3:]
    put(windowed.plane, NAMES)
    assert wait_for(windowed.available) == Available(4, "complete")
    windowed.report(finished=["r"])
    assert not windowed.begin(5, END), "all chunks are stored already"


def test_several_groups_still_load_the_stored_chunks_when_pending_ones_never_come(windowed: Scene) -> None:
    publish(windowed.plane, chunks=1)
    load(asks(windowed, TAKES), END)
    put(windowed.plane, NAMES[:2])
    put(windowed.plane, NAMES[1:2], WINDOW)
    windowed.plane.published.clear()
    assert wait_for(windowed.available) == Available(2, "published_gone")
    windowed.report({"r": 0}, finished=["r"])
    assert windowed.matched() == 2 * CHUNK, "vLLM has allocated no block for it, and calls again"
    assert load(windowed, 2 * CHUNK).available is None, "no wait for stored chunks"
    windowed.report({"r": 0}, finished=["r"])
    assert windowed.matched() == 0, "no third offer"
    stores = windowed.begin(WHOLE, tables={"r": (BLOCKS, OTHERS)})
    assert len(names_of([each for each in stores if each.group == FULL])) == 3, "what cannot be loaded is stored again"


def test_with_a_window_a_prompt_is_handed_over_to_its_last_block_in_every_group(windowed: Scene) -> None:
    """Symptom: with several groups, the decode engine computed all tokens after the last whole chunk."""
    assert asks(windowed, GIVES).matched() == 0
    stores, end = windowed.begin(len(TOKENS), tables={"r": (BLOCKS, OTHERS)}), END // BLOCK
    assert [(each.group, each.chunk_keys) for each in stores[-2:]] == [(WINDOW, NAMES[3:]), (FULL, NAMES[3:])], (
        "the group that keeps every chunk is stored last"
    )
    of_window, of_full = stores[-2:]
    assert of_window.blocks == OTHERS[end - 3 : end] and not of_window.tail_tokens
    assert of_full.blocks == padded(BLOCKS[WHOLE // BLOCK : end]) and of_full.tail_tokens == TAIL
    assert wait_for(lambda: windowed.plane.published and len(windowed.plane.published) >= 4)
    assert windowed.finish()["shadowserve"]["tokens"] == END and windowed.counted("slower_paths") == {}
    put(windowed.plane, NAMES)
    put(windowed.plane, NAMES, WINDOW)
    assert asks(windowed, TAKES, name="taking").matched() == END
    found = load(windowed, END)
    assert found.groups[FULL].chunk_keys == NAMES and found.groups[FULL].blocks == padded(BLOCKS[:end])
    assert found.groups[WINDOW].chunk_keys == NAMES[3:] and found.groups[WINDOW].chunks == [3]
    assert found.groups[WINDOW].blocks == OTHERS[end - 3 : end]


def test_with_a_window_no_tail_holds_the_prompts_last_token(windowed: Scene) -> None:
    """vLLM computes the last token again, and needs one more token of the window for it."""
    tokens = TOKENS[:END]
    assert asks(windowed, GIVES, tokens).matched() == 0
    stores = windowed.begin(len(tokens), tables={"r": (BLOCKS, OTHERS)})
    tails = [store.chunk_keys for store in stores if store.chunk_keys[0] not in chunk_keys(tokens)]
    assert tails == [[tail_of(tokens, END - BLOCK)]] * 2


def test_two_groups_of_full_attention_share_a_prompt_to_its_last_block(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(full(), full(block_size=2 * BLOCK))
    assert asks(scene, GIVES).matched() == 0
    stores = scene.begin(len(TOKENS), tables={"r": (BLOCKS, OTHERS)})
    tails = [store.blocks for store in stores if store.chunk_keys == NAMES[3:]]
    assert tails == [padded(BLOCKS[12:14]), [2006, NOWHERE]]
    for group in (0, 1):
        put(scene.plane, NAMES, group)
    assert asks(scene, TAKES, name="taking").matched() == END


NOT_SHARED = {"slower_paths/prompt_tail_not_shared": 1}


def test_a_tail_of_which_a_window_was_let_go_is_not_stored_and_counted(windowed: Scene) -> None:
    assert asks(windowed, GIVES).matched() == 0
    let_go = [0] * (WHOLE // BLOCK + 1) + OTHERS
    stores = windowed.begin(len(TOKENS), tables={"r": (BLOCKS, let_go)})
    assert set(names_of(stores)) <= set(chunk_keys(TOKENS))
    assert windowed.finish()["shadowserve"]["tokens"] == WHOLE and windowed.counted("slower_paths") == NOT_SHARED


def test_prompts_without_a_tail_to_share_are_counted(make_scene: Callable[..., Scene], windowed: Scene) -> None:
    """Tails with states have no records. With windows, no hit ends with a prompt that ends with a chunk."""
    states = make_scene(full(block_size=CHUNK), state(block_size=CHUNK))
    asks(states, name="not handed over")
    assert states.counted("slower_paths") == {}
    asks(states, GIVES)
    asks(windowed, GIVES, TOKENS[:WHOLE])
    assert states.counted("slower_paths") == windowed.counted("slower_paths") == NOT_SHARED
