"""Seats, the queue before them, and its order."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config import AdmissionConfig
from pdserve.errors import Overloaded, Reason
from pdserve.gateway.admission import Admission


def _admission(*, max_concurrent: int = 2, max_queued: int = 3, max_wait: float = 60.0) -> Admission:
    config = AdmissionConfig(max_concurrent=max_concurrent, max_queued=max_queued, max_wait=max_wait)
    return Admission(config, loop=asyncio.get_running_loop())


async def _turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_has_room_starts_at_once() -> None:
    """Without a turn of the event loop."""
    admission = _admission()
    assert admission.try_enter(1)
    assert admission.try_enter(1)
    assert not admission.try_enter(1)


async def test_the_queue_goes_by_priority_then_arrival() -> None:
    """Lower priorities first, as vLLM has it."""
    admission = _admission(max_concurrent=1)
    assert admission.try_enter(1)
    order: list[str] = []

    async def enter(name: str, priority: int) -> None:
        await admission.enter(priority=priority, weight=1)
        order.append(name)

    tasks = [asyncio.create_task(enter(name, priority)) for name, priority in (("a", 0), ("b", 0), ("urgent", -5))]
    await _turn()
    for _ in tasks:
        admission.leave(1)
        await _turn()
    assert order == ["urgent", "a", "b"]


async def test_a_full_queue_refuses_with_a_time_to_come_again() -> None:
    """One more than fits gets 429."""
    admission = _admission(max_concurrent=1, max_queued=1)
    assert admission.try_enter(1)
    waiting = asyncio.create_task(admission.enter(priority=0, weight=1))
    await _turn()
    with pytest.raises(Overloaded) as caught:
        await admission.enter(priority=-9, weight=1)
    assert (caught.value.status, caught.value.reason) == (429, Reason.QUEUE_FULL)
    assert caught.value.retry_after_s >= 1
    admission.leave(1)
    await waiting


async def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    """And leaves the queue as if it had never been there."""
    admission = _admission(max_concurrent=1, max_wait=0.01)
    assert admission.try_enter(1)
    with pytest.raises(Overloaded) as caught:
        await admission.enter(priority=0, weight=1)
    assert caught.value.reason is Reason.QUEUE_TIMEOUT
    assert admission.num_queued == 0
    admission.leave(1)
    assert admission.try_enter(1)


async def test_who_leaves_the_queue_takes_no_seat() -> None:
    """A client that goes while it waits keeps nobody from starting."""
    admission = _admission(max_concurrent=1)
    assert admission.try_enter(1)
    first, second = (asyncio.create_task(admission.enter(priority=0, weight=1)) for _ in range(2))
    await _turn()
    first.cancel()
    await _turn()
    admission.leave(1)
    await second
    assert (admission.num_running, admission.num_queued) == (1, 0)


async def test_who_leaves_in_the_moment_of_its_turn_gives_it_back() -> None:
    """The seat goes to the next one."""
    admission = _admission(max_concurrent=1)
    assert admission.try_enter(1)
    first, second = (asyncio.create_task(admission.enter(priority=0, weight=1)) for _ in range(2))
    await _turn()
    admission.leave(1)
    first.cancel()
    await second
    assert first.cancelled()
    assert (admission.num_running, admission.num_queued) == (1, 0)


async def test_a_request_larger_than_all_seats_runs_by_itself() -> None:
    """It is not kept waiting for ever."""
    admission = _admission(max_concurrent=2)
    assert admission.try_enter(5)
    assert not admission.try_enter(1)
    admission.leave(5)
    assert admission.try_enter(1)


async def test_nobody_overtakes_one_that_needs_more_room() -> None:
    """A large request is not starved by small ones that would fit before it."""
    admission = _admission(max_concurrent=2)
    assert admission.try_enter(1)
    large = asyncio.create_task(admission.enter(priority=0, weight=2))
    await _turn()
    small = asyncio.create_task(admission.enter(priority=0, weight=1))
    await _turn()
    assert not small.done()
    admission.leave(1)
    await large
    assert not small.done()
    admission.leave(2)
    await small


async def test_those_who_left_do_not_fill_the_queue() -> None:
    """Under a load that never lets up they would never come up to be dropped."""
    admission = _admission(max_concurrent=1, max_queued=10_000)
    assert admission.try_enter(1)
    staying = asyncio.create_task(admission.enter(priority=-1, weight=1))
    for _ in range(20):
        leaving = [asyncio.create_task(admission.enter(priority=0, weight=1)) for _ in range(50)]
        await _turn()
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
    assert admission.num_queued == 1
    assert len(admission._queue) <= 2 + 64
    admission.leave(1)
    await staying
    assert admission.num_running == 1
