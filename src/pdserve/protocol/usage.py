"""D's own count of what it computed: the proof that KV moved, and what of it the client sees.

D counts the prompt tokens that it did not compute, once the handoff came without `nixl.HIDING_KEY`. The client gets P's prefix
hits in that place: what one engine alone would have told it. Each API has its own words for both.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdserve.core import Evidence, PrefillPlace
from pdserve.protocol.api import ANSWER_FIELD, CHOICE_APIS, Api
from pdserve.protocol.fields import NOT_JSON, NULL, Fields, is_absent, join, raw, try_decode, try_split
from pdserve.protocol.sse import PROMPT_TOKENS_MARK, event_data, with_data

NO_DETAILS = (
    "D gives no prompt token details, so nothing proves where the prompt was computed; "
    "start D with --enable-prompt-tokens-details"
)

_INPUT_TOKENS_MARK = b'"input_tokens"'
_CACHE_READ = "cache_read_input_tokens"
_CACHE_CREATION = "cache_creation_input_tokens"
_CACHE_COUNTS = (_CACHE_READ, _CACHE_CREATION)
_HANDOFF_FIELDS = ("kv_transfer_params", "ec_transfer_params")


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The counts at the end of an answer, whatever its API."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine did not compute; None when it does not say."""


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _ChoicesUsage(msgspec.Struct, frozen=True, gc=False):
    """Of completions and chat."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def plain(self) -> Usage:
        details = self.prompt_tokens_details
        return Usage(self.prompt_tokens, self.completion_tokens, None if details is None else details.cached_tokens)


class _ResponseUsage(msgspec.Struct, frozen=True, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None

    def plain(self) -> Usage:
        details = self.input_tokens_details
        return Usage(self.input_tokens, self.output_tokens, None if details is None else details.cached_tokens)


class _MessageUsage(msgspec.Struct, frozen=True, gc=False):
    """Cached tokens are no part of `input_tokens` (vLLM 0.32, entrypoints/anthropic/serving.py, _build_anthropic_usage)."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def plain(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.output_tokens, self.cache_read_input_tokens)

    @property
    def num_prompt_tokens(self) -> int | None:
        if self.input_tokens is None:
            return None
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)


class _Form(Protocol):
    """An API's words for what an engine counted. A usage is given undecoded, or split."""

    def counts(self, usage: msgspec.Raw | bytes) -> Usage:
        """Raises one of NOT_JSON."""

    def prompt_details(self, usage: Fields) -> Fields | None:
        """What it says of the engine's cache; None when it says nothing."""

    def cache_hits(self, num_tokens: int) -> Fields:
        """The same, where only the number of prefix hits is known."""

    def replace_details(self, usage: Fields, details: Fields) -> bool:
        """Say of the prompt what P says, wherever D says something of it; whether it does."""


class _Nested:
    """Of completions, chat and responses: an object inside tells of the cache."""

    def __init__(self, kind: type[_ChoicesUsage | _ResponseUsage], details_field: str) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._details_field = details_field

    def counts(self, usage: msgspec.Raw | bytes) -> Usage:
        return self._decode(usage).plain()

    def prompt_details(self, usage: Fields) -> Fields | None:
        return try_split(usage.get(self._details_field, NULL)) or None

    def cache_hits(self, num_tokens: int) -> Fields:
        return {"cached_tokens": raw(num_tokens)}

    def replace_details(self, usage: Fields, details: Fields) -> bool:
        told = try_split(usage.get(self._details_field, NULL))
        if told is None:
            return False
        for name in told:
            if name in details:
                told[name] = details[name]
        usage[self._details_field] = raw(told)
        return True


class _Flat:
    """Of messages: three counts side by side make up the prompt, so one cannot change without another."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_MessageUsage).decode

    def counts(self, usage: msgspec.Raw | bytes) -> Usage:
        return self._decode(usage).plain()

    def prompt_details(self, usage: Fields) -> Fields | None:
        return {name: usage[name] for name in _CACHE_COUNTS if not is_absent(usage, name)} or None

    def cache_hits(self, num_tokens: int) -> Fields:
        return {_CACHE_READ: raw(num_tokens)}

    def replace_details(self, usage: Fields, details: Fields) -> bool:
        counted, told = try_decode(join(usage), _MessageUsage), try_decode(join(usage | details), _MessageUsage)
        if is_absent(usage, _CACHE_READ) or counted is None or told is None or counted.num_prompt_tokens is None:
            return False
        num_cached = (told.cache_read_input_tokens or 0) + (told.cache_creation_input_tokens or 0)
        usage.update(details)
        usage["input_tokens"] = raw(max(0, counted.num_prompt_tokens - num_cached))
        return True


_CHOICES = _Nested(_ChoicesUsage, "prompt_tokens_details")
_FORMS: dict[Api, _Form] = {
    Api.COMPLETIONS: _CHOICES,
    Api.CHAT_COMPLETIONS: _CHOICES,
    Api.RESPONSES: _Nested(_ResponseUsage, "input_tokens_details"),
    Api.MESSAGES: _Flat(),
}


def usage_mark(api: Api) -> bytes:
    """What every event that holds an API's usage holds (pdserve.protocol.sse, EventRelay)."""
    return PROMPT_TOKENS_MARK if api in CHOICE_APIS else _INPUT_TOKENS_MARK


def parse_usage(api: Api, usage: msgspec.Raw | bytes | None) -> Usage | None:
    """Read the counts; None when they are not there or not as vLLM writes them."""
    if usage is None:
        return None
    try:
        return _FORMS[api].counts(usage)
    except NOT_JSON:
        return None


def judge(usage: Usage | None) -> Evidence:
    """What D's counts prove of a request that it got a handoff for."""
    if usage is None or usage.prompt_tokens is None:
        return Evidence(PrefillPlace.UNPROVEN, cause="D's answer holds no usage")
    num_prompt, num_cached = usage.prompt_tokens, usage.num_cached_tokens
    if num_cached is None:
        return Evidence(PrefillPlace.UNPROVEN, num_prompt, cause=NO_DETAILS)
    if num_cached >= num_prompt:
        # A prefix hit of its own never covers the last token: vLLM computes at least one (v1/core/kv_cache_manager.py,
        # get_computed_blocks), so a count this high can only have come over the wire.
        return Evidence(PrefillPlace.REMOTE, num_prompt, num_cached)
    if num_prompt == 1:
        # With all of a prompt there vLLM computes the last token once more, and of one token nothing is left
        # (0.32, v1/core/sched/scheduler.py, _update_waiting_for_remote_kv).
        return Evidence(PrefillPlace.LOCAL, 1, num_cached, cause="D computes a prompt of a single token in any case")
    computed = num_prompt - num_cached
    return Evidence(
        PrefillPlace.LOCAL,
        num_prompt,
        num_cached,
        cause=f"D computed {computed} of {num_prompt} prompt tokens itself though it was given a handoff; "
        "is D running with --kv-transfer-config and a role that loads KV?",
    )


def prompt_details(api: Api, usage: msgspec.Raw) -> Fields | None:
    """What an engine's usage says of its cache, in the API's own form; None when it says nothing."""
    fields = try_split(usage)
    return None if fields is None else _FORMS[api].prompt_details(fields)


def cache_hits(api: Api, num_tokens: int) -> Fields:
    """The same, where only the number of prefix hits is known."""
    return _FORMS[api].cache_hits(num_tokens)


def for_client(api: Api, usage: msgspec.Raw, prefill_details: Fields) -> msgspec.Raw:
    """D's usage, with what P says of the prompt wherever D says something of it: as one engine alone would have told it."""
    fields = try_split(usage)
    return raw(fields) if fields is not None and _FORMS[api].replace_details(fields, prefill_details) else usage


class UsageWatch:
    """Reads the usage that passes in one answer, and edits it for the client. One per request."""

    __slots__ = ("_api", "_client_wants_usage", "_prefill_details", "has_answer", "usage")

    def __init__(self, api: Api, *, prefill_details: Fields | None, client_wants_usage: bool) -> None:
        self._api = api
        self._prefill_details = prefill_details
        """None when D had no handoff: its own count is then the client's too."""
        self._client_wants_usage = client_wants_usage
        self.usage: Usage | None = None
        self.has_answer = False
        """Whether what `edit_answer` got holds what an answer of the API cannot be without."""

    @property
    def mark(self) -> bytes:
        """What every event that `edit_event` must see holds."""
        return usage_mark(self._api)

    def edit_event(self, event: bytes) -> bytes:
        """An event of a stream. The one that only the gateway asked for is taken out."""
        fields = try_split(event_data(event))
        if fields is None:
            return event
        is_changed = self._edit_response(fields) if self._api is Api.RESPONSES else self._edit(fields)
        if self._is_ours_alone(fields):
            return b""
        return with_data(event, join(fields)) if is_changed else event

    def edit_answer(self, body: bytes) -> bytes:
        """A whole answer; the connector's fields stay inside."""
        fields = try_split(body)
        if fields is None:
            return body
        self.has_answer = ANSWER_FIELD[self._api] in fields
        return join(fields) if self._edit(fields) else body

    def _edit_response(self, fields: Fields) -> bool:
        """The last event of a response holds all of it, as a whole answer would."""
        response = try_split(fields["response"]) if "response" in fields else None
        if response is None or not self._edit(response):
            return False
        fields["response"] = raw(response)
        return True

    def _edit(self, fields: Fields) -> bool:
        is_changed = hide_handoff(self._api, fields)
        usage = fields.get("usage")
        if usage is None:
            return is_changed
        self.usage = parse_usage(self._api, usage) or self.usage
        if self._prefill_details is None:
            return is_changed
        told = for_client(self._api, usage, self._prefill_details)
        if told is usage:
            return is_changed
        fields["usage"] = told
        return True

    def _is_ours_alone(self, fields: Fields) -> bool:
        if self._client_wants_usage or "usage" not in fields:
            return False
        return bytes(fields.get("choices", b"")).replace(b" ", b"") == b"[]"


def hide_handoff(api: Api, fields: Fields) -> bool:
    """Take the connector's fields out of an answer, the way that an engine without one leaves them; whether there were any."""
    is_changed = False
    for name in _HANDOFF_FIELDS:
        if fields.get(name, NULL) != NULL:
            is_changed = True
            if api is Api.MESSAGES:
                del fields[name]  # What is null there is not sent at all.
            else:
                fields[name] = NULL
    return is_changed
