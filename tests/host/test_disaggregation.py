"""Chunks that another engine will store: lookups wait for them, at a low rate and with a time limit."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from machine import WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.disaggregation import POLL_INTERVAL, Available, Disaggregation
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import prefix_chain, record_keys, tail_chunk_key
from shadowserve.pieces import Flags, leading

MODEL = b"m" * 32
NAMESPACES = [b"a" * 32, b"b" * 32]
CHUNK = 4
TOKENS = list(range(4 * CHUNK + 3))
LINKS = prefix_chain(MODEL, TOKENS, chunk_tokens=CHUNK)
TAIL = tail_chunk_key(MODEL, TOKENS, 2, chunk_tokens=CHUNK, after=LINKS)
WAITS = Disaggregation(waits=WAIT_MAX_S)
MINUTE_MS = 60_000


def leading_tokens(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
    chunks = leading(present[0])
    return min(chunks * CHUNK - (CHUNK - tail_tokens if tail_tokens and chunks == len(present[0]) else 0), tokens)


def make(client: DataPlaneClient, timeout: float = WAIT_MAX_S, *, loads_wait: bool = False) -> PrefixLookup:
    group = [(client, name) for name in NAMESPACES]
    return PrefixLookup(MODEL, [group], leading_tokens, chunk_tokens=CHUNK, timeout=timeout, loads_wait=loads_wait)


def known(lookup: PrefixLookup, request_id: str) -> int:
    present = lookup.present(request_id)
    assert present is not None
    return leading(present[0])


@pytest.fixture
def lookup(client: DataPlaneClient) -> Iterator[PrefixLookup]:
    lookup = make(client)
    yield lookup
    lookup.close()


@pytest.fixture
def early(client: DataPlaneClient) -> Iterator[PrefixLookup]:
    """Return lookups of an engine whose loads may begin before all chunks are stored."""
    lookup = make(client, loads_wait=True)
    yield lookup
    lookup.close()


def keys(*chunk_keys: bytes, ranks: int = 2) -> list[bytes]:
    return [key for namespace in NAMESPACES[:ranks] for key in record_keys(namespace, chunk_keys)]


def publish(plane: ScriptedDataPlane, *chunk_keys: bytes, ranks: int = 2) -> None:
    assert plane.published is not None
    plane.published.update(dict.fromkeys(keys(*chunk_keys, ranks=ranks), MINUTE_MS))


def store(plane: ScriptedDataPlane, *chunk_keys: bytes, ranks: int = 2) -> None:
    plane.records.update(dict.fromkeys(keys(*chunk_keys, ranks=ranks), b""))


def polls(plane: ScriptedDataPlane, more: int = 2) -> None:
    """Wait for the given number of further lookups."""
    plane.wait_for_call("Lookup", plane.calls.count("Lookup") + more)


def test_a_cold_prompt_is_answered_at_once_even_if_the_request_may_wait(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")
    assert plane.calls.count("Lookup") == 1


def test_a_prompt_that_is_being_computed_elsewhere_is_a_hit_once_it_is_stored(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    for count in range(4):
        polls(plane)
        assert lookup.poll("r") is None
        store(plane, LINKS[count], ranks=1)
        polls(plane)
        assert lookup.poll("r") is None, "only one rank of two has stored it"
        store(plane, LINKS[count])
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(4 * CHUNK, "complete")
    assert known(lookup, "r") == 4


def test_a_request_without_disaggregation_does_not_wait(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")


def test_chunks_that_come_in_another_order_are_all_waited_for(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    for count in (3, 0, 2):
        store(plane, LINKS[count])
        polls(plane)
        assert lookup.poll("r") is None
    store(plane, LINKS[1])
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(4 * CHUNK, "complete")


def test_a_dropped_chunk_ends_the_wait_at_the_gap(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane)
    assert plane.published is not None
    for key in keys(LINKS[1]):
        del plane.published[key]
    store(plane, LINKS[0], *LINKS[2:])
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(
        CHUNK, "published_gone", "chunks that were pending are not stored"
    )


def test_chunks_that_one_rank_will_not_store_are_not_waited_for(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS, ranks=1)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")


def test_a_dropped_store_ends_the_wait_with_the_stored_chunks(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    store(plane, *LINKS[:2])
    publish(plane, *LINKS[2:])
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane)
    assert lookup.poll("r") is None
    assert plane.published is not None
    plane.published.clear()
    answer = wait(lambda: lookup.poll("r"))
    assert (answer.tokens, answer.reason) == (2 * CHUNK, "published_gone")


def test_an_publication_that_is_kept_up_and_never_kept_is_given_up_in_time(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    store(plane, *LINKS[:2])
    publish(plane, *LINKS[2:])
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(waits=0.2))
    answer = wait(lambda: lookup.poll("r"))
    assert answer.reason == "published_late" and answer.tokens in (
        0,
        2 * CHUNK,
    )  # 0 if the machine was slow
    assert lookup.poll("r") == answer


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_data_plane_that_dies_while_one_waits_ends_the_wait(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any], status: grpc.StatusCode
) -> None:
    publish(plane, *LINKS)
    lookup.submit("r", TOKENS, disaggregation=WAITS)
    polls(plane)
    plane.script.abort["Lookup"] = status
    answer = wait(lambda: lookup.poll("r"))
    assert answer.tokens == 0 * CHUNK and answer.reason not in ("complete", "published_late", "published_gone")


def test_many_that_wait_ask_together_and_at_intervals(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
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
        assert wait(lambda index=index: lookup.poll(f"{index}")) == LookupAnswer(4 * CHUNK, "complete")


@pytest.mark.parametrize("shard_layout", [0, 2])
def test_a_wait_polls_only_the_published_shard_layout(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any], shard_layout: int
) -> None:
    """An engine with other ranks may publish the chunks. Most do not, and each shard layout costs a query."""
    cuts = {number: bytes([number]) * 32 for number in range(4)}
    others = {number: [[(client, name)]] for number, name in cuts.items() if number}
    lookup = PrefixLookup(
        MODEL, [[(client, cuts[0])]], leading_tokens, others=others, chunk_tokens=CHUNK, timeout=WAIT_MAX_S
    )
    try:
        assert plane.published is not None
        theirs = record_keys(cuts[shard_layout], LINKS)
        plane.published.update(dict.fromkeys(theirs, MINUTE_MS))
        lookup.submit("r", TOKENS, disaggregation=WAITS)
        polls(plane, 4)
        assert plane.asked_keys == [theirs[-1:]], "the last pending chunk: with it, all are stored"
        plane.records.update(dict.fromkeys(theirs, b""))
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(4 * CHUNK, "complete", shard_layout=shard_layout)
    finally:
        lookup.close()


def test_without_publications_the_tokens_named_by_the_proxy_are_waited_for(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    plane.published = None
    store(plane, *LINKS[:1])
    told = Disaggregation(waits=WAIT_MAX_S, expected_tokens=2 * CHUNK)
    lookup.submit("cold", [9, *TOKENS[1:]], disaggregation=Disaggregation(waits=WAIT_MAX_S))
    assert wait(lambda: lookup.poll("cold")) == LookupAnswer(0, "complete")
    lookup.submit("r", TOKENS, disaggregation=told)
    polls(plane)
    assert lookup.poll("r") is None
    store(plane, LINKS[1])
    answer = wait(lambda: lookup.poll("r"))
    assert answer.tokens == 2 * CHUNK, "no lookup waits for chunks after the published ones"


def test_absent_chunks_are_published_repeatedly_and_withdrawn_at_the_end(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    store(plane, *LINKS[:1])
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(publishes=0.1))
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(1 * CHUNK, "complete")
    plane.wait_for_call("Publish", 4)
    assert plane.published is not None and set(plane.published) == set(keys(*LINKS[1:]))
    lookup.computed("r", LINKS[:3])
    lookup.forget("r")
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[1:3])))
    lookup.submit("again", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[1:])))
    before = plane.calls.count("Publish")
    lookup.forget("again")
    wait_for(lambda: not plane.published)
    assert plane.calls.count("Publish") == before + 1, "no publication for an ended request"


def test_a_chunk_that_a_rank_has_dropped_is_not_published_again_when_its_request_ends(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S))
    wait(lambda: lookup.poll("r"))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS)))
    assert plane.published is not None
    for key in keys(LINKS[1]):
        del plane.published[key]
    lookup.computed("r", LINKS[:3])
    before = plane.calls.count("Publish")
    lookup.forget("r")
    plane.wait_for_call("Publish", before + 1)
    wait_for(lambda: set(plane.published or ()) == set(keys(LINKS[0], LINKS[2])))


def test_a_chunk_that_a_rank_has_dropped_is_not_published_again_while_others_are_computed(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(publishes=0.1))
    wait(lambda: lookup.poll("r"))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS)))
    lookup.computed("r", LINKS[:2])
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)  # one may have been in flight
    assert plane.published is not None
    for key in keys(LINKS[1]):
        del plane.published[key]
    plane.wait_for_call("Publish", plane.calls.count("Publish") + 2)
    assert set(plane.published) == set(keys(LINKS[0], *LINKS[2:]))


def test_chunks_beyond_the_store_limit_are_not_published(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup.submit(
        "r", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S, tail_tokens=2, store_tokens_max=3 * CHUNK + 1)
    )
    wait(lambda: lookup.poll("r"))
    wait_for(lambda: set(plane.published or ()) == set(keys(*LINKS[:3])))


def test_a_lookup_that_failed_publishes_nothing(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    plane.script.abort["Lookup"] = grpc.StatusCode.INTERNAL
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(publishes=WAIT_MAX_S))
    assert wait(lambda: lookup.poll("r")).reason != "complete"
    assert "Publish" not in plane.calls


def test_a_tail_is_a_hit_behind_the_last_chunk_alone(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    disaggregation = Disaggregation(tail_tokens=2)
    store(plane, *LINKS[:3], TAIL)
    lookup.submit("gap", TOKENS, disaggregation=disaggregation)
    assert wait(lambda: lookup.poll("gap")) == LookupAnswer(3 * CHUNK, "complete")
    store(plane, *LINKS)
    lookup.submit("whole", TOKENS, disaggregation=disaggregation)
    assert wait(lambda: lookup.poll("whole")) == LookupAnswer(4 * CHUNK, "complete", tail=True)
    assert (known(lookup, "whole"), lookup.chunk_keys("whole"), lookup.tail("whole")) == (4, LINKS, [TAIL])
    short = tail_chunk_key(MODEL, TOKENS[:3], 2, chunk_tokens=CHUNK)
    store(plane, short)
    lookup.submit("short", TOKENS[:3], disaggregation=disaggregation)
    assert wait(lambda: lookup.poll("short")) == LookupAnswer(0, "complete", tail=True)


def test_a_load_may_begin_with_the_first_chunk_and_hears_of_the_others_as_they_arrive(
    early: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    publish(plane, *LINKS, TAIL)
    early.submit("r", TOKENS, disaggregation=Disaggregation(waits=WAIT_MAX_S, tail_tokens=2))
    polls(plane)
    assert early.poll("r") is None, "no blocks are allocated for chunks that may take long"
    store(plane, LINKS[0])
    assert wait(lambda: early.poll("r")) == LookupAnswer(4 * CHUNK, "complete", tail=True)
    assert early.available("r") == Available(1, "")
    store(plane, *LINKS[1:])
    wait_for(lambda: early.available("r") == Available(4, ""))
    store(plane, TAIL, ranks=1)
    polls(plane)
    assert early.available("r") == Available(4, ""), "only one rank of two has stored it"
    store(plane, TAIL)
    wait_for(lambda: early.available("r") == Available(5, "complete"))
    calls = plane.calls.count("Lookup")
    early.submit("cold", [9, *TOKENS[1:]], disaggregation=WAITS)
    assert wait(lambda: early.poll("cold")) == LookupAnswer(0, "complete") and early.available("cold") is None
    assert plane.calls.count("Lookup") == calls + 1, "no further lookups of complete chunks"


def gone(plane: ScriptedDataPlane) -> None:
    assert plane.published is not None
    for key in keys(*LINKS[2:]):
        del plane.published[key]


@pytest.mark.parametrize(
    ("happen", "seconds", "there", "reason"),
    [
        (gone, WAIT_MAX_S, 2, "published_gone"),
        (lambda plane: None, 1.0, 1, "published_late"),
        (lambda plane: plane.script.abort.update(Lookup=grpc.StatusCode.INTERNAL), WAIT_MAX_S, 1, ""),
    ],
    ids=["dropped", "late", "nobody answers"],
)
def test_a_load_that_has_begun_hears_why_no_more_arrives(
    early: PrefixLookup,
    plane: ScriptedDataPlane,
    wait: Callable[..., Any],
    happen: Callable[[ScriptedDataPlane], Any],
    seconds: float,
    there: int,
    reason: str,
) -> None:
    store(plane, LINKS[0])
    publish(plane, *LINKS[1:])
    early.submit("r", TOKENS, disaggregation=Disaggregation(waits=seconds))
    answer = wait(lambda: early.poll("r"))
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


def test_a_forgotten_request_is_not_polled_for_any_more(
    early: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    store(plane, LINKS[0])
    publish(plane, *LINKS[1:])
    early.submit("r", TOKENS, disaggregation=WAITS)
    wait(lambda: early.poll("r"))
    early.forget("r")
    store(plane, *LINKS)
    wait_for(lambda: not early._publications._waits)
    assert early.available("r") is None
    asked = plane.calls.count("Lookup")
    early.submit("another", [7, *TOKENS])
    wait(lambda: early.poll("another"))
    assert plane.calls.count("Lookup") == asked + 1, "only this one was looked up"
