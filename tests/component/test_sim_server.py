"""The stand-in over HTTP: answers, errors, faults, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.errors import ConfigError
from pdserve.sim.engine import Engine
from pdserve.sim.faults import (
    AnswerWithoutHandoff,
    BreakOffAfter,
    Die,
    ErrorStatus,
    GarbageSse,
    HalfHandoff,
    IgnoreHandoff,
    NeverAnswer,
    Slow,
    Stale,
    parse_fault,
)
from pdserve.sim.handoff import KvRole
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.sim.stand_in import StandIn, run_stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.sim.faults import Fault

_SETTINGS = EngineSettings(model="tiny", max_model_len=256, num_blocks=64, handshake_timeout_s=1.0)
_PROMPT = "the quick brown fox jumps over the lazy dog and then once more over the same dog"
_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
_BODY = {"model": "tiny", "prompt": _PROMPT, "max_tokens": 4, "temperature": 0}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}


@contextlib.asynccontextmanager
async def _up(
    role: str = "kv_both", settings: EngineSettings = _SETTINGS
) -> AsyncIterator[tuple[StandIn, httpx.AsyncClient]]:
    async with run_stand_in(role, settings) as engine, httpx.AsyncClient(base_url=engine.url, timeout=20) as client:
        yield engine, client


@pytest.fixture
async def engine() -> AsyncIterator[StandIn]:
    async with run_stand_in("kv_both", _SETTINGS) as stand_in:
        yield stand_in


@pytest.fixture
async def client(engine: StandIn) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=20) as http_client:
        yield http_client


async def _post(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return await client.post(path, json={**(_CHAT if "chat" in path else _BODY), **fields})


def _events(text: str) -> list[Any]:
    """The events of a stream that ends as it should."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def _handoff(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = (await _post(client, max_tokens=1, kv_transfer_params=_KEEP)).json()
    handoff: dict[str, Any] = answer["kv_transfer_params"]
    return handoff


# Answers


async def test_a_whole_completion(client: httpx.AsyncClient) -> None:
    """Fields, order and nulls are vLLM's."""
    answer = (await _post(client)).json()
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert answer["choices"][0] | {"text": ""} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }
    assert len(answer["choices"][0]["text"].split()) == 4
    assert answer["usage"] == {
        "prompt_tokens": 17,
        "total_tokens": 21,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


async def test_a_streamed_completion_says_the_same(client: httpx.AsyncClient) -> None:
    """One word an event, no usage unless asked for, the fingerprint on the last."""
    whole = (await _post(client)).json()
    response = await _post(client, stream=True)
    events = _events(response.text)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
    assert ["system_fingerprint" in event for event in events] == [False, False, False, True]
    assert not any("usage" in event for event in events)


async def test_stream_usage(client: httpx.AsyncClient) -> None:
    """include_usage adds an event without choices; continuous_usage_stats a count on every one."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = _events((await _post(client, stream=True, stream_options=options)).text)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert ["system_fingerprint" in event for event in events] == [False] * 4 + [True]


async def test_a_chat_completion(client: httpx.AsyncClient) -> None:
    """A message, and a stream that opens with the role and says the same."""
    whole = (await _post(client, "/v1/chat/completions")).json()
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    options = {"include_usage": True}
    events = _events((await _post(client, "/v1/chat/completions", stream=True, stream_options=options)).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["prompt_tokens_details"]["created_cache_tokens"] == 0


async def test_chat_limits(client: httpx.AsyncClient) -> None:
    """max_completion_tokens beats max_tokens."""
    answer = (await _post(client, "/v1/chat/completions", max_tokens=9, max_completion_tokens=2)).json()
    assert answer["usage"]["completion_tokens"] == 2


async def test_several_choices(client: httpx.AsyncClient) -> None:
    """n sampled choices differ, and the prompt is counted once."""
    answer = (await _post(client, n=3, temperature=1, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (17, 12)


async def test_several_prompts_and_one_handoff(engine: StandIn, client: httpx.AsyncClient) -> None:
    """A list of prompts is one answer; of its handoffs only the first one's is told, and both prompts' blocks are kept."""
    answer = (await _post(client, prompt=["red", [70, 71]], max_tokens=1, kv_transfer_params=_KEEP)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert "-0-" in answer["kv_transfer_params"]["remote_request_id"]
    assert engine.num_held_blocks == 2


async def test_several_prompts_stream_side_by_side(client: httpx.AsyncClient) -> None:
    """Their events are told apart by index, and one usage event counts them all."""
    options = {"include_usage": True}
    events = _events((await _post(client, prompt=["red", "blue"], stream=True, stream_options=options)).text)
    assert sorted(event["choices"][0]["index"] for event in events[:-1]) == [0] * 4 + [1] * 4
    assert events[-1]["usage"]["total_tokens"] == 2 + 8


async def test_logprobs(client: httpx.AsyncClient) -> None:
    """Both APIs' shapes, and offsets that go on through a stream."""
    logprobs = (await _post(client, logprobs=2)).json()["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:end])) for end in range(4)]
    events = _events((await _post(client, logprobs=2, stream=True)).text)
    assert [event["choices"][0]["logprobs"]["text_offset"][0] for event in events] == logprobs["text_offset"]
    chat = (await _post(client, "/v1/chat/completions", logprobs=True, top_logprobs=2)).json()
    assert [len(item["top_logprobs"]) for item in chat["choices"][0]["logprobs"]["content"]] == [2] * 3


async def test_echo(client: httpx.AsyncClient) -> None:
    """The prompt comes back in front, whole or streamed, with its logprobs but for the first token's."""
    choice = (await _post(client, echo=True, logprobs=1, max_tokens=1)).json()["choices"][0]
    assert choice["text"].startswith(_PROMPT)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == 17
    events = _events((await _post(client, echo=True, stream=True, max_tokens=2)).text)
    assert events[0]["choices"][0]["text"].startswith(_PROMPT)
    assert not events[1]["choices"][0]["text"].startswith(_PROMPT)


async def test_stop_strings(client: httpx.AsyncClient) -> None:
    """The answer ends before the stop string and names it."""
    text = (await _post(client)).json()["choices"][0]["text"]
    word = text.split()[2]
    choice = (await _post(client, stop=f" {word}")).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", f" {word}")
    assert text.startswith(choice["text"] + f" {word}")


async def test_token_ids(client: httpx.AsyncClient) -> None:
    """return_token_ids tells both sides' ids; they are what /tokenize and /detokenize say."""
    choice = (await _post(client, return_token_ids=True)).json()["choices"][0]
    tokens = (await client.post("/tokenize", json={"prompt": _PROMPT})).json()
    assert (tokens["tokens"], tokens["count"]) == (choice["prompt_token_ids"], 17)
    text = (await client.post("/detokenize", json={"tokens": choice["token_ids"]})).json()["prompt"]
    assert text == choice["text"]


async def test_tokenize_chat(client: httpx.AsyncClient) -> None:
    """A conversation has as many tokens as its chat completion counts."""
    count = (await client.post("/tokenize", json={"messages": _CHAT["messages"]})).json()["count"]
    assert count == (await _post(client, "/v1/chat/completions")).json()["usage"]["prompt_tokens"]


async def test_request_ids(engine: StandIn, client: httpx.AsyncClient) -> None:
    """X-Request-Id names the answer and the handoff; a header beats the body's id; the stand-in remembers what it saw."""
    headers = {"X-Request-Id": "abc"}
    body = {**_BODY, "max_tokens": 1, "request_id": "other", "kv_transfer_params": _KEEP}
    answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
    assert answer["id"] == "cmpl-abc"
    assert answer["kv_transfer_params"]["remote_request_id"].startswith("cmpl-abc-0-")
    chat = (
        await client.post("/v1/chat/completions", json={**_CHAT, "kv_transfer_params": _KEEP}, headers=headers)
    ).json()
    assert chat["kv_transfer_params"]["remote_request_id"].removeprefix("chatcmpl-abc-").isalnum()
    assert engine.requests[0].headers["x-request-id"] == "abc"
    assert engine.requests[0].fields == body


async def test_the_other_paths(client: httpx.AsyncClient) -> None:
    """Health, models, version, metrics; unknown paths and methods in Starlette's words."""
    for path in ("/health", "/ping"):
        assert ((await client.get(path)).status_code, (await client.get(path)).content) == (200, b"")
    assert (await client.get("/version")).json() == {"version": "0.32.0"}
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    assert (await client.get("/nope")).json() == {"detail": "Not Found"}
    refused = await client.get("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


async def test_metrics(client: httpx.AsyncClient) -> None:
    """vLLM's names and labels, with the suffixes of Prometheus."""
    await _post(client)
    text = (await client.get("/metrics")).text
    assert 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 17.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in text
    for name in ("nixl_xfer_time_seconds_count", "nixl_num_failed_transfers_total", "time_to_first_token_seconds_sum"):
        assert f"vllm:{name}" in text


async def test_details_can_be_off() -> None:
    """Without --enable-prompt-tokens-details usage has no details, and proves nothing."""
    async with _up(settings=dataclasses.replace(_SETTINGS, enable_prompt_tokens_details=False)) as (_, client):
        assert (await _post(client)).json()["usage"]["prompt_tokens_details"] is None
        events = _events((await _post(client, stream=True, stream_options={"include_usage": True})).text)
        assert "prompt_tokens_details" not in events[-1]["usage"]


# Errors


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "other"}, 404, "NotFoundError", "model"),
        ({"model": "other", "stream": True}, 404, "NotFoundError", "model"),
        ({"prompt": None}, 400, "BadRequestError", "prompt"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt"),
        ({"prompt": []}, 400, "BadRequestError", None),
        ({"prompt": 3}, 400, "Bad Request", "body.prompt"),
        ({"prompt": [10**6]}, 400, "BadRequestError", None),
        ({"prompt": "x" * 300}, 400, "BadRequestError", "input_tokens"),
        ({"prompt": "x" * 256}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
        ({"max_tokens": 1.5}, 400, "Bad Request", "body.max_tokens"),
        ({"min_tokens": 5}, 400, "BadRequestError", None),
        ({"n": 2}, 400, "BadRequestError", None),
        ({"n": 0}, 400, "BadRequestError", None),
        ({"temperature": -1}, 400, "BadRequestError", "temperature"),
        ({"top_p": 2}, 400, "BadRequestError", "top_p"),
        ({"stop": [""]}, 400, "BadRequestError", None),
        ({"stop": ["a"] * 5}, 400, "Bad Request", "body.stop"),
        ({"logprobs": 21}, 400, "BadRequestError", "logprobs"),
        ({"logprobs": -2}, 400, "BadRequestError", "logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
        ({"seed": 2**64}, 400, "Bad Request", "body.seed"),
        ({"suffix": "x"}, 400, "BadRequestError", "suffix"),
        ({"kv_transfer_params": "x"}, 400, "Bad Request", "body.kv_transfer_params"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, fields: dict[str, Any], status: int, kind: str, param: str) -> None:
    """What vLLM refuses is refused with its status, its type and its param."""
    response = await _post(client, **fields)
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (response.status_code, error["code"], error["type"], error["param"]) == (status, status, kind, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, None),
        ({"messages": "hello"}, "body.messages"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "body.tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_chat_refusals(client: httpx.AsyncClient, fields: dict[str, Any], param: str | None) -> None:
    """The same for chat."""
    response = await _post(client, "/v1/chat/completions", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
async def test_bodies_that_are_no_request(client: httpx.AsyncClient, body: bytes) -> None:
    """400 and an error object, where FastAPI alone would say 422."""
    response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "Bad Request")


async def test_other_media_types(client: httpx.AsyncClient) -> None:
    """Only JSON is taken."""
    response = await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 400


@pytest.mark.parametrize("fields", [{"unknown": 1}, {"priority": 1}, {"max_tokens": "4"}, {"best_of": 2}])
async def test_what_is_taken_all_the_same(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    """Unknown fields, and numbers in quotes."""
    assert (await _post(client, **fields)).status_code == 200


# Disconnects


async def test_a_client_that_leaves_a_stream_frees_the_blocks(engine: StandIn) -> None:
    """The generation ends with the connection."""
    async with (
        httpx.AsyncClient(base_url=engine.url) as leaving,
        leaving.stream("POST", "/v1/completions", json={**_BODY, "max_tokens": 200, "stream": True}) as response,
    ):
        await anext(response.aiter_bytes())
    await engine.idle()
    assert engine.counter("request_success_total", finished_reason="abort") == 0


async def test_a_client_that_leaves_early_frees_the_blocks() -> None:
    """Before the first byte of a whole answer as well; P is then told a second time, which it counts as too late."""
    slow = dataclasses.replace(_SETTINGS, timing=Timing(decode_step_s=60))
    async with _up("kv_producer") as (p, p_client), _up("kv_consumer", slow) as (d, d_client):
        body = {**_BODY, "kv_transfer_params": await _handoff(p_client)}
        request = asyncio.ensure_future(d_client.post("/v1/completions", json=body))
        await d.engine.until(lambda: d.engine.num_running == 1)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        await d.idle()
        await p.engine.until(lambda: p.counter("nixl_num_notifications_after_expiry_total") == 1)


# Handoffs


async def test_a_stream_is_taken_before_its_kv_is_there() -> None:
    """When the transfer fails, the client has a 200 already: the error is an event, and [DONE] follows it."""
    async with _up() as (_, client):
        handoff = await _handoff(client) | {"remote_port": 9, "remote_engine_id": "gone"}
        whole = await _post(client, kv_transfer_params=handoff)
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "Internal server error")
        stream = await _post(client, stream=True, kv_transfer_params=handoff)
        (event,) = _events(stream.text)
        assert (stream.status_code, event["error"]["code"]) == (200, 500)


@pytest.mark.parametrize("fields", [{"model": "other"}, {"min_tokens": 9}, {"prompt": "x" * 300}])
async def test_a_refusal_frees_p(fields: dict[str, Any]) -> None:
    """D refuses, and P's blocks are free at once."""
    async with _up("kv_producer") as (p, p_client), _up("kv_consumer") as (_, d_client):
        handoff = await _handoff(p_client)
        assert p.num_held_blocks == 2
        assert (await _post(d_client, kv_transfer_params=handoff, **fields)).status_code >= 400
        await p.engine.until(lambda: p.num_held_blocks == 0)
        assert p.counter("nixl_num_kv_expired_reqs_total") == 0


async def test_a_malformed_request_does_not_free_p() -> None:
    """What pydantic refuses never gets as far as the notice."""
    async with _up("kv_producer") as (p, p_client), _up("kv_consumer") as (d, d_client):
        handoff = await _handoff(p_client)
        assert (await _post(d_client, kv_transfer_params=handoff, max_tokens="x")).status_code == 400
        await d.idle()
        assert p.num_held_blocks == 2


async def test_a_dead_core_ends_the_server() -> None:
    """500 for the request that killed it, 503 for /health, and then nobody listens any more."""
    async with _up() as (engine, client):
        killer = await _post(client, kv_transfer_params={"do_remote_prefill": True})
        assert killer.status_code == 500
        assert killer.json()["error"]["message"].startswith("EngineCore encountered an issue.")
        await engine.gone.wait()
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_a_dead_core_can_stay() -> None:
    """With VLLM_KEEP_ALIVE_ON_ENGINE_DEATH it answers 500 for ever after; a stream is refused, not begun."""
    async with _up(settings=dataclasses.replace(_SETTINGS, keep_alive_on_engine_death=True)) as (engine, client):
        engine.engine.kill("by hand")
        assert (await _post(client)).status_code == 500
        assert (await _post(client, stream=True)).status_code == 500
        assert (await _post(client, model="other")).status_code == 404
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_core_that_dies_in_a_stream(engine: StandIn, client: httpx.AsyncClient) -> None:
    """The client gets an error event and [DONE]."""
    async with client.stream("POST", "/v1/completions", json={**_BODY, "max_tokens": 200, "stream": True}) as response:
        pieces = response.aiter_text()
        text = await anext(pieces)
        engine.engine.kill("by hand")
        text += "".join([piece async for piece in pieces])
    assert _events(text)[-1]["error"]["message"].startswith("EngineCore encountered an issue.")


# Faults


async def test_a_fault_hits_as_many_requests_as_it_is_told(engine: StandIn, client: httpx.AsyncClient) -> None:
    """Twice and no more; or always, until it is cleared."""
    engine.faults.inject(ErrorStatus(503), times=2)
    assert [(await _post(client)).status_code for _ in range(3)] == [503, 503, 200]
    engine.faults.inject(ErrorStatus(500), times=None)
    assert [(await _post(client)).status_code for _ in range(2)] == [500, 500]
    engine.faults.clear()
    assert (await _post(client)).status_code == 200


async def test_handoffs_that_are_missing_or_half(engine: StandIn, client: httpx.AsyncClient) -> None:
    """P keeps the blocks, and does not tell where they are, or not quite."""
    engine.faults.inject(AnswerWithoutHandoff())
    assert await _handoff(client) is None
    assert engine.num_held_blocks == 2
    engine.faults.inject(HalfHandoff("remote_host"))
    assert "remote_host" not in await _handoff(client)


async def test_a_stale_handoff_gives_marked_text(engine: StandIn, client: httpx.AsyncClient) -> None:
    """200, and text in capitals."""
    engine.faults.inject(Stale())
    handoff = await _handoff(client)
    assert engine.num_held_blocks == 0
    answer = await _post(client, prompt=_PROMPT, cache_salt="d", kv_transfer_params=handoff)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].isupper()


async def test_a_handoff_that_is_ignored(client: httpx.AsyncClient) -> None:
    """D computes alone; only its own numbers tell."""
    async with _up("kv_consumer") as (d, d_client):
        d.faults.inject(IgnoreHandoff())
        handoff = await _handoff(client)
        del handoff["remote_prefill_cached_tokens"]
        answer = (await _post(d_client, kv_transfer_params=handoff)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert d.counter("prompt_tokens_by_source_total", source="local_compute") == 17
        assert d.counter("prompt_tokens_by_source_total", source="external_kv_transfer") == 0


async def test_no_answer(engine: StandIn) -> None:
    """The request is taken and nothing comes; leaving ends it."""
    engine.faults.inject(NeverAnswer())
    async with httpx.AsyncClient(base_url=engine.url, timeout=0.1) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await _post(impatient)
    assert len(engine.requests) == 1
    await engine.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_pieces", [0, 1])
async def test_an_answer_that_breaks_off(
    engine: StandIn, client: httpx.AsyncClient, num_pieces: int, *, stream: bool
) -> None:
    """Before the head, or in the middle of the body: the client can tell, and nothing stays behind."""
    engine.faults.inject(BreakOffAfter(num_pieces))
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        await _post(client, stream=stream)
    await engine.idle()
    assert (await _post(client)).status_code == 200


async def test_an_engine_that_dies_in_the_middle() -> None:
    """Everything is reset at once, and nobody listens afterwards."""
    async with _up() as (engine, client):
        engine.faults.inject(Die(2))
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await _post(client, stream=True)
        await engine.gone.wait()
        with pytest.raises(httpx.ConnectError):
            await _post(client)


async def test_a_slow_answer_is_the_same(engine: StandIn, client: httpx.AsyncClient) -> None:
    """A byte at a time, and whole in the end."""
    text = (await _post(client)).json()["choices"][0]["text"]
    for stream in (False, True):
        engine.faults.inject(Slow())
        response = await _post(client, stream=stream)
        texts = _events(response.text) if stream else [response.json()]
        assert "".join(item["choices"][0]["text"] for item in texts) == text


async def test_garbage_in_a_stream(engine: StandIn, client: httpx.AsyncClient) -> None:
    """Bytes that are neither JSON nor UTF-8, after the first event."""
    engine.faults.inject(GarbageSse(1))
    parts = (await _post(client, stream=True)).content.split(b"\n\n")
    json.loads(parts[0].removeprefix(b"data: "))
    with pytest.raises(UnicodeDecodeError):
        json.loads(parts[1].removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stale", Stale()),
        ("half_handoff:remote_host", HalfHandoff("remote_host")),
        ("error_status:500", ErrorStatus(500)),
        ("slow:0.5", Slow(0.5)),
        ("die", Die()),
    ],
)
def test_faults_by_name(text: str, fault: Fault) -> None:
    """As the command line takes them."""
    assert parse_fault(text) == fault


@pytest.mark.parametrize("text", ["nope", "error_status:many", "stale:1"])
def test_unknown_faults(text: str) -> None:
    """A ConfigError, before anything starts."""
    with pytest.raises(ConfigError):
        parse_fault(text)


# The server


async def test_a_port_that_is_taken() -> None:
    """Found before anything starts."""
    async with _up() as (engine, _):
        port = int(engine.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            async with run_stand_in("kv_both", port=port):
                pass


async def test_many_at_once(engine: StandIn, client: httpx.AsyncClient) -> None:
    """Fifty requests at a time, half of them through a handoff to the same engine, say what each says alone."""
    prompts = [f"{word} river number {number}" for number in range(25) for word in ("red", "blue")]
    alone = [(await _post(client, prompt=prompt)).json()["choices"][0]["text"] for prompt in prompts]

    async def ask(prompt: str, *, through_handoff: bool) -> str:
        params = None
        if through_handoff:
            leg = await _post(client, prompt=prompt, max_tokens=1, kv_transfer_params=_KEEP)
            params = leg.json()["kv_transfer_params"]
        text: str = (await _post(client, prompt=prompt, kv_transfer_params=params)).json()["choices"][0]["text"]
        return text

    together = await asyncio.gather(*(ask(prompt, through_handoff=bool(i % 2)) for i, prompt in enumerate(prompts)))
    assert together == alone
    await engine.idle()


async def test_an_engine_of_its_own_process_has_no_api_for_tests(client: httpx.AsyncClient) -> None:
    """Nothing that breaks it can be reached over HTTP."""
    for path in ("/faults", "/admin", "/kill"):
        assert (await client.post(path, json={})).status_code == 404


def test_roles_are_vllms() -> None:
    """kv_role's values, and none."""
    assert [role.value for role in KvRole] == ["kv_producer", "kv_consumer", "kv_both", "none"]
    assert Engine(KvRole.NONE).engine_id != Engine(KvRole.NONE).engine_id


# A process of its own

_PROGRAM = """
import asyncio, sys
from pdserve.sim.faults import parse_fault
from pdserve.sim.settings import EngineSettings
from pdserve.sim.stand_in import serve_stand_in

settings = EngineSettings(model="tiny", max_model_len=256, num_blocks=64)
faults = [parse_fault(text) for text in sys.argv[1:]]
asyncio.run(serve_stand_in("kv_producer", settings, port=0, faults=faults, on_ready=lambda up: print(up.url, flush=True)))
print("ended")
"""


@contextlib.asynccontextmanager
async def _process(*faults: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, *faults, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_handoff_between_processes() -> None:
    """D in this process pulls from P in another one, and SIGTERM ends P in good order."""
    async with _process() as (process, url), _up("kv_consumer") as (d, d_client):
        async with httpx.AsyncClient(base_url=url, timeout=20) as p_client:
            handoff = await _handoff(p_client)
        answer = (await _post(d_client, kv_transfer_params=handoff)).json()
        assert not answer["choices"][0]["text"].isupper()
        assert d.counter("prompt_tokens_by_source_total", source="external_kv_transfer") == 17
        process.terminate()
        assert process.stdout is not None
        assert await process.stdout.read() == b"ended\n"
        assert await process.wait() == 0


async def test_a_process_that_dies_ends() -> None:
    """When a fault says die, the process is over, as vLLM's would be."""
    async with _process("die:1") as (process, url), httpx.AsyncClient(base_url=url, timeout=20) as client:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await _post(client, stream=True)
        assert await process.wait() == 0
