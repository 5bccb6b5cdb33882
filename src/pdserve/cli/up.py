"""`pdserve up`: engines and gateway on this machine, until a signal."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from pdserve.cli.options import config_option, environment, read_config, security_flags, security_options
from pdserve.cli.style import make_console
from pdserve.engine.credentials import CLIENT_KEY_VARIABLE, CLIENT_KEYS_VARIABLE
from pdserve.errors import LaunchError

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.http.listener import StopSignal
    from pdserve.launch.deployment import Checked, Deployment, DeploymentPlan
    from pdserve.protocol.admin import GatewayStatus

_UP_LOG = "up.log"
_READY = b"ready"


@click.command()
@click.option(
    "--model",
    envvar="PDSERVE_MODEL",
    help="smollm2, a folder, hf:ORG/NAME or modelscope:ORG/NAME [env: PDSERVE_MODEL; default: smollm2].",
)
@click.option("--prefill", "num_prefill", type=click.IntRange(0, 256), help="Prefill engines [default: 1].")
@click.option("--decode", "num_decode", type=click.IntRange(1, 256), help="Decode engines [default: 1].")
@click.option("--host", help="Address that the gateway listens on [default: 127.0.0.1].")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    envvar="PDSERVE_PORT",
    help="The gateway's port; 0 chooses one [env: PDSERVE_PORT; default: 8192].",
)
@click.option("--name", help="What to call this deployment, where there are several [default: default].")
@security_options
@config_option
@click.option("--detach", is_flag=True, help="Return once it is ready and leave it running.")
@click.option("--dry-run", is_flag=True, help="Print the exact command lines and environment; start nothing.")
@click.option("--ready-fd", type=int, hidden=True)
def up(
    model: str | None,
    num_prefill: int | None,
    num_decode: int | None,
    host: str | None,
    port: int | None,
    name: str | None,
    api_keys_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    config_path: Path | None,
    *,
    detach: bool,
    dry_run: bool,
    ready_fd: int | None,
) -> None:
    """Start prefill and decode engines and the gateway, prove that KV moves, and serve.

    Without a GPU this runs vLLM's CPU build, with one plain vLLM. Ctrl-C stops everything; a second one does not wait.
    """
    from pdserve.cli.running import check_deployment, plan_deployment, plan_without_fetching  # noqa: PLC0415

    flags = {
        "model": model,
        "prefill.count": num_prefill,
        "decode.count": num_decode,
        "gateway.host": host,
        "gateway.port": port,
        "name": name,
        **security_flags(api_keys_file, tls_cert, tls_key),
    }
    console = make_console()
    checked = check_deployment(read_config(config_path, flags))
    if dry_run:
        _print_commands(plan_without_fetching(checked, Path(f"/folder/of/{checked.source.served_name}")), checked)
        return
    plan = plan_deployment(checked, console)
    if detach:
        _detach(plan, console)
    else:
        asyncio.run(_serve(plan, checked.notes, console, ready_fd))


async def _serve(plan: DeploymentPlan, notes: tuple[str, ...], console: Console, ready_fd: int | None) -> None:
    from pdserve.cli.running import Stopped, exit_when_stopped, running  # noqa: PLC0415
    from pdserve.http.listener import stopped_by_signal  # noqa: PLC0415

    async with stopped_by_signal() as stop:
        try:
            async with running(plan, notes, console, stop) as deployment:
                announce(deployment, console)
                if ready_fd is not None:
                    os.write(ready_fd, _READY)
                    os.close(ready_fd)
                await watch(deployment, console, stop)
        except Stopped:
            exit_when_stopped()


def announce(deployment: Deployment, console: Console) -> None:
    """The address, whether KV is proven to move, and a request to paste."""
    status = deployment.gateway_status
    if status is not None:
        _say_proof(status, console)
    plan = deployment.plan
    console.print(
        f"serving [bold]{plan.served_name}[/bold] at [bold]{plan.gateway_url}[/bold], admin at {plan.admin_url}"
    )
    console.print(f"logs in {deployment.log_dir}\n", soft_wrap=True)
    example = curl_command(plan, prompt="The capital of France is", max_tokens=16)
    console.print(example, markup=False, soft_wrap=True)
    console.print()


def curl_command(plan: DeploymentPlan, **fields: object) -> str:
    """A completion with these fields, ready to paste."""
    body = json.dumps({"model": plan.served_name, **fields, "temperature": 0})
    gateway = plan.config.gateway
    trust = f" --cacert {shlex.quote(gateway.tls_ca)}" if gateway.tls_ca is not None else ""
    needs_key = gateway.api_keys_file is not None or environment().get(CLIENT_KEYS_VARIABLE)
    key = f' -H "Authorization: Bearer ${CLIENT_KEY_VARIABLE}"' if needs_key else ""
    headers = f"-H 'Content-Type: application/json'{key}"
    return f"curl{trust} {plan.gateway_url}/v1/completions {headers} -d '{body}'"


def _say_proof(status: GatewayStatus, console: Console) -> None:
    for pair in status.pairs:
        if pair.state == "proven" and pair.first_handoff_s is not None:
            took = f"first handoff {pair.first_handoff_s:.2f} s, its handshake included"
            console.print(f"[green]proven[/green] KV moves from {pair.prefill} to {pair.decode} ({took})")
        else:
            console.print(Text(f"{pair.state} {pair.prefill} to {pair.decode}: {pair.cause}", style="yellow"))


async def watch(deployment: Deployment, console: Console, stop: StopSignal) -> None:
    """Until a signal, or until nobody is left who could answer. Raises EngineExited then."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stopping.done():
            exiting = asyncio.create_task(deployment.next_exit())
            await asyncio.wait([stopping, exiting], return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                exiting.cancel()
                continue
            name = exiting.result().address.name
            error = deployment.exit_error(name)
            if name == "gateway" or not deployment.has_decode_engine():
                raise error
            console.print(Text(str(error), style="red"))
            console.print("the others go on; the gateway sends nothing to it any more")
    finally:
        stopping.cancel()


def _print_commands(plan: DeploymentPlan, checked: Checked) -> None:
    from pdserve.launch.deployment import CONFIG_FILE  # noqa: PLC0415
    from pdserve.launch.paths import state_dir  # noqa: PLC0415
    from pdserve.launch.plan import render_command  # noqa: PLC0415
    from pdserve.launch.state import run_dir  # noqa: PLC0415

    config_path = run_dir(state_dir(environment()), plan.config.name) / CONFIG_FILE
    for note in checked.notes:
        click.echo(f"# {note}")
    for command in (*plan.engines, plan.gateway_command(config_path)):
        click.echo(f"# {command.address.name}\n{render_command(command)}\n")


def _detach(plan: DeploymentPlan, console: Console) -> None:
    """Run `up` again as a process of its own, and wait for its word that it is ready."""
    from pdserve.launch.paths import state_dir  # noqa: PLC0415
    from pdserve.launch.state import LOG_DIR, run_dir  # noqa: PLC0415

    log_path = run_dir(state_dir(environment()), plan.config.name) / LOG_DIR / _UP_LOG
    log_path.parent.mkdir(parents=True, exist_ok=True)
    ready, ready_fd = os.pipe()
    argv = [sys.executable, "-m", "pdserve", *_arguments_without_detach(), "--ready-fd", str(ready_fd)]
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[ready_fd], start_new_session=True
        )
    os.close(ready_fd)
    try:
        with console.status("starting the engines"), os.fdopen(ready, "rb") as pipe:
            is_ready = pipe.read() == _READY
    except KeyboardInterrupt:
        # It has a session of its own, so that the terminal's Ctrl-C did not reach it.
        child.terminate()
        child.wait()
        raise
    if not is_ready:
        status = child.wait()
        text = log_path.read_text(encoding="utf-8", errors="replace").strip()
        raise LaunchError(f"it did not become ready (exit status {status}):\n{text}")
    console.print(log_path.read_text(encoding="utf-8").strip(), markup=False, soft_wrap=True)
    console.print(f"runs as pid {child.pid}; `pdserve status`, `pdserve logs -f` and `pdserve down` know it")


def _arguments_without_detach() -> list[str]:
    return [argument for argument in sys.argv[1:] if argument != "--detach"]
