"""A handoff that was young when it was sent and old when D came to it: never another request's text, never a needless retry."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.config import Config, RetriesConfig, TimeoutsConfig
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.scrape import parse_counters
from pdserve.engine.transport import EngineClient
from pdserve.errors import Reason
from pdserve.gateway.lease import Leases
from pdserve.http.listener import Listener, bind
from pdserve.launch.ports import any_free_port
from pdserve.sim.faults import ComeLate
from pdserve.sim.settings import Timing
from split import MODEL, SETTINGS, Split, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.errors import InvalidRequest
    from pdserve.gateway.lease import Lease
    from pdserve.http.server import Headers, Request, Response
    from pdserve.protocol.admin import RequestRecord

_LEASE_S = 1.0
_ENGINES = dataclasses.replace(SETTINGS, kv_lease_duration_s=_LEASE_S, max_model_len=256, num_blocks=18)
_TIMEOUTS = TimeoutsConfig(
    connect=5, prefill=20, first_byte=20, silence=20, shutdown=5, kv_lease=_LEASE_S, kv_lease_margin=0.6
)
_PROMPT = "my dog is called rex and my cat is called luna and they live with me in a house"


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0, **fields}


def _text_of(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["text"]
        return text
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def _alone(deployment: Split, body: dict[str, Any]) -> str:
    async with httpx.AsyncClient(base_url=deployment.decode.url) as client:
        return _text_of(await client.post("/v1/completions", json={**body, "stream": False}))


async def _overwrite(deployment: Split) -> None:
    """Give P's blocks to somebody else as soon as P has let the lease run out."""
    async with httpx.AsyncClient(base_url=deployment.prefill.url) as client:
        async with asyncio.timeout(10):
            while parse_counters((await client.get("/metrics")).text).num_expired == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.post("/v1/completions", json=_body(prompt="other people " * 110, max_tokens=1))


def _record(deployment: Split, response: httpx.Response) -> RequestRecord:
    record = deployment.gateway.journal.try_get(response.headers["x-pdserve-request-id"])
    assert record is not None
    return record


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stale_read_is_not_believed(stream: bool) -> None:  # noqa: FBT001
    """D comes late, reads what P has given to others, and answers 200: the client gets the right text from another try."""
    async with split(settings=_ENGINES, timeouts=_TIMEOUTS) as deployment:
        body = _body(stream=stream)
        expected = await _alone(deployment, body)
        deployment.decode.faults.inject(ComeLate(delay_s=2 * _LEASE_S), times=1)
        response, _ = await asyncio.gather(deployment.client.post("/v1/completions", json=body), _overwrite(deployment))
        assert _text_of(response) == expected
        record = _record(deployment, response)
        assert record.place == "local"
        assert "P's lease had run out" in record.cause
        await deployment.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stale_read_is_one_error_where_nothing_may_be_tried(stream: bool) -> None:  # noqa: FBT001
    """Without tries left the client gets 502 and its reason, and not a word of the wrong text."""
    async with split(
        settings=_ENGINES, timeouts=_TIMEOUTS, config=Config(retries=RetriesConfig(max_attempts=1))
    ) as deployment:
        deployment.decode.faults.inject(ComeLate(delay_s=2 * _LEASE_S), times=1)
        response, _ = await asyncio.gather(
            deployment.client.post("/v1/completions", json=_body(stream=stream)), _overwrite(deployment)
        )
        assert response.status_code == 502
        assert response.json()["error"]["code"] == response.headers["x-pdserve-reason"] == "stale_handoff"
        await deployment.settle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("timing", [Timing(decode_step_s=0.25), Timing(transfer_s=2.5 * _LEASE_S)])
async def test_a_lease_that_was_kept_is_believed(timing: Timing, stream: bool) -> None:  # noqa: FBT001
    """D wrote, or waited for its KV, for several leases and sent its heartbeats: nothing is tried again."""
    engines = dataclasses.replace(_ENGINES, timing=timing)
    async with split(settings=engines, timeouts=_TIMEOUTS) as deployment:
        body = _body(stream=stream, max_tokens=12)
        expected = await _alone(deployment, body)
        response = await deployment.client.post("/v1/completions", json=body)
        assert _text_of(response) == expected
        record = _record(deployment, response)
        assert (record.place, record.num_failed_legs) == ("remote", 0)
        await deployment.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_that_stands_still_after_its_first_lease_is_not_believed(stream: bool) -> None:  # noqa: FBT001
    """It kept the lease by heartbeats at first, waiting for its turn, and lost it later: nobody's other text either."""
    async with split(settings=_ENGINES, timeouts=_TIMEOUTS) as deployment:
        body = _body(stream=stream)
        expected = await _alone(deployment, body)
        deployment.decode.faults.inject(ComeLate(delay_s=2 * _LEASE_S, beats_s=1.5 * _LEASE_S), times=1)
        response, _ = await asyncio.gather(deployment.client.post("/v1/completions", json=body), _overwrite(deployment))
        assert _text_of(response) == expected
        assert _record(deployment, response).place == "local"
        await deployment.settle()


async def test_a_strangers_lease_costs_a_second_try_and_one_salt() -> None:
    """Nobody can tell that it was not theirs: whole answers are asked for again, all of them, and D's cache is left once."""
    engines = dataclasses.replace(_ENGINES, num_blocks=72, timing=Timing(decode_step_s=0.25))
    async with split(settings=engines, timeouts=_TIMEOUTS) as deployment:
        body = _body(max_tokens=12)
        expected = await _alone(deployment, body)
        asking = [asyncio.ensure_future(deployment.client.post("/v1/completions", json=body)) for _ in range(3)]
        async with httpx.AsyncClient(base_url=deployment.prefill.url) as client:
            orphan = {"do_remote_decode": True, "do_remote_prefill": False}
            await client.post("/v1/completions", json=_body(max_tokens=1, kv_transfer_params=orphan))
        answers = await asyncio.gather(*asking)
        assert {_text_of(answer) for answer in answers} == {expected}
        assert {_record(deployment, answer).num_failed_legs for answer in answers} == {1}
        salt = deployment.gateway.pool.cache_salt(EngineName("decode-0"))
        assert salt is not None
        deployment.gateway.pool.report_wrong_text(EngineName("decode-0"), Reason.STALE_HANDOFF, salt=None)
        assert deployment.gateway.pool.cache_salt(EngineName("decode-0")) == salt
        await deployment.settle()


async def test_what_d_cached_of_a_stale_read_is_never_found_again() -> None:
    """vLLM caches the pulled blocks under the prompt's hash: the next request with that prefix must not meet them."""
    engines = dataclasses.replace(_ENGINES, block_size=4, num_blocks=72)
    async with split(settings=engines, timeouts=_TIMEOUTS) as deployment:
        expected = await _alone(deployment, _body(cache_salt="apart"))
        deployment.decode.faults.inject(ComeLate(delay_s=2 * _LEASE_S), times=1)
        response, _ = await asyncio.gather(
            deployment.client.post("/v1/completions", json=_body()), _overwrite(deployment)
        )
        assert _text_of(response) == expected
        for fields in ({}, {"echo": False, "logprobs": 1}, {"n": "1"}, {"cache_salt": "theirs"}):
            again = await deployment.client.post("/v1/completions", json=_body(**fields))
            assert _text_of(again) == expected, fields
        salts = [
            request.fields.get("cache_salt")
            for request in deployment.decode.requests
            if request.headers.get("x-request-id", "").startswith("pd-")
        ]
        assert salts[0] is None
        assert all(salts[1:])
        await deployment.settle()


class _Prefill:
    """A P of which only /metrics matters: each number is a count, None a failure."""

    def __init__(self, *counts: int | None) -> None:
        self._counts = list(counts)
        self.num_asked = 0

    async def handle(self, _request: Request, response: Response) -> None:
        self.num_asked += 1
        count = self._counts.pop(0)
        body = f"# TYPE vllm:nixl_num_kv_expired_reqs counter\nvllm:nixl_num_kv_expired_reqs_total {count}\n"
        response.send(500 if count is None else 200, [(b"content-type", b"text/plain")], body.encode())

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], str(error).encode()


@pytest.mark.parametrize(
    ("counts", "is_kept"), [((3, 3), True), ((3, 4), False), ((3, 0), True), ((None, 3), False), ((3, None), False)]
)
async def test_a_lease_is_kept_where_p_says_so(counts: tuple[int | None, ...], is_kept: bool) -> None:  # noqa: FBT001
    """Nothing is asked while it is sure; after that the count may not have risen. One that fell is another process's."""
    async with Listener(_Prefill(*counts), bind("127.0.0.1", 0)) as listener:
        assert await _is_kept(listener.url) is is_kept


async def test_a_count_that_came_late_proves_nothing() -> None:
    """The gateway's own loop stood still: what P says then may have this very lease in it already."""
    async with Listener(_Prefill(3, 3), bind("127.0.0.1", 0)) as listener, _leases_on(listener.url, 0.4) as leases:
        lease = leases.open(time.monotonic())
        time.sleep(0.6)  # noqa: ASYNC251 - it is the loop that is to stand still
        await asyncio.sleep(0.05)
        assert not await leases.is_kept(lease)


async def test_those_who_ask_at_once_are_answered_at_once() -> None:
    """One reading of /metrics for all, as long as it began after they asked."""
    async with Listener(_Prefill(3, 3, 4), bind("127.0.0.1", 0)) as listener, _leases_on(listener.url, 0.4) as leases:
        late = [leases.open(time.monotonic()) for _ in range(5)]
        await _until_over(late[-1])
        assert await asyncio.gather(*map(leases.is_kept, late)) == [True] * 5
        assert await asyncio.gather(*map(leases.is_kept, late)) == [False] * 5


async def test_a_p_whose_leases_all_end_soon_is_asked_nothing() -> None:
    """Its /metrics cost it more than all the rest of this."""
    prefill = _Prefill()
    async with Listener(prefill, bind("127.0.0.1", 0)) as listener, _leases_on(listener.url, 0.4) as leases:
        for _ in range(20):
            lease = leases.open(time.monotonic())
            await asyncio.sleep(0.03)
            lease.is_open = False
        assert prefill.num_asked == 0


async def test_what_p_said_in_an_earlier_life_proves_nothing() -> None:
    """It counts from nothing again, and stays below what it had counted before for long."""
    async with (
        Listener(_Prefill(5, None, 1), bind("127.0.0.1", 0)) as listener,
        _leases_on(listener.url, 0.4) as leases,
    ):
        before = leases.open(time.monotonic())
        await _until_over(before)
        before.is_open = False
        lease = leases.open(time.monotonic())
        await _until_over(lease)
        assert not await leases.is_kept(lease)


async def test_an_engine_that_is_gone_gave_its_blocks_to_nobody() -> None:
    """What D read of it was this prompt's, or did not come."""
    assert await _is_kept(f"http://127.0.0.1:{any_free_port('127.0.0.1')}") is True


async def _is_kept(url: str) -> bool:
    async with _leases_on(url, 2.0) as leases:
        lease = leases.open(time.monotonic())
        await _until_over(lease)
        return await leases.is_kept(lease)


async def _until_over(lease: Lease) -> None:
    async with asyncio.timeout(10):
        while time.monotonic() < lease.sure_until_s:  # noqa: ASYNC110 - a moment on the clock, and no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _leases_on(url: str, sure_for_s: float) -> AsyncIterator[Leases]:
    engine = EngineClient(EngineAddress(EngineName("p"), Role.PREFILL, url), connect_timeout_s=5)
    leases = Leases(engine, sure_for_s=sure_for_s, clock=time.monotonic, loop=asyncio.get_running_loop())
    yield leases
    leases.close()
    engine.close()
