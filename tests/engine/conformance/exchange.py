"""Sends one case to the gateway and to the plain engine, and says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from engine.conformance import compare
from engine.conformance.case import BY_ENGINE, LOCAL, MODEL, PASSED_ON, REMOTE, alone, by_gateway, in_parts
from pdserve.core import PrefillPlace
from pdserve.engine.admin_client import AdminClient
from pdserve.errors import EngineError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.conformance.case import Case
    from pdserve.protocol.admin import RequestRecord

    OnResult = Callable[[Case, "Result"], None]

TIMEOUT_S = 120.0
_RECORDED_WITHIN_S = 10.0
_LOOK_INTERVAL_S = 0.05
_NUM_AT_ONCE = 8
_NUM_SHOWN = 300
"""Characters of a body in a failure's message."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where to send: the gateway, and one vLLM that has no part in it."""

    gateway_url: str
    admin_url: str
    plain_url: str
    model: str


@dataclass(frozen=True, slots=True)
class Result:
    """How one case went."""

    way: str
    """The way that it took through the gateway."""
    difference: str | None
    """The first one between the two answers; None when they are equal."""


async def run_all(cases: Sequence[Case], servers: Servers, on_result: OnResult = lambda *_: None) -> list[Result]:
    """Every case, several at once: an engine takes hardly longer for a few requests than for one."""
    turns = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run_in_turn(case: Case) -> Result:
        async with turns:
            result = await run(case, servers)
        on_result(case, result)
        return result

    return await asyncio.gather(*map(run_in_turn, cases))


async def run(case: Case, servers: Servers) -> Result:
    """Both answers, side by side."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        ours, theirs = await asyncio.gather(
            _send(client, servers.gateway_url, case, servers.model),
            _send(client, servers.plain_url, case, servers.model),
        )
    ways = [await _way_of(response, servers) for response in ours]
    is_ours = ways[0].startswith(by_gateway(""))
    differences = [
        _difference_of_refusals(*pair) if is_ours else _difference(*pair, servers.model)
        for pair in zip(ours, theirs, strict=True)
    ]
    way = next((way for way in ways if way != case.way), case.way)
    return Result(way, next((difference for difference in differences if difference is not None), None))


async def _send(client: httpx.AsyncClient, url: str, case: Case, model: str) -> list[httpx.Response]:
    return [await _send_once(client, url, case, model) for _ in range(case.times)]


async def _send_once(client: httpx.AsyncClient, url: str, case: Case, model: str) -> httpx.Response:
    if case.body is None:
        return await client.get(url + case.path)
    content = case.body if isinstance(case.body, bytes) else json.dumps(_filled_in(case.body, model)).encode()
    return await client.post(url + case.path, content=content, headers={"content-type": "application/json"})


def _filled_in(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {name: model if value == MODEL else value for name, value in body.items() if value is not None}


async def _way_of(response: httpx.Response, servers: Servers) -> str:
    reason = response.headers.get("x-pdserve-reason")
    if reason is not None:
        return BY_ENGINE if reason == Reason.ENGINE_STATUS else by_gateway(reason)
    if "x-pdserve-request-id" not in response.headers:
        return PASSED_ON
    admin = AdminClient(servers.admin_url)
    try:
        record = await _until_recorded(admin, response.headers["x-pdserve-request-id"])
    finally:
        admin.close()
    return _way_in(record, num_choices=len(_value_of(response).get("choices", ())))


async def _until_recorded(admin: AdminClient, request_id: str) -> RequestRecord:
    """It is written after the answer's last byte has left, so that a client may be faster."""
    async with asyncio.timeout(_RECORDED_WITHIN_S):
        while True:
            with contextlib.suppress(EngineError):
                return await admin.request(request_id)
            await asyncio.sleep(_LOOK_INTERVAL_S)


def _way_in(record: RequestRecord, *, num_choices: int) -> str:
    if record.place is PrefillPlace.REMOTE:
        return REMOTE if record.prefill is not None else in_parts(num_choices)
    if record.place is PrefillPlace.ALONE:
        return alone(record.cause.removeprefix("decided: "))
    if record.place is PrefillPlace.LOCAL and record.num_prompt_tokens == 1:
        return LOCAL
    return f"{record.place}: {record.cause}"


def _difference(ours: httpx.Response, theirs: httpx.Response, model: str) -> str | None:
    if ours.status_code != theirs.status_code:
        return _statuses(ours, theirs)
    types = [response.headers["content-type"].partition(";")[0] for response in (ours, theirs)]
    if types[0] != types[1]:
        return f"content type {types[0]} and not {types[1]}"
    values = [compare.normalised(_value_of(response), model=model) for response in (ours, theirs)]
    return compare.first_difference(*values)


def _value_of(response: httpx.Response) -> Any:
    if response.headers["content-type"].startswith("text/event-stream"):
        return compare.fold(compare.events_of(response.text))
    return response.json()


def _difference_of_refusals(ours: httpx.Response, theirs: httpx.Response) -> str | None:
    """What the gateway refuses by itself it tells in its own words, with vLLM's status and the API's fields."""
    if ours.status_code != theirs.status_code:
        return _statuses(ours, theirs)
    missing = {"message", "type"} - ours.json()["error"].keys()
    return f"the error has no {sorted(missing)}" if missing else None


def _statuses(ours: httpx.Response, theirs: httpx.Response) -> str:
    told = [f"{response.status_code} ({response.text[:_NUM_SHOWN]!r})" for response in (ours, theirs)]
    return f"status {told[0]} and not {told[1]}"
