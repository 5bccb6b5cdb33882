"""Plays one row of the table and looks for what it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from bench.asking import MESSAGES, body_of, read_stream, read_whole
from faults.table import SHAPES, Cut, Outcome, Right, Told
from pdserve.config import BreakerConfig, Config, RetriesConfig, TimeoutsConfig
from pdserve.core import Role
from pdserve.engine.pool import PairState
from pdserve.errors import Reason
from split import MODEL, SETTINGS, TIMEOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from bench.asking import Said
    from faults.table import Row, Shape
    from pdserve.engine.pool import EnginePool
    from pdserve.sim.stand_in import StandIn
    from split import Split

PROMPT = "the quick brown fox jumps over the lazy dog and then once more over the same dog"
NUM_TOKENS = 6
PATIENT = Config(breaker=BreakerConfig(failures=1000), retries=RetriesConfig(budget=1.0))
"""Every case is to be tried as if it were the first one."""
QUICK = TimeoutsConfig(
    connect=2.0, prefill=0.4, first_byte=0.4, whole_answer=0.4, silence=0.4, total=10.0, shutdown=2.0
)
QUICK_SETTINGS = dataclasses.replace(SETTINGS, handshake_timeout_s=1.0)
_ENOUGH_S = 8.0
"""For a leg that is not the slow one: a machine that stands still for a moment must not look like another fault."""


def timeouts_of(row: Row) -> TimeoutsConfig:
    """Short ones for the leg that a slow fault strikes, and for that alone."""
    if not row.is_slow:
        return TIMEOUTS
    if row.side is Role.DECODE:
        return msgspec.structs.replace(QUICK, prefill=_ENOUGH_S)
    return msgspec.structs.replace(QUICK, first_byte=_ENOUGH_S, whole_answer=_ENOUGH_S, silence=_ENOUGH_S)


@dataclass(frozen=True, slots=True)
class Got:
    """What a client got."""

    outcome: Outcome
    said: Said
    reason_told: str | None
    """In the header, which only an error with a status has."""


async def ask(deployment: Split, shape: Shape) -> Got:
    """Through the gateway. Fails the test when the answer is neither right nor an error that is told as it should be."""
    response = await _post(deployment.client, shape.api, shape)
    record = deployment.gateway.journal.last(1)[0]
    is_stream = shape.is_stream and response.status_code == 200
    said = (read_stream if is_stream else read_whole)(shape.api, response.content)
    assert said.num_after_end == 0
    header = response.headers.get("x-pdserve-reason")
    if said.error is None:
        assert said.is_marked == is_stream, "the end mark is missing"
        request_id = response.headers["x-pdserve-request-id"]
        answered = deployment.gateway.journal.try_get(request_id)
        assert answered is not None
        return Got(Right(answered.place), said, header)
    if is_stream:
        assert not said.is_marked
        request_id = response.headers["x-pdserve-request-id"]
        cut = deployment.gateway.journal.try_get(request_id)
        assert cut is not None
        assert cut.reason is not None
        if shape.api != MESSAGES:
            assert said.error.reason == cut.reason
        return Got(Cut(Reason(cut.reason)), said, header)
    assert record.reason is not None or header is not None
    assert header is not None
    if header != "engine_status" and shape.api != MESSAGES:
        assert said.error.reason == header
    return Got(Told(response.status_code, Reason(header)), said, header)


async def expected_answers(client: httpx.AsyncClient, plain: StandIn) -> Mapping[Shape, Said]:
    """What one engine alone says to each shape."""
    answers: dict[Shape, Said] = {}
    for shape in SHAPES:
        response = await _post(client, plain.url + shape.api, shape)
        assert response.status_code == 200, response.text
        answers[shape] = (read_stream if shape.is_stream else read_whole)(shape.api, response.content)
    return answers


def check(shape: Shape, got: Got, outcomes: set[Outcome], alone: Said) -> None:
    """The right text and nothing else, or the beginning of it and an error."""
    assert got.outcome in outcomes, f"{shape}: {got.outcome} {got.said.error}"
    if isinstance(got.outcome, Right):
        assert got.said.texts == alone.texts
        assert got.said.ends == alone.ends
        assert got.said.num_output == alone.num_output
        assert got.said.num_prompt == alone.num_prompt
    else:
        assert all(alone.texts[index].startswith(text) for index, text in got.said.texts.items())
    assert not any(word.isupper() and len(word) > 1 for text in got.said.texts.values() for word in text.split())


async def _post(client: httpx.AsyncClient, url: str, shape: Shape) -> httpx.Response:
    body = body_of(shape.api, PROMPT, model=MODEL, max_tokens=NUM_TOKENS, temperature=0, stream=shape.is_stream)
    return await client.post(url, json=body)


# Afterwards


def side(deployment: Split, role: Role) -> list[StandIn]:
    """The engines of a role."""
    return deployment.prefills if role is Role.PREFILL else deployment.decodes


async def heal(deployment: Split) -> None:
    """Nothing goes wrong any more, whoever died is back, and every pair is proven."""
    engines = (*deployment.prefills, *deployment.decodes)
    # What strikes after an answer may be yet to come.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            while any(engine._listener.num_tasks for engine in engines):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.001)
    for engine in engines:
        engine.faults.clear()
        if engine._restart is not None:
            await asyncio.wait([engine._restart])
        if engine.engine.is_dead:
            await engine.revive()
    pool = deployment.gateway.pool
    async with asyncio.timeout(20):
        while not all(engine.is_healthy for engine in pool.snapshots()) or _is_looking(pool):
            for pair in pool.pairs:
                if pair.state is not PairState.PROVEN:
                    pair.moved.set()
            for member in pool._members.values():
                if not member.is_up or member.is_suspect:
                    member.poked.set()
            await asyncio.sleep(0.01)  # What the pool finds out in its own time gives no event for all of this.


def _is_looking(pool: EnginePool) -> bool:
    """Whether an engine is still to be looked at, or a pair to be proven: what is to strike a request might strike that."""
    return any(member.is_doubted or member.poked.is_set() for member in pool._members.values()) or any(
        pair.state is not PairState.PROVEN or pair.is_doubted or pair.is_being_tried or pair.moved.is_set()
        for pair in pool.pairs
    )


async def leaves_nothing(deployment: Split, *, waits_for_lease: bool) -> None:
    """No block, leg, turn or task stays. With `waits_for_lease`, P's blocks stay until their time is up."""
    if waits_for_lease:
        await _until_clean(deployment, but={"blocks", "held_blocks"})
        for engine in deployment.prefills:
            engine.engine.leases.expire(math.inf)
    await _until_clean(deployment, but=set())


async def _until_clean(deployment: Split, *, but: set[str]) -> None:
    try:
        async with asyncio.timeout(8):
            while _leftovers(deployment, but):  # noqa: ASYNC110 - nobody tells of all of it
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"left behind: {_leftovers(deployment, but)}") from None


def _leftovers(deployment: Split, but: set[str]) -> dict[str, object]:
    gateway = deployment.gateway
    pool = gateway.pool
    found: dict[str, object] = {}
    for name, engine in zip(pool.names(), (*deployment.prefills, *deployment.decodes), strict=True):
        left = {what: count for what, count in engine.leftovers.items() if what not in {*but, "connections"}}
        found |= {str(name): left} if left else {}
        counts = {"in_flight": pool.num_in_flight(name), "held": pool.num_held(name)}
        found |= {f"{name} {what}": count for what, count in counts.items() if count}
    admission = gateway.proxy.admission
    counts = {
        "running": admission.num_running,
        "queued": admission.num_queued,
        "releases": len(gateway.proxy.releaser._tasks),
        "requests": len(gateway.client._server.server_state.tasks),
    }
    return found | {what: count for what, count in counts.items() if count}
