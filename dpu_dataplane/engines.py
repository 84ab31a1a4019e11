"""Connected engines, and warnings about engines of the same model that share no records.

Engines share records only with the same model, chunk size and quantizer. With different ones each stores its own copy:
no error, and most likely a mistake.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from dpu_dataplane.log_limiter import LogLimiter
from shadowserve.proto import dataplane_pb2 as pb

_ENGINES_MAX: Final = 256
_DIFFERENCES_MAX: Final = 8
_NEW_S: Final = 60.0  # seconds after its Hello for which an engine counts as running without registered memory


@dataclass(slots=True)
class _Engine:
    description: pb.Engine  # its description, with its process
    namespaces: set[bytes]  # namespaces of its chunks; memory registered for one of them shows that it runs
    hello_s: float  # monotonic time of its last Hello
    index: pb.EngineIndex | None  # how tokens become its keys


class Instance(NamedTuple):
    """A running engine: how tokens become the keys of its ranks' records (EngineIndex)."""

    name: str
    chain: bytes
    chunk_tokens: int
    namespaces: dict[bytes, None]  # different ones, in order
    last_namespaces: dict[bytes, int]  # with the number of last chunks of a hit that need their record


class Engines:
    """Engines with a recent Hello; ``registered`` returns the namespaces of registered memory."""

    def __init__(self, registered: Callable[[], Collection[bytes]], log: LogLimiter) -> None:
        self._registered = registered
        self._log = log
        self._engines: dict[bytes, _Engine] = {}
        self._logged: set[frozenset[bytes]] = set()

    def enter(self, request: pb.HelloRequest) -> list[str]:
        """Add the engine of a validated Hello; return a line for each running engine that should share its records."""
        engine = pb.Engine()
        engine.CopyFrom(request.engine)
        engine.process = request.process
        index = engine.index if engine.HasField("index") else None
        engine.ClearField("index")
        key = engine.SerializeToString(deterministic=True)
        known = self._engines.pop(key, None)
        namespaces = known.namespaces if known else set()
        namespaces.add(request.layout.namespace)
        self._engines[key] = _Engine(engine, namespaces, time.monotonic(), index)
        while len(self._engines) > _ENGINES_MAX:
            del self._engines[next(iter(self._engines))]
        others = {_form(each): each for each in self.running() if _differs(each, engine)}
        for other in others.values():
            self._warn(engine, other)
        return [_difference(engine, other) for other in others.values()][:_DIFFERENCES_MAX]

    def running(self) -> list[pb.Engine]:
        """Return the engines with registered memory or a Hello just now; the newest last."""
        return [each.description for each in self._running()]

    def _running(self) -> list[_Engine]:
        registered, now = self._registered(), time.monotonic()
        return [
            each
            for each in self._engines.values()
            if now - each.hello_s < _NEW_S or not each.namespaces.isdisjoint(registered)
        ]

    def instances(self, model: str) -> list[Instance]:
        """Return the running engines of a model, by the name that their users have for it."""
        found: dict[tuple[str, bytes, int], Instance] = {}
        for each in self._running():
            if (index := each.index) is not None and index.model == model:
                key = (index.instance, index.chain, each.description.chunk_tokens)
                ranks = found.setdefault(key, Instance(*key, {}, {}))
                ranks.namespaces.update(dict.fromkeys(index.namespaces))
                ranks.last_namespaces.update(zip(index.last_namespaces, index.last_chunks, strict=True))
        return list(found.values())

    def _warn(self, one: pb.Engine, other: pb.Engine) -> None:
        """Log a difference once for each pair of configurations."""
        pair = frozenset({_form(one), _form(other)})
        if pair in self._logged:
            return
        if len(self._logged) >= _ENGINES_MAX:
            self._logged.clear()
        self._logged.add(pair)
        self._log.log(logging.WARNING, "engines differ", one.process, _difference(one, other))


def _form(engine: pb.Engine) -> bytes:
    """Return the part of the description that engines with common records have in common."""
    alike = pb.Engine(model=engine.model, chunk_tokens=engine.chunk_tokens, quantizer=engine.quantizer)
    return alike.SerializeToString(deterministic=True)


def _differs(one: pb.Engine, other: pb.Engine) -> bool:
    return one.model == other.model and _form(one) != _form(other)


def _difference(one: pb.Engine, other: pb.Engine) -> str:
    keys = {
        "chunk_tokens": (one.chunk_tokens, other.chunk_tokens),
        "quantizer": (one.quantizer, other.quantizer),
    }
    different = " and ".join(f"{key} ({mine} and {theirs})" for key, (mine, theirs) in keys.items() if mine != theirs)
    return (
        f"two engines of the same model, {one.process or 'one without a name'} and {other.process or 'one without'}, "
        f"share no records, because they differ in {different}; configure both alike"
    )
