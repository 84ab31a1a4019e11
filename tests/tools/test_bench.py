"""Every benchmark in a small run: its table, its data, and its own checks of the transferred bytes."""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from machine import NEVER_S
from preloaded import Preloaded

from shadowserve.errors import ShadowServeError
from shadowserve_tools import main
from shadowserve_tools.bench import BENCHES
from shadowserve_tools.bench.interference import rounds_until_narrow
from shadowserve_tools.bench.parts import kernels
from shadowserve_tools.bench.parts.kernels import Run, nothing, speeds_in_turns
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.demo_model import OWN_MODEL
from shadowserve_tools.report import Report, half_width, outcome, verdict
from shadowserve_tools.simulate.fleet import checked

NO_PEERS = "--peers-python /nonexistent/python"
TINY = "--layers 2 --hidden 64 --heads 2 --head-size 32"
SMALL = {
    "fetch": f"--chunks 1 --repeats 1 {NO_PEERS}",
    "pipeline": "--chunks 4 --layers 1 --long 4 --long-layers 1 --repeats 1",
    "stages": "--largest 64 --mebibytes 1 --repeats 1",
    "codecs": "--layers 1 --mebibytes 1 --repeats 1",
    "storage": "--sizes 1,2 --connections 1 --mebibytes 8 --repeats 1 --engines memory,pool",
    "commands": "--count 500 --repeats 1",
    # Over Ceph, and for 'layers', it takes half a minute longer.
    "aggregate": "--chunks 16,256 --tokens 256 --layers 32 --repeats 1 --below memory",
    "schedule": "--mixes A,C --policies stall_opt --rate 0.2 --time 0.01 --repeats 1",
    "nodes": "--hosts 1 --documents 2 --chunks 4 --long 16 --fetched 8 --requests 1 --repeats 1 --troubles 1 "
    "--phase 0.2 --settle 0.2",
    "index": "--objects 50000 --repeats 1",
    "link": f"--rate 4 --chunks-per-gbit 0.25 --repeats 1 {NO_PEERS}",
    "lmcache": f"--chunks 1 --repeats 1 {NO_PEERS}",
    "control": "--requests 4 --prompt-chunks 2",
    "memory": "--longest 8192 --repeats 1",
    "tiers": f"--chunks 3 --repeats 1 {NO_PEERS}",
    "pages": "--layers 2 --repeats 1",
    "isolation": "--samples 100",
    "events": "--stores 8000 --repeats 1",
    "serving": f"{TINY} --prompt-chunks 2 --documents 2 --output-tokens 4 --rate 5 --link 4 --fills 3 --repeats 1 "
    f"--rounds 1 {NO_PEERS}",
    "agents": f"{TINY} --agents 2 --turns 4 --system-tokens 256 --turn-tokens 200 --output-tokens 2 --repeats 1 "
    f"--pause 0 {NO_PEERS}",
    "sglang": f"{TINY} --prompt-chunks 2 --repeats 1 --sglang-python /nonexistent/python",
    "recovery": "--objects 2000 --pairs 1",
    "pool": "--chunks 8 --chunk-kib 256 --caps 2000,1000 --memory 500 --repeats 1",
    "interference": f"{TINY} --prompt-chunks 1 --documents 1 --lengths 4 --requests 2 --repeats 1 --rounds 3 "
    "--rounds-max 3 --phase-steps 2",
    "budget": f"{TINY} --prompt-chunks 1 --documents 1 --read-chunks 8 --chunk-kib 256 --turns 1 --learning 1 "
    "--rounds 6 --rounds-max 6 --phase-steps 2 --kinds reads,near_lossless,pages",
    "ablation": f"{TINY} --prompt-chunks 2 --documents 1 --output-tokens 4 --requests 2 --unloaded 1 --repeats 1",
    "disaggregation": f"{TINY} --prompt-chunks 2 --documents 2 --output-tokens 4",
    "layers": f"{TINY} --layers 3 --prompt 600:1 --prompt 700:2 --repeats 1 --no-s3 --beside 0",
    "auto": f"{TINY} --layers 3 --prompt 600 --link 4 --learning 1 --repeats 1",
    "decide": f"{TINY} --prompt 300 --prompt 600 --link 4 --repeats 1",
    "queue": f"{TINY} --prompt 600 --output-tokens 2 --repeats 1",
    "oversubscription": f"{TINY} --prompt-tokens 30 --output-tokens 100 --fit 4 --demand 1 --demand 2 --repeats 1",
    "quality": f"--model '{OWN_MODEL}' --context 512 --scored 64 --windows 1 --prompts 0",
    "gpu": "--cpu --layers 1 --chunks 1 --batch 2 --hidden 64 --steps 3 --kv-rate 1 --repeats 1",
}
"""Options of a small run. The last of two equal ones counts."""

CONSTANTS = {
    "events": {"_MEMORY": "2 MiB", "_FILLING": 10_000, "_SMALL_LOG": 128 << 10, "_OVERFLOWING": 10_000},
    "interference": {"FETCH_LAYERS": 1, "OFTEN": 2},
}
"""Constants of benchmarks that have no options: smaller ones for the small run."""


def may_link() -> bool:
    try:
        with linked():
            return True
    except ShadowServeError:
        return False


OTHERS_INSTALL = {"agents", "fetch", "link", "lmcache", "serving", "tiers"}
"""Benchmarks whose output lists peers that are not installed."""
LACKING = {
    *(() if may_link() else ("link", "lmcache", "layers", "nodes", "auto", "decide", "queue")),
    *(() if shutil.which("redis-server") and shutil.which("redis-benchmark") else ("commands",)),
}


BY_NIGHT = {
    *("ablation", "auto", "decide", "disaggregation", "oversubscription", "queue", "budget"),
    *("agents", "control", "link", "lmcache", "memory", "quality", "sglang", "tiers"),
}
"""A quarter of a minute each, or more. 'serving', 'layers', 'interference' and 'fetch' cover most of their code."""
if os.environ.get("TEST_NIGHTLY"):
    BY_NIGHT = set()


def run(tmp_path: Path, name: str) -> dict[str, Any]:
    file, plot = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
    options = [*shlex.split(SMALL[name]), "--json", str(file), "--plot", str(plot)]
    result = CliRunner().invoke(main, ["bench", name, *options])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(file.read_text())
    assert all(chart["title"] in plot.read_text() for chart in content["charts"])
    return content


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
@pytest.mark.parametrize("name", sorted(set(SMALL) - LACKING - BY_NIGHT))
def test_a_small_run_writes_its_table_data_and_plot(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Preloaded)
    monkeypatch.setattr(kernels, "PASS_S", 1e-9)  # one call is enough where no speed counts
    for constant, value in CONSTANTS.get(name, {}).items():
        monkeypatch.setattr(f"shadowserve_tools.bench.{name}.{constant}", value)
    content = run(tmp_path, name)
    assert content["bench"] == name
    assert content["rows"] and all(set(row) <= set(content["columns"]) for row in content["rows"])
    assert content["charts"] and content["machine"]["cores"] >= 1 and content["sources"]
    assert content["ratios"].keys() == content["goals"].keys() == content["spread"].keys() != set()
    # Noise makes differences of times negative and a learned cost 0, and few records fit memory that was freed before.
    for ratio, value in content["ratios"].items():
        may_be_zero = content["goals"][ratio] == "exactly 0" or "cost_for_each" in ratio or "resident_bytes" in ratio
        assert math.isfinite(value) and (value != 0 or may_be_zero), ratio
        assert value == 0 or content["goals"][ratio] != "exactly 0", ratio
    if name == "nodes":  # too short to be predicted, but the model takes it
        assert [row["nodes"] for row in checked(content).rows] == [1, 2, 4]
    if name == "budget":
        slowdowns = {ratio for ratio in content["ratios"] if ratio.endswith("decode_step_slowdown")}
        assert slowdowns == {
            "near_lossless_decode_step_slowdown",
            "pages_decode_step_slowdown",
        }  # of the kinds asked for
    notes = {row.get("note") for row in content["rows"]}
    assert ("not installed (scripts/setup-peers)" in notes) == (name in OTHERS_INSTALL)


def test_rounds_end_when_intervals_are_narrow_or_with_the_time_but_not_before_the_least() -> None:
    wide, narrow = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [0.1] * 6
    assert len(list(rounds_until_narrow(3, 9, [narrow, wide], NEVER_S))) == 9
    assert len(list(rounds_until_narrow(3, 9, [narrow, wide], 0))) == 3
    assert len(list(rounds_until_narrow(3, 9, [narrow, narrow], NEVER_S))) == 3


def test_every_benchmark_explains_its_method_without_measuring() -> None:
    assert set(BENCHES) == set(SMALL)
    for name in BENCHES:
        result = CliRunner().invoke(main, ["bench", name, "--explain"])
        assert result.exit_code == 0 and "Prediction" in result.output, result.output


def test_link_without_rights_names_what_it_needs() -> None:
    command = [sys.executable, "-m", "shadowserve_tools", "bench", "link", *shlex.split(SMALL["link"])]
    if may_link():
        command = ["setpriv", "--bounding-set=-sys_admin,-net_admin", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 1
    assert "cannot make a network namespace" in done.stderr and "CAP_NET_ADMIN" in done.stderr
    assert "unshare --user" in done.stderr and "Traceback" not in done.stderr


def test_gpu_without_a_gpu_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "gpu"])
    assert result.exit_code == 1
    assert "bench gpu needs a GPU" in result.output and "--cpu" in result.output


def test_an_unknown_plot_format_is_refused_before_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "fetch", "--plot", str(tmp_path / "plot.jpeg")])
    assert result.exit_code == 2
    assert "plot.jpeg ends neither in .png nor in .svg" in result.output


def test_half_width_is_that_of_the_smallest_95_percent_interval() -> None:
    # With ten values, the median is between the second and the ninth with 97.9 %, and between the third and the eighth
    # with 89.1 %.
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
def test_a_goal_in_words_is_evaluated(value: float, goal: str, reached: bool | None) -> None:
    assert verdict(value, goal) is reached


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "missed"), (1.6, "missed; limit 1.6"), (1.25, "out of reach; limit 1.25")],
)
def test_a_goal_beyond_its_limit_is_out_of_reach(limit: float | None, words: str) -> None:
    assert outcome(1.2, "at least 1.5", limit) == words
    assert outcome(1.6, "at least 1.5", limit) == "reached"
    report = Report("tiers", [])
    report.ratio("gain", [1.1, 1.2, 1.3], "at least 1.5", [limit] if limit else [])
    assert report.data()["limits"] == ({"gain": limit} if limit else {})


def test_turns_alternate_in_order() -> None:
    order = []

    def run(name: str) -> Run:
        def work() -> None:
            sum(range(100_000))
            if order[-1:] != [name]:
                order.append(name)

        return Run(1, work, nothing)

    speeds = speeds_in_turns([run("one"), run("other")], repeats=2)
    assert [len(own) for own in speeds] == [2, 2]
    assert order == ["one", "other", "one", "other"]  # the second run of three is in reverse order
