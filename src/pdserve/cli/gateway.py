"""`pdserve gateway`: the gateway alone, in front of engines that someone else started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from typing import TYPE_CHECKING

import click

from pdserve.cli.collector import calm_collector
from pdserve.cli.open_files import max_clients, raise_limit, shortage
from pdserve.cli.options import config_option, environment, read_config, security_flags, security_options
from pdserve.config import check_url, is_loopback
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from pdserve.config import Config
    from pdserve.gateway.auth import Credentials
    from pdserve.gateway.service import Gateway
    from pdserve.gateway.workers.front import Front

_logger = logging.getLogger("pdserve.gateway")


@click.command()
@click.option("--prefill", "prefill_urls", multiple=True, metavar="URL", help="A prefill engine; give one or more.")
@click.option("--decode", "decode_urls", multiple=True, metavar="URL", help="A decode engine; give one or more.")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 chooses one [default: 8192].")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Port of the admin listener [default: the next one].")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that serve clients [default: 1].")
@security_options
@config_option
def gateway(
    prefill_urls: tuple[str, ...],
    decode_urls: tuple[str, ...],
    host: str | None,
    port: int | None,
    admin_port: int | None,
    workers: int | None,
    api_keys_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    config_path: Path | None,
) -> None:
    """Route OpenAI requests through prefill and decode engines that are already running.

    Each engine is a vLLM server with a NixlConnector; the first handoff of every pair is proven before it takes traffic.
    PDSERVE_API_KEYS=name:key,... names clients' keys too, PDSERVE_ENGINE_API_KEY the engines' own. SIGHUP reads the key file
    and the certificate again.
    """
    config = read_config(
        config_path,
        {
            "gateway.host": host,
            "gateway.port": port,
            "gateway.admin_port": admin_port,
            "gateway.workers": workers,
            "prefill.urls": list(prefill_urls) or None,
            "decode.urls": list(decode_urls) or None,
            **security_flags(api_keys_file, tls_cert, tls_key),
        },
    )
    run_gateway(config, addresses_of(config))


def addresses_of(config: Config) -> list[EngineAddress]:
    """The engines that the configuration names. Raises ConfigError when there is nobody to decode."""
    if not config.decode.urls:
        raise ConfigError("no decode engine: give --decode URL, or decode.urls in the configuration")
    addresses = [
        EngineAddress(EngineName(f"{role}-{index}"), role, check_url(url, source=f"{role}.urls"))
        for role, urls in ((Role.PREFILL, config.prefill.urls), (Role.DECODE, config.decode.urls))
        for index, url in enumerate(urls)
    ]
    urls = [address.url for address in addresses]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url} is named twice; an engine has one role and one place in the list")
    return addresses


def run_gateway(config: Config, addresses: list[EngineAddress]) -> None:
    """Serve until a signal. Raises ConfigError when an address cannot be had."""
    import uvloop  # noqa: PLC0415

    from pdserve.gateway.auth import read_credentials  # noqa: PLC0415

    credentials = read_credentials(config, environment())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for warning in open_doors(config, needs_key=credentials.clients.are_needed):
        _logger.warning(warning)
    num_files = raise_limit()
    lack = shortage(
        num_files,
        max_concurrent=config.admission.max_concurrent,
        num_engines=len(addresses),
        num_workers=config.gateway.workers,
    )
    if lack is not None:
        _logger.warning(lack)
    uvloop.run(_serve(config, addresses, credentials, max_clients(num_files)))


def open_doors(config: Config, *, needs_key: bool) -> Iterator[str]:
    """What others than this machine's users may do for want of a key, in sentences."""
    gateway = config.gateway
    if not needs_key and not is_loopback(gateway.host):
        yield f"whoever reaches {gateway.host}:{gateway.port} may ask; gateway.api_keys_file lets clients in by their keys"
    if not is_loopback(gateway.admin_host):
        yield f"the admin listener on {gateway.admin_host} asks for no key; keep it on loopback or behind a firewall"


async def _serve(
    config: Config, addresses: list[EngineAddress], credentials: Credentials, num_clients: int | None
) -> None:
    from pdserve.http.listener import stopped_by_signal  # noqa: PLC0415

    async with stopped_by_signal() as stop, _running(config, addresses, credentials, num_clients) as running:
        stop.on_second(running.force_stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, running.renew)
        stopping = asyncio.create_task(stop.wait())
        if not await _came_up(running, stopping):
            return
        calm_collector()
        for address in addresses:
            click.echo(f"{address}")
        workers = f", {config.gateway.workers} workers" if config.gateway.workers > 1 else ""
        click.echo(f"gateway on {running.url}, admin on {running.admin_url}{workers}")
        narrating = asyncio.create_task(_narrate(running))
        await asyncio.wait([stopping, running.watching], return_when=asyncio.FIRST_COMPLETED)
        narrating.cancel()
        if not stopping.done():
            await running.watching


async def _came_up(running: Gateway | Front, stopping: asyncio.Task[None]) -> bool:
    """Whether all its processes did, before a signal came. Raises LaunchError."""
    from pdserve.gateway.workers.front import Front  # noqa: PLC0415

    if not isinstance(running, Front):
        return True
    coming_up = asyncio.create_task(running.until_up())
    await asyncio.wait([coming_up, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not coming_up.done():
        coming_up.cancel()
        return False
    await coming_up
    return True


@contextlib.asynccontextmanager
async def _running(
    config: Config, addresses: list[EngineAddress], credentials: Credentials, num_clients: int | None
) -> AsyncIterator[Gateway | Front]:
    """One process that does it all, or a front with workers."""
    from pdserve.gateway.service import bind_gateway, running_gateway  # noqa: PLC0415
    from pdserve.gateway.workers.front import running_front  # noqa: PLC0415
    from pdserve.http.listener import server_tls  # noqa: PLC0415

    if config.gateway.workers == 1:
        sockets = bind_gateway(config)
        async with running_gateway(
            config, addresses, sockets, credentials=credentials, max_clients=num_clients
        ) as gateway:
            yield gateway
        return
    if config.gateway.tls_cert is not None and config.gateway.tls_key is not None:
        server_tls(
            config.gateway.tls_cert, config.gateway.tls_key
        )  # What is wrong with them is told once, and at once.
    command = (sys.executable, "-m", "pdserve", "gateway-worker")
    async with running_front(config, addresses, bind_gateway(config), command=command) as front:
        yield front


async def _narrate(running: Gateway | Front) -> None:
    """One line whenever an engine or a pair changes state."""
    told: dict[str, str] = {}
    while True:
        running.changed.clear()
        status = await running.operations.status()
        now = {engine.name: engine.state for engine in status.engines}
        now |= {f"{pair.prefill} -> {pair.decode}": pair.state for pair in status.pairs}
        for what, state in now.items():
            if told.get(what) != state:
                click.echo(f"{what}: {state}")
        told = now
        await running.changed.wait()
