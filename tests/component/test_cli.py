"""The command line as a process: what it says and with which status it ends when something is wrong beforehand."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deployment import isolated_env, pdserve
from pdserve.config import parse_config

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing runs and nothing is cached."""
    return isolated_env(tmp_path / "state") | {"PDSERVE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def _config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pdserve.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_help_names_every_command(env: dict[str, str]) -> None:
    """A newcomer sees what there is."""
    out = pdserve("--help", env=env).stdout
    for command in ("up", "status", "logs", "down", "gateway", "verify", "demo", "config", "sim"):
        assert re.search(rf"^  {command}\s", out, re.MULTILINE), command


def test_an_unknown_key_is_named(env: dict[str, str], tmp_path: Path) -> None:
    """File, key and the likely right one; exit 2."""
    path = _config(tmp_path, "[gatway]\nport = 1\n")
    result = pdserve("up", "--config", path, env=env)
    assert result.returncode == 2
    assert f"{path}: unknown key 'gatway'; did you mean 'gateway'?" in result.stderr


@pytest.mark.parametrize(
    ("model", "says"),
    [("/no/such/folder", "/no/such/folder"), ("Qwen/Qwen2.5-0.5B-Instruct", "hf:Qwen/Qwen2.5-0.5B-Instruct")],
)
def test_a_missing_model_is_found_before_anything_starts(env: dict[str, str], model: str, says: str) -> None:
    """Exit 2, and what to write instead."""
    result = pdserve("up", "--model", model, env=env)
    assert result.returncode == 2
    assert says in result.stderr


def test_a_python_without_vllm_is_told_what_to_install(env: dict[str, str], tmp_path: Path) -> None:
    """The engines run from the Python that the configuration names, if it has vLLM."""
    result = pdserve("up", "--config", _config(tmp_path, '[engines]\npython = "/usr/bin/no-python"\n'), env=env)
    assert result.returncode == 2
    assert "engines.python" in result.stderr


def test_a_gateway_needs_somebody_to_decode(env: dict[str, str]) -> None:
    """Exit 2 and the flag to give."""
    result = pdserve("gateway", "--prefill", "http://127.0.0.1:1", env=env)
    assert result.returncode == 2
    assert "--decode URL" in result.stderr


def test_one_url_has_one_role(env: dict[str, str]) -> None:
    """An engine that is named twice would pull from itself."""
    result = pdserve("gateway", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1/", env=env)
    assert result.returncode == 2
    assert "named twice" in result.stderr


def test_a_taken_port_stops_the_gateway(env: dict[str, str], taken_port: int) -> None:
    """Exit 2 and the port's number."""
    result = pdserve("gateway", "--decode", "http://127.0.0.1:1", "--port", str(taken_port), env=env)
    assert result.returncode == 2
    assert f"127.0.0.1:{taken_port}" in result.stderr


@pytest.mark.parametrize("command", ["status", "logs", "down", "verify"])
def test_nothing_running_is_said(env: dict[str, str], command: str) -> None:
    """Exit 2 and what to do."""
    result = pdserve(command, env=env)
    assert result.returncode == 2
    assert "nothing runs on this machine" in result.stderr


def test_verify_wants_both_sides_or_neither(env: dict[str, str]) -> None:
    """Half the engines could only give half the evidence."""
    result = pdserve("verify", "--url", "http://127.0.0.1:1", "--prefill", "http://127.0.0.1:2", env=env)
    assert result.returncode == 2
    assert "both sides" in result.stderr


def test_verify_in_front_of_nobody_says_so(env: dict[str, str]) -> None:
    """Exit 1: the address was well formed, and nobody is there."""
    result = pdserve("verify", "--url", "http://127.0.0.1:1", "--admin", "http://127.0.0.1:2", env=env)
    assert result.returncode == 1
    assert "cannot connect" in result.stderr


def test_the_configuration_is_shown_as_understood(env: dict[str, str], tmp_path: Path) -> None:
    """Defaults and the file's values together, in a form that can be loaded again."""
    shown = pdserve("config", "show", "--config", _config(tmp_path, "[gateway]\nport = 9000\n"), env=env).stdout
    assert json.loads(shown)["gateway"]["port"] == 9000
    again = tmp_path / "again.json"
    again.write_text(shown, encoding="utf-8")
    assert pdserve("config", "show", "--config", str(again), env=env).stdout == shown


def test_the_environment_names_the_file(env: dict[str, str], tmp_path: Path) -> None:
    """PDSERVE_CONFIG stands in for --config."""
    path = _config(tmp_path, 'name = "mine"\n')
    assert json.loads(pdserve("config", "show", env=env | {"PDSERVE_CONFIG": path}).stdout)["name"] == "mine"


def test_the_readmes_configuration_is_valid() -> None:
    """An example that fails is worse than none."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert parse_config(tomllib.loads(example), source="README.md").decode.count == 2
