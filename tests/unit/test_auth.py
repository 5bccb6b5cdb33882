"""Keys: how they are read, who is let in, and that they show themselves nowhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from pdserve.config import EnginesConfig, GatewayConfig
from pdserve.engine.credentials import EngineAccess, Secret, read_engine_key
from pdserve.errors import ConfigError, InvalidRequest, Reason
from pdserve.gateway.auth import ClientKeys, Credentials, NamedKey, own_access, read_client_keys
from pdserve.http.server import Request
from pdserve.launch.deployment import engine_environ

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.http.server import Headers

_ANNA = "sk-anna-0123456789"
_BERT = "sk-bert-0123456789"


def _keys_file(folder: Path, text: str, *, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def _credentials(*, engine_key: str | None = None, **keys: str) -> Credentials:
    known = tuple(NamedKey(name, Secret(key)) for name, key in keys.items())
    return Credentials(ClientKeys(lambda: known), EngineAccess(Secret(engine_key) if engine_key is not None else None))


def _request(*headers: tuple[bytes, bytes], path: bytes = b"/v1/models") -> Request:
    return Request(b"GET", path, b"", list(headers), knows_chunks=True, keep_alive=True, received_at_s=0)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer " + _ANNA.encode())],
        [(b"authorization", b"bearer  " + _ANNA.encode())],
        [(b"x-api-key", _ANNA.encode())],
        [(b"authorization", b"Basic eDp5"), (b"x-api-key", _ANNA.encode())],
        [(b"x-api-key", b"wrong"), (b"authorization", b"Bearer " + _ANNA.encode())],
    ],
)
def test_a_known_key_lets_in_and_has_a_name(headers: Headers) -> None:
    """As OpenAI's and as Anthropic's clients send it."""
    request = _request(*headers)
    _credentials(bert=_BERT, anna=_ANNA).admit(request)
    assert request.key_name == "anna"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", _ANNA.encode())],
        [(b"authorization", b"Basic " + _ANNA.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer " + _ANNA[:-1].encode())],
        [(b"authorization", b"Bearer " + _ANNA.encode() + b"x")],
        [(b"authorization", b"Bearer anna:" + _ANNA.encode())],
        [(b"x-api-key", b"\xff")],
        [(b"api-key", _ANNA.encode())],
    ],
)
@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/completions", b"/nowhere", b"/", b"/health/x", b"*"])
def test_anything_else_is_refused_everywhere(headers: Headers, path: bytes) -> None:
    """401, without a word on which keys there are; also where nothing is served."""
    request = _request(*headers, path=path)
    with pytest.raises(InvalidRequest) as caught:
        _credentials(anna=_ANNA).admit(request)
    assert (caught.value.status, caught.value.reason) == (401, Reason.UNAUTHORIZED)
    assert _ANNA not in str(caught.value)
    assert "anna" not in str(caught.value)
    assert request.key_name is None


@pytest.mark.parametrize("path", [b"/health", b"/health/", b"/healthcheck"])
def test_a_load_balancer_needs_no_key(path: bytes) -> None:
    """It asks for health alone."""
    _credentials(anna=_ANNA).admit(_request(path=path))


def test_without_keys_everybody_is_let_in() -> None:
    """The keys of clients may be the engines' own then, so they are none of the gateway's business."""
    request = _request((b"authorization", b"Bearer whatever"))
    _credentials().admit(request)
    assert request.key_name is None


def test_a_clients_key_goes_on_only_where_pdserve_has_none() -> None:
    """A key for the gateway is none for the engines."""
    authorization = (b"authorization", b"Bearer " + _ANNA.encode())
    headers = [(b"x-api-key", b"x"), authorization, (b"cookie", b"y"), (b"authorization", b"Bearer z")]
    assert _credentials().engine_headers(headers) == [authorization]
    assert _credentials(anna=_ANNA).engine_headers(headers) == []
    assert _credentials(engine_key="e").engine_headers(headers) == []
    assert _credentials(engine_key="e", anna=_ANNA).engine_headers(headers) == []


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    """Both count; a key may hold colons, and a name may have two keys while one replaces the other."""
    path = _keys_file(tmp_path, f"# ours\n\nanna:{_ANNA}\n  bert:a:b:c \nanna:newer\n")
    keys = read_client_keys(GatewayConfig(api_keys_file=path), {"PDSERVE_API_KEYS": "ci:x, cd:y"})
    assert [(entry.name, entry.key.reveal()) for entry in keys] == [
        ("ci", "x"),
        ("cd", "y"),
        ("anna", _ANNA),
        ("bert", "a:b:c"),
        ("anna", "newer"),
    ]
    assert read_client_keys(GatewayConfig(), {"PDSERVE_API_KEYS": " "}) == ()


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (f"anna:{_ANNA}", 0o644, "chmod 600"),
        ("", 0o600, "holds no key"),
        ("# nobody\n", 0o600, "holds no key"),
        (f"anna {_ANNA}", 0o600, "line 1: write name:key"),
        (f"x:y\n:{_ANNA}", 0o600, "line 2: write name:key"),
        (f"an na:{_ANNA}", 0o600, "write name:key"),
        ("anna:", 0o600, "anna: not a key"),
        (f"anna:{_ANNA} {_ANNA}", 0o600, "not a key"),
        (f"anna:{_ANNA}\u00e4", 0o600, "not a key"),
        (f"anna:{_ANNA}\nbert:{_ANNA}", 0o600, "'anna' and 'bert' are the same"),
    ],
)
def test_a_file_that_is_not_right_is_an_error_that_shows_no_key(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    """File and line are enough to find it; and a configured file without keys must not open the gateway."""
    path = _keys_file(tmp_path, text, mode=mode)
    with pytest.raises(ConfigError, match=says) as caught:
        read_client_keys(GatewayConfig(api_keys_file=path), {})
    assert _ANNA not in str(caught.value)


@pytest.mark.parametrize("data", [None, b"anna:\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, data: bytes | None) -> None:
    """Missing, or no text; without the bytes that are none."""
    path = tmp_path / "keys"
    if data is not None:
        path.write_bytes(data)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file") as caught:
        read_client_keys(GatewayConfig(api_keys_file=str(path)), {})
    assert "xff" not in str(caught.value)


def test_a_reload_takes_what_is_new_and_keeps_what_it_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key is replaced without a restart, and a mistake in the file locks nobody out nor lets everybody in."""
    path = _keys_file(tmp_path, f"anna:{_ANNA}\n")
    keys = ClientKeys(lambda: read_client_keys(GatewayConfig(api_keys_file=path), {}))
    _keys_file(tmp_path, f"bert:{_BERT}\n")
    with caplog.at_level(logging.DEBUG):
        keys.reload()
        assert keys.name_of([_BERT.encode()]) == "bert"
        assert keys.name_of([_ANNA.encode()]) is None
        _keys_file(tmp_path, f"nonsense {_ANNA}\n")
        keys.reload()
        assert keys.name_of([_BERT.encode()]) == "bert"
    assert "stay as they are" in caplog.text
    assert _ANNA not in caplog.text
    assert _BERT not in caplog.text


def test_a_key_shows_itself_nowhere() -> None:
    """Not in a repr, not in a format, not inside other values."""
    credentials = _credentials(engine_key=_BERT, anna=_ANNA)
    shown = f"{credentials!r} {credentials.clients.__dict__!r} {Secret(_ANNA)} {NamedKey('anna', Secret(_ANNA))!r}"
    assert _ANNA not in shown
    assert _BERT not in shown
    assert "anna" in shown


def test_the_engines_key_comes_from_the_environment_or_its_file(tmp_path: Path) -> None:
    """The environment beats the file; the file's key is its only word."""
    path = _keys_file(tmp_path, f"{_BERT}\n")
    config = EnginesConfig(api_key_file=path)
    from_file, from_environment = read_engine_key(config, {}), read_engine_key(config, {"PDSERVE_ENGINE_API_KEY": "e"})
    assert from_file is not None
    assert from_environment is not None
    assert (from_file.reveal(), from_environment.reveal()) == (_BERT, "e")
    assert read_engine_key(EnginesConfig(), {"PDSERVE_ENGINE_API_KEY": ""}) is None
    _keys_file(tmp_path, f"two {_BERT}\n")
    with pytest.raises(ConfigError, match="one word") as caught:
        read_engine_key(config, {})
    assert _BERT not in str(caught.value)


def test_engines_start_with_their_key_and_without_the_clients() -> None:
    """vLLM takes it from its environment, which other users of the machine cannot read."""
    environ = {"PATH": "/bin", "PDSERVE_API_KEYS": "a:b", "PDSERVE_API_KEY": "b", "PDSERVE_ENGINE_API_KEY": "e"}
    assert engine_environ(environ, Secret("e")) == {"PATH": "/bin", "VLLM_API_KEY": "e"}
    assert engine_environ(environ, None) == {"PATH": "/bin"}


def test_pdserves_own_commands_have_a_key_too(tmp_path: Path) -> None:
    """`demo` and `verify` ask as the first client where they are told nothing else."""
    config = GatewayConfig(api_keys_file=_keys_file(tmp_path, f"anna:{_ANNA}\nbert:{_BERT}\n"))
    first, own = own_access(config, {}).key, own_access(config, {"PDSERVE_API_KEY": "mine"}).key
    assert first is not None
    assert own is not None
    assert (first.reveal(), own.reveal()) == (_ANNA, "mine")
    assert own_access(GatewayConfig(), {}).key is None
