"""What pdserve shows to engines and what it trusts of them: the key, and the CA of those that speak TLS.

Keys come from the environment or from a file of their own, never from the configuration, which is printed and handed on.
"""

from __future__ import annotations

import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import EnginesConfig

ENGINE_KEY_VARIABLE = "PDSERVE_ENGINE_API_KEY"
CLIENT_KEYS_VARIABLE = "PDSERVE_API_KEYS"
CLIENT_KEY_VARIABLE = "PDSERVE_API_KEY"
_IS_KEY = re.compile(r"[!-~]+")
"""Printable ASCII without spaces: what a header can carry as it is."""


class Secret:
    """A key. Shows itself nowhere: only `reveal` gives it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def reveal(self) -> str:
        """The key itself."""
        return self._value


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """How to reach engines that want a key, or that speak TLS."""

    key: Secret | None = None
    tls: ssl.SSLContext | None = None
    """Default: what the system trusts."""


OPEN_ACCESS = EngineAccess()


def read_engine_access(config: EnginesConfig, environ: Mapping[str, str]) -> EngineAccess:
    """The key and the CA that are configured. Raises ConfigError."""
    tls = trusting(config.ca_file, setting="engines.ca_file") if config.ca_file is not None else None
    return EngineAccess(read_engine_key(config, environ), tls)


def read_engine_key(config: EnginesConfig, environ: Mapping[str, str]) -> Secret | None:
    """The environment's, else the file's. Raises ConfigError."""
    value, where = environ.get(ENGINE_KEY_VARIABLE, ""), ENGINE_KEY_VARIABLE
    if not value:
        if config.api_key_file is None:
            return None
        where = f"engines.api_key_file = {config.api_key_file!r}"
        value = read_private_file(Path(config.api_key_file), setting="engines.api_key_file").strip()
    return checked_key(value, where=where)


def checked_key(value: str, *, where: str) -> Secret:
    """A key that a header can carry. Raises ConfigError, which does not show it."""
    if not _IS_KEY.fullmatch(value):
        raise ConfigError(f"{where}: not a key: one word of printable ASCII is needed")
    return Secret(value)


def read_private_file(path: Path, *, setting: str) -> str:
    """A file of secrets. Raises ConfigError for one that every user of the machine can read."""
    try:
        if path.stat().st_mode & stat.S_IROTH:
            raise ConfigError(f"{setting} = {str(path)!r}: every user of this machine can read it; chmod 600 {path}")
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{setting} = {str(path)!r}: cannot read it: {exc.strerror}") from exc
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} = {str(path)!r}: not UTF-8 text") from None  # Its message would quote the bytes.


def trusting(ca_file: str, *, setting: str) -> ssl.SSLContext:
    """A client's TLS that trusts this CA alone. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as exc:
        raise ConfigError(f"{setting} = {ca_file!r}: holds no PEM certificate") from exc
    except OSError as exc:
        raise ConfigError(f"{setting} = {ca_file!r}: cannot read it: {exc.strerror}") from exc
