"""How contract tests ask an engine, whichever it is: over HTTP, and through its metrics."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOLD = "remote_prefill_cached_tokens"
SOON_S = 15.0
"""Half of the lease: what is free by then was not freed by the lease's end."""
_TIMEOUT_S = 120.0


class Engine:
    """One engine over HTTP."""

    def __init__(self, url: str, model: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S)
        self.model = model

    async def post(self, path: str, body: dict[str, Any], *, request_id: str | None = None) -> httpx.Response:
        headers = {"X-Request-Id": request_id} if request_id else {}
        return await self.client.post(path, json=body, headers=headers)

    async def answer(self, path: str, body: dict[str, Any], *, request_id: str | None = None) -> dict[str, Any]:
        response = await self.post(path, body, request_id=request_id)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A stream's events; it must be one, and end with [DONE]."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        )

    async def until_metric(self, name: str, expected: float, *, timeout_s: float = SOON_S, **labels: str) -> None:
        """vLLM updates its metrics with its steps, and gives no event for them."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.metric(name, **labels) != expected:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{name} {labels} is {await self.metric(name, **labels)} and not {expected}")

    async def source(self, source: str) -> float:
        return await self.metric("prompt_tokens_by_source_total", source=source)


def body_for(path: str, model: str, **fields: Any) -> dict[str, Any]:
    """A request that no prefix cache has seen, and that ends by its limit."""
    text = f"{uuid.uuid4().hex}: explain the way of a request through prefill and decode."
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path in {COMPLETIONS, RESPONSES}:
        prompt = {"prompt" if path == COMPLETIONS else "input": text}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {"model": model, **prompt, limit: 4, "temperature": 0, "ignore_eos": True, **fields}


async def hand_off(prefill: Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A P leg as the gateway sends it; the handoff."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    leg = {**body, limit: 1, "stream": False, "kv_transfer_params": PREFILL}
    handoff: dict[str, Any] = (await prefill.answer(path, leg))["kv_transfer_params"]
    return handoff


async def release(decode: Engine, handoff: dict[str, Any]) -> httpx.Response:
    """The release recipe: a D leg for a model that nobody serves."""
    return await decode.post(COMPLETIONS, {"model": "nobody-serves-this", "prompt": "-", "kv_transfer_params": handoff})
