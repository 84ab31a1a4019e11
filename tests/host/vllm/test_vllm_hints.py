"""Hints of requests in the connector's scheduler half: what each one sends, and that absurd ones send nothing."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_for
from scheduler_support import CHUNK, Scene, keys
from scripted import ScriptedDataPlane

from shadowserve.proto import dataplane_pb2 as pb

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = list(range(3 * CHUNK + 5))
GENERATED = list(range(CHUNK))
PAUSE_S = 8.0


def serve(scene: Scene, hints: Any = None, name: str = "r", **attributes: Any) -> list[Any]:
    """Serve a request that generates a chunk, to its end; return its stores."""
    params = None if hints is None else {"shadowserve_hints": hints}
    scene.arrive(TOKENS, name=name, kv_transfer_params=params, **attributes)
    scene.matched()
    scene.side.allocated(scene.request, [list(range(1000, 1100))], 0)
    stores = scene.begin(len(TOKENS))
    scene.request.all_token_ids += GENERATED
    stores += scene.go_on(len(TOKENS), len(GENERATED))
    scene.finish()
    return stores


def reasons(scene: Scene) -> dict[str, float]:
    return scene.counted("slower_paths/")


def action(kind: str, **payload: Any) -> SimpleNamespace:
    return SimpleNamespace(action_id="1", action_type=kind, action_version="1", payload=payload)


def envelope(*actions: SimpleNamespace) -> SimpleNamespace:
    """Return vLLM's ``kv_hints`` of a request."""
    return SimpleNamespace(protocol_version="1", message_id="m", actions=list(actions))


@pytest.mark.parametrize("typed", [False, True], ids=["kv_transfer_params", "kv_hints"])
def test_a_pin_names_all_chunks_also_of_generated_tokens_and_a_release_ends_it(scene: Scene, typed: bool) -> None:
    ways: tuple[dict[str, Any], dict[str, Any]] = ({"hints": {"pin_s": 30}}, {"hints": {"release": True}})
    if typed:
        ways = ({"kv_hints": envelope(action("pin", seconds=30))}, {"kv_hints": envelope(action("release"))})
    for way in ways:
        serve(scene, session_id="a session", **way)
    scene.plane.wait_for_call("Pin", 2)
    pinned, released = scene.plane.pins
    assert list(pinned.keys) == list(released.keys) == keys(0, TOKENS + GENERATED)
    assert (pinned.lasts_ms, released.lasts_ms) == (30_000, 0)
    assert pinned.session == released.session and 0 < len(pinned.session) <= 32
    assert not reasons(scene)


def test_without_a_session_pins_are_the_requests_own_and_a_release_is_counted(scene: Scene) -> None:
    serve(scene, {"pin_s": 30}, name="one")
    serve(scene, {"pin_s": 30}, name="two")
    scene.plane.wait_for_call("Pin", 2)
    assert len({each.session for each in scene.plane.pins}) == 2
    serve(scene, {"release": True}, name="three")
    assert reasons(scene) == {"slower_paths/release_without_session": 1} and len(scene.plane.pins) == 2


def test_a_host_may_ignore_hints(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(hints=False)
    assert {store.lasts_s for store in serve(scene, {"ttl_s": 90, "release": True})} == {0.0}
    assert not reasons(scene)


def test_a_ttl_limits_what_the_request_stores(scene: Scene) -> None:
    assert {store.lasts_s for store in serve(scene, {"ttl_s": 90})} == {90.0}
    assert {store.lasts_s for store in serve(scene, name="other")} == {0.0}
    assert "Pin" not in scene.plane.calls


@pytest.mark.parametrize("session", ["a session", None])
def test_the_next_turn_is_expected_until_it_comes(scene: Scene, session: str | None) -> None:
    plane = scene.plane
    serve(scene, {"prefetch_s": PAUSE_S}, session_id=session)

    def arrived() -> list[tuple[int, list[bytes]]]:
        found = [arrival for message in list(plane.expected) for arrival in message.arrivals]
        return [(each.request, [key for chain in each.chains for key in chain.keys]) for each in found if each.chains]

    wait_for(arrived)
    ((number, wanted),) = arrived()
    assert wanted == keys(0, TOKENS + GENERATED)
    begins = {n: ms for each in plane.expected for n, ms in zip(each.order, each.begins_in_ms, strict=True)}
    assert 0 < begins[number] / 1000 <= PAUSE_S
    serve(scene, name="another session", session_id="other")
    assert not any(number in message.gone for message in plane.expected)
    if session is not None:
        serve(scene, name="the next turn", session_id=session)
        wait_for(lambda: any(number in message.gone for message in list(plane.expected)))


@pytest.mark.parametrize(
    "hints",
    [
        pytest.param({"pin_s": -1}, id="negative"),
        pytest.param({"pin_s": 1e300}, id="huge"),
        pytest.param({"pin_s": 10**5000}, id="a number of 5,000 digits"),
        pytest.param({"ttl_s": math.nan}, id="no number"),
        pytest.param({"ttl_s": True}, id="a truth value"),
        pytest.param({"prefetch_s": "soon"}, id="text"),
        pytest.param({"release": 1}, id="a number for a truth value"),
        pytest.param({"session": ["x"], "pin_s": 1}, id="a session of another type"),
        pytest.param({"pin_s": 5, "release": True}, id="a contradiction"),
        pytest.param({"pin_s": 5, "pin": 5}, id="an unknown key"),
        pytest.param({f"pin_s{number}": 1 for number in range(10_000)}, id="10,000 hints"),
        pytest.param([1, 2], id="a list"),
        pytest.param(envelope(action("share", seconds=1)), id="an unknown action"),
        pytest.param(envelope(*[action("pin", seconds=1)] * 10_000), id="10,000 actions"),
        pytest.param(envelope(action("pin")), id="an action without its payload"),
        pytest.param(SimpleNamespace(actions=7), id="an envelope of another form"),
    ],
)
def test_absurd_hints_cost_one_counted_reason_and_one_line(
    scene: Scene, hints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"kv_hints": hints} if isinstance(hints, SimpleNamespace) else {"hints": hints}
    for name in ("one", "two"):
        assert {store.lasts_s for store in serve(scene, name=name, **given)} == {0.0}
    assert reasons(scene) == {"slower_paths/hint_invalid": 2}
    assert sum("hint_invalid" in record.message for record in caplog.records) == 1
    assert max(len(record.message) for record in caplog.records) < 500
    assert "Pin" not in scene.plane.calls


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (pb.PinResponse(outcome=pb.OUTCOME_COMPLETE), "pin_unsupported"),
        (pb.PinResponse(outcome=pb.OUTCOME_STORAGE_REFUSED, detail="OOM"), "pin_refused"),
        (pb.PinResponse(outcome=pb.OUTCOME_STORAGE_UNAVAILABLE), "pin_unanswered"),
    ],
)
def test_a_pin_that_is_not_set_is_counted(scene: Scene, answer: pb.PinResponse, reason: str) -> None:
    scene.plane.script.pin_answer = answer
    serve(scene, {"pin_s": 30})
    wait_for(lambda: reasons(scene) == {f"slower_paths/{reason}": 1})


def test_a_data_plane_without_local_tiers_prefetches_nothing(scene: Scene, plane: ScriptedDataPlane) -> None:
    plane.script.expect_answer = lambda message: pb.ExpectResponse(unused=True)
    scene.arrive(TOKENS, 2, name="waits")
    wait_for(lambda: scene.side.waiting.unused)
    serve(scene, {"prefetch_s": 5})
    assert reasons(scene) == {"slower_paths/prefetch_unused": 1}
