"""Compares one KV.LAYERS request with a GETRANGE for each chunk and layer.

Method: a prefix of 2,048 tokens with the stored size of Llama-3.1-8B's layers is in a storage node's memory, in
chunks of 16, 64 and 256 tokens. It is fetched layer by layer in one request, by GETRANGE with 64 requests in flight
(as the data plane does), and by one GETRANGE after the other. The client is one connection that receives into
prepared memory. Bytes are compared once before the measurement. With Ceph, the same requests go to a node that holds
less than three prefixes, so that each prefix comes from the bucket behind it.

Prediction: a GETRANGE costs 20 us, plus a round trip of 20 us: 4,096 of them cost 160 ms beside the 50 ms of 176 MB.
So one request is 4 times as fast with chunks of 16 tokens, and equally fast with 256. Over Ceph: 3 times at 16
tokens, 1 to 3 times at 256.
"""

import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.lean import LeanSocket, answer_lengths, plain_record
from shadowserve_tools.bench.parts.options import benchmark, choice, numbers_option, repeats_option, whole
from shadowserve_tools.bench.parts.workload import client as redis_client
from shadowserve_tools.bench.peers.buckets import CREDENTIALS, MISSING, ceph_gateway
from shadowserve_tools.processes import Programs, start_storage, until
from shadowserve_tools.report import Cost, Report, cpu_s, cpus, in_turns, measure, over, walls

TOKEN_LAYER_BYTES: Final = 2694
"""Stored bytes of a token and layer: Llama-8B's 4,096 in bfloat16, compressed lossless by 1.52 (``bench codecs``)."""
WHOLE, AHEAD, SINGLE = "KV.LAYERS", "GETRANGE, 64 ahead", "GETRANGE, one by one"
_AHEAD: Final = 64
"""Requests in flight: enough to keep the connection busy."""
MEMORY, CEPH = "memory", "ceph"
_PREFIXES: Final = 4
_ROOM_PREFIXES: Final = 2.5
"""Prefixes that fit in memory: half of it may be in transit, and none stays until its next turn."""
_BUCKET: Final = "kv-bench"
_STORED_S: Final = 120


@dataclass(frozen=True)
class Prefix:
    """A stored prefix with ``chunk_tokens`` tokens in each chunk.

    Attributes:
        body: Offset of the layers in a record.
        piece: Bytes of a layer of a chunk.
    """

    chunk_tokens: int
    layers: int
    keys: list[bytes]
    body: int
    piece: int

    @property
    def moved_bytes(self) -> int:
        return self.layers * len(self.keys) * self.piece

    def ranges(self) -> list[bytes]:
        return [
            encode_command("GETRANGE", key, begin, begin + self.piece - 1)
            for begin in range(self.body, self.body + self.layers * self.piece, self.piece)
            for key in self.keys
        ]

    def at_once(self) -> bytes:
        return encode_command("KV.LAYERS", f"0-{self.layers - 1}", 0, 0, *self.keys)


class _Fetched(NamedTuple):
    """Cost of fetching a prefix: of all processes, of the server's threads, and the requests of node and bucket."""

    cost: Cost
    server_cpu_s: float
    requests: int
    ranges: int


class _Bed:
    """A storage node with a prefix in memory, or only in Ceph's gateway behind it."""

    def __init__(self, stack: ExitStack, below: str, size: int, tokens: int, layers: int) -> None:
        """Start the node and store a prefix, or, over Ceph, as many prefixes as evict each other."""
        self._in_ceph = below == CEPH
        prefix_bytes = tokens * layers * TOKEN_LAYER_BYTES
        budget = (_ROOM_PREFIXES if self._in_ceph else 4) * prefix_bytes + (0 if self._in_ceph else 256 << 20)
        flags = ["--io-threads", "1", "--memory-budget-bytes", str(int(budget))]
        environment: dict[str, str] = {}
        if self._in_ceph:
            endpoint = stack.enter_context(ceph_gateway(_BUCKET))
            below_it = {"bucket": _BUCKET, "endpoint": endpoint, "gather_s": 0.2, "timeout_s": 60}
            flags += ["--s3", json.dumps(below_it)]
            environment = CREDENTIALS
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(start_storage(folder, *flags, environment=environment))
        self._process = psutil.Process(server.process.pid)
        self.client = stack.enter_context(LeanSocket(server.address))
        self._operator = stack.enter_context(redis_client(server.address))
        prefixes = []
        for number in range(_PREFIXES if self._in_ceph else 1):
            prefixes.append(_stored(self.client, size, tokens, layers, number))
            if self._in_ceph:  # records that are evicted before do not reach the bucket
                records = sum(len(prefix.keys) for prefix in prefixes)
                until(lambda: self._bucket()["records"] >= records, "the bucket lacks records", _STORED_S)  # noqa: B023
        self._chunks, self.moved_bytes = len(prefixes[0].keys), prefixes[0].moved_bytes
        self._turns = itertools.cycle(prefixes)

    def next(self) -> Prefix:
        """Return the prefix with the oldest request."""
        return next(self._turns)

    def fetch(self, way: Callable[["_Bed"], object]) -> _Fetched:
        requests, bucket, before_s = self._requests(), self._bucket(), cpu_s(self._process)
        cost = measure(lambda: way(self))
        spent_s = cpu_s(self._process) - before_s
        there = self._bucket()
        found = there["read_records"] - bucket["read_records"] if self._in_ceph else self._chunks
        if found != self._chunks:
            raise ShadowServeError(
                f"{found} of {self._chunks} records were read from the bucket: memory had the others"
            )
        ranges = there["requests"] - bucket["requests"] if self._in_ceph else 0
        return _Fetched(cost, spent_s, self._requests() - requests, ranges)

    def _requests(self) -> int:
        found = self._operator.info("commandstats")
        return sum(found.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("kv.layers", "getrange"))

    def _bucket(self) -> dict[str, int]:
        return self._operator.info("s3") if self._in_ceph else {}


@benchmark(
    "below", "chunk_tokens", "way", "requests", "s3_requests", "ms", "GB_per_s", "server_cpu_s_per_GB",
    "client_cpu_s_per_GB", bars=["ms", "server_cpu_s_per_GB"],
)  # fmt: skip
@numbers_option("--chunks sizes", "16,64,256", "Tokens of a chunk, with commas between.")
@whole("--tokens", 2048, "Tokens of the prefix.", 256)
@whole("--layers", 32, "Layers of the model.", most=256)
@repeats_option(7, "Number of turns.")
@choice(
    "--below", (MEMORY, CEPH), (MEMORY,) if MISSING else (MEMORY, CEPH),
    "Tier of the records: the node's memory, or a Ceph bucket behind it; repeatable.",
)  # fmt: skip
def aggregate(
    report: Report, programs: Programs, sizes: list[int], tokens: int, layers: int, repeats: int, below: Sequence[str]
) -> None:
    """Compare one request for a prefix with one for each chunk and layer."""
    requests = []
    for where, size in itertools.product(below, sizes):
        with ExitStack() as stack:
            bed = _Bed(stack, where, size, tokens, layers)
            _check(bed)
            requests.append(_compare(report, bed, repeats, where, size))
    ratio = max(requests) / min(requests)
    report.ratio("requests_most_over_fewest", [ratio], "exactly 1 request a prefix of any number of chunks")


def _compare(report: Report, bed: _Bed, repeats: int, where: str, size: int) -> int:
    ways: dict[str, Callable[[_Bed], None]] = {
        WHOLE: _aggregated,
        AHEAD: functools.partial(_ranged, ahead=_AHEAD),
        SINGLE: functools.partial(_ranged, ahead=1),
    }
    runs = {name: functools.partial(bed.fetch, way) for name, way in ways.items()}
    fetched = in_turns(repeats, runs, f"chunks of {size}, {where}")
    costs = {name: [each.cost for each in own] for name, own in fetched.items()}
    gigabytes = bed.moved_bytes / 1e9
    spent = {name: [each.server_cpu_s / gigabytes for each in own] for name, own in fetched.items()}
    for name, own in costs.items():
        wall_s = statistics.median(walls(own))
        report.row(
            below=where, chunk_tokens=size, way=name, requests=fetched[name][-1].requests,
            s3_requests=fetched[name][-1].ranges, ms=1e3 * wall_s, GB_per_s=gigabytes / wall_s,
            server_cpu_s_per_GB=statistics.median(spent[name]),
            client_cpu_s_per_GB=statistics.median(cpus(own)) / gigabytes,
        )  # fmt: skip
    suffix = str(size) if where == MEMORY else f"{size}_ceph"
    goal = "at least 3" if size == 16 else "reported"
    report.ratio(f"aggregate_over_single_{suffix}", over(walls(costs[SINGLE]), walls(costs[WHOLE])), goal)
    report.ratio(f"aggregate_over_ahead_{suffix}", over(walls(costs[AHEAD]), walls(costs[WHOLE])), "reported")
    goal = "at most 1" if size == 256 else "reported"
    report.ratio(f"cpu_over_getrange_{suffix}", over(spent[WHOLE], spent[AHEAD]), goal)
    return fetched[WHOLE][-1].requests


def _stored(client: LeanSocket, size: int, tokens: int, layers: int, number: int) -> Prefix:
    """Store a prefix, the ``number``-th of its size."""
    keys, value = [], b""
    for chunk in range(tokens // size):
        name = (number << 64 | size << 32 | chunk).to_bytes(32, "big")
        key, value = plain_record(name, layers=layers, tokens=size, token_bytes=TOKEN_LAYER_BYTES)
        client.call("SET", key, value)
        keys.append(key)
    piece = size * TOKEN_LAYER_BYTES
    return Prefix(size, layers, keys, len(value) - layers * piece, piece)


def _check(bed: _Bed) -> None:
    """Check that both commands return the same bytes of the last layer of the last chunk."""
    client, prefix = bed.client, bed.next()
    client.socket.sendall(prefix.ranges()[-1])
    by_range = bytes(client.receive(len(encode_bulk_header(prefix.piece)) + prefix.piece + 2))[-prefix.piece - 2 :]
    client.socket.sendall(prefix.at_once())
    lengths = answer_lengths(prefix.layers, [prefix.piece] * len(prefix.keys))
    client.receive(sum(lengths) - len(by_range))
    if bytes(client.receive(len(by_range))) != by_range:
        raise ShadowServeError("KV.LAYERS and GETRANGE answer different bytes; the server is faulty")


def _aggregated(bed: _Bed) -> None:
    prefix = bed.next()
    bed.client.socket.sendall(prefix.at_once())
    bed.client.receive(sum(answer_lengths(prefix.layers, [prefix.piece] * len(prefix.keys))))


def _ranged(bed: _Bed, ahead: int) -> None:
    client, prefix = bed.client, bed.next()
    commands = prefix.ranges()
    size = len(encode_bulk_header(prefix.piece)) + prefix.piece + 2
    for begin in range(0, len(commands), max(1, ahead // 2)):
        some = commands[begin : begin + max(1, ahead // 2)]
        client.socket.sendall(b"".join(some))
        if ahead == 1:
            client.receive(size)
        elif begin:  # the previous half, which is in transit meanwhile
            client.receive(size * (ahead // 2))
    if ahead > 1:
        client.receive(size * (len(commands) % (ahead // 2) or min(len(commands), ahead // 2)))
