"""What the policy of :mod:`host_control.decision` is told of vLLM, and what becomes of its decisions.

A step's time is that from the moment at which it could begin (it is scheduled, and the one before it is over) to the
moment at which the scheduler has its output: what the first token of a prompt waits for. Steps come out in the order
in which they went in, also where vLLM schedules the next one while one runs.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.decision import Decision, FetchOrCompute, Hit, attention_pairs
from host_control.vllm.metrics import Counts

__all__ = ["Deciding"]

_TOKENS_MIN: Final = 32
"""Steps that compute fewer tokens than this beside one for each request only decode: they tell little of prompts."""

_STEPS_TO_STORE: Final = 2

_STEPS_MAX: Final = 64
"""More than any engine has under way. Whoever does not say that steps have ended has none measured."""

Tell = Callable[[Decision, int, float], None]
"""Takes a decision, the prompt's tokens, and the seconds to its first token."""


@dataclass
class _Step:
    """A step that is under way.

    Attributes:
        begun: when it was scheduled.
        tokens, pairs: that it computes; nothing where its time tells nothing.
        first: those whose first token it brings: what was decided, the prompt's tokens, and since when they wait.
    """

    begun: float
    tokens: int = 0
    pairs: float = 0.0
    first: list[tuple[Decision, int, float]] = field(default_factory=list)


class Deciding:
    """Decides for vLLM's scheduler, measures, and counts. On the engine's thread alone.

    Args:
        config: of the host.
        chunk_tokens: tokens in a chunk.
        step_tokens: that a step computes at most.
        counts: of the connector.
        tell: is told what came of each decision.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        chunk_tokens: int,
        step_tokens: int,
        counts: Counts,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = FetchOrCompute(
            chunk_tokens=chunk_tokens,
            step_tokens=step_tokens,
            load_tokens_min=config.load_tokens_min,
            fetch_timeout=config.fetch_timeout,
        )
        self._counts = counts
        self._tell = tell
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._last_end = 0.0
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

    def step(self, output: Any, *, loads: bool) -> None:
        """A step is scheduled; ``loads``: it waits for some itself, so that its time tells nothing of computing."""
        step = _Step(self._clock())
        self._steps.append(step)
        requests, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        learns = not loads and tokens - requests >= _TOKENS_MIN
        if not learns and not self._waiting:
            return
        for request_id, computed, new in _scheduled(output):
            if learns:
                step.tokens += new
                step.pairs += attention_pairs(computed, new)
            if (waiting := self._waiting.get(request_id)) is not None and computed + new >= waiting[1]:
                step.first.append(self._waiting.pop(request_id))

    def stepped(self) -> None:
        """The oldest step that is under way has ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        seconds = now - max(step.begun, self._last_end)
        self._last_end = now
        if step.tokens:
            self._policy.computed(step.tokens, step.pairs, seconds)
        for decision, tokens, since in step.first:
            if decision.seconds:
                self._counts.add("predicted_seconds", decision.seconds, reason=decision.kind)
                self._counts.add("first_token_seconds", now - since, reason=decision.kind)
            self._tell(decision, tokens, now - since)


def _scheduled(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield each request of a step, how many of its tokens were computed before, and how many are now."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, scheduled[request_id]
