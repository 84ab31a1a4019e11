"""Prefix lookups that never block the engine.

A lookup is submitted when a request arrives; hashing and the round trip happen on threads of their own. The scheduler
polls: ``None`` until there is an answer or the deadline has passed, then the same answer for the request's life.
"""

import array
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from host_control.client import DataPlaneClient
from host_control.cold import ColdLoads
from host_control.disaggregation import Available, Coming, Disaggregation
from host_control.seen import Chain, Found, Seen
from shadowserve.errors import DataPlaneError
from shadowserve.keys import Extra, prefix_chain, record_keys, tail_chunk_key
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

__all__ = ["SAVED", "LookupAnswer", "PrefixLookup", "Rule"]

SAVED: Final = -1
"""Number, among shard layouts, of the records that preempted requests are saved in, where the others are not exact."""

_STRIDE_TOKENS: Final = 32_768
"""Tokens hashed between two moments at which the engine's thread may take the interpreter: some 0.5 ms."""
_IN_TIME: Final = 0.9
"""Of a load's time, that it waits for what is cold; then it ends with what is near."""
_NOTHING: Final = Extra()
_STAYS: Final = Disaggregation()


class Rule(Protocol):
    """How long a hit may be."""

    def __call__(self, present: Sequence[Flags], tokens: int, tail_tokens: int = 0, /) -> int:
        """Return how many leading tokens can be loaded of a prompt of so many, the last one never.

        ``present`` says of each group which chunks are stored, and then, where it has a tail, whether that is.
        """


@dataclass(frozen=True)
class LookupAnswer:
    """What a lookup found.

    Attributes:
        tokens: leading tokens of the prompt that can be loaded, by the engine's own rule, for every rank.
        shard_layout: whose records they are: 0 for those that this engine makes.
        reason: ``"complete"``, ``"short"`` (no full chunk), ``"deadline"``, ``"unnamed"`` (its KV cannot be named),
            ``"published_late"`` (chunks that were waited for are still only published), ``"published_gone"`` (they are
            not coming), ``"cold_late"`` (chunks that were waited for are still in object storage alone), or why the
            data plane could not say.
        detail: a sentence about a failure, else empty.
        present: which chunks of each group are there, of that shard_layout's.
        tail: whether the prompt's tail is there, too.
        chunk_bytes: mean bytes of a chunk's records, of all groups and ranks together; 0 where nobody can say.
        tiers: the :class:`~shadowserve.tier.Tier` of each chunk, the farthest of those of its records that are needed.
        cold_seconds: in how many storage expects to have nearer what is cold of them.
        unpublished: chunks are missing that another engine may be storing, and storage does not know of such chunks.

    Where a load may begin before all of it is near, what is published and what is cold counts as there;
    :meth:`PrefixLookup.available` tells of it.
    """

    tokens: int
    reason: str
    detail: str = ""
    shard_layout: int = 0
    present: Sequence[Flags] = field(default=(), compare=False)
    tail: bool = False
    chunk_bytes: float = field(default=0.0, compare=False)
    tiers: bytes = field(default=b"", compare=False)
    cold_seconds: float = field(default=0.0, compare=False)
    unpublished: bool = field(default=False, compare=False)


Groups = Sequence[Sequence[tuple[DataPlaneClient, bytes]]]
"""Of each group what it is stored as: of each rank and part its data plane's client, the same one as often as it
serves, and the namespace of the records."""


@dataclass
class _Lookup:
    tokens: Sequence[int]
    length: int
    extra: Extra | Callable[[], Extra]
    deadline: float
    disaggregation: Disaggregation = _STAYS
    answer: LookupAnswer | None = None
    so_far: LookupAnswer = field(default_factory=lambda: LookupAnswer(0, "deadline"))
    chunk_keys: list[bytes] | None = None
    tail: list[bytes] = field(default_factory=list)  # its chunk key, if it is to have a record
    saved: Sequence[bytes] = ()  # the names that it was saved under when it was preempted: nothing else is asked for
    waits_until: float = 0.0  # for what is published, or cold
    late: str = "deadline"  # reason of an answer that did not come in time
    available: Available | None = None  # where the answer counts what is only published, or cold
    cold: Callable[[int], None] | None = None  # has so many chunks brought, where some of them are cold
    drawn: str = ""  # how it ended that what is cold was waited for: what still is counts no more
    present: Sequence[Flags] | None = None
    asked: float = 0.0
    future: Future[None] | None = field(default=None, repr=False)


class PrefixLookup:
    """Looks prompts up in the background; :meth:`submit`, :meth:`poll` and :meth:`forget` take microseconds.

    Args:
        model: digest of the ``ModelIdentity``.
        groups: of the records that this engine makes.
        rule: how long a hit may be.
        others: shard_layout -> of the records that an engine of another shard_layout has made, and this one can read.
        saved: of the records that preempted requests are saved in, where they are others.
        every: of each group, whether it keeps every chunk, so that one that is missing may be waited for; by default
            all do.
        chunk_tokens: tokens in a chunk.
        timeout: seconds from :meth:`submit` to an answer.
        threads: that hash and ask.
        enabled: whether to ask the data plane at all; without it every answer is a miss, and only keys are made.
        loads_wait: whether a load may begin while some of its chunks are only published, or cold.
        load_timeout: seconds that a load may take, and that is waited for what is cold.
        plain: whether this engine stores records that are not compressed, for devices of its data plane.

    Attributes:
        reach: which engines hear of what is published, a ``Reach`` of the wire; as a data plane has said last.
    """

    def __init__(
        self,
        model: bytes,
        groups: Groups,
        rule: Rule,
        *,
        others: Mapping[int, Groups] | None = None,
        saved: Groups | None = None,
        every: Sequence[bool] | None = None,
        chunk_tokens: int,
        timeout: float,
        threads: int = 2,
        enabled: bool = True,
        loads_wait: bool = False,
        load_timeout: float = 10.0,
        plain: bool = False,
    ) -> None:
        self._model = model
        self._layouts: dict[int, Groups] = {0: groups, **(others or {})}
        self._records = {SAVED: saved or groups, **self._layouts}
        self._every = list(every or [True] * len(groups))
        self._rule = rule
        self._chunk_tokens = chunk_tokens
        self._timeout = timeout
        self._enabled = enabled
        self._loads_wait = loads_wait
        self._load_timeout = load_timeout
        self._plain = plain
        self.reach = 0
        self._lock = threading.Lock()
        self._lookups: dict[str, _Lookup] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shadowserve-lookup")
        self._late = ThreadPoolExecutor(1, thread_name_prefix="shadowserve-late-lookup")
        self._coming = Coming(self._of_layouts, self._publish, timeout)
        self._cold_loads = ColdLoads()
        if enabled:
            # So that the first request's deadline does not pay for the connection.
            for client in dict.fromkeys(client for group in groups for client, _ in group):
                self._pool.submit(client.wait_ready, timeout)

    def submit(
        self,
        request_id: str,
        tokens: Sequence[int],
        extra: Extra | Callable[[], Extra] = _NOTHING,
        disaggregation: Disaggregation = _STAYS,
        saved: Sequence[bytes] = (),
    ) -> None:
        """Start looking a prompt up, or start over for a request that is known already.

        Args:
            request_id: of the engine.
            tokens: of the prompt; must not change until :meth:`forget`, except by growing.
            extra: what else its KV depends on; or what returns that, called on a lookup thread. Where it raises, the
                answer's reason is ``"unnamed"``, and there are no chunk keys.
            disaggregation: what is waited for and published.
            saved: names of its chunks, and of its tail, that :data:`SAVED` records have: only these are asked for.
        """
        lookup = _Lookup(tokens, len(tokens), extra, time.monotonic() + self._timeout, disaggregation, saved=saved)
        count = lookup.length // self._chunk_tokens
        if count == 0 and not disaggregation.tail_tokens:
            lookup.answer, lookup.chunk_keys = LookupAnswer(0, "short"), []
        elif not self._enabled:
            lookup.answer = LookupAnswer(0, "disabled")
        with self._lock:
            self._lookups[request_id] = lookup
        if lookup.chunk_keys is None:
            lookup.future = self._pool.submit(self._run, request_id, lookup, count)

    def poll(self, request_id: str) -> LookupAnswer | None:
        """Return the answer, or ``None`` while there is none and time is left."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return LookupAnswer(0, "unknown")
        if lookup.answer is None and time.monotonic() >= lookup.deadline:
            with self._lock:
                # The thread may have answered since; what was said first stays.
                lookup.answer = lookup.answer or self._too_late(lookup)
        return lookup.answer

    @property
    def saves_apart(self) -> bool:
        """Preempted requests are saved in records of their own, because the others are not exact."""
        return self._records[SAVED] is not self._layouts[0]

    def is_pending(self, request_id: str) -> bool:
        """Tell if a lookup waits for chunks that are pending."""
        lookup = self._lookups.get(request_id)
        return lookup is not None and lookup.answer is None and lookup.waits_until > 0

    def chunk_keys(self, request_id: str) -> list[bytes] | None:
        """Return the chunk keys of full chunks, ``None`` while they are being computed.

        The list belongs to the request: whoever extends it (chunks of generated tokens) does so in place.
        """
        lookup = self._lookups.get(request_id)
        return None if lookup is None else lookup.chunk_keys

    def tail(self, request_id: str) -> list[bytes]:
        """Return the chunk key of the prompt's tail, if it is to have a record; known with the chunk keys."""
        lookup = self._lookups.get(request_id)
        return [] if lookup is None else lookup.tail

    def extra(self, request_id: str) -> Extra:
        """Return what a request's chunk keys were made of beside its tokens; there are chunk keys."""
        extra = self._lookups[request_id].extra
        assert isinstance(extra, Extra), "chunk_keys without a name"
        return extra

    def present(self, request_id: str, *, saved: bool = False) -> Sequence[Flags] | None:
        """Return which chunks of each group are stored, even where the answer came too late to be used.

        ``saved``: in the records that a preempted request is saved in; ``None`` where others were asked for.
        """
        lookup = self._lookups.get(request_id)
        return lookup.present if lookup is not None and bool(lookup.saved) == saved else None

    def asked(self, request_id: str, *, saved: bool = False) -> float:
        """Return when (monotonic) the chunks that :meth:`present` lacks were absent; 0 where that is not known."""
        lookup = self._lookups.get(request_id)
        return lookup.asked if lookup is not None and bool(lookup.saved) == saved else 0.0

    def begin_load(self, request_id: str, chunks: int) -> None:
        """A load of so many leading chunks begins: what is cold of them is brought, and :meth:`available` tells of it."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and lookup.cold is not None:
            bring, lookup.cold = lookup.cold, None
            bring(chunks)

    def available(self, request_id: str) -> Available | None:
        """Return how far a prompt is near by now whose answer counts what is published or cold; ``None`` for others."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None else lookup.available

    def chains(self, request_id: str) -> Mapping[DataPlaneClient, Sequence[tuple[bytes, Sequence[bytes]]]] | None:
        """Return which records a load of all that was found takes, by data planes; ``None`` while there is no answer.

        Of a group that does not keep every chunk, as few of the last ones as make the hit by the engine's own rule.
        """
        answer, lookup = self.poll(request_id), self._lookups.get(request_id)
        if answer is None:
            return None
        found: dict[DataPlaneClient, list[tuple[bytes, Sequence[bytes]]]] = {}
        if lookup is None or not answer.present or not lookup.chunk_keys:
            return found
        end = -(-answer.tokens // self._chunk_tokens)
        named = lookup.saved[: len(answer.present[0])] or lookup.chunk_keys
        for place, group in enumerate(self._records[answer.shard_layout]):
            first = 0 if self._every[place] else self._first_needed(answer, lookup.length, place, end)
            flags = answer.present[place]
            chunk_keys = [
                chunk_key for chunk_key, there in zip(named[first:end], flags[first:end], strict=True) if there
            ]
            for client, namespace in dict.fromkeys(group) if chunk_keys else ():
                found.setdefault(client, []).append((namespace, record_keys(namespace, chunk_keys)))
        return found

    def chains_of(
        self, chunk_keys: Sequence[Sequence[bytes]]
    ) -> Mapping[DataPlaneClient, Sequence[tuple[bytes, Sequence[bytes]]]]:
        """Return the records of each group's chunk keys as :meth:`chains`, of what a preempted request is saved in."""
        found: dict[DataPlaneClient, list[tuple[bytes, Sequence[bytes]]]] = {}
        for group, own in zip(self._records[SAVED], chunk_keys, strict=True):
            for client, namespace in dict.fromkeys(group) if own else ():
                found.setdefault(client, []).append((namespace, record_keys(namespace, own)))
        return found

    def _first_needed(self, answer: LookupAnswer, length: int, place: int, end: int) -> int:
        """Return the first chunk that a hit needs of one group."""
        last = 1
        while last < end:
            present = [flags.copy() for flags in answer.present]
            present[place][: end - last] = False
            if self._rule(present, length) == answer.tokens:
                break
            last *= 2
        return max(end - last, 0)

    def computed(self, request_id: str, chunk_keys: Iterable[bytes]) -> None:
        """Chunks of a request are on their way to the store: their publications are not renewed, nor withdrawn."""
        self._coming.computed(request_id, chunk_keys)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, and withdraw what it has published and not computed."""
        with self._lock:
            lookup = self._lookups.pop(request_id, None)
        self._coming.settle(request_id)
        self._cold_loads.end(request_id)
        if lookup is not None and lookup.future is not None:
            lookup.future.cancel()

    def close(self) -> None:
        """End the threads; a lookup that runs ends by its deadline."""
        self._coming.close()
        self._cold_loads.close()
        self._late.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, request_id: str, lookup: _Lookup, count: int) -> None:
        try:
            if self._named(lookup):
                chunk_keys = self._hash(lookup, count)
                wanted = list(lookup.saved) or [*chunk_keys, *lookup.tail]
                lookup.chunk_keys = chunk_keys  # from now on others may extend them
                if self._enabled:
                    self._ask(request_id, lookup, wanted)
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
        extra = lookup.extra
        assert isinstance(extra, Extra)
        tokens, chunk_keys = array.array("I"), list[bytes]()
        stride = max(_STRIDE_TOKENS // self._chunk_tokens, 1) * self._chunk_tokens
        for begin in range(0, count * self._chunk_tokens, stride):
            tokens += array.array("I", lookup.tokens[begin : min(begin + stride, count * self._chunk_tokens)])
            chunk_keys = prefix_chain(
                self._model, tokens, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys
            )
            time.sleep(0)  # let the engine's thread have the interpreter
        if size := lookup.disaggregation.tail_tokens:
            before = self._model, lookup.tokens, size
            lookup.tail = [tail_chunk_key(*before, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys)]
        return chunk_keys

    def _ask(self, request_id: str, lookup: _Lookup, wanted: list[bytes]) -> None:
        asked = time.monotonic()
        left = (lookup.waits_until or lookup.deadline) - asked
        if left <= 0:
            self._settle(lookup, self._too_late(lookup))
            return
        try:
            if lookup.saved:
                own, best = self._see({SAVED: len(wanted)}, wanted, left, published=False) * 2
            else:
                own, best = self._find(wanted, left, published=lookup.disaggregation.waits > 0)
        except DataPlaneError as error:
            self._settle(lookup, replace(lookup.so_far, reason=error.outcome, detail=str(error)))
            if error.outcome == "deadline":
                with contextlib.suppress(RuntimeError):  # closed
                    self._late.submit(self._learn_stored, request_id, lookup, wanted)
            return
        whole = len(wanted) - len(lookup.tail)
        lookup.present, lookup.asked = [flags[:whole] for flags in own.present], asked
        if lookup.drawn or not lookup.disaggregation.cold:
            best = best.near(self._every)
        hits = leading(best.there)
        self._note(lookup, best, whole)
        if hits < len(wanted) and self._is_coming(lookup, hits, best.coming):
            if best.coming is None:  # nobody can say of which shard_layout, either
                self._wait(request_id, lookup, wanted, hits, self._layouts)
                return
            if not (self._loads_wait and hits):
                # They are stored in their order: once the last is there, or is not coming, one question tells of all.
                # Where a load may go on from there, the first is enough.
                coming = np.flatnonzero(best.coming[: best.extent])
                self._wait(request_id, lookup, wanted, int(coming[0 if self._loads_wait else -1]), [best.shard_layout])
                return
            self._begin(request_id, lookup, wanted, best)
            hits = best.extent
        elif not lookup.drawn and Tier.COLD in lookup.so_far.tiers[:hits]:
            if not self._loads_wait:
                self._await_cold(request_id, lookup, wanted, hits, best)
                return
            self._offer_cold(request_id, lookup, wanted[:hits], best)
        reason, detail = "complete", ""
        if lookup.drawn not in ("", "complete"):
            reason, detail = lookup.drawn, "chunks of it are in object storage, and did not come"
        elif hits < len(wanted) and lookup.waits_until and lookup.available is None and not lookup.drawn:
            reason, detail = "published_gone", "chunks that were published are not stored"
        if seconds := lookup.disaggregation.publishes:  # before anybody can have computed and stored it
            there = own.there | (np.arange(len(wanted)) < hits)
            self._publish_absent(request_id, lookup, wanted, there, seconds)
        self._settle(lookup, replace(lookup.so_far, reason=reason, detail=detail))

    def _note(self, lookup: _Lookup, best: Seen, whole: int) -> None:
        """Note what a question has found of whole chunks and a tail, as the answer if no better one comes in time."""
        present = [flags[:whole] for flags in best.present]
        tokens = self._rule(present, lookup.length) if whole else 0
        tail = leading(best.there) > whole and self._has_tail(lookup, best, whole)
        lookup.so_far = LookupAnswer(
            tokens, "complete", shard_layout=best.shard_layout, present=present, tail=tail, chunk_bytes=best.chunk_bytes,
            cold_seconds=best.cold_seconds,
            unpublished=best.coming is None and lookup.disaggregation.waits > 0 and not best.there.all(),
        )  # fmt: skip
        lookup.so_far = replace(lookup.so_far, tiers=best.farthest(self._needed(lookup, best)).tobytes())

    def _needed(self, lookup: _Lookup, seen: Seen) -> list[int]:
        """Return the first chunk of each group that a load of all that was found needs."""
        answer = lookup.so_far
        end = -(-answer.tokens // self._chunk_tokens)
        kept = [tiers for tiers, every in zip(seen.tiers, self._every, strict=True) if every]
        base = np.maximum.reduce(kept) if kept else np.zeros(1, np.uint8)
        return [
            0 if every or not (tiers > base).any() else self._first_needed(answer, lookup.length, place, end)
            for place, (tiers, every) in enumerate(zip(seen.tiers, self._every, strict=True))
        ]

    def _too_late(self, lookup: _Lookup) -> LookupAnswer:
        details = {
            "deadline": f"no answer within {self._timeout:g} s (host.lookup_timeout_s)",
            "cold_late": f"not all came from object storage within {self._load_timeout:g} s (host.fetch_timeout_s)",
        }
        detail = details.get(lookup.late, f"still published after {lookup.disaggregation.waits:g} s")
        return replace(lookup.so_far, reason=lookup.late, detail=detail)

    def _learn_stored(self, request_id: str, lookup: _Lookup, wanted: list[bytes]) -> None:
        """Ask again, with time, what is stored of a prompt whose lookup had no answer: that is not stored again."""
        if self._lookups.get(request_id) is not lookup:
            return
        asked, whole = time.monotonic(), len(wanted) - len(lookup.tail)
        with contextlib.suppress(DataPlaneError):
            records = SAVED if lookup.saved else 0
            (own,) = self._see({records: len(wanted)}, wanted, self._load_timeout, published=False)
            lookup.present, lookup.asked = [flags[:whole] for flags in own.present], asked

    def _leave_cold(
        self,
        request_id: str,
        lookup: _Lookup,
        wanted: list[bytes],
        best: Seen,
        then: Callable[[Available], None] | None = None,
    ) -> Callable[[int], None]:
        """Return what has leading ones of these chunks brought; by default it notes how far they are."""
        needed, waits = self._needed(lookup, best), lookup.disaggregation.waits > 0

        def ask(first: int, end: int) -> tuple[Flags, Flags]:
            rest = wanted[first:end]
            (seen,) = self._see({best.shard_layout: len(rest)}, rest, self._timeout, published=waits, prefetch=True)
            cold = seen.farthest(needed, first) == Tier.COLD
            return seen.there & ~cold, cold if seen.coming is None else cold | seen.coming

        def told(available: Available) -> None:
            lookup.available = available

        def bring(chunks: int) -> None:
            seconds = _IN_TIME * self._load_timeout
            self._cold_loads.begin(request_id, ask, min(chunks, len(wanted)), seconds, then or told)

        return bring

    def _offer_cold(self, request_id: str, lookup: _Lookup, wanted: list[bytes], best: Seen) -> None:
        """Count what is cold of these chunks as there: it is brought once a load of it begins."""
        tiers = np.frombuffer(lookup.so_far.tiers, np.uint8)[: len(wanted)]
        lookup.available = Available(leading((tiers != Tier.COLD) & best.there[: len(wanted)]), "")
        lookup.cold = self._leave_cold(request_id, lookup, wanted, best)

    def _await_cold(self, request_id: str, lookup: _Lookup, wanted: list[bytes], hits: int, best: Seen) -> None:
        """Have what is cold brought before there is an answer, as no load may wait for it; then ask again."""

        def told(available: Available) -> None:
            if available.ended and self._lookups.get(request_id) is lookup and lookup.answer is None:
                lookup.drawn = available.ended
                with contextlib.suppress(RuntimeError):  # closed
                    self._pool.submit(self._ask_again, request_id, lookup, wanted)

        bring = self._leave_cold(request_id, lookup, wanted[:hits], best, told)
        self._note(lookup, best.near(self._every), len(wanted) - len(lookup.tail))
        lookup.late = "cold_late"
        lookup.deadline = lookup.waits_until = time.monotonic() + self._load_timeout
        bring(hits)

    def _has_tail(self, lookup: _Lookup, seen: Seen, whole: int) -> bool:
        """Return whether a load may go to the end of the tail, which the groups that keep every chunk have."""
        size = lookup.disaggregation.tail_tokens
        end = whole * self._chunk_tokens + size
        return self._rule(seen.present, end + 1, size) == end

    def _begin(self, request_id: str, lookup: _Lookup, wanted: list[bytes], best: Seen) -> None:
        """Count what is published as if it were there, and tell from now on how much of it is."""
        assert best.coming is not None
        whole = len(wanted) - len(lookup.tail)
        # Of a chunk, what is kept of every chunk is stored last: with it comes what other groups keep of the chunk.
        present = [(flags | best.coming)[:whole] for flags in best.present]
        tokens = self._rule(present, lookup.length) if whole else 0
        self._wait_from(lookup)
        if Tier.COLD in lookup.so_far.tiers[: best.extent]:
            self._offer_cold(request_id, lookup, wanted[: best.extent], best)
        else:
            self._follow(request_id, lookup, wanted[: best.extent], best)
        lookup.so_far = replace(lookup.so_far, tokens=tokens, present=present, tail=best.extent > whole)

    def _follow(self, request_id: str, lookup: _Lookup, wanted: list[bytes], seen: Seen, before: int = 0) -> None:
        """Note how many of these chunks are there, and ask again when most of those are that are still to come.

        Those ``before`` are there, and what was seen begins behind them.
        """
        there, coming = before + leading(seen.there), np.flatnonzero(~seen.there[: seen.extent])
        if len(coming):
            lookup.available = Available(there, "")
            again = functools.partial(self._ask_more, request_id, lookup, wanted, seen.shard_layout)
            self._coming.wait(wanted[before + coming[len(coming) // 2]], [seen.shard_layout], lookup.waits_until, again)
        else:
            lookup.available = Available(there, "complete" if there >= len(wanted) else "published_gone")

    def _ask_more(self, request_id: str, lookup: _Lookup, wanted: list[bytes], shard_layout: int, late: bool) -> None:
        """Have it looked how much has arrived; in a thread that asks for all requests, so elsewhere."""

        def look() -> None:
            assert lookup.available is not None
            before = lookup.available.chunks
            rest = wanted[before:]
            try:
                (seen,) = self._see({shard_layout: len(rest)}, rest, self._timeout, published=True)
                if late:
                    there = before + leading(seen.there)
                    lookup.available = Available(there, "complete" if there == len(wanted) else "published_late")
                else:
                    self._follow(request_id, lookup, wanted, seen, before)
            except DataPlaneError as error:
                lookup.available = lookup.available._replace(ended=error.outcome)
            except Exception:  # a bug must not leave the load waiting for its deadline
                lookup.available = lookup.available._replace(ended="internal")

        if self._lookups.get(request_id) is lookup:
            with contextlib.suppress(RuntimeError):  # closed
                self._pool.submit(look)

    def _find(self, chunk_keys: Sequence[bytes], timeout: float, *, published: bool) -> tuple[Seen, Seen]:
        """Return what there is of this engine's own records, and of those of which there is most, or is coming.

        Of others' records the first chunk's are asked for: most prompts have none, and few have both.

        Raises:
            DataPlaneError: somebody could not say.
        """
        ends = time.monotonic() + timeout
        counts = {shard_layout: 1 if shard_layout else len(chunk_keys) for shard_layout in self._layouts}
        own, *probes = self._see(counts, chunk_keys, timeout, published=published)
        best = own
        if not own.there.all():
            for shard_layout in [probe.shard_layout for probe in probes if probe.extent]:
                left = max(ends - time.monotonic(), 0.001)
                (other,) = self._see({shard_layout: len(chunk_keys)}, chunk_keys, left, published=published)
                best = max(best, other, key=lambda seen: seen.extent)
        return own, best

    def _of_layouts(
        self, chunk_keys: Sequence[bytes], shard_layouts: Iterable[int], timeout: float
    ) -> tuple[Flags, Flags | None]:
        """Return which chunks are there, and which are published, of whichever of these shard_layouts."""
        seen = self._see(dict.fromkeys(shard_layouts, len(chunk_keys)), chunk_keys, timeout, published=True)
        there = np.logical_or.reduce([each.there for each in seen])
        known = [each.coming for each in seen if each.coming is not None]
        return there, np.logical_or.reduce(known) & ~there if len(known) == len(seen) else None

    def _is_coming(self, lookup: _Lookup, index: int, coming: Flags | None) -> bool:
        """Return whether the first of a prompt's chunks, or its tail, that is not there is worth waiting for."""
        if coming is not None:
            return bool(coming[index])
        return lookup.disaggregation.waits > 0 and index * self._chunk_tokens < lookup.disaggregation.expected_tokens

    def _wait(
        self, request_id: str, lookup: _Lookup, wanted: list[bytes], place: int, shard_layouts: Iterable[int]
    ) -> None:
        """Ask again once a chunk is there, or is not coming; of these shard_layouts."""
        self._wait_from(lookup)

        def again(late: bool) -> None:
            if self._lookups.get(request_id) is lookup and lookup.answer is None:
                if late:
                    self._settle(lookup, self._too_late(lookup))
                else:
                    with contextlib.suppress(RuntimeError):  # closed
                        self._pool.submit(self._ask_again, request_id, lookup, wanted)

        self._coming.wait(wanted[place], shard_layouts, lookup.waits_until, again)

    def _wait_from(self, lookup: _Lookup) -> None:
        if not lookup.waits_until:
            lookup.waits_until = lookup.deadline - self._timeout + lookup.disaggregation.waits
            lookup.deadline, lookup.late = lookup.waits_until, "published_late"

    def _ask_again(self, request_id: str, lookup: _Lookup, wanted: list[bytes]) -> None:
        try:
            self._ask(request_id, lookup, wanted)
        except Exception as error:  # as in _run
            self._settle(lookup, LookupAnswer(0, "internal", f"{type(error).__name__}: {error}"))

    def _publish_absent(
        self, request_id: str, lookup: _Lookup, wanted: list[bytes], there: Flags, seconds: float
    ) -> None:
        """Publish what this engine will compute and store, if the request still lives."""
        ends = [(index + 1) * self._chunk_tokens for index in range(len(wanted))]
        if lookup.tail:
            ends[-1] -= self._chunk_tokens - lookup.disaggregation.tail_tokens
        mine = [
            chunk_key
            for chunk_key, stored, end in zip(wanted, there, ends, strict=True)
            if not stored and lookup.disaggregation.may_store(end)
        ]
        if mine:
            self._coming.publish(request_id, mine, seconds)
        if self._lookups.get(request_id) is not lookup:  # it has ended meanwhile, and that was not heard
            self._coming.settle(request_id)

    def _publish(self, chunk_keys: Sequence[bytes], seconds: float) -> None:
        """Publish all ranks' records of some chunks; 0 seconds: they will not be stored."""
        held = dict.fromkeys(
            each for group, every in zip(self._layouts[0], self._every, strict=True) if every for each in group
        )
        for client in dict.fromkeys(client for client, _ in held):
            names = [name for each, name in held if each is client]
            keys = [key for name in names for key in record_keys(name, chunk_keys)]
            client.publish(keys, seconds, plain=self._plain, reached=self._reached)

    def _reached(self, reach: int) -> None:
        self.reach = reach

    def _see(
        self,
        counts: Mapping[int, int],
        chunk_keys: Sequence[bytes],
        timeout: float,
        *,
        published: bool,
        prefetch: bool = False,
    ) -> list[Seen]:
        """Return what there is of the first so many chunk keys of each shard_layout, asking all data planes at once.

        KV that one rank lacks is of no use, and so is a group's of which one part is missing.

        Raises:
            DataPlaneError: one of them could not say.
        """
        # Ranks that hold the same part of the KV need the same records.
        asked = dict.fromkeys(
            (*each, count)
            for shard_layout, count in counts.items()
            for group in self._records[shard_layout]
            for each in group
        )
        found: dict[tuple[DataPlaneClient, bytes, int], Chain] = {}
        calls: list[tuple[list[tuple[DataPlaneClient, bytes, int]], Callable[[], Found]]] = []
        problem = None
        for client in dict.fromkeys(client for client, _, _ in asked):
            chains = [each for each in asked if each[0] is client]
            try:
                keys = [(namespace, record_keys(namespace, chunk_keys[:count])) for _, namespace, count in chains]
                calls.append((chains, client.find(keys, timeout, published=published, prefetch=prefetch)))
            except DataPlaneError as error:
                problem = problem or error
        for chains, call in calls:  # every answer is taken, or its data plane's breaker would not hear of it
            try:
                answer = call()
            except DataPlaneError as error:
                problem = problem or error
                continue
            for place, chain in enumerate(chains):
                soon = None if answer.published is None else answer.published[place]
                numbers = answer.stored_bytes[place], answer.cold_seconds[place]
                found[chain] = Chain(answer.present[place], soon, *numbers, answer.tiers[place])
        if problem is not None:
            raise problem
        return [
            Seen.of(
                shard_layout,
                count,
                [[found[*each, count] for each in group] for group in self._records[shard_layout]],
                self._every,
            )
            for shard_layout, count in counts.items()
        ]

    def _settle(self, lookup: _Lookup, answer: LookupAnswer) -> None:
        with self._lock:
            lookup.answer = lookup.answer or answer
