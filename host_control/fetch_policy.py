"""The fetch-or-recompute policy: for each prompt with a hit, select the way with the earliest predicted first token.

The options are: compute everything; fetch everything, then compute the rest; fetch layer by layer while computing; and
the last two with a shorter prefix, where the rest would arrive too late or comes from a slower tier. Computing times
are learnt from the engine's steps, and loading times per tier from loads. While a time is not known, everything is
fetched.

Whole and streamed (layer by layer) loads are predicted from the same times. The policy learns the ratio of measured
and predicted times to the first token by kind of load, because both kinds use cores differently. It forgets the ratio
of the way that was not selected after some requests, so that it tries that way again.

Only the selected option is measured, so a slow link could count as slow forever. Therefore the policy sometimes
*explores*: it moves the border between fetched and computed tokens by one chunk. The predicted cost is at most 1/50 of
the time of all requests since the other option was last measured. No clock and no I/O.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from host_control.interference.estimate import REACH
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable, LayerWait
from host_control.streams import Stream
from shadowserve.tier import Tier

Way = Literal["compute", "fetch", "layers"]
"""Compute everything; fetch, then compute the rest; or compute the rest while layers are fetched."""

Alike = tuple[Tier, int]
"""Kind of a load: the tier that takes the most time, and the binary logarithm of the load's time over computing."""

_RATIOS_MAX: Final = 5
"""Last ratios of a kind of load; their median counts."""
_RATIOS_MIN: Final = 3
"""Ratios that are needed for a correction."""
_FORGET_AFTER: Final = 64
"""Requests of one kind without the other way, after which the other way is tried once."""
_TRY: Final = 1.25
"""A whole load is tried if it is predicted to take up to this multiple of a streamed one: streamed loads teach how long
loads take, and may take longer than whole ones."""
_ALIKE_MAX: Final = 4
"""Loads that differ from computing by more than this power of two are alike."""
_EXPLORATION: Final = 1 / 50
"""Share of the requests' time that exploring may cost."""
_UNKNOWN_MAX: Final = 4
"""If only the computing time is unknown, every fourth request explores it."""
_ENDS_MAX: Final = 8
"""Number of shorter prefixes that are compared, and of further ones that end where the tier changes."""
_IN_TIME: Final = 0.8
"""Loads that are predicted to take a larger share of their deadline than this are not started."""
_AS_FAST: Final = 1.25
"""A load below this multiple of its time at the rate limit was limited by the rate, not by its tiers."""
_LOAD_MAX: Final = 3.0
"""A step may wait for layers this multiple of its computing time. New requests wait, too, so it waits longer only if
few requests arrive. With ``layer_order: true`` this limits the time for object storage only."""
_STEP_WAIT_MAX_S: Final = 10.0
"""Longest load that a step may wait for beyond ``_LOAD_MAX``."""
_LOADS_MAX: Final = 64
"""Last loads from which the rate of arrivals is learnt."""
_ARRIVALS_MAX: Final = 256


@dataclass(frozen=True, kw_only=True)
class Hit:
    """The stored part of a prompt.

    Attributes:
        local_tokens: Leading tokens in the engine's own prefix cache.
        end_tokens: Leading tokens that are available after the longest possible load.
        chunk_bytes: Stored size of a chunk; 0 if unknown.
        tiers: One :class:`~shadowserve.tier.Tier` per chunk of that load; chunks beyond its end are in storage.
        cold_seconds: Estimated time of storage to read the cold chunks.
        delivery_seconds: Time per chunk at the current rate limit; 0: no limit.
        layers: Layers of the model if the load may go layer by layer; else 0.
    """

    tokens: int
    local_tokens: int
    end_tokens: int
    chunk_bytes: float = 0.0
    tiers: bytes = b""
    cold_seconds: float = 0.0
    delivery_seconds: float = 0.0
    layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision for one prompt, with its predictions. Predictions are 0 or empty if unknown.

    Attributes:
        end_tokens: Leading tokens that are available after the load.
        kind: ``way``, or ``"prefix"`` for a shortened load, ``"explore"``, ``"unknown"``, or ``"configured"`` if the
            policy is off and everything is fetched.
        predicted: Seconds until the first token of the best option of each kind.
        seconds: Seconds until the first token of this option.
        load_seconds, load_tiers, load_cold_seconds: Seconds of the load, its bytes by tier, and the estimated time of
            storage to read its cold chunks.
        tier_seconds: Seconds of the load by tier.
        delivery_seconds: Seconds of the load at the rate limit; 0: no limit.
        tier_bytes: Bytes by tier of the longest possible load.
        queued_seconds: Seconds until earlier loads have ended.
        alike: Kind of the load, where it could go both whole and layer by layer; else None.
        correction: Factor of ``seconds`` that was learnt from loads that are alike.
    """

    way: Way
    end_tokens: int
    kind: str
    predicted: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    load_seconds: float = 0.0
    load_tiers: Mapping[Tier, float] = field(default_factory=dict)
    load_cold_seconds: float = 0.0
    tier_seconds: Mapping[Tier, float] = field(default_factory=dict)
    delivery_seconds: float = 0.0
    tier_bytes: Mapping[Tier, float] = field(default_factory=dict)
    cold_seconds: float = 0.0
    queued_seconds: float = 0.0
    alike: Alike | None = None
    correction: float = 1.0

    @property
    def load_bytes(self) -> float:
        return sum(self.load_tiers.values())

    @property
    def stored_bytes(self) -> float:
        return sum(self.tier_bytes.values())


@dataclass(kw_only=True)
class Decided:
    """A decision and its result.

    Attributes:
        tokens: Tokens of the prompt.
        since: Time of the decision, of the monotonic clock.
        seconds: Seconds from the decision to the first token.
        layer_waits: How the step waited for each layer; empty if the load did not go layer by layer.
        not_layerwise: Why it did not, or empty.
    """

    request_id: str
    decision: Decision
    tokens: int
    since: float = 0.0
    seconds: float = 0.0
    layer_waits: list[LayerWait] = field(default_factory=list)
    not_layerwise: str = ""


class _Corrections:
    """Measured over predicted times to the first token, of whole and of streamed loads."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[Way, Alike], deque[float]] = {}
        self._since: Counter[tuple[Way, Alike]] = Counter()  # requests of the other way since the last ratio

    def learn(self, decision: Decision, seconds: float) -> None:
        if decision.alike is None or not decision.seconds:
            return
        ratio = seconds * decision.correction / decision.seconds
        own: tuple[Way, Alike] = (decision.way, decision.alike)
        other: tuple[Way, Alike] = ("fetch" if decision.way == "layers" else "layers", decision.alike)
        self._ratios.setdefault(own, deque(maxlen=_RATIOS_MAX)).append(ratio)
        self._since[own] = 0
        self._since[other] += 1
        if self._since[other] == _FORGET_AFTER:
            while len(self._ratios.get(other, ())) >= _RATIOS_MIN:
                self._ratios[other].popleft()

    def of_layers(self, alike: Alike) -> float:
        """Return the factor for the time of a streamed load, relative to a whole one."""
        tried = _TRY if self._since["fetch", alike] >= _FORGET_AFTER else 1.0
        return tried * self._ratio("layers", alike) / self._ratio("fetch", alike)

    def _ratio(self, way: Way, alike: Alike) -> float:
        ratios = self._ratios.get((way, alike), ())
        return statistics.median(ratios) if len(ratios) >= _RATIOS_MIN else 1.0


class _Arrivals:
    """Number of requests that arrive while another one waits for its load."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_ARRIVALS_MAX)
        self._since: dict[str, float] = {}  # arrivals of the requests that load
        self._loads: deque[list[float]] = deque(maxlen=_LOADS_MAX)  # arrival, end, number of arrivals between them

    def arrived(self, now: float) -> None:
        self._times.append(now)
        for load in self._loads:
            load[2] += load[0] < now <= load[1]  # it waited for a step

    def begin(self, name: str, arrived: float) -> None:
        self._since[name] = arrived

    def ended(self, name: str, now: float) -> None:
        if (since := self._since.pop(name, None)) is not None:
            self._loads.append([since, now, sum(since < time <= now for time in self._times)])

    @property
    def per_s(self) -> float:
        """Arrivals a second, with one more than were counted; infinite before the first load has ended."""
        seconds = sum(end - since for since, end, _ in self._loads)
        return (1 + sum(load[2] for load in self._loads)) / seconds if seconds > 0 else math.inf


class FetchOrRecompute:
    """Decides for the prompts of one engine; the caller updates the table of computing times.

    Args:
        step_tokens: Most tokens that the engine computes in a step.
        layers_first: Loads go layer by layer where they can, unless another way is predicted to be faster; otherwise
            only where this is predicted to be fastest.
    """

    def __init__(
        self,
        table: ComputeTable,
        loads: LoadTable,
        *,
        chunk_tokens: int,
        step_tokens: int,
        load_tokens_min: int,
        fetch_timeout_s: float,
        layers_first: bool = True,
    ) -> None:
        self._table = table
        self._layers_first = layers_first
        self._corrections = _Corrections()
        self._arrivals = _Arrivals()
        self._loads = loads
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self._load_tokens_min = load_tokens_min
        self._load_seconds_max = _IN_TIME * fetch_timeout_s
        self._explore_s: dict[str, float] = {"compute": 0.0, "fetch": 0.0}  # affordable cost of exploring each way
        self._unknown = 0  # prompts that were fetched since computing was last explored
        self._queued: dict[str, float] = {}  # running loads in their order, with predicted seconds
        self._first_began = 0.0  # when the first of them began

    # ---- Measurements ------------------------------------------------------------------------------------------------

    def computed(self) -> None:
        """Record that the duration of a step with prompts was measured."""
        self._explore_s["compute"] = 0.0

    def fetched(self, decision: Decision, seconds: float) -> None:
        """Learn the duration, without queueing, of a load that was complete or reached its deadline.

        Loads that were limited by the rate are ignored: they show nothing about the tiers.
        """
        if not decision.load_bytes or seconds <= _AS_FAST * decision.delivery_seconds:
            return
        self._loads.observe(decision.load_tiers, decision.load_cold_seconds, seconds)
        if seconds > decision.load_seconds / 2:  # a much faster load may be chance: explore again
            self._explore_s["fetch"] = 0.0

    def came(self, decision: Decision, seconds: float) -> None:
        """Learn the time to the first token of a request."""
        self._corrections.learn(decision, seconds)

    def arrived(self, now: float) -> None:
        """Record that a request has arrived."""
        self._arrivals.arrived(now)

    def ended(self, name: str, now: float) -> None:
        self._arrivals.ended(name, now)
        if self._queued.pop(name, None) is not None:
            self._first_began = now

    # ---- Decisions ---------------------------------------------------------------------------------------------------

    def decide(self, hit: Hit, now: float) -> Decision:
        """Return the best option for a prompt. The result may change with time."""
        return self._with_hit(self._decided(hit, now), hit, now)

    def stream(self, hit: Hit) -> Stream:
        """Return a hit's load as it would go layer by layer within the first step that computes the request."""
        return self.stream_of(self._load(hit, "layers", hit.end_tokens), hit.tokens)

    def stream_of(self, decision: Decision, tokens: int) -> Stream:
        """Return the load of a decision for a prompt in the same way."""
        end, cold_s = decision.end_tokens, decision.tier_seconds.get(Tier.COLD, 0.0)
        return Stream(decision.load_seconds, end, min(tokens - end, self._step_tokens), cold_s)

    def configured(self, hit: Hit, now: float) -> Decision:
        """Return the decision to fetch everything, for engines without the policy."""
        chosen, predicted = self._whole(hit), dict[str, float]()
        if hit.layers and not self._layers_first:
            ways: tuple[Way, ...] = ("fetch", "layers")
            options = [option for way in ways if (option := self._option(hit, way, hit.end_tokens, now)) is not None]
            chosen = min(options, key=lambda option: option.seconds, default=chosen)
            predicted = {option.way: option.seconds for option in options}
        return self._with_hit(replace(chosen, kind="configured", predicted=predicted), hit, now)

    def _with_hit(self, decision: Decision, hit: Hit, now: float) -> Decision:
        tiers = self._tier_bytes(hit, hit.end_tokens)
        return replace(decision, tier_bytes=tiers, cold_seconds=hit.cold_seconds, queued_seconds=self.waiting(now))

    def _whole(self, hit: Hit) -> Decision:
        return self._load(hit, self._way(hit), hit.end_tokens)

    def _way(self, hit: Hit) -> Way:
        """Return the way of a load whose time is not known."""
        return "layers" if hit.layers and self._layers_first else "fetch"

    def _decided(self, hit: Hit, now: float) -> Decision:
        whole = self._whole(hit)
        options = [option for option in self._options(hit, now) if option is not None]
        if not options or options[0].way != "compute" or not whole.load_seconds:
            return self._unknown_decision(hit, whole)
        predicted: dict[str, float] = {}
        for option in options:
            predicted[option.kind] = min(option.seconds, predicted.get(option.kind, option.seconds))
        in_time = self._load_seconds_max - self.waiting(now)
        allowed = [option for option in options if option.way == "compute" or option.load_seconds <= in_time]
        best = min(allowed, key=lambda option: (option.seconds, option.way == "compute"))
        if (other := self._exploration(hit, best, now)) is not None:
            best = replace(other, kind="explore")
        return replace(best, predicted=predicted)

    def begin(self, name: str, decision: Decision, now: float, arrived: float | None = None) -> None:
        """Record that a request continues as decided; ``arrived``: its arrival, by default now."""
        if decision.way != "compute":
            self._arrivals.begin(name, now if arrived is None else arrived)
            if not self._queued:
                self._first_began = now
            # Other loads run while object storage is read.
            self._queued[name] = decision.load_seconds - decision.tier_seconds.get(Tier.COLD, 0.0)
        if decision.kind == "configured":
            return
        if decision.kind == "unknown":
            self._unknown += 1
        elif decision.kind != "explore":
            other = "fetch" if decision.way == "compute" else "compute"
            self._explore_s[other] += _EXPLORATION * decision.seconds
        elif not decision.predicted:
            self._unknown = 0

    def _options(self, hit: Hit, now: float) -> Iterator[Decision | None]:
        yield self._option(hit, "compute", hit.local_tokens, now)
        first = hit.local_tokens // self._chunk_tokens
        whole = hit.end_tokens // self._chunk_tokens
        stride = max(-(-(whole - first) // _ENDS_MAX), 1)
        shorter = [chunk * self._chunk_tokens for chunk in range(first + stride, whole + 1, stride)]
        changes = [index for index in range(1, len(hit.tiers)) if hit.tiers[index] != hit.tiers[index - 1]]
        shorter += [(first + index) * self._chunk_tokens for index in changes[:_ENDS_MAX]]
        if hit.layers:  # all of the rest computes in one step, while the layers arrive
            shorter.append(-(-(hit.tokens - self._step_tokens) // self._chunk_tokens) * self._chunk_tokens)
        ends = {end for end in shorter if self._least_end(hit) <= end < hit.end_tokens}
        for end in [hit.end_tokens, *sorted(ends, reverse=True)]:
            yield self._option(hit, "fetch", end, now)
            if hit.layers:
                yield self._option(hit, "layers", end, now)

    def _option(self, hit: Hit, way: Way, end: int, now: float) -> Decision | None:
        """Return an option with its prediction; None if its duration is unknown, or a step would wait too long."""
        rest = self._compute_seconds(end, hit.tokens)
        if rest is None:
            return None
        if way == "compute":
            return Decision(way=way, end_tokens=end, kind=way, seconds=rest)
        load = self._load(hit, way, end)
        waiting = self.waiting(now)
        if not load.load_seconds:
            return None
        if not hit.layers:
            return replace(load, seconds=waiting + load.load_seconds + rest)
        first = rest
        if hit.tokens > end + self._step_tokens:  # only the first of several steps computes while layers arrive
            first = min(self._compute_seconds(end, end + self._step_tokens) or rest, rest)
        limited = load.tier_seconds.get(Tier.COLD, 0.0) if self._layers_first else load.load_seconds
        if way == "layers" and limited > _LOAD_MAX * first and not self._may_wait(limited, first):
            return None
        alike = _alike(load.tier_seconds, load.load_seconds, first)
        load = replace(load, alike=alike)
        if way == "fetch":
            return replace(load, seconds=waiting + load.load_seconds + rest)
        # A pipeline of two stages, loading and computing, over all layers.
        longer, shorter = max(load.load_seconds, first), min(load.load_seconds, first)
        correction = self._corrections.of_layers(alike)
        seconds = correction * (waiting + longer + shorter / hit.layers + rest - first)
        return replace(load, seconds=seconds, correction=correction)

    def _may_wait(self, load_s: float, computing_s: float) -> bool:
        """Return whether a step that waits for a load saves its request more time than it costs those that arrive."""
        others_s = self._arrivals.per_s * (load_s**2 - computing_s**2) / 2
        return load_s <= _STEP_WAIT_MAX_S and others_s <= computing_s

    def _load(self, hit: Hit, way: Way, end: int) -> Decision:
        tiers, all_cold = self._tier_bytes(hit, end), self._tier_bytes(hit, hit.end_tokens).get(Tier.COLD, 0.0)
        # Assume that storage reads all cold bytes at the same rate.
        cold_seconds = hit.cold_seconds * tiers.get(Tier.COLD, 0.0) / all_cold if all_cold else 0.0
        predicted = self._loads.predict(tiers, cold_seconds) or {}
        delivery_seconds = self._chunks(hit, end) * hit.delivery_seconds
        return Decision(
            way=way,
            end_tokens=end,
            kind=way if end == hit.end_tokens else "prefix",
            load_seconds=max(sum(predicted.values()), delivery_seconds) if predicted else 0.0,
            load_tiers=tiers,
            load_cold_seconds=cold_seconds,
            tier_seconds=predicted,
            delivery_seconds=delivery_seconds,
        )

    def _unknown_decision(self, hit: Hit, whole: Decision) -> Decision:
        tokens = hit.tokens - hit.local_tokens
        if self._compute_seconds(hit.local_tokens, hit.tokens) is None and self._unknown + 1 >= _UNKNOWN_MAX:
            computed = -(-max(tokens // REACH, self._chunk_tokens) // self._chunk_tokens) * self._chunk_tokens
            end = -(-hit.end_tokens // self._chunk_tokens) * self._chunk_tokens - computed
            if end >= self._least_end(hit):
                return replace(self._load(hit, self._way(hit), end), kind="explore")
        return replace(whole, kind="unknown")

    def _exploration(self, hit: Hit, best: Decision, now: float) -> Decision | None:
        """Return an option that measures what the best option does not, if exploring can be afforded."""
        if best.way == "compute":
            end, unmeasured = self._least_end(hit), "fetch"
        else:
            end, unmeasured = (best.end_tokens - 1) // self._chunk_tokens * self._chunk_tokens, "compute"
        if not self._least_end(hit) <= end < hit.end_tokens:
            return None
        other = self._option(hit, "fetch", end, now)
        affordable = self._explore_s[unmeasured]
        if other is None or other.seconds - best.seconds > affordable or not affordable:
            return None
        return other

    # ---- Predictions -------------------------------------------------------------------------------------------------

    def _least_end(self, hit: Hit) -> int:
        return -(-(hit.local_tokens + self._load_tokens_min) // self._chunk_tokens) * self._chunk_tokens

    def _chunks(self, hit: Hit, end: int) -> int:
        return -(-end // self._chunk_tokens) - hit.local_tokens // self._chunk_tokens

    def _compute_seconds(self, computed: int, tokens: int) -> float | None:
        return self._table.prefill(computed, tokens, self._step_tokens)

    def _tier_bytes(self, hit: Hit, end: int) -> dict[Tier, float]:
        count = self._chunks(hit, end)
        tiers = Counter(hit.tiers[:count])
        tiers[Tier.STORAGE] += count - tiers.total() + tiers.pop(Tier.NONE, 0)
        return {Tier(tier): chunks * hit.chunk_bytes for tier, chunks in tiers.items() if chunks and hit.chunk_bytes}

    def waiting(self, now: float) -> float:
        """Return the seconds until a load that is queued now can begin. A late load may be late by as much again."""
        if not self._queued:
            return 0.0
        first = next(iter(self._queued.values()))
        return sum(self._queued.values()) - first + abs(first - max(now - self._first_began, 0.0))


def _alike(tier_seconds: Mapping[Tier, float], load_seconds: float, computing: float) -> Alike:
    """Return the kind of a load, behind which a step computes for ``computing`` seconds."""
    power = round(math.log2(max(load_seconds, 1e-9) / max(computing, 1e-9)))
    slowest = max(tier_seconds, key=lambda tier: tier_seconds[tier], default=Tier.NONE)
    return slowest, min(max(power, -_ALIKE_MAX), _ALIKE_MAX)
