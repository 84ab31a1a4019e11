"""A bucket that fails, or that several storage nodes share: real nodes, and hosts that fetch through data planes.

The bucket is Ceph's gateway if it is installed and supports the case, else the tests' own server.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import redis
from callers import Host
from cases import MEMORY, Context, add, case
from cases_dataplane import CHUNKS, Work, prompts_of
from faulty_s3 import BUCKET, LIES, Answer, faulty_s3
from machine import WAIT_MAX_S, wait_for
from nodes import MIB, DataPlane, Storage
from outcomes import Tally

from shadowserve_tools.bench.peers import buckets

_PROMPTS = 8
_WORDS = {
    "denied": "403 AccessDenied",
    "expired": "a credential has expired",
    "skewed": "403 RequestTimeTooSkewed",
    "absent": "404 for objects that are there",
    "precondition": "412 for reads",
    "slow_down": "503 SlowDown",
    "broken": "500 for each read",
    "moved": "301 to nowhere",
    "redirected": "307 to an unused address",
    "truncated": "each body ends after 1,000 bytes",
    "wrong_range": "another range than was asked for",
    "no_range": "200 and the whole object for a range",
    "another_body": "another body, of another length",
    "same_length": "another body, of the same length",
}


class _Bucket:
    """A bucket, nodes over it, and prompts that it stores. ``own`` is the tests' own server, if ``real`` is False.

    The bucket has all prompts if ``filled``.
    """

    def __init__(self, context: Context, *, real: bool = True, filled: bool = True) -> None:
        self.context = context
        self.prompts = prompts_of(context, _PROMPTS)
        if real and not buckets.MISSING:
            endpoint = context.enter(buckets.ceph_gateway(BUCKET))
        else:
            self.own = context.enter(faulty_s3())
            endpoint = self.own.endpoint
        self.port = urlsplit(endpoint).port or 0
        if filled:
            self.fill(self.node())

    def node(self, port: int = 0, *, reads_only: bool = False, secret: str = "", **s3: object) -> Storage:
        """Start a node, with ``port`` through a proxy. A node that only reads is too small for all prompts."""
        given = {"bucket": BUCKET, "endpoint": f"http://127.0.0.1:{port or self.port}", "gather_s": 0.1}
        given |= {"index_ttl_s": 0.2, "timeout_s": 1.0, "object_bytes": MIB}
        given |= {"write": "never"} if reads_only else {}
        credentials = buckets.CREDENTIALS | ({"AWS_SECRET_ACCESS_KEY": secret} if secret else {})
        return self.context.storage(
            memory_bytes=MIB if reads_only else 64 * MIB, s3=json.dumps(given | s3), environment=credentials
        )

    def hosts(self, *nodes: Storage) -> DataPlane:
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        return self.context.data_plane(nodes[0].port, storage_nodes=json.dumps(addresses))

    def reading(self, port: int = 0) -> DataPlane:
        """Start a node that only reads and knows all prompts, and a data plane over it."""
        reader = self.node(port, reads_only=True)
        self.await_known(reader)
        return self.hosts(reader)

    def fill(self, node: Storage) -> None:
        """Store all prompts in a node, and wait until they are in the bucket."""
        self.context.host(self.hosts(node).address).store_whole(self.prompts)
        self.await_known(node)

    def await_known(self, node: Storage) -> None:
        def known() -> bool:
            found = s3_of(node)
            return (found["records"], found["waiting_records"]) == (_PROMPTS * CHUNKS, 0)

        wait_for(known)

    def fetching(self, plane: DataPlane, losable: str = "") -> contextlib.AbstractContextManager[None]:
        """Run two hosts that fetch at random until the context ends."""
        work = Work(self.context, plane, self.prompts)
        work.stored = dict.fromkeys(work.stored, CHUNKS)
        work.losable, work.storing = losable, False
        return work.running()

    @contextlib.contextmanager
    def fetched(self, plane: DataPlane, losable: str = "") -> Iterator[None]:
        """Run these hosts until the context ends. Then the nodes must reach the bucket again."""
        with self.fetching(plane, losable):
            yield
        self.verify(plane)

    def verify(self, plane: DataPlane) -> None:
        """Wait until the nodes reach the bucket. Then check that no record is lost."""
        with contextlib.closing(Host(plane.address, Tally())) as quiet:
            for prompt in self.prompts:
                wait_for(lambda prompt=prompt: quiet.fetch(prompt) == CHUNKS)  # type: ignore[misc]
        host = self.context.host(plane.address, deadline_s=WAIT_MAX_S)
        for prompt in self.prompts:
            host.fetch(prompt, stored=CHUNKS)


def s3_of(node: Storage) -> dict[str, int]:
    with redis.Redis(port=node.port) as client:
        found = client.info("s3")
    return {name: int(value) for name, value in found.items() if isinstance(value, int)}


def _lies(context: Context, how: str) -> None:
    bucket = _Bucket(context, real=False)
    plane = bucket.reading()
    bucket.own.fault = LIES[how]
    with bucket.fetched(plane, _WORDS[how]):
        context.pause(0.8, 1.2)
        bucket.own.fault = lambda asked: None


for _how in LIES:
    _what = f"{_WORDS[_how]}, while hosts fetch what only the bucket has; then it is well again."
    _short = MEMORY if _how == "same_length" else ()
    add(
        f"bucket_{_how}", "bucket refuses or lies", _what, MEMORY, partial(_lies, how=_how), repetitions=1, short=_short
    )


@case("bucket refuses or lies", MEMORY)
def bucket_wrong_secret(context: Context) -> None:
    """A node with a wrong secret; restarted with the right one."""
    bucket = _Bucket(context)
    rejected = bucket.node(reads_only=True, secret="wrong")
    plane = bucket.hosts(rejected)
    with bucket.fetching(plane, "" if buckets.MISSING else "its secret is wrong"):
        context.pause(0.5, 0.8)
    rejected.kill()
    rejected.environment = buckets.CREDENTIALS
    rejected.start()
    bucket.verify(plane)


@case("bucket away", MEMORY)
def bucket_away_at_start(context: Context) -> None:
    """At the node's start; then it is there."""
    bucket = _Bucket(context)
    proxy = context.proxy(1)  # no process listens on this port
    plane = bucket.hosts(bucket.node(proxy.port, reads_only=True))
    with bucket.fetched(plane, "the bucket is away"):
        context.pause(0.5, 0.8)
        proxy.target = bucket.port
        context.pause(0.5, 0.8)


@case("bucket away", MEMORY)
def bucket_away_mid_read(context: Context) -> None:
    """Connections break in the middle of bodies, again and again."""
    bucket = _Bucket(context)
    proxy = context.proxy(bucket.port)
    plane = bucket.reading(proxy.port)
    proxy.bytes_per_s = 4 * MIB
    with bucket.fetched(plane, "the connection to the bucket broke"):
        for _ in range(10):
            context.pause(0.05, 0.2)
            proxy.cut()
        proxy.bytes_per_s = 0


@case("bucket away", MEMORY)
def bucket_away_long(context: Context) -> None:
    """It says nothing for five seconds, while hosts fetch, and store elsewhere."""
    bucket = _Bucket(context)
    proxy = context.proxy(bucket.port)
    with bucket.fetched(bucket.reading(proxy.port), "the bucket says nothing"):
        context.pause(0.2, 0.4)
        with proxy.silenced():
            time.sleep(5)


@case("bucket full", MEMORY)
def bucket_full(context: Context) -> None:
    """507 for each write while hosts store; then there is room."""
    bucket = _Bucket(context, real=False, filled=False)
    bucket.own.fault = lambda asked: Answer(507, "QuotaExceeded") if asked.operation == "put" else None
    writer = bucket.node()
    host = context.host(bucket.hosts(writer).address)
    for prompt in bucket.prompts:
        host.store_whole([prompt])
        host.fetch(prompt, stored=CHUNKS)
    context.pause(0.5, 1.0)
    assert not bucket.own.objects
    bucket.own.fault = lambda asked: None
    bucket.await_known(writer)
    bucket.verify(bucket.reading())


@case("clock jump", MEMORY, repetitions=1)
def bucket_clock(context: Context) -> None:
    """The bucket's clock is ten years ahead, then ten behind."""
    bucket = _Bucket(context, real=False, filled=False)
    bucket.own.skew_s = 10 * 365 * 86_400.0
    bucket.fill(bucket.node(bytes_max="64 MiB"))
    with bucket.fetched(bucket.reading()):
        context.pause(0.3, 0.5)
        bucket.own.skew_s = -bucket.own.skew_s
        context.pause(0.5, 0.8)


@case("nodes over one bucket", MEMORY)
def nodes_write_the_same(context: Context) -> None:
    """Two nodes are given the same prompts at the same time."""
    bucket = _Bucket(context, filled=False)
    nodes = [bucket.node(), bucket.node()]
    planes = [bucket.hosts(node) for node in nodes]

    def store(plane: DataPlane) -> None:
        host = context.host(plane.address)
        for prompt in bucket.prompts:
            host.store(prompt)

    with ThreadPoolExecutor() as pool:
        list(pool.map(store, planes))
    for node in nodes:
        bucket.await_known(node)
    for plane in [*planes, bucket.reading()]:
        bucket.verify(plane)


@case("nodes over one bucket", MEMORY, repetitions=3)
def node_killed_between_put_and_index(context: Context) -> None:
    """A node is killed while its objects are written, before anybody has listed them."""
    bucket = _Bucket(context, filled=False)
    writer = bucket.node(index_ttl_s=3600.0)
    context.host(bucket.hosts(writer).address).store_whole(bucket.prompts)
    wait_for(lambda: s3_of(writer)["written_objects"] > 0)
    writer.kill()
    reader = bucket.node(reads_only=True)
    fetching = context.host(bucket.hosts(reader).address)
    wait_for(lambda: s3_of(reader)["records"] > 0)
    for prompt in bucket.prompts:
        fetching.fetch(prompt, stored=CHUNKS, losable="its node was killed before it was in the bucket")


@case("nodes over one bucket", MEMORY, short=MEMORY)
def one_of_two_nodes_killed(context: Context) -> None:
    """One of two is killed while hosts fetch through storage_nodes; then it starts again, empty."""
    bucket = _Bucket(context, filled=False)
    nodes = [bucket.node(), bucket.node()]
    bucket.fill(nodes[0])
    bucket.await_known(nodes[1])
    plane = bucket.hosts(*nodes)
    with bucket.fetched(plane):
        context.pause(0.3, 0.6)
        nodes[0].kill()
        context.pause(0.5, 1.0)
        nodes[0].start()
        back = f"connected to storage 127.0.0.1:{nodes[0].port}"
        wait_for(lambda: plane.log.read_text().count(back) == 2)
        context.pause(0.5, 1.0)
        nodes[1].kill()
        context.pause(0.3, 0.6)
