"""Fetch or compute in the connector's scheduler half: measurements of steps and loads, and their effects."""

from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import (
    CHUNK,
    Request,
    arrive,
    full,
    groups_of,
    keys,
    kv_cache_manager,
    matched,
    report,
    state,
    step,
)
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.fetch_policy import Decision
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

RECORD_BYTES = 1_000_000
TOKENS = list(range(40 * CHUNK + 10))
TOKEN_S, BYTE_S = 1e-4, 1e-7
"""Seconds per computed token, and per loaded byte: a fetch of a chunk takes 0.1 s, and computing it 6.4 ms."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Policy:
    """Records its calls."""

    def __init__(self) -> None:
        self.steps = 0
        self.loads: list[tuple[Decision, float]] = []
        self.ended_loads: list[str] = []

    def computed(self) -> None:
        self.steps += 1

    def fetched(self, decision: Decision, seconds: float) -> None:
        self.loads.append((decision, seconds))

    def begin(self, name: str, decision: Decision, now: float) -> None:
        pass

    def ended(self, name: str, now: float) -> None:
        self.ended_loads.append(name)


@pytest.fixture
def parts() -> Any:
    """Return the policy's runner with a policy and a clock of the test, and the runner's reports."""
    from host_control.vllm.fetch_policy import PolicyRunner
    from host_control.vllm.metrics import Counts

    told: list[tuple[Decision, int, float]] = []
    made = SimpleNamespace(clock=Clock(), policy=Policy(), counts=Counts(), told=told)
    made.runner = PolicyRunner(
        HostConfig(), ComputeTable(), LoadTable(), chunk_tokens=CHUNK, step_tokens=4096, counts=made.counts,
        clock=made.clock, report=lambda *arguments: told.append(arguments),
    )  # fmt: skip
    made.runner._policy = made.policy
    return made


def fetching(end: int = 1000) -> Decision:
    return Decision(
        way="fetch", end_tokens=end, kind="fetch", seconds=0.5, load_tiers={Tier.STORAGE: 1e6}, load_seconds=0.4
    )


def loaded(size: float, tier: Tier = Tier.STORAGE) -> Decision:
    """Return a load of the given number of bytes."""
    return Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={tier: size})


def request_of(name: str = "a", tokens: int = 1100) -> Any:
    from host_control.vllm.requests import RequestState

    state = RequestState(Request(name, list(range(tokens))))
    state.probe(0)
    return state


@pytest.mark.parametrize(("seconds", "learnt"), [(0.3, [(fetching(), 0.3)]), (0.0, [])])
def test_a_load_that_ended_in_time_is_learnt_from(parts: Any, seconds: float, learnt: list[Any]) -> None:
    state = request_of()
    parts.runner.follow(state, fetching())
    assert parts.policy.loads == [] and parts.policy.ended_loads == []
    state.load.seconds = seconds
    parts.runner.load_ended(state.load)
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
    assert parts.told == [(fetching(), 1100, pytest.approx(0.6))]
    counted = parts.counts.take().data
    assert counted["decisions/fetch"] == 2
    assert counted["predicted_seconds/fetch"] == 0.5
    assert counted["first_token_seconds/fetch"] == pytest.approx(0.6)


# ---------------------------------------------------------------------------------------------------- requests


@pytest.fixture
def side(make_side: Any, plane: ScriptedDataPlane) -> Any:
    """Return a scheduler half with such a slow link that computing ends first."""
    return slow(make_side(fetch_or_recompute=True), plane)


def slow(side: Any, plane: ScriptedDataPlane) -> Any:
    plane.script.record_bytes = RECORD_BYTES
    policy = side._policy_runner._policy
    for tokens in (500, 1000, 2000):
        side._timing.table.observe("prompts", tokens, tokens * tokens / 2, TOKEN_S * tokens)
        chunks = loaded(tokens * RECORD_BYTES / CHUNK)
        policy.fetched(chunks, chunks.load_bytes * BYTE_S)
    return side


def test_computing_that_is_sooner_is_done_and_nothing_is_stored_again(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 0
    assert matched(side, request) == 0, "the second answer is the same"
    side.allocated(request, (), 0)
    metadata = side.step(step(new={"r": (0, len(TOKENS))}))
    side.stepped()
    assert metadata.loads == [] and metadata.stores == []
    counted = side.counts.take().data
    assert counted["decisions/compute"] == 1, "of two decisions, one was executed"
    assert counted["hit_tokens"] == 40 * CHUNK
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert (told.kind, told.tokens, told.loaded_tokens) == ("compute", len(TOKENS), 0)
    assert told.predicted["compute"] == told.predicted_seconds < told.predicted["fetch"] / 10 < 2


def known_size(side: Any) -> None:
    """Let the scheduler half learn the chunk size, as from an earlier hit."""
    side._policy_runner._chunk_bytes = 2 * RECORD_BYTES


def test_no_lookup_is_waited_for_that_could_change_nothing(side: Any, plane: ScriptedDataPlane) -> None:
    known_size(side)
    plane.script.stall.add("Lookup")
    request = arrive(side, plane, TOKENS, stored=40)
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, (), 0)
    metadata = side.step(step(new={"r": (0, len(TOKENS))}))
    assert metadata.loads == [] == metadata.stores, "the stored chunks are not known yet"
    side.stepped()
    plane.script.unstall.set()
    wait_for(lambda: side._lookup.poll("r") is not None)
    assert side.step(step(cached={"r": (len(TOKENS), 1)})).stores == [], "all chunks are stored"
    side.finished(request)
    counted = side.counts.take().data
    assert counted["decisions/compute"] == 1
    assert (counted["lookup_requests"], counted["hit_tokens"]) == (1, 40 * CHUNK), "it is counted anyway"


def test_chunks_computed_before_the_lookup_answers_are_stored_in_the_next_step(
    side: Any, plane: ScriptedDataPlane
) -> None:
    known_size(side)
    plane.script.stall.add("Lookup")
    request = arrive(side, plane, TOKENS, stored=3)
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, (), 0)
    assert side.step(step(new={"r": (0, len(TOKENS))})).stores == []
    plane.script.unstall.set()
    wait_for(lambda: side._lookup.poll("r") is not None)
    tables = {"r": (list(range(1000, 1200)),)}
    (store,) = side.step(step(cached={"r": (len(TOKENS), 1)}, tables=tables)).stores
    assert len(store.chunk_keys) == 37


@pytest.mark.parametrize(
    "why", ["its size is not known", "it has no second step", "it is handed over", "it may be sooner", "it explores"]
)
def test_a_lookup_that_may_change_something_is_waited_for(
    make_side: Any, side: Any, plane: ScriptedDataPlane, why: str
) -> None:
    more: dict[str, Any] = {}
    if why != "its size is not known":
        known_size(side)
    if why == "it has no second step":
        more["max_tokens"] = 1
    if why == "it is handed over":
        more["kv_transfer_params"] = {"do_remote_decode": True}
    if why == "it may be sooner":
        side._policy_runner._chunk_bytes /= 1e6
    if why == "it explores":
        side._policy_runner._policy._explore_s["fetch"] = 100.0
    plane.script.stall.add("Lookup")
    request = arrive(side, plane, TOKENS, stored=40, **more)
    assert side.matched_tokens(request, 0) is None
    assert side.matched_tokens(request, 0) is None
    plane.script.unstall.set()
    matched(side, request)


def test_an_engine_that_stores_nothing_waits_for_no_lookup_of_a_single_token(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    side = slow(make_side(fetch_or_recompute=True, store=False), plane)
    known_size(side)
    plane.script.stall.add("Lookup")
    assert side.matched_tokens(arrive(side, plane, TOKENS, stored=40, max_tokens=1), 0) == 0
    plane.script.unstall.set()


def test_cold_chunks_are_reported_and_not_fetched_by_the_lookup(make_side: Any, plane: ScriptedDataPlane) -> None:
    """With a fast link, and computing that takes a quarter of a second."""
    side = make_side(fetch_or_recompute=True)
    plane.script.record_bytes = RECORD_BYTES
    policy = side._policy_runner._policy
    for tokens in (500, 1000, 2000):
        side._timing.table.observe("prompts", tokens, tokens * tokens / 2, TOKEN_S * tokens)
        policy.computed()
        policy.fetched(loaded(tokens * RECORD_BYTES / CHUNK), 0.01)
    assert matched(side, arrive(side, plane, TOKENS, stored=40)) == 40 * CHUNK
    plane.script.cold_ms = 3000
    plane.script.cold.update(keys(0, TOKENS))
    request = arrive(side, plane, TOKENS, stored=40, name="cold")
    assert matched(side, request) == 0
    assert plane.prefetches == 0
    side.allocated(request, (), 0)
    side.step(step(new={"cold": (0, len(TOKENS))}))
    side.stepped()
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert told.kind == "compute" and told.cold_seconds == 3.0
    assert told.predicted["fetch"] == pytest.approx(3.01, rel=0.1) and told.stored_bytes == 40 * RECORD_BYTES
    assert dict(told.tier_bytes) == {"cold": 40 * RECORD_BYTES}
    assert side.counts.take().data["cold_seconds/compute"] == 3.0


def test_a_fast_load_is_chosen_and_its_time_is_learned(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = make_side(ranks=2, fetch_or_recompute=True)
    plane.script.record_bytes = 1000
    for number in range(3):
        request = arrive(side, plane, TOKENS, stored=40, name=str(number))
        assert matched(side, request) == 40 * CHUNK
        side.allocated(request, [list(range(100, 300))], 40 * CHUNK)
        side.step(step())
        side.stepped()
        side.worker_output({str(number)}, report(seconds={str(number): 0.01}))
        assert side.counts.take().data["decisions/unknown"] == 1
    policy = side._policy_runner._policy
    predicted = policy._loads.predict({Tier.STORAGE: 2 * 40 * 1000})
    assert predicted == {Tier.STORAGE: pytest.approx(0.01, rel=0.1)}, "of the records of two ranks"
    for tokens in (1000, 2000, 2500):
        side._timing.table.observe("prompts", tokens, tokens * tokens / 2, TOKEN_S * tokens)
    request = arrive(side, plane, TOKENS, stored=40, name="r")
    assert matched(side, request) == 40 * CHUNK
    side.allocated(request, [list(range(100, 300))], 40 * CHUNK)
    assert side.counts.take().data["decisions/fetch"] == 1


def test_a_prompt_that_a_prefill_engine_computed_is_fetched(side: Any, plane: ScriptedDataPlane) -> None:
    told = {"do_remote_prefill": True, "shadowserve": {"v": 1, "tokens": 40 * CHUNK}}
    assert matched(side, arrive(side, plane, TOKENS, stored=40, kv_transfer_params=told)) == 40 * CHUNK


def test_a_request_that_is_preempted_is_decided_anew(side: Any, plane: ScriptedDataPlane) -> None:
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 0
    side.allocated(request, (), 0)
    for tokens in (500, 1000, 2000):  # the link is fast again, as other requests have measured
        chunks = loaded(tokens * RECORD_BYTES / CHUNK)
        side._policy_runner._policy.fetched(chunks, chunks.load_bytes * BYTE_S / 1000)
    request.num_preemptions = 1
    assert matched(side, request) == 40 * CHUNK


def test_a_shorter_prefix_ends_where_the_groups_have_it(
    make_side: Any, plane: ScriptedDataPlane, monkeypatch: Any
) -> None:
    side = slow(make_side(fetch_or_recompute=True), plane)
    shorter = Decision(way="fetch", end_tokens=30 * CHUNK, kind="prefix")
    monkeypatch.setattr(side._policy_runner, "decide", lambda hit: shorter)
    asked = []
    rule = side._engine.groups.hit_tokens
    monkeypatch.setattr(side._engine.groups, "hit_tokens", lambda *given: asked.append(given) or rule(*given) - CHUNK)
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 29 * CHUNK
    assert asked[-1][1] == 30 * CHUNK + 1
    side.allocated(request, [list(range(100, 300))], 29 * CHUNK)
    (load,) = side.step(step()).loads
    assert len(load.groups[0].chunk_keys) == 29


def test_a_load_that_vllm_does_not_take_is_not_waited_for(
    side: Any, plane: ScriptedDataPlane, monkeypatch: Any
) -> None:
    monkeypatch.setattr(side._policy_runner, "decide", lambda hit: fetching(hit.end_tokens))
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 40 * CHUNK
    side.allocated(request, (), 0)
    assert side._loads == {} == side._policy_runner._waiting and request.request_id in side._requests


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_request_that_ends_before_its_load_leaves_nothing_behind(
    side: Any, plane: ScriptedDataPlane, monkeypatch: Any, asynchronous: bool
) -> None:
    monkeypatch.setattr(side._policy_runner, "decide", lambda hit: fetching(hit.end_tokens))
    monkeypatch.setattr(side.ways, "goes_in_step", lambda request: not asynchronous)
    request = arrive(side, plane, TOKENS, stored=40)
    side.allocated(request, [list(range(100, 300))], matched(side, request))
    side.step(step())
    side.finished(request)
    runner = side._policy_runner
    assert side._loads and not runner._waiting
    if asynchronous:
        side.worker_output(None, report(seconds={"r": 1.0}))  # the slower of two ranks counts
        side.worker_output({"r"}, report(seconds={"r": 0.5}))
    else:
        side.worker_output(None, report({"r": 40}, seconds={"r": 1.0}))
    assert side._loads == {} == runner._policy._queued
    line = runner._policy._loads._lines[Tier.STORAGE]
    assert line._last[-1][1] == 1.0, "the policy has learnt it anyway"


def test_without_the_setting_nothing_is_decided(make_side: Any, plane: ScriptedDataPlane) -> None:
    plane.script.record_bytes = RECORD_BYTES
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 40 * CHUNK
    side.allocated(request, [list(range(100, 300))], 40 * CHUNK)
    side.step(step(new={"r": (40 * CHUNK, 10)}))
    side.stepped()
    assert not any(name.startswith("decisions") for name in side.counts.take().data) and plane.decisions == []


def test_a_shorter_prefix_of_several_groups_ends_where_all_groups_can(
    make_side: Any, plane: ScriptedDataPlane, monkeypatch: Any
) -> None:
    specs = full(), state(block_size=CHUNK)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    side = slow(make_side(groups=groups, fetch_or_recompute=True), plane)
    plane.records.update(dict.fromkeys(keys(0, TOKENS), b""))
    plane.records.update({keys(0, TOKENS, 1)[chunk]: b"" for chunk in (11, 39)})
    shorter = Decision(way="fetch", end_tokens=30 * CHUNK, kind="prefix")
    seen = []
    monkeypatch.setattr(side._policy_runner, "decide", lambda hit: seen.append(hit) or shorter)
    request = Request("r", TOKENS)
    side.on_new_request(request)
    assert matched(side, request) == 12 * CHUNK
    assert seen[-1].end_tokens == 40 * CHUNK and seen[-1].chunk_bytes == 2 * RECORD_BYTES


# ---------------------------------------------------------------------------------------------------- tiers


TABLES = [list(range(100, 300))]


def computes(side: Any) -> None:
    """Let the scheduler half learn the engine's computing time."""
    for tokens in (500, 1000, 2000, 2600):
        side._timing.table.observe("prompts", tokens, tokens * tokens / 2, TOKEN_S * tokens)


def test_in_one_engine_a_near_hit_is_loaded_and_a_far_one_is_computed(make_side: Any, plane: ScriptedDataPlane) -> None:
    side = slow(make_side(fetch_or_recompute=True), plane)
    policy = side._policy_runner._policy
    for chunks in (2, 8, 32):
        policy.fetched(loaded(chunks * RECORD_BYTES, Tier.MEMORY), 1e-3)
    far = arrive(side, plane, TOKENS, stored=40, name="far")
    assert matched(side, far) == 0
    side.finished(far)
    plane.script.tiers = dict.fromkeys(keys(0, TOKENS), Tier.MEMORY)
    near = arrive(side, plane, TOKENS, stored=40, name="near")
    assert matched(side, near) == 0, "it does not wait for its lookup, because no earlier hit was that near"
    wait_for(lambda: side._lookup.poll("near") is not None)
    side.finished(near)
    again = arrive(side, plane, TOKENS, stored=40, name="again")
    assert matched(side, again) == 40 * CHUNK
    plane.script.tiers = dict.fromkeys(keys(0, TOKENS)[:30], Tier.MEMORY)
    both = arrive(side, plane, TOKENS, stored=40, name="both")
    assert matched(side, both) == 30 * CHUNK
    side.allocated(both, TABLES, 30 * CHUNK)
    counted = side.counts.take().data
    assert counted["tier_hit_tokens/memory"] == (2 * 40 + 30) * CHUNK
    assert counted["tier_hit_tokens/storage"] == (40 + 10) * CHUNK


def test_by_default_a_cold_prompt_is_waited_for_and_others_go_on(make_side: Any, plane: ScriptedDataPlane) -> None:
    plane.script.cold.update(keys(0, TOKENS)[10:])
    plane.script.cold_ms, plane.script.brings = 3000, 0
    side = make_side()
    cold = arrive(side, plane, TOKENS, stored=40, name="cold")
    assert matched(side, cold) == 40 * CHUNK, "the computing time is unknown, so it waits"
    assert plane.prefetches == 0
    side.allocated(cold, TABLES, 40 * CHUNK)
    assert side.waits(cold)
    (load,) = side.step(step()).loads
    assert load.available == (10, "")
    other = arrive(side, plane, [9, *TOKENS], stored=0, name="other")
    assert matched(side, other) == 0, "another request is served during the wait"
    plane.script.brings = 4

    def available() -> Any:
        return side.step(step()).available.get("cold")

    wait_for(lambda: (more := available()) is not None and more.chunks > 10)
    plane.script.brings = 1 << 30
    wait_for(lambda: available() == (40, "complete"))
    side.worker_output({"cold"}, report(seconds={"cold": 0.1}))
    assert side.step(step(cached={"cold": (len(TOKENS), 1)}, tables={"cold": TABLES})).stores == []


def test_by_default_a_cold_prompt_is_computed_where_that_is_sooner_and_not_stored_again(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    plane.script.cold.update(keys(0, TOKENS)[10:])
    plane.script.record_bytes, plane.script.cold_ms = RECORD_BYTES, 3000
    side = make_side()
    computes(side)
    for number in range(3):  # they measure the time of loads from storage
        near = arrive(side, plane, TOKENS[: 10 * CHUNK + 5 + number], stored=10, name=f"near {number}")
        assert matched(side, near) == 10 * CHUNK
        side.allocated(near, TABLES, 10 * CHUNK)
        side.step(step())
        side.worker_output({near.request_id}, report(seconds={near.request_id: 0.01}))
    assert not any(name.startswith("decisions") for name in side.counts.take().data)
    cold = arrive(side, plane, TOKENS, stored=40, name="cold")
    assert matched(side, cold) == 10 * CHUNK, "near chunks are loaded"
    side.allocated(cold, TABLES, 10 * CHUNK)
    assert side.counts.take().data["decisions/prefix"] == 1
    wait_for(lambda: side._lookup.available("cold") == (10, "complete"))
    assert plane.script.cold == set(keys(0, TOKENS)[10:]), "computed chunks are not read"
    side.step(step())
    side.worker_output({"cold"}, report(seconds={"cold": 0.01}))
    computed = side.step(step(new={"cold": (10 * CHUNK, 30 * CHUNK)}, tables={"cold": TABLES}))
    assert computed.stores == [], "all chunks are stored"


def test_a_load_that_waited_for_object_storage_in_vain_is_not_stored_again(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    plane.script.cold.update(keys(0, TOKENS)[10:])
    plane.script.brings = 0
    side = make_side(fetch_timeout_s=0.1)
    request = arrive(side, plane, TOKENS, stored=40)
    assert matched(side, request) == 40 * CHUNK
    side.allocated(request, TABLES, 40 * CHUNK)
    side.step(step())
    wait_for(lambda: side.step(step()).available.get("r") == (10, "cold_late"))
    side.worker_output({"r"}, report({"r": 10}))
    assert matched(side, request) == 0, "no second offer"
    computed = side.step(step(cached={"r": (10 * CHUNK, 30 * CHUNK)}, tables={"r": TABLES}))
    assert computed.stores == []


def test_several_groups_offer_the_near_chunks_once_after_cold_ones_stayed_away(
    make_side: Any, plane: ScriptedDataPlane
) -> None:
    specs = full(), full(num_kv_heads=2)
    groups = groups_of(*specs)
    groups.bind(kv_cache_manager(*specs))
    side = make_side(groups=groups, fetch_timeout_s=0.1)
    for group in (0, 1):
        plane.records.update(dict.fromkeys(keys(0, TOKENS, group), b""))
    plane.script.cold.update(keys(0, TOKENS, 1)[10:])
    plane.script.brings = 0
    request = Request("r", TOKENS)
    side.on_new_request(request)
    assert matched(side, request) == 40 * CHUNK
    side.allocated(request, [*TABLES, *TABLES], 40 * CHUNK)
    side.step(step())
    wait_for(lambda: side.step(step()).available.get("r") == (10, "cold_late"))
    side.worker_output({"r"}, report({"r": 10}))
    assert matched(side, request) == 10 * CHUNK
    side.allocated(request, [*TABLES, *TABLES], 10 * CHUNK)
    (load,) = side.step(step()).loads
    assert load.available is None, "no request waits"


def test_the_rate_that_decoding_leaves_is_in_the_prediction(
    make_side: Any, plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = slow(make_side(fetch_or_recompute=True), plane)
    policy = side._policy_runner._policy
    for chunks in (2, 8, 32):
        policy.fetched(loaded(chunks * RECORD_BYTES, Tier.MEMORY), 1e-3)
    plane.script.tiers = dict.fromkeys(keys(0, TOKENS), Tier.MEMORY)
    side._policy_runner.start(0, 0, 10 * RECORD_BYTES)
    assert matched(side, arrive(side, plane, TOKENS, stored=40, name="free")) == 40 * CHUNK
    monkeypatch.setattr(type(side._timing), "rate", 10 * RECORD_BYTES)  # one chunk per second
    assert matched(side, arrive(side, plane, TOKENS, stored=40, name="beside")) == 0
