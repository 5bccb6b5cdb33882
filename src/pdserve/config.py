"""The configuration: one TOML file as frozen values, checked whole at load.

A flag beats the environment, that beats the file, that beats the default; merging flags in is the CLI's work. An unknown
key, a value of the wrong type or one out of range is a ConfigError that names file, key, value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAX_PORT = 65535
Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=256)]
ArgValue = str | int | float | bool | list[str | int | float] | dict[str, object]
"""A vLLM flag's value: true is the bare flag, false is its `--no-` form, a list is several words, a table is JSON."""


_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - these are what is replaced
_IS_URL = re.compile(r"[!-~]+")
"""Printable ASCII without spaces: the address goes into request headers as it is."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class GatewayConfig(_Section, frozen=True):
    """`[gateway]`: where clients connect."""

    host: str = "127.0.0.1"
    port: Port = 8192
    admin_host: str = "127.0.0.1"
    admin_port: Port | None = None
    """Default: the port after `port`, or any where there is none.

    The admin listener answers who the engines are and what became of a request.
    """
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024 * 1024


class TimeoutsConfig(_Section, frozen=True):
    """`[timeouts]`, in seconds."""

    connect: Seconds = 5.0
    prefill: Seconds = 300.0
    """From sending the P leg to P's whole answer."""
    first_byte: Seconds = 300.0
    """From sending the D leg to the first byte of D's answer."""
    whole_answer: Seconds = 1800.0
    """The same for an answer that is not streamed: vLLM sends nothing of it before its last token."""
    silence: Seconds = 120.0
    """Between two pieces of D's answer; also how long a client may leave its answer unread."""
    kv_lease: Seconds = 30.0
    """How long P keeps a handoff's blocks: vLLM's `kv_lease_duration`, 30 s unless the engines were started otherwise."""
    kv_lease_margin: Seconds = 5.0
    """A handoff older than the lease less this is not sent to D: its blocks may hold another request's KV by then."""
    shutdown: Seconds = 30.0
    """How long open requests may go on after a stop was asked for."""


class EnginesConfig(_Section, frozen=True):
    """`[engines]`: what both roles share."""

    python: str | None = None
    """The Python that has vLLM; default: the one that runs pdserve."""
    command: list[str] | None = None
    """The start of the engine's command line, such as `["vllm", "serve"]`; the model and the flags follow. Beats `python`."""
    args: dict[str, ArgValue] = {}
    env: dict[str, str] = {}
    start_timeout: Seconds = 600.0
    host: str = "127.0.0.1"
    first_port: Port = 8100
    first_side_channel_port: Port = 5600


class RoleConfig(_Section, frozen=True):
    """`[prefill]` and `[decode]`."""

    count: Count = 1
    args: dict[str, ArgValue] = {}
    env: dict[str, str] = {}
    urls: list[str] = []
    """Engines that someone else started. Only `pdserve gateway` reads this."""


class Config(_Section, frozen=True):
    """The whole file."""

    name: str = "default"
    """Tells deployments on one machine apart; `status`, `logs` and `down` take it."""
    model: str = "smollm2"
    served_model_name: str | None = None
    gateway: GatewayConfig = GatewayConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    engines: EnginesConfig = EnginesConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()

    @property
    def admin_port(self) -> int:
        """The admin listener's port, resolved; 0 lets the kernel choose."""
        if self.gateway.admin_port is not None:
            return self.gateway.admin_port
        return self.gateway.port + 1 if 0 < self.gateway.port < MAX_PORT else 0


def load_config(path: Path) -> Config:
    """Read a TOML file. Raises ConfigError for anything that is not exactly right."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: cannot read the configuration: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text") from exc
    try:
        # pdserve hands a resolved configuration to its own processes as JSON, which keeps what TOML has no word for.
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path}: not valid JSON: {exc}") from exc
    return parse_config(table, source=str(path))


def parse_config(table: dict[str, object], *, source: str) -> Config:
    """Check a parsed table. `source` names it in errors."""
    _refuse_unknown_keys(table, Config, source=source, where="")
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explain(str(exc), table, source=source)) from exc
    check_config(config, source=source)
    return config


def check_config(config: Config, *, source: str) -> None:
    """Check what types cannot say. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.name):
        raise ConfigError(f"{source}: name = {config.name!r}: use letters, digits, '.', '_' and '-', 64 at most")
    if config.engines.command == []:
        raise ConfigError(f"{source}: engines.command is empty: name a program, or leave the key out")
    if config.timeouts.kv_lease_margin >= config.timeouts.kv_lease:
        raise ConfigError(
            f"{source}: timeouts.kv_lease_margin = {config.timeouts.kv_lease_margin} leaves nothing of "
            f"timeouts.kv_lease = {config.timeouts.kv_lease}: every handoff would count as stale"
        )
    for role in ("prefill", "decode"):
        for url in getattr(config, role).urls:
            check_url(url, source=f"{source}: {role}.urls")


def check_url(url: str, *, source: str) -> str:
    """Return an engine's URL without its trailing slash. Raises ConfigError unless it is scheme, host and port alone."""
    stripped = url.rstrip("/")
    advice = f"{source}: {url!r} is not an engine's address; write it like http://10.0.0.7:8100"
    try:
        parts = urlsplit(stripped)
        is_valid = parts.port is None or parts.port > 0
    except ValueError as exc:
        raise ConfigError(advice) from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or not is_valid or not _IS_URL.fullmatch(stripped):
        raise ConfigError(advice)
    if parts.path or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{source}: {url!r} has more than scheme, host and port; pdserve adds the paths itself")
    return stripped


def reachable_host(host: str) -> str:
    """Where to reach, from this machine, what listens on a host: one that means every address is none to connect to."""
    return _REACHABLE.get(host, host)


def http_url(host: str, port: int) -> str:
    """The URL of what listens there, as it is reached from this machine."""
    host = reachable_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refuse_unknown_keys(table: dict[str, object], section: type[msgspec.Struct], *, source: str, where: str) -> None:
    """msgspec refuses them too, but tells neither the place in full nor what would have been right."""
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed here: {', '.join(sorted(fields))}"
            raise ConfigError(f"{source}: unknown key {where + key!r}; {hint}")
        kind = fields[key]
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, _Section):
            _refuse_unknown_keys(value, kind, source=source, where=f"{where}{key}.")


def _explain(message: str, table: dict[str, object], *, source: str) -> str:
    """Turn msgspec's `Expected ... - at `$.gateway.port`` into file, key, value and what is allowed."""
    expected, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    value: object = table
    for part in path.split("."):
        value = value.get(part.split("[")[0]) if isinstance(value, dict) else value
    return f"{source}: {path} = {value!r}: {expected[:1].lower()}{expected[1:]}"
