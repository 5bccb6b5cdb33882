"""Forms with a file in them, taken apart and put together anew, less what clients may not say.

vLLM reads `vllm_xargs` off a form too (0.32, entrypoints/speech_to_text/transcription/protocol.py), and a handoff in it reaches
the scheduler as one in a JSON body does. A form has many spellings of one name: quoted, escaped, split up, in another charset.
So no byte of the client's own framing goes on: what is read here strictly is written anew under a boundary of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.errors import InvalidRequest, Reason
from pdserve.protocol.openai import RESERVED_FIELDS, clean_xargs

_CONTENT_TYPE = re.compile(
    rb'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([^"\\\r\n]{1,70})"|([!#$%&\'*+.^_`|~0-9A-Za-z-]{1,70}))[ \t]*',
    re.IGNORECASE,
)
_NAME = re.compile(rb'name=(?:"([\w\[\].-]{1,100})"|([\w\[\].-]{1,100}))')
_FILENAME = re.compile(rb'filename=(?:"((?:[^"\\]|\\.)*)"|([^\s;"\\]*))')
_PLAIN_ENCODINGS = frozenset({b"7bit", b"8bit", b"binary"})
_NOT_IN_QUOTES = re.compile(rb'["\\\x00-\x1f\x7f]')
_IS_TOKEN = re.compile(rb"[A-Za-z-]+")
_IS_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form."""

    name: bytes
    content: bytes
    filename: bytes | None = None
    content_type: bytes | None = None


def clean_form(content_type: bytes, body: bytes, *, boundary: bytes) -> tuple[bytes, bytes]:
    """Content type and body of the same form, under another boundary, which must not be in it. Raises InvalidRequest."""
    parts = [_cleaned(part) for part in read_form(content_type, body) if part.name.decode() not in RESERVED_FIELDS]
    return b"multipart/form-data; boundary=" + boundary, b"".join(
        [*(_written(part, boundary) for part in parts), b"--%b--\r\n" % boundary]
    )


def read_form(content_type: bytes, body: bytes) -> list[Part]:
    """A form's fields. Raises InvalidRequest for everything but the plain form that clients send."""
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise _refusal("the content type must be multipart/form-data and name its boundary")
    delimiter = b"\r\n--" + (found[1] or found[2])
    before, *pieces = (b"\r\n" + body).split(delimiter, _MAX_PARTS + 1)
    if before or not pieces or len(pieces) > _MAX_PARTS:
        raise _refusal(
            "it does not begin with its boundary" if before or not pieces else f"more than {_MAX_PARTS} fields"
        )
    *parts, last = pieces
    if not last.startswith(b"--") or last[2:].strip(b"\r\n"):
        raise _refusal("it does not end with its boundary")
    return [_part(piece) for piece in parts]


def _part(piece: bytes) -> Part:
    if not piece.startswith(b"\r\n"):
        raise _refusal("a boundary is not alone on its line")
    head, end, content = piece[2:].partition(b"\r\n\r\n")
    if not end:
        raise _refusal("a field has no headers")
    headers = dict(_header(line) for line in head.split(b"\r\n"))
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in _PLAIN_ENCODINGS:
        raise _refusal("a field has a transfer encoding")
    kind, *parameters = re.split(rb"[ \t]*;[ \t]*", headers.get(b"content-disposition", b""))
    names = [found for found in map(_NAME.fullmatch, parameters) if found is not None]
    if kind.lower() != b"form-data" or len(names) != 1:
        raise _refusal("a field is not plainly named")
    name = names[0][1] or names[0][2]
    filename = _filename(headers[b"content-disposition"])
    return Part(name, content, filename, headers.get(b"content-type"))


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    value = value.strip(b" \t")
    if not colon or not _IS_TOKEN.fullmatch(name) or not _IS_VALUE.fullmatch(value):
        raise _refusal("a field's headers are malformed")
    return name.lower(), value


def _filename(disposition: bytes) -> bytes | None:
    """A file is one for its name, also where that name is spelled some other way."""
    if b"filename" not in disposition:
        return None
    found = _FILENAME.search(disposition)
    return _NOT_IN_QUOTES.sub(b"_", found[1] or found[2] or b"") if found is not None else b"file"


def _cleaned(part: Part) -> Part:
    return part if part.name != b"vllm_xargs" else Part(part.name, bytes(clean_xargs(part.content)))


def _written(part: Part, boundary: bytes) -> bytes:
    filename = b"" if part.filename is None else b'; filename="%b"' % part.filename
    kind = b"" if part.content_type is None else b"content-type: %b\r\n" % part.content_type
    head = b'--%b\r\ncontent-disposition: form-data; name="%b"%b\r\n%b\r\n' % (boundary, part.name, filename, kind)
    return head + part.content + b"\r\n"


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(f"the form cannot be read: {what}", reason=Reason.INVALID_FIELD)
