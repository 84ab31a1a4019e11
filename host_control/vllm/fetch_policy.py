"""Runs the fetch-or-recompute policy of :mod:`host_control.fetch_policy` for vLLM's loads.

Where ``fetch_or_recompute`` is off, the policy decides only for prompts with cold chunks: whether to wait for these.
All other prompts are fetched, and their times are learned from.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from vllm.v1.request import RequestStatus

from host_control.config import HostConfig
from host_control.fetch_policy import Decided, Decision, FetchOrRecompute, Hit
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from host_control.lookup import LookupAnswer
from host_control.streams import OTHER_REQUESTS, Streams
from host_control.transfer import State
from host_control.vllm.groups import Groups
from host_control.vllm.loads import TIME_UNKNOWN, WHOLE_IS_FASTER
from host_control.vllm.metrics import Counts
from host_control.vllm.requests import Load, RequestState
from host_control.vllm.timing import scheduled_requests
from shadowserve.tier import Tier

_STEPS_TO_STORE: Final = 2
"""The lookup's answer is used from a request's second step on."""

_STEPS_MAX: Final = 64
"""More steps than any engine overlaps; the measurements of an engine that never reports a step's end are dropped."""

Report = Callable[[Decided], None]


class PolicyRunner:
    """Decides for vLLM's scheduler, and counts. Used on the engine's thread only.

    Args:
        rate: Returns the bytes a second that loads are delivered at now; 0: unlimited.
    """

    def __init__(
        self,
        config: HostConfig,
        table: ComputeTable,
        loads: LoadTable,
        *,
        rate: Callable[[], int] = lambda: 0,
        chunk_tokens: int,
        step_tokens: int,
        counts: Counts,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = FetchOrRecompute(
            table,
            loads,
            chunk_tokens=chunk_tokens,
            step_tokens=step_tokens,
            load_tokens_min=config.load_tokens_min,
            fetch_timeout_s=config.fetch_timeout_s,
            layers_first=config.layer_order is True,
        )
        self._streams = Streams(table, config.interference_budget, step_tokens)
        self._always = config.fetch_or_recompute
        self._rate = rate
        self._chunk_tokens = chunk_tokens
        self._layers = self._delivered_chunk_bytes = 0
        self._counts = counts
        self._report = report
        self._clock = clock
        self._waiting: dict[str, Decided] = {}
        # The same requests, once a step computes their first token: a list for each step in flight.
        self._first_tokens: deque[list[Decided]] = deque(maxlen=_STEPS_MAX)
        self._chunk_bytes = 0.0  # of the last lookup that told it
        self._nearest = Tier.STORAGE  # nearest tier of any chunk so far

    def start(self, layers: int, chunk_bytes: int) -> None:
        """Set what the workers report.

        Args:
            layers: Layers that can be loaded one by one; 0 where none can.
        """
        self._layers, self._delivered_chunk_bytes = layers, chunk_bytes

    # ------------------------------------------------------------------ decisions

    def usable(self, state: RequestState, answer: LookupAnswer, groups: Groups, usable: int) -> int:
        """Decide for a hit; return how many tokens to load, and set the decision and the way of the request's load.

        Args:
            usable: Tokens behind the engine's own prefix that can be loaded.
        """
        load, local = state.load, state.load.local_tokens
        end = local + usable
        hit = self._hit_of(state, answer, usable, layerwise=not load.not_layerwise)
        # A prompt that another engine computes for this one is loaded, whatever the policy predicts.
        waits = state.disaggregation.waits
        decision = load.decision = self._policy.configured(hit, self._clock()) if waits else self.decide(hit)
        if decision.kind == "configured" and not hit.layers:
            return usable
        if decision.way == "compute":
            return 0
        load.layerwise = decision.way == "layers"
        if not (load.layerwise or load.not_layerwise):
            load.not_layerwise = WHOLE_IS_FASTER if decision.seconds else TIME_UNKNOWN
        if decision.end_tokens == end or not answer.present:
            return usable
        return groups.hit_tokens(answer.present, decision.end_tokens + 1) - local

    def why_not_stream(
        self,
        state: RequestState,
        answer: LookupAnswer | None,
        usable: int,
        requests: Mapping[str, RequestState],
        loads: Mapping[str, Load],
    ) -> str:
        """Return why a hit's load does not go layer by layer beside other requests and loads; empty if it does."""
        begin = {name for name, load in loads.items() if load.state is State.ALLOCATED}
        streams = {name for name in begin if loads[name].layerwise}
        loading = begin != streams or any(not load.in_step for load in loads.values())
        running = any(
            other.request.status == RequestStatus.RUNNING for name, other in requests.items() if name not in streams
        )
        if not (streams or loading or running):
            return ""
        if answer is None:
            return OTHER_REQUESTS
        hit = self._hit_of(state, answer, usable, layerwise=True)
        queued_s = max(self._policy.waiting(self._clock()) - self._streams.queued_s, 0.0)
        stream = self._policy.stream(hit)
        return self._streams.why_not(stream, hit.layers, queued_s=queued_s, busy=loading or running)

    @property
    def step_is_closed(self) -> bool:
        """A load waits for the next step, and requests behind it would overtake it."""
        return self._streams.is_closed

    def computes_anyway(self, state: RequestState, *, layerwise: Callable[[], bool], stores: bool) -> bool:
        """Tell if computing a prompt is best even if all of it is stored; then the lookup is not waited for.

        Args:
            stores: This engine stores what it computes. Its second step needs the lookup's answer for that, so a
                request of a single step waits for the lookup.
        """
        disaggregation = state.disaggregation
        if not self._always or state.foreseen or disaggregation.waits or disaggregation.publishes:
            return False
        state.foreseen = True
        tokens = state.request.num_tokens
        end = min(tokens // self._chunk_tokens * self._chunk_tokens, tokens - 1)
        hit = self._hit(state, end, layerwise=layerwise())
        hit = replace(hit, tiers=bytes([self._nearest]) * (end // self._chunk_tokens + 1))
        if hit.end_tokens <= hit.local_tokens or (stores and state.request.max_tokens < _STEPS_TO_STORE):
            return False
        decision = self.decide(hit)
        if decision.kind == "compute":
            state.load.decision = decision
        return decision.kind == "compute"

    def arrived(self, state: RequestState) -> None:
        """Record that a request has arrived; it may have waited for a step."""
        state.arrived_s = self._clock() - max(time.time() - float(state.request.arrival_time), 0.0)
        self._policy.arrived(state.arrived_s)

    def note_tiers(self, tiers: bytes) -> None:
        self._nearest = Tier(min(filter(None, (*tiers, self._nearest))))

    def _hit_of(self, state: RequestState, answer: LookupAnswer, usable: int, *, layerwise: bool) -> Hit:
        local = state.load.local_tokens
        end = local + usable
        return replace(
            self._hit(state, end, layerwise=layerwise),
            chunk_bytes=answer.chunk_bytes or self._chunk_bytes,
            tiers=answer.tiers[local // self._chunk_tokens : -(-end // self._chunk_tokens)],
            cold_seconds=answer.cold_seconds,
        )

    def _hit(self, state: RequestState, end: int, *, layerwise: bool) -> Hit:
        rate = self._rate()
        return Hit(
            tokens=state.request.num_tokens,
            local_tokens=state.load.local_tokens,
            end_tokens=end,
            delivery_seconds=self._delivered_chunk_bytes / rate if rate else 0.0,
            layers=self._layers if layerwise else 0,
        )

    def decide(self, hit: Hit) -> Decision:
        """Return the best decision for a hit; a hit of unknown chunk size counts as large as the last one."""
        self._chunk_bytes = hit.chunk_bytes or self._chunk_bytes
        hit = replace(hit, chunk_bytes=self._chunk_bytes)
        decide = self._policy.decide if self._always or Tier.COLD in hit.tiers else self._policy.configured
        return decide(hit, self._clock())

    # ------------------------------------------------------------------ results of decisions

    def follow(self, state: RequestState, decision: Decision) -> None:
        """Record that a request has blocks and continues as decided."""
        request, now = state.request, self._clock()
        if decision.way == "layers":
            self._streams.join(self._policy.stream_of(decision, request.num_tokens))
        if state.disaggregation.waits:
            return  # its time shows how long the other engine took
        self._policy.begin(request.request_id, decision, now, state.arrived_s or now)
        if decision.way != "compute":
            state.load.decision, state.load.began_s = decision, now
        if decision.kind == "configured":
            if not self._layers:
                return
            decision = replace(decision, kind=decision.way if decision.predicted else decision.kind)
        self._waiting[request.request_id] = Decided(
            request_id=request.request_id,
            decision=decision,
            tokens=request.num_tokens,
            since=now,
            not_layerwise=state.load.not_layerwise if self._layers and decision.way == "fetch" else "",
        )
        self._counts.add("decisions", reason=decision.kind)
        self._counts.add("cold_seconds", decision.cold_seconds, reason=decision.kind)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def load_ended(self, load: Load) -> None:
        """Learn from a load that has ended."""
        first = self._first_tokens[0] if self._first_tokens else []
        for waiting in (*self._waiting.values(), *first):
            if waiting.request_id == load.request_id:
                waiting.layer_waits = load.layer_waits
                if load.in_step and load.state is State.SHORT and waiting in first:  # vLLM takes this step back
                    first.remove(waiting)
                    self._waiting[load.request_id] = waiting
        if (decision := load.decision) is None:
            return
        now, seconds = self._clock(), load.seconds
        self._policy.ended(load.request_id, now)
        if seconds:
            # While a load waits for cold chunks other loads run, so its own time begins with the wait.
            if decision.load_cold_seconds:
                seconds = max(seconds, now - load.began_s - decision.queued_seconds)
            self._policy.fetched(decision, seconds)

    def step(self, output: Any) -> None:
        """Record which requests a scheduled step brings their first token."""
        if self._streams.joined:
            self._streams.clear()
        first: list[Decided] = []
        self._first_tokens.append(first)
        for request_id, computed, new in scheduled_requests(output) if self._waiting else ():
            if (waiting := self._waiting.get(request_id)) is not None and computed + new >= waiting.tokens:
                first.append(self._waiting.pop(request_id))

    def stepped(self, *, learnt: bool) -> None:
        """Report the results of the oldest step, which has ended; ``learnt``: it measured how long prompts take."""
        if learnt:
            self._policy.computed()
        now = self._clock()
        for result in self._first_tokens.popleft() if self._first_tokens else ():
            decision, result.seconds = result.decision, now - result.since
            if decision.seconds:
                self._counts.add("predicted_seconds", decision.seconds, reason=decision.kind)
                self._counts.add("first_token_seconds", result.seconds, reason=decision.kind)
                self._policy.came(decision, result.seconds)
            self._report(result)
