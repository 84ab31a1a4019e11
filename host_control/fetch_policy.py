"""Fetch or compute: for each prompt with a hit, whatever is predicted to bring its first token sooner.

Compared are computing all, fetching all and waiting for it, fetching layer by layer while computing, and each of these
with a shorter prefix, which pays where the rest would come too late or is farther away, or where fetching layers is to
take no longer than computing what is behind them. What is predicted is learnt from what came: from the engine's steps
how long computing takes, from loads how long fetching does from each tier: memory and devices of the data plane's
machine, storage, object storage behind it. What storage says of object storage is believed, until loads have shown what
to make of it. As long as one of them is not known, everything is fetched.

A side that is not chosen is not seen any more, and what was a slow link for an hour might be taken for one for ever. So
now and then a prompt *explores*: its border between what is fetched and what is computed is moved by one chunk. What
that costs by prediction is at most a fiftieth of the time of the requests since that side was last seen.

No clock and no I/O: times are handed over.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from host_control.interference.estimate import REACH
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable, attention_pairs
from shadowserve.tier import Tier

Way = Literal["compute", "fetch", "layers"]
"""Compute all; fetch, wait, compute the rest; or compute the rest while layers are fetched."""

_EXPLORATION: Final = 1 / 50
"""Of the time that requests take."""
_UNKNOWN_MAX: Final = 4
"""Each such request explores computing where only that is not known."""
_ENDS_MAX: Final = 8
"""So many shorter prefixes are compared, and as many more that end where a tier does."""
_IN_TIME: Final = 0.8
"""A load that is predicted to take more of its deadline than this is not begun."""
_AS_FAST: Final = 1.25
"""A load that took less than so many times what it takes at the rate it was held to was as fast as that let it be."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What could be loaded of a prompt.

    Attributes:
        tokens: of the prompt.
        local_tokens: leading ones that the engine has itself.
        end_tokens: leading ones that would be there after a load of all that can be loaded.
        chunk_bytes: of a chunk as it is stored; 0: nobody has said.
        tiers: a :class:`~shadowserve.tier.Tier` for each chunk of that load; storage, where it has none.
        cold_seconds: in how many storage expects to have nearer what is cold of all that.
        delivery_seconds: of a chunk, at the rate at which loads are delivered now, beside decoding; 0: no bound.
        layers: of the model, where it may go layer by layer; else 0.
        layerwise_chunks: that go layer by layer at most.
    """

    tokens: int
    local_tokens: int
    end_tokens: int
    chunk_bytes: float = 0.0
    tiers: bytes = b""
    cold_seconds: float = 0.0
    delivery_seconds: float = 0.0
    layers: int = 0
    layerwise_chunks: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done with a prompt, and why.

    Attributes:
        way: how it comes to its KV.
        end_tokens: leading tokens that are there after the load.
        kind: ``way``, or ``"prefix"`` of a load that was made shorter, ``"explore"``, ``"unknown"``, or
            ``"configured"`` where there was nothing to decide: everything is fetched.
        predicted: seconds until its first token, of each kind the best; nothing where that is not known.
        seconds: the same of what is done; 0 where that is not known.
        load_seconds: of its load; 0 where there is none, or where that is not known.
        load_tiers: bytes of its load, by where they are.
        load_cold_seconds: in how many storage expects to have nearer what is cold of its load.
        tier_seconds: of its load, what each tier adds to it.
        delivery_seconds: that its load takes at the rate at which loads were delivered then; 0: no bound.
        tier_bytes: of all that could be loaded.
        cold_seconds: of the :class:`Hit`.
        queued_seconds: that loads which are under way will take.
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

    @property
    def load_bytes(self) -> float:
        """Of its load; 0 where there is none, or nobody has said."""
        return sum(self.load_tiers.values())

    @property
    def stored_bytes(self) -> float:
        """Of all that could be loaded; 0 where nobody has said."""
        return sum(self.tier_bytes.values())


class FetchOrRecompute:
    """Decides for the prompts of one engine.

    Args:
        table: of how long the engine computes, which whoever times its steps keeps.
        loads: of how long loads take.
        chunk_tokens: tokens in a chunk.
        step_tokens: that the engine computes in a step at most.
        load_tokens_min: loads of fewer tokens are not made.
        fetch_timeout_s: seconds from the hand-over of a load to its outcome.
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
    ) -> None:
        self._table = table
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self._load_tokens_min = load_tokens_min
        self._load_seconds_max = _IN_TIME * fetch_timeout_s
        self._fetching = loads
        self._allowed: dict[str, float] = {"compute": 0.0, "fetch": 0.0}  # seconds, to explore a side
        self._unknown = 0  # prompts that were fetched since it was tried to learn about computing
        self._loads: dict[str, float] = {}  # predicted seconds of those that are under way, in their order
        self._turn = 0.0  # when the first of them had its turn

    # ------------------------------------------------------------------ what came

    def computed(self) -> None:
        """Take note that a step was timed that computed prompts."""
        self._allowed["compute"] = 0.0

    def fetched(self, decision: Decision, seconds: float) -> None:
        """Learn how long a load took from its turn to its outcome, which was all of it, or that time was up.

        One that took as long as the rate let it says nothing of the tiers.
        """
        if not decision.load_bytes or seconds <= _AS_FAST * decision.delivery_seconds:
            return
        self._fetching.observe(decision.load_tiers, decision.load_cold_seconds, seconds)
        if seconds > decision.load_seconds / 2:  # else the next one may see whether that was chance
            self._allowed["fetch"] = 0.0

    def ended(self, name: str, now: float) -> None:
        """Forget a load that is over, however it ended."""
        if self._loads.pop(name, None) is not None:
            self._turn = now

    # ------------------------------------------------------------------ deciding

    def decide(self, hit: Hit, now: float) -> Decision:
        """Return what is best for a prompt at a time; asked again, it may be another answer."""
        return self._of_hit(self._decided(hit, now), hit, now)

    def configured(self, hit: Hit, now: float) -> Decision:
        """Return that all of a hit is fetched, whatever that takes."""
        return self._of_hit(replace(self._whole(hit), kind="configured"), hit, now)

    def _of_hit(self, decision: Decision, hit: Hit, now: float) -> Decision:
        tiers = self._tier_bytes(hit, hit.end_tokens)
        return replace(decision, tier_bytes=tiers, cold_seconds=hit.cold_seconds, queued_seconds=self._waiting(now))

    def _whole(self, hit: Hit) -> Decision:
        return self._load(hit, "layers" if self._layerwise(hit, hit.end_tokens) else "fetch", hit.end_tokens)

    def _decided(self, hit: Hit, now: float) -> Decision:
        today = self._whole(hit)
        options = [option for option in self._options(hit, now) if option is not None]
        if not options or options[0].way != "compute" or not today.load_seconds:
            return self._unknown_decision(hit, today)
        predicted: dict[str, float] = {}
        for option in options:
            predicted[option.kind] = min(option.seconds, predicted.get(option.kind, option.seconds))
        in_time = self._load_seconds_max - self._waiting(now)
        allowed = [option for option in options if option.way == "compute" or option.load_seconds <= in_time]
        best = min(allowed, key=lambda option: (option.seconds, option.way == "compute"))
        if (other := self._exploration(hit, best, now)) is not None:
            best = replace(other, kind="explore")
        return replace(best, predicted=predicted)

    def begin(self, name: str, decision: Decision, now: float) -> None:
        """Take note that a request goes on as was decided."""
        if decision.way != "compute":
            if not self._loads:
                self._turn = now
            # While object storage brings what is cold, others have their turn.
            self._loads[name] = decision.load_seconds - decision.tier_seconds.get(Tier.COLD, 0.0)
        if decision.kind == "configured":
            return
        if decision.kind == "unknown":
            self._unknown += 1
        elif decision.kind != "explore":
            side = "fetch" if decision.way == "compute" else "compute"
            self._allowed[side] += _EXPLORATION * decision.seconds
        elif not decision.predicted:
            self._unknown = 0

    def _options(self, hit: Hit, now: float) -> Iterator[Decision | None]:
        yield self._option(hit, "compute", hit.local_tokens, now)
        first = hit.local_tokens // self._chunk_tokens
        whole = hit.end_tokens // self._chunk_tokens
        stride = max(-(-(whole - first) // _ENDS_MAX), 1)
        shorter = [chunk * self._chunk_tokens for chunk in range(first + stride, whole + 1, stride)]
        changes = [place for place in range(1, len(hit.tiers)) if hit.tiers[place] != hit.tiers[place - 1]]
        shorter += [(first + place) * self._chunk_tokens for place in changes[:_ENDS_MAX]]
        ends = {end for end in shorter if self._least_end(hit) <= end < hit.end_tokens}
        for end in [hit.end_tokens, *sorted(ends, reverse=True)]:
            yield self._option(hit, "fetch", end, now)
            if self._layerwise(hit, end):
                yield self._option(hit, "layers", end, now)

    def _option(self, hit: Hit, way: Way, end: int, now: float) -> Decision | None:
        """Return a way with its prediction, ``None`` where there is none."""
        rest = self._compute_seconds(end, hit.tokens)
        if rest is None:
            return None
        if way == "compute":
            return Decision(way=way, end_tokens=end, kind=way, seconds=rest)
        load = self._load(hit, way, end)
        waiting = self._waiting(now)
        if not load.load_seconds:
            return None
        if way == "layers":  # two stages, each of which goes through all layers
            longer, shorter = max(load.load_seconds, rest), min(load.load_seconds, rest)
            return replace(load, seconds=waiting + longer + shorter / hit.layers)
        return replace(load, seconds=waiting + load.load_seconds + rest)

    def _load(self, hit: Hit, way: Way, end: int) -> Decision:
        tiers, all_cold = self._tier_bytes(hit, end), self._tier_bytes(hit, hit.end_tokens).get(Tier.COLD, 0.0)
        # Of what is cold its share, as if storage took as long for each byte.
        cold_seconds = hit.cold_seconds * tiers.get(Tier.COLD, 0.0) / all_cold if all_cold else 0.0
        predicted = self._fetching.predict(tiers, cold_seconds) or {}
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

    def _unknown_decision(self, hit: Hit, today: Decision) -> Decision:
        """Return what is done without any prediction: fetch all, and learn about computing now and then."""
        tokens = hit.tokens - hit.local_tokens
        if self._compute_seconds(hit.local_tokens, hit.tokens) is None and self._unknown + 1 >= _UNKNOWN_MAX:
            left_out = -(-max(tokens // REACH, self._chunk_tokens) // self._chunk_tokens) * self._chunk_tokens
            end = -(-hit.end_tokens // self._chunk_tokens) * self._chunk_tokens - left_out
            if end >= self._least_end(hit):
                way: Way = "layers" if self._layerwise(hit, end) else "fetch"
                return replace(self._load(hit, way, end), kind="explore")
        return replace(today, kind="unknown")

    def _exploration(self, hit: Hit, best: Decision, now: float) -> Decision | None:
        """Return what shows how long the side takes that the best way leaves unseen, if that may be afforded."""
        if best.way == "compute":
            end, side = self._least_end(hit), "fetch"
        else:
            end, side = (best.end_tokens - 1) // self._chunk_tokens * self._chunk_tokens, "compute"
        if not self._least_end(hit) <= end < hit.end_tokens:
            return None
        other = self._option(hit, "fetch", end, now)
        if other is None or other.seconds - best.seconds > self._allowed[side] or not self._allowed[side]:
            return None
        return other

    # ------------------------------------------------------------------ predictions

    def _least_end(self, hit: Hit) -> int:
        """Return the end of the shortest load that is made."""
        return -(-(hit.local_tokens + self._load_tokens_min) // self._chunk_tokens) * self._chunk_tokens

    def _chunks(self, hit: Hit, end: int) -> int:
        return -(-end // self._chunk_tokens) - hit.local_tokens // self._chunk_tokens

    def _layerwise(self, hit: Hit, end: int) -> bool:
        return hit.layers > 0 and self._chunks(hit, end) <= hit.layerwise_chunks

    def _compute_seconds(self, computed: int, tokens: int) -> float | None:
        new = tokens - computed
        steps = max(-(-new // self._step_tokens), 1)
        return self._table.predict("prompts", new, attention_pairs(computed, new), steps)

    def _tier_bytes(self, hit: Hit, end: int) -> dict[Tier, float]:
        """Return the stored bytes of a load up to ``end``, by where they are."""
        count = self._chunks(hit, end)
        tiers = Counter(hit.tiers[:count])
        tiers[Tier.STORAGE] += count - tiers.total() + tiers.pop(Tier.NONE, 0)
        return {Tier(tier): chunks * hit.chunk_bytes for tier, chunks in tiers.items() if chunks and hit.chunk_bytes}

    def _waiting(self, now: float) -> float:
        """Return the seconds until a load that is handed over now has its turn."""
        if not self._loads:
            return 0.0
        first = next(iter(self._loads.values()))
        return sum(self._loads.values()) - min(max(now - self._turn, 0.0), first)
