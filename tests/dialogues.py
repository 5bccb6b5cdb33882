"""What people do with the official `openai` and `anthropic` clients, as short dialogues: each holds in front of any gateway.

The same ones run against real vLLM (tests/engine) and against the stand-in (tests/component). A dialogue asserts only what
holds for any model that writes text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    SyncDialogue = Callable[["Clients"], None]
    AsyncDialogue = Callable[["AsyncClients"], Awaitable[None]]

_TIMEOUT_S = 120.0
_STORY = "Once upon a time there was a little robot who"
_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
_CITY_AND_UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": _CITY_AND_UNIT, "strict": True},
}
_FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": _CITY_AND_UNIT, "strict": True}
_ANTHROPIC_TOOL: Any = {
    "name": "get_weather",
    "description": "Current weather",
    "input_schema": _CITY_AND_UNIT,
    "strict": True,
}
_GREEDY = {"temperature": 0}
"""Anthropic's client has no argument for it any more (2.14)."""
_NOBODY = "nobody-serves-this"


class Weather(BaseModel):
    """A structured answer that is short whatever the model."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


@dataclass(frozen=True)
class Clients:
    """Both blocking clients of one gateway."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    model: str


@dataclass(frozen=True)
class AsyncClients:
    """Both asyncio clients of one gateway."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    model: str


@contextlib.contextmanager
def clients_of(url: str, model: str) -> Iterator[Clients]:
    """As a person sets them up; without retries, so that the first answer is the one that counts."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=_TIMEOUT_S) as ours,
        anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=_TIMEOUT_S) as other,
    ):
        yield Clients(ours, other, model)


@contextlib.asynccontextmanager
async def async_clients_of(url: str, model: str) -> AsyncIterator[AsyncClients]:
    """The same for asyncio."""
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=_TIMEOUT_S) as ours,
        anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0, timeout=_TIMEOUT_S) as other,
    ):
        yield AsyncClients(ours, other, model)


# Completions


def completes(clients: Clients) -> None:
    """A completion, whole and streamed, is the same text."""
    create = clients.openai.completions.create
    whole = create(model=clients.model, prompt=_STORY, max_tokens=6, temperature=0, extra_body={"ignore_eos": True})
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    stream = create(
        model=clients.model, prompt=_STORY, max_tokens=6, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)


def completes_many(clients: Clients) -> None:
    """Choices of several prompts come in the order of their indexes, and usage counts them all."""
    answer = clients.openai.completions.create(
        model=clients.model,
        prompt=["Red is", "The sea is"],
        n=2,
        max_tokens=3,
        temperature=1,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


# Chat


def chats(clients: Clients) -> None:
    """A chat, whole and streamed with usage, is the same text."""
    asked: dict[str, Any] = {"model": clients.model, "messages": _QUESTION, "max_tokens": 6, "temperature": 0}
    whole = clients.openai.chat.completions.create(**asked)
    assert whole.choices[0].message.content
    chunks = list(clients.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def chats_with_tools(clients: Clients) -> None:
    """A required tool is called with arguments of its schema, whole and streamed."""
    asked: dict[str, Any] = {
        "model": clients.model,
        "messages": _QUESTION,
        "tools": [_TOOL],
        "tool_choice": "required",
        "max_tokens": 100,
        "temperature": 0,
    }
    whole = clients.openai.chat.completions.create(**asked).choices[0].message
    assert whole.tool_calls is not None
    (call,) = whole.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)
    chunks = clients.openai.chat.completions.create(**asked, stream=True)
    deltas = [tool for chunk in chunks for choice in chunk.choices for tool in choice.delta.tool_calls or ()]
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["get_weather"]
    arguments = "".join((delta.function and delta.function.arguments) or "" for delta in deltas)
    assert json.loads(arguments) == json.loads(call.function.arguments)


def parses_a_chat(clients: Clients) -> None:
    """`parse` gives a value of the caller's own type, and so does the end of a stream."""
    asked: dict[str, Any] = {"model": clients.model, "messages": _QUESTION, "max_tokens": 100, "temperature": 0}
    answer = clients.openai.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with clients.openai.chat.completions.stream(**asked, response_format=Weather) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


# Responses


def responds(clients: Clients) -> None:
    """A response, whole, streamed as events, and through the client's own helper for streams."""
    asked: dict[str, Any] = {"model": clients.model, "input": "Say hello.", "max_output_tokens": 6, "temperature": 0}
    whole = clients.openai.responses.create(**asked)
    assert whole.output_text
    assert whole.usage is not None
    events = list(clients.openai.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type in {"response.completed", "response.incomplete"}
    assert events[-1].response.usage is not None
    with clients.openai.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text


def responds_with_a_tool(clients: Clients) -> None:
    """A required tool comes as an item of its own."""
    answer = clients.openai.responses.create(
        model=clients.model,
        input="How is the weather in Rome?",
        tools=[_FLAT_TOOL],
        tool_choice="required",
        max_output_tokens=100,
        temperature=0,
    )
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert call.name == "get_weather"
    Weather.model_validate_json(call.arguments)


def parses_a_response(clients: Clients) -> None:
    """`parse` gives a value of the caller's own type."""
    answer = clients.openai.responses.parse(
        model=clients.model, input="Rome, please.", text_format=Weather, max_output_tokens=100, temperature=0
    )
    assert isinstance(answer.output_parsed, Weather)


# Messages


def messages(clients: Clients) -> None:
    """A message, whole, streamed as events, and through the client's own helper for streams."""
    asked: dict[str, Any] = {
        "model": clients.model,
        "system": "You are short of words.",
        "messages": _QUESTION,
        "max_tokens": 6,
        "extra_body": _GREEDY,
    }
    whole = clients.anthropic.messages.create(**asked)
    assert whole.content[0].type == "text"
    assert whole.usage.output_tokens <= 6
    events = list(clients.anthropic.messages.create(**asked, stream=True))
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    with clients.anthropic.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens


def counts_tokens(clients: Clients) -> None:
    """What is counted beforehand is what the message then takes."""
    counted = clients.anthropic.messages.count_tokens(model=clients.model, messages=_QUESTION)
    answer = clients.anthropic.messages.create(model=clients.model, messages=_QUESTION, max_tokens=1)
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def messages_with_tools(clients: Clients) -> None:
    """A tool, any or by name, is called with an input of its schema."""
    choices: tuple[Any, ...] = ({"type": "any"}, {"type": "tool", "name": "get_weather"})
    for choice in choices:
        answer = clients.anthropic.messages.create(
            model=clients.model,
            messages=_QUESTION,
            tools=[_ANTHROPIC_TOOL],
            tool_choice=choice,
            max_tokens=100,
            extra_body=_GREEDY,
        )
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert call.name == "get_weather"
        Weather.model_validate(call.input)


# Around them


def lists_models(clients: Clients) -> None:
    """The served model, in the list and by its name."""
    assert [model.id for model in clients.openai.models.list()] == [clients.model]
    assert clients.openai.models.retrieve(clients.model).id == clients.model


def proves_the_split(clients: Clients) -> None:
    """The headers that say where the prompt was computed come through the client's raw answers."""
    answer = clients.openai.chat.completions.with_raw_response.create(
        model=clients.model, messages=_QUESTION, max_tokens=2
    )
    assert answer.headers["x-pdserve-prefill"] == "remote"
    assert answer.parse().choices[0].message.content is not None


def tells_an_unknown_model(clients: Clients) -> None:
    """404 with the model's name, as the exception that each client has for it."""
    with pytest.raises(openai.NotFoundError, match=_NOBODY) as completion:
        clients.openai.completions.create(model=_NOBODY, prompt=_STORY)
    assert completion.value.body["code"] == 404  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match=_NOBODY):
        clients.openai.chat.completions.create(model=_NOBODY, messages=_QUESTION, stream=True)
    with pytest.raises(openai.NotFoundError, match=_NOBODY):
        clients.openai.responses.create(model=_NOBODY, input="Hello")
    with pytest.raises(openai.NotFoundError, match=_NOBODY):
        clients.openai.models.retrieve(_NOBODY)
    with pytest.raises(anthropic.NotFoundError, match=_NOBODY) as message:
        clients.anthropic.messages.create(model=_NOBODY, messages=_QUESTION, max_tokens=1)
    assert message.value.body["type"] == "error"  # type: ignore[index]


def tells_a_bad_request(clients: Clients) -> None:
    """400 with the field's name, whole and streamed."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            clients.openai.chat.completions.create(
                model=clients.model,
                messages=_QUESTION,
                temperature=-1,
                stream=stream,
            )
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        clients.openai.completions.create(model=clients.model, prompt=_STORY, max_tokens=-1)
    with pytest.raises(openai.BadRequestError):
        clients.openai.responses.create(model=clients.model, input="Hello", extra_body={"input": 3})
    with pytest.raises(anthropic.BadRequestError):
        clients.anthropic.messages.create(model=clients.model, messages=_QUESTION, max_tokens=-1)


# With asyncio


async def all_at_once(clients: AsyncClients) -> None:
    """Every API side by side on one connection pool."""
    chat, completion, response, message = await asyncio.gather(
        clients.openai.chat.completions.create(model=clients.model, messages=_QUESTION, max_tokens=4, temperature=0),
        clients.openai.completions.create(model=clients.model, prompt=_STORY, max_tokens=4, temperature=0),
        clients.openai.responses.create(model=clients.model, input="Hi", max_output_tokens=4, temperature=0),
        clients.anthropic.messages.create(model=clients.model, messages=_QUESTION, max_tokens=4, extra_body=_GREEDY),
    )
    assert chat.choices[0].message.content is not None
    assert completion.choices[0].text
    assert response.output_text
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.choices[0].message.content


async def streams_all_at_once(clients: AsyncClients) -> None:
    """Streams of every API side by side."""

    async def chat() -> str:
        stream = await clients.openai.chat.completions.create(
            model=clients.model, messages=_QUESTION, max_tokens=4, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response() -> str:
        stream = await clients.openai.responses.create(
            model=clients.model, input="Hi", max_output_tokens=4, temperature=0, stream=True
        )
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def message() -> str:
        async with clients.anthropic.messages.stream(
            model=clients.model, messages=_QUESTION, max_tokens=4, extra_body=_GREEDY
        ) as stream:
            return await stream.get_final_text()

    told, responded, written = await asyncio.gather(chat(), response(), message())
    assert told == written
    assert responded


async def leaves_a_stream(clients: AsyncClients) -> None:
    """A client that has read enough goes on with the next request."""
    stream = await clients.openai.completions.create(
        model=clients.model, prompt=_STORY, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    answer = await clients.openai.completions.create(model=clients.model, prompt=_STORY, max_tokens=2)
    assert answer.choices


SYNC: tuple[SyncDialogue, ...] = (
    completes,
    completes_many,
    chats,
    chats_with_tools,
    parses_a_chat,
    responds,
    responds_with_a_tool,
    parses_a_response,
    messages,
    counts_tokens,
    messages_with_tools,
    lists_models,
    proves_the_split,
    tells_an_unknown_model,
    tells_a_bad_request,
)
ASYNC: tuple[AsyncDialogue, ...] = (all_at_once, streams_all_at_once, leaves_a_stream)
