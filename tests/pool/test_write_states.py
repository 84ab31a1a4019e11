"""The states of a put: the documented table equals the code's."""

import re
from typing import Any

import pytest

from shadowserve.pool import write_states
from shadowserve.pool.volume.tickets import Ticket
from shadowserve.pool.write_states import ENDS, State, Write

NOTHING: Any = None  # parts of a write without effect on its states


def told() -> dict[State, set[State]]:
    """Return the successors of each state in the documented table."""
    assert write_states.__doc__ is not None
    rows = re.findall(r"^([A-Z_]+)  .*?  (?:when .*?  (.*)|no more)$", write_states.__doc__, re.MULTILINE)
    return {State[name]: {State[each] for each in re.findall(r"[A-Z_]{2,}", following)} for name, following in rows}


def may_go(state: State, following: State) -> bool:
    write = Write(NOTHING, NOTHING, NOTHING, None, False, None, [], Ticket(), [], state)
    try:
        write.move_to(following)
    except AssertionError:
        return False
    return write.state is following


def test_the_documented_table_of_states_is_that_of_the_code() -> None:
    assert set(told()) == set(State)
    for state, following in told().items():
        assert {each for each in State if may_go(state, each)} == following


def test_each_final_state_has_an_end() -> None:
    assert {state for state, following in told().items() if not following} == set(ENDS)


@pytest.mark.parametrize("state", ENDS)
def test_only_failed_puts_report_an_error(state: State) -> None:
    assert ENDS[state].fails is (state is State.FAILED) and ENDS[state].removal is (state is State.TAKEN_BACK)
