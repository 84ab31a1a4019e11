"""Fetch or compute in the connector's scheduler half: measurements of steps and loads, and their effects."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from machine import Clock, wait_for
from scheduler_support import CHUNK, Request, Scene, full, keys, report, state, step

from host_control.config import HostConfig
from host_control.fetch_policy import Decided, Decision
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

RECORD_BYTES = 1_000_000
TOKENS = list(range(40 * CHUNK + 10))
TOKEN_S, BYTE_S = 1e-4, 1e-7
"""Seconds per computed token, and per loaded byte: a fetch of a chunk takes 0.1 s, and computing it 6.4 ms."""


class Policy:
    """Records its calls."""

    def __init__(self) -> None:
        self.steps = 0
        self.loads: list[tuple[Decision, float]] = []
        self.ended_loads: list[str] = []
        self.first_tokens: list[float] = []
        self.arrivals: list[float] = []

    def arrived(self, now: float) -> None:
        self.arrivals.append(now)

    def came(self, decision: Decision, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def computed(self) -> None:
        self.steps += 1

    def fetched(self, decision: Decision, seconds: float) -> None:
        self.loads.append((decision, seconds))

    def begin(self, name: str, decision: Decision, now: float, arrived: float) -> None:
        self.arrivals.append(arrived)

    def ended(self, name: str, now: float) -> None:
        self.ended_loads.append(name)


@pytest.fixture
def parts() -> Any:
    """Return the policy's runner with a policy and a clock of the test, and the runner's reports."""
    from host_control.vllm.fetch_policy import PolicyRunner
    from host_control.vllm.metrics import Counts

    told: list[Decided] = []
    made = SimpleNamespace(clock=Clock(), policy=Policy(), counts=Counts(), told=told)
    made.runner = PolicyRunner(
        HostConfig(), ComputeTable(), LoadTable(), chunk_tokens=CHUNK, step_tokens=4096, counts=made.counts,
        clock=made.clock, report=told.append,
    )  # fmt: skip
    made.runner._policy = made.policy
    return made


def fetching(end: int = 1000) -> Decision:
    tiers = {Tier.STORAGE: 1e6}
    return Decision(way="fetch", end_tokens=end, kind="fetch", seconds=0.5, load_tiers=tiers, load_seconds=0.4)


def loaded(size: float, tier: Tier = Tier.STORAGE) -> Decision:
    """Return a load of the given number of bytes."""
    return Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={tier: size})


def request_of(name: str = "a", tokens: int = 1100) -> Any:
    from host_control.vllm.requests import RequestState

    made = RequestState(Request(name, list(range(tokens))))
    made.probe(0)
    return made


def test_a_requests_own_arrival_is_none_during_its_load(parts: Any) -> None:
    """Symptom: half of the requests counted as arrivals during their own loads, by two readings of two clocks."""
    made = request_of()
    parts.runner.arrived(made)
    parts.clock.now += 0.1
    parts.runner.follow(made, fetching())
    first, again = parts.policy.arrivals
    assert first == again


@pytest.mark.parametrize(("seconds", "learnt"), [(0.3, [(fetching(), 0.3)]), (0.0, [])])
def test_a_load_that_ended_in_time_is_learnt_from(parts: Any, seconds: float, learnt: list[Any]) -> None:
    made = request_of()
    parts.runner.follow(made, fetching())
    assert parts.policy.loads == [] and parts.policy.ended_loads == []
    made.load.seconds = seconds
    parts.runner.load_ended(made.load)
    assert parts.policy.loads == learnt and parts.policy.ended_loads == ["a"]


def test_the_result_of_a_decision_is_reported_with_the_first_token(parts: Any) -> None:
    runner, clock = parts.runner, parts.clock
    runner.follow(request_of("a"), fetching())
    runner.follow(request_of("gone"), fetching())
    runner.forget("gone")
    clock.now += 0.4
    for computed, new in ((1000, 60), (1060, 40)):
        runner.step(step(new={"a": (computed, new), "gone": (1000, 100)}))
        clock.now += 0.1
        if computed > 1000:
            runner.forget("a")  # its first token is its last one: vLLM reports its end before the step's end
        runner.stepped(learnt=computed > 1000)
    assert parts.policy.steps == 1
    runner.stepped(learnt=False)  # one step more than expected
    (result,) = parts.told
    assert (result.decision, result.tokens, result.seconds) == (fetching(), 1100, pytest.approx(0.6))
    assert parts.policy.first_tokens == [result.seconds]
    counted = parts.counts.take().data
    assert counted["decisions/fetch"] == 2
    assert counted["predicted_seconds/fetch"] == 0.5
    assert counted["first_token_seconds/fetch"] == pytest.approx(0.6)


# ---- Requests --------------------------------------------------------------------------------------------------------


def learn(scene: Scene, chunk_s: float | None = None, tier: Tier = Tier.STORAGE) -> Any:
    """Let the scheduler half learn the engine's computing time, and the seconds that a chunk of a tier takes to load.

    Returns:
        The policy.
    """
    scene.plane.script.record_bytes = RECORD_BYTES
    policy = scene.side._policy_runner._policy
    for tokens in (500, 1000, 2000):
        scene.side._timing.table.observe("prompts", tokens, tokens * tokens / 2, TOKEN_S * tokens)
        policy.computed()
        if chunk_s is not None:
            policy.fetched(loaded(tokens * RECORD_BYTES / CHUNK, tier), chunk_s * tokens / CHUNK)
    return policy


@pytest.fixture
def make_slow(make_scene: Callable[..., Scene]) -> Callable[..., Scene]:
    """Return a function that starts a scheduler half with such a slow link that computing ends first."""

    def make(*specs: Any, **options: Any) -> Scene:
        scene = make_scene(*specs, fetch_or_recompute=True, **options)
        learn(scene, RECORD_BYTES * BYTE_S)
        return scene

    return make


@pytest.fixture
def slow(make_slow: Callable[..., Scene]) -> Scene:
    return make_slow()


def computes(scene: Scene) -> Any:
    """Let vLLM compute a whole prompt; return the step's metadata."""
    scene.side.allocated(scene.request, (), 0)
    metadata = scene.side.step(step(new={scene.name: (0, len(TOKENS))}))
    scene.side.stepped()
    return metadata


def told(scene: Scene) -> Any:
    """Return the only decision that the data plane has received."""
    wait_for(lambda: scene.plane.decisions)
    (one,) = scene.plane.decisions
    return one


def test_computing_that_is_sooner_is_done_and_nothing_is_stored_again(slow: Scene) -> None:
    slow.arrive(TOKENS, stored=40)
    assert slow.matched() == 0 == slow.matched(), "the second answer is the same"
    metadata = computes(slow)
    assert metadata.loads == [] and metadata.stores == []
    counted = slow.counted()
    assert counted["decisions/compute"] == 1, "of two decisions, one was executed"
    assert counted["hit_tokens"] == 40 * CHUNK
    decision = told(slow)
    assert (decision.kind, decision.tokens, decision.loaded_tokens) == ("compute", len(TOKENS), 0)
    assert decision.predicted["compute"] == decision.predicted_seconds < decision.predicted["fetch"] / 10 < 2


def known_size(scene: Scene) -> None:
    """Let the scheduler half learn the chunk size, as from an earlier hit."""
    scene.side._policy_runner._chunk_bytes = 2 * RECORD_BYTES


@pytest.mark.parametrize("stored", [40, 3])
def test_no_lookup_is_waited_for_that_could_change_nothing(slow: Scene, stored: int) -> None:
    """Chunks that are computed before the lookup answers are stored in the next step, where storage lacks them."""
    known_size(slow)
    slow.plane.script.stall.add("Lookup")
    slow.arrive(TOKENS, stored=stored)
    assert slow.ask() == 0
    metadata = computes(slow)
    assert metadata.loads == [] == metadata.stores, "the stored chunks are not known yet"
    slow.plane.script.unstall.set()
    wait_for(lambda: slow.side._lookup.poll("r") is not None)
    stores = slow.go_on(len(TOKENS), 1, tables={"r": (list(range(1000, 1200)),)})
    assert [len(store.chunk_keys) for store in stores] == ([37] if stored == 3 else [])
    slow.finish()
    counted = slow.counted()
    assert counted["decisions/compute"] == 1
    assert (counted["lookup_requests"], counted["hit_tokens"]) == (1, stored * CHUNK), "it is counted anyway"


@pytest.mark.parametrize(
    "why", ["its size is not known", "it has no second step", "it is handed over", "it may be sooner", "it explores"]
)
def test_a_lookup_that_may_change_something_is_waited_for(slow: Scene, why: str) -> None:
    more: dict[str, Any] = {}
    runner = slow.side._policy_runner
    if why != "its size is not known":
        known_size(slow)
    if why == "it has no second step":
        more["max_tokens"] = 1
    if why == "it is handed over":
        more["kv_transfer_params"] = {"do_remote_decode": True}
    if why == "it may be sooner":
        runner._chunk_bytes /= 1e6
    if why == "it explores":
        runner._policy._explore_s["fetch"] = 100.0
    slow.plane.script.stall.add("Lookup")
    slow.arrive(TOKENS, stored=40, **more)
    assert slow.ask() is None and slow.ask() is None
    slow.plane.script.unstall.set()
    slow.matched()


def test_an_engine_that_stores_nothing_waits_for_no_lookup_of_a_single_token(make_slow: Callable[..., Scene]) -> None:
    scene = make_slow(store=False)
    known_size(scene)
    scene.plane.script.stall.add("Lookup")
    scene.arrive(TOKENS, stored=40, max_tokens=1)
    assert scene.ask() == 0
    scene.plane.script.unstall.set()


def test_a_fast_load_is_chosen_and_its_time_is_learned(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(ranks=2, fetch_or_recompute=True)
    scene.plane.script.record_bytes = 1000
    for name in "abc":
        scene.arrive(TOKENS, stored=40, name=name)
        assert scene.matched() == 40 * CHUNK
        scene.load()
        scene.side.stepped()
        scene.report(finished=[name], seconds={name: 0.01})
        assert scene.counted()["decisions/unknown"] == 1
    predicted = scene.side._policy_runner._policy._loads.predict({Tier.STORAGE: 2 * 40 * 1000})
    assert predicted == {Tier.STORAGE: pytest.approx(0.01, rel=0.1)}, "of the records of two ranks"
    learn(scene)
    scene.plane.script.record_bytes = 1000
    scene.arrive(TOKENS, stored=40)
    scene.load()
    assert scene.counted()["decisions/fetch"] == 1


def test_a_prompt_that_a_prefill_engine_computed_is_fetched(slow: Scene) -> None:
    params = {"do_remote_prefill": True, "shadowserve": {"v": 1, "tokens": 40 * CHUNK}}
    slow.arrive(TOKENS, stored=40, kv_transfer_params=params)
    assert slow.matched() == 40 * CHUNK


def test_a_request_that_is_preempted_is_decided_anew(slow: Scene) -> None:
    request = slow.arrive(TOKENS, stored=40)
    assert slow.matched() == 0
    slow.side.allocated(request, (), 0)
    learn(slow, RECORD_BYTES * BYTE_S / 1000)  # the link is fast again, as other requests have measured
    request.num_preemptions = 1
    assert slow.matched() == 40 * CHUNK


def test_a_shorter_prefix_ends_where_all_groups_have_it(make_slow: Callable[..., Scene], monkeypatch: Any) -> None:
    scene = make_slow(full(), state(block_size=CHUNK))
    scene.plane.records.update(dict.fromkeys(keys(0, TOKENS), b""))
    scene.plane.records.update({keys(0, TOKENS, 1)[chunk]: b"" for chunk in (11, 39)})
    shorter = Decision(way="fetch", end_tokens=30 * CHUNK, kind="prefix")
    seen = []
    monkeypatch.setattr(scene.side._policy_runner, "decide", lambda hit: seen.append(hit) or shorter)
    scene.arrive(TOKENS)
    assert scene.matched() == 12 * CHUNK
    assert seen[-1].end_tokens == 40 * CHUNK and seen[-1].chunk_bytes == 2 * RECORD_BYTES
    assert len(scene.load([range(100, 300), range(400, 600)]).groups[0].chunk_keys) == 12


def test_a_load_that_vllm_does_not_take_is_not_waited_for(slow: Scene, monkeypatch: Any) -> None:
    monkeypatch.setattr(slow.side._policy_runner, "decide", lambda hit: fetching(hit.end_tokens))
    slow.arrive(TOKENS, stored=40)
    assert slow.matched() == 40 * CHUNK
    slow.side.allocated(slow.request, (), 0)
    assert slow.side._loads == {} == slow.side._policy_runner._waiting and "r" in slow.side._requests


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_request_that_ends_before_its_load_leaves_nothing_behind(
    slow: Scene, monkeypatch: Any, asynchronous: bool
) -> None:
    side, runner = slow.side, slow.side._policy_runner
    monkeypatch.setattr(runner, "decide", lambda hit: fetching(hit.end_tokens))
    monkeypatch.setattr(side.ways, "goes_in_step", lambda request: not asynchronous)
    slow.arrive(TOKENS, stored=40)
    slow.load()
    slow.finish()
    assert side._loads and not runner._waiting
    if asynchronous:
        slow.report(seconds={"r": 1.0})  # the slower of two ranks counts
        slow.report(finished=["r"], seconds={"r": 0.5})
    else:
        side.worker_output(None, report({"r": 40}, seconds={"r": 1.0}))
    assert side._loads == {} == runner._policy._queued
    line = runner._policy._loads._lines[Tier.STORAGE]
    assert line._last[-1][1] == 1.0, "the policy has learnt it anyway"


def test_without_the_setting_nothing_is_decided(scene: Scene) -> None:
    scene.plane.script.record_bytes = RECORD_BYTES
    scene.arrive(TOKENS, stored=40)
    scene.load()
    scene.begin(10, 40 * CHUNK)
    scene.side.stepped()
    assert scene.counted("decisions") == {} and scene.plane.decisions == []


# ---- Tiers -----------------------------------------------------------------------------------------------------------


def test_cold_chunks_are_reported_and_not_fetched_by_the_lookup(make_scene: Callable[..., Scene]) -> None:
    """With a fast link, and computing that takes a quarter of a second."""
    scene = make_scene(fetch_or_recompute=True)
    policy, script = learn(scene), scene.plane.script
    for chunks in (8, 16, 32):
        policy.fetched(loaded(chunks * RECORD_BYTES), 0.01)
    scene.arrive(TOKENS, stored=40)
    assert scene.matched() == 40 * CHUNK
    script.cold_ms = 3000
    script.cold.update(keys(0, TOKENS))
    scene.arrive(TOKENS, stored=40, name="cold")
    assert scene.matched() == 0 == scene.plane.prefetches
    computes(scene)
    decision = told(scene)
    assert decision.kind == "compute" and decision.cold_seconds == 3.0
    assert decision.predicted["fetch"] == pytest.approx(3.01, rel=0.1) and decision.stored_bytes == 40 * RECORD_BYTES
    assert dict(decision.tier_bytes) == {"cold": 40 * RECORD_BYTES}
    assert scene.counted()["cold_seconds/compute"] == 3.0


def test_in_one_engine_a_near_hit_is_loaded_and_a_far_one_is_computed(slow: Scene) -> None:
    policy, script = slow.side._policy_runner._policy, slow.plane.script
    for chunks in (2, 8, 32):
        policy.fetched(loaded(chunks * RECORD_BYTES, Tier.MEMORY), 1e-3)
    slow.arrive(TOKENS, stored=40, name="far")
    assert slow.matched() == 0
    slow.finish()
    script.tiers = dict.fromkeys(keys(0, TOKENS), Tier.MEMORY)
    slow.arrive(TOKENS, stored=40, name="near")
    assert slow.matched() == 0, "it does not wait for its lookup, because no earlier hit was that near"
    wait_for(lambda: slow.side._lookup.poll("near") is not None)
    slow.finish()
    slow.arrive(TOKENS, stored=40, name="again")
    assert slow.matched() == 40 * CHUNK
    script.tiers = dict.fromkeys(keys(0, TOKENS)[:30], Tier.MEMORY)
    slow.arrive(TOKENS, stored=40, name="both")
    assert slow.matched() == 30 * CHUNK
    slow.load()
    counted = slow.counted("tier_hit_tokens")
    assert counted["tier_hit_tokens/memory"] == (2 * 40 + 30) * CHUNK
    assert counted["tier_hit_tokens/storage"] == (40 + 10) * CHUNK


def test_by_default_a_cold_prompt_is_waited_for_and_others_go_on(scene: Scene) -> None:
    script, cold_tables = scene.plane.script, {"cold": [list(range(100, 300))]}
    script.cold.update(keys(0, TOKENS)[10:])
    script.cold_ms, script.brings = 3000, 0
    cold = scene.arrive(TOKENS, stored=40, name="cold")
    assert scene.matched() == 40 * CHUNK, "the computing time is unknown, so it waits"
    assert scene.plane.prefetches == 0
    assert scene.load().available == (10, "") and scene.side.waits(cold)
    scene.arrive([9, *TOKENS], name="other")
    assert scene.matched() == 0, "another request is served during the wait"
    scene.request = cold
    script.brings = 4
    wait_for(lambda: (more := scene.available()) is not None and more.chunks > 10)
    script.brings = 1 << 30
    wait_for(lambda: scene.available() == (40, "complete"))
    scene.report(finished=["cold"], seconds={"cold": 0.1})
    assert scene.go_on(len(TOKENS), 1, tables=cold_tables) == []


def test_in_layer_order_a_cold_prompt_streams(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(layer_order=True)
    scene.side.ways.by_layers, scene.side._policy_runner._layers = True, 4
    scene.plane.script.cold.update(keys(0, TOKENS)[10:])
    cold = scene.arrive(TOKENS, stored=40, status=None)
    operation = scene.load()
    assert operation.layerwise and operation.available is None and not scene.side.waits(cold)
    assert scene.plane.prefetches == 0, "the fetch itself names the cold chunks"
    assert scene.counted("slower_paths") == {}


def test_by_default_a_cold_prompt_is_computed_where_that_is_sooner_and_not_stored_again(scene: Scene) -> None:
    script = scene.plane.script
    script.cold.update(keys(0, TOKENS)[10:])
    script.cold_ms = 3000
    learn(scene)
    for number in range(3):  # they measure the time of loads from storage
        scene.arrive(TOKENS[: 10 * CHUNK + 5 + number], stored=10, name=f"near {number}")
        assert scene.matched() == 10 * CHUNK
        scene.load()
        scene.report(finished=[scene.name], seconds={scene.name: 0.01})
    assert scene.counted("decisions") == {}
    scene.arrive(TOKENS, stored=40, name="cold")
    assert scene.matched() == 10 * CHUNK, "near chunks are loaded"
    scene.load()
    assert scene.counted()["decisions/prefix"] == 1
    wait_for(lambda: scene.side._lookup.available("cold") == (10, "complete"))
    assert script.cold == set(keys(0, TOKENS)[10:]), "computed chunks are not read"
    scene.report(finished=["cold"], seconds={"cold": 0.01})
    tables = {"cold": [list(range(100, 300))]}
    assert scene.begin(30 * CHUNK, 10 * CHUNK, tables=tables) == [], "all chunks are stored"


@pytest.mark.parametrize("several", [False, True])
def test_a_load_that_waited_for_object_storage_in_vain_is_not_stored_again(
    make_scene: Callable[..., Scene], several: bool
) -> None:
    """Several groups offer the near chunks once more: vLLM takes all of a load or nothing."""
    scene = make_scene(*((full(), full(num_kv_heads=2)) if several else ()), fetch_timeout_s=0.1)
    for group in (0, 1):
        scene.plane.records.update(dict.fromkeys(keys(0, TOKENS, group), b""))
    scene.plane.script.cold.update(keys(0, TOKENS, int(several))[10:])
    scene.plane.script.brings = 0
    tables = [list(range(100, 300))] * (1 + several)
    scene.arrive(TOKENS)
    assert scene.matched() == 40 * CHUNK
    scene.load(tables)
    wait_for(lambda: scene.available() == (10, "cold_late"))
    scene.report({"r": 10}, finished=["r"])
    assert scene.matched() == (10 * CHUNK if several else 0)
    if several:
        assert scene.load(tables).available is None, "no request waits"
    else:
        assert scene.go_on(10 * CHUNK, 30 * CHUNK, tables={"r": tables}) == []


def test_the_rate_that_decoding_leaves_is_in_the_prediction(slow: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = slow.side._policy_runner._policy
    for chunks in (2, 8, 32):
        policy.fetched(loaded(chunks * RECORD_BYTES, Tier.MEMORY), 1e-3)
    slow.plane.script.tiers = dict.fromkeys(keys(0, TOKENS), Tier.MEMORY)
    slow.side._policy_runner.start(0, 10 * RECORD_BYTES)
    slow.arrive(TOKENS, stored=40, name="free")
    assert slow.matched() == 40 * CHUNK
    monkeypatch.setattr(type(slow.side._timing), "rate", 10 * RECORD_BYTES)  # one chunk per second
    slow.arrive(TOKENS, stored=40, name="beside")
    assert slow.matched() == 0
