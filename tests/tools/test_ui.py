"""``shadowserve ui``, and ``stats`` of a metrics endpoint: what programs answer is bounded, and only they are asked."""

import http.server
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from machine import WAIT_MAX_S, free_port, http_server, wait_for

from shadowserve_tools import main, summaries
from shadowserve_tools.processes import start_storage, started

ENGINE = "vllm:shadowserve_prompts_total 3\nvllm:shadowserve_prompt_tokens_total{reason=\"loaded\"} 768\n"  # fmt: skip


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server of metrics: its URL, and what it answers (``status``, ``body``); it lists the requested paths."""
    given: dict[str, Any] = {"status": 200, "body": ENGINE, "asked": [], "next": threading.Event()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given["asked"].append(self.path)
            self.send_response(given["status"])
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            for part in given["body"].split("|"):
                self.wfile.write(part.encode())
                given["next"].wait(given.get("pause_s", 0.0))

        def log_message(self, format: str, *args: Any) -> None: ...

    with http_server(Handler) as address:
        yield address, given
        given["next"].set()


def test_stats_of_an_engine_begin_with_the_paragraph(answers: tuple[str, dict[str, Any]]) -> None:
    where, _ = answers
    done = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["stats", where])  # recognized by its protocol
    assert done.exit_code == 0, done.output
    first, second = done.output.splitlines()[:2]
    assert first == f"{where}, engine" and second.startswith(
        "3 prompts with 768 tokens. 768 tokens (100.0 %) were loaded"
    )


def test_stats_of_an_engine_name_the_period_of_its_rates(answers: tuple[str, dict[str, Any]]) -> None:
    """Symptom: means since the engine's start were in a column 'now'."""
    where, _ = answers
    once = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["stats", where])
    assert re.search(r"what +since the start *\n", once.output), once.output
    twice = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["stats", "--watch", "--interval=0.05", "--count=2", where])
    assert re.search(r"what +now *\n", twice.output), twice.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"status": 302}, "HTTP status 302"),
        ({"body": "up 1\n"}, "no metrics of ShadowServe"),
        ({"body": "shadowserve_x{"}, "malformed"),
        ({"body": "# " + "x" * 3000}, "more than 0 MiB"),
        ({"body": "#|" * 1000, "pause_s": 0.1}, "no whole answer within 0.5 s"),  # each part comes in time
    ],
)
def test_an_endpoint_that_answers_something_else_is_one_line(
    answers: tuple[str, dict[str, Any]], given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "_BYTES_MAX", 2000)
    monkeypatch.setattr(summaries, "TIMEOUT_S", 0.5 if "pause_s" in given else 60.0)
    where, server = answers
    server.update(given)
    done = CliRunner().invoke(main, ["stats", f"http://{where}"])
    assert done.exit_code == 1 and message in done.output and len(done.output.splitlines()) == 1
    assert server["asked"] == ["/metrics"], "a redirection is not followed"


def test_ui_asks_the_given_programs_and_shows_errors_beside_values(tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_port()}"
    with start_storage(tmp_path) as storage:
        command = [sys.executable, "-m", "shadowserve_tools", "ui", storage.address, closed, "--port", "0"]
        ready = re.compile(r"http://(?P<address>127\.0\.0\.1:\d+)/")
        with started("ui", [*command, "--interval", "0.2"], tmp_path, ready=ready) as ui:

            def shown(query: str = "") -> list[dict[str, Any]]:
                url = f"http://{ui.address}/summary.json{query}"
                with closing(urllib.request.urlopen(url, timeout=WAIT_MAX_S)) as answer:
                    found: list[dict[str, Any]] = json.load(answer)["programs"]
                return found

            wait_for(lambda: "summary" in shown()[0] and "refused" in shown()[1]["error"])
            assert [each["where"] for each in shown(f"?where={closed}")] == [storage.address, closed]
            storage.process.kill()
            wait_for(lambda: "error" in shown()[0])
    done = CliRunner().invoke(main, ["ui"])
    assert done.exit_code == 2 and "ADDRESS" in done.output
