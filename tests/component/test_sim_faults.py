"""Every fault, with every generating API, streamed or not: what the client sees, and that the stand-in is clean afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.sim.faults import (
    FAULTS,
    AnswerInstead,
    BreakOffAfter,
    ComeLate,
    Die,
    DieAfterAnswer,
    EndWithoutDone,
    ErrorAfter,
    ErrorStatus,
    FalseChunks,
    HalfCloseAfter,
    HalfCloseInLength,
    HeadOnly,
    KillCore,
    LongLength,
    NeverLoad,
    NoHttp,
    RefuseHandshake,
    ResetAfter,
    Restart,
    RestartAfterAnswer,
    ShortLength,
    StallAfter,
    TruncateAfter,
)
from pdserve.sim.settings import EngineSettings
from pdserve.sim.stand_in import StandIn, run_stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.sim.faults import Fault

_SETTINGS = EngineSettings(model="tiny", max_model_len=256, num_blocks=64, handshake_timeout_s=1.0)
_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
_TEXT = "the quick brown fox jumps over the lazy dog and then once more over the same dog"
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_ALL = pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT, _RESPONSES, _MESSAGES])
_STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True])
_SILENCE_S = 0.3
"""How long a client waits where nothing is to come."""
_ENDS = {
    _COMPLETIONS: b"data: [DONE]\n\n",
    _CHAT: b"data: [DONE]\n\n",
    _RESPONSES: b'"type":"response.completed"}\n\n',
    _MESSAGES: b'data: {"type":"message_stop"}\n\n',
}

_BREAKS: list[Fault] = [
    *(BreakOffAfter(0), BreakOffAfter(1), ResetAfter(0), ResetAfter(1), HalfCloseAfter(0), HalfCloseAfter(1)),
    *(HalfCloseInLength(), LongLength(), FalseChunks(), NoHttp()),
]
_SILENCES: list[Fault] = [HeadOnly(), StallAfter(0), StallAfter(2)]
_DEATHS: list[Fault] = [Die(0), Die(1), Restart(0), Restart(1)]


@contextlib.asynccontextmanager
async def _up(role: str = "kv_both", **settings: Any) -> AsyncIterator[tuple[StandIn, httpx.AsyncClient]]:
    async with (
        run_stand_in(role, dataclasses.replace(_SETTINGS, **settings)) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=10) as client,
    ):
        yield engine, client


def _body(path: str, *, limit: int = 4, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, **fields}
    if path == _COMPLETIONS:
        return {"prompt": _TEXT, "max_tokens": limit, **body}
    if path == _RESPONSES:
        return {"input": _TEXT, "max_output_tokens": limit, **body}
    return {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": limit, **body}


async def _hand_off(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    leg = (await client.post(path, json=_body(path, limit=1, kv_transfer_params=_KEEP))).json()
    handoff: dict[str, Any] = leg["kv_transfer_params"]
    return handoff


async def _clean(engine: StandIn) -> None:
    """Wait until nothing is left; the connection of the client that is asking does not count."""
    async with asyncio.timeout(20):
        await engine.idle()
        while {"tasks", "blocks", "running", "waiting"} & set(engine.leftovers):  # noqa: ASYNC110 - a turn is enough
            await asyncio.sleep(0)


@_ALL
@_STREAM_OR_NOT
@pytest.mark.parametrize("fault", _BREAKS, ids=str)
async def test_connections_that_break(path: str, fault: Fault, *, stream: bool) -> None:
    """The client's HTTP library notices, and the next request is answered."""
    async with _up() as (engine, client):
        engine.faults.inject(fault)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await client.post(path, json=_body(path, stream=stream))
        assert (await client.post(path, json=_body(path, stream=stream))).status_code == 200
        await _clean(engine)


@_ALL
@_STREAM_OR_NOT
@pytest.mark.parametrize("fault", _SILENCES, ids=str)
async def test_silence(path: str, fault: Fault, *, stream: bool) -> None:
    """Nothing more comes, until the client leaves: then all is given back."""
    async with _up() as (engine, client):
        engine.faults.inject(fault)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(path, json=_body(path, stream=stream), timeout=_SILENCE_S)
        await _clean(engine)


@_ALL
@_STREAM_OR_NOT
@pytest.mark.parametrize("fault", _DEATHS, ids=str)
async def test_deaths(path: str, fault: Fault, *, stream: bool) -> None:
    """The connection breaks; afterwards there is nobody, or another engine on the same ports that knows nothing."""
    async with _up() as (engine, client):
        before = engine.engine.engine_id
        engine.faults.inject(fault)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await client.post(path, json=_body(path, stream=stream))
        if isinstance(fault, Die):
            assert engine.gone.is_set()
            with pytest.raises(httpx.ConnectError):
                await client.post(path, json=_body(path, stream=stream))
            await engine.revive()
        else:
            await engine.restarted()
        assert engine.engine.engine_id != before
        assert engine.leftovers == {}
        assert (await client.post(path, json=_body(path, stream=stream))).status_code == 200


@pytest.mark.parametrize("fault", [DieAfterAnswer(), RestartAfterAnswer()], ids=str)
@_ALL
async def test_p_is_gone_between_the_legs(path: str, fault: Fault) -> None:
    """Its answer is whole; its handoff is worth nothing, and D says so after the handshake's time."""
    async with _up() as (prefill, p), _up() as (decode, d):
        prefill.faults.inject(fault)
        handoff = await _hand_off(p, path)
        if isinstance(fault, RestartAfterAnswer):
            await prefill.restarted()
        else:
            await prefill.gone.wait()
        response = await d.post(path, json=_body(path, kv_transfer_params=handoff))
        assert response.status_code == 500
        await _clean(decode)


@_ALL
@_STREAM_OR_NOT
@pytest.mark.parametrize("fault", [RefuseHandshake(), ErrorAfter(0), ErrorAfter(2)], ids=str)
async def test_errors_after_admission(path: str, fault: Fault, *, stream: bool) -> None:
    """500 for a whole answer; what the API has for an error in a stream; P is free where it was reached."""
    patience_s = 0.1 if isinstance(fault, RefuseHandshake) else 30.0
    async with _up() as (prefill, p), _up(handshake_timeout_s=patience_s) as (decode, d):
        handoff = await _hand_off(p, path)
        decode.faults.inject(fault)
        body = _body(path, stream=stream, kv_transfer_params=handoff)
        if stream and path == _RESPONSES:
            with pytest.raises(httpx.RemoteProtocolError):
                await d.post(path, json=body)
        else:
            response = await d.post(path, json=body)
            assert response.status_code == (200 if stream else 500)
            assert "rror" in response.text
            assert (_ENDS[path] in response.content) == (stream and path != _MESSAGES)
        await _clean(decode)
        if isinstance(fault, RefuseHandshake):
            assert prefill.num_held_blocks > 0
        else:
            await _clean(prefill)


@_ALL
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_errors_before_admission(path: str, status: int) -> None:
    """In the API's own shape, and P is told that its blocks may go."""
    async with _up() as (prefill, p), _up() as (decode, d):
        handoff = await _hand_off(p, path)
        decode.faults.inject(ErrorStatus(status))
        response = await d.post(path, json=_body(path, stream=True, kv_transfer_params=handoff))
        assert response.status_code == status
        assert ("param" in response.json()["error"]) == (path != _MESSAGES)
        await _clean(prefill)


@_ALL
@_STREAM_OR_NOT
async def test_kv_that_never_comes(path: str, *, stream: bool) -> None:
    """D holds its blocks and says nothing; P holds its own, kept alive by D; both are free when the client leaves."""
    async with _up() as (prefill, p), _up() as (decode, d):
        handoff = await _hand_off(p, path)
        decode.faults.inject(NeverLoad())
        with pytest.raises(httpx.ReadTimeout):
            await d.post(path, json=_body(path, stream=stream, kv_transfer_params=handoff), timeout=_SILENCE_S)
        await _clean(decode)
        if stream:
            assert prefill.num_held_blocks > 0
        else:
            await _clean(prefill)  # vLLM takes a whole answer that nobody waits for any more for a refused one.


async def test_a_lease_that_ends_while_d_queues() -> None:
    """What P's blocks hold by then is somebody else's, and shows."""
    async with _up(kv_lease_duration_s=0.05, num_blocks=16) as (prefill, p), _up() as (decode, d):
        handoff = await _hand_off(p, _COMPLETIONS)
        decode.faults.inject(ComeLate(0.2))
        late = asyncio.create_task(d.post(_COMPLETIONS, json=_body(_COMPLETIONS, kv_transfer_params=handoff)))
        await prefill.idle()
        other = {"model": "tiny", "prompt": "z" * 250, "max_tokens": 1}
        assert (await p.post(_COMPLETIONS, json=other)).status_code == 200
        text = (await late).json()["choices"][0]["text"]
        assert text == text.upper()


@_ALL
async def test_streams_that_end_too_early(path: str) -> None:
    """In good HTTP order, without the API's last word and without an error."""
    async with _up() as (engine, client):
        for fault in (EndWithoutDone(), TruncateAfter(1), TruncateAfter(3)):
            engine.faults.inject(fault)
            response = await client.post(path, json=_body(path, stream=True))
            assert response.status_code == 200
            assert _ENDS[path] not in response.content
            assert "error" not in response.text
        whole = (await client.post(path, json=_body(path, stream=True))).content
        assert whole.endswith(_ENDS[path])


@_ALL
@_STREAM_OR_NOT
async def test_a_length_that_is_too_small(path: str, *, stream: bool) -> None:
    """The client gets a body that is cut off, and has no way of knowing."""
    async with _up() as (engine, client):
        engine.faults.inject(ShortLength())
        response = await client.post(path, json=_body(path, stream=stream))
        assert response.status_code == 200
        assert not response.text.rstrip().endswith("}") or _ENDS[path] not in response.content


@_ALL
@_STREAM_OR_NOT
@pytest.mark.parametrize("body", ["", "<html>", '{"hello": ["world"]}', "[]"])
async def test_another_body(path: str, body: str, *, stream: bool) -> None:
    """200, and not what was asked for."""
    async with _up() as (engine, client):
        engine.faults.inject(AnswerInstead(body))
        response = await client.post(path, json=_body(path, stream=stream))
        assert (response.status_code, response.text) == (200, body)
        await _clean(engine)


async def test_a_core_that_dies() -> None:
    """500; and with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH 500 for ever after, where the engine else ends."""
    async with _up(keep_alive_on_engine_death=True) as (engine, client):
        engine.faults.inject(KillCore())
        for _ in range(3):
            assert (await client.post(_COMPLETIONS, json=_body(_COMPLETIONS))).status_code == 500
        assert (await client.get("/health")).status_code == 503
        assert not engine.gone.is_set()
    async with _up() as (engine, client):
        engine.faults.inject(KillCore())
        assert (await client.post(_COMPLETIONS, json=_body(_COMPLETIONS))).status_code == 500
        async with asyncio.timeout(5):
            await engine.gone.wait()
        await engine.revive()
        assert (await client.post(_COMPLETIONS, json=_body(_COMPLETIONS))).status_code == 200


async def test_no_blocks() -> None:
    """Requests wait, the gauge says so, and they are answered when there is room again."""
    async with _up() as (engine, client):
        async with asyncio.timeout(5):
            with engine.without_blocks():
                waiting = asyncio.create_task(client.post(_COMPLETIONS, json=_body(_COMPLETIONS), timeout=5))
                await engine.engine.until(lambda: engine.engine.num_waiting == 1)
                assert engine.counter("num_requests_waiting") == 1
                assert not waiting.done()
            assert (await waiting).status_code == 200
        await _clean(engine)


async def test_restarts_on_the_same_ports() -> None:
    """Again and again: new engine id, counters at zero, cache empty, the same URL."""
    async with _up() as (engine, client):
        ids = set()
        for _ in range(5):
            answer = (await client.post(_COMPLETIONS, json=_body(_COMPLETIONS, kv_transfer_params=_KEEP))).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            ids.add((answer["kv_transfer_params"]["remote_engine_id"], answer["kv_transfer_params"]["remote_port"]))
            await engine.restart()
            assert engine.leftovers == {}
            assert engine.counter("prompt_tokens_total") == 0
        assert len({engine_id for engine_id, _ in ids}) == 5
        assert len({port for _, port in ids}) == 1


async def test_a_share_of_the_requests() -> None:
    """With a seed the same requests suffer in every run."""
    struck = []
    for _ in range(2):
        async with _up() as (engine, client):
            engine.faults.inject(ErrorStatus(503), share=0.3, seed=5)
            statuses = [(await client.post(_COMPLETIONS, json=_body(_COMPLETIONS))).status_code for _ in range(40)]
            assert engine.faults.num_struck == statuses.count(503)
            struck.append(statuses)
    assert struck[0] == struck[1]
    assert 4 < struck[0].count(503) < 20


async def test_leftovers_are_told_by_name() -> None:
    """Blocks kept for another engine, and a connection that waits for its next request."""
    async with _up() as (engine, client):
        assert engine.leftovers == {}
        await _hand_off(client, _COMPLETIONS)
        assert engine.leftovers == {"blocks": 2, "held_blocks": 2, "connections": 1}


def test_every_fault_has_a_name() -> None:
    """What tests can do, the command line can."""
    kinds = {kind for kind, _ in FAULTS.values()}
    assert kinds == {type(kind()) for kind in kinds}
