"""Attacks of one tenant on another's time and memory, through shared resources: streams, link, locks, event loops.

Alice fetches a prefix layer by layer during the attack, alternately from the attacked node and from a control. The
control is an idle node on the same machine; it shares only the processors with the attacker. At the attacked node,
90 % of her waits stay within a bound: three times those at the control, plus one fair share of the link, plus one fair
share of the processor, which another tenant may hold once for each layer. The longest wait may exceed the bound by a
pause of the machine. The server's memory stays within its budget plus its clients' bound.
"""

import contextlib
import itertools
import json
import socket
import sys
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
_PAUSE_S = 1.0
"""Longest pause of a busy test machine."""
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
    """Alice's prefix, stored on a node and on a control.

    Args:
        node: Node under attack.
        share_s: Seconds that the prefix takes at alice's fair share of the node's link.
    """

    def __init__(self, node: Node, *, share_s: float = 0.0) -> None:
        self.context = node.context
        self.records = records("alice", 8, 64 << 10)
        control = Node(node.context, memory_budget_bytes=32 * MIB, memory_bytes=32 * MIB)
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
        """Fetch the prefix and check its bytes. Return the seconds of the fetch."""
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
            found.append(context.enter(contextlib.closing(node.connect())))
    return found


def _send(sock: socket.socket, data: bytes) -> None:
    """Send data as long as the server reads it."""
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
            context.tally.note(Outcome.WRONG, "the server accepted a rate of a bit per second")
        except redis.exceptions.ResponseError as error:
            context.tally.note(Outcome.REFUSED, f"a bit per second: {error}")
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
        for data in (command("KV.PUBLISH", "60000", *names[:8]), command("KV.PENDING", *names) * 4):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(data)
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "requests of thousands of connections: one tenant's share serves them")


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
        context.tally.note(Outcome.REFUSED, "requests for layers: the server did not start all of them")


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
        own.fault = lambda asked: time.sleep(0.2)  # then the correct answer
        socks = _connections(context, node, 40)
        for number, sock in enumerate(socks):
            asked = list(stored)[number % 10 * 30 :][:30]
            _send(sock, request(asked) + command("MGET", *asked))
        context.pause(4.0, 6.0)
        context.tally.note(Outcome.REFUSED, "only the other tenant waits for its cold reads")
