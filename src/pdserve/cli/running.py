"""What `up` and `demo` share: from a configuration to a deployment that is ready, shown while it starts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import click
from rich.live import Live

from pdserve.cli.options import environment
from pdserve.cli.style import engine_table, progress_bar
from pdserve.gateway.auth import read_credentials
from pdserve.http.listener import server_tls
from pdserve.launch.deployment import Deployment, check, plan
from pdserve.launch.model import ResolvedModel, resolve_model
from pdserve.launch.paths import state_dir
from pdserve.launch.state import claim

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rich.console import Console

    from pdserve.config import Config
    from pdserve.http.listener import StopSignal
    from pdserve.launch.deployment import Checked, DeploymentPlan

_REDRAW_S = 0.5


class Stopped(Exception):
    """A signal came before the deployment was ready."""


def check_deployment(config: Config) -> Checked:
    """Everything that can be found before anything starts. Raises ConfigError."""
    read_credentials(config, environment())
    if config.gateway.tls_cert is not None and config.gateway.tls_key is not None:
        server_tls(config.gateway.tls_cert, config.gateway.tls_key)
    with claim(state_dir(environment()), config.name):
        return check(config, environment())


def plan_deployment(checked: Checked, console: Console) -> DeploymentPlan:
    """Fetch or convert the model, with a progress bar, and plan. Raises ModelUnavailable and ConfigError."""
    with progress_bar(console) as on_progress:
        model = resolve_model(checked.source, on_progress=on_progress)
    return plan(checked, model, environment())


def plan_without_fetching(checked: Checked, unknown: Path) -> DeploymentPlan:
    """The same plan for `--dry-run`; `unknown` stands for a folder that only fetching would tell."""
    model = ResolvedModel(checked.source.known_path or unknown, checked.source.served_name)
    return plan(checked, model, environment())


@contextlib.asynccontextmanager
async def running(
    plan: DeploymentPlan, notes: tuple[str, ...], console: Console, stop: StopSignal
) -> AsyncIterator[Deployment]:
    """A deployment that is ready. Raises LaunchError, and Stopped when a signal comes first."""
    for note in notes:
        console.print(note, style="yellow")
    with claim(state_dir(environment()), plan.config.name) as folder:
        async with Deployment(plan, folder, environment()) as deployment:
            killing: list[asyncio.Task[None]] = []
            stop.on_second(lambda: killing.append(asyncio.create_task(deployment.kill())))
            deployment.record_state(is_ready=False)
            await _until_ready(deployment, console, stop)
            deployment.record_state(is_ready=True)
            yield deployment
            console.print("stopping: open requests end first, then the engines; Ctrl-C again does not wait")


async def _until_ready(deployment: Deployment, console: Console, stop: StopSignal) -> None:
    """Draw the table until every pair is through its first handoff."""
    becoming_ready = asyncio.create_task(deployment.until_ready())
    stopping = asyncio.create_task(stop.wait())
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while not becoming_ready.done() and not stopping.done():
                live.update(engine_table(await deployment.rows()), refresh=console.is_terminal)
                await asyncio.wait([becoming_ready, stopping], timeout=_REDRAW_S, return_when=asyncio.FIRST_COMPLETED)
        if not becoming_ready.done():
            raise Stopped
        await becoming_ready
        console.print(engine_table(await deployment.rows()))
    finally:
        becoming_ready.cancel()
        stopping.cancel()


def exit_when_stopped() -> None:
    """The exit status of a program that a signal ended before it did its work."""
    click.echo("stopped before it was ready", err=True)
    raise click.exceptions.Exit(130)
