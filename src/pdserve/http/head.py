"""What a request's head must be for its framing and its target to mean one thing to everybody on the way. Pure.

llhttp (httptools 0.9) refuses most of what requests are smuggled with; what it lets pass, or only newer ones refuse, is
refused here: RFC 9112's musts on lengths, codings, Host and versions.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, NoReturn

import msgspec

from pdserve.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    from pdserve.http.server import Headers

MAX_HEADER_BYTES = 64 * 1024
"""The request line and all headers together; nginx and Node allow 8 to 16 KiB, some API gateways add long tokens."""
MAX_HEADERS = 128

_VERSIONS = frozenset({"1.0", "1.1"})
_MEANT_FOR_HERE = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})
_NAME_BYTES = b"!#$%&'*+.^_`|~-" + string.ascii_letters.encode() + string.digits.encode()
_VALUE_BYTES = bytes({*range(256)} - {*range(0x20), 0x7F} | {0x09})
_IS_TARGET = re.compile(rb"[!-\"$-~]+").fullmatch
"""Visible ASCII. A fragment never leaves its client (RFC 9112, 3.2)."""
_IS_HOST = re.compile(
    rb"(?:[A-Za-z0-9._~%!$&'()*+;=-]*|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\])(?::[0-9]*)?"
).fullmatch
_IS_ABSOLUTE = re.compile(rb"https?://([^/?]*)([^?]*)(?:\?(.*))?", re.IGNORECASE).fullmatch
_IS_LENGTH = re.compile(rb"[0-9]{1,18}").fullmatch


class Head(msgspec.Struct, frozen=True, gc=False):
    """What a request's headers say of the request itself."""

    length: int
    """Of the body; 0 where chunks tell it."""
    is_chunked: bool
    expects_continue: bool
    """Whether the client waits for a word before it sends the body."""


def read_head(version: str, headers: Headers) -> Head:
    """Refuse every head that two parsers could give two lengths, or that names no host. Raises InvalidRequest."""
    if version not in _VERSIONS:
        message = f"HTTP/{version} is not spoken here; use HTTP/1.1"
        raise InvalidRequest(message, status=400 if version == "0.9" else 505, reason=Reason.MALFORMED_HTTP)
    _check_bytes(headers)
    length = coding = host = expectation = None
    for name, value in headers:
        if name not in _MEANT_FOR_HERE:
            continue
        if name == b"host":
            if host is not None:
                _refuse_host()
            host = value
        elif name == b"expect":
            expectation = value if expectation is None else expectation + b"," + value
        elif length is not None or coding is not None:
            _refuse("more than one of content-length and transfer-encoding")
        elif name == b"content-length":
            length = value
        else:
            coding = value
    _check_host(version, host)
    if coding is not None:
        _check_coding(version, coding)
    return Head(
        0 if length is None else _read_length(length),
        coding is not None,
        expectation is not None and _expects_continue(version, expectation),
    )


def _check_bytes(headers: Headers) -> None:
    """All names at once and all values at once: a check for each would be most of what a head costs."""
    names = [name for name, _ in headers]
    values = [value for _, value in headers]
    if b"" in names or b"".join(names).translate(None, _NAME_BYTES) or b"".join(values).translate(None, _VALUE_BYTES):
        _refuse("a header's name or value holds bytes that do not belong there")


def _read_length(length: bytes) -> int:
    if not _IS_LENGTH(length):
        _refuse("content-length is not a number of bytes")
    return int(length)


def _check_coding(version: str, coding: bytes) -> None:
    if version == "1.0":
        _refuse("HTTP/1.0 has no transfer-encoding")
    if coding.lower() != b"chunked":
        message = "the only transfer-encoding understood here is chunked"
        raise InvalidRequest(message, status=501, reason=Reason.MALFORMED_HTTP)


def _check_host(version: str, host: bytes | None) -> None:
    """HTTP/1.1 names its host exactly once (RFC 9112, 3.2)."""
    if host is None:
        if version != "1.0":
            _refuse_host()
    elif not _IS_HOST(host):
        _refuse("the host header names no host")


def _expects_continue(version: str, expectation: bytes) -> bool:
    """417 for any other wish."""
    if version == "1.0":
        return False  # RFC 9110, 10.1.1: an HTTP/1.0 client cannot mean it.
    if any(wish.strip(b" \t").lower() != b"100-continue" for wish in expectation.split(b",")):
        message = "the only expectation that can be met here is 100-continue"
        raise InvalidRequest(message, status=417, reason=Reason.MALFORMED_HTTP)
    return True


def read_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request's target, in any of the forms that a server must take. Raises InvalidRequest.

    The path is `*` for an OPTIONS that asks about the server as a whole.
    """
    if not _IS_TARGET(target):
        _refuse("the request's target holds bytes that do not belong there")
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    absolute = _IS_ABSOLUTE(target)
    if absolute is None or not absolute[1] or not _IS_HOST(absolute[1]):
        _refuse("the request's target is neither a path nor an http URL")
    if method == b"OPTIONS" and not absolute[2] and absolute[3] is None:
        return b"*", b""  # RFC 9112, 3.2.4
    return absolute[2] or b"/", absolute[3] or b""


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, reason=Reason.MALFORMED_HTTP)


def _refuse_host() -> NoReturn:
    _refuse("exactly one host header is needed")
