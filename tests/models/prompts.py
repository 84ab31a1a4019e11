"""Prompts of a family. Each cell of the matrix has its own tokens, so that no cell hits another cell's records."""

from dataclasses import dataclass
from typing import Final

from tiny_models import random_tokens

MANY_CHUNKS: Final = 130
"""Number of chunks: more than 128, because other systems failed there."""
SEEDS: Final = 4
_SIX_CHUNKS: Final = (
    *("local then stored", "abort", "a record is lost", "the data plane is killed", "a record is damaged"),
)


@dataclass(frozen=True)
class Plan:
    """The prompts of a family: by cell, each run alone, and those of a crowd, run at once.

    Attributes:
        chunk: Number of tokens in a chunk.
        crowd_tokens: Number of generated tokens for each prompt of the crowd.
        step: Number of tokens in a step, for prompts that are computed in steps.
    """

    chunk: int
    alone: dict[str, list[int]]
    crowd: list[list[int]]
    crowd_tokens: int
    step: int


def plan(chunk: int, window: int, tokens_max: int, cells: tuple[str, ...]) -> Plan:
    """Return the prompts for a chunk size and a window size in tokens, none longer than ``tokens_max``."""
    rest = chunk // 4 + 1
    chunks = dict.fromkeys(_SIX_CHUNKS, 6) | dict.fromkeys(("whole prefill", "chunked prefill", "another TP size"), 5)
    chunks |= {"one chunk": 1, "128 chunks": min(MANY_CHUNKS, (tokens_max - 64) // chunk)}
    lengths = {cell: count * chunk + rest for cell, count in chunks.items()}
    # A hit is whole chunks, or one token less at the end of the prompt: it ends at the last token but one.
    for sign, more in ((" - 1", -1), ("", 0), (" + 1", 1)) if window else ():
        lengths[f"window{sign}"] = window + more + 1
    alone = {cell: random_tokens(length, cell) for cell, length in lengths.items() if cell in cells}
    crowd = [random_tokens(2 * chunk + rest, f"crowd {seed}") for seed in range(SEEDS)] if "preemption" in cells else []
    return Plan(chunk, alone, crowd, max(96, chunk + chunk // 4), chunk + chunk // 2)
