"""HTTP in front of a stand-in's engine: vLLM's paths, and what each of them answers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.sim.answer import VLLM_VERSION
from pdserve.sim.exchange import CHAT_PATH, Exchange
from pdserve.sim.request import DetokenizeBody, Refused, TokenizeBody, check_model, read_body, render_messages
from pdserve.sim.tokens import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.faults import Faults, Victim

_JSON: Headers = [(b"content-type", b"application/json")]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it came in, for tests that ask what a gateway sent."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The body as JSON."""
        fields: dict[str, Any] = msgspec.json.decode(self.body)
        return fields


class StandInApp:
    """Answers as vLLM's API server does."""

    def __init__(self, victim: Victim, faults: Faults, *, on_dead_core: Callable[[], None]) -> None:
        self.requests: list[SeenRequest] = []
        self._victim = victim
        self._engine = victim.engine
        self._faults = faults
        self._on_dead_core = on_dead_core
        self._routes: dict[bytes, dict[bytes, Callable[[Request, Response], Awaitable[None]]]] = {
            b"/v1/completions": {b"POST": self._generate},
            CHAT_PATH: {b"POST": self._generate},
            b"/v1/models": {b"GET": self._models},
            b"/health": {b"GET": self._health},
            b"/ping": {b"GET": self._health, b"POST": self._health},
            b"/version": {b"GET": self._version},
            b"/metrics": {b"GET": self._metrics},
            b"/tokenize": {b"POST": self._tokenize},
            b"/detokenize": {b"POST": self._detokenize},
        }

    async def handle(self, request: Request, response: Response) -> None:
        methods = self._routes.get(request.path)
        if methods is None:
            response.send(404, _JSON, b'{"detail":"Not Found"}')
            return
        handler = methods.get(request.method)
        if handler is None:
            response.send(405, [*_JSON, (b"allow", b", ".join(methods))], b'{"detail":"Method Not Allowed"}')
            return
        try:
            await handler(request, response)
        except Refused as refusal:
            response.send(refusal.status, _JSON, _encode(refusal.body()))

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:  # noqa: ARG002 - uvicorn does not tell either
        return [(b"content-type", b"text/plain; charset=utf-8")], b"Invalid HTTP request received."

    async def _generate(self, request: Request, response: Response) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        self.requests.append(SeenRequest(request.path.decode("latin-1"), headers, request.body))
        try:
            await Exchange(request, response, self._victim, self._faults.take()).run()
        finally:
            if self._engine.is_dead:
                self._on_dead_core()

    async def _models(self, request: Request, response: Response) -> None:  # noqa: ARG002
        created = int(self._engine.clock.unix_s())
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = self._engine.settings.model
        card = {"id": model, "object": "model", "created": created, "owned_by": "vllm", "root": model, "parent": None}
        card |= {"max_model_len": self._engine.settings.max_model_len, "permission": [permission]}
        response.send(200, _JSON, _encode({"object": "list", "data": [card]}))

    async def _health(self, request: Request, response: Response) -> None:  # noqa: ARG002
        response.send(503 if self._engine.is_dead else 200, [], b"")

    async def _version(self, request: Request, response: Response) -> None:  # noqa: ARG002
        response.send(200, _JSON, _encode({"version": VLLM_VERSION}))

    async def _metrics(self, request: Request, response: Response) -> None:  # noqa: ARG002
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        response.send(200, headers, self._engine.metrics.render())

    async def _tokenize(self, request: Request, response: Response) -> None:
        body = read_body(request.body, request.header(b"content-type") or b"", TokenizeBody)
        check_model(body.model, self._engine.settings)
        tokens = encode(_text_to_tokenize(body))
        answer = {
            "count": len(tokens),
            "max_model_len": self._engine.settings.max_model_len,
            "tokens": tokens,
            "token_strs": [decode([token]) for token in tokens] if body.return_token_strs else None,
        }
        response.send(200, _JSON, _encode(answer))

    async def _detokenize(self, request: Request, response: Response) -> None:
        body = read_body(request.body, request.header(b"content-type") or b"", DetokenizeBody)
        check_model(body.model, self._engine.settings)
        response.send(200, _JSON, _encode({"prompt": decode(body.tokens)}))


def _text_to_tokenize(body: TokenizeBody) -> str:
    if body.prompt is not None:
        return body.prompt
    if body.messages is None:
        raise Refused(
            400, "Bad Request", "1 validation error:\n  {'type': 'missing', 'loc': 'body.prompt'}", "body.prompt"
        )
    return render_messages(body.messages, add_generation_prompt=body.add_generation_prompt)
