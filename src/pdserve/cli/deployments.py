"""`pdserve status`, `logs` and `down`: what runs on this machine, from another terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import psutil
from rich.text import Text

from pdserve.cli.options import environment, name_option
from pdserve.cli.style import engine_table, make_console, styled_state
from pdserve.config import EnginesConfig
from pdserve.engine.credentials import read_engine_access
from pdserve.errors import ConfigError, EngineError, LaunchError
from pdserve.launch.overview import ProcessInfo, engine_rows
from pdserve.launch.paths import state_dir
from pdserve.launch.state import is_alive, list_states, read_state

if TYPE_CHECKING:
    from pdserve.launch.state import DeploymentState
    from pdserve.protocol.admin import GatewayStatus

_TAIL_LINES = 40
_POLL_S = 0.1


def find_deployment(name: str | None) -> DeploymentState:
    """The named deployment, or the only one. Raises ConfigError."""
    folder = state_dir(environment())
    if name is not None:
        found = read_state(folder, name)
        if found is None:
            raise ConfigError(f"no deployment named {name!r} runs on this machine; {_names()}")
        return found
    running = list_states(folder)
    if not running:
        raise ConfigError("nothing runs on this machine; start it with `pdserve up`")
    if len(running) > 1:
        raise ConfigError(f"several deployments run; choose one with --name. {_names()}")
    return running[0]


def _names() -> str:
    names = [state.name for state in list_states(state_dir(environment()))]
    return f"running: {', '.join(names)}" if names else "none runs"


@click.command()
@name_option
def status(name: str | None) -> None:
    """Show engines, pairs and what became of the requests so far."""
    found = find_deployment(name)
    asyncio.run(_show_status(found))


async def _show_status(found: DeploymentState) -> None:
    from pdserve.engine.admin_client import AdminClient  # noqa: PLC0415

    console = make_console()
    access = read_engine_access(EnginesConfig(api_key_file=found.engine_api_key_file), environment())
    admin = AdminClient(found.admin_url)
    gateway: GatewayStatus | None = None
    with contextlib.suppress(EngineError):
        gateway = await admin.status()
    admin.close()
    console.print(
        f"[bold]{found.name}[/bold]: {found.served_model_name} at {found.gateway_url}, pid {found.supervisor_pid}"
    )
    console.print(engine_table(await engine_rows(_processes(found), gateway, access=access)))
    if gateway is None:
        console.print("the gateway does not answer yet", style="yellow")
        return
    for engine in gateway.engines:
        if engine.breaker != "closed":
            console.print(f"{engine.name} fails its requests and is left alone for a while", style="yellow")
    for pair in gateway.pairs:
        console.print(styled_state(pair.state), Text(f"{pair.prefill} to {pair.decode} {pair.cause}"))
    places = ", ".join(f"{count} {place}" for place, count in gateway.num_by_place.items() if count)
    console.print(f"{gateway.num_requests} requests" + (f": prefill {places}" if places else ""))
    for index, worker in enumerate(gateway.workers):
        if worker.state != "serving":
            console.print(f"worker {index} of the gateway is {worker.state}", style="yellow")
    if gateway.num_running:
        console.print(f"{gateway.num_running} under way, {gateway.num_queued} waiting for their turn")


def _processes(found: DeploymentState) -> list[ProcessInfo]:
    return [
        ProcessInfo(
            name=engine.name,
            role=engine.role,
            url=engine.url,
            pid=engine.pid,
            state="starting" if engine.pid is not None and psutil.pid_exists(engine.pid) else "exited",
        )
        for engine in found.engines
    ]


@click.command()
@click.argument("engine", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as new lines come.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=_TAIL_LINES, show_default=True, help="Lines to begin with."
)
@name_option
def logs(engine: str | None, *, follow: bool, lines: int, name: str | None) -> None:
    """Show the end of the logs: of one ENGINE (prefill-0, decode-0, gateway), or of all."""
    folder = Path(find_deployment(name).log_dir)
    paths = sorted(folder.glob("*.log"))
    if engine is not None:
        known = [path.stem for path in paths]
        if engine not in known:
            raise ConfigError(f"{engine!r} has no log in {folder}; there are: {', '.join(known)}")
        paths = [folder / f"{engine}.log"]
    argv = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, paths)]
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run(argv, check=False)


@click.command()
@name_option
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds to wait."
)
def down(name: str | None, timeout_s: float) -> None:
    """Stop a deployment: open requests end first, then the engines."""
    found = find_deployment(name)
    try:
        os.kill(found.supervisor_pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as exc:
        raise LaunchError(f"{found.name} (pid {found.supervisor_pid}) belongs to another user") from exc
    # Not waitpid: it is not our child. And where nobody reaps orphans, it stays a zombie, which is as good as gone.
    deadline_s = time.monotonic() + timeout_s
    while is_alive(found):
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"{found.name} (pid {found.supervisor_pid}) still has open requests after {timeout_s:g} s; "
                f"`kill {found.supervisor_pid}` once more ends them"
            )
        time.sleep(_POLL_S)
    click.echo(f"{found.name} is down")
