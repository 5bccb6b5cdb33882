"""Where pdserve keeps files of its own: converted models, and the state of running deployments.

The environment comes in as a mapping; nothing here reads it by itself, and nothing here makes a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_dir(environ: Mapping[str, str]) -> Path:
    """What can be made again: `$PDSERVE_CACHE_DIR`, else `pdserve` in the XDG cache folder."""
    return _own_folder(environ, own="PDSERVE_CACHE_DIR", xdg="XDG_CACHE_HOME", below_home=".cache")


def state_dir(environ: Mapping[str, str]) -> Path:
    """What tells of running deployments: `$PDSERVE_STATE_DIR`, else `pdserve` in the XDG state folder."""
    return _own_folder(environ, own="PDSERVE_STATE_DIR", xdg="XDG_STATE_HOME", below_home=".local/state")


def _own_folder(environ: Mapping[str, str], *, own: str, xdg: str, below_home: str) -> Path:
    if environ.get(own):
        return _absolute(environ[own], variable=own, environ=environ)
    base = environ.get(xdg, "")
    # The XDG base directory specification says that a relative path there is invalid and to be ignored.
    if base.startswith("/"):
        return Path(base) / "pdserve"
    return _home(environ, wanted=own) / below_home / "pdserve"


def _absolute(value: str, *, variable: str, environ: Mapping[str, str]) -> Path:
    """A path that means the same from every working directory: `up` and `down` may be called from different ones."""
    if value == "~" or value.startswith("~/"):
        return _home(environ, wanted=variable) / value[2:]
    if not value.startswith("/"):
        raise ConfigError(f"{variable} = {value!r} is not an absolute path; start it with / or ~/")
    return Path(value)


def _home(environ: Mapping[str, str], *, wanted: str) -> Path:
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        raise ConfigError(f"HOME = {home!r} names no folder, so there is no place for pdserve's files; set {wanted}")
    return Path(home)
