"""What the policy of :mod:`host_control.decision` is told of vLLM's loads, and what becomes of its decisions."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.decision import Decision, FetchOrCompute, Hit
from host_control.slack.table import ComputeTable
from host_control.vllm.metrics import Counts
from host_control.vllm.timing import scheduled_requests

__all__ = ["Deciding"]

_STEPS_TO_STORE: Final = 2

_STEPS_MAX: Final = 64
"""More than any engine has under way. Whoever does not say that steps have ended has none measured."""

Tell = Callable[[Decision, int, float], None]
"""Takes a decision, the prompt's tokens, and the seconds to its first token."""


class Deciding:
    """Decides for vLLM's scheduler, and counts. On the engine's thread alone.

    Args:
        config: of the host.
        table: of how long the engine computes.
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
        *,
        chunk_tokens: int,
        step_tokens: int,
        counts: Counts,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = FetchOrCompute(
            table,
            chunk_tokens=chunk_tokens,
            step_tokens=step_tokens,
            load_tokens_min=config.load_tokens_min,
            fetch_timeout=config.fetch_timeout,
        )
        self._counts = counts
        self._tell = tell
        self._clock = clock
        # Of each step under way those whose first token it brings: what was decided, tokens, and since when they wait.
        self._firsts: deque[list[tuple[Decision, int, float]]] = deque(maxlen=_STEPS_MAX)
        self._waiting: dict[str, tuple[Decision, int, float]] = {}  # for the step of their first token
        self._loads: dict[str, Decision] = {}
        self._in_steps: set[str] = set()  # those loads that a step waits for itself
        self._load_seconds: dict[str, float] = {}  # of their ranks that have reported
        self._chunk_bytes = 0.0  # as was last said

    def decide(self, hit: Hit) -> Decision:
        """Return what is best for a prompt now; where nobody has said how large a chunk is, it is as those before."""
        self._chunk_bytes = hit.chunk_bytes or self._chunk_bytes
        return self._policy.decide(replace(hit, chunk_bytes=self._chunk_bytes), self._clock())

    def foresee(self, hit: Hit, output_tokens: int, *, stores: bool) -> Decision | None:
        """Return the decision to compute a prompt, if that is sooner though this is the most that a lookup can find.

        Args:
            hit: of unknown size.
            output_tokens: of the request, at most.
            stores: whether what is computed is stored. What is stored already is known by the request's second step,
                which may decode, so one that has a single one waits for its lookup.
        """
        if hit.end_tokens <= hit.local_tokens or (stores and output_tokens < _STEPS_TO_STORE):
            return None
        decision = self.decide(hit)
        return decision if decision.kind == "compute" else None

    def begin(self, request_id: str, decision: Decision, tokens: int, *, in_step: bool = False) -> None:
        """A request of so many tokens has blocks, and goes on as was decided; its load goes on in its own step."""
        now = self._clock()
        self._policy.begin(request_id, decision, now)
        self._waiting[request_id] = decision, tokens, now
        if decision.way != "compute":
            self._loads[request_id] = decision
            if in_step:
                self._in_steps.add(request_id)
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
            if (decision := self._loads.pop(request_id, None)) is not None:
                self._policy.ended(request_id, self._clock())
                if taken:
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
