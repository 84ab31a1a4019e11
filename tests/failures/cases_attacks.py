"""Attacks by malicious clients while other clients work. Each case measures memory and the others' longest wait."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import redis
from callers import SHAPE, Caller, Prompt
from cases import ENGINES, KEYS, MEMORY, POOL, Context, case
from cases_clients import closed_by_server, records
from faulty_s3 import BUCKET, faulty_s3
from machine import WAIT_MAX_S, free_port, wait_for
from nodes import MIB, REPOSITORY, DataPlane, Storage
from outcomes import Outcome

from host_control.client import FetchPart
from shadowserve import record
from shadowserve.pool.volume.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS
from shadowserve_tools.bench.peers import buckets

USERS = """user default off
user root on >root ~* +@all
user alice on >alice ~* +@all -@admin tenant=alice
user mallory on >mallory ~* +@all -@admin tenant=mallory
"""


class Node:
    """A server with two tenants: alice works, mallory attacks. ``mib`` is its memory."""

    def __init__(self, context: Context, *, mib: int = 0, **options: Any) -> None:
        if mib:
            options |= {"memory_budget_bytes": mib * MIB, "memory_bytes": mib * MIB}
        users = context.folder / "users.acl"
        users.write_text(USERS)
        self.context = context
        self.storage: Storage = context.storage(users_file=users, **options)
        self.port = self.storage.port

    def alice(self) -> Caller:
        return self.context.caller(self.port, username="alice", password="alice")

    def mallory(self, **options: Any) -> "redis.Redis":
        return redis.Redis(port=self.port, username="mallory", password="mallory", socket_timeout=WAIT_MAX_S, **options)

    def connect(self) -> socket.socket:
        """Return a raw connection of mallory's; ConnectionError: no connection slot is free."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_MAX_S)
        try:
            sock.sendall(command("AUTH", "mallory", "mallory"))
            if sock.recv(16) != b"+OK\r\n":
                raise ConnectionRefusedError("not let in")
        except OSError:
            sock.close()
            raise
        return sock


def command(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


@contextlib.contextmanager
def others_work(context: Context, storage: Storage, callers: Sequence[Caller], bound_mib: int) -> Iterator[None]:
    """Run other clients during the attack. Measure their longest wait and the growth of the server's memory."""
    before = storage.resident_bytes()

    def watch() -> None:
        context.tally.measure("memory_MiB", (storage.resident_bytes() - before) / MIB)
        time.sleep(0.005)

    def working(number: int, caller: Caller) -> Callable[[], None]:
        keys = itertools.cycle(KEYS[number :: len(callers)])

        def work() -> None:
            key, began = next(keys), time.monotonic()
            caller.set(key)
            caller.get(key)
            context.tally.measure("longest_wait_s", (time.monotonic() - began) / 2)

        return work

    with context.beside(watch, *[working(*pair) for pair in enumerate(callers)]):
        yield
    grown = context.tally.most.get("memory_MiB", 0)
    assert grown < bound_mib, f"the server's memory grew by {grown:.0f} MiB"


# ---- Authenticated attackers


HTTP = [
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n%b",
    b"GET / HTTP/1.1\r\n%b",
    b"PUT /x HTTP/1.0\r\n\r\n%b",
    b"OPTIONS * HTTP/1.1\r\nOrigin: http://evil\r\n%b",
    b"get /index.html\r\n%b",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%b",
    b"Host: localhost\r\n%b",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n%b",
]
HARM = [b"FLUSHALL\r\n", command("FLUSHALL"), b"ACL SETUSER eve on nopass ~* +@all\r\n", b"SET 'key 0' eve\r\n"]


@case("attack: HTTP", ENGINES, repetitions=1)
def http_requests(context: Context) -> None:
    """Requests of a browser or a forger, with commands in lines, headers and bodies, whole and in pieces; the default
    configuration, in which everybody on the machine is administrator."""
    storage = context.storage(filled=KEYS)
    callers = [context.caller(storage.port)]
    with others_work(context, storage, callers, bound_mib=64):
        for request in HTTP:
            for harm in HARM:
                for pieces in (1, 3):
                    sock = socket.create_connection(("127.0.0.1", storage.port), timeout=WAIT_MAX_S)
                    whole = request % harm
                    with contextlib.suppress(OSError):
                        for number in range(pieces):
                            sock.sendall(whole[number * len(whole) // pieces : (number + 1) * len(whole) // pieces])
                    closed_by_server(context, "HTTP", sock)
                    sock.close()
    context.verify(storage)
    users = callers[0].redis.acl_list()
    context.tally.note(Outcome.RIGHT if len(users) == 1 else Outcome.WRONG, f"users: {users}")


@case("attack: unread replies", ENGINES, repetitions=1)
def unread_replies(context: Context) -> None:
    """A tenant asks on eight connections for 60,000 times the same value, and for pages of GETs, and reads nothing."""
    node = Node(context, mib=64)
    for size in (10, 16_000, 100_000):
        node.mallory().set(f"large {size}", bytes(size))
    with others_work(context, node.storage, [node.alice()], bound_mib=256):
        socks = [context.enter(node.connect()) for _ in range(8)]
        for number, sock in enumerate(socks):
            size = (10, 16_000, 100_000)[number % 3]
            with contextlib.suppress(OSError):
                sock.settimeout(2.0)
                sock.sendall(command("MGET", *[f"large {size}"] * 60_000))
                sock.sendall(command("GET", f"large {size}") * 20_000)
        context.pause(1.0, 1.5)
        context.tally.note(Outcome.REFUSED, "unread replies: not all of them were made")


@case("attack: refused requests", ENGINES, repetitions=1)
def unfinished_requests(context: Context) -> None:
    """Keys of 500 MB, values above the whole budget, published and half sent, by eight connections of each kind."""
    node = Node(context, mib=64)
    beginnings = [
        b"*2\r\n$3\r\nGET\r\n$500000000\r\n",
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$500000000\r\n",
        b"*3\r\n$3\r\nSET\r\n$500000000\r\n",
        b"*1048576\r\n$4\r\nMGET\r\n" + b"$1\r\nk\r\n" * 1000,
    ]
    with others_work(context, node.storage, [node.alice()], bound_mib=256):
        socks = [(begin, context.enter(node.connect())) for begin in beginnings for _ in range(8)]
        for begin, sock in socks:
            sock.settimeout(2.0)
            with contextlib.suppress(OSError):
                sock.sendall(begin)
                for _ in range(16):
                    sock.sendall(bytes(4 * MIB))
        context.tally.note(Outcome.REFUSED, "refused requests: the server did not read all of their bytes")


@case("attack: unauthenticated connections", MEMORY, repetitions=1)
def idle_strangers(context: Context) -> None:
    """More connections than there are places never authenticate, or dribble; a tenant's own take no more than its
    share."""
    node = Node(context, connections_max=60)
    alice = node.alice()
    alice.ping()
    with others_work(context, node.storage, [alice], bound_mib=64):
        for _ in range(200):
            with contextlib.suppress(OSError):
                sock = context.enter(socket.create_connection(("127.0.0.1", node.port), timeout=WAIT_MAX_S))
                sock.sendall(b"*2\r\n$4\r\nAU")
        _connections(context, node, 120)
        newcomer = node.alice()
        context.tally.note(
            Outcome.RIGHT if newcomer.ping() else Outcome.WRONG, "a tenant with a password got no connection slot"
        )


# ---- Attacks on all clients


@case("attack: pins", ENGINES, repetitions=1)
def page_of_pins(context: Context) -> None:
    """A tenant pins all that it may store, for as long as it can; the other one stores on."""
    node = Node(context, mib=8, device_bytes=24 * MIB)
    mallory = node.mallory()
    alice = node.alice()
    context.expected.losable = "evicted"  # her own records, because the store is small
    with others_work(context, node.storage, [alice], bound_mib=128):
        for number in range(1500):
            with contextlib.suppress(redis.exceptions.ResponseError):
                mallory.set(f"pinned {number}", bytes(40_000))
                mallory.execute_command("KV.PIN", 31_000_000, f"pinned {number}")
    refused = context.tally.counts[Outcome.REFUSED]
    for key in KEYS:
        if not alice.set(key):
            context.tally.note(Outcome.WRONG, "a tenant cannot store because of another tenant's pins")
    assert context.tally.counts[Outcome.REFUSED] == refused


@case("attack: FLUSHDB of many keys", ENGINES, repetitions=1)
def flush_of_many(context: Context) -> None:
    """A tenant with 30,000 keys removes them all at once, again and again, with pages of SCAN and DEL between."""
    metrics = free_port()
    count = 30_000
    node = Node(context, mib=128, metrics_port=metrics)
    if context.engine == "pool":
        node.storage.stop()
        for device in node.storage.devices:
            device["objects_max"], device["size"] = 100_000, 512 * MIB
            os.unlink(device["path"])
        node.storage.start()
    mallory = node.mallory()
    with others_work(context, node.storage, [node.alice()], bound_mib=512):
        for _ in range(2):
            with mallory.pipeline(transaction=False) as pipeline:
                for number in range(count):
                    pipeline.set(f"many {number}", b"x")
                    if len(pipeline) == 2000:
                        pipeline.execute()
                pipeline.execute()
            mallory.execute_command("MGET", *[f"many {number}" for number in range(0, count, 10)])
            mallory.scan(0, "nothing*", 50_000)
            mallory.execute_command("DEL", *[f"many {number}" for number in range(0, count, 10)])
            flushing = threading.Thread(target=mallory.flushdb)
            flushing.start()
            while flushing.is_alive():
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/healthz", timeout=WAIT_MAX_S) as page:
                    context.tally.note(Outcome.RIGHT if page.status == 200 else Outcome.WRONG, "healthz")
            context.tally.note(Outcome.RIGHT if mallory.dbsize() == 0 else Outcome.WRONG, "keys are left")


@case("attack: listening to SCAN", ENGINES, repetitions=1, short=MEMORY)
def scan_cursors(context: Context) -> None:
    """A tenant watches its own cursor while the other one stores and removes."""
    node = Node(context)
    mallory, alice = node.mallory(), node.alice()
    for number in range(50):
        mallory.set(f"own {number}", b"x")

    def cursors() -> list[int]:
        found, cursor = [], 0
        while True:
            cursor, _ = mallory.scan(cursor, count=7)
            found.append(cursor)
            if cursor == 0:
                return found

    before = cursors()
    with others_work(context, node.storage, [alice], bound_mib=64):
        for _ in range(20):
            now = cursors()
            context.tally.note(Outcome.RIGHT if now == before else Outcome.WRONG, f"cursors were {before}, then {now}")


# ---- Over a data plane


def hosts_work(context: Context, address: str) -> contextlib.AbstractContextManager[None]:
    """Store and fetch with another host during the attack, and judge every answer."""
    host = context.host(address, deadline_s=WAIT_MAX_S)
    prompts = [Prompt(f"{context.seed}/{number}", 4) for number in range(3)]
    host.store_whole(prompts)
    turns = itertools.cycle(prompts)

    def work() -> None:
        began = time.monotonic()
        host.fetch(next(turns), stored=4)
        context.tally.measure("longest_wait_s", time.monotonic() - began)

    return context.beside(work)


def log_bytes(plane: DataPlane) -> int:
    return plane.log.stat().st_size


@case("attack: shrinking segments", MEMORY, repetitions=1, short=MEMORY)
def shrinking_segments(context: Context) -> None:
    """A host cuts its shared memory off before and while the daemon writes into it; another host goes on."""
    plane = context.data_plane(context.storage().port)
    prompt = Prompt(f"{context.seed}/attack", 8)
    with hosts_work(context, plane.address):
        for number in range(12):
            evil = context.host(plane.address, deadline_s=WAIT_MAX_S)
            if number == 0:
                assert evil.store(prompt) == 8
            memory = evil._registration.acquire(WAIT_MAX_S)
            descriptor = os.dup(memory._descriptor)  # type: ignore[attr-defined]
            part = FetchPart.whole(SHAPE, evil._registration.memory_id, prompt.keys)
            call = evil.client.start_fetch(f"evil-{number}", [part], WAIT_MAX_S)
            os.ftruncate(descriptor, context.chance.choice((0, 4096, SHAPE.raw_bytes)))
            answer = call.result()
            os.close(descriptor)
            context.tally.note(Outcome.REFUSED, f"the segment shrank: {answer.reason}")
            assert plane.alive, "the daemon ended"


@case("attack: undecodable messages", MEMORY, repetitions=1, short=MEMORY)
def undecodable_messages(context: Context) -> None:
    """1,500 gRPC calls whose messages cannot be decoded; another host goes on, the log does not grow."""
    plane = context.data_plane(context.storage().port)
    with hosts_work(context, plane.address), grpc.insecure_channel(plane.address) as channel:
        began = log_bytes(plane)
        for method in ("Hello", "Lookup", "Fetch", "Store", "RegisterMemory", "Cancel"):
            call = channel.unary_unary(f"/shadowserve.v1.DataPlane/{method}")
            for _ in range(250):
                try:
                    call(b"\xff" * 40, timeout=WAIT_MAX_S)
                    context.tally.note(Outcome.WRONG, f"{method}: an invalid message got an answer")
                except grpc.RpcError as error:
                    said = error.code()  # type: ignore[attr-defined]
                    right = said is grpc.StatusCode.INVALID_ARGUMENT
                    context.tally.note(Outcome.REFUSED if right else Outcome.WRONG, f"{method}: {said.name}")
        assert log_bytes(plane) - began < 64_000, f"the log grew by {log_bytes(plane) - began} bytes"


@case("attack: hung accelerator", MEMORY, repetitions=1, short=MEMORY)
def hung_accelerator(context: Context) -> None:
    """An engine of the emulated DPU ends nothing that it is given; the daemon gives it up, says so and ends."""
    storage = context.storage()
    prompt = Prompt(f"{context.seed}/hang", 4)
    plane = context.data_plane(storage.port, codec="deflate")
    assert context.host(plane.address, deadline_s=WAIT_MAX_S).store(prompt) == 4
    plane.kill()
    for tasks in ("decompress:1", "dma:1+"):
        hung = context.data_plane(
            storage.port, environment={"DOCA_EMULATOR_HANG": tasks}, backend="doca", device_timeout_s=1
        )
        began = time.monotonic()
        assert context.host(hung.address, deadline_s=WAIT_MAX_S).fetch(prompt) == 0
        context.tally.measure("longest_wait_s", time.monotonic() - began)
        wait_for(lambda hung=hung: not hung.alive)  # the daemon ends without a signal
        assert "it is given up" in hung.log.read_text()
    assert plane.start() and context.host(plane.address, deadline_s=WAIT_MAX_S).fetch(prompt, stored=4) == 4


# ---- Devices


@case("attack: a short or foreign device", POOL, repetitions=1, short=POOL)
def wrong_devices(context: Context) -> None:
    """Cut off at its end; with foreign data in the middle or at the end; with both superblocks gone."""
    storage = context.storage(devices=1, filled=KEYS)
    assert storage.stop()
    (path,) = storage.paths
    whole = path.read_bytes()

    def refused(what: str, content: bytes) -> None:
        path.write_bytes(content)
        assert not storage.try_start(), f"{what}: the server uses the device"
        assert path.read_bytes() == content, f"{what}: the server wrote to the device"
        context.tally.note(Outcome.REFUSED, what)

    refused("cut off", whole[: len(whole) // 2])
    judged = subprocess.run(
        [sys.executable, "-m", "shadowserve_tools", "verify", str(path)],
        capture_output=True,
        cwd=REPOSITORY,
        check=False,
    )
    context.tally.note(Outcome.REFUSED if judged.returncode else Outcome.WRONG, "verify: a truncated device")
    foreign = bytearray(len(whole))
    foreign[len(whole) // 2 : len(whole) // 2 + 8 * MIB] = os.urandom(8 * MIB)
    refused("foreign data in the middle", bytes(foreign))
    gone = bytearray(whole)
    for offset in SUPERBLOCK_OFFSETS:
        gone[offset : offset + BLOCK_BYTES] = bytes(BLOCK_BYTES)
    refused("ours, without superblocks", bytes(gone))
    path.write_bytes(whole)
    storage.start()
    context.verify(storage)


# ---- Attacks of one tenant on another's time and memory
#
# Through streams, link, locks and event loops. Alice fetches a prefix layer by layer during the attack, alternately
# from the attacked node and from a control: an idle node on the same machine, which shares only the processors with the
# attacker. At the attacked node, 90 % of her waits stay within a bound: three times those at the control, plus one fair
# share of the link, plus one fair share of the processor, which another tenant may hold once for each layer. The
# longest wait may exceed the bound by a pause of the machine. The server's memory is bounded.

LAYERS = 4
_PAUSE_S = 1.0
"""Longest pause of a busy test machine."""
_TENANTS = 3
_CLIENTS_MIB = 64
_MARGIN_MIB = 150


def request(keys: Sequence[bytes], *, rate: int = 0, layers: str = "0-3") -> bytes:
    return command("KV.LAYERS", layers, str(rate), "0", *keys)


class Prefix:
    """Alice's prefix, on the attacked node and on a control; it takes ``share_s`` at her fair share of the link."""

    def __init__(self, node: Node, *, share_s: float = 0.0) -> None:
        self.context = node.context
        self.records = records("alice", 8, 64 << 10)
        control = Node(node.context, mib=32)
        self._attacked, self._control = self._client(node), self._client(control)
        bounds = [record.layer_bounds(value).tolist() for value in self.records.values()]
        self._layers = []
        for layer in range(LAYERS):
            found = [
                value[ends[layer] : ends[layer + 1]] for value, ends in zip(self.records.values(), bounds, strict=True)
            ]
            self._layers.append(np.array([len(piece) for piece in found], "<u4").tobytes() + b"".join(found))
        self._share_s = share_s
        self._alone_s = max(self._fetch(self._attacked) for _ in range(20))

    def _client(self, node: Node) -> redis.Redis:
        client = redis.Redis(port=node.port, username="alice", password="alice", socket_timeout=4 * WAIT_MAX_S)
        self.context.enter(contextlib.closing(client))
        for key, value in self.records.items():
            client.set(key, value)
        return client

    def _fetch(self, client: redis.Redis) -> float:
        began = time.monotonic()
        _, *layers = client.execute_command("KV.LAYERS", "0-3", 0, 0, *self.records)
        seconds = time.monotonic() - began
        right = layers == self._layers
        self.context.tally.note(Outcome.RIGHT if right else Outcome.WRONG, "KV.LAYERS: other bytes")
        return seconds

    @contextlib.contextmanager
    def fetched_meanwhile(self, node: Node, budget_mib: int) -> Iterator[None]:
        """Fetch the prefix repeatedly during an attack. Then check the longest wait and the server's memory."""
        tally = self.context.tally
        tally.measure("alone_s", self._alone_s)
        before = node.storage.resident_bytes()
        waits: dict[redis.Redis, list[float]] = {self._control: [], self._attacked: []}

        def work() -> None:
            for client, seconds in waits.items():
                seconds.append(self._fetch(client))
            tally.measure("memory_MiB", (node.storage.resident_bytes() - before) / MIB)

        with self.context.beside(work):
            yield
        control, attacked = (sorted(seconds) for seconds in waits.values())
        control_s, wait_s = (seconds[int(0.9 * len(seconds))] for seconds in (control, attacked))
        for name, seconds in (("control_s", control_s), ("wait_s", wait_s), ("longest_wait_s", attacked[-1])):
            tally.measure(name, seconds)
        undisturbed_s = max(self._alone_s, control_s)
        processor_s = undisturbed_s + LAYERS * sys.getswitchinterval()
        bound_s = 3 * undisturbed_s + max(self._share_s, processor_s)
        said = f"alone {self._alone_s:.3f} s, control {control_s:.3f} s, bound {bound_s:.3f} s"
        assert wait_s < bound_s, f"10 % of alice's waits exceed {wait_s:.3f} s: {said}"
        assert attacked[-1] < bound_s + _PAUSE_S, f"alice's longest wait is {attacked[-1]:.3f} s: {said}"
        grown = tally.most["memory_MiB"]
        bound = budget_mib + _CLIENTS_MIB + _MARGIN_MIB
        assert grown < bound, f"the server's memory grew by {grown:.0f} MiB"


def _connections(context: Context, node: Node, count: int) -> list[socket.socket]:
    """Return the connections of mallory's that the server accepts."""
    found = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            found.append(context.enter(node.connect()))
    return found


def _send(sock: socket.socket, data: bytes) -> None:
    """Send data as long as the server reads it."""
    sock.settimeout(0.2)
    with contextlib.suppress(OSError):
        sock.sendall(data)


@case("attack: long streams", ENGINES, repetitions=1)
def lasting_streams(context: Context) -> None:
    """A tenant asks for its prefix at one bit a second, at the least rate, and on sixty connections that it does not
    read; the link is shared."""
    link_bits_per_s = 4e8
    node = Node(
        context,
        mib=64,
        egress_bits_per_s=link_bits_per_s,
        clients_memory_bytes_max=_CLIENTS_MIB * MIB,
    )
    prefix = Prefix(node, share_s=8 * 8 * LAYERS * (64 << 10) / (link_bits_per_s / _TENANTS))
    mallory, stored = node.mallory(), records("mallory", 24, 64 << 10)
    for key, value in stored.items():
        mallory.set(key, value)
    with prefix.fetched_meanwhile(node, 64):
        try:
            mallory.execute_command("KV.LAYERS", "0-3", 1, 0, *stored)
            context.tally.note(Outcome.WRONG, "the server accepted a rate of a bit per second")
        except redis.exceptions.ResponseError as error:
            context.tally.note(Outcome.REFUSED, f"a bit per second: {error}")
        socks = _connections(context, node, 120)
        for number, sock in enumerate(socks):
            _send(sock, request(list(stored), rate=1_000_000 if number % 2 else 0) * 4)
        context.pause(4.0, 6.0)


@case("attack: thousands that publish", MEMORY, repetitions=1)
def many_publishers(context: Context) -> None:
    """Two thousand connections of a tenant publish one key, and ask for hundreds of published keys without an end."""
    node = Node(context, mib=64)
    prefix = Prefix(node)
    names = [f"kv:{number:064x}" for number in range(250)]
    with prefix.fetched_meanwhile(node, 64):
        socks = _connections(context, node, 2000)
        for sock in socks:
            sock.setblocking(False)
        for data in (command("KV.PUBLISH", "60000", *names[:8]), command("KV.PENDING", *names) * 4):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(data)
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "requests of thousands of connections: one tenant's share serves them")


@case("attack: large requests for layers", ENGINES, repetitions=1)
def large_layer_requests(context: Context) -> None:
    """A thousand connections of a tenant with a small quota ask for a thousand keys and 32 layers each, and do not
    read."""
    node = Node(
        context,
        mib=64,
        clients_memory_bytes_max=_CLIENTS_MIB * MIB,
        tenants=json.dumps({"mallory": {"bytes_max": 16 * MIB}}),
    )
    prefix = Prefix(node)
    mallory, stored = node.mallory(), records("mallory", 200, 1 << 10)
    for key, value in stored.items():
        mallory.set(key, value)
    asked = list(itertools.islice(itertools.cycle(stored), 1000))
    with prefix.fetched_meanwhile(node, 0):
        for sock in _connections(context, node, 1000):
            _send(sock, request(asked, layers="0-31"))
        context.pause(2.0, 3.0)
        context.tally.note(Outcome.REFUSED, "requests for layers: the server did not start all of them")


@case("attack: cold reads", MEMORY, repetitions=1, short=MEMORY)
def cold_flood(context: Context) -> None:
    """A tenant asks on forty connections for hundreds of records that are in the bucket alone, which is slow."""
    own = context.enter(faulty_s3())
    s3 = {"bucket": BUCKET, "endpoint": own.endpoint, "gather_s": 0.1, "index_ttl_s": 0.2, "timeout_s": 20.0}
    options = {"s3": json.dumps(s3 | {"object_bytes": MIB}), "environment": buckets.CREDENTIALS}
    writer = Node(context, mib=64, **options)
    stored = records("mallory", 300, 16 << 10)
    mallory = writer.mallory()
    for key, value in stored.items():
        mallory.set(key, value)
    with redis.Redis(port=writer.port, username="root", password="root") as root:
        wait_for(lambda: root.info("s3")["waiting_records"] == 0 and root.info("s3")["records"] == len(stored))
    assert writer.storage.stop()
    node = Node(context, mib=32, **options)
    prefix = Prefix(node)
    with redis.Redis(port=node.port, username="root", password="root") as root:
        wait_for(lambda: root.info("s3")["records"] >= len(stored))
    with prefix.fetched_meanwhile(node, 32):
        own.fault = lambda asked: time.sleep(0.2)  # then the correct answer
        socks = _connections(context, node, 40)
        for number, sock in enumerate(socks):
            asked = list(stored)[number % 10 * 30 :][:30]
            _send(sock, request(asked) + command("MGET", *asked))
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "only the other tenant waits for its cold reads")
