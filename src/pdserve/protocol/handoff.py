"""One request's life as a table: which event may come in which state, where it leads, and whether P must be told to free.

Everything about transitions stands in TABLE; a pair that is missing there is a fault in the program, not in the request.
This module performs nothing: the proxy reports events and does what the table says.
"""

from __future__ import annotations

import enum

import msgspec


class _Word(enum.Enum):
    """Its members stand in the table below, and what Enum itself has for a hash is written in Python."""

    __hash__ = object.__hash__


class State(_Word):
    """Where a request is."""

    OPEN = "open"
    """No leg is under way and no handoff in hand: at the start, and again after a leg that failed."""
    PREFILLING = "prefilling"
    HELD = "held"
    """P holds the prompt's blocks for us, and no D knows of them yet."""
    HANDED = "handed"
    """D has the handoff and answers for P's blocks: it pulls and frees them, or frees them when the request is aborted."""
    ALONE = "alone"
    DECODING = "decoding"
    CLOSED = "closed"


class Event(_Word):
    """What can happen to it."""

    PREFILL_SENT = "prefill_sent"
    HANDOFF_TAKEN = "handoff_taken"
    PREFILL_FAILED = "prefill_failed"
    """P answered without a usable handoff, or not at all; whatever P computed, it keeps no blocks for us."""
    PREFILL_REFUSED = "prefill_refused"
    """P found fault with the client's request; D would find the same."""
    HANDOFF_REFUSED = "handoff_refused"
    """Too old, from an engine that nobody proved, or an address that D may not or cannot reach: not sent."""
    DECODE_SENT = "decode_sent"
    DECODE_ANSWERED = "decode_answered"
    DECODE_REFUSED = "decode_refused"
    """D found fault with the request before admission, and told P to free."""
    DECODE_REFUSED_UNTOLD = "decode_refused_untold"
    """The same in a way of which P hears nothing (protocol/nixl.py, `tells_prefill`)."""
    DECODE_LOST = "decode_lost"
    """D died, failed in itself or kept silent before it answered: it may never have told P anything."""
    FINISHED = "finished"
    BROKE_OFF = "broke_off"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Nothing that could go on: no engine left, or a fault of ours."""


class Step(msgspec.Struct, frozen=True):
    """Where an event leads."""

    state: State
    releases: bool = False
    """P holds blocks that nobody will fetch: free them now instead of when the lease ends."""


_END = Step(State.CLOSED)
_END_RELEASING = Step(State.CLOSED, releases=True)

TABLE: dict[State, dict[Event, Step]] = {
    State.OPEN: {
        Event.PREFILL_SENT: Step(State.PREFILLING),
        Event.DECODE_SENT: Step(State.ALONE),
        Event.CANCELLED: _END,
        Event.FAILED: _END,
    },
    State.PREFILLING: {
        Event.HANDOFF_TAKEN: Step(State.HELD),
        Event.PREFILL_FAILED: Step(State.OPEN),
        Event.PREFILL_REFUSED: _END,
        # P sees its client gone and aborts: an aborted request keeps no blocks (pull_scheduler.py, request_finished). An
        # answer that has left P by then still comes, a little after the request's end, and is released for itself.
        Event.CANCELLED: _END,
        Event.FAILED: _END,
    },
    State.HELD: {
        Event.DECODE_SENT: Step(State.HANDED),
        Event.HANDOFF_REFUSED: Step(State.OPEN, releases=True),
        Event.CANCELLED: _END_RELEASING,
        Event.FAILED: _END_RELEASING,
    },
    State.HANDED: {
        Event.DECODE_ANSWERED: Step(State.DECODING),
        Event.DECODE_REFUSED: _END,
        Event.DECODE_REFUSED_UNTOLD: _END_RELEASING,
        # A handoff that D had is never sent again: D may have freed the blocks with it.
        Event.DECODE_LOST: Step(State.OPEN, releases=True),
        # D sees its client gone and aborts, which frees P's blocks whether or not it had pulled them.
        Event.CANCELLED: _END,
        Event.FAILED: _END_RELEASING,
    },
    State.ALONE: {
        Event.DECODE_ANSWERED: Step(State.DECODING),
        Event.DECODE_REFUSED: _END,
        Event.DECODE_REFUSED_UNTOLD: _END,
        Event.DECODE_LOST: Step(State.OPEN),
        Event.CANCELLED: _END,
        Event.FAILED: _END,
    },
    State.DECODING: {
        Event.FINISHED: _END,
        Event.BROKE_OFF: _END,
        Event.CANCELLED: _END,
        Event.FAILED: _END,
    },
    State.CLOSED: {},
}


class IllegalTransition(AssertionError):
    """An event came in a state that the table does not foresee."""


class RequestLife:
    """One request's way through the table."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.OPEN

    def apply(self, event: Event) -> bool:
        """Move on. Returns whether P's blocks must be released now. Raises IllegalTransition."""
        step = TABLE[self.state].get(event)
        if step is None:
            raise IllegalTransition(f"{event.name} cannot happen to a request that is {self.state.value}")
        self.state = step.state
        return step.releases
