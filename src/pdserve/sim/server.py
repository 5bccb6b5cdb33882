"""HTTP in front of a stand-in's engine: vLLM's paths, and what each of them answers."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.sim.answer import VLLM_VERSION
from pdserve.sim.api import ChatApi, CompletionsApi, MessagesApi, ResponsesApi
from pdserve.sim.background import Background
from pdserve.sim.exchange import JSON, Exchange
from pdserve.sim.messages import CountTokensBody, count_tokens
from pdserve.sim.pooling import EmbeddingsBody, RerankBody, ScoreBody, embeddings, ranks, scores
from pdserve.sim.refusal import Refused, read_body
from pdserve.sim.request import DetokenizeBody, TokenizeBody, check_model, render_messages
from pdserve.sim.response_store import ResponseStore
from pdserve.sim.settings import Task
from pdserve.sim.tokens import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.api import Api
    from pdserve.sim.fault import Victim
    from pdserve.sim.faults import Faults

    _Handler = Callable[[Request, Response], Awaitable[None]]

_RESPONSE = b"/v1/responses/"
_encode = msgspec.json.Encoder().encode


class SeenRequest:
    """A request as it came in, for tests that ask what a gateway sent."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def path(self) -> str:
        """Without the query."""
        return self._request.path.decode("latin-1")

    @property
    def headers(self) -> dict[str, str]:
        """By their lower-case names."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._request.headers}

    @property
    def body(self) -> bytes:
        """As it was sent."""
        return self._request.body

    @property
    def fields(self) -> dict[str, Any]:
        """The body as JSON."""
        fields: dict[str, Any] = msgspec.json.decode(self.body)
        return fields


class StandInApp:
    """Answers as vLLM's API server does."""

    def __init__(
        self,
        victim: Victim,
        faults: Faults,
        *,
        see: Callable[[SeenRequest], None],
        on_dead_core: Callable[[], None],
    ) -> None:
        self._see = see
        self._victim = victim
        self._engine = victim.engine
        self._faults = faults
        self._on_dead_core = on_dead_core
        self.store = ResponseStore()
        settings = victim.engine.settings
        self._responses = ResponsesApi(settings, self.store)
        self._background = Background(self._responses, victim.engine)
        self._apis: dict[bytes, Api] = {
            b"/v1/completions": CompletionsApi(settings),
            b"/v1/chat/completions": ChatApi(settings),
            b"/v1/messages": MessagesApi(settings),
            b"/v1/responses": self._responses,
        }
        self._routes = self._routes_of(settings.task)

    def _routes_of(self, task: Task) -> dict[bytes, dict[bytes, _Handler]]:
        """A model has the paths of what it can do (entrypoints/serve, register_*_api_routers)."""
        routes: dict[bytes, dict[bytes, _Handler]] = {
            b"/v1/models": {b"GET": self._models},
            b"/health": {b"GET": self._health},
            b"/ping": {b"GET": self._health, b"POST": self._health},
            b"/version": {b"GET": self._version},
            b"/metrics": {b"GET": self._metrics},
            b"/tokenize": {b"POST": self._tokenize},
            b"/detokenize": {b"POST": self._detokenize},
        }
        if task is Task.GENERATE:
            routes |= {path: {b"POST": self._generate} for path in self._apis}
            return routes | {b"/v1/messages/count_tokens": {b"POST": self._count_tokens}}
        if task is Task.EMBED:
            routes[b"/v1/embeddings"] = {b"POST": self._embed}
        for path in (b"/score", b"/v1/score"):
            routes[path] = {b"POST": self._score}
        for path in (b"/rerank", b"/v1/rerank", b"/v2/rerank"):
            routes[path] = {b"POST": self._rerank}
        return routes

    def _methods_of(self, path: bytes) -> dict[bytes, _Handler] | None:
        methods = self._routes.get(path)
        if methods is not None or b"/v1/responses" not in self._routes or not path.startswith(_RESPONSE):
            return methods
        name, _, rest = path.removeprefix(_RESPONSE).partition(b"/")
        if not name or rest not in {b"", b"cancel"}:
            return None
        return {b"POST": self._cancel_response} if rest else {b"GET": self._get_response}

    async def handle(self, request: Request, response: Response) -> None:
        methods = self._methods_of(request.path)
        if methods is None:
            response.send(404, JSON, b'{"detail":"Not Found"}')
            return
        handler = methods.get(request.method)
        if handler is None:
            response.send(405, [*JSON, (b"allow", b", ".join(methods))], b'{"detail":"Method Not Allowed"}')
            return
        try:
            await handler(request, response)
        except Refused as refusal:
            response.send(refusal.status, JSON, _encode(refusal.body()))

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:  # noqa: ARG002 - uvicorn does not tell either
        return [(b"content-type", b"text/plain; charset=utf-8")], b"Invalid HTTP request received."

    async def _generate(self, request: Request, response: Response) -> None:
        self._see(SeenRequest(request))
        api = self._apis[request.path]
        try:
            if api is self._responses and self._is_background(request):
                await self._background.begin(self._responses.read(request.body, _content_type(request)), response)
            else:
                await Exchange(api, request, response, self._victim, self._faults.take()).run()
        finally:
            if self._engine.is_dead:
                self._on_dead_core()

    def _is_background(self, request: Request) -> bool:
        """Only where the engine can; elsewhere the exchange refuses it."""
        settings = self._engine.settings
        return settings.enable_responses_store and bool(
            self._responses.read(request.body, _content_type(request)).background
        )

    async def _get_response(self, request: Request, response: Response) -> None:
        query = parse_qs(request.query.decode("latin-1"))
        wants_events = query.get("stream", ["false"])[-1] in {"true", "1"}
        start = int(query.get("starting_after", ["-1"])[-1]) + 1 if wants_events else None
        name = request.path.removeprefix(_RESPONSE).decode("latin-1")
        await self._background.send(name, response, start=start)

    async def _cancel_response(self, request: Request, response: Response) -> None:
        name = request.path.removeprefix(_RESPONSE).removesuffix(b"/cancel").decode("latin-1")
        await self._background.cancel(name, response)

    async def _count_tokens(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), CountTokensBody)
        response.send(200, JSON, _encode(count_tokens(body, self._engine.settings)))

    async def _embed(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), EmbeddingsBody)
        answer = embeddings(body, _request_id(request), self._created, self._engine.settings)
        response.send(200, JSON, _encode(answer))

    async def _score(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), ScoreBody)
        answer = scores(body, _request_id(request), self._created, self._engine.settings)
        response.send(200, JSON, _encode(answer))

    async def _rerank(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), RerankBody)
        response.send(200, JSON, _encode(ranks(body, _request_id(request), self._engine.settings)))

    @property
    def _created(self) -> int:
        return int(self._engine.clock.unix_s())

    async def _models(self, request: Request, response: Response) -> None:  # noqa: ARG002
        created = self._created
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
        response.send(200, JSON, _encode({"object": "list", "data": [card]}))

    async def _health(self, request: Request, response: Response) -> None:  # noqa: ARG002
        response.send(503 if self._engine.is_dead else 200, [], b"")

    async def _version(self, request: Request, response: Response) -> None:  # noqa: ARG002
        response.send(200, JSON, _encode({"version": VLLM_VERSION}))

    async def _metrics(self, request: Request, response: Response) -> None:  # noqa: ARG002
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        response.send(200, headers, self._engine.metrics.render())

    async def _tokenize(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), TokenizeBody)
        check_model(body.model, self._engine.settings)
        tokens = encode(_text_to_tokenize(body))
        answer = {
            "count": len(tokens),
            "max_model_len": self._engine.settings.max_model_len,
            "tokens": tokens,
            "token_strs": [decode([token]) for token in tokens] if body.return_token_strs else None,
        }
        response.send(200, JSON, _encode(answer))

    async def _detokenize(self, request: Request, response: Response) -> None:
        body = read_body(request.body, _content_type(request), DetokenizeBody)
        check_model(body.model, self._engine.settings)
        response.send(200, JSON, _encode({"prompt": decode(body.tokens)}))


def _text_to_tokenize(body: TokenizeBody) -> str:
    if body.prompt is not None:
        return body.prompt
    if body.messages is None:
        raise Refused(
            400, "Bad Request", "1 validation error:\n  {'type': 'missing', 'loc': 'body.prompt'}", "body.prompt"
        )
    return render_messages(body)


def _content_type(request: Request) -> bytes:
    return request.header(b"content-type") or b""


def _request_id(request: Request) -> str:
    header = request.header(b"x-request-id")
    return uuid.uuid4().hex[:16] if header is None else header.decode("latin-1")
