"""From the engine's output to the JSON that vLLM 0.32 answers: fields, their order, nulls, stream events, usage.

Taken from answers of running engines and from entrypoints/openai/{completion,chat_completion}/{protocol,serving}.py. Values in,
values out: no sockets, no engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.sim.tokens import decode, logprob, rivals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.request import Call

VLLM_VERSION = "0.32.0"
"""The release whose wire protocol is spoken; /version says so too, for clients that look."""

Json = dict[str, Any]


@dataclass(slots=True)
class _Choice:
    """What one choice has come to so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offset: int = 0
    """Where the next token's text starts, for `logprobs`."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    handoff: Params | None = None


class Answer:
    """One request's answer, whole or in events. Feed it every output; ask for `whole` or take the events as they come."""

    def __init__(self, call: Call, *, model: str, created: int, has_details: bool) -> None:
        self._call = call
        self._model = model
        self._created = created
        self._has_details = has_details
        self._choices = [_Choice() for _ in call.jobs]
        self._first: Output | None = None

    def add(self, index: int, output: Output) -> list[Json]:
        """Take an output in; the events that a stream sends for it."""
        events = self._opening_events(output) if self._first is None else []
        self._first = self._first or output
        choice = self._choices[index]
        is_first = not choice.tokens
        choice.text += output.text
        choice.tokens += output.tokens
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        choice.num_cached, choice.handoff = output.num_cached, output.handoff
        event = (
            self._chat_event(index, output) if self._call.is_chat else self._completion_event(index, output, is_first)
        )
        return [*events, self._stamped(event, output)]

    def whole(self) -> Json:
        """The answer, when every choice has ended."""
        choices = [self._whole_choice(index) for index in range(len(self._choices))]
        answer = {
            **self._head("chat.completion" if self._call.is_chat else "text_completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._whole_usage(),
        }
        if self._call.is_chat:
            prompt = list(self._call.prompts[0]) if self._call.returns_token_ids else None
            answer |= {"prompt_logprobs": self._prompt_logprobs(0), "prompt_token_ids": prompt, "prompt_text": None}
        # With several prompts or choices the handoff is the first one's: the others' blocks stay until their leases end.
        return answer | {"kv_transfer_params": self._choices[0].handoff, "ec_transfer_params": None, "metrics": None}

    def usage_event(self) -> Json:
        """The last event of a stream that includes usage; nulls are left out of this one."""
        assert self._first is not None
        details: Json = {"cached_tokens": self._first.num_cached}
        if self._call.is_chat:
            details["created_cache_tokens"] = self._first.num_created
        usage = self._usage(self._num_generated)
        if self._has_details:
            usage["prompt_tokens_details"] = details
        event = self._head(self._event_object) | {"choices": [], "usage": usage}
        return event | {"system_fingerprint": self._fingerprint}

    # Events

    def _opening_events(self, output: Output) -> list[Json]:
        """Chat streams open with the role, for every choice."""
        del output
        if not self._call.is_chat:
            return []
        return [self._role_event(index) for index in range(self._call.n)]

    def _role_event(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        event = self._head(self._event_object) | {"choices": [choice]}
        if self._call.has_continuous_usage:
            event["usage"] = self._usage(0) | {"completion_tokens_details": None}
        prompt = list(self._call.prompts[0]) if self._call.returns_token_ids else None
        return event | {"prompt_token_ids": prompt, "prompt_text": None}

    def _chat_event(self, index: int, output: Output) -> Json:
        choice: Json = {
            "index": index,
            "delta": {"content": output.text},
            "logprobs": self._chat_logprobs(output.tokens),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = self._token_ids(output.tokens)
        event = self._head(self._event_object) | {"choices": [choice]}
        if self._call.has_continuous_usage:
            usage = self._usage(len(self._choices[index].tokens))
            event["usage"] = usage | {"completion_tokens_details": None}
        return event

    def _completion_event(self, index: int, output: Output, is_first: bool) -> Json:  # noqa: FBT001 - one caller
        prompt = self._call.prompts[index // self._call.n]
        is_echo = self._call.echoes and is_first
        choice = {
            "index": index,
            "text": decode(prompt) + output.text if is_echo else output.text,
            "logprobs": self._completion_logprobs(
                index, [*prompt, *output.tokens] if is_echo else output.tokens, is_echo
            ),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": list(prompt) if is_first and (is_echo or self._call.returns_token_ids) else None,
            "token_ids": self._token_ids(output.tokens),
        }
        event = self._head(self._event_object) | {"choices": [choice]}
        if self._call.has_continuous_usage:
            num_tokens = len(self._choices[index].tokens)
            event["usage"] = _usage(len(prompt), num_tokens)
        return event

    def _stamped(self, event: Json, output: Output) -> Json:
        """A stream's terminal chunk bears the fingerprint, unless a usage event follows it."""
        if output.finish_reason is not None and not self._call.includes_usage:
            event["system_fingerprint"] = self._fingerprint
        return event

    # The whole

    def _whole_choice(self, index: int) -> Json:
        return self._chat_choice(index) if self._call.is_chat else self._completion_choice(index)

    def _completion_choice(self, index: int) -> Json:
        choice = self._choices[index]
        prompt_index = index // self._call.n
        prompt = self._call.prompts[prompt_index]
        is_echo = self._call.echoes
        tokens = [*prompt, *choice.tokens] if is_echo else choice.tokens
        return {
            "index": index,
            "text": decode(prompt) + choice.text if is_echo else choice.text,
            "logprobs": self._completion_logprobs(index, tokens, is_echo, start=0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self._token_ids(choice.tokens),
            "prompt_logprobs": self._prompt_logprobs(prompt_index),
            "prompt_token_ids": list(prompt) if self._call.returns_token_ids else None,
            "routed_experts": None,
        }

    def _chat_choice(self, index: int) -> Json:
        choice = self._choices[index]
        message = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": None, "audio": None}
        return {
            "index": index,
            "message": message | {"function_call": None, "reasoning": None},
            "logprobs": self._chat_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self._token_ids(choice.tokens),
            "routed_experts": None,
        }

    # Usage

    @property
    def _num_generated(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    def _usage(self, num_generated: int) -> Json:
        return _usage(sum(map(len, self._call.prompts)), num_generated)

    def _whole_usage(self) -> Json:
        """Completions report the last prompt's cached tokens and never the created ones."""
        created = self._first.num_created if self._call.is_chat and self._first is not None else None
        details = {
            "cached_tokens": self._choices[-1].num_cached,
            "created_cache_tokens": created,
            "multimodal_tokens": None,
        }
        usage = self._usage(self._num_generated)
        usage["prompt_tokens_details"] = details if self._has_details else None
        return usage | {"completion_tokens_details": None}

    # Parts

    @property
    def _event_object(self) -> str:
        return "chat.completion.chunk" if self._call.is_chat else "text_completion"

    @property
    def _fingerprint(self) -> str:
        return f"vllm-{VLLM_VERSION}-{hashlib.sha256(self._model.encode()).hexdigest()[:8]}"

    def _head(self, kind: str) -> Json:
        return {"id": self._call.request_id, "object": kind, "created": self._created, "model": self._model}

    def _token_ids(self, tokens: Sequence[int]) -> list[int] | None:
        return list(tokens) if self._call.returns_token_ids else None

    def _completion_logprobs(
        self,
        index: int,
        tokens: Sequence[int],
        is_echo: bool,  # noqa: FBT001 - two callers
        *,
        start: int | None = None,
    ) -> Json | None:
        """`start` is where the texts' offsets begin: in a stream, where the last event left off."""
        if self._call.num_logprobs is None:
            return None
        offset = self._choices[index].offset if start is None else start
        texts = [decode([token]) for token in tokens]
        offsets = [offset + sum(map(len, texts[:position])) for position in range(len(texts))]
        self._choices[index].offset = offset + sum(map(len, texts))
        # Of a prompt's first token nobody knows how likely it was.
        values = [None if is_echo and not position else logprob(token, 0) for position, token in enumerate(tokens)]
        tops = [_top(token, self._call.num_logprobs) for token in tokens]
        top_logprobs = [None if value is None else top for value, top in zip(values, tops, strict=True)]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": top_logprobs}

    def _chat_logprobs(self, tokens: Sequence[int]) -> Json | None:
        count = self._call.num_logprobs
        if count is None:
            return None
        return {"content": [{**_likely(token, 0), "top_logprobs": _likelies(token, count)} for token in tokens]}

    def _prompt_logprobs(self, prompt_index: int) -> list[Json | None] | None:
        count = self._call.num_prompt_logprobs
        if count is None:
            return None
        prompt = self._call.prompts[prompt_index]
        return [None, *(_prompt_logprob(token, count) for token in prompt[1:])]


def _usage(num_prompt: int, num_generated: int) -> Json:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_generated, "completion_tokens": num_generated}


def _ranked(token: int, count: int) -> list[int]:
    """A token and its rivals, `count` in all, but the token itself always."""
    return [token, *rivals(token, max(0, count - 1))]


def _top(token: int, count: int) -> dict[str, float]:
    return {decode([rival]): logprob(rival, rank) for rank, rival in enumerate(_ranked(token, count))}


def _likely(token: int, rank: int) -> Json:
    text = decode([token])
    return {"token": text, "logprob": logprob(token, rank), "bytes": list(text.encode())}


def _likelies(token: int, count: int) -> list[Json]:
    return [_likely(rival, rank) for rank, rival in enumerate(_ranked(token, count)[:count])]


def _prompt_logprob(token: int, count: int) -> Json:
    return {
        str(rival): {"logprob": logprob(rival, rank), "rank": rank + 1, "decoded_token": decode([rival])}
        for rank, rival in enumerate(_ranked(token, count))
    }
