# mypy: ignore-errors
"""The gateway that everybody writes first: FastAPI in front, httpx behind, every body parsed and written anew.

Runs in the peers' virtual environment, whose packages are not pdserve's. `python gateway_toy.py PORT PREFILL_URL DECODE_URL`
"""

from __future__ import annotations

import sys
import uuid
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

_NO_HANDOFF_YET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    """P first, then D with P's handoff."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with (
            httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits) as app.state.prefill,  # noqa: S113
            httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits) as app.state.decode,  # noqa: S113
        ):
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def complete(request: Request):
        asked = await request.json()
        headers = {"x-request-id": str(uuid.uuid4())}
        params = {"do_remote_decode": True, "do_remote_prefill": False, **_NO_HANDOFF_YET}
        leg = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        prefilled = await app.state.prefill.post("/v1/completions", json=leg, headers=headers)
        prefilled.raise_for_status()
        asked["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
        if not asked.get("stream"):
            answer = await app.state.decode.post("/v1/completions", json=asked, headers=headers)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def relay():
            async with app.state.decode.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    yield piece

        return StreamingResponse(relay(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    port, *urls = sys.argv[1:]
    uvicorn.run(make_app(*urls), host="127.0.0.1", port=int(port), log_level="warning")
