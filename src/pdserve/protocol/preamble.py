"""What a stream's first and last events say: nothing of the answer yet, that there will be none, or that it is whole.

vLLM opens a stream before D has got the KV, so a failure of the transfer comes after the first event: after the role's chunk,
after `message_start`, after `response.in_progress` (0.32, entrypoints/openai/*/serving.py). Held back until an event brings
something of the answer, such a stream can still be tried elsewhere. Looks at an event's first bytes, where only vLLM writes:
model text stands inside JSON strings, whose quotes are escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.protocol.api import Api
from pdserve.protocol.fields import NULL, try_decode, try_split
from pdserve.protocol.sse import event_data, event_name, split_events

if TYPE_CHECKING:
    from pdserve.protocol.fields import Fields

_PREAMBLE_NAMES = {
    Api.RESPONSES: frozenset({b"response.created", b"response.queued", b"response.in_progress"}),
    Api.MESSAGES: frozenset({b"message_start", b"ping"}),
}
_ERROR_NAMES = {
    Api.RESPONSES: frozenset({b"error", b"response.failed"}),
    Api.MESSAGES: frozenset({b"error"}),
}
_ERROR_DATA = (b'data: {"error"', b'data:{"error"')
"""How vLLM tells completions and chat of a failure (0.32, create_streaming_error_response)."""
_ERROR_MARKS = {api: tuple(b"event: " + name for name in sorted(names)) for api, names in _ERROR_NAMES.items()}
_FINAL_NAMES = {
    Api.RESPONSES: frozenset({b"response.completed", b"response.incomplete", b"response.cancelled"}),
    Api.MESSAGES: frozenset({b"message_stop"}),
}
_ROLE_MARK = b'"role"'
_ROLE_FIELDS = frozenset({"role", "content"})
_EMPTY = (msgspec.Raw(b'""'), NULL)


class _Choice(msgspec.Struct, frozen=True):
    delta: dict[str, msgspec.Raw]
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice]


def is_preamble(api: Api, event: bytes) -> bool:
    """Whether a whole event carries nothing of the answer yet."""
    if event.startswith(b":"):
        return not event_data(event)  # A comment, which vLLM sends to keep a silent stream open.
    if api is Api.CHAT_COMPLETIONS:
        return _ROLE_MARK in event and _is_role_chunk(event)
    names = _PREAMBLE_NAMES.get(api)
    return names is not None and event_name(event) in names


def error_marks(api: Api) -> tuple[bytes, ...]:
    """What a piece of a stream holds if `stream_error` would find an error in it."""
    return _ERROR_MARKS.get(api, _ERROR_DATA[:1])


def ends_stream(api: Api, events: bytes) -> bool:
    """Whether the last of these events is the one that ends an answer: a stream without it broke off, however politely."""
    last = split_events(events)[-1] if events else b""
    names = _FINAL_NAMES.get(api)
    return event_data(last).strip() == b"[DONE]" if names is None else event_name(last) in names


def stream_error(api: Api, event: bytes) -> bytes | None:
    """An error's body, when a whole event is vLLM's error event.

    Responses in vLLM 0.32 have none: the error it means to send fails its own check, and the connection just ends
    (responses/serving.py, responses_stream_generator).
    """
    if event.startswith(_ERROR_DATA):
        return event_data(event)
    names = _ERROR_NAMES.get(api)
    if names is None or event_name(event) not in names:
        return None
    data = event_data(event)
    return _response_error(data) if api is Api.RESPONSES else data


def _is_role_chunk(event: bytes) -> bool:
    chunk = try_decode(event_data(event), _Chunk)
    return chunk is not None and bool(chunk.choices) and all(map(_is_empty, chunk.choices))


def _is_empty(choice: _Choice) -> bool:
    delta = choice.delta
    is_role_only = "role" in delta and delta.keys() <= _ROLE_FIELDS and delta.get("content", NULL) in _EMPTY
    return is_role_only and choice.finish_reason is None


def _response_error(data: bytes) -> bytes:
    """The body that tells the same error: OpenAI's event is flat, and a failed response has its error inside."""
    fields = try_split(data) or {}
    if "response" in fields:
        fields = try_split(fields["response"]) or {}
    error: Fields | None = try_split(fields["error"]) if "error" in fields else None
    if error is None:
        error = {name: fields[name] for name in ("message", "code", "param") if name in fields}
    error.setdefault("message", msgspec.Raw(b'"the response failed"'))
    return msgspec.json.encode({"error": error})
