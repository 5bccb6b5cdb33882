"""What a stream's first events say, in the bytes that vLLM 0.32 writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import EngineTimeout
from pdserve.protocol import openai
from pdserve.protocol.openai import Api
from pdserve.protocol.preamble import is_preamble, stream_error

_HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":['
_ROLE = _HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
_ROLE_WITH_COUNTS = _ROLE.replace(
    b"]}\n", b'],"prompt_token_ids":[1,2],"usage":{"prompt_tokens":2,"total_tokens":2,"completion_tokens":0}}\n'
)
_TEXT = _HEAD + b'{"index":0,"delta":{"content":"\\"role\\" a"},"logprobs":null,"finish_reason":null}]}\n\n'
_RESPONSE = b'"response":{"id":"resp_1","output":[],"status":"in_progress","usage":null},"sequence_number":0}\n\n'
_CREATED = b'event: response.created\ndata: {"type":"response.created",' + _RESPONSE
_IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress",' + _RESPONSE
_ITEM = b'event: response.output_item.added\ndata: {"type":"response.output_item.added","item":{"type":"message"}}\n\n'
_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1","content":[],"model":"m",'
    b'"stop_reason":null,"stop_sequence":null,"usage":{"output_tokens":0,"input_tokens":9}}}\n\n'
)
_BLOCK = (
    b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text","text":""},'
    b'"index":0}\n\n'
)
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta",'
    b'"text":"event: ping\\n"},"index":0}\n\n'
)
_COMPLETION = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":""}]}\n\n'
_KEEP_ALIVE = b": keep-alive\n\n"
_ERROR = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
_MESSAGES_ERROR = (
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"2 validation errors"}}\n\n'
)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.CHAT_COMPLETIONS, _ROLE),
        (Api.CHAT_COMPLETIONS, _ROLE_WITH_COUNTS),
        (Api.CHAT_COMPLETIONS, _ROLE.replace(b'""', b"null")),
        (Api.RESPONSES, _CREATED),
        (Api.RESPONSES, _IN_PROGRESS),
        (Api.MESSAGES, _START),
        (Api.MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n'),
        *((api, _KEEP_ALIVE) for api in Api),
    ],
)
def test_what_opens_a_stream_says_nothing_of_the_answer(api: Api, event: bytes) -> None:
    """It can come before D has got the KV, so it does not show that D got through."""
    assert is_preamble(api, event)
    assert stream_error(api, event) is None


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.COMPLETIONS, _COMPLETION),
        (Api.COMPLETIONS, _ROLE),
        (Api.CHAT_COMPLETIONS, _TEXT),
        (Api.CHAT_COMPLETIONS, _ROLE.replace(b'"content":""', b'"content":"a"')),
        (Api.CHAT_COMPLETIONS, _ROLE.replace(b'"content":""', b'"content":"","tool_calls":[]')),
        (Api.CHAT_COMPLETIONS, _ROLE.replace(b'"finish_reason":null', b'"finish_reason":"stop"')),
        (Api.CHAT_COMPLETIONS, b'data: {"choices":[],"usage":{"role":1}}\n\n'),
        (Api.CHAT_COMPLETIONS, b'data: broken "role"\n\n'),
        (Api.RESPONSES, _ITEM),
        (Api.MESSAGES, _BLOCK),
        (Api.MESSAGES, _DELTA),
        *((api, b"data: [DONE]\n\n") for api in Api),
        *((api, b": comment\ndata: x\n\n") for api in Api),
    ],
)
def test_what_holds_something_of_the_answer_is_not_held_back(api: Api, event: bytes) -> None:
    """D got through, and the client waits for it."""
    assert not is_preamble(api, event)
    assert stream_error(api, event) is None


@pytest.mark.parametrize("api", Api)
def test_an_errors_body_is_read_off_its_event(api: Api) -> None:
    """Chat's form is looked for everywhere; Anthropic's and OpenAI's newer one have names."""
    assert stream_error(api, _ERROR) == _ERROR[6:-2]
    assert openai.error_status(stream_error(api, _ERROR) or b"") == 500
    is_named = stream_error(api, _MESSAGES_ERROR) is not None
    assert is_named == (api in {Api.RESPONSES, Api.MESSAGES})
    assert not is_preamble(api, _ERROR)
    assert not is_preamble(api, _MESSAGES_ERROR)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "error", "code": "server_error", "message": "m", "param": None, "sequence_number": 3}, "m"),
        ({"type": "response.failed", "response": {"status": "failed", "error": {"code": "x", "message": "m"}}}, "m"),
        ({"type": "response.failed", "response": {"error": None}}, "the response failed"),
        ({"type": "error", "error": {"message": "m"}}, "m"),
    ],
)
def test_a_responses_error_becomes_a_body(data: dict[str, object], message: str) -> None:
    """A flat event and a failed response are told as OpenAI tells errors outside of streams."""
    event = f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
    body = stream_error(Api.RESPONSES, event)
    assert body is not None
    assert json.loads(body)["error"]["message"] == message
    assert openai.error_status(body) == 500


@pytest.mark.parametrize("api", Api)
def test_our_own_error_event_is_an_error_event(api: Api) -> None:
    """A gateway behind a gateway understands it."""
    error = EngineTimeout("late", engine="decode-0")
    body = stream_error(api, openai.error_event(api, error))
    assert body is not None
    assert json.loads(body)["error"]["message"] == str(error)


@given(st.sampled_from(Api), st.text(), st.booleans())
def test_text_is_neither_preamble_nor_error(api: Api, text: str, is_first: bool) -> None:  # noqa: FBT001
    """Whatever the model says, its event is a piece of the answer."""
    text = f'data: {{"error": {text}\n\nevent: error\ndata: "role"' if is_first else text
    delta = {"role": "assistant", "content": text or "x"}
    bodies: dict[Api, dict[str, Any]] = {
        Api.COMPLETIONS: {"choices": [{"text": text}]},
        Api.CHAT_COMPLETIONS: {"choices": [{"delta": delta, "finish_reason": None}]},
        Api.RESPONSES: {"type": "response.output_text.delta", "delta": text},
        Api.MESSAGES: {"type": "content_block_delta", "delta": {"text": text}},
    }
    name = bodies[api].get("type")
    event = (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(bodies[api]).encode() + b"\n\n"
    assert not is_preamble(api, event)
    assert stream_error(api, event) is None


@given(
    st.sampled_from(Api),
    st.binary(max_size=120),
    st.sampled_from([b"", b"event: error\ndata: ", b": ", b'data: {"error"']),
)
def test_no_bytes_break_it(api: Api, rest: bytes, start: bytes) -> None:
    """An engine may send anything."""
    is_preamble(api, start + rest)
    stream_error(api, start + rest)
