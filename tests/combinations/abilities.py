"""Abilities that a user configures, and the table of their pairs. The table is the single source of the matrix in
docs/reference/combinations.md.

An ability lists its additions to the configuration of the engine, the data plane and the storage nodes. A pair runs
with both, unless :data:`PAIRS` has another entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, Literal, NamedTuple

Behind = Literal["node", "nodes", "s3", "cluster", "nothing"]
"""Storage behind the data plane: a storage node, several, one over a bucket, a Redis Cluster, or nothing."""


@dataclass(frozen=True)
class Ability:
    """One ability, and its configuration in tests.

    Attributes:
        title: Name of the ability in the documents.
        key: Setting with which a user enables it.
        host: Keys of the connector.
        engine: Arguments of vLLM.
        plane: Flags of the data plane.
        behind: Storage behind the data plane, if the ability requires a kind.
        family: Family of the model, if the ability requires one.
        exact: True if outputs equal those of an engine without a cache.
        alone: Test of this ability, if the matrix cannot run it.
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
    """Expected result of a pair.

    Attributes:
        outcome: ``works``; ``slower``: it works on a slower path, which a counter and a log line name; ``refused``: the
            program does not start, or the plugin is off, and one line has the reason; ``none``: no meaning.
        detail: The counter's reason, the text of the refusal as a regular expression, or why the pair does not exist.
        test: Test of the pair as ``file::function``, if the matrix does not run it.
    """

    outcome: Literal["works", "slower", "refused", "none"] = "works"
    detail: str = ""
    test: str = ""


_TIERS: Final = '{"memory_budget_bytes": "64MiB", "devices": [{"path": "DEVICE", "size": "64MiB"}]}'
_TIER: Final = "tests/host/vllm/test_vllm_start_check.py::test_a_tier_refuses_keys_that_it_does_not_use"
_TIER_REFUSES: Final = "ShadowServeTier does not use"

ABILITIES: Final[dict[str, Ability]] = {
    "groups": Ability("several KV cache groups", "a model with windows or recurrent state", family="gemma3"),
    "layers": Ability("layer order", "host.layer_order: true", host={"layer_order": True}),
    "waits": Ability("fetching within the step", "host.asynchronous_fetch: false", host={"asynchronous_fetch": False}),
    "pages": Ability("pages", "host.pages: true", host={"pages": True}, plane=("--tiers", _TIERS), behind="nothing"),
    "binned": Ability("lossy quantizer", "host.quantizer: binned", host={"quantizer": "binned"}, exact=False),
    "calibrated": Ability(
        "calibrated quantizer",
        "host.quantizer: near_lossless, small, tiny",
        host={"quantizer": "near_lossless", "calibration": "CALIBRATION"},
        exact=False,
    ),
    "copies": Ability(
        "exact copies",
        "host.exact_copies: true",
        host={"quantizer": "binned", "exact_copies": True},
        plane=("--tiers", _TIERS),
        exact=False,
    ),
    "policy": Ability("fetch-or-recompute policy", "host.fetch_or_recompute: true", host={"fetch_or_recompute": True}),
    "pd": Ability("P/D disaggregation", "host.pd_role: prefill, decode", host={"pd_role": "prefill"}),
    "budget": Ability("interference budget", "host.interference_budget", host={"interference_budget": 0.01}),
    "preemption": Ability(
        "preemption saves",
        "more requests than paged memory holds",
        engine={"num_gpu_blocks_override": 36, "max_model_len": 1120, "enable_prefix_caching": False},
    ),
    "ranks": Ability(
        "several ranks",
        "--tensor-parallel-size 2",
        alone="tests/e2e/test_vllm_ranks.py::test_two_ranks_store_load_and_recompute",
    ),
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
        alone="tests/e2e/test_vllm_tier.py::test_a_second_engine_loads_what_the_first_stored",
    ),
}


def runs(first: str, second: str) -> bool:
    """Return True if the matrix runs a pair itself."""
    found = expected(first, second)
    return found.outcome != "none" and not found.test and not ABILITIES[first].alone and not ABILITIES[second].alone


def pairs() -> list[tuple[str, str]]:
    """Return all pairs, in the order of :data:`ABILITIES`."""
    return list(combinations(ABILITIES, 2))


def expected(first: str, second: str) -> Expected:
    """Return the expected result of a pair."""
    return PAIRS.get((first, second)) or PAIRS.get((second, first)) or Expected()


_ONE_GROUP: Final = "needs one KV cache group of full attention"
_OWN_REQUESTS: Final = "vLLM's OffloadingConnector decides this; the tier sees rows of it"

PAIRS: Final[dict[tuple[str, str], Expected]] = {
    ("groups", "layers"): Expected("refused", _ONE_GROUP),
    ("groups", "pages"): Expected("refused", _ONE_GROUP),
    ("groups", "waits"): Expected("slower", "several_groups"),
    ("layers", "budget"): Expected("slower", "other_requests"),
    ("layers", "preemption"): Expected("slower", "other_requests"),
    ("layers", "cluster"): Expected("slower", "cluster"),
    ("pages", "binned"): Expected("refused", "pages: true stores pages unchanged, which quantizer: binned"),
    ("groups", "calibrated"): Expected("refused", "needs keys and values of equal layers in one KV cache group"),
    ("pages", "calibrated"): Expected("refused", "pages: true stores pages unchanged, which quantizer: near_lossless"),
    ("binned", "calibrated"): Expected("none", "an engine has the one or the other"),
    ("calibrated", "copies"): Expected(
        test="tests/e2e/test_vllm_calibrated.py::test_exact_copies_stay_in_local_tiers_and_are_preferred"
    ),
    ("pages", "copies"): Expected("refused", "pages: true stores pages unchanged, which quantizer: binned"),
    ("copies", "tier"): Expected("refused", "ShadowServeTier .* does not use quantizer: binned", _TIER),
    ("calibrated", "ranks"): Expected(
        test="tests/e2e/test_vllm_calibrated.py::test_an_engine_loads_what_a_preset_stored_within_half_a_step"
    ),
    ("calibrated", "tier"): Expected("refused", "ShadowServeTier .* does not use quantizer: near_lossless", _TIER),
    ("pages", "gpu"): Expected(
        "refused",
        "pages: true needs an engine that computes on a CPU",
        "tests/host/vllm/test_vllm_start_check.py::test_an_unusable_configuration_is_refused",
    ),
    ("pd", "cluster"): Expected("slower", "no_publishing"),
    ("s3", "nodes"): Expected(
        test="tests/dataplane/sources/resp/test_several.py::test_a_lookup_reports_cold_chunks_without_waiting"
    ),
    ("s3", "cluster"): Expected("none", "the bucket is below a storage node of ShadowServe"),
    ("nodes", "cluster"): Expected("none", "a data plane has the one or the other"),
    ("groups", "tier"): Expected(test="tests/e2e/test_vllm_tier.py::test_a_second_engine_loads_what_the_first_stored"),
    ("layers", "tier"): Expected("refused", _TIER_REFUSES, _TIER),
    ("waits", "tier"): Expected("refused", _TIER_REFUSES, _TIER),
    ("pages", "tier"): Expected("refused", _TIER_REFUSES, _TIER),
    ("binned", "tier"): Expected("refused", "ShadowServeTier .* does not use quantizer: binned", _TIER),
    ("policy", "tier"): Expected("refused", _TIER_REFUSES, _TIER),
    ("pd", "tier"): Expected("refused", _TIER_REFUSES, _TIER),
    ("budget", "tier"): Expected(
        test="tests/e2e/test_vllm_tier.py::test_the_tier_reports_steps_and_its_transfers_keep_the_interference_budget"
    ),
    ("preemption", "tier"): Expected("none", _OWN_REQUESTS),
    ("ranks", "tier"): Expected(
        test="tests/e2e/test_vllm_tier.py::test_engines_with_other_numbers_of_ranks_only_share_canonical_rows"
    ),
}
"""Pairs with another expected result than ``works``, or with their own test."""
