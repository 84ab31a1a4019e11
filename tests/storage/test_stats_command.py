"""``shadowserve stats`` on running servers."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from machine import WAIT_MAX_S, free_port
from storage_support import Child, Start, make_certificates, make_record, tls_flags

from shadowserve.errors import StorageUnavailableError
from shadowserve.resp_client import RespClient
from shadowserve_tools import main
from shadowserve_tools.fleet_stats import with_members
from shadowserve_tools.processes import start_redis
from shadowserve_tools.stats import Sample, Watcher, _gone, source
from shadowserve_tools.storage_client import Login

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
        for name in ("none", "neither", key):  # lookups without a read
            client.call("EXISTS", name)


@pytest.fixture
def server(start: Start) -> Child:
    child = start()
    used(child)
    return child


def test_once_it_shows_totals_and_the_slowest_commands(server: Child) -> None:
    done = stats("--port", str(server.port))
    assert done.exit_code == 0, done.output
    for text in (
        "read hit rate",
        "75.0 %",
        "lookup hit rate",
        "33.3 %",
        " of 4 GiB",
        "slowest commands",
        "get",
        "memory",
    ):
        assert text in done.output


def test_as_json_it_is_one_object(server: Child) -> None:
    view = json.loads(stats("--port", str(server.port), "--json").output)
    assert view["read_hit_rate"] == 0.75, "symptom: keys of lookups counted, too"
    assert view["lookup_hit_rate"] == 1 / 3 and view["other_server"] == ""
    assert view["records"] == 1 and view["memory_budget_bytes"] == 4 << 30
    calls = {each["command"]: each["calls"] for each in view["commands"]}
    assert calls["get"] == 4 and calls["set"] == 1
    assert view["devices"] == [] and view["sent_bytes_per_s"] > 0


def test_watching_shows_rates_between_two_samples(server: Child) -> None:
    done = stats("--port", str(server.port), "--json", "--watch", "--interval", "0.05", "--count", "3")
    views = [json.loads(line) for line in done.output.splitlines()]
    assert len(views) == 3 and views[0]["read_hit_rate"] == 0.75 and views[2]["read_hit_rate"] is None
    assert views[2]["commands_per_s"] > 0  # INFO itself counts
    shown = stats("--port", str(server.port), "--watch", "--interval", "0.05", "--count", "2")
    assert shown.exit_code == 0 and "read hit rate" in shown.output


def test_a_fleet_is_a_table_with_a_line_for_each_node(server: Child, tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text(f"127.0.0.1:{server.port}=3\n127.0.0.1:1 # it does not run\n")
    done = stats(f"file:{file}")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "fleet of 2 storage nodes, 1 do not answer" in shown and "75.0 %" in shown
    view = json.loads(stats(f"127.0.0.1:{server.port}=3,127.0.0.1:1", "--json").output)
    node, dead = view["nodes"]
    assert (node["state"], node["weight"], node["records"], node["load_s"]) == ("ok", 3.0, 1, 0)
    assert node["share"] == pytest.approx(0.75, abs=0.05) and node["share"] + dead["share"] == pytest.approx(1.0)
    assert "cannot reach the storage node at 127.0.0.1:1" in dead["state"]
    assert "[fd00::3]:1" in stats(f"127.0.0.1:{server.port},[fd00::3]:1").output
    assert stats(f"127.0.0.1:{server.port},{'a' * 64}.test:1", "--json").exit_code == 0, "a name that is too long"
    file.write_text("")
    assert "no members" in stats(f"file:{file}").output


def test_the_nodes_behind_a_name_are_asked_for_its_certificate(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path, "storage.test")
    port = start("--host", "127.0.0.2", *tls_flags(tmp_path)).port  # the certificate lacks this address
    resolve = socket.getaddrinfo

    def resolved(host: str, *rest: Any, **more: Any) -> list[Any]:
        return list(resolve(host.replace("storage.test", "127.0.0.2"), *rest, **more))

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    [(where, name)] = with_members([f"dns:storage.test:{port}"])
    files = {"user": "", "password": "", "tls_ca": f"{tmp_path}/ca.crt", "tls_cert": "", "tls_key": ""}
    with contextlib.closing(source(where, files, watches=False, server_name=name)) as node:
        assert node.step()["records"] == 0


def test_a_password_is_given_by_the_environment_or_a_flag(start: Start) -> None:
    child = start(environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})
    refused = stats("--port", str(child.port))
    assert refused.exit_code == 1 and "NOAUTH" in refused.output and "--password" in refused.output
    wrong = stats("--port", str(child.port), "--password", "wrong")
    assert wrong.exit_code == 1 and "WRONGPASS" in wrong.output
    assert stats("--port", str(child.port), "--password", PASSWORD).exit_code == 0
    assert stats("--port", str(child.port), "--user", "default", "--password", PASSWORD).exit_code == 0


def test_it_speaks_tls(start: Start, certificates: Path) -> None:
    child = start(*tls_flags(certificates, mutual=True))
    where = ("--port", str(child.port), "--json", "--tls-ca", str(certificates / "ca.crt"))
    own = ("--tls-cert", str(certificates / "client.crt"), "--tls-key", str(certificates / "client.key"))
    assert stats(*where, *own).exit_code == 0
    # Symptom: the server logged a failed handshake for each call with a certificate.
    assert not any("tls_failed" in line for line in child.log), child.log
    without = stats(*where)
    assert without.exit_code == 1 and "--tls-cert" in without.output
    plain = stats("--port", str(child.port))
    assert plain.exit_code == 1 and "speaks TLS only" in plain.output and "--tls-ca" in plain.output


def test_a_server_that_disconnects_before_the_first_command_is_an_error(start: Start, certificates: Path) -> None:
    """The server's TLS alert arrives in the turn that completes the connection."""
    child = start(*tls_flags(certificates, mutual=True))
    context = Login(host="127.0.0.1", port=child.port, tls_ca=str(certificates / "ca.crt")).context()

    async def ask_as_it_closes() -> None:
        client = RespClient("a server", WAIT_MAX_S)
        await client.open("127.0.0.1", child.port, [], context, "127.0.0.1")
        while not client._transport.is_closing():
            await asyncio.sleep(0)
        assert not client.closed.done()
        await client.ask([["PING"]])

    with pytest.raises(StorageUnavailableError, match="(?i)certificate.required"):
        asyncio.run(ask_as_it_closes())


def test_users_without_admin_get_an_error_with_a_hint(start_tenants: Start) -> None:
    users = "user team on >secret ~* +@all -@admin tenant=team\nuser admin on >secret ~* +@all\n"
    where = ("--port", str(start_tenants(users=users).port), "--password", "secret", "--user")
    refused = stats(*where, "team")
    assert refused.exit_code == 1 and "@admin" in refused.output and "read hit rate" not in refused.output
    assert stats(*where, "admin").exit_code == 0


def test_a_refused_connection_is_an_error() -> None:
    """Symptom: for the address of an engine that did not run, it named a storage node alone."""
    port = free_port()
    done = stats("--port", str(port))
    message = f"cannot connect to 127.0.0.1:{port}: Connection refused; is a storage node, a data plane or vLLM running"
    assert done.exit_code == 1 and message in done.output


def test_a_host_that_has_no_address_is_an_error_of_the_resolver() -> None:
    done = stats("host.invalid:6380")
    assert done.exit_code == 1 and "name" in done.output.lower() and "Unknown error" not in done.output


def test_certificates_that_cannot_be_used_are_refused() -> None:
    assert stats("--tls-ca", "/nonexistent.crt").exit_code == 2
    assert stats("--tls-cert", "/nonexistent.crt").exit_code == 2


# ---- Display of INFO -------------------------------------------------------------------------------------------------


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


def test_history_is_drawn_as_bars() -> None:
    watcher = Watcher()
    for hits in (0, 50, 150):
        watcher.step(Sample({"total_commands_processed": str(hits), "run_id": "a"}, hits / 50.0))
    assert len(watcher.line("commands_per_s")) == 3 and watcher.line("commands_per_s")[-1] == "█"
    assert watcher.line("nothing") == ""


# ---- Tenants ---------------------------------------------------------------------------------------------------------

USERS = """user a on >secret ~* +@all -@admin tenant=team-a
user b on >secret ~* +@all -@admin tenant=b,x=1%
user admin on >secret ~* +@all
"""
LIMITS = "{team-a: {bytes_max: 1 GiB, keys_max: 100, commands_per_s: 100000, bytes_per_s: 1 GiB}}"


@pytest.fixture
def shared(start_tenants: Start) -> Child:
    """A server where one tenant with limits has two thirds of the bytes, and one without limits the rest."""
    child = start_tenants("--tenants", LIMITS, users=USERS)
    for user, keys in (("a", 20), ("b", 10)):
        with child.client() as client:
            client.call("AUTH", user, "secret")
            for number in range(keys):
                client.call("SET", f"key{number}", b"x" * 10_000)
    return child


def as_admin(child: Child, *arguments: str) -> Result:
    return stats("--port", str(child.port), "--user", "admin", "--password", "secret", *arguments)


def test_an_administrator_sees_usage_and_limits_of_each_tenant(shared: Child) -> None:
    view = json.loads(as_admin(shared, "--json").output)
    tenants = {each["name"]: each for each in view["tenants"]}
    assert list(tenants) == ["team-a", "b,x=1%", ""] and view["tenants_known"] == 3
    assert tenants["team-a"]["keys"] == 20 and tenants["b,x=1%"]["keys"] == 10 and tenants[""]["keys"] == 0
    assert tenants["team-a"]["keys_max"] == 100 and tenants["team-a"]["bytes_max"] == 1 << 30
    assert tenants["team-a"]["share"] == pytest.approx(2 / 3, abs=0.01)
    assert sum(each["used_bytes"] for each in tenants.values()) == view["memory_used_bytes"]
    assert tenants["team-a"]["commands"] == 20 and tenants["team-a"]["bytes"] > 20 * 10_000
    assert tenants["team-a"]["used_commands_per_s"] > 0 and tenants["team-a"]["throttled"] == 0
    assert tenants[""]["clients"] == 1 and "throttled" not in tenants["b,x=1%"]


def test_a_table_of_tenants_is_shown_if_there_are_tenants(shared: Child, server: Child) -> None:
    done = as_admin(shared)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    (own,) = (row for row in rows if row[:1] == ["team-a"])
    assert own[2:5] == ["20", "of", "100"] and "67%" in own
    assert any(row[:1] == ["b,x=1%"] for row in rows) and any(row[:1] == ["(default)"] for row in rows)
    assert "tenants:" not in stats("--port", str(server.port)).output


def test_a_tenant_does_not_see_the_others(shared: Child) -> None:
    with shared.client() as client:
        client.call("AUTH", "b", "secret")
        assert client.call("INFO", "tenants") == b""
        assert b"team-a" not in client.call("INFO", "everything")


# ---- Time range of each number ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "path", "rate"),
    [
        ({"cmdstat_get": "calls=100,usec=5000"}, {"cmdstat_get": "calls=120,usec=6000"}, "commands 0 calls_per_s", 10),
        ({"tenant0": "name=x,commands=5"}, {"tenant0": "name=x,commands=9"}, "tenants 0 used_commands_per_s", 2),
        ({"tenant0": "name=x,bytes=100"}, {"tenant0": "name=x,bytes=300"}, "tenants 0 used_bytes_per_s", 100),
        ({"tenant0": "name=x,commands_per_s=7"}, {"tenant0": "name=x,commands_per_s=7"}, "tenants 0 commands_per_s", 7),
        ({"keyspace_hits": "100"}, {"keyspace_hits": "120"}, "hits_per_s", 10),
        ({"keyspace_hits": "100"}, {"keyspace_hits": "20", "uptime_in_seconds": "2", "run_id": "b"}, "hits_per_s", 10),
    ],
    ids=["command", "tenant", "bytes of a tenant", "limit of a tenant", "hits", "after a restart"],
)
def test_a_rate_is_that_of_the_interval(before: dict[str, str], after: dict[str, str], path: str, rate: float) -> None:
    found: Any = Sample({"run_id": "a"} | after, 12.0).view(Sample({"run_id": "a"} | before, 10.0))
    for name in path.split():
        found = found[int(name) if name.isdigit() else name]
    assert found == rate


def test_another_kind_of_server_is_named(tmp_path: Path) -> None:
    """Symptom: against Redis the header was 'shadowserve , ,'."""
    with start_redis(tmp_path) as redis:
        port = redis.address.rpartition(":")[2]
        done = stats("--port", port)
        assert done.exit_code == 0, done.output
        assert "Redis " in done.output and "not a storage node of ShadowServe" in done.output
        assert "shadowserve ," not in done.output and "records" not in done.output
        view = json.loads(stats("--port", port, "--json").output)
        assert view["other_server"].startswith("Redis ") and view["version"] == ""
