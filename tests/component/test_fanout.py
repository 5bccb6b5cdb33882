"""Requests with many choices and prompts through P/D: the client sees what one engine without P/D answers."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.sim.faults import BreakOffAfter, ErrorStatus
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.sim.stand_in import run_stand_in
from split import MODEL, SETTINGS, TIMEOUTS, Split, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from pdserve.sim.stand_in import StandIn

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_PROMPT = "the quick brown fox jumps over the lazy dog and then once more over the same dog"
_MESSAGES = [{"role": "user", "content": _PROMPT}]
_SPREAD = [_PROMPT, "one two three", "", "the same dog " * 20]
_IDS = [[300, 301, 302, 400], [500] * 40]


@dataclass(frozen=True)
class _Deployment:
    """1P2D behind the gateway, and one engine alone."""

    split: Split
    plain: StandIn

    async def both(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        """The gateway's answer, and that of the engine alone."""
        through = await self.split.client.post(path, json=body)
        return through, await self.split.client.post(self.plain.url + path, json=body)

    @property
    def num_prefills(self) -> int:
        """Requests that P has seen."""
        return len(self.split.prefill.requests)


@pytest.fixture
async def deployment() -> AsyncIterator[_Deployment]:
    """Everybody ready."""
    async with split(num_decode=2) as pair, run_stand_in("none", SETTINGS) as plain:
        yield _Deployment(pair, plain)


def _body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": _MESSAGES} if path == _CHAT else {"prompt": _PROMPT}
    return {"model": MODEL, **prompt, "max_tokens": 6, **fields}


_SHAPES: dict[str, list[tuple[dict[str, Any], int]]] = {
    _COMPLETIONS: [
        ({"n": 3, "seed": 5}, 3),
        ({"n": 4, "seed": -9, "temperature": 0.3}, 4),
        ({"n": 2, "seed": 5, "logprobs": 2, "return_token_ids": True}, 2),
        ({"n": 2, "best_of": 7, "stop": [" dog", " x"], "seed": 1}, 2),
        ({"prompt": _SPREAD[:2], "temperature": 0}, 2),
        ({"prompt": _SPREAD[:2], "n": 3, "seed": 2**40}, 6),
        ({"prompt": _IDS, "temperature": 0, "logprobs": 0}, 2),
        ({"prompt": _IDS, "n": 2, "seed": 0, "return_token_ids": True}, 4),
        ({"prompt": [_PROMPT], "n": 2, "seed": 3}, 2),
        ({"prompt": _IDS[0], "n": 2, "seed": 3}, 2),
        ({"prompt": _SPREAD[:2] * 24, "temperature": 0, "max_tokens": 2}, 48),
    ],
    _CHAT: [
        ({"n": 3, "seed": 5}, 3),
        ({"n": 2, "seed": 8, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}, 2),
        ({"n": 2, "seed": 8, "max_tokens": None, "max_completion_tokens": 3, "min_tokens": 2, "stop": "fox"}, 2),
    ],
}
"""Fields, and the parts that they come to."""
_WHOLE: list[tuple[str, dict[str, Any]]] = [
    (_COMPLETIONS, {"n": 2, "temperature": 0}),
    (_CHAT, {"n": 2, "temperature": 0}),
    (_COMPLETIONS, {"n": 0}),
    (_CHAT, {"n": -1}),
    (_COMPLETIONS, {"n": 2, "temperature": -1}),
    (_COMPLETIONS, {"n": "2", "seed": 5}),
    (_COMPLETIONS, {"n": 2, "seed": "5"}),
    (_COMPLETIONS, {"n": 2, "echo": True, "seed": 5}),
    (_COMPLETIONS, {"prompt": _SPREAD[:2], "echo": True, "temperature": 0}),
    (_COMPLETIONS, {"prompt": ["one"] * 129, "temperature": 0, "max_tokens": 1}),
]
"""What is not taken apart."""


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
async def test_a_whole_answer_is_one_engines(deployment: _Deployment, path: str) -> None:
    """Equal but for ids, times and where the prompt was cached; every part went through P and D."""
    for fields, num_parts in _SHAPES[path]:
        num_before = deployment.num_prefills
        through, plain = await deployment.both(path, _body(path, **fields))
        assert (plain.status_code, through.status_code) == (200, 200), (fields, through.text)
        assert _comparable(through.json()) == _comparable(plain.json()), fields
        assert list(through.json()) == list(plain.json())
        assert deployment.num_prefills == num_before + num_parts
        assert through.headers["x-pdserve-prefill"] == "remote"
        request_id = through.headers["x-pdserve-request-id"]
        assert through.json()["id"] == _answer_id(path, through)
        assert through.headers["server-timing"].startswith("queue;dur=")
        whole, *records = deployment.split.gateway.journal.last(num_parts + 1)
        assert whole.request_id == request_id
        assert sorted(whole.parts) == sorted(record.request_id for record in records)
        assert set(whole.parts) == {f"{request_id}-{index}" for index in range(num_parts)}
        assert {record.place for record in (whole, *records)} == {"remote"}
        assert whole.num_output_tokens == through.json()["usage"]["completion_tokens"]
    await deployment.split.settle()
    assert deployment.split.prefill.num_held_blocks == 0


def _answer_id(path: str, answer: httpx.Response) -> str:
    return f"{'chatcmpl' if path == _CHAT else 'cmpl'}-{answer.headers['x-pdserve-request-id']}"


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what may differ. Details of the cache depend on which choice came first, on one engine too."""
    usage = dict(answer.get("usage") or {})
    details = usage.pop("prompt_tokens_details", None)
    return {
        **answer,
        "id": "",
        "created": 0,
        "kv_transfer_params": None,
        "usage": usage,
        "has_details": details is not None,
    }


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
async def test_a_stream_is_one_engines(deployment: _Deployment, path: str, options: dict[str, Any] | None) -> None:
    """Each choice's events are equal and in order; roles come first, usage comes last, then one end."""
    for fields, num_parts in _SHAPES[path]:
        num_before = deployment.num_prefills
        body = _body(path, **fields, stream=True, stream_options=options)
        through, plain = await deployment.both(path, body)
        assert (plain.status_code, through.status_code) == (200, 200), (fields, through.text)
        assert through.headers["content-type"] == plain.headers["content-type"]
        ours, theirs = _events(through.text), _events(plain.text)
        assert _by_choice(ours) == _by_choice(theirs), fields
        assert len(_by_choice(ours)) == num_parts + (1 if options else 0)
        if path == _CHAT:
            assert [_opened(event) for event in ours[:num_parts]] == list(range(num_parts))
        if options:
            assert ours[-1]["choices"] == theirs[-1]["choices"] == []
        assert {event["id"] for event in ours} == {_answer_id(path, through)}
        assert len({event["created"] for event in ours}) == 1
        assert deployment.num_prefills == num_before + num_parts
    await deployment.split.settle()
    assert deployment.split.prefill.num_held_blocks == 0


def _events(text: str) -> list[dict[str, Any]]:
    """The payloads of a stream that is whole."""
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _by_choice(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Each choice's own events; -1 is what belongs to none."""
    chosen: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        index = event["choices"][0]["index"] if event["choices"] else -1
        chosen.setdefault(index, []).append(_comparable(_without_fingerprint(event)))
    return chosen


def _without_fingerprint(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "system_fingerprint"}


def _opened(event: dict[str, Any]) -> int:
    assert event["choices"][0]["delta"]["role"] == "assistant"
    index: int = event["choices"][0]["index"]
    return index


@pytest.mark.parametrize("stream", [False, True])
async def test_what_stays_whole_is_answered_by_one_engine(deployment: _Deployment, stream: bool) -> None:  # noqa: FBT001
    """Answers and refusals of one engine, word for word; what P refuses or never sees is not held there."""
    for path, fields in _WHOLE:
        through, plain = await deployment.both(path, _body(path, **fields, stream=stream))
        assert through.status_code == plain.status_code, fields
        if plain.status_code != 200:
            assert through.json() == plain.json()
        elif stream:
            assert _by_choice(_events(through.text)) == _by_choice(_events(plain.text))
        else:
            assert _comparable(through.json()) == _comparable(plain.json())
    assert deployment.num_prefills == 2  # One proof of each pair.
    await deployment.split.settle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "another", "n": 2},
        {"n": 2, "top_p": 3},
        {"prompt": [_PROMPT, "word " * 3000], "temperature": 0},
        {"prompt": [[300] * 99, [10**6]], "temperature": 0},
        {"n": 2, "max_tokens": 0},
    ],
)
async def test_what_one_part_is_refused_for_is_the_answer(
    fields: dict[str, Any],
    stream: bool,  # noqa: FBT001
) -> None:
    """The engine's own refusal, once, as one engine would have told it; the other parts are gone from the engines."""
    # P refuses at once and computes for a while, so that the other part's answer is not on its way by then.
    settings = EngineSettings(model=MODEL, max_model_len=2048, timing=Timing(prefill_token_s=0.002))
    async with split(settings=settings) as pair, run_stand_in("none", settings) as plain:
        through, expected = await _Deployment(pair, plain).both(
            _COMPLETIONS, _body(_COMPLETIONS, **fields, stream=stream)
        )
        assert expected.status_code in {400, 404}
        assert (through.status_code, through.json()) == (expected.status_code, expected.json())
        await pair.settle()
        assert pair.prefill.num_held_blocks == 0


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
async def test_a_part_that_breaks_off_ends_the_stream(deployment: _Deployment, path: str) -> None:
    """The client is told of it, there is no `[DONE]`, and the other parts are gone from the engines."""
    for decode in deployment.split.decodes:
        decode.faults.inject(BreakOffAfter(4), times=1)
    response = await deployment.split.client.post(
        path, json=_body(path, n=4, max_tokens=200, stream=True, ignore_eos=True)
    )
    *_, last, empty = response.text.split("\n\n")
    assert (response.status_code, empty) == (200, "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_broke_off"
    await deployment.split.settle()
    assert deployment.split.prefill.num_held_blocks == 0


async def test_a_part_that_fails_is_tried_again(deployment: _Deployment) -> None:
    """Before its first byte a part may go to another D, as any request may; the client sees nothing of it."""
    deployment.split.decodes[0].faults.inject(ErrorStatus(500), times=1)
    body = _body(_COMPLETIONS, n=3, seed=5)
    through, plain = await deployment.both(_COMPLETIONS, body)
    assert through.status_code == 200, through.text
    assert _comparable(through.json()) == _comparable(plain.json())
    await deployment.split.settle()
    assert deployment.split.prefill.num_held_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
async def test_a_client_that_leaves_takes_all_parts_with_it(path: str, stream: bool) -> None:  # noqa: FBT001
    """No engine goes on with any part of it, and no block stays held."""
    settings = EngineSettings(model=MODEL, timing=Timing(decode_step_s=0.01))
    async with split(num_decode=2, settings=settings) as deployment:
        body = _body(path, n=6, max_tokens=3000, stream=stream, ignore_eos=True)
        asking = asyncio.create_task(_read(deployment, path, body))
        async with asyncio.timeout(10):
            for decode in deployment.decodes:
                await decode.engine.until(partial(_runs, decode, 3))
        asking.cancel()
        await asyncio.wait([asking])
        await deployment.settle()
        assert deployment.prefill.num_held_blocks == 0
        assert deployment.gateway.journal.num_requests == 6


def _runs(engine: StandIn, count: int) -> bool:
    return engine.engine.num_running == count


async def _read(deployment: Split, path: str, body: dict[str, Any]) -> None:
    async with deployment.client.stream("POST", path, json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def test_a_client_that_reads_nothing_is_hung_up_on() -> None:
    """Every part's engine is told to wait, and after a while the request is given up, whole."""
    settings = EngineSettings(model=MODEL, max_model_len=40_000, num_blocks=16_384)
    async with split(num_decode=2, settings=settings, timeouts=TIMEOUTS.__class__(silence=1.5)) as deployment:
        body = json.dumps(
            _body(_COMPLETIONS, n=3, stream=True, max_tokens=30_000, ignore_eos=True, logprobs=5)
        ).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(deployment.gateway.client.url.rpartition(":")[2])))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(30):
                while deployment.gateway.journal.num_requests < 3:  # noqa: ASYNC110 - the journal gives no event
                    await asyncio.sleep(0.02)
        assert "client_stalled" in {record.reason for record in deployment.gateway.journal.last(3)}
        await deployment.settle()
        assert deployment.prefill.num_held_blocks == 0


async def test_an_engine_that_dies_under_its_parts_ends_the_stream() -> None:
    """One error, nothing after it but the end that the engine itself may have told, and the other D is idle again."""
    settings = EngineSettings(model=MODEL, timing=Timing(decode_step_s=0.01))
    async with split(num_decode=2, settings=settings) as deployment:
        body = _body(_COMPLETIONS, n=4, max_tokens=3000, stream=True, ignore_eos=True)
        events: list[str] = []
        async with deployment.client.stream("POST", _COMPLETIONS, json=body) as response:
            async for line in response.aiter_lines():
                events += [line] if line else []
                if line and len(_by_choice([json.loads(event[6:]) for event in events if '"choices"' in event])) == 4:
                    deployment.decodes[0].engine.kill("a test")
        assert sum('"error"' in event for event in events) == 1
        assert '"error"' in [event for event in events if event != "data: [DONE]"][-1]
        async with asyncio.timeout(10):
            await deployment.decodes[1].idle()
            await deployment.prefill.idle()
        assert deployment.prefill.num_held_blocks == 0
