"""The dashboards for Grafana: a program exports each metric, and a panel shows one kind of value."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exposition import counters_of_the_plugin, families, needs_promtool
from machine import NEVER_S, PATIENT, free_port, http_get

from shadowserve_tools.processes import start_data_plane, start_storage

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "configs" / "grafana"
DASHBOARDS = sorted(path.stem.removeprefix("shadowserve-") for path in FOLDER.glob("*.json"))
METRIC = re.compile(r"(?<![\w:])(?:vllm:)?shadowserve_[a-z0-9_]+")
RATES = {"Bps", "ops", "reqps", "cps"}


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"shadowserve-{name}.json").read_text())
    return found


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in load(name)["panels"] if panel["type"] != "row"]


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def scraped(port: int) -> set[str]:
    return families(http_get(port, "/metrics")[1])


def sglang_metrics() -> set[str]:
    """Return the metrics of SGLang's backend, which SGLang exports with its own."""
    import prometheus_client

    import host_control.sglang  # noqa: F401

    return {name for name in families(prometheus_client.generate_latest().decode()) if "_sglang_" in name}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The metrics of each program, by the name of its dashboard."""
    logs = tmp_path_factory.mktemp("logs")
    ports = [free_port(), free_port()]
    small = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB"]
    tiers = ["--tiers", '{"memory_budget_bytes": "8MiB"}']
    with (
        start_storage(logs, "--metrics-port", str(ports[0])) as storage,
        start_data_plane(logs, storage.address, *PATIENT, *small, *tiers, "--metrics-port", str(ports[1])),
    ):
        found = {"storage": scraped(ports[0]), "dataplane": scraped(ports[1])}
    found["sglang"] = sglang_metrics()
    found["vllm"] = {f"vllm:shadowserve_{name}_total" for name in counters_of_the_plugin()}
    # Only a daemon with TLS exports it (dpu_dataplane/server.py).
    found["dataplane"].add("shadowserve_tls_certificate_expiry_timestamp_seconds")
    yield found


def test_there_is_a_dashboard_for_each_program() -> None:
    assert DASHBOARDS == ["dataplane", "sglang", "storage", "vllm"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_metric_of_a_dashboard_is_exported(name: str, exported: dict[str, set[str]]) -> None:
    shown = {metric for panel in panels(name) for text in expressions(panel) for metric in METRIC.findall(text)}
    assert len(shown) > (0 if name == "sglang" else 10) and shown - exported[name] == set()
    (instances,) = (each for each in load(name)["templating"]["list"] if each["name"] == "instance")
    known_by = METRIC.findall(instances["definition"])
    assert len(known_by) == 1 and set(known_by) <= exported[name]


def test_the_data_plane_and_the_plugin_hide_nothing(exported: dict[str, set[str]]) -> None:
    for name in ("dataplane", "vllm"):
        shown = {metric for panel in panels(name) for text in expressions(panel) for metric in METRIC.findall(text)}
        whole = {each for each in exported[name] if not each.endswith(("_created", "_sum", "_count"))}
        assert whole - shown == set()


def kind(expression: str) -> str:
    """Return the kind of an expression's value: a rate, a count of the last hour, a total, a quantile, or a gauge."""
    if "histogram_quantile(" in expression:
        return "quantile"
    if "rate(" in expression:
        return "ratio" if re.search(r"\) / \(?sum", expression) else "rate"
    if "increase(" in expression:
        return "count"
    return "total" if any(name.endswith("_total") for name in METRIC.findall(expression)) else "now"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_panel_shows_one_kind_of_thing_in_a_unit_that_fits(name: str) -> None:
    for panel in panels(name):
        title, unit = panel["title"], panel["fieldConfig"]["defaults"]["unit"]
        kinds = {kind(text) for text in expressions(panel)}
        assert len(kinds) == 1, f"{title} mixes {kinds}"
        (found,) = kinds
        metrics = {metric for text in expressions(panel) for metric in METRIC.findall(text)}
        if found == "rate":
            of_time = all("_seconds_total" in metric for metric in metrics)
            # Seconds per second are working cores or waiting jobs.
            assert (unit == "none" and ("ores" in title or "wait" in title)) if of_time else unit in RATES, title
            assert (unit == "Bps") == all("_bytes_total" in metric for metric in metrics), title
        elif found == "count":
            assert unit == "short" and title.endswith(", in the last hour"), title
        elif found == "total":
            assert panel["type"] == "stat", f"{title}: a total over all time is not useful"
            units = {"_bytes_total": "bytes", "_seconds_total": "s"}
            fits = (each for end, each in units.items() if all(end in metric for metric in metrics))
            assert unit == next(fits, "short"), title
        elif found == "quantile":
            assert unit == "s", title
        elif found == "now" and unit != "percentunit":
            assert (unit == "bytes") == all(metric.endswith("_bytes") for metric in metrics), title


@needs_promtool
@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_expression_of_a_dashboard_is_one(name: str, tmp_path: Path) -> None:
    texts = [text for panel in panels(name) for text in expressions(panel)]
    filled = (text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in texts)
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(filled)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_has_the_shape_that_grafana_takes(name: str) -> None:
    """Grafana has no JSON schema. These checks implement the requirements in its documentation of the format."""
    found = load(name)
    assert found["schemaVersion"] >= 36 and found["uid"] and found["title"] and isinstance(found["tags"], list)
    assert {each["name"] for each in found["templating"]["list"]} == {"datasource", "instance"}
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "timeseries", "stat") and panel["title"]
        if panel["type"] != "row":
            assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
