"""Engines of several kinds on one data plane, SGLang's page sizes, and LMCache's objects."""

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import faults
import numpy as np
import redis
import torch
from callers import Prompt
from cases import ENGINES, MEMORY, POOL, Context, case
from cases_dataplane import Work
from machine import WAIT_MAX_S, wait_for
from nodes import DataPlane, Storage
from outcomes import Outcome, Tally
from sglang_pool import HEADS, IDENTITY, PAGE, MHATokenToKVPoolHost, chain, indices, ranks

from host_control.lmcache import objects
from host_control.sglang import ShadowServeStorage
from host_control.sglang.engine import Engine
from shadowserve.errors import RecordError
from shadowserve.keys import storage_key
from shadowserve.pieces import leading

# ---- SGLang

_PAGES: Final = 21
"""Pages of a prompt: a block of 16 with pages of 16 tokens, one of four and one of one."""
_OTHER: Final = 99.0
"""A value that no page has."""
_PAUSE_S: Final = 0.02
"""Pause after a miss or a refusal, as SGLang computes then."""


class SGLang:
    """SGLang's side of its storage backend: pages of a host pool, whose answers are judged. One thread at a time."""

    def __init__(self, address: str, tally: Tally, page_tokens: int = PAGE) -> None:
        self.losable = ""  # why acknowledged pages may be lost; empty if they must be present
        self.tally, self._page_tokens = tally, page_tokens
        self._pool = MHATokenToKVPoolHost("page_first", 0, page_tokens)
        options = {
            "data_plane": address,
            "lookup_timeout_s": 3.0,
            "store_timeout_s": 3.0,
            "breaker_backoff_max_s": 0.2,
        }
        self._storage = ShadowServeStorage(ranks(extra_config=options), {}, engine=Engine(IDENTITY, HEADS, 3.0))
        self._storage.register_mem_host_pool_v2(self._pool, "kv")
        self._storage.on_host_pools_registered()

    def close(self) -> None:
        self._storage.close()

    def _values(self, page_hash: str) -> torch.Tensor:
        """Return the values of a page, which are others with another page size."""
        generator = torch.Generator().manual_seed(int(page_hash[:12], 16) + self._page_tokens)
        return torch.randint(-9, 9, self._pool.page(0).shape, generator=generator).to(self._pool.dtype)

    def _moved(self, operation: str, call: Callable[[], list[bool]]) -> tuple[list[bool], str]:
        """Return a flag for each page that a call has moved, and the reason why it has not moved others."""
        before, began = self._storage.counts.copy(), time.monotonic()
        moved = call()
        self.tally.note_late(operation, began, 6.0)
        failed = self._storage.counts - before
        reasons = [name.split()[1] for name in failed if name.startswith(f"{operation} ") and "complete" not in name]
        if len(reasons) > 1 or (not all(moved) and not reasons):
            self.tally.note(Outcome.WRONG, f"SGLang's {operation}: not one reason but {reasons}")
        if "internal" in reasons:
            self.tally.note(Outcome.WRONG, f"SGLang's {operation}: internal")
        return moved, "".join(reasons[:1])

    def store(self, pages: Sequence[str]) -> int:
        """Store a prompt's pages. Return the number of leading ones that are stored."""
        for number, each in enumerate(pages):
            self._pool.page(number)[...] = self._values(each)
        places = indices(self._pool, range(len(pages)))
        moved, reason = self._moved("set", lambda: self._storage.batch_set_v1(list(pages), places))
        if any(moved):
            self.tally.note(Outcome.RIGHT)
        if not all(moved):
            self.tally.note(Outcome.REFUSED, f"SGLang's set: {reason}")
            time.sleep(_PAUSE_S)
        return leading(np.array(moved))

    def store_whole(self, prompts: Sequence[Sequence[str]]) -> None:
        for pages in prompts:
            wait_for(lambda pages=pages: self.store(pages) == len(pages))  # type: ignore[misc]

    def fetch(self, pages: Sequence[str], *, stored: int = 0) -> int:
        """Look a prompt up and fetch its pages. Return the number of leading ones that arrived; ``stored`` must."""
        first = self._pool.kv_buffer.shape[1] // self._page_tokens // 2
        self._pool.kv_buffer[:, first * self._page_tokens :] = _OTHER
        places = indices(self._pool, range(first, first + len(pages)))
        self._storage.batch_exists(list(pages))
        moved, reason = self._moved("get", lambda: self._storage.batch_get_v1(list(pages), places))
        for number, (each, there) in enumerate(zip(pages, moved, strict=True)):
            if there and not torch.equal(self._pool.page(first + number), self._values(each)):
                self.tally.note(Outcome.WRONG, f"SGLang's get: page {number} has other values")
                return 0
        arrived = leading(np.array(moved))
        if any(moved):
            self.tally.note(Outcome.RIGHT)
        if not all(moved):
            lost = reason == "absent" and arrived < stored and not self.losable
            why = f"{reason}: {self.losable}" if self.losable else reason
            self.tally.note(Outcome.WRONG if lost else Outcome.MISSED, f"SGLang's get: {why}")
            time.sleep(_PAUSE_S)
        return arrived


class Pages:
    """SGLang engines that store and fetch the same prompts, each with its own page size and values."""

    def __init__(self, context: Context, plane: DataPlane, page_tokens: Sequence[int]) -> None:
        self._context, self._plane = context, plane
        self.prompts = [chain(_PAGES, f"{context.seed}/{number}") for number in range(4)]
        self.engines = [self._engine(size, context.tally) for size in page_tokens]
        self.stored = [[0] * len(self.prompts) for _ in self.engines]

    def _engine(self, size: int, tally: Tally) -> SGLang:
        return self._context.enter(contextlib.closing(SGLang(self._plane.address, tally, size)))

    def may_lose(self, why: str) -> None:
        """Set the reason why acknowledged pages may be lost; empty if they must be present."""
        for engine in self.engines:
            engine.losable = why

    def fill(self) -> None:
        for number, engine in enumerate(self.engines):
            engine.store_whole(self.prompts)
            self.stored[number] = [_PAGES] * len(self.prompts)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        def working(number: int, engine: SGLang) -> Callable[[], None]:
            chance, stored = random.Random(f"{self._context.seed}/{number}"), self.stored[number]

            def work() -> None:
                prompt = chance.randrange(len(self.prompts))
                if chance.random() < 0.3:
                    stored[prompt] = max(stored[prompt], engine.store(self.prompts[prompt]))
                else:
                    engine.fetch(self.prompts[prompt], stored=stored[prompt])

            return work

        with self._context.beside(*[working(*pair) for pair in enumerate(self.engines)]):
            yield

    def verify(self) -> None:
        for engine, stored in zip(self.engines, self.stored, strict=True):
            for pages, count in zip(self.prompts, stored, strict=True):
                engine.fetch(pages, stored=count)

    def verify_again(self) -> None:
        """Wait until all programs are connected again. Then check that all acknowledged pages are present."""
        with contextlib.closing(SGLang(self._plane.address, Tally())) as quiet:
            quiet.store_whole([chain(1, f"{self._context.seed}/probe")])
        self.verify()


class _Foreign(Prompt):
    """A record of another engine, asked for as if it were this engine's."""

    def __init__(self, key: bytes) -> None:
        self.keys, self.chunks, self.parents = [key], [b""], [b""]


def _kv_keys(storage: Storage) -> set[bytes]:
    with redis.Redis(port=storage.port) as client:
        return {bytes.fromhex(key[3:].decode()) for key in client.scan_iter(match="kv:*", count=1000)}


@case("engines of two kinds", ENGINES, short=MEMORY)
def two_kinds_of_engines(context: Context) -> None:
    """vLLM's client and SGLang's backend store and fetch for one tenant; SIGKILL of the data plane meanwhile. Then each
    record of SGLang is asked for as vLLM's, and put under the other's key."""
    storage = context.storage()
    plane = context.data_plane(storage.port, hosts_max=8)
    work, pages = Work(context, plane), Pages(context, plane, [PAGE, PAGE])
    with work.running(), pages.running():
        context.kills(plane, 1, (0.4, 0.8), (0.1, 0.3))
        context.pause(0.5, 0.8)
    work.verify_again()
    pages.verify_again()
    work.fill()
    pages.fill()
    ours = {key for prompt in work.prompts for key in prompt.keys}
    foreign = sorted(_kv_keys(storage) - ours)
    before = context.tally.reasons[Outcome.MISSED]["fetch: mismatch"]
    for key in foreign:
        if key not in Prompt(f"{context.seed}/probe", 1).keys:
            work.host.fetch(_Foreign(key))
    missed = context.tally.reasons[Outcome.MISSED]["fetch: mismatch"] - before
    if missed < len(foreign) - 1:
        context.tally.note(Outcome.WRONG, f"{missed} of {len(foreign)} records of SGLang are a mismatch for vLLM")
    _exchange_records(context, storage, sorted(ours), foreign)
    work.verify()
    pages.verify()


def _exchange_records(context: Context, storage: Storage, ours: Sequence[bytes], foreign: Sequence[bytes]) -> None:
    """Try to put records under keys of other engines."""
    with redis.Redis(port=storage.port) as client:
        for one, other in zip(context.chance.sample(ours, 5), context.chance.sample(foreign, 5), strict=True):
            for key, record in ((one, client.get(storage_key(other))), (other, client.get(storage_key(one)))):
                try:
                    client.set(storage_key(key), record)
                    context.tally.note(Outcome.WRONG, "the storage node takes a record under another key")
                except redis.exceptions.ResponseError:
                    context.tally.note(Outcome.REFUSED, "SET: a record under another key")


@case("SGLang's page sizes", ENGINES, short=POOL)
def other_page_sizes(context: Context) -> None:
    """Pages of 16, 32 and 48 tokens have the same hashes and other values; one engine finds nothing of another. Then
    all store and fetch, and storage is killed and restarted."""
    storage = context.storage()
    pages = Pages(context, context.data_plane(storage.port, hosts_max=8), [PAGE, 2 * PAGE, 3 * PAGE])
    for storing in range(len(pages.engines)):
        pages.engines[storing].store_whole(pages.prompts)
        pages.stored[storing] = [_PAGES] * len(pages.prompts)
        pages.verify()
    with pages.running():
        context.pause(0.2, 0.5)
        if context.engine == "memory":
            pages.may_lose("the engine memory ends with its process")
        context.kills(storage, 1, (0.0, 0.0), (0.1, 0.3))
        context.pause(0.6, 1.0)
    pages.verify_again()


@case("bit rot on disk", POOL)
def rotten_under_sglang(context: Context) -> None:
    """A bit of each of eight records on the devices, while engines with SGLang's backend fetch."""
    storage = context.storage()
    pages = Pages(context, context.data_plane(storage.port, hosts_max=8), [PAGE, 2 * PAGE])
    pages.fill()
    assert storage.stop()
    faults.rot_some(storage.objects(), 8, context.chance)
    storage.start()
    pages.may_lose("damaged on its device")
    pages.verify_again()
    with pages.running():
        context.pause(0.4, 0.8)
    pages.may_lose("")
    pages.fill()
    pages.verify()


# ---- LMCache's objects

_KV: Final = objects.Array((2, 2, 256, 128), "bfloat16")
_RAW_BYTES: Final = objects.layout_of(_KV).raw_bytes
_WEIGHTS: Final = "weights 1"


@dataclass(frozen=True)
class _ObjectKey:
    chunk_hash: bytes
    model_name: str = "team/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""

    @property
    def name(self) -> str:
        """Return LMCache's name of the object, which lacks some of what the key says."""
        return f"{self.model_name}@{self.kv_rank:08x}@{self.object_group_id:x}@{self.chunk_hash.hex()}"

    def values(self, seed: int) -> bytes:
        """Return values of the object, which are others for each key."""
        name = hashlib.sha256(repr((seed, self)).encode()).digest()
        noise = np.random.default_rng(list(name)).standard_normal(_RAW_BYTES // 2, np.float32)
        return (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _encoded(
    key: _ObjectKey, kv: bytes, array: objects.Array = _KV, identity: str = _WEIGHTS, size: float | None = None
) -> bytes:
    target = bytearray(objects.stored_bytes([array], size))
    objects.encode(key, [array], memoryview(kv), memoryview(target), identity)
    return bytes(target)


def _damaged(value: bytes, chance: random.Random) -> bytes:
    """Return a value with flipped bits, a hole, a foreign part, another length, or nothing of it."""
    place, size = chance.randrange(len(value)), chance.randint(1, 4096)
    holed = bytearray(value)
    holed[place : place + size] = chance.choice([bytes(size), chance.randbytes(size)])
    flipped = bytearray(value)
    for _ in range(chance.choice([1, 2, 64])):
        flipped[chance.choice([chance.randrange(400), chance.randrange(len(value))])] ^= 1 << chance.randrange(8)
    return chance.choice([bytes(flipped), bytes(holed[: len(value)]), value[:place], value + value[:size], b"x", b""])


class _LMCache:
    """LMCache's side of the serde over a storage node: it sets and gets objects, which are judged."""

    def __init__(self, context: Context, storage: Storage) -> None:
        self._tally = context.tally
        self.client = context.enter(redis.Redis(port=storage.port, socket_timeout=WAIT_MAX_S))

    def load(self, key: _ObjectKey, expected: bytes, losable: str) -> None:
        """Load an object; without ``losable``, a miss is wrong."""
        value, target = self.client.get(key.name), bytearray(_RAW_BYTES)
        try:
            if value is None:
                reason = "absent"
            else:
                objects.decode(key, [_KV], memoryview(value), memoryview(target), _WEIGHTS)
                right = bytes(target) == expected
                self._tally.note(Outcome.RIGHT if right else Outcome.WRONG, "LMCache's load: other bytes")
                return
        except RecordError as error:
            reason = type(error).__name__
        except Exception as error:  # a miss with a reason is expected, whatever the bytes are
            self._tally.note(Outcome.WRONG, f"LMCache's load: {type(error).__name__}")
            return
        self._tally.note(Outcome.MISSED if losable else Outcome.WRONG, f"LMCache's load: {reason}: {losable}")


def _wrong_object(key: _ObjectKey, kv: bytes, keys: Sequence[_ObjectKey], context: Context) -> bytes:
    """Return the object of another key, layout or identity, or a damaged one."""
    chance = context.chance
    match chance.randrange(4):
        case 0:
            others = [
                replace(key, model_name="team/model2"),
                replace(key, kv_rank=0x01000101),
                replace(key, object_group_id=1),
                replace(key, cache_salt="tenant"),
                chance.choice([each for each in keys if each != key]),
            ]
            other = chance.choice(others)
            return _encoded(other, other.values(context.seed))
        case 1:
            other_layout, other_weights = objects.Array((2, 2, 128, 256), "bfloat16"), replace(key, cache_salt="x")
            if chance.random() < 0.5:
                return _encoded(key, kv, other_layout, size=1.0)
            return _encoded(key, other_weights.values(context.seed), identity="weights 2")
        case _:
            return _damaged(_encoded(key, kv), chance)


@case("wrong LMCache objects", ENGINES)
def wrong_lmcache_objects(context: Context) -> None:
    """Under its name in storage is the object of another model, rank, salt, chunk, layout or of other weights, or a
    damaged one; then a bit of each of six objects on the devices."""
    storage, chance = context.storage(), context.chance
    lmcache = _LMCache(context, storage)
    keys = [_ObjectKey(chance.randbytes(32)) for _ in range(12)]
    values = {key: key.values(context.seed) for key in keys}
    for key, kv in values.items():
        lmcache.client.set(key.name, _encoded(key, kv))
    for _ in range(25):
        for key, kv in values.items():
            lmcache.client.set(key.name, _wrong_object(key, kv, keys, context))
            lmcache.load(key, kv, "another value is under its name")
    for key, kv in values.items():
        lmcache.client.set(key.name, _encoded(key, kv))
        lmcache.load(key, kv, "")
    if context.engine == "pool":
        assert storage.stop()
        faults.rot_some(storage.objects(), 6, chance)
        storage.start()
        for key, kv in values.items():
            lmcache.load(key, kv, "damaged on its device")
