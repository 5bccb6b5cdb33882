"""Clients that leave, deadlines, engines that restart or run out of blocks: at every moment of a request's life."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from typing import TYPE_CHECKING

import pytest

from bench.asking import APIS, MESSAGES, body_of, read_stream
from faults.playing import PATIENT, PROMPT, QUICK, QUICK_SETTINGS, ask, expected_answers, heal, leaves_nothing
from faults.table import REMOTE, SHAPES, Cut, Shape, Told
from pdserve.config import AdmissionConfig, Config, RetriesConfig, TimeoutsConfig
from pdserve.core import EngineName, PrefillPlace
from pdserve.errors import Reason
from pdserve.http.client import ConnectionPool
from pdserve.sim.faults import ErrorAfter, ErrorStatus, NeverAnswer, NeverLoad, Stale
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.sim.stand_in import run_stand_in
from pdserve.telemetry.metrics import ENGINE_RESTARTS, HANDOFFS_REFUSED, RELEASES, REQUESTS, RETRIES
from split import MODEL, TIMEOUTS, Split, split, until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

_COMPLETION, _STREAM = Shape("/v1/completions", is_stream=False), Shape("/v1/completions", is_stream=True)
_UNHURRIED = EngineSettings(model=MODEL, max_model_len=2048, num_blocks=512, timing=Timing(decode_step_s=0.05))
_ONE_SEAT = Config(
    breaker=PATIENT.breaker, retries=PATIENT.retries, admission=AdmissionConfig(max_concurrent=1, max_queued=8)
)


async def _post(deployment: Split, shape: Shape, *, max_tokens: int = 6) -> httpx.Response:
    body = body_of(
        shape.api, PROMPT, model=MODEL, max_tokens=max_tokens, temperature=0, stream=shape.is_stream, ignore_eos=True
    )
    return await deployment.client.post(shape.api, json=body)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not holds():  # noqa: ASYNC110 - what is looked at gives no event
            await asyncio.sleep(0.002)


async def _leave(asking: asyncio.Task[httpx.Response]) -> None:
    """The client's connection closes with it."""
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled(), repr(asking)


def _num_left(deployment: Split) -> int:
    tally = deployment.gateway.proxy.tally
    return sum(tally.value(REQUESTS, api, "disconnected") for api in APIS)


# The client leaves


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_a_client_leaves_at_every_moment(shape: Shape) -> None:
    """Queued, with P, between the legs, with D before its first byte, in the transfer: both legs end, and nothing stays."""
    async with split(settings=QUICK_SETTINGS, config=_ONE_SEAT) as deployment:
        admission, prefill, decode = deployment.gateway.proxy.admission, deployment.prefill, deployment.decode
        prefill.faults.inject(NeverAnswer())
        num_seen = len(prefill.requests)
        first = asyncio.create_task(_post(deployment, shape))
        await _until(lambda: len(prefill.requests) > num_seen)
        queued = asyncio.create_task(_post(deployment, shape))
        await _until(lambda: admission.num_queued == 1)
        await _leave(queued)
        await _until(lambda: admission.num_queued == 0)
        await _leave(first)
        await leaves_nothing(deployment, waits_for_lease=False)
        for fault in (NeverAnswer(), NeverLoad()):
            decode.faults.inject(fault)
            num_seen = len(decode.requests)
            asking = asyncio.create_task(_post(deployment, shape))
            await _until(lambda: len(decode.requests) > num_seen)  # noqa: B023 - over before the next turn
            await _leave(asking)
            # A stream's D that waits for KV tells P nothing when it is left; the lease is what that is for.
            is_untold = shape.is_stream and isinstance(fault, NeverLoad)
            await leaves_nothing(deployment, waits_for_lease=is_untold)
        with _connecting_for_ever(deployment) as reconnect:
            asking = asyncio.create_task(_post(deployment, shape))
            await _until(lambda: deployment.gateway.pool.num_held(EngineName("prefill-0")) == 1)
            reconnect()
            await _leave(asking)
            await leaves_nothing(deployment, waits_for_lease=False)
        assert _num_left(deployment) == 5
        assert deployment.gateway.proxy.tally.value(RELEASES, "failed") == 0


@pytest.mark.parametrize("api", APIS)
async def test_a_client_leaves_in_the_middle_of_its_answer(api: str) -> None:
    """Streaming and whole: D stops computing, whatever it had sent."""
    async with split(settings=_UNHURRIED, config=PATIENT) as deployment:
        decode = deployment.decode
        body = body_of(api, PROMPT, model=MODEL, max_tokens=1000, temperature=0, stream=True, ignore_eos=True)
        async with deployment.client.stream("POST", api, json=body) as response:
            async for _ in response.aiter_bytes():
                break
        await leaves_nothing(deployment, waits_for_lease=False)
        asking = asyncio.create_task(_post(deployment, Shape(api, is_stream=False), max_tokens=1000))
        await _until(lambda: decode.engine.num_running == 1)
        await _leave(asking)
        await leaves_nothing(deployment, waits_for_lease=False)
        assert _num_left(deployment) == 2


@contextlib.contextmanager
def _connecting_for_ever(deployment: Split) -> Iterator[Callable[[], None]]:
    """D's own connections are all gone, and new ones do not come about until it is undone."""
    client = deployment.gateway.pool.client(EngineName("decode-0"))
    proper = client._pool
    with socket.socket() as listening, contextlib.ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(2):  # A full backlog: the kernel lets every further connection wait.
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listening.getsockname())
        client._pool = ConnectionPool(*listening.getsockname())

        def undo() -> None:
            client._pool = proper

        try:
            yield undo
        finally:
            undo()


# Deadlines


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_a_connection_that_does_not_come_about(shape: Shape) -> None:
    """504 connect_timeout, and P's blocks are free."""
    timeouts = _with(TIMEOUTS, connect=0.2)
    async with split(settings=QUICK_SETTINGS, timeouts=timeouts, config=PATIENT) as deployment:
        with _connecting_for_ever(deployment):
            got = await ask(deployment, shape)
        assert got.outcome == Told(504, Reason.CONNECT_TIMEOUT)
        await heal(deployment)
        await leaves_nothing(deployment, waits_for_lease=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_a_silent_p_where_d_may_not_compute_alone(shape: Shape) -> None:
    """`without_prefill = error`: 504 prefill_timeout, and D never hears of it."""
    config = Config(breaker=PATIENT.breaker, retries=RetriesConfig(without_prefill="error"))
    async with split(settings=QUICK_SETTINGS, timeouts=QUICK, config=config) as deployment:
        deployment.prefill.faults.inject(NeverAnswer())
        num_seen = len(deployment.decode.requests)
        assert (await ask(deployment, shape)).outcome == Told(504, Reason.PREFILL_TIMEOUT)
        assert len(deployment.decode.requests) == num_seen
        await leaves_nothing(deployment, waits_for_lease=False)


@pytest.mark.parametrize("api", APIS)
async def test_the_whole_requests_deadline(api: str) -> None:
    """It ends every leg: 504 deadline before the first byte, an error event after it."""
    timeouts = _with(TIMEOUTS, total=0.6)
    slow = dataclasses.replace(_UNHURRIED, timing=Timing(decode_step_s=0.2))
    async with split(settings=slow, timeouts=timeouts, config=PATIENT) as deployment:
        whole = await _post(deployment, Shape(api, is_stream=False), max_tokens=50)
        assert (whole.status_code, whole.headers["x-pdserve-reason"]) == (504, "deadline")
        stream = await _post(deployment, Shape(api, is_stream=True), max_tokens=50)
        said = read_stream(api, stream.content)
        assert said.error is not None
        assert said.error.reason == (None if api == MESSAGES else "deadline")
        assert not said.is_marked
        deployment.prefill.faults.inject(NeverAnswer())
        with_p = await _post(deployment, Shape(api, is_stream=False))
        assert (with_p.status_code, with_p.headers["x-pdserve-reason"]) == (504, "deadline")
        await leaves_nothing(deployment, waits_for_lease=False)


def _with(timeouts: TimeoutsConfig, **changes: float) -> TimeoutsConfig:
    """Other deadlines."""
    import msgspec

    return msgspec.structs.replace(timeouts, **changes)


# Retries


async def test_retries_have_a_budget() -> None:
    """Once it is spent, a failed D leg is the request's end."""
    async with split(settings=QUICK_SETTINGS, config=Config(retries=RetriesConfig(budget=0.0))) as deployment:
        outcomes = []
        for _ in range(12):
            deployment.decode.faults.inject(ErrorAfter(0))
            outcomes.append((await ask(deployment, _COMPLETION)).outcome)
            deployment.decode.faults.clear()
            await heal(deployment)
        assert Told(500, Reason.ENGINE_STATUS) in outcomes
        assert deployment.gateway.proxy.tally.value(RETRIES, "decode") == 10
        await leaves_nothing(deployment, waits_for_lease=False)


async def test_one_attempt_is_one_leg() -> None:
    """`max_attempts = 1` tries nothing again, and D alone is no second attempt of P."""
    config = Config(retries=RetriesConfig(max_attempts=1))
    async with split(num_prefill=2, num_decode=2, settings=QUICK_SETTINGS, config=config) as deployment:
        for engine in deployment.decodes:
            engine.faults.inject(ErrorAfter(0), times=None)
        assert (await ask(deployment, _COMPLETION)).outcome == Told(500, Reason.ENGINE_STATUS)
        for engine in deployment.decodes:
            engine.faults.clear()
        for engine in deployment.prefills:
            engine.faults.inject(ErrorStatus(503), times=None)
        got = await ask(deployment, _COMPLETION)
        assert str(got.outcome) == "the right answer (local)"


# Engines


@pytest.mark.parametrize("shape", [_COMPLETION, _STREAM], ids=str)
async def test_a_p_that_restarted_unnoticed_is_proven_before_it_gets_traffic(shape: Shape) -> None:
    """Its first handoff names an engine that nobody proved: not sent, released, and the right answer all the same."""
    async with split(settings=QUICK_SETTINGS, config=PATIENT) as deployment:
        tally = deployment.gateway.proxy.tally
        old = deployment.prefill.engine.engine_id
        await deployment.prefill.restart()
        assert deployment.prefill.engine.engine_id != old
        got = await ask(deployment, shape)
        assert str(got.outcome) == "the right answer (local)"
        await until_ready(deployment.gateway)
        await heal(deployment)
        assert tally.value(HANDOFFS_REFUSED, "unknown_engine") == 1
        assert tally.value(ENGINE_RESTARTS, "prefill-0") == 1
        assert (await ask(deployment, shape)).outcome == REMOTE
        await leaves_nothing(deployment, waits_for_lease=False)


async def test_a_p_that_is_proven_anew_takes_no_traffic_from_d() -> None:
    """D answers alone meanwhile: a proof may take minutes on a cold engine."""
    async with split(settings=QUICK_SETTINGS, config=PATIENT) as deployment:
        deployment.prefill.faults.inject(NeverAnswer(), times=None)
        await deployment.prefill.restart()
        pool = deployment.gateway.pool
        pool.report_unreachable(EngineName("prefill-0"), may_be_another=True)
        await _until(lambda: pool.pairs[0].is_being_tried)
        got = await ask(deployment, _COMPLETION)
        assert str(got.outcome) == "the right answer (alone)"
        deployment.prefill.die()  # It ends the proof, which would wait for its deadline.
        await heal(deployment)


async def test_a_dead_core_that_answers_500_for_ever() -> None:
    """VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: its health says so, and it gets no more."""
    settings = dataclasses.replace(QUICK_SETTINGS, keep_alive_on_engine_death=True)
    async with split(num_decode=2, settings=settings, config=PATIENT) as deployment:
        async with run_stand_in("none", QUICK_SETTINGS) as plain:
            alone = await expected_answers(deployment.client, plain)
        deployment.decodes[0].engine.kill("killed")
        for shape in SHAPES * 2:
            got = await ask(deployment, shape)
            assert got.outcome == REMOTE
            assert got.said.texts == alone[shape].texts
        await leaves_nothing(deployment, waits_for_lease=True)


@pytest.mark.parametrize("shape", [_COMPLETION, _STREAM], ids=str)
async def test_engines_without_a_free_block(shape: Shape) -> None:
    """P full: D computes alone after P's deadline. D full: its deadline is the client's answer."""
    async with split(settings=QUICK_SETTINGS, timeouts=QUICK, config=PATIENT) as deployment:
        with deployment.prefill.without_blocks():
            assert str((await ask(deployment, shape)).outcome) == "the right answer (local)"
        await heal(deployment)
        with deployment.decode.without_blocks():
            got = await ask(deployment, shape)
        assert got.outcome == Told(504, Reason.FIRST_BYTE_TIMEOUT)
        await heal(deployment)
        await leaves_nothing(deployment, waits_for_lease=True)
        assert (await ask(deployment, shape)).outcome == REMOTE


async def test_what_a_gateway_cannot_see() -> None:
    """A P that gives blocks away before its lease ends: 200 with another request's context. Only P's counters tell."""
    async with split(settings=QUICK_SETTINGS, config=PATIENT) as deployment:
        deployment.prefill.faults.inject(Stale())
        got = await ask(deployment, _COMPLETION)
        assert got.outcome == REMOTE
        assert got.said.texts[0].isupper()
        assert deployment.prefill.counter("nixl_num_kv_expired_reqs_total") == 1
        await _until(lambda: deployment.prefill.counter("nixl_num_notifications_after_expiry_total") == 1)


async def test_an_error_event_has_a_reason_in_the_journal() -> None:
    """Anthropic's form has no place for it; the record does."""
    async with split(settings=QUICK_SETTINGS, config=PATIENT) as deployment:
        deployment.decode.faults.inject(ErrorAfter(3))
        got = await ask(deployment, Shape(MESSAGES, is_stream=True))
        assert got.outcome == Cut(Reason.ENGINE_STATUS)
        assert deployment.gateway.journal.last(1)[0].place in set(PrefillPlace)
