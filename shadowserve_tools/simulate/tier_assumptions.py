"""Parameters of the model of tiers: values from the TierKV paper, and assumptions where the paper gives none or two.

"Section", "figure", "table" and "equation" are the TierKV paper's. docs/design/simulation.md says what follows from
each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from shadowserve.pool.prefetch_policy import Hop
from shadowserve_tools.simulate.assumptions import given


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """The machine, the load and the rules. GB are 10^9 bytes."""

    hbm_gb: float = given(80, "table 3; all of it for KV: weights left out, or 70B would have none", "the GPU's memory")
    memory_gb: float = given(512, "table 3", "host memory")
    hbm_gb_per_s: float = given(3350, "table 3", "the GPU's memory")
    memory_gb_per_s: float = given(
        64, "table 3; section 3.1 has 50", "from host memory to the GPU, all transfers together"
    )
    memory_latency_us: float = given(1, "table 3; section 3.1 has 5", "the same")
    ssd_gb_per_s: float = given(7, "table 3", "from SSD to host memory")
    ssd_latency_us: float = given(10, "table 3; section 3.1 has 80", "the same")
    block_tokens: float = given(
        256, "assumed: our chunk; the paper's 16 save a partly filled end", "what moves at once"
    )
    slots: float = given(32, 'appendix A: "at batch size 32"', "requests that decode together, at most")
    load: float = given(
        0.81,
        "section 4.2: 6473 tokens/s at 4.0 ms are 25.9 of 32",
        "requests that decode on average, of those that could",
    )
    answer_tokens: float = given(200, "fitted, to the nearest hundred: table 4, 7B", "mean of an answer; exponential")
    running_share: float = given(0.5, "assumed", "of the GPU's memory for what decodes, at most; the rest is a cache")
    skew: float = given(
        0.7, "assumed, of 0.5 to 0.8 that were tried", "Zipf's exponent: how unequally often sessions come back"
    )

    def hops(self) -> tuple[Hop, Hop]:
        """Return the ways up, into the GPU's memory first."""
        return (
            Hop(self.memory_gb_per_s * 1e9, self.memory_latency_us / 1e6),
            Hop(self.ssd_gb_per_s * 1e9, self.ssd_latency_us / 1e6),
        )


@dataclass(frozen=True)
class Shape:
    """A model: KV bytes of a token, milliseconds of an iteration without any transfer (table 4, Oracle)."""

    token_bytes: int
    step_ms: float

    def context(self, workload: str, random: np.random.Generator) -> int:
        """Draw the tokens of a session's context."""
        return WORKLOADS[workload](random)


def _mha(layers: int, heads: int) -> int:
    """Return KV bytes of a token: keys and values, heads of 128, 16 bits, no grouped queries, as the paper."""
    return 2 * layers * heads * 128 * 2


MODELS: Final = {
    "7b": Shape(_mha(32, 32), 4.0),
    "13b": Shape(_mha(40, 40), 7.5),
    "30b": Shape(_mha(60, 52), 17.6),
    "70b": Shape(_mha(80, 64), 40.0),
}


def _between(low: int, high: int) -> Callable[[np.random.Generator], int]:
    return lambda random: int(random.integers(low, high, endpoint=True))


def _chatbot(random: np.random.Generator) -> int:
    low, high = (128, 255) if random.random() < 0.7 else (256, 512)
    return int(random.integers(low, high, endpoint=True))


def _mixed(random: np.random.Generator) -> int:
    name = ("uniform", "chatbot", "code", "summarization")[int(random.integers(4))]
    return WORKLOADS[name](random)


WORKLOADS: Final[dict[str, Callable[[np.random.Generator], int]]] = {
    "uniform": lambda random: 512,
    "chatbot": _chatbot,
    "code": _between(512, 2048),
    "summarization": _between(2048, 8192),
    "mixed": _mixed,
}
"""Tokens of a session's context (section 4.1). Assumed: all of a range are alike; mixed is a quarter of each."""

TABLE_4: Final = {
    "7b": {"lru": 6.32, "frequency": 5.90, "static": 5.24, "prefetch": 4.03, "oracle": 4.01},
    "13b": {"lru": 12.47, "frequency": 11.68, "static": 10.37, "prefetch": 7.52, "oracle": 7.48},
    "30b": {"lru": 65.21, "frequency": 56.17, "static": 42.70, "prefetch": 17.61, "oracle": 17.87},
    "70b": {"lru": 42.09, "frequency": 41.77, "static": 41.25, "prefetch": 40.03, "oracle": 39.98},
}
"""Mean TPOT in ms at 3 times the GPU's memory."""
