"""The scheduler side of the connector: which prompts to load, and which finished chunks to store.

Everything here runs on the engine's thread, so it is cheap: lookups and hashing run on other threads, and a step in
which no request completes a chunk costs one comparison for each running request.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.disaggregation import Available, Disaggregation
from host_control.fetch_policy import Decided
from host_control.lookup import SAVED, LookupAnswer, PrefixLookup
from host_control.streams import NEXT_STEP
from host_control.transfer import Event, Reason, State
from host_control.vllm.accounting import PromptAccount
from host_control.vllm.disaggregation import (
    ENDS_WITH_CHUNK,
    TAILLESS,
    count_reach,
    count_tail,
    disaggregation_of,
    reply_of,
)
from host_control.vllm.epochs import WEIGHTS_CHANGED, Epochs
from host_control.vllm.events import StoreEvents
from host_control.vllm.fetch_policy import PolicyRunner
from host_control.vllm.groups import Groups
from host_control.vllm.hints import apply, hints_of
from host_control.vllm.identity.requests import RequestInputs
from host_control.vllm.loads import NO_LAYERS, LoadWays, group_loads, note_chunk_keys, usable_tokens
from host_control.vllm.metadata import (
    LoadOperation,
    ShadowServeMetadata,
    StoreOperation,
    WorkerHandshake,
    WorkerReport,
)
from host_control.vllm.metrics import Counts, FailureLog, SlowerPaths
from host_control.vllm.outcomes import Outcomes
from host_control.vllm.preemption import Preemption
from host_control.vllm.requests import NEVER, Held, Load, RequestState
from host_control.vllm.stores import Stores
from host_control.vllm.support import request_problem
from host_control.vllm.timing import Timing
from host_control.vllm.workers import Workers, agreed
from host_control.waiting import WaitingQueue
from shadowserve.errors import ConfigurationError
from shadowserve.tier import Tier


@dataclass(frozen=True)
class _Engine:
    """Facts of the engine that do not change."""

    config: HostConfig
    groups: Groups | None
    fetch: bool
    store: bool
    recomputes: bool
    by_priority: bool
    events: StoreEvents | None = None

    @property
    def has_states(self) -> bool:
        return self.groups is not None and any(group.kind == "state" for group in self.groups.groups)

    @property
    def loads_wait(self) -> bool:
        """A load may wait for chunks. It may fall short of them, and then the engine must compute them."""
        several = self.groups is not None and not self.groups.one
        return self.recomputes and (self.config.asynchronous_fetch or several)


class SchedulerSide:
    """Decides which prompts to load and which chunks to store.

    Attributes:
        waiting: Sends the engine's queue to the data planes; None where nothing is fetched.
    """

    def __init__(
        self,
        config: HostConfig,
        groups: Groups | None,
        *,
        fetch: bool,
        store: bool,
        problem: str,
        logger: logging.Logger,
        inputs: RequestInputs | None = None,
        recomputes: bool = True,
        step_tokens: int = 1 << 30,
        by_priority: bool = False,
        sampling_state: bool = False,
        events: StoreEvents | None = None,
    ) -> None:
        self._engine = _Engine(config, groups, fetch, store, recomputes, by_priority, events)
        self.problem = problem
        self._logger = logger
        self._failures = FailureLog(logger)
        self._outcomes = Outcomes(logger, groups)
        self._inputs = inputs or RequestInputs()
        self.epochs = Epochs()
        self.counts = Counts()
        self.slower = SlowerPaths(self.counts, logger)
        self.ways = LoadWays(config, groups, self.slower, sampling_state=sampling_state)
        self.waiting: WaitingQueue | None = None
        self._clients: list[DataPlaneClient] = []
        self._serves = False
        self._lookup: PrefixLookup  # from start() on, in an engine that is served
        self._stores: Stores
        self._preemption: Preemption | None = None
        # All requests of the engine, also those that are served without the cache.
        self._requests: dict[str, RequestState] = {}
        # Loads in flight. A load may outlive its request: vLLM keeps the blocks until the workers report it as ended.
        self._loads: dict[str, Load] = {}
        self._timing = Timing(config, counts=self.counts)
        chunk_tokens = groups.chunk_tokens if groups is not None else 1
        self._account = PromptAccount(self.counts, self._timing.table, chunk_tokens, step_tokens)
        self._policy_runner: PolicyRunner | None = None
        if fetch and groups is not None:
            self._policy_runner = PolicyRunner(
                config,
                self._timing.table,
                self._timing.loads,
                rate=lambda: self._timing.rate,
                chunk_tokens=groups.chunk_tokens,
                step_tokens=step_tokens,
                counts=self.counts,
                report=self._report_decision,
            )

    def start(self, handshakes: dict[int, WorkerHandshake]) -> None:
        """Start with the handshakes of all ranks: check that they agree, connect, and accept requests."""
        groups, config = self._engine.groups, self._engine.config
        if self.problem or groups is None:
            return  # the connector has logged it
        try:
            workers = agreed(handshakes, groups.groups, config)
        except ConfigurationError as error:
            self.problem = str(error)
            self._logger.error("ShadowServe is off, every prompt is computed: %s", error)
            return
        shake, self._clients, self.epochs.ranks = workers.shake, workers.clients, len(handshakes)
        layers = shake.layers if config.layer_order else 0
        self.ways.by_layers = layers > 0
        if self._policy_runner is not None:
            self._policy_runner.start(layers, shake.chunk_bytes)
        self._timing.begin(shake.model, shake.machine, layers, self._logger, self._clients)
        lookup = self._lookup = self._outcomes.lookup = self._make_lookup(workers, groups)
        self._serves = True
        if self._engine.fetch:
            self.waiting = WaitingQueue(lookup.chains, self._clients, by_priority=self._engine.by_priority)
        events = self._engine.events and self._engine.events.begin(workers.names, self.counts)
        self._stores = Stores(shake.model, groups, lookup, self.slower, enabled=self._engine.store, events=events)
        if self._engine.fetch and self._engine.store and groups.followed:
            self._preemption = Preemption(
                self._requests,
                groups,
                lookup,
                self._stores,
                ranks=len(handshakes),
                timeout=config.fetch_timeout_s,
                apart=workers.saved is not None,
            )

    def _make_lookup(self, workers: Workers, groups: Groups) -> PrefixLookup:
        config = self._engine.config
        return PrefixLookup(
            workers.shake.model,
            workers.records[0],
            groups.hit_tokens,
            others={layout: records for layout, records in workers.records.items() if layout},
            saved=workers.saved,
            every=[group.kind == "full" for group in groups.groups],
            chunk_tokens=groups.chunk_tokens,
            timeout=config.lookup_timeout_s,
            threads=config.lookup_threads,
            enabled=self._engine.fetch,
            loads_wait=self._engine.loads_wait,
            load_timeout=config.fetch_timeout_s,
            plain=workers.shake.plain,
            context=self._outcomes.context,
        )

    # ------------------------------------------------------------------ arrival and lookup

    def on_new_request(self, request: Any) -> None:
        if not self._serves:
            return
        state = self._requests[request.request_id] = RequestState(request)
        self._outcomes.begin(request)
        named = self._name(state)  # of all requests, in their order: an adapter's number may be reused
        if (problem := request_problem(request)) is not None:
            self._failures.warn("a request is served without the cache", problem, "")
        elif named:
            self._start_lookup(state)
        self._account.arrived(state, named=named)
        if self._policy_runner is not None:
            self._policy_runner.arrived(state)
        self._outcomes.arrived(state, problem or "")
        if self.waiting is not None:  # after the lookup began: before, the queue would read "no lookup" as "no hit"
            self.waiting.enqueue(request.request_id, request.priority, state.hints.session)

    def _start_lookup(self, state: RequestState) -> None:
        request, groups = state.request, self._groups
        state.served, state.hints = True, hints_of(request, self._engine.config, self.slower)
        state.disaggregation = disaggregation_of(
            request,
            self._engine.config,
            groups.chunk_tokens,
            groups.tail_block_tokens,
            fetch=self._engine.fetch,
            store=self._engine.store,
            to_the_end=groups.tail_may_end_prompt,
        )
        if not request.num_prompt_tokens % groups.chunk_tokens and not groups.tail_may_end_prompt:
            count_tail(self.slower, state.disaggregation, ENDS_WITH_CHUNK, groups.chunk_tokens)
        elif request.num_prompt_tokens % groups.chunk_tokens and not groups.tail_block_tokens:
            count_tail(self.slower, state.disaggregation, TAILLESS, groups.chunk_tokens)
        # The list is vLLM's own and only grows; the lookup reads its first tokens.
        self._look_up(state, request.prompt_token_ids)
        self._stores.schedule(state)

    def _look_up(self, state: RequestState, tokens: list[int]) -> None:
        request, disaggregation, size = state.request, state.disaggregation, state.disaggregation.tail_tokens
        if (save := state.current_save) is not None:
            # Without a tail one more token is looked up, because a lookup never matches the last one.
            disaggregation, size = Disaggregation(tail_tokens=save.tail_tokens), 0
            tokens = tokens[: save.tokens + (not save.tail_tokens)]
        elif len(tokens) != request.num_prompt_tokens:
            disaggregation, size = Disaggregation(), 0  # it has generated tokens: only this engine continues it
        state.tail_stored = state.foreseen = False
        chunk_tokens = self._groups.chunk_tokens
        state.tail_end = len(tokens) // chunk_tokens * chunk_tokens + size if size else 0
        names = save.chunk_keys if save is not None and save.apart else ()
        self._lookup.submit(request.request_id, tokens, state.extra, disaggregation, names)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Return how many tokens behind the engine's own prefix can be loaded; None: ask again.

        Each question starts the request's load over, with a probe.
        """
        if local_tokens and self._unconfirmed:
            return None  # its prefix may be KV that this step waits for; the next step knows if that KV is valid
        if (state := self._served(request.request_id)) is None:
            return 0
        if self._policy_runner is not None and self._policy_runner.step_is_closed:
            return None
        self._outcomes.begin(request)
        load = state.probe(local_tokens)
        self._look_up_again(state)
        if (reason := self._why_no_load(state)) is not Reason.NONE:
            load.on(Event.MISSED, reason)
            return 0
        if (answer := self._answer(state)) is None:
            return self._without_answer(state)
        self._note_answer(state, answer)
        if not (usable := self._choose_load(state, answer)):
            load.on(Event.MISSED, Reason.NOT_WORTH_IT)
            return 0
        if load.not_layerwise == NEXT_STEP:
            return None
        note_chunk_keys(state, answer, self._lookup, usable, self._groups.chunk_tokens)
        load.epoch, load.shard_layout = self.epochs.current, answer.shard_layout
        load.on(Event.OFFER)
        return usable

    def _look_up_again(self, state: RequestState) -> None:
        """Look a preempted request up again: by now chunks of its own may be stored, of generated tokens too."""
        request, save = state.request, state.current_save
        if request.num_preemptions != state.preemptions and (save is None or not save.pending):
            state.preemptions = request.num_preemptions
            self._look_up(state, list(request.all_token_ids))
        # vLLM asks for requests that hold no blocks: their KV will continue this prefix of the engine's own.
        state.mixes_weights = state.load.local_tokens > 0 and self.epochs.own_cache_is_old
        self._stores.schedule(state)

    def _why_no_load(self, state: RequestState) -> Reason:
        if state.mixes_weights:
            return Reason.OTHER_WEIGHTS
        if state.refused:
            return Reason.REFUSED_BEFORE
        if not self._engine.fetch or state.request.skip_reading_prefix_cache:
            return Reason.OFF
        if state.current_save is None and self._lookup.saves_apart and state.was_computed_here:
            return Reason.NOT_EXACT
        return Reason.NONE

    def _answer(self, state: RequestState) -> LookupAnswer | None:
        request, save = state.request, state.current_save
        answer = self._lookup.poll(request.request_id) if state.preemptions == request.num_preemptions else None
        if answer is None and save is not None and self._engine.loads_wait:
            return save.expected_answer  # offered at once, before other requests get the blocks that it needs
        return answer

    def _without_answer(self, state: RequestState) -> int | None:
        """Return 0 where computing the prompt is best whatever the lookup answers, else None."""
        # Recurrent state is stored as it is computed or never: which of it is stored must be known before.
        if (
            self._policy_runner is not None
            and not self._engine.has_states
            and self._policy_runner.computes_anyway(
                state, layerwise=lambda: not self._why_not_layerwise(state), stores=self._engine.store
            )
        ):
            state.load.on(Event.MISSED, Reason.NOT_WORTH_IT)
            return 0
        if self._lookup.is_pending(state.request.request_id):
            state.load.on(Event.WAIT)
        return None

    def _note_answer(self, state: RequestState, answer: LookupAnswer) -> None:
        self._count_lookup(state, answer)
        stored = state.tail_end if answer.tail else self._chunks(answer.tokens) * self._groups.chunk_tokens
        self._account.answered(state.request.request_id, stored, answer.reason)
        if answer.shard_layout != SAVED:
            state.stored_chunks = max(state.stored_chunks, self._chunks(answer.tokens))
        state.tail_stored |= answer.tail

    def _choose_load(self, state: RequestState, answer: LookupAnswer) -> int:
        """Return how many tokens to load, 0 where that is not worth it; set the way of the load."""
        load = state.load
        worth = max(min(self._engine.config.load_tokens_min, self._groups.chunk_tokens - 1), 1)
        usable = usable_tokens(state, answer, self._groups)
        if usable < worth:
            return 0
        load.not_layerwise = self._why_not_layerwise(state, answer, usable)
        load.layerwise = not load.not_layerwise and self._engine.config.layer_order is True
        if self._policy_runner is not None:
            usable = self._policy_runner.usable(state, answer, self._groups, usable)
        return usable if usable >= worth else 0

    def _why_not_layerwise(self, state: RequestState, answer: LookupAnswer | None = None, usable: int = 0) -> str:
        """Return the reason why a load of ``usable`` tokens cannot go layer by layer; empty if it can."""
        if not self.ways.by_layers:
            return NO_LAYERS
        save, runner = state.current_save, self._policy_runner
        counts_pending = self._lookup.counts_pending(state.request.request_id)
        return self.ways.not_by_layers(
            state.request,
            pending=bool(save.pending) if save is not None else counts_pending,
            partial_block=answer is not None
            and answer.tail
            and (state.load.local_tokens + usable) % self._groups.groups[0].block_tokens != 0,
            others=runner.why_not_stream(state, answer, usable, self._requests, self._loads) if runner else "",
        )

    def _count_lookup(self, state: RequestState, answer: LookupAnswer) -> None:
        if state.counted or answer.reason == Reason.SHORT:
            return
        state.counted = True
        chunk_tokens = self._groups.chunk_tokens
        self.counts.add("lookup_requests")
        self.ways.count_lookup(answer)
        self.counts.add("lookup_tokens", state.request.num_prompt_tokens // chunk_tokens * chunk_tokens)
        self.counts.add("hit_tokens", self._chunks(answer.tokens) * chunk_tokens)
        if self._policy_runner is not None:
            self._policy_runner.note_tiers(answer.tiers)
        for tier, chunks in Counter(answer.tiers[: self._chunks(answer.tokens)]).items():
            if tier != Tier.NONE:  # the chunk is pending
                self.counts.add("tier_hit_tokens", chunks * chunk_tokens, reason=Tier(tier).label)
        if answer.reason != Reason.COMPLETE:
            self.counts.add("lookup_failures", reason=answer.reason)
            unnamed = answer.reason == Reason.UNNAMED
            what = "a request is served without the cache" if unnamed else "lookup failed, prompts are computed"
            self._failures.warn(what, answer.reason, answer.detail)

    # ------------------------------------------------------------------ loads

    def waits(self, request: Any) -> bool:
        """Tell if a request with matched tokens waits for its load outside the running batch."""
        return not (self._requests[request.request_id].load.layerwise or self.ways.goes_in_step(request))

    def allocated(self, request: Any, tables: Sequence[list[int]], external_tokens: int) -> None:
        """Note that vLLM has allocated blocks; load ``external_tokens`` tokens, if any, into each group's table."""
        if self.waiting is not None:
            self.waiting.begun(request.request_id)
        if (state := self._served(request.request_id)) is None:
            return
        self._account.allocated(state, external_tokens)
        decision, state.load.decision = state.load.decision, None
        follows = decision is not None and bool(external_tokens) == (decision.way != "compute")
        if external_tokens:
            self._allocate_load(state, tables, external_tokens)
        self._outcomes.allocated(state.load, external_tokens)
        if follows and decision is not None and self._policy_runner is not None:
            self._policy_runner.follow(state, decision)

    def _allocate_load(self, state: RequestState, tables: Sequence[list[int]], external_tokens: int) -> None:
        request, load, chunk_tokens = state.request, state.load, self._groups.chunk_tokens
        load.on(Event.ALLOCATE)
        if request.num_preemptions:
            self.counts.add("restored_tokens", external_tokens)
        load.tokens, end_tokens = external_tokens, load.local_tokens + external_tokens
        if not load.layerwise:  # else the fetch itself names the cold chunks, layer by layer
            self._lookup.begin_load(request.request_id, self._chunks(end_tokens))
        load.in_step = not self.waits(request)
        load.first_chunk = load.local_tokens // chunk_tokens
        load.chunks = load.placed_chunks = self._chunks(end_tokens) - load.first_chunk
        load.operation = LoadOperation(
            request.request_id,
            load.epoch,
            load.shard_layout,
            {},
            layerwise=load.layerwise,
            in_step=load.in_step and not load.layerwise,
            available=None if load.layerwise else self._available(state),
        )
        self.ways.count_load(request, "" if load.layerwise else load.not_layerwise)
        try:
            load.operation.groups = group_loads(load, self._groups.groups, tables, end_tokens, chunk_tokens)
        except ValueError as error:  # a rule of a vLLM that is not known here: the load falls short, nothing is read
            self._failures.warn("a prompt cannot be loaded", "unknown_rule", str(error))
        if load.in_step:
            (group,) = self._groups.groups
            load.table = list(tables[group.index])
        self._loads[request.request_id] = load

    @property
    def _unconfirmed(self) -> bool:
        """Some in-step load has no report yet.

        The step that waits for such a load computes on it at once, and so would every request that shares its blocks,
        which vLLM's own prefix cache has already. If the load falls short, the step computes on invalid KV before vLLM
        learns of it.
        """
        return any(load.in_step for load in self._loads.values())

    def _available(self, state: RequestState) -> Available | None:
        """Return how many chunks of a request's load can be fetched by now; None: all of them."""
        if (save := state.current_save) is not None:
            return Available(0, "") if save.pending else None
        available = self._lookup.available(state.request.request_id)
        first = state.load.local_tokens // self._groups.chunk_tokens
        return available and available._replace(chunks=max(available.chunks - first, 0))

    def _newly_available(self) -> Iterator[tuple[str, Available]]:
        """Yield the loads of which more chunks are available than the workers know, or no more will be."""
        for request_id, load in self._loads.items():
            state, before = self._served(request_id), load.available
            if load.in_step or load.operation is None or before is None or before.ended or state is None:
                continue
            available = self._available(state)
            if available is None and state.current_save is not None:
                available = Available(load.chunks, Reason.COMPLETE)  # all of the save is stored by now, or dropped
            # Without a save, the request was looked up again: weights changed, or another rank's load fell short.
            why = Reason.PUBLISHED_GONE if load.epoch == self.epochs.current else Reason.WEIGHTS_CHANGED
            available = available or before._replace(ended=why)
            if available != before:
                load.operation.available = available
                yield request_id, available

    def _report_decision(self, result: Decided) -> None:
        if self._clients:
            self._clients[0].decided(result)

    def worker_output(self, finished: set[str] | None, report: WorkerReport) -> None:
        """Follow the workers' reports."""
        self._timing.loaded(report)
        for request_id in report.seconds.keys() | report.layer_waits.keys() | report.reasons.keys():
            if (load := self._loads.get(request_id)) is not None:
                load.seconds = max(load.seconds, report.seconds.get(request_id, 0.0))
                load.layer_waits = report.layer_waits.get(request_id, load.layer_waits)
                load.why_short = load.why_short or report.reasons.get(request_id, "")
        for request_id, chunks in report.loaded.items():
            if (load := self._loads.get(request_id)) is not None:
                self._placed(load, chunks)
        for request_id in finished or ():
            if (load := self._loads.get(request_id)) is not None and not load.in_step:
                self._end(load)
        for request_id, ranks in report.saved.items():
            if (state := self._requests.get(request_id)) is not None and state.save is not None:
                state.save.settle(ranks)
        self.epochs.settled(report.settled)
        if self.epochs.current in report.outlived:
            self._logger.warning(WEIGHTS_CHANGED)
            self.reset()

    def _placed(self, load: Load, chunks: int) -> None:
        """Record how many chunks of a load a rank placed; a report of an in-step load ends it."""
        load.placed_chunks = min(load.placed_chunks, chunks)
        if load.in_step:
            self._end(load)
            if chunks != load.chunks:
                self._evict(load, chunks)
        if chunks != load.chunks and (state := self._served(load.request_id)) is not None:
            self._fell_short(state, load, chunks)

    def _end(self, load: Load) -> None:
        del self._loads[load.request_id]
        if load.request_id not in self._requests:
            load.on(Event.CANCEL, Reason.CANCELLED)
        elif load.placed_chunks < load.chunks:
            load.on(Event.FALL_SHORT)
        else:
            load.on(Event.COMPLETE, Reason.COMPLETE)
        self._account.ended(self._requests.get(load.request_id), load)
        self._outcomes.ended(load)
        if self._policy_runner is not None:
            self._policy_runner.load_ended(load)

    def _evict(self, load: Load, chunks: int) -> None:
        """Evict from vLLM's own prefix cache what a step computed behind a load that brought ``chunks`` chunks.

        vLLM computes it again for this request. If the request is aborted or preempted before, other requests would
        find the invalid KV.
        """
        (group,) = self._groups.groups
        valid = max(load.local_tokens, (load.first_chunk + chunks) * self._groups.chunk_tokens)
        self.epochs.evict(load.table[valid // group.block_tokens :])

    def _fell_short(self, state: RequestState, load: Load, chunks: int) -> None:
        """Compute and store again what a load did not bring."""
        available = None if load.in_step else load.available
        if available is None or available.ended != Reason.COLD_LATE:  # else the chunks are stored, and far away
            state.stored_chunks = min(state.stored_chunks, load.first_chunk + chunks)
            state.tail_stored = False
        if self._preemption is not None:
            self._preemption.invalidate()
        if available is None or self._groups.one:
            state.refused = True
        else:
            # With several groups vLLM takes all of a load or nothing. The chunks that are stored are offered once
            # more, without waiting for pending or cold ones.
            state.disaggregation = replace(state.disaggregation, waits=0.0, cold=False)
            self._look_up(state, state.request.prompt_token_ids)
        self._stores.schedule(state)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request that has ended or was aborted, perhaps during its load; return the reply to its proxy."""
        request_id = request.request_id
        state = self._requests.pop(request_id, None)
        self._account.forget(request_id)
        if self.waiting is not None:
            self.waiting.ended(request_id)
        if self._policy_runner is not None:
            self._policy_runner.forget(request_id)
        self._outcomes.finished(request_id, self._loads.get(request_id))
        if (load := self._loads.get(request_id)) is not None and not load.in_step:
            load.abort_due = True
        if state is None or not state.served:
            return None
        if state.foreseen and (answer := self._lookup.poll(request_id)) is not None:
            self._count_lookup(state, answer)
        count_reach(self.slower, state.disaggregation, self._lookup.reach)
        apply(request_id, state.hints, self._lookup, self.waiting, self.slower)
        self._lookup.forget(request_id)
        tokens = state.tail_end if state.tail_stored else state.stored_chunks * self._groups.chunk_tokens
        return reply_of(request, self._engine.config, 0 if state.mixes_weights else tokens)

    # ------------------------------------------------------------------ each step

    def step(self, output: Any) -> ShadowServeMetadata:
        """Return the workers' tasks of this step."""
        if self.epochs.look(self._logger):
            self.reset()
        metadata = ShadowServeMetadata(self.epochs.current, doubts=self.epochs.doubts, agreed=self.epochs.agreed)
        if self.waiting is not None:
            for request_id in output.preempted_req_ids or ():
                self.waiting.sent_back(request_id)
        if not self._serves:
            return metadata
        self._step_loads(output, metadata)
        if self._policy_runner is not None:
            self._policy_runner.step(output)
        if self._preemption is not None and (lost := self._preemption.follow(output)):
            metadata.saves = dict(self._save(self._preemption, lost))
        if self._engine.store and not self._unconfirmed:  # else chunks that are complete now are stored later
            self._step_stores(output, metadata)
        return metadata

    def _step_loads(self, output: Any, metadata: ShadowServeMetadata) -> None:
        """Send new loads, aborts, and what became available of loads in flight."""
        asynchronous = [load for load in self._loads.values() if not load.in_step]
        new = [load for load in self._loads.values() if load.state is State.ALLOCATED]
        if asynchronous:
            metadata.available = dict(self._newly_available())
            metadata.idle = not output.total_num_scheduled_tokens and all(
                request_id in self._loads and not self._loads[request_id].in_step for request_id in self._requests
            )
        begin = sum(not load.in_step for load in new)
        self._lookup.publications.begin_step()
        self._timing.step(output, waits=len(asynchronous) < len(self._loads), loads=len(asynchronous), begin=begin)
        for load in new:
            assert load.operation is not None
            load.on(Event.QUEUE)
            metadata.loads.append(load.operation)
        if new:
            metadata.window_s = self._timing.layer_seconds()
        for load in asynchronous:
            if load.abort_due:
                load.abort_due = False
                metadata.cancels.append(load.request_id)

    def _step_stores(self, output: Any, metadata: ShadowServeMetadata) -> None:
        """Store the recurrent state, the chunks and the tails that this step completes."""
        block_state = output.kv_connector_block_state
        if self._engine.has_states:
            for request_id, offered in block_state.boundary_state_offloads.items():
                if (state := self._served(request_id)) is not None and not state.mixes_weights:
                    metadata.stores += self._stores.states(state, offered)
        requests, scheduled = self._requests, output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            computed = new.num_computed_tokens + scheduled[new.req_id]
            if (state := requests.get(new.req_id)) is not None and computed >= state.store_at:
                metadata.stores += self._stores.completed(state, block_state, computed)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # In most steps this comparison is all that a running request costs.
            if (state := requests.get(request_id)) is not None and computed + scheduled[request_id] >= state.store_at:
                metadata.stores += self._stores.completed(state, block_state, computed + scheduled[request_id])

    def _save(self, preemption: Preemption, lost: Sequence[Held]) -> Iterator[tuple[str, list[StoreOperation]]]:
        """Yield the saves of requests that this step preempts; workers run them before the step writes any KV."""
        for held in lost:
            state = self._served(held.request_id)
            if state is None or state.mixes_weights or self._unconfirmed:
                continue
            self.counts.add("preempted_tokens", min(held.tokens, state.request.num_tokens))
            if state.prompt_is_shared:
                continue  # its prompt has a tail of its own, and is looked up with that
            if (stores := preemption.save(state, held)) and (save := state.current_save) is not None:
                if not save.apart:
                    state.stored_chunks = max(state.stored_chunks, save.tokens // self._groups.chunk_tokens)
                self.counts.add("saved_tokens", save.tokens)
                if self.waiting is not None:
                    self.waiting.wants(held.request_id, self._lookup.chains_of(save.held))
                yield held.request_id, stores

    def stepped(self) -> None:
        """Follow the end of the oldest step in flight, whose output vLLM has taken."""
        if self._serves:
            self._lookup.publications.end_step()
        learnt = self._timing.stepped(idle=not self._requests)
        if self._policy_runner is not None:
            self._policy_runner.stepped(learnt=learnt)

    # ------------------------------------------------------------------ housekeeping

    @property
    def _groups(self) -> Groups:
        assert self._engine.groups is not None, "the plugin is off"
        return self._engine.groups

    def _served(self, request_id: str) -> RequestState | None:
        """Return a request that is served with the cache."""
        state = self._requests.get(request_id)
        return state if state is not None and state.served else None

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._groups.chunk_tokens)

    def reset(self) -> None:
        """Forget everything stored so far: none of it is served to this engine's requests again.

        That includes requests that wait and requests that load: their loads are given up. KV that the engine computed
        before, for running requests or in its own prefix cache, is not stored any more.
        """
        self.epochs.begin()
        if self._preemption is not None:
            self._preemption.clear()
        for request_id, state in self._requests.items():
            if not state.served:
                continue
            request, load = state.request, self._loads.get(request_id)
            loading = load is not None and (not load.in_step or load.state is State.ALLOCATED)
            state.mixes_weights = (state.load.local_tokens if loading else request.num_computed_tokens) > 0
            state.stored_chunks = 0
            self._stores.schedule(state)
            if not self._name(state):
                state.served, state.store_at = False, NEVER
                self._lookup.forget(request_id)
                continue
            self._look_up(state, list(request.all_token_ids) if request.num_preemptions else request.prompt_token_ids)

    def _name(self, state: RequestState) -> bool:
        """Set the inputs of a request's KV in this epoch; return False where they have no identity."""
        try:
            state.extra = self._inputs.extra(state.request, self.epochs.current)
        except Exception as error:  # an input of an unknown kind must not fail the request
            self._failures.warn("a request is served without the cache", Reason.UNNAMED, str(error) or repr(error))
            return False
        return True

    def close(self) -> None:
        """End lookups and save the measurements."""
        if self.waiting is not None:
            self.waiting.close()
        self._timing.close()
        if self._serves:
            self._lookup.close()
        for client in self._clients:
            client.close()
