"""The official clients, told of an error in the middle of a stream or outside of one: each raises and says what happened."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest

from pdserve.errors import EngineTimeout, Overloaded, Reason, RequestError
from pdserve.http.listener import Listener, bind
from pdserve.protocol.openai import Api, error_body, error_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

_BEGINNING = {
    Api.COMPLETIONS: b'data: {"id":"c","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":"a"}]}\n\n',
    Api.CHAT_COMPLETIONS: b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    Api.RESPONSES: b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    b'"content_index":0,"output_index":0,"item_id":"i","delta":"a","logprobs":[]}\n\n',
    Api.MESSAGES: b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"a"}}\n\n',
}
_LATE = EngineTimeout("the next piece did not come", engine="decode-0", reason=Reason.SILENCE_TIMEOUT)
_FULL = Overloaded("too much work", reason=Reason.QUEUE_FULL)


class _Failing:
    """A server whose streams begin well, and whose other answers are 429."""

    async def handle(self, request: Request, response: Response) -> None:
        """Answer, and fail."""
        api = Api(request.path.decode())
        if b'"stream":true' not in request.body.replace(b" ", b""):
            response.send(429, [(b"content-type", b"application/json")], error_body(_FULL, api))
            return
        response.start(200, [(b"content-type", b"text/event-stream")])
        response.write(_BEGINNING[api] + error_event(api, _LATE))
        response.end()

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        """Not reached."""
        raise error


@contextlib.asynccontextmanager
async def _clients() -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with (
        Listener(_Failing(), bind("127.0.0.1", 0), shutdown_s=1) as listener,
        openai.AsyncOpenAI(api_key="k", base_url=f"{listener.url}/v1", max_retries=0) as one,
        anthropic.AsyncAnthropic(api_key="k", base_url=listener.url, max_retries=0) as other,
    ):
        yield one, other


async def _complete(one: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic) -> list[str]:
    return [chunk.choices[0].text async for chunk in await one.completions.create(model="m", prompt="p", stream=True)]


async def _chat(one: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic) -> list[str]:
    stream = await one.chat.completions.create(model="m", messages=[{"role": "user", "content": "p"}], stream=True)
    return [chunk.choices[0].delta.content or "" async for chunk in stream]


async def _respond(one: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic) -> list[str]:
    return [event.type async for event in await one.responses.create(model="m", input="p", stream=True)]


async def _write(_: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> list[str]:
    stream = await other.messages.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "p"}], stream=True
    )
    return [event.type async for event in stream]


@pytest.mark.parametrize(
    ("ask", "raised"),
    [
        (_complete, openai.APIError),
        (_chat, openai.APIError),
        (_respond, openai.APIError),
        (_write, anthropic.APIStatusError),
    ],
)
async def test_an_error_in_a_stream_is_raised(
    ask: Callable[[openai.AsyncOpenAI, anthropic.AsyncAnthropic], Awaitable[list[str]]], raised: type[Exception]
) -> None:
    """A client that took the event for a piece of the answer would take half an answer for a whole one."""
    async with _clients() as (one, other):
        with pytest.raises(raised, match="the next piece did not come"):
            await ask(one, other)


async def test_an_error_before_an_answer_is_of_its_statuss_kind() -> None:
    """The clients choose their exception by the status, and show our message."""
    async with _clients() as (one, other):
        with pytest.raises(openai.RateLimitError, match="too much work") as caught:
            await one.responses.create(model="m", input="p")
        assert caught.value.code == "queue_full"
        assert caught.value.type == "rate_limit_error"
        with pytest.raises(anthropic.RateLimitError, match="too much work") as refused:
            await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "p"}])
        assert refused.value.type == "rate_limit_error"


def test_the_errors_are_what_the_gateway_raises() -> None:
    """Each has a status that the clients know."""
    for error in (_LATE, _FULL):
        assert isinstance(error, RequestError)
        assert 400 <= error.status < 600
