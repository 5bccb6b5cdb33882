"""Forms written anew: whatever way a name was spelled, nothing reserved comes out."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.protocol.multipart import Part, clean_form, read_form

_OURS = b"ours-0123456789"


def _form(*parts: str, boundary: str = "b") -> tuple[bytes, bytes]:
    body = "".join(f"--{boundary}\r\n{part}\r\n" for part in parts) + f"--{boundary}--\r\n"
    return f"multipart/form-data; boundary={boundary}".encode(), body.encode()


def _field(disposition: str, content: str = "x") -> str:
    return f"Content-Disposition: {disposition}\r\n\r\n{content}"


def _cleaned(content_type: bytes, body: bytes) -> list[Part]:
    return read_form(*clean_form(content_type, body, boundary=_OURS))


def test_what_a_client_sends_comes_out_again() -> None:
    """httpx writes forms for the official clients."""
    audio = bytes(range(256)) * 40 + b"\r\n--b\r\n\r\n--"
    request = httpx.Request(
        "POST",
        "http://gateway/v1/audio/transcriptions",
        data={"model": "whisper", "timestamp_granularities[]": ["word", "segment"], "prompt": "Grüße\n2"},
        files={"file": ("a b.wav", audio, "audio/wav")},
    )
    content_type, body = clean_form(request.headers["content-type"].encode(), request.read(), boundary=_OURS)
    assert content_type == b"multipart/form-data; boundary=" + _OURS
    assert read_form(content_type, body) == [
        Part(b"model", b"whisper"),
        Part(b"timestamp_granularities[]", b"word"),
        Part(b"timestamp_granularities[]", b"segment"),
        Part(b"prompt", "Grüße\n2".encode()),
        Part(b"file", audio, b"a b.wav", b"audio/wav"),
    ]


def test_reserved_names_are_dropped() -> None:
    """At the top and in `vllm_xargs`, each time that it comes."""
    xargs = json.dumps({"kv_transfer_params": "x", "mine": 1})
    fields = [_field(f'form-data; name="{name}"', xargs) for name in ("vllm_xargs", "kv_transfer_params", "vllm_xargs")]
    assert _cleaned(*_form(*fields)) == [Part(b"vllm_xargs", b'{"mine":1}')] * 2


@pytest.mark.parametrize(
    "disposition",
    [
        "form-data",
        "form-data; name=",
        r'form-data; name="vllm\_xargs"',
        "form-data; name*=utf-8''vllm%5Fxargs",
        'form-data; name*0="vllm_"; name*1="xargs"',
        'form-data; name="a"; name="vllm_xargs"',
        'form-data; filename="a; name=b; c"; name="d"',
        'form-data; name="=?utf-8?q?vllm=5Fxargs?="',
        'attachment; name="a"',
        'form-data; name="a"\r\n continued: x',
        'form-data; name="a"\r\nContent-Transfer-Encoding: base64',
        'form-data; name="a"\r\nno colon',
        'form-data; name="a"\nX: y',
    ],
)
def test_a_name_that_could_be_read_otherwise_is_refused(disposition: str) -> None:
    """What another parser makes of it is not known."""
    with pytest.raises(InvalidRequest, match="form"):
        clean_form(*_form(_field(disposition)), boundary=_OURS)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"", b"--b--\r\n"),
        (b"application/x-www-form-urlencoded", b"vllm_xargs=%7B%7D"),
        (b"multipart/form-data", b"--b--\r\n"),
        (b"multipart/mixed; boundary=b", b"--b--\r\n"),
        (b"multipart/form-data; boundary=b; boundary=c", b"--b--\r\n"),
        (b"multipart/form-data; boundary*=utf-8''b", b"--b--\r\n"),
        (b"multipart/form-data; boundary=b", b""),
        (b"multipart/form-data; boundary=b", b"preamble\r\n--b--\r\n"),
        (b"multipart/form-data; boundary=b", b"--b\r\n"),
        (b"multipart/form-data; boundary=b", b"--b--\r\nepilogue"),
        (b"multipart/form-data; boundary=b", b"--b \r\ncontent-disposition: form-data; name=a\r\n\r\nx\r\n--b--\r\n"),
        (b"multipart/form-data; boundary=b", b"--b\r\nno headers\r\n--b--\r\n"),
    ],
)
def test_a_frame_that_could_be_read_otherwise_is_refused(content_type: bytes, body: bytes) -> None:
    """There is one plain way to write a form, and all clients use it."""
    with pytest.raises(InvalidRequest, match="form"):
        clean_form(content_type, body, boundary=_OURS)


@pytest.mark.parametrize("xargs", ["", "[]", '{"a": NaN, "kv_transfer_params": "x"}', '{"kv_transfer_params": "x"'])
def test_xargs_that_cannot_be_read_are_refused(xargs: str) -> None:
    """As in a JSON body."""
    with pytest.raises(InvalidRequest, match="vllm_xargs"):
        clean_form(*_form(_field('form-data; name="vllm_xargs"', xargs)), boundary=_OURS)


@pytest.mark.parametrize(
    ("filename", "told"),
    [('"a.wav"', b"a.wav"), (r'"a\".wav"', b"a__.wav"), ("a.wav", b"a.wav"), ('"a;b.wav"', b"a;b.wav")],
)
def test_a_files_name_cannot_break_out_of_its_quotes(filename: str, told: bytes) -> None:
    """The name is the client's; the quotes are ours."""
    (part,) = _cleaned(*_form(_field(f'form-data; name="file"; filename={filename}')))
    assert part.filename == told


def test_a_file_with_a_name_in_another_charset_is_still_a_file() -> None:
    """`filename*` alone is how some clients spell names that are not ASCII."""
    (part,) = _cleaned(*_form(_field("form-data; name=\"file\"; filename*=utf-8''%C3%A4.wav")))
    assert part.filename == b"file"


_HEADS = st.sampled_from(
    ['form-data; name="vllm_xargs"', 'form-data; name="kv_transfer_params"', 'form-data; name="a"; filename="b"', "x"]
)


@given(st.lists(st.tuples(_HEADS, st.text(max_size=20)), max_size=4), st.binary(max_size=8), st.integers(0, 200))
def test_any_bytes_are_written_anew_or_refused(fields: list[tuple[str, str]], noise: bytes, at: int) -> None:
    """And what is written anew holds nothing reserved."""
    content_type, body = _form(*(_field(head, content) for head, content in fields))
    with contextlib.suppress(InvalidRequest):
        parts = _cleaned(content_type, body[:at] + noise + body[at:])
        assert b"kv_transfer_params" not in {part.name for part in parts}
