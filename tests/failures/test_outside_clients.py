"""Programs from outside the project over the pool engine: redis-py's commands, redis-benchmark's own load."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from machine import NEVER_S, WAIT_MAX_S
from nodes import MIB, Storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    node = Storage("pool", tmp_path, memory_bytes=8 * MIB).start()
    yield node
    node.close()
    assert not node.complaints()


def test_redis_benchmark_runs_over_a_pool_without_an_error(storage: Storage) -> None:
    program = shutil.which("redis-benchmark")
    assert program, "this test needs redis-benchmark: install the system package redis-tools"
    for flags in (["-d", "3"], ["-d", "3", "-P", "16"], ["-d", "100000", "-n", "400", "-r", "50"]):
        command = [program, "-p", str(storage.port), "-n", "2000", "-c", "20", "-t", "ping,set,get", "-r", "200"]
        done = subprocess.run([*command, *flags, "--csv"], capture_output=True, text=True, timeout=NEVER_S)
        assert done.returncode == 0 and "rror" not in done.stdout + done.stderr, done.stdout + done.stderr
        assert '"SET"' in done.stdout and '"GET"' in done.stdout


def _connect(storage: Storage) -> "redis.Redis":
    return redis.Redis(port=storage.port, socket_timeout=WAIT_MAX_S)


def test_redis_py_finds_after_a_kill_what_was_acknowledged(storage: Storage) -> None:
    with _connect(storage) as client:
        values = {f"key {number}": bytes([number]) * (1 + number * 5_000) for number in range(40)}
        for key, value in values.items():
            assert client.set(key, value)
        assert client.mget(list(values)) == list(values.values())
        assert client.getrange("key 30", 10, 20) == bytes([30]) * 11
        assert client.strlen("key 30") == 150_001
        assert client.delete("key 0", "key 1", "nothing") == 2
        assert client.expire("key 2", 1000) and client.persist("key 2") and client.ttl("key 2") == -1
        assert client.expire("key 3", 1000) and 0 < client.ttl("key 3") <= 1000
        with client.pipeline(transaction=False) as pipeline:
            for number in range(100):
                pipeline.set(f"piped {number}", number)
            assert all(pipeline.execute())
    storage.kill()
    storage.start()
    with _connect(storage) as client:
        there = {f"key {number}": values[f"key {number}"] for number in range(2, 40)}
        assert {key: client.get(key) for key in there} == there
        assert client.get("key 0") is None and client.exists("key 1") == 0
        assert client.ttl("key 2") == -1 and 0 < client.ttl("key 3") <= 1000
        assert client.dbsize() == len(there) + 100
        found = {key.decode() for key in client.scan_iter(count=7)}
        assert found == {*there, *(f"piped {number}" for number in range(100))}
        assert client.flushall()
    storage.kill()
    storage.start()
    with _connect(storage) as client:
        assert client.dbsize() == 0
