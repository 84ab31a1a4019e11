"""Measures the duration of vLLM's steps, to predict computing times and the slowdown by KV transfers.

A step begins when it is scheduled and the step before it has ended, and ends when the scheduler has its output. Steps
end in the order in which they were scheduled. Data planes report how many bytes they moved meanwhile, for any engine.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from host_control.cache import KeptLearning, cache_file, engine_name
from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.interference.loading import LoadTable
from host_control.interference.slowdown import Interference
from host_control.interference.step_rates import Sample, StepRates
from host_control.interference.table import ComputeTable, Row, attention_pairs
from host_control.step_reports import StepReports
from host_control.vllm.metadata import WorkerReport
from host_control.vllm.metrics import Counts

_PROMPT_TOKENS_MIN: Final = 32
"""Steps with fewer prompt tokens than this are not used to measure prompts."""
_DECODED_TOKENS_MAX: Final = 8
"""Most tokens of one request in a decode step, drafts included."""
_STEPS_MAX: Final = 64
"""More steps than any engine runs at once; a bound for engines that never report the end of a step."""
_PAUSE_EVERY_STEPS: Final = 1024
_FIRST_PAUSE_STEPS: Final = 64
"""After this number of decode steps in a row with concurrent transfers, data planes are asked to pause, so that the
duration of a step without transfers is measured. The second number applies until it was measured once."""
_PAUSE_STEPS: Final = 16
"""A pause ends after this number of steps without transfers."""
_QUIET_STEPS: Final = 64
_QUIET_EVERY: Final = 32
"""After this number of decode steps without transfers, only one step in as many is measured: measuring takes 0.2 ms of
the engine's thread."""
_PAUSE_MAX_S: Final = 2.0
"""Longest pause: a fifth of the default ``fetch_timeout_s``."""


@dataclass
class _Step:
    """A scheduled step that has not ended.

    Attributes:
        row: Row of the table that its duration belongs to; ``None`` if it is not measured.
    """

    scheduled_s: float
    row: Row | None = None
    tokens: int = 0
    pairs: float = 0.0
    decodes: bool = False


class Timing:
    """Measures the steps of one engine. All methods run on the engine's thread.

    Attributes:
        interference: Learnt slowdown by transfers; ``None`` without an interference budget.
        reports: Reports of decode steps to the data planes; ``None`` without a budget and before :meth:`begin`.
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
        self._decodes = False  # the step that was scheduled last decodes
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)
        self._last_end_s = 0.0
        self._rates: StepRates[_Step] = StepRates()
        self._moving = True  # the last sample shows transfers
        self._moved_bytes = 0  # total of the last sample
        self._quiet_steps = 0  # decode steps since the last transfer
        self._busy_steps = 0  # decode steps since the last one without transfers
        self._paused_since_s: float | None = None
        self._paused_steps = 0  # steps without transfers in this pause

    def begin(
        self, model: bytes, machine: str, layers: int, logger: logging.Logger, clients: Sequence[DataPlaneClient] = ()
    ) -> None:
        """Load the measurements of earlier engines with this model and machine, and start to report steps.

        Args:
            layers: Number of layers if loads may go layer by layer; 0 if not.
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
        if self.reports is not None:
            self.reports.close()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.save()

    @property
    def rate(self) -> int:
        """Bytes per second that loads may use during the last scheduled step; 0: no limit."""
        return self.interference.rate if self._decodes and self.interference is not None else 0

    def step(self, output: Any, *, waits: bool, loads: int, begin: int) -> None:
        """Record that a step is scheduled.

        Args:
            waits: The step itself waits for loads, so its duration is not a computing time.
        """
        scheduled = output.num_scheduled_tokens
        requests, tokens = len(scheduled), output.total_num_scheduled_tokens
        with_decodes = requests > 0 and min(scheduled.values()) <= _DECODED_TOKENS_MAX
        self._decodes = with_decodes and not waits
        if self.reports is not None and self.interference is not None:
            if self._decodes:
                self.reports.decodes(self.interference.rate, paused=self._paused_since_s is not None)
            elif not with_decodes and not any(each.decodes for each in self._steps):
                self.reports.ends()
        quiet = not (loads or self._moving)
        # Fast path: of quiet decode steps, most are not measured. Nothing about them needs to be computed.
        if quiet and tokens == requests > 0 and not (waits or output.scheduled_new_reqs) and self._skips_next():
            self._quiet_steps += 1
            self._steps.append(_Step(0.0, decodes=True))
            return
        step = _Step(self._clock(), self._row(output, begin), decodes=self._decodes)
        self._steps.append(step)
        if not quiet:
            self._quiet_steps = 0
        elif step.row == "decoding":
            if self._skips_next():
                step.row = None
            self._quiet_steps += 1
        if step.row == "decoding":  # the average over the requests: a loop over hundreds of them would take too long
            step.tokens = tokens
            step.pairs = tokens / requests * (sum(output.scheduled_cached_reqs.num_computed_tokens) + tokens / 2)
        elif step.row is not None or waits:
            for _, computed, new in scheduled_requests(output):
                step.tokens += new
                step.pairs += attention_pairs(computed, new)
        if waits:
            step.row = None

    def _row(self, output: Any, begin: int) -> Row | None:
        scheduled = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens - len(scheduled) >= _PROMPT_TOKENS_MIN:
            return "prompts"
        only_decodes = self._decodes and max(scheduled.values()) <= _DECODED_TOKENS_MAX
        return "decoding" if only_decodes and not output.scheduled_new_reqs and not begin else None

    def _skips_next(self) -> bool:
        """Return True if the next quiet decode step is not measured."""
        return self._quiet_steps >= _QUIET_STEPS and (self._quiet_steps + 1) % _QUIET_EVERY != 0

    def layer_seconds(self) -> float:
        """Return the predicted seconds per layer of the last scheduled step; 0 if unknown.

        Where workers cannot measure layers (on GPUs), each layer takes an equal part of the step.
        """
        step = self._steps[-1]
        if not step.tokens or not self._layers:
            return 0.0
        of_step = self.table.predict("prompts", step.tokens, step.pairs) or 0.0
        return self.table.predict("layer", step.tokens, step.pairs) or of_step / self._layers

    def stepped(self, *, idle: bool = False) -> bool:
        """Record that the oldest scheduled step has ended. Return True if it measured the computing time of prompts.

        ``idle``: the engine has no more requests.
        """
        if not self._steps:
            return False
        step, now = self._steps.popleft(), self._clock()
        begin, self._last_end_s = max(step.scheduled_s, self._last_end_s), now
        if self.reports is not None and not any(each.decodes for each in self._steps):
            if idle:
                self.reports.ends()
            else:
                self.reports.rests()
        if step.row is not None and now > begin:
            if step.row == "prompts":
                self.table.observe(step.row, step.tokens, step.pairs, now - begin)
            elif self.interference is not None:
                self._rates.ended(begin, now, step)
        if self.reports is not None:
            self.judge(self.reports.take())
        if self._paused_since_s is not None and now >= self._paused_since_s + _PAUSE_MAX_S:
            self._end_pause()
        return step.row == "prompts"

    def judge(self, samples: Sequence[Sample]) -> None:
        """Learn from ended decode steps for which samples show the concurrent transfers."""
        if samples:
            last = samples[-1]
            self._moving = last.moving or not last.known or last.moved_bytes != self._moved_bytes
            self._moved_bytes = last.moved_bytes
        for step, seconds, rate in self._rates.take(samples):
            predicted = self.table.predict("decoding", step.tokens, step.pairs)
            if self.interference is not None and predicted:
                self.interference.decoded(predicted, seconds, rate)
                if rate:
                    self._counts.add("decode_during_fetch_predicted_seconds", predicted)
                    self._counts.add("decode_during_fetch_seconds", seconds)
            if rate:
                self._busy_steps += 1
                limit = _FIRST_PAUSE_STEPS if predicted is None else _PAUSE_EVERY_STEPS
                if self._paused_since_s is None and self._busy_steps >= limit:
                    self._paused_since_s, self._paused_steps = self._clock(), 0
            else:
                self.table.observe("decoding", step.tokens, step.pairs, seconds)
                self._busy_steps = 0
                self._paused_steps += 1
                if self._paused_since_s is not None and self._paused_steps >= _PAUSE_STEPS:
                    self._end_pause()

    def _end_pause(self) -> None:
        self._paused_since_s, self._busy_steps = None, 0

    def loaded(self, report: WorkerReport) -> None:
        """Learn the duration of a layer from the workers' report of the step that ends next."""
        if report.layer_seconds and self._steps and self._steps[0].tokens:
            self.table.observe("layer", self._steps[0].tokens, self._steps[0].pairs, report.layer_seconds)


def scheduled_requests(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (request ID, tokens computed before, tokens computed now) for each request of a step."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, scheduled[request_id]
