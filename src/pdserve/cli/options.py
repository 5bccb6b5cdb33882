"""Options that several commands share, and how flags, environment and file become one Config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from pdserve.config import Config, check_config, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Function = TypeVar("_Function", bound="Callable[..., Any]")

CONFIG_NAME = "pdserve.toml"
_READABLE = click.Path(exists=True, dir_okay=False)


def config_option(function: _Function) -> _Function:
    """`--config`, else the environment, else pdserve.toml where one lies in the current folder."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="PDSERVE_CONFIG",
        help=f"TOML file [env: PDSERVE_CONFIG; default: {CONFIG_NAME}, if there is one].",
    )(function)


def security_options(function: _Function) -> _Function:
    """`--api-keys-file`, `--tls-cert` and `--tls-key`: who may ask the gateway, and how."""
    for option in (
        click.option("--tls-key", type=_READABLE, help="Its key, PEM."),
        click.option("--tls-cert", type=_READABLE, help="Certificate chain, PEM: clients then connect by HTTPS."),
        click.option("--api-keys-file", type=_READABLE, help="Lines of name:key; clients then need a key."),
    ):
        function = option(function)
    return function


def security_flags(api_keys_file: str | None, tls_cert: str | None, tls_key: str | None) -> dict[str, object]:
    """The same as dotted keys, for `read_config`."""
    return {"gateway.api_keys_file": api_keys_file, "gateway.tls_cert": tls_cert, "gateway.tls_key": tls_key}


def name_option(function: _Function) -> _Function:
    """`--name`: which deployment on this machine."""
    return click.option("--name", help="Deployment [default: the only one that runs].")(function)


def read_config(config_path: Path | None, flags: Mapping[str, object]) -> Config:
    """The file with flags over it. A flag is a dotted key; None means that it was not given. Raises ConfigError."""
    path = config_path
    if path is None and Path(CONFIG_NAME).is_file():
        path = Path(CONFIG_NAME)
    config = load_config(path) if path is not None else Config()
    for key, value in flags.items():
        if value is not None:
            config = _with(config, key.split("."), value)
    check_config(config, source="the command line")
    return config


def environment() -> Mapping[str, str]:
    """The process's environment: read here and passed down."""
    return os.environ


def _with(section: Any, keys: list[str], value: object) -> Any:
    first, *rest = keys
    inner = _with(getattr(section, first), rest, value) if rest else value
    return msgspec.structs.replace(section, **{first: inner})
