"""A router's index, made from a storage node's feed, agrees with the node after evictions, restarts and loss."""

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from kv_events import DECODER, END, AllBlocksCleared, Router, replayed_index
from machine import Clock, free_port, wait_for
from storage_support import Child, Client, Start, login, make_record

import shadowserve_tools.events
from shadowserve.errors import StorageUnavailableError
from shadowserve.resp import ErrorReply
from shadowserve_tools import main
from shadowserve_tools.events import Feed, Publisher, Relay
from shadowserve_tools.storage_client import Login, StorageClient

USERS = """user ann on >a ~* +@all -@admin tenant=a
user bob on >b ~* +@all -@admin tenant=b
user eve on >e ~kv:0* +@all -@admin tenant=a
user ida on >i ~* +get +set tenant=a
"""


class _Router(Router):
    def wait_until_it_agrees(self, client: Client) -> None:
        wait_for(lambda: self.agrees(hashes_of(client)))


def hashes_of(client: Client) -> set[int]:
    keys = client.call("KEYS", "*")
    return {int(key[3:19], 16) for key in keys if re.fullmatch(rb"kv:[0-9a-f]{64}", key)}


def key_of(number: int) -> bytes:
    return b"kv:%016x%048x" % (number, number)


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Callable[..., _Router]]:
    with contextlib.ExitStack() as routers:

        def started(port: int, *flags: str, password: str = "") -> _Router:
            (folder := tmp_path / f"router-{len(list(tmp_path.iterdir()))}").mkdir()
            return routers.enter_context(_Router(port, folder, *flags, password=password))

        yield started


@pytest.mark.parametrize("devices", [False, True], ids=["memory", "devices"])
def test_the_index_agrees_after_stores_evictions_expiry_deletion_flush_and_a_restart(
    start: Start, route: Callable[..., _Router], tmp_path: Path, devices: bool
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
    start: Start, route: Callable[..., _Router]
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
    assert min(late.batches) > min(router.index.batches) + 3, "the first batch is kept, so the test proves nothing"
    assert isinstance(late.batches[min(late.batches)].events[0], AllBlocksCleared) or late.hashes == hashes_of(client)
    assert late.hashes == hashes_of(client)


def test_a_new_router_soon_after_another_lacks_nothing_that_is_not_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: within 10 s after a replay with everything stored, another began in the middle of what had changed."""
    clock = Clock()
    monkeypatch.setattr(shadowserve_tools.events, "time", SimpleNamespace(**vars(time) | {"monotonic": clock}))
    client = (child := start("--events-bytes-max", "1 MiB")).client()
    feed = Feed(lambda: StorageClient(Login.at(f"127.0.0.1:{child.port}")))
    publisher = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "", 3)
    relay = Relay(feed, publisher, 0.01)
    with contextlib.closing(feed), contextlib.closing(publisher), ThreadPoolExecutor(1) as router:
        for second in (False, True):
            for number in range(5):  # more batches than are kept
                client.call("SET", key_of(5 * second + number), "x")
                relay.turn()
            assert publisher.lacks(0)
            replay = router.submit(replayed_index, f"tcp://127.0.0.1:{publisher.replay_port}")
            if second:
                wait_for(lambda: relay.turn() or relay._early or replay.done())  # noqa: B023
                clock.now += 10
            wait_for(lambda: relay.turn() or replay.done())  # noqa: B023
            assert replay.result().hashes == hashes_of(client)


def test_a_router_notices_that_the_program_ended_and_began_again(start: Start, route: Callable[..., _Router]) -> None:
    client = (child := start("--events-bytes-max", "1 MiB")).client()
    client.call("SET", key_of(1), "x")
    router = route(child.port)
    assert router.index.hashes == {1}
    router.stop()
    wait_for(lambda: router.take() or not router.index.hashes)
    router.index.hashes.add(1)  # as a router that has lost the last batch
    client.call("DEL", key_of(1))
    router.start()
    numbers = itertools.count(2)

    def noticed() -> bool:
        client.call("SET", key_of(next(numbers)), "x")  # the subscriber connects again after the first batches
        router.take()
        return 1 not in router.index.hashes

    wait_for(noticed)
    router.wait_until_it_agrees(client)


def test_a_client_that_reads_late_gets_the_end_of_its_last_replay() -> None:
    publisher = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "", 100)
    for _ in range(100):
        publisher.publish([{"type": "BlockStored", "block_hashes": [1 << 63] * 20_000}])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger, asking.rcvhwm = 0, 1
        asking.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        for _ in range(3):
            asking.send_multipart((b"", bytes(8)))
            for client, first in wait_for(lambda: publisher.wait(0.1)):
                publisher.replay(client, first)
        found: list[bytes] = []

        def ended() -> bool:
            publisher.wait(0)
            while asking.poll(0 if found[-1:] != [END] else 200):
                found.append(asking.recv_multipart()[2])
            return found[-1:] == [END]

        wait_for(ended)
    publisher.close()
    first = int.from_bytes(found[-101], "big")
    assert found[-101:-1] == [number.to_bytes(8, "big") for number in range(first, first + 100)]


class ScriptedNode:
    """A node with one key in each page of SCAN, whose log gets an entry with each page and keeps the last ones."""

    def __init__(self, pages: int, kept: int) -> None:
        self.pages, self.kept, self.end = pages, kept, 0
        self.fails_at = 0

    def call(self, command: str, *arguments: Any) -> Any:
        if command == "SCAN":
            if (page := int(arguments[0])) == self.fails_at - 1:
                self.fails_at = 0
                raise StorageUnavailableError("lost")
            self.end += 1
            return [b"%d" % ((page + 1) % self.pages), [key_of(page)]]
        name, position = arguments
        has_it = name == b"log" and self.end - self.kept <= int(position) <= self.end
        return [b"log", self.end, (b"+" + bytes(32)) * (self.end - int(position)) if has_it else None]

    def close(self) -> None:
        pass

    def hashes(self, feed: Feed) -> set[int]:
        found: set[int] = set()
        for event in itertools.chain.from_iterable(feed.poll()):
            found = found | {*event["block_hashes"]} if event["type"] == "BlockStored" else set()
        return found


def test_a_connection_lost_during_a_snapshot_begins_the_snapshot_again() -> None:
    node = ScriptedNode(pages=5, kept=100)
    feed = Feed(lambda: node)
    node.fails_at = 3
    with pytest.raises(StorageUnavailableError, match="lost"):
        node.hashes(feed)
    assert node.hashes(feed) == set(range(5))


def test_a_snapshot_ends_that_takes_longer_than_the_log_keeps_and_pauses_where_it_cannot() -> None:
    slow, short = ScriptedNode(pages=200, kept=40), ScriptedNode(pages=200, kept=20)
    feed = Feed(lambda: slow)
    assert slow.hashes(feed) == set(range(200)) and not slow.hashes(feed)
    hopeless = Feed(lambda: short)
    assert not short.hashes(hopeless) and not short.hashes(hopeless)
    assert (feed.started_over, hopeless.started_over) == (1, 1)


def test_a_router_that_lost_the_last_batches_of_an_idle_node_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a router that connected again had an empty index until the next change of what is stored."""
    monkeypatch.setattr(shadowserve_tools.events, "_IDLE_S", 0.05)
    node = ScriptedNode(pages=5, kept=100)
    publisher = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "", 100)
    relay = Relay(Feed(lambda: node), publisher, 0.01)
    relay.turn()
    with zmq.Context() as context, context.socket(zmq.SUB) as subscribed:
        subscribed.linger = 0
        subscribed.connect(f"tcp://127.0.0.1:{publisher.port}")
        subscribed.subscribe(b"")
        wait_for(lambda: relay.turn() or subscribed.poll(0))
        _, number, payload = subscribed.recv_multipart()
        assert not publisher.lacks(0) and DECODER.decode(payload).events == []
        publisher.close()
    assert int.from_bytes(number, "big") > 0


def test_a_tenants_feed_has_its_own_keys_only_and_needs_the_right_to_read_them(
    start_tenants: Start, route: Callable[..., _Router]
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
        assert client.refused("KV.EVENTS", "", 0).startswith(said)
    anyone = child.client().call("KV.EVENTS", "", 0)
    assert isinstance(anyone, ErrorReply) and anyone.startswith(b"NOAUTH")


def test_a_slow_reader_costs_bounded_memory_and_starts_over(start: Start, route: Callable[..., _Router]) -> None:
    child = start("--events-bytes-max", "128 KiB", "--metrics-port", "0")
    client = child.client()
    name, position, entries = client.call("KV.EVENTS", "", 0)
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
    assert b"set events_bytes_max" in client.refused("KV.EVENTS", "", 0)
    for flags, said in (
        ([f"127.0.0.1:{shared_server.port}", "--replay-endpoint", "tcp://127.0.0.1:0"], "set events_bytes_max"),
        (["--endpoint", "tcp://*:5557"], "has neither users nor TLS"),
        (["--endpoint", "udp://1"], "is not tcp://HOST:PORT"),
    ):
        done = CliRunner().invoke(main, ["events", "--endpoint", "tcp://127.0.0.1:0", *flags])
        assert done.exit_code and said in " ".join(done.output.split()), done.output
