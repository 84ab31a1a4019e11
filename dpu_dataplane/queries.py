"""Queries of routers: how many tokens of a prompt are stored, in which tier, and how long a load would take.

Two shapes of requests are answered: ``POST /query`` of Mooncake's indexer (RFC 1403), and ``POST /directory/lookup`` of
LMCache's coordinator. Engines tell in their Hello how tokens become keys. Answers are estimates for choosing an engine:
an engine looks the prompt up itself, and checks what it loads.
"""

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from dpu_dataplane.catalog import Catalog
from dpu_dataplane.engines import Engines, Instance
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import Cold, Found, Stored, Unanswered
from shadowserve.errors import StorageError
from shadowserve.keys import KEY_BYTES, Extra, prefix_chain, record_keys, request_inputs
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

QUERY_TIMEOUT_S: Final = 2.0
_KEYS_MAX: Final = 8_192
_PART_KEYS: Final = 512
"""Keys in one request to storage: behind each, other calls get their turn on the event loop, as in lookups."""
_INSTANCES_MAX: Final = 16
_NAMES: Final = {"CPU": Tier.MEMORY, "DISK": Tier.DEVICE, "STORAGE": Tier.STORAGE, "COLD": Tier.COLD}
_MEDIA: Final = {
    "l1": (),
    "gpu": (),
    "l2": (Tier.MEMORY,),
    "l3": (Tier.DEVICE, Tier.STORAGE, Tier.COLD),
    **{name.lower(): (tier,) for name, tier in _NAMES.items()},
}
"""Tiers of each medium that a query may name. KV in an engine's own memory is not known here."""

_Token = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Query(BaseModel):
    """Mooncake's request; other fields are ignored."""

    model: str
    lora_name: str | None = None
    token_ids: list[_Token]
    medium: list[str] | str | None = None
    cache_salt: str | None = None
    instance_id: str | None = None


class _Lookup(BaseModel):
    """LMCache's request; ``keys`` are hexadecimal record keys, with or without ``kv:``."""

    keys: list[str] = []
    token_ids: list[_Token] = []
    model_name: str = ""
    world_size: int | None = None
    cache_salt: str | None = None


class _Refusal(Exception):
    """A query that is not answered; ``status`` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Records(NamedTuple):
    """Records that were looked for, as arrays [namespace, chunk]."""

    keys: list[list[bytes]]
    tiers: npt.NDArray[np.int64]  # :class:`Tier`; 0 for absent ones
    sizes: npt.NDArray[np.int64]  # bytes
    cold_ms: npt.NDArray[np.int64]  # milliseconds until the bucket has brought it and those before it


class Queries:
    """Answers queries, in the threads of the HTTP endpoint."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engines: Engines, catalog: Catalog, metrics: Metrics) -> None:
        self._loop, self._engines, self._catalog, self._metrics = loop, engines, catalog, metrics
        self.paths = {"/query": self._query, "/directory/lookup": self._lookup}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and answer to a request, within about QUERY_TIMEOUT_S."""
        try:
            found: tuple[int, Any] = 200, self.paths[path](body, time.monotonic() + QUERY_TIMEOUT_S)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            found = 400, {"error": f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"}
        except _Refusal as refusal:
            found = refusal.status, {"error": str(refusal)}
        self._loop.call_soon_threadsafe(self._metrics.queries.update, [str(found[0])])
        return found

    # ---- The two shapes

    def _query(self, body: bytes, until_s: float) -> Any:
        query = _Query.model_validate_json(body)
        if query.lora_name:
            raise _Refusal(422, "lora_name: an adapter's records are known by its content, which only engines have")
        allowed = _tiers_of(query.medium)
        found: dict[str, Any] = {}
        chain = _chains(query.token_ids, query.cache_salt)
        for engine in self._instances(query.model, until_s):
            if query.instance_id in (None, engine.name):
                names = [*engine.namespaces, *engine.last_namespaces]
                records = self._find(names, chain(engine.chain, engine.chunk_tokens), until_s)
                found[engine.name] = self._hit(engine, records, allowed)
        return {"default": found}

    def _hit(self, engine: Instance, records: _Records, allowed: Sequence[Tier]) -> Any:
        every = len(engine.namespaces)
        usable = np.isin(records.tiers, allowed)
        last = list(engine.last_namespaces.values())
        ends: Flags = np.ones(usable.shape[1], np.bool_)
        for row, count in zip(usable[every:], last, strict=True):
            ends &= _whole_behind(row, count)
        reach = leading(np.logical_and.reduce(usable[:every])) if every else len(ends)
        chunks = int(np.flatnonzero(ends[:reach])[-1]) + 1 if ends[:reach].any() else 0
        needed = np.zeros(records.tiers.shape, np.bool_)
        needed[:every, :chunks] = True
        for row, count in zip(needed[every:], last, strict=True):
            row[max(chunks - count, 0) : chunks] = True
        # A chunk is as far away as the farthest of its records; where only the last ones count, so are all before it.
        farthest = np.where(needed, records.tiers, 0).max(axis=0, initial=0)[:chunks]
        farthest = np.maximum(farthest, farthest[-1:]) if not every else farthest
        return {
            "longest_matched": chunks * engine.chunk_tokens,
            "GPU": 0,
            **{name: int((farthest == tier).sum()) * engine.chunk_tokens for name, tier in _NAMES.items()},
            "stored_bytes": int(records.sizes[needed].sum()),
            "expected_ms": self._expected_ms(records, needed),
        }

    def _lookup(self, body: bytes, until_s: float) -> Any:
        query = _Lookup.model_validate_json(body)
        if len(query.keys) > _KEYS_MAX:
            raise _Refusal(400, f"keys: at most {_KEYS_MAX}")
        if query.keys:
            records = self._find([b""], [_key(text) for text in query.keys], until_s)
            chunks, known = len(query.keys), records.tiers > 0
        else:
            engines = self._instances(query.model_name, until_s)
            ranked = [each for each in engines if len(each.namespaces) == query.world_size] or engines
            if not ranked:
                return {"chunks": 0, "results": [], "expected_ms": None}
            names = [*ranked[0].namespaces, *ranked[0].last_namespaces]
            chain = _chains(query.token_ids, query.cache_salt)(ranked[0].chain, ranked[0].chunk_tokens)
            records = self._find(names, chain, until_s)
            chunks, known = records.tiers.shape[1], records.tiers > 0
        results = [
            {
                "key": key.hex(),
                "placements": [{"tier": Tier(tier).label, "bytes": size}] if tier else [],
                "token_ids": [],
                "access_count": 0,
            }
            for row, tiers, sizes in zip(records.keys, records.tiers.tolist(), records.sizes.tolist(), strict=True)
            for key, tier, size in zip(row, tiers, sizes, strict=True)
        ]
        return {"chunks": chunks, "results": results, "expected_ms": self._expected_ms(records, known)}

    # ---- What both need

    def _instances(self, model: str, until_s: float) -> list[Instance]:
        """Return the engines of a model; the event loop's thread changes them."""

        async def read() -> list[Instance]:
            return self._engines.instances(model)[-_INSTANCES_MAX:]

        instances: list[Instance] = self._run(read(), until_s)
        return instances

    def _find(self, namespaces: Sequence[bytes], chain: Sequence[bytes], until_s: float) -> _Records:
        """Look the records of chunks up. With the namespace ``b""``, the chain has record keys."""
        chain = chain[: _KEYS_MAX // max(len(namespaces), 1)]
        keys = [record_keys(name, chain) if name else list(chain) for name in namespaces]
        flat = [(name, key) for name, row in zip(namespaces, keys, strict=True) for key in row]
        found: list[tuple[int, int, int]] = []

        async def look() -> None:
            before_ms = 0
            for first in range(0, len(flat), _PART_KEYS):
                part = flat[first : first + _PART_KEYS]
                answers = await self._catalog.find([key for _, key in part], fresh=True, waiting=False)
                for (name, key), (answer, _) in zip(part, answers, strict=True):
                    found.append(_described(None if self._catalog.is_quarantined(name, key) else answer, before_ms))
                before_ms = max([before_ms, *(ms for _, _, ms in found[first:])])  # the bucket brings them in order

        self._run(look(), until_s)
        facts = np.array(found, np.int64).reshape(len(namespaces), len(chain), 3)
        return _Records(keys, facts[:, :, 0], facts[:, :, 1], facts[:, :, 2])

    def _run(self, work: Any, until_s: float) -> Any:
        """Run a coroutine in the event loop, and wait for its result."""
        left_s = max(until_s - time.monotonic(), 0.0)
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, left_s), self._loop)
        try:
            return future.result(left_s + QUERY_TIMEOUT_S)
        except StorageError as error:
            raise _Refusal(503, str(error)) from error
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise _Refusal(504, f"no answer within {QUERY_TIMEOUT_S:g} s") from error

    def _expected_ms(self, records: _Records, needed: npt.NDArray[np.bool_]) -> int | None:
        """Return how long a load of records would take, as fast as recent ones; None where none was measured."""
        sizes, tiers = records.sizes[needed], records.tiers[needed]
        expected = float(records.cold_ms[needed].max(initial=0))
        local = tiers <= Tier.DEVICE
        for size, pace in (
            (int(sizes[local].sum()), self._metrics.local_pace.bytes_per_s),
            (int(sizes[~local].sum()), self._metrics.storage_pace.bytes_per_s),
        ):
            if size and not pace:
                return None
            expected += 1e3 * size / pace if pace else 0.0
        return round(expected)


def _whole_behind(usable: Flags, count: int) -> Flags:
    """Tell of each chunk whether it and those before it, ``count`` in all, are usable."""
    misses = np.cumsum(~usable)
    whole: Flags = misses - np.concatenate((np.zeros(min(count, len(misses)), np.int64), misses[:-count])) == 0
    return whole


def _described(found: Found, before_ms: int) -> tuple[int, int, int]:
    """Return tier, length, and milliseconds until it is nearer, of what storage has for a key."""
    match found:
        case Stored():
            return int(found.tier), found.length, 0
        case Cold():
            return int(Tier.COLD), found.length, before_ms + found.ms
        case Unanswered():
            raise _Refusal(503, f"storage has not answered for some keys: {found.reason}")
    return 0, 0, 0


def _chains(tokens: Sequence[int], salt: str | None) -> Callable[[bytes, int], list[bytes]]:
    """Return a function that returns the chunk keys of a prompt, given an engine's chain and tokens of a chunk."""
    extra = Extra(request_inputs(salt))

    @functools.cache
    def chain(begin: bytes, size: int) -> list[bytes]:
        return prefix_chain(begin, tokens[: size * _KEYS_MAX], chunk_tokens=size, extra=extra)

    return chain


def _tiers_of(medium: list[str] | str | None) -> list[Tier]:
    if medium is None:
        return list(_NAMES.values())
    wanted = [medium] if isinstance(medium, str) else medium
    unknown = [each for each in wanted if each.lower() not in _MEDIA]
    if unknown:
        raise _Refusal(400, f"medium: {unknown[0][:40]!r} is none of {', '.join(sorted(_MEDIA))}")
    return [tier for each in wanted for tier in _MEDIA[each.lower()]]


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text.removeprefix("kv:")[: 2 * KEY_BYTES + 1])
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise _Refusal(400, f"keys: {text[:80]!r} is not a record key of {2 * KEY_BYTES} hexadecimal digits")
    return key
