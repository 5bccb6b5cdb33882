"""The configuration: one TOML file as frozen values, checked whole at load.

A flag beats the environment, that beats the file, that beats the default; merging flags in is the CLI's work. An unknown
key, a value of the wrong type or one out of range is a ConfigError that names file, key, value and what is allowed.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Literal
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
_IS_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})?")
_LOOKS_NUMERIC = re.compile(r"[0-9.]+|0[xX].*")
"""A mistyped address: no host has such a name, and some resolvers read one out of it all the same."""


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
    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Processes that serve clients, one per core that the gateway may fill. With one there is no other process at all."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024 * 1024
    api_keys_file: str | None = None
    """Lines of `name:key`; with it, or with PDSERVE_API_KEYS, clients need a key. No key stands in this file itself."""
    tls_cert: str | None = None
    """The certificate with its chain, PEM; clients then connect by HTTPS. `tls_key` is its key."""
    tls_key: str | None = None
    tls_ca: str | None = None
    """What pdserve's own commands trust when they ask this gateway, where the system does not know its CA."""

    @property
    def is_tls(self) -> bool:
        """Whether clients connect by HTTPS."""
        return self.tls_cert is not None


class TimeoutsConfig(_Section, frozen=True):
    """`[timeouts]`, in seconds."""

    connect: Seconds = 5.0
    prefill: Seconds = 300.0
    """From sending the P leg to P's whole answer."""
    first_byte: Seconds = 300.0
    """From sending the D leg to the first byte of D's answer."""
    whole_answer: Seconds = 1800.0
    """The same for an answer that is not streamed: vLLM sends nothing of it before its last token."""
    total: Seconds = 3600.0
    """A whole request, from its last byte in to its answer's last byte out."""
    silence: Seconds = 120.0
    """Between two pieces of D's answer; also how long a client may leave its answer unread."""
    kv_lease: Seconds = 30.0
    """How long P keeps a handoff's blocks: vLLM's `kv_lease_duration`, 30 s unless the engines were started otherwise."""
    kv_lease_margin: Seconds = 5.0
    """A handoff older than the lease less this is not sent to D: its blocks may hold another request's KV by then."""
    shutdown: Seconds = 30.0
    """How long open requests may go on after a stop was asked for."""


class AdmissionConfig(_Section, frozen=True):
    """`[admission]`: how much work the gateway takes on at once."""

    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """Requests under way; each choice of a request that asks for several counts."""
    max_queued: Annotated[int, msgspec.Meta(ge=0)] = 4096
    """Requests that wait for their turn; one more is refused with 429."""
    max_wait: Seconds = 60.0
    """Seconds that a request may wait for its turn."""


class RetriesConfig(_Section, frozen=True):
    """`[retries]`: what happens to a request whose leg failed before a byte had gone to the client."""

    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    """How often a leg to one role may be tried; 1 tries nothing again."""
    budget: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    """Retries may be this share of the requests: an outage must not be answered with a multiple of the load."""
    without_prefill: Literal["decode_alone", "error"] = "decode_alone"
    """What to do when no prefill engine gave a usable handoff: let D compute the prompt too, or answer the error."""


class BreakerConfig(_Section, frozen=True):
    """`[breaker]`: when an engine that answers its health check but fails its requests is left alone for a while."""

    failures: Annotated[int, msgspec.Meta(ge=1)] = 5
    """Failed legs in a row that open it."""
    open: Seconds = 5.0
    """Seconds until one request may try the engine again; doubled with each try that fails."""
    max_open: Seconds = 60.0


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
    api_key_file: str | None = None
    """The key that engines ask for, alone in a file. Beaten by PDSERVE_ENGINE_API_KEY."""
    ca_file: str | None = None
    """What is trusted for engines with https URLs, PEM; default: what the system trusts."""


class RoleConfig(_Section, frozen=True):
    """`[prefill]` and `[decode]`."""

    count: Count = 1
    args: dict[str, ArgValue] = {}
    env: dict[str, str] = {}
    urls: list[str] = []
    """Engines that someone else started. Only `pdserve gateway` reads this."""


class PrefillConfig(RoleConfig, frozen=True):
    """`[prefill]` alone."""

    side_channel_hosts: list[str] = []
    """Names, addresses and networks (10.0.0.0/16) that a handoff may send D to, beside the hosts of the P engines' URLs."""


class Config(_Section, frozen=True):
    """The whole file."""

    name: str = "default"
    """Tells deployments on one machine apart; `status`, `logs` and `down` take it."""
    model: str = "smollm2"
    served_model_name: str | None = None
    gateway: GatewayConfig = GatewayConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    retries: RetriesConfig = RetriesConfig()
    breaker: BreakerConfig = BreakerConfig()
    engines: EnginesConfig = EnginesConfig()
    prefill: PrefillConfig = PrefillConfig()
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
    if config.gateway.workers > config.admission.max_concurrent:
        raise ConfigError(
            f"{source}: gateway.workers = {config.gateway.workers} share admission.max_concurrent = "
            f"{config.admission.max_concurrent}, which leaves nothing for some of them; start fewer"
        )
    if (config.gateway.tls_cert is None) != (config.gateway.tls_key is None):
        raise ConfigError(f"{source}: gateway.tls_cert and gateway.tls_key go together; set both or neither")
    for host in config.prefill.side_channel_hosts:
        _check_side_channel_host(host, source=source)
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


def _check_side_channel_host(host: str, *, source: str) -> None:
    """A network must be one, with no bits behind its mask; a name must not be a URL or a host with a port."""
    try:
        ipaddress.ip_network(host)
    except ValueError as exc:
        if _IS_HOST_NAME.fullmatch(host) and not _LOOKS_NUMERIC.fullmatch(host):
            return
        advice = "write a host's name, an address such as 10.0.0.7 or fd00::7, or a network such as 10.0.0.0/16"
        raise ConfigError(f"{source}: prefill.side_channel_hosts: {host!r}: {advice}") from exc


def reachable_host(host: str) -> str:
    """Where to reach, from this machine, what listens on a host: one that means every address is none to connect to."""
    return _REACHABLE.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """The URL of what listens there, as it is reached from this machine."""
    host, scheme = reachable_host(host), "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
