"""The prefetch policy: single rules, and no link gets more bytes than it can carry in time."""

import random

import pytest

from shadowserve.pool.prefetch_policy import Hop, Move, PrefetchPolicy, Waiting

FAST, SLOW = Hop(1000.0), Hop(100.0)


def test_a_hop_takes_its_latency_and_the_bytes_over_its_bandwidth() -> None:
    assert Hop(64e9, 1e-6).seconds(64e6) == pytest.approx(1e-6 + 1e-3)


def test_as_many_bytes_are_prefetched_as_arrive_before_the_request_runs() -> None:
    plan = PrefetchPolicy(1).plan
    assert plan([Waiting("r", 0.5, [400])], [FAST], [0]) == [Move("r", 0, 400)]
    assert plan([Waiting("r", 0.5, [800])], [FAST], [0]) == [Move("r", 0, 500)]
    assert plan([Waiting("r", 0.5, [800])], [FAST], [300]) == [Move("r", 0, pytest.approx(200))]  # planned bytes count
    assert plan([Waiting("r", 0.5, [800])], [Hop(1000, 0.1)], [0]) == [Move("r", 0, pytest.approx(400))]
    assert plan([Waiting("r", 0.5, [800])], [FAST], [500]) == []
    assert plan([Waiting("r", 0.0, [1])], [FAST], [0]) == []  # its turn has started: this is a load


def test_the_reach_is_a_number_of_requests_or_a_time() -> None:
    waiting = [Waiting(number, 1.0 + number, [10]) for number in range(5)]
    assert [move.request for move in PrefetchPolicy(1).plan(waiting, [FAST], [0])] == [0]
    assert [move.request for move in PrefetchPolicy(3).plan(waiting, [FAST], [0])] == [0, 1, 2]
    assert [move.request for move in PrefetchPolicy(None, ahead_s=2.5).plan(waiting, [FAST], [0])] == [0, 1]
    assert len(PrefetchPolicy(None).plan(waiting, [FAST], [0])) == 5


def test_two_hops_begin_earlier_by_as_much_as_the_second_is_slower() -> None:
    waiting = [Waiting(number, 10.0 * (number + 1), [5, 50]) for number in range(20)]
    moves = PrefetchPolicy(1).plan(waiting, [FAST, SLOW], [0, 0])
    assert [move.request for move in moves if move.hop == 0] == [0]
    assert [move.request for move in moves if move.hop == 1] == list(range(10))
    moves = PrefetchPolicy(None, ahead_s=10.0).plan(waiting, [FAST, SLOW], [0, 0])
    assert [move.request for move in moves if move.hop == 1] == list(range(10))


def test_a_move_over_two_hops_leaves_time_for_the_first() -> None:
    plan = PrefetchPolicy(1).plan
    assert plan([Waiting("r", 1.0, [0, 500])], [FAST, SLOW], [600, 0]) == [Move("r", 1, pytest.approx(40))]


@pytest.mark.parametrize("seed", range(20))
def test_everything_promised_arrives_in_time_in_the_order_in_which_requests_run(seed: int) -> None:
    chance = random.Random(seed)
    hops = [Hop(chance.uniform(100, 1000), chance.choice([0, 0.01])) for _ in range(2)]
    begins, waiting = 0.0, []
    for number in range(30):
        begins += chance.expovariate(5)
        waiting.append(Waiting(number, begins, [chance.choice([0, chance.uniform(0, 500)]) for _ in hops]))
    promised = [chance.choice([0, 200.0]) for _ in hops]
    owed = list(promised)
    moves = PrefetchPolicy(None).plan(waiting, hops, promised)
    assert moves or all(each.begins_in_s < 2 for each in waiting)
    for request, hop, size in moves:
        owed[hop] += size
        assert 0 < size <= waiting[request].below[hop]
        assert hops[hop].seconds(owed[hop]) <= waiting[request].begins_in_s + 1e-9
    assert [move.request for move in moves] == sorted(move.request for move in moves)
