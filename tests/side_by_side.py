"""Tests in parallel: the number of processes, the unit of work of each, and the order.

A process takes a whole file, so that its tests share their fixtures. The tests of the files in ``APART`` share nothing
and take minutes, so they are separate units. One process takes all files of one of the ``LINES``, one after the other.
Tests that import or start vLLM are in two of the lines: the import costs seconds, an engine gigabytes, and two at once
are enough. One line has the benchmarks' engines, the other ``vllm serve``, several ranks, and what is compared with
``reference``: each kind has a process that its engines are forked from. Tests that import half of vLLM for a model are
with them. Tests that install into a temporary system share their wheels.
"""

import os
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

PROCESSES_MAX: Final = 8
"""Maximum number of processes: with more, the lines end last, and the others only use memory."""

LINES: Final = (
    (
        "combinations/test_combinations e2e/test_core_partition e2e/test_identity e2e/test_vllm_models "
        "e2e/test_vllm_tier host/vllm/test_identity_requests host/vllm/test_identity_table "
        "host/vllm/test_identity_weights host/vllm/test_vllm_fetch_policy host/vllm/test_vllm_connector "
        "host/vllm/test_vllm_epochs host/vllm/test_vllm_groups "
        "host/vllm/test_vllm_disaggregation host/vllm/test_vllm_hints "
        "host/vllm/test_vllm_preemption host/vllm/test_vllm_quantized_pages host/vllm/test_vllm_scheduler_groups "
        "host/vllm/test_vllm_scheduler_side host/vllm/test_vllm_start_check host/vllm/test_vllm_support "
        "host/vllm/test_vllm_take_back host/vllm/test_vllm_timing host/vllm/test_vllm_weights "
        "models/test_models models/test_size scripts/test_model_asset tools/test_bench tools/test_bench_quality "
        "tools/test_calibrate tools/test_doctor_reach"
    ).split(),
    (
        "e2e/test_demo e2e/test_vllm_cache e2e/test_vllm_calibrated e2e/test_vllm_cold e2e/test_vllm_disaggregation "
        "e2e/test_vllm_events e2e/test_vllm_groups e2e/test_vllm_hints e2e/test_vllm_in_step "
        "e2e/test_vllm_new_weights e2e/test_vllm_pages e2e/test_vllm_preemption e2e/test_vllm_ranks "
        "e2e/test_vllm_serve e2e/test_vllm_start e2e/test_whole_stack"
    ).split(),
    "deploy/test_install deploy/test_storage_node".split(),
)
APART: Final = ("native/test_build",)
LONGEST: Final = (
    "failures/test_failures pool/test_conformance pool/test_cold_tier dataplane/sources/resp/test_cluster "
    "storage/test_client_memory "
    "simulation/test_seeds storage/test_many_keys host/test_delivery "
    "pool/volume/test_volume_crash failures/test_crash_loop storage/test_object_storage storage/test_lifecycle "
    "storage/test_tls dataplane/sources/test_conformance e2e/test_disaggregation_faults"
).split()
"""Further files that take more than half a minute, the longest first."""


def file_of(nodeid: str) -> str:
    """Return the name of a test's file within ``tests``, without its suffix."""
    return nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def unit_of(nodeid: str) -> str:
    """Return the unit of work of a test."""
    file = file_of(nodeid)
    lines = [f"line {number}" for number, line in enumerate(LINES) if file in line]
    return lines[0] if lines else nodeid if file in APART else file


def processes() -> int:
    """Return the number of processes: one more than cores, because each waits at times."""
    return min(len(os.sched_getaffinity(0)) + 1, PROCESSES_MAX)


def begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Put the longest units first, so that none runs alone at the end."""
    order = [file for line in LINES for file in line] + [*APART, *LONGEST]
    rank = {file: number for number, file in enumerate(order)}
    items.sort(key=lambda item: rank.get(file_of(item.nodeid), len(order)))


class SideBySide(LoadFileScheduling):
    """Schedules units in the order of their first tests."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
