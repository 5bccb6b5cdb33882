"""Errors as the clients of each API expect them: bodies, and events in the middle of a stream.

Written against the official Python clients: `openai` raises on an event whose data holds `error`, `anthropic` on an event of
that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.protocol.api import Api
from pdserve.protocol.fields import NOT_JSON

if TYPE_CHECKING:
    from pdserve.errors import RequestError

_encode = msgspec.json.Encoder().encode

_OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Error(msgspec.Struct, frozen=True):
    code: int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def error_body(error: RequestError, api: Api | None = None) -> bytes:
    """An error as the API's clients expect it, OpenAI's form where there is no API; `code` is the reason there."""
    return _encode(_anthropic_body(error) if api is Api.MESSAGES else {"error": _openai_error(error)})


def error_event(api: Api, error: RequestError) -> bytes:
    """The event that ends a stream whose status has gone out."""
    if api is Api.MESSAGES:
        return b"event: error\ndata: " + _encode(_anthropic_body(error)) + b"\n\n"
    told = _openai_error(error)
    if api is Api.RESPONSES:
        # Flat as OpenAI documents the event, and with `error`, without which its client takes it for a piece of the answer.
        flat = {"type": "error", "sequence_number": 0, "code": told["code"], "message": told["message"], "param": None}
        return b"event: error\ndata: " + _encode({**flat, "error": told}) + b"\n\n"
    return b"data: " + _encode({"error": told}) + b"\n\n"


def error_status(body: bytes) -> int:
    """The HTTP status that an error body names as its `code`; 500 when it names none."""
    try:
        code = msgspec.json.decode(body, type=_ErrorBody).error.code
    except NOT_JSON:
        return 500
    return code if code is not None and 400 <= code < 600 else 500  # noqa: PLR2004


def _openai_error(error: RequestError) -> dict[str, str | None]:
    default = "invalid_request_error" if error.status < 500 else "server_error"  # noqa: PLR2004
    kind = _OPENAI_KINDS.get(error.status, default)
    return {"message": str(error), "type": kind, "param": None, "code": error.reason}


def _anthropic_body(error: RequestError) -> dict[str, str | dict[str, str]]:
    default = "invalid_request_error" if error.status < 500 else "api_error"  # noqa: PLR2004
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(error.status, default), "message": str(error)}}
