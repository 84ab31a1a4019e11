"""Queries of routers: how many tokens of a prompt are stored, in which tier, and how long a load would take.

Two shapes of requests are answered: ``POST /query`` of Mooncake's indexer (RFC 1403), and ``POST /directory/lookup`` of
LMCache's coordinator. Engines tell in their Hello how tokens become keys. Answers are estimates for choosing an engine:
an engine looks the prompt up itself, and checks what it loads.
"""

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from dpu_dataplane.catalog import Catalog
from dpu_dataplane.engines import Engines, Instance
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import Cold, Found, Stored, Unanswered
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX
from shadowserve.errors import StorageError
from shadowserve.keys import KEY_BYTES, Extra, prefix_chain, record_keys, request_inputs
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

QUERY_TIMEOUT_S: Final = 2.0
_KEYS_MAX: Final = 65_536
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
            found: tuple[int, Any] = 200, self.paths[path](body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            found = 400, {"error": f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"}
        except _Refusal as refusal:
            found = refusal.status, {"error": str(refusal)}
        self._loop.call_soon_threadsafe(self._metrics.queries.update, [str(found[0])])
        return found

    # ---- The two shapes

    def _query(self, body: bytes) -> Any:
        query = _Query.model_validate_json(body)
        if query.lora_name:
            raise _Refusal(422, "lora_name: an adapter's records are known by its content, which only engines have")
        allowed = _tiers_of(query.medium)
        found: dict[str, Any] = {}
        for engine in self._instances(query.model):
            if query.instance_id in (None, engine.name):
                found[engine.name] = self._hit(engine, query.token_ids, query.cache_salt, allowed)
        return {"default": found}

    def _hit(self, engine: Instance, tokens: Sequence[int], salt: str | None, allowed: Sequence[Tier]) -> Any:
        every = len(engine.namespaces)
        records = self._find([*engine.namespaces, *engine.last_namespaces], _chain(engine, tokens, salt))
        usable = np.isin(records.tiers, allowed)
        ends: Flags = np.logical_and.reduce(usable[every:])
        reach = leading(np.logical_and.reduce(usable[:every])) if every else len(ends)
        chunks = int(np.flatnonzero(ends[:reach])[-1]) + 1 if ends[:reach].any() else 0
        needed = np.zeros(records.tiers.shape, np.bool_)
        needed[:every, :chunks] = True
        needed[every:, max(chunks - 1, 0) : chunks] = True
        # A chunk is as far away as the farthest of its records; where only the last one counts, so are all before it.
        farthest = np.where(needed, records.tiers, 0).max(axis=0, initial=0)[:chunks]
        farthest = np.maximum(farthest, farthest[-1:]) if not every else farthest
        return {
            "longest_matched": chunks * engine.chunk_tokens,
            "GPU": 0,
            **{name: int((farthest == tier).sum()) * engine.chunk_tokens for name, tier in _NAMES.items()},
            "stored_bytes": int(records.sizes[needed].sum()),
            "expected_ms": self._expected_ms(records, needed),
        }

    def _lookup(self, body: bytes) -> Any:
        query = _Lookup.model_validate_json(body)
        if query.keys:
            records = self._find([b""], [_key(text) for text in query.keys])
            chunks, known = len(query.keys), records.tiers > 0
        else:
            engines = self._instances(query.model_name)
            ranked = [each for each in engines if len(each.namespaces) == query.world_size] or engines
            if not ranked:
                return {"chunks": 0, "results": [], "expected_ms": None}
            names = [*ranked[0].namespaces, *ranked[0].last_namespaces]
            chain = _chain(ranked[0], query.token_ids, query.cache_salt)
            records = self._find(names, chain)
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

    def _instances(self, model: str) -> list[Instance]:
        """Return the engines of a model; the event loop's thread changes them."""

        async def read() -> list[Instance]:
            return self._engines.instances(model)[-_INSTANCES_MAX:]

        instances: list[Instance] = self._run(read())
        return instances

    def _find(self, namespaces: Sequence[bytes], chain: Sequence[bytes]) -> _Records:
        """Look the records of chunks up. With the namespace ``b""``, the chain has record keys."""
        chain = chain[: _KEYS_MAX // max(len(namespaces), 1)]
        keys = [record_keys(name, chain) if name else list(chain) for name in namespaces]
        flat = [(name, key) for name, row in zip(namespaces, keys, strict=True) for key in row]
        found: list[tuple[int, int, int]] = []

        async def look() -> None:
            for first in range(0, len(flat), QUESTION_KEYS_MAX):
                part = flat[first : first + QUESTION_KEYS_MAX]
                answers = await self._catalog.find([key for _, key in part], fresh=True, waiting=False)
                for (name, key), (answer, _) in zip(part, answers, strict=True):
                    found.append(_described(None if self._catalog.is_quarantined(name, key) else answer))

        self._run(look())
        facts = np.array(found, np.int64).reshape(len(namespaces), len(chain), 3)
        return _Records(keys, facts[:, :, 0], facts[:, :, 1], facts[:, :, 2])

    def _run(self, work: Any) -> Any:
        """Run a coroutine in the event loop, and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, QUERY_TIMEOUT_S), self._loop)
        try:
            return future.result(2 * QUERY_TIMEOUT_S)
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


def _described(found: Found) -> tuple[int, int, int]:
    """Return tier, length, and milliseconds until it is nearer, of what storage has for a key."""
    match found:
        case Stored():
            return int(found.tier), found.length, 0
        case Cold():
            return int(Tier.COLD), found.length, found.ms
        case Unanswered():
            raise _Refusal(503, f"storage has not answered for some keys: {found.reason}")
    return 0, 0, 0


def _chain(engine: Instance, tokens: Sequence[int], salt: str | None) -> list[bytes]:
    """Return the chunk keys of a prompt's whole chunks, at most as many as a query may ask for."""
    most = engine.chunk_tokens * (_KEYS_MAX // max(len(engine.namespaces) + len(engine.last_namespaces), 1))
    extra = Extra(request_inputs(salt))
    return prefix_chain(engine.chain, tokens[:most], chunk_tokens=engine.chunk_tokens, extra=extra)


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
