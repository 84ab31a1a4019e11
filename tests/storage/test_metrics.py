"""The metrics of a running server, and of a store with devices."""

import errno
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from exposition import counters_of_the_plugin, families, needs_promtool
from machine import NEVER_S
from prometheus_client import CollectorRegistry, generate_latest
from storage_support import REPOSITORY, Start, make_node, make_record

from dpu_dataplane.metrics import Metrics
from shadowserve.latency import LatencyHistogram
from shadowserve.pool.statistics import DeviceStatistics, Statistics
from storage_kv.commands import execute
from storage_kv.counters import SAMPLE_EVERY, CommandCounters
from storage_kv.metric_table import BUCKET
from storage_kv.node import Node
from storage_kv.operations import NodeCollector, Operations
from storage_kv.reply import CommandError
from storage_kv.session import Session

NAMES = re.compile(r"shadowserve_storage_[a-z0-9_]+")
UNITS = ("_bytes", "_seconds", "_total", "_bytes_per_second", "_bucket", "_count", "_sum", "_info")


def shown() -> Statistics:
    """Statistics of a pool with two devices, one of them lost."""
    latencies = {kind: LatencyHistogram() for kind in ("read", "write")}
    latencies["read"].add(90_000)
    return Statistics(
        keys=3,
        devices=(
            DeviceStatistics(name="nvme0n1", read_bytes=7, latencies=latencies, wear_budget_bytes=100),
            DeviceStatistics(name="nvme1n1", state="gone", errors=3, quarantined_bytes=1, scrubbed_bytes=1000),
        ),
        memory_bytes=1 << 20,
        promotions=2,
        copies_dropped=3,
        evictions={"budget": 5, "quota": 1},
        held_back=4,
        scrub_rotten=1,
        writing_bytes=2,
    )


def scraped(node: Node, *, recovered: bool = True) -> bytes:
    """Return the metrics of a node."""
    operations = Operations(node)
    operations.recovered = recovered
    registry = CollectorRegistry()
    registry.register(NodeCollector(operations))
    return generate_latest(registry)


def exported(node: Node) -> dict[str, float]:
    lines = scraped(node).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_metrics_count_the_work_of_a_server(start: Start) -> None:
    child = start("--metrics-port", "0")
    with child.client() as client:
        key, value = make_record(b"a" * 32)
        client.call("SET", key, value)
        client.call("GET", key)
        client.call("GET", "none")
        client.call("GET")
        client.call("NOSUCH")
        client.call("SET", "a", "x", "EX", "never")
        samples = child.samples()
    assert samples["shadowserve_storage_records"] == 1
    assert samples["shadowserve_storage_hits_total"] == samples["shadowserve_storage_misses_total"] == 1
    assert samples['shadowserve_storage_command_calls_total{command="get"}'] == 2
    assert samples['shadowserve_storage_command_refusals_total{command="get"}'] == 1
    assert samples['shadowserve_storage_command_failures_total{command="set"}'] == 1
    assert samples["shadowserve_storage_unknown_commands_total"] == 1
    assert (
        samples['shadowserve_storage_command_duration_seconds_count{command="set"}'] == 1
    )  # the first command is timed
    assert samples["shadowserve_storage_records_stored_total"] == 1
    assert samples["shadowserve_storage_received_bytes_total"] > len(value)
    assert samples["shadowserve_storage_clients"] == 1
    assert samples["shadowserve_storage_recovered"] == 1 and samples["shadowserve_storage_draining"] == 0
    assert samples["shadowserve_storage_cpu_seconds_total"] > 0


@needs_promtool
def test_promtool_accepts_a_scrape_with_devices() -> None:
    text = scraped(make_node(ShownStore()))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=NEVER_S)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_no_label_holds_a_key_or_a_client(start: Start) -> None:
    child = start("--metrics-port", "0")
    with child.client() as client:
        client.call("CLIENT", "SETNAME", "somebody")
        client.call("SET", "secret-key", "1")
        text = child.http("/metrics")[1]
    labels = set(re.findall(r'[{,](\w+)="', text))
    assert labels <= {"cause", "command", "le", "version", "engine"} and "secret" not in text and "somebody" not in text


class ShownStore:
    """Metrics of :func:`shown`."""

    def statistics(self) -> Statistics:
        return shown()


def test_devices_arenas_and_causes_are_metrics() -> None:
    samples = exported(make_node(ShownStore()))
    own = {name.removeprefix("shadowserve_storage_"): value for name, value in samples.items()}
    assert own["keys"] == 3
    assert own['device_read_bytes_total{device="nvme0n1"}'] == 7
    assert own['device_healthy{device="nvme0n1"}'] == 1 and own['device_healthy{device="nvme1n1"}'] == 0
    assert own['device_errors_total{device="nvme1n1"}'] == 3
    assert own['device_wear_budget_bytes{device="nvme0n1"}'] == 100
    assert 'device_wear_budget_bytes{device="nvme1n1"}' not in own
    bucket = 'device_operation_duration_seconds_bucket{device="nvme0n1",le="%s",operation="read"}'
    assert own[bucket % "5e-05"] == 0 and own[bucket % "0.0001"] == 1 and own[bucket % "+Inf"] == 1
    assert own['evictions_total{cause="quota"}'] == 1 and own['admissions_total{outcome="held_back"}'] == 4
    assert own["scrub_rotten_total"] == own["quarantined_bytes"] == 1 and own["writing_bytes"] == 2
    assert own['arena_promotions_total{arena="memory"}'] == 2 and own['arena_copies_dropped_total{arena="memory"}'] == 3


def test_a_scrape_does_not_use_the_store_before_recovery() -> None:
    node = make_node(object())
    assert b"shadowserve_storage_recovered 0.0" in scraped(node, recovered=False)
    assert [check.name for check in Operations(node).readiness() if check.failed] == ["recovery", "listening"]


def test_a_scrape_reads_sessions_and_queues_with_the_lock_held() -> None:
    node = make_node(ShownStore())
    for owner, name in ((node, "sessions"), (node.memory, "_queues"), (node.lent, "_queues")):
        setattr(owner, name, LockedDict(node))
    assert exported(node)["shadowserve_storage_clients"] == 0


class LockedDict(dict[Any, Any]):
    """A dictionary that other threads change: only the holder of the node's lock may iterate over it."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def values(self) -> Any:
        assert self._node.lock.locked()
        return super().values()


def test_every_metric_has_the_prefix_and_units_stand_at_the_end() -> None:
    for name in exported(make_node(ShownStore())):
        bare = name.partition("{")[0]
        assert NAMES.fullmatch(bare), name
        if "bytes" in bare or "seconds" in bare:
            assert bare.endswith(UNITS), name


def test_every_metric_of_the_storage_node_is_documented_and_no_other(start: Start) -> None:
    text = start("--metrics-port", "0").http("/metrics")[1]
    exported_names = {name.removeprefix("shadowserve_storage_") for name in re.findall(r"^# TYPE (\S+) ", text, re.M)}
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    table = page.partition("## Storage node\n")[2].partition("| metrics | meaning |")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)(?:{[a-z, ]+})?`", table)) == exported_names


# ---- Commands --------------------------------------------------------------------------------------------------------


def test_one_call_in_many_is_timed_the_first_included() -> None:
    statistics = CommandCounters()
    with pytest.raises(CommandError):
        statistics.timed(_failing)
    assert statistics.durations.count == 1
    node = make_node(ShownStore())
    session = Session(1, address="", authenticated=True)
    for _ in range(2 * SAMPLE_EVERY + 1):
        execute(node, session, [b"PING"])
    found = node.counters.by_command["ping"]
    assert found.calls == 2 * SAMPLE_EVERY + 1 and found.durations.count == 3 and found.mean_ns > 0


def _failing() -> None:
    raise CommandError("ERR no")


def test_a_histogram_sorts_by_upper_bounds_and_finds_quantiles() -> None:
    histogram = LatencyHistogram((0.001, 0.01))
    assert histogram.quantile_ns(0.5) == 0
    for duration in (1_000_000, 1_000_001, 10_000_000, 99_000_000):
        histogram.add(duration)
    assert histogram.counts == [1, 2, 1] and histogram.count == 4
    assert histogram.cumulative() == [("0.001", 1), ("0.01", 3), ("+Inf", 4)]
    assert 1_000_000 < histogram.quantile_ns(0.5) < 10_000_000 and histogram.quantile_ns(0.99) == 10_000_000


def test_info_has_the_commands_as_redis_has_them(start: Start) -> None:
    with start().client() as client:
        client.call("SET", "a", "1")
        client.call("SET", "a")
        info = client.info("commandstats")
        assert re.fullmatch(
            r"calls=1,usec=\d+,usec_per_call=\d+\.\d\d,rejected_calls=1,failed_calls=0", info["cmdstat_set"]
        )
        latency = client.info("latencystats")["latency_percentiles_usec_set"]
        assert re.fullmatch(r"p50=\d+\.\d+,p99=\d+\.\d+,p99\.9=\d+\.\d+", latency)
        assert "cmdstat_set" in client.info("all") and "cmdstat_set" not in client.info("default")
        client.call("CONFIG", "RESETSTAT")
        assert "cmdstat_set" not in client.info("commandstats")


def test_info_needs_no_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", no_descriptor)
    reply = execute(make_node(), Session(1, "", authenticated=True), [b"INFO"])
    assert re.search(rb"used_memory_rss:[1-9]", reply)


# ---- Alerts ----------------------------------------------------------------------------------------------------------

RULES = REPOSITORY / "configs" / "prometheus" / "shadowserve.rules.yaml"
RULES_TEST = Path(__file__).with_name("alerts.test.yaml")
ANY_METRIC = re.compile(r"\b(vllm:)?(shadowserve_[a-z0-9_]+)")


@pytest.fixture
def exported_names(start: Start) -> set[str]:
    """Names of the metrics of a running storage server."""
    return families(start("--metrics-port", "0").http("/metrics")[1])


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_metric_of_an_alert_is_exported(exported_names: set[str]) -> None:
    of_the_data_plane = families(generate_latest(Metrics().registry).decode())
    of_the_data_plane |= {"shadowserve_storage_up", "shadowserve_tier_devices_gone"}  # only with storage or with tiers
    of_the_plugin = {f"shadowserve_{name}_total" for name in counters_of_the_plugin()}
    with_a_bucket = {f"shadowserve_storage_{name}" for name in (row.name for row in BUCKET)}
    for name, rule in alerts().items():
        for prefix, metric in ANY_METRIC.findall(rule["expr"]):
            known = of_the_plugin if prefix else exported_names | of_the_data_plane | with_a_bucket
            assert metric in known, f"{name}: {metric}"


def test_every_alert_is_explained_and_tested() -> None:
    explained = (REPOSITORY / "docs" / "guides" / "operate.md").read_text()
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    quiet = {case["alertname"] for case in tests[-1]["alert_rule_test"] if not case["exp_alerts"]}
    assert fired == quiet == set(alerts())
    assert [name for name in alerts() if f"`{name}`" not in explained] == []


@needs_promtool
@pytest.mark.parametrize(("command", "file"), [("check", RULES), ("test", RULES_TEST)])
def test_promtool_accepts_and_tests_the_alerts(command: str, file: Path) -> None:
    done = subprocess.run(
        ["promtool", command, "rules", file], capture_output=True, text=True, timeout=NEVER_S, check=False
    )
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
