"""What the gateway relies on in vLLM, and no more: the same tests on the stand-in and on the real thing."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import pytest

from contract.asking import CHAT, COMPLETIONS, PREFILL, SOON_S, TOLD, body_for, hand_off, release

if TYPE_CHECKING:
    from contract.asking import Engine

_BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


async def test_an_engine_that_is_up(prefill: Engine, decode: Engine) -> None:
    """Both answer /health, name their model, and have the metrics that prove a handoff."""
    for engine in (prefill, decode):
        assert (await engine.client.get("/health")).status_code == 200
        models = (await engine.client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [engine.model]
        text = (await engine.client.get("/metrics")).text
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            labels = f'engine="0",model_name="{engine.model}",source="{source}"'
            assert f"vllm:prompt_tokens_by_source_total{{{labels}}}" in text
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
            *("nixl_xfer_time_seconds_count", "nixl_xfer_time_seconds_sum", "nixl_bytes_transferred_sum"),
            *("nixl_num_failed_transfers_total", "nixl_num_kv_expired_reqs_total"),
            "nixl_num_notifications_after_expiry_total",
        ):
            assert f"vllm:{name}{{" in text


@_BOTH
async def test_p_answers_with_a_handoff(prefill: Engine, decode: Engine, path: str) -> None:
    """A P leg is one whole JSON answer whose handoff has every key that D needs, and the request id in its own."""
    request_id = f"leg-{uuid.uuid4().hex}"
    leg = body_for(path, prefill.model, max_tokens=1, kv_transfer_params=PREFILL)
    answer = await prefill.answer(path, leg, request_id=request_id)
    handoff = answer["kv_transfer_params"]
    assert (handoff["do_remote_prefill"], handoff["do_remote_decode"]) == (True, False)
    assert handoff["transfer_mode"] == "pull"
    assert (handoff["tp_size"], handoff["remote_blocks_expiry_time"]) == (1, None)
    assert isinstance(handoff["remote_engine_id"], str)
    assert isinstance(handoff["remote_host"], str)
    assert isinstance(handoff["remote_port"], int)
    (block_ids,) = handoff["remote_block_ids"]
    assert all(isinstance(block_id, int) for block_id in block_ids)
    assert handoff["remote_num_tokens"] == answer["usage"]["prompt_tokens"]
    assert handoff[TOLD] == 0
    assert request_id in handoff["remote_request_id"]
    assert answer["id"].endswith(request_id)
    assert answer["usage"]["completion_tokens"] == 1
    await release(decode, handoff)


async def test_p_keeps_the_blocks_until_they_are_released(prefill: Engine, decode: Engine) -> None:
    """After a P leg the blocks are in use; a refused D leg frees them, long before the lease would."""
    for _ in range(3):
        started_s = time.monotonic()
        num_expired = await prefill.metric("nixl_num_kv_expired_reqs_total")
        handoff = await hand_off(prefill, COMPLETIONS, body_for(COMPLETIONS, prefill.model))
        usage = await prefill.metric("kv_cache_usage_perc")
        status = (await release(decode, handoff)).status_code
        await prefill.until_metric("kv_cache_usage_perc", 0)
        if time.monotonic() - started_s > SOON_S:
            continue  # Two engines on two cores can stand still for a whole lease; that attempt tells nothing.
        assert usage > 0
        assert status == 404
        assert await prefill.metric("nixl_num_kv_expired_reqs_total") == num_expired
        return
    pytest.fail("three times the engines took longer than half a lease")


@_BOTH
async def test_d_reports_what_it_did_not_compute(prefill: Engine, decode: Engine, path: str) -> None:
    """With the handoff, less the number that P told, D's cached tokens are the whole prompt, and its counter says so too."""
    body = body_for(path, decode.model)
    handoff = await hand_off(prefill, path, body)
    del handoff[TOLD]
    external, local = await decode.source("external_kv_transfer"), await decode.source("local_compute")
    num_transfers = await decode.metric("nixl_xfer_time_seconds_count")
    answer = await decode.answer(path, {**body, "kv_transfer_params": handoff})
    num_tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens == handoff["remote_num_tokens"]
    assert answer["usage"]["completion_tokens"] == 4
    await decode.until_metric("prompt_tokens_by_source_total", external + num_tokens, source="external_kv_transfer")
    assert await decode.source("local_compute") == local
    await decode.until_metric("nixl_xfer_time_seconds_count", num_transfers + 1)
    await prefill.until_metric("kv_cache_usage_perc", 0)


@_BOTH
async def test_a_streams_usage_proves_the_same(prefill: Engine, decode: Engine, path: str) -> None:
    """The last event before [DONE] has the usage, no choices, and D's own number."""
    body = body_for(path, decode.model, stream_options={"include_usage": True})
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    handoff = await hand_off(prefill, path, plain)
    del handoff[TOLD]
    events = await decode.events(path, {**body, "kv_transfer_params": handoff})
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] == handoff["remote_num_tokens"]
    assert usage["completion_tokens"] == 4


async def test_the_number_that_p_told_hides_ds_own(prefill: Engine, decode: Engine) -> None:
    """With the number in the handoff D repeats it: the client sees P's cache hits, and nobody sees a proof."""
    body = body_for(COMPLETIONS, decode.model)
    handoff = await hand_off(prefill, COMPLETIONS, body)
    answer = await decode.answer(COMPLETIONS, {**body, "kv_transfer_params": {**handoff, TOLD: 3}})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@_BOTH
async def test_d_alone_computes_the_prompt(decode: Engine, path: str) -> None:
    """Without a handoff D answers in the same way; only its numbers differ."""
    local, external = await decode.source("local_compute"), await decode.source("external_kv_transfer")
    answer = await decode.answer(path, body_for(path, decode.model))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["kv_transfer_params"] is None
    num_tokens = answer["usage"]["prompt_tokens"]
    await decode.until_metric("prompt_tokens_by_source_total", local + num_tokens, source="local_compute")
    assert await decode.source("external_kv_transfer") == external


async def test_a_completions_answer(decode: Engine) -> None:
    """Whole and streamed completions say the same, in the places where clients look."""
    body = body_for(COMPLETIONS, decode.model)
    whole = await decode.answer(COMPLETIONS, body)
    (choice,) = whole["choices"]
    assert (whole["object"], whole["model"], choice["index"]) == ("text_completion", decode.model, 0)
    assert choice["finish_reason"] == "length"
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    events = await decode.events(COMPLETIONS, body)
    assert all(event["object"] == "text_completion" and "usage" not in event for event in events)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


async def test_a_chat_answer(decode: Engine) -> None:
    """The same for chat; its stream opens with the role."""
    body = body_for(CHAT, decode.model)
    whole = await decode.answer(CHAT, body)
    (choice,) = whole["choices"]
    assert (whole["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    events = await decode.events(CHAT, body)
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == choice["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"


@_BOTH
async def test_an_unknown_model_is_not_found(decode: Engine, path: str) -> None:
    """404 before anything else, streamed or not, and an error object."""
    for stream in (False, True):
        response = await decode.post(path, body_for(path, "nobody-serves-this", stream=stream))
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (404, "NotFoundError", 404)


@_BOTH
async def test_min_tokens_above_the_limit_is_refused(prefill: Engine, path: str) -> None:
    """Why the gateway drops min_tokens from a P leg."""
    response = await prefill.post(
        path, body_for(path, prefill.model, max_tokens=1, min_tokens=4, kv_transfer_params=PREFILL)
    )
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "BadRequestError", 400)


async def test_stream_options_without_a_stream_are_refused(prefill: Engine) -> None:
    """Why the gateway drops stream_options from a P leg."""
    body = body_for(COMPLETIONS, prefill.model, stream_options={"include_usage": True})
    assert (await prefill.post(COMPLETIONS, body)).status_code == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": "a", "max_tokens": "many"}'])
async def test_an_error_has_abody_for(decode: Engine, body: bytes) -> None:
    """What is no request gets 400 and an error object with four fields."""
    response = await decode.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400


async def test_a_client_that_leaves_frees_ds_blocks(prefill: Engine, decode: Engine) -> None:
    """In the middle of a stream: the request ends, on D with its blocks, on P they were free before."""
    body = body_for(COMPLETIONS, decode.model, max_tokens=1000, stream=True)
    handoff = await hand_off(prefill, COMPLETIONS, body)
    async with decode.client.stream("POST", COMPLETIONS, json={**body, "kv_transfer_params": handoff}) as response:
        pieces = response.aiter_bytes()
        await anext(pieces)
        assert await decode.metric("kv_cache_usage_perc") > 0
    await decode.until_metric("kv_cache_usage_perc", 0)
    await decode.until_metric("num_requests_running", 0)
    await prefill.until_metric("kv_cache_usage_perc", 0)


async def test_a_transfer_that_fails_is_an_error(prefill: Engine, decode: Engine) -> None:
    """P's side channel does not answer: 500 for a whole answer, an event in a stream whose 200 is out; D lives on."""
    body = body_for(COMPLETIONS, decode.model)
    handoff = await hand_off(prefill, COMPLETIONS, body)
    await release(decode, handoff)
    nobody = {**handoff, "remote_engine_id": str(uuid.uuid4()), "remote_port": 9}
    whole = await decode.post(COMPLETIONS, {**body, "kv_transfer_params": nobody})
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "InternalServerError")
    (event,) = await decode.events(COMPLETIONS, {**body, "kv_transfer_params": nobody})
    assert event["error"]["code"] == 500
    assert (await decode.client.get("/health")).status_code == 200
    await prefill.until_metric("kv_cache_usage_perc", 0)


async def test_params_without_a_flag_are_ignored(prefill: Engine, decode: Engine) -> None:
    """A handoff that does not say do_remote_prefill is no handoff: D computes alone, without a word."""
    body = body_for(COMPLETIONS, decode.model)
    handoff = await hand_off(prefill, COMPLETIONS, body)
    lost = {**handoff, "do_remote_prefill": False}
    answer = await decode.answer(COMPLETIONS, {**body, "kv_transfer_params": lost})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await release(decode, handoff)
    await prefill.until_metric("kv_cache_usage_perc", 0)
