"""Reads a gateway's admin listener."""

from __future__ import annotations

from typing import TypeVar

from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.transport import EngineClient
from pdserve.protocol.admin import GatewayStatus, RequestRecord

_TIMEOUT_S = 10.0
_Value = TypeVar("_Value")


class AdminClient:
    """One gateway's admin listener. Every method raises EngineError when it cannot be reached or answers nonsense."""

    def __init__(self, url: str) -> None:
        self._client = EngineClient(EngineAddress(EngineName("gateway"), Role.BOTH, url), connect_timeout_s=_TIMEOUT_S)

    async def status(self) -> GatewayStatus:
        """Engines, pairs and counts."""
        return await self._read("/status", GatewayStatus)

    async def request(self, request_id: str) -> RequestRecord:
        """One request that is at its end."""
        return await self._read(f"/requests/{request_id}", RequestRecord)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _read(self, path: str, kind: type[_Value]) -> _Value:
        return self._client.decoded(await self._client.get(path, timeout_s=_TIMEOUT_S), kind)
