"""What the policy of :mod:`host_control.fetch_policy` is told of vLLM's loads, and what becomes of its decisions.

Where ``fetch_or_recompute`` is off it decides for prompts alone of which something is cold: whether to wait for that.
All others are fetched, and tell how long that takes.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.fetch_policy import Decision, FetchOrRecompute, Hit
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from host_control.lookup import LookupAnswer
from host_control.vllm.groups import Groups
from host_control.vllm.metrics import Counts
from host_control.vllm.timing import scheduled_requests
from host_control.vllm.tracked import Tracked
from shadowserve.tier import Tier

__all__ = ["PolicyRunner"]

_STEPS_TO_STORE: Final = 2

_STEPS_MAX: Final = 64
"""More than any engine has under way. Whoever does not say that steps have ended has none measured."""

Tell = Callable[[Decision, int, float], None]
"""Takes a decision, the prompt's tokens, and the seconds to its first token."""


class PolicyRunner:
    """Decides for vLLM's scheduler, and counts. On the engine's thread alone.

    Args:
        config: of the host.
        table: of how long the engine computes.
        loads: of how long loads take.
        rate: returns the bytes a second that loads are delivered at now; 0: no bound.
        chunk_tokens: tokens in a chunk.
        step_tokens: that a step computes at most.
        counts: of the connector.
        tell: is told what came of each decision.
        clock: seconds, monotonic.
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
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = FetchOrRecompute(
            table,
            loads,
            chunk_tokens=chunk_tokens,
            step_tokens=step_tokens,
            load_tokens_min=config.load_tokens_min,
            fetch_timeout_s=config.fetch_timeout_s,
        )
        self._always = config.fetch_or_recompute
        self._rate = rate
        self._chunk_tokens = chunk_tokens
        self._layers = self._layerwise_chunks = self._delivered_chunk_bytes = 0
        self._counts = counts
        self._tell = tell
        self._clock = clock
        # Of each step under way those whose first token it brings: what was decided, tokens, and since when they wait.
        self._firsts: deque[list[tuple[Decision, int, float]]] = deque(maxlen=_STEPS_MAX)
        self._waiting: dict[str, tuple[Decision, int, float]] = {}  # for the step of their first token
        self._loads: dict[str, tuple[Decision, float]] = {}  # and since when
        self._in_steps: set[str] = set()  # those loads that a step waits for itself
        self._load_seconds: dict[str, float] = {}  # of their ranks that have reported
        self._chunk_bytes = 0.0  # as was last said
        self._nearest = Tier.STORAGE  # that any chunk was in so far

    def start(self, layers: int, layerwise_chunks: int, chunk_bytes: int) -> None:
        """Take what the workers say.

        Args:
            layers: that may be loaded one by one; 0 where none may.
            layerwise_chunks: that a load may have which goes layer by layer.
            chunk_bytes: that a rank is delivered for each chunk.
        """
        self._layers, self._layerwise_chunks, self._delivered_chunk_bytes = layers, layerwise_chunks, chunk_bytes

    def usable(self, tracked: Tracked, answer: LookupAnswer, rules: Groups, usable: int, *, layerwise: bool) -> int:
        """Return how many tokens are to be loaded of those that can, by prediction; and note in which way.

        Args:
            tracked: the request.
            answer: to its lookup.
            rules: of the engine's groups.
            usable: tokens behind those that the engine has itself.
            layerwise: whether it may go layer by layer.
        """
        local, end = tracked.local_tokens, tracked.local_tokens + usable
        hit = replace(
            self._hit(tracked, end, layerwise=layerwise),
            chunk_bytes=answer.chunk_bytes,
            tiers=answer.tiers[local // self._chunk_tokens : -(-end // self._chunk_tokens)],
            cold_seconds=answer.cold_seconds,
        )
        decision = tracked.decision = self.decide(hit)
        if decision.kind == "configured":
            return usable
        if decision.way == "compute":
            return 0
        tracked.layerwise = decision.way == "layers"
        if decision.end_tokens == end or not answer.present:
            return usable
        return rules.hit_tokens(answer.present, decision.end_tokens + 1) - local

    def computes_anyway(self, tracked: Tracked, *, layerwise: Callable[[], bool], stores: bool) -> bool:
        """Return whether a prompt is to be computed though all of it were stored: then no lookup is waited for.

        Args:
            tracked: the request.
            layerwise: whether it may go layer by layer.
            stores: whether what is computed is stored. What is stored already is known by the request's second step,
                which may decode, so one that has a single one waits for its lookup.
        """
        disaggregation = tracked.disaggregation
        if not self._always or tracked.foreseen or disaggregation.waits or disaggregation.publishes:
            return False
        tracked.foreseen = True
        tokens = tracked.request.num_tokens
        end = min(tokens // self._chunk_tokens * self._chunk_tokens, tokens - 1)
        hit = self._hit(tracked, end, layerwise=layerwise())
        hit = replace(hit, tiers=bytes([self._nearest]) * (end // self._chunk_tokens + 1))
        if hit.end_tokens <= hit.local_tokens or (stores and tracked.request.max_tokens < _STEPS_TO_STORE):
            return False
        decision = self.decide(hit)
        if decision.kind == "compute":
            tracked.decision = decision
        return decision.kind == "compute"

    def found(self, tiers: bytes) -> None:
        """Take note of where the chunks were that a lookup has found."""
        self._nearest = Tier(min(filter(None, (*tiers, self._nearest))))

    def _hit(self, tracked: Tracked, end: int, *, layerwise: bool) -> Hit:
        rate = self._rate()
        return Hit(
            tokens=tracked.request.num_tokens,
            local_tokens=tracked.local_tokens,
            end_tokens=end,
            delivery_seconds=self._delivered_chunk_bytes / rate if rate else 0.0,
            layers=self._layers if layerwise else 0,
            layerwise_chunks=self._layerwise_chunks,
        )

    def decide(self, hit: Hit) -> Decision:
        """Return what is best for a prompt now; where nobody has said how large a chunk is, it is as those before."""
        self._chunk_bytes = hit.chunk_bytes or self._chunk_bytes
        hit = replace(hit, chunk_bytes=self._chunk_bytes)
        decide = self._policy.decide if self._always or Tier.COLD in hit.tiers else self._policy.configured
        return decide(hit, self._clock())

    def begin(self, request_id: str, decision: Decision, tokens: int, *, in_step: bool = False) -> None:
        """A request of so many tokens has blocks, and goes on as was decided; its load goes on in its own step."""
        now = self._clock()
        self._policy.begin(request_id, decision, now)
        if decision.way != "compute":
            self._loads[request_id] = decision, now
            if in_step:
                self._in_steps.add(request_id)
        if decision.kind == "configured":
            return
        self._waiting[request_id] = decision, tokens, now
        self._counts.add("decisions", reason=decision.kind)
        self._counts.add("cold_seconds", decision.cold_seconds, reason=decision.kind)

    def forget(self, request_id: str) -> None:
        """A request has ended, perhaps with its first token; a load of it may still be under way."""
        self._waiting.pop(request_id, None)

    def loaded(self, seconds: Mapping[str, float], finished: Collection[str], in_steps: Collection[str]) -> None:
        """Take what the workers say: how long loads took, and which have ended, asynchronous ones or in their steps."""
        for request_id, taken in seconds.items():
            if request_id in self._loads:
                self._load_seconds[request_id] = max(taken, self._load_seconds.get(request_id, 0.0))
        for request_id in {*finished, *self._in_steps.intersection(in_steps)}:
            self._in_steps.discard(request_id)
            taken = self._load_seconds.pop(request_id, 0.0)
            if (load := self._loads.pop(request_id, None)) is not None:
                (decision, since), now = load, self._clock()
                self._policy.ended(request_id, now)
                if taken:
                    # While it waits for what is cold, others have their turn: it begins before it has its own.
                    if decision.load_cold_seconds:
                        taken = max(taken, now - since - decision.queued_seconds)
                    self._policy.fetched(decision, taken)

    # ------------------------------------------------------------------ each step

    def step(self, output: Any) -> None:
        """A step is scheduled."""
        first: list[tuple[Decision, int, float]] = []
        self._firsts.append(first)
        for request_id, computed, new in scheduled_requests(output) if self._waiting else ():
            if (waiting := self._waiting.get(request_id)) is not None and computed + new >= waiting[1]:
                first.append(self._waiting.pop(request_id))

    def stepped(self, *, learnt: bool) -> None:
        """The oldest step that is under way has ended; ``learnt``: it has shown how long prompts take."""
        if learnt:
            self._policy.computed()
        now = self._clock()
        for decision, tokens, since in self._firsts.popleft() if self._firsts else ():
            if decision.seconds:
                self._counts.add("predicted_seconds", decision.seconds, reason=decision.kind)
                self._counts.add("first_token_seconds", now - since, reason=decision.kind)
            self._tell(decision, tokens, now - since)
