"""What a request's head must be for its framing and its target to mean one thing to everybody on the way. Pure.

llhttp (httptools 0.9) refuses most of what requests are smuggled with; what it lets pass, or only newer ones refuse, is
refused here: RFC 9112's musts on lengths, codings, Host and versions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from pdserve.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    from pdserve.http.server import Headers

MAX_HEADER_BYTES = 64 * 1024
"""The request line and all headers together; nginx and Node allow 8 to 16 KiB, some API gateways add long tokens."""
MAX_HEADERS = 128

_IS_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IS_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_IS_TARGET = re.compile(rb"[!-\"$-~]+")
"""Visible ASCII. A fragment never leaves its client (RFC 9112, 3.2)."""
_IS_HOST = re.compile(rb"(?:[A-Za-z0-9._~%!$&'()*+;=-]*|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\])(?::[0-9]*)?")
_IS_ABSOLUTE = re.compile(rb"https?://([^/?]*)([^?]*)(?:\?(.*))?", re.IGNORECASE)
_IS_LENGTH = re.compile(rb"[0-9]{1,18}")


def check_framing(version: str, headers: Headers) -> None:
    """Refuse every head that two parsers could give two lengths. Raises InvalidRequest."""
    if version not in {"1.0", "1.1"}:
        message = f"HTTP/{version} is not spoken here; use HTTP/1.1"
        raise InvalidRequest(message, status=400 if version == "0.9" else 505, reason=Reason.MALFORMED_HTTP)
    for name, value in headers:
        if not _IS_NAME.fullmatch(name) or not _IS_VALUE.fullmatch(value):
            _refuse("a header's name or value holds bytes that do not belong there")
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        _refuse("more than one of content-length and transfer-encoding")
    if lengths and not _IS_LENGTH.fullmatch(lengths[0].strip(b" \t")):
        _refuse("content-length is not a number of bytes")
    if codings:
        _check_coding(version, codings[0])


def _check_coding(version: str, coding: bytes) -> None:
    if version == "1.0":
        _refuse("HTTP/1.0 has no transfer-encoding")
    if coding.strip(b" \t").lower() != b"chunked":
        message = "the only transfer-encoding understood here is chunked"
        raise InvalidRequest(message, status=501, reason=Reason.MALFORMED_HTTP)


def check_host(version: str, headers: Headers) -> None:
    """HTTP/1.1 names its host exactly once (RFC 9112, 3.2). Raises InvalidRequest."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        _refuse("exactly one host header is needed")
    if hosts and not _IS_HOST.fullmatch(hosts[0].strip(b" \t")):
        _refuse("the host header names no host")


def read_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request's target, in any of the forms that a server must take. Raises InvalidRequest.

    The path is `*` for an OPTIONS that asks about the server as a whole.
    """
    if not _IS_TARGET.fullmatch(target):
        _refuse("the request's target holds bytes that do not belong there")
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    absolute = _IS_ABSOLUTE.fullmatch(target)
    if absolute is None or not absolute[1] or not _IS_HOST.fullmatch(absolute[1]):
        _refuse("the request's target is neither a path nor an http URL")
    if method == b"OPTIONS" and not absolute[2] and absolute[3] is None:
        return b"*", b""  # RFC 9112, 3.2.4
    return absolute[2] or b"/", absolute[3] or b""


def expects_continue(version: str, headers: Headers) -> bool:
    """Whether the client waits for a word before it sends the body. Raises InvalidRequest, 417, for any other wish."""
    expectations = [value.strip(b" \t").lower() for name, value in headers if name == b"expect"]
    if version == "1.0" or not expectations:
        return False  # RFC 9110, 10.1.1: an HTTP/1.0 client cannot mean it.
    if any(value != b"100-continue" for value in expectations):
        message = "the only expectation that can be met here is 100-continue"
        raise InvalidRequest(message, status=417, reason=Reason.MALFORMED_HTTP)
    return True


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, reason=Reason.MALFORMED_HTTP)
