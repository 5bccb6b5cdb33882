"""The commands around real engines: verify, status, logs, and what `up` says when an engine cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from deployment import STOP_TIMEOUT_S, isolated_env, pdserve
from pdserve.http.listener import Listener, bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from deployment import RealPair
    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_verify_proves_it(real_pair: RealPair) -> None:
    """Exit 0, D's count, both engines' counters, the transfer's size and time, and D alone agrees."""
    result = pdserve("verify", "--json", env=real_pair.env)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["has_moved"] is True
    num_prompt = report["num_prompt_tokens"]
    assert report["record"]["num_remote_tokens"] == num_prompt
    (decode,) = report["decode"]
    assert decode["counters"]["num_prompt_tokens_remote"] == num_prompt
    assert decode["counters"]["num_prompt_tokens_local"] == 0
    assert decode["counters"]["num_transfers"] == 1
    assert decode["counters"]["transfer_bytes"] > 0
    assert report["prefill"][0]["counters"]["num_prompt_tokens_local"] == num_prompt
    assert report["comparison"]["agreement"] in {"equal", "near_tie"}


def test_verify_shows_it_in_vllms_own_words(real_pair: RealPair) -> None:
    """The lines that the engines' logs are searched for are found."""
    result = pdserve("verify", env=real_pair.env)
    assert "KV moved." in result.stdout
    assert "NIXL compatibility check passed" in result.stdout
    assert "Num successful transfers=" in result.stdout
    assert '"POST /v1/completions HTTP/1.1" 200' in result.stdout


class _Lossy:
    """A gateway as some are: it runs the P leg, and forgets what P answered."""

    def __init__(self, pair: RealPair, client: httpx.AsyncClient) -> None:
        self._pair = pair
        self._client = client

    async def handle(self, request: Request, response: Response) -> None:
        if request.method == b"GET":
            answer = await self._client.get(self._pair.decode_url + request.path.decode())
        else:
            fields = json.loads(request.body)
            leg = fields | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
            del leg["stream_options"]
            await self._client.post(f"{self._pair.prefill_url}/v1/completions", json=leg)
            answer = await self._client.post(f"{self._pair.decode_url}/v1/completions", json=fields)
        response.send(answer.status_code, [(b"content-type", answer.headers["content-type"].encode())], answer.content)

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], str(error).encode()


@contextlib.asynccontextmanager
async def _lossy_gateway(pair: RealPair) -> AsyncIterator[str]:
    async with (
        httpx.AsyncClient(timeout=120) as client,
        Listener(_Lossy(pair, client), bind("127.0.0.1", 0)) as listener,
    ):
        yield listener.url


async def test_verify_catches_a_gateway_that_loses_the_handoff(real_pair: RealPair) -> None:
    """Everything answers 200 and the text is right; D computed it all, and verify says so."""
    async with _lossy_gateway(real_pair) as url:
        engines = ["--prefill", real_pair.prefill_url, "--decode", real_pair.decode_url]
        result = await asyncio.to_thread(pdserve, "verify", "--url", url, *engines, env=real_pair.env)
    assert result.returncode == 1
    assert "prompt tokens itself, though P computed them too" in result.stderr
    assert "the gateway lost it on the way" in result.stderr


def test_status_tells_what_runs(real_pair: RealPair) -> None:
    """Engines, the proven pair, and where the prompts were computed."""
    result = pdserve("status", env=real_pair.env)
    assert result.returncode == 0, result.stderr
    assert "prefill-0" in result.stdout
    assert "proven prefill-0 to decode-0" in result.stdout
    assert "tokens" in result.stdout


def test_logs_are_found_by_name(real_pair: RealPair) -> None:
    """One engine's log, and a wrong name is told the right ones."""
    result = pdserve("logs", "-n", "5", "decode-0", env=real_pair.env)
    assert len(result.stdout.splitlines()) == 5
    wrong = pdserve("logs", "decode-9", env=real_pair.env)
    assert wrong.returncode == 2
    assert "there are: decode-0, gateway, prefill-0" in wrong.stderr


def test_a_taken_port_is_found_before_anything_starts(real_pair: RealPair, tmp_path: Path) -> None:
    """Exit 2, and who has it."""
    port = real_pair.gateway_url.rpartition(":")[2]
    result = pdserve("up", "--port", port, env=isolated_env(tmp_path))
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use by pid" in result.stderr


def test_an_engine_that_cannot_start_is_explained(tmp_path: Path) -> None:
    """Exit 1, the end of its log, the cause in words; and nothing is left running."""
    config = tmp_path / "pdserve.toml"
    config.write_text("[decode.args]\nno-such-flag = true\n", encoding="utf-8")
    result = pdserve("up", "--port", "0", "--config", str(config), env=isolated_env(tmp_path))
    assert result.returncode == 1
    assert "unrecognized arguments: --no-such-flag" in result.stderr
    assert "engine decode-0" in result.stderr
    assert "Likely cause:" in result.stderr
    assert _processes_of(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_pdserve(tmp_path: Path, how: signal.Signals) -> None:
    """However pdserve ends while its engines start, all of vLLM's processes end with it."""
    ready, ready_fd = os.pipe()
    argv = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--ready-fd", str(ready_fd)]
    env = isolated_env(tmp_path)
    process = subprocess.Popen(argv, env=env, pass_fds=[ready_fd], stdout=subprocess.DEVNULL)
    os.close(ready_fd)
    with os.fdopen(ready, "rb"):
        children = _wait_for_engines(process.pid)
        process.send_signal(how)
        assert process.wait(STOP_TIMEOUT_S) == (130 if how == signal.SIGTERM else -how)
        _, alive = psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)
        assert alive == []


def _wait_for_engines(pid: int) -> list[psutil.Process]:
    """Every descendant, once both engines have started processes of their own."""
    parent = psutil.Process(pid)
    while True:
        descendants = parent.children(recursive=True)
        commands = [" ".join(child.cmdline()) for child in descendants if child.is_running()]
        if sum("vllm.entrypoints" in command for command in commands) >= 2 and len(descendants) >= 8:
            return descendants
        assert parent.is_running()
        with contextlib.suppress(psutil.TimeoutExpired):
            parent.wait(0.2)


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name a folder or have it in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PDSERVE_STATE_DIR") == str(folder):
                found.append(" ".join(process.cmdline()))
    return found
