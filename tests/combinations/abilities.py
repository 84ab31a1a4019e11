"""Abilities that a user configures, and the table of their pairs: the one source of the matrix in docs/combinations.md.

An ability says what it adds to the configuration of the engine, the data plane and the storage nodes. A pair runs with
both, unless :data:`PAIRS` says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, Literal, NamedTuple

__all__ = ["ABILITIES", "PAIRS", "Ability", "Behind", "Expected", "expected", "pairs"]

Behind = Literal["node", "nodes", "s3", "cluster", "nothing"]
"""What is behind the data plane: a storage node, several, one over a bucket, a Redis Cluster, or nothing."""


@dataclass(frozen=True)
class Ability:
    """One ability, and how the tests switch it on.

    Attributes:
        title: its name in the documents.
        key: what a user writes to switch it on.
        host: keys of the connector.
        engine: arguments of vLLM.
        plane: flags of the data plane.
        behind: what is behind the data plane, where the ability asks for it.
        family: of the model, where the ability asks for it.
        exact: outputs are those of an engine without a cache.
        alone: test that shows it by itself, where the matrix cannot run it.
    """

    title: str
    key: str
    host: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    plane: tuple[str, ...] = ()
    behind: Behind | None = None
    family: str | None = None
    exact: bool = True
    alone: str = ""


class Expected(NamedTuple):
    """What is expected of a pair.

    Attributes:
        outcome: ``works``; ``slower``: it works on a slower path, which a counter and a log line name; ``refused``: the
            program does not start, or the plugin is off, and one line says why; ``none``: the pair has no meaning.
        detail: the counter's reason, the text of the refusal as a regular expression, or why there is no such pair.
        test: the test that shows it, where the matrix does not run it: ``file::function``.
    """

    outcome: Literal["works", "slower", "refused", "none"] = "works"
    detail: str = ""
    test: str = ""


_TIERS: Final = '{"memory_budget_bytes": "64MiB", "devices": [{"path": "DEVICE", "size": "64MiB"}]}'
_SMALL_BUFFERS: Final = tuple(
    f"--{name}-buffer-bytes=8MiB" for name in ("decompression", "dequantization", "dma-source", "store")
)

ABILITIES: Final[dict[str, Ability]] = {
    "groups": Ability("several KV cache groups", "a model with windows or recurrent state", family="gemma3"),
    "layers": Ability("layer order", "host.layer_order: true", host={"layer_order": True}),
    "waits": Ability("fetching within the step", "host.asynchronous_fetch: false", host={"asynchronous_fetch": False}),
    "pages": Ability("pages", "host.pages: true", host={"pages": True}, plane=("--tiers", _TIERS), behind="nothing"),
    "binned": Ability("lossy quantizer", "host.quantizer: binned", host={"quantizer": "binned"}, exact=False),
    "policy": Ability("fetch-or-recompute policy", "host.fetch_or_compute: true", host={"fetch_or_compute": True}),
    "pd": Ability("P/D disaggregation", "host.handover: prefill, decode", host={"handover": "prefill"}),
    "budget": Ability("interference budget", "host.interference_budget", host={"interference_budget": 0.01}),
    "preemption": Ability(
        "preemption saves",
        "more requests than paged memory holds",
        engine={"num_gpu_blocks_override": 36, "max_model_len": 1120, "enable_prefix_caching": False},
    ),
    "ranks": Ability("several ranks", "--tensor-parallel-size 2", engine={"tensor_parallel_size": 2}),
    "tiers": Ability("local tiers", "dpu.tiers", plane=("--tiers", _TIERS)),
    "s3": Ability("object storage", "storage.s3", behind="s3"),
    "nodes": Ability("several storage nodes", "dpu.storage_nodes", behind="nodes"),
    "cluster": Ability("Redis or Valkey cluster", "dpu.storage_cluster", behind="cluster"),
    "doca": Ability("DPU (emulated)", "dpu.backend: doca", host={"delivery": "exported"}, plane=("--backend", "doca")),
    "gpu": Ability(
        "GPU memory",
        "an engine on a GPU",
        alone="tests/host/test_delivery.py::test_kv_that_one_engine_stored_is_delivered_to_another",
    ),
    "tier": Ability(
        "offloading tier",
        "OffloadingConnector with ShadowServeTier",
        alone="tests/e2e/test_vllm_tier.py::test_another_engine_has_what_one_has_computed",
    ),
}


def pairs() -> list[tuple[str, str]]:
    """Return all pairs, in the order of :data:`ABILITIES`."""
    return list(combinations(ABILITIES, 2))


def expected(first: str, second: str) -> Expected:
    """Return what is expected of a pair."""
    return PAIRS.get((first, second)) or PAIRS.get((second, first)) or Expected()


PAIRS: Final[dict[tuple[str, str], Expected]] = {}
"""Pairs of which something else is expected than that they work."""
