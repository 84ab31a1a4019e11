"""``shadowserve simulate fleet``: engines over several storage nodes and one bucket, also when nodes fail."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np

from shadowserve.keys import SEGMENT_CHUNKS
from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.indexing import MERGED
from shadowserve_tools.bench.parts.options import choice, numbers_option, real, whole
from shadowserve_tools.charts import Chart
from shadowserve_tools.report import Output, Report, output_options, tracked
from shadowserve_tools.simulate.assumptions import rows
from shadowserve_tools.simulate.fleet_load import EVERYWHERE, Given, Prompt, Prompts, Segment
from shadowserve_tools.simulate.fleet_run import DETECTED_S, RANGE_BYTES, SOURCES, Counts, Fleet

COLUMNS: Final = (
    "what", "nodes", "requests", "hottest_over_mean", "link_use", *SOURCES, "p50_ms",
    "p90_ms", "p99_ms", "late", "bucket_per_s", "dollars_per_month", "index_GB_per_node", "recover_s",
)  # fmt: skip
_MONTH_S: Final = 365.25 / 12 * 86_400
_WARM_UP_SHARE: Final = 0.25
_RESTART_S: Final = 2.0
_WINDOW_S: Final = 0.5
_OBJECT_BYTES: Final = int(S3Config.model_fields["object_bytes"].default)
_INDEX_TTL_S: Final[float] = S3Config.model_fields["index_ttl_s"].default
_LISTED: Final = 1000
"""Objects in one answer of the bucket to LIST."""
_INDEXED: Final = 16
_INDEX_S: Final = 3600.0
"""A node writes an index object of a partition for this many new objects, or after this time."""
_INTERVALS: Final = 60
"""Intervals between two lists of a partition."""
_TOLERANCE: Final = 0.1


class Setting(NamedTuple):
    """Size of a fleet and its load."""

    nodes: int
    engines: int
    requests_per_s: float
    records: float
    systems: int
    seconds: float
    seed: int


def _lost(fleet: Fleet, names: Sequence[str], begin_s: float, _end_s: float) -> None:
    fleet.watched = names[0]
    fleet.at(begin_s, fleet.stop, names[0])
    fleet.at(begin_s + DETECTED_S, fleet.detect, names[0])


def _slow(fleet: Fleet, names: Sequence[str], begin_s: float, _end_s: float) -> None:
    fleet.at(begin_s, fleet.slow, names[0], 10.0)


def _rolling(fleet: Fleet, names: Sequence[str], begin_s: float, end_s: float) -> None:
    for number, name in enumerate(names):
        stops_s = begin_s + number * _RESTART_S
        if stops_s + _RESTART_S < end_s:  # a stopped process closes its connections: data planes know at once
            fleet.at(stops_s, fleet.stop, name)
            fleet.at(stops_s, fleet.detect, name)
            fleet.at(stops_s + _RESTART_S, fleet.start, name)


SCENARIOS: Final[dict[str, Callable[[Fleet, Sequence[str], float, float], None]]] = {
    "steady": lambda fleet, names, begin_s, end_s: None,
    "lost": _lost,
    "slow": _slow,
    "rolling": _rolling,
    "storm": lambda fleet, names, begin_s, end_s: None,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run: its counts, bytes that each node sent while counting, and seconds until recovery."""

    counts: Counts
    sent: Mapping[str, float]
    counted_s: float
    recover_s: float | None = None

    @property
    def hottest_over_mean(self) -> float:
        return max(self.sent.values()) / statistics.fmean(self.sent.values())

    def first_token_ms(self, share: float) -> float:
        """Return the time to first token that a share of the requests does not exceed."""
        return 1e3 * float(np.quantile(self.counts.first_token_s, share))


def outcome(setting: Setting, its: Given, scenario: str = "steady") -> Outcome:
    """Run one scenario. The first quarter of the time is not counted; trouble begins with the second."""
    random = np.random.default_rng(setting.seed)
    prompts = Prompts(its, setting.records, setting.systems, random)
    names = [f"10.0.{number // 250}.{number % 250}:6380" for number in range(setting.nodes)]
    capacities = {"memory": its.memory_gb * 1e9, "device": its.device_tb * 1e12}
    lasting = {
        tier: prompts.lasting(setting.nodes * size / (its.chunk_mb * 1e6)) if size else 0.0
        for tier, size in capacities.items()
    }
    lasting["bucket"] = prompts.lasting(its.bucket_tb * 1e12 / (its.chunk_mb * 1e6)) if its.bucket_tb else math.inf
    fleet = Fleet(its, dict.fromkeys(names, 1.0), setting.engines, lasting)
    rate = setting.engines * setting.requests_per_s
    count = round(setting.seconds * rate)
    begin_s = fleet.counting_from_s = _WARM_UP_SHARE * setting.seconds
    fleet.counting_to_s = setting.seconds
    times, of = np.cumsum(random.exponential(1 / rate, count)), random.integers(0, setting.engines, count)
    arrivals = list(zip(times.tolist(), of.tolist(), strict=True))
    if scenario == "storm":
        arrivals = sorted(arrivals + [(begin_s, engine) for engine in range(setting.engines)])
    coming = iter(arrivals)

    def arrive(engine: int) -> None:
        fleet.ask(engine, prompts.draw())
        come()

    def come() -> None:
        for at_s, engine in coming:
            fleet.at(at_s, arrive, engine)
            break

    come()
    SCENARIOS[scenario](fleet, names, begin_s, setting.seconds)
    fleet.run(begin_s)
    before = fleet.sent()
    fleet.run(setting.seconds)
    up = [name for name in names if fleet.nodes[name].up] or names
    sent = {name: max(1.0, fleet.sent()[name] - before[name]) for name in up}
    fleet.run()
    recover_s = _recover_s(fleet, begin_s + DETECTED_S, setting.seconds) if fleet.watched and len(names) > 1 else None
    return Outcome(fleet.counts, sent, setting.seconds - begin_s, recover_s)


def _recover_s(fleet: Fleet, detected_s: float, end_s: float) -> float:
    """Return the time until reads of the lost node's segments take at most twice as long as from an idle bucket.

    Reads that end without their bytes take infinitely long.
    """
    its = fleet.its
    idle_s = its.bucket_latency_ms / 1e3 + RANGE_BYTES / (its.bucket_mb_per_s * 1e6)
    for begin_s in np.arange(detected_s, end_s, _WINDOW_S):
        times = [took_s for asked_s, took_s in fleet.transfers if begin_s <= asked_s < begin_s + _WINDOW_S]
        if not times or statistics.fmean(times) <= 2 * idle_s:
            return float(begin_s - detected_s)
    return end_s - detected_s


def bucket_rates(setting: Setting, its: Given, found: Outcome) -> dict[str, float]:
    """Return the requests a second to the bucket, by kind, and dollars a month.

    Each node lists its own partitions once an hour and the news of others in each interval. Index objects are written
    for sixteen objects, or each hour, and eight are read and merged into one (shadowserve/pool/cold).
    """
    chunk_bytes = its.chunk_mb * 1e6
    object_bytes = chunk_bytes * max(1, min(SEGMENT_CHUNKS, _OBJECT_BYTES // chunk_bytes))
    stored_bytes = its.bucket_tb * 1e12 or setting.records * chunk_bytes
    new = found.counts.stored_bytes / object_bytes / found.counted_s
    pages = PARTITIONS + stored_bytes / object_bytes / _LISTED
    lists = pages / (_INTERVALS * _INDEX_TTL_S) + setting.nodes / _INDEX_TTL_S
    indexes = max(new / _INDEXED, min(new, PARTITIONS / _INDEX_S))
    merges = indexes / (MERGED - 1)
    gets, puts = found.counts.gets / found.counted_s + merges * MERGED, new + indexes + merges
    dollars = (puts + lists) * its.put_dollars + gets * its.get_dollars
    return {
        "gets_per_s": gets, "puts_per_s": puts, "lists_per_s": lists,
        "dollars_per_month": _MONTH_S * dollars + stored_bytes / 1e9 * its.month_dollars,
    }  # fmt: skip


@click.command()
@numbers_option("--nodes", "50", "Storage nodes; several numbers for a row each.", most=100)
@whole("--engines", 1000, "Engines.", most=1000)
@real("--requests-per-s", 0.5, "Requests of an engine.", 0.001, 1000)
@real("--records", 1e7, "Chunks in the bucket, of all documents.", 1000, 1e10)
@whole("--systems", 100, "Shared system prompts.", most=1_000_000)
@choice("--scenario scenarios", SCENARIOS, (), "What happens; repeatable. All by default.")
@real("--seconds", 20.0, "Simulated time.", 12, 3600)
@whole("--seed", 0, "Seed; the same seed gives the same result.", 0)
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change an assumption; repeatable. --json lists them."
)
@click.option(
    "--check", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Predict what 'bench nodes --json FILE' measured; exit code 1 if a prediction is more than a tenth off.",
)  # fmt: skip
@output_options
def fleet(
    nodes: list[int], engines: int, requests_per_s: float, records: float, systems: int, scenarios: tuple[str, ...],
    seconds: float, seed: int, changes: tuple[str, ...], check: Path | None, output: Output,
) -> None:  # fmt: skip
    """Predict load, hit rates, times and costs of storage nodes over one bucket.

    The product's own placement, choice by load and memory cache, over links that transfers share equally. A model, not
    a measurement: docs/design/simulation.md.

    \b
    The scenarios:
      steady   nothing happens
      lost     a node is gone; data planes notice after their command_timeout_s
      slow     a node has a tenth of its rate
      rolling  nodes restart one after the other; their memory is lost
      storm    all engines ask at the same moment, besides their other requests

    \b
    The columns:
      hottest_over_mean  bytes that the hottest node sent, over the mean
      link_use           mean use of the nodes' links
      engine ... miss    share of the prompts' bytes by source; engine: its own prefix cache; miss: computed
      p50_ms ...         time to first token
      late               requests that computed what had not come in fetch_timeout_s
      bucket_per_s       requests to the bucket, its lists included
      recover_s          after the loss was noticed, until its segments are read in at most twice an idle bucket's time

    \b
    Which number of nodes:   shadowserve simulate fleet --nodes 1,2,4,8 --engines 100 --scenario steady
    Faster links:            shadowserve simulate fleet --set node_gbit_per_s=200
    Against a measurement:   shadowserve bench nodes --json n.json; shadowserve simulate fleet --check n.json
    """
    if check is not None:
        report = checked(json.loads(check.read_text()))
        report.finish(output)
        if max(report.ratios.values()) > _TOLERANCE:
            click.get_current_context().exit(1)
        return
    its = _changed(changes)
    settings = [Setting(count, engines, requests_per_s, records, systems, seconds, seed) for count in nodes]
    report_of(settings, its, scenarios or tuple(SCENARIOS)).finish(output)


def _changed(changes: Sequence[str]) -> Given:
    values: dict[str, float] = {}
    known = {each.name for each in dataclasses.fields(Given)}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            values[name] = float(text)
        except ValueError as error:
            raise click.BadParameter(f"{change!r} is no NAME=VALUE", param_hint="--set") from error
        if name not in known or not 0 <= values[name] < 1e12:
            raise click.BadParameter(f"{change!r}: one of {', '.join(sorted(known))}, from 0", param_hint="--set")
    return Given(**values)


def report_of(settings: Sequence[Setting], its: Given, scenarios: Sequence[str]) -> Report:
    """Return a row for each scenario of each setting."""
    bars = ["hottest_over_mean", "p99_ms"] if len(settings) == 1 else []
    report = Report("fleet", list(COLUMNS), bars, command="simulate")
    runs = [(setting, scenario) for setting in settings for scenario in scenarios]
    data = []
    for setting, scenario in tracked(runs, "simulating"):
        found = outcome(setting, its, scenario)
        rates, counts = bucket_rates(setting, its, found), found.counts
        whole_bytes = max(1.0, sum(counts.by_source.values()))
        shares = {source: size / whole_bytes for source, size in counts.by_source.items()}
        link = found.counted_s * its.node_gbit_per_s * its.tcp_share * 1e9 / 8
        values: dict[str, Any] = {
            "what": scenario, "nodes": setting.nodes, "requests": counts.requests,
            "hottest_over_mean": found.hottest_over_mean, "link_use": statistics.fmean(found.sent.values()) / link,
            **shares, **{f"p{share}_ms": found.first_token_ms(share / 100) for share in (50, 90, 99)},
            "late": counts.late, "bucket_per_s": sum(value for name, value in rates.items() if name.endswith("per_s")),
            "dollars_per_month": rates["dollars_per_month"],
            "index_GB_per_node": setting.records / setting.nodes * its.index_bytes / 1e9,
        }  # fmt: skip
        if found.recover_s is not None:
            values["recover_s"] = found.recover_s
        report.row(**values)
        data.append({**setting._asdict(), **values, **rates, "throttled": counts.throttled})
    steady = [row["hottest_over_mean"] for row in report.rows if row["what"] == "steady"]
    lost = [row["recover_s"] for row in report.rows if "recover_s" in row]
    if steady:
        report.ratio("hottest_over_mean", steady, "at most 1.3")
    if lost:
        report.ratio("recover_s", lost, "at most 2")
    report.more = {"runs": data, "assumptions": rows(its)}
    if len(settings) > 1:
        series = {
            scenario: [(row["nodes"], row["p99_ms"]) for row in report.rows if row["what"] == scenario]
            for scenario in scenarios
        }
        report.charts = [Chart("Time to first token, 99th percentile", x="nodes", y="ms", series=series, y_log=True)]
    return report


# ---- Against bench nodes -------------------------------------------------------------------------------------------


def checked(measured: Mapping[str, Any]) -> Report:
    """Predict the throughput of each fleet of ``bench nodes`` from its links, records and requests."""
    report = Report("fleet", ["nodes", "predicted_GB_per_s", "measured_GB_per_s", "error"], command="simulate")
    for fleet in measured["fleets"]:
        seconds = replayed(measured["load"], fleet)
        size = sum(sum(size for _, size in measured["load"]["prompts"][each]) for own in fleet["asked"] for each in own)
        predicted, found = size / seconds / 1e9, size / fleet["wall_s"] / 1e9
        count, error = len(fleet["nodes"]), predicted / found - 1
        report.row(nodes=count, predicted_GB_per_s=predicted, measured_GB_per_s=found, error=error)
        report.ratio(f"error_{count}", [abs(error)], f"at most {_TOLERANCE}")
    return report


def replayed(load: Mapping[str, Any], fleet: Mapping[str, Any]) -> float:
    """Return the seconds that hosts take for their requests, one after the other, each host at the same time.

    Args:
        load: The benchmark's ``prompts``, a list of partition and bytes of each segment; ``gbit_per_s`` of each link;
            ``idle_s``, what a fetch takes besides its bytes; ``think_s`` between two fetches of a host.
        fleet: ``nodes``, and ``asked``: the numbers of the prompts that each host asks for.
    """
    its = Given(
        node_gbit_per_s=load["gbit_per_s"], engine_gbit_per_s=1e6, chunk_mb=1e-6, lookup_ms=1e3 * load["idle_s"],
        first_ms=0, memory_gb=1e9, engine_gb=0,
    )  # fmt: skip
    lasting = {"memory": math.inf, "device": 0.0, "bucket": 0.0}
    run = Fleet(its, dict.fromkeys(fleet["nodes"], 1.0), len(fleet["asked"]), lasting)
    prompts = [
        Prompt([Segment(partition << 32 | size, partition, size, EVERYWHERE) for partition, size in each], [])
        for each in load["prompts"]
    ]
    left = [list(reversed(own)) for own in fleet["asked"]]

    def ask(host: int) -> None:
        if left[host]:
            run.ask(host, prompts[left[host].pop()])

    run.ended = lambda host: run.at(run.now_s + load["think_s"], ask, host)
    for host in range(len(left)):
        ask(host)
    run.run()
    return run.now_s - float(load["think_s"])
