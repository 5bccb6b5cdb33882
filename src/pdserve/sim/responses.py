"""`/v1/responses` as vLLM 0.32 has it for models that do not speak Harmony: request, whole answer, and the events of a stream.

Read from entrypoints/openai/responses/{protocol,serving,streaming_events,utils}.py. Knows no sockets, no engine and no store.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pdserve.sim.answer import new_tool_call_id
from pdserve.sim.refusal import Refused, invalid, read_body
from pdserve.sim.request import ChatBody, Function, Tool, check_model, prepare_conversation
from pdserve.sim.tokens import decode, logprob, rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdserve.sim.answer import Json
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.request import Call
    from pdserve.sim.settings import EngineSettings

_LOGPROBS = "message.output_text.logprobs"
_encode = msgspec.json.Encoder().encode


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The request. Fields that are not here are accepted and ignored."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    background: bool | None = False
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int | None = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    request_id: str | None = None
    """The response's id; a header does not matter here."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def read_responses(body: bytes, content_type: bytes) -> ResponsesBody:
    """A responses request. Raises Refused."""
    request = read_body(body, content_type, ResponsesBody)
    request.request_id = request.request_id or f"resp_{uuid.uuid4().hex[:16]}"
    if request.background and not request.store:
        raise invalid("background can only be used when `store` is true", "background")
    if request.prompt is not None:
        raise invalid("prompt template is not supported", "prompt")
    _check_tool_choice(request)
    return request


def _check_tool_choice(request: ResponsesBody) -> None:
    """As ResponsesRequest.check_tool_usage, which also writes `none` where there are no tools."""
    choice = request.tool_choice
    if isinstance(choice, dict):
        if choice.get("name") not in {tool.get("name") for tool in request.tools}:
            raise invalid("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")
    elif not request.tools:
        if choice == "required":
            raise invalid("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
        request.tool_choice = "none"


def prepare_responses(body: ResponsesBody, history: Sequence[Json], settings: EngineSettings) -> Call:
    """`history` are the messages before this request's own. Raises Refused."""
    assert body.request_id is not None
    chat = _chat_body(body, history)
    return prepare_conversation(chat, body.request_id, f"{body.request_id}_0", settings)


def check_responses(body: ResponsesBody, settings: EngineSettings) -> None:
    """What is refused before anything is looked up. Raises Refused."""
    check_model(body.model, settings)
    if body.background and not settings.enable_responses_store:
        message = (
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
            "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
        )
        raise Refused(400, "invalid_request_error", message, "background")


def _chat_body(body: ResponsesBody, history: Sequence[Json]) -> ChatBody:
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return ChatBody(
        model=body.model,
        messages=conversation_of(body, history),
        tools=[_tool(tool) for tool in body.tools] or None,
        tool_choice=choice,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        response_format=(body.text or {}).get("format"),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        cache_salt=body.cache_salt,
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        stream=body.stream,
        kv_transfer_params=body.kv_transfer_params,
    )


def _tool(tool: Mapping[str, Any]) -> Tool:
    return Tool(Function(str(tool.get("name")), tool.get("description"), tool.get("parameters"), tool.get("strict")))


def conversation_of(body: ResponsesBody, history: Sequence[Json]) -> list[Json]:
    """Instructions, what went before, and the new input; earlier instructions do not carry over."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    earlier = [message for message in history if message["role"] != "system"]
    if isinstance(body.input, str):
        return [*system, *earlier, {"role": "user", "content": body.input}]
    return [*system, *earlier, *map(_message_of, body.input)]


def _message_of(item: Mapping[str, Any]) -> Json:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning": item.get("content") or item.get("summary")}
    return {"role": item.get("role", "user"), "content": item.get("content")}


class ResponsesAnswer:
    """An answer to a responses request."""

    def __init__(self, body: ResponsesBody, call: Call, settings: EngineSettings, *, created: int) -> None:
        self._body = body
        self._call = call
        self._settings = settings
        self._created = created
        self.finished: Json | None = None
        """The whole response, once there is one."""
        self._first: Output | None = None
        self._last: Output | None = None
        self._text = ""
        self._tokens: list[int] = []
        self._sequence_number = 0
        self._item: Json | None = None
        """What the stream has opened; its ids are told again in the whole answer."""

    def opening(self) -> bytes:
        response = self.response("in_progress", [])
        return b"".join(
            self._framed({"response": response}, kind) for kind in ("response.created", "response.in_progress")
        )

    def add(self, index: int, output: Output) -> None:
        del index
        self._first, self._last = self._first or output, output
        self._text += output.text
        self._tokens += output.tokens

    def events(self, index: int, output: Output) -> bytes:
        self.add(index, output)
        if not output.text:
            return b""
        opening = [] if self._item is not None else list(self._opened())
        return b"".join(self._framed(event, kind) for kind, event in [*opening, self._written(output)])

    def closing(self) -> bytes:
        events = [] if self._item is None else list(self._closed(self._item))
        output = [event["item"] for kind, event in events if kind == "response.output_item.done"]
        events.append(("response.completed", {"response": self._finished(output, lambda handoff: handoff)}))
        return b"".join(self._framed(event, kind) for kind, event in events)

    def failure(self, error: Refused, *, is_output: bool) -> bytes | None:
        """None: no event stands for a failure here, and the generator's own complaint breaks the stream off."""
        del error, is_output
        return None

    def whole(self, change: Callable[[Params], Params | None]) -> Json:
        return self._finished(self._whole_output(), change)

    def response(self, status: str, output: list[Json]) -> Json:
        """The object that is answered, and told at a stream's beginning and end."""
        body, sampling = self._body, self._call.jobs[0].sampling
        return {
            "id": self._call.request_id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._settings.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice,
            "tools": [_told_tool(tool) for tool in body.tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": bool(body.background),
            "max_output_tokens": sampling.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "reasoning": body.reasoning,
            "service_tier": body.service_tier,
            "status": status,
            "text": body.text,
            "top_logprobs": self._call.num_logprobs,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    # The end

    def _finished(self, output: list[Json], change: Callable[[Params], Params | None]) -> Json:
        assert self._last is not None
        response = self.response("incomplete" if self._last.finish_reason == "length" else "completed", output)
        handoff = self._last.handoff
        response["kv_transfer_params"] = None if handoff is None else change(handoff)
        response["usage"] = self._usage()
        self.finished = response
        return response

    def _whole_output(self) -> list[Json]:
        """What the limit cut off is no call, and a text where tags show what it was to be. A parser drops an empty one."""
        assert self._last is not None
        tool = self._call.tool_use
        if tool is not None and tool.is_call(self._last.finish_reason):
            return [self._whole_item(_new_call(tool.name))]
        if tool is not None and not tool.is_tagged:
            return []
        if self._text:
            return [self._whole_item(_new_message())]
        return [] if self._settings.enable_auto_tool_choice else [_new_message() | {"status": "completed"}]

    def _usage(self) -> Json:
        assert self._first is not None
        num_prompt, num_output = len(self._call.prompts[0]), len(self._tokens)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": self._first.num_cached,
                "cache_write_tokens": self._first.num_created,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": num_output,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": num_prompt + num_output,
        }

    # Items

    def _whole_item(self, item: Json) -> Json:
        """The item when it is done. In a stream its log probabilities were told piece by piece."""
        if item["type"] == "function_call":
            return item | {"arguments": self._text, "status": "completed"}
        logprobs = None if self._item is not None else self._logprobs(self._tokens)
        part = {"annotations": [], "text": self._text, "type": "output_text", "logprobs": logprobs}
        return item | {"content": [part], "status": "completed"}

    # Events

    def _opened(self) -> Iterator[tuple[str, Json]]:
        tool = self._call.tool_use
        self._item = _new_message() if tool is None else _new_call(tool.name)
        yield "response.output_item.added", {"item": self._item, "output_index": 0}
        if self._item["type"] == "message":
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            yield "response.content_part.added", self._in_part({"part": part})

    def _written(self, output: Output) -> tuple[str, Json]:
        assert self._item is not None
        if self._item["type"] == "function_call":
            event = {"delta": output.text, "item_id": self._item["id"], "output_index": 0}
            return "response.function_call_arguments.delta", event
        logprobs = self._logprobs(output.tokens) or []
        return "response.output_text.delta", self._in_part({"delta": output.text, "logprobs": logprobs})

    def _closed(self, item: Json) -> Iterator[tuple[str, Json]]:
        done = self._whole_item(item)
        if item["type"] == "function_call":
            event = {"arguments": self._text, "item_id": item["id"], "output_index": 0, "name": item["name"]}
            yield "response.function_call_arguments.done", event
        else:
            yield "response.output_text.done", self._in_part({"logprobs": [], "text": self._text})
            yield "response.content_part.done", self._in_part({"part": done["content"][0]})
        yield "response.output_item.done", {"item": done, "output_index": 0}

    def _in_part(self, event: Json) -> Json:
        assert self._item is not None
        return {"content_index": 0, "item_id": self._item["id"], "output_index": 0} | event

    def _logprobs(self, tokens: Sequence[int]) -> list[Json] | None:
        count = self._call.num_logprobs
        if count is None:
            return None
        return [{**_likely(token, 0), "top_logprobs": _likelies(token, count)} for token in tokens]

    def _framed(self, event: Json, kind: str) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        data = _encode(event | {"sequence_number": number, "type": kind})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _new_message() -> Json:
    return {
        "id": f"msg_{uuid.uuid4().hex[:16]}",
        "content": [],
        "role": "assistant",
        "status": "in_progress",
        "type": "message",
        "phase": None,
    }


def _new_call(name: str) -> Json:
    return {
        "arguments": "",
        "call_id": new_tool_call_id(),
        "name": name,
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex[:16]}",
        "async": None,
        "caller": None,
        "namespace": None,
        "status": "in_progress",
    }


def _told_tool(tool: Mapping[str, Any]) -> Json:
    """A function tool as the OpenAI library's model writes it out."""
    if tool.get("type") != "function":
        return dict(tool)
    names = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description")
    return {name: tool.get(name) for name in (*names, "output_schema")}


def _likely(token: int, rank: int) -> Json:
    text = decode([token])
    return {"token": text, "logprob": logprob(token, rank), "bytes": list(text.encode())}


def _likelies(token: int, count: int) -> list[Json]:
    ranked = [token, *rivals(token, max(0, count - 1))][:count]
    return [_likely(rival, rank) for rank, rival in enumerate(ranked)]
