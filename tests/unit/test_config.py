"""The configuration file: right values, and errors that name file, key, value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import Config, check_url, load_config, parse_config
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_empty_file_is_the_default() -> None:
    """Every key has a default."""
    assert parse_config({}, source="f") == Config()


def test_the_admin_port_follows_the_port() -> None:
    """It is the next one unless it is named; a port that the kernel chooses has no next one."""
    assert parse_config({"gateway": {"port": 9000}}, source="f").admin_port == 9001
    assert parse_config({"gateway": {"port": 9000, "admin_port": 5}}, source="f").admin_port == 5
    assert parse_config({"gateway": {"port": 0}}, source="f").admin_port == 0


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"gatway": {}}, r"f\.toml: unknown key 'gatway'; did you mean 'gateway'\?"),
        ({"gateway": {"xyz": 1}}, r"unknown key 'gateway\.xyz'; allowed here: admin_host, "),
        ({"gateway": {"port": 70000}}, r"gateway\.port = 70000: expected `int` <= 65535"),
        ({"gateway": {"port": "80"}}, r"gateway\.port = '80': expected `int`"),
        ({"timeouts": {"connect": 0}}, r"timeouts\.connect = 0: expected `float` > 0"),
        ({"timeouts": {"kv_lease": 4.0}}, r"kv_lease_margin = 5\.0 leaves nothing of timeouts\.kv_lease = 4\.0"),
        ({"decode": {"urls": ["10.0.0.7:8100"]}}, r"decode\.urls: '10\.0\.0\.7:8100' is not an engine's address"),
        ({"name": "a/b"}, r"name = 'a/b'"),
        ({"engines": {"command": []}}, r"engines\.command is empty"),
        ({"prefill": {"count": -1}}, r"prefill\.count = -1: expected `int` >= 0"),
    ],
)
def test_a_wrong_value_is_named(table: dict[str, Any], says: str) -> None:
    """Whoever reads the message knows which line to change, and how."""
    with pytest.raises(ConfigError, match=says):
        parse_config(table, source="f.toml")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a = ", "not valid TOML"), (b"\xff", "not UTF-8"), (None, "cannot read the configuration: No such file")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    """The path stands in the message."""
    path = tmp_path / "pdserve.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_an_engines_url_is_scheme_host_and_port() -> None:
    """A trailing slash is forgiven; paths and credentials are not."""
    assert check_url("http://a:1/", source="s") == "http://a:1"
    for url in ("a:1", "ftp://a:1", "http://a:1/v1", "http://u@a:1", "http://a:0", "http://a:x", "http://"):
        with pytest.raises(ConfigError, match="s: "):
            check_url(url, source="s")
