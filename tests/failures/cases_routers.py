"""Routers and hints of sessions: feeds, queries and pins, with consumers that have no rights or ask for nonsense."""

import contextlib
import http.client
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import redis
from callers import MODEL, SHAPE, Prompt, generic
from cases import ENGINES, MEMORY, Context, case
from cases_dataplane import CHUNKS, Work
from kv_events import BlockStored, Router, replayed
from machine import WAIT_MAX_S, free_port, wait_for
from nodes import MIB, DataPlane, Storage, resident_bytes
from outcomes import Outcome
from redis.backoff import NoBackoff
from redis.retry import Retry

from host_control.client import DataPlaneClient
from shadowserve.keys import storage_key
from shadowserve.proto import SESSION_KEY, dataplane_pb2_grpc
from shadowserve.proto import dataplane_pb2 as pb

# ---- Feeds of routers

_FEED_BYTES: Final = "1MiB"


def _feed_key(number: int) -> str:
    return f"kv:{number:016x}{number:048x}"


_FEED_KEYS: Final = list(map(_feed_key, range(30)))


def _hashes(client: "redis.Redis") -> set[int]:
    return {int(key[3:19], 16) for key in client.scan_iter(match="kv:*", count=1000)}


def _router(context: Context, storage: Storage, *flags: str, password: str = "") -> Router:
    folder = Path(context.enter(tempfile.TemporaryDirectory(prefix="feed-")))  # a socket's path is short
    return context.enter(Router(storage.port, folder, *flags, password=password))


def _judge_index(context: Context, router: Router, storage: Storage) -> None:
    """Check that the indexes of a router and of a new one become what is stored."""
    with redis.Redis(port=storage.port) as client:
        try:
            wait_for(lambda: router.agrees(_hashes(client)))
        except AssertionError:
            missing = len(_hashes(client) - router.index.hashes)
            excess = len(router.index.hashes - _hashes(client))
            context.tally.note(Outcome.WRONG, f"a router's index lacks {missing} keys, and {excess} are not stored")
            return
        new = router.replayed().hashes
        context.tally.note(Outcome.RIGHT if new == _hashes(client) else Outcome.WRONG, "a new router's index differs")


@case("replays from sequence 0", ENGINES)
def replays_from_zero(context: Context) -> None:
    """Three routers request all batches again and again, and leave some unread, while records are stored, removed and
    evicted; then SIGKILL of the node, and the feed's program ends and begins again. Another router's index agrees."""
    storage = context.storage(memory_budget_bytes=2 * MIB, events_bytes_max=_FEED_BYTES)
    context.expected.losable = "evicted"
    router = _router(context, storage, "--replay-batches", "30")
    before = resident_bytes(router.process.pid)

    def greedy(number: int) -> Callable[[], None]:
        chance = random.Random(f"{context.seed}/{number}")

        def replay() -> None:
            with contextlib.closing(replayed(router.replays)) as batches:
                some = itertools.islice(batches, 1 if chance.random() < 0.2 else None)
                try:
                    numbers = [at for at, _ in some]
                except AssertionError:
                    context.tally.note(Outcome.HANG, "a replay has no end")
                    return
            whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            context.tally.note(Outcome.RIGHT if whole else Outcome.WRONG, "a replay has gaps")

        return replay

    working = context.load(storage.port, keys=_FEED_KEYS)
    with working, context.beside(*map(greedy, range(3))):
        context.pause(0.5, 1.0)
        storage.kill()
        context.pause(0.0, 0.5)
        storage.start()
        context.pause(0.5, 1.0)
    _judge_index(context, router, storage)
    with context.load(storage.port, keys=_FEED_KEYS):
        router.stop()
        context.pause(0.0, 0.3)
        router.start()
        context.pause(0.2, 0.5)
    _judge_index(context, router, storage)
    context.verify(storage)
    grown = resident_bytes(router.process.pid) - before
    context.tally.measure("memory_MiB", grown / MIB)
    assert grown < 128 * MIB, f"the feed's memory grew by {grown} bytes"


_USERS: Final = """user default off
user root on >root ~* +@all
user ann on >ann ~* +@all -@admin tenant=a
user bob on >bob ~* +@all -@admin tenant=b
user eve on >eve ~kv:0* +@all -@admin tenant=a
user ida on >ida ~* +get +set tenant=a
user spy on >spy ~* +kv.events +scan tenant=b
"""
_REFUSED: Final = {"": "authenticated", "eve": "may not read every key", "ida": "no permissions"}
"""Part of the error for each user that may not read the feed."""


@case("consumer without rights", MEMORY)
def consumers_without_rights(context: Context) -> None:
    """Of a feed: an unauthenticated client, users without the command or some of the keys, another tenant's, and one
    who loses the right while it follows."""
    users = context.folder / "users.acl"
    users.write_text(_USERS)
    storage = context.storage(users_file=users, events_bytes_max=_FEED_BYTES)
    half = len(_FEED_KEYS) // 2
    allowed = {int(key[3:19], 16) for key in _FEED_KEYS[half:]}
    callers = {name: context.caller(storage.port, username=name, password=name) for name in ("ann", "bob")}
    chance = random.Random(context.seed)

    def client(name: str) -> "redis.Redis":
        login = {"username": name, "password": name} if name else {}
        once = Retry(NoBackoff(), 0)
        return context.enter(redis.Redis(port=storage.port, socket_timeout=WAIT_MAX_S, retry=once, **login))

    asking = {name: client(name) for name in ("", "eve", "ida", "bob")}

    def ask() -> None:
        name = chance.choice(list(asking))
        try:
            _, _, entries = asking[name].execute_command("KV.EVENTS", log_name, 0)
        except (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError) as error:
            right = name in _REFUSED and _REFUSED[name] in str(error)
            context.tally.note(Outcome.REFUSED if right else Outcome.WRONG, f"'{name}': {str(error)[:60]}")
            time.sleep(0.01)
            return
        seen = {int.from_bytes(entries[at + 1 : at + 9], "big") for at in range(0, len(entries or b""), 33)}
        context.tally.note(
            Outcome.RIGHT if name == "bob" and seen <= allowed else Outcome.WRONG, f"'{name}' reads others' events"
        )

    log_name, _, _ = client("bob").execute_command("KV.EVENTS", "", 0)
    router = _router(context, storage, "--user", "spy", password="spy")
    works = [
        lambda caller=caller, keys=keys: caller.step(chance.choice(keys), chance)
        for caller, keys in ((callers["ann"], _FEED_KEYS[:half]), (callers["bob"], _FEED_KEYS[half:]))
    ]
    with context.beside(ask, *works):
        context.pause(0.8, 1.2)
        router.take()
    bob = client("bob")
    wait_for(lambda: router.agrees(_hashes(bob)))
    client("root").execute_command("ACL", "SETUSER", "spy", "-kv.events")
    secret = _feed_key(1 << 60)
    bob.set(secret, b"x")
    wait_for(lambda: router.agrees(set()))
    context.tally.note(Outcome.REFUSED, "the feed's user has lost its right: nothing counts as stored")
    told = {
        each
        for batch in router.index.batches.values()
        for event in batch.events
        if isinstance(event, BlockStored)
        for each in event.block_hashes
    }
    context.tally.note(Outcome.RIGHT if told and told <= allowed else Outcome.WRONG, "a feed tells other keys")
    for name, caller in callers.items():
        caller.verify(_FEED_KEYS[:half] if name == "ann" else _FEED_KEYS[half:])


# ---- Queries of routers

_TOKEN: Final = "a-token-of-routers"


@dataclass(frozen=True)
class _Queries:
    """A data plane that answers queries of routers."""

    context: Context
    plane: DataPlane

    @classmethod
    def over(cls, context: Context, storage: Storage, **options: Any) -> "_Queries":
        options |= {"metrics_port": free_port(), "environment": {"SHADOWSERVE_DPU_QUERY_TOKEN": _TOKEN}}
        made = cls(context, context.data_plane(storage.port, hosts_max=8, **options))
        index = pb.EngineIndex(model="m", instance="one", chain=MODEL.digest(), namespaces=[SHAPE.namespace])
        engine = pb.Engine(model=bytes(32), chunk_tokens=SHAPE.tokens, quantizer="lossless", index=index)
        client = context.enter(contextlib.closing(DataPlaneClient(made.plane.address, engine=engine)))
        client.connect(WAIT_MAX_S, SHAPE)
        return made

    def post(self, path: str, body: bytes, token: str = _TOKEN) -> tuple[int, Any]:
        """Return status and answer of a query. OSError: the connection was closed."""
        port = self.plane.options["metrics_port"]
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_MAX_S)) as connection:
            connection.request("POST", path, body, {"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def ask(self, prompt: Prompt, stored: int, losable: Callable[[], str], most: int = CHUNKS) -> None:
        """Ask for a prompt of which at least ``stored`` and at most ``most`` chunks are stored."""
        body = json.dumps({"model": "m", "token_ids": prompt.tokens}).encode()
        status, answer = self.post("/query", body)
        if status != 200:
            expected = status in (503, 504)
            said = generic(str(answer.get("error")))
            self.context.tally.note(Outcome.REFUSED if expected else Outcome.WRONG, f"query: {status}: {said}")
            return
        found = answer["default"]["one"]["longest_matched"] // MODEL.chunk_tokens
        if found > most:
            self.context.tally.note(Outcome.WRONG, f"query: {found} chunks are found, {most} were stored")
        elif found < stored:
            why = losable()
            self.context.tally.note(Outcome.MISSED if why else Outcome.WRONG, f"query: absent: {why}")
        else:
            self.context.tally.note(Outcome.RIGHT)

    def absurd(self, chance: random.Random) -> None:
        """Send a query that must be refused."""
        tokens = chance.choice([[-1], [1 << 32], [1e300], ["one"], {}, None, "1", [[1]], [1, "x"]])
        body = chance.choice(
            [
                b"",
                b"{",
                b"\xff\xfe",
                b"[" * 100_000,
                b"null",
                json.dumps({"model": "m", "token_ids": tokens}).encode(),
                json.dumps({"model": "m" * chance.choice([1, 10**6]), "token_ids": [1], "lora_name": "x"}).encode(),
                json.dumps({"model": "m", "token_ids": [1], "medium": "x" * 10**6}).encode(),
                json.dumps({"model_name": "m", "keys": [chance.choice(["z", "kv:" + "0" * 63, "0" * 10**6])]}).encode(),
                json.dumps({"model_name": "m", "keys": ["0" * 64] * 9000}).encode(),
                b" " * (64 << 20),
            ]
        )  # fmt: skip
        lookup = b"model_name" in body
        try:
            status, answer = self.post("/directory/lookup" if lookup else "/query", body)
        except OSError:
            self.context.tally.note(Outcome.REFUSED, "absurd query: closed")
            return
        said = f"absurd query: {status}: {str(answer)[:60]}"
        self.context.tally.note(Outcome.REFUSED if 400 <= status < 500 else Outcome.WRONG, said)


@case("server SIGKILL", ENGINES)
def storage_killed_under_queries(context: Context) -> None:
    """While routers ask for stored prompts, others and nonsense at a data plane, and hosts store; restarted."""
    storage = context.storage()
    queries = _Queries.over(context, storage)
    work = Work(context, queries.plane)
    never = Prompt(f"{context.seed}/never", CHUNKS)
    chance = random.Random(context.seed)

    def ask() -> None:
        prompt = chance.choice(work.prompts)
        stored = work.stored[id(prompt)]
        queries.ask(prompt, stored, lambda: work.losable)
        queries.ask(never, 0, lambda: "", 0)

    def absurd() -> None:
        queries.absurd(random.Random(time.monotonic_ns()))
        time.sleep(0.01)

    with work.surviving(), context.beside(ask, absurd):
        context.pause(0.4, 1.0)
        if context.engine == "memory":
            work.losable = "the engine memory ends with its process"
        context.kills(storage, 1, (0.0, 0.0), (0.1, 0.3))
        context.pause(0.6, 1.0)
    refused = context.tally.counts[Outcome.REFUSED]
    for prompt in work.prompts:
        queries.ask(prompt, work.stored[id(prompt)], lambda: work.losable)
    assert context.tally.counts[Outcome.REFUSED] == refused, "a query is refused when storage is back"
    for token in ("", _TOKEN[:-1], _TOKEN + "x"):
        status, _ = queries.post("/query", json.dumps({"model": "m", "token_ids": []}).encode(), token)
        context.tally.note(Outcome.REFUSED if status == 401 else Outcome.WRONG, f"query with '{token}': {status}")


# ---- Hints of sessions


class _Pins:
    """A host that sends pins as no client of the project would."""

    def __init__(self, context: Context, plane: DataPlane) -> None:
        self._context = context
        channel = context.enter(grpc.insecure_channel(plane.address))
        self._stub = dataplane_pb2_grpc.DataPlaneStub(channel)
        client = context.enter(contextlib.closing(DataPlaneClient(plane.address)))
        peer = client.connect(WAIT_MAX_S)
        self._metadata = ((SESSION_KEY, peer.session),)

    def send(self, chance: random.Random, stored: Sequence[bytes]) -> None:
        keys = chance.choice(
            [
                chance.sample(list(stored), 4),
                [chance.randbytes(32) for _ in range(chance.choice([1, 5000, 9000]))],
                [],
                [b""],
                [b"short", bytes(100)],
                [stored[0]] * 3,
            ]
        )
        session = chance.choice([b"", b"s", chance.randbytes(32), bytes(33), bytes(1 << 20)])
        lasts_ms = chance.choice([0, 1, 600_000, 602_000, 2**31, 2**32 - 1])
        request = pb.PinRequest(keys=keys, session=session, lasts_ms=lasts_ms, timeout_ms=10_000)
        absurd = lasts_ms > 601_000 or len(session) > 32 or any(len(key) != 32 for key in keys)
        tally = self._context.tally
        try:
            answer = self._stub.Pin(request, timeout=WAIT_MAX_S, metadata=self._metadata)
        except grpc.RpcError as error:
            said = error.code()  # type: ignore[attr-defined]
            right = said in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            tally.note(Outcome.REFUSED if right else Outcome.WRONG, f"pin: {said.name}")
            return
        if answer.outcome == pb.OUTCOME_COMPLETE:
            wrong = absurd and keys
            tally.note(Outcome.WRONG if wrong else Outcome.RIGHT, f"pin for {lasts_ms} ms of {len(keys)} keys")
        else:
            refused = answer.outcome == pb.OUTCOME_STORAGE_REFUSED
            tally.note(Outcome.REFUSED if refused else Outcome.WRONG, f"pin: {pb.Outcome.Name(answer.outcome)}")


@case("absurd hints", ENGINES, short=MEMORY)
def absurd_hints(context: Context) -> None:
    """Pins and lifetimes of no time, years or nonsense, of thousands of keys that do not exist, for sessions of any
    length, at a data plane and at its storage; others store and fetch."""
    storage = context.storage(memory_bytes=64 * MIB)
    plane = context.data_plane(storage.port, hosts_max=8)
    work = Work(context, plane)
    work.fill()
    pins, chance = _Pins(context, plane), random.Random(context.seed)
    own = [key for prompt in work.prompts for key in prompt.keys]
    client = context.enter(redis.Redis(port=storage.port, socket_timeout=WAIT_MAX_S))
    brief, numbers = context.host(plane.address), itertools.count()

    def direct() -> None:
        seconds = chance.choice([-1, 601, 2**63, 10**30, "nan", "1e3", "", "0x1", 1.5, "\0"])
        try:
            client.execute_command("KV.PIN", seconds, storage_key(own[0]))
            context.tally.note(Outcome.WRONG, f"KV.PIN for {seconds!r} seconds")
        except redis.exceptions.ResponseError as error:
            context.tally.note(Outcome.REFUSED, f"KV.PIN: {str(error)[:60]}")
        time.sleep(0.01)

    def lifetimes() -> None:
        prompt = Prompt(f"{context.seed}/brief {next(numbers)}", 2)
        lasts_s = chance.choice([0.001, 0.05, 30 * 86_400, (2**32 - 1) / 1000])
        stored = brief.store(prompt, lasts_s=lasts_s)
        brief.fetch(prompt, stored=stored, losable="its lifetime is over" if lasts_s < 1 else "")

    with work.running(), context.beside(lambda: pins.send(chance, own), direct, lifetimes):
        context.pause(1.5, 2.0)
    for tenant in client.execute_command("KV.PINS"):
        right = tenant[b"bytes"] <= tenant[b"bytes_max"] and tenant[b"keys"] <= len(own)
        context.tally.note(Outcome.RIGHT if right else Outcome.WRONG, f"pins: {tenant}")
    work.verify()
