"""Measures what the feed of stored and evicted keys costs a core.

Method: records are put into two full pools in memory, in turns, so each put evicts another record; one pool logs its
changes. The added CPU time per change is the node's part. For the publisher's part, a client fills a storage node,
``shadowserve events`` follows and publishes, and a subscriber in this process reads: the CPU time of that process per
change. Both, scaled to 100,000 changes a second, are ``feed_cores``. At the end the subscriber's index must be equal to
the node's keys. ``lag_over_bound`` is the memory of the log after more changes than it holds, unread.

Prediction: the pool appends 33 bytes for each change, 0.4 us; publishing takes 0.3 us. Both: 0.07 of a core.
"""

import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import psutil
import zmq

from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.types import DEFAULT_TENANT
from shadowserve.resp import encode_command
from shadowserve_tools.bench.parts.lean import LeanSocket
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.processes import Child, Programs, started, until
from shadowserve_tools.report import Report, cpu_s, tracked
from shadowserve_tools.storage_client import Login, StorageClient
from storage_kv.config import StorageConfig

_KEYS: Final = 250
"""Keys of one command."""
_PIPELINED: Final = 4
_OK: Final = b"+OK\r\n"
_MEMORY: Final = "16 MiB"
_FILLING: Final = 50_000
"""Keys that fill a node with so much memory."""
_LOG: Final = 64 << 20
_SMALL_LOG: Final = 1 << 20
_OVERFLOWING: Final = 100_000
"""Keys that are more than the small log holds."""
_SCALE: Final = 100_000


class _Subscriber:
    """An index made from what is published."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._hashes: set[int] = set()
        self._next = -1

    def take(self, wait_ms: int = 0) -> None:
        while self._socket.poll(wait_ms):
            _, number, payload = self._socket.recv_multipart()
            if self._next not in (-1, int.from_bytes(number, "big")):
                raise ShadowServeError("the subscriber has lost a batch; please report this")
            self._next = int.from_bytes(number, "big") + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)
            wait_ms = 0

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._hashes.clear()
        elif event["type"] == "BlockStored":
            self._hashes.update(event["block_hashes"])
        else:
            self._hashes.difference_update(event["block_hashes"])

    def has(self, number: int) -> bool:
        self.take(10)
        return number in self._hashes

    def agrees(self, client: StorageClient) -> bool:
        self.take(100)
        cursor, names = b"0", set[bytes]()
        while True:
            cursor, found = client.call("SCAN", cursor, "COUNT", "250")
            names.update(found)
            if cursor == b"0":
                return self._hashes == {int(name[3:19], 16) for name in names}

    def close(self) -> None:
        self._socket.close(linger=0)


@benchmark("part", "stores", "us_each", "load", bars=["us_each"])
@whole("--stores", 100_000, "Stored keys of a run; each evicts another.", 1_000)
@repeats_option(5, "Pairs of runs.")
def events(report: Report, programs: Programs, stores: int, repeats: int) -> None:
    """Measure the CPU time of the feed of stored and evicted keys."""
    logged, changes = _logging(stores, repeats), 2 * stores
    node = programs.storage("--memory-budget-bytes", _MEMORY, "--events-bytes-max", str(_LOG))
    endpoint = f"ipc://{programs.logs}/events"
    command = [sys.executable, "-m", "shadowserve_tools", "events", node.address, "--endpoint", endpoint]
    command += ["--replay-endpoint", f"{endpoint}-replay"]
    relay = programs.enter_context(started("events", command, programs.logs, ready=re.compile(r"ready \d")))
    subscriber = _Subscriber(endpoint)
    programs.callback(subscriber.close)
    keys = itertools.count()
    _store(node, keys, _FILLING)
    published: list[float] = []
    for _ in tracked(range(repeats), "publishing"):
        before = cpu_s(psutil.Process(relay.process.pid))
        _store(node, keys, stores)
        last = next(keys)  # its event comes last
        _store(node, iter([last]), 1)
        until(lambda: subscriber.has(last), "the last key in the feed")  # noqa: B023
        published.append((cpu_s(psutil.Process(relay.process.pid)) - before) / changes)
    for part, own in (("log of the pool", logged), ("publisher", published)):
        report.row(part=part, stores=stores, us_each=statistics.median(own) * 1e6, load=os.getloadavg()[0])
    shares = [(log_s + relay_s) * _SCALE for log_s, relay_s in zip(logged, published, strict=True)]
    report.ratio("feed_cores", shares, "at most 0.1 at 100,000 changes a second")
    report.ratio("publisher_cores", [each * _SCALE for each in published], "part of feed_cores")
    with StorageClient(Login.at(node.address), 60.0) as client:
        until(lambda: subscriber.agrees(client), "the subscriber's index equal to the node's keys")
    report.ratio("lag_over_bound", [_lag(programs, keys)], "at most 1")


def _logging(stores: int, repeats: int) -> list[float]:
    """Return the CPU time, in seconds for each change, that a log adds to puts that evict."""
    pools = [MemoryPool.open(StorageConfig.model_validate({"memory_budget_bytes": _MEMORY})) for _ in range(2)]
    changes = pools[0].log_changes(_LOG)
    pools[0].read_changes(0, b"", 0)
    added = []
    numbers = itertools.count()
    for turn in tracked(range(repeats + 1), "logging"):  # the first one fills the pools
        keys = [storage_key(next(numbers).to_bytes(8, "big") * 4) for _ in range(stores)]
        before, times = changes.entries, [0.0, 0.0]
        for number in (0, 1) if turn % 2 else (1, 0):
            begin = time.thread_time()
            for key in keys:
                pools[number].put((DEFAULT_TENANT, key), b"x" * 64, header_bytes=32)
            times[number] = time.thread_time() - begin
        added.append((times[0] - times[1]) / (changes.entries - before))
    for pool in pools:
        pool.close()
    return added[1:]


def _store(node: Child, keys: Iterator[int], count: int) -> None:
    """Store new keys, with some commands on their way."""
    with LeanSocket(node.address) as client:
        waiting = 0
        for _ in range(-(-count // _KEYS)):
            names = (b"kv:%016x%048x" % (number, 0) for number in itertools.islice(keys, _KEYS))
            client.socket.sendall(encode_command("MSET", *(part for name in names for part in (name, b"x"))))
            waiting += 1
            if waiting == _PIPELINED:
                _confirm(client)
                waiting -= 1
        for _ in range(waiting):
            _confirm(client)


def _confirm(client: LeanSocket) -> None:
    if bytes(client.receive(len(_OK))) != _OK:
        raise ShadowServeError("the storage node refused to store a key")


def _lag(programs: Programs, keys: Iterator[int]) -> float:
    """Return the memory of a log without a reader, over its bound, after more changes than it holds."""
    node = programs.storage("--memory-budget-bytes", _MEMORY, "--events-bytes-max", str(_SMALL_LOG))
    with StorageClient(Login.at(node.address), 60.0) as client:
        client.call("KV.EVENTS", "", "0")
        _store(node, keys, _OVERFLOWING)
        return int(client.info(("everything",))["events_bytes"]) / _SMALL_LOG
