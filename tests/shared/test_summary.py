"""The summary of a program, and the web page that shows it."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from machine import WAIT_MAX_S
from prometheus_client.parser import text_string_to_metric_families

from shadowserve.health import Endpoint
from shadowserve.summary import Samples, Summarizer
from shadowserve.web_page import Page

ENGINE = """
vllm:shadowserve_prompts_total{engine="0"} 10
vllm:shadowserve_prompt_tokens_total{engine="0",reason="loaded"} 6000
vllm:shadowserve_prompt_tokens_total{engine="0",reason="local"} 1000
vllm:shadowserve_prompt_tokens_total{engine="0",reason="absent"} 2000
vllm:shadowserve_prompt_tokens_total{engine="0",reason="short"} 1000
vllm:shadowserve_saved_prefill_seconds_total{engine="0"} 42
vllm:shadowserve_load_seconds_total{engine="0"} 3
vllm:shadowserve_stored_raw_bytes_total{engine="0"} 3145728
vllm:shadowserve_stored_bytes_total{engine="0"} 2097152
vllm:shadowserve_decode_during_fetch_seconds_total{engine="0"} 1.01
vllm:shadowserve_decode_during_fetch_predicted_seconds_total{engine="0"} 1
vllm:shadowserve_interference_budget_ratio{engine="0"} 0.02
process_start_time_seconds 1000
"""
STORAGE = """
shadowserve_storage_hits_total 5
shadowserve_storage_misses_total 5
shadowserve_storage_recovered 1
shadowserve_storage_up_seconds 60
"""
PLANE = """
shadowserve_batches_total 5
shadowserve_fetches_total{outcome="complete"} 3
shadowserve_fetches_total{outcome="deadline"} 1
shadowserve_storage_up 1
shadowserve_up_seconds 60
"""


def samples(text: str, **changes: float) -> Samples:
    """Return the samples of a text, with other values of some metrics."""
    for name, value in changes.items():
        text = re.sub(rf"(?m)^((?:vllm:)?shadowserve_{name}(?:{{.*}})?) .*\n", "", text)
        text += f"{'vllm:' if 'vllm:' in text else ''}shadowserve_{name} {value}\n"
    return Samples.of_text(text)


def test_an_engine_tells_what_it_saved_and_why_tokens_were_computed() -> None:
    summary = Summarizer().step(samples(ENGINE), 500.0, 1100.0)
    for part in (
        "In 100 s: 10 prompts with 10,000 tokens.",
        "6,000 tokens (60.0 %) were loaded instead of computed, 1,000 (10.0 %) were in the engine's own",
        "30.0 % were computed: not stored 20.0 %, less than a chunk 10.0 %.",
        "saved 42 s of prefill at this engine's measured speed; loads took 3 s",
        "stored 3 MiB as 2 MiB (1.50 times smaller)",
        "1.0 % slower (budget 2 %)",
    ):
        assert part in summary["paragraph"]
    assert summary["kind"] == "engine" and summary["parts"]["counts"]["loaded"] == 6000
    unpriced = Summarizer().step(samples(ENGINE, saved_prefill_seconds_total=0), 500.0, 1100.0)
    assert "not known yet" in unpriced["paragraph"]


@pytest.mark.parametrize(
    ("text", "changes", "level", "limit"),
    [
        (ENGINE, {}, "good", "nothing."),
        (ENGINE, {"off_requests_total": 1}, "bad", "the plugin is off"),
        (ENGINE, {"load_failures_total{reason=\"deadline\"}": 2}, "warning", "loads fall short: deadline"),
        (ENGINE, {"decode_during_fetch_seconds_total": 2}, "warning", "slow decoding by 100.0 %"),
        (STORAGE, {}, "good", "nothing."),
        (STORAGE, {"storage_recovered": 0}, "warning", "recovering"),
        (STORAGE, {"storage_device_healthy{device=\"nvme0\"}": 0}, "bad", "out of use: nvme0"),
        (STORAGE, {"storage_evicted_keys_total": 7}, "warning", "capacity: 7 keys"),
        (PLANE, {}, "good", "nothing."),
        (PLANE, {"storage_up": 0}, "bad", "storage is not connected"),
        (PLANE, {"stage_busy_seconds_total{stage=\"decompress\"}": 90}, "warning", "decompress: 1.5 cores"),
        (PLANE, {"interference_wait_seconds_total": 30}, "warning", "the interference budget"),
    ],
)  # fmt: skip
def test_the_limit_is_named(text: str, changes: dict[str, float], level: str, limit: str) -> None:
    summary = Summarizer().step(samples(text, **changes), 500.0, 1100.0)
    assert summary["level"] == level and limit in summary["limit_line"]


def test_rates_are_of_the_last_seconds_and_begin_again_after_a_restart() -> None:
    summarizer = Summarizer()

    def rate(now_s: float, up_s: float, hits: float) -> tuple[float, str]:
        found = samples(STORAGE, storage_up_seconds=up_s, storage_hits_total=hits)
        summary = summarizer.step(found, now_s, 0.0)
        return next(each["value"] for each in summary["values"] if each["name"] == "hits_total"), summary["limit_line"]

    assert rate(100.0, 60.0, 120) == (2.0, "What limits since the start: nothing.")
    assert rate(105.0, 65.0, 220) == (20.0, "What limits now: nothing.")
    assert rate(115.0, 75.0, 220) == (0.0, "What limits now: no traffic.")
    assert rate(116.0, 2.0, 30) == (15.0, "What limits since the start: nothing.")


def test_metrics_of_another_program_are_refused() -> None:
    with pytest.raises(ValueError, match="no metrics of ShadowServe"):
        Summarizer().step(samples("up 1\n"), 0.0, 0.0)


# ---- The page --------------------------------------------------------------------------------------------------------


class _Registry:
    def collect(self) -> Any:
        return text_string_to_metric_families(STORAGE)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint("127.0.0.1", 0, _Registry())
    yield endpoint
    endpoint.close()


def test_the_page_is_served_whole_with_headers_that_let_nothing_foreign_in(endpoint: Endpoint) -> None:
    def get(path: str, method: str = "GET", host: str = "localhost") -> tuple[int, dict[str, str], str]:
        with closing(http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=WAIT_MAX_S)) as connection:
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    status, headers, body = get("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';") and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assets = re.findall(r'(?:src|href)="(/[\w.]+)"', body)
    assert {"/page.js", "/page.css", "/uplot.js", "/uplot.css", "/metrics"} == set(assets) and "style=" not in body
    assert not re.search(r'(?:src|href)="(?!/|data:,)', body)
    for path in (*assets[:4], "/summary.json"):
        assert get(path)[0] == 200 and get(path, "HEAD")[::2] == (200, "")
        assert get(path, "POST")[0] == get(path, "DELETE")[0] == 501
        assert get(path, host="rebound.example")[0] == 421
    [program] = json.loads(get("/summary.json")[2])["programs"]
    assert program["where"] == "" and program["summary"]["kind"] == "storage node"
    assert get("/page.py")[0] == get("/uplot.LICENSE")[0] == 404


def test_many_pages_cost_one_summary_a_second() -> None:
    made: list[int] = []
    page = Page(lambda: made.append(1) or [])
    for _ in range(20):
        assert page.answer("/summary.json") == ("application/json", b'{"programs": []}')
    assert len(made) < 20
