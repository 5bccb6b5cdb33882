"""Requests in parts against vLLM's own serving code: the merged answer is byte for byte what vLLM makes of the whole."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.protocol.api import Api
from pdserve.protocol.fields import join
from pdserve.protocol.openai import split_request
from pdserve.protocol.parts import Parts, StreamMerge, merge_answers, take_apart

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

_NUM_CASES = 150
_PROGRAM = Path(__file__).with_name("vllm_serving.py")


@dataclass(frozen=True)
class _Case:
    """One request, and what the engine put out for it, in order: the index of the choice and its piece."""

    api: Api
    body: dict[str, Any]
    parts: Parts
    prompts: list[list[int]]
    pieces: list[tuple[int, dict[str, Any]]]
    num_cached: list[int]

    @property
    def is_stream(self) -> bool:
        return bool(self.body["stream"])

    def whole_job(self) -> dict[str, Any]:
        """As one engine sees it."""
        n = self.parts.num_choices
        if self.is_stream:
            results = [self._result(index // n, index, [{**piece, "index": index % n}]) for index, piece in self.pieces]
        else:
            # A prompt's answer is told when its last choice has ended; what it says of the cache is that one's.
            results = [
                self._result(at, at * n + n - 1, [{**self._final(at * n + j), "index": j} for j in range(n)])
                for at in range(len(self.prompts))
            ]
        return {"id": self._id("R"), "body": self.body, "prompts": self.prompts, "results": results}

    def part_job(self, index: int) -> dict[str, Any]:
        """As the engine sees that answers one part."""
        own = [piece for at, piece in self.pieces if at == index] if self.is_stream else [self._final(index)]
        return {
            "id": self._id(f"R-{index}"),
            "body": json.loads(join(self.parts.requests[index])),
            "prompts": [self.prompts[index // self.parts.num_choices]],
            "results": [self._result(0, index, [{**piece, "index": 0}]) for piece in own],
        }

    def merged(self, answers: list[list[str]]) -> str:
        """The parts' answers as the gateway merges them, their events in the order of the engine's outputs."""
        if not self.is_stream:
            return merge_answers(self.parts, [answer[0].encode() for answer in answers], request_id="R").decode()
        merge = StreamMerge(self.parts, request_id="R")
        left = [iter(answer) for answer in answers]
        order = [index for index, _ in self.pieces]
        if self.api is Api.CHAT_COMPLETIONS:  # The first output brings the role's event too.
            order = [index for at, index in enumerate(order) for _ in range(1 if index in order[:at] else 2)]
        merged = [merge.feed(index, next(left[index]).encode()) for index in order]
        merged += [merge.feed(index, event.encode()) for index, events in enumerate(left) for event in events]
        return (b"".join(merged) + merge.finish()).decode()

    def _final(self, index: int) -> dict[str, Any]:
        own = [piece for at, piece in self.pieces if at == index]
        tokens = [token for piece in own for token in piece["tokens"]]
        return {**own[-1], "text": "".join(piece["text"] for piece in own), "tokens": tokens}

    def _result(self, prompt: int, index: int, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"prompt": prompt, "outputs": outputs, "num_cached": self.num_cached[index]}

    def _id(self, request_id: str) -> str:
        return f"{'chatcmpl' if self.api is Api.CHAT_COMPLETIONS else 'cmpl'}-{request_id}"


def _case(rng: random.Random) -> _Case:
    api = rng.choice([Api.COMPLETIONS, Api.CHAT_COMPLETIONS])
    num_prompts = 1 if api is Api.CHAT_COMPLETIONS else rng.randint(1, 3)
    n = rng.randint(1 if num_prompts > 1 else 2, 3)
    body = _body(rng, api, num_prompts, n)
    parts = take_apart(api, split_request(json.dumps(body).encode()))
    assert parts is not None
    sequences = [_sequence(rng) for _ in parts.requests]
    order = [index for index, sequence in enumerate(sequences) for _ in sequence]
    rng.shuffle(order)
    left = [iter(sequence) for sequence in sequences]
    return _Case(
        api,
        body,
        parts,
        prompts=[[rng.randint(1, 99) for _ in range(rng.randint(1, 5))] for _ in range(num_prompts)],
        pieces=[(index, next(left[index])) for index in order],
        num_cached=[rng.randint(0, 3) for _ in parts.requests],
    )


def _body(rng: random.Random, api: Api, num_prompts: int, n: int) -> dict[str, Any]:
    body: dict[str, Any] = {"n": n, "max_tokens": 9, "stream": rng.random() < 0.7}
    if api is Api.CHAT_COMPLETIONS:
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": rng.random() < 0.5}
    else:
        body |= {"prompt": ["x"] * num_prompts if num_prompts > 1 else "x", "logprobs": rng.choice([None, 1])}
    body["return_token_ids"] = rng.random() < 0.5
    if body["stream"] and rng.random() < 0.7:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    return body


def _sequence(rng: random.Random) -> list[dict[str, Any]]:
    """One choice's pieces, the last of which says why it ended."""
    pieces: list[dict[str, Any]] = [
        {
            "text": rng.choice(["a", 'é "', "", "\n"]),
            "tokens": [rng.randint(5, 900) for _ in range(rng.randint(1, 3))],
            "finish_reason": None,
            "stop_reason": None,
        }
        for _ in range(rng.randint(1, 4))
    ]
    pieces[-1] |= {"finish_reason": rng.choice(["stop", "length"]), "stop_reason": rng.choice([None, 7, "x"])}
    return pieces


def test_merged_answers_are_vllms_byte_for_byte() -> None:
    """Whole answers and streams of completions and chat, in any order of the engine's outputs."""
    rng = random.Random(32)  # noqa: S311 - test data
    cases = [_case(rng) for _ in range(_NUM_CASES)]
    jobs = [
        job
        for case in cases
        for job in (case.whole_job(), *(case.part_job(index) for index in range(len(case.parts.requests))))
    ]
    done = subprocess.run(
        [sys.executable, str(_PROGRAM)], input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = iter(json.loads(done.stdout))
    for case in cases:
        expected = "".join(next(answers))
        assert case.merged([next(answers) for _ in case.parts.requests]) == expected, case.body
