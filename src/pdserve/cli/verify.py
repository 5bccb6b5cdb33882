"""`pdserve verify`: one request with everybody's account of it; exit 0 only when KV moved."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from pdserve.cli.options import environment
from pdserve.cli.picture import draw_evidence, draw_handoff, draw_request, draw_verdict
from pdserve.cli.style import make_console
from pdserve.config import EnginesConfig, GatewayConfig, check_url
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.credentials import read_engine_access
from pdserve.errors import ConfigError, VerifyFailed
from pdserve.gateway.auth import own_access
from pdserve.verify.check import DEFAULT_PROMPT, Verifier
from pdserve.verify.compare import Agreement
from pdserve.verify.logs import telling_lines

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.engine.credentials import EngineAccess
    from pdserve.launch.state import DeploymentState
    from pdserve.verify.check import Report

_LOG_WAIT_S = 11.0
"""vLLM writes its line about KV transfers every ten seconds (VLLM_LOG_STATS_INTERVAL, vllm/envs.py in 0.32)."""


@click.command()
@click.option("--url", help="The gateway [default: what `pdserve up` runs on this machine].")
@click.option("--admin", "admin_url", help="Its admin listener [default: the port after the gateway's].")
@click.option(
    "--prefill", "prefill_urls", multiple=True, metavar="URL", help="With --decode: any other P/D gateway's engines."
)
@click.option("--decode", "decode_urls", multiple=True, metavar="URL", help="See --prefill.")
@click.option(
    "--prompt", default=DEFAULT_PROMPT, help="What to ask; a new cache salt each time keeps prefix caches out."
)
@click.option("--max-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--ca", "tls_ca", type=click.Path(exists=True, dir_okay=False), help="CA of an https gateway, PEM.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(
    url: str | None,
    admin_url: str | None,
    prefill_urls: tuple[str, ...],
    decode_urls: tuple[str, ...],
    prompt: str,
    max_tokens: int,
    tls_ca: str | None,
    *,
    as_json: bool,
) -> None:
    """Send one request through the gateway and prove where its prompt was computed.

    HTTP 200 proves nothing: an engine that got no KV answers the same. What counts is D's usage for this request, both
    engines' counters, and that D alone gives the same answer. In front of another gateway than pdserve's, name its
    engines; do it on a quiet system, since counters are all there is then.
    PDSERVE_API_KEY is the key for the gateway, PDSERVE_ENGINE_API_KEY the engines' own, where they want one.
    """
    console = make_console()
    deployment = _local_deployment(url)
    url = check_url(url, source="--url") if url is not None else None
    if url is None:
        if deployment is None:
            raise ConfigError("nothing runs on this machine; give --url")
        url, admin_url = deployment.gateway_url, admin_url or deployment.admin_url
    engines = _named_engines(prefill_urls, decode_urls)
    keys_file, engine_key_file = None, None
    if deployment is not None:
        keys_file, engine_key_file = deployment.api_keys_file, deployment.engine_api_key_file
        tls_ca = tls_ca or deployment.tls_ca
    access = own_access(GatewayConfig(api_keys_file=keys_file, tls_ca=tls_ca), environment())
    engine_access = read_engine_access(EnginesConfig(api_key_file=engine_key_file), environment())
    admin_url = admin_url or next_port(url)
    asking = _verify(url, admin_url, engines, prompt, max_tokens, access=access, engine_access=engine_access)
    report = asyncio.run(asking)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show_report(console, report)
        if deployment is not None and report.has_moved:
            show_log_lines(console, Path(deployment.log_dir), wait_s=_LOG_WAIT_S)
    check_report(report)


def next_port(url: str) -> str:
    """Where pdserve puts the admin listener unless it is told otherwise. Raises ConfigError for a URL without a port."""
    head, _, port = url.replace("https://", "http://", 1).rpartition(":")  # The admin listener speaks no TLS.
    if not port.isdecimal():
        raise ConfigError(
            f"{url} names no port, so the admin listener's cannot be guessed; give --admin, or name the engines"
        )
    return f"{head}:{int(port) + 1}"


def show_report(console: Console, report: Report) -> None:
    """Answer, picture, handoff and evidence."""
    console.print("[bold]prompt[/bold]", end=" ")
    console.print(report.prompt, markup=False)
    console.print("[bold]answer[/bold]", end=" ")
    console.print(report.text.strip(), markup=False)
    if report.record is not None:
        console.print("\n[bold]the request[/bold]")
        draw_request(console, report.record)
        console.print("\n[bold]the handoff[/bold]")
        draw_handoff(console, report.record)
    console.print("\n[bold]the evidence[/bold]")
    draw_evidence(console, report)
    draw_verdict(console, report)


def show_log_lines(console: Console, log_dir: Path, *, wait_s: float) -> None:
    """The engines' own words. The line about transfers is waited for, at most `wait_s`."""
    lines = _wait_for_transfer_line(log_dir, wait_s)
    console.print("\n[bold]in the logs[/bold]")
    for engine, found in lines.items():
        for line in found.values():
            console.print(f"{engine}: {line}", markup=False, style="dim")


def _wait_for_transfer_line(log_dir: Path, wait_s: float) -> dict[str, dict[str, str]]:
    deadline_s = time.monotonic() + wait_s
    while True:
        lines = telling_lines(sorted(log_dir.glob("*-[0-9]*.log")))
        if any("transfers" in found for found in lines.values()) or time.monotonic() > deadline_s:
            return lines
        time.sleep(0.5)  # a log file gives no event


def check_report(report: Report) -> None:
    """Raises VerifyFailed unless KV moved and D alone agrees."""
    if not report.has_moved:
        raise VerifyFailed(report.sentence)
    comparison = report.comparison
    if comparison is not None and comparison.agreement is Agreement.DIFFERENT:
        raise VerifyFailed(f"KV moved, but the answer is not D's own: {comparison.explanation}")


def _local_deployment(url: str | None) -> DeploymentState | None:
    """The deployment on this machine that the URL means, if it is one."""
    from pdserve.launch.paths import state_dir  # noqa: PLC0415
    from pdserve.launch.state import list_states  # noqa: PLC0415

    running = list_states(state_dir(environment()))
    if url is None:
        if len(running) > 1:
            raise ConfigError(f"several deployments run ({', '.join(state.name for state in running)}); give --url")
        return running[0] if running else None
    return next((state for state in running if state.gateway_url == url.rstrip("/")), None)


def _named_engines(prefill_urls: tuple[str, ...], decode_urls: tuple[str, ...]) -> list[EngineAddress]:
    if bool(prefill_urls) != bool(decode_urls):
        raise ConfigError("name both sides' engines, --prefill and --decode, or neither")
    return [
        EngineAddress(EngineName(f"{role}-{index}"), role, check_url(url, source=f"--{role}"))
        for role, urls in ((Role.PREFILL, prefill_urls), (Role.DECODE, decode_urls))
        for index, url in enumerate(urls)
    ]


async def _verify(
    url: str,
    admin_url: str,
    engines: list[EngineAddress],
    prompt: str,
    max_tokens: int,
    *,
    access: EngineAccess,
    engine_access: EngineAccess,
) -> Report:
    if engines:
        verifier = Verifier(url, engines, None, access=access, engine_access=engine_access)
    else:
        verifier = await Verifier.of_pdserve(url, admin_url, access=access, engine_access=engine_access)
    try:
        return await verifier.verify(prompt, max_tokens=max_tokens)
    finally:
        verifier.close()
