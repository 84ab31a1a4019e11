"""The states of a put: what its table says is what the code does."""

import re
from typing import Any

import pytest

from shadowserve.pool import write_states
from shadowserve.pool.volume.changes import Ticket
from shadowserve.pool.write_states import ENDS, State, Write

NOTHING: Any = None  # a write's parts, which its states do not concern


def told() -> dict[State, set[State]]:
    """Return which states the table says may follow each."""
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


def test_the_table_of_states_is_what_a_put_goes_through() -> None:
    assert set(told()) == set(State)
    for state, following in told().items():
        assert {each for each in State if may_go(state, each)} == following


def test_a_put_ends_in_each_state_that_nothing_follows_and_in_no_other() -> None:
    assert {state for state, following in told().items() if not following} == set(ENDS)


@pytest.mark.parametrize("state", ENDS)
def test_who_stored_a_value_hears_an_error_only_of_one_that_is_there_no_more(state: State) -> None:
    assert ENDS[state].fails is (state is State.FAILED) and ENDS[state].removal is (state is State.TAKEN_BACK)
