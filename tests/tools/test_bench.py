"""Every benchmark runs, small, so that none rots: its table, its data, and its own checks of what it moved."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from machine import NEVER_S
from preloaded import Preloaded

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve_tools import main, provenance
from shadowserve_tools.bench.parts.disks import Disks
from shadowserve_tools.bench.parts.kernels import Run, in_turns, nothing
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.report import Report, half_width, outcome, verdict

NO_PEERS = ["--peers-python", "/nonexistent/python"]
SMALL = {
    "fetch": ["--chunks", "1", "--repeats", "1", *NO_PEERS],
    "pipeline": ["--chunks", "4", "--layers", "1", "--long", "4", "--long-layers", "1", "--repeats", "1"],
    "stages": ["--largest", "64", "--mebibytes", "1", "--repeats", "1"],
    "codecs": ["--layers", "1", "--mebibytes", "1", "--repeats", "1"],
    "storage": [
        *("--sizes", "1,2", "--connections", "1", "--mebibytes", "8", "--repeats", "1"),
        *("--engines", "memory,pool"),
    ],
    "commands": ["--count", "500", "--repeats", "1"],
    "aggregate": [
        *("--chunks", "16,256", "--tokens", "256", "--layers", "2", "--repeats", "1"),
        *("--below", "memory"),  # over Ceph, and in 'layers', it takes half a minute more
    ],
    "schedule": [
        *("--mixes", "A,C", "--policies", "stall_opt", "--rate", "0.2", "--time", "0.01", "--repeats", "1"),
    ],
    "nodes": ["--hosts", "1", "--prefixes", "2", "--chunks", "2", "--repeats", "1", "--phase", "0.2"],
    "index": ["--objects", "50000", "--repeats", "1"],
    "link": ["--rate", "4", "--chunks-per-gbit", "0.25", "--repeats", "1", *NO_PEERS],
    "control": ["--requests", "4", "--prompt-chunks", "2"],
    "memory": [],
    "tiers": ["--chunks", "3", "--repeats", "1", *NO_PEERS],
    "pages": ["--layers", "2", "--repeats", "1"],
    "isolation": ["--samples", "100"],
    "serving": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-chunks", "2"),
        *("--documents", "2", "--output-tokens", "4", "--rate", "5", "--link", "4", "--fills", "3"),
        *("--repeats", "1", "--rounds", "1"),
        *NO_PEERS,
    ],
    "recovery": ["--objects", "2000", "--pairs", "1"],
    "pool": ["--chunks", "8", "--chunk-kib", "256", "--caps", "80,40", "--memory", "20", "--repeats", "1"],
    "interference": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-chunks", "1"),
        *("--documents", "1", "--lengths", "4", "--requests", "2", "--repeats", "1", "--rounds", "3"),
        *("--rounds-max", "3", "--phase-steps", "2"),
    ],
    "budget": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-chunks", "1"),
        *("--documents", "1", "--read-chunks", "8", "--chunk-kib", "256", "--turns", "1", "--learning", "1"),
        *("--rounds", "6", "--rounds-max", "6", "--phase-steps", "2"),
    ],
    "ablation": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-chunks", "2"),
        *("--documents", "1", "--output-tokens", "4", "--requests", "2", "--unloaded", "1", "--repeats", "1"),
    ],
    "disaggregation": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-chunks", "2"),
        *("--documents", "2", "--output-tokens", "4"),
    ],
    "layers": [
        *("--layers", "3", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt", "600:1"),
        *("--prompt", "700:2", "--repeats", "1", "--no-s3"),
    ],
    "decide": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt", "300"),
        *("--prompt", "600", "--link", "4", "--repeats", "1"),
    ],
    "queue": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt", "600"),
        *("--output-tokens", "2", "--repeats", "1"),
    ],
    "oversubscription": [
        *("--layers", "2", "--hidden", "64", "--heads", "2", "--head-size", "32", "--prompt-tokens", "30"),
        *("--output-tokens", "100", "--fit", "4", "--demand", "1", "--demand", "2", "--repeats", "1"),
    ],
    "gpu": [
        *("--cpu", "--layers", "1", "--chunks", "1", "--batch", "2", "--hidden", "64", "--steps", "3"),
        *("--kv-rate", "1", "--repeats", "1"),
    ],
}
PARTS = ("pool", "passthrough")
OF_CAPPED_DEVICES = (
    *("organizer_error", "orchestration_share_uncapped"),
    *(f"{part}_only_over_full_uncapped" for part in PARTS),
)
REDIS_RATIOS = ("cpu_gain_over_redis", "cpu_gain_over_redis_pool")


def may_cap() -> bool:
    with tempfile.TemporaryDirectory() as folder, Disks(Path(folder)) as disks:
        return not disks.why_not


def may_link() -> bool:
    try:
        with linked():
            return True
    except ShadowServeError:
        return False


RATIOS = {
    "fetch": {
        "cpu_over_best_raw_peer",
        "throughput_over_best_raw_peer",
        "gb_per_cpu_s_over_naive",
        "fetch_over_naive",
        "cpu_over_naive",
        "cpu_over_uncompressed",
        "throughput_over_uncompressed",
        "stored_over_raw",
        "lossless_cpu_over_best_raw_peer",
        "lossless_throughput_over_best_raw_peer",
        "lossless_cpu_over_uncompressed",
        "lossless_throughput_over_uncompressed",
        "lossless_stored_over_raw",
    },
    "tiers": {"ssd_over_limit", "mixed_over_sum", "mixed_over_divided", "memory_busy", "mixed_busy"},
    "pages": {
        *("control_growth", "control_cpu_growth", "pages_over_compressed", "pages_cpu_over_compressed"),
        *("vectored_over_page_by_page", "vectored_over_page_by_page_time", "vectored_over_one_by_one_time"),
    },
    "pipeline": {
        "over_ideal_one",
        "over_ideal_many",
        "over_ideal_one_apart",
        "over_ideal_many_apart",
        "over_ideal_separate",
        "linear_growth",
    },
    "stages": {"dequantize_over_memcpy", "fused_over_memcpy", "fused_over_separate", "net_over_plain_socket"},
    "codecs": {
        "kvrans_over_zstd",
        "kvrans_over_memcpy",
        "kvrans_bytes_over_deflate",
        "kvrans_encode_GB_per_s",
        "kvrans_real_over_made_up",
        "deflate_over_zlib_numpy",
        "deflate_encode_GB_per_s",
        "dequantize_over_memcpy",
        "lossless_over_memcpy",
        "lossless_over_zstd",
        "lossless_encode_GB_per_s",
        *(f"lossless_float32_over_{other}" for other in ("memcpy", "bfloat16", "zstd")),
        *(f"lossless_float8_e4m3_over_{other}" for other in ("memcpy", "bfloat16", "zstd")),
        *(["kvrans_avx2_over_zstd", "lossless_avx2_over_zstd"] if native.isa_available(native.Isa.AVX2) else []),
    },
    "aggregate": {
        *(
            f"{ratio}_{size}"
            for ratio in ("aggregate_over_single", "aggregate_over_ahead", "cpu_over_getrange")
            for size in (16, 256)
        ),
        "requests_most_over_fewest",
    },
    "nodes": {"two_over_one", "failed_requests", "wrong_bytes"},
    "schedule": {
        f"equal_over_{policy}_{mix}" for policy in ("shortest", "calibrated", "calibrated_handed_on") for mix in "AC"
    },
    "storage": {
        f"{verb}_{ratio}"
        for verb in ("get", "getrange")
        for ratio in (
            *("over_socket_floor", "over_socket_floor_pool"),
            "cpu_gain_over_memory_pool",
            *(REDIS_RATIOS if shutil.which("redis-server") else ()),
        )
    },
    "commands": {"set_over_redis", "get_over_redis"},
    "index": {
        "resident_bytes_each",
        "counted_bytes_each",
        "find_us_in_c",
        "find_us_from_python",
        "recovery_s_per_million",
        "step_us",
    },
    "link": {
        *("lossless_over_raw_peers_4", "lossless_raw_over_stored"),
        *("over_raw_peers_4", "over_compressing_peers_4", "raw_over_stored"),
    },
    "control": {
        "iteration_over_0.2_ms",
        "iteration_of_three_groups_over_0.4_ms",
        "lookup_over_20_ms",
        "lookup_of_three_groups_over_20_ms",
        "lookup_round_trips",
        "lookup_of_three_groups_commands",
        "queue_step_ms",
    },
    "memory": {"resident_over_allowed"},
    "isolation": {"guess_beyond_chance", "own_guess_beyond_chance"},
    "recovery": {"seconds_per_million_objects", "seconds_per_million_named_objects"},
    "pool": {
        "aggregate_over_sum",
        "devices_over_sum",
        "placement_error",
        "orchestration_share",
        "control_share",
        "cpu_gain_over_filesystem",
        "pool_only_over_full",
        "passthrough_only_over_full",
        *(OF_CAPPED_DEVICES if may_cap() else ()),
    },
    "interference": {
        "decode_step_slowdown_in_engine",
        "decode_step_slowdown_by_spinning",
        "decode_step_slowdown_by_copying",
        "decode_step_slowdown_by_writing",
        *(
            f"{stored}decode_step_slowdown{what}"
            for stored in ("lossless_", "")
            for what in ("", "_half_width", "_in_cpu_time")
        ),
        "tpot_gain_over_in_engine",
        "ttft_gain_over_in_engine",
    },
    "budget": {
        *("mixed_over_reads_alone", "mixed_over_reads_alone_any_order"),
        *(
            f"{moved}{ratio}"
            for moved in ("", "pages_")
            for ratio in (
                *(f"decode_step_slowdown{off}{width}" for off in ("", "_off") for width in ("", "_half_width")),
                *("rate_left_GB_per_s", "rate_left_GB_per_s_half_width", "rate_off_GB_per_s", "cost_for_each_GB_per_s"),
            )
        ),
    },
    "serving": {
        "ttft_over_recompute",
        "ttft_over_recompute_arriving",
        "fill_over_off",
        "fill_over_plain",
        "fill_over_plain_idle",
        "ttft_layers_over_default",
        *(["ttft_layers_over_default_link", "fetch_over_link_4"] if may_link() else []),
    },
    "ablation": {"no_af_tpot"},
    "disaggregation": {f"disaggregation_ttft_over_{other}" for other in ("warm_hit", "hit_beside_storing", "prefill")},
    "layers": {
        f"{ratio}{of}"
        for ratio in ("chunkwise_over_layerwise", "remote_over_local", "chunkwise_over_layerwise_local")
        for of in ("", "_600")
    },
    "decide": {
        *("worst_over_better_of_both", "always_fetch_worst_over_better", "no_cache_worst_over_better"),
        *("all_over_better", "healed_with_prompt"),
    },
    "queue": {
        *("prefetched_over_resident", "prefetched_over_fetched"),
        *("ssd_prefetched_over_resident", "ssd_prefetched_over_fetched"),
    },
    "oversubscription": {
        *("throughput_2x_over_1x", "throughput_2x_over_recompute", "throughput_1x_over_off", "equal_answers"),
    },
    "gpu": {
        "scatter_over_device_copy",
        "decode_step_slowdown_by_scatter",
        "decode_step_slowdown_by_decompression",
        "decode_step_slowdown_by_shared_memory_fetches",
    },
}
LIMITS = {
    "disaggregation": {"disaggregation_ttft_over_warm_hit"},
    "interference": {"decode_step_slowdown", "tpot_gain_over_in_engine", "ttft_gain_over_in_engine"},
    "oversubscription": {"throughput_2x_over_recompute"},
    "serving": {"ttft_over_recompute"},
    "tiers": {"mixed_over_sum"},
}
"""Ratios that are told beside what nobody can do without."""
PEERS = {
    "fetch": ["LMCache, lm://", "LMCache server, Redis tuned", "Mooncake store, TCP"],
    "link": ["LMCache, lm://", "LMCache server, fp8 (lossy), Redis tuned"],
    "serving": [
        *("LMCache, CPU tier", "LMCache, Redis"),
        *("LMCache, CPU tier, shared memory", "LMCache, Redis tuned, shared memory"),
    ],
}


LACKING = {
    *(() if may_link() else ("link", "layers", "nodes", "decide", "queue")),
    *(() if shutil.which("redis-server") and shutil.which("redis-benchmark") else ("commands",)),
}


BY_NIGHT = {"ablation", "decide", "disaggregation", "oversubscription", "queue", "budget"}
"""A quarter of a minute each, or more; 'serving', 'layers' and 'interference' have what most of them stand on."""
if os.environ.get("TEST_NIGHTLY"):
    BY_NIGHT = set()


def run(tmp_path: Path, name: str) -> dict[str, Any]:
    file, plot = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
    result = CliRunner().invoke(main, ["bench", name, *SMALL[name], "--json", str(file), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(file.read_text())
    assert all(chart["title"] in plot.read_text() for chart in content["charts"])
    return content


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
@pytest.mark.parametrize("name", sorted(set(SMALL) - LACKING - BY_NIGHT))
def test_a_small_run_writes_what_it_promises(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Preloaded)
    content = run(tmp_path, name)
    assert content["bench"] == name
    assert "commit" in content and content["sources"] == provenance.digest(name)
    assert content["rows"] and all(set(row) <= set(content["columns"]) for row in content["rows"])
    assert content["charts"]
    assert content["machine"]["cores"] >= 1 and "deflate" in content["machine"]["codecs"]
    assert set(content["ratios"]) == RATIOS[name]
    assert set(content["limits"]) == LIMITS.get(name, set())
    # A step beside something else may happen to be faster than alone, and what is beside it then costs nothing.
    assert all(
        value > (-1 if "slowdown" in ratio or "cost_for_each" in ratio else 0)
        for ratio, value in content["ratios"].items()
        if not content["goals"][ratio].startswith("exactly 0")
    )
    assert all(value == 0 for ratio, value in content["ratios"].items() if content["goals"][ratio] == "exactly 0")
    rows = {row.get("system"): row for row in content["rows"]}
    for peer in PEERS.get(name, ()):
        assert rows[peer] == {"system": peer, "note": "not installed (scripts/setup-peers)"}
    if name == "pipeline" and native.isa_active() is not native.Isa.SCALAR:
        (stages, _) = content["charts"]
        assert "dequantize" not in dict(stages["series"]["together, fused"])  # in one go, as at an engine


def test_link_says_what_it_needs_where_it_may_not_make_namespaces() -> None:
    command = [sys.executable, "-m", "shadowserve_tools", "bench", "link", *SMALL["link"]]
    if may_link():
        command = ["setpriv", "--bounding-set=-sys_admin,-net_admin", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 1
    assert "cannot make a network namespace" in done.stderr and "CAP_NET_ADMIN" in done.stderr
    assert "unshare --user" in done.stderr and "Traceback" not in done.stderr


def test_gpu_says_what_it_needs_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "gpu"])
    assert result.exit_code == 1
    assert "bench gpu needs a GPU" in result.output and "--cpu" in result.output


def test_every_benchmark_has_a_small_run() -> None:
    from shadowserve_tools.bench import BENCHES

    assert set(BENCHES) == set(SMALL) == set(RATIOS)


def test_a_plot_of_another_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "fetch", "--plot", str(tmp_path / "plot.jpeg")])
    assert result.exit_code == 2
    assert "plot.jpeg ends neither in .png nor in .svg" in result.output


def test_an_interval_of_the_median_holds_it_and_no_more_than_needed() -> None:
    # Of ten values, the second to the ninth hold the median with 97.9 %, the third to the eighth with 89.1 %.
    assert half_width([9.0, 1, 8, 2, 7, 3, 6, 4, 5, 0]) == 3.5
    assert half_width([0.0] * 99 + [1000.0]) == 0
    with pytest.raises(ValueError, match="too few"):
        half_width([1.0] * 5)


@pytest.mark.parametrize(
    ("value", "goal", "reached"),
    [
        (3.0, "at least 3", True),
        (2.9, "at least 3", False),
        (0.95, "at most 0.95, tables included", True),
        (1.0, "exactly 1", True),
        (2.0, "exactly 1", False),
        (1.0, "none; the compression", None),
        (0.01, "no result: ± 0.03 is wider than 0.01; at most 0.02", None),
    ],
)
def test_a_goal_in_words_is_judged(value: float, goal: str, reached: bool | None) -> None:
    assert verdict(value, goal) is reached


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "missed"), (1.6, "missed; limit 1.6"), (1.25, "out of reach; limit 1.25")],
)
def test_a_goal_that_its_limit_misses_is_out_of_reach(limit: float | None, words: str) -> None:
    assert outcome(1.2, "at least 1.5", limit) == words
    assert outcome(1.6, "at least 1.5", limit) == "reached"
    report = Report("tiers", [])
    report.ratio("gain", [1.1, 1.2, 1.3], "at least 1.5", [limit] if limit else [])
    assert report.data()["limits"] == ({"gain": limit} if limit else {})


def test_on_a_machine_that_slows_down_what_is_timed_first_is_not_ahead() -> None:
    order = []

    def run(name: str) -> Run:
        def work() -> None:
            sum(range(100_000))
            if order[-1:] != [name]:
                order.append(name)

        return Run(1, work, nothing)

    speeds = in_turns([run("one"), run("other")], repeats=2)
    assert [len(own) for own in speeds] == [2, 2]
    assert order == ["one", "other", "one", "other"]  # the second turn of three went backwards
