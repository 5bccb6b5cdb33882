"""Every process of a deployment at one moment, for a table: what its process, the gateway and its own counters say."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.scrape import scrape
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine.credentials import EngineAccess
    from pdserve.engine.scrape import EngineCounters
    from pdserve.protocol.admin import GatewayStatus

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One engine as its supervisor knows it."""

    name: str
    role: Role
    url: str
    pid: int | None
    state: str


@dataclass(frozen=True, slots=True)
class EngineRow:
    """The same, with what the gateway and the engine itself say."""

    process: ProcessInfo
    state: str
    counters: EngineCounters | None
    """None while the engine does not answer."""


async def engine_rows(
    processes: Sequence[ProcessInfo], gateway: GatewayStatus | None, *, access: EngineAccess
) -> list[EngineRow]:
    """Ask every engine at once."""
    seen = {info.name: info.state for info in gateway.engines} if gateway is not None else {}
    counters = await asyncio.gather(*(_try_scrape(process, access) for process in processes))
    return [
        EngineRow(
            process, process.state if process.state == "exited" else seen.get(process.name, process.state), counted
        )
        for process, counted in zip(processes, counters, strict=True)
    ]


async def _try_scrape(process: ProcessInfo, access: EngineAccess) -> EngineCounters | None:
    if process.state == "exited":
        return None
    address = EngineAddress(EngineName(process.name), process.role, process.url)
    client = EngineClient(address, connect_timeout_s=_TIMEOUT_S, access=access)
    try:
        return await scrape(client, timeout_s=_TIMEOUT_S)
    except EngineError:
        return None
    finally:
        client.close()
