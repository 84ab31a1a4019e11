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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from dpu_dataplane.sources.resp.several import ranking
from host_control.client import DataPlaneClient
from host_control.registered_memory import RegisteredMemory
from shadowserve.errors import ShadowServeError
from shadowserve.keys import chain_of
from shadowserve_tools.bench.parts.target import CALL_TIMEOUT_S, Target
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.bench.peers.buckets import BUCKET, CREDENTIALS, bucket_server
from shadowserve_tools.bench.peers.network import Link, linked
from shadowserve_tools.processes import Child, Programs, free_port, start_data_plane, started, until
from shadowserve_tools.report import Cost, Output, Report, measure, output_options, repeat
from shadowserve_tools.storage_client import Login, StorageClient

_SETTLED_S: Final = 120.0
_BUFFERS: Final = ("--decompression-buffer-bytes", "32MiB", "--store-buffer-bytes", "32MiB", "--connections", "1")
_TCP_SHARE: Final = 0.957
"""Part of a link's rate that TCP carries."""


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
        """Return its INFO about the bucket."""
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
) -> Iterator[list[Target]]:
    """Run a data plane over some nodes, with memory for a prefix; yield the target of each prefix."""
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
        yield [Target(client, registration, prefix) for prefix in prefixes]


@dataclass
class _Tally:
    """Outcomes of requests."""

    requests: int = 0
    failed: int = 0
    wrong_bytes: int = 0
    longest_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def request(self, target: Target, size: int) -> None:
        """Fetch a prefix and compare all of it."""
        target.clear()
        self.requests += 1
        begin = time.perf_counter()
        try:
            target.fetch()
        except ShadowServeError as error:
            self.failed += 1
            self.reasons.append(str(error))
            return
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - begin)
        try:
            target.verify()
        except ShadowServeError as error:
            self.wrong_bytes += size
            self.reasons.append(str(error))


@click.command()
@click.option(
    "--rate", default=0.5, show_default=True, type=click.FloatRange(0.01, 100), help="Rate of each link, in Gbit/s."
)
@click.option("--hosts", default=12, show_default=True, type=click.IntRange(1, 64), help="Data planes that fetch.")
@click.option(
    "--prefixes", default=8, show_default=True, type=click.IntRange(2, 1024), help="Number of prefixes, even."
)
@click.option("--chunks", default=4, show_default=True, type=click.IntRange(1, 64), help="Chunks of a prefix.")
@click.option("--layers", default=1, show_default=True, type=click.IntRange(1, 32), help="Layers of a chunk.")
@click.option(
    "--rounds", default=1, show_default=True, type=click.IntRange(1), help="Passes of each host over all prefixes."
)
@click.option(
    "--phase", "phase_s", default=3.0, show_default=True, type=click.FloatRange(0.1, 600), metavar="SECONDS",
    help="Time before a node is killed, while it is down, and after its return.",
)  # fmt: skip
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Number of pairs.")
@output_options
def nodes(
    rate: float, hosts: int, prefixes: int, chunks: int, layers: int, rounds: int, phase_s: float, repeats: int,
    output: Output,
) -> None:  # fmt: skip
    """Compare two storage nodes over one bucket with one, and kill one of them."""
    report = Report(
        "nodes",
        ["what", "requests", "GB_per_s", "over_links", "failed", "wrong_bytes", "longest_ms"],
        bars=["GB_per_s"],
    )
    with Programs() as programs:
        network = programs.enter_context(linked(2))
        with network.store_side():
            endpoint, kind = programs.enter_context(bucket_server(programs.logs))
        password = secrets.token_hex(16)  # required beyond loopback
        both = [
            programs.enter_context(closing(_Node(network, host, programs.logs, endpoint, password)))
            for host in network.hosts
        ]
        for node in both:
            node.start()
        stored = _shared_out([node.address for node in both], prefixes // 2, chunks, layers)
        with network.store_side():
            for prefix in stored:
                put(prefix, both[0].address, password)
        for node in both:
            node.await_known(len(stored) * chunks)
        network.limit(rate)
        planes = [
            [
                programs.enter_context(_host(network, programs.logs / f"{name}-{number}", stored, addresses, password))
                for number in range(hosts)
            ]
            for name, addresses in (("one", [both[0].address]), ("two", [node.address for node in both]))
        ]
        _measure(report, planes, stored, rate, rounds, repeats)
        tally = _kill_one(both[0], planes[1], stored, phase_s)
        from_bucket = both[1].bucket()
    report.row(
        what="one of two killed", requests=tally.requests, failed=tally.failed,
        wrong_bytes=tally.wrong_bytes, longest_ms=1e3 * tally.longest_s,
    )  # fmt: skip
    report.ratio("failed_requests", [tally.failed], "exactly 0")
    report.ratio("wrong_bytes", [tally.wrong_bytes], "exactly 0")
    report.more |= {"bucket": kind, "reasons": tally.reasons[:10], "records_from_bucket": from_bucket["read_records"]}
    click.echo(f"the bucket: {kind}")
    for reason in tally.reasons[:3]:
        click.echo(reason)
    report.finish(output)


def _shared_out(addresses: Sequence[str], each: int, chunks: int, layers: int) -> list[Workload]:
    """Return prefixes, as many of one node as of the other, alternating."""
    found: dict[str, list[Workload]] = {address: [] for address in addresses}
    while any(len(own) < each for own in found.values()):
        prefix = llama_8b(chunks, layers=layers)
        own = found[ranking(chain_of(prefix.keys[0]), addresses)[0]]
        if len(own) < each:
            own.append(prefix)
    return [prefix for turn in zip(*found.values(), strict=True) for prefix in turn]


def _measure(
    report: Report, planes: Sequence[Sequence[Sequence[Target]]], stored: Sequence[Workload], rate: float, rounds: int,
    repeats: int,
) -> None:  # fmt: skip
    """Fetch all prefixes from all hosts, from one node and from two in turns."""
    tallies = [_Tally(), _Tally()]

    def run(number: int) -> Cost:
        def work(own: Sequence[Target], first: int) -> None:
            for _ in range(rounds):
                for target, prefix in _turned(own, stored, first):
                    tallies[number].request(target, prefix.raw_bytes)

        return measure(lambda: _side_by_side([functools.partial(work, *each) for each in _numbered(planes[number])]))

    costs = repeat(repeats, functools.partial(run, 0), functools.partial(run, 1), description="one node and two")
    if bad := [reason for tally in tallies for reason in tally.reasons]:
        raise ShadowServeError(f"a healthy node failed: {bad[0]}")
    count = rounds * len(planes[0])
    raw, sent = (count * sum(getattr(each, name) for each in stored) for name in ("raw_bytes", "stored_bytes"))
    for what, links, own in zip(("one node", "two nodes"), (1, 2), costs, strict=True):
        wall_s = statistics.median(cost.wall_s for cost in own)
        report.row(
            what=what, requests=count * len(stored), GB_per_s=raw / wall_s / 1e9,
            over_links=sent / wall_s / (links * rate * _TCP_SHARE * 1e9 / 8), failed=0, wrong_bytes=0,
        )  # fmt: skip

    pairs = zip(*costs, strict=True)
    report.ratio("two_over_one", [one.wall_s / two.wall_s for one, two in pairs], "at least 1.8")


def _kill_one(node: _Node, hosts: Sequence[Sequence[Target]], stored: Sequence[Workload], phase_s: float) -> _Tally:
    """Fetch from all hosts while a node is killed and started again; return the outcomes."""
    tallies = [_Tally() for _ in hosts]
    ended = threading.Event()

    def work(own: Sequence[Target], first: int) -> None:
        while not ended.is_set():
            for target, prefix in _turned(own, stored, first):
                tallies[first].request(target, prefix.raw_bytes)

    def operate() -> None:
        try:
            time.sleep(phase_s)
            node.kill()
            time.sleep(phase_s)
            node.start()
            node.await_known(sum(len(prefix.keys) for prefix in stored))
            time.sleep(phase_s)
        finally:
            ended.set()

    _side_by_side([operate, *(functools.partial(work, *each) for each in _numbered(hosts))])
    return _Tally(
        sum(tally.requests for tally in tallies),
        sum(tally.failed for tally in tallies),
        sum(tally.wrong_bytes for tally in tallies),
        max(tally.longest_s for tally in tallies),
        [reason for tally in tallies for reason in tally.reasons],
    )


def _numbered(hosts: Sequence[Sequence[Target]]) -> list[tuple[Sequence[Target], int]]:
    return [(own, number) for number, own in enumerate(hosts)]


def _turned(own: Sequence[Target], stored: Sequence[Workload], first: int) -> Iterator[tuple[Target, Workload]]:
    """Yield a host's prefixes. Each host begins with another one, so that they use different nodes."""
    for index in range(len(own)):
        turned = (index + first) % len(own)
        yield own[turned], stored[turned]


def _side_by_side(runs: Sequence[Callable[[], None]]) -> None:
    """Run all functions at the same time, each in a thread.

    Raises:
        Exception: The first error of a thread.
    """
    errors: list[Exception] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
