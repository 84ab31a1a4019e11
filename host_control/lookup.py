"""Prefix lookups that never block the engine.

A lookup starts when a request arrives; hashing and round trips run on threads of their own. The scheduler polls: None
until there is an answer or the deadline has passed, then the same answer for the request's life.
"""

import array
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from host_control.client import DataPlaneClient
from host_control.cold import ColdLoads
from host_control.disaggregation import Available, Disaggregation, Publications
from host_control.probe import Probe, Prober, Records
from host_control.transfer import Reason
from shadowserve import spans
from shadowserve.errors import DataPlaneError
from shadowserve.keys import Extra, prefix_chain, record_keys, tail_chunk_key
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

EXACT: Final = -2
"""Key, among shard layouts, of exact records in local tiers beside the engine's own lossy ones."""
SAVED: Final = -1
"""Key, among shard layouts, of the records of preempted requests, where the others are not exact."""

_STRIDE_TOKENS: Final = 32_768
"""Tokens hashed between two moments at which the engine's thread may take the interpreter: about 0.5 ms."""
_COLD_WAIT_SHARE: Final = 0.9
"""Share of a load's time that it waits for cold chunks; then it ends with the chunks that are near."""
_NOTHING: Final = Extra()
_ALONE: Final = Disaggregation()

RecordKeys = Mapping[DataPlaneClient, Sequence[tuple[bytes, Sequence[bytes]]]]
"""Of each data plane, namespaces and keys of records, a prompt's first chunk first."""


class Rule(Protocol):
    """The engine's rule of how long a hit may be."""

    def __call__(self, present: Sequence[Flags], tokens: int, tail_tokens: int = 0, /) -> int:
        """Return the leading tokens of a prompt of ``tokens`` tokens that can be loaded, never the last one.

        ``present`` tells of each group which chunks are stored, and at the end if the tail is, where there is one.
        """


@dataclass(frozen=True)
class LookupAnswer:
    """Answer of a lookup.

    Attributes:
        tokens: Leading tokens of the prompt that can be loaded, by the engine's rule, for every rank.
        reason: ``complete``, or why not more can be loaded; see :class:`~host_control.transfer.Reason`.
        shard_layout: Shard layout of the records; 0 is this engine's own.
        present: Flags of each group: chunks that are stored.
        tail: The prompt's tail is stored, too.
        chunk_bytes: Mean bytes of a chunk's records, of all groups and ranks together; 0 if unknown.
        tiers: :class:`~shadowserve.tier.Tier` of each chunk: the farthest of the records that a load needs.
        cold_seconds: Seconds after which storage expects to have the cold ones nearer.
        unpublished: Chunks are missing that another engine may be storing, and storage does not know pending chunks.

    Where a load may start before all of it is near, pending and cold chunks count as stored, and
    :meth:`PrefixLookup.available` tells how many of them can be fetched by now.
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


@dataclass
class _Lookup:
    """One request's lookup. Times are of the monotonic clock.

    Attributes:
        tokens, length: The prompt, which may grow, and its length at the start.
        extra: Inputs of its KV other than tokens, or the function that finds them.
        best_answer: The answer if no better one comes in time.
        chunk_keys: Keys of the whole chunks, once they are hashed.
        tail: Key of the prompt's tail, if that has a record.
        saved: Names that a preemption saved its chunks under: only these are asked for.
        wanted: Keys to ask for: those of whole chunks, and then of the tail.
        waits_until: Time up to which it waits for pending or cold chunks; 0 where it does not wait.
        late_reason: Reason of an answer at the deadline.
        available: Chunks that can be fetched by now, where the answer counts pending or cold ones.
        counts_pending: The answer counts pending ones.
        bring_cold: Starts to bring a number of leading chunks nearer, where some are cold.
        cold_ended: How the wait for cold chunks ended; chunks that are still cold do not count any more.
        present: Flags of each group: chunks that are stored in this engine's own records.
        asked_at: Time of the last probe that was answered.
    """

    request_id: str
    tokens: Sequence[int]
    length: int
    extra: Extra | Callable[[], Extra]
    deadline: float
    disaggregation: Disaggregation = _ALONE
    answer: LookupAnswer | None = None
    best_answer: LookupAnswer = field(default_factory=lambda: LookupAnswer(0, Reason.DEADLINE))
    chunk_keys: list[bytes] | None = None
    tail: list[bytes] = field(default_factory=list)
    saved: Sequence[bytes] = ()
    wanted: list[bytes] = field(default_factory=list)
    waits_until: float = 0.0
    late_reason: str = Reason.DEADLINE
    available: Available | None = None
    counts_pending: bool = False
    bring_cold: Callable[[int], None] | None = None
    cold_ended: str = ""
    present: Sequence[Flags] | None = None
    asked_at: float = 0.0
    future: Future[None] | None = field(default=None, repr=False)

    @property
    def whole(self) -> int:
        return len(self.wanted) - len(self.tail)

    def note_stored(self, own: Probe, asked_at: float) -> None:
        self.present, self.asked_at = [flags[: self.whole] for flags in own.present], asked_at


_UNKNOWN: Final = _Lookup("", (), 0, _NOTHING, 0.0, answer=LookupAnswer(0, Reason.UNKNOWN))
"""Stands for the lookup of a request that was never looked up, or has ended."""


class PrefixLookup:
    """Looks prompts up in the background; :meth:`submit`, :meth:`poll` and :meth:`forget` take microseconds.

    Args:
        model: Digest of the ``ModelIdentity``.
        groups: Records that this engine makes.
        others: Records of other shard layouts that this engine can read.
        saved: Records of preempted requests, where these are separate.
        every: Flag per group: it keeps every chunk, so that a missing chunk may be waited for; by default all.
        timeout: Seconds from :meth:`submit` to an answer.
        enabled: Ask the data plane. Otherwise each answer is a miss, and only keys are made.
        loads_wait: A load may start while some of its chunks are pending or cold.
        load_timeout: Seconds that a load may take, and that a lookup waits for cold chunks.
        plain: This engine stores records uncompressed, for devices of its data plane.
        context: Returns the context of a request's span.

    Attributes:
        reach: Engines that learn of published chunks, a ``Reach`` of the wire, as a data plane told last.
        publications: Published chunks, for the steps that compute them.
    """

    def __init__(
        self,
        model: bytes,
        groups: Records,
        rule: Rule,
        *,
        others: Mapping[int, Records] | None = None,
        saved: Records | None = None,
        every: Sequence[bool] | None = None,
        chunk_tokens: int,
        timeout: float,
        threads: int = 2,
        enabled: bool = True,
        loads_wait: bool = False,
        load_timeout: float = 10.0,
        plain: bool = False,
        context: Callable[[str], str] = lambda request_id: "",
    ) -> None:
        self._model = model
        self._prober = Prober({0: groups, **(others or {})}, (SAVED, saved or groups), every or [True] * len(groups))
        self.saves_apart = saved is not None
        self._rule = rule
        self._chunk_tokens = chunk_tokens
        self._timeout = timeout
        self._enabled = enabled
        self._loads_wait = loads_wait
        self._load_timeout = load_timeout
        self._plain = plain
        self._context = context
        self.reach = 0
        self._lock = threading.Lock()
        self._lookups: dict[str, _Lookup] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shadowserve-lookup")
        self._late = ThreadPoolExecutor(1, thread_name_prefix="shadowserve-late-lookup")
        self.publications = Publications(self._prober.of_any, self._publish, timeout)
        self._cold_loads = ColdLoads()
        if enabled:
            # So that the first request's deadline does not pay for the connection.
            for client in dict.fromkeys(client for group in groups for client, _ in group):
                self._pool.submit(client.wait_ready, timeout)

    # ------------------------------------------------------------------ the engine's side

    def submit(
        self,
        request_id: str,
        tokens: Sequence[int],
        extra: Extra | Callable[[], Extra] = _NOTHING,
        disaggregation: Disaggregation = _ALONE,
        saved: Sequence[bytes] = (),
    ) -> None:
        """Start a lookup, or start it over.

        Args:
            tokens: Tokens of the prompt; must not change until :meth:`forget`, except by growing.
            extra: Inputs of its KV other than tokens, or a function that returns them, called on a lookup thread. If it
                raises, the answer's reason is ``unnamed``, and there are no chunk keys.
            saved: Names of its chunks, and of its tail, among :data:`SAVED` records: only these are asked for.
        """
        ends = time.monotonic() + self._timeout
        lookup = _Lookup(request_id, tokens, len(tokens), extra, ends, disaggregation, saved=saved)
        if lookup.length < self._chunk_tokens and not disaggregation.tail_tokens:
            lookup.answer, lookup.chunk_keys = LookupAnswer(0, Reason.SHORT), []
        elif not self._enabled:
            lookup.answer = LookupAnswer(0, Reason.DISABLED)
        with self._lock:
            self._lookups[request_id] = lookup
        if lookup.chunk_keys is None:
            lookup.future = self._pool.submit(self._guarded, lookup, self._run)

    def _of(self, request_id: str) -> _Lookup:
        return self._lookups.get(request_id, _UNKNOWN)

    def poll(self, request_id: str) -> LookupAnswer | None:
        """Return the answer, or None while there is none and time is left."""
        lookup = self._of(request_id)
        if lookup.answer is None and time.monotonic() >= lookup.deadline:
            with self._lock:
                # A lookup thread may have answered since; the first answer counts.
                lookup.answer = lookup.answer or self._late_answer(lookup)
        return lookup.answer

    def is_pending(self, request_id: str) -> bool:
        """Tell if a lookup waits for pending or cold chunks."""
        lookup = self._of(request_id)
        return lookup.answer is None and lookup.waits_until > 0

    def chunk_keys(self, request_id: str) -> list[bytes] | None:
        """Return the keys of whole chunks, None while they are being hashed.

        The list belongs to the request: keys of later chunks are appended in place.
        """
        return self._of(request_id).chunk_keys

    def tail(self, request_id: str) -> list[bytes]:
        """Return the key of the prompt's tail, if that has a record; known with the chunk keys."""
        return self._of(request_id).tail

    def extra(self, request_id: str) -> Extra:
        """Return the inputs of a request's KV other than tokens; only for requests with chunk keys."""
        extra = self._lookups[request_id].extra
        assert isinstance(extra, Extra), "chunk keys without their inputs"
        return extra

    def present(self, request_id: str, *, saved: bool = False) -> Sequence[Flags] | None:
        """Return flags of the stored chunks of each group, even where the answer came too late to be used.

        ``saved``: in the records of the preempted request. None where the other records were asked for.
        """
        lookup = self._of(request_id)
        return lookup.present if bool(lookup.saved) == saved else None

    def asked(self, request_id: str, *, saved: bool = False) -> float:
        """Return the time (monotonic) at which the chunks that :meth:`present` lacks were absent; 0 if unknown."""
        lookup = self._of(request_id)
        return lookup.asked_at if bool(lookup.saved) == saved else 0.0

    def begin_load(self, request_id: str, chunks: int) -> None:
        """Start to bring the cold ones of a load's leading chunks nearer; :meth:`available` tells how far that is."""
        lookup = self._of(request_id)
        if lookup.bring_cold is not None:
            bring, lookup.bring_cold = lookup.bring_cold, None
            bring(chunks)

    def available(self, request_id: str) -> Available | None:
        """Return how many chunks can be fetched by now; None where the answer counts no pending or cold ones."""
        return self._of(request_id).available

    def counts_pending(self, request_id: str) -> bool:
        """Tell if the answer counts chunks that another engine is still storing."""
        return self._of(request_id).counts_pending

    def chains(self, request_id: str) -> RecordKeys | None:
        """Return the records that a load of everything found takes; None while there is no answer.

        Of a group that does not keep every chunk: the fewest last ones that the engine's rule needs for the hit.
        """
        answer, lookup = self.poll(request_id), self._of(request_id)
        if answer is None:
            return None
        if not answer.present or not lookup.chunk_keys:
            return {}
        end = -(-answer.tokens // self._chunk_tokens)
        names = lookup.saved[: len(answer.present[0])] or lookup.chunk_keys
        wanted: list[list[bytes]] = []
        for number, present in enumerate(answer.present):
            first = 0 if self._prober.every[number] else self._first_needed(answer, lookup.length, number, end)
            wanted.append(list(itertools.compress(names[first:end], present[first:end])))
        return _by_client(self._prober.records[answer.shard_layout], wanted)

    def chains_of(self, chunk_keys: Sequence[Sequence[bytes]]) -> RecordKeys:
        """Return the records of a save, given the chunk keys of each group."""
        return _by_client(self._prober.records[SAVED], chunk_keys)

    def name_records(self, request_id: str, then: Callable[[RecordKeys], None], *, needed: bool) -> None:
        """Call ``then``, on a lookup thread, with the records of a request's chunks; not while they have no keys.

        ``needed``: of a group that does not keep every chunk, only those that a hit of all chunks needs.
        """
        lookup = self._of(request_id)
        if not (lookup.chunk_keys or lookup.tail):
            return
        names, tail = list(lookup.chunk_keys or ()), list(lookup.tail)
        layouts = {0, max(lookup.answer.shard_layout, 0) if lookup.answer is not None else 0}

        def name() -> None:
            end, wanted = len(names), list[list[bytes]]()
            whole = LookupAnswer(
                end * self._chunk_tokens, Reason.COMPLETE, present=[np.ones(end, np.bool_)] * len(self._prober.every)
            )
            for number, every in enumerate(self._prober.every):
                first = self._first_needed(whole, whole.tokens + 1, number, end) if needed and not every else 0
                wanted.append([*names[first:], *tail])
            found: dict[DataPlaneClient, list[tuple[bytes, Sequence[bytes]]]] = {}
            for layout in layouts:
                for client, chains in _by_client(self._prober.records[layout], wanted).items():
                    found.setdefault(client, []).extend(chains)
            then(found)

        with contextlib.suppress(RuntimeError):  # closed
            self._pool.submit(name)

    def _first_needed(self, answer: LookupAnswer, length: int, number: int, end: int) -> int:
        last = 1
        while last < end:
            present = [flags.copy() for flags in answer.present]
            present[number][: end - last] = False
            if self._rule(present, length) == answer.tokens:
                break
            last *= 2
        return max(end - last, 0)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, and withdraw what it published and did not compute."""
        with self._lock:
            lookup = self._lookups.pop(request_id, None)
        self.publications.withdraw(request_id)
        self._cold_loads.end(request_id)
        if lookup is not None and lookup.future is not None:
            lookup.future.cancel()

    def close(self) -> None:
        self.publications.close()
        self._cold_loads.close()
        self._late.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ naming and hashing

    def _run(self, lookup: _Lookup) -> None:
        if self._named(lookup):
            chunk_keys = self._hash(lookup)
            lookup.wanted = list(lookup.saved) or [*chunk_keys, *lookup.tail]
            lookup.chunk_keys = chunk_keys  # from now on the engine's thread may extend them
            if self._enabled:
                self._probe(lookup)

    def _guarded(self, lookup: _Lookup, step: Callable[[_Lookup], None]) -> None:
        try:
            with spans.span("lookup", self._context(lookup.request_id)) as span:
                step(lookup)
                answer = lookup.answer or lookup.best_answer
                span.set(chunks=len(lookup.wanted), found_tokens=answer.tokens, reason=answer.reason)
        except Exception as error:  # a bug must not leave the request waiting for its deadline
            self._resolve(lookup, LookupAnswer(0, Reason.INTERNAL, f"{type(error).__name__}: {error}"))

    def _submit(self, pool: ThreadPoolExecutor, lookup: _Lookup, step: Callable[[_Lookup], None]) -> None:
        """Take a step of a lookup on a thread, unless its request has ended."""
        if self._lookups.get(lookup.request_id) is lookup:
            with contextlib.suppress(RuntimeError):  # closed
                pool.submit(step, lookup)

    def _named(self, lookup: _Lookup) -> bool:
        """Find the inputs of a prompt's KV other than tokens; return False where one has no identity."""
        if isinstance(lookup.extra, Extra):
            return True
        try:
            lookup.extra = lookup.extra()
        except Exception as error:  # also of an input of an unknown kind
            with self._lock:  # also over "disabled" and "deadline", after which chunks could be stored
                lookup.answer = LookupAnswer(0, Reason.UNNAMED, str(error) or type(error).__name__)
            return False
        return True

    def _hash(self, lookup: _Lookup) -> list[bytes]:
        extra, end = lookup.extra, lookup.length // self._chunk_tokens * self._chunk_tokens
        assert isinstance(extra, Extra)
        tokens, chunk_keys = array.array("I"), list[bytes]()
        stride = max(_STRIDE_TOKENS // self._chunk_tokens, 1) * self._chunk_tokens
        for begin in range(0, end, stride):
            tokens += array.array("I", lookup.tokens[begin : min(begin + stride, end)])
            chunk_keys = prefix_chain(
                self._model, tokens, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys
            )
            time.sleep(0)  # let the engine's thread take the interpreter
        if size := lookup.disaggregation.tail_tokens:
            before = self._model, lookup.tokens, size
            lookup.tail = [tail_chunk_key(*before, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys)]
        return chunk_keys

    # ------------------------------------------------------------------ probing

    def _probe(self, lookup: _Lookup) -> None:
        """Ask which chunks are stored; then answer, or wait for pending or cold chunks and probe again."""
        asked_at, wanted = time.monotonic(), lookup.wanted
        left = (lookup.waits_until or lookup.deadline) - asked_at
        if left <= 0:
            self._resolve(lookup, self._late_answer(lookup))
            return
        try:
            if lookup.saved:
                own, best = self._prober.ask({SAVED: len(wanted)}, wanted, left, published=False) * 2
            else:
                own, best = self._prober.best(wanted, left, published=lookup.disaggregation.waits > 0)
        except DataPlaneError as error:
            self._resolve(lookup, replace(lookup.best_answer, reason=error.outcome, detail=str(error)))
            if error.outcome == Reason.DEADLINE:
                self._submit(self._late, lookup, self._learn_stored)
            return
        lookup.note_stored(own, asked_at)
        if lookup.cold_ended or not lookup.disaggregation.cold:
            best = best.within(Tier.STORAGE, self._prober.every)
        self._note(lookup, best)
        if (hits := self._match(lookup, best)) is None:
            return  # it waits, and is probed again
        if lookup.disaggregation.publishes:  # before this engine can have computed and stored it
            self._publish_absent(lookup, own.stored | (np.arange(len(wanted)) < hits))
        reason: str = Reason.COMPLETE
        detail = ""
        if lookup.cold_ended not in ("", Reason.COMPLETE):
            reason, detail = lookup.cold_ended, "chunks are in object storage alone, and were not brought"
        elif hits < len(wanted) and lookup.waits_until and lookup.available is None and not lookup.cold_ended:
            reason, detail = Reason.PUBLISHED_GONE, "chunks that were pending are not stored"
        self._resolve(lookup, replace(lookup.best_answer, reason=reason, detail=detail))

    def _probe_again(self, lookup: _Lookup) -> None:
        if lookup.answer is None:
            self._submit(self._pool, lookup, lambda again: self._guarded(again, self._probe))

    def _match(self, lookup: _Lookup, best: Probe) -> int | None:
        """Return how many leading chunks, the tail among them, count as found; None where the lookup waits."""
        hits = leading(best.stored)
        if hits < len(lookup.wanted) and self._is_worth_waiting(lookup, hits, best.pending):
            return self._match_pending(lookup, hits, best)
        if not lookup.cold_ended and Tier.COLD in lookup.best_answer.tiers[:hits]:
            if not self._loads_wait:
                self._await_cold(lookup, hits, best)
                return None
            self._offer_cold(lookup, hits, best)
        return hits

    def _match_pending(self, lookup: _Lookup, hits: int, best: Probe) -> int | None:
        if best.pending is None:  # then the shard layout that will have it is not known either
            self._await_pending(lookup, hits, self._prober.layouts)
            return None
        if self._loads_wait and hits:
            self._offer_pending(lookup, best)
            return best.extent
        # Chunks are stored in their order: once the last is stored or not pending any more, one question tells of all.
        # Where the load may continue from there, the first chunk is enough.
        pending = np.flatnonzero(best.pending[: best.extent])
        self._await_pending(lookup, int(pending[0 if self._loads_wait else -1]), [best.shard_layout])
        return None

    def _note(self, lookup: _Lookup, best: Probe) -> None:
        """Keep what a probe found of whole chunks and a tail as the answer, if no better one comes in time."""
        whole = lookup.whole
        present = [flags[:whole] for flags in best.present]
        answer = LookupAnswer(
            self._rule(present, lookup.length) if whole else 0,
            Reason.COMPLETE,
            shard_layout=best.shard_layout,
            present=present,
            tail=leading(best.stored) > whole and self._has_tail(lookup, best),
            chunk_bytes=best.chunk_bytes,
            cold_seconds=best.cold_seconds,
            unpublished=best.pending is None and lookup.disaggregation.waits > 0 and not best.stored.all(),
        )
        tiers = best.farthest(self._needed(answer, lookup.length, best)).tobytes()
        lookup.best_answer = replace(answer, tiers=tiers)

    def _needed(self, answer: LookupAnswer, length: int, probe: Probe) -> list[int]:
        """Return the first chunk of each group that a load of everything found needs."""
        end = -(-answer.tokens // self._chunk_tokens)
        kept = [tiers for tiers, every in zip(probe.tiers, self._prober.every, strict=True) if every]
        base = np.maximum.reduce(kept) if kept else np.zeros(1, np.uint8)
        return [
            0 if every or not (tiers > base).any() else self._first_needed(answer, length, number, end)
            for number, (tiers, every) in enumerate(zip(probe.tiers, self._prober.every, strict=True))
        ]

    def _has_tail(self, lookup: _Lookup, probe: Probe) -> bool:
        """Tell if a load may go to the end of the tail, which the groups that keep every chunk have."""
        size = lookup.disaggregation.tail_tokens
        end = lookup.whole * self._chunk_tokens + size
        return self._rule(probe.present, end + 1, size) == end

    def _late_answer(self, lookup: _Lookup) -> LookupAnswer:
        detail = f"still pending after {lookup.disaggregation.waits:g} s"
        if lookup.late_reason == Reason.DEADLINE:
            detail = f"no answer within {self._timeout:g} s (host.lookup_timeout_s)"
        elif lookup.late_reason == Reason.COLD_LATE:
            detail = f"not all came from object storage within {self._load_timeout:g} s (host.fetch_timeout_s)"
        return replace(lookup.best_answer, reason=lookup.late_reason, detail=detail)

    def _learn_stored(self, lookup: _Lookup) -> None:
        """Ask again with more time, for a lookup that was not answered: chunks that are stored are not stored again."""
        if self._lookups.get(lookup.request_id) is lookup:
            asked_at, count = time.monotonic(), {SAVED if lookup.saved else 0: len(lookup.wanted)}
            with contextlib.suppress(DataPlaneError):
                (own,) = self._prober.ask(count, lookup.wanted, self._load_timeout, published=False)
                lookup.note_stored(own, asked_at)

    def _resolve(self, lookup: _Lookup, answer: LookupAnswer) -> None:
        with self._lock:
            lookup.answer = lookup.answer or answer

    # ------------------------------------------------------------------ cold chunks

    def _cold_bringer(
        self, lookup: _Lookup, count: int, best: Probe, then: Callable[[Available], None]
    ) -> Callable[[int], None]:
        """Return a function that brings leading ones of the first ``count`` chunks nearer, and reports to ``then``."""
        needed, waits = self._needed(lookup.best_answer, lookup.length, best), lookup.disaggregation.waits > 0

        def ask(first: int, end: int) -> tuple[Flags, Flags]:
            rest, counts = lookup.wanted[first:end], {best.shard_layout: end - first}
            with spans.use(self._context(lookup.request_id)):
                (probe,) = self._prober.ask(counts, rest, self._timeout, published=waits, prefetch=True)
            cold = probe.farthest(needed, first) == Tier.COLD
            return probe.stored & ~cold, cold if probe.pending is None else cold | probe.pending

        def bring(chunks: int) -> None:
            seconds = _COLD_WAIT_SHARE * self._load_timeout
            self._cold_loads.begin(lookup.request_id, ask, min(chunks, count), seconds, then)

        return bring

    def _offer_cold(self, lookup: _Lookup, count: int, best: Probe) -> None:
        """Count the cold ones of the first chunks as stored: they are brought once a load of them begins."""

        def note(available: Available) -> None:
            lookup.available = available

        tiers = np.frombuffer(lookup.best_answer.tiers, np.uint8)[:count]
        lookup.available = Available(leading((tiers != Tier.COLD) & best.stored[:count]), "")
        lookup.bring_cold = self._cold_bringer(lookup, count, best, note)

    def _await_cold(self, lookup: _Lookup, hits: int, best: Probe) -> None:
        """Bring cold chunks nearer before the answer, because no load may wait for them; then probe again."""

        def then(available: Available) -> None:
            if available.ended and lookup.answer is None:
                lookup.cold_ended = available.ended
                self._probe_again(lookup)

        bring = self._cold_bringer(lookup, hits, best, then)
        self._note(lookup, best.within(Tier.STORAGE, self._prober.every))
        lookup.late_reason = Reason.COLD_LATE
        lookup.deadline = lookup.waits_until = time.monotonic() + self._load_timeout
        bring(hits)

    # ------------------------------------------------------------------ pending chunks

    def _is_worth_waiting(self, lookup: _Lookup, index: int, pending: Flags | None) -> bool:
        """Tell if the first of a prompt's chunks (or its tail) that is not stored is worth waiting for."""
        if pending is not None:
            return bool(pending[index])
        return lookup.disaggregation.waits > 0 and index * self._chunk_tokens < lookup.disaggregation.expected_tokens

    def _start_waiting(self, lookup: _Lookup) -> None:
        if not lookup.waits_until:
            lookup.waits_until = lookup.deadline - self._timeout + lookup.disaggregation.waits
            lookup.deadline, lookup.late_reason = lookup.waits_until, Reason.PUBLISHED_LATE

    def _await_pending(self, lookup: _Lookup, index: int, layouts: Iterable[int]) -> None:
        """Probe again once a chunk is stored, or is not pending any more, in any of some shard layouts."""
        self._start_waiting(lookup)

        def then(late: bool) -> None:
            if late and self._lookups.get(lookup.request_id) is lookup:
                self._resolve(lookup, self._late_answer(lookup))
            self._probe_again(lookup)

        self.publications.wait(lookup.wanted[index], layouts, lookup.waits_until, then)

    def _offer_pending(self, lookup: _Lookup, best: Probe) -> None:
        """Count pending chunks as stored, and report from now on how many of them are."""
        assert best.pending is not None
        whole = lookup.whole
        # A chunk's records of full attention are stored last: with them, its records in other groups are stored.
        present = [(flags | best.pending)[:whole] for flags in best.present]
        tokens = self._rule(present, lookup.length) if whole else 0
        self._start_waiting(lookup)
        lookup.counts_pending = True
        if Tier.COLD in lookup.best_answer.tiers[: best.extent]:
            self._offer_cold(lookup, best.extent, best)
        else:
            self._follow_pending(lookup, lookup.wanted[: best.extent], best)
        lookup.best_answer = replace(lookup.best_answer, tokens=tokens, present=present, tail=best.extent > whole)

    def _follow_pending(self, lookup: _Lookup, wanted: list[bytes], probe: Probe, before: int = 0) -> None:
        """Record how many chunks are stored, and ask again when most of the pending ones are.

        The first ``before`` chunks are stored, and the probe begins behind them.
        """
        stored, pending = before + leading(probe.stored), np.flatnonzero(~probe.stored[: probe.extent])
        if len(pending):
            lookup.available = Available(stored, "")
            middle = wanted[before + pending[len(pending) // 2]]
            again = functools.partial(self._poll_pending, lookup, wanted, probe.shard_layout)
            self.publications.wait(middle, [probe.shard_layout], lookup.waits_until, again)
        else:
            lookup.available = Available(stored, Reason.COMPLETE if stored >= len(wanted) else Reason.PUBLISHED_GONE)

    def _poll_pending(self, lookup: _Lookup, wanted: list[bytes], layout: int, late: bool) -> None:
        """Ask on a lookup thread how many chunks are stored by now; the calling thread serves all requests."""

        def poll(lookup: _Lookup) -> None:
            assert lookup.available is not None
            before = lookup.available.chunks
            rest = wanted[before:]
            try:
                (probe,) = self._prober.ask({layout: len(rest)}, rest, self._timeout, published=True)
                if late:
                    stored = before + leading(probe.stored)
                    ended = Reason.COMPLETE if stored == len(wanted) else Reason.PUBLISHED_LATE
                    lookup.available = Available(stored, ended)
                else:
                    self._follow_pending(lookup, wanted, probe, before)
            except DataPlaneError as error:
                lookup.available = lookup.available._replace(ended=error.outcome)
            except Exception:  # a bug must not leave the load waiting for its deadline
                lookup.available = lookup.available._replace(ended=Reason.INTERNAL)

        self._submit(self._pool, lookup, poll)

    def _publish_absent(self, lookup: _Lookup, stored: Flags) -> None:
        """Publish the chunks that this engine will compute and store, unless the request has ended."""
        ends = [(index + 1) * self._chunk_tokens for index in range(len(lookup.wanted))]
        if lookup.tail:
            ends[-1] -= self._chunk_tokens - lookup.disaggregation.tail_tokens
        absent = [
            chunk_key
            for chunk_key, there, end in zip(lookup.wanted, stored, ends, strict=True)
            if not there and lookup.disaggregation.may_store(end)
        ]
        if absent:
            self.publications.publish(lookup.request_id, absent, lookup.disaggregation.publishes)
        if self._lookups.get(lookup.request_id) is not lookup:  # it ended before there was anything to withdraw
            self.publications.withdraw(lookup.request_id)

    def _publish(self, chunk_keys: Sequence[bytes], seconds: float) -> None:
        """Publish all ranks' records of some chunks; 0 seconds: withdraw them."""
        groups = zip(self._prober.layouts[0], self._prober.every, strict=True)
        held = dict.fromkeys(each for group, every in groups if every for each in group)
        for client in dict.fromkeys(client for client, _ in held):
            names = [name for each, name in held if each is client]
            keys = [key for name in names for key in record_keys(name, chunk_keys)]
            client.publish(keys, seconds, plain=self._plain, reached=self._set_reach)

    def _set_reach(self, reach: int) -> None:
        self.reach = reach


def _by_client(groups: Records, chunk_keys: Iterable[Sequence[bytes]]) -> RecordKeys:
    """Return the records of some chunks of each group, by the data plane that has them."""
    found: dict[DataPlaneClient, list[tuple[bytes, Sequence[bytes]]]] = {}
    for group, keys in zip(groups, chunk_keys, strict=True):
        for client, namespace in dict.fromkeys(group) if keys else ():
            found.setdefault(client, []).append((namespace, record_keys(namespace, keys)))
    return found
