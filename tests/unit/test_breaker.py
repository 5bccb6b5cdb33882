"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import BreakerConfig
from pdserve.engine.breaker import Breaker, BreakerState

_CONFIG = BreakerConfig(failures=3, open=5.0, max_open=15.0)


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def breaker(clock: _Clock) -> Breaker:
    return Breaker(_CONFIG, clock=clock)


def _open(breaker: Breaker) -> None:
    for _ in range(_CONFIG.failures):
        breaker.failed()


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    """The last of them says that it opened now."""
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert not breaker.lets_through


def test_a_success_between_starts_the_count_again(breaker: Breaker) -> None:
    """Only failures in a row count."""
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed()] == [False, False]
    assert breaker.lets_through


def test_after_its_time_one_request_may_try(breaker: Breaker, clock: _Clock) -> None:
    """Half open lets one through at a time, and the next when that one told nothing."""
    _open(breaker)
    clock.now_s += _CONFIG.open
    assert breaker.lets_through
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.begin()
    assert not breaker.lets_through
    breaker.end()
    assert breaker.lets_through


def test_a_try_that_succeeds_closes_it(breaker: Breaker, clock: _Clock) -> None:
    """And the next outage starts with the short time again."""
    _open(breaker)
    clock.now_s += _CONFIG.open
    assert breaker.lets_through
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    _open(breaker)
    clock.now_s += _CONFIG.open
    assert breaker.lets_through


def test_a_try_that_fails_opens_it_for_longer_up_to_a_bound(breaker: Breaker, clock: _Clock) -> None:
    """5 s, 10 s, 15 s, 15 s."""
    _open(breaker)
    for wait_s in (5.0, 10.0, 15.0, 15.0):
        clock.now_s += wait_s - 0.01
        assert not breaker.lets_through
        clock.now_s += 0.01
        assert breaker.lets_through
        assert breaker.failed()
    assert breaker.num_openings == 5


@given(st.lists(st.sampled_from(["begin", "end", "succeeded", "failed", "wait"])))
def test_it_never_locks_for_good(events: list[str]) -> None:
    """Whatever happened, once nothing is under way and the longest time has passed a request may try."""
    clock = _Clock()
    breaker = Breaker(_CONFIG, clock=clock)
    num_running = 0
    for event in events:
        if event == "wait":
            clock.now_s += 1.0
        elif event == "begin":
            if breaker.lets_through:
                breaker.begin()
                num_running += 1
        elif event == "end":
            if num_running:
                breaker.end()
                num_running -= 1
        else:
            getattr(breaker, event)()
    for _ in range(num_running):
        breaker.end()
    clock.now_s += _CONFIG.max_open
    assert breaker.lets_through
