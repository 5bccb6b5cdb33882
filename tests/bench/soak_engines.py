"""The soak's engines, all in one process: stand-ins with faults dealt out at random, told what to do by lines of JSON on stdin.

Prints one line when everybody listens, then one answer for each order. Ends when stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from pdserve.sim.faults import parse_fault
from pdserve.sim.settings import EngineSettings
from pdserve.sim.stand_in import run_stand_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.sim.stand_in import StandIn

MODEL = "soak"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_PREFILL_FAULTS = """
answer_without_handoff half_handoff never_answer head_only error_status:429 error_status:500 error_status:503 error_after:0
break_off_after:0 break_off_after:1 reset_after:1 half_close_after:1 long_length garbage_sse:0 truncate_after:1 short_length
false_chunks no_http answer_instead slow
"""
_DECODE_FAULTS = """
ignore_handoff refuse_handshake never_load come_late:0.05 never_answer head_only stall_after:2 error_status:429 error_status:500
error_status:503 error_after:0 error_after:2 break_off_after:0 break_off_after:2 reset_after:2 half_close_after:2 long_length
garbage_sse:0 garbage_sse:2 truncate_after:2 end_without_done short_length false_chunks no_http answer_instead slow
"""
FAULTS = {"prefill": _PREFILL_FAULTS.split(), "decode": _DECODE_FAULTS.split()}
"""Without those that kill an engine, which are dealt out by the clock, and those that no gateway can see."""
SETTINGS = EngineSettings(
    model=MODEL, max_model_len=2048, num_blocks=16_384, max_num_seqs=1024, handshake_timeout_s=0.5
)


async def serve(options: argparse.Namespace) -> None:
    """Until stdin ends."""
    rng = random.Random(options.seed)  # noqa: S311 - a run that can be repeated
    settings = dataclasses.replace(SETTINGS, kv_lease_duration_s=options.lease)
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, StandIn] = {}
        for role, count in (("prefill", options.prefill), ("decode", options.decode)):
            for index in range(count):
                engine = await stack.enter_async_context(run_stand_in(ROLES[role], settings))
                engine.keeps_requests = False
                engines[f"{role}-{index}"] = engine
        _tell({name: engine.url for name, engine in engines.items()})
        async for order in _orders():
            if order["do"] == "faults":
                _deal(engines, order["share"], rng)
            elif order["do"] == "calm":
                for engine in engines.values():
                    engine.faults.clear()
            elif order["do"] == "restart":
                await engines[order["name"]].restart()
            _tell(_report(engines.values()))


def _deal(engines: dict[str, StandIn], share: float, rng: random.Random) -> None:
    """Each leg suffers one of its side's faults with this probability."""
    for name, engine in engines.items():
        faults = FAULTS[name.partition("-")[0]]
        for fault in faults:
            engine.faults.inject(parse_fault(fault), share=share / len(faults), seed=rng.randrange(2**32))


def _report(engines: Sequence[StandIn] | Any) -> dict[str, int]:
    counts = {"num_struck": 0, "blocks": 0, "held_blocks": 0, "running": 0, "waiting": 0, "tasks": 0, "connections": 0}
    for engine in engines:
        counts["num_struck"] += engine.faults.num_struck
        for what, count in engine.leftovers.items():
            counts[what] += count
    return counts


async def _orders() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _tell(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease", type=float, default=30.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
