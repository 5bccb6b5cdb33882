"""What clients say and what models answer is for the two of them: it is in no log, no record and no state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.config import Config, GatewayConfig, RetriesConfig
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.gateway.auth import read_credentials
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.http.listener import Listener, bind
from split import MODEL, TIMEOUTS, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pdserve.errors import InvalidRequest
    from pdserve.gateway.service import Gateway
    from pdserve.http.server import Headers, Request, Response

_SECRET = "xyzzy-plugh"
"""In every prompt and every answer here, and nowhere else."""
_KEY = "sk-plover-egg"
_PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


def _body(path: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say {_SECRET}"}]
    prompt: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": f"say {_SECRET}"},
        "/v1/responses": {"input": f"say {_SECRET}"},
    }
    return {"model": MODEL, "max_tokens": 4, **prompt.get(path, {"messages": messages}), **fields}


class _Parrot:
    """An engine that is healthy and answers every request with an echo of it, in one of the ways that go wrong."""

    def __init__(self, echo: Callable[[bytes, Response], None]) -> None:
        self._echo = echo
        self.num_echoed = 0

    async def handle(self, request: Request, response: Response) -> None:
        if request.path == b"/health":
            response.send(200, [], b"")
        elif request.path == b"/v1/models":
            response.send(200, _JSON, json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
        else:
            self.num_echoed += _SECRET.encode() in request.body
            self._echo(request.body, response)

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        raise AssertionError(error)


_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]


def _echoes_status(status: int) -> Callable[[bytes, Response], None]:
    def echo(body: bytes, response: Response) -> None:
        error = {"message": f"1 validation error: input={body.decode()!r}", "type": "BadRequestError", "code": status}
        response.send(status, _JSON, json.dumps({"error": error}).encode())

    return echo


def _echoes_text(body: bytes, response: Response) -> None:
    response.send(200, [(b"content-type", b"text/plain")], body)


def _echoes_broken_json(body: bytes, response: Response) -> None:
    response.send(200, _JSON, body[:-1])


def _echoes_header(_body: bytes, response: Response) -> None:
    response.send(500, [(b"x-echo", _SECRET.encode()), (b"content-type", _SECRET.encode())], b"")


def _echoes_in_an_error_event(body: bytes, response: Response) -> None:
    response.start(200, _EVENTS)
    response.write(b"data: " + json.dumps({"error": {"message": body.decode(), "code": 400}}).encode() + b"\n\n")
    response.end()


def _echoes_and_breaks_off(body: bytes, response: Response) -> None:
    response.start(200, _EVENTS)
    response.write(b"data: " + json.dumps({"choices": [{"text": body.decode()}]}).encode() + b"\n\n")
    response.abort()


def _echoes_bad_http(body: bytes, response: Response) -> None:
    response.connection.write(b"HTTP/1.1 200 OK\r\n" + body + b"\r\n\r\n")
    response.abort()


_ECHOES = [
    _echoes_status(400),
    _echoes_status(404),
    _echoes_status(422),
    _echoes_status(500),
    _echoes_status(503),
    _echoes_text,
    _echoes_broken_json,
    _echoes_header,
    _echoes_in_an_error_event,
    _echoes_and_breaks_off,
    _echoes_bad_http,
]


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every logger at its most talkative."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("pdserve", "uvicorn", "asyncio"))]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):
        caplog.set_level(logging.WARNING, logger=name)  # The test's own client may say what it likes.
    yield caplog
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


async def _shown(gateway: Gateway) -> str:
    """All that the operator can see."""
    async with httpx.AsyncClient(base_url=gateway.admin.url) as admin:
        return "".join([(await admin.get(path)).text for path in ("/status", "/requests?last=1000", "/metrics")])


def _assert_secret(caplog: pytest.LogCaptureFixture, shown: str) -> None:
    """Neither said outright nor inside what a log record carries."""
    told = [f"{record.getMessage()} {record.exc_text or ''} {record.__dict__}" for record in caplog.records]
    assert not [line for line in told if _SECRET in line or _KEY in line]
    assert _SECRET not in caplog.text
    assert _KEY not in caplog.text
    assert _SECRET not in shown
    assert _KEY not in shown


async def test_requests_that_go_well_or_are_wrong_leave_no_word_behind(
    everything_logged: pytest.LogCaptureFixture,
) -> None:
    """Every API, streamed or not, and everything that a client can get wrong."""
    headers = {"authorization": f"Bearer {_KEY}"}
    async with split() as pair:
        for path in _PATHS:
            for fields in (
                {},
                {"stream": True},
                {"n": 2},
                {"max_tokens": _SECRET},
                {"model": _SECRET},
                {"stream": _SECRET},
            ):
                answer = await pair.client.post(path, json=_body(path, **fields), headers=headers)
                assert answer.status_code < 600
            for content in (
                f'{{"prompt": "{_SECRET}"'.encode(),
                f'["{_SECRET}"]'.encode(),
                _SECRET.encode(),
                f'{{"messages": "{_SECRET}", "prompt": {{"{_SECRET}": 1}}, "model": 7, "input": 3}}'.encode(),
                f'{{"prompt": "{_SECRET}\\ud800", "{_SECRET}": "\xff"}}'.encode("latin-1"),
            ):
                await pair.client.post(path, content=content, headers=headers)
        await pair.client.post(f"/v1/{_SECRET}?q={_SECRET}", json=_body(_PATHS[0]), headers=headers)
        await pair.client.get(f"/v1/models?{_SECRET}", headers=headers | {_SECRET: _SECRET})
        await _send_raw(pair.client.base_url, f"POST /{_SECRET} HTTP/1.1\r\nhost : {_SECRET}\r\n\r\n{_SECRET}")
        await _send_raw(pair.client.base_url, f"{_SECRET}\r\n\r\n")
        await _send_raw(pair.client.base_url, f"GET / HTTP/1.1\r\nhost: x\r\nexpect: {_SECRET}\r\n\r\n")
        shown = await _shown(pair.gateway)
    assert '"request_id"' in shown
    _assert_secret(everything_logged, shown)


async def _send_raw(url: httpx.URL, text: str) -> None:
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(text.encode())
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 4")
    writer.close()


@contextlib.asynccontextmanager
async def _parrots(echo: Callable[[bytes, Response], None]) -> AsyncIterator[tuple[Gateway, list[_Parrot]]]:
    parrots = [_Parrot(echo), _Parrot(echo)]
    config = Config(
        gateway=GatewayConfig(port=0, admin_port=0), timeouts=TIMEOUTS, retries=RetriesConfig(max_attempts=1)
    )
    credentials = read_credentials(config, {"PDSERVE_API_KEYS": f"anna:{_KEY}", "PDSERVE_ENGINE_API_KEY": _KEY})
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Listener(parrot, bind("127.0.0.1", 0), shutdown_s=1)) for parrot in parrots
        ]
        addresses = [
            EngineAddress(EngineName(f"{role}-0"), role, engine.url)
            for role, engine in zip((Role.PREFILL, Role.DECODE), engines, strict=True)
        ]
        serving = running_gateway(config, addresses, bind_gateway(config), credentials=credentials)
        gateway = await stack.enter_async_context(serving)
        while not all(gateway.pool.state_of(name)[0] == "ready" for name in gateway.pool.names()):
            await gateway.pool.changed.wait()
            gateway.pool.changed.clear()
        yield gateway, parrots


@pytest.mark.parametrize("echo", _ECHOES)
async def test_an_engine_that_repeats_the_prompt_is_not_quoted(
    everything_logged: pytest.LogCaptureFixture, echo: Callable[[bytes, Response], None]
) -> None:
    """vLLM puts the input into its validation errors; the client may have them, the log may not."""
    async with _parrots(echo) as (gateway, parrots):
        async with httpx.AsyncClient(base_url=gateway.client.url, headers={"x-api-key": _KEY}, timeout=30) as client:
            for path in _PATHS:
                for is_stream in (False, True):
                    with contextlib.suppress(httpx.RemoteProtocolError):
                        await client.post(path, json=_body(path, stream=is_stream))
        shown = await _shown(gateway)
    assert sum(parrot.num_echoed for parrot in parrots) > 1
    assert '"anna"' in shown
    _assert_secret(everything_logged, shown)
