"""What is passed through: to an engine that can answer it, less what clients may not say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from pdserve.config import Config, GatewayConfig
from pdserve.core import EngineAddress, EngineName, PrefillPlace, Role
from pdserve.gateway.passthrough import find_response
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.http.listener import Listener, bind
from pdserve.protocol.multipart import read_form
from pdserve.sim.settings import Task
from pdserve.sim.stand_in import run_stand_in
from pdserve.telemetry.metrics import ENGINE_RESTARTS
from split import MODEL, SETTINGS, TIMEOUTS, Split, split, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import TimeoutsConfig
    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.settings import EngineSettings

_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


@contextlib.asynccontextmanager
async def _gateway(*urls: str, timeouts: TimeoutsConfig = TIMEOUTS) -> AsyncIterator[Split]:
    """A gateway in front of decode engines that are there already."""
    config = Config(gateway=GatewayConfig(port=0, admin_port=0), timeouts=timeouts)
    addresses = [EngineAddress(EngineName(f"decode-{index}"), Role.DECODE, url) for index, url in enumerate(urls)]
    async with running_gateway(config, addresses, bind_gateway(config)) as gateway:
        await until_ready(gateway)
        async with httpx.AsyncClient(base_url=gateway.client.url, timeout=30) as client:
            yield Split(gateway, client, [], [])


@contextlib.asynccontextmanager
async def _in_front_of(*settings: EngineSettings) -> AsyncIterator[Split]:
    """A gateway in front of decode stand-ins of several kinds."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(run_stand_in("kv_consumer", each)) for each in settings]
        deployment = await stack.enter_async_context(_gateway(*(engine.url for engine in engines)))
        yield dataclasses.replace(deployment, decodes=engines)


def _engine(**changes: Any) -> EngineSettings:
    return dataclasses.replace(SETTINGS, **changes)


class _Engine:
    """An engine that can do what the stand-in cannot: its paths answer what the test says."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.may_go_on = asyncio.Event()
        self.is_gone = asyncio.Event()

    async def handle(self, request: Request, response: Response) -> None:
        """Answer like an engine that transcribes."""
        if request.path == b"/health":
            response.send(200, [], b"")
            return
        self.seen.append(request)
        if request.path == b"/cohere/v2/chat":
            await self._stream(request, response)
        elif request.path == b"/v1/audio/transcriptions":
            body = b'{"text":"hello","kv_transfer_params":{"remote_host":"h"}}'
            response.send(200, [*_JSON, (b"x-internal", b"1")], body)
        else:
            response.send(404, _JSON, b'{"error":{"message":"Not Found"}}')

    async def _stream(self, request: Request, response: Response) -> None:
        response.start(200, _STREAM)
        response.write(b"data: one\n\n")
        try:
            await self.may_go_on.wait()
        except asyncio.CancelledError:
            self.is_gone.set()
            raise
        if b"break" in request.body:
            response.abort()
            return
        if b"drip" in request.body:
            await self._drip(response)
        response.write(b"data: two\n\n")
        response.end()

    async def _drip(self, response: Response) -> None:
        """Never silent for long, and never at an end."""
        try:
            while True:
                response.write(b"data: more\n\n")
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.is_gone.set()
            raise

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        """Not reached."""
        raise error


@contextlib.asynccontextmanager
async def _in_front_of_another(*, timeouts: TimeoutsConfig = TIMEOUTS) -> AsyncIterator[tuple[_Engine, Split]]:
    engine = _Engine()
    async with (
        Listener(engine, bind("127.0.0.1", 0), shutdown_s=1) as listener,
        _gateway(listener.url, timeouts=timeouts) as deployment,
    ):
        engine.seen.clear()
        yield engine, deployment


async def test_models_are_those_of_all_decode_engines_each_once() -> None:
    """Two engines may serve the same model, and others another."""
    settings = [_engine(model="org/a"), _engine(model="org/a"), _engine(model="b")]
    async with _in_front_of(*settings) as deployment:
        listed = (await deployment.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert sorted(model["id"] for model in listed["data"]) == ["b", "org/a"]
        for path in ("/v1/models/org/a", "/v1/models/org%2Fa"):
            model = (await deployment.client.get(path)).json()
            assert (model["id"], model["owned_by"]) == ("org/a", "vllm")
        answer = await deployment.client.get("/v1/models/c")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_models_survive_an_engine_that_is_gone() -> None:
    """One that answers is enough."""
    async with _in_front_of(_engine(model="a"), _engine(model="b")) as deployment:
        deployment.decodes[0].die()
        listed = (await deployment.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["b"]


async def test_tokens_and_texts() -> None:
    """Query and body go through, and an engine's refusal comes back as it was said."""
    async with split() as deployment:
        tokens = (await deployment.client.post("/tokenize", json={"model": MODEL, "prompt": "a b c"})).json()
        text = await deployment.client.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
        assert text.json() == {"prompt": "a b c"}
        refused = await deployment.client.post("/tokenize", json={"model": "nobody", "prompt": "a"})
        assert refused.status_code == 404
        assert "nobody" in refused.json()["error"]["message"]
        version = (await deployment.client.get("/version")).json()
        assert version["version"].startswith("0.32")


async def test_each_request_finds_the_engine_that_can() -> None:
    """A path that one engine does not have is tried on the others; the last word is an engine's own."""
    async with _in_front_of(_engine(), _engine(model="e", task=Task.EMBED), _engine(model="s", task=Task.SCORE)) as it:
        vectors = await it.client.post("/v1/embeddings", json={"model": "e", "input": "text"})
        assert len(vectors.json()["data"]) == 1
        ranks = await it.client.post("/v2/rerank", json={"model": "s", "query": "q", "documents": ["a", "b"]})
        assert len(ranks.json()["results"]) == 2
        nowhere = await it.client.post("/classify", json={"model": "e", "input": "text"})
        assert nowhere.status_code == 404
        assert nowhere.headers["x-pdserve-reason"] == "engine_status"


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/load_lora_adapter", "/sleep", "/collective_rpc", "/x"])
async def test_what_is_not_for_clients_is_not_there(path: str) -> None:
    """An engine has these paths; the gateway's clients do not."""
    async with split() as deployment:
        answer = await deployment.client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_message_is_counted_and_refused_in_anthropics_form() -> None:
    """The official client counts, and understands the gateway's own refusal."""
    async with split() as deployment:
        async with anthropic.AsyncAnthropic(api_key="k", base_url=str(deployment.client.base_url)) as client:
            count = await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "a b"}])
        assert count.input_tokens > 2
        refused = await deployment.client.post("/v1/messages/count_tokens", content=b"{")
        assert refused.json()["type"] == "error"


async def test_no_healthy_engine_is_told_as_such() -> None:
    """503 and when to come again, in place of a connection error."""
    async with split() as deployment:
        deployment.decode.die()
        for _ in range(2):
            answer = await deployment.client.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code in {502, 503}
        assert (await deployment.client.get("/v1/models")).status_code in {502, 503}


async def test_a_stored_response_is_found_on_whichever_engine_has_it() -> None:
    """Retrieved, streamed again and cancelled by its id alone; the official client does it."""
    stored = _engine(enable_responses_store=True)
    async with _in_front_of(stored, stored) as deployment:
        base_url = f"{deployment.client.base_url}/v1"
        async with openai.AsyncOpenAI(api_key="k", base_url=base_url) as client:
            made = [
                await client.responses.create(model=MODEL, input=f"text {index}", max_output_tokens=3)
                for index in range(4)
            ]
            for response in made:
                found = await client.responses.retrieve(response.id)
                assert found.output_text == response.output_text
            with pytest.raises(openai.NotFoundError, match="not found"):
                await client.responses.retrieve("resp_unknown")
            with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
                await client.responses.cancel(made[0].id)
        pool = deployment.gateway.pool
        homes = {await find_response(pool, response.id, []) for response in made}
        assert homes <= set(pool.names())
        assert None not in homes
        for unknown in ("resp_unknown", "../metrics", "", "a" * 300, "ä"):
            assert await find_response(pool, unknown, []) is None


@pytest.mark.parametrize("response_id", ["..%2Fmetrics", "a b", "a%2Fcancel", "x" * 300])
async def test_an_id_leads_nowhere_else(response_id: str) -> None:
    """Only what looks like an id reaches an engine."""
    async with split() as deployment:
        answer = await deployment.client.get(f"/v1/responses/{response_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_form_is_written_anew_less_what_clients_may_not_say() -> None:
    """vLLM reads a handoff off `vllm_xargs` in a form as well."""
    async with _in_front_of_another() as (engine, deployment):
        answer = await deployment.client.post(
            "/v1/audio/transcriptions?x=1",
            data={"model": "w", "vllm_xargs": json.dumps({"kv_transfer_params": "x", "mine": 1})},
            files={"file": ("a.wav", b"\x00\xff" * 9, "audio/wav")},
        )
        assert answer.json() == {"text": "hello", "kv_transfer_params": None}
        assert "x-internal" not in answer.headers
        (request,) = engine.seen
        assert request.query == b"x=1"
        fields = {part.name: part.content for part in read_form(request.header(b"content-type") or b"", request.body)}
        assert fields == {b"model": b"w", b"vllm_xargs": b'{"mine":1}', b"file": b"\x00\xff" * 9}
        refused = await deployment.client.post("/v1/audio/transcriptions", json={"model": "w"})
        assert refused.status_code == 400
        assert len(engine.seen) == 1


async def test_reserved_fields_are_dropped_from_json() -> None:
    """Whatever path an engine might read them on."""
    async with _in_front_of_another() as (engine, deployment):
        await deployment.client.post("/pooling", json={"input": "x", "kv_transfer_params": {}, "seed": 2**70})
        assert json.loads(engine.seen[-1].body) == {"input": "x", "seed": 2**70}


async def test_a_stream_comes_as_it_is_made() -> None:
    """The first piece is there while the engine still works on the second."""
    async with (
        _in_front_of_another() as (engine, deployment),
        deployment.client.stream("POST", "/cohere/v2/chat", json={"stream": True}) as answer,
    ):
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: one\n\n"
        engine.may_go_on.set()
        assert b"".join([piece async for piece in pieces]) == b"data: two\n\n"


async def test_a_stream_that_breaks_is_seen_to_break() -> None:
    """An API without a form for errors in streams ends without its end."""
    async with _in_front_of_another() as (engine, deployment):
        engine.may_go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await deployment.client.post("/cohere/v2/chat", json={"what": "break"})
        # It is looked at, and keeps its traffic: a connection may end for many a reason.
        assert [snapshot.is_healthy for snapshot in deployment.gateway.pool.snapshots()] == [True]
        tally = deployment.gateway.proxy.tally
        await deployment.gateway.pool.client(EngineName("decode-0")).get("/health", timeout_s=5)
        assert tally.value(ENGINE_RESTARTS, "decode-0") == 0


async def test_a_stream_that_falls_silent_is_given_up() -> None:
    """And the engine sees its client gone."""
    async with _in_front_of_another(timeouts=msgspec.structs.replace(TIMEOUTS, silence=0.2)) as (engine, deployment):
        with pytest.raises(httpx.RemoteProtocolError):
            await deployment.client.post("/cohere/v2/chat", json={})
        async with asyncio.timeout(5):
            await engine.is_gone.wait()


async def test_a_stream_that_never_ends_meets_the_whole_deadline() -> None:
    """However lively it is; and the engine sees its client gone."""
    timeouts = msgspec.structs.replace(TIMEOUTS, total=0.5)
    async with _in_front_of_another(timeouts=timeouts) as (engine, deployment):
        engine.may_go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await deployment.client.post("/cohere/v2/chat", json={"what": "drip"})
        async with asyncio.timeout(5):
            await engine.is_gone.wait()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/v1/completions", "POST"), ("POST", "/version", "GET, HEAD"), ("PUT", "/v1/models/x", "GET, HEAD")],
)
async def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allow: str) -> None:
    """RFC 9110 (15.5.6) wants them in a header."""
    async with _in_front_of_another() as (_, deployment):
        answer = await deployment.client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow)


async def test_a_response_whose_last_event_is_long_ends_as_any_other() -> None:
    """It repeats the request, here with megabytes of metadata: edited, known for the end, and nobody's failure."""
    async with split() as deployment:
        body = {"model": MODEL, "input": "a b", "stream": True, "metadata": {"note": "x" * (3 * 1024 * 1024)}}
        answer = await deployment.client.post("/v1/responses", json=body)
        events = answer.text.split("\n\n")
        assert events.pop() == ""
        last = events[-1]
        assert len(last) > 3 * 1024 * 1024
        assert last.startswith("event: response.completed\n")
        response = json.loads(last.partition("data: ")[2])["response"]
        assert response["usage"]["input_tokens"] > 0
        assert not response.get("kv_transfer_params")
        (record,) = deployment.gateway.journal.last(1)
        assert (record.status, record.reason, record.place) == (200, None, PrefillPlace.REMOTE)


async def test_a_client_that_leaves_ends_its_request() -> None:
    """The engine must not work for nobody."""
    async with _in_front_of_another() as (engine, deployment):
        async with deployment.client.stream("POST", "/cohere/v2/chat", json={}) as answer:
            assert await anext(answer.aiter_raw()) == b"data: one\n\n"
        async with asyncio.timeout(5):
            await engine.is_gone.wait()
