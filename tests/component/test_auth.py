"""Keys on the wire: who is let in, what the engines get to see, and what shows whose request it was."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anthropic
import httpx
import openai
import pytest

from deployment import isolated_env, pdserve
from pdserve.cli.gateway import open_doors
from pdserve.config import Config, GatewayConfig
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.gateway.auth import read_credentials
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.sim.stand_in import run_stand_in
from pdserve.telemetry.metrics import UNAUTHORIZED
from split import MODEL, SETTINGS, TIMEOUTS, until_ready
from tap import Tap, tapped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from pdserve.gateway.service import Gateway

_KEYS = {"PDSERVE_API_KEYS": "anna:sk-anna-secret,bert:sk-bert-secret"}
_ENGINE_KEY = {"PDSERVE_ENGINE_API_KEY": "sk-engine-secret"}
_ANNA = {"authorization": "Bearer sk-anna-secret"}
_BODY = {"model": MODEL, "prompt": "one two three", "max_tokens": 3}


@contextlib.asynccontextmanager
async def _deployment(environ: Mapping[str, str]) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient, list[Tap]]]:
    async with contextlib.AsyncExitStack() as stack:
        taps = []
        for role in ("kv_producer", "kv_consumer"):
            engine = await stack.enter_async_context(run_stand_in(role, SETTINGS))
            taps.append(await stack.enter_async_context(tapped(engine.url)))
        config = Config(gateway=GatewayConfig(port=0, admin_port=0), timeouts=TIMEOUTS)
        addresses = [
            EngineAddress(EngineName(f"{role}-0"), role, tap.url)
            for role, tap in zip((Role.PREFILL, Role.DECODE), taps, strict=True)
        ]
        credentials = read_credentials(config, environ)
        serving = running_gateway(config, addresses, bind_gateway(config), credentials=credentials)
        gateway = await stack.enter_async_context(serving)
        await until_ready(gateway)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.client.url, timeout=30))
        yield gateway, client, taps


async def test_a_request_without_a_known_key_is_refused() -> None:
    """With an error that OpenAI's client understands, and no engine hears of it."""
    async with _deployment(_KEYS) as (gateway, client, taps):
        for headers in ({}, {"authorization": "Bearer sk-anna"}, {"x-api-key": "nothing"}):
            answer = await client.post("/v1/completions", json=_BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["x-pdserve-reason"] == "unauthorized"
            assert answer.json()["error"]["code"] == "unauthorized"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/nowhere")).status_code == 401
        assert gateway.proxy.tally.value(UNAUTHORIZED) == 5
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/healthcheck")).status_code == 200
        assert all(b"one two three" not in bytes(tap.sent) for tap in taps)


async def test_openais_and_anthropics_clients_are_let_in_and_refused() -> None:
    """Each sends its key in its own way, and knows a wrong one for what it is."""
    async with _deployment(_KEYS) as (gateway, _, _taps):
        url = gateway.client.url
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-anna-secret", max_retries=0) as client:
            answer = await client.completions.create(model=MODEL, prompt="one two three", max_tokens=3)
            assert answer.choices[0].text
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        message = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "one two three"}]}
        async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-bert-secret", max_retries=0) as client2:
            await client2.messages.create(**message)  # type: ignore[call-overload]
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client2:
            with pytest.raises(anthropic.AuthenticationError):
                await client2.messages.create(**message)  # type: ignore[call-overload]


async def test_a_record_names_the_key_and_shows_none(caplog: pytest.LogCaptureFixture) -> None:
    """Whose request it was is known from the name alone, wherever it is shown."""
    caplog.set_level("DEBUG")
    async with _deployment(_KEYS | _ENGINE_KEY) as (gateway, client, _):
        answer = await client.post("/v1/completions", json=_BODY, headers=_ANNA)
        assert answer.status_code == 200
        async with httpx.AsyncClient(base_url=gateway.admin.url) as admin:
            shown = [(await admin.get(path)).text for path in ("/status", "/requests", "/metrics")]
    assert '"anna"' in shown[1]
    assert "-secret" not in "".join([*shown, caplog.text, answer.text, str(answer.headers)])


async def test_a_clients_key_goes_on_where_pdserve_has_none() -> None:
    """The engines were started with it, and only they can tell whether it is right."""
    async with _deployment({}) as (_, client, taps):
        await client.post("/v1/completions", json=_BODY, headers=_ANNA)
        for tap in taps:
            assert b"authorization: bearer sk-anna-secret" in b"".join(tap.heads())


@pytest.mark.parametrize("environ", [_KEYS, _ENGINE_KEY, _KEYS | _ENGINE_KEY], ids=["gateway", "engines", "both"])
async def test_a_clients_key_stays_here_where_pdserve_has_one(environ: Mapping[str, str]) -> None:
    """It is a key for the gateway then; engines get their own with every request, or none."""
    async with _deployment(environ) as (_, client, taps):
        for path, body in (("/v1/completions", _BODY), ("/v1/completions", _BODY | {"stream": True})):
            answer = await client.post(path, json=body, headers=_ANNA | {"x-api-key": "sk-bert-secret"})
            assert answer.status_code == 200
        assert (await client.get("/v1/models", headers=_ANNA)).status_code == 200
    for tap in taps:
        heads = tap.heads()
        assert len(heads) > 3
        assert {head.split(b" ")[0] for head in heads} == {b"GET", b"POST"}
        own = b"authorization: bearer sk-engine-secret"
        assert all((own in head) == ("PDSERVE_ENGINE_API_KEY" in environ) for head in heads)
        assert all(head.count(b"authorization") == head.count(own) for head in heads)
        assert b"sk-anna" not in bytes(tap.sent)
        assert b"sk-bert" not in bytes(tap.sent)


def _keys_file(folder: Path, text: str, *, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def _config_file(folder: Path, text: str) -> str:
    path = folder / "pdserve.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_no_command_shows_a_key(tmp_path: Path) -> None:
    """Neither the configuration nor the commands that `up` would run, nor what it says of them."""
    env = isolated_env(tmp_path / "state") | _KEYS | _ENGINE_KEY
    keys, engine_key = _keys_file(tmp_path, "carl:sk-carl-secret\n"), tmp_path / "engine"
    engine_key.write_text("sk-file-secret\n", encoding="utf-8")
    engine_key.chmod(0o600)
    text = f'[gateway]\nport = 0\napi_keys_file = "{keys}"\n[engines]\napi_key_file = "{engine_key}"\n'
    config = _config_file(tmp_path, text)
    for arguments in (("config", "show", "--config", config), ("up", "--dry-run", "--config", config)):
        result = pdserve(*arguments, env=env)
        assert result.returncode == 0, result.stderr
        assert "-secret" not in result.stdout + result.stderr


_WRONG_ANYWHERE = [
    ("[gateway]\napi_keys_file = '/no/such/file'\n", "gateway.api_keys_file"),
    ("[engines]\napi_key_file = '/no/such/file'\n", "engines.api_key_file"),
    ("[engines]\nca_file = '/no/such/file'\n", "engines.ca_file"),
    ("[gateway]\ntls_cert = '/no/such/file'\ntls_key = '/no/such/file'\n", "gateway.tls_cert"),
]
_WRONG_FOR_ENGINES = [
    ("[engines.args]\napi-key = 'sk-secret'\n", "every user of the machine can read a command line"),
    ("[decode.env]\nVLLM_API_KEY = 'sk-secret'\n", "engines.api_key_file"),
]


@pytest.mark.parametrize(
    ("command", "text", "says"),
    [("up", *wrong) for wrong in (*_WRONG_ANYWHERE, *_WRONG_FOR_ENGINES)]
    + [("gateway", *wrong) for wrong in _WRONG_ANYWHERE],
)
def test_what_is_wrong_with_keys_is_found_before_anything_starts(
    tmp_path: Path, command: str, text: str, says: str
) -> None:
    """Exit 2 with the setting, and without the key."""
    arguments = ("--decode", "http://127.0.0.1:9", "--port", "0") if command == "gateway" else ("--dry-run",)
    config = _config_file(tmp_path, text)
    result = pdserve(command, "--config", config, *arguments, env=isolated_env(tmp_path / "state"))
    assert result.returncode == 2
    assert says in result.stderr
    assert "sk-secret" not in result.stderr


def test_a_door_that_stands_open_is_told_of() -> None:
    """Listening beyond this machine without keys is allowed, and never silent."""
    assert list(open_doors(Config(), needs_key=False)) == []
    outside = Config(gateway=GatewayConfig(host="0.0.0.0", admin_host="::"))  # noqa: S104
    assert len(list(open_doors(outside, needs_key=False))) == 2
    (warning,) = open_doors(outside, needs_key=True)
    assert "admin listener" in warning


async def test_a_running_gateway_shows_no_key_and_takes_new_ones(tmp_path: Path) -> None:
    """Its command line is everybody's to read; SIGHUP reads the file again, and requests go on."""
    keys = _keys_file(tmp_path, "carl:sk-carl-secret\n")
    env = isolated_env(tmp_path / "state") | _ENGINE_KEY
    argv = ["-m", "pdserve", "gateway", "--port", "0", "--admin-port", "0", "--api-keys-file", keys]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        "--decode",
        "http://127.0.0.1:9",
        env=env | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = ""
    try:
        async with asyncio.timeout(30):
            while "gateway on " not in said:
                said += (await process.stdout.readline()).decode()
            url = said.partition("gateway on ")[2].partition(",")[0]
            async with httpx.AsyncClient(base_url=url) as client:
                assert await _status(client, "sk-carl-secret") == 503
                assert await _status(client, "sk-dora-secret") == 401
                _keys_file(tmp_path, "dora:sk-dora-secret\n")
                process.send_signal(signal.SIGHUP)
                while "API keys read again: dora" not in said:
                    said += (await process.stdout.readline()).decode()
                assert await _status(client, "sk-carl-secret") == 401
                assert await _status(client, "sk-dora-secret") == 503
        command_line = await asyncio.to_thread(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        assert b"-secret" not in command_line
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
    assert "-secret" not in said + rest.decode()


async def _status(client: httpx.AsyncClient, key: str) -> int:
    return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code


async def test_who_may_not_ask_may_not_fill_the_memory_either() -> None:
    """A long body is refused at its head; a client that waits for a word before it sends one never sends it."""
    async with _deployment(_KEYS) as (gateway, _, _taps):
        url = httpx.URL(gateway.client.url)
        for framing in ("content-length: 999999", "transfer-encoding: chunked"):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\nexpect: 100-continue\r\n\r\n"
            writer.write(head.encode())
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"www-authenticate: Bearer" in answer
            writer.close()


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
)
async def test_a_web_page_cannot_drain_an_engine(headers: dict[str, str]) -> None:
    """A page that the operator looks at may send to loopback addresses; its browser tells on it."""
    async with _deployment({}) as (gateway, _, _taps), httpx.AsyncClient(base_url=gateway.admin.url) as admin:
        assert (await admin.post("/drain/decode-0", headers=headers)).status_code == 403
        assert (await admin.get("/status", headers=headers)).status_code == 403
        assert (await admin.get("/status", headers={"sec-fetch-site": "none"})).status_code == 200
        assert gateway.pool.state_of(EngineName("decode-0"))[0] == "ready"
