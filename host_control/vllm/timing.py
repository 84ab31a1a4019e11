"""Times vLLM's steps: for the table of how long it computes, and for what moving KV costs it beside decoding.

A step's time is that from the moment at which it could begin (it is scheduled, and the one before it is over) to the
moment at which the scheduler has its output: what the first token of a prompt waits for. Steps come out in the order
in which they went in, also where vLLM schedules the next one while one runs. What moved beside a step, for whichever
engine, the data planes say that the steps are reported to.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from host_control.cache import cache_file
from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.interference.beside import Beside, Moved
from host_control.interference.kept import KeptLearning, engine_name
from host_control.interference.loading import LoadTable
from host_control.interference.slowdown import Interference
from host_control.interference.table import ComputeTable, Row, attention_pairs
from host_control.step_reports import StepReports
from host_control.vllm.metadata import WorkerReport
from host_control.vllm.metrics import Counts

_PROMPT_TOKENS_MIN: Final = 32
"""Steps that compute fewer tokens than this beside one for each request tell little of prompts."""
_DECODED_TOKENS_MAX: Final = 8
"""Of one request in one step that decodes, drafts included."""
_STEPS_MAX: Final = 64
"""More than any engine has under way. Whoever does not say that steps have ended has none measured."""
_ALONE_EVERY: Final = 1024
_ALONE_FIRST: Final = 64
"""After so many decode steps that something moved beside, data planes are asked to pause: it has to be known what
decoding takes beside nothing, and slow movements leave few steps alone. The second while it was never seen."""
_ALONE_STEPS: Final = 16
"""That are enough of a pause."""
_QUIET_STEPS: Final = 64
_QUIET_EVERY: Final = 32
"""Behind so many decode steps beside nothing one in so many is learnt from: that takes 0.2 ms of the engine's thread,
as nothing of it is in caches, and tells little that those before it have not."""
_PAUSE_MAX_S: Final = 2.0
"""A fifth of what a load may take by default; data planes pause no longer."""


@dataclass
class _Step:
    """A step that is under way.

    Attributes:
        begun: when it was scheduled.
        row: of the table, that its time is for; none where it tells nothing.
        tokens, pairs: that it computes.
        decodes: some request decodes in it.
    """

    begun: float
    row: Row | None = None
    tokens: int = 0
    pairs: float = 0.0
    decodes: bool = False


class Timing:
    """Times the steps of an engine. On the engine's thread alone.

    Args:
        config: of the host.
        counts: of the connector.
        clock: seconds, monotonic.

    Attributes:
        table: of how long the engine computes.
        loads: of how long loads take, by the tiers that they load from.
        interference: what moving KV costs it; none where there is no budget for that.
        reports: to data planes; none where there is no budget, and before :meth:`begin`.
    """

    def __init__(self, config: HostConfig, *, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._counts = counts
        self._clock = clock
        self.table = ComputeTable()
        self.loads = LoadTable()
        budget = config.interference_budget
        self.interference = Interference(budget) if budget else None
        self.reports: StepReports | None = None
        self._layers = 0
        self._kept: KeptLearning | None = None
        self._decodes = False  # in the step that was scheduled last
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._last_end = 0.0
        self._beside: Beside[_Step] = Beside()
        self._moves = True  # something has moved of late
        self._moved_bytes = 0  # as the last sample says
        self._quiet = 0  # decode steps beside nothing, since something moved last
        self._never_alone = 0  # decode steps since one had nothing beside it
        self._paused_since: float | None = None
        self._paused_steps = 0  # that had nothing beside them since

    # ------------------------------------------------------------------ life

    def begin(
        self, model: bytes, machine: str, layers: int, logger: logging.Logger, clients: Sequence[DataPlaneClient] = ()
    ) -> None:
        """Go on with what earlier engines of this model and machine have learnt.

        Args:
            model: what it is called.
            machine: what it computes on.
            layers: that may be loaded one by one; 0 where none may.
            logger: for a file that cannot be used.
            clients: of the data planes that move the engine's KV.
        """
        if self.interference is not None:
            self.reports = StepReports(clients, self._config.interference_budget)
        self._layers = layers
        learnt: dict[str, Any] = {"table": self.table, "loads": self.loads}
        if self.interference is not None:
            learnt["interference"] = self.interference
        path = cache_file(self._config.computing_cache, "computing.json")
        self._kept = KeptLearning(path, engine_name(model, machine), learnt, logger)
        self._kept.load()

    def close(self) -> None:
        """Keep what was learnt, and report no more."""
        if self.reports is not None:
            self.reports.close()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.save()

    @property
    def rate(self) -> int:
        """Bytes a second that the interference budget leaves for loads beside the last step; 0: no bound."""
        return self.interference.rate if self._decodes and self.interference is not None else 0

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
        decodes = requests > 0 and not waits and min(scheduled.values()) <= _DECODED_TOKENS_MAX
        self._decodes = decodes
        if decodes and self.reports is not None and self.interference is not None:
            self.reports.decodes(self.interference.rate, paused=self._paused_since is not None)
        calm = tokens == requests > 0 and not (loads or waits or self._moves or output.scheduled_new_reqs)
        if calm and self._quiet >= _QUIET_STEPS and (self._quiet + 1) % _QUIET_EVERY:
            self._quiet += 1
            self._steps.append(_Step(0.0, decodes=True))
            return
        step = _Step(self._clock(), decodes=decodes)
        self._steps.append(step)
        if tokens - requests >= _PROMPT_TOKENS_MIN:
            step.row = "prompts"
        elif decodes and max(scheduled.values()) <= _DECODED_TOKENS_MAX and not output.scheduled_new_reqs and not begin:
            step.row = "decoding"
        if loads or self._moves:
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
        begun, self._last_end = max(step.begun, self._last_end), now
        if self.reports is not None and not any(each.decodes for each in self._steps):
            self.reports.rests()
        if step.row is not None and now > begun:
            if step.row == "prompts":
                self.table.observe(step.row, step.tokens, step.pairs, now - begun)
            elif self.interference is not None:
                self._beside.ended(begun, now, step)
        if self.reports is not None:
            self.judge(self.reports.take())
        if self._paused_since is not None and now >= self._paused_since + _PAUSE_MAX_S:
            self._go_on()
        return step.row == "prompts"

    def judge(self, samples: Sequence[Moved]) -> None:
        """Learn from the steps of which samples say what moved beside them."""
        if samples:
            last = samples[-1]
            self._moves = last.moving or not last.known or last.moved_bytes != self._moved_bytes
            self._moved_bytes = last.moved_bytes
        for step, seconds, rate in self._beside.take(samples):
            predicted = self.table.predict("decoding", step.tokens, step.pairs)
            if self.interference is not None and predicted:
                self.interference.decoded(predicted, seconds, rate)
                if rate:
                    self._counts.add("beside_fetching_predicted_seconds", predicted)
                    self._counts.add("beside_fetching_seconds", seconds)
            if rate:
                self._moved_beside(predicted is not None)
            else:
                self.table.observe("decoding", step.tokens, step.pairs, seconds)
                self._never_alone = 0
                self._paused_steps += 1
                if self._paused_since is not None and self._paused_steps >= _ALONE_STEPS:
                    self._go_on()

    def _moved_beside(self, known: bool) -> None:
        """Ask for a pause where no decode step had nothing beside it for long."""
        self._never_alone += 1
        if self._paused_since is None and self._never_alone >= (_ALONE_EVERY if known else _ALONE_FIRST):
            self._paused_since, self._paused_steps = self._clock(), 0

    def _go_on(self) -> None:
        self._paused_since, self._never_alone = None, 0

    def loaded(self, report: WorkerReport) -> None:
        """Take what the workers say of the step whose end comes next."""
        if report.layer_seconds and self._steps and self._steps[0].tokens:
            self.table.observe("layer", self._steps[0].tokens, self._steps[0].pairs, report.layer_seconds)


def scheduled_requests(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield each request of a step, how many of its tokens were computed before, and how many are now."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, scheduled[request_id]
