"""Responses and messages in P/D, and what all APIs do with choices, tools and refusals: the stand-in and the real thing."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from contract.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PREFILL,
    RESPONSES,
    TOLD,
    body_for,
    hand_off,
    release,
)

if TYPE_CHECKING:
    from contract.asking import Engine

_NEWER = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


def _events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream whose events have both."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    pairs = [event.split("\n", 1) for event in events]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def _stream(engine: Engine, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    response = await engine.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = _events(response.text)
    assert all(name == data["type"] for name, data in events)
    return events


async def _until_it_breaks_off(response: httpx.Response) -> str:
    """What came before the connection broke, which it must."""
    text = ""
    try:
        async for piece in response.aiter_text():
            text += piece
    except httpx.RemoteProtocolError:
        return text
    pytest.fail(f"the stream ended in good order: {text}")


def _not_computed(path: str, usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens that the engine did not compute, and all of them."""
    if path == RESPONSES:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    parts = (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"], usage["input_tokens"])
    return parts[0], sum(parts)


@_NEWER
async def test_p_answers_with_a_handoff(prefill: Engine, decode: Engine, path: str) -> None:
    """A P leg answers with the handoff at the top level, whatever the API."""
    handoff = await hand_off(prefill, path, body_for(path, prefill.model))
    assert (handoff["do_remote_prefill"], handoff["transfer_mode"], handoff[TOLD]) == (True, "pull", 0)
    assert all(key in handoff for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"))
    await release(decode, handoff)
    await prefill.until_metric("kv_cache_usage_perc", 0)


async def test_a_response_has_the_bodys_id(prefill: Engine, decode: Engine) -> None:
    """X-Request-Id does not name responses; `request_id` does, and it is in the engine's own id."""
    name = f"resp_{uuid.uuid4().hex[:16]}"
    leg = body_for(RESPONSES, prefill.model, max_output_tokens=1, request_id=name, kv_transfer_params=PREFILL)
    answer = await prefill.answer(RESPONSES, leg, request_id="from-the-header")
    assert answer["id"] == name
    assert answer["kv_transfer_params"]["remote_request_id"].startswith(f"{name}_0-")
    await release(decode, answer["kv_transfer_params"])


async def test_a_message_has_the_headers_id(prefill: Engine, decode: Engine) -> None:
    """A message is a chat request inside, and named like one."""
    name = f"leg-{uuid.uuid4().hex}"
    leg = body_for(MESSAGES, prefill.model, max_tokens=1, kv_transfer_params=PREFILL)
    answer = await prefill.answer(MESSAGES, leg, request_id=name)
    assert answer["id"] == f"chatcmpl-{name}"
    assert name in answer["kv_transfer_params"]["remote_request_id"]
    await release(decode, answer["kv_transfer_params"])


@_NEWER
async def test_d_reports_what_it_did_not_compute(prefill: Engine, decode: Engine, path: str) -> None:
    """As in completions and chat: less P's number, D's count is the whole prompt."""
    body = body_for(path, decode.model)
    handoff = await hand_off(prefill, path, body)
    del handoff[TOLD]
    answer = await decode.answer(path, {**body, "kv_transfer_params": handoff})
    num_cached, num_tokens = _not_computed(path, answer["usage"])
    assert num_cached == num_tokens == handoff["remote_num_tokens"]
    await prefill.until_metric("kv_cache_usage_perc", 0)


@_NEWER
async def test_a_streams_usage_proves_the_same(prefill: Engine, decode: Engine, path: str) -> None:
    """In the last events but one or the last, where the API has it."""
    body = body_for(path, decode.model)
    handoff = await hand_off(prefill, path, body)
    del handoff[TOLD]
    events = dict(await _stream(decode, path, {**body, "kv_transfer_params": handoff}))
    usage = events["response.completed"]["response"]["usage"] if path == RESPONSES else events["message_delta"]["usage"]
    num_cached, num_tokens = _not_computed(path, usage)
    assert num_cached == num_tokens == handoff["remote_num_tokens"]
    await prefill.until_metric("kv_cache_usage_perc", 0)


@_NEWER
async def test_the_number_that_p_told_hides_ds_own(prefill: Engine, decode: Engine, path: str) -> None:
    """D repeats what the handoff says of P's cache."""
    body = body_for(path, decode.model)
    handoff = await hand_off(prefill, path, body)
    answer = await decode.answer(path, {**body, "kv_transfer_params": {**handoff, TOLD: 3}})
    assert _not_computed(path, answer["usage"])[0] == 3


@_NEWER
async def test_d_alone_computes_the_prompt(decode: Engine, path: str) -> None:
    """Without a handoff D reports no cached tokens and tells no handoff."""
    answer = await decode.answer(path, body_for(path, decode.model))
    assert _not_computed(path, answer["usage"])[0] == 0
    assert answer.get("kv_transfer_params") is None


async def test_a_response(decode: Engine) -> None:
    """Whole and streamed responses say the same, and the stream says it twice."""
    body = body_for(RESPONSES, decode.model)
    whole = await decode.answer(RESPONSES, body)
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (whole["max_output_tokens"], whole["tool_choice"]) == (4, "none")
    (item,) = whole["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], item["status"], part["type"]) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == 4
    events = await _stream(decode, RESPONSES, body)
    names = [name for name, _ in events]
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[4:-4] == ["response.output_text.delta"] * len(deltas)
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(deltas) == events[-4][1]["text"] == part["text"]
    last = events[-1][1]["response"]
    assert set(last) == set(whole)
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("incomplete", part["text"])
    assert (last["id"], last["output"][0]["id"]) == (events[0][1]["response"]["id"], events[2][1]["item"]["id"])


async def test_a_message(decode: Engine) -> None:
    """Whole and streamed messages say the same."""
    body = body_for(MESSAGES, decode.model)
    whole = await decode.answer(MESSAGES, body)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", decode.model)
    (block,) = whole["content"]
    events = await _stream(decode, MESSAGES, body)
    names = [name for name, _ in events]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[2:-3] == ["content_block_delta"] * len(deltas)
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert "".join(deltas) == block["text"]
    assert events[-2][1]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_counting_tokens(decode: Engine) -> None:
    """count_tokens tells what a message's prompt is made of."""
    body = body_for(MESSAGES, decode.model)
    asked = {name: body[name] for name in ("model", "messages")}
    counted = await decode.answer(f"{MESSAGES}/count_tokens", asked)
    answer = await decode.answer(MESSAGES, body)
    assert counted["input_tokens"] == _not_computed(MESSAGES, answer["usage"])[1]
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_a_refusal_frees_p(prefill: Engine, decode: Engine, path: str) -> None:
    """An unknown model is refused in the API's own shape, and P is told that its blocks may go."""
    handoff = await hand_off(prefill, path, body_for(path, prefill.model))
    assert await prefill.metric("kv_cache_usage_perc") > 0
    body = body_for(path, "nobody-serves-this", kv_transfer_params=handoff)
    response = await decode.post(path, body)
    answer = response.json()
    assert (response.status_code, answer["error"]["type"]) == (404, "NotFoundError")
    assert set(answer) == ({"type", "error"} if path == MESSAGES else {"error"})
    assert set(answer["error"]) == ({"type", "message"} if path == MESSAGES else {"message", "type", "param", "code"})
    await prefill.until_metric("kv_cache_usage_perc", 0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(MESSAGES, {"max_tokens": 0}), (MESSAGES, {"messages": "hello"}), (RESPONSES, {"input": 3})],
)
async def test_what_is_malformed_has_openais_shape(decode: Engine, path: str, fields: dict[str, Any]) -> None:
    """pydantic refuses before anybody knows which API it was."""
    response = await decode.post(path, body_for(path, decode.model, **fields))
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (400, {"message", "type", "param", "code"})
    assert error["type"] == "Bad Request"


async def test_a_response_whose_transfer_fails(prefill: Engine, decode: Engine) -> None:
    """500 for a whole one; a stream breaks off after its preamble, without any event that says why."""
    body = body_for(RESPONSES, decode.model)
    handoff = await hand_off(prefill, RESPONSES, body)
    await release(decode, handoff)
    nobody = {**handoff, "remote_engine_id": str(uuid.uuid4()), "remote_port": 9}
    whole = await decode.post(RESPONSES, {**body, "kv_transfer_params": nobody})
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "InternalServerError")
    broken = {**body, "stream": True, "kv_transfer_params": nobody}
    async with decode.client.stream("POST", RESPONSES, json=broken) as response:
        assert response.status_code == 200
        text = await _until_it_breaks_off(response)
    assert [name for name, _ in _events(text)] == ["response.created", "response.in_progress"]
    assert (await decode.client.get("/health")).status_code == 200


async def test_a_message_whose_transfer_fails(prefill: Engine, decode: Engine) -> None:
    """500 in Anthropic's shape; a stream begins, then an error event that does not say what happened, and no message_stop."""
    body = body_for(MESSAGES, decode.model)
    handoff = await hand_off(prefill, MESSAGES, body)
    await release(decode, handoff)
    nobody = {**handoff, "remote_engine_id": str(uuid.uuid4()), "remote_port": 9}
    whole = await decode.post(MESSAGES, {**body, "kv_transfer_params": nobody})
    assert (whole.status_code, whole.json()["type"]) == (500, "error")
    assert whole.json()["error"] == {"type": "InternalServerError", "message": "Internal server error"}
    (start, _), (name, event) = await _stream(decode, MESSAGES, {**body, "kv_transfer_params": nobody})
    assert (start, name, event["error"]["type"]) == ("message_start", "error", "internal_error")
    assert event["error"]["message"].startswith("2 validation errors for ChatCompletionStreamResponse")
    assert (await decode.client.get("/health")).status_code == 200


async def test_a_chat_stream_whose_transfer_fails(prefill: Engine, decode: Engine) -> None:
    """It begins with the role, as every chat stream does, and then comes the error."""
    body = body_for(CHAT, decode.model)
    handoff = await hand_off(prefill, CHAT, body)
    await release(decode, handoff)
    nobody = {**handoff, "remote_engine_id": str(uuid.uuid4()), "remote_port": 9}
    role, error = await decode.events(CHAT, {**body, "kv_transfer_params": nobody})
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert (error["error"]["type"], error["error"]["code"]) == ("InternalServerError", 500)


async def test_responses_are_not_kept(decode: Engine) -> None:
    """Without VLLM_ENABLE_RESPONSES_API_STORE nothing is remembered, and nothing runs in the background."""
    answer = await decode.answer(RESPONSES, body_for(RESPONSES, decode.model))
    found = await decode.client.get(f"{RESPONSES}/{answer['id']}")
    cancelled = await decode.client.post(f"{RESPONSES}/{answer['id']}/cancel")
    follow_up = await decode.post(RESPONSES, body_for(RESPONSES, decode.model, previous_response_id=answer["id"]))
    for response in (found, cancelled, follow_up):
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (404, "invalid_request_error", "response_id")
    background = await decode.post(RESPONSES, body_for(RESPONSES, decode.model, background=True))
    assert (background.status_code, background.json()["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"])
async def test_a_text_model_does_not_embed(decode: Engine, path: str) -> None:
    """Paths that a model cannot serve are not there at all."""
    response = await decode.post(path, {"model": decode.model, "input": "a", "query": "a", "documents": ["b"]})
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


_FORCED_CHOICES: list[tuple[str, Any, str]] = [
    (CHAT, "required", "tool_calls"),
    (CHAT, {"type": "function", "function": {"name": "weather"}}, "stop"),
    (RESPONSES, "required", "completed"),
    (RESPONSES, {"type": "function", "name": "weather"}, "completed"),
    (MESSAGES, {"type": "any"}, "tool_use"),
    (MESSAGES, {"type": "tool", "name": "weather"}, "tool_use"),
]


def _with_tools(path: str, model: str, choice: Any, **fields: Any) -> dict[str, Any]:
    """A request that must end in a call whose arguments leave no choice: without `strict` vLLM lets them be any JSON."""
    tool: dict[str, Any] = {"name": "weather", "parameters": _TOOL_SCHEMA, "strict": True}
    if path == CHAT:
        tool = {"type": "function", "function": tool}
    elif path == RESPONSES:
        tool["type"] = "function"
    else:
        tool["input_schema"] = tool.pop("parameters")
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    if path == MESSAGES:
        choice = {**choice, "disable_parallel_tool_use": True}
    else:
        fields["parallel_tool_calls"] = False
    body = body_for(path, model, tools=[tool], tool_choice=choice, **{limit: 128, **fields})
    del body["ignore_eos"]
    return body


@pytest.mark.parametrize(("path", "choice", "end"), _FORCED_CHOICES)
async def test_a_tool_call(decode: Engine, path: str, choice: Any, end: str) -> None:
    """Where the client demands a call there is one, and the answer ends as the API says."""
    answer = await decode.answer(path, _with_tools(path, decode.model, choice))
    if path == CHAT:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        told = (call["function"]["name"], json.loads(call["function"]["arguments"]))
        assert answer["choices"][0]["finish_reason"] == end
    elif path == RESPONSES:
        (item,) = answer["output"]
        told = (item["name"], json.loads(item["arguments"]))
        assert (item["type"], answer["status"]) == ("function_call", end)
    else:
        (block,) = answer["content"]
        told = (block["name"], block["input"])
        assert (block["type"], answer["stop_reason"]) == ("tool_use", end)
    assert told == ("weather", {"unit": "c"})


@pytest.mark.parametrize(("path", "choice", "end"), _FORCED_CHOICES)
async def test_a_streamed_tool_call(decode: Engine, path: str, choice: Any, end: str) -> None:
    """Its name comes first, and its arguments in pieces."""
    body = _with_tools(path, decode.model, choice)
    if path == CHAT:
        chunks = [event["choices"][0] for event in await decode.events(path, body)]
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        assert (calls[0]["function"]["name"], chunks[-1]["finish_reason"]) == ("weather", end)
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    elif path == RESPONSES:
        events = await _stream(decode, path, body)
        arguments = "".join(data["delta"] for name, data in events if name.endswith("arguments.delta"))
        names = [name for name, _ in events]
        assert names[2] == "response.output_item.added"
        assert names[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert events[-1][1]["response"]["status"] == end
    else:
        events = await _stream(decode, path, body)
        (start,) = [data["content_block"] for name, data in events if name == "content_block_start"]
        assert (start["type"], start["name"], start["input"]) == ("tool_use", "weather", {})
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        arguments = "".join(delta["partial_json"] for delta in deltas)
        assert events[-2][1]["delta"]["stop_reason"] == end
    assert json.loads(arguments) == {"unit": "c"}


@pytest.mark.parametrize(("path", "choice", "end"), _FORCED_CHOICES)
async def test_a_p_leg_with_tools(prefill: Engine, decode: Engine, path: str, choice: Any, end: str) -> None:
    """One token of a call is none, and no harm where the parser knows calls by their tags."""
    del end
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    leg = _with_tools(path, prefill.model, choice, **{limit: 1, "kv_transfer_params": PREFILL})
    answer = await prefill.answer(path, leg)
    await release(decode, answer["kv_transfer_params"])
    await prefill.until_metric("kv_cache_usage_perc", 0)


async def test_a_format_is_not_in_the_prompt(decode: Engine) -> None:
    """`response_format` shapes the output only: both legs may have it, and the prompt is the same."""
    wanted = {"type": "json_schema", "json_schema": {"name": "short", "schema": _TOOL_SCHEMA}}
    body = body_for(CHAT, decode.model)
    plain = await decode.answer(CHAT, body)
    del body["ignore_eos"]
    shaped = await decode.answer(CHAT, {**body, "max_tokens": 128, "response_format": wanted})
    assert shaped["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert json.loads(shaped["choices"][0]["message"]["content"]) == {"unit": "c"}


async def test_choices_and_prompts_are_numbered(decode: Engine) -> None:
    """Prompt by prompt, each `n` times; usage counts each prompt once and every generated token."""
    first, second = (body_for(COMPLETIONS, decode.model)["prompt"] for _ in range(2))
    body = body_for(COMPLETIONS, decode.model, prompt=[first, second], n=2, temperature=1, seed=7)
    answer = await decode.answer(COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    singles = [await decode.answer(COMPLETIONS, {**body, "prompt": prompt, "n": 1}) for prompt in (first, second)]
    assert answer["usage"]["prompt_tokens"] == sum(single["usage"]["prompt_tokens"] for single in singles)
    assert answer["usage"]["completion_tokens"] == 16
    events = await decode.events(COMPLETIONS, body)
    assert {event["choices"][0]["index"] for event in events} == {0, 1, 2, 3}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_choice_has_a_seed_of_its_own(decode: Engine, path: str) -> None:
    """Choice j of a seeded request is what seed + j gives alone (v1/engine/parallel_sampling.py)."""
    body = body_for(path, decode.model, temperature=1, seed=7, max_tokens=3)

    def texts(answer: dict[str, Any]) -> list[str]:
        return [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in answer["choices"]]

    both = texts(await decode.answer(path, {**body, "n": 2}))
    alone = [texts(await decode.answer(path, {**body, "seed": seed}))[0] for seed in (7, 8)]
    assert both == alone


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_several_greedy_choices_are_refused(decode: Engine, path: str) -> None:
    """They would all be the same."""
    response = await decode.post(path, body_for(path, decode.model, n=2))
    assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_priority_is_taken(decode: Engine, path: str) -> None:
    """By a scheduler that does not look at it as well, though vLLM's docs say otherwise."""
    assert (await decode.post(path, body_for(path, decode.model, priority=1))).status_code == 200
    response = await decode.client.post(path, json=body_for(path, decode.model), headers={"X-Vllm-Priority": "2"})
    assert response.status_code == 200


async def test_a_message_in_parts(decode: Engine) -> None:
    """System text, tool results and earlier answers all end up in the prompt."""
    plain = body_for(MESSAGES, decode.model)
    parts = {
        **plain,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *plain["messages"],
            {"role": "assistant", "content": [{"type": "text", "text": "A request goes to prefill first."}]},
            {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
        ],
    }
    short, long = [(await decode.answer(MESSAGES, body))["usage"] for body in (plain, parts)]
    assert _not_computed(MESSAGES, long)[1] > _not_computed(MESSAGES, short)[1]
