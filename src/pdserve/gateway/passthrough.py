"""Requests that are no P/D requests but that an engine can answer: to a decode engine, and its answer back as it came.

Engines may serve different models, so one that does not know what is asked for is not the last word while there are others.
What only an operator may do to an engine is not here, nor what takes a handoff (vLLM 0.32: /inference/v1/generate, the render
paths, /v1/load_lora_adapter, /sleep, /start_profile, /collective_rpc, /reset_prefix_cache, /abort_requests and the like).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_to_bytes

import msgspec

from pdserve.core import Role
from pdserve.errors import EngineError, EngineUnreachable, InvalidRequest, NoEligibleEngine, Reason, RequestError
from pdserve.gateway.passing import Passing
from pdserve.protocol import openai
from pdserve.protocol.fields import raw
from pdserve.protocol.multipart import clean_form
from pdserve.protocol.usage import hide_handoff
from pdserve.telemetry.metrics import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from pdserve.core import EngineName
    from pdserve.engine.pool import EnginePool
    from pdserve.engine.transport import Answer, EngineClient
    from pdserve.gateway.proxy import Proxy
    from pdserve.http.client import ClientConnection
    from pdserve.http.server import Headers, Request, Response

    Handler = Callable[[Request, Response], Awaitable[None]]

_JSON_PATHS = (
    b"/tokenize",
    b"/detokenize",
    b"/v1/embeddings",
    b"/v2/embed",
    b"/pooling",
    b"/classify",
    b"/score",
    b"/v1/score",
    b"/rerank",
    b"/v1/rerank",
    b"/v2/rerank",
    b"/generative_scoring",
    b"/v1/systemone",
    b"/v1/messages/count_tokens",
    b"/v1/chat/completions/batch",
    b"/cohere/v2/chat",
)
_FORM_PATHS = (b"/v1/audio/transcriptions", b"/v1/audio/translations")
_GET_PATHS = (b"/version", b"/tokenizer_info")
_MODELS = b"/v1/models"

_TIMEOUT_S = 10.0
_OK = 200
_NOT_HERE = frozenset({404, 501})
"""vLLM's answers for a path, a model or a response that it does not have, and for what its model cannot do."""
_NOT_ASKED = frozenset({Reason.ENGINE_UNREACHABLE, Reason.CONNECT_TIMEOUT})
"""The engine has not said a word: another one may."""
_HANDOFF_MARK = b"transfer_params"
_IS_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,256}")


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


async def find_response(pool: EnginePool, response_id: str, headers: Headers) -> EngineName | None:
    """The decode engine that remembers a response; None when none does."""
    if not _IS_ID.fullmatch(response_id.encode()):
        return None
    names = [client.address.name for client in _clients(pool)]
    path = f"/v1/responses/{quote(response_id, safe='')}"
    answers = await _ask_all(pool, names, path, headers)
    found = (name for name, answer in answers if not isinstance(answer, RequestError) and answer.status == _OK)
    return next(found, None)


class Passthrough:
    """The handlers. Holds nothing of any one request."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._pool = proxy.pool
        self._id_prefix = f"pt-{secrets.token_hex(8)}-"
        self._num_ids = itertools.count()

    def handlers(self) -> dict[bytes, tuple[bytes, Handler]]:
        """Path to method and handler, for the router."""
        return {
            **{path: (b"POST", self._counted(path, self._pass_json)) for path in _JSON_PATHS},
            **{path: (b"POST", self._counted(path, self._pass_form)) for path in _FORM_PATHS},
            **{path: (b"GET", self._counted(path, self._pass_get)) for path in _GET_PATHS},
            b"/v1/responses/*": (b"GET", self._counted(b"/v1/responses/*", self._pass_response)),
            b"/v1/responses/*/cancel": (b"POST", self._counted(b"/v1/responses/*/cancel", self._pass_response)),
            _MODELS: (b"GET", self._counted(_MODELS, self._list_models)),
            # A model's name may hold a slash, which not every client spells %2F.
            b"/v1/models/*": (b"GET", self._counted(b"/v1/models/*", self._show_model)),
            b"/v1/models/*/*": (b"GET", self._counted(b"/v1/models/*", self._show_model)),
        }

    def _counted(self, path: bytes, handler: Handler) -> Handler:
        label, tally = path.decode(), self._proxy.tally

        async def counted(request: Request, response: Response) -> None:
            outcome = "internal"
            try:
                await handler(request, response)
                outcome = "ok"
            except asyncio.CancelledError:
                outcome = "disconnected"
                raise
            except RequestError as exc:
                outcome = exc.reason.value
                if not response.is_started:
                    raise
                _break_off(request, response, exc)
            finally:
                tally.count(REQUESTS, label, outcome)

        return counted

    # What goes to an engine

    async def _pass_json(self, request: Request, response: Response) -> None:
        body = openai.join(openai.split_request(request.body))
        await self._pass_in_turn(request, response, body, openai.JSON_HEADER[1])

    async def _pass_form(self, request: Request, response: Response) -> None:
        boundary = f"pdserve-{secrets.token_hex(16)}".encode()
        content_type, body = clean_form(request.header(b"content-type") or b"", request.body, boundary=boundary)
        await self._pass_in_turn(request, response, body, content_type)

    async def _pass_get(self, request: Request, response: Response) -> None:
        await self._pass_on(request, response, b"", openai.JSON_HEADER[1])

    async def _pass_response(self, request: Request, response: Response) -> None:
        """Of a response's path only the id is the client's, and it must not be able to lead anywhere else."""
        response_id = request.path.split(b"/")[3]
        if not _IS_ID.fullmatch(response_id):
            raise InvalidRequest("no response has such an id", status=404, reason=Reason.NOT_FOUND)
        await self._pass_on(request, response, b"", openai.JSON_HEADER[1])

    async def _pass_in_turn(self, request: Request, response: Response, body: bytes, content_type: bytes) -> None:
        """What makes an engine work waits for its turn."""
        admission = self._proxy.admission
        await admission.enter(priority=0, weight=1)
        try:
            await self._pass_on(request, response, body, content_type)
        finally:
            admission.leave(1)

    async def _pass_on(self, request: Request, response: Response, body: bytes, content_type: bytes) -> None:
        """The first answer of an engine that knows what is asked for, else the last of one that does not."""
        error: EngineError | None = None
        for client in _clients(self._pool):
            try:
                answer = await self._ask(client, request, response, body, content_type)
            except EngineError as exc:
                if response.is_started or exc.reason not in _NOT_ASKED:
                    raise
                error = error or exc
                continue
            if answer is None:
                response.end()
                return
            if answer.status < 400:  # noqa: PLR2004
                _send(answer, response)
                return
            error = client.status_error(answer)
            if answer.status not in _NOT_HERE:
                break
        raise error or _nobody()

    async def _ask(
        self, client: EngineClient, request: Request, response: Response, body: bytes, content_type: bytes
    ) -> Answer | None:
        """A whole answer; None when it was a stream, which the client has by then. Raises RequestError."""
        path = request.path.rstrip(b"/").decode() + (f"?{request.query.decode()}" if request.query else "")
        request_id = f"{self._id_prefix}{next(self._num_ids)}".encode()
        deadline_s = request.received_at_s + self._proxy.timeouts.total
        while True:
            connection = await self._connect(client)
            passing = Passing(
                response,
                client,
                connection,
                api=openai.api_of(request.path),
                loop=self._proxy.loop,
                timeouts=self._proxy.timeouts,
                total_timeout_s=deadline_s - self._proxy.clock(),
            )
            try:
                with self._pool.leg(client.address.name):
                    client.send(
                        connection,
                        path,
                        body,
                        passing,
                        request_id=request_id,
                        headers=self._proxy.engine_headers(request),
                        method=b"GET" if request.method == b"HEAD" else request.method,
                        content_type=content_type,
                    )
                    return await passing.outcome
            except EngineUnreachable as exc:
                # The engine may have closed an idle connection just as it was used again.
                if not connection.was_used or response.is_started or exc.reason is not Reason.ENGINE_UNREACHABLE:
                    self._pool.report_broken(client.address.name)
                    raise
            finally:
                passing.close()

    async def _connect(self, client: EngineClient) -> ClientConnection:
        """Only an engine that cannot be connected to may be another process by now. Raises EngineError or OutOfSockets."""
        try:
            return client.try_connect() or await client.connect()
        except EngineError as exc:
            may_be_another = isinstance(exc, EngineUnreachable)
            self._pool.report_unreachable(client.address.name, may_be_another=may_be_another)
            raise

    # What the gateway puts together

    async def _list_models(self, request: Request, response: Response) -> None:
        models = list((await self._models(request)).values())
        _send_json(response, {"object": "list", "data": models})

    async def _show_model(self, request: Request, response: Response) -> None:
        name = unquote_to_bytes(request.path.removeprefix(_MODELS + b"/")).decode(errors="replace")
        model = (await self._models(request)).get(name)
        if model is None:
            raise InvalidRequest(f"no engine serves the model {name!r}", status=404, reason=Reason.NOT_FOUND)
        _send_json(response, model)

    async def _models(self, request: Request) -> dict[str, msgspec.Raw]:
        """What any decode engine serves, by id. Raises RequestError when none tells."""
        clients = list(_clients(self._pool))
        if not clients:
            raise _nobody()
        names = [client.address.name for client in clients]
        answers = await _ask_all(self._pool, names, _MODELS.decode(), self._proxy.engine_headers(request))
        models: dict[str, msgspec.Raw] = {}
        errors: list[RequestError] = []
        for name, answer in answers:
            try:
                models = _listed(self._pool.client(name), answer) | models
            except RequestError as exc:
                errors.append(exc)
        if len(errors) == len(answers):
            raise errors[0]
        return models


def _listed(client: EngineClient, answer: Answer | RequestError) -> dict[str, msgspec.Raw]:
    if isinstance(answer, RequestError):
        raise answer
    if answer.status != _OK:
        raise client.status_error(answer)
    models = client.decoded(answer, _Models).data
    return {msgspec.json.decode(model, type=_Model).id: model for model in models}


async def _ask_all(
    pool: EnginePool, names: Iterable[EngineName], path: str, headers: Headers
) -> list[tuple[EngineName, Answer | RequestError]]:
    """Every engine's answer, or why there is none."""

    async def ask(name: EngineName) -> tuple[EngineName, Answer | RequestError]:
        try:
            return name, await pool.client(name).get(path, timeout_s=_TIMEOUT_S, headers=headers)
        except RequestError as exc:
            return name, exc

    return list(await asyncio.gather(*map(ask, names)))


def _clients(pool: EnginePool) -> list[EngineClient]:
    """Those of the engines that clients may be answered by, the least busy first."""
    engines = [engine for engine in pool.snapshots() if engine.is_healthy and engine.address.role is not Role.PREFILL]
    return [pool.client(engine.address.name) for engine in sorted(engines, key=lambda engine: engine.num_in_flight)]


def _nobody() -> NoEligibleEngine:
    return NoEligibleEngine("no decode engine is healthy; `pdserve status` tells which are down")


def _send(answer: Answer, response: Response) -> None:
    body = answer.body
    if _HANDOFF_MARK in body:
        fields = openai.try_split(body)
        if fields is not None and hide_handoff(openai.Api.RESPONSES, fields):
            body = openai.join(fields)
    response.send(answer.status, [(b"content-type", answer.content_type)], body)


def _send_json(response: Response, value: object) -> None:
    response.send(_OK, [openai.JSON_HEADER], bytes(raw(value)))


def _break_off(request: Request, response: Response, error: RequestError) -> None:
    """A stream whose API has a form for errors gets one; any other ends so that its client sees that it is not whole."""
    api = openai.api_of(request.path)
    if api is None or error.reason is Reason.CLIENT_STALLED:
        response.abort()
        return
    response.write(openai.error_event(api, error))
    response.end()
