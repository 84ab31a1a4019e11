"""Lookups of prompts with chunks that are only in object storage: the answers, and the prefetch of these chunks."""

from typing import Any

import numpy as np
import pytest
from lookup_support import CHUNK, MODEL, MakeLookup, asked
from machine import WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.disaggregation import Available, Disaggregation
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import prefix_chain, record_keys
from shadowserve.pieces import leading
from shadowserve.tier import Tier

NAMESPACE = b"n" * 32
CHUNKS = 6
TOKENS = list(range(CHUNK * CHUNKS + 1))
LINKS = prefix_chain(MODEL, TOKENS, chunk_tokens=CHUNK)
KEYS = record_keys(NAMESPACE, LINKS)
NEVER_S = 60.0
ALL = LookupAnswer(CHUNK * CHUNKS, "complete")


@pytest.fixture
def make(make_lookup: MakeLookup, plane: ScriptedDataPlane) -> MakeLookup:
    """Make lookups of an engine with one group; all chunks are stored, and the last four are cold."""
    plane.records.update(dict.fromkeys(KEYS, b""))
    plane.script.cold.update(KEYS[2:])
    plane.script.cold_ms = 3000

    def make(*groups: Any, **options: Any) -> PrefixLookup:
        return make_lookup(*groups or [[NAMESPACE]], **{"loads_wait": True, "load_timeout": NEVER_S, **options})

    return make


def test_an_answer_counts_cold_chunks_and_tells_their_tier(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    plane.script.tiers[KEYS[0]] = Tier.MEMORY
    lookup = make()
    answer = asked(lookup, "r", TOKENS)
    assert answer == ALL and answer.cold_seconds == 3.0
    assert answer.tiers == bytes([Tier.MEMORY, Tier.STORAGE, *[Tier.COLD] * 4])
    assert lookup.available("r") == Available(2, "")
    (present,) = lookup.present("r") or ()
    assert present.all(), "it is stored"
    assert plane.prefetches == 0, "no prefetch before a load begins"


def test_a_load_brings_its_cold_chunks_and_follows_them(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    plane.script.brings = 0
    lookup = make()
    asked(lookup, "r", TOKENS)
    lookup.begin_load("r", CHUNKS)
    wait_for(lambda: plane.prefetches > 1)
    assert lookup.available("r") == Available(2, "")
    assert plane.asked_keys == [KEYS[2:]], "no request for chunks that are near"
    plane.script.brings = 1
    wait_for(lambda: lookup.available("r") == Available(CHUNKS, "complete"))
    before = plane.prefetches
    asked(lookup, "other", TOKENS)
    assert plane.prefetches == before and lookup.available("other") is None, "no chunk is cold any longer"


def test_a_shorter_load_brings_only_its_own_cold_chunks(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    lookup = make()
    asked(lookup, "r", TOKENS)
    lookup.begin_load("r", 3)
    wait_for(lambda: lookup.available("r") == Available(3, "complete"))
    assert plane.script.cold == set(KEYS[3:])


def test_cold_chunks_that_stay_away_end_as_cold_late_or_cold_gone(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    plane.script.brings = 0
    lookup = make(load_timeout=0.1)
    asked(lookup, "late", TOKENS)
    lookup.begin_load("late", CHUNKS)
    wait_for(lambda: lookup.available("late") == Available(2, "cold_late"))
    lookup = make()
    asked(lookup, "gone", TOKENS)
    del plane.records[KEYS[3]]
    plane.script.brings = 1 << 30
    lookup.begin_load("gone", CHUNKS)
    wait_for(lambda: lookup.available("gone") == Available(3, "cold_gone"))


def test_nothing_is_brought_for_a_request_that_has_ended(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    plane.script.brings = 0
    lookup = make()
    for name in ("r", "other"):
        lookup.submit(name, TOKENS)
        wait_for(lambda name=name: lookup.poll(name))
        lookup.begin_load(name, CHUNKS)
    lookup.forget("r")
    lookup.forget("other")
    wait_for(lambda: not lookup._cold_loads._loads)
    lookup.begin_load("r", CHUNKS)  # unknown now


def test_where_no_load_may_wait_the_lookup_waits_until_all_is_near(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    plane.script.brings = 0
    lookup = make(loads_wait=False, timeout=WAIT_MAX_S)
    lookup.submit("r", TOKENS)
    wait_for(lambda: plane.prefetches > 1)
    assert lookup.poll("r") is None
    plane.script.brings = 1 << 30
    assert wait_for(lambda: lookup.poll("r")) == ALL and lookup.available("r") is None


def test_late_cold_chunks_are_a_miss_where_no_load_may_wait_and_count_as_stored(
    make: MakeLookup, plane: ScriptedDataPlane
) -> None:
    plane.script.brings = 0
    lookup = make(loads_wait=False, load_timeout=0.2)
    answer = asked(lookup, "r", TOKENS)
    assert (answer.tokens, answer.reason) == (2 * CHUNK, "cold_late")
    (present,) = lookup.present("r") or ()
    assert present.all()


def test_a_request_that_does_not_wait_gets_the_near_chunks(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    lookup = make()
    assert asked(lookup, "r", TOKENS, disaggregation=Disaggregation(cold=False)) == LookupAnswer(2 * CHUNK, "complete")
    assert lookup.available("r") is None and plane.prefetches == 0


def test_cold_chunks_of_a_window_count_only_where_a_load_needs_them(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    """One group keeps every chunk, and all of them are near. Another group's cold last chunk is needed for a hit."""
    window = record_keys(b"w" * 32, LINKS)
    plane.records.update(dict.fromkeys(window, b""))
    plane.script.cold = set(window[:4])

    def rule(present: Any, tokens: int, tail: int = 0) -> int:
        ends = [end for end in range(1, leading(present[0]) + 1) if present[1][end - 1]]
        return min(max(ends, default=0) * CHUNK, tokens - 1)

    lookup = make([NAMESPACE], [b"w" * 32], every=[True, False], rule=rule)
    answer = asked(lookup, "r", TOKENS)
    assert answer == ALL and Tier.COLD not in answer.tiers and lookup.available("r") is None
    plane.script.cold.add(window[5])
    answer = asked(lookup, "last", TOKENS)
    assert answer == ALL and answer.tiers[5] == Tier.COLD
    lookup.begin_load("last", CHUNKS)
    wait_for(lambda: lookup.available("last") == Available(CHUNKS, "complete"))


def test_a_load_waits_for_pending_and_cold_chunks_together(make: MakeLookup, plane: ScriptedDataPlane) -> None:
    del plane.records[KEYS[5]]
    plane.published[KEYS[5]] = 60_000
    lookup = make()
    lookup.submit("r", TOKENS, disaggregation=Disaggregation(waits=NEVER_S))
    assert wait_for(lambda: lookup.poll("r")).tokens == CHUNK * CHUNKS
    assert lookup.available("r") == Available(2, "")
    lookup.begin_load("r", CHUNKS)
    wait_for(lambda: lookup.available("r") == Available(5, ""))
    plane.records[KEYS[5]] = b""
    wait_for(lambda: lookup.available("r") == Available(CHUNKS, "complete"))


def test_a_late_lookup_is_a_miss_and_still_learns_which_chunks_are_stored(
    make: MakeLookup, plane: ScriptedDataPlane
) -> None:
    plane.script.stall.add("Lookup")
    lookup = make(timeout=0.2)
    answer = asked(lookup, "r", TOKENS)
    assert (answer.tokens, answer.reason) == (0, "deadline") and "lookup_timeout_s" in answer.detail
    assert lookup.present("r") is None
    plane.script.unstall.set()
    wait_for(lambda: lookup.present("r") is not None)
    assert lookup.poll("r") == answer, "it stays a miss"
    (present,) = lookup.present("r") or ()
    assert np.array_equal(present, np.ones(CHUNKS, np.bool_)) and lookup.asked("r") > 0
