"""Anthropic's `/v1/messages` as vLLM 0.32 has it: a chat request in another dress, and its answer turned back.

Read from entrypoints/anthropic/{protocol,serving}.py. Knows no sockets and no engine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from pdserve.sim.refusal import Refused, malformed, read_body
from pdserve.sim.request import (
    ChatBody,
    Function,
    StreamOptions,
    Tool,
    check_model,
    check_tool_choice,
    prepare_chat,
    render_messages,
)
from pdserve.sim.tokens import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdserve.sim.answer import Json, OpenAiAnswer
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.request import Call
    from pdserve.sim.settings import EngineSettings

_Content = str | list[dict[str, Any]]
_BILLING = "x-anthropic-billing-header"
"""Claude Code's header with a hash of its own for each request: vLLM takes it out, for the prefix cache's sake."""
_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: _Content


class AnthropicTool(msgspec.Struct):
    """One of `tools`."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: list[Message]
    system: _Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: int
    stream: bool | None = False
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    request_id: ClassVar[str | None] = None
    """Anthropic's requests have none."""


def read_messages(body: bytes, content_type: bytes) -> MessagesBody:
    """A messages request. Raises Refused."""
    request = read_body(body, content_type, MessagesBody)
    if request.max_tokens <= 0:
        raise malformed(
            "{'loc': 'body.max_tokens', 'msg': 'Value error, max_tokens must be positive'}", "body.max_tokens"
        )
    if request.tool_choice is not None and request.tool_choice.type == "tool" and not request.tool_choice.name:
        message = "Value error, tool_choice.name is required when type is 'tool'"
        raise malformed(f"{{'loc': 'body.tool_choice', 'msg': '{message}'}}", "body.tool_choice")
    return request


def prepare_messages(body: MessagesBody, request_id: str, settings: EngineSettings) -> Call:
    """Raises Refused."""
    try:
        return prepare_chat(_chat_body(body), request_id, settings)
    except Refused as refusal:
        raise refusal.for_anthropic() from refusal


def count_tokens(body: CountTokensBody, settings: EngineSettings) -> Json:
    """What `/v1/messages/count_tokens` answers. Raises Refused."""
    try:
        check_model(body.model, settings)
        count = len(encode(render_messages(_conversation(body))))
    except Refused as refusal:
        raise refusal.for_anthropic() from refusal
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


# From Anthropic's request to a chat request


def _chat_body(body: MessagesBody) -> ChatBody:
    chat = _conversation(body)
    chat.max_tokens = chat.max_completion_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.temperature, chat.top_p, chat.cache_salt = body.temperature, body.top_p, body.cache_salt
    chat.kv_transfer_params = body.kv_transfer_params
    chat.stream = body.stream
    if body.stream:
        chat.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    return chat


def _conversation(body: CountTokensBody) -> ChatBody:
    """What shapes the prompt, and the choice among tools."""
    tools = [_tool(tool) for tool in body.tools or ()]
    chat = ChatBody(
        model=body.model,
        messages=[*_system(body.system), *(turn for message in body.messages for turn in _turns(message))],
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_choice, has_tools=bool(tools)),
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=_effort(body),
        response_format=(body.output_config or {}).get("format"),
    )
    check_tool_choice(chat.tool_choice, chat.tools)
    return chat


def _tool(tool: AnthropicTool) -> Tool:
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    return Tool(Function(tool.name, tool.description, schema, tool.strict))


def _tool_choice(choice: ToolChoice | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    if choice is None:
        return "auto" if has_tools else None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _effort(body: CountTokensBody) -> str | None:
    if body.thinking is not None and body.thinking.get("type") == "disabled":
        return "none"
    effort: str | None = (body.output_config or {}).get("effort")
    return effort


def _system(system: _Content | None) -> list[dict[str, Any]]:
    text = _plain_text(system)
    return [{"role": "system", "content": text}] if text else []


def _plain_text(content: _Content | None) -> str:
    texts = [content] if isinstance(content, str) else [block.get("text") or "" for block in content or ()]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _turns(message: Message) -> Iterator[dict[str, Any]]:
    """One message may be several: tool results have turns of their own, before the rest."""
    if message.role == "system":
        yield from _system(message.content)
        return
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": message.role}
    for block in message.content:
        if block.get("type") == "tool_use":
            turn.setdefault("tool_calls", []).append(_tool_call(block))
        elif block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        elif block.get("type") == "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + str(block.get("thinking"))
        else:
            parts.append({name: value for name, value in block.items() if name != "cache_control"})
    if parts:
        turn["content"] = parts
    if len(turn) > 1:
        yield turn


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


# From chat's answer to Anthropic's


class MessagesAnswer:
    """An answer to a messages request."""

    def __init__(self, chat: OpenAiAnswer, model: str) -> None:
        self._chat = chat
        self._model = model
        self._is_open = False
        self._block: Json | None = None
        """The content block that is being written."""
        self._stop: Json = {}

    def opening(self) -> bytes:
        return b""

    def add(self, index: int, output: Output) -> None:
        self._chat.add(index, output)

    def whole(self, change: Callable[[Params], Params | None]) -> Json:
        chat = self._chat.whole(change)
        (choice,) = chat["choices"]
        content = list(_whole_content(choice["message"]))
        is_tool_use = content[-1]["type"] == "tool_use"
        answer: Json = {"id": chat["id"], "type": "message", "role": "assistant", "content": content}
        answer |= {"model": self._model} | _stop_of(choice, is_tool_use=is_tool_use)
        answer["usage"] = _usage_of(chat["usage"])
        answer["kv_transfer_params"] = chat["kv_transfer_params"]
        return {name: value for name, value in answer.items() if value is not None}

    def events(self, index: int, output: Output) -> bytes:
        return b"".join(
            _framed(event) for chunk in self._chat.event_objects(index, output) for event in self._of(chunk)
        )

    def closing(self) -> bytes:
        usage = _usage_of(self._chat.usage_event()["usage"])
        events = [*self._closed_block(), {"type": "message_delta", "delta": self._stop, "usage": usage}]
        return b"".join(map(_framed, [*events, {"type": "message_stop"}]))

    def failure(self, error: Refused, *, is_output: bool) -> bytes:
        """The converter does not know chat's error event: its complaint about that is what the client gets."""
        chunks = self._chat.opening_events() if is_output and not self._is_open else []
        opening = [event for chunk in chunks for event in self._of(chunk)]
        complaint = f"2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required ({error})"
        ending = {"type": "error", "error": {"type": "internal_error", "message": complaint}}
        return b"".join(map(_framed, [*opening, ending]))

    def _of(self, chunk: Json) -> Iterator[Json]:
        if not self._is_open:
            self._is_open = True
            yield {"type": "message_start", "message": self._opened(chunk)}
            return
        (choice,) = chunk["choices"]
        yield from self._written(choice["delta"])
        if choice["finish_reason"] is not None:
            is_tool_use = self._block is not None and self._block["type"] == "tool_use"
            self._stop = _stop_of(choice, is_tool_use=is_tool_use)

    def _opened(self, chunk: Json) -> Json:
        message: Json = {"id": chunk["id"], "type": "message", "role": "assistant", "content": [], "model": self._model}
        return message | {"stop_reason": None, "stop_sequence": None, "usage": _usage_of(chunk["usage"])}

    def _written(self, delta: Json) -> Iterator[Json]:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                yield {"type": "content_block_start", "content_block": self._block, "index": 0}
            yield _delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        if delta.get("content"):
            if self._block is None:
                self._block = {"type": "text", "text": ""}
                yield {"type": "content_block_start", "content_block": self._block, "index": 0}
            yield _delta({"type": "text_delta", "text": delta["content"]})

    def _closed_block(self) -> list[Json]:
        return [] if self._block is None else [{"type": "content_block_stop", "index": 0}]


def _whole_content(message: Json) -> Iterator[Json]:
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input_of(call)}
    if not message["content"] and not message.get("tool_calls"):
        yield {"type": "text", "text": ""}


def _input_of(call: Json) -> Any:
    """Arguments of bare JSON that the limit cut off: so ends every P leg for a tool that the client named. Raises Refused."""
    try:
        return json.loads(call["function"]["arguments"])
    except json.JSONDecodeError as exc:
        raise Refused(400, "BadRequestError", str(exc), is_anthropic=True) from exc


def _stop_of(choice: Json, *, is_tool_use: bool) -> Json:
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if is_tool_use:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_of(usage: Json) -> Json:
    """Without the tokens that the cache had or took: Anthropic counts those apart."""
    details = usage.get("prompt_tokens_details") or {}
    read, created = details.get("cached_tokens"), details.get("created_cache_tokens")
    answer: Json = {"input_tokens": max(0, usage["prompt_tokens"] - (read or 0) - (created or 0))}
    answer["output_tokens"] = usage["completion_tokens"]
    if created is not None:
        answer["cache_creation_input_tokens"] = created
    if read is not None:
        answer["cache_read_input_tokens"] = read
    return answer


def _delta(delta: Json) -> Json:
    return {"type": "content_block_delta", "delta": delta, "index": 0}


def _framed(event: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
