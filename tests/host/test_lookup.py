"""Prefix lookups in the background: answers, deadlines, and a lost data plane."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from machine import WAIT_MAX_S
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import Extra, prefix_chain, record_keys
from shadowserve.pieces import Flags, leading

MODEL = b"m" * 32
NAMESPACES = [b"a" * 32, b"b" * 32]
CHUNK = 4


def shortest(present: Sequence[Flags], tokens: int) -> int:
    """Return the number of tokens that every group has from the start."""
    return min(min(map(leading, present)) * CHUNK, tokens - 1)


def lookup_of(client: DataPlaneClient, *names: bytes, **options: Any) -> PrefixLookup:
    """Return the lookups of an engine with one group, of ranks with these shards."""
    held = [(client, name) for name in names or NAMESPACES]
    return PrefixLookup(MODEL, [held], shortest, **{"chunk_tokens": CHUNK, "timeout": WAIT_MAX_S, **options})


@pytest.fixture
def lookup(client: DataPlaneClient) -> Iterator[PrefixLookup]:
    lookup = lookup_of(client)
    yield lookup
    lookup.close()


def test_answer_is_the_fewest_hits_of_any_rank(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    tokens = list(range(22))
    chunk_keys = prefix_chain(MODEL, tokens, chunk_tokens=CHUNK)
    first, second = (record_keys(namespace, chunk_keys) for namespace in NAMESPACES)
    plane.records.update(dict.fromkeys([*first[:4], *second[:3]], b""))
    lookup.submit("r", tokens)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(3 * CHUNK, "complete")
    assert lookup.chunk_keys("r") == chunk_keys
    (present,) = lookup.present("r") or []
    assert present.tolist() == [True, True, True, False, False]
    assert plane.calls.count("Lookup") == 1, "one round trip for all ranks"


def test_chunks_that_different_ranks_lack_are_no_hits_together(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    chunk_keys = prefix_chain(MODEL, range(22), chunk_tokens=CHUNK)
    first, second = (record_keys(namespace, chunk_keys) for namespace in NAMESPACES)
    plane.records.update(dict.fromkeys([*first[:1], *first[2:], *second[:3], *second[4:]], b""))
    lookup.submit("r", range(22))
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(CHUNK, "complete"), "the other chunks are after a gap"
    (present,) = lookup.present("r") or []
    assert present.tolist() == [True, False, True, False, True]


def test_ranks_that_hold_the_same_part_are_asked_for_once(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """Like latent KV, or heads that several ranks share."""
    lookup = lookup_of(client, *[NAMESPACES[0]] * 4)
    try:
        keys = record_keys(NAMESPACES[0], prefix_chain(MODEL, range(22), chunk_tokens=CHUNK))
        plane.records.update(dict.fromkeys(keys[:3], b""))
        lookup.submit("r", range(22))
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(3 * CHUNK, "complete")
        assert plane.asked_keys == [keys]
    finally:
        lookup.close()


def test_all_groups_are_looked_up_in_one_round_trip_and_passed_to_the_rule(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """A group's chunk is stored if all parts of all ranks are. The rule selects the hit."""
    parts = [bytes([65 + number]) * 32 for number in range(5)]
    groups = [[(client, parts[0]), (client, parts[1])], [(client, parts[2])], [(client, parts[3]), (client, parts[4])]]
    told: list[Any] = []

    def rule(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        told.append(([flags.tolist() for flags in present], tokens))
        return 7

    lookup = PrefixLookup(MODEL, groups, rule, chunk_tokens=CHUNK, timeout=WAIT_MAX_S)
    try:
        chunk_keys = prefix_chain(MODEL, range(14), chunk_tokens=CHUNK)
        stored = [[0, 1], [1, 2], [0, 2], [2], [1, 2]]
        for name, chunks in zip(parts, stored, strict=True):
            plane.records.update(dict.fromkeys(record_keys(name, [chunk_keys[chunk] for chunk in chunks]), b""))
        lookup.submit("r", range(14))
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(7, "complete")
        present = [[False, True, False], [True, False, True], [False, False, True]]
        assert told == [(present, 14)]
        assert [flags.tolist() for flags in lookup.present("r") or []] == present
        assert plane.calls.count("Lookup") == 1 and len(plane.asked_keys) == len(parts)
    finally:
        lookup.close()


def test_a_rule_that_fails_is_a_miss_that_says_so(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """This is another project's code, and may change."""

    def rule(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        raise AttributeError("no such attention group")

    lookup = PrefixLookup(MODEL, [[(client, NAMESPACES[0])]], rule, chunk_tokens=CHUNK, timeout=WAIT_MAX_S)
    try:
        lookup.submit("r", range(8))
        answer = wait(lambda: lookup.poll("r"))
        assert (answer.tokens, answer.reason) == (0, "internal") and "attention group" in answer.detail
        assert len(lookup.chunk_keys("r") or []) == 2, "it can still be stored"
    finally:
        lookup.close()


def test_prompt_without_a_full_chunk_is_answered_at_once(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    lookup.submit("r", [1, 2, 3])
    assert lookup.poll("r") == LookupAnswer(0, "short")
    assert lookup.chunk_keys("r") == []
    assert "Lookup" not in plane.calls


def test_silence_becomes_a_miss_at_the_deadline_and_stays_one(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    plane.script.stall.add("Lookup")
    lookup = lookup_of(client, timeout=0.1)
    try:
        begin = time.monotonic()
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") is None or time.monotonic() - begin >= 0.1
        answer = wait(lambda: lookup.poll("r"))
        assert answer.tokens == 0 and answer.reason == "deadline"
        assert lookup.poll("r") == answer
    finally:
        lookup.close()


def test_extra_inputs_of_a_request_separate_its_chunks(lookup: PrefixLookup, wait: Callable[..., Any]) -> None:
    tokens = list(range(8))
    lookup.submit("a", tokens)
    lookup.submit("b", tokens, Extra(b"salt"))
    wait(lambda: lookup.poll("a") and lookup.poll("b"))
    assert lookup.chunk_keys("a") != lookup.chunk_keys("b")


def test_disabled_lookup_still_makes_chunk_keys(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup = lookup_of(client, enabled=False)
    try:
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") == LookupAnswer(0, "disabled")
        assert len(wait(lambda: lookup.chunk_keys("r"))) == 2
        assert "Lookup" not in plane.calls
    finally:
        lookup.close()


def test_token_that_does_not_fit_is_a_miss(lookup: PrefixLookup, wait: Callable[..., Any]) -> None:
    lookup.submit("r", [-1] * 8)
    assert wait(lambda: lookup.poll("r")).reason == "internal"


def test_long_prompt_does_not_hold_the_engine(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """A lookup of a 128K-token prompt: one round trip, and none of the work runs in submit and poll."""
    returned = threading.Event()

    class Prompt(list[int]):
        """A prompt that is readable after the engine's thread has returned from submit and poll."""

        def __getitem__(self, index: Any) -> Any:
            assert returned.wait(WAIT_MAX_S)
            return super().__getitem__(index)

    lookup = lookup_of(client, NAMESPACES[0], chunk_tokens=256)
    try:
        tokens = np.random.default_rng(1).integers(0, 128000, 131072).tolist()
        lookup.submit("r", Prompt(tokens))
        assert lookup.poll("r") is None and lookup.chunk_keys("r") is None
        returned.set()
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")
        assert lookup.chunk_keys("r") == prefix_chain(MODEL, tokens)
        assert plane.calls.count("Lookup") == 1
    finally:
        lookup.close()


def test_a_model_whose_every_group_forgets_has_hits(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """Symptom: reason "internal" for each prompt of a model with only windows."""
    namespace, tokens = b"w" * 32, list(range(12))
    plane.records.update(dict.fromkeys(record_keys(namespace, prefix_chain(b"m" * 32, tokens, chunk_tokens=4)), b""))
    lookup = PrefixLookup(
        b"m" * 32, [[(client, namespace)]], lambda present, _: 4 * int(present[0].sum()),
        every=[False], chunk_tokens=4, timeout=WAIT_MAX_S,
    )  # fmt: skip
    try:
        lookup.submit("r", tokens)
        answer = wait(lambda: lookup.poll("r"))
        assert (answer.tokens, answer.reason) == (12, "complete")
    finally:
        lookup.close()
