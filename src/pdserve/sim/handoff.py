"""What vLLM 0.32 makes of `kv_transfer_params`, well formed or not, and the handoff that P answers with.

Pure. Read from distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py and v1/core/sched/scheduler.py of 0.32 and seen
on running engines; what looks odd here is odd there. Only NixlConnector in pull mode.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Params = dict[str, Any]
"""`kv_transfer_params` as the client sent them."""

_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_HEARTBEAT = (*_REQUIRED, "tp_size")
"""on_new_request in base_scheduler.py: without all of these D sends no heartbeats."""


class CoreFault(Exception):
    """An assertion or a look-up fails inside EngineCore, which takes the whole engine with it."""


class KvRole(enum.StrEnum):
    """`kv_role` of --kv-transfer-config; `none` is an engine without a connector."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"
    NONE = "none"

    @property
    def is_consumer(self) -> bool:
        """Whether the engine counts KV loads."""
        return self in {KvRole.CONSUMER, KvRole.BOTH}


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """No remote prefill: an ordinary request."""


@dataclass(frozen=True, slots=True)
class KeepForDecode:
    """P leg: keep the blocks when done and answer with a handoff."""


@dataclass(frozen=True, slots=True)
class Pull:
    """D leg: fetch the KV."""

    engine_id: str | None
    request_id: str
    host: str
    port: int
    block_ids: list[int]
    sends_heartbeats: bool


@dataclass(frozen=True, slots=True)
class WaitForever:
    """A key that names P is missing. vLLM logs that it will do without the transfer, yet leaves the request waiting for one."""


Plan = ComputeHere | KeepForDecode | Pull | WaitForever


def plan_transfer(params: Mapping[str, Any] | None, role: KvRole) -> Plan:
    """What an engine does with a request's parameters. Raises CoreFault.

    The role does not matter, except that without a connector all is ignored: a producer that is asked to pull pulls.
    """
    if not params or role is KvRole.NONE:
        return ComputeHere()
    if params.get("do_remote_prefill"):
        return _plan_pull(params)
    if params.get("do_remote_decode"):
        return KeepForDecode()
    return ComputeHere()


def _plan_pull(params: Mapping[str, Any]) -> Plan:
    groups = params.get("remote_block_ids")
    if not groups:
        raise CoreFault("assert num_external_tokens == 0")
    if any(key not in params for key in _REQUIRED):
        return WaitForever()
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
        raise CoreFault(f"remote_block_ids {groups!r} is not one list per KV cache group")
    return Pull(
        engine_id=params["remote_engine_id"],
        request_id=str(params["remote_request_id"]),
        host=str(params["remote_host"]),
        port=int(params["remote_port"]),
        block_ids=groups[0],
        sends_heartbeats=all(params.get(key) is not None for key in _HEARTBEAT),
    )


def notice_target(params: Mapping[str, Any]) -> tuple[str, int, str]:
    """Whom D tells that a refused request's blocks may go: host, port, P's request id. Raises CoreFault.

    NixlConnectorMetadata.add_new_req_to_recv takes the keys without looking (metadata.py), and nobody catches its KeyError.
    """
    for key in (*_REQUIRED, "remote_block_ids"):
        if key not in params:
            raise CoreFault(f"KeyError: {key!r}")
    return str(params["remote_host"]), int(params["remote_port"]), str(params["remote_request_id"])


def tail_of(block_ids: Sequence[int], count: int) -> Sequence[int]:
    """The blocks that D reads when it lacks `count`: the last ones, since the first are in its own cache. Raises CoreFault.

    As _apply_prefix_caching in base_worker.py: nothing checks that the blocks belong to the same tokens.
    """
    if count > len(block_ids):
        raise CoreFault("assert num_decode_blocks <= len(prefill_group)")
    return block_ids[len(block_ids) - count :]


def reported_cached_tokens(params: Mapping[str, Any] | None, num_cached: int) -> int:
    """`usage.prompt_tokens_details.cached_tokens`: P's number where the handoff holds one, D's own count where it does not
    (v1/engine/output_processor.py, RequestState.from_new_request). Read in the API server, whatever the connector does.
    """
    if params and params.get("do_remote_prefill"):
        told = params.get("remote_prefill_cached_tokens")
        if isinstance(told, int):
            return told
    return num_cached


def make_handoff(
    *,
    block_ids: Sequence[int],
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    num_tokens: int,
    num_cached: int | None,
) -> Params:
    """The handoff as P answers it, its keys in vLLM's order. `num_cached` is known to P only if it ended on its first token."""
    handoff: Params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    if num_cached is not None:
        handoff["remote_prefill_cached_tokens"] = num_cached
    return handoff
