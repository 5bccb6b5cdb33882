"""`pdserve gateway --workers 2`: real processes in front of stand-ins that live in the test."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import resource
import signal
import socket
import ssl
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import trustme

from deployment import isolated_env
from pdserve.config import Config, GatewayConfig, parse_config
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.board import Board, open_shared
from pdserve.errors import LaunchError, Reason
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.gateway.workers import crew
from pdserve.gateway.workers import link as wire
from pdserve.gateway.workers.front import running_front
from pdserve.gateway.workers.intake import Intake, hand_over
from pdserve.gateway.workers.link import link_to_front, link_to_worker
from pdserve.http.listener import Listener, bind
from pdserve.protocol.admin import GatewayStatus, RequestRecord
from pdserve.sim.faults import parse_fault
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.sim.stand_in import run_stand_in
from processes import wait_gone
from split import MODEL, SETTINGS, TIMEOUTS, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from pdserve.errors import RequestError
    from pdserve.http.server import Request, Response
    from pdserve.sim.stand_in import StandIn

_START_S = 15.0
_DECODE = EngineAddress(EngineName("decode-0"), Role.DECODE, "http://127.0.0.1:9")
_UNHURRIED = EngineSettings(model=MODEL, max_model_len=2048, num_blocks=512, timing=Timing(decode_step_s=0.05))
_WHOLE: dict[str, Any] = {"model": MODEL, "prompt": "How do two workers share a port?", "max_tokens": 4}
_STREAM: dict[str, Any] = _WHOLE | {"max_tokens": 20, "stream": True}


@dataclass
class _Gateway:
    """The front's process, and what it has said."""

    process: asyncio.subprocess.Process
    said: str = ""
    url: str = ""
    admin: httpx.AsyncClient = field(default_factory=httpx.AsyncClient)

    async def until(self, pattern: str) -> re.Match[str]:
        """Wait until it says something; what was waited for is not found again."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_START_S):
            while (found := re.search(pattern, self.said)) is None:
                line = (await self.process.stdout.readline()).decode()
                assert line, f"{pattern!r} does not come after {self.said}"
                self.said += line
        self.said = self.said[: found.start()] + self.said[found.end() :]
        return found

    async def status(self) -> GatewayStatus:
        return msgspec.json.decode((await self.admin.get("/status")).content, type=GatewayStatus)

    async def pids(self) -> list[int]:
        """The workers'."""
        pids = [worker.pid for worker in (await self.status()).workers]
        return [pid for pid in pids if pid is not None]

    @contextlib.asynccontextmanager
    async def clients(self, number: int, **how: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
        """Each with a connection of its own: they go to the workers in turn."""
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(httpx.AsyncClient(base_url=self.url, timeout=30, **how))
                for _ in range(number)
            ]

    async def ended(self) -> int:
        """The exit status, when nothing is left that could write to the log either."""
        async with asyncio.timeout(_START_S):
            said, _ = await self.process.communicate()
            self.said += said.decode()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, settings: EngineSettings = SETTINGS, arguments: Sequence[str] = ()
) -> AsyncIterator[tuple[_Gateway, list[StandIn]]]:
    """One prefill and one decode engine, proven by both workers."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(run_stand_in(role, settings)) for role in ("kv_producer", "kv_consumer")
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdserve", "gateway", "--workers", "2", "--port", "0", "--admin-port", "0"),
            *("--prefill", engines[0].url, "--decode", engines[1].url, *arguments),
            cwd=folder,
            env=isolated_env(folder / "state"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        gateway = _Gateway(process)
        try:
            found = await gateway.until(r"gateway on (\S+), admin on (\S+), 2 workers\n")
            gateway.url = found[1]
            gateway.admin = await stack.enter_async_context(httpx.AsyncClient(base_url=found[2], timeout=30))
            for _ in range(2):
                await gateway.until(r"worker \d \(pid \d+\) serves\n")
            yield gateway, engines
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
                await gateway.ended()


async def _ask(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post("/v1/completions", json=_WHOLE, headers=headers)


async def _read_stream(client: httpx.AsyncClient, begun: asyncio.Event) -> str:
    """The whole of a stream; `begun` is set with its first piece."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=_STREAM) as answer:
        async for piece in answer.aiter_text():
            text += piece
            begun.set()
    return text


@contextlib.asynccontextmanager
async def _streams(clients: Sequence[httpx.AsyncClient]) -> AsyncIterator[list[asyncio.Task[str]]]:
    """A stream for each, under way."""
    begun = [asyncio.Event() for _ in clients]
    tasks = [asyncio.create_task(_read_stream(client, event)) for client, event in zip(clients, begun, strict=True)]
    try:
        async with asyncio.timeout(_START_S):
            await asyncio.gather(*(event.wait() for event in begun))
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_workers_take_turns_and_are_one_gateway_to_the_operator(tmp_path: Path) -> None:
    """Status, records, metrics and drain speak of both."""
    async with _gateway(tmp_path) as (gateway, _), gateway.clients(4) as clients:
        answers = [await _ask(client) for client in clients for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-pdserve-prefill"] for answer in answers} == {"remote"}
        status = await gateway.status()
        assert [worker.num_requests for worker in status.workers] == [6, 6]
        assert (status.num_requests, status.num_by_place["remote"]) == (12, 12)  # type: ignore[index]
        assert len({worker.pid for worker in status.workers}) == 2

        last = msgspec.json.decode((await gateway.admin.get("/requests?last=5")).content, type=list[RequestRecord])
        ids = [answer.headers["x-pdserve-request-id"] for answer in answers]
        assert [record.request_id for record in last] == ids[:-6:-1]
        for request_id in ids:
            assert (await gateway.admin.get(f"/requests/{request_id}")).json()["request_id"] == request_id
        assert (await gateway.admin.get("/requests/pd-none")).status_code == 404

        metrics = (await gateway.admin.get("/metrics")).text
        assert 'pdserve_requests_total{outcome="ok",path="/v1/completions"} 12.0' in metrics
        assert "pdserve_workers 2.0" in metrics

        assert (await gateway.admin.post("/drain/decode-0")).json()["state"] == "draining"
        refusals = [await _ask(client) for client in clients]
        assert {refusal.headers["x-pdserve-reason"] for refusal in refusals} == {Reason.NO_ENGINE}
        assert (await gateway.admin.post("/undrain/decode-0")).json()["state"] == "ready"
        assert {(await _ask(client)).status_code for client in clients} == {200}
        assert (await gateway.admin.post("/drain/decode-9")).status_code == 404


async def test_a_worker_that_is_killed_is_replaced_and_the_other_goes_on(tmp_path: Path) -> None:
    """Its clients lose their answers; nobody else does, no count falls, and the new one knows what is drained."""
    async with _gateway(tmp_path, _UNHURRIED) as (gateway, _), gateway.clients(2) as clients:
        assert (await _ask(clients[0])).status_code == 200
        before = await gateway.status()
        async with _streams(clients) as streams:
            victim = next(worker.pid for worker in before.workers if worker.num_requests == 1)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await streams[0]
            assert (await streams[1]).endswith("data: [DONE]\n\n")
        await gateway.until(rf"worker \d \(pid {victim}\) was ended by SIGKILL; another one starts in 0.5 s\n")
        async with gateway.clients(2) as newcomers:
            assert {(await _ask(client)).status_code for client in newcomers} == {200}
        assert (await gateway.admin.post("/drain/prefill-0")).json()["state"] == "draining"
        await gateway.until(r"worker \d \(pid \d+\) serves\n")
        after = await gateway.status()
        assert sorted(worker.num_restarts for worker in after.workers) == [0, 1]
        assert victim not in [worker.pid for worker in after.workers]
        assert after.num_requests == before.num_requests + 3
        assert "pdserve_worker_restarts_total 1.0" in (await gateway.admin.get("/metrics")).text
        async with gateway.clients(4) as newcomers:
            places = [(await _ask(client)).headers["x-pdserve-prefill"] for client in newcomers]
        assert places == ["alone"] * 4


async def test_nothing_outlives_a_front_that_is_killed(tmp_path: Path) -> None:
    """The workers see that it is gone."""
    async with _gateway(tmp_path) as (gateway, _), gateway.clients(2) as clients:
        for client in clients:
            await _ask(client)
        pids = await gateway.pids()
        assert len(pids) == 2
        gateway.process.kill()
        assert await asyncio.to_thread(wait_gone, pids) == set()
        await gateway.ended()


async def test_a_stop_lets_the_streams_of_all_workers_end(tmp_path: Path) -> None:
    """And then nothing is left."""
    async with _gateway(tmp_path, _UNHURRIED) as (gateway, engines), gateway.clients(4) as clients:
        pids = await gateway.pids()
        async with _streams(clients) as streams:
            gateway.process.send_signal(signal.SIGTERM)
            for text in await asyncio.gather(*streams):
                assert text.endswith("data: [DONE]\n\n")
        assert await gateway.ended() == 0
        assert await asyncio.to_thread(wait_gone, pids) == set()
        for engine in engines:
            await engine.idle()


async def test_a_second_signal_waits_for_nobody(tmp_path: Path) -> None:
    """It reaches the workers too."""
    async with _gateway(tmp_path) as (gateway, (_, decode)), gateway.clients(2) as clients:
        decode.faults.inject(parse_fault("stall_after:3"), times=None)
        async with _streams(clients) as streams:
            gateway.process.send_signal(signal.SIGINT)
            await gateway.until("stopping")
            status = await gateway.status()
            assert {worker.state for worker in status.workers} == {"leaving"}
            gateway.process.send_signal(signal.SIGINT)
            assert await gateway.ended() == 0
            await asyncio.wait(streams)


async def test_a_worker_that_is_asked_to_stop_ends_its_streams_and_is_replaced(tmp_path: Path) -> None:
    """It gets no more clients meanwhile."""
    async with _gateway(tmp_path, _UNHURRIED) as (gateway, _), gateway.clients(2) as clients:
        pids = await gateway.pids()
        async with _streams(clients) as streams:
            os.kill(pids[0], signal.SIGTERM)
            for text in await asyncio.gather(*streams):
                assert text.endswith("data: [DONE]\n\n")
        await gateway.until(rf"\(pid {pids[0]}\) ended with status 0")
        async with gateway.clients(2) as newcomers:
            assert {(await _ask(client)).status_code for client in newcomers} == {200}
        await gateway.until(r"worker 0 \(pid \d+\) serves\n")
        assert (await gateway.status()).num_requests == 4


async def test_keys_and_certificate_are_renewed_in_every_worker(tmp_path: Path) -> None:
    """One SIGHUP to the front; clients come by TLS, which the workers speak."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("carl:sk-carl-secret\n", encoding="utf-8")
    arguments = ("--api-keys-file", "keys", "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with _gateway(tmp_path, arguments=arguments) as (gateway, _), gateway.clients(2, verify=trust) as clients:
        assert gateway.url.startswith("https://")
        shown = {"authorization": "Bearer sk-dora-secret"}
        assert [(await _ask(client, **shown)).status_code for client in clients] == [401, 401]
        keys.write_text("dora:sk-dora-secret\n", encoding="utf-8")
        gateway.process.send_signal(signal.SIGHUP)
        for _ in clients:
            await gateway.until("certificate read again")
        assert [(await _ask(client, **shown)).status_code for client in clients] == [200, 200]


async def test_a_gateway_whose_workers_cannot_start_says_so() -> None:
    """Instead of starting them again and again."""
    config = Config(gateway=GatewayConfig(port=0, admin_port=0, workers=2))
    addresses = [EngineAddress(EngineName("decode-0"), Role.DECODE, "http://127.0.0.1:9")]
    command = (sys.executable, "-I", "-S", "-c", "import sys; sys.exit(3)")
    with pytest.raises(LaunchError, match=r"worker \d \(pid \d+\) ended with status 3 before it served"):
        async with running_front(config, addresses, bind_gateway(config), command=command) as front:
            await front.until_up()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_a_gateway_whose_workers_still_start(tmp_path: Path, number: signal.Signals) -> None:
    """At once: they have no clients yet."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'gateway-worker' in sys.orig_argv:\n    print('starts', flush=True)\n    time.sleep(600)\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve", "gateway", "--workers", "2", "--port", "0", "--admin-port", "0"),
        *("--decode", "http://127.0.0.1:9"),
        cwd=tmp_path,
        env=isolated_env(tmp_path / "state") | {"PYTHONPATH": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    gateway = _Gateway(process)
    for _ in range(2):
        await gateway.until("starts\n")
    process.send_signal(number)
    assert await gateway.ended() == 0
    assert "Traceback" not in gateway.said


async def test_a_silent_worker_gets_no_new_clients_until_it_answers(tmp_path: Path) -> None:
    """Nobody has to ask for it; a drain that it did not take is an error, and it takes it in the end."""
    async with _gateway(tmp_path) as (gateway, _), gateway.clients(1) as (first,):
        assert (await _ask(first)).status_code == 200
        hung = (await gateway.pids())[0]
        os.kill(hung, signal.SIGSTOP)
        try:
            await gateway.until(rf"\(pid {hung}\) has not answered for 5 s; it gets no new clients until it does\n")
            async with gateway.clients(4) as clients:
                assert {(await _ask(client)).status_code for client in clients} == {200}
            assert [worker.state for worker in (await gateway.status()).workers] == ["silent", "serving"]
            refused = await gateway.admin.post("/drain/prefill-0")
            assert refused.status_code == 500
            assert f"worker 0 (pid {hung}) did not answer" in refused.text
        finally:
            os.kill(hung, signal.SIGCONT)
        await gateway.until(rf"\(pid {hung}\) answers again\n")
        async with gateway.clients(2) as clients:
            answers = [await _ask(client) for client in clients]
        assert [answer.headers["x-pdserve-prefill"] for answer in answers] == ["alone", "alone"]
        assert {worker.state for worker in (await gateway.status()).workers} == {"serving"}


async def test_a_worker_that_stays_silent_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is there, and nobody else, clients wait for the next one."""
    for name, value in (("ASK_EVERY_S", 0.01), ("ANSWER_TIMEOUT_S", 0.5), ("HUNG_S", 0.1)):
        monkeypatch.setattr(crew, name, value)
    async with contextlib.AsyncExitStack() as stack:
        decode = await stack.enter_async_context(run_stand_in("kv_consumer", SETTINGS))
        addresses = [EngineAddress(EngineName("decode-0"), Role.DECODE, decode.url)]
        config = Config(gateway=GatewayConfig(port=0, admin_port=0, workers=2), timeouts=TIMEOUTS)
        command = (sys.executable, "-m", "pdserve", "gateway-worker")
        front = await stack.enter_async_context(running_front(config, addresses, bind_gateway(config), command=command))
        await front.until_up()
        hung = [place.process for place in front.crew.places]
        for process in hung:
            assert process is not None
            process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(_START_S):
            while any(place.process in hung or not place.takes_clients for place in front.crew.places):
                await front.changed.wait()
                front.changed.clear()
        assert [place.num_restarts for place in front.crew.places] == [1, 1]
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=front.url, timeout=30))
        assert (await client.get("/healthcheck")).status_code == 200


async def test_a_configuration_comes_to_a_worker_as_it_is() -> None:
    """A limit of `inf` too, for which JSON has no word; and whoever is cut off has said nothing."""
    ours, theirs = socket.socketpair()
    front, worker = await link_to_worker(ours), await link_to_front(theirs)
    config = parse_config({"timeouts": {"total": math.inf}, "decode": {"urls": ["http://127.0.0.1:9"]}}, source="test")
    begin = wire.Begin(
        config=config, engines=[_DECODE], worker=0, num_workers=2, board_descriptor=3, intake_descriptor=4
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.close)
        stack.push_async_callback(front.close)
        front.send(begin)
        assert await worker.receive() == begin
        await front.flush()
        ours.send(b"\x00\x00\x00\x09half")
        await front.close()
        assert await worker.receive() is None


@pytest.mark.parametrize("is_tls", [False, True])
async def test_whoever_was_handed_over_is_answered_by_a_worker_that_stops(*, is_tls: bool) -> None:
    """Its connection was accepted, and no client sends a first request again."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    channel, theirs = socket.socketpair()
    with channel, bind("127.0.0.1", 0) as door:
        door.listen()
        host, port = door.getsockname()
        how: dict[str, Any] = {"ssl": trust, "server_hostname": host} if is_tls else {}
        async with Listener(_Greeter(), None, tls=tls if is_tls else None, shutdown_s=5) as listener:
            intake = Intake(theirs, listener.take)
            asking = [asyncio.create_task(_get(host, port, **how)) for _ in range(8)]
            for _ in asking:
                connection, _ = await asyncio.get_running_loop().sock_accept(door)
                with connection:
                    assert hand_over(channel, connection)
            channel.close()
            await intake.closed.wait()
        async with asyncio.timeout(_START_S):
            answers = await asyncio.gather(*asking)
        assert {answer.split(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}


async def test_a_client_that_a_worker_cannot_take_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel drops its connection where the worker may open no more files."""
    channel, theirs = socket.socketpair()
    with channel:
        taken: list[socket.socket] = []
        intake = Intake(theirs, taken.append)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hand_over(channel, theirs)
        channel.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            await intake.closed.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not taken
    assert "a client was lost on its way from the front: this worker may open no more than 0 files" in caplog.text


class _Greeter:
    """Says so."""

    async def handle(self, request: Request, response: Response) -> None:
        assert request.path == b"/"
        response.send(200, [], b"hello")

    def render_error(self, error: RequestError) -> tuple[list[tuple[bytes, bytes]], bytes]:
        raise AssertionError(error)


async def _get(host: str, port: int, **how: Any) -> bytes:
    """The whole answer to a request for a connection's only one."""
    reader, writer = await asyncio.open_connection(host, port, **how)
    writer.write(b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return answer


async def test_a_worker_sees_the_load_and_the_salts_of_the_others() -> None:
    """What a policy gets to see is the whole gateway's."""
    async with contextlib.AsyncExitStack() as stack:
        decode = await stack.enter_async_context(run_stand_in("kv_consumer", _UNHURRIED))
        name = EngineName("decode-0")
        addresses = [EngineAddress(name, Role.DECODE, decode.url)]
        config = Config(gateway=GatewayConfig(port=0, admin_port=0), timeouts=TIMEOUTS)
        descriptor = open_shared(num_engines=1, num_workers=2)
        stack.callback(os.close, descriptor)
        pools = []
        for worker in range(2):
            board = Board.shared(descriptor, num_engines=1, worker=worker)
            serving = running_gateway(config, addresses, bind_gateway(config), board=board)
            gateway = await stack.enter_async_context(serving)
            await until_ready(gateway)
            pools.append(gateway.pool)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.client.url, timeout=30))
        async with _streams([client]) as (stream,):
            assert [pool.snapshots()[0].num_in_flight for pool in pools] == [1, 1]
            await stream
        assert [pool.snapshots()[0].num_in_flight for pool in pools] == [0, 0]
        assert [pool.cache_salt(name) for pool in pools] == [None, None]
        pools[0].report_wrong_text(name, Reason.WRONG_CONTEXT, salt=None)
        (salt,) = {pool.cache_salt(name) for pool in pools}
        assert salt is not None
