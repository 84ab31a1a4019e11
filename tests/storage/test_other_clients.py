"""Redis and Valkey clients: supported features, and the errors for unsupported ones."""

import importlib
import shutil
import subprocess
from typing import Any

import pytest
import redis
from machine import WAIT_MAX_S
from storage_support import Child

LIBRARIES = ["redis", "valkey"]


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def store(library: Any, protocol: int, shared_server: Child) -> Any:
    """A client of the library."""
    name = {"redis": "Redis", "valkey": "Valkey"}[library.__name__]
    with getattr(library, name)(port=shared_server.port, protocol=protocol) as store:
        assert store.flushall()
        yield store


def test_a_default_pipeline_is_a_working_transaction(store: Any, library: Any) -> None:
    values = {f"key:{number}": bytes([number]) * 40_000 for number in range(50)}
    with store.pipeline() as pipeline:
        for key, value in values.items():
            pipeline.set(key, value)
        assert pipeline.execute() == [True] * 50
        for key in values:
            pipeline.get(key)
        assert pipeline.execute() == list(values.values())
        pipeline.set("a", "1").incr("a").get("a")
        with pytest.raises(library.exceptions.ResponseError, match="unknown command 'INCRBY'"):
            pipeline.execute()
        assert store.get("a") is None
    with store.pipeline(transaction=False) as pipeline:
        assert pipeline.set("a", "1").get("a").delete("a", "b").execute() == [True, b"1", 1]


def test_a_changed_watched_key_fails_the_transaction(store: Any, library: Any) -> None:
    def double(pipeline: Any) -> None:
        value = int(pipeline.get("n"))
        pipeline.multi()
        pipeline.set("n", 2 * value)

    store.set("n", 3)
    assert store.transaction(double, "n") == [True] and store.get("n") == b"6"
    with store.pipeline() as pipeline:
        pipeline.watch("n")
        pipeline.multi()
        pipeline.set("n", 1)
        store.set("n", 7)
        with pytest.raises(library.exceptions.WatchError):
            pipeline.execute()
    assert store.get("n") == b"7"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_commands_of_cache_clients_work(store: Any, protocol: int) -> None:
    assert store.setex("s", 1000, "v") and store.psetex("s", 1_000_000, "v") and not store.setnx("s", "x")
    assert store.getset("s", "y") == b"v" and store.getex("s", ex=1000) == b"y" and store.getdel("s") == b"y"
    assert store.mset({"a": "1", "b": b"\0" * 70_000}) and not store.msetnx({"a": "2", "c": "3"})
    assert sorted(store.keys("*")) == sorted(store.scan_iter()) == [b"a", b"b"]
    assert store.expireat("a", 99_999_999_999) and store.expiretime("a") == 99_999_999_999
    assert store.pexpireat("a", 99_999_999_999_001, gt=True) and store.pexpiretime("a") == 99_999_999_999_001
    assert store.touch("a", "none") == 1 and store.unlink("a", "b") == 2
    assert store.client_kill_filter(_id=10**12) == 0 and store.client_setname("me") and store.client_no_evict("ON")
    assert any(client["name"] == "me" for client in store.client_list())
    assert store.client_id() > 0 and str(store.client_info()["resp"]) == str(protocol)
    assert store.set("db", 1) and store.info()["db0"]["keys"] == 1 and store.info("shadowserve")["records"] == 0
    assert store.command_getkeys("MSET", "a", "1", "b", "2") in (["a", "b"], [b"a", b"b"])
    assert store.command_count() == len(store.command()) < len(store.command_list())
    assert store.info("server")["redis_version"].startswith("7.0.") and store.config_get("save") == {"save": ""}
    assert store.config_get("maxmemory*")["maxmemory"] == str(4 << 30)


def test_unsupported_commands_are_errors_with_their_names(store: Any, library: Any) -> None:
    refused = [
        lambda: store.incr("n"), lambda: store.hset("h", "field", "value"), lambda: store.lpush("l", "x"),
        lambda: store.eval("return 1", 0), lambda: store.publish("channel", "x"), lambda: store.append("a", "x"),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(library.exceptions.ResponseError, match="unknown command"):
            call()
    with pytest.raises(library.exceptions.ResponseError, match="DB index is out of range"):
        store.execute_command("SELECT", 1)
    lock = store.lock("lock", timeout=1000)
    assert lock.acquire(blocking=False)
    with pytest.raises(library.exceptions.ResponseError, match="unknown command 'EVALSHA'"):
        lock.release()


@pytest.mark.parametrize("name", LIBRARIES)
async def test_asynchronous_clients(name: str, shared_server: Child) -> None:
    module = importlib.import_module(f"{name}.asyncio")
    store = {"redis": "Redis", "valkey": "Valkey"}[name]
    async with getattr(module, store)(port=shared_server.port) as client:
        async with client.pipeline() as pipeline:
            pipeline.set("a", b"x" * 500_000).get("a")
            assert await pipeline.execute() == [True, b"x" * 500_000]
        assert await client.delete("a") == 1


def test_the_parsers_with_and_without_hiredis_read_the_same(shared_server: Child, protocol: int) -> None:
    """redis-py parses with hiredis if it is installed, otherwise with its own parsers."""
    assert importlib.import_module("redis.utils").HIREDIS_AVAILABLE
    parsers = importlib.import_module("redis._parsers")
    found = []
    for parser in (parsers._HiredisParser, parsers._RESP2Parser if protocol == 2 else parsers._RESP3Parser):
        pool = redis.ConnectionPool(port=shared_server.port, protocol=protocol, parser_class=parser)
        with redis.Redis(connection_pool=pool) as store:
            with store.pipeline() as pipeline:
                pipeline.set("a", b"\r\n" * 50_000).get("a").mget("a", "none").exists("a").ttl("a").command()
                found.append(pipeline.execute())
        pool.close()
    assert found[0][:5] == found[1][:5] == [True, b"\r\n" * 50_000, [b"\r\n" * 50_000, None], 1, -1]


def run(*arguments: str, given: str = "") -> str:
    program = shutil.which(arguments[0])
    assert program, f"install the system package redis-tools, which has {arguments[0]}"
    done = subprocess.run(
        [program, *arguments[1:]], input=given, capture_output=True, text=True, timeout=WAIT_MAX_S, check=True
    )
    return done.stdout + done.stderr


def test_redis_cli(shared_server: Child) -> None:
    cli = ("redis-cli", "-p", str(shared_server.port))
    assert run(*cli, "FLUSHALL") == "OK\n" and run(*cli, "SET", "key:1", "x y") == "OK\n"
    assert run(*cli, "--json", "MGET", "key:1", "none") == '["x y",null]\n'
    assert run(*cli, "-3", "--no-raw", "GET", "none") == "(nil)\n"
    assert run(*cli, given="MULTI\nSET a 1\nGET a\nEXEC\n") == "OK\nQUEUED\nQUEUED\nOK\n1\n"
    assert run(*cli, "--scan", "--pattern", "key:*") == "key:1\n"
    assert "Biggest string found" in run(*cli, "--bigkeys")
    piped = "".join(f"*3\r\n$3\r\nSET\r\n$5\r\np{number:04}\r\n$1\r\nv\r\n" for number in range(1000))
    assert "errors: 0, replies: 1000" in run(*cli, "--pipe", given=piped)
    assert run(*cli, "-r", "3", "PING") == "PONG\n" * 3
    assert run("redis-cli", "-u", f"redis://127.0.0.1:{shared_server.port}/0", "DBSIZE") == "1002\n"
    assert run(*cli, "CLIENT", "KILL", "ID", "999999") == "0\n"
    assert run(*cli, "-x", "SET", "b", given="from a pipe") == "OK\n" and run(*cli, "STRLEN", "b") == "11\n"
    assert "shadowserve_version:" in run(*cli, "INFO", "server")
    assert "GET" in run(*cli, "COMMAND", "DOCS", "GET").upper()


BENCHMARKS = {
    "all options": ["-t", "ping,set,get,mset", "-n", "300", "-c", "10", "-P", "8", "-r", "100", "-d", "64", "-q"],
    "one connection at a time": ["-t", "set,get", "-n", "50", "-c", "5", "-k", "0", "-q"],
    "threads and RESP3": ["-t", "set,get", "-n", "200", "--threads", "2", "-3", "-q"],
    "any command": ["-n", "100", "-r", "10", "-q", "SET", "key:__rand_int__", "value"],
    "CSV": ["-t", "set,get", "-n", "100", "--csv"],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_redis_benchmark(name: str, shared_server: Child) -> None:
    options = BENCHMARKS[name]
    told = run("redis-benchmark", "-p", str(shared_server.port), *options)
    assert "Error" not in told and "Could not" not in told
    tests = options[1].split(",") if options[0] == "-t" else ["set"]
    for test in tests:
        assert test.upper() in told
    rates = told.count('","') if "--csv" in options else told.count("requests per second")
    assert rates >= len(tests)
