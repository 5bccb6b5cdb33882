"""Open-loop load of streamed completions with random token ids: `python tests/bench/stream_load.py URL`.

For the figures in docs/performance.md. The pieces of a stream are timed as they arrive, so ITL is per piece, not per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field

import httpx


@dataclass
class Timings:
    """What the streams took, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Milliseconds, by percentile."""
        shown = {"ttft": (self.ttft_s, (50, 99)), "itl": (self.itl_s, (50, 99, 100)), "e2e": (self.e2e_s, (50, 99))}
        return {
            f"{name}_p{percent}_ms": round(_percentile(values, percent) * 1e3, 1)
            for name, (values, percents) in shown.items()
            for percent in percents
        }


def _percentile(values: list[float], percent: int) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] if ranked else float("nan")


async def _stream(client: httpx.AsyncClient, body: dict[str, object], timings: Timings) -> None:
    started_s = last_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        is_first = True
        async for _ in response.aiter_bytes():
            now_s = time.perf_counter()
            (timings.ttft_s if is_first else timings.itl_s).append(now_s - last_s)
            last_s, is_first = now_s, False
    timings.e2e_s.append(last_s - started_s)


async def run(options: argparse.Namespace) -> Timings:
    """Poisson arrivals for the given time; waits for every stream to end."""
    rng = random.Random(options.seed)  # noqa: S311 - load, not secrets
    timings = Timings()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        end_s = time.perf_counter() + options.seconds
        while time.perf_counter() < end_s:
            body = {
                "model": options.model,
                "prompt": [rng.randrange(5, options.vocabulary) for _ in range(options.input_tokens)],
                "max_tokens": options.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            group.create_task(_stream(client, body, timings))
            await asyncio.sleep(rng.expovariate(options.rate))
    return timings


def main() -> None:
    """Read the command line, run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--input-tokens", type=int, default=4000)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    parser.add_argument("--seed", type=int, default=1)
    timings = asyncio.run(run(parser.parse_args()))
    sys.stdout.write(json.dumps({"num_requests": len(timings.e2e_s), **timings.summary()}) + "\n")


if __name__ == "__main__":
    main()
