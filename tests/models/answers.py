"""An engine's answers, and the difference between two answers."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

LOGPROBS: Final = 5
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.2}
"""Tolerance of logprobs: the same sums in another order. Another prefix changes them by 0.05 to 2 in float32, where
equal prefixes differ by 1e-5; in bfloat16, which only recurrent state needs, by 0.5 and more."""


@dataclass(frozen=True)
class Answer:
    """Generated tokens, the likeliest ones at each position, and the number of prompt tokens from a cache."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int


def of_output(output: Any) -> Answer:
    generated = output.outputs[0]
    logprobs = [{token: value.logprob for token, value in each.items()} for each in generated.logprobs]
    return Answer(list(generated.token_ids), logprobs, output.num_cached_tokens or 0)


def answers(engine: Any, prompts: Sequence[list[int]], tokens: int = 8) -> list[Answer]:
    return [of_output(output) for output in engine.generate(list(prompts), tokens, logprobs=LOGPROBS)]


def answer(engine: Any, prompt: list[int], tokens: int = 8) -> Answer:
    return answers(engine, [prompt], tokens)[0]


def difference(one: Answer, other: Answer, tolerance: float) -> float:
    """Return the largest difference of the logprobs; infinity for other tokens.

    Two tokens may be exchanged if their logprobs differ by at most ``tolerance``; later tokens are then not compared.
    """
    most = 0.0
    for token, second, here, there in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        gaps = [abs(here[each] - there[each]) for each in here.keys() & there.keys()]
        if any(map(math.isnan, gaps)):
            return math.inf
        most = max([most, *gaps])
        if token != second:
            tie = second in here and token in there and here[token] - here[second] <= tolerance
            return most if tie and there[second] - there[token] <= tolerance else math.inf
    return most


@contextmanager
def prefill_of(engine: Any, tokens: int | None) -> Iterator[None]:
    """Limit steps of prompt computation to this number of tokens; ``None`` if the model has no chunked prefill."""
    scheduler = engine.scheduler
    before = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.enable_chunked_prefill
    if not before[1]:
        yield  # no chunked prefill
        return
    scheduler.scheduler_config.enable_chunked_prefill = tokens is not None
    if tokens is not None:
        scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.enable_chunked_prefill = before
