"""Takes a request with several choices or prompts apart into requests with one each, and makes one answer of theirs.

The client sees what one vLLM 0.32 would have told it (entrypoints/openai/{completion,chat_completion}/serving.py,
v1/engine/parallel_sampling.py). Whatever splitting could tell differently is not taken apart. Knows no sockets, and not
who sends the parts where.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdserve.protocol.api import CHOICE_APIS, Api
from pdserve.protocol.fields import (
    NULL,
    is_absent,
    is_count,
    is_list_of_one_list,
    join,
    raw,
    try_decode,
    try_list,
    try_split,
)
from pdserve.protocol.openai import facts_of
from pdserve.protocol.sse import event_data, split_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocol.fields import Fields

MAX_PARTS = 128
MAX_PARTS_AT_ONCE = 32
"""Parts of one request that run side by side; the rest wait for one of these to end."""
MAX_BYTES_AT_ONCE = 64 * 1024 * 1024
"""Of all parts that run side by side, each of which carries the prompt anew: as much as one client's body may have by default.
What would take more goes to one engine whole, which holds the prompt once."""
MAX_UNFINISHED_EVENT_BYTES = 16 * 1024 * 1024
"""Of one part. The longest event is a first one that tells the prompt's token ids."""

DONE_EVENT = b"data: [DONE]\n\n"

_ID_PREFIXES = {Api.COMPLETIONS: "cmpl-", Api.CHAT_COMPLETIONS: "chatcmpl-"}
"""What vLLM puts before a request's id to name the answer."""

_DONE = b"[DONE]"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_NO_SEEDS = (NULL, msgspec.Raw(b"-1"))
"""vLLM's sampling_params.py takes -1 for none."""
_LOWEST_TEMPERATURE = 1e-2
"""Zero is greedy, and vLLM raises what is between zero and this to this (sampling_params.py, _MAX_TEMP)."""

_INTEGER = re.compile(rb"-?[0-9]{1,18}")
"""Certain to stay within 64 bits, as vLLM demands of a seed, when a choice's index is added."""
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[\]]')
_TEXT = re.compile(rb'"')
_TOKEN_IDS = re.compile(rb"\[\s*[0-9][\s0-9,]*\]")


class UnmergeableAnswer(Exception):
    """A part's answer is not what vLLM answers."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A request taken apart: prompt by prompt, and of each prompt choice by choice, in the order of their indexes."""

    api: Api
    requests: tuple[Fields, ...]
    num_choices: int
    """Of each prompt."""

    def answer_id(self, request_id: str) -> msgspec.Raw:
        """What the client's answer is called."""
        return raw(_ID_PREFIXES[self.api] + request_id)


# Apart


def take_apart(api: Api, fields: Fields) -> Parts | None:
    """None when there is nothing to take apart, or when only one engine that sees it whole can answer it right.

    Not seen from here: an engine that refuses several choices because the model's own default temperature is zero, or because
    its VLLM_MAX_N_SEQUENCES or VLLM_MAX_COMPLETION_PROMPTS is lower than `MAX_PARTS`. Raises InvalidRequest.
    """
    if api not in CHOICE_APIS or not ("n" in fields or _LIST_OF_PROMPTS.match(fields.get("prompt", NULL))):
        return None
    num_choices = _num_choices(fields)
    prompts = _prompts(api, fields)
    if not 1 < num_choices * len(prompts) <= MAX_PARTS:
        return None
    seeds = _seeds(fields, num_choices)
    if not seeds:
        return None
    common = _without_counts(fields, num_choices)
    requests = tuple({**common, **prompt, **seed} for prompt in prompts for seed in seeds)
    if facts_of(api, requests[0]).alone_reason is not None:
        return None
    if min(len(requests), MAX_PARTS_AT_ONCE) * _num_bytes(common | max(prompts, key=_num_bytes)) > MAX_BYTES_AT_ONCE:
        return None
    return Parts(api, requests, num_choices)


def _num_choices(fields: Fields) -> int:
    """0 where only the engine can say."""
    if is_absent(fields, "n"):
        return 1
    return int(bytes(fields["n"])) if is_count(fields["n"]) else 0


def _num_bytes(fields: Fields) -> int:
    return sum(map(len, fields.values()))


def _prompts(api: Api, fields: Fields) -> Sequence[Fields]:
    """What each prompt puts in the place of the request's own; empty where only the engine can say.

    A prompt from a list stays in a list: vLLM refuses `""` and takes `[""]`. One list holds only texts or only lists of ids.
    """
    prompt = fields.get("prompt", NULL)
    if api is not Api.COMPLETIONS or not _LIST_OF_PROMPTS.match(prompt) or is_list_of_one_list(prompt):
        return [{}]
    elements = try_list(prompt) or []
    if len(elements) == 1:
        return [{}]
    if len(elements) > MAX_PARTS or not (_are_texts(elements) or _are_token_ids(elements)):
        return []
    return [{"prompt": msgspec.Raw(b"[%b]" % element)} for element in elements]


def _are_texts(elements: Sequence[msgspec.Raw]) -> bool:
    return all(_TEXT.match(element) for element in elements)


def _are_token_ids(elements: Sequence[msgspec.Raw]) -> bool:
    return all(_TOKEN_IDS.fullmatch(element) for element in elements)


def _seeds(fields: Fields, num_choices: int) -> Sequence[Fields]:
    """What each choice puts in the place of the request's own seed; empty where only the engine can say.

    Choice j of every prompt has the seed + j (v1/engine/parallel_sampling.py, _get_child_sampling_params).
    """
    if num_choices == 1:
        return [{}]
    if not _is_sampled(fields):
        return []
    seed = fields.get("seed", NULL)
    if seed in _NO_SEEDS:
        return [{}] * num_choices
    if not _INTEGER.fullmatch(seed):
        return []
    first = int(bytes(seed))
    seeds = range(first, first + num_choices)
    # A child's seed is not looked at again, so there -1 is a seed like any other; alone it would be none.
    if -1 in seeds:
        return []
    return [{"seed": raw(seed)} for seed in seeds]


def _is_sampled(fields: Fields) -> bool:
    """Whether the temperature is certain to allow several choices: greedy with `n` above one is an error."""
    if is_absent(fields, "temperature"):
        return True
    temperature = try_decode(fields["temperature"], float)
    return temperature is not None and temperature >= _LOWEST_TEMPERATURE


def _without_counts(fields: Fields, num_choices: int) -> Fields:
    """`best_of` is a field that vLLM 0.32 does not know and ignores. An `n` of one may be `null`, which completions refuse."""
    dropped = {"best_of"} if num_choices == 1 else {"best_of", "n"}
    return {name: value for name, value in fields.items() if name not in dropped}


# Together


def merge_answers(parts: Parts, answers: Sequence[bytes], *, request_id: str) -> bytes:
    """One whole answer out of the parts' whole answers. Raises UnmergeableAnswer."""
    usages = _Usages(parts)
    choices: list[Fields] = []
    merged: Fields = {}
    for index, body in enumerate(answers):
        fields = try_split(body)
        choice = _only_choice(fields)
        if fields is None or choice is None:
            raise UnmergeableAnswer("an answer without its one choice")
        merged = merged or fields
        choices.append(_numbered(choice, index))
        usages.add(index, fields.get("usage", NULL))
    # As vLLM has it, the prompt's details are the last prompt's.
    usage = usages.total(details_of=len(answers) - 1)
    replaced = {"id": parts.answer_id(request_id), "choices": raw(choices), "usage": usage}
    merged = {**merged, **replaced}
    if "metrics" in merged:
        merged["metrics"] = NULL  # They speak of one sequence, so vLLM leaves them out where there are several.
    return join(merged)


class StreamMerge:
    """Merges the parts' streams into one. Feed it each part's bytes; send on what it gives back."""

    def __init__(self, parts: Parts, *, request_id: str) -> None:
        self._parts = parts
        self._answer_id = parts.answer_id(request_id)
        self._created: msgspec.Raw | None = None
        self._first_part = 0
        self._usages = _Usages(parts)
        self._usage_event: Fields | None = None
        self._unfinished: dict[int, bytes] = {}
        self._parts_with_role: set[int] = set()
        self.is_broken = False
        """Whether an engine has told of a failure. vLLM ends the whole stream then, and so should the caller."""

    def feed(self, part_index: int, data: bytes) -> bytes:
        """Take a part's bytes in. Raises UnmergeableAnswer."""
        events = split_events(self._unfinished.pop(part_index, b"") + data)
        if events and not events[-1].endswith(_EVENT_ENDS):
            self._hold_back(part_index, events.pop())
        return b"".join([self._edited(part_index, event) for event in events])

    def finish(self) -> bytes:
        """The usage of all parts, where they told theirs, and the end."""
        if self._usage_event is None or self.is_broken:
            return DONE_EVENT
        usage = self._usages.total(details_of=self._first_part)
        return self._event({**self._usage_event, "usage": usage}) + DONE_EVENT

    def _hold_back(self, part_index: int, event: bytes) -> None:
        if len(event) > MAX_UNFINISHED_EVENT_BYTES:
            raise UnmergeableAnswer(f"an event exceeds {MAX_UNFINISHED_EVENT_BYTES} bytes")
        self._unfinished[part_index] = event

    def _edited(self, part_index: int, event: bytes) -> bytes:
        data = event_data(event)
        if data == _DONE:
            return b""
        fields = try_split(data)
        if fields is None:
            return event
        if "error" in fields:
            self.is_broken = True
            return event
        choice = _only_choice(fields)
        if choice is not None:
            return self._choice_event(part_index, fields, choice)
        if "usage" in fields:
            self._usages.add(part_index, fields["usage"])
            self._usage_event = {name: value for name, value in fields.items() if name != "metrics"}
            return b""
        return event

    def _choice_event(self, part_index: int, fields: Fields, choice: Fields) -> bytes:
        if self._created is None:
            self._created = fields.get("created")
            self._first_part = part_index
        if self._is_role_event(part_index, choice):
            return self._all_role_events(part_index, fields, choice)
        return self._event({**fields, "choices": _choices(choice, part_index)})

    def _is_role_event(self, part_index: int, choice: Fields) -> bool:
        if self._parts.api is not Api.CHAT_COMPLETIONS or part_index in self._parts_with_role:
            return False
        delta = try_split(choice.get("delta", NULL))
        return delta is not None and "role" in delta

    def _all_role_events(self, part_index: int, fields: Fields, choice: Fields) -> bytes:
        """vLLM opens all choices before the first of them says a word."""
        is_first = not self._parts_with_role
        self._parts_with_role.add(part_index)
        if not is_first:
            return b""
        indexes = range(len(self._parts.requests))
        return b"".join(self._event({**fields, "choices": _choices(choice, index)}) for index in indexes)

    def _event(self, fields: Fields) -> bytes:
        fields["id"] = self._answer_id
        if self._created is not None:
            fields["created"] = self._created
        return b"data: %b\n\n" % join(fields)


class _ReasoningCount(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class _Counts(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    completion_tokens_details: _ReasoningCount | None = None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None when the engine runs without a reasoning parser."""
        details = self.completion_tokens_details
        return details.reasoning_tokens if details is not None else None


class _Usages:
    """The parts' usages. Each prompt counts once, however many choices it has."""

    def __init__(self, parts: Parts) -> None:
        self._num_choices = parts.num_choices
        self._raw: dict[int, msgspec.Raw] = {}
        self._counts: dict[int, _Counts] = {}

    def add(self, part_index: int, usage: msgspec.Raw) -> None:
        """Raises UnmergeableAnswer."""
        counts = try_decode(usage, _Counts)
        if counts is None:
            raise UnmergeableAnswer("a usage that cannot be read")
        self._counts[part_index] = counts
        self._raw[part_index] = usage

    def total(self, *, details_of: int) -> msgspec.Raw:
        """What the client is told; of the details that belong to one prompt, those of one part."""
        base = try_split(self._raw.get(details_of) or next(iter(self._raw.values()))) or {}
        num_prompt = sum(
            {index // self._num_choices: count.prompt_tokens for index, count in self._counts.items()}.values()
        )
        num_completion = sum(count.completion_tokens or 0 for count in self._counts.values())
        sums = {"prompt_tokens": num_prompt, "completion_tokens": num_completion}
        sums["total_tokens"] = num_prompt + num_completion
        base.update({name: raw(value) for name, value in sums.items()})
        reasoning = [count.num_reasoning_tokens for count in self._counts.values()]
        if any(count is not None for count in reasoning):
            details = {"reasoning_tokens": sum(count or 0 for count in reasoning)}
            base["completion_tokens_details"] = raw(details)
        return raw(base)


def _only_choice(fields: Fields | None) -> Fields | None:
    choices = try_list(fields.get("choices", NULL)) if fields is not None else None
    return try_split(choices[0]) if choices is not None and len(choices) == 1 else None


def _numbered(choice: Fields, index: int) -> Fields:
    return {**choice, "index": raw(index)}


def _choices(choice: Fields, index: int) -> msgspec.Raw:
    return raw([_numbered(choice, index)])
