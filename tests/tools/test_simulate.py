"""``shadowserve simulate``: its distance from the paper, its results in limits, and its output."""

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shadowserve_tools import main
from shadowserve_tools.simulate import objectcache
from shadowserve_tools.simulate.assumptions import Given, described
from shadowserve_tools.simulate.bluefield import COMBINATIONS
from shadowserve_tools.simulate.model import CHANGES, Design, Model, Setting, swing
from shadowserve_tools.simulate.targets import TARGETS, Target
from storage_kv.egress import ttft_s

REPOSITORY = Path(__file__).parents[2]
MODEL = Model()
DESIGNS = [Design(frozenset(each)) for each in COMBINATIONS]
LINKS = (1, 5, 10, 19, 20, 21, 25, 30, 40, 100, 1000)
QUIET = Given(network_without_dequantization_gbps=37.3, network_together_gbps=37.3)
designs = pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)


def at(bandwidth: float, **others: int) -> Setting:
    return Setting(bandwidth_gbps=bandwidth, **others)


# ---- Against the paper ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_model_matches_the_paper_or_is_a_known_miss(target: Target) -> None:
    # A target that is listed as missed but is reached must move to the other list, and the document must change.
    assert target.missed(MODEL) == target.known_miss


def test_fitted_figures_match_and_are_no_predictions() -> None:
    # 32 tasks are not 32 Gbps. The one prediction of 20.6 does not use it; the next test checks that.
    given = {value for name, value in dataclasses.asdict(Given()).items() if name != "tasks_in_flight"} - {20.6}
    for target in TARGETS:
        assert not (target.kind == "fitted" and target.known_miss)
        assert not (target.kind == "predicted" and target.paper in given), target.name
    assert sum(target.kind == "predicted" for target in TARGETS) >= 10


def test_the_network_stage_from_traffic_alone_does_not_use_its_target() -> None:
    told_otherwise = Model(dataclasses.replace(MODEL.given, network_together_gbps=25))
    said = MODEL.network_by_traffic_alone_gbps()
    assert told_otherwise.network_by_traffic_alone_gbps() == pytest.approx(said, rel=0.02)


def test_instruction_counts_are_the_measured_ones() -> None:
    counts = json.loads((REPOSITORY / "native/bench/instructions.json").read_text())["gcc-12 aarch64"]
    decode, symbols = counts["kvrans-decode neon"]
    dequantize, element_bytes = counts["dequantize-bfloat16 neon"]
    file = "shadowserve_tools/simulate/assumptions.py"
    message = f"change Given in {file}, renew docs/design/simulation.md"
    assert MODEL.given.kvrans_instructions == pytest.approx(decode / symbols, rel=0.03), message
    assert MODEL.given.dequantize_instructions == pytest.approx(dequantize / (element_bytes / 2), rel=0.03), message


# ---- Limits --------------------------------------------------------------------------------------------------------


@designs
def test_without_contention_the_network_stage_is_as_fast_as_alone(design: Design) -> None:
    quiet = Model(QUIET)
    assert quiet.network_gbps(at(40), design) == pytest.approx(37.3)
    assert MODEL.network_gbps(at(40), design) < 37.3


@designs
def test_a_link_faster_than_the_card_changes_nothing(design: Design) -> None:
    fastest = MODEL.shadowserve(at(math.inf), design)
    assert fastest == MODEL.shadowserve(at(1000), design)
    assert fastest.fetch_gbps == MODEL.network_gbps(at(40), design)


@pytest.mark.parametrize("design", [Design(), Design(frozenset({"kvrans"}))], ids=lambda design: design.name)
def test_the_first_chunk_takes_the_sum_of_stages_and_each_further_one_the_slowest(design: Design) -> None:
    stages = MODEL.stages_s(at(40), design).values()
    rest = MODEL.fitted.rest_s / 14_000 * 256
    one, two, three = (MODEL.ttft_s(at(40, prompt_tokens=256 * count), design) for count in (1, 2, 3))
    assert one == pytest.approx(rest + sum(stages))
    assert two - one == pytest.approx(rest + max(stages))
    assert three - two == pytest.approx(two - one)


def test_each_batch_fills_the_pipeline_again() -> None:
    stages = MODEL.stages_s(at(40), Design()).values()
    in_rounds = Model(dataclasses.replace(MODEL.given, buffer_mib=32))  # of one chunk
    chunks = in_rounds.ttft_s(at(40, prompt_tokens=512), Design()) - in_rounds.ttft_s(
        at(40, prompt_tokens=256), Design()
    )
    assert chunks == pytest.approx(in_rounds.fitted.rest_s / 14_000 * 256 + sum(stages), rel=1e-3)


def test_slices_as_large_as_a_chunk_without_overhead_equal_the_chunk() -> None:
    model = Model(dataclasses.replace(MODEL.given, hand_over_us=0))
    whole = Design(frozenset({"slices"}), slice_bytes=16 << 20)
    assert model.ttft_s(at(40), whole) == pytest.approx(model.ttft_s(at(40), Design()))


def test_engines_that_bypass_the_caches_do_not_gain_from_fusion() -> None:
    model = Model(dataclasses.replace(MODEL.given, cached_share=0))
    assert model.ttft_s(at(40), Design(frozenset({"fusion"}))) == model.ttft_s(at(40), Design())


def test_slow_cores_make_kvrans_the_bottleneck() -> None:
    kvrans, slow = Design(frozenset({"kvrans"})), Model(dataclasses.replace(MODEL.given, instructions_per_cycle=0.5))
    stages = slow.stages_s(at(40), kvrans)
    assert max(stages, key=stages.__getitem__) == "decode"
    assert slow.ttft_s(at(40), kvrans) > slow.ttft_s(at(40), Design())


def test_ttft_at_a_rate_of_zero_is_the_unloaded_one() -> None:
    ours, theirs = MODEL.shadowserve(at(20), rate=1e-9), MODEL.cachegen(at(20), rate=1e-9)
    assert ours.ttft_at_rate_s == pytest.approx(ours.ttft_s)
    assert theirs.ttft_at_rate_s == pytest.approx(theirs.ttft_s)
    assert MODEL.shadowserve(at(20), rate=5).ttft_at_rate_s is None


# ---- Directions ----------------------------------------------------------------------------------------------------


@designs
def test_a_faster_link_never_hurts(design: Design) -> None:
    results = [MODEL.shadowserve(at(link), design) for link in LINKS]
    theirs = [MODEL.cachegen(at(link)) for link in LINKS]
    for slower, faster in [*pairwise(results), *pairwise(theirs)]:
        assert faster.ttft_s <= slower.ttft_s + 1e-12
        assert faster.requests_per_s >= slower.requests_per_s - 1e-9


@designs
def test_longer_prompts_and_answers_take_longer(design: Design) -> None:
    prompts = [MODEL.ttft_s(at(20, prompt_tokens=each), design) for each in (1, 256, 257, 4096, 14_000, 128_000)]
    answers = [MODEL.shadowserve(at(20, output_tokens=each), design) for each in (4, 16, 64, 256, 10_000)]
    waits = [MODEL.shadowserve(at(20), design, rate=each).ttft_at_rate_s for each in (0.1, 0.5, 1.0, 1.5)]
    assert prompts == sorted(prompts)
    for shorter, longer in pairwise(answers):
        assert longer.requests_per_s <= shorter.requests_per_s + 1e-9
    assert None not in waits and waits == sorted(wait for wait in waits if wait)


def test_smaller_slices_raise_the_network_rate_and_have_an_optimum() -> None:
    sizes = [MODEL.network_gbps(at(40), Design(frozenset({"fusion", "slices"}), 4096 << each)) for each in range(10)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    assert sizes[-1] == pytest.approx(MODEL.network_gbps(at(40), Design(frozenset({"fusion"}))))
    times = [MODEL.ttft_s(at(40), Design(frozenset({"slices"}), 4096 << each)) for each in range(10)]
    assert min(times) < times[0] and min(times) < times[-1], (
        "small slices cost more transfers between stages, and large ones a longer fill"
    )


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_shortens_a_fetch_at_its_best_estimate(change: str) -> None:
    assert MODEL.ttft_s(at(40), Design(frozenset({change}))) < MODEL.ttft_s(at(40), Design())


@designs
def test_a_range_contains_the_best_estimate_and_the_corners(design: Design) -> None:
    low, high = swing(lambda model: model.ttft_s(at(40), design))
    values = [MODEL.ttft_s(at(40), design)]
    ranges = {name: its for name, its in described(Given) if its["low"] is not None}
    for mask in range(0, 1 << len(ranges), 7):  # some of the corners, spread over all of them
        ends = {name: ranges[name]["high" if mask >> bit & 1 else "low"] for bit, name in enumerate(ranges)}
        values.append(Model(Given(**ends)).ttft_s(at(40), design))
    assert low - 1e-9 <= min(values) and max(values) <= high + 1e-9


# ---- The command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_rows_assumptions_and_targets_reproducibly(simulate: Callable[..., Any]) -> None:
    data = simulate("bluefield", "--bandwidth", "10,40")
    assert data == simulate("bluefield", "--bandwidth", "10,40")
    assert len(data["rows"]) == 2 * (1 + len(COMBINATIONS))
    assert {"system", "link_Gbps", "net_Gbps", "ttft_ms", "tpot_ms", "req_per_s"} <= set(data["rows"][0])
    assert all({"name", "value", "low", "high", "source", "meaning"} <= set(row) for row in data["assumptions"])
    assert [row["name"] for row in data["targets"]] == [target.name for target in TARGETS]
    assert {row["stage"] for row in data["stages"]} == {"network", "deflate", "dequantize", "dma"}
    titles = [chart["title"].partition(",")[0] for chart in data["charts"]]
    assert titles == ["Unloaded TTFT", "Loaded TPOT", "Highest load"]
    for chart in data["charts"]:
        assert set(chart["dots"]) <= set(chart["series"]) and all(chart["series"].values())


def test_one_combination_is_shown_with_the_papers_two_systems(tmp_path: Path, simulate: Callable[..., Any]) -> None:
    plot = tmp_path / "one.svg"
    options = ("--with", "slices,fusion", "--slice-bytes", "64KiB", "--rate", "0.5", "--plot", str(plot))
    systems = [row["system"] for row in simulate("bluefield", "--bandwidth", "40", *options)["rows"]]
    assert systems == ["CacheGen-Async", "ShadowServe", "fusion + slices"]
    assert "with fusion + slices" in plot.read_text() and "paper, ShadowServe" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("bluefield --bandwidth ten", "numbers with commas"),
        ("bluefield --bandwidth nan", "0.1 to 10000"),
        ("bluefield --bandwidth 0", "0.1 to 10000"),
        ("bluefield --with fusion,magic", "magic"),
        ("bluefield --slice-bytes 4MiB", "4KiB to 2MiB"),
        ("bluefield --slice-bytes much", "64KiB"),
        ("bluefield --chunk-tokens 0", "--chunk-tokens"),
        ("objectcache --requests 8K:0.5", "table A8"),
        ("objectcache --requests 16K:0.6", "table A8"),
        ("objectcache --requests 16K", "16K:0.5"),
        ("objectcache --cap-gbps 0", "--cap-gbps"),
        ("objectcache --margin-gbps -1", "--margin-gbps"),
        ("objectcache --stored-share 0", "--stored-share"),
        ("tiers --model 8b", "--model"),
        ("tiers --workload poems", "--workload"),
        ("tiers --oversubscription 0.5", "--oversubscription"),
        ("tiers --seeds 0", "--seeds"),
        ("ssd --hit-rate 1.5", "--hit-rate"),
        ("ssd --context-tokens 0", "--context-tokens"),
        ("fleet --nodes 101", "1 to 100"),
        ("fleet --engines 0", "--engines"),
        ("fleet --scenario war", "--scenario"),
        ("fleet --set memory_gb=much", "NAME=VALUE"),
        ("fleet --set speed=1", "memory_gb"),
    ],
)
def test_an_invalid_option_of_a_simulation_is_refused(arguments: str, word: str) -> None:
    done = CliRunner().invoke(main, ["simulate", *arguments.split()])
    assert done.exit_code == 2 and word in done.output


# ---- Requests that share a link ------------------------------------------------------------------------------------


def test_a_mix_of_requests_is_reported_in_order_for_every_policy(simulate: Callable[..., Any]) -> None:
    mix = [("64K", 0.875), ("4K", 0.5), ("64K", 0.875), ("32K", 0.5)]
    asked = ",".join(f"{context}:{share}" for context, share in mix)
    found = simulate("objectcache", "--requests", asked, "--cap-gbps", "50", "--margin-gbps", "5")
    assert set(found["policies"]) == {"equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt"}
    for its in found["policies"].values():
        rows = its["requests"]
        assert [(row["context"], row["hit_rate"]) for row in rows] == mix
        assert all(set(row) == {"context", "hit_rate", "rate_gbps", "ttft_ms"} for row in rows)
        assert rows[0] == rows[2]
        assert its["total_ttft_ms"] == pytest.approx(sum(row["ttft_ms"] for row in rows))


def test_compressed_records_are_faster_by_their_share_of_the_bytes(simulate: Callable[..., Any]) -> None:
    found = simulate("objectcache", "--stored-share", "0.5")
    assert found["stored"]["share"] == 0.5
    for policy, its in found["policies"].items():
        assert found["stored"]["policies"][policy]["total_ttft_ms"] < its["total_ttft_ms"]
    # Half of the bytes over half of the link takes the same time as all bytes over the whole link.
    half = simulate("objectcache", "--stored-share", "0.5", "--cap-gbps", "40", "--margin-gbps", "2.5")
    halves = half["stored"]["policies"]["calibrated_stall_opt"]["total_ttft_ms"]
    assert halves == pytest.approx(found["policies"]["calibrated_stall_opt"]["total_ttft_ms"])


@pytest.mark.parametrize("cap_gbps", [5.0, 60.0])
def test_redistributed_rates_are_equation_3_if_all_requests_end_together(cap_gbps: float) -> None:
    request = objectcache.Request("16K", 0.875)
    demand = request.demand()
    for count in (1, 3):
        added = objectcache.handed_on([request] * count, cap_gbps, 0.0, "equal")
        alone_s = objectcache.LAYERS * demand.window_s
        wanted = ttft_s(demand, 1e9 * cap_gbps / count, objectcache.LAYERS) - alone_s
        assert added == pytest.approx([wanted] * count, rel=1e-6)


def test_redistributing_rates_delays_no_request_and_favours_short_ones() -> None:
    mix = objectcache.WORKLOAD_A
    held = objectcache.outcome(mix, 50.0, 0.0)["equal"]["requests"]
    alone_ms = [objectcache.TABLE_A8[request] for request in mix]
    added = objectcache.handed_on(mix, 50.0, 0.0, "equal")
    for row, alone, now_s in zip(held, alone_ms, added, strict=True):
        assert 1e3 * now_s <= (row["ttft_ms"] - alone) * (1 + 1e-6)
    assert sum(objectcache.handed_on(mix, 50.0, 5.0, "shortest_remaining")) < 0.8 * sum(added)
