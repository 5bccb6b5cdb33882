"""A gateway in front of stand-in engines, all in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import msgspec

from pdserve.config import Config, GatewayConfig, TimeoutsConfig
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.pool import EngineState, PairState
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.sim.settings import EngineSettings
from pdserve.sim.stand_in import run_stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.gateway.service import Gateway
    from pdserve.sim.faults import Fault
    from pdserve.sim.stand_in import StandIn

MODEL = "tiny"
SETTINGS = EngineSettings(model=MODEL, max_model_len=2048, num_blocks=512)
TIMEOUTS = TimeoutsConfig(connect=5.0, prefill=20.0, first_byte=20.0, silence=20.0, shutdown=30.0)


@dataclass(frozen=True)
class Split:
    """A deployment of stand-ins."""

    gateway: Gateway
    client: httpx.AsyncClient
    prefills: list[StandIn]
    decodes: list[StandIn]

    @property
    def prefill(self) -> StandIn:
        """The only prefill engine."""
        (engine,) = self.prefills
        return engine

    @property
    def decode(self) -> StandIn:
        """The only decode engine."""
        (engine,) = self.decodes
        return engine

    async def settle(self) -> None:
        """Wait until every engine is idle and holds nothing."""
        async with asyncio.timeout(10):
            for engine in (*self.prefills, *self.decodes):
                await engine.idle()


@contextlib.asynccontextmanager
async def split(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_role: str = "kv_producer",
    decode_role: str = "kv_consumer",
    settings: EngineSettings = SETTINGS,
    timeouts: TimeoutsConfig = TIMEOUTS,
    config: Config = Config(),  # noqa: B008 - frozen
    prefill_faults: Sequence[Fault] = (),
    decode_faults: Sequence[Fault] = (),
) -> AsyncIterator[Split]:
    """Engines and gateway, ready; the given faults strike every request from the start."""
    async with contextlib.AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(run_stand_in(prefill_role, settings)) for _ in range(num_prefill)]
        decodes = [await stack.enter_async_context(run_stand_in(decode_role, settings)) for _ in range(num_decode)]
        for engines, faults in ((prefills, prefill_faults), (decodes, decode_faults)):
            for engine in engines:
                for fault in faults:
                    engine.faults.inject(fault, times=None)
        config = msgspec.structs.replace(config, gateway=GatewayConfig(port=0, admin_port=0), timeouts=timeouts)
        addresses = [
            EngineAddress(EngineName(f"{role}-{index}"), role, engine.url)
            for role, engines in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
            for index, engine in enumerate(engines)
        ]
        gateway = await stack.enter_async_context(running_gateway(config, addresses, bind_gateway(config)))
        await until_ready(gateway)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.client.url, timeout=30))
        yield Split(gateway, client, prefills, decodes)


async def until_ready(gateway: Gateway) -> None:
    """Wait until every engine takes traffic and every pair has been tried."""
    pool = gateway.pool
    async with asyncio.timeout(20):
        while not (
            all(pool.state_of(name)[0] is EngineState.READY for name in pool.names())
            and all(pair.state is not PairState.UNTRIED for pair in pool.pairs)
        ):
            await pool.changed.wait()
            pool.changed.clear()
