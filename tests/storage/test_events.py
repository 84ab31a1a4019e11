"""A router's index, made from a storage node's feed, agrees with the node after evictions, restarts and loss."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq
from click.testing import CliRunner
from kv_events import AllBlocksCleared, Index, replayed_index
from machine import WAIT_MAX_S, free_port, wait_for
from preloaded import Preloaded
from storage_support import REPOSITORY, Child, Client, Start, login, make_record

from shadowserve.resp import ErrorReply
from shadowserve_tools import main

USERS = """user ann on >a ~* +@all -@admin tenant=a
user bob on >b ~* +@all -@admin tenant=b
user eve on >e ~kv:0* +@all -@admin tenant=a
user ida on >i ~* +get +set tenant=a
"""


class Router:
    """A subscriber of ``shadowserve events``, which requests lost batches again."""

    def __init__(self, port: int, folder: Path, *flags: str, password: str = "") -> None:
        self._replays = f"ipc://{folder}/replay"
        command = [sys.executable, "-m", "shadowserve_tools", "events", f"127.0.0.1:{port}", "--interval", "0.01"]
        command += ["--endpoint", f"ipc://{folder}/pub", "--replay-endpoint", self._replays, *flags]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
        self.process = Preloaded(
            command,
            cwd=REPOSITORY,
            env=clean | ({"SHADOWSERVE_STORAGE_PASSWORD": password} if password else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline().startswith("ready")
        self._context = zmq.Context()
        self._subscribed = self._context.socket(zmq.SUB)
        self._subscribed.linger = 0
        self._subscribed.connect(f"ipc://{folder}/pub")
        self._subscribed.subscribe(b"")
        self.index = self.replayed()

    def replayed(self) -> Index:
        """Return a new router's index, from batch 0 on."""
        return replayed_index(self._replays)

    def take(self) -> None:
        """Take what has been published."""
        while self._subscribed.poll(0):
            _, number, payload = self._subscribed.recv_multipart()
            at = int.from_bytes(number, "big")
            if at == max(self.index.batches, default=-1) + 1:
                self.index.take(at, payload)
            elif at not in self.index.batches:
                self.index = self.replayed()

    def wait_until_it_agrees(self, client: Client) -> None:
        def agrees() -> bool:
            self.take()
            return self.index.hashes == hashes_of(client)

        wait_for(agrees)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_MAX_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._subscribed.close()
        self._context.term()


def hashes_of(client: Client) -> set[int]:
    keys = client.call("KEYS", "*")
    assert isinstance(keys, list)
    return {int(key[3:19], 16) for key in keys if re.fullmatch(rb"kv:[0-9a-f]{64}", key)}  # type: ignore[arg-type]


def key_of(number: int) -> bytes:
    return b"kv:%016x%048x" % (number, number)


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Callable[..., Router]]:
    with contextlib.ExitStack() as routers:

        def started(port: int, *flags: str, password: str = "") -> Router:
            (folder := tmp_path / f"router-{len(list(tmp_path.iterdir()))}").mkdir()
            return routers.enter_context(Router(port, folder, *flags, password=password))

        yield started


@pytest.mark.parametrize("devices", [False, True], ids=["memory", "devices"])
def test_the_index_agrees_after_stores_evictions_expiry_deletion_flush_and_a_restart(
    start: Start, route: Callable[..., Router], tmp_path: Path, devices: bool
) -> None:
    port = str(free_port())
    flags = ["--events-bytes-max", "1 MiB", "--port", port, "--memory-budget-bytes", "64 MiB" if devices else "2 MiB"]
    if devices:
        flags += ["--devices", f'[{{"path": "{tmp_path}/device", "size": "16 MiB"}}]']
    child = start(*flags)
    client = child.client()
    record_key, record = make_record(b"r" * 32)
    assert client.call("SET", record_key, record) == b"OK" and client.call("SET", "other", "x") == b"OK"
    router = route(child.port)
    assert router.index.hashes == hashes_of(client) == {int.from_bytes(b"r" * 8, "big")}
    value = b"v" * 200_000
    for number in range(100):
        assert client.call("SET", key_of(number), value) == b"OK"
    assert len(hashes_of(client)) < 100, "nothing was evicted"
    router.wait_until_it_agrees(client)
    assert client.call("DEL", key_of(99)) == 1 and client.call("PEXPIRE", key_of(98), 50) == 1
    wait_for(lambda: client.call("EXISTS", key_of(98)) == 0)
    router.wait_until_it_agrees(client)
    assert client.call("FLUSHDB") == b"OK" and client.call("SET", key_of(1), value) == b"OK"
    router.wait_until_it_agrees(client)
    assert router.index.hashes == {1}
    child.close_clients()
    assert child.stop() == 0
    child = start(*flags)
    client = child.client()
    client.call("SET", key_of(2), value)
    router.wait_until_it_agrees(client)
    assert router.index.hashes == ({1, 2} if devices else {2})
    assert router.replayed().hashes == router.index.hashes


def test_a_new_router_and_one_that_lost_batches_learn_everything_from_a_replay(
    start: Start, route: Callable[..., Router]
) -> None:
    child = start("--events-bytes-max", "1 MiB")
    client = child.client()
    router = route(child.port, "--replay-batches", "3")
    for number in range(10):  # each in a batch of its own
        client.call("SET", key_of(number), "x")
        router.wait_until_it_agrees(client)
    assert client.call("DEL", key_of(0)) == 1
    router.wait_until_it_agrees(client)
    late = router.replayed()
    assert min(late.batches) > 3, "batch 0 is kept, so the test proves nothing"
    assert isinstance(late.batches[min(late.batches)].events[0], AllBlocksCleared) or late.hashes == hashes_of(client)
    assert late.hashes == hashes_of(client)


def test_a_tenants_feed_has_its_own_keys_only_and_needs_the_right_to_read_them(
    start_tenants: Start, route: Callable[..., Router]
) -> None:
    child = start_tenants("--events-bytes-max", "1 MiB", users=USERS)
    ann, bob, eve, ida = (login(child, name) for name in ("ann", "bob", "eve", "ida"))
    assert ann.call("SET", key_of(1), "x") == bob.call("SET", key_of(2), "x") == b"OK"
    routers = {name: route(child.port, "--user", name, password=name[0]) for name in ("ann", "bob")}
    assert routers["ann"].index.hashes == {1} and routers["bob"].index.hashes == {2}
    assert bob.call("SET", key_of(3), "x") == bob.call("SET", key_of(1), "x") == b"OK" and bob.call("FLUSHDB") == b"OK"
    assert bob.call("SET", key_of(4), "x") == b"OK" and ann.call("SET", key_of(5), "x") == b"OK"
    routers["bob"].wait_until_it_agrees(bob)
    routers["ann"].wait_until_it_agrees(ann)
    assert routers["ann"].index.hashes == {1, 5} and routers["bob"].index.hashes == {4}
    for client, said in ((eve, b"NOPERM this user may not read every key"), (ida, b"NOPERM this user has no perm")):
        reply = client.call("KV.EVENTS", "", 0)
        assert isinstance(reply, ErrorReply) and reply.startswith(said)
    anyone = child.client().call("KV.EVENTS", "", 0)
    assert isinstance(anyone, ErrorReply) and anyone.startswith(b"NOAUTH")


def test_a_slow_reader_costs_bounded_memory_and_starts_over(start: Start, route: Callable[..., Router]) -> None:
    child = start("--events-bytes-max", "128 KiB", "--metrics-port", "0")
    client = child.client()
    name, position, entries = client.call("KV.EVENTS", "", 0)  # type: ignore[misc]
    assert entries is None
    count = 12_000
    for first in range(0, count, 1_000):
        client.call("MSET", *(part for number in range(first, first + 1_000) for part in (key_of(number), "x")))
    assert int(client.info("shadowserve")["events_bytes"]) <= 128 << 10
    assert client.call("KV.EVENTS", name, position) == [name, count, None]
    assert client.call("KV.EVENTS", name, count) == [name, count, b""]
    last = b"+" + bytes.fromhex(key_of(count - 1)[3:].decode())
    assert client.call("KV.EVENTS", name, count - 1) == [name, count, last]
    for absurd in (count + 1, -1, 1 << 62):
        assert client.call("KV.EVENTS", name, absurd) == [name, count, None]
    assert child.samples()["shadowserve_storage_events_missed_total"] == 4
    assert route(child.port).index.hashes == set(range(count))


def test_without_a_log_there_is_no_feed_and_the_program_says_so(client: Client, shared_server: Child) -> None:
    reply = client.call("KV.EVENTS", "", 0)
    assert isinstance(reply, ErrorReply) and b"set events_bytes_max" in reply
    for flags, said in (
        ([f"127.0.0.1:{shared_server.port}", "--replay-endpoint", "tcp://127.0.0.1:0"], "set events_bytes_max"),
        (["--endpoint", "tcp://*:5557"], "has neither users nor TLS"),
        (["--endpoint", "udp://1"], "is not tcp://HOST:PORT"),
    ):
        done = CliRunner().invoke(main, ["events", "--endpoint", "tcp://127.0.0.1:0", *flags])
        assert done.exit_code and said in " ".join(done.output.split()), done.output
