"""The OpenAI requests that are split: which fields the gateway reads, and how a body is taken apart and put together.

A body is split at its top level only. Every value stays the bytes that the client sent, so that a long prompt is copied
and never parsed, unknown fields survive, and integers of any size stay exact. Nothing here knows of connectors.
"""

from __future__ import annotations

import enum
import re

import msgspec

from pdserve.core import AloneReason, RequestFacts
from pdserve.errors import InvalidRequest, Reason, RequestError

Fields = dict[str, msgspec.Raw]
"""A JSON object's members, undecoded, in their order."""

JSON_HEADER = (b"content-type", b"application/json")

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode

_TRUE = b"true"
_NULL = b"null"
_ONES = frozenset({b"1", _NULL})
_FALSES = frozenset({b"false", _NULL})
_BOOLS = frozenset({b"true", b"false", _NULL})
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Every spelling of how long an answer may get."""
_FIRST_ELEMENT_IS_NESTED = re.compile(rb'\[\s*["\[]')


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, no UTF-8, or nested a thousand levels deep."""


class _Error(msgspec.Struct, frozen=True):
    code: int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class Api(enum.StrEnum):
    """The requests that can be split, by path."""

    COMPLETIONS = "/v1/completions"
    CHAT_COMPLETIONS = "/v1/chat/completions"


ROUTED_APIS = {api.value.encode(): api for api in Api}

_PROMPT_FIELDS = {Api.COMPLETIONS: "prompt", Api.CHAT_COMPLETIONS: "messages"}

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


def split_request(body: bytes) -> Fields:
    """Split a request's body, less what clients may not say. Raises InvalidRequest."""
    try:
        fields = _decode_fields(body)
    except NOT_JSON as exc:
        raise InvalidRequest(f"the body is not a JSON object: {exc}", reason=Reason.MALFORMED_JSON) from exc
    for name in RESERVED_FIELDS & fields.keys():
        del fields[name]
    if "vllm_xargs" in fields:
        fields["vllm_xargs"] = _without_reserved(fields["vllm_xargs"])
    return fields


def _without_reserved(xargs: msgspec.Raw) -> msgspec.Raw:
    """vLLM 0.32 copies `vllm_xargs` over what it reads the handoff from (completion/protocol.py, to_sampling_params)."""
    fields = try_split(xargs)
    if fields is None or not RESERVED_FIELDS & fields.keys():
        return xargs
    return msgspec.Raw(_encode({name: value for name, value in fields.items() if name not in RESERVED_FIELDS}))


def try_split(raw: msgspec.Raw | bytes) -> Fields | None:
    """Split a JSON object; None when it is something else."""
    try:
        return _decode_fields(raw)
    except NOT_JSON:
        return None


def join(fields: Fields) -> bytes:
    """Put a body together again."""
    return _encode(fields)


def facts_of(api: Api, fields: Fields) -> RequestFacts:
    """What the policy may know. Raises InvalidRequest when there is nothing to prefill."""
    prompt = fields.get(_PROMPT_FIELDS[api])
    if prompt is None and (api is not Api.COMPLETIONS or _is_absent(fields, "prompt_embeds")):
        raise InvalidRequest(f"the field {_PROMPT_FIELDS[api]!r} is missing")
    return RequestFacts(
        prompt_bytes=len(memoryview(prompt)) if prompt is not None else 0,
        is_stream=is_stream(fields),
        alone_reason=_alone_reason(api, fields),
    )


def is_stream(fields: Fields) -> bool:
    """Whether the client asked for server-sent events."""
    return _is(fields, "stream", _TRUE)


def wants_stream_usage(fields: Fields) -> bool:
    """Whether the client asked for a usage event at the end of its stream."""
    options = fields.get("stream_options")
    inner = try_split(options) if options is not None else None
    return inner is not None and _is(inner, "include_usage", _TRUE)


def with_stream_usage(fields: Fields) -> Fields:
    """The same request, asking for the usage event that proves where the prompt was computed."""
    options = fields.get("stream_options")
    inner = (try_split(options) if options is not None else None) or {}
    inner["include_usage"] = msgspec.Raw(_TRUE)
    return {**fields, "stream_options": msgspec.Raw(_encode(inner))}


def error_body(error: RequestError) -> bytes:
    """An error as OpenAI clients expect it; `code` is the reason."""
    kind = "invalid_request_error" if error.status < 500 else "engine_error"  # noqa: PLR2004
    return _encode({"error": {"message": str(error), "type": kind, "param": None, "code": error.reason}})


def error_status(body: bytes) -> int:
    """The HTTP status that an error body names as its `code`; 500 when it names none."""
    try:
        code = msgspec.json.decode(body, type=_ErrorBody).error.code
    except NOT_JSON:
        return 500
    return code if code is not None and 400 <= code < 600 else 500  # noqa: PLR2004


def _alone_reason(api: Api, fields: Fields) -> AloneReason | None:
    """Split only what is certain to be one prompt with one choice, and certain to be valid on D if it is on P.

    vLLM reads `"n": "2"` as two and `"echo": 1` as true, so whatever is not spelled plainly goes to D alone: one handoff
    for two choices gives the second one another request's KV. And what P never sees of a request (its limits, its stream
    options) D may refuse before admission without telling P, which would hold the blocks until its lease ends.
    """
    if not (_is_plain(fields, "n", _ONES) and _is_plain(fields, "best_of", _ONES)):
        return AloneReason.MANY_CHOICES
    if not _is_plain(fields, "use_beam_search", _FALSES):
        return AloneReason.BEAM_SEARCH
    if not _is_absent(fields, "prompt_logprobs"):
        return AloneReason.PROMPT_LOGPROBS
    if not _is_plain(fields, "echo", _FALSES):
        return AloneReason.PROMPT_ECHO
    if not _is_absent(fields, "prompt_embeds") or (api is Api.COMPLETIONS and _has_many_prompts(fields["prompt"])):
        return AloneReason.MANY_PROMPTS
    return None if _are_limits_plain(fields) and _are_stream_options_plain(fields) else AloneReason.UNUSUAL_FIELDS


def _has_many_prompts(prompt: msgspec.Raw) -> bool:
    """Token ids are one prompt, however many; only a list of texts or of lists can be several."""
    is_nested = _FIRST_ELEMENT_IS_NESTED.match(memoryview(prompt)) is not None
    return is_nested and len(_decode_list(prompt)) > 1


def _are_limits_plain(fields: Fields) -> bool:
    return all(_is_absent(fields, name) or bytes(fields[name]).isdigit() for name in (*LIMIT_FIELDS, "min_tokens"))


def _are_stream_options_plain(fields: Fields) -> bool:
    if not _is_plain(fields, "stream", _BOOLS):
        return False
    if _is_absent(fields, "stream_options"):
        return True
    options = try_split(fields["stream_options"])
    return is_stream(fields) and options is not None and all(_is_plain(options, name, _BOOLS) for name in options)


def _is(fields: Fields, name: str, literal: bytes) -> bool:
    value = fields.get(name)
    return value is not None and memoryview(value) == literal


def _is_plain(fields: Fields, name: str, literals: frozenset[bytes]) -> bool:
    """Absent, null, or spelled as one of these."""
    return name not in fields or bytes(fields[name]) in literals


def _is_absent(fields: Fields, name: str) -> bool:
    return name not in fields or _is(fields, name, _NULL)
