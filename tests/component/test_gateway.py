"""The gateway over stand-in engines: what goes to P, what goes to D, what the client gets, and what is booked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.config import AdmissionConfig, Config, RetriesConfig
from pdserve.core import EngineName, PrefillPlace
from pdserve.engine.pool import PairState
from pdserve.protocol import nixl
from pdserve.sim.faults import (
    AnswerWithoutHandoff,
    BreakOffAfter,
    ErrorStatus,
    GarbageSse,
    HalfHandoff,
    IgnoreHandoff,
    NeverAnswer,
    Slow,
)
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.telemetry.metrics import BREAKER_OPENED, HANDOFFS_REFUSED, PAIR_FAILURES, RELEASES
from split import MODEL, TIMEOUTS, Split, split, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from pdserve.protocol.admin import RequestRecord
    from pdserve.protocol.openai import Api
    from pdserve.sim.faults import Fault
    from pdserve.sim.server import SeenRequest
    from pdserve.sim.stand_in import StandIn

_PATHS = ["/v1/completions", "/v1/chat/completions"]
_PROMPT = "the quick brown fox jumps over the lazy dog and then once more over the same dog"


@pytest.fixture
async def pair() -> AsyncIterator[Split]:
    """1P1D."""
    async with split() as deployment:
        yield deployment


def _body(path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": _PROMPT}]} if "chat" in path else {"prompt": _PROMPT}
    return {"model": MODEL, **prompt, "max_tokens": 6, "temperature": 0, **fields}


def _record(deployment: Split, response: httpx.Response) -> RequestRecord:
    record = deployment.gateway.journal.try_get(response.headers["x-pdserve-request-id"])
    assert record is not None
    return record


def _last(deployment: Split) -> RequestRecord:
    return deployment.gateway.journal.last(1)[0]


def _text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _events(text: str) -> list[str]:
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def _streamed_text(events: list[str]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in json.loads(event).get("choices", [])]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


async def _alone(deployment: Split, path: str, **fields: Any) -> dict[str, Any]:
    """What one engine alone answers: its prefix cache is kept out by a salt."""
    return await _alone_at(deployment, deployment.decode.url, path, **fields)


async def _alone_at(deployment: Split, url: str, path: str, **fields: Any) -> dict[str, Any]:
    body = _body(path, cache_salt="alone", **fields)
    answer: dict[str, Any] = (await deployment.client.post(url + path, json=body)).json()
    return answer


def _asked(engine: StandIn) -> list[SeenRequest]:
    """What an engine was asked by clients: neither proofs nor releases."""
    return [request for request in engine.requests if request.headers.get("x-request-id", "").startswith("pd-")]


# The good path


@pytest.mark.parametrize("path", _PATHS)
async def test_the_answer_is_what_one_engine_alone_gives(pair: Split, path: str) -> None:
    """Same text, same usage; the header and the record say that the prompt was computed on P."""
    response = await pair.client.post(path, json=_body(path))
    body, alone = response.json(), await _alone(pair, path)
    assert response.status_code == 200
    assert _text(body) == _text(alone)
    assert body["usage"] == alone["usage"]
    assert body["kv_transfer_params"] is None
    assert response.headers["x-pdserve-prefill"] == "remote"
    record = _record(pair, response)
    assert (record.place, record.prefill, record.decode) == (PrefillPlace.REMOTE, "prefill-0", "decode-0")
    assert record.num_remote_tokens == record.num_prompt_tokens == body["usage"]["prompt_tokens"]
    await pair.settle()


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_is_what_one_engine_alone_gives(pair: Split, path: str, options: dict[str, Any]) -> None:
    """The same pieces, the usage event only for those who asked, and the evidence in any case."""
    response = await pair.client.post(path, json=_body(path, stream=True, **options))
    alone = await pair.client.post(pair.decode.url + path, json=_body(path, stream=True, cache_salt="s", **options))
    ours, theirs = _events(response.text), _events(alone.text)
    assert response.headers["content-type"] == alone.headers["content-type"]
    assert len(ours) == len(theirs)
    assert ours[-1] == "[DONE]"
    assert _streamed_text(ours) == _streamed_text(theirs)
    usages = [[json.loads(event).get("usage") for event in events[:-1]] for events in (ours, theirs)]
    assert usages[0] == usages[1]
    assert _record(pair, response).place is PrefillPlace.REMOTE
    await pair.settle()


async def test_the_legs_are_as_the_protocol_says(pair: Split) -> None:
    """One fresh id on both, one token on P, the client's own limits and P's handoff on D."""
    await pair.client.post(
        "/v1/completions", json=_body(stream=True, max_tokens=5, min_tokens=2, user="me", seed=2**60)
    )
    prefill, decode = pair.prefill.requests[-1], pair.decode.requests[-1]
    p_leg, d_leg = prefill.fields, decode.fields
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert prefill.headers["x-request-id"].startswith("pd-")
    assert (p_leg["max_tokens"], p_leg["stream"]) == (1, False)
    assert "min_tokens" not in p_leg
    assert p_leg["kv_transfer_params"]["do_remote_decode"] is True
    assert (d_leg["max_tokens"], d_leg["min_tokens"], d_leg["stream"]) == (5, 2, True)
    assert p_leg["user"] == d_leg["user"] == "me"
    assert p_leg["seed"] == d_leg["seed"] == 2**60
    handoff = d_leg["kv_transfer_params"]
    assert handoff["do_remote_prefill"] is True
    assert prefill.headers["x-request-id"] in handoff["remote_request_id"]
    assert "remote_prefill_cached_tokens" not in handoff


async def test_every_request_has_an_id_of_its_own(pair: Split) -> None:
    """A client's own id is not used: two clients may choose the same, and vLLM tells requests apart by it."""
    headers = {"x-request-id": "mine"}
    ids = [
        (await pair.client.post("/v1/completions", json=_body(), headers=headers)).headers["x-pdserve-request-id"]
        for _ in range(3)
    ]
    assert len(set(ids)) == 3
    assert "mine" not in ids


async def test_the_clients_key_reaches_both_engines(pair: Split) -> None:
    """Engines that were started with --api-key ask for it on both legs."""
    await pair.client.post("/v1/completions", json=_body(), headers={"authorization": "Bearer k"})
    assert pair.prefill.requests[-1].headers["authorization"] == "Bearer k"
    assert pair.decode.requests[-1].headers["authorization"] == "Bearer k"


async def test_the_client_sees_ps_prefix_hits(pair: Split) -> None:
    """On a repeat P finds blocks in its cache; the client is told that number, as one engine alone would tell it."""
    prompt = _PROMPT * 5
    first = (await pair.client.post("/v1/completions", json=_body(prompt=prompt))).json()
    again = (await pair.client.post("/v1/completions", json=_body(prompt=prompt))).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["usage"]["prompt_tokens"]
    assert _last(pair).place is PrefillPlace.REMOTE


@pytest.mark.parametrize("hidden", ["kv_transfer_params", "ec_transfer_params", "bootstrap_room"])
async def test_a_clients_own_handoff_never_reaches_an_engine(pair: Split, hidden: str) -> None:
    """It would end the engine, or make it connect anywhere."""
    response = await pair.client.post("/v1/completions", json=_body() | {hidden: {"do_remote_prefill": True}})
    assert response.headers["x-pdserve-prefill"] == "remote"
    assert pair.prefill.requests[-1].fields["kv_transfer_params"]["do_remote_prefill"] is False


@pytest.mark.parametrize("fields", [{"n": "2", "temperature": 1}, {"echo": True}, {"prompt_logprobs": 1}])
async def test_what_one_handoff_cannot_stand_for_goes_to_d_alone(pair: Split, fields: dict[str, Any]) -> None:
    """P never sees it, and the header says that this was decided."""
    num_seen = len(pair.prefill.requests)
    response = await pair.client.post("/v1/completions", json=_body(**fields))
    assert response.headers["x-pdserve-prefill"] == "alone"
    assert len(pair.prefill.requests) == num_seen
    assert _record(pair, response).place is PrefillPlace.ALONE


async def test_many_at_once_do_not_mix(pair: Split) -> None:
    """Every stream is its own, whatever runs beside it."""
    bodies = [_body(prompt=f"number {n} " * (n % 7 + 1), stream=n % 2 == 0, max_tokens=8) for n in range(60)]
    alone = [
        await pair.client.post(f"{pair.decode.url}/v1/completions", json=body | {"cache_salt": "s"}) for body in bodies
    ]
    ours = await asyncio.gather(*(pair.client.post("/v1/completions", json=body) for body in bodies))
    for body, one, other in zip(bodies, ours, alone, strict=True):
        if body["stream"]:
            assert _streamed_text(_events(one.text)) == _streamed_text(_events(other.text))
        else:
            assert _text(one.json()) == _text(other.json())
    counts = pair.gateway.journal.num_by_place
    assert counts == {
        PrefillPlace.REMOTE: 60,
        PrefillPlace.LOCAL: 0,
        PrefillPlace.ALONE: 0,
        PrefillPlace.UNPROVEN: 0,
    }
    await pair.settle()


async def test_engines_take_turns() -> None:
    """An even load stays even on both sides, and every pair was proven beforehand."""
    async with split(num_prefill=2, num_decode=3) as deployment:
        assert {pair.state for pair in deployment.gateway.pool.pairs} == {PairState.PROVEN}
        for _ in range(12):
            await deployment.client.post("/v1/completions", json=_body())
        records = deployment.gateway.journal.last(12)
        assert sorted(record.prefill or "" for record in records) == ["prefill-0"] * 6 + ["prefill-1"] * 6
        assert {record.decode for record in records} == {"decode-0", "decode-1", "decode-2"}
        await deployment.settle()


async def test_load_is_counted_while_it_lasts(pair: Split) -> None:
    """A leg counts as load until it is over, however it ends."""
    pool = pair.gateway.pool
    name = pool.names()[0]
    with contextlib.suppress(ValueError), pool.leg(name):
        assert pool.num_in_flight(name) == 1
        raise ValueError
    assert pool.num_in_flight(name) == 0


async def test_phases_are_told(pair: Split) -> None:
    """The standard header names where the time went."""
    response = await pair.client.post("/v1/completions", json=_body(stream=True))
    names = [entry.split(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert names == ["queue", "prefill", "handoff", "first-token"]
    phases = _record(pair, response).phases
    assert phases.stream_s is not None
    assert phases.decode_s is None


# Where KV does not move


async def test_a_p_without_a_connector_is_told_of() -> None:
    """The client's answer is right; the pair, the health and the record say that nothing moves, and why."""
    async with split(prefill_role="none") as deployment:
        (pair_state,) = deployment.gateway.pool.pairs
        assert pair_state.state is PairState.NOT_MOVING
        response = await deployment.client.post("/v1/completions", json=_body())
        assert _text(response.json()) == _text(await _alone(deployment, "/v1/completions"))
        assert response.headers["x-pdserve-prefill"] == "local"
        assert "--kv-transfer-config" in _record(deployment, response).cause
        assert (await deployment.client.get("/health")).json() == {"status": "warning", "split": "unproven"}


async def test_a_d_that_ignores_the_handoff_is_told_of() -> None:
    """D answers 200 and the right text; its own count gives it away."""
    async with split(decode_faults=[IgnoreHandoff()]) as deployment:
        assert deployment.gateway.pool.pairs[0].state is PairState.NOT_MOVING
        response = await deployment.client.post("/v1/completions", json=_body())
        assert response.headers["x-pdserve-prefill"] == "local"
        assert "D computed" in _record(deployment, response).cause


async def test_a_d_that_gives_no_proof_serves_unproven() -> None:
    """Flags or a version that cannot prove anything are no reason not to serve."""
    settings = EngineSettings(model=MODEL, enable_prompt_tokens_details=False)
    async with split(settings=settings) as deployment:
        assert deployment.gateway.pool.pairs[0].state is PairState.UNPROVEN
        response = await deployment.client.post("/v1/completions", json=_body())
        assert response.headers["x-pdserve-prefill"] == "unproven"
        assert "--enable-prompt-tokens-details" in _record(deployment, response).cause
        assert (await deployment.client.get("/health")).json() == {"status": "ok", "split": "unproven"}


# P fails


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (HalfHandoff("remote_host"), "incomplete"),
        (ErrorStatus(500), "answered 500"),
        (ErrorStatus(503), "answered 503"),
        (ErrorStatus(429), "answered 429"),
        (BreakOffAfter(0), "connection ended"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_where_p_fails_d_answers_alone(pair: Split, fault: Fault, says: str, stream: bool) -> None:  # noqa: FBT001
    """The right answer for the client, and never silent."""
    pair.prefill.faults.inject(fault, times=2 if isinstance(fault, BreakOffAfter) else 1)  # it is asked twice then
    response = await pair.client.post("/v1/completions", json=_body(stream=stream))
    text = _streamed_text(_events(response.text)) if stream else _text(response.json())
    assert text == _text(await _alone(pair, "/v1/completions"))
    assert response.headers["x-pdserve-prefill"] == "local"
    assert says in _record(pair, response).cause
    asked = [request.fields for request in pair.decode.requests if not request.fields["prompt"].startswith("Pair ")]
    assert all("kv_transfer_params" not in fields for fields in asked)


async def test_a_connection_that_p_closed_while_it_was_idle_is_replaced(pair: Split) -> None:
    """An engine may close a kept connection just as it is used again; that is no failure of P."""
    await pair.client.post("/v1/completions", json=_body())
    pair.prefill.faults.inject(BreakOffAfter(0))
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.headers["x-pdserve-prefill"] == "remote"


async def test_a_silent_p_meets_its_deadline() -> None:
    """D answers alone once P's time is up, and P is hung up on."""
    timeouts = TIMEOUTS.__class__(prefill=0.2)
    async with split(timeouts=timeouts) as deployment:
        deployment.prefill.faults.inject(NeverAnswer())
        response = await deployment.client.post("/v1/completions", json=_body())
        assert response.status_code == 200
        assert "did not come within 0.2 s" in _record(deployment, response).cause
        await deployment.settle()


@pytest.mark.parametrize(("fields", "status"), [({"model": "nope"}, 404), ({"prompt": "a " * 5000}, 400)])
async def test_what_p_refuses_is_the_clients_to_mend(pair: Split, fields: dict[str, Any], status: int) -> None:
    """P's own error goes to the client as P said it, and D never sees the request."""
    num_seen = len(pair.decode.requests)
    response = await pair.client.post("/v1/completions", json=_body(**fields))
    direct = await pair.client.post(f"{pair.prefill.url}/v1/completions", json=_body(**fields))
    assert response.status_code == direct.status_code == status
    assert response.json()["error"]["type"] == direct.json()["error"]["type"]
    assert response.headers["x-pdserve-reason"] == "engine_status"
    assert len(pair.decode.requests) == num_seen


async def test_a_stale_handoff_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would answer 200 with another request's context; here P is told to free and asked again, then D computes it."""
    timeouts = TIMEOUTS.__class__(kv_lease=2.0, kv_lease_margin=1.5)
    async with split(timeouts=timeouts) as deployment:
        ticks = itertools.count()
        monkeypatch.setattr(deployment.gateway.proxy, "clock", lambda: float(next(ticks)))
        response = await deployment.client.post("/v1/completions", json=_body())
        assert "old and its blocks are sure for 0.5 s only" in _record(deployment, response).cause
        assert response.headers["x-pdserve-prefill"] == "local"
        await deployment.settle()
        assert deployment.gateway.proxy.tally.value(HANDOFFS_REFUSED, "expired") == 3
        assert deployment.gateway.proxy.tally.value(RELEASES, "released") == 3
        assert deployment.prefill.num_held_blocks == 0


async def test_a_handoff_that_grew_old_once_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh P leg, and KV moves after all."""
    timeouts = TIMEOUTS.__class__(kv_lease=2.0, kv_lease_margin=1.5)
    async with split(timeouts=timeouts) as deployment:
        proxy, clock = deployment.gateway.proxy, deployment.gateway.proxy.clock
        late_s = iter([0.0, 0.0, 0.0, 5.0])  # In the queue, the deadline, P's answer, and then the check of its age.
        monkeypatch.setattr(proxy, "clock", lambda: clock() + next(late_s, 5.0))
        response = await deployment.client.post("/v1/completions", json=_body())
        assert response.headers["x-pdserve-prefill"] == "remote"
        assert proxy.tally.value(HANDOFFS_REFUSED, "expired") == 1
        await deployment.settle()


# D fails


async def test_a_d_that_always_fails_before_its_first_byte_frees_p(pair: Split) -> None:
    """The client gets D's own error in the end; P is told to free at once instead of when the lease ends."""
    pair.decode.faults.inject(ErrorStatus(500), times=None)
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.status_code == 500
    assert response.headers["x-pdserve-reason"] == "engine_status"
    pair.decode.faults.clear()
    await pair.settle()
    assert pair.prefill.num_held_blocks == 0
    assert len(_asked(pair.prefill)) == 1
    assert len(_asked(pair.decode)) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [ErrorStatus(500), BreakOffAfter(0), GarbageSse(0)])
async def test_a_failed_d_is_replaced_and_gets_a_fresh_handoff(fault: Fault, stream: bool) -> None:  # noqa: FBT001
    """P computes again, another D takes it over, the client sees nothing; no handoff is sent twice."""
    async with split(num_decode=2) as deployment:
        for engine in deployment.decodes:
            engine.faults.inject(fault)
        deployment.decodes[1].faults.clear()
        responses = [await deployment.client.post("/v1/completions", json=_body(stream=stream)) for _ in range(2)]
        texts = {_streamed_text(_events(one.text)) if stream else _text(one.json()) for one in responses}
        assert texts == {_text(await _alone_at(deployment, deployment.decodes[1].url, "/v1/completions"))}
        assert {_record(deployment, one).place for one in responses} == {PrefillPlace.REMOTE}
        handed = [
            request.fields["kv_transfer_params"]["remote_request_id"]
            for engine in deployment.decodes
            for request in _asked(engine)
            if request.fields.get("kv_transfer_params") and request.fields["model"] == MODEL
        ]
        assert len(handed) == len(set(handed)) == 3
        await deployment.settle()
        assert deployment.prefill.num_held_blocks == 0


async def test_the_only_d_is_tried_alone_after_a_failed_handoff(pair: Split) -> None:
    """What failed between the two may not fail on D alone."""
    pair.decode.faults.inject(ErrorStatus(500))
    response = await pair.client.post("/v1/completions", json=_body())
    assert _text(response.json()) == _text(await _alone(pair, "/v1/completions"))
    assert response.headers["x-pdserve-prefill"] == "local"
    assert "answered 500" in _record(pair, response).cause
    assert _record(pair, response).num_failed_legs == 1
    await pair.settle()


async def test_a_busy_d_is_not_asked_twice(pair: Split) -> None:
    """503 is D's word for come again later; the client gets it when there is nobody else."""
    pair.decode.faults.inject(ErrorStatus(503))
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.status_code == 503
    assert len(_asked(pair.decode)) == 1
    await pair.settle()


async def test_a_pair_whose_handoffs_fail_is_left_alone_until_it_is_proven(pair: Split) -> None:
    """After three in a row D computes alone, and says why; the proof then opens the pair again."""
    for _ in range(3):
        pair.decode.faults.inject(ErrorStatus(500))
        await pair.client.post("/v1/completions", json=_body())
    await until_ready(pair.gateway)
    async with asyncio.timeout(10):
        while pair.gateway.pool.pairs[0].state is not PairState.PROVEN:
            await pair.gateway.pool.changed.wait()
            pair.gateway.pool.changed.clear()
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.headers["x-pdserve-prefill"] == "remote"
    tally = pair.gateway.proxy.tally
    assert tally.value(PAIR_FAILURES, "prefill-0", "decode-0") == 3
    await pair.settle()


async def test_an_engine_that_fails_its_requests_is_left_alone_for_a_while(pair: Split) -> None:
    """Its health check may say what it likes."""
    pair.decode.faults.inject(ErrorStatus(500), times=None)
    for _ in range(2):
        assert (await pair.client.post("/v1/completions", json=_body(echo=True))).status_code == 500
    response = await pair.client.post("/v1/completions", json=_body(echo=True))
    assert response.status_code == 503
    assert response.headers["x-pdserve-reason"] == "no_engine"
    assert response.headers["retry-after"] == "1"
    assert pair.gateway.proxy.tally.value(BREAKER_OPENED, "decode-0") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_between_the_legs_leaves_no_connection(
    pair: Split,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,  # noqa: FBT001
) -> None:
    """The whole request's time is over when P has answered: 504, P's blocks are free, and D's socket is nobody's."""
    await pair.client.post("/v1/completions", json=_body())
    proxy, parse, skipped_s = pair.gateway.proxy, nixl.parse_handoff, 0.0

    def parse_late(api: Api, answer: bytes, *, now_s: float) -> nixl.Handoff:
        nonlocal skipped_s
        skipped_s = 20.0
        return parse(api, answer, now_s=now_s)

    monkeypatch.setattr(nixl, "parse_handoff", parse_late)
    monkeypatch.setattr(proxy, "clock", lambda: time.monotonic() + skipped_s)
    monkeypatch.setattr(proxy, "timeouts", msgspec.structs.replace(proxy.timeouts, total=15.0))
    response = await pair.client.post("/v1/completions", json=_body(stream=stream))
    assert response.headers["x-pdserve-reason"] == "deadline"
    decode = pair.gateway.pool.client(EngineName("decode-0"))
    async with asyncio.timeout(3):  # It would be closed for want of use after 5.
        while pair.decode.num_connections != len(decode._pool._idle):  # noqa: ASYNC110 - it gives no event
            await asyncio.sleep(0.01)
    await pair.settle()


async def test_a_prompt_that_d_counts_otherwise_is_never_answered(pair: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """P and D with unlike templates: D would go on from another prompt's KV and answer 200. It is asked alone instead."""
    parse = nixl.parse_handoff

    def miscounted(api: Api, answer: bytes, *, now_s: float) -> nixl.Handoff:
        handoff = parse(api, answer, now_s=now_s)
        return msgspec.structs.replace(handoff, num_prompt_tokens=(handoff.num_prompt_tokens or 0) + 1)

    monkeypatch.setattr(nixl, "parse_handoff", miscounted)
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.status_code == 200
    assert response.headers["x-pdserve-prefill"] == "local"
    assert "wrong context" in _record(pair, response).cause
    streamed = await pair.client.post("/v1/completions", json=_body(stream=True))
    assert json.loads(_events(streamed.text)[-1])["error"]["code"] == "wrong_context"
    await pair.settle()


async def test_a_silent_d_is_tried_again() -> None:
    """A stream that says nothing in time costs its client only the time."""
    async with split(num_decode=2, timeouts=TIMEOUTS.__class__(first_byte=0.3)) as deployment:
        for engine in deployment.decodes:
            engine.faults.inject(NeverAnswer())
        deployment.decodes[0].faults.clear()
        responses = [await deployment.client.post("/v1/completions", json=_body(stream=True)) for _ in range(2)]
        assert {_record(deployment, response).place for response in responses} == {PrefillPlace.REMOTE}
        assert sum(_record(deployment, response).num_failed_legs for response in responses) == 1
        await deployment.settle()


@pytest.mark.parametrize("without_prefill", ["decode_alone", "error"])
@pytest.mark.parametrize("fault", [ErrorStatus(500), AnswerWithoutHandoff()])
async def test_what_happens_without_p_is_the_operators_choice(fault: Fault, without_prefill: Any) -> None:
    """The other P is asked first; then D alone, or P's error."""
    config = Config(retries=RetriesConfig(without_prefill=without_prefill))
    async with split(num_prefill=2, config=config) as deployment:
        for engine in deployment.prefills:
            engine.faults.inject(fault)
        response = await deployment.client.post("/v1/completions", json=_body())
        assert [len(_asked(engine)) for engine in deployment.prefills] == [1, 1]
        if without_prefill == "error":
            assert response.status_code == (500 if isinstance(fault, ErrorStatus) else 502)
            assert not _asked(deployment.decode)
        else:
            assert response.headers["x-pdserve-prefill"] == "local"
        echoed = await deployment.client.post("/v1/completions", json=_body(echo=True))
        assert echoed.headers["x-pdserve-prefill"] == "alone"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_d_meets_its_deadline(stream: bool) -> None:  # noqa: FBT001
    """504 with a reason, no status before it, and nothing is held on P."""
    timeouts = TIMEOUTS.__class__(first_byte=0.2, whole_answer=0.2)
    async with split(timeouts=timeouts, config=Config(retries=RetriesConfig(max_attempts=1))) as deployment:
        deployment.decode.faults.inject(NeverAnswer())
        response = await deployment.client.post("/v1/completions", json=_body(stream=stream))
        assert response.status_code == 504
        error = response.json()["error"]
        assert error["code"] == "first_byte_timeout"
        assert "decode engine decode-0" in error["message"]
        await deployment.settle()
        assert deployment.prefill.num_held_blocks == 0


async def test_a_d_that_cannot_be_reached_is_replaced() -> None:
    """Nothing has been sent yet, so another D takes the handoff; the dead one gets nothing more."""
    async with split(num_decode=2) as deployment:
        deployment.decodes[0].die()
        responses = [await deployment.client.post("/v1/completions", json=_body()) for _ in range(4)]
        assert [response.status_code for response in responses] == [200] * 4
        assert {_record(deployment, response).decode for response in responses} == {"decode-1"}
        assert {response.headers["x-pdserve-prefill"] for response in responses} == {"remote"}
        assert deployment.prefill.num_held_blocks == 0


async def test_a_client_that_reads_nothing_is_hung_up_on() -> None:
    """D and P are free again once the client has left its answer unread for too long."""
    settings = EngineSettings(model=MODEL, max_model_len=40_000, num_blocks=4096)
    async with split(settings=settings, timeouts=TIMEOUTS.__class__(silence=1.5)) as deployment:
        body = json.dumps(_body(stream=True, max_tokens=30_000, ignore_eos=True, logprobs=5)).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(deployment.gateway.client.url.rpartition(":")[2])))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(30):
                while deployment.gateway.journal.num_requests == 0:  # noqa: ASYNC110 - the journal gives no event
                    await asyncio.sleep(0.02)
        assert _last(deployment).reason == "client_stalled"
        await deployment.settle()


async def test_a_stream_that_breaks_off_says_so_and_is_not_done(pair: Split) -> None:
    """After the first byte an error is an event, and `[DONE]` is left out."""
    pair.decode.faults.inject(BreakOffAfter(3))
    response = await pair.client.post("/v1/completions", json=_body(stream=True, max_tokens=20))
    events = _events(response.text)
    assert response.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "engine_broke_off"
    assert "[DONE]" not in events
    assert _last(pair).reason == "engine_broke_off"
    await pair.settle()


async def test_a_stream_that_falls_silent_is_given_up() -> None:
    """Between two pieces D has its own, shorter deadline."""
    settings = EngineSettings(model=MODEL, timing=Timing(decode_step_s=30.0))
    async with split(timeouts=TIMEOUTS.__class__(silence=0.2)) as deployment:
        object.__setattr__(deployment.decode.engine, "settings", settings)
        response = await deployment.client.post("/v1/completions", json=_body(stream=True))
        assert json.loads(_events(response.text)[-1])["error"]["code"] == "silence_timeout"
        assert "the next piece did not come within 0.2 s" in response.text


async def test_a_whole_answer_that_breaks_off_is_an_error(pair: Split) -> None:
    """Half an answer is none, and neither is the one of a second try."""
    pair.decode.faults.inject(BreakOffAfter(1), times=None)
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.status_code == 502
    pair.decode.faults.clear()
    await pair.settle()
    assert pair.prefill.num_held_blocks == 0


async def test_pieces_of_any_size_make_the_same_stream(pair: Split) -> None:
    """A D that sends a byte at a time is relayed event by event."""
    expected = _events((await pair.client.post("/v1/completions", json=_body(stream=True))).text)
    pair.decode.faults.inject(Slow())
    slow = _events((await pair.client.post("/v1/completions", json=_body(stream=True))).text)
    assert _streamed_text(slow) == _streamed_text(expected)
    assert len(slow) == len(expected)


async def test_without_a_decode_engine_the_client_is_told_to_come_back(pair: Split) -> None:
    """503, a reason and Retry-After; the health endpoint says the same."""
    pair.decode.die()
    first = await pair.client.post("/v1/completions", json=_body())
    assert first.status_code in {502, 503}
    async with asyncio.timeout(10):
        while (await pair.client.get("/health")).status_code != 503:
            await pair.gateway.pool.changed.wait()
            pair.gateway.pool.changed.clear()
    response = await pair.client.post("/v1/completions", json=_body())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_engine"
    assert response.headers["retry-after"] == "1"


# The client leaves


@pytest.mark.parametrize("path", _PATHS)
async def test_a_client_that_leaves_its_stream_stops_d(path: str) -> None:
    """D sees its client gone and frees everything."""
    settings = EngineSettings(model=MODEL, max_model_len=2048, timing=Timing(decode_step_s=0.01))
    async with split(settings=settings) as deployment:
        body = _body(path, stream=True, max_tokens=1000, ignore_eos=True)
        async with deployment.client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_bytes():
                break
        await deployment.settle()
        assert _last(deployment).status == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_client_that_leaves_while_an_engine_is_silent_stops_it(pair: Split, side: str) -> None:
    """Both legs end with the request, wherever it is."""
    engine = pair.prefill if side == "prefill" else pair.decode
    num_seen = len(engine.requests)
    engine.faults.inject(NeverAnswer())
    sending = asyncio.create_task(pair.client.post("/v1/completions", json=_body()))
    async with asyncio.timeout(10):
        while len(engine.requests) == num_seen:  # noqa: ASYNC110 - the stand-in's list gives no event
            await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    async with asyncio.timeout(10):
        while pair.gateway.journal.num_requests == 0:  # noqa: ASYNC110 - the journal gives no event
            await asyncio.sleep(0)
    assert _last(pair).status is None


# The rest of the client's side


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nope", None, 404, "not_found"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("POST", "/v1/completions", b"{", 400, "malformed_json"),
        ("POST", "/v1/completions", b"[]", 400, "malformed_json"),
        ("POST", "/v1/completions", b"{}", 400, "invalid_field"),
        ("POST", "/v1/chat/completions", b'{"prompt":"p"}', 400, "invalid_field"),
    ],
)
async def test_what_no_engine_should_see_is_refused_here(
    pair: Split, method: str, path: str, content: bytes | None, status: int, code: str
) -> None:
    """An OpenAI error body with a reason, also as a header."""
    response = await pair.client.request(method, path, content=content)
    assert response.status_code == status
    assert response.json()["error"]["code"] == response.headers["x-pdserve-reason"] == code


async def test_models_and_healthcheck(pair: Split) -> None:
    """The model list is D's own; the health check is what scripts for the toy proxy look for."""
    assert (await pair.client.get("/v1/models")).json()["data"][0]["id"] == MODEL
    healthcheck = (await pair.client.get("/healthcheck")).json()
    assert healthcheck == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
    assert (await pair.client.get("/health")).json() == {"status": "ok", "split": "proven"}


async def test_the_operator_sees_engines_pairs_and_requests(pair: Split) -> None:
    """All of it on a listener of its own; nothing of prompts or answers."""
    response = await pair.client.post("/v1/completions", json=_body(prompt="a secret"))
    admin = pair.gateway.admin.url
    status = (await pair.client.get(f"{admin}/status")).json()
    assert [(engine["name"], engine["state"]) for engine in status["engines"]] == [
        ("prefill-0", "ready"),
        ("decode-0", "ready"),
    ]
    assert status["pairs"][0]["state"] == "proven"
    assert status["num_by_place"]["remote"] == 1
    request_id = response.headers["x-pdserve-request-id"]
    record = (await pair.client.get(f"{admin}/requests/{request_id}")).json()
    assert record["handoff"]["remote_port"] > 0
    assert (await pair.client.get(f"{admin}/requests?last=5")).json() == [record]
    assert "secret" not in json.dumps(record)
    assert (await pair.client.get(f"{admin}/requests/unknown")).status_code == 404
    assert (await pair.client.get(f"{admin}/requests?last=x")).status_code == 400
    assert (await pair.client.get(f"{pair.gateway.client.url}/status")).status_code == 404


async def test_a_stop_lets_open_streams_end() -> None:
    """Leaving the gateway waits for what is under way, up to its limit."""
    settings = EngineSettings(model=MODEL, timing=Timing(decode_step_s=0.01))
    async with split(settings=settings) as deployment:
        body = _body(stream=True, max_tokens=40)
        async with deployment.client.stream("POST", "/v1/completions", json=body) as response:
            stopping = asyncio.create_task(deployment.gateway.client.stop())
            text = "".join([piece async for piece in response.aiter_text()])
            await stopping
        assert _events(text)[-1] == "[DONE]"


# Stopping


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_that_runs_out_of_time_says_so(stream: bool) -> None:  # noqa: FBT001
    """A whole answer becomes 503, a stream ends with an error and no `[DONE]`; nobody is just hung up on."""
    settings = EngineSettings(model=MODEL, max_model_len=2048, num_blocks=512, timing=Timing(decode_step_s=0.05))
    async with split(settings=settings, timeouts=TIMEOUTS.__class__(shutdown=1.0)) as deployment:
        body = _body(stream=stream, max_tokens=1000, ignore_eos=True)
        asking = asyncio.create_task(deployment.client.post("/v1/completions", json=body))
        await deployment.decode.engine.until(lambda: deployment.decode.engine.is_busy)
        await deployment.gateway.client.stop()
        response = await asking
        if stream:
            *_, last = _events(response.text)
            assert json.loads(last)["error"]["code"] == "shutting_down"
        else:
            assert (response.status_code, response.headers["x-pdserve-reason"]) == (503, "shutting_down")
            assert "retry-after" in response.headers
        await deployment.settle()


async def test_a_stop_waits_for_what_is_open_and_for_what_is_queued() -> None:
    """No request is lost: they end as if nothing were, and new ones are not taken."""
    settings = EngineSettings(model=MODEL, max_model_len=2048, num_blocks=512, timing=Timing(decode_step_s=0.02))
    config = Config(admission=AdmissionConfig(max_concurrent=2))
    async with split(settings=settings, config=config) as deployment:
        asking = [asyncio.create_task(deployment.client.post("/v1/completions", json=_body())) for _ in range(6)]
        proxy = deployment.gateway.proxy
        async with asyncio.timeout(10):
            while proxy.admission.num_running + proxy.admission.num_queued < 6:  # noqa: ASYNC110 - numbers without an event
                await asyncio.sleep(0.01)
        assert proxy.admission.num_queued == 4
        await deployment.gateway.client.stop()
        responses = await asyncio.gather(*asking)
        assert [response.status_code for response in responses] == [200] * 6
        await deployment.settle()
