"""TLS on both sides of the gateway, with certificates that the tests make."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from pdserve.config import Config, EnginesConfig, GatewayConfig, parse_config
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.credentials import OPEN_ACCESS, read_engine_access, trusting
from pdserve.engine.transport import EngineClient
from pdserve.errors import ConfigError, EngineUnreachable
from pdserve.gateway.auth import own_access
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.http.listener import Listener, bind, server_tls
from pdserve.sim.stand_in import run_stand_in
from pdserve.verify.check import Verifier
from split import MODEL, SETTINGS, TIMEOUTS, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.errors import InvalidRequest
    from pdserve.gateway.service import Gateway
    from pdserve.http.server import Headers, Request, Response


@dataclass(frozen=True)
class _Files:
    """A server's certificate with its key, and the CA that vouches for it."""

    cert: str
    key: str
    ca: str

    @classmethod
    def made_in(cls, folder: Path, name: str = "127.0.0.1", **how: Any) -> _Files:
        folder.mkdir(exist_ok=True)
        ca = trustme.CA()
        issued = ca.issue_cert(name, **how)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
        issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        issued.private_key_pem.write_to_path(str(folder / "key.pem"))
        ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        return cls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"))


class _App:
    """A stream with a word in it, and a request that waits."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()

    async def handle(self, request: Request, response: Response) -> None:
        if request.path == b"/hang":
            self.arrived.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        response.start(200, [])
        response.write(b"x" * 300_000)
        response.write(b"the end")
        response.end()

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], error.reason.encode()


@contextlib.asynccontextmanager
async def _listening(files: _Files) -> AsyncIterator[tuple[Listener, _App, int]]:
    app = _App()
    tls = server_tls(files.cert, files.key)
    async with Listener(app, bind("127.0.0.1", 0), tls=tls, shutdown_s=5) as listener:
        yield listener, app, int(listener.url.rpartition(":")[2])


def _client(url: str, access: Any = OPEN_ACCESS) -> EngineClient:
    return EngineClient(EngineAddress(EngineName("e"), Role.DECODE, url), connect_timeout_s=10, access=access)


def _trusting(files: _Files) -> Any:
    return read_engine_access(EnginesConfig(ca_file=files.ca), {})


async def test_an_answer_comes_whole_over_tls(tmp_path: Path) -> None:
    """A long stream too, and the connection is used again."""
    files = _Files.made_in(tmp_path)
    async with _listening(files) as (listener, _, _port):
        assert listener.url.startswith("https://")
        client = _client(listener.url, _trusting(files))
        for _ in range(2):
            answer = await client.get("/stream", timeout_s=10)
            assert len(answer.body) == 300_007
        assert listener.num_connections == 1
        client.close()


@pytest.mark.parametrize(
    ("name", "how", "trusts_it", "says"),
    [
        ("127.0.0.1", {}, False, r"not trusted: .*; name its CA in engines\.ca_file"),
        ("other.example", {}, True, r"not trusted: .*mismatch.*; use a name or address that stands in it"),
        (
            "127.0.0.1",
            {
                "not_before": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
                "not_after": dt.datetime(2021, 1, 1, tzinfo=dt.UTC),
            },
            True,
            "not trusted: certificate has expired",
        ),
    ],
    ids=["wrong CA", "wrong name", "expired"],
)
async def test_an_engine_that_is_not_who_it_says_is_not_spoken_to(
    tmp_path: Path, name: str, how: dict[str, Any], *, trusts_it: bool, says: str
) -> None:
    """The error names the engine, what is wrong with its certificate, and what to do."""
    files = _Files.made_in(tmp_path / "its", name, **how)
    trusted = files if trusts_it else _Files.made_in(tmp_path / "another")
    async with _listening(files) as (listener, app, _):
        with pytest.raises(EngineUnreachable, match=rf"engine e at https://127\.0\.0\.1:\d+: its TLS .*{says}"):
            await _client(listener.url, _trusting(trusted)).get("/hang", timeout_s=10)
        with pytest.raises(EngineUnreachable, match="not trusted"):
            await _client(listener.url).get("/hang", timeout_s=10)
        assert not app.arrived.is_set()


async def test_an_engine_without_tls_is_told_apart() -> None:
    """The likely mistake is the scheme."""
    async with Listener(_App(), bind("127.0.0.1", 0), shutdown_s=1) as listener:
        url = listener.url.replace("http://", "https://")
        with pytest.raises(EngineUnreachable, match=r"no TLS: .* write http://"):
            await _client(url).get("/", timeout_s=10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_from_1_2_on_is_spoken(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Both that are in use."""
    files = _Files.made_in(tmp_path)
    context = trusting(files.ca, setting="x")
    context.minimum_version = context.maximum_version = version
    _greet(server_tls(files.cert, files.key), context)


def test_old_tls_is_refused(tmp_path: Path) -> None:
    """1.1 has been given up by everybody (RFC 8996)."""
    files = _Files.made_in(tmp_path)
    context = trusting(files.ca, setting="x")
    context.set_ciphers("ALL:@SECLEVEL=0")  # Else it is the client that refuses.
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        _greet(server_tls(files.cert, files.key), context)


def _greet(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A client's first words, and the server's opinion of them, which no socket would tell."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    for context, incoming, outgoing, name in (
        (client, to_client, to_server, "127.0.0.1"),
        (server, to_server, to_client, None),
    ):
        side = context.wrap_bio(incoming, outgoing, server_side=name is None, server_hostname=name)
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


async def test_plain_http_on_the_tls_port_is_hung_up_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is answered in the clear, nothing reaches the application, and the listener goes on."""
    files = _Files.made_in(tmp_path)
    async with _listening(files) as (listener, app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/" not in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert not app.arrived.is_set()
        client = _client(listener.url, _trusting(files))
        assert (await client.get("/", timeout_s=10)).status == 200
        client.close()
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_is_noticed_under_tls_too(tmp_path: Path) -> None:
    """TLS has no half of a connection: its end is the client's."""
    files = _Files.made_in(tmp_path)
    async with _listening(files) as (_, app, port):
        context = trusting(files.ca, setting="x")
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.arrived.wait(), 10)
        writer.close()
        await asyncio.wait_for(app.cancelled.wait(), 10)


async def test_a_stop_lets_the_answer_in_hand_end_and_says_farewell(tmp_path: Path) -> None:
    """The client gets all of it and an orderly end, not a cut that an attacker could have made."""
    files = _Files.made_in(tmp_path)
    async with _listening(files) as (listener, app, port):
        context = trusting(files.ca, setting="x")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.arrived.wait(), 10)
        stopping = asyncio.create_task(listener.stop())
        await asyncio.sleep(0.2)  # uvicorn tells its connections a moment after it stops listening
        app.release.set()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.endswith(b"the end\r\n0\r\n\r\n")
        assert b"connection: close\r\n" in answer
        writer.close()
        await asyncio.wait_for(stopping, 10)


async def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    """Without a restart; a file that is not right changes nothing."""
    files, newer = _Files.made_in(tmp_path / "old"), _Files.made_in(tmp_path / "new")
    async with _listening(files) as (listener, _, _port):
        listener.renew_certificate(newer.cert, newer.key)
        client = _client(listener.url, _trusting(newer))
        assert (await client.get("/", timeout_s=10)).status == 200
        with pytest.raises(ConfigError):
            listener.renew_certificate(str(tmp_path / "none"), newer.key)
        client.close()
        client = _client(listener.url, _trusting(newer))
        assert (await client.get("/", timeout_s=10)).status == 200
        client.close()


def test_certificates_that_are_not_right_are_found_before_anything_starts(tmp_path: Path) -> None:
    """Missing, no PEM, of two pairs, or encrypted: files and cause are named, and nobody is asked for a password."""
    files, other = _Files.made_in(tmp_path / "a"), _Files.made_in(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert = '/no/cert'.*cannot read them: No such file"):
        server_tls("/no/cert", files.key)
    with pytest.raises(ConfigError, match="do not belong together"):
        server_tls(files.cert, other.key)
    text = tmp_path / "text"
    text.write_text("no certificate", encoding="ascii")
    with pytest.raises(ConfigError, match="no PEM certificate and key"):
        server_tls(str(text), files.key)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        server_tls(files.cert, _encrypted(files.key, tmp_path / "encrypted.pem"))
    with pytest.raises(ConfigError, match=r"engines\.ca_file = '.*text': holds no PEM certificate"):
        trusting(str(text), setting="engines.ca_file")
    with pytest.raises(ConfigError, match=r"engines\.ca_file = '/no/ca': cannot read it"):
        trusting("/no/ca", setting="engines.ca_file")
    with pytest.raises(ConfigError, match="go together"):
        parse_config({"gateway": {"tls_cert": files.cert}}, source="x")


def _encrypted(key_path: str, path: Path) -> str:
    with open(key_path, "rb") as file:  # noqa: PTH123
        key = serialization.load_pem_private_key(file.read(), password=None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    return str(path)


@contextlib.asynccontextmanager
async def _gateway(files: _Files, *, engines: _Files | None = None) -> AsyncIterator[Gateway]:
    """A gateway that speaks TLS, in front of stand-ins that do if `engines` says so."""
    async with contextlib.AsyncExitStack() as stack:
        stand_ins = [
            await stack.enter_async_context(run_stand_in(role, SETTINGS)) for role in ("kv_producer", "kv_consumer")
        ]
        urls = [stand_in.url for stand_in in stand_ins]
        if engines is not None:
            urls = [await stack.enter_async_context(_behind_tls(url, engines)) for url in urls]
        config = Config(
            gateway=GatewayConfig(port=0, admin_port=0, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca),
            engines=EnginesConfig(ca_file=engines.ca if engines is not None else None),
            timeouts=TIMEOUTS,
        )
        addresses = [
            EngineAddress(EngineName(f"{role}-0"), role, url)
            for role, url in zip((Role.PREFILL, Role.DECODE), urls, strict=True)
        ]
        gateway = await stack.enter_async_context(running_gateway(config, addresses, bind_gateway(config)))
        await until_ready(gateway)
        yield gateway


@contextlib.asynccontextmanager
async def _behind_tls(url: str, files: _Files) -> AsyncIterator[str]:
    """What a TLS proxy in front of an engine does."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, engine_writer), _copy(engine_reader, writer))

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.create_task(relay(reader, writer)))

    sock = bind("127.0.0.1", 0)
    server = await asyncio.start_server(connected, sock=sock, ssl=server_tls(files.cert, files.key))
    try:
        yield f"https://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.close()
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def test_a_split_request_is_served_with_tls_on_both_sides(tmp_path: Path) -> None:
    """KV is proven to move, and a stream comes whole."""
    files, engines = _Files.made_in(tmp_path / "gateway"), _Files.made_in(tmp_path / "engines")
    async with _gateway(files, engines=engines) as gateway:
        context = trusting(files.ca, setting="x")
        async with httpx.AsyncClient(base_url=gateway.client.url, verify=context) as client:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": 5}
            answer = await client.post("/v1/completions", json=body)
            stream = await client.post("/v1/completions", json=body | {"stream": True})
        assert answer.headers["x-pdserve-prefill"] == "remote"
        assert stream.text.endswith("data: [DONE]\n\n")


async def test_pdserves_own_check_trusts_the_gateways_ca(tmp_path: Path) -> None:
    """`demo` and `verify` ask by HTTPS, and only with the CA that is configured."""
    files = _Files.made_in(tmp_path)
    async with _gateway(files) as gateway:
        access = own_access(GatewayConfig(tls_ca=files.ca), {})
        verifier = await Verifier.of_pdserve(gateway.client.url, gateway.admin.url, access=access)
        report = await verifier.verify("one two three four", max_tokens=4)
        verifier.close()
        assert report.has_moved
        verifier = await Verifier.of_pdserve(gateway.client.url, gateway.admin.url)
        with pytest.raises(EngineUnreachable, match="not trusted"):
            await verifier.verify("one two three four", max_tokens=4)
        verifier.close()
