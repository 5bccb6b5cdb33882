"""The client's side: paths to handlers, errors to OpenAI bodies, and what the gateway says of itself."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

import msgspec

from pdserve.core import Role
from pdserve.engine.pool import EngineState, PairState
from pdserve.errors import (
    EngineStatus,
    InvalidRequest,
    MethodNotAllowed,
    NoEligibleEngine,
    Overloaded,
    Reason,
    RequestError,
    ShuttingDown,
)
from pdserve.gateway.auth import CHALLENGE
from pdserve.gateway.passthrough import Passthrough
from pdserve.protocol import openai

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve.engine.pool import EnginePool
    from pdserve.gateway.proxy import Proxy
    from pdserve.http.server import Headers, Request, Response

    Handler = Callable[[Request, Response], Awaitable[None]]

_logger = logging.getLogger("pdserve.gateway")
_METHODS = b"GET, HEAD, OPTIONS, POST"


class Router:
    """Finds a path's handler and turns what it raises into an answer."""

    def __init__(
        self, handlers: dict[bytes, tuple[bytes, Handler]], *, guard: Callable[[Request], None] = lambda _: None
    ) -> None:
        self._handlers = handlers
        """Path to method and handler; `*` stands for any part, as one of the last two."""
        self._guard = guard
        """Lets a request in, or raises InvalidRequest."""

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request, whatever happens: this is the edge where every error ends."""
        try:
            self._guard(request)
            if request.path == b"*":
                response.send(200, [(b"allow", _METHODS)], b"")  # OPTIONS for the server as a whole
                return
            await self._find(request)(request, response)
        except RequestError as exc:
            send_error(response, exc, api=openai.api_of(request.path))
        except asyncio.CancelledError:
            if response.is_client_there and not response.is_started:
                send_error(response, ShuttingDown(), api=openai.api_of(request.path))
            raise
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
        found = self._handlers.get(request.path) or self._find_by_pattern(request.path)
        method, handler = found
        if request.method != method and not (request.method == b"HEAD" and method == b"GET"):
            allowed = ["GET", "HEAD"] if method == b"GET" else [method.decode()]
            raise MethodNotAllowed(f"this path takes {method.decode()}", allowed=allowed)
        return handler

    def _find_by_pattern(self, path: bytes) -> tuple[bytes, Handler]:
        for name in _names_of(path.rstrip(b"/") or b"/"):
            found = self._handlers.get(name)
            if found is not None:
                return found
        raise InvalidRequest(f"nothing is served at {path.decode('latin-1')}", status=404, reason=Reason.NOT_FOUND)


def _names_of(path: bytes) -> Iterator[bytes]:
    """What a path may be called in a router, its own spelling first."""
    above, _, last = path.rpartition(b"/")
    far_above, _, _ = above.rpartition(b"/")
    yield from (path, above + b"/*", far_above + b"/*/" + last, far_above + b"/*/*")


def send_error(response: Response, error: RequestError, *, api: openai.Api | None = None) -> None:
    """An engine's own error goes out as the engine said it, ours in the API's shape."""
    if isinstance(error, EngineStatus):
        headers = [(b"content-type", error.content_type), _reason_header(error), *error.headers]
        response.send(error.status, headers, error.body)
    else:
        response.send(error.status, _error_headers(error), openai.error_body(error, api))


def send_json(response: Response, value: object, *, status: int = 200) -> None:
    """Any value as JSON."""
    response.send(status, [openai.JSON_HEADER], msgspec.json.encode(value))


def _error_headers(error: RequestError) -> Headers:
    headers = [openai.JSON_HEADER, _reason_header(error)]
    if isinstance(error, (NoEligibleEngine, ShuttingDown)) or error.reason is Reason.OUT_OF_SOCKETS:
        headers.append((b"retry-after", b"1"))
    elif isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    elif error.reason is Reason.UNAUTHORIZED:
        headers.append(CHALLENGE)
    elif isinstance(error, Overloaded):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers


def _reason_header(error: RequestError) -> tuple[bytes, bytes]:
    return b"x-pdserve-reason", error.reason.encode()


class ClientApp:
    """What clients reach."""

    def __init__(self, proxy: Proxy, pool: EnginePool) -> None:
        self._proxy = proxy
        self._pool = pool

    def router(self, *, guard: Callable[[Request], None] = lambda _: None) -> Router:
        """All paths of the client's side."""
        return Router(
            {path: (b"POST", functools.partial(self._proxy.serve, api)) for path, api in openai.ROUTED_APIS.items()}
            | Passthrough(self._proxy).handlers()
            | {
                b"/health": (b"GET", self.health),
                b"/healthcheck": (b"GET", self.healthcheck),
            },
            guard=guard,
        )

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
    is_sound = set(states.values()) <= {EngineState.READY, EngineState.DRAINING} and not pair_states & {
        PairState.NOT_MOVING,
        PairState.FAILING,
    }
    return {"status": "ok" if is_sound else "warning", "split": split}
