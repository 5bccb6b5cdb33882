"""What a request's shape allows: split only what one handoff can stand for, and what is certain to be valid on D if it is on P.

vLLM reads `"n": "2"` as two and `"echo": 1` as true, so whatever is not spelled plainly goes to D alone: one handoff for two
choices gives the second one another request's KV. And what P never sees of a request (its limits, its stream options, `store`)
D may refuse before admission without telling P, which would hold the blocks until its lease ends: vLLM's checks of a body's
form come before the handler that tells P of a refusal (0.32, entrypoints/generate/base/serving.py,
_with_kv_transfer_rejection_cleanup).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from pdserve.core import AloneReason
from pdserve.protocol.api import CHOICE_APIS, LIMIT_FIELDS, Api
from pdserve.protocol.fields import (
    BOOLS,
    FALSES,
    NULL,
    TRUE,
    is_absent,
    is_count,
    is_plain,
    is_spelled,
    try_decode,
    try_split,
)

if TYPE_CHECKING:
    from pdserve.protocol.fields import Fields

_ONES = frozenset({b"1", NULL})
_NOT_TRUNCATED = frozenset({b'"disabled"'})
"""Null is not among them: vLLM truncates whatever is not the word (0.32, responses/protocol.py, build_tok_params)."""
_FUNCTION_TOOLS = frozenset({"function", "custom", "namespace"})
"""Tools that the client calls. For every other type the engine may call them itself and generate again with the same sampling
params, handoff included (0.32, responses/serving.py, _generate_with_builtin_tools)."""
UNREPEATABLE = frozenset({AloneReason.PREVIOUS_RESPONSE, AloneReason.BACKGROUND, AloneReason.BUILTIN_TOOLS})
"""Requests not to be sent to another engine after one that failed: no other engine knows the response that this one follows, a
background response goes on in the engine that took it, and built-in tools act on the world."""
_FIRST_ELEMENT_IS_NESTED = re.compile(rb'\[\s*["\[]')


class _Typed(msgspec.Struct, frozen=True):
    type: str | None = None


class _Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


def alone_reason(api: Api, fields: Fields) -> AloneReason | None:
    """Why D must compute the prompt itself; None when the request can be split."""
    if api in CHOICE_APIS:
        reason = _reason_of_choices(api, fields)
    elif api is Api.RESPONSES:
        reason = _reason_of_response(fields)
    else:
        reason = None if _is_message_sure(fields) else AloneReason.UNUSUAL_FIELDS
    if reason is not None:
        return reason
    return None if _are_limits_plain(fields) and _is_stream_plain(api, fields) else AloneReason.UNUSUAL_FIELDS


def is_stream(fields: Fields) -> bool:
    """Whether the client asked for server-sent events."""
    return is_spelled(fields, "stream", TRUE)


def _reason_of_choices(api: Api, fields: Fields) -> AloneReason | None:
    if not (is_plain(fields, "n", _ONES) and _is_best_of_ignored(fields)):
        return AloneReason.MANY_CHOICES
    if not is_plain(fields, "use_beam_search", FALSES):
        return AloneReason.BEAM_SEARCH
    if not is_absent(fields, "prompt_logprobs"):
        return AloneReason.PROMPT_LOGPROBS
    if not is_plain(fields, "echo", FALSES):
        return AloneReason.PROMPT_ECHO
    if not is_absent(fields, "prompt_embeds") or (api is Api.COMPLETIONS and _has_many_prompts(fields["prompt"])):
        return AloneReason.MANY_PROMPTS
    return None if _is_truncation_plain(fields) else AloneReason.UNUSUAL_FIELDS


def _is_best_of_ignored(fields: Fields) -> bool:
    """vLLM 0.32 does not know the field (entrypoints/openai/completion/protocol.py): with any number, `n` alone counts."""
    return is_absent(fields, "best_of") or is_count(fields["best_of"])


def _reason_of_response(fields: Fields) -> AloneReason | None:
    if not is_absent(fields, "previous_response_id"):
        return AloneReason.PREVIOUS_RESPONSE
    if _is_in_background(fields):
        return AloneReason.BACKGROUND
    if _has_builtin_tools(fields):
        return AloneReason.BUILTIN_TOOLS
    is_sure = is_plain(fields, "truncation", _NOT_TRUNCATED) and is_plain(fields, "store", BOOLS)
    return None if is_sure else AloneReason.UNUSUAL_FIELDS


def _is_message_sure(fields: Fields) -> bool:
    """P gets a limit and leaves the thinking budget unchecked, so D's own checks of both must be certain to pass.

    A tool that must be called by name is out: P would read its one token as the call's whole arguments and answer 400
    (0.32, entrypoints/anthropic/serving.py, messages_full_converter).
    """
    limit = fields.get("max_tokens")
    if limit is None or not is_count(limit) or int(bytes(limit)) == 0:
        return False
    if not is_absent(fields, "tool_choice"):
        choice = try_decode(fields["tool_choice"], _Typed)
        if choice is None or choice.type == "tool":
            return False
    if is_absent(fields, "thinking"):
        return True
    thinking = try_decode(fields["thinking"], _Thinking)
    if thinking is None:
        return False
    return thinking.type != "enabled" or (
        thinking.budget_tokens is not None and thinking.budget_tokens < int(bytes(limit))
    )


def _is_in_background(fields: Fields) -> bool:
    return not is_plain(fields, "background", FALSES)


def _has_builtin_tools(fields: Fields) -> bool:
    if is_absent(fields, "tools"):
        return False
    tools = try_decode(fields["tools"], list[_Typed])
    return tools is None or any(tool.type not in _FUNCTION_TOOLS for tool in tools)


def _has_many_prompts(prompt: msgspec.Raw) -> bool:
    """Token ids are one prompt, however many; only a list of texts or of lists can be several."""
    if _FIRST_ELEMENT_IS_NESTED.match(memoryview(prompt)) is None:
        return False
    prompts = try_decode(prompt, list[msgspec.Raw])
    return prompts is None or len(prompts) > 1


def _is_truncation_plain(fields: Fields) -> bool:
    """-1 means as much as fits, which depends on the limit, and P has another one (0.32, renderers/params.py)."""
    return is_absent(fields, "truncate_prompt_tokens") or is_count(fields["truncate_prompt_tokens"])


def _are_limits_plain(fields: Fields) -> bool:
    limits = (fields[name] for name in LIMIT_FIELDS if not is_absent(fields, name))
    # A null `min_tokens` is refused by D, and P does not get to see it.
    return all(map(is_count, limits)) and ("min_tokens" not in fields or is_count(fields["min_tokens"]))


def _is_stream_plain(api: Api, fields: Fields) -> bool:
    if not is_plain(fields, "stream", BOOLS):
        return False
    if api not in CHOICE_APIS or is_absent(fields, "stream_options"):
        return True
    options = try_split(fields["stream_options"])
    return is_stream(fields) and options is not None and all(is_plain(options, name, BOOLS) for name in options)
