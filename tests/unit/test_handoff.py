"""The handoff table: every walk ends, and none leaves blocks on P without D or a release to answer for them."""

from __future__ import annotations

import random  # noqa: TC003 - hypothesis resolves the annotation

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol.handoff import TABLE, Event, IllegalTransition, RequestLife, State

_MAX_STEPS = 60
_HOLDING = {State.HELD, State.HANDED}
_FREED_BY_D = {Event.DECODE_ANSWERED, Event.DECODE_REFUSED, Event.CANCELLED}
"""What may follow a handoff that D has without a release: D pulled and freed, told P, or saw its client gone and told P."""


@given(st.randoms(use_true_random=False))
def test_every_walk_ends_and_leaks_nothing(rng: random.Random) -> None:
    """Random event orders, with retries: each handoff is freed by D or released by us, exactly once, and never sent twice."""
    life = RequestLife()
    walk: list[Event] = []
    while life.state is not State.CLOSED:
        events = list(TABLE[life.state])
        # A walk may go round for ever; a request may not, which is for its attempts to say (gateway/attempts.py).
        event = rng.choice(events) if len(walk) < _MAX_STEPS else Event.FAILED
        before = life.state
        releases = life.apply(event)
        walk.append(event)
        if before in _HOLDING and life.state not in _HOLDING:
            is_freed_by_d = before is State.HANDED and event in _FREED_BY_D
            assert releases != is_freed_by_d, walk
        else:
            assert not releases, walk
        if event is Event.DECODE_SENT:
            assert life.state is (State.HANDED if before is State.HELD else State.ALONE), walk


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_every_open_state_can_be_cancelled_and_can_fail(state: State) -> None:
    """A client may leave and a fault may strike at any moment: both lead to the end from everywhere."""
    for event in (Event.CANCELLED, Event.FAILED):
        assert TABLE[state][event].state is State.CLOSED


@pytest.mark.parametrize("state", [State.HANDED, State.ALONE])
def test_a_lost_decode_leg_starts_again_without_the_handoff(state: State) -> None:
    """From there only a fresh P leg or D alone lead on: the same handoff is never sent twice."""
    step = TABLE[state][Event.DECODE_LOST]
    assert step.state is State.OPEN
    assert step.releases == (state is State.HANDED)


def test_every_state_is_reachable() -> None:
    """No state stands in the table for nothing."""
    reached = {State.OPEN}
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
    with pytest.raises(IllegalTransition, match="DECODE_ANSWERED cannot happen to a request that is open"):
        RequestLife().apply(Event.DECODE_ANSWERED)


def test_a_closed_request_stays_closed() -> None:
    """Nothing follows the end."""
    assert TABLE[State.CLOSED] == {}
