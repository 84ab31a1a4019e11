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
from shadowserve.keys import chunk_keys

NAMESPACES = [b"a" * 32, b"b" * 32]
CHUNK = 4


@pytest.fixture
def lookup(client: DataPlaneClient) -> Iterator[PrefixLookup]:
    lookup = PrefixLookup([client] * len(NAMESPACES), NAMESPACES, chunk_tokens=CHUNK, timeout=PATIENCE_S)
    yield lookup
    lookup.close()


def test_answer_is_the_fewest_hits_of_any_rank(
    lookup: PrefixLookup, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    tokens = list(range(22))
    first, second = (chunk_keys(namespace, tokens, chunk_tokens=CHUNK) for namespace in NAMESPACES)
    plane.records.update(dict.fromkeys([*first[:4], *second[:3]], b""))
    lookup.submit("r", tokens)
    assert wait(lambda: lookup.poll("r")) == LookupAnswer(3, "complete")
    assert lookup.keys("r") == [first, second]
    assert lookup.known("r") == 3
    assert plane.calls.count("Lookup") == 1, "one round trip for all ranks"


def test_prompt_without_a_full_chunk_is_answered_at_once(lookup: PrefixLookup, plane: ScriptedDataPlane) -> None:
    lookup.submit("r", [1, 2, 3])
    assert lookup.poll("r") == LookupAnswer(0, "short")
    assert lookup.keys("r") == [[], []]
    assert "Lookup" not in plane.calls


def test_silence_becomes_a_miss_at_the_deadline_and_stays_one(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    plane.script.stall.add("Lookup")
    lookup = PrefixLookup([client] * len(NAMESPACES), NAMESPACES, chunk_tokens=CHUNK, timeout=0.1)
    try:
        begin = time.monotonic()
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") is None or time.monotonic() - begin >= 0.1
        answer = wait(lambda: lookup.poll("r"))
        assert answer.hits == 0 and answer.reason == "deadline"
        assert lookup.poll("r") == answer
    finally:
        lookup.close()


def test_extra_bytes_separate_requests(lookup: PrefixLookup, wait: Callable[..., Any]) -> None:
    tokens = list(range(8))
    lookup.submit("a", tokens)
    lookup.submit("b", tokens, b"salt")
    wait(lambda: lookup.poll("a") and lookup.poll("b"))
    assert lookup.keys("a") != lookup.keys("b")


def test_disabled_lookup_still_makes_keys(
    client: DataPlaneClient, plane: ScriptedDataPlane, wait: Callable[..., Any]
) -> None:
    lookup = PrefixLookup([client] * len(NAMESPACES), NAMESPACES, chunk_tokens=CHUNK, timeout=PATIENCE_S, enabled=False)
    try:
        lookup.submit("r", list(range(8)))
        assert lookup.poll("r") == LookupAnswer(0, "disabled")
        assert len(wait(lambda: lookup.keys("r"))[0]) == 2
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

    lookup = PrefixLookup([client], NAMESPACES[:1], chunk_tokens=256, timeout=PATIENCE_S)
    try:
        tokens = np.random.default_rng(1).integers(0, 128000, 131072).tolist()
        lookup.submit("r", Prompt(tokens))
        assert lookup.poll("r") is None and lookup.keys("r") is None
        returned.set()
        assert wait(lambda: lookup.poll("r")) == LookupAnswer(0, "complete")
        assert lookup.keys("r") == [chunk_keys(NAMESPACES[0], tokens)]
        assert plane.calls.count("Lookup") == 1
    finally:
        lookup.close()
