"""``shadowserve stats`` on running servers."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machine import PATIENCE_S, free_port
from storage_support import REPOSITORY, Child, make_record

from shadowserve.cli import main
from shadowserve.cli.stats import Sample, Watcher, _gone

PASSWORD = "correct horse"


def stats(*arguments: str) -> Result:
    return CliRunner(env={"SHADOWSERVE_STORAGE_PASSWORD": "", "COLUMNS": "120"}).invoke(main, ["stats", *arguments])


def used(child: Child) -> None:
    with child.client() as client:
        key, value = make_record(b"a" * 32)
        client.call("SET", key, value)
        for _ in range(3):
            client.call("GET", key)
        client.call("GET", "none")


@pytest.fixture
def server(start: Callable[..., Child]) -> Child:
    child = start()
    used(child)
    return child


def test_once_it_shows_totals_and_the_slowest_commands(server: Child) -> None:
    done = stats("--port", str(server.port))
    assert done.exit_code == 0, done.output
    for text in ("hit rate", "75.0 %", "4.0 GiB", "slowest commands", "get", "memory"):
        assert text in done.output


def test_as_json_it_is_one_object(server: Child) -> None:
    view = json.loads(stats("--port", str(server.port), "--json").output)
    assert view["hit_rate"] == 0.75 and view["records"] == 1 and view["memory_budget_bytes"] == 4 << 30
    calls = {each["command"]: each["calls"] for each in view["commands"]}
    assert calls["get"] == 4 and calls["set"] == 1
    assert view["devices"] == [] and view["sent_bytes_per_s"] > 0


def test_watching_shows_what_happens_between_two_looks(server: Child) -> None:
    done = stats("--port", str(server.port), "--json", "--watch", "--interval", "0.05", "--count", "3")
    views = [json.loads(line) for line in done.output.splitlines()]
    assert len(views) == 3 and views[0]["hit_rate"] == 0.75 and views[2]["hit_rate"] is None
    assert views[2]["commands_per_s"] > 0  # INFO itself
    shown = stats("--port", str(server.port), "--watch", "--interval", "0.05", "--count", "2")
    assert shown.exit_code == 0 and "hit rate" in shown.output


@pytest.mark.usefixtures("interruptible")
def test_watching_ends_in_order_on_an_interrupt(server: Child) -> None:
    command = [sys.executable, "-m", "shadowserve.cli", "stats", "--port", str(server.port), "--json", "--watch"]
    with subprocess.Popen(
        [*command, "--interval", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as watching:
        assert watching.stdout is not None and watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode in (0, 1) and "Traceback" not in errors


def test_a_password_is_given_by_the_environment_or_a_flag(start: Callable[..., Child]) -> None:
    child = start(environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})
    refused = stats("--port", str(child.port))
    assert refused.exit_code == 1 and "NOAUTH" in refused.output and "--password" in refused.output
    wrong = stats("--port", str(child.port), "--password", "wrong")
    assert wrong.exit_code == 1 and "WRONGPASS" in wrong.output
    assert stats("--port", str(child.port), "--password", PASSWORD).exit_code == 0
    assert stats("--port", str(child.port), "--user", "default", "--password", PASSWORD).exit_code == 0


def test_it_speaks_tls(start: Callable[..., Child], certificates: Path) -> None:
    child = start(
        *("--tls-cert", str(certificates / "server.crt"), "--tls-key", str(certificates / "server.key")),
        *("--tls-client-ca", str(certificates / "ca.crt")),
    )
    where = ("--port", str(child.port), "--json", "--tls-ca", str(certificates / "ca.crt"))
    own = ("--tls-cert", str(certificates / "client.crt"), "--tls-key", str(certificates / "client.key"))
    assert stats(*where, *own).exit_code == 0
    without = stats(*where)
    assert without.exit_code == 1 and "--tls-cert" in without.output
    plain = stats("--port", str(child.port))
    assert plain.exit_code == 1 and "speaks TLS only" in plain.output and "--tls-ca" in plain.output


def test_a_tenant_is_shown_no_zeros_but_told_whom_to_ask_as(start: Callable[..., Child], tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user team on >secret ~* +@all -@admin tenant=team\nuser admin on >secret ~* +@all\n")
    where = ("--port", str(start("--users-file", str(users)).port), "--password", "secret", "--user")
    refused = stats(*where, "team")
    assert refused.exit_code == 1 and "@admin" in refused.output and "hit rate" not in refused.output
    assert stats(*where, "admin").exit_code == 0


def test_where_nobody_listens_it_says_so() -> None:
    done = stats("--port", str(free_port()))
    assert done.exit_code == 1 and "cannot reach the storage server at 127.0.0.1:" in done.output


def test_certificates_that_cannot_be_used_are_refused() -> None:
    assert stats("--tls-ca", "/nonexistent.crt").exit_code == 2
    assert stats("--tls-cert", "/nonexistent.crt").exit_code == 2


# ---- What is made of INFO --------------------------------------------------------------------------------------------


def test_devices_and_causes_are_read() -> None:
    fields = {
        "device0": "name=nvme0n1,healthy=0,used_bytes=5,read_p99_usec=90",
        "device1": "name=nvme1n1,healthy=1",
        "arena0": "name=node0,used_bytes=1",
        "evictions": "budget=0,quota=1",
        "lost_objects": "rotten=3",
        "expired_keys": "2",
    }
    view = Sample(fields, 1.0).view()
    assert _gone(view) == "rotten 3, expired 2, quota 1"
    assert [each["name"] for each in view["devices"]] == ["nvme0n1", "nvme1n1"] and not view["devices"][0]["healthy"]
    assert view["evictions"] == {"budget": 0, "quota": 1} and view["arenas"][0]["name"] == "node0"


def test_a_restart_in_between_begins_the_rates_anew() -> None:
    before = Sample({"run_id": "a", "keyspace_hits": "100"}, 10.0)
    after = Sample({"run_id": "b", "keyspace_hits": "20", "uptime_in_seconds": "2"}, 20.0)
    assert after.view(before)["hits_per_s"] == 10.0


def test_the_past_is_drawn_as_bars() -> None:
    watcher = Watcher()
    for hits in (0, 50, 150):
        watcher.step(Sample({"total_commands_processed": str(hits), "run_id": "a"}, hits / 50.0))
    assert len(watcher.line("commands_per_s")) == 3 and watcher.line("commands_per_s")[-1] == "█"
    assert watcher.line("nothing") == ""
