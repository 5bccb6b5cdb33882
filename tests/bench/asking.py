"""The four APIs as a client sees them: a request's body, and what an answer says, whole or streamed.

Written against the wire and not against pdserve's own readers, whose mistakes it must not share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
APIS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)

_LIMIT = {RESPONSES: "max_output_tokens"}
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Told:
    """An error that the client was told."""

    message: str
    reason: str | None
    """OpenAI's `code`; Anthropic's form has no place for it."""


@dataclass(slots=True)
class Said:
    """What an answer says."""

    texts: dict[int, str] = field(default_factory=dict)
    """By the choice's index."""
    ends: dict[int, str] = field(default_factory=dict)
    """Why each choice ended."""
    num_prompt: int | None = None
    num_output: int | None = None
    is_marked: bool = False
    """Whether the mark was there that ends a stream; a whole answer has none and needs none."""
    error: Told | None = None
    num_after_end: int = 0
    """Events that came after the mark or after the error."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing more should come."""
        return self.is_marked or self.error is not None


def body_of(api: str, prompt: str | list[str], *, model: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request in an API's own words; lists of prompts are for completions alone."""
    asked: dict[str, Any] = {"model": model, _LIMIT.get(api, "max_tokens"): max_tokens, **fields}
    if api == COMPLETIONS:
        return asked | {"prompt": prompt}
    if api == RESPONSES:
        return asked | {"input": prompt}
    return asked | {"messages": [{"role": "user", "content": prompt}]}


def read_whole(api: str, body: bytes) -> Said:
    """A whole answer, or the body of an error. Raises ValueError for what is neither."""
    answer = _decode(body)
    said = Said()
    if (told := _error_of(answer)) is not None:
        said.error = told
    elif api in {COMPLETIONS, CHAT}:
        for choice in answer["choices"]:
            text = choice["text"] if api == COMPLETIONS else choice["message"]["content"]
            said.texts[choice["index"]], said.ends[choice["index"]] = text or "", choice["finish_reason"]
        _count_openai(said, answer["usage"])
    elif api == RESPONSES:
        _finish_response(said, answer)
        said.is_marked = False
    else:
        said.texts[0] = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        said.ends[0] = answer["stop_reason"]
        _count_anthropic(said, answer["usage"])
    return said


def read_stream(api: str, body: bytes) -> Said:
    """A stream from its first byte to its last. Raises ValueError for an event that is none."""
    said = Said()
    for event in body.split(b"\n\n"):
        if not event or event.startswith(b":"):
            continue
        if said.is_ended:
            said.num_after_end += 1
        name, data = _parsed(event)
        if data == b"[DONE]":
            said.is_marked = True
            continue
        value = _decode(data)
        told = _error_of(value)
        if told is not None:
            said.error = told
        elif api in {COMPLETIONS, CHAT}:
            _take_chunk(api, said, value)
        elif api == RESPONSES:
            _take_response_event(said, name, value)
        else:
            _take_message_event(said, name, value)
    return said


def _parsed(event: bytes) -> tuple[bytes, bytes]:
    name = data = b""
    for line in event.split(b"\n"):
        if line.startswith(b"data: "):
            data += line[6:]
        elif line.startswith(b"event: "):
            name = line[7:]
        else:
            raise ValueError(f"not a line of an event: {line[:80]!r}")
    return name, data


def _error_of(value: Any) -> Told | None:
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {str(value)[:80]}")  # noqa: TRY004 - whoever reads asks for ValueError alone
    error = value.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        return Told(str(error.get("message")), None if code is None else str(code))
    return None


def _take_chunk(api: str, said: Said, chunk: dict[str, Any]) -> None:
    for choice in chunk["choices"]:
        index = choice["index"]
        piece = choice["text"] if api == COMPLETIONS else choice["delta"].get("content")
        said.texts[index] = said.texts.get(index, "") + (piece or "")
        if choice["finish_reason"] is not None:
            said.ends[index] = choice["finish_reason"]
    if chunk.get("usage"):
        _count_openai(said, chunk["usage"])


def _take_response_event(said: Said, name: bytes, event: dict[str, Any]) -> None:
    if name == b"response.output_text.delta":
        said.texts[0] = said.texts.get(0, "") + event["delta"]
    elif name in {b"response.completed", b"response.incomplete"}:
        pieces = said.texts.get(0)
        _finish_response(said, event["response"])
        if pieces != said.texts[0]:
            raise ValueError(f"the pieces make {pieces!r} and the end says {said.texts[0]!r}")


def _take_message_event(said: Said, name: bytes, event: dict[str, Any]) -> None:
    if name == b"content_block_delta":
        said.texts[0] = said.texts.get(0, "") + event["delta"]["text"]
    elif name == b"message_delta":
        said.ends[0] = event["delta"]["stop_reason"]
        _count_anthropic(said, event["usage"])
    elif name == b"message_stop":
        said.is_marked = True


def _finish_response(said: Said, response: dict[str, Any]) -> None:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    said.texts[0] = "".join(part["text"] for part in parts)
    said.ends[0] = response["status"]
    said.is_marked = True
    usage = response["usage"]
    said.num_prompt, said.num_output = usage["input_tokens"], usage["output_tokens"]


def _count_openai(said: Said, usage: dict[str, Any]) -> None:
    said.num_prompt, said.num_output = usage["prompt_tokens"], usage["completion_tokens"]


def _count_anthropic(said: Said, usage: dict[str, Any]) -> None:
    """Anthropic counts what the cache had, and what it took, apart from the rest."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    said.num_prompt = sum(usage.get(name) or 0 for name in names)
    said.num_output = usage["output_tokens"]
