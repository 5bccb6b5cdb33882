"""From the engine's output to what vLLM 0.32 answers to completions and chat: fields, their order, nulls, events, usage.

Taken from answers of running engines and from entrypoints/openai/{completion,chat_completion}/{protocol,serving}.py. Values in,
values out: no sockets, no engine. Messages and responses have their own: messages.py, responses.py.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdserve.sim.tokens import decode, logprob, rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.refusal import Refused
    from pdserve.sim.request import Call

VLLM_VERSION = "0.32.0"
"""The release whose wire protocol is spoken; /version says so too, for clients that look."""

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """One request's answer, in any of the APIs: whole, or as the bytes of a stream."""

    def opening(self) -> bytes:
        """What a stream says before the engine has said anything."""

    def add(self, index: int, output: Output) -> None:
        """Take an output in, for the whole answer."""

    def events(self, index: int, output: Output) -> bytes:
        """Take an output in; what a stream says of it."""

    def closing(self) -> bytes:
        """What a stream says when every choice has ended."""

    def failure(self, error: Refused, *, is_output: bool) -> bytes | None:
        """How a stream ends that cannot go on; None: it breaks off. `is_output`: the engine's last output told so."""

    def whole(self, change: Callable[[Params], Params | None]) -> Json:
        """The answer, when every choice has ended; the handoff goes through `change` on its way."""


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
    tool_call_id: str = ""


class OpenAiAnswer:
    """An answer to a completion or a chat request."""

    def __init__(self, call: Call, *, model: str, created: int, has_details: bool) -> None:
        self._call = call
        self._model = model
        self._created = created
        self._has_details = has_details
        self._choices = [_Choice() for _ in call.jobs]
        self._first: Output | None = None

    def opening(self) -> bytes:
        return b""

    def add(self, index: int, output: Output) -> None:
        self._first = self._first or output
        choice = self._choices[index]
        choice.text += output.text
        choice.tokens += output.tokens
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        choice.num_cached, choice.handoff = output.num_cached, output.handoff

    def events(self, index: int, output: Output) -> bytes:
        return b"".join(map(_framed, self.event_objects(index, output)))

    def closing(self) -> bytes:
        return _framed(self.usage_event()) + _DONE if self._call.includes_usage else _DONE

    def failure(self, error: Refused, *, is_output: bool) -> bytes:
        # The first output opens a chat stream, also one that says nothing but that it failed.
        opening = self.opening_events() if is_output and self._first is None else []
        # Of all events only this one has spaces in its JSON, and [DONE] follows it.
        ending = f"data: {json.dumps(error.body())}\n\n".encode() + _DONE
        return b"".join(map(_framed, opening)) + ending

    def event_objects(self, index: int, output: Output) -> list[Json]:
        """The events that a stream sends for an output, which it takes in."""
        events = self.opening_events() if self._first is None else []
        is_first = not self._choices[index].tokens
        self.add(index, output)
        event = (
            self._chat_event(index, output) if self._call.is_chat else self._completion_event(index, output, is_first)
        )
        return [*events, self._stamped(event, output)]

    def whole(self, change: Callable[[Params], Params | None]) -> Json:
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
        handoff = self._choices[0].handoff
        told = None if handoff is None else change(handoff)
        return answer | {"kv_transfer_params": told, "ec_transfer_params": None, "metrics": None}

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

    def opening_events(self) -> list[Json]:
        """Chat streams open with the role, for every choice."""
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
            "delta": self._delta(index, output),
            "logprobs": self._chat_logprobs(output.tokens),
            "finish_reason": self._chat_finish_reason(output.finish_reason),
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = self._token_ids(output.tokens)
        event = self._head(self._event_object) | {"choices": [choice]}
        if self._call.has_continuous_usage:
            usage = self._usage(len(self._choices[index].tokens))
            event["usage"] = usage | {"completion_tokens_details": None}
        return event

    def _delta(self, index: int, output: Output) -> Json:
        """A tool call opens with its name; its arguments come as the model writes them."""
        if self._call.tool_use is None:
            return {"content": output.text}
        if not output.text:
            return {}
        choice = self._choices[index]
        if choice.tool_call_id:
            return {"tool_calls": [{"index": 0, "function": {"arguments": output.text}}]}
        choice.tool_call_id = new_tool_call_id()
        function = {"name": self._call.tool_use.name, "arguments": output.text}
        return {"tool_calls": [{"id": choice.tool_call_id, "type": "function", "index": 0, "function": function}]}

    def _chat_finish_reason(self, reason: str | None) -> str | None:
        """A tool that the client named ends with `stop`, one that the model chose with `tool_calls`."""
        tool = self._call.tool_use
        return "tool_calls" if reason == "stop" and tool is not None and not tool.is_named else reason

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
        tool = self._call.tool_use
        is_call = tool is not None and tool.is_call(choice.finish_reason)
        # What the limit cut off is no call, and stays in the text where tags show that it was to be one.
        text = choice.text if tool is None or (tool.is_tagged and not is_call) else ""
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message["function_call"] = None
        if tool is not None and is_call:
            function = {"name": tool.name, "arguments": choice.text}
            message["tool_calls"] = [{"id": new_tool_call_id(), "type": "function", "function": function}]
        return {
            "index": index,
            "message": message | {"reasoning": None},
            "logprobs": self._chat_logprobs(choice.tokens),
            "finish_reason": self._chat_finish_reason(choice.finish_reason),
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


def _framed(event: Json) -> bytes:
    return b"data: %b\n\n" % _encode(event)


def new_tool_call_id() -> str:
    """As vLLM makes them (renderers/chat_utils.py)."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


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
