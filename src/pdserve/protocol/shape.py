"""What a request's shape allows: split only what one handoff can stand for, and what is certain to be valid on D if it is on P.

vLLM reads `"n": "2"` as two and `"echo": 1` as true, so whatever is not spelled plainly goes to D alone: one handoff for two
choices gives the second one another request's KV. And what P never sees of a request (its limits, its stream options, `store`)
D may refuse before admission without telling P, which would hold the blocks until its lease ends: vLLM's checks of a body's
form come before the handler that tells P of a refusal (0.32, entrypoints/generate/base/serving.py,
_with_kv_transfer_rejection_cleanup).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pdserve.core import AloneReason
from pdserve.protocol.api import LIMIT_FIELDS, Api
from pdserve.protocol.fields import (
    FALSE,
    NULL,
    TRUE,
    Fields,
    is_absent,
    is_count,
    is_list_of_one_list,
    try_decode,
    try_list,
    try_split,
)

_FUNCTION_TOOLS = frozenset({"function", "custom", "namespace"})
"""Tools that the client calls. For every other type the engine may call them itself and generate again with the same sampling
params, handoff included (0.32, responses/serving.py, _generate_with_builtin_tools)."""
UNREPEATABLE = frozenset({AloneReason.PREVIOUS_RESPONSE, AloneReason.BACKGROUND, AloneReason.BUILTIN_TOOLS})
"""Requests not to be sent to another engine after one that failed: no other engine knows the response that this one follows, a
background response goes on in the engine that took it, and built-in tools act on the world."""
_LIST_OF_TEXTS_OR_LISTS = re.compile(rb'\[\s*["\[]')


class _Typed(msgspec.Struct, frozen=True):
    type: str | None = None


class _Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


_Test = Callable[[msgspec.Raw, Fields], bool]
"""Gets a member that is there, and the request that it may have to be seen with."""


class _Rule(NamedTuple):
    allows: _Test
    reason: AloneReason = AloneReason.UNUSUAL_FIELDS
    """Why D computes the prompt where the test fails."""


_Rules = dict[str, _Rule]


def alone_reason(api: Api, fields: Fields) -> AloneReason | None:
    """Why D must compute the prompt itself; None when the request can be split."""
    rules = _RULES[api]
    for name in fields:
        if name in rules and not rules[name].allows(fields[name], fields):
            return _first_reason(rules, fields)
    if api is Api.MESSAGES and "max_tokens" not in fields:
        return AloneReason.UNUSUAL_FIELDS
    return None


def is_stream(fields: Fields) -> bool:
    """Whether the client asked for server-sent events."""
    return fields.get("stream") == TRUE


def _first_reason(rules: _Rules, fields: Fields) -> AloneReason:
    """Of several the one that stands first in the table, in whatever order the request has its members."""
    return next(rule.reason for name, rule in rules.items() if name in fields and not rule.allows(fields[name], fields))


# What a single member may be


def _is_one_of(*values: msgspec.Raw) -> _Test:
    return lambda value, _: value in values


def _is_null(value: msgspec.Raw, _: Fields) -> bool:
    return value == NULL


def _is_number(value: msgspec.Raw, _: Fields) -> bool:
    return is_count(value)


def _is_number_or_null(value: msgspec.Raw, _: Fields) -> bool:
    return is_count(value) or value == NULL


def _is_one_prompt(prompt: msgspec.Raw, _: Fields) -> bool:
    """Token ids are one prompt, however many; only a list of texts or of lists can be several."""
    if _LIST_OF_TEXTS_OR_LISTS.match(prompt) is None or is_list_of_one_list(prompt):
        return True
    prompts = try_list(prompt)
    return prompts is not None and len(prompts) == 1


def _are_plain_options(value: msgspec.Raw, fields: Fields) -> bool:
    if value == NULL:
        return True
    options = try_split(value)
    return is_stream(fields) and options is not None and all(_is_bool(option, fields) for option in options.values())


def _are_clients_tools(value: msgspec.Raw, _: Fields) -> bool:
    if value == NULL:
        return True
    tools = try_decode(value, list[_Typed])
    return tools is not None and all(tool.type in _FUNCTION_TOOLS for tool in tools)


def _is_free_choice(value: msgspec.Raw, _: Fields) -> bool:
    """Not a tool that must be called by name: P would read its one token as the call's whole arguments and answer 400
    (0.32, entrypoints/anthropic/serving.py, messages_full_converter).
    """
    if value == NULL:
        return True
    choice = try_decode(value, _Typed)
    return choice is not None and choice.type != "tool"


def _is_limit(value: msgspec.Raw, _: Fields) -> bool:
    return is_count(value) and int(bytes(value)) > 0


def _fits_limit(value: msgspec.Raw, fields: Fields) -> bool:
    """P gets another limit and leaves the thinking budget unchecked, so D's check must be certain to pass."""
    if value == NULL:
        return True
    thinking = try_decode(value, _Thinking)
    if thinking is None or is_absent(fields, "max_tokens") or not is_count(fields["max_tokens"]):
        return False
    budget = thinking.budget_tokens
    return thinking.type != "enabled" or (budget is not None and budget < int(bytes(fields["max_tokens"])))


# The table

_is_bool = _is_one_of(TRUE, FALSE, NULL)
_is_false = _is_one_of(FALSE, NULL)

_LIMITS = {name: _Rule(_is_number_or_null) for name in LIMIT_FIELDS}
# A null `min_tokens` is refused by D, and P does not get to see it.
_COMMON = {**_LIMITS, "min_tokens": _Rule(_is_number), "stream": _Rule(_is_bool)}
_CHOICES = {
    "n": _Rule(_is_one_of(msgspec.Raw(b"1"), NULL), AloneReason.MANY_CHOICES),
    # vLLM 0.32 does not know the field (entrypoints/openai/completion/protocol.py): with any number, `n` alone counts.
    "best_of": _Rule(_is_number_or_null, AloneReason.MANY_CHOICES),
    "use_beam_search": _Rule(_is_false, AloneReason.BEAM_SEARCH),
    "prompt_logprobs": _Rule(_is_null, AloneReason.PROMPT_LOGPROBS),
    "echo": _Rule(_is_false, AloneReason.PROMPT_ECHO),
    "prompt_embeds": _Rule(_is_null, AloneReason.MANY_PROMPTS),
}
_CHOICES_PLAIN = {
    # -1 means as much as fits, which depends on the limit, and P has another one (0.32, renderers/params.py).
    "truncate_prompt_tokens": _Rule(_is_number_or_null),
    **_COMMON,
    "stream_options": _Rule(_are_plain_options),
}

_RULES: dict[Api, _Rules] = {
    Api.COMPLETIONS: {**_CHOICES, "prompt": _Rule(_is_one_prompt, AloneReason.MANY_PROMPTS), **_CHOICES_PLAIN},
    Api.CHAT_COMPLETIONS: {**_CHOICES, **_CHOICES_PLAIN},
    Api.RESPONSES: {
        "previous_response_id": _Rule(_is_null, AloneReason.PREVIOUS_RESPONSE),
        "background": _Rule(_is_false, AloneReason.BACKGROUND),
        "tools": _Rule(_are_clients_tools, AloneReason.BUILTIN_TOOLS),
        # Null is not among them: vLLM truncates whatever is not the word (0.32, responses/protocol.py, build_tok_params).
        "truncation": _Rule(_is_one_of(msgspec.Raw(b'"disabled"'))),
        "store": _Rule(_is_bool),
        **_COMMON,
    },
    Api.MESSAGES: {
        **_COMMON,
        "max_tokens": _Rule(_is_limit),
        "tool_choice": _Rule(_is_free_choice),
        "thinking": _Rule(_fits_limit),
    },
}
"""What a request's members must be for it to be split, by API, in the order of the reasons; whatever is not named here may be
anything. A member that is absent allows everything, but a message's limit."""
