"""Prefix lookups in the background: answers, deadlines, and what a lost data plane does to them."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from machine import PATIENCE_S
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.keys import Extra, chain_links, record_keys

MODEL = b"m" * 32
NAMESPACES = [b"a" * 32, b"b" * 32]
CHUNK = 4


@pytest.fixture
def lookup(client: DataPlaneClient) -> Iterator[PrefixLookup]:
    lookup = PrefixLookup(MODEL, [(client, name) for name in NAMESPACES], chunk_tokens=CHUNK, timeout=PATIENCE_S)
    yield lookup
    lookup.close()


def test_answer_is_the_fewest_hits_of_any_rank(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    tokens = list(range(22))
    links = chain_links(MODEL, tokens, chunk_tokens=CHUNK)
    first, second = (record_keys(namespace, links) for namespace in NAMESPACES)
    plane.records.update(dict.fromkeys([*first[:4], *second[:3]], b""))
    lookup.submit("r", tokens)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(3, "complete")
    assert lookup.links("r") == links
    assert lookup.known("r") == 3
    assert plane.calls.count("Lookup") == 1, "one round trip for all ranks"


def test_chunks_that_different_ranks_lack_are_no_hits_together(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    links = chain_links(MODEL, range(22), chunk_tokens=CHUNK)
    first, second = (record_keys(namespace, links) for namespace in NAMESPACES)
    plane.records.update(dict.fromkeys([*first[:1], *first[2:], *second[:3], *second[4:]], b""))
    lookup.submit("r", range(22))
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(1, "complete"), "the rest lies behind a gap"


def test_ranks_that_hold_the_same_part_are_asked_for_once(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """Of a latent, say, or of heads that several ranks share."""
    lookup = PrefixLookup(MODEL, [(client, NAMESPACES[0])] * 4, chunk_tokens=CHUNK, timeout=PATIENCE_S)
    try:
        keys = record_keys(NAMESPACES[0], chain_links(MODEL, range(22), chunk_tokens=CHUNK))
        plane.records.update(dict.fromkeys(keys[:3], b""))
        lookup.submit("r", range(22))
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(3, "complete")
        assert plane.asked_keys == [keys]
    finally:
        lookup.close()


def test_prompt_without_a_full_chunk_is_answered_at_once(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    lookup.submit("r", [1, 2, 3])
    assert lookup.poll("r") == LookupAnswer(0, "short")
    assert lookup.links("r") == []
    assert "Lookup" not in plane.calls


def test_silence_becomes_a_miss_at_the_deadline_and_stays_one(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    plane.script.stall.add("Lookup")
    lookup = PrefixLookup(MODEL, [(client, name) for name in NAMESPACES], chunk_tokens=CHUNK, timeout=0.1)
    try:
        begin = time.monotonic()
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") is None or time.monotonic() - begin >= 0.1
        answer = wait(lambda: lookup.poll("r"))
        assert answer.hits == 0 and answer.reason == "deadline"
        assert lookup.poll("r") == answer
    finally:
        lookup.close()


def test_what_holds_for_a_request_separates_it(lookup: PrefixLookup, wait: Callable[..., Any]) -> None:
    tokens = list(range(8))
    lookup.submit("a", tokens)
    lookup.submit("b", tokens, Extra(b"salt"))
    wait(lambda: lookup.poll("a") and lookup.poll("b"))
    assert lookup.links("a") != lookup.links("b")


def test_disabled_lookup_still_makes_links(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup = PrefixLookup(
        MODEL, [(client, name) for name in NAMESPACES], chunk_tokens=CHUNK, timeout=PATIENCE_S, enabled=False
    )
    try:
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") == LookupAnswer(0, "disabled")
        assert len(wait(lambda: lookup.links("r"))) == 2
        assert "Lookup" not in plane.calls
    finally:
        lookup.close()


def test_token_that_does_not_fit_is_a_miss(lookup: PrefixLookup, wait: Callable[..., Any]) -> None:
    lookup.submit("r", [-1] * 8)
    assert wait(lambda: lookup.poll("r")).reason == "internal"


def test_long_prompt_does_not_hold_the_engine(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    """A lookup of a 128K-token prompt: one round trip, and submit and poll do none of the work."""
    returned = threading.Event()

    class Prompt(list[int]):
        """Can be read once the engine's thread is back from submit and poll."""

        def __getitem__(self, index: Any) -> Any:
            assert returned.wait(PATIENCE_S)
            return super().__getitem__(index)

    lookup = PrefixLookup(MODEL, [(client, NAMESPACES[0])], chunk_tokens=256, timeout=PATIENCE_S)
    try:
        tokens = np.random.default_rng(1).integers(0, 128000, 131072).tolist()
        lookup.submit("r", Prompt(tokens))
        assert lookup.poll("r") is None and lookup.links("r") is None
        returned.set()
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")
        assert lookup.links("r") == chain_links(MODEL, tokens)
        assert plane.calls.count("Lookup") == 1
    finally:
        lookup.close()
