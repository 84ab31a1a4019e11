"""The connector's scheduler half with scripted requests and steps: bookkeeping and its cost."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine import wait_for
from scheduler_support import (
    BLOCK,
    CHUNK,
    TOKENS,
    Request,
    arrive,
    chunk_keys,
    groups_of,
    handshake,
    keys,
    matched,
    report,
    step,
)
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.layouts import NOWHERE

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_request_waits_for_its_lookup_and_no_longer(make_side: Any, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Lookup")
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=3)
    assert side.matched_tokens(request, 0) is None, "no wait: at its deadline a lookup is a miss"
    plane.script.unstall.set()
    assert matched(side, request) == 3 * CHUNK
    assert side.matched_tokens(request, 0) == 3 * CHUNK, "the same answer while there are not enough blocks"


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
def test_tokens_offered(
    make_side: Any, plane: ScriptedDataPlane, length: int, stored: int, local: int, expected: int
) -> None:
    side = make_side()
    request = arrive(side, plane, list(range(length)), stored)
    assert matched(side, request, local) == expected


@pytest.mark.parametrize(
    ("offset", "chunks"), [(2 * CHUNK + 10, 2), (2 * CHUNK, 2), (2 * CHUNK - 1, 1), (0, 0), (5 * CHUNK, 5)]
)
def test_text_before_an_image_is_offered_from_a_prompt_without_one(
    make_side: Any, plane: ScriptedDataPlane, offset: int, chunks: int
) -> None:
    side = make_side()
    image = SimpleNamespace(
        data={"pixels": torch.ones(4)},
        modality="image",
        identifier="cat",
        mm_position=SimpleNamespace(offset=offset, length=10, is_embed=None),
    )
    request = arrive(side, plane, TOKENS, stored=5, mm_features=[image])
    assert matched(side, request) == chunks * CHUNK


def test_a_salt_changes_every_chunk(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    assert matched(side, arrive(side, plane, TOKENS, stored=5, cache_salt="mine")) == 0
    assert matched(side, arrive(side, plane, TOKENS, stored=5, name="other")) == 5 * CHUNK


def test_load_covers_whole_chunks_and_leaves_local_blocks_alone(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(ranks=2)
    request = arrive(side, plane, TOKENS, stored=4)
    local = CHUNK + 2 * BLOCK
    assert matched(side, request, local) == 4 * CHUNK - local
    side.allocated(request, [list(range(100, 140))], 4 * CHUNK - local)
    (load,) = side.step(step()).loads
    assert list(load.groups) == [0]
    assert load.groups[0].chunk_keys == chunk_keys(TOKENS)[1:4]
    assert load.groups[0].blocks == [NOWHERE, NOWHERE, *range(106, 116)]
    assert side.step(step()).loads == [], "passed to the workers once"


def test_fewest_hits_of_any_rank_count(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(ranks=2)
    plane.records.update(dict.fromkeys(keys(0, TOKENS), b""))
    request = arrive(side, plane, TOKENS, stored=2)
    del plane.records[keys(1, TOKENS)[1]]
    side.on_new_request(request)
    assert matched(side, request) == CHUNK


def test_failed_load_is_not_offered_again_and_stored_anew(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=4)
    side.allocated(request, [list(range(100, 140))], matched(side, request))
    side.step(step())
    side.worker_output({"r"}, report({"r": 1}))
    assert side.matched_tokens(request, CHUNK) == 0
    (store,) = side.step(step(new={"r": (CHUNK, len(TOKENS) - CHUNK)})).stores
    assert store.chunk_keys == chunk_keys(TOKENS)[1:5]
    assert store.previous == chunk_keys(TOKENS)[0] and store.anchored
    assert store.blocks == list(range(1004, 1020))


def test_abort_while_loading_cancels_at_the_workers(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=4)
    side.allocated(request, [list(range(100, 140))], matched(side, request))
    side.step(step())
    side.finished(request)
    assert side.step(step()).cancels == ["r"]
    assert side.step(step()).cancels == []
    side.worker_output({"r"}, report())
    assert not side._loads and not side._requests


def test_a_step_is_idle_only_while_every_request_waits_for_its_load(make_side: Any, plane: ScriptedDataPlane) -> None:
    """In an idle step workers may wait, so the next step must have no other work."""
    side = make_side()
    assert not side.step(step()).idle, "no request waits"
    request = arrive(side, plane, TOKENS, stored=4)
    assert not side.step(step()).idle, "it waits for its lookup"
    side.allocated(request, [list(range(100, 140))], matched(side, request))
    assert side.step(step()).idle and side.step(step()).idle
    other = arrive(side, plane, list(range(CHUNK - 1)), name="short")
    assert not side.step(step()).idle, "another request may be scheduled"
    assert not side.step(step(new={"short": (0, CHUNK - 1)})).idle
    assert not side.step(step(cached={"short": (CHUNK - 1, 1)})).idle
    side.finished(other)
    assert side.step(step()).idle
    side.finished(request)
    assert side.step(step()).idle, "the load of the aborted request has not ended"
    side.worker_output({"r"}, report())
    assert not side.step(step()).idle


def test_abort_between_allocation_and_step_still_reaches_the_workers(make_side: Any, plane: ScriptedDataPlane) -> None:
    """Without the load, the workers would never report the request, and its blocks would never be freed."""
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=4)
    side.allocated(request, [list(range(100, 140))], matched(side, request))
    side.finished(request)
    metadata = side.step(step())
    assert [load.request_id for load in metadata.loads] == metadata.cancels == ["r"]


def test_chunks_are_stored_as_steps_complete_them(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=1)
    matched(side, request, CHUNK)
    assert side.step(step(new={"r": (CHUNK, CHUNK - 1)})).stores == []
    (store,) = side.step(step(cached={"r": (2 * CHUNK - 1, CHUNK + 1)})).stores
    assert store.chunk_keys == chunk_keys(TOKENS)[1:3]
    assert store.blocks == list(range(1004, 1012))
    assert side.step(step(cached={"r": (3 * CHUNK, 5)})).stores == []


def test_chunk_of_generated_tokens_has_the_key_of_its_tokens(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(ranks=2)
    request = arrive(side, plane, TOKENS[: CHUNK + 20], stored=1)
    matched(side, request, CHUNK)
    request.all_token_ids += list(range(900, 900 + CHUNK))
    assert side.step(step(cached={"r": (CHUNK + 20, 1)})).stores == []
    (store,) = side.step(step(cached={"r": (2 * CHUNK - 1, 1)})).stores
    assert store.chunk_keys == chunk_keys(request.all_token_ids)[1:2]


def test_draft_tokens_are_not_stored(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS[: 2 * CHUNK - 2])
    matched(side, request)
    (store,) = side.step(step(new={"r": (0, 2 * CHUNK - 2)})).stores
    assert store.chunk_keys == chunk_keys(TOKENS)[:1]
    request.all_token_ids.append(7)
    # One known token and four drafts are scheduled: the chunk is complete only if the drafts are right.
    assert side.step(step(cached={"r": (2 * CHUNK - 2, 5)})).stores == []


def test_preempted_request_is_looked_up_again(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS)
    assert matched(side, request) == 0
    side.step(step(new={"r": (0, len(TOKENS))}))
    request.all_token_ids += list(range(900, 900 + CHUNK))
    plane.records.update(dict.fromkeys(keys(0, request.all_token_ids), b""))
    request.num_preemptions = 1
    assert matched(side, request) == 6 * CHUNK
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
    make_side: Any, plane: ScriptedDataPlane, attributes: Any, caplog: Any
) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=5, **attributes)
    assert side.matched_tokens(request, 0) == 0
    assert side.step(step(new={"r": (0, len(TOKENS))})).stores == []
    assert "without the cache" in caplog.text
    side.finished(request)


@pytest.mark.parametrize("fetch", [True, False])
def test_request_whose_inputs_cannot_be_named_is_computed_and_not_stored(
    make_side: Any, plane: ScriptedDataPlane, fetch: bool, caplog: Any
) -> None:
    feature = SimpleNamespace(
        identifier="image-0", modality="image", data=None, mm_position=SimpleNamespace(offset=0, length=3)
    )
    side = make_side(fetch=fetch)
    request = arrive(side, plane, TOKENS, stored=5, mm_features=[feature])
    wait_for(lambda: (side._lookup.poll("r") or SimpleNamespace(reason="")).reason == "unnamed")
    assert side.matched_tokens(request, 0) == 0
    for done in range(0, len(TOKENS), CHUNK):
        new = {"new": {"r": (done, CHUNK)}} if not done else {"cached": {"r": (done, CHUNK)}}
        assert side.step(step(**new)).stores == []
    assert not fetch or "only in a worker's memory" in caplog.text
    side.finished(request)


def unstarted(plane: ScriptedDataPlane) -> tuple[Any, Any]:
    """Return a scheduler half without reports from its workers, and its groups."""
    from host_control.vllm.scheduler_side import SchedulerSide

    config, groups = HostConfig(data_plane=plane.address), groups_of()
    side = SchedulerSide(config, groups, fetch=True, store=True, problem="", logger=logging.getLogger("t"))
    return side, groups


def test_one_worker_that_is_off_turns_all_off(make_side: Any, plane: ScriptedDataPlane) -> None:
    from host_control.vllm.metadata import WorkerHandshake

    side, groups = unstarted(plane)
    side.start({0: handshake(0, groups), 1: WorkerHandshake(b"", (), "unknown layout")})
    request = Request("r", TOKENS)
    side.on_new_request(request)
    assert side.matched_tokens(request, 0) == 0
    assert side.step(step(new={"r": (0, len(TOKENS))})).stores == []
    assert side.problem == "unknown layout"
    side.close()


def test_ranks_that_compute_with_different_files_turn_the_cache_off(plane: ScriptedDataPlane) -> None:
    """Otherwise their KV would have the same key."""
    side, groups = unstarted(plane)
    side.start({rank: replace(handshake(rank, groups), model=bytes([rank]) * 32) for rank in (0, 1)})
    assert "do not agree" in side.problem
    request = Request("r", TOKENS)
    side.on_new_request(request)
    assert side.matched_tokens(request, 0) == 0
    assert side.step(step(new={"r": (0, len(TOKENS))})).stores == []
    side.close()


@pytest.mark.parametrize("held", [(), ((0, 0, b"a" * 32), (0, 1, b"b" * 32)), ((0, 1, b"a" * 32),)])
def test_ranks_that_keep_other_groups_turn_the_cache_off(plane: ScriptedDataPlane, held: Any) -> None:
    """Otherwise no lookup would contain the chunks that one of them lacks."""
    side, groups = unstarted(plane)
    side.start({0: handshake(0, groups), 1: replace(handshake(1, groups), namespaces=held)})
    assert "do not agree on what they keep" in side.problem
    side.on_new_request(Request("r", TOKENS))
    assert side.step(step(new={"r": (0, len(TOKENS))})).stores == []
    side.close()


def test_certificates_that_cannot_be_used_turn_the_cache_off(make_side: Callable[..., Any]) -> None:
    side = make_side(tls_ca="/nowhere/ca.crt")
    assert "tls_ca: cannot read /nowhere/ca.crt" in side.problem
    request = Request("r", TOKENS)
    side.on_new_request(request)
    assert side.matched_tokens(request, 0) == 0


def test_step_with_256_running_requests_costs_under_a_fifth_of_a_millisecond(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """All our methods in one iteration, in both roles, without fetches; the best of many runs on a shared machine."""
    from host_control.vllm.metrics import Counts

    side = make_side()
    names = [f"request-{number}" for number in range(256)]
    for number, name in enumerate(names):
        side.on_new_request(Request(name, [number] * (CHUNK + 1)))
    wait_for(lambda: all(side._lookup.poll(name) is not None for name in names))
    side.step(step(cached={name: (CHUNK, 1) for name in names}))
    output = step(cached={name: (CHUNK + 1, 1) for name in names})
    counts = Counts()
    best = 1.0
    for _ in range(300):
        begin = time.thread_time()
        metadata = side.step(output)
        side.worker_output(None, report())
        counts.take()
        best = min(best, time.thread_time() - begin)
    assert metadata.stores == []
    print(f"scheduler iteration with 256 running requests: {best * 1e6:.0f} us")
    assert best < 0.0002


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
