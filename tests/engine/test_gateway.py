"""The gateway in front of real vLLM: what a client gets, and what moved for it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from counters import is_idle, until
from pdserve.core import PrefillPlace, Role
from pdserve.engine.admin_client import AdminClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from deployment import RealPair
    from pdserve.protocol.admin import RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

_WATCHED_S = 3.0
_PROMPT = "Explain the request flow between Prefill and Decode in PD disaggregation."


@pytest.fixture
async def client(real_pair: RealPair) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with httpx.AsyncClient(base_url=real_pair.gateway_url, timeout=120) as client:
        yield client


async def _record(pair: RealPair, response: httpx.Response) -> RequestRecord:
    admin = AdminClient(pair.admin_url)
    try:
        return await admin.request(response.headers["x-pdserve-request-id"])
    finally:
        admin.close()


async def _until_in_flight(pair: RealPair, name: str) -> None:
    """vLLM counts a request as running only after its first step, which for a prefill is its last; the gateway knows."""
    admin = AdminClient(pair.admin_url)
    try:
        async with asyncio.timeout(20):
            while not await _is_in_flight(admin, name):  # noqa: ASYNC110 - another process, which gives no event
                await asyncio.sleep(0.02)
    finally:
        admin.close()


async def _is_in_flight(admin: AdminClient, name: str) -> bool:
    status = await admin.status()
    return any(info.name == name and info.num_in_flight for info in status.engines)


def _completion(pair: RealPair, **fields: Any) -> dict[str, Any]:
    return {"model": pair.model, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0, **fields}


def _chat(pair: RealPair, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": pair.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


async def test_a_completion_is_prefilled_remotely(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """The answer is whole, hides the connector, and D's own count says that it computed nothing of the prompt."""
    response = await client.post("/v1/completions", json=_completion(real_pair))
    body = response.json()
    assert response.status_code == 200
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert body["kv_transfer_params"] is None
    assert response.headers["x-pdserve-prefill"] == "remote"
    record = await _record(real_pair, response)
    assert record.place is PrefillPlace.REMOTE
    assert record.num_remote_tokens == record.num_prompt_tokens == body["usage"]["prompt_tokens"]


async def test_a_chat_is_prefilled_remotely(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """The template gives both engines the same prompt."""
    response = await client.post("/v1/chat/completions", json=_chat(real_pair, max_completion_tokens=6))
    assert response.json()["usage"]["completion_tokens"] == 6
    assert (await _record(real_pair, response)).place is PrefillPlace.REMOTE


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_equals_its_whole_answer(
    real_pair: RealPair,
    client: httpx.AsyncClient,
    path: str,
    wants_usage: bool,  # noqa: FBT001
) -> None:
    """Token by token the same text; usage comes to those who asked, and the evidence is taken either way."""
    make = _completion if path == "/v1/completions" else _chat
    whole = (await client.post(path, json=make(real_pair))).json()
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    response = await client.post(path, json=make(real_pair, stream=True, **options))
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path == "/v1/completions":
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    else:
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert [usage["completion_tokens"] for usage in usages] == ([8] if wants_usage else [])
    assert (await _record(real_pair, response)).place is PrefillPlace.REMOTE


async def test_what_cannot_be_split_goes_to_d_alone(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """No handoff stands for an echo: it is answered whole, and the record says by whose decision."""
    response = await client.post("/v1/completions", json=_completion(real_pair, echo=True))
    assert response.json()["choices"][0]["text"]
    assert response.headers["x-pdserve-prefill"] == "alone"
    assert "prompt_echo" in (await _record(real_pair, response)).cause


async def test_a_list_of_prompts_has_a_handoff_for_each(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """One answer, two choices, and a proof for both."""
    prompts = ["One two three four", "Five six seven eight"]
    response = await client.post("/v1/completions", json=_completion(real_pair, prompt=prompts))
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]
    assert response.headers["x-pdserve-prefill"] == "remote"
    assert len((await _record(real_pair, response)).parts) == 2


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_decode": True}, {"remote_block_ids": [[]]}, "x", 3]
)
async def test_a_clients_own_handoff_is_dropped(real_pair: RealPair, client: httpx.AsyncClient, params: object) -> None:
    """Sent to an engine, the first of these ends its EngineCore for good."""
    response = await client.post("/v1/completions", json=_completion(real_pair, kv_transfer_params=params))
    assert response.status_code == 200
    assert (await _record(real_pair, response)).place is PrefillPlace.REMOTE


async def test_an_engines_own_error_reaches_the_client(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """An unknown model is P's 404, told as vLLM tells it."""
    response = await client.post("/v1/completions", json=_completion(real_pair, model="nope"))
    assert response.status_code == 404
    assert "nope" in response.json()["error"]["message"]
    assert response.headers["x-pdserve-reason"] == "engine_status"


async def test_a_limit_that_only_d_can_check_frees_p(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """P computed the prompt, D refused the request: nothing stays held on P."""
    response = await client.post("/v1/completions", json=_completion(real_pair, max_tokens=1_000_000))
    assert response.status_code == 400
    await until(real_pair.prefill_url, is_idle)


async def test_a_client_that_leaves_its_stream_frees_both_engines(
    real_pair: RealPair, client: httpx.AsyncClient
) -> None:
    """Both engines are idle again long before any lease ends."""
    body = _completion(real_pair, stream=True, max_tokens=1000, ignore_eos=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            break
    await until(real_pair.decode_url, is_idle)
    await until(real_pair.prefill_url, is_idle)


async def test_a_client_that_leaves_during_prefill_frees_p(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """P aborts what nobody waits for."""
    body = _completion(real_pair, prompt=" ".join(f"{n} bottles of beer on the wall," for n in range(150)))
    sending = asyncio.create_task(client.post("/v1/completions", json=body))
    await _until_in_flight(real_pair, "prefill-0")
    sending.cancel()
    await asyncio.wait([sending])
    await until(real_pair.prefill_url, is_idle)
    await until(real_pair.decode_url, is_idle)


async def test_many_at_once_all_move(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """Requests side by side do not get each other's KV."""
    prompts = [f"My number is {n}. My number is" for n in range(100, 112)]
    alone = [
        (await client.post(f"{real_pair.decode_url}/v1/completions", json=_completion(real_pair, prompt=prompt))).json()
        for prompt in prompts
    ]
    responses = await asyncio.gather(
        *(client.post("/v1/completions", json=_completion(real_pair, prompt=prompt)) for prompt in prompts)
    )
    assert {response.headers["x-pdserve-prefill"] for response in responses} == {"remote"}
    first_words = [response.json()["choices"][0]["text"].split()[:1] for response in responses]
    assert first_words == [body["choices"][0]["text"].split()[:1] for body in alone]


async def test_an_idle_pair_leaves_the_machine_alone(real_pair: RealPair) -> None:
    """NIXL's progress thread takes a core for each engine unless it may sleep (pdserve/vllm_plugin.py)."""
    engines = [
        process
        for process in psutil.Process(real_pair.process.pid).children(recursive=True)
        if "vllm.entrypoints" in " ".join(process.cmdline()) or process.name().startswith("VLLM")
    ]
    assert len(engines) >= len(Role)
    before_s = _cpu_s(engines)
    await asyncio.sleep(_WATCHED_S)
    assert _cpu_s(engines) - before_s < _WATCHED_S / 2


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


async def test_models_and_health(real_pair: RealPair, client: httpx.AsyncClient) -> None:
    """What D serves, that KV is proven to move, and what scripts written for the toy proxy look for."""
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [real_pair.model]
    assert (await client.get("/health")).json() == {"status": "ok", "split": "proven"}
    healthcheck = (await client.get("/healthcheck")).json()
    assert healthcheck == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
