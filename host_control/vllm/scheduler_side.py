"""The connector's half in vLLM's scheduler: which prompts to load, and which finished chunks to store.

Everything here runs on the engine's thread, so it is cheap: lookups and hashing happen elsewhere, and a step in which
no request completes a chunk costs one comparison for each running request.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from vllm.v1.request import RequestStatus

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.disaggregation import Arrived, Disaggregation
from host_control.fetch_policy import Decision
from host_control.lookup import SAVED, LookupAnswer, PrefixLookup
from host_control.vllm.disaggregation import (
    ENDS_WITH_CHUNK,
    LET_GO,
    TAILLESS,
    count_reach,
    count_tail,
    disaggregation_of,
    reply_of,
)
from host_control.vllm.epochs import WEIGHTS_CHANGED, Epochs
from host_control.vllm.fetch_policy import PolicyRunner
from host_control.vllm.groups import Groups
from host_control.vllm.identity.requests import RequestInputs
from host_control.vllm.loads import LoadWays, group_loads
from host_control.vllm.metadata import (
    LoadOperation,
    ShadowServeMetadata,
    StoreOperation,
    WorkerHandshake,
    WorkerReport,
)
from host_control.vllm.metrics import Counts, FailureLog, SlowerPaths
from host_control.vllm.preemption import Held, Preemption, Saved
from host_control.vllm.stores import Stores
from host_control.vllm.support import request_problem
from host_control.vllm.timing import Timing
from host_control.vllm.tracked import Tracked
from host_control.vllm.workers import agreed
from host_control.waiting import WaitingQueue
from shadowserve.errors import ConfigurationError
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

__all__ = ["SchedulerSide"]

_NEVER: Final = 1 << 62


class SchedulerSide:
    """Decides which prompts to load and which chunks to store; all of it runs on the engine's thread.

    Args:
        config: of the host.
        groups: whose KV it is; ``None`` where there is a problem.
        fetch, store: whether this engine does either at all (``kv_role``, configuration).
        problem: why this engine is served without the cache, or empty.
        logger: where failures are logged.
        inputs: what requests' KV depends on beside tokens.
        recomputes: whether a load that falls short costs its computation, and not the request.
        step_tokens: that the engine computes in a step at most; by default any number.
        by_priority: whether waiting requests run by priority, and not as they came.
        sampling_state: whether the engine runs logits processors that may keep state.

    Attributes:
        waiting: the engine's queue, of which data planes are told; None where nothing is fetched.
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
    ) -> None:
        self._config = config
        self._by_priority = by_priority
        self.waiting: WaitingQueue | None = None
        self._groups = groups.groups if groups is not None else ()
        self._rules = groups
        self._chunk_tokens = groups.chunk_tokens if groups is not None else config.chunk_tokens
        self._states = {group.index for group in self._groups if group.kind == "state"}
        # A load that waits for chunks may fall short of them, and then the engine has to go on without.
        self._loads_wait = recomputes and (config.asynchronous_fetch or (groups is not None and not groups.one))
        self._fetch = fetch
        self._store = store
        self._logger = logger
        self._failures = FailureLog(logger)
        self._inputs = inputs or RequestInputs()
        self.epochs = Epochs()
        self._model = b""
        self._clients: list[DataPlaneClient] = []
        self._lookup: PrefixLookup | None = None
        self._stores: Stores
        self._preemption: Preemption | None = None
        self._tracked: dict[str, Tracked] = {}
        self._boundary: dict[str, int] = {}
        self._new_loads: dict[str, LoadOperation] = {}
        self._loading: dict[str, LoadOperation] = {}
        # Synchronous loads that no worker has reported yet. The step that waits for one computes on it at once, and so
        # would every request that shares its blocks; if it falls short, it computes on garbage before vLLM hears of it.
        # Of each its table of blocks: they are in vLLM's own prefix cache already, whatever becomes of the request.
        self._unconfirmed: dict[str, tuple[Tracked, list[int]]] = {}
        self._saved_apart = False  # what preempted requests hold: other records are not exact
        self._requests: dict[str, Any] = {}  # all that the engine has, also those that are served without the cache
        self._cancels: list[str] = []
        self.counts = Counts()
        self.slower = SlowerPaths(self.counts, logger)
        self.ways = LoadWays(config, groups, self.slower, sampling_state=sampling_state)
        self.problem = problem
        self._timing = Timing(config, counts=self.counts)
        self._policy_runner: PolicyRunner | None = None
        if fetch and groups is not None:
            self._policy_runner = PolicyRunner(
                config,
                self._timing.table,
                self._timing.loads,
                rate=lambda: self._timing.rate,
                chunk_tokens=self._chunk_tokens,
                step_tokens=step_tokens,
                counts=self.counts,
                tell=self._tell_decision,
            )

    def start(self, handshakes: dict[int, WorkerHandshake]) -> None:
        """Take what the workers, one for each tensor-parallel rank, call the model and what they hold, and begin."""
        if self.problem or self._rules is None:
            return  # the connector has said so
        try:
            workers = agreed(handshakes, self._groups, self._config)
        except ConfigurationError as error:
            self._turn_off(str(error))
            return
        self._model, self._clients, self.epochs.ranks = workers.model, workers.clients, len(handshakes)
        self.ways.layerwise_chunks = workers.layerwise_chunks
        if self._policy_runner is not None:
            self._policy_runner.start(workers.layers, workers.layerwise_chunks, workers.chunk_bytes)
        self._timing.begin(workers.model, workers.machine, workers.layers, self._logger, self._clients)
        self._lookup = PrefixLookup(
            self._model,
            workers.records[0],
            self._rules.hit_tokens,
            others={cut: records for cut, records in workers.records.items() if cut},
            saved=workers.saved,
            every=[group.kind == "full" for group in self._groups],
            chunk_tokens=self._chunk_tokens,
            timeout=self._config.lookup_timeout_s,
            threads=self._config.lookup_threads,
            enabled=self._fetch,
            loads_wait=self._loads_wait,
            load_timeout=self._config.fetch_timeout_s,
            plain=workers.plain,
        )
        if self._fetch:
            self.waiting = WaitingQueue(self._lookup.chains, self._clients, by_priority=self._by_priority)
        self._stores = Stores(self._model, self._chunk_tokens, self._lookup)
        self._saved_apart = workers.saved is not None
        if self._fetch and self._store and self._rules.followed:
            self._preemption = Preemption(
                self._rules,
                self._lookup,
                self._stores,
                ranks=len(handshakes),
                timeout=self._config.fetch_timeout_s,
                apart=self._saved_apart,
            )

    def _turn_off(self, problem: str) -> None:
        """Serve without the cache from now on; said here alone, once for all workers."""
        self.problem = problem
        self._logger.error("ShadowServe is off, every prompt is computed: %s", problem)

    # ------------------------------------------------------------------ arrival and lookup

    def on_new_request(self, request: Any) -> None:
        """Start looking a request up."""
        if self._lookup is None:
            return
        self._requests[request.request_id] = request
        self._begin_lookup(request)
        if self.waiting is not None:  # after the lookup began: before, the queue would read "no lookup" as "no hit"
            self.waiting.arrived(request.request_id, request.priority)

    def _begin_lookup(self, request: Any) -> None:
        tracked = Tracked(request)
        named = self._name(tracked)  # of all, in their order: an adapter's number may come to mean another one
        if (problem := request_problem(request)) is not None:
            self._failures.warn("a request is served without the cache", problem, "")
            return
        if not named:
            return
        self._tracked[request.request_id] = tracked
        assert self._rules is not None
        tracked.disaggregation = disaggregation_of(
            request,
            self._config,
            self._chunk_tokens,
            self._rules.tail_block_tokens,
            fetch=self._fetch,
            store=self._store,
            to_the_end=self._rules.tail_may_end_prompt,
        )
        if not request.num_prompt_tokens % self._chunk_tokens and not self._rules.tail_may_end_prompt:
            count_tail(self.slower, tracked.disaggregation, ENDS_WITH_CHUNK, self._chunk_tokens)
        elif request.num_prompt_tokens % self._chunk_tokens and not self._rules.tail_block_tokens:
            count_tail(self.slower, tracked.disaggregation, TAILLESS, self._chunk_tokens)
        # The list is vLLM's own and only grows; lookups read its head.
        self._look_up(tracked, request.prompt_token_ids)
        self._set_boundary(tracked)

    def _look_up(self, tracked: Tracked, tokens: list[int]) -> None:
        assert self._lookup is not None
        request, disaggregation, size = tracked.request, tracked.disaggregation, tracked.disaggregation.tail_tokens
        if (saved := self._saved(request)) is not None:
            # Without a tail with one token behind it, as the last one of what is looked up is never loaded.
            disaggregation, size = Disaggregation(tail_tokens=saved.tail_tokens), 0
            tokens = tokens[: saved.tokens + (not saved.tail_tokens)]
        elif len(tokens) != request.num_prompt_tokens:
            disaggregation, size = Disaggregation(), 0  # it goes on here
        tracked.tail_stored = tracked.foreseen = False
        tracked.tail_end = len(tokens) // self._chunk_tokens * self._chunk_tokens + size if size else 0
        names = saved.chunk_keys if saved is not None and saved.apart else ()
        self._lookup.submit(request.request_id, tokens, tracked.extra, disaggregation, names)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Return how many tokens beyond the local prefix can be loaded; ``None``: ask again."""
        if self._unconfirmed and local_tokens:
            return None  # its prefix may be what this step waits for; by the next one that is there, or nobody's
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._lookup is None:
            return 0
        tracked.local_tokens, tracked.decision = local_tokens, None
        saved = self._saved(request)
        if request.num_preemptions != tracked.preemptions and (saved is None or not saved.under_way):
            # It comes back after a preemption: by now chunks of its own may be stored, generated tokens too.
            tracked.preemptions = request.num_preemptions
            self._look_up(tracked, list(request.all_token_ids))
        # vLLM asks for requests that hold nothing: all they will have is behind this prefix of the engine's own.
        tracked.mixed = local_tokens > 0 and self.epochs.own_cache_is_old
        self._set_boundary(tracked)
        if tracked.mixed or tracked.refused or not self._fetch or request.skip_reading_prefix_cache:
            return 0
        if saved is None and self._saved_apart and tracked.was_computed_here:
            return 0  # what is stored of it is not exactly what it had
        answer = self._lookup.poll(request.request_id) if tracked.preemptions == request.num_preemptions else None
        if answer is None and saved is not None and self._loads_wait:
            answer = saved.promise  # so that no other request is given the blocks that it needs meanwhile
        if answer is None:
            # States are stored as they are computed, or never: it has to be known before which of them are.
            computes = (
                self._policy_runner is not None
                and not self._states
                and self._policy_runner.computes_anyway(
                    tracked, layerwise=lambda: not self._not_by_layers(tracked), stores=self._store
                )
            )
            return 0 if computes else None
        self._count_lookup(tracked, answer)
        if answer.cut != SAVED:
            tracked.stored_chunks = max(tracked.stored_chunks, self._chunks(answer.tokens))
        tracked.tail_stored |= answer.tail
        worth = min(self._config.load_tokens_min, self._chunk_tokens - 1)
        usable = self._usable(tracked, answer)
        if usable < worth:
            return 0
        tracked.not_by_layers = self._not_by_layers(tracked, answer.cut)
        may_go_layerwise = not tracked.not_by_layers
        chunks = self._chunks(local_tokens + usable) - local_tokens // self._chunk_tokens
        if may_go_layerwise and chunks > self.ways.layerwise_chunks:
            tracked.not_by_layers = "beyond_fetch_buffer"
        tracked.layerwise = not tracked.not_by_layers
        # A prompt that another engine has computed for this one was not to be computed here.
        if self._policy_runner is not None and not tracked.disaggregation.waits:
            assert self._rules is not None
            usable = self._policy_runner.usable(tracked, answer, self._rules, usable, layerwise=may_go_layerwise)
            if usable < worth:
                return 0
        chunk_keys = self._lookup.chunk_keys(request.request_id)
        tracked.offered_tail = 0
        if saved is not None and (answer.tail or chunk_keys is None or saved.apart):
            chunk_keys, tracked.offered_tail = saved.chunk_keys, saved.tail_tokens and saved.tokens
        elif answer.tail and chunk_keys is not None:
            chunk_keys = [*chunk_keys[: tracked.tail_end // self._chunk_tokens], *self._lookup.tail(request.request_id)]
            end = local_tokens + usable
            tracked.offered_tail = end if end > tracked.tail_end // self._chunk_tokens * self._chunk_tokens else 0
        tracked.offered, tracked.offered_epoch, tracked.offered_cut = chunk_keys, self.epochs.current, answer.cut
        return usable

    def _not_by_layers(self, tracked: Tracked, cut: int = 0) -> str:
        """Return why a load of records of a shard layout may not go by layers, however long it is."""
        if not self.ways.layerwise_chunks:
            return "off"
        running = any(request.status == RequestStatus.RUNNING for request in self._requests.values())
        return self.ways.not_by_layers(
            tracked.request,
            pending=self._arrived(tracked) is not None,
            other_records="" if cut == 0 else "preempted" if cut == SAVED else "shard_layout",
            alone=not (running or self._loading or self._new_loads),
        )

    def _arrived(self, tracked: Tracked) -> Arrived | None:
        """Return how many chunks of a load are there by now; ``None`` where all were when it was offered."""
        assert self._lookup is not None
        if (saved := self._saved(tracked.request)) is not None:
            return Arrived(0, "") if saved.under_way else None
        arrived = self._lookup.arrived(tracked.request.request_id)
        first = tracked.local_tokens // self._chunk_tokens
        return arrived and arrived._replace(chunks=max(arrived.chunks - first, 0))

    def _more(self) -> Iterator[tuple[str, Arrived]]:
        """Tell of which loads under way more chunks are there than the workers have been told, or no more will be."""
        for request_id, load in self._loading.items():
            if load.arrived is None or load.arrived.ended or (tracked := self._tracked.get(request_id)) is None:
                continue
            arrived = self._arrived(tracked)
            if arrived is None and self._saved(tracked.request) is not None:
                arrived = Arrived(tracked.load_chunks, "complete")  # all of it is stored by now, or dropped
            # Looked up anew: for other weights, or as another rank's load fell short.
            why = "published_gone" if load.epoch == self.epochs.current else "weights_changed"
            arrived = arrived or load.arrived._replace(ended=why)
            if arrived != load.arrived:
                load.arrived = arrived
                yield request_id, arrived

    def _tell_decision(self, decision: Decision, tokens: int, seconds: float) -> None:
        if self._clients:
            self._clients[0].decided(decision, tokens, seconds)

    def waits(self, request: Any) -> bool:
        """Return whether a request whose tokens were matched waits for its load outside the running batch."""
        return not (self._tracked[request.request_id].layerwise or self.ways.goes_in_step(request))

    def _usable(self, tracked: Tracked, answer: LookupAnswer) -> int:
        """Return how many tokens beyond the local prefix are to be loaded of those that can."""
        assert self._rules is not None
        saved = self._saved(tracked.request)
        tail_end = tracked.tail_end if saved is None else saved.tokens
        known = int(tracked.request.num_tokens)
        tokens = self._rules.with_tail(tail_end, known) if answer.tail else answer.tokens
        most = tracked.disaggregation.load_tokens_max
        if most is not None and tokens - tracked.local_tokens > most:
            end = (tracked.local_tokens + most) // self._chunk_tokens * self._chunk_tokens
            tokens = self._rules.hit_tokens(answer.present, end + 1) if answer.present else 0
        return tokens - tracked.local_tokens

    def _chunks(self, tokens: int) -> int:
        """Return how many chunks so many tokens take."""
        return -(-tokens // self._chunk_tokens)

    def _count_lookup(self, tracked: Tracked, answer: LookupAnswer) -> None:
        if tracked.counted or answer.reason == "short":
            return
        tracked.counted = True
        self.counts.add("lookup_requests")
        self.ways.looked_up(answer)
        self.counts.add("lookup_tokens", tracked.request.num_prompt_tokens // self._chunk_tokens * self._chunk_tokens)
        self.counts.add("hit_tokens", self._chunks(answer.tokens) * self._chunk_tokens)
        if self._policy_runner is not None:
            self._policy_runner.found(answer.tiers)
        for tier, chunks in Counter(answer.tiers[: self._chunks(answer.tokens)]).items():
            if tier != Tier.NONE:  # as of what is only published
                self.counts.add("tier_hit_tokens", chunks * self._chunk_tokens, reason=Tier(tier).label)
        if answer.reason != "complete":
            self.counts.add("lookup_failures", reason=answer.reason)
            unnamed = answer.reason == "unnamed"
            what = "a request is served without the cache" if unnamed else "lookup failed, prompts are computed"
            self._failures.warn(what, answer.reason, answer.detail)

    # ------------------------------------------------------------------ loads

    def allocated(self, request: Any, tables: Sequence[list[int]], external_tokens: int) -> None:
        """Blocks exist for a request's tokens; load ``external_tokens`` of them, if any, into each group's table."""
        if self.waiting is not None:
            self.waiting.begun(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._lookup is None:
            return
        decision, tracked.decision = tracked.decision, None
        if (
            self._policy_runner is not None
            and decision is not None
            and bool(external_tokens) == (decision.way != "compute")
        ):
            in_step = external_tokens > 0 and not self.waits(request)
            self._policy_runner.begin(request.request_id, decision, request.num_tokens, in_step=in_step)
        if not external_tokens:
            return
        if request.num_preemptions:
            self.counts.add("restored_tokens", external_tokens)
        end_tokens = tracked.local_tokens + external_tokens
        self._lookup.begin_load(request.request_id, self._chunks(end_tokens))
        operation = LoadOperation(
            request.request_id,
            tracked.offered_epoch,
            tracked.offered_cut,
            {},
            layerwise=tracked.layerwise,
            in_step=not (tracked.layerwise or self.waits(request)),
            arrived=self._arrived(tracked),
        )
        self.ways.begin(request, "" if tracked.layerwise else tracked.not_by_layers)
        try:
            operation.groups = group_loads(tracked, self._groups, tables, end_tokens, self._chunk_tokens)
        except ValueError as error:  # a rule of vLLM's that is not known here: the load falls short, nothing is read
            self._failures.warn("a prompt cannot be loaded", "unknown_rule", str(error))
        tracked.first_chunk = tracked.local_tokens // self._chunk_tokens
        tracked.load_chunks = self._chunks(end_tokens) - tracked.first_chunk
        self._new_loads[request.request_id] = operation
        if self.waits(request):
            self._loading[request.request_id] = operation
        else:
            (group,) = self._groups
            self._unconfirmed[request.request_id] = tracked, list(tables[group.index])

    def worker_output(self, finished: set[str] | None, report: WorkerReport) -> None:
        """Take what the workers report."""
        self._timing.loaded(report)
        if self._policy_runner is not None:
            self._policy_runner.loaded(report.seconds, finished or (), report.loaded)
        for request_id, chunks in report.loaded.items():
            if (waited := self._unconfirmed.pop(request_id, None)) is not None:
                self._evict(*waited, chunks)
            if (tracked := self._tracked.get(request_id)) is not None and chunks != tracked.load_chunks:
                self._fell_short(tracked, chunks)
        for request_id in finished or ():
            self._loading.pop(request_id, None)
        for request_id, ranks in report.saved.items():
            if self._preemption is not None:
                self._preemption.settled(request_id, ranks)
        self.epochs.settled(report.settled)
        if self.epochs.current in report.outlived:
            self._logger.warning(WEIGHTS_CHANGED)
            self._begin_epoch()

    def _evict(self, tracked: Tracked, table: list[int], chunks: int) -> None:
        """Take out of vLLM's own prefix cache what a step has computed behind a load that brought so many chunks.

        vLLM has the request compute it again, but where that is aborted or preempted before, others would find garbage.
        """
        if chunks != tracked.load_chunks:
            (group,) = self._groups
            valid = max(tracked.local_tokens, (tracked.first_chunk + chunks) * self._chunk_tokens)
            self.epochs.evict(table[valid // group.block_tokens :])

    def _fell_short(self, tracked: Tracked, chunks: int) -> None:
        """A load has ended with so many chunks, and not all: what it lacks is computed, and then stored again."""
        assert self._rules is not None
        load = self._loading.get(tracked.request.request_id)
        if load is None or load.arrived is None or load.arrived.ended != "cold_late":  # else it is stored, and far
            tracked.stored_chunks = min(tracked.stored_chunks, tracked.first_chunk + chunks)
            tracked.tail_stored = False
        if self._preemption is not None:
            self._preemption.distrust()
        if load is None or load.arrived is None or self._rules.one:
            tracked.refused = True
        else:
            # Of several groups vLLM takes all or nothing. What was published, or is cold, and did not come is not to
            # cost what is there: that is offered, this once, and nothing is waited for.
            tracked.disaggregation = replace(tracked.disaggregation, waits=0.0, cold=False)
            self._look_up(tracked, tracked.request.prompt_token_ids)
        self._set_boundary(tracked)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended or was aborted, perhaps while it was being loaded; return what its proxy is told."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        if self.waiting is not None:
            self.waiting.ended(request_id)
        if self._preemption is not None:
            self._preemption.forget(request_id)
        if self._policy_runner is not None:
            self._policy_runner.forget(request_id)
        if request_id in self._loading:
            # vLLM keeps the blocks until the workers report the load as ended, which they do once it is quiet.
            self._cancels.append(request_id)
        if (tracked := self._tracked.pop(request_id, None)) is None:
            return None  # it never had a name, or lost it
        self._boundary.pop(request_id, None)
        if self._lookup is not None:
            if tracked.foreseen and (answer := self._lookup.poll(request_id)) is not None:
                self._count_lookup(tracked, answer)
            count_reach(self.slower, tracked.disaggregation, self._lookup.reach)
            self._lookup.forget(request_id)
        tokens = tracked.tail_end if tracked.tail_stored else tracked.stored_chunks * self._chunk_tokens
        return reply_of(request, self._config, 0 if tracked.mixed else tokens)

    # ------------------------------------------------------------------ each step

    def step(self, output: Any) -> ShadowServeMetadata:
        """Return what the workers have to do in this step."""
        if self.epochs.look(self._logger):
            self._begin_epoch()
        metadata = ShadowServeMetadata(self.epochs.current, doubts=self.epochs.doubts, agreed=self.epochs.agreed)
        if self.waiting is not None:
            for request_id in output.preempted_req_ids or ():
                self.waiting.sent_back(request_id)
        if self._loading:
            metadata.arrived = dict(self._more())
            metadata.idle = not output.total_num_scheduled_tokens and self._requests.keys() <= self._loading.keys()
        if self._lookup is not None:
            begin = len(self._new_loads.keys() & self._loading.keys()) if self._new_loads else 0
            self._timing.step(output, waits=bool(self._unconfirmed), loads=len(self._loading), begin=begin)
        if self._new_loads:
            metadata.loads = list(self._new_loads.values())
            metadata.window_s = self._timing.layer_seconds()
            self._new_loads = {}
        if self._cancels:
            metadata.cancels, self._cancels = self._cancels, []
        if self._policy_runner is not None:
            self._policy_runner.step(output)
        if self._preemption is not None and (lost := self._preemption.follow(output)):
            metadata.saves = dict(self._saves(self._preemption, lost))
        if not self._store or self._lookup is None or self._unconfirmed:
            return metadata  # what is complete now is stored after a later step
        if self._states:
            for request_id, offered in output.kv_connector_block_state.boundary_state_offloads.items():
                if (tracked := self._tracked.get(request_id)) is not None and not tracked.mixed:
                    metadata.stores += self._stores.states(
                        tracked.request, self._groups, offered, again=tracked.refused
                    )
        scheduled, boundary = output.num_scheduled_tokens, self._boundary
        for new in output.scheduled_new_reqs:
            request_id = new.req_id
            if new.num_computed_tokens + scheduled[request_id] >= boundary.get(request_id, _NEVER):
                self._complete(output, metadata, request_id, new.num_computed_tokens + scheduled[request_id])
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # The common case ends here, once for each running request and step.
            if computed + scheduled[request_id] >= boundary.get(request_id, _NEVER):
                self._complete(output, metadata, request_id, computed + scheduled[request_id])
        return metadata

    def _saves(self, preemption: Preemption, lost: Sequence[Held]) -> Iterator[tuple[str, list[StoreOperation]]]:
        """Have what requests hold saved that this step preempts, before anybody else writes there."""
        for held in lost:
            tracked = self._tracked.get(held.request_id)
            if tracked is None or tracked.mixed or self._unconfirmed:
                continue
            request, disaggregation = tracked.request, tracked.disaggregation
            self.counts.add("preempted_tokens", min(held.tokens, request.num_tokens))
            if (disaggregation.publishes or disaggregation.waits) and request.num_tokens == request.num_prompt_tokens:
                continue  # its prompt has a tail of its own, and is looked up with that
            if saves := preemption.save(
                request, held, again=tracked.refused, tokens_max=disaggregation.store_tokens_max
            ):
                saved = preemption.of(request)
                assert saved is not None
                if not saved.apart:
                    tracked.stored_chunks = max(tracked.stored_chunks, saved.tokens // self._chunk_tokens)
                self.counts.add("saved_tokens", saved.tokens)
                if self.waiting is not None and self._lookup is not None:
                    self.waiting.wants(held.request_id, self._lookup.chains_of(saved.held))
                yield held.request_id, saves

    def _saved(self, request: Any) -> Saved | None:
        return self._preemption.of(request) if self._preemption is not None else None

    def stepped(self) -> None:
        """The oldest step that is under way has ended, and its output has been taken."""
        learnt = self._timing.stepped()
        if self._policy_runner is not None:
            self._policy_runner.stepped(learnt=learnt)

    def _complete(self, output: Any, metadata: ShadowServeMetadata, request_id: str, computed: int) -> None:
        """Have the chunks stored that a request completes in this step."""
        assert self._lookup is not None and self._rules is not None
        tracked = self._tracked[request_id]
        answer, chunk_keys = self._lookup.poll(request_id), self._lookup.chunk_keys(request_id)
        if answer is None or chunk_keys is None:
            if answer is not None and answer.reason == "unnamed":
                self._boundary.pop(request_id, None)
            return  # still being hashed, or asked for; ask again with the next step
        # Tokens that are drafts, or still being sampled, have no identity yet.
        computed = min(computed, tracked.request.num_tokens)
        if (most := tracked.disaggregation.store_tokens_max) is not None:
            computed = min(computed, most)
        end = computed // self._chunk_tokens
        present = self._lookup.present(request_id)
        known = max(tracked.stored_chunks, 0 if present is None or tracked.refused else self._stored(present))
        tracked.stored_chunks = max(known, end)
        tables = output.kv_connector_block_state.get_block_ids(request_id)
        tail = not tracked.tail_stored and 0 < tracked.tail_end <= computed
        if tail and tables is not None and not self._rules.keeps_tail(tables, tracked.tail_end):
            tail, tracked.tail_end = False, 0
            count_tail(self.slower, tracked.disaggregation, LET_GO, self._chunk_tokens)
        tracked.tail_stored |= tail
        self._set_boundary(tracked)
        if (end <= known and not tail) or tables is None:
            return
        self._stores.extend(chunk_keys, tracked.request, end)
        published = tracked.disaggregation.publishes > 0
        # What is kept of every chunk is stored last: where others see that, they can have the rest.
        ordered = sorted(enumerate(self._groups), key=lambda placed: placed[1].kind == "full")
        for place, group in ordered:
            if group.kind != "state":
                held = None if present is None else present[place]
                metadata.stores.extend(
                    self._stores.chunks(
                        request_id,
                        group,
                        tables[group.index],
                        chunk_keys,
                        (known, end),
                        held,
                        again=tracked.refused,
                        published=published,
                    )
                )
        for place, group in ordered if tail else ():
            (chunk_key,) = self._lookup.tail(request_id)
            held, end_tokens = tables[group.index], tracked.tail_end
            metadata.stores.append(
                self._stores.tail(
                    request_id, group, held, chunk_keys, chunk_key, end_tokens, place=place, published=published
                )
            )
        if tracked.disaggregation.publishes:
            self._lookup.computed(
                request_id, [*chunk_keys[known:end], *(self._lookup.tail(request_id) if tail else ())]
            )

    def _stored(self, present: Sequence[Flags]) -> int:
        """Return how many leading chunks lack nothing that is kept of every chunk: states are kept of some."""
        groups = zip(self._groups, present, strict=True)
        return min((leading(flags) for group, flags in groups if group.kind != "state"), default=0)

    # ------------------------------------------------------------------ housekeeping

    def reset(self) -> bool:
        """Forget everything stored so far: nothing of it is served to this engine's requests again.

        Not to those that wait, either, nor to those that load: what they load is given up. What the engine computed
        before, for requests that run on or in its own prefix cache, is stored under no name from now on.
        """
        self._begin_epoch()
        return True

    def _begin_epoch(self) -> None:
        self.epochs.begin()
        if self._preemption is not None:
            self._preemption.clear()
        for request_id, tracked in list(self._tracked.items()):
            request = tracked.request
            loading = request_id in self._loading or request_id in self._new_loads
            holds = tracked.local_tokens if loading else request.num_computed_tokens
            tracked.mixed = holds > 0
            tracked.stored_chunks = 0
            self._set_boundary(tracked)
            if self._lookup is None:
                continue
            if not self._name(tracked):
                del self._tracked[request_id], self._boundary[request_id]
                self._lookup.forget(request_id)
                continue
            self._look_up(tracked, list(request.all_token_ids) if request.num_preemptions else request.prompt_token_ids)

    def _name(self, tracked: Tracked) -> bool:
        """Give a request its name in this epoch; return whether it has one."""
        try:
            tracked.extra = self._inputs.extra(tracked.request, self.epochs.current)
        except Exception as error:  # an input of a kind that is not known here must not fail the request
            self._failures.warn("a request is served without the cache", "unnamed", str(error) or repr(error))
            return False
        return True

    def _set_boundary(self, tracked: Tracked) -> None:
        """Note how many computed tokens make a request's next chunk complete."""
        end = (tracked.stored_chunks + 1) * self._chunk_tokens
        if tracked.tail_end and not tracked.tail_stored:
            end = min(end, tracked.tail_end)
        wanted = self._store and not tracked.mixed and tracked.disaggregation.may_store(end)
        self._boundary[tracked.request.request_id] = end if wanted else _NEVER

    def close(self) -> None:
        """End lookups, and keep what was learnt."""
        if self.waiting is not None:
            self.waiting.close()
        self._timing.close()
        if self._lookup is not None:
            self._lookup.close()
        for client in self._clients:
            client.close()
