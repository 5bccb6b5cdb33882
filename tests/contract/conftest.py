"""The pair of engines that a contract test runs on: stand-ins in this process, or real vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from contract.asking import Engine
from pdserve.sim.settings import EngineSettings
from pdserve.sim.stand_in import run_stand_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Pair:
    """One prefill and one decode engine, wherever they are."""

    prefill_url: str
    decode_url: str
    model: str


# As `pdserve up` starts vLLM on a CPU: its block size; and a handshake's patience that a test can wait for.
_SETTINGS = EngineSettings(
    model="tiny",
    block_size=128,
    num_blocks=64,
    max_model_len=2048,
    handshake_timeout_s=0.2,
)


@pytest.fixture(
    params=[
        pytest.param("stand_in"),
        # The first test that needs real engines waits until they are up.
        pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.timeout(300)]),
    ]
)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Engines that must not be told apart by what the gateway relies on; tests leave them idle."""
    if request.param == "vllm":
        real = request.getfixturevalue("real_pair")
        yield Pair(real.prefill_url, real.decode_url, real.model)
        return
    async with run_stand_in("kv_producer", _SETTINGS) as prefill, run_stand_in("kv_consumer", _SETTINGS) as decode:
        yield Pair(prefill.url, decode.url, _SETTINGS.model)


@pytest.fixture
async def prefill(pair: Pair) -> AsyncIterator[Engine]:
    engine = Engine(pair.prefill_url, pair.model)
    async with engine.client:
        yield engine


@pytest.fixture
async def decode(pair: Pair) -> AsyncIterator[Engine]:
    engine = Engine(pair.decode_url, pair.model)
    async with engine.client:
        yield engine
