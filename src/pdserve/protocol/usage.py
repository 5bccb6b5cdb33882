"""D's own count of what it computed: the proof that KV moved, and what of it the client sees.

D's `cached_tokens` counts the prompt tokens that it did not compute, once the handoff came without `nixl.HIDING_KEY`. The
client gets P's prefix hits in that place: what one engine alone would have told it.
"""

from __future__ import annotations

import msgspec

from pdserve.core import Evidence, PrefillPlace
from pdserve.protocol.openai import NOT_JSON, Fields, join, try_split
from pdserve.protocol.sse import event_data

NO_DETAILS = (
    "D gives no prompt token details, so nothing proves where the prompt was computed; "
    "start D with --enable-prompt-tokens-details"
)


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The counts at the end of an answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that D did not compute; None when it does not say."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details is not None else None


def parse_usage(raw: msgspec.Raw | bytes | None) -> Usage | None:
    """Read the counts; None when they are not there or not as vLLM writes them."""
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Usage | None)
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
    computed = num_prompt - num_cached
    return Evidence(
        PrefillPlace.LOCAL,
        num_prompt,
        num_cached,
        cause=f"D computed {computed} of {num_prompt} prompt tokens itself though it was given a handoff; "
        "is D running with --kv-transfer-config and a role that loads KV?",
    )


def for_client(usage: msgspec.Raw, prefill_details: Fields) -> msgspec.Raw:
    """D's usage, with what P says of the prompt wherever D says something of it: as one engine alone would have told it."""
    fields = try_split(usage)
    if fields is None or "prompt_tokens_details" not in fields:
        return usage
    details = try_split(fields["prompt_tokens_details"])
    if details is None:
        return usage
    details.update({name: prefill_details[name] for name in details.keys() & prefill_details.keys()})
    fields["prompt_tokens_details"] = msgspec.Raw(join(details))
    return msgspec.Raw(join(fields))


class UsageWatch:
    """Reads the usage that passes in one answer, and edits it for the client. One per request."""

    __slots__ = ("_client_wants_usage", "_prefill_details", "usage")

    def __init__(self, *, prefill_details: Fields | None, client_wants_usage: bool) -> None:
        self._prefill_details = prefill_details
        """None when D had no handoff: its own count is then the client's too."""
        self._client_wants_usage = client_wants_usage
        self.usage: Usage | None = None

    def edit_event(self, event: bytes) -> bytes:
        """An event of a stream. The one that only the gateway asked for is taken out."""
        fields = try_split(event_data(event))
        if fields is None or "usage" not in fields:
            return event
        self.usage = parse_usage(fields["usage"]) or self.usage
        if not self._client_wants_usage and bytes(fields.get("choices", b"")).replace(b" ", b"") == b"[]":
            return b""
        if not self._replace(fields):
            return event
        return b"data: " + join(fields) + b"\n\n"

    def edit_answer(self, body: bytes) -> bytes:
        """A whole answer; the connector's fields stay inside."""
        fields = try_split(body)
        if fields is None:
            return body
        self.usage = parse_usage(fields.get("usage"))
        is_changed = self._replace(fields)
        if bytes(fields.get("kv_transfer_params", b"null")) != b"null":
            fields["kv_transfer_params"] = msgspec.Raw(b"null")
            is_changed = True
        return join(fields) if is_changed else body

    def _replace(self, fields: Fields) -> bool:
        if self._prefill_details is None or "usage" not in fields:
            return False
        before = fields["usage"]
        fields["usage"] = for_client(before, self._prefill_details)
        return fields["usage"] is not before
