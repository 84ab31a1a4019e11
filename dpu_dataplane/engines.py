"""Engines: which models the connected engines serve, and which engines of one model share nothing, and why.

Records have the same keys only where the model, the tokens in a chunk and the quantizer are the same. Two engines of
one model that differ in one of these are each served correctly, and each stores its own copy of everything. So this is
no error, and it is most likely a mistake.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from dpu_dataplane.repeats import Repeats
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["Engines"]

_ENGINES_MAX: Final = 256
_DIFFERENCES_MAX: Final = 8
_NEW_S: Final = 60.0
"""An engine registers memory soon after its Hello: for so long it counts without."""


@dataclass(slots=True)
class _Engine:
    """One engine process.

    Attributes:
        said: its description, with its process.
        namespaces: of the chunks that it has named; memory registered for one of them shows that it runs.
        seen_s: monotonic time of its last Hello.
    """

    said: pb.Engine
    namespaces: set[bytes]
    seen_s: float


class Engines:
    """The engines that said Hello lately. Used on the event loop's thread alone.

    Args:
        registered: returns the namespaces of the memory that is registered.
        repeats: logs each difference.
    """

    def __init__(self, registered: Callable[[], Collection[bytes]], repeats: Repeats) -> None:
        self._registered = registered
        self._repeats = repeats
        self._engines: dict[bytes, _Engine] = {}
        self._logged: set[frozenset[bytes]] = set()

    def enter(self, request: pb.HelloRequest) -> list[str]:
        """Take an engine's Hello, which was checked.

        Returns:
            One line for each connected engine of the same model that shares nothing with it.
        """
        said = pb.Engine()
        said.CopyFrom(request.engine)
        said.process = request.process
        key = said.SerializeToString(deterministic=True)
        known = self._engines.pop(key, None)
        namespaces = known.namespaces if known else set()
        namespaces.add(request.layout.namespace)
        self._engines[key] = _Engine(said, namespaces, time.monotonic())
        while len(self._engines) > _ENGINES_MAX:
            del self._engines[next(iter(self._engines))]
        others = {_form(each): each for each in self.running() if _differs(each, said)}
        for other in others.values():
            self._log(said, other)
        return [_difference(said, other) for other in others.values()][:_DIFFERENCES_MAX]

    def running(self) -> list[pb.Engine]:
        """Return the engines that have registered memory, or said Hello just now; the newest last."""
        registered, now = self._registered(), time.monotonic()
        return [
            each.said
            for each in self._engines.values()
            if now - each.seen_s < _NEW_S or not each.namespaces.isdisjoint(registered)
        ]

    def _log(self, one: pb.Engine, other: pb.Engine) -> None:
        """Log a difference once for each pair of an engine's chunks and quantizer with another's."""
        pair = frozenset({_form(one), _form(other)})
        if pair in self._logged:
            return
        if len(self._logged) >= _ENGINES_MAX:
            self._logged.clear()
        self._logged.add(pair)
        self._repeats.tell(logging.WARNING, "engines differ", one.process, _difference(one, other))


def _form(engine: pb.Engine) -> bytes:
    """Return what two engines have in common that share what they store."""
    alike = pb.Engine(model=engine.model, chunk_tokens=engine.chunk_tokens, quantizer=engine.quantizer)
    return alike.SerializeToString(deterministic=True)


def _differs(one: pb.Engine, other: pb.Engine) -> bool:
    return one.model == other.model and _form(one) != _form(other)


def _difference(one: pb.Engine, other: pb.Engine) -> str:
    """Return that two engines of one model share nothing, and what to do."""
    keys = {
        "chunk_tokens": (one.chunk_tokens, other.chunk_tokens),
        "quantizer": (one.quantizer, other.quantizer),
    }
    different = " and ".join(f"{key} ({mine} and {theirs})" for key, (mine, theirs) in keys.items() if mine != theirs)
    return (
        f"two engines of the same model, {one.process or 'one without a name'} and {other.process or 'one without'}, "
        f"share nothing, since they differ in {different}; configure both alike"
    )
