"""Chunks that another engine will store: lookups wait for them, at a low rate and with a time limit."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from lookup_support import CHUNK, MODEL, NAMESPACES, MakeLookup, asked
from machine import WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.disaggregation import POLL_INTERVAL, Available, Disaggregation
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import prefix_chain, record_keys, tail_chunk_key
from shadowserve.pieces import leading

TOKENS = list(range(4 * CHUNK + 3))
LINKS = prefix_chain(MODEL, TOKENS, chunk_tokens=CHUNK)
TAIL = tail_chunk_key(MODEL, TOKENS, 2, chunk_tokens=CHUNK, after=LINKS)
WAITS = Disaggregation(waits=WAIT_MAX_S)
MINUTE_MS = 60_000


@pytest.fixture
def lookup(make_lookup: MakeLookup) -> PrefixLookup:
    return make_lookup()


@pytest.fixture
def early(make_lookup: MakeLookup) -> PrefixLookup:
    """Return lookups of an engine whose loads may begin before all chunks are stored."""
    return make_lookup(loads_wait=True)


def keys(*chunk_keys: bytes, ranks: int = 2) -> list[bytes]:
    return [key for namespace in NAMESPACES[:ranks] for key in record_keys(namespace, chunk_keys)]


def publish(plane: ScriptedDataPlane, *chunk_keys: bytes, ranks: int = 2) -> None:
    plane.published.update(dict.fromkeys(keys(*chunk_keys, ranks=ranks), MINUTE_MS))


def withdraw(plane: ScriptedDataPlane, *chunk_keys: bytes) -> None:
    for key in keys(*chunk_keys):
        del plane.published[key]


def store(plane: ScriptedDataPlane, *chunk_keys: bytes, ranks: int = 2) -> None:
    plane.records.update(dict.fromkeys(keys(*chunk_keys, ranks=ranks), b""))


def polls(plane: ScriptedDataPlane, more: int = 2) -> None:
    """Wait for the given number of further lookups."""
    plane.wait_for_call("Lookup", plane.calls.count("Lookup") + more)


@pytest.mark.parametrize(("ranks", "disaggregation"), [(0, WAITS), (2, Disaggregation()), (1, WAITS)], ids=str)
def test_nothing_is_waited_for_that_not_all_ranks_store_or_by_a_request_that_does_not_wait(
    lookup: PrefixLookup, plane: ScriptedDataPlane, ranks: int, disaggregation: Disaggregation
) -> None:
    publish(plane, *LINKS, ranks=ranks)
    assert asked(lookup, "r", TOKENS, disaggregation=disaggregation) == LookupAnswer(0, "complete")
    assert plane.calls.count("Lookup") == 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)], ids=str)
def test_a_prompt_that_is_being_computed_elsewhere_is_a_hit_once_it_is_stored(
    lookup: PrefixLookup, plane: ScriptedDataPlane, order: tuple[int, ...]
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    for index in order:
        polls(plane)
        assert lookup.poll("r") is None
        store(plane, LINKS[index], ranks=1)
        polls(plane)
        assert lookup.poll("r") is None, "only one rank of two has stored it"
        store(plane, LINKS[index])
    assert wait_for(lambda: lookup.poll("r")) == LookupAnswer(4 * CHUNK, "complete")
    assert leading((lookup.present("r") or [])[0]) == 4


@pytest.mark.parametrize(
    ("there", "gone", "later", "hits"),
    [([], [1], [0, 2, 3], 1), ([0, 1], [2, 3], [], 2)],
    ids=["a gap", "the rest of the prompt"],
)
def test_a_dropped_chunk_ends_the_wait_with_the_chunks_before_it(
    lookup: PrefixLookup, plane: ScriptedDataPlane, there: list[int], gone: list[int], later: list[int], hits: int
) -> None:
    store(plane, *(LINKS[index] for index in there))
    publish(plane, *(LINKS[index] for index in range(4) if index not in there))
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane)
    assert lookup.poll("r") is None
    withdraw(plane, *(LINKS[index] for index in gone))
    store(plane, *(LINKS[index] for index in later))
    reason = "published_gone", "chunks that were pending are not stored"
    assert wait_for(lambda: lookup.poll("r")) == LookupAnswer(hits * CHUNK, *reason)


def test_an_publication_that_is_kept_up_and_never_kept_is_given_up_in_time(
    lookup: PrefixLookup, plane: ScriptedDataPlane
) -> None:
    store(plane, *LINKS[:2])
    publish(plane, *LINKS[2:])
    answer = asked(lookup, "r", TOKENS, disaggregation=Disaggregation(waits=0.2))
    assert answer.reason == "published_late" and answer.tokens in (
        0,
        2 * CHUNK,
    )  # 0 if the machine was slow
    assert lookup.poll("r") == answer


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_data_plane_that_dies_while_one_waits_ends_the_wait(
    lookup: PrefixLookup, plane: ScriptedDataPlane, status: grpc.StatusCode
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane)
    plane.script.abort["Lookup"] = status
    answer = wait_for(lambda: lookup.poll("r"))
    assert answer.tokens == 0 * CHUNK and answer.reason not in ("complete", "published_late", "published_gone")


def test_many_that_wait_ask_together_and_at_intervals(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    prompts = [[index, *TOKENS[1:]] for index in range(50)]
    all_chunk_keys = [prefix_chain(MODEL, prompt, chunk_tokens=CHUNK) for prompt in prompts]
    publish(plane, *(chunk_key for chunk_keys in all_chunk_keys for chunk_key in chunk_keys))
    for index, prompt in enumerate(prompts):
        lookup.submit(f"{index}", prompt, disaggregation=WAITS)
    plane.wait_for_call("Lookup", len(prompts))
    wait_for(lambda: len(plane.asked_keys[0]) == len(prompts))
    began, before = time.monotonic(), plane.calls.count("Lookup")
    polls(plane, 20)
    calls = plane.calls.count("Lookup") - before
    assert (calls - 2) * POLL_INTERVAL <= time.monotonic() - began
    assert [len(chain) for chain in plane.asked_keys] == [50, 50], "one chunk of each prompt"
    for chunk_keys in all_chunk_keys:
        store(plane, *chunk_keys)
    for index in range(len(prompts)):
        assert wait_for(lambda index=index: lookup.poll(f"{index}")) == LookupAnswer(4 * CHUNK, "complete")


@pytest.mark.parametrize("shard_layout", [0, 2])
def test_a_wait_polls_only_the_published_shard_layout(
    make_lookup: MakeLookup, client: DataPlaneClient, plane: ScriptedDataPlane, shard_layout: int
) -> None:
    """An engine with other ranks may publish the chunks. Most do not, and each shard layout costs a query."""
    names = [bytes([number]) * 32 for number in range(4)]
    others = {number: [[(client, name)]] for number, name in enumerate(names) if number}
    lookup = make_lookup(names[:1], others=others)
    theirs = record_keys(names[shard_layout], LINKS)
    plane.published.update(dict.fromkeys(theirs, MINUTE_MS))
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane, 4)
    assert plane.asked_keys == [theirs[-1:]], "the last pending chunk: with it, all are stored"
    plane.records.update(dict.fromkeys(theirs, b""))
    assert wait_for(lambda: lookup.poll("r")) == LookupAnswer(4 * CHUNK, "complete", shard_layout=shard_layout)


def test_without_publications_the_tokens_named_by_the_proxy_are_waited_for(
    lookup: PrefixLookup, plane: ScriptedDataPlane
) -> None:
    plane.published = None
    store(plane, *LINKS[:1])
    parameters = Disaggregation(waits=WAIT_MAX_S, expected_tokens=2 * CHUNK)
    assert asked(lookup, "cold", [9, *TOKENS[1:]], disaggregation=Disaggregation(waits=WAIT_MAX_S)) == LookupAnswer(
        0, "complete"
    )
    lookup.submit("r", TOKENS, disaggregation=parameters)
    polls(plane)
    assert lookup.poll("r") is None
    store(plane, LINKS[1])
    answer = wait_for(lambda: lookup.poll("r"))
    assert answer.tokens == 2 * CHUNK, "no lookup waits for chunks after the published ones"


def test_absent_chunks_are_published_repeatedly_and_withdrawn_at_the_end(
    lookup: PrefixLookup, plane: ScriptedDataPlane
) -> None:
    store(plane, *LINKS[:1])
    assert asked(lookup, "r", TOKENS, disaggregation=Disaggregation(publishes=0.1)) == LookupAnswer(
        1 * CHUNK, "complete"
    )
    plane.wait_for_call("Publish", 4)
    assert plane.published is not None and set(plane.published) == set(keys(*LINKS[1:]))
    lookup.publications.computed("r", LINKS[:3])
    lookup.forget("r")
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[1:3])))
    lookup.submit("again", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[1:])))
    before = plane.calls.count("Publish")
    lookup.forget("again")
    wait_for(lambda: not plane.published)
    assert plane.calls.count("Publish") == before + 1, "no publication for an ended request"


def test_a_chunk_that_a_rank_has_dropped_is_not_published_again(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    """Neither while others are computed, nor when its request ends."""
    asked(lookup, "r", TOKENS, disaggregation=Disaggregation(publishes=0.1))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS)))
    lookup.publications.computed("r", LINKS[:2])
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)  # one may have been in flight
    withdraw(plane, LINKS[1])
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)
    assert set(plane.published or ()) == set(keys(LINKS[0], *LINKS[2:]))
    lookup.forget("r")
    wait_for(lambda: set(plane.published or ()) == set(keys(LINKS[0])))


def test_chunks_are_pending_until_the_end_of_a_long_step(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    """Symptom: where a step took longer than pd_timeout_s, the decode engine computed what it could have waited for."""
    asked(lookup, "r", TOKENS, disaggregation=Disaggregation(publishes=0.1))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS)))
    lookup.publications.begin_step()
    lookup.publications.computed("r", LINKS[:2])
    lookup.publications.begin_step()  # as vLLM does with asynchronous scheduling
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)
    withdraw(plane, LINKS[0])  # as at the end of its time
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS)))
    lookup.publications.end_step()
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)  # one may have been in flight
    withdraw(plane, LINKS[0])
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)
    assert set(plane.published or ()) == set(keys(*LINKS[1:]))
    lookup.forget("r")
    wait_for(lambda: set(plane.published or ()) == set(keys(LINKS[1])))


def test_chunks_beyond_the_store_limit_are_not_published(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    lookup.submit(
        "r", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S, tail_tokens=2, store_tokens_max=3 * CHUNK + 1)
    )
    wait_for(lambda: lookup.poll("r"))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[:3])))


def test_a_lookup_that_failed_publishes_nothing(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    plane.script.abort["Lookup"] = grpc.StatusCode.INTERNAL
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S))
    assert wait_for(lambda: lookup.poll("r")).reason != "complete"
    assert "Publish" not in plane.calls


def test_a_tail_is_a_hit_behind_the_last_chunk_alone(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    disaggregation = Disaggregation(tail_tokens=2)
    store(plane, *LINKS[:3], TAIL)
    assert asked(lookup, "gap", TOKENS, disaggregation=disaggregation) == LookupAnswer(3 * CHUNK, "complete")
    store(plane, *LINKS)
    assert asked(lookup, "whole", TOKENS, disaggregation=disaggregation) == LookupAnswer(
        4 * CHUNK, "complete", tail=True
    )
    assert (leading((lookup.present("whole") or [])[0]), lookup.chunk_keys("whole"), lookup.tail("whole")) == (
        4,
        LINKS,
        [TAIL],
    )
    short = tail_chunk_key(MODEL, TOKENS[:3], 2, chunk_tokens=CHUNK)
    store(plane, short)
    assert asked(lookup, "short", TOKENS[:3], disaggregation=disaggregation) == LookupAnswer(0, "complete", tail=True)


def test_a_load_may_begin_with_the_first_chunk_and_the_others_are_reported_as_they_arrive(
    early: PrefixLookup, plane: ScriptedDataPlane
) -> None:
    publish(plane, *LINKS, TAIL)
    early.submit("r", TOKENS, disaggregation=Disaggregation(waits=WAIT_MAX_S, tail_tokens=2))
    polls(plane)
    assert early.poll("r") is None, "no blocks are allocated for chunks that may take long"
    store(plane, LINKS[0])
    assert wait_for(lambda: early.poll("r")) == LookupAnswer(4 * CHUNK, "complete", tail=True)
    assert early.available("r") == Available(1, "")
    store(plane, *LINKS[1:])
    wait_for(lambda: early.available("r") == Available(4, ""))
    store(plane, TAIL, ranks=1)
    polls(plane)
    assert early.available("r") == Available(4, ""), "only one rank of two has stored it"
    store(plane, TAIL)
    wait_for(lambda: early.available("r") == Available(5, "complete"))
    calls = plane.calls.count("Lookup")
    assert (
        asked(early, "cold", [9, *TOKENS[1:]], disaggregation=WAITS) == LookupAnswer(0, "complete")
        and early.available("cold") is None
    )
    assert plane.calls.count("Lookup") == calls + 1, "no further lookups of complete chunks"


@pytest.mark.parametrize(
    ("happen", "seconds", "there", "reason"),
    [
        (lambda plane: withdraw(plane, *LINKS[2:]), WAIT_MAX_S, 2, "published_gone"),
        (lambda plane: None, 1.0, 1, "published_late"),
        (lambda plane: plane.script.abort.update(Lookup=grpc.StatusCode.INTERNAL), WAIT_MAX_S, 1, ""),
    ],
    ids=["dropped", "late", "nobody answers"],
)
def test_a_load_that_has_begun_ends_with_the_reason_why_no_more_arrives(
    early: PrefixLookup,
    plane: ScriptedDataPlane,
    happen: Callable[[ScriptedDataPlane], Any],
    seconds: float,
    there: int,
    reason: str,
) -> None:
    store(plane, LINKS[0])
    publish(plane, *LINKS[1:])
    answer = asked(early, "r", TOKENS, disaggregation=Disaggregation(waits=seconds))
    if answer.reason == "published_late":  # the machine was slow
        return
    assert answer == LookupAnswer(4 * CHUNK, "complete") and early.available("r") == Available(1, "")
    happen(plane)
    if there == 2:
        wait_for(lambda: early.available("r") == Available(1, ""))
        store(plane, LINKS[1])
    ended = wait_for(lambda: (early.available("r") or Available(0, "")).ended)
    assert early.available("r") == Available(there, ended)
    assert ended == reason if reason else ended not in ("complete", "published_gone", "published_late")


def test_a_forgotten_request_is_not_polled_for_any_more(early: PrefixLookup, plane: ScriptedDataPlane) -> None:
    store(plane, LINKS[0])
    publish(plane, *LINKS[1:])
    asked(early, "r", TOKENS, disaggregation=WAITS)
    early.forget("r")
    store(plane, *LINKS)
    wait_for(lambda: not early.publications._waits)
    assert early.available("r") is None
    before = plane.calls.count("Lookup")
    asked(early, "another", [7, *TOKENS])
    assert plane.calls.count("Lookup") == before + 1, "only this one was looked up"
