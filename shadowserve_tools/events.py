"""``shadowserve events``: publishes what a storage node stores and removes, in the form of vLLM's KV events.

The node keeps logs (KV.EVENTS), with its users, tenants and TLS. This process reads one tenant's and publishes it over
ZeroMQ, which has none of these, to routers on its own machine. So a slow router costs the node nothing.
"""

import itertools
import logging
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import click
import msgspec
import numpy as np
import zmq

from shadowserve.addresses import is_loopback, split_address
from shadowserve.errors import ConfigurationError, StorageError, StorageUnavailableError
from shadowserve.logs import configure_logging
from shadowserve.pool.changes import CLEARED, ENTRIES_MAX, ENTRY_BYTES, STORED
from shadowserve.signals import stop_signals
from shadowserve_tools.stats import logins
from shadowserve_tools.storage_client import Login, StorageClient

_log = logging.getLogger(__name__)

Event = dict[str, Any]
_ENTRY: Final = np.dtype([("sign", "S1"), ("hash", ">u8"), ("rest", "V24")])
_CHUNK: Final = re.compile(rb"kv:[0-9a-f]{64}")
_HASH_DIGITS: Final = slice(3, 19)
"""Those of shadowserve.keys.block_hash()."""
_SCAN_KEYS: Final = 250
_SCANS_OF_BATCH: Final = 32
"""So an event of a snapshot has about 8,000 hashes: 72 KB."""
_END: Final = (-1).to_bytes(8, "big", signed=True)
_REPLAY_BYTES_MAX: Final = 32 << 20
_REPLAYS_MAX: Final = 8
"""Clients whose replays are unfinished, and those that wait for a snapshot; a further one takes the place of the
oldest."""
_QUEUED_REPLAYED_MAX: Final = 64
"""Batches that wait for one of these clients."""
_REPLAY_WAIT_S: Final = 0.005
_QUEUED_BATCHES_MAX: Final = 1_000
"""Batches that wait for one subscriber; later ones are lost to it, which the sequence numbers show."""
_LINGER_MS: Final = 500
"""For so long the last batch may wait for slow subscribers."""
_SNAPSHOT_INTERVAL_S: Final = 10.0
"""Least time between two snapshots for replays; a replay that needs one waits for so long."""
_IDLE_S: Final = 10.0
"""Time without changes after which an empty batch lets subscribers notice that they have lost the last ones."""
_RETRY_S: Final = 1.0
_DOWN_S: Final = 10.0
"""Time without the node after which nothing of it counts as stored."""


class Feed:
    """Follows the log of one tenant of a storage node."""

    def __init__(self, connect: Callable[[], StorageClient], medium: str = "STORAGE") -> None:
        self._connect = connect
        self._medium = medium
        self._client: StorageClient | None = None
        self._name, self._position = b"", 0
        self._whole = False  # everything stored was read, up to that position
        self._again_s = 0.0  # time before which a snapshot does not begin
        self.started_over = 0  # times that the log did not have what was missing

    def poll(self) -> Iterator[list[Event]]:
        """Yield what has changed since the last call, as batches of events; at first what is stored.

        Raises:
            StorageUnavailableError: The node does not answer; the next call connects again.
            StorageRefusedError: The user may not read the log, or there is none.
            ConfigurationError: The certificates are unusable.
        """
        if self._client is None:
            self._client = self._connect()
        try:
            if self._whole and (yield from self._read(self._client)):
                return
            if (began_s := time.monotonic()) < self._again_s:
                return
            self.started_over += 1
            self._whole = False
            self._whole = yield from self._snapshot(self._client)
            if not self._whole:
                self._again_s = time.monotonic() + max(_RETRY_S, time.monotonic() - began_s)
                yield [{"type": "AllBlocksCleared"}]
        except StorageError:
            self.close()
            raise

    def start_over(self) -> None:
        """Let the next poll() begin with what is stored."""
        self._whole = False

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _read(self, client: StorageClient) -> Generator[list[Event], None, bool]:
        """Yield the log from the position on; return False where the log does not have it."""
        while True:
            reply = client.call("KV.EVENTS", self._name, str(self._position))
            self._name, self._position, entries = _checked(reply, self._position)
            if entries is None:
                return False
            if entries:
                yield self._changes(entries)
            if len(entries) < ENTRIES_MAX * ENTRY_BYTES:
                return True

    def _snapshot(self, client: StorageClient) -> Generator[list[Event], None, bool]:
        """Yield the present keys, and in between the log, which is bounded; return False where the log was too short.

        The log's position is read before the keys.
        """
        self._name = b""
        yield from self._read(client)
        yield [{"type": "AllBlocksCleared"}]
        cursor, hashes = b"0", list[int]()
        for number in itertools.count(1):
            cursor, names = client.call("SCAN", cursor, "COUNT", str(_SCAN_KEYS))
            hashes += [int(name[_HASH_DIGITS], 16) for name in names if _CHUNK.fullmatch(name)]
            if cursor != b"0" and number % _SCANS_OF_BATCH:
                continue
            if hashes:
                yield [self._stored(hashes)]
                hashes = []
            if not (yield from self._read(client)):
                break
            if cursor == b"0":
                return True
        return False

    def _changes(self, entries: bytes) -> list[Event]:
        """Return the net effect of log entries."""
        events: list[Event] = []
        changed = np.frombuffer(entries, _ENTRY)
        clears = np.flatnonzero(changed["sign"] == CLEARED[:1])
        if len(clears):
            events.append({"type": "AllBlocksCleared"})
            changed = changed[clears[-1] + 1 :]
        last = dict(zip(changed["hash"].tolist(), changed["sign"].tolist(), strict=True))
        stored = [each for each, sign in last.items() if sign == STORED]
        if len(stored) < len(last):
            removed = [each for each, sign in last.items() if sign != STORED] if stored else list(last)
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": self._medium})
        if stored:
            events.append(self._stored(stored))
        return events

    def _stored(self, hashes: Sequence[int]) -> Event:
        """Return the event of stored keys. The node knows neither tokens nor order: as in vLLM's offloading, none."""
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
            "ownership": "shadowserve",
        }


def _checked(reply: Any, before: int) -> tuple[bytes, int, bytes | None]:
    """Return the fields of a reply to KV.EVENTS."""
    if isinstance(reply, list) and len(reply) == 3:
        name, position, entries = reply
        if isinstance(name, bytes) and isinstance(position, int):
            if entries is None:
                return name, position, None
            if isinstance(entries, bytes) and len(entries) == (position - before) * ENTRY_BYTES:
                return name, position, entries
    raise StorageUnavailableError("the storage node's answer to KV.EVENTS is not understood: is it of another release?")


class Publisher:
    """PUB and ROUTER sockets in vLLM's form: topic, sequence number, batch; and batches again from a number on.

    Attributes:
        port: TCP port of the PUB socket, 0 without one.
        replay_port: TCP port of the ROUTER socket.
        published_s: Monotonic time of the last batch.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, batches_max: int) -> None:
        """Listen. ConfigurationError: an endpoint cannot be used."""
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._batches_max = batches_max
        self._next = time.time_ns() // 1_000_000  # above the numbers before a restart, so subscribers see a gap
        self.published_s = time.monotonic()
        self._begins = -1  # number of the last batch that everything stored begins with
        self._replays: dict[bytes, int] = {}  # next number by client
        self._encode = msgspec.msgpack.Encoder().encode
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pub = self._listen(zmq.PUB, endpoint)
        self._replay = self._listen(zmq.ROUTER, replay_endpoint)
        self.port, self.replay_port = (_port(each) for each in self._sockets)

    def _listen(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        if kind == zmq.PUB:
            socket.set(zmq.SNDHWM, _QUEUED_BATCHES_MAX)
        else:
            socket.set(zmq.SNDHWM, _QUEUED_REPLAYED_MAX)
            socket.set(zmq.ROUTER_MANDATORY, 1)  # tells of full queues and of clients that have gone
        socket.set(zmq.MAXMSGSIZE, 1_024)  # of what clients send
        socket.set(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(f"cannot listen on {endpoint}: {error}") from error
        return socket

    def publish(self, events: list[Event]) -> None:
        payload = self._encode([time.time(), events, 0])
        number, self._next, self.published_s = self._next, self._next + 1, time.monotonic()
        if events and events[0]["type"] == "AllBlocksCleared":
            self._begins = number
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._batches_max or self._kept_bytes > _REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def wait(self, seconds: float) -> list[tuple[bytes, int]]:
        """Go on with replays, and wait for requests to replay; return client and first number of each."""
        for client, number in list(self._replays.items()):
            self._go_on(client, number)
        seconds = min(seconds, _REPLAY_WAIT_S) if self._replays else seconds
        found: list[tuple[bytes, int]] = []
        if self._replay.poll(int(1000 * seconds)):
            while len(found) < 64 and self._replay.poll(0):
                frames = self._replay.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8:
                    found.append((frames[0], int.from_bytes(frames[2], "big")))
        return found

    def lacks(self, first: int) -> bool:
        """Return True if batches from a number on do not tell all that is stored, as some are not kept any more."""
        return first < self._next - len(self._kept) and self._begins < self._next - len(self._kept)

    def replay(self, client: bytes, first: int) -> None:
        """Begin to send a client the batches from a number on, instead of those that it still waits for."""
        self._replays.pop(client, None)
        if len(self._replays) == _REPLAYS_MAX:
            del self._replays[next(iter(self._replays))]
        self._replays[client] = first

    def _go_on(self, client: bytes, number: int) -> None:
        """Send batches of a replay until the client's queue is full."""
        oldest = self._next - len(self._kept)
        try:
            for at, payload in itertools.islice(self._kept, min(max(number - oldest, 0), len(self._kept)), None):
                self._send(client, self._topic, at.to_bytes(8, "big"), payload)
                self._replays[client] = at + 1
            self._send(client, b"", _END, b"")
        except zmq.Again:
            return
        except zmq.ZMQError as error:  # EHOSTUNREACH: the client has gone
            _log.debug("replay_ended error=%r", str(error))
        del self._replays[client]

    def _send(self, client: bytes, *frames: bytes) -> None:
        self._replay.send_multipart((client, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        """Tell subscribers that nothing counts as stored any more, and close."""
        if len(self._sockets) == 2:
            self._pub.set(zmq.LINGER, _LINGER_MS)
            self.publish([{"type": "AllBlocksCleared"}])
        for socket in self._sockets:
            socket.close()
        self._context.term()


def _port(socket: "zmq.Socket[bytes]") -> int:
    where = socket.get_string(zmq.LAST_ENDPOINT)
    return int(where.rpartition(":")[2]) if where.startswith("tcp:") else 0


class Relay:
    """Publishes a feed, with replays, until stop()."""

    def __init__(self, feed: Feed, publisher: Publisher, interval_s: float) -> None:
        self._feed, self._publisher, self._interval_s = feed, publisher, interval_s
        self._stopped = False
        self._answered_s = time.monotonic()  # time of the node's last answer
        self._down = False
        self._retry_s = 0.0
        self._snapshot_s = -_SNAPSHOT_INTERVAL_S
        self._early: dict[bytes, int] = {}  # requests that wait for the next snapshot, the newest last

    def stop(self, *_: int | FrameType | None) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            self.turn()

    def turn(self) -> None:
        """Publish what has changed, and answer requests to replay."""
        self._follow()
        if time.monotonic() - self._publisher.published_s > _IDLE_S:
            self._publisher.publish([])
        requests = self._early | dict(self._publisher.wait(self._interval_s))
        self._early = {}
        if any(map(self._publisher.lacks, requests.values())):
            now_s = time.monotonic()
            if now_s >= self._snapshot_s:
                self._snapshot_s = now_s + _SNAPSHOT_INTERVAL_S
                self._feed.start_over()
                self._follow()
            else:
                early = [(client, first) for client, first in requests.items() if self._publisher.lacks(first)]
                self._early = dict(early[-_REPLAYS_MAX:])
                requests = {client: first for client, first in requests.items() if not self._publisher.lacks(first)}
        for client, first in requests.items():
            self._publisher.replay(client, first)

    def _follow(self) -> None:
        now_s = time.monotonic()
        if now_s < self._retry_s:
            return
        try:
            for events in self._feed.poll():
                self._publisher.publish(events)
                if self._stopped:
                    return
        except (StorageError, ConfigurationError) as error:  # also refusals: rights and certificates change, and limits
            self._retry_s = now_s + _RETRY_S
            if not self._down and now_s - self._answered_s > _DOWN_S:
                self._down = True
                _log.warning("node_down error=%r effect='nothing counts as stored until it answers'", str(error))
                self._publisher.publish([{"type": "AllBlocksCleared"}])
                self._feed.start_over()
            return
        if self._down:
            _log.info("node_up")
        self._answered_s, self._down = time.monotonic(), False


def _check_endpoint(flag: str, endpoint: str, *, unprotected: bool) -> None:
    """Raise ConfigurationError for an endpoint that other machines reach."""
    kind, _, address = endpoint.partition("://")
    if kind == "ipc" and address:
        return
    try:
        host, _ = split_address(address)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: {endpoint!r} is not tcp://HOST:PORT or ipc://PATH") from error
    if kind != "tcp":
        raise ConfigurationError(f"{flag}: {endpoint!r} is not tcp://HOST:PORT or ipc://PATH")
    if not unprotected and not is_loopback(host):
        raise ConfigurationError(
            f"{flag}: {endpoint} can be reached by other machines, and ZeroMQ has neither users nor TLS here: run this "
            "beside the router, on loopback, or add --unprotected"
        )


@click.command()
@click.argument("address", default="127.0.0.1:6380")
@click.option("--endpoint", default="tcp://127.0.0.1:5557", show_default=True, help="Where routers subscribe.")
@click.option(
    "--replay-endpoint", default="tcp://127.0.0.1:5558", show_default=True, help="Where they request lost batches."
)
@click.option("--topic", default="", help="Topic of the messages; llm-d: kv@pool:NAME@MODEL.")
@click.option("--medium", default="STORAGE", show_default=True, help="Medium in the events.")
@click.option(
    "--replay-batches", default=10_000, show_default=True, type=click.IntRange(1, 1 << 20), help="Kept batches."
)
@click.option(
    "--interval", default=0.05, show_default=True, type=click.FloatRange(0.001, 10), help="Seconds between two reads."
)
@click.option("--unprotected", is_flag=True, help="Allow endpoints that other machines reach.")
@logins
def events(
    address: str, endpoint: str, replay_endpoint: str, topic: str, medium: str, replay_batches: int, interval: float,
    unprotected: bool, **login: Any,
) -> None:  # fmt: skip
    """Publish what the storage node ADDRESS stores and removes, as vLLM's KV events over ZeroMQ.

    The node needs events_bytes_max, and the user the right to run KV.EVENTS and SCAN and to read all keys; the events
    are those of its tenant. Block hashes are the first 8 bytes of record keys, as in the events of the connector, and
    there are no token IDs (docs/guides/routers.md). Runs until SIGTERM or Ctrl-C.
    """
    configure_logging("info", "text")
    _check_endpoint("--endpoint", endpoint, unprotected=unprotected)
    _check_endpoint("--replay-endpoint", replay_endpoint, unprotected=unprotected)
    node = Login.at(address, **login)
    feed = Feed(lambda: StorageClient(node), medium)
    publisher = Publisher(endpoint, replay_endpoint, topic, replay_batches)
    relay = Relay(feed, publisher, interval)
    for number in stop_signals():
        signal.signal(number, relay.stop)
    try:
        for first in feed.poll():  # a refusal ends the program
            publisher.publish(first)
        click.echo(f"ready {publisher.port} {publisher.replay_port}")
        relay.run()
    finally:
        feed.close()
        publisher.close()
