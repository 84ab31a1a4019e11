"""Prefix lookups that never block the engine.

A lookup is submitted when a request arrives; hashing and the round trip happen on threads of their own. The scheduler
polls: ``None`` until there is an answer or the deadline has passed, then the same answer for the request's life.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from host_control.client import DataPlaneClient
from shadowserve.errors import DataPlaneError
from shadowserve.keys import Extra, chain_links, record_keys
from shadowserve.pieces import Flags, leading

__all__ = ["LookupAnswer", "PrefixLookup"]

_STRIDE_TOKENS: Final = 8192
"""Tokens hashed between two moments at which the engine's thread may take the interpreter: some 0.5 ms."""
_NOTHING: Final = Extra()


@dataclass(frozen=True)
class LookupAnswer:
    """What a lookup found.

    Attributes:
        hits: leading chunks that storage holds for every rank.
        reason: ``"complete"``, ``"short"`` (no full chunk), ``"deadline"``, ``"unnamed"`` (its KV cannot be named), or
            why the data plane could not say.
        detail: a sentence about a failure, else empty.
    """

    hits: int
    reason: str
    detail: str = ""


@dataclass
class _Lookup:
    tokens: Sequence[int]
    extra: Extra | Callable[[], Extra]
    deadline: float
    answer: LookupAnswer | None = None
    links: list[bytes] | None = None
    known: int = 0
    asked: float = 0.0
    future: Future[None] | None = field(default=None, repr=False)


class PrefixLookup:
    """Looks prompts up in the background; :meth:`submit`, :meth:`poll` and :meth:`forget` take microseconds.

    Args:
        model: digest of the ``ModelIdentity``.
        ranks: of each rank its data plane's client, the same one as often as it serves, and its chunks' namespace.
        chunk_tokens: tokens in a chunk.
        timeout: seconds from :meth:`submit` to an answer.
        threads: that hash and ask.
        enabled: whether to ask the data plane at all; without it every answer is a miss, and only keys are made.
    """

    def __init__(
        self,
        model: bytes,
        ranks: Sequence[tuple[DataPlaneClient, bytes]],
        *,
        chunk_tokens: int,
        timeout: float,
        threads: int = 2,
        enabled: bool = True,
    ) -> None:
        self._model = model
        # What each data plane is asked for; ranks that hold the same part of the KV need the same records.
        self._namespaces = {client: list(dict.fromkeys(n for c, n in ranks if c is client)) for client, _ in ranks}
        self._chunk_tokens = chunk_tokens
        self._timeout = timeout
        self._enabled = enabled
        self._lock = threading.Lock()
        self._lookups: dict[str, _Lookup] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shadowserve-lookup")
        if enabled:
            # So that the first request's deadline does not pay for the connection.
            for client in self._namespaces:
                self._pool.submit(client.wait_ready, timeout)

    def submit(self, request_id: str, tokens: Sequence[int], extra: Extra | Callable[[], Extra] = _NOTHING) -> None:
        """Start looking a prompt up, or start over for a request that is known already.

        Args:
            request_id: of the engine.
            tokens: of the prompt; must not change until :meth:`forget`, except by growing.
            extra: what else its KV depends on; or what returns that, called on a lookup thread. Where it raises, the
                answer's reason is ``"unnamed"``, and there are no links.
        """
        lookup = _Lookup(tokens, extra, time.monotonic() + self._timeout)
        count = len(tokens) // self._chunk_tokens
        if count == 0:
            lookup.answer, lookup.links = LookupAnswer(0, "short"), []
        elif not self._enabled:
            lookup.answer = LookupAnswer(0, "disabled")
        with self._lock:
            self._lookups[request_id] = lookup
        if count:
            lookup.future = self._pool.submit(self._run, lookup, count)

    def poll(self, request_id: str) -> LookupAnswer | None:
        """Return the answer, or ``None`` while there is none and time is left."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return LookupAnswer(0, "unknown")
        if lookup.answer is None and time.monotonic() >= lookup.deadline:
            with self._lock:
                # The thread may have answered since; what was said first stays.
                lookup.answer = lookup.answer or LookupAnswer(0, "deadline", "no answer in time")
        return lookup.answer

    def links(self, request_id: str) -> list[bytes] | None:
        """Return the links of full chunks, ``None`` while they are being computed.

        The list belongs to the request: whoever extends it (chunks of generated tokens) does so in place.
        """
        lookup = self._lookups.get(request_id)
        return None if lookup is None else lookup.links

    def extra(self, request_id: str) -> Extra:
        """Return what a request's links were made of beside its tokens; there are links."""
        extra = self._lookups[request_id].extra
        assert isinstance(extra, Extra), "links without a name"
        return extra

    def known(self, request_id: str) -> int:
        """Return how many leading chunks are known to be stored, even where the answer came too late to be used."""
        lookup = self._lookups.get(request_id)
        return 0 if lookup is None else lookup.known

    def asked(self, request_id: str) -> float:
        """Return when (monotonic) the chunks behind :meth:`known` were found absent; 0 where nobody could say."""
        lookup = self._lookups.get(request_id)
        return 0.0 if lookup is None else lookup.asked

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        with self._lock:
            lookup = self._lookups.pop(request_id, None)
        if lookup is not None and lookup.future is not None:
            lookup.future.cancel()

    def close(self) -> None:
        """End the threads; a lookup that runs ends by its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, lookup: _Lookup, count: int) -> None:
        try:
            if self._named(lookup):
                links = self._hash(lookup, count)
                lookup.links = links
                if self._enabled:
                    self._ask(lookup, links)
        except Exception as error:  # a bug must not leave the request waiting for its deadline
            self._settle(lookup, LookupAnswer(0, "internal", f"{type(error).__name__}: {error}"))

    def _named(self, lookup: _Lookup) -> bool:
        """Find out what else than tokens a prompt's KV depends on."""
        if isinstance(lookup.extra, Extra):
            return True
        try:
            lookup.extra = lookup.extra()
        except Exception as error:  # also of an input that is not known here
            with self._lock:  # above "disabled" and "deadline", which know nothing of stores
                lookup.answer = LookupAnswer(0, "unnamed", str(error) or type(error).__name__)
            return False
        return True

    def _hash(self, lookup: _Lookup, count: int) -> list[bytes]:
        tokens: npt.NDArray[np.uint32] = np.empty(count * self._chunk_tokens, dtype="<u4")
        for begin in range(0, len(tokens), _STRIDE_TOKENS):
            end = min(begin + _STRIDE_TOKENS, len(tokens))
            tokens[begin:end] = lookup.tokens[begin:end]
            time.sleep(0)  # let the engine's thread have the interpreter
        links: list[bytes] = []
        extra = lookup.extra
        assert isinstance(extra, Extra)
        stride = max(_STRIDE_TOKENS // self._chunk_tokens, 1)
        for end in range(stride, count + stride, stride):
            prefix = tokens[: min(end, count) * self._chunk_tokens]
            links = chain_links(self._model, prefix, chunk_tokens=self._chunk_tokens, extra=extra, after=links)
            time.sleep(0)
        return links

    def _ask(self, lookup: _Lookup, links: list[bytes]) -> None:
        left = lookup.deadline - time.monotonic()
        if left <= 0:
            self._settle(lookup, LookupAnswer(0, "deadline", "no thread was free in time"))
            return
        asked = time.monotonic()
        try:
            hits = leading(self._common(links, left))
        except DataPlaneError as error:
            self._settle(lookup, LookupAnswer(0, error.outcome, str(error)))
            return
        lookup.known, lookup.asked = hits, asked
        self._settle(lookup, LookupAnswer(hits, "complete"))

    def _common(self, links: list[bytes], timeout: float) -> Flags:
        """Return which chunks each rank finds, asking all data planes at once: KV that one rank lacks is of no use.

        Raises:
            DataPlaneError: one of them could not say.
        """
        calls, problem = [], None
        present = np.ones(len(links), np.bool_)
        keys = {name: record_keys(name, links) for name in set().union(*self._namespaces.values())}
        for client, names in self._namespaces.items():
            try:
                calls.append(client.lookup([(name, keys[name]) for name in names], timeout))
            except DataPlaneError as error:
                problem = problem or error
        for call in calls:  # every answer is taken, or its data plane's breaker would not hear of it
            try:
                present = np.logical_and.reduce([present, *call()])
            except DataPlaneError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return present

    def _settle(self, lookup: _Lookup, answer: LookupAnswer) -> None:
        with self._lock:
            lookup.answer = lookup.answer or answer
