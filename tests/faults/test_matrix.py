"""Every fault of the stand-in, on both sides, through four APIs, whole and streamed, once, always, and with a second engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from faults.playing import (
    PATIENT,
    QUICK_SETTINGS,
    ask,
    check,
    expected_answers,
    heal,
    leaves_nothing,
    side,
    timeouts_of,
)
from faults.table import REMOTE, ROWS, SHAPES, UNHARMED, UNSEEN
from pdserve.core import Role
from pdserve.sim.faults import FAULTS, parse_fault
from pdserve.sim.stand_in import run_stand_in
from split import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.asking import Said
    from faults.table import Row, Seen, Shape
    from split import Split

    Answers = Mapping[Shape, Said]

_on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])
_on_asyncio = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@_on_uvloop
async def test_a_fault(row: Row) -> None:
    """Three deployments side by side: the right answer or one clear error, nothing left behind, and the metric tells."""
    await _play(row)


@pytest.mark.parametrize("row", ROWS[::7], ids=lambda row: row.name)
@_on_asyncio
async def test_a_fault_on_asyncios_own_loop(row: Row) -> None:
    """A sample: its transports close and lose connections otherwise than uvloop's."""
    await _play(row)


def test_the_table_is_whole() -> None:
    """Every fault of the stand-in is a row for the side where it matters, or stands where it is said why not."""
    for role in (Role.PREFILL, Role.DECODE):
        known = {row.fault.partition(":")[0] for row in ROWS if row.side is role}
        known |= set(UNHARMED.get(role, ())) | set(UNSEEN.get(role, ()))
        assert known == set(FAULTS)


async def _play(row: Row) -> None:
    variants = (_once(row), _always(row), _with_another(row))
    failures = [found for found in await asyncio.gather(*variants, return_exceptions=True) if found is not None]
    for failure in failures:
        raise failure


async def _once(row: Row) -> None:
    """1P1D, and one leg suffers it."""
    async with split(settings=QUICK_SETTINGS, timeouts=timeouts_of(row), config=PATIENT) as deployment:
        alone = await _alone(deployment)
        tally = deployment.gateway.proxy.tally
        before = row.count(tally)
        if row.is_slow:
            await _play_at_once(deployment, row, row.once, alone, times=len(SHAPES))
            await leaves_nothing(deployment, waits_for_lease=row.waits_for_lease)
        else:
            await _play_in_turn(deployment, row, alone, times=1)
        assert row.count(tally) > before, f"{row.metric.name} {row.shown_labels}"


async def _always(row: Row) -> None:
    """1P1D, and every leg suffers it: nobody else is there to help."""
    async with split(settings=QUICK_SETTINGS, timeouts=timeouts_of(row), config=PATIENT) as deployment:
        alone = await _alone(deployment)
        if row.is_slow:
            await _play_at_once(deployment, row, row.always, alone, times=None)
            await leaves_nothing(deployment, waits_for_lease=row.always_waits_for_lease)
        else:
            await _play_in_turn(deployment, row, alone, times=None)


async def _with_another(row: Row) -> None:
    """2P2D: one of each works, and that is where most faults end."""
    timeouts = timeouts_of(row)
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
            await leaves_nothing(deployment, waits_for_lease=row.always_waits_for_lease)


async def _alone(deployment: Split) -> Answers:
    await heal(deployment)
    async with run_stand_in("none", QUICK_SETTINGS) as plain:
        return await expected_answers(deployment.client, plain)


async def _play_in_turn(deployment: Split, row: Row, alone: Answers, *, times: int | None) -> None:
    seen = row.once if times else row.always
    (victim,) = side(deployment, row.side)
    for shape in SHAPES:
        num_struck = victim.faults.num_struck
        victim.faults.inject(parse_fault(row.fault), times=times)
        check(shape, await ask(deployment, shape), {seen.by(shape)}, alone[shape])
        assert victim.faults.num_struck > num_struck
        await heal(deployment)
        waits = row.waits_for_lease if times else row.always_waits_for_lease
        await leaves_nothing(deployment, waits_for_lease=waits)


async def _play_at_once(deployment: Split, row: Row, seen: Seen, alone: Answers, *, times: int | None) -> None:
    """All shapes wait for the same deadline together."""
    (victim,) = side(deployment, row.side)
    victim.faults.inject(parse_fault(row.fault), times=times)
    got = await asyncio.gather(*(ask(deployment, shape) for shape in SHAPES))
    for shape, one in zip(SHAPES, got, strict=True):
        check(shape, one, {seen.by(shape)}, alone[shape])
    if times is None:
        await victim.restart()  # A release that hangs there would wait for its deadline.
    await heal(deployment)
