"""The client's side: paths to handlers, errors to OpenAI bodies, and what the gateway says of itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from pdserve.core import EngineName, Role
from pdserve.engine.pool import EngineState, PairState
from pdserve.errors import EngineStatus, InvalidRequest, NoEligibleEngine, Reason, RequestError
from pdserve.protocol import openai

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.engine.pool import EnginePool
    from pdserve.gateway.proxy import Proxy
    from pdserve.http.server import Headers, Request, Response

    Handler = Callable[[Request, Response], Awaitable[None]]

_logger = logging.getLogger("pdserve.gateway")
_MODELS_TIMEOUT_S = 10.0


class Router:
    """Finds a path's handler and turns what it raises into an answer."""

    def __init__(self, handlers: dict[bytes, tuple[bytes, Handler]]) -> None:
        self._handlers = handlers
        """Path to method and handler; a path that ends in `/*` stands for any last part."""

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request, whatever happens: this is the edge where every error ends."""
        try:
            await self._find(request)(request, response)
        except RequestError as exc:
            send_error(response, exc)
        except Exception:
            _logger.exception("a fault in the gateway itself")
            if response.is_started:
                response.abort()
                return
            message = "the gateway failed; its log tells more"
            send_error(response, RequestError(message, status=500, reason=Reason.INTERNAL))

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        """For what was not a request."""
        return _error_headers(error), openai.error_body(error)

    def _find(self, request: Request) -> Handler:
        path = request.path.rstrip(b"/") or b"/"
        found = self._handlers.get(path) or self._handlers.get(path.rpartition(b"/")[0] + b"/*")
        if found is None:
            shown = request.path.decode("latin-1")
            raise InvalidRequest(f"nothing is served at {shown}", status=404, reason=Reason.NOT_FOUND)
        method, handler = found
        if request.method != method and not (request.method == b"HEAD" and method == b"GET"):
            wanted = method.decode()
            raise InvalidRequest(f"this path takes {wanted}", status=405, reason=Reason.METHOD_NOT_ALLOWED)
        return handler


def send_error(response: Response, error: RequestError) -> None:
    """An engine's own error goes out as the engine said it, ours in OpenAI's shape."""
    if isinstance(error, EngineStatus):
        headers = [(b"content-type", error.content_type), _reason_header(error)]
        response.send(error.status, headers, error.body)
    else:
        response.send(error.status, _error_headers(error), openai.error_body(error))


def send_json(response: Response, value: object, *, status: int = 200) -> None:
    """Any value as JSON."""
    response.send(status, [openai.JSON_HEADER], msgspec.json.encode(value))


def _error_headers(error: RequestError) -> Headers:
    retry = [(b"retry-after", b"1")] if isinstance(error, NoEligibleEngine) else []
    return [openai.JSON_HEADER, _reason_header(error), *retry]


def _reason_header(error: RequestError) -> tuple[bytes, bytes]:
    return b"x-pdserve-reason", error.reason.encode()


class ClientApp:
    """What clients reach."""

    def __init__(self, proxy: Proxy, pool: EnginePool) -> None:
        self._proxy = proxy
        self._pool = pool

    def router(self) -> Router:
        """All paths of the client's side."""
        return Router(
            {path: (b"POST", self._split(api)) for path, api in openai.ROUTED_APIS.items()}
            | {
                b"/v1/models": (b"GET", self.models),
                b"/health": (b"GET", self.health),
                b"/healthcheck": (b"GET", self.healthcheck),
            }
        )

    def _split(self, api: openai.Api) -> Handler:
        async def handler(request: Request, response: Response) -> None:
            await self._proxy.serve(api, request, response)

        return handler

    async def models(self, request: Request, response: Response) -> None:
        """What a decode engine says: it is the one that answers under these names."""
        name = self._any_ready(Role.DECODE)
        client = self._pool.client(name)
        authorization = request.header(b"authorization")
        headers = [] if authorization is None else [(b"authorization", authorization)]
        answer = await client.get("/v1/models", timeout_s=_MODELS_TIMEOUT_S, headers=headers)
        response.send(answer.status, [(b"content-type", answer.content_type)], answer.body)

    async def health(self, _request: Request, response: Response) -> None:
        """200 once a decode engine takes traffic; `split` says whether KV is known to move."""
        body = health_of(self._pool)
        send_json(response, body, status=503 if body["status"] == "starting" else 200)

    async def healthcheck(self, _request: Request, response: Response) -> None:
        """As the toy proxy of vLLM's tests answers, for scripts that were written against it."""
        roles = [self._pool.client(name).address.role for name in self._pool.names()]
        send_json(
            response,
            {
                "status": "ok",
                "prefill_instances": roles.count(Role.PREFILL),
                "decode_instances": roles.count(Role.DECODE),
            },
        )

    def _any_ready(self, role: Role) -> EngineName:
        for snapshot in self._pool.snapshots():
            if snapshot.address.role == role and snapshot.is_healthy:
                return snapshot.address.name
        raise NoEligibleEngine(f"no {role} engine is healthy; `pdserve status` tells which are down")


def health_of(pool: EnginePool) -> dict[str, str]:
    """`starting` without a ready decode engine, `warning` where a pair does not move KV or an engine is down, else `ok`."""
    states = {name: pool.state_of(name)[0] for name in pool.names()}
    is_serving = any(
        state is EngineState.READY for name, state in states.items() if pool.client(name).address.role == Role.DECODE
    )
    if not is_serving:
        return {"status": "starting", "split": "unproven"}
    pair_states = {pair.state for pair in pool.pairs}
    split = "proven" if pair_states == {PairState.PROVEN} else "unproven"
    is_sound = all(state is EngineState.READY for state in states.values()) and not pair_states & {
        PairState.NOT_MOVING,
        PairState.FAILING,
    }
    return {"status": "ok" if is_sound else "warning", "split": split}
