"""The engines that gateways are measured against: one prefill and one decode engine in one process, as cheap as asyncio allows.

They answer what vLLM 0.32 answers on the wire to completions and to whoever looks after engines, from bytes made beforehand,
and count who was asked what. `pdserve.sim` has the behaviour; this has the speed. Prints its two URLs, then one answer for
each line of JSON on stdin, and ends when stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "m"
NUM_CHUNKS = 64
"""Of every streamed answer."""
CHUNK_BYTES = 180
TEXT = "a" * 200
"""Of every whole answer."""
PREFILL_TEXT = "a"
"""P's one token."""
STAMP_MARK = b'"text":" '
"""Stands before the moment at which a chunk left, in microseconds of CLOCK_MONOTONIC, which all processes share."""
STAMP_DIGITS = 15
DONE = b"data: [DONE]\n\n"

_BACKLOG = 4096
_EDGE_BYTES = 2048
_NUM_PROMPT_TOKENS = 100
_REQUEST_ID = "cmpl-2f6f1c0a7d3"
_HEAD: dict[str, Any] = {"id": _REQUEST_ID, "object": "text_completion", "created": 1790000000, "model": MODEL}
_HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "6d3f6a52-5d0c-4c5e-9a43-0b1f0c7f9a11",
    "remote_request_id": f"{_REQUEST_ID}-0-9d1c7f3a",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": _NUM_PROMPT_TOKENS,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
_METRICS = b"""# HELP vllm:nixl_num_kv_expired_reqs_total Requests whose KV expired.
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 0.0
# HELP vllm:num_requests_running Requests in the engine.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _answer(content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: %b\r\n\r\n"
    return head % (len(body), content_type) + body


def _usage(*, num_generated: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": _NUM_PROMPT_TOKENS,
        "total_tokens": _NUM_PROMPT_TOKENS + num_generated,
        "completion_tokens": num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _whole(text: str, *, num_generated: int, num_cached: int, handoff: object = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = _usage(num_generated=num_generated, num_cached=num_cached)
    body = _HEAD | {"choices": [choice], "usage": usage, "kv_transfer_params": handoff}
    return _answer(b"application/json", _json(body))


def _framed(data: bytes) -> bytes:
    """A chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk_around_stamp() -> tuple[bytes, bytes]:
    """What stands before and after the stamp."""
    choice = {"index": 0, "text": " " + "0" * STAMP_DIGITS, "logprobs": None, "finish_reason": None}
    event = b"data: %b\n\n" % _json(_HEAD | {"choices": [choice]})
    assert len(event) == CHUNK_BYTES
    before, _, after = _framed(event).partition(STAMP_MARK)
    return before + STAMP_MARK, after[STAMP_DIGITS:]


def _usage_event(*, num_cached: int) -> bytes:
    """What a stream says before its end when it was asked for."""
    usage = _usage(num_generated=NUM_CHUNKS, num_cached=num_cached)
    return _framed(b"data: %b\n\n" % _json(_HEAD | {"choices": [], "usage": usage}))


_PREFILLED = _whole(PREFILL_TEXT, num_generated=1, num_cached=0, handoff=_HANDOFF)
_DECODED = _whole(TEXT, num_generated=NUM_CHUNKS, num_cached=_NUM_PROMPT_TOKENS)
_ANSWERED_ALONE = _whole(TEXT, num_generated=NUM_CHUNKS, num_cached=0)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_USAGE_DECODED = _usage_event(num_cached=_NUM_PROMPT_TOKENS)
_USAGE_ALONE = _usage_event(num_cached=0)
_BEFORE_STAMP, _AFTER_STAMP = _chunk_around_stamp()
_STREAM_END = b"0\r\n\r\n"
_LAST_CHUNK = _framed(DONE)
_LOOKED_AT = {
    b"/health": _answer(b"text/plain", b""),
    b"/version": _answer(b"application/json", _json({"version": "0.32.0"})),
    b"/metrics": _answer(b"text/plain; version=0.0.4; charset=utf-8", _METRICS),
    b"/v1/models": _answer(
        b"application/json",
        _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 131072}]}
        ),
    ),
}
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_NOT_FOUND = (
    b'HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n{"detail":"Not Found"}'
)


@dataclass(slots=True)
class Counts:
    """What the two engines were asked since somebody asked for this."""

    num_prefills: int = 0
    """Legs on P that keep their KV."""
    num_other_prefills: int = 0
    num_decodes: int = 0
    """Legs on D with a handoff."""
    num_alone: int = 0
    """Requests to D without one."""
    num_broken_off: int = 0
    """Streams whose reader went away."""


@dataclass(slots=True)
class Bench:
    """What both engines share."""

    counts: Counts
    pace_s: float = 0.01
    """Between two chunks of one stream."""


def _without_prompt(body: bytearray) -> bytearray:
    """A long prompt is one piece, whatever the order of the keys: the rest stands before and after it."""
    return body if len(body) <= 2 * _EDGE_BYTES else body[:_EDGE_BYTES] + body[-_EDGE_BYTES:]


def _says(body: bytearray, key: bytes) -> bool:
    """Whether a key's value is true, in whatever spacing."""
    start = body.find(key)
    return start >= 0 and body[start + len(key) : start + len(key) + 8].lstrip(b": ").startswith(b"true")


class Connection(asyncio.Protocol):
    """One of a gateway's connections to an engine."""

    def __init__(self, bench: Bench, *, decodes: bool) -> None:
        self._bench = bench
        self._answer = self._decode if decodes else self._prefill
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""
        self._transport: asyncio.Transport | None = None
        self._num_left = 0
        self._ending = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            # sglang-router tries HTTP/2 first.
            assert self._transport is not None
            self._transport.write(_BAD_REQUEST)
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        assert self._transport is not None
        body = self._body
        if body:
            self._answer(_without_prompt(body), self._transport.write)
            self._body = bytearray()
        else:
            self._transport.write(_LOOKED_AT.get(self._url, _NOT_FOUND))

    def _prefill(self, body: bytearray, write: Callable[[bytes], None]) -> None:
        if _says(body, b'"do_remote_decode"'):
            self._bench.counts.num_prefills += 1
        else:
            self._bench.counts.num_other_prefills += 1
        write(_PREFILLED)

    def _decode(self, body: bytearray, write: Callable[[bytes], None]) -> None:
        is_split = _says(body, b'"do_remote_prefill"')
        if is_split:
            self._bench.counts.num_decodes += 1
        else:
            self._bench.counts.num_alone += 1
        if not _says(body, b'"stream"'):
            write(_DECODED if is_split else _ANSWERED_ALONE)
            return
        usage = (_USAGE_DECODED if is_split else _USAGE_ALONE) if _says(body, b'"include_usage"') else b""
        self._ending = usage + _LAST_CHUNK + _STREAM_END
        self._num_left = NUM_CHUNKS
        write(_STREAM_HEAD)
        self._write_chunk()

    def _write_chunk(self) -> None:
        if self._transport is None:
            self._bench.counts.num_broken_off += 1
            return
        if not self._num_left:
            self._transport.write(self._ending)
            return
        self._num_left -= 1
        asyncio.get_running_loop().call_later(self._bench.pace_s, self._write_chunk)
        stamp = b"%0*d" % (STAMP_DIGITS, time.monotonic_ns() // 1000)
        self._transport.write(_BEFORE_STAMP + stamp + _AFTER_STAMP)


async def serve() -> None:
    """Until stdin ends."""
    loop = asyncio.get_running_loop()
    bench = Bench(Counts())
    urls = {}
    for role in ("prefill", "decode"):
        make = partial(Connection, bench, decodes=role == "decode")
        server = await loop.create_server(make, "127.0.0.1", 0, backlog=_BACKLOG)
        urls[role] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    _tell(urls)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        bench.pace_s = json.loads(line)["pace_s"]
        _tell(asdict(bench.counts))
        bench.counts = Counts()


def _tell(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, nargs="+", required=True, help="where to run")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    gc.disable()  # Nothing here makes cycles, and a pause would be taken for a gateway's.
    uvloop.run(serve())


if __name__ == "__main__":
    main()
