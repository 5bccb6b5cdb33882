"""`pdserve`: the group of commands, and the edge where an error becomes a sentence and an exit status."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console

from pdserve import __version__
from pdserve.errors import ConfigError, EngineExited, PdserveError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMANDS: Mapping[str, str] = {
    "up": "up:up",
    "status": "deployments:status",
    "logs": "deployments:logs",
    "down": "deployments:down",
    "gateway": "gateway:gateway",
    "gateway-worker": "worker:worker",
    "verify": "verify:verify",
    "demo": "demo:demo",
    "config": "config:config",
    "sim": "sim:sim",
}
"""Command to module and object: a command's imports are paid for by that command alone."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        target = _COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, name = target.partition(":")
        command = getattr(importlib.import_module(f"pdserve.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pdserve")
def cli() -> None:
    """vLLM with prefill and decode split: launch, route, prove.

    `pdserve demo` shows it all on this machine; `pdserve up` serves.
    """


def main() -> None:
    """Run a command; exit 2 for what was wrong before anything started, 1 for what went wrong later."""
    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except PdserveError as exc:
        _show(exc)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)
    sys.exit(status if isinstance(status, int) else 0)  # click returns what a command's Exit said


def _show(error: PdserveError) -> None:
    console = Console(stderr=True, highlight=False)
    if isinstance(error, EngineExited):
        console.print(f"[dim]-- the end of {error.log_path}[/dim]")
        console.print(error.log_tail, markup=False, style="dim", soft_wrap=True)
    console.print("[bold red]error:[/bold red]", end=" ")
    console.print(str(error), markup=False, soft_wrap=True)
