"""Which loads of a step go layer by layer side by side, by predicted times."""

import pytest

from host_control.interference.table import ComputeTable, attention_pairs
from host_control.streams import NEXT_STEP, OTHER_REQUESTS, Stream, Streams

LAYERS = 64
STEP_TOKENS = 4096
FIXED_S, TOKEN_S = 0.1, 0.001


def known(fixed_s: float = FIXED_S, token_s: float = TOKEN_S) -> ComputeTable:
    table = ComputeTable()
    for new in range(100, 4000, 100):
        table.observe("prompts", new, attention_pairs(0, new), fixed_s + new * token_s)
    return table


def stream(load_s: float, new: int = 1000) -> Stream:
    return Stream(load_s, 0, new)


def chosen(streams: Streams, load_s: float, new: int = 1000, **given: bool | float) -> str:
    return streams.why_not(stream(load_s, new), LAYERS, **{"queued_s": 0.0, "busy": False} | given)


@pytest.mark.parametrize(
    ("load_s", "budget", "queued_s", "reason"),
    [
        (0.5, 0.02, 0.0, ""),  # its first layer comes after 0.008 s of a step of 1.1 s
        (1.4, 0.02, 0.0, OTHER_REQUESTS),
        (0.5, 0.0, 0.0, OTHER_REQUESTS),
        (0.5, 0.02, 0.1, OTHER_REQUESTS),  # other loads go first
    ],
)
def test_beside_other_requests_a_step_waits_within_the_budget_only(
    load_s: float, budget: float, queued_s: float, reason: str
) -> None:
    streams = Streams(known(), budget, STEP_TOKENS)
    assert chosen(streams, load_s, busy=True, queued_s=queued_s) == reason
    assert chosen(streams, load_s) == "", "an idle engine waits for nothing else"
    assert chosen(Streams(ComputeTable(), budget, STEP_TOKENS), load_s, busy=True) == OTHER_REQUESTS, (
        "computing time unknown"
    )


@pytest.mark.parametrize(
    ("load_s", "token_s", "reason"),
    [
        (0.01, 0.00001, ""),  # a step takes as long with two requests as with one
        (0.5, 0.001, NEXT_STEP),  # the first request need not wait until the second is computed, too
        (9.0, 0.001, OTHER_REQUESTS),  # the link is slow: the first request need not wait for the second load
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_second_load_takes_the_way_with_the_earliest_first_tokens(
    load_s: float, token_s: float, reason: str, busy: bool
) -> None:
    streams = Streams(known(token_s=token_s), 0.02, STEP_TOKENS)
    streams.join(stream(load_s))
    assert chosen(streams, load_s, busy=busy) == reason
    assert streams.is_closed == (reason == NEXT_STEP), "later requests do not overtake it"
    streams.clear()
    assert not streams.is_closed
    assert chosen(streams, load_s) == "", "it is the next step's first"


def test_while_times_are_unknown_loads_of_an_idle_engine_go_side_by_side() -> None:
    streams = Streams(ComputeTable(), 0.02, STEP_TOKENS)
    streams.join(stream(0.0))
    assert chosen(streams, 0.0) == "" and chosen(streams, 0.0, busy=True) == OTHER_REQUESTS


@pytest.mark.parametrize(("load_s", "reason"), [(0.3, NEXT_STEP), (9.0, OTHER_REQUESTS)])
def test_a_load_of_which_the_step_can_compute_nothing_does_not_join_it(load_s: float, reason: str) -> None:
    streams = Streams(known(), 0.02, 1000)
    streams.join(stream(0.01))
    assert chosen(streams, load_s) == reason
