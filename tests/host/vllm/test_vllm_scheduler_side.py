"""The connector's scheduler half with scripted requests and steps: bookkeeping, kinds of loads, and changed weights."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine import wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    TOKENS,
    Pool,
    Request,
    Scene,
    arrive,
    chunk_keys,
    full,
    groups_of,
    handshake,
    keys,
    matched,
    put,
    report,
    step,
    window,
)
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.interference.table import LayerWait
from host_control.layouts import NOWHERE
from host_control.vllm.shards import Rank
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

# ---- The log ---------------------------------------------------------------------------------------------------------


def test_the_debug_log_says_for_each_request_what_was_loaded_and_why_not_more(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scene.arrive(stored=3, name="short")
    scene.load()
    scene.report({"short": 1}, reasons={"short": "corrupt"}, finished=["short"])
    scene.arrive(stored=3, name="cached")
    scene.side.allocated(scene.request, (), scene.matched(local=3 * CHUNK))
    scene.arrive(name="aborted")
    scene.finish()
    scene.arrive(name="aborted load")
    scene.load()
    scene.finish()
    scene.report(finished=[scene.name])
    scene.arrive(range(CHUNK - 1), name="small")
    scene.side.allocated(scene.request, (), scene.matched())
    lines = [line.split("; waited")[0] for line in caplog.messages if "prompt tokens loaded" in line]
    of = f"of {len(TOKENS)} prompt tokens loaded"
    assert lines == [
        f"ShadowServe: request short: {CHUNK} {of}, 0 in vLLM's own cache; reason: corrupt; chunks: 3 storage",
        f"ShadowServe: request cached: 0 {of}, {3 * CHUNK} in vLLM's own cache; reason: absent; chunks: 3 storage",
        f"ShadowServe: request aborted: 0 {of}, 0 in vLLM's own cache; reason: cancelled; chunks: none",
        f"ShadowServe: request aborted load: 0 {of}, 0 in vLLM's own cache; reason: cancelled; chunks: 3 storage",
        f"ShadowServe: request small: 0 of {CHUNK - 1} prompt tokens loaded, 0 in vLLM's own cache; reason: short; "
        "chunks: none",
    ]


# ---- Arrival and lookup ----------------------------------------------------------------------------------------------


def test_request_waits_for_its_lookup_and_no_longer(scene: Scene, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Lookup")
    scene.arrive(stored=3)
    assert scene.ask() is None, "no wait: at its deadline a lookup is a miss"
    plane.script.unstall.set()
    assert scene.matched() == 3 * CHUNK
    assert scene.ask() == 3 * CHUNK, "the same answer while there are not enough blocks"


@pytest.mark.parametrize(
    ("length", "stored", "local", "expected"),
    [
        (5 * CHUNK + 10, 3, 0, 3 * CHUNK),
        (5 * CHUNK, 5, 0, 5 * CHUNK - 1),  # prefill computes the last token
        (5 * CHUNK, 5, 4 * CHUNK + 48, 0),  # a transfer is not efficient for 15 tokens
        (5 * CHUNK + 10, 3, 2 * CHUNK, CHUNK),
        (5 * CHUNK + 10, 3, 3 * CHUNK, 0),
        (5 * CHUNK + 10, 0, 0, 0),
        (CHUNK - 1, 0, 0, 0),
    ],
)
def test_tokens_offered(scene: Scene, length: int, stored: int, local: int, expected: int) -> None:
    scene.arrive(range(length), stored)
    assert scene.matched(local) == expected


def test_text_before_an_image_is_offered_from_a_prompt_without_one(scene: Scene) -> None:
    place = SimpleNamespace(offset=2 * CHUNK + 10, length=10, is_embed=None)
    data = {"pixels": torch.ones(4)}
    image = SimpleNamespace(data=data, modality="image", identifier="cat", mm_position=place)
    scene.arrive(stored=5, mm_features=[image])
    assert scene.matched() == 2 * CHUNK


def test_preempted_request_is_looked_up_again(scene: Scene, plane: ScriptedDataPlane) -> None:
    request = scene.arrive()
    assert scene.matched() == 0
    scene.begin(len(TOKENS))
    request.all_token_ids += list(range(900, 900 + CHUNK))
    put(plane, chunk_keys(request.all_token_ids))
    request.num_preemptions = 1
    assert scene.matched() == 6 * CHUNK
    assert plane.calls.count("Lookup") == 2


@pytest.mark.parametrize(
    "attributes",
    [
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"resumable": True},
        {"lora_request": SimpleNamespace(load_inplace=True)},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_request_that_tokens_do_not_name_is_served_without_the_cache(
    scene: Scene, attributes: Any, caplog: Any
) -> None:
    scene.arrive(stored=5, **attributes)
    assert scene.ask() == 0 and scene.begin(len(TOKENS)) == []
    assert "without the cache" in caplog.text
    scene.finish()


@pytest.mark.parametrize("fetch", [True, False])
def test_request_whose_inputs_cannot_be_named_is_computed_and_not_stored(
    make_scene: Callable[..., Scene], fetch: bool, caplog: Any
) -> None:
    place = SimpleNamespace(offset=0, length=3)
    image = SimpleNamespace(identifier="image-0", modality="image", data=None, mm_position=place)
    scene = make_scene(fetch=fetch)
    scene.arrive(stored=5, mm_features=[image])
    wait_for(lambda: (scene.side._lookup.poll("r") or SimpleNamespace(reason="")).reason == "unnamed")
    assert scene.ask() == 0 and scene.begin(CHUNK) == []
    for done in range(CHUNK, len(TOKENS), CHUNK):
        assert scene.go_on(done, CHUNK) == []
    assert not fetch or "only in a worker's memory" in caplog.text
    scene.finish()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"model": b"", "namespaces": (), "problem": "unknown layout"}, "unknown layout"),
        # Otherwise their KV would have the same key.
        ({"model": bytes(32)}, "do not agree on what they compute"),
        # Otherwise no lookup would contain the chunks that one of them lacks.
        ({"namespaces": ()}, "do not agree on what they keep"),
        ({"namespaces": ((0, 0, b"a" * 32), (0, 1, b"b" * 32))}, "do not agree on what they keep"),
        ({"namespaces": ((0, 1, b"a" * 32),)}, "do not agree on what they keep"),
    ],
)
def test_a_worker_that_is_off_or_differs_turns_all_off(
    plane: ScriptedDataPlane, second: dict[str, Any], why: str
) -> None:
    from host_control.vllm.scheduler_side import SchedulerSide

    config, groups = HostConfig(data_plane=plane.address), groups_of()
    side = SchedulerSide(config, groups, fetch=True, store=True, problem="", logger=logging.getLogger("t"))
    side.start({0: handshake(0, groups), 1: replace(handshake(1, groups), **second)})
    scene = Scene(side, plane)
    scene.arrive()
    assert why in side.problem and scene.ask() == 0 and scene.begin(len(TOKENS)) == []
    side.close()


def test_certificates_that_cannot_be_used_turn_the_cache_off(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(tls_ca="/nowhere/ca.crt")
    scene.arrive()
    assert "tls_ca: cannot read /nowhere/ca.crt" in scene.side.problem and scene.ask() == 0


def test_the_engines_queue_is_sent_with_each_requests_records(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(ranks=2)
    prompts = {name: [*range(number, number + 3 * CHUNK + 5)] for number, name in enumerate("abc")}
    requests = {name: arrive(side, plane, tokens, stored=2, name=name) for name, tokens in prompts.items()}
    told: dict[int, list[list[bytes]]] = {}
    order: list[int] = []

    def waiting() -> list[list[list[bytes]]]:
        for message in plane.expected:
            told.update({each.request: [list(chain.keys) for chain in each.chains] for each in message.arrivals})
            order[:] = list(message.order) or order
        return [told[name] for name in order]

    def wanted(*names: str) -> list[list[list[bytes]]]:
        return [[keys(rank, prompts[name])[:2] for rank in (0, 1)] for name in names]

    wait_for(lambda: waiting() == wanted("a", "b", "c"))
    for name in "ab":
        matched(side, requests[name])
        side.allocated(requests[name], [list(range(100))], 2 * CHUNK)
    wait_for(lambda: waiting() == wanted("c"))
    side.step(step(preempted=["b"]))
    wait_for(lambda: waiting() == wanted("b", "c"))
    side.finished(requests["c"])
    wait_for(lambda: waiting() == wanted("b"))


# ---- Loads -----------------------------------------------------------------------------------------------------------


def test_load_covers_whole_chunks_and_leaves_local_blocks_alone(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(ranks=2)
    scene.arrive(stored=4)
    local = CHUNK + 2 * BLOCK
    assert scene.matched(local) == 4 * CHUNK - local
    load = scene.load([range(100, 140)], local)
    assert list(load.groups) == [0] and load.groups[0].chunk_keys == chunk_keys(TOKENS)[1:4]
    assert load.groups[0].blocks == [NOWHERE, NOWHERE, *range(106, 116)]
    assert scene.side.step(step()).loads == [], "passed to the workers once"


def test_failed_load_is_not_offered_again_and_stored_anew(scene: Scene) -> None:
    scene.arrive(stored=4)
    scene.load()
    scene.report({"r": 1}, finished=["r"])
    assert scene.ask(CHUNK) == 0
    (store,) = scene.begin(len(TOKENS) - CHUNK, CHUNK)
    assert store.chunk_keys == chunk_keys(TOKENS)[1:5]
    assert store.previous == chunk_keys(TOKENS)[0] and store.anchored and store.blocks == list(range(1004, 1020))


def test_abort_while_loading_cancels_at_the_workers(scene: Scene) -> None:
    scene.arrive(stored=4)
    scene.load()
    scene.finish()
    assert scene.side.step(step()).cancels == ["r"] and scene.side.step(step()).cancels == []
    scene.report(finished=["r"])
    assert not scene.side._loads and not scene.side._requests


def test_abort_between_allocation_and_step_still_reaches_the_workers(scene: Scene) -> None:
    """Without the load, the workers would never report the request, and its blocks would never be freed."""
    request = scene.arrive(stored=4)
    scene.side.allocated(request, [list(range(100, 140))], scene.matched())
    scene.finish()
    metadata = scene.side.step(step())
    assert [load.request_id for load in metadata.loads] == metadata.cancels == ["r"]


def test_a_step_is_idle_only_while_every_request_waits_for_its_load(scene: Scene) -> None:
    """In an idle step workers may wait, so the next step must have no other work."""

    def idle(output: Any = None) -> bool:
        return bool(scene.side.step(output or step()).idle)

    assert not idle(), "no request waits"
    request = scene.arrive(stored=4)
    assert not idle(), "it waits for its lookup"
    scene.side.allocated(request, [list(range(100, 140))], scene.matched())
    assert idle() and idle()
    other = scene.arrive(range(CHUNK - 1), name="short")
    assert not idle(), "another request may be scheduled"
    assert not idle(step(new={"short": (0, CHUNK - 1)})) and not idle(step(cached={"short": (CHUNK - 1, 1)}))
    scene.side.finished(other)
    assert idle()
    scene.side.finished(request)
    assert idle(), "the load of the aborted request has not ended"
    scene.report(finished=["r"])
    assert not idle()


def worker_of(groups: Any, **config: Any) -> Any:
    """Return the worker half without a data plane: each load ends immediately, without any chunk."""
    from host_control.vllm.worker_side import WorkerSide

    how: dict[str, Any] = {"fetch": True, "store": True, "problem": "", "logger": logging.getLogger("test")}
    worker = WorkerSide(HostConfig(**config), None, None, groups, Rank(0, 1), **how)
    worker._shards.parts = {0: [SimpleNamespace(group=group, first_layer=0) for group in groups.groups]}
    worker._shards.shapes = {0: [SimpleNamespace(namespace=bytes(32)) for _ in groups.groups]}
    return worker


def test_a_load_of_two_groups_with_asynchronous_fetch_false_ends_for_vllm(make_scene: Callable[..., Scene]) -> None:
    """Symptom: the request stays in WAITING_FOR_REMOTE_KVS for ever."""
    scene = make_scene(full(), window(CHUNK), asynchronous_fetch=False)
    worker = worker_of(scene.side._engine.groups, asynchronous_fetch=False)
    for group in (0, 1):
        put(scene.plane, chunk_keys(TOKENS), group)
    request = scene.arrive()
    scene.side.allocated(request, [list(range(100, 140))] * 2, scene.matched())
    worker.exchange(scene.side.step(step()))
    finished, failed = worker.loads.take_finished()
    assert (scene.side.waits(request), finished, failed) == (True, {"r"}, {"r"})
    scene.side.worker_output(finished, worker.take_report() or report())
    assert not scene.side._loads and scene.counted("slower_paths") == {"slower_paths/several_groups": 1}


def test_pages_are_renewed_before_vllm_learns_of_a_layerwise_load_that_ended_without_an_answer(
    make_scene: Callable[..., Scene],
) -> None:
    """Symptom: vLLM computes into pages that a device may still write to, because the load ended after the renewal."""
    from host_control.vllm.metadata import ShadowServeMetadata

    scene, worker = make_scene(layer_order=True), worker_of(groups_of(full()), layer_order=True)
    scene.side.ways.by_layers = True
    scene.arrive(stored=4, status=None)
    operation = scene.load()
    assert operation.layerwise
    events: list[str] = []
    worker._pages = worker.loads.pages = SimpleNamespace(renew=lambda: events.append("renewed"))
    outcomes = [[], [worker.loads._failed_load(operation, "unreachable")]]
    worker.loads.managers[0] = SimpleNamespace(
        exchange=lambda *arguments: outcomes.pop(0), wait=lambda requests: events.append("ended"), idle=False
    )
    worker.exchange(ShadowServeMetadata(loads=[operation]))
    worker.loads.take_finished()
    assert worker.take_report().loaded == {operation.request_id: 0} and events == ["ended", "renewed"]


PLAIN = SimpleNamespace(seed=None, thinking_token_budget=None)
SEEDED = SimpleNamespace(seed=1, thinking_token_budget=None)
BUDGET = SimpleNamespace(seed=None, thinking_token_budget=10)


@pytest.mark.parametrize(
    ("sampling", "own", "reason"),
    [(SEEDED, False, "seed"), (BUDGET, False, "sampling_state"), (PLAIN, True, "sampling_state"), (PLAIN, False, "")],
)
@pytest.mark.parametrize("asked", ["layer_order", "asynchronous_fetch"])
def test_no_step_computes_on_a_load_whose_request_has_state_that_vllm_does_not_set_back(
    make_scene: Callable[..., Scene], caplog: Any, asked: str, sampling: Any, own: bool, reason: str
) -> None:
    scene = make_scene(**{asked: asked == "layer_order"})
    scene.side.ways.by_layers = asked == "layer_order"
    scene.side.ways._sampling_state = own
    for name in ("r", "s"):
        request = scene.arrive(stored=4, name=name, sampling_params=sampling, status=None)
        operation = scene.load()
        assert (operation.layerwise or operation.in_step) == (not reason) == (not scene.side.waits(request))
        scene.report({name: 4}, finished=[name])
        scene.finish()
    assert scene.counted("slower_paths") == ({f"slower_paths/{reason}": 2} if reason else {})
    lines = [line for line in caplog.messages if "slower path" in line]
    assert len(lines) == bool(reason) and all(f"({reason})" in line for line in lines), "once for each reason"


def test_each_load_that_layer_order_leaves_out_is_counted_with_its_reason(make_scene: Callable[..., Scene]) -> None:
    from vllm.v1.request import RequestStatus

    scene = make_scene(layer_order=True)
    scene.side.ways.by_layers = True
    scene.arrive(stored=4, name="alone", status=None)
    assert scene.load().layerwise and scene.counted("slower_paths") == {}
    scene.report({"alone": 4})
    scene.arrive([2, *TOKENS], name="running", status=RequestStatus.RUNNING)
    scene.arrive([1, *TOKENS], stored=3, name="beside", status=None)
    assert not scene.load().layerwise
    assert scene.counted("slower_paths") == {"slower_paths/other_requests": 1}


def test_auto_streams_loads_that_are_predicted_to_be_faster_and_tells_why_others_are_whole(
    make_scene: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "test")
    scene = make_scene(layer_order="auto")
    scene.plane.script.record_bytes = 1000
    scene.side.ways.by_layers = True
    runner, table = scene.side._policy_runner, scene.side._timing.table
    runner.start(4, 0)
    loads = runner._policy._loads

    def load(name: str, **attributes: Any) -> bool:
        scene.arrive(stored=4, name=name, status=None, **attributes)
        operation = scene.load()
        waits = [LayerWait(runner._clock(), 0.25, 3)] * 4 if operation.layerwise else []
        scene.side.worker_output({name}, report({name: 4}, layer_waits={name: waits}))
        scene.side.step(step(new={name: (4 * CHUNK, len(TOKENS) - 4 * CHUNK)}))
        for _ in range(2):
            scene.side.stepped()
        scene.finish()
        return bool(operation.layerwise)

    assert not load("unknown")
    for tokens in (30, 80, 400):
        table.observe("prompts", tokens, tokens * (4 * CHUNK + tokens / 2), 0.1)
        loads.observe({Tier.STORAGE: 4000}, 0.0, 0.1)
    assert load("streamed")
    assert not load("seeded", sampling_params=SEEDED)
    counted = scene.counted()
    assert {name: counted[name] for name in counted if name.startswith(("whole_loads", "slower", "decisions"))} == {
        "whole_loads/time_unknown": 1,
        "whole_loads/seed": 1,
        "decisions/configured": 2,
        "decisions/layers": 1,
    }
    lines = {line.split()[2][:-1]: line.rpartition("; ")[2] for line in caplog.messages if "tokens loaded" in line}
    assert lines == {
        "unknown": "not layer by layer: time_unknown",
        "streamed": "layer by layer: 1.000 s of waiting for layers, 3.0 layers ahead",
        "seeded": "not layer by layer: seed",
    }
    wait_for(lambda: len(scene.plane.decisions) == 3)
    streamed, seeded = scene.plane.decisions[1:]
    assert [(wait.seconds, wait.ahead) for wait in streamed.layer_waits] == [(0.25, 3)] * 4
    assert seeded.not_layerwise == "seed" and not seeded.layer_waits


def test_the_first_token_of_a_stream_that_fell_short_is_the_one_of_a_later_step(
    make_scene: Callable[..., Scene],
) -> None:
    """vLLM takes back the step that computed on the load."""
    scene = make_scene(layer_order=True)
    scene.side.ways.by_layers = True
    scene.side._policy_runner.start(4, 0)
    scene.arrive(stored=4, name="r", status=None)
    assert scene.load().layerwise
    scene.side.stepped()
    scene.side.step(step(new={"r": (4 * CHUNK, len(TOKENS) - 4 * CHUNK)}))
    scene.side.worker_output(set(), report({"r": 1}))
    scene.side.stepped()
    assert not scene.counted().get("first_token_seconds/configured") and "r" in scene.side._policy_runner._waiting
    scene.side.step(step(cached={"r": (CHUNK, len(TOKENS) - CHUNK)}))
    scene.side.stepped()
    wait_for(lambda: len(scene.plane.decisions) == 1)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pending": True, "partial_block": True}, "pending_chunks"),
        ({"partial_block": True, "others": "other_requests"}, "partial_block"),
        ({"others": "other_requests"}, "other_requests"),
        ({}, ""),
    ],
)
def test_why_a_load_may_not_go_by_layers(make_side: Any, given: dict[str, Any], reason: str) -> None:
    ways, request = make_side(layer_order=True).ways, Request("r", TOKENS)
    given = {"pending": False, "partial_block": False, "others": ""} | given
    assert ways.not_by_layers(request, **given) == reason


def test_each_reason_has_a_row_in_the_document() -> None:
    from host_control.vllm import loads, paging

    document = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "combinations.md").read_text()
    missing = [reason for reason in (*loads._DETAILS, *paging._OBSTACLES) if f"| `{reason}` |" not in document]
    assert not missing


# ---- Stores ----------------------------------------------------------------------------------------------------------


def test_chunks_are_stored_as_steps_complete_them(scene: Scene) -> None:
    scene.arrive(stored=1)
    scene.matched(CHUNK)
    assert scene.begin(CHUNK - 1, CHUNK) == []
    (store,) = scene.go_on(2 * CHUNK - 1, CHUNK + 1)
    assert store.chunk_keys == chunk_keys(TOKENS)[1:3] and store.blocks == list(range(1004, 1012))
    assert scene.go_on(3 * CHUNK, 5) == []


def test_chunk_of_generated_tokens_has_the_key_of_its_tokens(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(ranks=2)
    request = scene.arrive(TOKENS[: CHUNK + 20], stored=1)
    scene.matched(CHUNK)
    request.all_token_ids += list(range(900, 900 + CHUNK))
    assert scene.go_on(CHUNK + 20, 1) == []
    (store,) = scene.go_on(2 * CHUNK - 1, 1)
    assert store.chunk_keys == chunk_keys(request.all_token_ids)[1:2]


def test_draft_tokens_are_not_stored(scene: Scene) -> None:
    request = scene.arrive(TOKENS[: 2 * CHUNK - 2])
    scene.matched()
    (store,) = scene.begin(2 * CHUNK - 2)
    assert store.chunk_keys == chunk_keys(TOKENS)[:1]
    request.all_token_ids.append(7)
    assert scene.go_on(2 * CHUNK - 2, 5) == [], "with four drafts the chunk is complete only if they are right"


# ---- Changed weights -------------------------------------------------------------------------------------------------


def test_doubt_is_settled_once_all_ranks_have_found_their_weights(scene: Scene) -> None:
    scene.side.epochs.ranks = 2
    calls = [0]
    scene.side.epochs.watch(lambda: calls[0], blind=False)
    calls[0] += 1
    assert scene.side.step(step()).doubts == 1
    for agreed in (0, 1):
        scene.report(settled={1: 1})
        assert scene.side.step(step()).agreed == agreed


def test_load_of_an_earlier_epoch_says_so_and_its_hits_are_not_offered(scene: Scene) -> None:
    request = scene.arrive(stored=3)
    scene.side.allocated(request, [list(range(100, 140))], scene.matched())
    scene.side.reset()
    metadata = scene.side.step(step())
    assert metadata.epoch == scene.side.epochs.current != ""
    assert [load.epoch for load in metadata.loads] == [""]
    scene.arrive(name="s")
    assert scene.matched() == 0
    (store,) = scene.begin(len(TOKENS))
    assert store.chunk_keys == chunk_keys(TOKENS, scene.side._requests["s"].extra) != chunk_keys(TOKENS)


@pytest.mark.parametrize("own", [2 * BLOCK, 0])
def test_nothing_is_loaded_or_stored_behind_old_kv_of_the_engines_own(own: int, scene: Scene) -> None:
    scene.side.epochs.bind(Pool(cached=3))
    scene.report(outlived={""})
    request = scene.arrive()
    put(scene.plane, chunk_keys(TOKENS, scene.side._requests["r"].extra)[:3])
    scene.side.on_new_request(request)  # now its first three chunks are stored in this epoch
    assert (scene.matched(own) > 0) is (own == 0)
    assert bool(scene.begin(len(TOKENS) - own, own)) is (own == 0)
    # The request is preempted, and the cache has been emptied since then.
    scene.side.epochs.bind(Pool())
    request.num_preemptions = 1
    assert scene.matched(own) > 0


def test_change_is_noticed_once_for_all_ranks(scene: Scene) -> None:
    seen = report(outlived={""}).aggregate(report())
    scene.side.worker_output(None, seen)
    epoch = scene.side.epochs.current
    assert epoch
    scene.side.worker_output(None, seen)  # of a running step
    assert scene.side.epochs.current == epoch


def test_the_load_of_an_aborted_request_without_a_name_is_cancelled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the load continues until its deadline, into blocks that vLLM keeps for it."""
    scene.arrive(stored=3)
    scene.load()

    def unnamed(*_: Any) -> Any:
        raise ValueError("its adapter no longer exists")

    monkeypatch.setattr(scene.side._inputs, "extra", unnamed)
    scene.side.reset()
    scene.finish()
    assert scene.side.step(step()).cancels == ["r"]


# ---- Accounts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "local", "placed", "expected"),
    [
        (5, 0, 5, {"loaded": 5 * CHUNK, "short": 10}),
        (3, CHUNK, 2, {"local": CHUNK, "loaded": 2 * CHUNK, "absent": 2 * CHUNK, "short": 10}),
        (3, 0, 1, {"loaded": CHUNK, "fell_short": 2 * CHUNK, "absent": 2 * CHUNK, "short": 10}),
        (0, 0, 0, {"absent": 5 * CHUNK, "short": 10}),
    ],
)
def test_tokens_are_counted_by_where_their_kv_came_from(
    scene: Scene, stored: int, local: int, placed: int, expected: dict[str, int]
) -> None:
    for _ in range(3):
        scene.side._timing.table.observe("prompts", 1000, 500_000.0, 2.0)
    scene.arrive(stored=stored)
    if stored:
        chunks = len(scene.load(local=local).groups[0].chunk_keys)
        scene.report({scene.name: placed} if placed < chunks else {}, finished=[scene.name])
    scene.side.allocated(scene.request, [], scene.matched(local) if not stored else 0)
    scene.side.allocated(scene.request, [], 0)  # again, after a preemption
    counted = scene.counted()
    tokens = {name.partition("/")[2]: count for name, count in counted.items() if name.startswith("prompt_tokens/")}
    assert counted["prompts"] == 1 and tokens == expected
    assert counted.get("saved_prefill_seconds", 0.0) == pytest.approx(expected.get("loaded", 0) * 0.002)


def test_a_load_is_priced_once_the_engine_knows_its_speed(scene: Scene) -> None:
    for name in ("first", "second"):
        scene.arrive(stored=5, name=name)
        scene.load()
        scene.report(finished=[name])
        assert ("saved_prefill_seconds" in scene.counted()) == (name == "second")
        for _ in range(3):
            scene.side._timing.table.observe("prompts", 1000, 500_000.0, 2.0)
