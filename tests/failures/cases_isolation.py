"""Attacks of one tenant on another one's time and memory, through what all tenants share: streams, link, locks, loops.

Alice fetches a prefix layer by layer all the while. Her longest wait is bounded by what it takes her alone, and by one
fair share of what is shared; the server's memory by its budget and the bound of its clients.
"""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator, Sequence

import numpy as np
import redis
from cases import Context, case
from cases_attacks import OURS, Node, command
from faulty_s3 import BUCKET, faulty_s3
from machine import WAIT_MAX_S, wait_for
from nodes import MIB
from outcomes import Outcome

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import storage_key
from shadowserve_tools.bench.peers import buckets

LAYERS = 4
_STALL_S = 5.0
"""For which the machine itself may stand still."""
_TENANTS = 3
_CLIENTS_MIB = 64
_MARGIN_MIB = 150


def records(seed: str, count: int, layer_bytes: int) -> dict[bytes, bytes]:
    """Return keys and records of a prefix."""
    layout = ChunkLayout(
        namespace=b"n" * 32, dtype=DType.UINT8, layers=LAYERS, kinds=2, vector_length=64,
        tokens=layer_bytes // 128, quantizer=Quantizer.PASSTHROUGH,
    )  # fmt: skip
    found = {}
    for number in range(count):
        name = f"{seed}/{number}".encode().rjust(32, b"\0")[-32:]
        values = np.random.default_rng(list(name)).integers(0, 256, layout.raw_bytes, np.uint8)
        found[storage_key(name)] = record.encode(name, native.Codec.NONE, layout, values.tobytes())
    return found


def request(keys: Sequence[bytes], *, rate: int = 0, layers: str = "0-3") -> bytes:
    return command("KV.LAYERS", layers, str(rate), "0", *keys)


class Prefix:
    """Alice's prefix: stored, and fetched as a whole again and again."""

    def __init__(self, node: Node, *, share_s: float = 0.0) -> None:
        """Store it, and see how long it takes alone; ``share_s`` is what it takes at a fair share of the link."""
        self.context = node.context
        self.records = records("alice", 8, 64 << 10)
        self.redis = redis.Redis(port=node.port, username="alice", password="alice", socket_timeout=4 * WAIT_MAX_S)
        self.context.enter(contextlib.closing(self.redis))
        for key, value in self.records.items():
            self.redis.set(key, value)
        bounds = [record.layer_bounds(value).tolist() for value in self.records.values()]
        self._layers = []
        for layer in range(LAYERS):
            found = [
                value[ends[layer] : ends[layer + 1]] for value, ends in zip(self.records.values(), bounds, strict=True)
            ]
            self._layers.append(np.array([len(piece) for piece in found], "<u4").tobytes() + b"".join(found))
        self.alone_s = max(self.fetch() for _ in range(20))
        self.bound_s = 3 * self.alone_s + share_s + _STALL_S

    def fetch(self) -> float:
        """Fetch it and look at its bytes; return how long that took."""
        began = time.monotonic()
        _, *layers = self.redis.execute_command("KV.LAYERS", "0-3", 0, 0, *self.records)
        seconds = time.monotonic() - began
        right = layers == self._layers
        self.context.tally.note(Outcome.RIGHT if right else Outcome.WRONG, "KV.LAYERS: other bytes")
        return seconds

    @contextlib.contextmanager
    def fetched_meanwhile(self, node: Node, budget_mib: int) -> Iterator[None]:
        """Fetch it all the while; in the end her longest wait and the server's memory are within their bounds."""
        tally = self.context.tally
        tally.measure("alone_s", self.alone_s)
        before = node.storage.resident_bytes()

        def work() -> None:
            tally.measure("longest_wait_s", self.fetch())
            tally.measure("memory_MiB", (node.storage.resident_bytes() - before) / MIB)

        with self.context.beside(work):
            yield
        waited, grown = tally.most["longest_wait_s"], tally.most["memory_MiB"]
        assert waited < self.bound_s, f"alice has waited for {waited:.2f} s, and {self.alone_s:.3f} s alone"
        bound = budget_mib + _CLIENTS_MIB + _MARGIN_MIB
        assert grown < bound, f"the server has grown by {grown:.0f} MiB"


def _connections(context: Context, node: Node, count: int) -> list[socket.socket]:
    """Return connections of mallory's, as many as are let in."""
    found = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            found.append(context.enter(contextlib.closing(node.connect())))
    return found


def _send(sock: socket.socket, data: bytes) -> None:
    """Send as long as the server takes anything."""
    sock.settimeout(0.2)
    with contextlib.suppress(OSError):
        sock.sendall(data)


@case(
    "attack: streams that last",
    "a tenant asks for its prefix at one bit a second, at the least rate, and on sixty connections that it does not "
    "read; the link is shared",
    engines=OURS,
    repetitions=1,
    short=("memory",),
)
def lasting_streams(context: Context) -> None:
    link_bits_per_s = 4e8
    node = Node(
        context,
        memory_budget_bytes=64 * MIB,
        memory_bytes=64 * MIB,
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
            context.tally.note(Outcome.WRONG, "a rate of a bit a second was taken")
        except redis.exceptions.ResponseError as error:
            context.tally.note(Outcome.REFUSED, f"a bit a second: {error}")
        socks = _connections(context, node, 120)
        for number, sock in enumerate(socks):
            _send(sock, request(list(stored), rate=1_000_000 if number % 2 else 0) * 4)
        context.pause(4.0, 6.0)


@case(
    "attack: thousands that publish",
    "two thousand connections of a tenant publish one key, and ask for hundreds of published keys without an end",
    engines=("memory",),
    repetitions=1,
    short=("memory",),
)
def many_publishers(context: Context) -> None:
    node = Node(context, memory_budget_bytes=64 * MIB, memory_bytes=64 * MIB)
    prefix = Prefix(node)
    names = [f"kv:{number:064x}" for number in range(250)]
    with prefix.fetched_meanwhile(node, 64):
        socks = _connections(context, node, 2000)
        for sock in socks:
            sock.setblocking(False)
        for data in (command("KV.PUBLISH", "60000", *names[:8]), command("KV.PUBLISHED", *names) * 4):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(data)
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "what thousands ask for at a time: it comes in the turns of one tenant")


@case(
    "attack: large requests for layers",
    "a thousand connections of a tenant with a small quota ask for a thousand keys and 32 layers each, and do not read",
    engines=OURS,
    repetitions=1,
    short=("memory",),
)
def large_layer_requests(context: Context) -> None:
    node = Node(
        context,
        memory_budget_bytes=64 * MIB,
        memory_bytes=64 * MIB,
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
        context.tally.note(Outcome.REFUSED, "requests for layers: not all of them were begun")


@case(
    "attack: a flood of cold reads",
    "a tenant asks on forty connections for hundreds of records that are in the bucket alone, which is slow",
    engines=("memory",),
    repetitions=1,
    short=("memory",),
)
def cold_flood(context: Context) -> None:
    own = context.enter(faulty_s3())
    s3 = {"bucket": BUCKET, "endpoint": own.endpoint, "gather_s": 0.1, "index_ttl_s": 0.2, "timeout_s": 20.0}
    options = {"s3": json.dumps(s3 | {"object_bytes": MIB}), "environment": buckets.CREDENTIALS}
    writer = Node(context, memory_budget_bytes=64 * MIB, memory_bytes=64 * MIB, **options)
    stored = records("mallory", 300, 16 << 10)
    mallory = writer.mallory()
    for key, value in stored.items():
        mallory.set(key, value)
    with redis.Redis(port=writer.port, username="root", password="root") as root:
        wait_for(lambda: root.info("s3")["waiting_records"] == 0 and root.info("s3")["records"] == len(stored))
    assert writer.storage.stop()
    node = Node(context, memory_budget_bytes=32 * MIB, memory_bytes=32 * MIB, **options)
    prefix = Prefix(node)
    with redis.Redis(port=node.port, username="root", password="root") as root:
        wait_for(lambda: root.info("s3")["records"] >= len(stored))
    with prefix.fetched_meanwhile(node, 32):
        own.fault = lambda asked: time.sleep(0.2)  # and the right answer
        socks = _connections(context, node, 40)
        for number, sock in enumerate(socks):
            asked = list(stored)[number % 10 * 30 :][:30]
            _send(sock, request(asked) + command("MGET", *asked))
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "cold reads of the other tenant are its own to wait for")


__all__ = ["Prefix", "cold_flood", "large_layer_requests", "lasting_streams", "many_publishers"]
