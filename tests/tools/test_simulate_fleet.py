"""``shadowserve simulate fleet``: nothing is lost or invented, known results of queueing, and what trouble does."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadowserve_tools.simulate.fleet import SCENARIOS, Outcome, Setting, outcome
from shadowserve_tools.simulate.fleet_load import EVERYWHERE, Given, Prompt, Segment
from shadowserve_tools.simulate.fleet_run import Fleet

SMALL = Setting(nodes=10, engines=60, requests_per_s=0.5, records=1e6, systems=10, seconds=12, seed=1)
BARE = Given(
    node_gbit_per_s=8, tcp_share=1, engine_gbit_per_s=1e9, engine_gb=0, device_tb=0, chunk_mb=1, lookup_ms=0,
    prefill_tokens_per_s=1, first_ms=0,
)  # fmt: skip
"""A node sends a chunk in a millisecond, and nothing else takes time, but computing takes far longer."""
RATE = 1e9


def bare(nodes: int = 1, memory: float = math.inf, **changes: float) -> tuple[Fleet, Prompt]:
    """Return a fleet, and a prompt of one chunk; without ``memory``, it is in the bucket alone."""
    lasting = {"memory": memory, "device": 0.0, "bucket": math.inf}
    names = {f"node {number}": 1.0 for number in range(nodes)}
    fleet = Fleet(Given(**{**vars(BARE), **changes}), names, 1000, lasting)
    return fleet, Prompt([Segment(1, 1, 1, EVERYWHERE)], [])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {scenario: outcome(SMALL, Given(), scenario) for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bytes_that_are_asked_for_are_sent_or_given_up_and_each_request_ends(
    outcomes: dict[str, Outcome], scenario: str
) -> None:
    counts = outcomes[scenario].counts
    assert counts.asked == pytest.approx(counts.sent + counts.given_up, rel=1e-9)
    assert counts.ended == counts.requests > 0
    assert (counts.given_up > 0) == (scenario in ("lost", "rolling") or counts.late > 0)


def test_a_billion_records_take_the_same_work_as_a_million_and_miss_more(outcomes: dict[str, Outcome]) -> None:
    many = outcome(SMALL._replace(records=1e9), Given())
    few = outcomes["steady"]
    assert many.counts.requests == few.counts.requests
    assert many.counts.by_source["memory"] < few.counts.by_source["memory"]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_node_has_the_waits_of_a_shared_link(load: float) -> None:
    # M/G/1 with processor sharing: the mean time is the service time over the idle share.
    fleet, prompt = bare()
    random = np.random.default_rng(1)
    for number, at_s in enumerate(np.cumsum(random.exponential(1e-3 / load, 12_000))):
        fleet.at(float(at_s), fleet.ask, number % 1000, prompt)
    fleet.run()
    assert statistics.fmean(fleet.counts.first_token_s) == pytest.approx(1e-3 / (1 - load), rel=0.05)


def test_a_busy_link_is_never_idle() -> None:
    fleet, prompt = bare()
    for engine in range(100):
        fleet.ask(engine, prompt)
    fleet.run()
    assert fleet.now_s == pytest.approx(0.1) and sum(fleet.sent().values()) == pytest.approx(100e6)


def test_a_segment_is_read_from_the_bucket_once_however_many_ask() -> None:
    fleet, prompt = bare(memory=0)
    for engine in range(100):
        fleet.ask(engine, prompt)
    fleet.run()
    assert fleet.counts.gets == 1 and fleet.counts.by_source["bucket"] == pytest.approx(100e6)
    assert max(fleet.counts.first_token_s) == pytest.approx(0.1 + 1 / 85 + 0.1)


def test_the_bucket_limit_bounds_reads_and_late_ones_are_computed() -> None:
    fleet, _ = bare(memory=0, bucket_reads_per_s=10)
    for engine in range(100):
        fleet.ask(engine, Prompt([Segment(engine, 1, 1, EVERYWHERE)], []))
    fleet.run()
    assert fleet.counts.gets <= 51 and fleet.counts.throttled == 100 - fleet.counts.gets
    assert fleet.counts.ended == 100


def test_bytes_that_do_not_come_in_time_are_computed_ones_and_no_recovery() -> None:
    fleet, prompt = bare()
    fleet.watched = "node 0"
    fleet.stop("node 0")
    fleet.ask(0, prompt)
    fleet.at(60, lambda: None)
    fleet.run()
    assert fleet.counts.late == 1 and fleet.counts.by_source["miss"] == 1e6 == sum(fleet.counts.by_source.values())
    assert fleet.transfers == [(0.0, math.inf)]


def test_a_lost_nodes_segments_come_from_others_within_two_seconds_of_its_detection(
    outcomes: dict[str, Outcome],
) -> None:
    lost, steady = outcomes["lost"], outcomes["steady"]
    assert len(lost.sent) == len(steady.sent) - 1
    assert sum(lost.sent.values()) > 0.8 * sum(steady.sent.values())
    assert lost.recover_s is not None and lost.recover_s <= 2
    assert lost.counts.gets > steady.counts.gets


def test_a_slow_node_sheds_load_to_the_second_choices() -> None:
    # Two nodes, one with a tenth of its rate; all segments are in the memory of both.
    def sent_by_the_slow_one(factor: float) -> float:
        fleet, _ = bare(nodes=2)
        fleet.slow("node 0", factor)
        random = np.random.default_rng(3)
        for number, at_s in enumerate(np.cumsum(random.exponential(1 / 200, 1000))):
            segments = [Segment(each, each % 4096, 1, EVERYWHERE) for each in map(int, random.integers(0, 1 << 40, 4))]
            fleet.at(float(at_s), fleet.ask, number % 4, Prompt(segments, []))
        fleet.run()
        assert not fleet.counts.late
        return fleet.sent()["node 0"] / sum(fleet.sent().values())

    assert sent_by_the_slow_one(1.0) == pytest.approx(0.5, abs=0.05)
    assert 0.02 < sent_by_the_slow_one(10.0) < 0.25


def test_the_command_writes_a_row_for_each_scenario_reproducibly(tmp_path: Path, simulate: Callable[..., Any]) -> None:
    options = ["--nodes", "1,3", "--engines", "5", "--seconds", "12", "--scenario", "steady", "--scenario", "lost"]
    options += ["--plot", str(tmp_path / "plot.svg")]
    data = simulate("fleet", *options)
    assert data == simulate("fleet", *options)
    assert [(row["nodes"], row["what"]) for row in data["rows"]] == [
        (n, each) for n in (1, 3) for each in ("steady", "lost")
    ]
    for row in data["rows"]:
        assert sum(row[source] for source in ("engine", "memory", "device", "bucket", "miss")) == pytest.approx(1)
    assert {"recover_s", "hottest_over_mean"} == set(data["goals"])
    assert all({"name", "value", "source", "meaning"} <= set(row) for row in data["assumptions"])


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (0.8, 1)])
def test_a_measurement_that_the_model_does_not_predict_is_an_error(
    tmp_path: Path, simulate: Callable[..., Any], slower: float, code: int
) -> None:
    size, hosts = 10**6, 4
    load = {"prompts": [[[1, size]]], "gbit_per_s": 8 / 0.957, "idle_s": 0.0, "think_s": 0.0}
    fleet = {"nodes": ["one"], "asked": [[0] * 5] * hosts, "wall_s": 5 * hosts * size / RATE / slower}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"load": load, "fleets": [fleet]}))
    data = simulate("fleet", "--check", str(file), code=code)
    assert data["ratios"]["error_1"] == pytest.approx(1 / slower - 1 if slower == 1 else 0.25, abs=1e-6)
