"""The stand-in's newer APIs over HTTP: responses, messages, tools, structured output, embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.sim.faults import Stale
from pdserve.sim.settings import EngineSettings, Task, Timing
from pdserve.sim.stand_in import StandIn, run_stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SETTINGS = EngineSettings(model="tiny", max_model_len=1024, num_blocks=128, handshake_timeout_s=1.0)
_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "near": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}},
        "is_exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}}}},
}

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
_ALL = pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
_CONVERSING = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
_STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True])


@contextlib.asynccontextmanager
async def _up(settings: EngineSettings = _SETTINGS) -> AsyncIterator[tuple[StandIn, httpx.AsyncClient]]:
    async with (
        run_stand_in("kv_both", settings) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=20) as client,
    ):
        yield engine, client


@pytest.fixture
async def engine() -> AsyncIterator[StandIn]:
    async with run_stand_in("kv_both", _SETTINGS) as stand_in:
        yield stand_in


@pytest.fixture
async def client(engine: StandIn) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=20) as http_client:
        yield http_client


def _body(path: str, *, limit: int = 4, **fields: Any) -> dict[str, Any]:
    text = "the quick brown fox jumps over the lazy dog and then once more over the same dog"
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, **fields}
    if path == COMPLETIONS:
        return {"prompt": text, "max_tokens": limit, **body}
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": limit, **body}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": limit, **body}


def _tool(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}
    if path == RESPONSES:
        return {"type": "function", "name": "weather", "parameters": _SCHEMA}
    return {"name": "weather", "input_schema": _SCHEMA}


def _choice(path: str, *, is_named: bool) -> Any:
    if path == CHAT:
        return {"type": "function", "function": {"name": "weather"}} if is_named else "required"
    if path == RESPONSES:
        return {"type": "function", "name": "weather"} if is_named else "required"
    return {"type": "tool", "name": "weather"} if is_named else {"type": "any"}


def _data(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _text_of(path: str, answer: dict[str, Any]) -> str:
    """What the model wrote, text or arguments."""
    if path == COMPLETIONS:
        text: str = answer["choices"][0]["text"]
    elif path == CHAT:
        message = answer["choices"][0]["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if "tool_calls" in message else message["content"]
    elif path == RESPONSES:
        (item,) = answer["output"]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    else:
        (block,) = answer["content"]
        text = json.dumps(block["input"]) if block["type"] == "tool_use" else block["text"]
    return text


def _streamed_text(path: str, text: str) -> str:
    events = _data(text)
    if path == COMPLETIONS:
        return "".join(event["choices"][0]["text"] for event in events)
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text") or delta.get("partial_json") or "" for delta in deltas)
    deltas = [event["choices"][0]["delta"] for event in events]
    arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    return "".join(arguments or [delta.get("content") or "" for delta in deltas])


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return _streamed_text(path, response.text) if body.get("stream") else _text_of(path, response.json())


# Handoffs


@_ALL
@_STREAM_OR_NOT
async def test_every_api_goes_on_where_p_left_off(client: httpx.AsyncClient, path: str, *, stream: bool) -> None:
    """The same text as from one engine alone; with a stale handoff it is marked by capitals."""
    alone = await _answer(client, path, _body(path))
    leg = (await client.post(path, json=_body(path, limit=1, kv_transfer_params=_KEEP))).json()
    params = leg["kv_transfer_params"]
    assert await _answer(client, path, _body(path, stream=stream, kv_transfer_params=params)) == alone


@_ALL
@_STREAM_OR_NOT
async def test_stale_handoffs_are_marked_in_every_api(path: str, *, stream: bool) -> None:
    """Capitals, where the KV was somebody else's."""
    async with _up() as (prefill, p), _up() as (_, d):
        prefill.faults.inject(Stale())
        leg = (await p.post(path, json=_body(path, limit=1, kv_transfer_params=_KEEP))).json()
        text = await _answer(d, path, _body(path, stream=stream, kv_transfer_params=leg["kv_transfer_params"]))
        assert text.strip()
        assert text == text.upper()


@_CONVERSING
async def test_what_is_in_the_prompt(client: httpx.AsyncClient, path: str) -> None:
    """Tools, template arguments and what is no text, in any order of keys; not what shapes the output only."""
    plain = await _answer(client, path, _body(path))
    changes: list[dict[str, Any]] = [{"tools": [_tool(path)]}, {"chat_template_kwargs": {"enable_thinking": False}}]
    if path == CHAT:
        picture = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
        changes += [{"reasoning_effort": "low"}, {"messages": [{"role": "user", "content": [picture]}]}]
    texts = {plain, *[await _answer(client, path, _body(path, **change)) for change in changes]}
    assert len(texts) == len(changes) + 1
    assert await _answer(client, path, _body(path, metadata={"a": "b"})) == plain


# Tools and structured output


@_CONVERSING
@_STREAM_OR_NOT
@pytest.mark.parametrize("is_named", [False, True])
async def test_a_tool_call(client: httpx.AsyncClient, path: str, *, stream: bool, is_named: bool) -> None:
    """Where the client demands one there is one, with arguments as its schema wants them."""
    fields = {"tools": [_tool(path)], "tool_choice": _choice(path, is_named=is_named)}
    text = await _answer(client, path, _body(path, limit=300, stream=stream, **fields))
    arguments = json.loads(text)
    assert set(arguments) == set(_SCHEMA["properties"])
    assert (arguments["days"], arguments["unit"], arguments["is_exact"]) == (7, "c", True)
    assert arguments["city"] == arguments["city"].lower()
    assert set(arguments["near"]) == {"name"}


async def test_why_a_tool_call_ended(client: httpx.AsyncClient) -> None:
    """In chat a tool that the client named ends with `stop`; messages say tool_use either way."""
    for path, is_named, expected in (
        (CHAT, False, "tool_calls"),
        (CHAT, True, "stop"),
        (MESSAGES, False, "tool_use"),
        (MESSAGES, True, "tool_use"),
    ):
        fields = {"tools": [_tool(path)], "tool_choice": _choice(path, is_named=is_named)}
        answer = (await client.post(path, json=_body(path, limit=300, **fields))).json()
        assert (answer["stop_reason"] if path == MESSAGES else answer["choices"][0]["finish_reason"]) == expected
        events = _data((await client.post(path, json=_body(path, limit=300, stream=True, **fields))).text)
        last = events[-2]["delta"]["stop_reason"] if path == MESSAGES else events[-1]["choices"][0]["finish_reason"]
        assert last == expected


@_CONVERSING
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("is_tagged", [False, True])
async def test_a_p_leg_for_a_tool(path: str, *, is_named: bool, is_tagged: bool) -> None:
    """One token of a call is none. Messages refuse it where the tool is named and its call is bare JSON: no JSON at all.

    P has prefilled all the same, and keeps the blocks.
    """
    async with _up(dataclasses.replace(_SETTINGS, has_tagged_tool_calls=is_tagged)) as (engine, client):
        fields = {"tools": [_tool(path)], "kv_transfer_params": _KEEP, "tool_choice": _choice(path, is_named=is_named)}
        response = await client.post(path, json=_body(path, limit=1, **fields))
        assert engine.num_held_blocks > 0
        if path == MESSAGES and is_named and not is_tagged:
            assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")
            fields["tool_choice"] = {"type": "auto"}
            response = await client.post(path, json=_body(path, limit=1, **fields))
        assert response.json()["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"response_format": {"type": "json_object"}}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}}),
    ],
)
@_STREAM_OR_NOT
async def test_structured_output(client: httpx.AsyncClient, path: str, fields: dict[str, Any], *, stream: bool) -> None:
    """Some object of the wanted shape."""
    text = await _answer(client, path, _body(path, limit=300, stream=stream, **fields))
    assert isinstance(json.loads(text), dict)


@_CONVERSING
async def test_tools_without_a_parser(path: str) -> None:
    """Chat and messages refuse them, responses write text."""
    async with _up(dataclasses.replace(_SETTINGS, enable_auto_tool_choice=False)) as (_, client):
        fields = {"tools": [_tool(path)], "tool_choice": _choice(path, is_named=False)}
        response = await client.post(path, json=_body(path, **fields))
        assert response.status_code == (200 if path == RESPONSES else 400)


# Choices


async def test_seeds(client: httpx.AsyncClient) -> None:
    """Choice j of n has seed + j; another seed gives another text; greedy ones do not care."""

    async def texts(**fields: Any) -> list[str]:
        answer = (await client.post(COMPLETIONS, json=_body(COMPLETIONS, **fields))).json()
        return [choice["text"] for choice in answer["choices"]]

    both = await texts(temperature=1, seed=7, n=2)
    assert both == [*await texts(temperature=1, seed=7), *await texts(temperature=1, seed=8)]
    assert len(set(both)) == 2
    assert len(set(await texts(temperature=1, n=3))) == 3
    assert await texts(seed=1) == await texts(seed=2)


async def test_a_full_queue() -> None:
    """--max-num-queued-reqs: 503 for what would be one too many, choices counted."""
    async with _up(dataclasses.replace(_SETTINGS, max_num_queued_reqs=1)) as (_, client):
        response = await client.post(COMPLETIONS, json=_body(COMPLETIONS, n=2, temperature=1))
        assert (response.status_code, response.json()["error"]["type"]) == (503, "Service Unavailable")
        assert (await client.post(COMPLETIONS, json=_body(COMPLETIONS))).status_code == 200


# Responses that are kept


@pytest.fixture
async def keeping() -> AsyncIterator[httpx.AsyncClient]:
    settings = dataclasses.replace(_SETTINGS, enable_responses_store=True, timing=Timing(decode_step_s=0.001))
    async with _up(settings) as (_, http_client):
        yield http_client


async def test_a_response_goes_on_from_another(keeping: httpx.AsyncClient) -> None:
    """The earlier turn and its answer are in the prompt, its instructions are not."""
    first = (await keeping.post(RESPONSES, json=_body(RESPONSES, instructions="Be brief."))).json()
    assert (await keeping.get(f"{RESPONSES}/{first['id']}")).json() == first
    again = (await keeping.post(RESPONSES, json=_body(RESPONSES, previous_response_id=first["id"]))).json()
    spelled_out = [
        {"role": "user", "content": _body(RESPONSES)["input"]},
        {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
        {"role": "user", "content": _body(RESPONSES)["input"]},
    ]
    alike = (await keeping.post(RESPONSES, json={**_body(RESPONSES), "input": spelled_out})).json()
    assert again["usage"]["input_tokens"] == alike["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert again["output"][0]["content"] == alike["output"][0]["content"]
    unknown = await keeping.post(RESPONSES, json=_body(RESPONSES, previous_response_id="resp_nobody"))
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "response_id")


async def test_a_response_that_is_not_to_be_kept(keeping: httpx.AsyncClient) -> None:
    """`store` false is heeded."""
    response = (await keeping.post(RESPONSES, json=_body(RESPONSES, store=False))).json()
    assert (await keeping.get(f"{RESPONSES}/{response['id']}")).status_code == 404


async def test_a_response_in_the_background(keeping: httpx.AsyncClient) -> None:
    """Queued at once, there later, and not to be cancelled any more."""
    queued = (await keeping.post(RESPONSES, json=_body(RESPONSES, background=True))).json()
    assert (queued["status"], queued["output"], queued["background"]) == ("queued", [], True)
    async with asyncio.timeout(10):
        while (await keeping.get(f"{RESPONSES}/{queued['id']}")).json()["status"] != "incomplete":
            pass
    late = await keeping.post(f"{RESPONSES}/{queued['id']}/cancel")
    assert (late.status_code, late.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_a_background_response_is_cancelled() -> None:
    """Its blocks are free at once."""
    settings = dataclasses.replace(_SETTINGS, enable_responses_store=True, timing=Timing(decode_step_s=10))
    async with _up(settings) as (engine, client):
        queued = (await client.post(RESPONSES, json=_body(RESPONSES, background=True))).json()
        cancelled = (await client.post(f"{RESPONSES}/{queued['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await engine.idle()
        assert (await client.get(f"{RESPONSES}/{queued['id']}")).json()["status"] == "cancelled"


async def test_a_background_stream_can_be_read_again(keeping: httpx.AsyncClient) -> None:
    """Whole, or from an event on; the reader may leave meanwhile."""
    body = _body(RESPONSES, background=True, stream=True)
    async with keeping.stream("POST", RESPONSES, json=body) as response:
        text = await anext(response.aiter_text())
    name = _data(text)[0]["response"]["id"]
    whole = (await keeping.get(f"{RESPONSES}/{name}", params={"stream": "true"})).text
    events = _data(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    rest = (await keeping.get(f"{RESPONSES}/{name}", params={"stream": "true", "starting_after": "2"})).text
    assert whole.endswith(rest)
    assert _data(rest)[0]["sequence_number"] == 3


# Embeddings and scores


async def test_embeddings() -> None:
    """One vector a text, the same every time, also in base64; and no text from such a model."""
    async with _up(dataclasses.replace(_SETTINGS, task=Task.EMBED)) as (_, client):
        body = {"model": "tiny", "input": ["a dog", "a cat", "a dog"]}
        answer = (await client.post("/v1/embeddings", json=body)).json()
        first, second, third = (item["embedding"] for item in answer["data"])
        assert first == third != second
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        encoded = (await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
        assert isinstance(encoded["data"][0]["embedding"], str)
        assert (await client.post(COMPLETIONS, json=_body(COMPLETIONS))).status_code == 404
        assert (await client.post("/v1/embeddings", json={**body, "model": "other"})).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_scores_and_ranks(prefix: str) -> None:
    """One score a pair, and documents in the order of theirs."""
    async with _up(dataclasses.replace(_SETTINGS, task=Task.SCORE)) as (_, client):
        documents = ["a dog", "a cat", "a fox"]
        scored = (await client.post(f"{prefix}/score", json={"queries": "a dog", "documents": documents})).json()
        assert [item["index"] for item in scored["data"]] == [0, 1, 2]
        assert scored["data"][0]["score"] == pytest.approx(1)
        ranked = (
            await client.post(f"{prefix}/rerank", json={"query": "a dog", "documents": documents, "top_n": 2})
        ).json()
        assert len(ranked["results"]) == 2
        assert ranked["results"][0]["index"] == 0
        assert (await client.post(f"{prefix}/score", json={"queries": "a dog"})).status_code == 400
