"""JSON objects taken apart at their top level only.

Every value stays the bytes that were sent, so that a long prompt is copied and never parsed, unknown fields survive, and
integers of any size stay exact. Knows no API.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

Fields = dict[str, msgspec.Raw]
"""A JSON object's members, undecoded, in their order."""

_Value = TypeVar("_Value")

_decode_fields = msgspec.json.Decoder(Fields).decode
_encode = msgspec.json.Encoder().encode

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, no UTF-8, or nested a thousand levels deep."""

TRUE = b"true"
NULL = b"null"
FALSES = frozenset({b"false", NULL})
BOOLS = frozenset({b"true", b"false", NULL})

_MAX_COUNT_DIGITS = 18
"""A longer integer may overflow whatever reads it; Python's own parser refuses one of 4,301 digits."""


def split(raw: msgspec.Raw | bytes) -> Fields:
    """Split a JSON object. Raises one of NOT_JSON."""
    return _decode_fields(raw)


def try_split(raw: msgspec.Raw | bytes) -> Fields | None:
    """Split a JSON object; None when it is something else."""
    try:
        return _decode_fields(raw)
    except NOT_JSON:
        return None


def try_decode(raw: msgspec.Raw | bytes, kind: type[_Value]) -> _Value | None:
    """A value of this kind; None when it is something else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON:
        return None


def join(fields: Fields) -> bytes:
    """Put an object together again."""
    return _encode(fields)


def raw(value: object) -> msgspec.Raw:
    """A value as undecoded JSON."""
    return msgspec.Raw(_encode(value))


def is_spelled(fields: Fields, name: str, literal: bytes) -> bool:
    """Whether a member is there and spelled just so."""
    value = fields.get(name)
    return value is not None and memoryview(value) == literal


def is_plain(fields: Fields, name: str, literals: frozenset[bytes]) -> bool:
    """Absent, or spelled as one of these."""
    return name not in fields or bytes(fields[name]) in literals


def is_absent(fields: Fields, name: str) -> bool:
    """Absent or null."""
    return name not in fields or is_spelled(fields, name, NULL)


def is_count(value: msgspec.Raw) -> bool:
    """Whether a value is plainly a number of something."""
    return len(memoryview(value)) <= _MAX_COUNT_DIGITS and bytes(value).isdigit()
