"""Times vLLM's steps: for the table of how long it computes, and for what fetching costs it beside decoding.

A step's time is that from the moment at which it could begin (it is scheduled, and the one before it is over) to the
moment at which the scheduler has its output: what the first token of a prompt waits for. Steps come out in the order
in which they went in, also where vLLM schedules the next one while one runs.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from host_control.cache import cache_file
from host_control.config import HostConfig
from host_control.slack.interference import Interference
from host_control.slack.kept import KeptLearning, engine_name
from host_control.slack.loading import LoadTable
from host_control.slack.table import ComputeTable, Row, attention_pairs
from host_control.vllm.metadata import WorkerReport
from host_control.vllm.metrics import Counts

__all__ = ["Timing", "scheduled_requests"]

_PROMPT_TOKENS_MIN: Final = 32
"""Steps that compute fewer tokens than this beside one for each request tell little of prompts."""
_DECODED_TOKENS_MAX: Final = 8
"""Of one request in one step that decodes, drafts included."""
_STEPS_MAX: Final = 64
"""More than any engine has under way. Whoever does not say that steps have ended has none measured."""
_ALONE_EVERY: Final = 1024
_ALONE_FIRST: Final = 64
"""After so many decode steps all of which a load was beside, loads are held up for some: what decoding takes beside
nothing has to be known, and the slower loads go, the less they leave alone. The second while it was never seen."""
_ALONE_STEPS: Final = 16
_SETTLE_S: Final = 0.5
"""Calls that have begun end within it: a tenth of a second's bytes, or a chunk."""
_QUIET_STEPS: Final = 64
_QUIET_EVERY: Final = 32
"""Behind so many decode steps without any load one in so many is learnt from: that takes 0.2 ms of the engine's thread,
as nothing of it is in caches, and tells little that those before it have not."""
_HELD_MAX_S: Final = 2.0
"""A fifth of what a load may take by default: beside a long prompt no step decodes alone, and steps may be slow."""
_BESIDE_MAX: Final = 4096
"""Steps beside one load: more than fit into the longest deadline of a load that keeps to it."""


@dataclass
class _Step:
    """A step that is under way.

    Attributes:
        begun: when it was scheduled.
        row: of the table, that its time is for; none where it tells nothing.
        tokens, pairs: that it computes.
        beside: a load is under way that began before it did.
    """

    begun: float
    row: Row | None = None
    tokens: int = 0
    pairs: float = 0.0
    beside: bool = False


_UNSEEN: Final = _Step(0.0)
"""A step of which nothing is learnt."""


class Timing:
    """Times the steps of an engine. On the engine's thread alone.

    Args:
        config: of the host.
        counts: of the connector.
        clock: seconds, monotonic.

    Attributes:
        table: of how long the engine computes.
        loads: of how long loads take, by the tiers that they load from.
        interference: what fetching costs it; none where there is no budget for that.
        rate: bytes a second that loads may be delivered at beside the step that was scheduled last; 0: no bound.
        held: whether loads are held up beside that step.
    """

    def __init__(self, config: HostConfig, *, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._counts = counts
        self._clock = clock
        self.table = ComputeTable()
        self.loads = LoadTable()
        budget = config.interference_budget
        self.interference = Interference(budget) if budget else None
        self.rate = 0
        self.held = False
        self._layers = 0
        self._kept: KeptLearning | None = None
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._last_end = 0.0
        self._beside: deque[tuple[float, float]] = deque(maxlen=_BESIDE_MAX)  # steps: seconds predicted, and taken
        self._beside_since = 0.0
        self._quiet = 0  # decode steps since the last load
        self._never_alone = 0  # decode steps since one had no load beside it
        self._held_since = 0.0
        self._held_steps = 0  # that had nothing beside them since
        self._loads = False  # some are under way
        self._delivered = 0  # bytes of loads that have ended with the step that ends now

    # ------------------------------------------------------------------ life

    def begin(self, model: bytes, machine: str, layers: int, logger: logging.Logger) -> None:
        """Go on with what earlier engines of this model and machine have learnt.

        Args:
            model: what it is called.
            machine: what it computes on.
            layers: that may be loaded one by one; 0 where none may.
            logger: for a file that cannot be used.
        """
        self._layers = layers
        learnt: dict[str, Any] = {"table": self.table, "loads": self.loads}
        if self.interference is not None:
            learnt["interference"] = self.interference
        path = cache_file(self._config.computing_cache, "computing.json")
        self._kept = KeptLearning(path, engine_name(model, machine), learnt, logger)
        self._kept.load()

    def close(self) -> None:
        """Keep what was learnt."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.save()

    # ------------------------------------------------------------------ each step

    def step(self, output: Any, *, waits: bool, loads: int, begin: int) -> None:
        """A step is scheduled.

        Args:
            output: of vLLM's scheduler.
            waits: it waits for loads itself, so that its time tells nothing of computing.
            loads: that are under way beside it.
            begin: of these, those that begin with it: on some engines before what it computes, on some behind.
        """
        scheduled = output.num_scheduled_tokens
        requests, tokens = len(scheduled), output.total_num_scheduled_tokens
        calm = tokens == requests > 0 and not (loads or waits or self._loads or output.scheduled_new_reqs)
        if calm and self._quiet >= _QUIET_STEPS and (self._quiet + 1) % _QUIET_EVERY:
            self._quiet += 1
            self._steps.append(_UNSEEN)
            return
        step = _Step(self._clock(), beside=loads > begin)
        self._steps.append(step)
        decodes = requests > 0 and min(scheduled.values()) <= _DECODED_TOKENS_MAX
        policy = self.interference if decodes and not waits else None
        self.rate = policy.rate if policy is not None else 0
        if loads and not self._loads:
            self._beside_since = step.begun
            self._beside.clear()  # of loads that have brought nothing
        self._loads = loads > 0
        if tokens - requests >= _PROMPT_TOKENS_MIN:
            step.row = "prompts"
        elif decodes and max(scheduled.values()) <= _DECODED_TOKENS_MAX and not output.scheduled_new_reqs:
            step.row = None if begin and not step.beside else "decoding"
        self._hold(step, beside=policy is not None and loads > 0)
        if loads:
            self._quiet = 0
        elif step.row == "decoding":
            self._quiet += 1
            if self._quiet > _QUIET_STEPS and self._quiet % _QUIET_EVERY:
                step.row = None
        if step.row == "decoding":  # as all others, but for hundreds of requests in each step
            step.tokens = tokens
            step.pairs = tokens / requests * (sum(output.scheduled_cached_reqs.num_computed_tokens) + tokens / 2)
        elif step.row is not None or waits:
            for _, computed, new in scheduled_requests(output):
                step.tokens += new
                step.pairs += attention_pairs(computed, new)
        if waits:
            step.row = None

    def _hold(self, step: _Step, *, beside: bool) -> None:
        """Hold loads up for some decode steps, where none had nothing beside it for long; then go on.

        Args:
            step: that is scheduled.
            beside: it decodes, and loads are under way.
        """
        decodes = step.row == "decoding"
        if self.held and decodes:
            if step.begun < self._held_since + _SETTLE_S:
                step.row = None  # beside what has begun before
            else:
                step.beside = False
                self._held_steps += 1
        if decodes:
            self._never_alone = self._never_alone + 1 if step.beside else 0
        late = step.begun >= self._held_since + _HELD_MAX_S
        if self.held and (not beside or late or self._held_steps >= _ALONE_STEPS):
            self.held, self._never_alone = False, 0
            self._beside_since += step.begun - self._held_since  # in which nothing came
        elif beside and not self.held:
            known = self.table.predict("decoding", 1, 1.0) is not None
            if self._never_alone >= (_ALONE_EVERY if known else _ALONE_FIRST):
                self.held, self._held_since, self._held_steps = True, step.begun, 0

    def layer_seconds(self) -> float:
        """Return how long each layer of the step that was scheduled last is expected to compute; 0: nobody knows.

        Where no worker can time its layers, as on GPUs, it is an equal part of the step.
        """
        step = self._steps[-1]
        if not step.tokens or not self._layers:
            return 0.0
        of_step = self.table.predict("prompts", step.tokens, step.pairs) or 0.0
        return self.table.predict("layer", step.tokens, step.pairs) or of_step / self._layers

    def stepped(self) -> bool:
        """The oldest step that is under way has ended; return whether it has shown how long prompts take."""
        if not self._steps:
            return False
        step, now = self._steps.popleft(), self._clock()
        seconds = now - max(step.begun, self._last_end)
        self._last_end = now
        if step.row is not None and seconds > 0:
            predicted = self.table.predict(step.row, step.tokens, step.pairs)
            if step.row == "decoding" and self.interference is not None and predicted:
                if step.beside:
                    self._beside.append((predicted, seconds))
                else:
                    self.interference.decoded(predicted, seconds, 0.0)
            if step.row == "prompts" or not step.beside:
                self.table.observe(step.row, step.tokens, step.pairs, seconds)
        if self._delivered:
            self._learn_beside(now)
        return step.row == "prompts"

    def loaded(self, report: WorkerReport) -> None:
        """Take what the workers say of the step whose end comes next."""
        self._delivered += report.delivered_bytes
        if report.layer_seconds and self._steps and self._steps[0].tokens:
            self.table.observe("layer", self._steps[0].tokens, self._steps[0].pairs, report.layer_seconds)

    def _learn_beside(self, now: float) -> None:
        """Learn from the steps since loading began, or other loads ended: all that has come since was beside them."""
        delivered, self._delivered = self._delivered, 0
        since, self._beside_since = self._beside_since, now
        beside = list(self._beside)
        self._beside.clear()
        if self.interference is None or now <= since:
            return
        for predicted, seconds in beside:
            self.interference.decoded(predicted, seconds, delivered / (now - since))
            self._counts.add("beside_fetching_predicted_seconds", predicted)
            self._counts.add("beside_fetching_seconds", seconds)


def scheduled_requests(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield each request of a step, how many of its tokens were computed before, and how many are now."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, scheduled[request_id]
