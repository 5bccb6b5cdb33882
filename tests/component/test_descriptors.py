"""A gateway that has no descriptor left: its own trouble, and nobody else's."""

from __future__ import annotations

import asyncio

from descriptors import no_descriptor_left
from pdserve.core import PrefillPlace
from pdserve.engine.breaker import BreakerState
from pdserve.engine.pool import PairState
from split import MODEL, split


async def test_a_gateway_without_descriptors_blames_no_engine() -> None:
    """Its clients are told to come again; engines, pairs and breakers stay as they were, and so does their watch."""
    async with split() as deployment:
        pool = deployment.gateway.pool
        body = {"model": MODEL, "prompt": "one two three", "max_tokens": 2}
        assert (await deployment.client.post("/v1/completions", json=body)).status_code == 200
        for name in pool.names():
            pool.client(name).close()
        await asyncio.sleep(0.2)  # Both ends' descriptors are free again, and may not be while they count.
        with no_descriptor_left():
            for name in pool.names():
                pool.report_broken(name)  # Has them looked at now.
            for path in ("/v1/completions", "/tokenize", "/v1/completions"):
                answer = await deployment.client.post(path, json=body)
                assert (answer.status_code, answer.headers["x-pdserve-reason"]) == (503, "out_of_sockets")
                assert answer.headers["retry-after"]
            await asyncio.sleep(0.1)
        assert not deployment.gateway.watching.done()
        assert all(snapshot.is_healthy for snapshot in pool.snapshots())
        assert {pool.breaker_state(name) for name in pool.names()} == {BreakerState.CLOSED}
        assert [pair.state for pair in pool.pairs] == [PairState.PROVEN]
        assert (await deployment.client.post("/v1/completions", json=body)).status_code == 200
        assert deployment.gateway.journal.last(1)[0].place is PrefillPlace.REMOTE
        await deployment.settle()
