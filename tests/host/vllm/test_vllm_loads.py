"""Kinds of loads in both halves of the connector: beside other requests, within the step, or by layers."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_support import (
    CHUNK,
    TOKENS,
    Request,
    arrive,
    full,
    groups_of,
    keys,
    kv_cache_manager,
    matched,
    report,
    step,
    window,
)
from scripted import ScriptedDataPlane

from host_control.config import HostConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def worker_of(groups: Any, **config: Any) -> Any:
    """Return the worker half without a data plane: each load ends immediately, without any chunk."""
    from host_control.vllm.shards import Rank
    from host_control.vllm.worker_side import WorkerSide

    worker = WorkerSide(
        HostConfig(**config),
        None,
        None,
        groups,
        Rank(0, 1),
        fetch=True,
        store=True,
        problem="",
        logger=logging.getLogger("test"),
    )
    worker._shards.parts = {0: [SimpleNamespace(group=group) for group in groups.groups]}
    worker._shards.shapes = {0: [SimpleNamespace(namespace=bytes(32)) for _ in groups.groups]}
    return worker


def test_a_load_of_two_groups_with_asynchronous_fetch_false_ends_for_vllm(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """Symptom: the request stays in WAITING_FOR_REMOTE_KVS for ever."""
    specs = full(), window(CHUNK)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    side, worker = make_side(groups=groups, asynchronous_fetch=False), worker_of(groups, asynchronous_fetch=False)
    for group in range(len(specs)):
        plane.records.update(dict.fromkeys(keys(0, TOKENS, group), b""))
    request = arrive(side, plane, TOKENS)
    side.allocated(request, [list(range(100, 140))] * 2, matched(side, request))
    worker.exchange(side.step(step()))
    finished, failed = worker.take_finished()
    assert (side.waits(request), finished, failed) == (True, {"r"}, {"r"})
    side.worker_output(finished, worker.take_report() or report())
    assert not side._loads
    assert side.counts.take().data["slower_paths/several_groups"] == 1


def test_pages_are_renewed_before_vllm_learns_of_a_layerwise_load_that_ended_without_an_answer(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    """Symptom: vLLM computes into pages that a device may still write to, because the load ended after the renewal."""
    from host_control.vllm.metadata import ShadowServeMetadata

    side, worker = make_side(layer_order=True), worker_of(groups_of(full()), layer_order=True)
    side.ways.layerwise_chunks = 8
    operation = load(side, arrive(side, plane, TOKENS, stored=4, status=None))
    assert operation.layerwise
    events: list[str] = []
    worker._pages = worker._loads.pages = SimpleNamespace(renew=lambda: events.append("renewed"))
    ended = worker._loads._failed_load(operation, "unreachable")
    outcomes = [[], [ended]]

    worker._loads.managers[0] = SimpleNamespace(
        exchange=lambda *arguments: outcomes.pop(0), wait=lambda requests: events.append("ended"), idle=False
    )
    worker.exchange(ShadowServeMetadata(loads=[operation]))
    worker.take_finished()
    assert worker.take_report().loaded == {operation.request_id: 0}
    assert events == ["ended", "renewed"]


SEEDED = SimpleNamespace(seed=1, thinking_token_budget=None)
BUDGET = SimpleNamespace(seed=None, thinking_token_budget=10)
PLAIN = SimpleNamespace(seed=None, thinking_token_budget=None)


def load(side: Any, request: Request) -> Any:
    side.allocated(request, [list(range(100, 140))], matched(side, request))
    (operation,) = side.step(step()).loads
    return operation


@pytest.mark.parametrize(
    ("sampling", "own", "reason"),
    [(SEEDED, False, "seed"), (BUDGET, False, "sampling_state"), (PLAIN, True, "sampling_state"), (PLAIN, False, "")],
)
@pytest.mark.parametrize("asked", ["layer_order", "asynchronous_fetch"])
def test_no_step_computes_on_a_load_whose_request_has_state_that_vllm_does_not_set_back(
    make_side: Any, plane: ScriptedDataPlane, caplog: Any, asked: str, sampling: Any, own: bool, reason: str
) -> None:
    side = make_side(**{asked: asked == "layer_order"})
    side.ways.layerwise_chunks = 8 if asked == "layer_order" else 0
    side.ways._sampling_state = own
    for name in ("r", "s"):
        request = arrive(side, plane, TOKENS, stored=4, name=name, sampling_params=sampling, status=None)
        operation = load(side, request)
        assert (operation.layerwise or operation.in_step) == (not reason) == (not side.waits(request))
        side.worker_output({name}, report({name: 4}))
        side.finished(request)
    counted = {name: count for name, count in side.counts.take().data.items() if name.startswith("slower_paths")}
    assert counted == ({f"slower_paths/{reason}": 2} if reason else {})
    lines = [line for line in caplog.messages if "slower path" in line]
    assert len(lines) == bool(reason) and all(f"({reason})" in line for line in lines), "once for each reason"


def test_each_load_that_layer_order_leaves_out_is_counted_with_its_reason(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = make_side(layer_order=True)
    side.ways.layerwise_chunks = 3

    def counted() -> dict[str, float]:
        taken = side.counts.take().data
        return {name: count for name, count in taken.items() if name.startswith("slower_paths")}

    short = arrive(side, plane, TOKENS, stored=3, name="short", status=None)
    assert load(side, short).layerwise and counted() == {}
    side.worker_output(None, report({"short": 3}))
    side.finished(short)
    plane.records.clear()
    long = arrive(side, plane, TOKENS, stored=4, name="long", status=None)
    assert not load(side, long).layerwise and counted() == {"slower_paths/beyond_fetch_buffer": 1}
    other = arrive(side, plane, [1, *TOKENS], stored=3, name="beside", status=None)
    assert not load(side, other).layerwise and counted() == {"slower_paths/other_requests": 1}


@pytest.mark.parametrize(
    ("pending", "other_records", "alone", "reason"),
    [
        (True, "shard_layout", False, "pending_chunks"),
        (False, "shard_layout", False, "shard_layout"),
        (False, "preempted", True, "preempted"),
        (False, "", False, "other_requests"),
        (False, "", True, ""),
    ],
)
def test_why_a_load_may_not_go_by_layers(
    make_side: Any, pending: bool, other_records: str, alone: bool, reason: str
) -> None:
    ways = make_side(layer_order=True).ways
    request = Request("r", TOKENS)
    assert ways.not_by_layers(request, pending=pending, other_records=other_records, alone=alone) == reason


def test_each_reason_has_a_row_in_the_document() -> None:
    from host_control.vllm import loads, paging

    document = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "combinations.md").read_text()
    missing = [reason for reason in (*loads._DETAILS, *paging._OBSTACLES) if f"| `{reason}` |" not in document]
    assert not missing
