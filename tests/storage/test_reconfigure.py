"""Changing the configuration of a running server."""

import json
import signal
from pathlib import Path

import pytest
from machine import wait_for
from storage_support import Child, Client, Start, make_node

from shadowserve.errors import ConfigurationError
from shadowserve.resp import ErrorReply
from storage_kv.config import LIVE, StorageConfig

MIB = 1 << 20
FAILED = b"ERR CONFIG SET failed (possibly related to argument '%s') - %s"


def get(client: Client, name: str) -> str:
    found = client.call("CONFIG", "GET", name)
    assert len(found) == 2 and isinstance(found[1], bytes)
    return found[1].decode()


def test_a_smaller_budget_evicts_at_once(start: Start) -> None:
    with start("--memory-budget-bytes", "8 MiB").client() as client:
        for number in range(6):
            assert client.call("SET", f"k{number}", b"x" * MIB) == b"OK"
        assert client.call("CONFIG", "SET", "maxmemory", "3mb") == b"OK"
        assert client.call("EXISTS", "k5") == 1 and client.call("EXISTS", "k0") == 0
        assert int(client.info()["used_memory"]) <= 3 * MIB and client.info()["maxmemory"] == str(3 * MIB)
        assert get(client, "maxmemory") == get(client, "memory_budget_bytes") == str(3 * MIB)
        assert client.call("CONFIG", "SET", "memory_budget_bytes", "8 MiB") == b"OK"
        assert client.call("SET", "k6", b"x" * 4 * MIB) == b"OK"


def test_fewer_connections_are_let_in_from_then_on(start: Start) -> None:
    child = start()
    with child.client() as client:
        assert client.call("CONFIG", "SET", "maxclients", "1") == b"OK"
        for _ in range(2):
            with child.client() as second:
                assert second.receive_to_end() == b"-ERR max number of clients reached\r\n"
        assert client.info()["rejected_connections"] == "2"
        assert client.call("CONFIG", "SET", "maxclients", "2") == b"OK"
        assert child.client().call("PING") == b"PONG"


def test_the_level_and_the_form_of_the_log_follow(start: Start) -> None:
    child = start("--log-level", "error")
    with child.client() as client:
        assert get(client, "loglevel") == "warning"
        assert client.call("CONFIG", "SET", "loglevel", "notice", "log_format", "json") == b"OK"
        assert get(client, "log_level") == "info"
        client.socket.sendall(b"*x\r\n")
        client.receive_to_end()
    line = json.loads(wait_for(lambda: child.log)[0])
    assert line["event"] == "client_refused" and "Protocol error" in line["reason"]


def test_a_tenant_s_limits_follow(start: Start) -> None:
    with start("--tenants", "{'': {keys_max: 2}}").client() as client:
        for number in range(3):
            client.call("SET", f"k{number}", "x")
        assert client.call("DBSIZE") == 2
        assert client.call("CONFIG", "SET", "tenants", "{'': {keys_max: 1, commands_per_s: 1000000}}") == b"OK"
        assert client.call("DBSIZE") == 1
        assert client.call("CONFIG", "SET", "tenants", "{}") == b"OK"
        for number in range(3):
            client.call("SET", f"k{number}", "x")
        assert client.call("DBSIZE") == 3
        client.refused("CONFIG", "SET", "tenants", "{'': {keys_max: none}}")


def test_timeouts_follow(start: Start) -> None:
    with start().client() as client:
        assert client.call("CONFIG", "SET", "timeout", "1", "stall_timeout_s", "0.5") == b"OK"
        assert get(client, "timeout") == "1" and get(client, "idle_timeout_s") == "1.0"
        assert client.receive_to_end() == b""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("nosuch 1", b"ERR Unknown option or number of arguments for CONFIG SET - 'nosuch'"),
        ("maxmemory", b"ERR wrong number of arguments for 'config|set' command"),
        ("maxmemory 5mb timeout", b"ERR syntax error"),
        ("maxmemory plenty", FAILED % (b"maxmemory", b"argument must be a memory value")),
        ("maxclients many", FAILED % (b"maxclients", b"argument couldn't be parsed into an integer")),
        ("port 1", FAILED % (b"port", b"can't set immutable config")),
        ("maxmemory 5mb maxmemory 6mb", FAILED % (b"maxmemory", b"duplicate parameter")),
    ],
)
def test_errors_are_those_of_redis(client: Client, redis_port: int, arguments: str, error: bytes) -> None:
    assert client.call("CONFIG", "SET", *arguments.split()) == error
    if not arguments.startswith("port"):
        with Client(redis_port) as reference:
            assert reference.call("CONFIG", "SET", *arguments.split()) == error


@pytest.mark.parametrize(
    ("arguments", "name", "cause"),
    [
        ("maxmemory 5", "maxmemory", "greater than or equal to"),
        ("maxclients 0", "maxclients", "greater than or equal to 1"),
        ("host 0.0.0.0", "host", "can't set immutable config"),
        ("loglevel loud", "loglevel", "must be one of the following: debug, verbose, notice, warning"),
        ("stall_timeout_s [", "stall_timeout_s", "is not a YAML value"),
    ],
)
def test_invalid_changes_are_refused_with_their_reason(client: Client, arguments: str, name: str, cause: str) -> None:
    said = client.call("CONFIG", "SET", *arguments.split())
    assert isinstance(said, ErrorReply)
    assert said.startswith(f"ERR CONFIG SET failed (possibly related to argument '{name}') - ".encode())
    assert cause.encode() in said


def test_a_change_is_all_or_nothing(client: Client) -> None:
    before = get(client, "maxmemory"), get(client, "timeout")
    client.refused("CONFIG", "SET", "timeout", "7", "maxmemory", "5")
    assert (get(client, "maxmemory"), get(client, "timeout")) == before


def test_secrets_are_neither_shown_nor_set(client: Client) -> None:
    assert client.call("CONFIG", "GET", "*pass*") == []
    assert client.call("CONFIG", "SET", "password", "x") == (
        b"ERR Unknown option or number of arguments for CONFIG SET - 'password'"
    )


def test_rewrite_is_refused_with_a_hint(client: Client) -> None:
    assert b"send the server SIGHUP" in client.refused("CONFIG", "REWRITE")


# ---- SIGHUP ----------------------------------------------------------------------------------------------------------


def reload(child: Child, event: str) -> str:
    """Reload the configuration; return the log line with the result."""
    known = len(child.log)
    child.process.send_signal(signal.SIGHUP)
    lines: list[str] = wait_for(lambda: [line for line in child.log[known:] if event in line])
    return lines[0]


def test_sighup_reads_the_file_again(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "storage.yaml"
    path.write_text("storage: {memory_budget_bytes: 8 MiB, stall_timeout_s: 7}\n")
    child = start("--config", str(path), "--connections-max", "9")
    with child.client() as client:
        path.write_text("storage: {memory_budget_bytes: 4 MiB, connections_max: 5, bulk_bytes_max: 1 MiB}\n")
        line = reload(child, "configuration_reloaded")
        assert "applied='memory_budget_bytes,stall_timeout_s'" in line and "needs_restart='bulk_bytes_max'" in line
        assert get(client, "maxmemory") == str(4 * MIB) and get(client, "stall_timeout_s") == "60.0"
        assert get(client, "maxclients") == "9"  # a flag has precedence over the file, as at the start


@pytest.mark.parametrize("text", ["storage: {nosuch: 1}", "storage: {port: [", "storage: {memory_budget_bytes: 1}"])
def test_a_file_that_cannot_be_used_changes_nothing(start: Start, tmp_path: Path, text: str) -> None:
    path = tmp_path / "storage.yaml"
    path.write_text("storage: {memory_budget_bytes: 8 MiB}\n")
    child = start("--config", str(path))
    path.write_text(text)
    assert "nothing has changed" in reload(child, "configuration_refused")
    with child.client() as client:
        assert get(client, "maxmemory") == str(8 * MIB)


# ---- Within the process ----------------------------------------------------------------------------------------------


def test_if_one_part_cannot_apply_a_change_the_others_roll_back() -> None:
    node = make_node()
    changes = node.reconfiguration
    seen: list[int] = []

    def refuse(old: StorageConfig, new: StorageConfig) -> None:
        raise ConfigurationError("stall_timeout_s: no")

    changes.follow("connections_max", lambda old, config: seen.append(config.connections_max))
    changes.follow("stall_timeout_s", refuse)
    with pytest.raises(ConfigurationError, match="no"), node.lock:
        changes.change({"connections_max": 5, "stall_timeout_s": 9})
    assert seen == [5, 10_000] and node.config == StorageConfig()


def test_reloading_without_a_configuration_is_an_error() -> None:
    node = make_node()
    with pytest.raises(ConfigurationError, match="without a configuration"):
        node.reconfiguration.reload(node.lock)


def test_a_device_s_budget_and_the_scrub_follow_and_its_metrics_are_there(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "device")
    config = tmp_path / "storage.yaml"
    config.write_text(f"storage: {{devices: [{{path: {path}, size: 64 MiB, bandwidth: 100 MiB}}], metrics_port: 0}}\n")
    child = start("--config", str(config))
    with child.client() as client:
        assert client.call("SET", "a", b"x" * MIB) == b"OK"
        assert client.call("CONFIG", "SET", "scrub_bytes_per_s", "0") == b"OK"
        assert b"only bytes_max" in client.refused("CONFIG", "SET", "devices", "[]")
        budget = f"{{path: {path}, size: 64 MiB, bandwidth: 100 MiB, bytes_max: 8 MiB, write_bytes_per_day: 1 GiB}}"
        config.write_text(f"storage: {{devices: [{budget}], metrics_port: 0}}\n")
        assert "applied='devices,scrub_bytes_per_s'" in reload(child, "configuration_reloaded")
        label = f'device="{path}"'
        samples = child.samples()
        assert samples[f"shadowserve_storage_device_capacity_bytes{{{label}}}"] == 8 * MIB
        assert samples[f"shadowserve_storage_device_wear_budget_bytes{{{label}}}"] == 1 << 30
        assert samples[f"shadowserve_storage_device_healthy{{{label}}}"] == 1
        name = "shadowserve_storage_device_operation_duration_seconds_count"
        assert samples[f'{name}{{{label},operation="write"}}'] > 0
        assert child.http("/readyz")[0] == 200


def test_every_key_that_can_change_is_one() -> None:
    assert set(LIVE) <= set(StorageConfig.model_fields)
