"""Clients that people use: redis-py, redis-cli, redis-benchmark."""

import asyncio
import shutil
import subprocess

import pytest
import redis
import redis.asyncio
from machine import NEVER_S
from storage_support import Child, Client

from shadowserve.resp import encode_command


def run(*command: str, text: str = "") -> str:
    program = shutil.which(command[0])
    assert program, f"this test needs {command[0]}: install the system package redis-tools"
    done = subprocess.run([program, *command[1:]], input=text, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_does_its_everyday_work(shared_server: Child, client: Client, protocol: int) -> None:
    with redis.Redis(
        port=shared_server.port, protocol=protocol, client_name="test", health_check_interval=1
    ) as connection:
        assert connection.ping() and connection.client_getname() in ("test", b"test")
        assert connection.set("a", b"1", ex=100) and connection.get("a") == b"1" and connection.ttl("a") == 100
        assert connection.set("a", b"2", nx=True) is None and connection.exists("a", "b") == 1
        assert connection.mget("a", "b") == [b"1", None] and connection.getrange("a", 0, -1) == b"1"
        assert connection.set("b", b"x" * 3_000_000) and connection.get("b") == b"x" * 3_000_000
        assert sorted(connection.scan_iter(match="*", count=1)) == [b"a", b"b"] and connection.dbsize() == 2
        with connection.pipeline(transaction=False) as pipeline:
            for number in range(500):
                pipeline.set(f"key{number}", number)
            for number in range(500):
                pipeline.get(f"key{number}")
            assert pipeline.execute()[500:] == [b"%d" % number for number in range(500)]
        assert connection.delete("a", "b") == 2 and connection.type("a") in (b"none", "none")
        info = connection.info()
        assert info["redis_version"] == "7.0.15" and info["db0"]["keys"] == 500
        assert connection.info("shadowserve")["records"] == 0
        assert "test" in [other["name"] for other in connection.client_list()]
        assert connection.config_get("maxmemory*")["maxmemory"] == str(4 << 30)
        assert connection.command_count() == len(connection.command())
        assert connection.client_id() > 0 and connection.client_info()["resp"] in (protocol, str(protocol))
        with pytest.raises(redis.exceptions.ResponseError, match="unknown command 'LPUSH'"):
            connection.lpush("a", 1)
        assert connection.flushall() and connection.dbsize() == 0


async def test_redis_py_works_asynchronously(shared_server: Child, client: Client) -> None:
    async with redis.asyncio.Redis(port=shared_server.port) as connection:
        await asyncio.gather(*(connection.set(f"a{number}", b"x" * 50_000) for number in range(20)))
        values = await asyncio.gather(*(connection.get(f"a{number}") for number in range(20)))
        assert values == [b"x" * 50_000] * 20


def test_redis_cli_reads_writes_and_inspects(shared_server: Child, client: Client) -> None:
    port = str(shared_server.port)
    assert run("redis-cli", "-p", port, "set", "a", "hello") == "OK\n"
    assert run("redis-cli", "-p", port, "-3", "get", "a") == "hello\n"
    assert run("redis-cli", "-p", port, "--scan") == "a\n"
    assert "shadowserve_version:" in run("redis-cli", "-p", port, "info", "server")
    assert "getrange" in run("redis-cli", "-p", port, "command", "docs", "getrange")
    assert run("redis-cli", "-p", port, "-x", "set", "b", text="from a pipe") == "OK\n"
    assert run("redis-cli", "-p", port, "strlen", "b") == "11\n"
    commands = encode_command("SET", "c", "1").decode() * 100
    assert "errors: 0, replies: 100" in run("redis-cli", "-p", port, "--pipe", text=commands)
    assert "Biggest string" in run("redis-cli", "-p", port, "--bigkeys").replace("Biggest\tstring", "Biggest string")


def test_redis_benchmark_runs(shared_server: Child, client: Client) -> None:
    output = run(
        *("redis-benchmark", "-p", str(shared_server.port), "-t", "ping,set,get", "-n", "2000", "-c", "20"),
        *("-P", "16", "-d", "100", "-r", "1000", "--csv"),
    )
    rows = [line.split(",") for line in output.splitlines() if line.startswith('"')]
    measured = {row[0].strip('"'): float(row[1].strip('"')) for row in rows if row[0] != '"test"'}
    assert {"SET", "GET"} <= set(measured) and all(rate > 0 for rate in measured.values())
    assert 500 < client.call("DBSIZE") <= 1000  # type: ignore[operator]
