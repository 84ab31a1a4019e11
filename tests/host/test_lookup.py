"""Prefix lookups in the background: answers, deadlines, and a lost data plane."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from lookup_support import CHUNK, MODEL, NAMESPACES, MakeLookup, asked
from machine import WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import Extra, prefix_chain, record_keys
from shadowserve.pieces import Flags

TOKENS = list(range(22))
LINKS = prefix_chain(MODEL, TOKENS, chunk_tokens=CHUNK)


def store(plane: ScriptedDataPlane, namespace: bytes, chunks: Sequence[int]) -> None:
    plane.records.update(dict.fromkeys(record_keys(namespace, [LINKS[chunk] for chunk in chunks]), b""))


def present_of(lookup: PrefixLookup) -> list[list[bool]]:
    return [flags.tolist() for flags in lookup.present("r") or []]


@pytest.mark.parametrize(
    ("first", "second", "hits"), [([0, 1, 2, 3], [0, 1, 2], 3), ([0, 2, 3, 4], [0, 1, 2, 4], 1)], ids=str
)
def test_a_chunk_that_one_rank_lacks_is_no_hit(
    make_lookup: MakeLookup, plane: ScriptedDataPlane, first: list[int], second: list[int], hits: int
) -> None:
    store(plane, NAMESPACES[0], first)
    store(plane, NAMESPACES[1], second)
    lookup = make_lookup()
    assert asked(lookup, "r", TOKENS) == LookupAnswer(hits * CHUNK, "complete"), "no chunks after a gap"
    assert lookup.chunk_keys("r") == LINKS
    assert present_of(lookup) == [[chunk in first and chunk in second for chunk in range(5)]]
    assert plane.calls.count("Lookup") == 1, "one round trip for all ranks"


def test_ranks_that_hold_the_same_part_are_asked_for_once(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> None:
    """Like latent KV, or heads that several ranks share."""
    store(plane, NAMESPACES[0], range(3))
    assert asked(make_lookup([NAMESPACES[0]] * 4), "r", TOKENS) == LookupAnswer(3 * CHUNK, "complete")
    assert plane.asked_keys == [record_keys(NAMESPACES[0], LINKS)]


def test_all_groups_are_looked_up_in_one_round_trip_and_passed_to_the_rule(
    make_lookup: MakeLookup, plane: ScriptedDataPlane
) -> None:
    """A group's chunk is stored if all parts of all ranks are. The rule selects the hit."""
    parts = [bytes([65 + number]) * 32 for number in range(5)]
    results: list[Any] = []

    def rule(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        results.append(([flags.tolist() for flags in present], tokens))
        return 7

    lookup = make_lookup(parts[:2], parts[2:3], parts[3:], rule=rule)
    for name, chunks in zip(parts, [[0, 1], [1, 2], [0, 2], [2], [1, 2]], strict=True):
        store(plane, name, chunks)
    assert asked(lookup, "r", TOKENS[:14]) == LookupAnswer(7, "complete")
    present = [[False, True, False], [True, False, True], [False, False, True]]
    assert results == [(present, 14)]
    assert present_of(lookup) == present
    assert plane.calls.count("Lookup") == 1 and len(plane.asked_keys) == len(parts)


def test_a_rule_that_fails_is_a_miss_that_says_so(make_lookup: MakeLookup) -> None:
    """This is another project's code, and may change."""

    def rule(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        raise AttributeError("no such attention group")

    lookup = make_lookup(rule=rule)
    answer = asked(lookup, "r", range(8))
    assert (answer.tokens, answer.reason) == (0, "internal") and "attention group" in answer.detail
    assert len(lookup.chunk_keys("r") or []) == 2, "it can still be stored"


def test_prompt_without_a_full_chunk_is_answered_at_once(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> None:
    lookup = make_lookup()
    lookup.submit("r", [1, 2, 3])
    assert lookup.poll("r") == LookupAnswer(0, "short")
    assert lookup.chunk_keys("r") == []
    assert "Lookup" not in plane.calls


def test_extra_inputs_of_a_request_separate_its_chunks(make_lookup: MakeLookup) -> None:
    lookup = make_lookup()
    asked(lookup, "a", range(8))
    asked(lookup, "b", range(8), extra=Extra(b"salt"))
    assert lookup.chunk_keys("a") != lookup.chunk_keys("b")


def test_disabled_lookup_still_makes_chunk_keys(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> None:
    lookup = make_lookup(enabled=False)
    lookup.submit("r", range(8))
    assert lookup.poll("r") == LookupAnswer(0, "disabled")
    assert len(wait_for(lambda: lookup.chunk_keys("r"))) == 2
    assert "Lookup" not in plane.calls


def test_token_that_does_not_fit_is_a_miss(make_lookup: MakeLookup) -> None:
    assert asked(make_lookup(), "r", [-1] * 8).reason == "internal"


def test_long_prompt_does_not_hold_the_engine(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> None:
    """A lookup of a 128K-token prompt: one round trip, and none of the work runs in submit and poll."""
    returned = threading.Event()

    class Prompt(list[int]):
        """A prompt that is readable after the engine's thread has returned from submit and poll."""

        def __getitem__(self, index: Any) -> Any:
            assert returned.wait(WAIT_MAX_S)
            return super().__getitem__(index)

    lookup = make_lookup(chunk_tokens=256)
    tokens = np.random.default_rng(1).integers(0, 128000, 131072).tolist()
    lookup.submit("r", Prompt(tokens))
    assert lookup.poll("r") is None and lookup.chunk_keys("r") is None
    returned.set()
    assert wait_for(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")
    assert lookup.chunk_keys("r") == prefix_chain(MODEL, tokens)
    assert plane.calls.count("Lookup") == 1


def test_a_model_whose_every_group_forgets_has_hits(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> None:
    """Symptom: reason "internal" for each prompt of a model with only windows."""
    store(plane, b"w" * 32, range(3))
    lookup = make_lookup([b"w" * 32], rule=lambda present, _: 4 * int(present[0].sum()), every=[False])
    assert asked(lookup, "r", TOKENS[:12]) == LookupAnswer(12, "complete")
