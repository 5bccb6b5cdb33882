"""Requests that wait their turn, engines that are drained or left alone, clients that read late: through the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest

from bench.asking import APIS, body_of, read_stream
from pdserve.config import AdmissionConfig, BreakerConfig, Config
from pdserve.core import EngineName
from pdserve.engine.breaker import BreakerState
from pdserve.sim.faults import ErrorAfter, NeverAnswer
from pdserve.sim.settings import EngineSettings, Timing
from split import MODEL, Split, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import httpx

_PROMPT = "the quick brown fox jumps over the lazy dog"
_DECODE = EngineName("decode-0")


def _config(**admission: Any) -> Config:
    return Config(admission=AdmissionConfig(**admission))


async def _post(deployment: Split, api: str = APIS[0], prompt: str = _PROMPT, **fields: Any) -> httpx.Response:
    body = body_of(api, prompt, model=MODEL, max_tokens=6, **fields)
    return await deployment.client.post(api, json=body)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not holds():  # noqa: ASYNC110 - what is looked at gives no event
            await asyncio.sleep(0.002)


# The queue


@pytest.mark.parametrize("api", APIS)
async def test_one_more_than_fits_is_told_when_to_come_again(api: str) -> None:
    """429 in the API's own form, with Retry-After; what waits goes on."""
    async with split(config=_config(max_concurrent=1, max_queued=1)) as deployment:
        admission = deployment.gateway.proxy.admission
        deployment.prefill.faults.inject(NeverAnswer())
        running = asyncio.create_task(_post(deployment, api))
        await _until(lambda: admission.num_running == 1)
        waiting = asyncio.create_task(_post(deployment, api))
        await _until(lambda: admission.num_queued == 1)
        refused = await _post(deployment, api)
        assert (refused.status_code, refused.headers["x-pdserve-reason"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        running.cancel()
        assert (await waiting).status_code == 200
        await deployment.settle()


@pytest.mark.parametrize("api", APIS)
async def test_a_turn_that_does_not_come(api: str) -> None:
    """429 queue_timeout."""
    async with split(config=_config(max_concurrent=1, max_wait=0.1)) as deployment:
        deployment.prefill.faults.inject(NeverAnswer())
        running = asyncio.create_task(_post(deployment, api))
        await _until(lambda: deployment.gateway.proxy.admission.num_running == 1)
        refused = await _post(deployment, api)
        assert (refused.status_code, refused.headers["x-pdserve-reason"]) == (429, "queue_timeout")
        assert "retry-after" in refused.headers
        running.cancel()
        await asyncio.wait([running])
        await deployment.settle()


async def test_the_lowest_priority_number_goes_first() -> None:
    """As vLLM has it, whichever came first."""
    async with split(config=_config(max_concurrent=1)) as deployment:
        admission, prefill = deployment.gateway.proxy.admission, deployment.prefill
        prefill.faults.inject(NeverAnswer())
        running = asyncio.create_task(_post(deployment))
        await _until(lambda: admission.num_running == 1)
        waiting: list[asyncio.Task[httpx.Response]] = []
        for priority in (5, 0, -3, 0):
            prompt = f"priority {priority}, number {len(waiting)}"
            waiting.append(asyncio.create_task(_post(deployment, prompt=prompt, priority=priority)))
            await _until(lambda: admission.num_queued == len(waiting))
        num_seen = len(prefill.requests)
        running.cancel()
        assert {(await one).status_code for one in waiting} == {200}
        prompts = [request.fields["prompt"] for request in prefill.requests[num_seen:]]
        assert [prompt.split(",")[0] for prompt in prompts] == [
            "priority -3",
            "priority 0",
            "priority 0",
            "priority 5",
        ]
        assert prompts[1:3] == ["priority 0, number 1", "priority 0, number 3"]


async def test_each_choice_takes_a_seat() -> None:
    """A request for three waits until three are free, or nobody else runs."""
    async with split(config=_config(max_concurrent=3)) as deployment:
        admission = deployment.gateway.proxy.admission
        deployment.prefill.faults.inject(NeverAnswer())
        running = asyncio.create_task(_post(deployment))
        await _until(lambda: admission.num_running == 1)
        wide = asyncio.create_task(_post(deployment, n=3, seed=1, temperature=1))
        await _until(lambda: admission.num_queued == 1)
        running.cancel()
        answer = await wide
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 3
        assert admission.num_running == 0


# Drain


async def test_a_drained_engine_ends_what_it_has_and_gets_no_more() -> None:
    """Seen and done on the admin listener; undrained, it works again."""
    settings = EngineSettings(model=MODEL, timing=Timing(decode_step_s=0.02))
    async with split(num_prefill=2, num_decode=2, settings=settings) as deployment:
        admin, gateway = deployment.gateway.admin.url, deployment.gateway
        body = body_of(APIS[0], _PROMPT, model=MODEL, max_tokens=30, temperature=0, stream=True)
        async with deployment.client.stream("POST", APIS[0], json=body) as response:
            pieces = response.aiter_bytes()
            text = await anext(pieces)
            busy = next(name for name in gateway.pool.names() if gateway.pool.num_in_flight(name))
            drained = (await deployment.client.post(f"{admin}/drain/{busy}")).json()
            assert (drained["state"], drained["num_in_flight"]) == ("draining", 1)
            answers = [await _post(deployment) for _ in range(4)]
            text += b"".join([piece async for piece in pieces])
        said = read_stream(APIS[0], text)
        assert said.is_marked
        assert len(said.texts[0].split()) == 30
        assert {one.status_code for one in answers} == {200}
        records = [gateway.journal.try_get(one.headers["x-pdserve-request-id"]) for one in answers]
        assert busy not in {record.decode for record in records if record is not None}
        assert gateway.pool.num_in_flight(busy) == 0
        assert (await deployment.client.post(f"{admin}/drain/prefill-0")).json()["num_held"] == 0
        answers = [await _post(deployment) for _ in range(4)]
        records = [gateway.journal.try_get(one.headers["x-pdserve-request-id"]) for one in answers]
        assert {record.prefill for record in records if record is not None} == {"prefill-1"}
        for name in (busy, "prefill-0"):
            assert (await deployment.client.post(f"{admin}/undrain/{name}")).json()["state"] == "ready"
        assert (await deployment.client.post(f"{admin}/drain/nobody")).status_code == 404
        await deployment.settle()


# The breaker


async def test_after_a_while_one_request_tries_an_engine_again() -> None:
    """Half open: one at a time; the one that succeeds closes it."""
    config = Config(breaker=BreakerConfig(failures=2, open=0.3))
    async with split(config=config) as deployment:
        pool, decode = deployment.gateway.pool, deployment.decode
        decode.faults.inject(ErrorAfter(0), times=None)
        alone: dict[str, Any] = {"echo": True, "temperature": 0}
        await _until_open(deployment, alone)
        refused = await _post(deployment, **alone)
        assert (refused.status_code, refused.headers["x-pdserve-reason"]) == (503, "no_engine")
        decode.faults.clear()
        decode.faults.inject(NeverAnswer())
        await _until(lambda: next(one.is_healthy for one in pool.snapshots() if one.address.name == _DECODE))
        trying = asyncio.create_task(_post(deployment, **alone))
        await _until(lambda: pool.num_in_flight(_DECODE) == 1)
        assert pool.breaker_state(_DECODE) is BreakerState.HALF_OPEN
        assert (await _post(deployment, **alone)).status_code == 503
        trying.cancel()
        await asyncio.wait([trying])
        await _until(lambda: pool.num_in_flight(_DECODE) == 0)
        assert (await _post(deployment, **alone)).status_code == 200
        assert pool.breaker_state(_DECODE) is BreakerState.CLOSED


async def _until_open(deployment: Split, fields: dict[str, Any]) -> None:
    async with asyncio.timeout(15):
        while deployment.gateway.pool.breaker_state(_DECODE) is not BreakerState.OPEN:
            await _post(deployment, **fields)


# Slow clients


async def test_a_client_that_reads_late_holds_d_and_not_the_memory() -> None:
    """D waits for it; once it reads, it gets all of it."""
    api, num_tokens = APIS[0], 9000
    settings = EngineSettings(model=MODEL, max_model_len=10_000, num_blocks=1024)
    async with split(settings=settings) as deployment:
        fields = {"stream": True, "temperature": 0, "ignore_eos": True, "logprobs": 5}
        body = json.dumps(body_of(api, _PROMPT, model=MODEL, max_tokens=num_tokens, **fields)).encode()
        host, port = deployment.gateway.client.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            head = f"POST {api} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(client, head.encode() + body)
            (connection,) = await _connected(deployment)
            await _until(lambda: connection._is_write_paused)
            assert connection._transport.get_write_buffer_size() < 512 * 1024
            received = b""
            async with asyncio.timeout(30):
                while piece := await loop.sock_recv(client, 1 << 20):
                    received += piece
        said = read_stream(api, _unchunked(received.partition(b"\r\n\r\n")[2]))
        assert said.is_marked
        assert len(said.texts[0].split()) == num_tokens
        await deployment.settle()


async def _connected(deployment: Split) -> list[Any]:
    """The gateway's side of its clients' connections."""
    connections = deployment.gateway.client._server.server_state.connections
    await _until(lambda: len(connections) == 1)
    return list(connections)


def _unchunked(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(body[:length])
        body = body[length + 2 :]
    return b"".join(pieces)
