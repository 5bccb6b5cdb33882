"""Every fault of the stand-in, on both sides, through four APIs, whole and streamed, once, always, and with a second engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from faults.playing import (
    PATIENT,
    QUICK_SETTINGS,
    ROW_TIMEOUTS,
    ask,
    check,
    expected_answers,
    heal,
    leaves_nothing,
    side,
)
from faults.table import REMOTE, ROWS, SHAPES, UNHARMED, UNSEEN
from pdserve.core import Role
from pdserve.sim.faults import FAULTS, parse_fault
from pdserve.sim.stand_in import run_stand_in
from split import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.asking import Said
    from faults.table import Row, Shape
    from split import Split

    Answers = Mapping[Shape, Said]

_by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@_by_name
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_fault_that_strikes_once(row: Row) -> None:
    """1P1D: the right answer or one clear error; nothing is left behind, and the metric tells."""
    async with split(settings=QUICK_SETTINGS, timeouts=ROW_TIMEOUTS[row.is_slow], config=PATIENT) as deployment:
        alone = await _alone(deployment)
        tally = deployment.gateway.proxy.tally
        before = 0 if row.metric is None else tally.value(row.metric, *row.labels)
        if row.is_slow:
            await _play_at_once(deployment, row, alone, times=len(SHAPES))
        else:
            await _play_in_turn(deployment, row, alone, times=1)
        if row.metric is not None:
            assert tally.value(row.metric, *row.labels) > before


@pytest.mark.parametrize("row", [row for row in ROWS if row.always is not None], ids=lambda row: row.name)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_fault_that_strikes_always(row: Row) -> None:
    """1P1D: nobody else is there to help."""
    async with split(settings=QUICK_SETTINGS, config=PATIENT) as deployment:
        await _play_in_turn(deployment, row, await _alone(deployment), times=None)


@_by_name
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_fault_of_one_of_two(row: Row) -> None:
    """2P2D: one of each works, and that is where most faults end."""
    timeouts = ROW_TIMEOUTS[row.is_slow]
    async with split(
        num_prefill=2, num_decode=2, settings=QUICK_SETTINGS, timeouts=timeouts, config=PATIENT
    ) as deployment:
        alone = await _alone(deployment)
        victim = side(deployment, row.side)[0]
        for shapes in [SHAPES] if row.is_slow else [[shape] for shape in SHAPES]:
            num_struck = victim.faults.num_struck
            victim.faults.inject(parse_fault(row.fault), times=None)
            got = await asyncio.gather(*(ask(deployment, shape) for shape in shapes for _ in range(2)))
            assert victim.faults.num_struck > num_struck
            for index, one in enumerate(got):
                shape = shapes[index // 2]
                check(shape, one, {row.other.by(shape), REMOTE}, alone[shape])
            await heal(deployment)
            await leaves_nothing(deployment, waits_for_lease=row.waits_for_lease)


def test_the_table_is_whole() -> None:
    """Every fault of the stand-in is a row for the side where it matters, or stands where it is said why not."""
    for role in (Role.PREFILL, Role.DECODE):
        known = {row.fault.partition(":")[0] for row in ROWS if row.side is role}
        known |= set(UNHARMED.get(role, ())) | set(UNSEEN.get(role, ()))
        assert known == set(FAULTS)


async def _alone(deployment: Split) -> Answers:
    async with run_stand_in("none", QUICK_SETTINGS) as plain:
        return await expected_answers(deployment.client, plain)


async def _play_in_turn(deployment: Split, row: Row, alone: Answers, *, times: int | None) -> None:
    seen = row.once if times else row.always
    assert seen is not None
    (victim,) = side(deployment, row.side)
    for shape in SHAPES:
        num_struck = victim.faults.num_struck
        victim.faults.inject(parse_fault(row.fault), times=times)
        check(shape, await ask(deployment, shape), {seen.by(shape)}, alone[shape])
        assert victim.faults.num_struck > num_struck
        await heal(deployment)
        waits = row.waits_for_lease if times else row.always_waits_for_lease
        await leaves_nothing(deployment, waits_for_lease=waits)


async def _play_at_once(deployment: Split, row: Row, alone: Answers, *, times: int) -> None:
    """All shapes wait for the same deadline together."""
    (victim,) = side(deployment, row.side)
    victim.faults.inject(parse_fault(row.fault), times=times)
    got = await asyncio.gather(*(ask(deployment, shape) for shape in SHAPES))
    for shape, one in zip(SHAPES, got, strict=True):
        check(shape, one, {row.once.by(shape)}, alone[shape])
    await heal(deployment)
    await leaves_nothing(deployment, waits_for_lease=row.waits_for_lease)
