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
    assert breaker.begin()
    assert not breaker.lets_through
    breaker.end(was_try=True)
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
        was_try = breaker.begin()
        assert breaker.failed()
        breaker.end(was_try=was_try)


def test_what_began_before_neither_tries_nor_blocks(breaker: Breaker, clock: _Clock) -> None:
    """A stream of an hour that was there before keeps nobody from trying, and its failure opens nothing again."""
    was_try = breaker.begin()
    _open(breaker)
    clock.now_s += _CONFIG.open
    assert breaker.lets_through
    assert not breaker.failed()
    breaker.end(was_try=was_try)
    assert breaker.lets_through


@given(st.lists(st.sampled_from(["begin", "end", "succeeded", "failed", "wait"])))
def test_it_never_locks_for_good(events: list[str]) -> None:
    """Whatever happened, once nothing is under way and the longest time has passed a request may try."""
    clock = _Clock()
    breaker = Breaker(_CONFIG, clock=clock)
    running: list[bool] = []
    for event in events:
        if event == "wait":
            clock.now_s += 1.0
        elif event == "begin":
            if breaker.lets_through:
                running.append(breaker.begin())
        elif event == "end":
            if running:
                breaker.end(was_try=running.pop())
        else:
            getattr(breaker, event)()
    for was_try in running:
        breaker.end(was_try=was_try)
    clock.now_s += _CONFIG.max_open
    assert breaker.lets_through
