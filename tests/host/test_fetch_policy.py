"""The fetch-or-recompute policy: its results, and the cost of exploring."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from host_control.fetch_policy import Decision, FetchOrRecompute, Hit
from host_control.interference.estimate import Estimate
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable, attention_pairs
from shadowserve.tier import Tier

CHUNK = 256
CHUNK_BYTES = 4e6
TOKEN_S, PAIR_S, STEP_S = 3e-4, 2e-8, 2e-3
LOAD_S = 0.01
MBIT = 1e6 / 8


def compute_seconds(computed: int, tokens: int) -> float:
    new = tokens - computed
    return STEP_S + TOKEN_S * new + PAIR_S * attention_pairs(computed, new)


@dataclass
class Engine:
    """An engine with one request at a time, and a link with a given rate in bytes per second.

    Attributes:
        auto: It fetches everything, layer by layer only where this is predicted to be faster.
        stream_cost: Factor of the time of streamed loads, which the model does not know.
    """

    rate: float
    auto: bool = False
    stream_cost: float = 1.0
    noise: float = 0.0
    layers: int = 0
    chunk_bytes: float = CHUNK_BYTES
    timeout: float = 10.0
    now: float = 1000.0
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = ComputeTable()
        self.policy = FetchOrRecompute(
            self.table,
            LoadTable(),
            chunk_tokens=CHUNK,
            step_tokens=8192,
            load_tokens_min=64,
            fetch_timeout_s=self.timeout,
            layers_first=not self.auto,
        )
        self._random = random.Random(1)

    def _jitter(self) -> float:
        return max(0.5, 1 + self._random.gauss(0, self.noise))

    def hit(self, tokens: int, **changes: Any) -> Hit:
        given = {"tokens": tokens, "local_tokens": 0, "end_tokens": tokens - 1, "chunk_bytes": self.chunk_bytes}
        return Hit(**{**given, "layers": self.layers, **changes})

    def fetch_seconds(self, load_bytes: float) -> float:
        return min(LOAD_S + load_bytes / self.rate, self.timeout)

    def computed(self, computed: int, tokens: int, seconds: float) -> None:
        new = tokens - computed
        self.table.observe("prompts", new, attention_pairs(computed, new), seconds)
        self.policy.computed()

    def compute(self, computed: int, tokens: int) -> float:
        seconds = compute_seconds(computed, tokens) * self._jitter()
        self.now += seconds
        if tokens - computed >= 32:
            self.computed(computed, tokens, seconds)
        return seconds

    def stream(self, hit: Hit) -> float:
        """Return the seconds until the first token if a hit is loaded layer by layer."""
        load = self.fetch_seconds(self.policy._load(hit, "layers", hit.end_tokens).load_bytes)
        rest = compute_seconds(hit.end_tokens, hit.tokens)
        return self.stream_cost * (max(load, rest) + min(load, rest) / hit.layers)

    def whole(self, hit: Hit) -> float:
        load = self.policy._load(hit, "fetch", hit.end_tokens)
        return self.fetch_seconds(load.load_bytes) + compute_seconds(hit.end_tokens, hit.tokens)

    def serve_auto(self, hit: Hit) -> float:
        """Return the seconds until the first token of a hit that is fetched."""
        decision = self.policy.configured(hit, self.now)
        self.decisions.append(decision)
        load = self.fetch_seconds(decision.load_bytes)
        seconds = self.stream(hit) if decision.way == "layers" else self.whole(hit)
        seconds *= self._jitter()
        self.policy.fetched(decision, load)
        self.policy.came(decision, seconds)
        if decision.way == "fetch":
            self.computed(hit.end_tokens, hit.tokens, seconds - load)
        return seconds

    def serve(self, tokens: int) -> float:
        """Return the seconds until the first token of a stored prompt."""
        decision = self.policy.decide(self.hit(tokens), self.now)
        self.decisions.append(decision)
        self.policy.begin("r", decision, self.now)
        if decision.way == "compute":
            return self.compute(0, tokens)
        seconds = self.fetch_seconds(decision.load_bytes) * self._jitter()
        self.now += seconds
        self.policy.ended("r", self.now)
        self.policy.fetched(decision, seconds)
        return seconds + self.compute(decision.end_tokens, tokens)

    def better(self, tokens: int) -> float:
        """Return the time of the better of two fixed choices: always compute, always fetch."""
        fetched = self.fetch_seconds(-(-tokens // CHUNK) * self.chunk_bytes) + compute_seconds(tokens - 1, tokens)
        return min(compute_seconds(0, tokens), fetched)

    def kinds(self) -> list[str]:
        return [decision.kind for decision in self.decisions]


def experienced(**options: Any) -> Engine:
    """Return an engine with measurements of computing and fetching."""
    engine = Engine(**options)
    for tokens in (512, 1024, 4096):
        engine.compute(0, tokens)
        engine.serve(tokens)
    engine.decisions.clear()
    return engine


def test_without_measurements_everything_is_fetched() -> None:
    engine = Engine(rate=1 * MBIT)
    for tokens in (512, 4096):
        stored = {Tier.STORAGE: tokens // CHUNK * CHUNK_BYTES}
        assert engine.policy.decide(engine.hit(tokens), 0.0) == Decision(
            way="fetch", end_tokens=tokens - 1, kind="unknown", load_tiers=stored, tier_bytes=stored
        )
    layered = engine.policy.decide(engine.hit(512, layers=24), 0.0)
    assert (layered.way, layered.kind) == ("layers", "unknown")


def test_with_unknown_sizes_everything_is_fetched() -> None:
    engine = experienced(rate=1 * MBIT)
    assert engine.policy.decide(engine.hit(512), engine.now).way == "compute"
    decision = engine.policy.decide(engine.hit(512, chunk_bytes=0.0), engine.now)
    assert (decision.kind, decision.way, decision.end_tokens) == ("unknown", "fetch", 511)


@pytest.mark.parametrize("mbit", [50, 250, 1000, 4000])
@pytest.mark.parametrize("tokens", [512, 2048, 4096])
def test_the_faster_way_is_selected(mbit: int, tokens: int) -> None:
    engine = experienced(rate=mbit * MBIT)
    taken = engine.serve(tokens)
    assert taken <= 1.02 * engine.better(tokens)
    (decision,) = engine.decisions
    assert {"compute", "fetch"} <= decision.predicted.keys() <= {"compute", "fetch", "prefix"}
    assert decision.seconds == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("mbit", [50, 250, 500, 1000, 4000])
def test_many_prompts_take_little_longer_than_the_best_fixed_choice(mbit: int) -> None:
    engine = experienced(rate=mbit * MBIT, noise=0.1)
    draw = random.Random(2)
    prompts = [draw.choice((512, 1024, 2048, 4096)) for _ in range(300)]
    taken = sum(map(engine.serve, prompts))
    assert taken <= 1.05 * sum(map(engine.better, prompts))


def test_an_engine_that_only_fetches_learns_the_computing_time() -> None:
    engine = Engine(rate=20 * MBIT)
    for _ in range(40):
        engine.serve(2048)
    assert engine.kinds()[:4] == ["unknown"] * 3 + ["explore"]
    assert engine.kinds().count("explore") < 6
    assert set(engine.kinds()[20:]) == {"compute"}


def test_a_link_that_becomes_fast_again_is_noticed_at_a_bounded_cost() -> None:
    engine = experienced(rate=4000 * MBIT)
    engine.rate = 50 * MBIT
    for _ in range(3):
        engine.serve(2048)
    assert engine.kinds()[-1] == "compute", "the policy uses two slow loads"
    slow = [engine.serve(2048) for _ in range(200)]
    assert "explore" in engine.kinds()
    assert sum(slow) <= 1.025 * len(slow) * engine.better(2048)
    engine.rate = 4000 * MBIT
    for _ in range(150):
        engine.serve(2048)
    assert set(engine.kinds()[-10:]) <= {"fetch", "explore"} and "fetch" in engine.kinds()[-10:]


def test_one_slow_load_is_ignored() -> None:
    engine = experienced(rate=4000 * MBIT)
    for _ in range(4):
        engine.serve(2048)
    engine.rate /= 100
    engine.serve(2048)
    engine.rate *= 100
    engine.serve(2048)
    assert set(engine.kinds()) == {"fetch"}


def test_computing_that_becomes_fast_again_is_noticed() -> None:
    engine = experienced(rate=100 * MBIT)
    for _ in range(10):  # another process used the cores
        engine.computed(0, 2048, 20 * compute_seconds(0, 2048))
    engine.serve(2048)
    assert engine.kinds() == ["fetch"]
    for _ in range(300):
        engine.serve(2048)
    assert engine.kinds()[-1] == "compute"


def test_a_load_predicted_to_miss_its_deadline_is_not_started() -> None:
    engine = experienced(rate=50 * MBIT)
    for computing in range(20):  # computing is even slower
        engine.computed(0, 2048 + computing, 100.0)
    decision = engine.policy.decide(engine.hit(8192), engine.now)
    assert decision.kind == "prefix" and decision.way == "fetch"
    assert engine.fetch_seconds(decision.load_bytes) < engine.timeout
    assert decision.end_tokens % CHUNK == 0 and decision.end_tokens > 1024


def test_layers_are_fetched_as_far_as_computing_hides_them() -> None:
    rate = 250 * MBIT
    engine = experienced(rate=rate, layers=24)
    decision = engine.policy.decide(engine.hit(4096, end_tokens=3072), engine.now)
    rest, load = compute_seconds(decision.end_tokens, 4096), engine.fetch_seconds(decision.load_bytes)
    assert decision.way == "layers"
    assert decision.seconds == pytest.approx(max(rest, load) + min(rest, load) / 24, rel=0.05)
    assert decision.seconds < min(decision.predicted["fetch"], decision.predicted["compute"])


def test_of_a_long_prompt_over_a_slow_link_a_suffix_is_computed_while_the_front_streams() -> None:
    """The stream is far larger than any buffer, and computing takes several steps: only the first is beside it."""
    engine = experienced(rate=100 * MBIT, layers=32, timeout=600.0)
    for long in (engine.hit(1 << 15), engine.hit(1 << 16)):
        engine.computed(0, long.tokens, compute_seconds(0, long.tokens))
        load = engine.policy.configured(long, engine.now)
        engine.policy.fetched(load, engine.fetch_seconds(load.load_bytes))
    engine.policy._step_tokens = 8192
    tokens = 1 << 17
    decision = engine.policy.decide(engine.hit(tokens), engine.now)
    assert (decision.way, decision.kind, decision.end_tokens) == ("layers", "prefix", tokens - 8192)
    loading, computing = engine.fetch_seconds(decision.load_bytes), compute_seconds(tokens - 8192, tokens)
    assert decision.seconds == pytest.approx(loading + computing / 32, rel=0.05)
    longer = engine.policy._option(engine.hit(tokens), "layers", tokens - 2 * 8192, engine.now)
    assert longer.seconds > longer.load_seconds + computing, "its second step begins after the load"


@pytest.mark.parametrize("mbit", [50, 250, 1000, 4000, 64000])
@pytest.mark.parametrize("end", [1024, 3840])
def test_auto_is_as_fast_as_the_better_of_whole_and_streamed(mbit: int, end: int) -> None:
    """Streams cost more than the model knows, so that the better way is not the predicted one everywhere."""
    engine = Engine(rate=mbit * MBIT, layers=24, auto=True, stream_cost=1.15, noise=0.02)
    hit = engine.hit(4096, end_tokens=end)
    assert engine.serve_auto(hit) and engine.decisions[0].way == "fetch", "while times are unknown, loads are whole"
    for _ in range(15):
        engine.serve_auto(hit)
    taken = [engine.serve_auto(hit) for _ in range(200)]
    better = min(engine.stream(hit), engine.whole(hit))
    if engine.fetch_seconds(end // CHUNK * CHUNK_BYTES) > 3 * compute_seconds(end, 4096):
        better = engine.whole(hit)  # new requests would wait for the step too long
    assert sum(taken) <= 1.02 * len(taken) * better
    ways = {decision.way for decision in engine.decisions[-200:]}
    gap = max(engine.stream(hit), engine.whole(hit)) / better
    assert gap < 1.3 or ways == {"layers" if engine.stream(hit) == better else "fetch"}


@pytest.mark.parametrize(("before", "after"), [(1.5, 1.0), (1.0, 1.5)])
def test_auto_notices_when_the_other_way_becomes_faster(before: float, after: float) -> None:
    engine = Engine(rate=4000 * MBIT, layers=24, auto=True, stream_cost=before)
    hit = engine.hit(4096, end_tokens=3072)
    for cost in (before, after):
        engine.stream_cost = cost
        for _ in range(400):
            engine.serve_auto(hit)
        faster = "layers" if engine.stream(hit) < engine.whole(hit) else "fetch"
        assert [decision.way for decision in engine.decisions[-10:]].count(faster) >= 9


@pytest.mark.parametrize("arrivals, way", [(0, "layers"), (1, "fetch"), (8, "fetch")])
def test_a_step_waits_long_for_layers_only_while_few_requests_arrive(arrivals: int, way: str) -> None:
    """A load takes five times as long as the step computes; requests arrive during each of eight loads before it."""
    engine = experienced(rate=200 * MBIT, auto=True, layers=32)
    hit = engine.hit(4096, end_tokens=3072)
    load_s = engine.fetch_seconds(engine.policy._load(hit, "fetch", hit.end_tokens).load_bytes)
    assert 3 < load_s / compute_seconds(3072, 4096) < 10
    assert engine.policy.configured(hit, engine.now).way == "fetch", "nothing is known about arrivals"
    for number in range(8):
        arrived = engine.now
        engine.policy.arrived(arrived)
        decision = engine.policy.configured(hit, engine.now)
        engine.policy.begin(str(number), decision, engine.now, arrived)
        for other in range(arrivals):
            engine.policy.arrived(arrived + load_s * (other + 1) / (arrivals + 1))
        engine.now += load_s
        engine.policy.ended(str(number), engine.now)
        engine.now += 1.0
    assert engine.policy.configured(hit, engine.now).way == way


def test_no_step_waits_longer_than_ten_seconds_for_layers() -> None:
    engine = experienced(rate=30 * MBIT, auto=True, layers=32, timeout=100.0)
    hit = engine.hit(4096, end_tokens=3072)
    for number in range(20):
        engine.policy.begin(str(number), engine.policy.configured(hit, engine.now), engine.now)
        engine.now += 30.0
        engine.policy.ended(str(number), engine.now)
    assert engine.policy.configured(hit, engine.now).way == "fetch"


def test_earlier_loads_in_the_queue_count() -> None:
    engine = experienced(rate=1000 * MBIT)
    hit = engine.hit(4096)
    first = engine.policy.decide(hit, engine.now)
    assert first.way == "fetch"
    engine.policy.begin("first", first, engine.now)
    second = engine.policy.decide(hit, engine.now)
    assert second.predicted["fetch"] == pytest.approx(first.predicted["fetch"] + first.load_seconds)
    later = engine.policy.decide(hit, engine.now + first.load_seconds / 2)
    assert later.predicted["fetch"] == pytest.approx(first.predicted["fetch"] + first.load_seconds / 2)
    names = [str(number) for number in range(100)]
    for count, name in enumerate(names):
        engine.policy.begin(name, first, engine.now)
        if count == 5:
            assert engine.policy.decide(hit, engine.now).way == "compute", (
                "the link is busy for longer than computing takes"
            )
    assert engine.policy.decide(hit, engine.now).way == "compute", "it would also miss the time limit"
    for name in ("first", *names):
        engine.policy.ended(name, engine.now)
    assert engine.policy.decide(hit, engine.now).predicted == first.predicted


def test_loads_have_a_minimum_length() -> None:
    table = ComputeTable()
    policy = FetchOrRecompute(
        table, LoadTable(), chunk_tokens=16, step_tokens=2048, load_tokens_min=64, fetch_timeout_s=10
    )
    for tokens in (500, 600, 700):
        table.observe("prompts", tokens, attention_pairs(0, tokens), compute_seconds(0, tokens))
    hit = Hit(tokens=600, local_tokens=100, end_tokens=592, chunk_bytes=1e6)
    seen = set()
    for _ in range(2000):
        decision = policy.decide(hit, 0.0)
        policy.begin("r", decision, 0.0)
        policy.ended("r", 0.0)
        if decision.way != "compute":
            seen.add(decision.end_tokens)
            policy.fetched(decision, 0.1 + decision.load_bytes / 50e6)
    assert len(seen) > 1 and all(end >= 164 and (end == 592 or end % 16 == 0) for end in seen)


def cold_hit(engine: Engine, tokens: int, seconds: float) -> Hit:
    """Return a hit whose chunks are all in object storage."""
    return engine.hit(tokens, tiers=bytes([Tier.COLD]) * -(-tokens // CHUNK), cold_seconds=seconds)


def test_cold_chunks_are_predicted_by_the_storage_nodes_estimate() -> None:
    """Without measured loads, the policy uses the estimate unchanged."""
    engine = experienced(rate=1000 * MBIT)
    near = engine.policy.decide(engine.hit(2048), engine.now)
    assert near.way == "fetch" and near.cold_seconds == 0.0
    cold = engine.policy.decide(cold_hit(engine, 2048, 0.1), engine.now)
    assert cold.way == "fetch" and cold.cold_seconds == 0.1
    assert cold.seconds == pytest.approx(near.seconds + 0.1)
    late = engine.policy.decide(cold_hit(engine, 2048, 5.0), engine.now)
    assert late.way == "compute"
    assert late.predicted["fetch"] == pytest.approx(near.seconds + 5.0)
    assert late.tier_bytes == {Tier.COLD: 2048 // CHUNK * CHUNK_BYTES} and late.cold_seconds == 5.0


def test_the_estimate_is_enough_without_measured_loads() -> None:
    engine = Engine(rate=1000 * MBIT)
    cold = [cold_hit(engine, 2048, seconds) for seconds in (60.0, 5.0, 0.1)]
    assert engine.policy.decide(cold[0], engine.now).kind == "unknown", "the computing time is unknown"
    for tokens in (512, 1024, 4096):
        engine.compute(0, tokens)
    assert [engine.policy.decide(hit, engine.now).way for hit in cold[1:]] == ["compute", "fetch"]


@pytest.mark.parametrize(("share", "streams"), [(0.5, True), (2.5, True), (4.0, False)])
def test_no_step_waits_much_longer_for_object_storage_than_it_computes(share: float, streams: bool) -> None:
    engine = experienced(rate=1000 * MBIT, layers=8)
    tiers, computing = bytes([Tier.COLD]) * (4096 // CHUNK), compute_seconds(4096, 8192)
    hit = engine.hit(8192, end_tokens=4096, tiers=tiers, cold_seconds=share * computing)
    assert ("layers" in engine.policy.decide(hit, engine.now).predicted) == streams


def test_a_shorter_prefix_has_its_share_of_the_cold_time() -> None:
    engine = experienced(rate=1000 * MBIT)
    for computing in range(20):  # computing is slower than every load
        engine.computed(0, 2048 + computing, 100.0)
    decision = engine.policy.decide(cold_hit(engine, 8192, 16.0), engine.now)
    assert decision.kind == "prefix" and 1024 < decision.end_tokens < 8192, "of the 10 seconds that are allowed"
    assert decision.load_cold_seconds == pytest.approx(16.0 * decision.end_tokens / 8192)
    assert decision.load_seconds < 8


@pytest.mark.parametrize(("near", "far"), [(Tier.STORAGE, Tier.COLD), (Tier.MEMORY, Tier.STORAGE)])
def test_the_slow_part_of_a_hit_is_computed(near: Tier, far: Tier) -> None:
    engine = experienced(rate=1000 * MBIT) if far is Tier.COLD else familiar()
    hit = engine.hit(4096, tiers=bytes([near] * 9 + [far] * 7), cold_seconds=20.0 if far is Tier.COLD else 0.0)
    decision = engine.policy.decide(hit, engine.now)
    assert (decision.kind, decision.end_tokens) == ("prefix", 9 * CHUNK), "exactly the near chunks"
    assert decision.load_tiers == {near: 9 * CHUNK_BYTES} and not decision.load_cold_seconds
    assert decision.tier_bytes == {near: 9 * CHUNK_BYTES, far: 7 * CHUNK_BYTES}


def test_a_load_that_waits_for_object_storage_does_not_block_others() -> None:
    engine = experienced(rate=1000 * MBIT)
    cold = engine.policy.decide(cold_hit(engine, 2048, 0.1), engine.now)
    engine.policy.begin("cold", cold, engine.now)
    assert engine.policy.decide(engine.hit(2048), engine.now).queued_seconds == pytest.approx(cold.load_seconds - 0.1)


@pytest.mark.parametrize("takes", [0.25, 4.0])
def test_the_cold_estimate_is_corrected_by_measured_loads(takes: float) -> None:
    """The predictions for the link do not change."""
    engine = experienced(rate=1000 * MBIT)
    draw = random.Random(4)
    for _ in range(24):
        tokens, seconds = draw.choice((1024, 2048, 4096)), draw.choice((0.0, 0.0, 0.5, 2.0))
        hit = cold_hit(engine, tokens, seconds) if seconds else engine.hit(tokens)
        load = engine.policy.configured(hit, engine.now)
        engine.policy.fetched(load, engine.fetch_seconds(load.load_bytes) + takes * seconds)
    near = engine.policy.decide(engine.hit(2048), engine.now).predicted["fetch"]
    assert near == pytest.approx(engine.fetch_seconds(8 * CHUNK_BYTES) + compute_seconds(2047, 2048), rel=0.2)
    cold = engine.policy.decide(cold_hit(engine, 2048, 1.0), engine.now).predicted["fetch"]
    assert cold - near == pytest.approx(takes, rel=0.2)


# ---------------------------------------------------------------------------------------------------- tiers


RATES = {Tier.MEMORY: 4e9, Tier.DEVICE: 1e9, Tier.STORAGE: 50 * MBIT}


def tiered(engine: Engine, tokens: int, *runs: tuple[Tier, int]) -> Hit:
    """Return a hit with a number of chunks in each tier, in this order."""
    return engine.hit(tokens, tiers=bytes([tier for tier, count in runs for _ in range(count)]))


def loaded(engine: Engine, hit: Hit) -> None:
    """Load a hit, each tier at its own rate, one after the other."""
    load = engine.policy.configured(hit, engine.now)
    engine.policy.fetched(load, sum(LOAD_S + size / RATES[tier] for tier, size in load.load_tiers.items()))


def familiar() -> Engine:
    """Return an engine with measurements of computing, of each local tier and of storage."""
    engine = Engine(rate=1000 * MBIT)
    for tokens in (512, 1024, 4096):
        engine.compute(0, tokens)
    for tier in RATES:
        for chunks in (2, 8, 16):
            loaded(engine, tiered(engine, chunks * CHUNK, (tier, chunks)))
    return engine


@pytest.mark.parametrize(("tier", "way"), [(Tier.MEMORY, "fetch"), (Tier.DEVICE, "fetch"), (Tier.STORAGE, "compute")])
def test_fast_tiers_are_fetched_and_slow_ones_computed(tier: Tier, way: str) -> None:
    engine = familiar()
    decision = engine.policy.decide(tiered(engine, 2048, (tier, 8)), engine.now)
    assert decision.way == way
    expected = LOAD_S + 8 * CHUNK_BYTES / RATES[tier] + compute_seconds(2047, 2048)
    assert decision.predicted["fetch"] == pytest.approx(expected, rel=0.1)


def test_a_load_from_several_tiers_is_the_sum_of_the_tiers() -> None:
    engine = familiar()
    hit = tiered(engine, 4096, (Tier.MEMORY, 4), (Tier.DEVICE, 4), (Tier.STORAGE, 8))
    load = engine.policy.configured(hit, engine.now)
    assert load.tier_seconds == {
        tier: pytest.approx(LOAD_S + size / RATES[tier], rel=0.1) for tier, size in load.load_tiers.items()
    }
    assert load.load_seconds == pytest.approx(sum(load.tier_seconds.values()))


def test_a_tier_is_learnt_from_loads_of_several_tiers() -> None:
    engine = Engine(rate=1000 * MBIT)
    for tokens in (512, 1024, 4096):
        engine.compute(0, tokens)
    for chunks in (2, 8, 16):
        loaded(engine, tiered(engine, chunks * CHUNK, (Tier.MEMORY, chunks)))
    mixed = tiered(engine, 4096, (Tier.MEMORY, 8), (Tier.STORAGE, 8))
    assert engine.policy.decide(mixed, engine.now).kind == "unknown"
    for chunks in (2, 4, 8):
        loaded(engine, tiered(engine, 2 * chunks * CHUNK, (Tier.MEMORY, chunks), (Tier.STORAGE, chunks)))
    far = engine.policy.decide(tiered(engine, 2048, (Tier.STORAGE, 8)), engine.now)
    expected = LOAD_S + 8 * CHUNK_BYTES / RATES[Tier.STORAGE] + compute_seconds(2047, 2048)
    assert far.way == "compute" and far.predicted["fetch"] == pytest.approx(expected, rel=0.1)


def test_a_slow_link_does_not_change_local_predictions() -> None:
    engine = familiar()
    before = engine.policy.decide(tiered(engine, 2048, (Tier.MEMORY, 8)), engine.now).seconds
    for _ in range(3):
        load = engine.policy.configured(tiered(engine, 1024, (Tier.STORAGE, 4)), engine.now)
        engine.policy.fetched(load, 20.0)
    assert engine.policy.decide(tiered(engine, 2048, (Tier.MEMORY, 8)), engine.now).seconds == before


def test_learnt_loading_times_are_packed_and_restored() -> None:
    engine, other = familiar(), LoadTable()
    other.restore(engine.policy._loads.pack())
    for load in ({Tier.MEMORY: 1e6}, {Tier.DEVICE: 1e7, Tier.STORAGE: 1e6}):
        assert other.predict(load) == engine.policy._loads.predict(load) is not None
    with pytest.raises(KeyError):
        other.restore({"memory": Estimate(2).pack()})


# ---------------------------------------------------------------------------------------------------- beside decoding


def test_the_rate_limit_bounds_the_predicted_load() -> None:
    engine = familiar()
    hit = tiered(engine, 2048, (Tier.MEMORY, 8))
    free = engine.policy.decide(hit, engine.now)
    held = engine.policy.decide(engine.hit(2048, tiers=hit.tiers, delivery_seconds=0.01), engine.now)
    assert free.load_seconds < 0.03 and held.load_seconds == pytest.approx(0.08), "longer than the tier takes"
    slow = engine.policy.decide(engine.hit(2048, tiers=hit.tiers, delivery_seconds=1.0), engine.now)
    assert slow.way == "compute"


def test_rate_limited_loads_are_not_learnt() -> None:
    engine = familiar()
    hit = tiered(engine, 2048, (Tier.MEMORY, 8))
    before = engine.policy.decide(hit, engine.now).load_seconds
    held = engine.policy.configured(engine.hit(2048, tiers=hit.tiers, delivery_seconds=0.5), engine.now)
    for _ in range(3):
        engine.policy.fetched(held, 4.1)
    assert engine.policy.decide(hit, engine.now).load_seconds == before
    for _ in range(3):  # as after a load without a limit
        engine.policy.fetched(held, 8.0)
    assert engine.policy.decide(hit, engine.now).way == "compute"


# ---------------------------------------------------------------------------------------------------- estimates


def estimate(terms: int, seconds: Callable[..., float], sizes: list[tuple[float, ...]]) -> Estimate:
    made = Estimate(terms)
    for each in sizes:
        made.observe(each, seconds(*each))
    return made


def test_coefficients_are_recovered() -> None:
    made = estimate(2, lambda size, one: 0.01 + size / 1e8, [(1e6, 1), (5e6, 1), (2e7, 1), (1e6, 1)])
    for size in (1e5, 3e6, 1e8):
        assert made.predict((size, 1)) == pytest.approx(0.01 + size / 1e8, rel=0.1)


def test_equal_sizes_give_no_constant_term() -> None:
    made = estimate(2, lambda size, one: size / 1e8, [(1e7, 1)] * 5)
    assert made.predict((2e7, 1)) == pytest.approx(0.2, rel=0.01)


def test_there_is_no_prediction_far_beyond_observed_sizes() -> None:
    made = estimate(2, lambda size, one: size / 1e8, [(1e6, 1), (2e6, 1)])
    assert made.predict((1e6, 1)) is None, "two measurements are not enough"
    made.observe((2e6, 1), 0.02)
    assert made.predict((3e7, 1)) is not None
    assert made.predict((4e7, 1)) is None
    assert made.predict((4e7, 2), 2) is not None, "twice as much in two runs"


def test_coefficients_are_never_negative() -> None:
    draw = random.Random(3)
    for _ in range(200):
        made = Estimate(3)
        for _ in range(draw.randrange(3, 30)):
            made.observe([draw.random() * 10 ** draw.randrange(6), draw.random(), 1], 10 ** draw.uniform(-6, 3))
        for sizes in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
            predicted = made.predict(sizes)
            assert predicted is None or 0 <= predicted < float("inf")
    made.observe((1, 1, 1), 0.0)  # a clock without progress
    assert made.predict((0.0, 0.0, 1.0)) == predicted
