"""The handoff table: every walk ends, and none leaves blocks on P without D or a release to answer for them."""

from __future__ import annotations

import random  # noqa: TC003 - hypothesis resolves the annotation

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol.handoff import TABLE, Event, IllegalTransition, RequestLife, State

_MAX_STEPS = 10


@given(st.randoms(use_true_random=False))
def test_every_walk_ends_and_leaks_nothing(rng: random.Random) -> None:
    """Random event orders always close the request; blocks that P holds for us are handed to D or released, exactly once."""
    life = RequestLife()
    walk: list[Event] = []
    num_taken = num_handed = num_released = 0
    while life.state is not State.CLOSED:
        event = rng.choice(list(TABLE[life.state]))
        walk.append(event)
        num_taken += event is Event.HANDOFF_TAKEN
        num_handed += event is Event.DECODE_SENT and life.state is State.HELD
        num_released += life.apply(event)
        assert len(walk) <= _MAX_STEPS, walk
    assert num_taken <= 1
    lost_after_handing = (
        num_handed and walk[-1] in {Event.DECODE_LOST, Event.FAILED} and Event.DECODE_ANSWERED not in walk
    )
    assert num_released == num_taken - num_handed + bool(lost_after_handing), walk


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_every_open_state_can_be_cancelled_and_can_fail(state: State) -> None:
    """A client may leave and a fault may strike at any moment: both lead to the end from everywhere."""
    for event in (Event.CANCELLED, Event.FAILED):
        assert TABLE[state][event].state is State.CLOSED


def test_every_state_is_reachable() -> None:
    """No state stands in the table for nothing."""
    reached = {State.NEW}
    while True:
        further = {step.state for state in reached for step in TABLE[state].values()} | reached
        if further == reached:
            break
        reached = further
    assert reached == set(State)


def test_every_event_is_foreseen_somewhere() -> None:
    """No event stands in the enum for nothing."""
    assert {event for steps in TABLE.values() for event in steps} == set(Event)


def test_a_missing_entry_is_an_error() -> None:
    """An event that cannot come in a state is a fault in the program and says so."""
    with pytest.raises(IllegalTransition, match="DECODE_SENT cannot happen to a request that is new"):
        RequestLife().apply(Event.DECODE_SENT)


def test_a_closed_request_stays_closed() -> None:
    """Nothing follows the end."""
    assert TABLE[State.CLOSED] == {}
