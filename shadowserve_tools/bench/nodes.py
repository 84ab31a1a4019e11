"""Compares four storage nodes over one bucket with one node, where all prompts share a system prompt.

Method: storage nodes over one bucket (Ceph's gateway where it is installed), each behind its own link of 0.5 Gbit/s, in
network namespaces. All prompts begin with a system prompt of 1,024 tokens; 3,072 tokens of a document follow. Eight
hosts ask for documents of Zipf's popularity, the same ones from one, two and four nodes. A host is a data plane with
``storage_nodes``; every request's bytes are compared. One more host fetches a long prompt, with nothing else on the
links, and looks its 512 chunks up; so does a client that only sends the same commands and reads the answers: its times
give the limit, because here four nodes share two cores. Then, while all hosts fetch from four nodes, a node is killed,
and started again, empty; and the link of another one gets a tenth of its rate. Throughput counts from ten seconds
later.

Prediction: eight hosts that wait for the last of their nodes keep 0.9 of four links busy, which is 3.5 times one link.
The busiest node sends 1.1 times the mean, as a segment comes from its first or second choice by load. One long prompt
has 128 segments; some 37 are from the busiest node, so four links are 3.4 times as fast as one. (Of 32 segments it has
9 to 11: 2.9 to 3.5 times, by chance.) Four nodes answer a lookup side by side, in one round trip. Three nodes of four
have 0.75 of the throughput. No request fails. 'shadowserve simulate fleet --check' compares the throughputs with the
model's.
"""

import functools
import json
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np

from host_control.client import DataPlaneClient
from host_control.registered_memory import RegisteredMemory
from shadowserve.addresses import split_address
from shadowserve.errors import ShadowServeError
from shadowserve.keys import SEGMENT_CHUNKS, segment_of, storage_key
from shadowserve.placement import Placement, partition_of
from shadowserve.resp import encode_command
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.target import CALL_TIMEOUT_S, Target
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.bench.peers.buckets import BUCKET, CREDENTIALS, bucket_server
from shadowserve_tools.bench.peers.network import TCP_SHARE, Link, linked
from shadowserve_tools.processes import Child, Programs, free_port, start_data_plane, started, until
from shadowserve_tools.report import Report, over, repeat, timed
from shadowserve_tools.storage_client import Login, StorageClient

FLEETS: Final = (1, 2, 4)
"""Numbers of nodes that are compared."""
_SYSTEM_CHUNKS: Final = 4
_SKEW: Final = 1.0
"""Zipf's exponent of the documents."""
_SETTLED_S: Final = 120.0
_SMALL: Final = ("--decompression-buffer-bytes", "32MiB", "--store-buffer-bytes", "32MiB", "--connections", "1")
_ALONE: Final = ("--store-buffer-bytes", "32MiB", "--connections", "1")
_LOOKUPS: Final = 101


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

    def start(self, records: int) -> None:
        """Start it; wait until it knows of ``records`` records in the bucket."""
        command = [sys.executable, "-m", "shadowserve_tools", "storage", "--host", self._login.host]
        command += ["--port", str(self._login.port), "--s3", self._s3]
        name = f"storage-{self._login.host}"
        with self._network.store_side():
            self._child = self._life.enter_context(started(name, command, self._logs, environment=self._environment))
        self.await_known(records)

    def kill(self) -> None:
        self._child.process.kill()
        self._life.close()

    def await_known(self, records: int) -> None:
        """Wait until it knows of ``records`` records in the bucket and has written all of its own."""

        def known() -> bool:
            with self._network.store_side(), StorageClient(self._login, CALL_TIMEOUT_S) as client:
                found = client.info(("s3",))
            return found["records"] == str(records) and found["waiting_records"] == "0"

        until(known, f"{self.address} does not know the {records} records in the bucket", _SETTLED_S)

    def close(self) -> None:
        self._life.close()


class _Host(NamedTuple):
    """A data plane's client, and a target for each prompt."""

    client: DataPlaneClient
    targets: list[Target]


class _Fleet(NamedTuple):
    """Nodes, hosts that fetch from them, and a host with larger buffers for one long prompt alone."""

    addresses: list[str]
    hosts: list[_Host]
    alone: _Host


def _host(
    stack: ExitStack, network: Link, folder: Path, prompts: Sequence[Workload], chunks: int, addresses: Sequence[str],
    password: str, flags: Sequence[str],
) -> _Host:  # fmt: skip
    """Run a data plane over some nodes, and register memory for some chunks of a prompt."""
    folder.mkdir()
    where = ["--listen", f"unix:{folder}/dpu.sock", "--storage-nodes", json.dumps(addresses), *flags]
    environment = {"SHADOWSERVE_DPU_STORAGE_PASSWORD": password}
    with network.client_side():
        child = stack.enter_context(start_data_plane(folder, addresses[0], *where, environment=environment))
    client = stack.enter_context(closing(DataPlaneClient(child.address, connect_timeout_s=CALL_TIMEOUT_S)))
    layout = prompts[0].layout
    registration = RegisteredMemory(client, [layout], chunks * layout.raw_bytes, connect_timeout_s=CALL_TIMEOUT_S)
    stack.enter_context(closing(registration))
    return _Host(client, [Target(client, registration, prompt) for prompt in prompts])


@dataclass
class _Tally:
    """Outcomes of requests.

    Attributes:
        think_s: Time that hosts spent between requests, on comparing.
    """

    requests: int = 0
    failed: int = 0
    wrong: int = 0
    longest_s: float = 0.0
    think_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, target: Target) -> None:
        begin = time.perf_counter()
        target.clear()
        failed = wrong = 0
        reason = ""
        asked = time.perf_counter()
        try:
            target.fetch()
        except ShadowServeError as error:
            failed, reason = 1, str(error)
        answered = time.perf_counter()
        try:
            if not failed:
                target.verify()
        except ShadowServeError as error:
            wrong, reason = 1, str(error)
        with self._lock:
            self.requests += 1
            self.failed += failed
            self.wrong += wrong
            self.longest_s = max(self.longest_s, answered - asked)
            self.think_s += asked - begin + time.perf_counter() - answered
            self.reasons += [reason] if reason else []

    def per_s(self, seconds: float) -> float:
        """Return the requests a second in the next ``seconds``, or until each thread has had a chance of one."""
        before, begin = self.requests, time.perf_counter()
        time.sleep(seconds)
        until(lambda: self.requests > before, "no request ends", _SETTLED_S)
        return (self.requests - before) / (time.perf_counter() - begin)


class _Trouble(NamedTuple):
    """Trouble of a node while all hosts fetch from four, and the throughput that must be left."""

    what: str
    ratio: str
    goal: str
    begin: Callable[[], None]
    end: Callable[[], None]


@benchmark(
    "what", "requests", "GB_per_s", "over_links", "hottest_over_mean", "ms", "failed", "wrong", "longest_ms",
    bars=["GB_per_s"],
)  # fmt: skip
@real("--rate", 0.5, "Rate of each link, in Gbit/s.", 0.01, 100)
@whole("--hosts", 8, "Data planes that fetch.", most=64)
@whole("--documents", 24, "Documents.", most=1024)
@whole("--chunks", 12, "Chunks of a document.", most=64)
@whole("--long", 512, "Chunks of the long prompt, which is looked up.", most=1024)
@whole("--fetched", 512, "Chunks of it that are fetched.", most=1024)
@whole("--layers", 1, "Layers of a chunk.", most=32)
@whole("--requests", 8, "Requests of each host in a turn.")
@real("--phase phase_s", 10.0, "Time that a throughput is measured for, beside trouble.", 0.1, 600, "SECONDS")
@real("--settle settle_s", 10.0, "Time from the beginning of trouble until then.", 0.0, 600, "SECONDS")
@repeats_option(5)
@whole("--troubles", 3, "Number of times that each trouble is made.", most=50)
def nodes(
    report: Report, programs: Programs, rate: float, hosts: int, documents: int, chunks: int, long: int, fetched: int,
    layers: int, requests: int, phase_s: float, settle_s: float, repeats: int, troubles: int,
) -> None:  # fmt: skip
    """Compare four storage nodes over one bucket with one, and take one of them away.

    Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2.
    """
    network, logs = programs.enter_context(linked(max(FLEETS))), programs.logs
    with network.store_side():
        endpoint, kind = programs.enter_context(bucket_server(logs))
    password = secrets.token_hex(16)  # required beyond loopback
    stores = [programs.enter_context(closing(_Node(network, host, logs, endpoint, password))) for host in network.hosts]
    for node in stores:
        node.start(0)
    system = llama_8b(_SYSTEM_CHUNKS, layers=layers)
    prompts = [llama_8b(chunks, layers=layers, after=system) for _ in range(documents)]
    whole_prompt = llama_8b(long, layers=layers)
    with network.store_side():
        for prompt in (*prompts, whole_prompt):
            put(prompt, stores[0].address, password)
    records = _SYSTEM_CHUNKS + documents * chunks + long
    for node in stores:
        node.await_known(records)
    network.limit(rate)
    fetched = min(fetched, long)
    addresses = [node.address for node in stores]
    fleets = {
        count: _fleet(programs, network, addresses[:count], hosts, prompts, whole_prompt, fetched, password)
        for count in FLEETS
    }
    report.more |= {"bucket": kind}
    click.echo(f"the bucket: {kind}")
    alone_s = _add_alone(report, fleets, whole_prompt, fetched, rate, repeats)
    with network.client_side():
        bare = {count: _BareLookup(programs, addresses[:count], whole_prompt.keys, password) for count in (1, 4)}
    _add_lookups(report, fleets, bare, whole_prompt)
    _add_shared(report, fleets, network, prompts, rate, requests, repeats, alone_s)
    kinds = (
        _Trouble(
            "one of four killed", "killed_over_before", "at least 0.6", stores[3].kill,
            functools.partial(stores[3].start, records),
        ),
        _Trouble(
            "one of four slowed tenfold", "slowed_over_before", "at least 0.7", lambda: network.limit(rate / 10, 2),
            lambda: network.limit(rate, 2),
        ),
    )  # fmt: skip
    _add_troubles(report, fleets[4], kinds, troubles, prompts[0], phase_s, settle_s)


def _fleet(
    programs: Programs, network: Link, addresses: list[str], hosts: int, prompts: Sequence[Workload], long: Workload,
    fetched: int, password: str,
) -> _Fleet:  # fmt: skip
    def host(name: str, prompts: Sequence[Workload], chunks: int, flags: Sequence[str]) -> _Host:
        folder = programs.logs / f"{len(addresses)}-{name}"
        return _host(programs, network, folder, prompts, chunks, addresses, password, flags)

    return _Fleet(
        addresses,
        [host(str(number), prompts, len(prompts[0].keys), _SMALL) for number in range(hosts)],
        host("alone", [long], fetched, _ALONE),
    )


def _add_row(
    report: Report, what: str, nodes: int, raw: int, stored: int, seconds: float, rate: float, **more: Any
) -> None:
    link = nodes * rate * TCP_SHARE * 1e9 / 8
    report.row(what=what, GB_per_s=raw / seconds / 1e9, over_links=stored / seconds / link, **more)


# ---- One host alone ------------------------------------------------------------------------------------------------


def _add_alone(
    report: Report, fleets: dict[int, _Fleet], long: Workload, fetched: int, rate: float, repeats: int
) -> float:
    """Add the fetch of a long prompt with nothing else on the links; return what a fetch takes besides its bytes."""

    def seconds(host: _Host, count: int) -> float:
        [target] = host.targets
        target.clear()
        wall_s = timed(functools.partial(target.fetch, count))
        target.verify(count)
        return wall_s

    one, four = fleets[1].alone, fleets[4].alone
    four.targets[0].fetch_through()  # from the bucket, so that each node has its share
    runs = [functools.partial(seconds, host, fetched) for host in (one, four)]
    times = repeat(repeats, *runs, description="one prompt alone")
    stored = sum(map(len, long.records[:fetched]))
    for count, own in zip((1, 4), times, strict=True):
        raw, median_s = fetched * long.layout.raw_bytes, statistics.median(own)
        _add_row(report, f"one prompt alone, {_nodes(count)}", count, raw, stored, median_s, rate, requests=1)
    report.ratio("four_over_one_single", over(*times), "at least 3")
    short_s = statistics.median(seconds(one, SEGMENT_CHUNKS) for _ in range(repeats))
    return max(0.0, short_s - sum(map(len, long.records[:SEGMENT_CHUNKS])) / (rate * TCP_SHARE * 1e9 / 8))


class _BareLookup:
    """A lookup's commands on connections of their own; the answers are not parsed."""

    def __init__(self, stack: ExitStack, addresses: Sequence[str], keys: Sequence[bytes], password: str) -> None:
        placement = Placement(dict.fromkeys(addresses, 1.0))
        names: dict[str, list[bytes]] = defaultdict(list)
        for key in keys:
            names[placement.ranking(partition_of(key))[0]].append(storage_key(key))
        self._sends: list[tuple[socket.socket, bytes]] = []
        for address, some in names.items():
            connection = stack.enter_context(socket.create_connection(split_address(address), CALL_TIMEOUT_S))
            connection.sendall(encode_command(b"AUTH", password.encode()))
            _read_until(connection, b"+OK\r\n")
            self._sends.append((connection, encode_command(b"KV.META", *some) + encode_command(b"PING")))

    def milliseconds(self) -> float:
        begin = time.perf_counter()
        for connection, commands in self._sends:
            connection.sendall(commands)
        for connection, _ in self._sends:
            _read_until(connection, b"+PONG\r\n")
        return 1e3 * (time.perf_counter() - begin)


def _read_until(connection: socket.socket, end: bytes) -> None:
    last = b""
    while last != end:
        if not (data := connection.recv(1 << 20)):
            raise ShadowServeError("a storage node closed the connection; its log says why")
        last = (last + data)[-len(end) :]


def _add_lookups(report: Report, fleets: dict[int, _Fleet], bare: dict[int, _BareLookup], long: Workload) -> None:
    def milliseconds(host: _Host) -> float:
        begin = time.perf_counter()
        [chain] = host.client.find([(long.layout.namespace, long.keys)], CALL_TIMEOUT_S, published=False)()
        wall_s = time.perf_counter() - begin
        if not chain.stored.all():
            raise ShadowServeError("the lookup did not find what is stored; please report this")
        return 1e3 * wall_s

    runs: list[Callable[[], float]] = [functools.partial(milliseconds, fleets[count].alone) for count in (1, 4)]
    runs += [bare[count].milliseconds for count in (1, 4)]
    one, four, bare_one, bare_four = repeat(_LOOKUPS, *runs, description="looking up")
    for what, own in (("lookup", (one, four)), ("a lookup's commands alone", (bare_one, bare_four))):
        for count, times in zip((1, 4), own, strict=True):
            report.row(what=f"{what}, {len(long.keys)} chunks, {_nodes(count)}", ms=statistics.median(times))
    limits = [1 + (all_ms - one_ms) / whole for whole, one_ms, all_ms in zip(one, bare_one, bare_four, strict=True)]
    report.ratio("lookup_over_round_trip", over(four, one), "at most 1.2; over one node", limits)
    report.ratio("lookup_ms", four, "at most 20")


# ---- All hosts -----------------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    wall_s: float
    tally: _Tally
    sent: list[int]


def _add_shared(
    report: Report, fleets: dict[int, _Fleet], network: Link, prompts: Sequence[Workload], rate: float, requests: int,
    repeats: int, idle_s: float,
) -> None:  # fmt: skip
    """Add the fetches of all hosts from each fleet, and what the model needs to predict them."""
    asked = [_documents(len(prompts), requests, seed) for seed in range(len(fleets[4].hosts))]

    def turn(fleet: _Fleet) -> _Turn:
        tally, before = _Tally(), network.sent_bytes()
        fetches = [functools.partial(_fetch, host, own, tally) for host, own in zip(fleet.hosts, asked, strict=True)]
        wall_s = timed(functools.partial(_side_by_side, fetches))
        if tally.reasons:
            raise ShadowServeError(f"a healthy node failed: {tally.reasons[0]}")
        return _Turn(wall_s, tally, [now - was for now, was in zip(network.sent_bytes(), before, strict=True)])

    runs = [functools.partial(turn, fleet) for fleet in fleets.values()]
    turns = dict(zip(fleets, repeat(repeats, *runs, description="all hosts"), strict=True))
    flat = [prompts[each] for own in asked for each in own]
    raw, stored = (sum(getattr(each, name) for each in flat) for name in ("raw_bytes", "stored_bytes"))
    hottest = {
        count: [max(each.sent) / statistics.fmean(each.sent[:count]) for each in own] for count, own in turns.items()
    }
    walls_s = {count: [each.wall_s for each in own] for count, own in turns.items()}
    for count, own in walls_s.items():
        what, median_s = f"all hosts, {_nodes(count)}", statistics.median(own)
        more = {"requests": len(flat), "failed": 0, "wrong": 0, "hottest_over_mean": statistics.median(hottest[count])}
        _add_row(report, what, count, raw, stored, median_s, rate, **more)
    report.ratio("four_over_one_shared", over(walls_s[1], walls_s[4]), "at least 3.2")
    report.ratio("two_over_one_shared", over(walls_s[1], walls_s[2]), "none")
    report.ratio("hottest_over_mean", hottest[4], "at most 1.3")
    tallies = [each.tally for own in turns.values() for each in own]
    report.more["load"] = {
        "prompts": [_segments(prompt) for prompt in prompts], "gbit_per_s": rate, "idle_s": idle_s,
        "think_s": statistics.fmean(each.think_s / each.requests for each in tallies),
    }  # fmt: skip
    report.more["fleets"] = [
        {"nodes": fleet.addresses, "asked": asked, "wall_s": statistics.median(walls_s[count])}
        for count, fleet in fleets.items()
    ]


def _documents(count: int, requests: int, seed: int) -> list[int]:
    """Return the documents that a host asks for, by Zipf's popularity."""
    weights = np.arange(1, count + 1) ** -_SKEW
    drawn = np.random.default_rng(seed).choice(count, requests, p=weights / weights.sum())
    return [int(each) for each in drawn]


def _segments(prompt: Workload) -> list[tuple[int, int]]:
    """Return the partition and the stored bytes of each segment."""
    found: dict[bytes, int] = {}
    for key, record in zip(prompt.keys, prompt.records, strict=True):
        found[segment_of(key)] = found.get(segment_of(key), 0) + len(record)
    return [(partition_of(segment), size) for segment, size in found.items()]


def _fetch(host: _Host, asked: Sequence[int], tally: _Tally) -> None:
    for each in asked:
        tally.request(host.targets[each])


# ---- Trouble -------------------------------------------------------------------------------------------------------


def _add_troubles(
    report: Report, fleet: _Fleet, kinds: Sequence[_Trouble], repeats: int, prompt: Workload, phase_s: float,
    settle_s: float,
) -> None:  # fmt: skip
    """Fetch from all hosts while a node is in trouble; add the throughput, and the outcomes of all requests."""
    tallies = [_Tally() for _ in kinds]
    runs = [
        functools.partial(_in_trouble, fleet, kind, tally, phase_s, settle_s)
        for kind, tally in zip(kinds, tallies, strict=True)
    ]
    found = repeat(repeats, *runs, description="in trouble", warm_up=0)
    for kind, tally, own in zip(kinds, tallies, found, strict=True):
        before, after = ([each[number] for each in own] for number in (0, 1))
        report.row(
            what=kind.what, requests=tally.requests, GB_per_s=statistics.median(after) * prompt.raw_bytes / 1e9,
            failed=tally.failed, wrong=tally.wrong, longest_ms=1e3 * tally.longest_s,
        )  # fmt: skip
        report.ratio(kind.ratio, over(after, before), kind.goal)
    report.ratio("failed_requests", [sum(each.failed for each in tallies)], "exactly 0")
    report.ratio("wrong_requests", [sum(each.wrong for each in tallies)], "exactly 0")
    reasons = [reason for each in tallies for reason in each.reasons]
    report.more["reasons"] = reasons[:10]
    for line in reasons[:3]:
        click.echo(line)


def _in_trouble(fleet: _Fleet, trouble: _Trouble, tally: _Tally, phase_s: float, settle_s: float) -> list[float]:
    """Return the requests a second before the trouble, and from ``settle_s`` after its beginning on."""
    ended = threading.Event()
    per_s: list[float] = []

    def work(seed: int) -> None:
        host, asked = fleet.hosts[seed], _documents(len(fleet.hosts[seed].targets), 10_000, seed)
        while not ended.is_set():
            _fetch(host, [asked.pop()], tally)

    def operate() -> None:
        try:
            per_s.append(tally.per_s(phase_s))
            trouble.begin()
            time.sleep(settle_s)
            per_s.append(tally.per_s(phase_s))
            trouble.end()
            tally.per_s(phase_s)
        finally:
            ended.set()

    _side_by_side([operate, *(functools.partial(work, seed) for seed in range(len(fleet.hosts)))])
    return per_s


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"


def _side_by_side(runs: Sequence[Callable[[], None]]) -> None:
    """Run all functions at the same time, each in a thread; raise the first error of one."""
    with ThreadPoolExecutor(len(runs)) as pool:
        for ended in [pool.submit(run) for run in runs]:
            ended.result()
