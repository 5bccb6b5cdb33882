"""Errors in each API's form, as its official client reads them."""

from __future__ import annotations

import json

import pytest

from pdserve.errors import EngineTimeout, InvalidRequest, NoEligibleEngine, Overloaded, Reason, RequestError
from pdserve.protocol import openai
from pdserve.protocol.openai import Api
from pdserve.protocol.sse import event_data, event_name, split_events


@pytest.mark.parametrize("api", [None, Api.COMPLETIONS, Api.CHAT_COMPLETIONS, Api.RESPONSES])
def test_an_error_has_openais_shape(api: Api | None) -> None:
    """Clients find message, type and code where they look for them."""
    body = json.loads(openai.error_body(NoEligibleEngine("nobody there"), api))
    assert body == {"error": {"message": "nobody there", "type": "server_error", "param": None, "code": "no_engine"}}


def test_a_messages_error_has_anthropics_shape() -> None:
    """Its client reads `type` and `message` one level down."""
    body = json.loads(openai.error_body(NoEligibleEngine("nobody there"), Api.MESSAGES))
    assert body == {"type": "error", "error": {"type": "overloaded_error", "message": "nobody there"}}


def _error(status: int) -> RequestError:
    return RequestError("x", status=status, reason=Reason.INTERNAL)


@pytest.mark.parametrize(
    ("status", "openai_kind", "anthropic_kind"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (405, "invalid_request_error", "invalid_request_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (502, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
        (504, "server_error", "timeout_error"),
    ],
)
def test_an_errors_kind_is_its_statuss(status: int, openai_kind: str, anthropic_kind: str) -> None:
    """In the words of each vendor."""
    assert json.loads(openai.error_body(_error(status)))["error"]["type"] == openai_kind
    assert json.loads(openai.error_body(_error(status), Api.MESSAGES))["error"]["type"] == anthropic_kind


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(
    "error",
    [
        EngineTimeout('a "quoted"\nmessage', engine="decode-0", reason=Reason.SILENCE_TIMEOUT),
        Overloaded("full", reason=Reason.QUEUE_FULL),
        InvalidRequest("bad"),
    ],
)
def test_an_error_event_is_one_whole_event(api: Api, error: RequestError) -> None:
    """It ends with a blank line and holds no other, whatever the message says."""
    event = openai.error_event(api, error)
    assert split_events(event) == [event]
    assert event.endswith(b"\n\n")
    told = json.loads(event_data(event))
    assert told["error"]["message"] == str(error)
    assert event_name(event) == (b"error" if api in {Api.RESPONSES, Api.MESSAGES} else b"")


def test_a_responses_error_event_is_what_openai_documents() -> None:
    """Flat, with a type of its own; `error` is there for the client, which takes any other event for a piece of the answer."""
    told = json.loads(event_data(openai.error_event(Api.RESPONSES, InvalidRequest("bad"))))
    error = told.pop("error")
    flat = {"type": "error", "sequence_number": 0, "code": "invalid_field", "message": "bad", "param": None}
    assert told == flat
    assert error == {"message": "bad", "type": "invalid_request_error", "param": None, "code": "invalid_field"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"error":{"code":400}}', 400),
        (b'{"error":{"code":null}}', 500),
        (b"x", 500),
        (b'{"error":{"code":200}}', 500),
        (b'{"type":"error","error":{"type":"internal_error","message":"m"}}', 500),
    ],
)
def test_an_error_events_code_is_its_status(body: bytes, status: int) -> None:
    """A stream that failed before its first token is told with the status that the engine meant."""
    assert openai.error_status(body) == status
