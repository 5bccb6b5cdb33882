"""vLLM flags as a user may give them under `args`: how they are spelled, which are pdserve's own, and how they become words.

Pure. Which flags pdserve itself sets, and why, is in pdserve.launch.plan.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import ArgValue

CONNECTOR_FLAG = "kv-transfer-config"
OWNED_FLAGS = {
    "model": "set `model`, or pass --model",
    "model-tag": "set `model`, or pass --model",
    "served-model-name": "set `served_model_name`",
    "host": "set `engines.host`",
    "port": "set `engines.first_port`",
    "uds": "leave it out: the gateway reaches engines by TCP",
    "api-key": "set `engines.api_key_file`, or PDSERVE_ENGINE_API_KEY: every user of the machine can read a command line",
    "ssl-keyfile": "leave it out: the gateway reaches the engines that pdserve starts by plain HTTP",
    "ssl-certfile": "leave it out: the gateway reaches the engines that pdserve starts by plain HTTP",
}
OWNED_VARIABLES = {
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "set `engines.first_side_channel_port`",
    "VLLM_API_KEY": "set `engines.api_key_file`, or PDSERVE_ENGINE_API_KEY, so that the gateway has it too",
}


def check_args(args: Mapping[str, ArgValue], section: str) -> dict[str, ArgValue]:
    """With every flag in one spelling: vLLM takes `max_model_len` and `max-model-len` for the same. Raises ConfigError."""
    checked: dict[str, ArgValue] = {}
    for key, value in args.items():
        flag = canonical_flag(key)
        if flag in OWNED_FLAGS:
            raise ConfigError(f"{section}: {key!r} is pdserve's to set; {OWNED_FLAGS[flag]}")
        if flag in checked:
            raise ConfigError(f"{section}: {key!r} is there twice, once with '-' and once with '_'")
        checked[flag] = _as_table(value, f"{section}: {key}") if flag == CONNECTOR_FLAG else value
    return checked


def check_env(env: Mapping[str, str], section: str) -> Mapping[str, str]:
    """As it came. Raises ConfigError for a variable that pdserve must set itself."""
    for name in env:
        if name in OWNED_VARIABLES:
            raise ConfigError(f"{section}: {name} is pdserve's to set; {OWNED_VARIABLES[name]}")
    return env


def canonical_flag(key: str) -> str:
    """vLLM's spelling of a flag, without dashes in front. Behind a dot stands a key of a JSON flag, which stays as it is."""
    flag, dot, inner = key.partition(".")
    return flag.lstrip("-").replace("_", "-") + dot + inner


def _as_table(value: ArgValue, where: str) -> dict[str, object]:
    """The connector's settings, also when they were pasted as JSON from vLLM's documentation."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise ConfigError(f"{where}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a table is needed, such as {{ kv_connector = 'NixlConnector' }}")
    extra = value.get("kv_connector_extra_config")
    if isinstance(extra, dict) and "kv_lease_duration" in extra:
        raise ConfigError(f"{where}: kv_lease_duration must be known to the gateway too; set `timeouts.kv_lease`")
    return value


def merge_args(ours: Mapping[str, ArgValue], theirs: Mapping[str, ArgValue]) -> dict[str, ArgValue]:
    """Theirs replaces ours, except that the connector's settings are merged key by key."""
    merged = {**ours, **theirs}
    mine, other = ours.get(CONNECTOR_FLAG), theirs.get(CONNECTOR_FLAG)
    if isinstance(mine, dict) and isinstance(other, dict):
        merged[CONNECTOR_FLAG] = _merge_tables(mine, other)
    return merged


def _merge_tables(ours: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, object]:
    merged = dict(ours)
    for key, value in theirs.items():
        mine = merged.get(key)
        merged[key] = _merge_tables(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def render_arg(flag: str, value: ArgValue) -> tuple[str, ...]:
    """The words of one flag: true is the bare flag, false its `--no-` form, a list several words, a table JSON."""
    match value:
        case True:
            return (f"--{flag}",)
        case False:
            return (f"--no-{flag}",)
        case list():
            return (f"--{flag}", *(str(item) for item in value))
        case dict():
            return (f"--{flag}", json.dumps(value, separators=(",", ":"), ensure_ascii=False))
        case _ if str(value).startswith("-"):
            return (f"--{flag}={value}",)  # As a word of its own argparse would take it for a flag.
        case _:
            return (f"--{flag}", str(value))
