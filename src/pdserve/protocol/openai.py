"""Request bodies: how one is taken apart, less what clients may not say, and which of its fields the gateway reads.

A body is split at its top level only (pdserve.protocol.fields). What its shape allows stands in pdserve.protocol.shape. Nothing
here knows of connectors.
"""

from __future__ import annotations

import hashlib

import msgspec

from pdserve.core import RequestFacts
from pdserve.errors import InvalidRequest, Reason
from pdserve.protocol import shape
from pdserve.protocol.api import CHOICE_APIS, PROMPT_FIELD, PROMPT_PARTS, ROUTED_APIS, Api, api_of
from pdserve.protocol.failure import error_body, error_event, error_status
from pdserve.protocol.fields import (
    NOT_JSON,
    TRUE,
    Fields,
    is_absent,
    is_count,
    join,
    join_pieces,
    raw,
    split,
    try_decode,
    try_split,
)
from pdserve.protocol.shape import is_stream

__all__ = [
    "JSON_HEADER",
    "NOT_JSON",
    "RESERVED_FIELDS",
    "ROUTED_APIS",
    "Api",
    "Fields",
    "api_of",
    "clean_xargs",
    "error_body",
    "error_event",
    "error_status",
    "facts_of",
    "is_stream",
    "join",
    "join_pieces",
    "previous_response_id",
    "split_request",
    "try_split",
    "wants_stream_usage",
    "with_cache_salt",
    "with_stream_usage",
    "without_reserved",
]

JSON_HEADER = (b"content-type", b"application/json")

RESERVED_FIELDS = frozenset(
    {
        "kv_transfer_params",  # One such request ends a kv_consumer's EngineCore; another makes it connect anywhere.
        "ec_transfer_params",  # The same door for encoder caches (vLLM 0.32, entrypoints/openai/*/protocol.py).
        "bootstrap_host",  # SGLang's spelling of a handoff.
        "bootstrap_port",
        "bootstrap_room",
    }
)
"""What only the gateway may say to an engine."""

_XARGS = "vllm_xargs"
_RESERVED_XARGS = RESERVED_FIELDS | {"kv_cache_report_mode"}
"""`vllm_xargs` reaches what the scheduler reads the handoff from, for all four APIs; this one makes an engine flood its
listeners with KV events (vLLM 0.32, v1/request.py)."""


def split_request(body: bytes) -> Fields:
    """Split a request's body, less what clients may not say. Raises InvalidRequest."""
    try:
        fields = split(body)
    except NOT_JSON as exc:
        raise InvalidRequest(f"the body is not a JSON object: {exc}", reason=Reason.MALFORMED_JSON) from exc
    if RESERVED_FIELDS.isdisjoint(fields) and _XARGS not in fields:
        return fields
    fields = without_reserved(fields)
    if not is_absent(fields, _XARGS):
        fields[_XARGS] = clean_xargs(fields[_XARGS])
    return fields


def without_reserved(fields: Fields) -> Fields:
    """Less what only the gateway may say."""
    return {name: value for name, value in fields.items() if name not in RESERVED_FIELDS}


def clean_xargs(xargs: msgspec.Raw | bytes) -> msgspec.Raw:
    """`vllm_xargs` less what clients may not say. Raises InvalidRequest.

    What cannot be read is not passed on: an engine's more lenient parser may well read it, and find a handoff in it.
    """
    fields = try_split(xargs)
    if fields is None:
        raise InvalidRequest("the field 'vllm_xargs' is not a JSON object")
    return raw({name: value for name, value in fields.items() if name not in _RESERVED_XARGS})


def facts_of(api: Api, fields: Fields) -> RequestFacts:
    """What the policy may know. Raises InvalidRequest when there is nothing to prefill."""
    prompt_field = PROMPT_FIELD[api]
    if prompt_field not in fields and (api is not Api.COMPLETIONS or is_absent(fields, "prompt_embeds")):
        raise InvalidRequest(f"the field {prompt_field!r} is missing")
    alone_reason = shape.alone_reason(api, fields)
    prompt_bytes = 0
    for name in PROMPT_PARTS[api]:
        if name in fields:
            prompt_bytes += len(fields[name])
    return RequestFacts(
        prompt_bytes,
        is_stream(fields),
        alone_reason,
        priority=_priority(fields["priority"]) if "priority" in fields else 0,
        is_repeatable=alone_reason not in shape.UNREPEATABLE,
    )


def wants_stream_usage(api: Api, fields: Fields) -> bool:
    """Whether the client gets to see its stream's usage: where it comes always, or was asked for."""
    if api not in CHOICE_APIS:
        return True
    options = fields.get("stream_options")
    inner = try_split(options) if options is not None else None
    return inner is not None and inner.get("include_usage") == TRUE


def with_stream_usage(api: Api, fields: Fields) -> Fields:
    """The same request, asking for the usage event that proves where the prompt was computed."""
    if wants_stream_usage(api, fields):
        return fields
    options = fields.get("stream_options")
    inner = (try_split(options) if options is not None else None) or {}
    inner["include_usage"] = TRUE
    # Without effect for a client that wants no usage, and with ours it would bring usage in every chunk.
    inner.pop("continuous_usage_stats", None)
    return {**fields, "stream_options": raw(inner)}


def with_cache_salt(fields: Fields, salt: str) -> Fields:
    """The same request, in a prefix cache of its own: the client's own salt still keeps apart what it kept apart."""
    digest = hashlib.sha256(bytes(fields.get("cache_salt", b"")) + salt.encode()).hexdigest()
    return {**fields, "cache_salt": raw(digest)}


def previous_response_id(fields: Fields) -> str | None:
    """The response that a request to `/v1/responses` follows."""
    value = fields.get("previous_response_id")
    return try_decode(value, str) if value is not None else None


def _priority(value: msgspec.Raw) -> int:
    return int(bytes(value)) if is_count(msgspec.Raw(bytes(value).removeprefix(b"-"))) else 0
