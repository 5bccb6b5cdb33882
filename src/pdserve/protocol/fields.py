"""JSON objects taken apart at their top level only.

Every value stays the bytes that were sent, so that a long prompt is copied and never parsed, unknown fields survive, and
integers of any size stay exact. Values are compared as they are: `msgspec.Raw` is equal by its bytes, to another Raw only.
Knows no API.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Fields = dict[str, msgspec.Raw]
"""A JSON object's members, undecoded, in their order."""

_Value = TypeVar("_Value")

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, no UTF-8, or nested a thousand levels deep."""

TRUE = msgspec.Raw(b"true")
FALSE = msgspec.Raw(b"false")
NULL = msgspec.Raw(b"null")

_LONG = 8 * 1024
"""From here on, a value's copy costs more than sending it as a piece of its own."""
_NOTHING = msgspec.Raw(b"0")

_MAX_COUNT_DIGITS = 18
"""A longer integer may overflow whatever reads it; Python's own parser refuses one of 4,301 digits."""
_LIST_IN_LIST = re.compile(rb"\[\s*\[")

split: Callable[[msgspec.Raw | bytes], Fields] = msgspec.json.Decoder(Fields).decode
"""Split a JSON object. Raises one of NOT_JSON."""
join: Callable[[Fields], bytes] = msgspec.json.Encoder().encode
"""Put an object together again."""
_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def join_pieces(fields: Fields) -> bytes | list[bytes | memoryview]:
    """Put an object together for sending, without copying what is long in it: in pieces where there is such."""
    if max(map(len, fields.values()), default=0) <= _LONG:
        return join(fields)
    pieces: list[bytes | memoryview] = []
    before = b"{"
    short: Fields = {}
    for name, value in fields.items():
        if len(value) <= _LONG:
            short[name] = value
            continue
        # Empty as an object, `short` gives nothing but its braces, and so no comma.
        members = join({**short, name: _NOTHING})[1:-2]
        pieces += [before + members, memoryview(value)]
        before, short = b",", {}
    pieces.append(before + join(short)[1:] if short else b"}")
    return pieces


def try_split(raw: msgspec.Raw | bytes) -> Fields | None:
    """Split a JSON object; None when it is something else."""
    try:
        return split(raw)
    except NOT_JSON:
        return None


def try_list(raw: msgspec.Raw | bytes) -> list[msgspec.Raw] | None:
    """Split a JSON list; None when it is something else."""
    try:
        return _decode_list(raw)
    except NOT_JSON:
        return None


def try_decode(raw: msgspec.Raw | bytes, kind: type[_Value]) -> _Value | None:
    """A value of this kind; None when it is something else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON:
        return None


def raw(value: object) -> msgspec.Raw:
    """A value as undecoded JSON."""
    return msgspec.Raw(_encode(value))


def is_absent(fields: Fields, name: str) -> bool:
    """Absent or null."""
    return fields.get(name, NULL) == NULL


def is_count(value: msgspec.Raw) -> bool:
    """Whether a value is plainly a number of something."""
    return len(value) <= _MAX_COUNT_DIGITS and bytes(value).isdigit()


def is_list_of_one_list(value: msgspec.Raw) -> bool:
    """Whether a list holds one list and nothing else, and that one no further lists: seen without parsing, however long it is.

    The first bracket that closes, closes the inner list; if only the outer one's follows, there is no other element. Inside a
    text it would be followed by that text's end.
    """
    if _LIST_IN_LIST.match(value) is None:
        return False
    written = bytes(value)
    return written[written.find(b"]") + 1 :].strip() == b"]"
