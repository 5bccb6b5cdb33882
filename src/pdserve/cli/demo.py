"""`pdserve demo`: the whole thing once, from nothing to a proven handoff, explained as it happens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from pdserve.cli.options import config_option, environment, read_config
from pdserve.cli.picture import draw_evidence, draw_handoff, draw_request, draw_verdict
from pdserve.cli.style import make_console
from pdserve.cli.verify import check_report
from pdserve.engine.credentials import read_engine_access
from pdserve.gateway.auth import own_access
from pdserve.verify.check import DEFAULT_PROMPT, Verifier

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from pdserve.http.listener import StopSignal
    from pdserve.launch.deployment import Deployment, DeploymentPlan

_NUM_TOKENS = 24


@click.command()
@click.option("--model", envvar="PDSERVE_MODEL", help="smollm2, a folder, hf:ORG/NAME or modelscope:ORG/NAME.")
@click.option("--port", type=click.IntRange(0, 65535), help="The gateway's port; 0 chooses one [default: 8192].")
@click.option("--keep", is_flag=True, help="Go on serving afterwards, until Ctrl-C.")
@config_option
def demo(model: str | None, port: int | None, *, keep: bool, config_path: Path | None) -> None:
    """Start a prefill and a decode engine, send one request through both, and prove that its KV cache moved."""
    from pdserve.cli.running import check_deployment, plan_deployment  # noqa: PLC0415

    console = make_console()
    console.print(
        "[bold]1[/bold]  Start a prefill engine P, a decode engine D and the gateway, each a process of its own."
    )
    config = read_config(config_path, {"model": model, "gateway.port": port})
    checked = check_deployment(config)
    plan = plan_deployment(checked, console)
    asyncio.run(_run(plan, checked.notes, console, keep=keep))


async def _run(plan: DeploymentPlan, notes: tuple[str, ...], console: Console, *, keep: bool) -> None:
    from pdserve.cli.running import Stopped, exit_when_stopped, running  # noqa: PLC0415
    from pdserve.cli.up import announce, watch  # noqa: PLC0415
    from pdserve.http.listener import stopped_by_signal  # noqa: PLC0415

    async with stopped_by_signal() as stop:
        try:
            async with running(plan, notes, console, stop) as deployment:
                await _until_shown(deployment, console, stop)
                if keep:
                    console.print()
                    announce(deployment, console)
                    await watch(deployment, console, stop)
        except Stopped:
            exit_when_stopped()


async def _until_shown(deployment: Deployment, console: Console, stop: StopSignal) -> None:
    """Show it, unless a signal comes first. Raises Stopped then."""
    from pdserve.cli.running import Stopped  # noqa: PLC0415

    showing, stopping = asyncio.create_task(_show(deployment, console)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([showing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not showing.done():
            raise Stopped
        await showing
    finally:
        showing.cancel()
        stopping.cancel()


async def _show(deployment: Deployment, console: Console) -> None:
    from pdserve.cli.up import curl_command  # noqa: PLC0415

    plan = deployment.plan
    verifier = await Verifier.of_pdserve(
        plan.gateway_url,
        plan.admin_url,
        access=own_access(plan.config.gateway, environment()),
        engine_access=read_engine_access(plan.config.engines, environment()),
    )
    try:
        console.print("\n[bold]2[/bold]  An ordinary OpenAI request, as a client sends it:")
        example = curl_command(plan, prompt=DEFAULT_PROMPT, max_tokens=_NUM_TOKENS, stream=True)
        console.print(example, markup=False, soft_wrap=True, style="dim")
        report = await verifier.verify(DEFAULT_PROMPT, max_tokens=_NUM_TOKENS)
    finally:
        verifier.close()
    assert report.record is not None
    console.print("\n[bold]answer[/bold]", end=" ")
    console.print(report.text.strip(), markup=False)
    console.print("\n[bold]3[/bold]  What happened to it:")
    draw_request(console, report.record)
    console.print("\n[bold]4[/bold]  The handoff that P answered with, which the gateway gave to D:")
    draw_handoff(console, report.record)
    console.print("\n[bold]5[/bold]  HTTP 200 proves nothing, since a D without KV answers the same. The evidence:")
    draw_evidence(console, report)
    draw_verdict(console, report)
    check_report(report)
