"""Compares two storage nodes over one bucket with one node.

Method: two storage nodes over one bucket (Ceph's gateway where it is installed), each with its own link of 0.5 Gbit/s
to twelve hosts in network namespaces. Each host is a data plane with ``storage_nodes`` that fetches eight prefixes in
turns; four belong to each node. Every request's bytes are compared. Then the node that was stored to is killed and
started again three seconds later, empty, while all hosts continue.

Prediction: of N hosts that change nodes at random, each of two links is busy N / (N + 1) of the time: 0.92 with
twelve hosts, so ``two_over_one`` is 1.85. No request fails.
"""

import functools
import json
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import click

from host_control.client import DataPlaneClient
from host_control.registered_memory import RegisteredMemory
from shadowserve.errors import ShadowServeError
from shadowserve.placement import Placement, partition_of
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.target import CALL_TIMEOUT_S, Target
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.bench.peers.buckets import BUCKET, CREDENTIALS, bucket_server
from shadowserve_tools.bench.peers.network import TCP_SHARE, Link, linked
from shadowserve_tools.processes import Child, Programs, free_port, start_data_plane, started, until
from shadowserve_tools.report import Cost, Report, measure, over, repeat, walls
from shadowserve_tools.storage_client import Login, StorageClient

_SETTLED_S: Final = 120.0
_BUFFERS: Final = ("--decompression-buffer-bytes", "32MiB", "--store-buffer-bytes", "32MiB", "--connections", "1")


class _Request(NamedTuple):
    target: Target
    size: int


class _Node:
    """A storage node over the bucket, on its own link; it can be killed and started again."""

    def __init__(self, network: Link, host: str, logs: Path, endpoint: str, password: str) -> None:
        self._network, self._logs = network, logs
        self._login = Login(host=host, port=free_port(), password=password)
        self._environment = CREDENTIALS | {"SHADOWSERVE_STORAGE_PASSWORD": password}
        self._s3 = json.dumps({"bucket": BUCKET, "endpoint": endpoint, "gather_s": 0.2, "index_ttl_s": 0.5})
        self._life = ExitStack()
        self._child: Child

    @property
    def address(self) -> str:
        return f"{self._login.host}:{self._login.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "shadowserve_tools", "storage", "--host", self._login.host]
        command += ["--port", str(self._login.port), "--s3", self._s3]
        name = f"storage-{self._login.host}"
        with self._network.store_side():
            self._child = self._life.enter_context(started(name, command, self._logs, environment=self._environment))

    def kill(self) -> None:
        self._child.process.kill()
        self._life.close()

    def bucket(self) -> dict[str, str]:
        with self._network.store_side(), StorageClient(self._login, CALL_TIMEOUT_S) as client:
            return client.info(("s3",))

    def await_known(self, records: int) -> None:
        """Wait until it knows of ``records`` records in the bucket and has written all of its own."""

        def known() -> bool:
            found = self.bucket()
            return found["records"] == str(records) and found["waiting_records"] == "0"

        until(known, f"{self.address} does not know the {records} records in the bucket", _SETTLED_S)

    def close(self) -> None:
        self._life.close()


@contextmanager
def _host(
    network: Link, folder: Path, prefixes: Sequence[Workload], addresses: Sequence[str], password: str
) -> Iterator[list[_Request]]:
    """Run a data plane over some nodes, with memory for a prefix; yield the request for each prefix."""
    folder.mkdir()
    where = ["--listen", f"unix:{folder}/dpu.sock", "--storage-nodes", json.dumps(addresses), *_BUFFERS]
    environment = {"SHADOWSERVE_DPU_STORAGE_PASSWORD": password}
    with network.client_side():
        plane = start_data_plane(folder, addresses[0], *where, environment=environment)
    with ExitStack() as stack:
        with network.client_side():
            child = stack.enter_context(plane)
        client = stack.enter_context(closing(DataPlaneClient(child.address, connect_timeout_s=CALL_TIMEOUT_S)))
        shape, size = prefixes[0].layout, prefixes[0].raw_bytes
        registration = RegisteredMemory(client, [shape], size, connect_timeout_s=CALL_TIMEOUT_S)
        stack.enter_context(closing(registration))
        yield [_Request(Target(client, registration, prefix), prefix.raw_bytes) for prefix in prefixes]


@dataclass
class _Tally:
    requests: int = 0
    failed: int = 0
    wrong_bytes: int = 0
    longest_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def turn(self, requests: Sequence[_Request], first: int, rounds: int = 1) -> None:
        """Fetch a host's prefixes. Each host begins with another one, so that they use different nodes."""
        for number in range(rounds * len(requests)):
            self._request(*requests[(number + first) % len(requests)])

    def _request(self, target: Target, size: int) -> None:
        target.clear()
        failed = wrong_bytes = 0
        reason = ""
        begin = time.perf_counter()
        try:
            target.fetch()
        except ShadowServeError as error:
            failed, reason = 1, str(error)
        seconds = time.perf_counter() - begin
        try:
            if not failed:
                target.verify()
        except ShadowServeError as error:
            wrong_bytes, reason = size, str(error)
        with self._lock:
            self.requests += 1
            self.failed += failed
            self.wrong_bytes += wrong_bytes
            self.longest_s = max(self.longest_s, seconds)
            self.reasons += [reason] if reason else []


@benchmark("what", "requests", "GB_per_s", "over_links", "failed", "wrong_bytes", "longest_ms", bars=["GB_per_s"])
@real("--rate", 0.5, "Rate of each link, in Gbit/s.", 0.01, 100)
@whole("--hosts", 12, "Data planes that fetch.", most=64)
@whole("--prefixes", 8, "Number of prefixes, even.", 2, 1024)
@whole("--chunks", 4, "Chunks of a prefix.", most=64)
@whole("--layers", 1, "Layers of a chunk.", most=32)
@whole("--rounds", 1, "Passes of each host over all prefixes.")
@real(
    "--phase phase_s", 3.0, "Time before a node is killed, while it is down, and after its return.", 0.1, 600, "SECONDS"
)
@repeats_option(5)
def nodes(
    report: Report, programs: Programs, rate: float, hosts: int, prefixes: int, chunks: int, layers: int, rounds: int,
    phase_s: float, repeats: int,
) -> None:  # fmt: skip
    """Compare two storage nodes over one bucket with one, and kill one of them."""
    network, logs = programs.enter_context(linked(2)), programs.logs
    with network.store_side():
        endpoint, kind = programs.enter_context(bucket_server(logs))
    password = secrets.token_hex(16)  # required beyond loopback
    both = [programs.enter_context(closing(_Node(network, host, logs, endpoint, password))) for host in network.hosts]
    for node in both:
        node.start()
    stored = _shared_out([node.address for node in both], prefixes // 2, chunks, layers)
    with network.store_side():
        for prefix in stored:
            put(prefix, both[0].address, password)
    for node in both:
        node.await_known(len(stored) * chunks)
    network.limit(rate)
    one, two = (
        [
            programs.enter_context(_host(network, logs / f"{count}-{number}", stored, addresses, password))
            for number in range(hosts)
        ]
        for count, addresses in enumerate(([both[0].address], [node.address for node in both]))
    )
    costs = repeat(repeats, *(functools.partial(_fetch_all, each, rounds) for each in (one, two)), description="nodes")
    raw, sent = (rounds * hosts * sum(getattr(each, name) for each in stored) for name in ("raw_bytes", "stored_bytes"))
    for what, links, own in zip(("one node", "two nodes"), (1, 2), costs, strict=True):
        wall_s = statistics.median(walls(own))
        report.row(
            what=what, requests=rounds * hosts * len(stored), GB_per_s=raw / wall_s / 1e9,
            over_links=sent / wall_s / (links * rate * TCP_SHARE * 1e9 / 8), failed=0, wrong_bytes=0,
        )  # fmt: skip
    report.ratio("two_over_one", over(*map(walls, costs)), "at least 1.8")
    tally = _kill_one(both[0], two, len(stored) * chunks, phase_s)
    report.row(
        what="one of two killed", requests=tally.requests, failed=tally.failed,
        wrong_bytes=tally.wrong_bytes, longest_ms=1e3 * tally.longest_s,
    )  # fmt: skip
    report.ratio("failed_requests", [tally.failed], "exactly 0")
    report.ratio("wrong_bytes", [tally.wrong_bytes], "exactly 0")
    from_bucket = both[1].bucket()["read_records"]
    report.more |= {"bucket": kind, "reasons": tally.reasons[:10], "records_from_bucket": from_bucket}
    for line in (f"the bucket: {kind}", *tally.reasons[:3]):
        click.echo(line)


def _shared_out(addresses: Sequence[str], each: int, chunks: int, layers: int) -> list[Workload]:
    """Return prefixes, as many of one node as of the other, alternating."""
    found: dict[str, list[Workload]] = {address: [] for address in addresses}
    while any(len(own) < each for own in found.values()):
        prefix = llama_8b(chunks, layers=layers)
        own = found[Placement(dict.fromkeys(addresses, 1.0)).ranking(partition_of(prefix.keys[0]))[0]]
        if len(own) < each:
            own.append(prefix)
    return [prefix for turn in zip(*found.values(), strict=True) for prefix in turn]


def _fetch_all(hosts: Sequence[Sequence[_Request]], rounds: int) -> Cost:
    tally = _Tally()
    works = [functools.partial(tally.turn, own, first, rounds) for first, own in enumerate(hosts)]
    cost = measure(lambda: _side_by_side(works))
    if tally.reasons:
        raise ShadowServeError(f"a healthy node failed: {tally.reasons[0]}")
    return cost


def _kill_one(node: _Node, hosts: Sequence[Sequence[_Request]], records: int, phase_s: float) -> _Tally:
    """Fetch from all hosts while a node is killed and started again; return the outcomes."""
    tally, ended = _Tally(), threading.Event()

    def work(own: Sequence[_Request], first: int) -> None:
        while not ended.is_set():
            tally.turn(own, first)

    def operate() -> None:
        try:
            time.sleep(phase_s)
            node.kill()
            time.sleep(phase_s)
            node.start()
            node.await_known(records)
            time.sleep(phase_s)
        finally:
            ended.set()

    _side_by_side([operate, *(functools.partial(work, own, first) for first, own in enumerate(hosts))])
    return tally


def _side_by_side(runs: Sequence[Callable[[], None]]) -> None:
    """Run all functions at the same time, each in a thread; raise the first error of one."""
    with ThreadPoolExecutor(len(runs)) as pool:
        for ended in [pool.submit(run) for run in runs]:
            ended.result()
