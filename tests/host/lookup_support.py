"""Prompts, rules and answers for tests of prefix lookups; fixture ``make_lookup`` makes the lookups."""

from collections.abc import Callable, Sequence
from typing import Any

from machine import wait_for

from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.pieces import Flags, leading

MODEL = b"m" * 32
NAMESPACES = [b"a" * 32, b"b" * 32]
CHUNK = 4


MakeLookup = Callable[..., PrefixLookup]


def leading_tokens(present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
    """Return the number of tokens that every group has from the start."""
    chunks = min(map(leading, present))
    if tail_tokens and chunks == len(present[0]):
        return min(chunks * CHUNK - (CHUNK - tail_tokens), tokens)
    return min(chunks * CHUNK, tokens - 1)


def asked(lookup: PrefixLookup, name: str, tokens: Sequence[int], **options: Any) -> LookupAnswer:
    """Look a prompt up and return the answer."""
    lookup.submit(name, tokens, **options)
    answer: LookupAnswer = wait_for(lambda: lookup.poll(name))
    return answer
