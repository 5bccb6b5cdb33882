"""Faults that only real engines have: killed, stopped and left alone, with a gateway in front that nobody supervises for.

Engines and gateway are this file's own. A test may kill an engine; the next one starts it again, which is a fault of its own:
the gateway must prove a restarted engine before it trusts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from counters import is_idle, until
from engines import EngineProcess, engine_commands, running_engines, running_gateway
from pdserve.config import Config, PrefillConfig, TimeoutsConfig
from pdserve.core import Role
from pdserve.engine.admin_client import AdminClient
from pdserve.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pdserve.protocol.admin import GatewayStatus, RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

_LEASE_S = 12
_NUM_PREFILL_BLOCKS = 20
"""Few, so that what other requests compute on P soon lies where an expired handoff's KV lay."""
_TIMEOUTS = TimeoutsConfig(
    connect=5,
    prefill=60,
    first_byte=45,
    whole_answer=60,
    total=100,
    silence=20,
    kv_lease=_LEASE_S,
    kv_lease_margin=3,
    shutdown=5,
)
_DEADLINE_S = _TIMEOUTS.total + 10
_CONFIG = Config(timeouts=_TIMEOUTS, prefill=PrefillConfig(args={"num-gpu-blocks-override": _NUM_PREFILL_BLOCKS}))
_NUM_DISCONNECTS = 200
_NUM_AT_ONCE = 8
_SEED = 20261130


@dataclass(frozen=True)
class Deployment:
    """Two engines and a gateway, each a process of its own."""

    prefill: EngineProcess
    decode: EngineProcess
    gateway_url: str
    admin_url: str
    model: str

    async def until_whole(self) -> None:
        """Start again what was killed, and wait until the gateway has proven the pair."""
        for engine in (self.prefill, self.decode):
            if not engine.is_running:
                engine.start()
        for engine in (self.prefill, self.decode):
            await asyncio.to_thread(engine.until_healthy)
        await self.until_status(lambda status: all(pair.state == "proven" for pair in status.pairs))

    async def until_status(self, is_so: Callable[[GatewayStatus], bool], *, timeout_s: float = 120) -> None:
        """Wait for what the gateway says of its engines. It starts beside its first test, so it may not answer yet."""
        admin = AdminClient(self.admin_url)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(EngineError):
                        if is_so(await admin.status()):
                            return
                    await asyncio.sleep(0.1)
        finally:
            admin.close()

    async def record(self, response: httpx.Response) -> RequestRecord:
        """What the gateway noted of a request that is over."""
        admin = AdminClient(self.admin_url)
        try:
            return await admin.request(response.headers["x-pdserve-request-id"])
        finally:
            admin.close()

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """A completion that ends by its limit."""
        return {"model": self.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Started once."""
    folder = tmp_path_factory.mktemp("faults")
    commands = engine_commands(_CONFIG)
    gateway = {"timeouts": msgspec.to_builtins(_TIMEOUTS)}
    with (
        running_engines(commands, folder) as (prefill, decode),
        running_gateway(gateway, prefill=[prefill.url], decode=[decode.url], folder=folder) as (url, admin_url),
    ):
        model = httpx.get(f"{decode.url}/v1/models").json()["data"][0]["id"]
        yield Deployment(prefill, decode, url, admin_url, model)


@pytest.fixture
async def deployment(processes: Deployment) -> Deployment:
    """Whole again, whatever the test before has done."""
    await processes.until_whole()
    return processes


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway that waits longer than the gateway's own deadlines."""
    async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=_DEADLINE_S) as client:
        yield client


async def _alone(deployment: Deployment, body: dict[str, Any]) -> str:
    """What D writes when it does it all: the right answer."""
    async with httpx.AsyncClient(timeout=_DEADLINE_S) as client:
        answer = await client.post(f"{deployment.decode.url}/v1/completions", json=body)
    text: str = answer.json()["choices"][0]["text"]
    return text


def _error_of(response: httpx.Response) -> str:
    """The reason in one clear error: an OpenAI body, and the same word in the header."""
    code: str = response.json()["error"]["code"]
    assert response.headers["x-pdserve-reason"] == code
    return code


async def test_a_decode_engine_killed_in_a_stream(deployment: Deployment, client: httpx.AsyncClient) -> None:
    """The stream ends with one error event and no [DONE]; then D is down for the gateway, and P holds nothing."""
    body = deployment.body("Count up: one two three", max_tokens=1500, stream=True)
    events: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            events += [line.removeprefix("data: ")] if line else []
            if len(events) == 3:
                await asyncio.to_thread(deployment.decode.kill)
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "engine_broke_off"
    assert [event for event in events[:-1] if "error" in json.loads(event)] == []
    await deployment.until_status(lambda status: _state(status, Role.DECODE) == "down")
    refused = await client.post("/v1/completions", json=deployment.body("Hello"))
    assert (refused.status_code, _error_of(refused)) == (503, "no_engine")
    await until(deployment.prefill.url, is_idle, timeout_s=_LEASE_S)


def _state(status: GatewayStatus, role: Role) -> str:
    return next(engine.state for engine in status.engines if engine.role == role)


async def test_a_prefill_engine_killed_between_the_legs(deployment: Deployment, client: httpx.AsyncClient) -> None:
    """D has a handoff of an engine that is gone: the client gets the right answer or one clear error, in time."""
    body = deployment.body("The capital of France is the city of")
    expected = await _alone(deployment, body)
    deployment.decode.pause()
    try:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await deployment.until_status(lambda status: _num_in_flight(status, Role.DECODE) == 1)
        await asyncio.to_thread(deployment.prefill.kill)
    finally:
        deployment.decode.resume()
    response = await asking
    if response.status_code == 200:
        assert response.json()["choices"][0]["text"] == expected
        assert response.headers["x-pdserve-prefill"] == "local"
    else:
        assert response.status_code in {500, 502, 504}
        assert response.json()["error"]["message"]
    again = await client.post("/v1/completions", json=body)
    assert again.json()["choices"][0]["text"] == expected
    assert again.headers["x-pdserve-prefill"] in {"alone", "local"}


def _num_in_flight(status: GatewayStatus, role: Role) -> int:
    return sum(engine.num_in_flight for engine in status.engines if engine.role == role)


async def test_a_restarted_engine_is_proven_again(deployment: Deployment, client: httpx.AsyncClient) -> None:
    """P has a new engine id by then; nobody is sent to it before a handoff of its own was seen, and then all are again."""
    await asyncio.to_thread(deployment.prefill.kill)
    alone = await client.post("/v1/completions", json=deployment.body("Yellow sun and"))
    assert alone.status_code == 200
    assert alone.headers["x-pdserve-prefill"] in {"alone", "local"}
    await deployment.until_status(lambda status: _state(status, Role.PREFILL) == "down")
    await deployment.until_whole()
    assert await _places(client, deployment, num=5) & {"remote"}


async def _places(client: httpx.AsyncClient, deployment: Deployment, *, num: int) -> set[str]:
    """Where some prompts were computed: on a busy machine the first ones after a start may take longer than the lease."""
    bodies = [deployment.body(f"Green leaves and {number}") for number in range(num)]
    return {(await client.post("/v1/completions", json=body)).headers["x-pdserve-prefill"] for body in bodies}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handoff_that_grew_stale_in_d(
    deployment: Deployment,
    client: httpx.AsyncClient,
    stream: bool,  # noqa: FBT001
) -> None:
    """D took the request and its core stood still until P had given its blocks to others: never their text."""
    body = deployment.body("My dog is called Rex and my cat is called", max_tokens=12, stream=stream)
    expected = await _alone(deployment, {**body, "stream": False})
    before = await until(deployment.prefill.url, is_idle, timeout_s=2 * _LEASE_S)
    deployment.decode.pause_core()
    try:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await deployment.until_status(lambda status: _num_in_flight(status, Role.DECODE) == 1)
        await until(deployment.prefill.url, lambda now: now.num_expired > before.num_expired, timeout_s=4 * _LEASE_S)
        await _overwrite(deployment)
    finally:
        deployment.decode.resume()
    response = await asking
    assert response.headers.get("x-pdserve-reason") == "stale_handoff" or _text_of(response) == expected
    await until(deployment.decode.url, is_idle, timeout_s=2 * _LEASE_S)
    await until(deployment.prefill.url, is_idle, timeout_s=2 * _LEASE_S)


async def _overwrite(deployment: Deployment) -> None:
    """Other people's prompts over all of P's blocks."""
    async with httpx.AsyncClient(timeout=_DEADLINE_S) as client:
        for number in range(3):
            prompt = f"Recipe {number}: " + "take two onions and three carrots, then cook them with salt. " * 70
            answer = await client.post(f"{deployment.prefill.url}/v1/completions", json=deployment.body(prompt))
            assert answer.status_code == 200


def _text_of(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        text: str = response.json()["choices"][0]["text"]
        return text
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def test_clients_that_leave_at_random_moments(deployment: Deployment, client: httpx.AsyncClient) -> None:
    """Whole and streamed, in any phase: within the lease both engines hold nothing, and the next request is right."""
    chance = random.Random(_SEED)  # noqa: S311 - chosen, not secret
    moments = iter([(chance.random() < 0.5, chance.expovariate(1 / 0.6)) for _ in range(_NUM_DISCONNECTS)])

    async def keep_leaving() -> None:
        for stream, patience_s in moments:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    prompt = f"Number {chance.randrange(1000)} of the long list of things is"
                    await client.post("/v1/completions", json=deployment.body(prompt, max_tokens=1000, stream=stream))

    await asyncio.gather(*(keep_leaving() for _ in range(_NUM_AT_ONCE)))
    await until(deployment.decode.url, is_idle, timeout_s=_LEASE_S)
    await until(deployment.prefill.url, is_idle, timeout_s=_LEASE_S)
    await deployment.until_status(lambda status: not any(engine.num_in_flight for engine in status.engines))
    body = deployment.body("One, two, three, four, five, six,")
    expected = await _alone(deployment, body)
    response = await client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-pdserve-prefill"] == "remote"
