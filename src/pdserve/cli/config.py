"""`pdserve config show`: the configuration as it is understood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from pdserve.cli.options import config_option, read_config

if TYPE_CHECKING:
    from pathlib import Path


@click.group()
def config() -> None:
    """Look at the configuration."""


@config.command()
@config_option
def show(config_path: Path | None) -> None:
    """Print every key with its value, defaults included, as JSON."""
    resolved = read_config(config_path, {})
    click.echo(msgspec.json.format(msgspec.json.encode(resolved)).decode())
