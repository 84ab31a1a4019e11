"""The table of a transfer's states."""

import pytest

from host_control.transfer import TRANSITIONS, Event, Reason, State, Transfer
from shadowserve.proto import dataplane_pb2 as pb

LOAD = [
    (Event.WAIT, State.PENDING),
    (Event.PROBE, State.PROBING),
    (Event.OFFER, State.OFFERED),
    (Event.ALLOCATE, State.ALLOCATED),
    (Event.QUEUE, State.QUEUED),
    (Event.START, State.MOVING),
    (Event.QUEUE, State.QUEUED),
    (Event.START, State.MOVING),
]
"""A load whose lookup waits for pending chunks, and which waits for further chunks while it runs."""


@pytest.mark.parametrize(
    ("event", "end"),
    [(Event.COMPLETE, State.PLACED), (Event.FALL_SHORT, State.SHORT), (Event.CANCEL, State.CANCELLED)],
)
def test_a_load_goes_from_its_lookup_to_one_end(event: Event, end: State) -> None:
    transfer = Transfer()
    for step, state in LOAD:
        assert transfer.on(step) is state
    assert transfer.on(event, Reason.ABSENT) is end
    assert transfer.reason is Reason.ABSENT


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_an_event_that_the_table_does_not_have_is_refused(state: State, event: Event) -> None:
    transfer = Transfer(state)
    if event in TRANSITIONS[state]:
        assert transfer.on(event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(ValueError, match=f"is {state} cannot follow the event '{event}'"):
            transfer.on(event)
        assert transfer.state is state


def test_every_state_can_be_reached_and_has_a_row() -> None:
    reached = {State.PROBING, State.QUEUED} | {target for row in TRANSITIONS.values() for target in row.values()}
    assert reached == set(TRANSITIONS) == set(State)


def test_blocks_are_never_kept_for_a_transfer_that_can_be_looked_up_again() -> None:
    assert not [state for state in (State.ALLOCATED, State.QUEUED, State.MOVING) if Event.PROBE in TRANSITIONS[state]]


def test_every_outcome_of_the_wire_is_a_reason() -> None:
    assert {name.removeprefix("OUTCOME_").lower() for name in pb.Outcome.keys()} <= set(Reason)
