"""What vLLM's own serving code makes of given engine outputs, without an engine: jobs as JSON in, answers as JSON out.

A program of its own, because importing vLLM changes the process that does it. Run by test_merged_answers.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_CREATED = 1_796_000_000
_OPENAI = "vllm.entrypoints.openai"


class _Tokenizer:
    def decode(self, token: int) -> str:
        return f"<{token}>"


def _serving(kind: str, name: str) -> Any:
    """A serving object as its methods need it, less what makes it serve."""
    cls = getattr(import_module(f"{_OPENAI}.{kind}.serving"), name)
    serving = object.__new__(cls)
    serving.enable_force_include_usage = False
    serving.enable_prompt_tokens_details = True
    serving.enable_per_request_metrics = True
    serving.system_fingerprint = "vllm-test"
    serving.return_tokens_as_token_ids = False
    serving.parser_cls = None
    serving.response_role = "assistant"
    serving.enable_auto_tools = serving.enable_log_outputs = serving.enable_log_deltas = False
    serving.request_logger = None
    serving._include_reasoning_tokens_details = False
    return serving


def _result(prompt: Sequence[int], outputs: Sequence[dict[str, Any]], *, is_last: bool, num_cached: int) -> Any:
    module, logprob = import_module("vllm.outputs"), import_module("vllm.logprobs").Logprob
    return module.RequestOutput(
        request_id="",
        prompt="",
        prompt_token_ids=list(prompt),
        prompt_logprobs=None,
        outputs=[
            module.CompletionOutput(
                index=output["index"],
                text=output["text"],
                token_ids=output["tokens"],
                cumulative_logprob=0.0,
                logprobs=[{token: logprob(-0.5, 1, f"<{token}>")} for token in output["tokens"]],
                finish_reason=output["finish_reason"],
                stop_reason=output["stop_reason"],
            )
            for output in outputs
        ],
        finished=is_last,
        num_cached_tokens=num_cached,
    )


async def _each(items: Sequence[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def _answer(job: dict[str, Any]) -> list[str]:
    """A stream's events, or one whole answer as the server's JSON response writes it."""
    is_chat = "messages" in job["body"]
    kind = "chat_completion" if is_chat else "completion"
    serving = _serving(kind, "OpenAIServingChat" if is_chat else "OpenAIServingCompletion")
    protocol = import_module(f"{_OPENAI}.{kind}.protocol")
    request = getattr(protocol, "ChatCompletionRequest" if is_chat else "CompletionRequest").model_validate(job["body"])
    metadata = import_module("vllm.entrypoints.generate.base.protocol").RequestResponseMetadata(request_id="")
    prompts, last = job["prompts"], len(job["results"]) - 1
    results = [
        (
            result["prompt"],
            _result(prompts[result["prompt"]], result["outputs"], is_last=at == last, num_cached=result["num_cached"]),
        )
        for at, result in enumerate(job["results"])
    ]
    own = [result for _, result in results]
    name = job["id"]
    if is_chat and request.stream:
        stream = serving.chat_completion_stream_generator(request, _each(own), name, "m", [], _Tokenizer(), metadata)
    elif is_chat:
        answer = await serving.chat_completion_full_generator(
            request, _each(own), name, "m", [], _Tokenizer(), metadata
        )
    elif request.stream:
        stream = serving.completion_stream_generator(
            request,
            [{}] * len(prompts),
            _each(results),
            name,
            _CREATED,
            "m",
            num_prompts=len(prompts),
            tokenizer=_Tokenizer(),
            request_metadata=metadata,
        )
    else:
        answer = serving.request_output_to_completion_response(
            own, request, name, _CREATED, "m", _Tokenizer(), metadata
        )
    if request.stream:
        return [event async for event in stream]
    return [json.dumps(answer.model_dump(), ensure_ascii=False, separators=(",", ":"))]


async def _answers(jobs: list[dict[str, Any]]) -> list[list[str]]:
    return [await _answer(job) for job in jobs]


if __name__ == "__main__":
    time.time = lambda: float(_CREATED)
    json.dump(asyncio.run(_answers(json.load(sys.stdin))), sys.stdout)
