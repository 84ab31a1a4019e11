"""Log lines that clients can cause: one at once, then a count per minute, and a bound for all of them."""

import math

from shadowserve.incidents import CALLERS_MAX, INTERVAL_S, LINES_MAX, OTHERS, Incidents, Repeated


def test_what_repeats_is_logged_at_once_then_counted_by_the_minute() -> None:
    failed = Incidents()
    logged = [failed.note("tls", "10.0.0.1", "expired", 100.0 + number) for number in range(20)]
    assert logged == [True] + 19 * [False]
    assert failed.note("tls", "10.0.0.1", "hung up", 120.0), "another reason needs a new line"
    assert failed.note("tls", "10.0.0.2", "expired", 130.0), "another caller needs a new line"
    assert failed.due(100.0 + INTERVAL_S - 1) == []
    assert failed.due(100.0 + INTERVAL_S) == [Repeated("tls", "10.0.0.1", 19, "expired")]
    assert not failed.note("tls", "10.0.0.1", "hung up", 170.0), "it goes on"
    assert failed.due(130.0 + INTERVAL_S) == [], "an incident without repetition must be forgotten"
    assert failed.note("tls", "10.0.0.2", "expired", 195.0)
    assert failed.due(math.inf) == [Repeated("tls", "10.0.0.1", 1, "hung up")]
    assert failed.note("tls", "10.0.0.1", "expired", 400.0) and failed.due(math.inf) == []


def test_the_log_has_a_bound_however_many_callers_there_are() -> None:
    failed = Incidents()
    one = [failed.note("tls", "a caller", f"reason {number}", 0.0) for number in range(100)]
    assert sum(one) == LINES_MAX
    many = [failed.note("tls", f"caller {number}", "scan", 1.0) for number in range(10_000)]
    assert sum(many) == CALLERS_MAX - 1
    logged = {repeated.caller: repeated.times for repeated in failed.due(math.inf)}
    assert logged == {"a caller": 100 - LINES_MAX, OTHERS: 10_000 - (CALLERS_MAX - 1)}
