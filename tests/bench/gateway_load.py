"""The client that gateways are measured with: a fixed number of connections, each asking again as soon as it has its answer.

Every answer must be 200 and whole. CPU time is read for the gateway's processes over the same seconds in which answers are
counted. Takes one order, a line of JSON, on stdin at a time and answers with what was measured; ends when stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import psutil
import uvloop

from bench.gateway_engines import CHUNK_BYTES, DONE, MODEL, NUM_CHUNKS, STAMP_DIGITS, STAMP_MARK, TEXT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STREAM_BYTES = NUM_CHUNKS * CHUNK_BYTES + len(DONE)
_DRAIN_TIMEOUT_S = 20.0
_NUM_TOKEN_IDS = 100_000
_VOCABULARY = 128_000


class Prompt(StrEnum):
    """What is asked."""

    SHORT = "400 B"
    LONG = "60 kB"
    TOKEN_IDS = "100,000 token ids"


class Order(msgspec.Struct, frozen=True):
    """One load on one gateway."""

    port: int
    num_connections: int
    seconds: float
    warm_up_s: float
    prompt: Prompt = Prompt.SHORT
    is_stream: bool = False
    text: str = TEXT
    """What a whole answer must say."""
    gateway_pids: list[int] = []
    """The processes whose CPU time and memory are read, their children included."""
    other_pids: list[int] = []
    """Those beside this one that share the cores that the gateway does not have."""


class Measured(msgspec.Struct, frozen=True):
    """What one order showed; None for what did not happen.

    A unit of work is a request, or a chunk where answers are streamed.
    """

    num_answers: int
    """In all, warm-up and end included: as many as the engines must have been asked."""
    problems: dict[str, int]
    requests_per_s: float
    units_per_s: float
    cpu_us: float
    """CPU time a unit of work."""
    kernel_us: float
    """What of it the kernel took."""
    gateway_cores: float
    """How much of a core the gateway used."""
    other_cores: float
    """The same for engines and client."""
    foreign_cores: float
    """And for whatever else ran on this machine."""
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    first_byte_p50_ms: float | None
    first_byte_p99_ms: float | None
    delay_p50_ms: float | None
    """From a chunk's departure at the engine to its arrival here."""
    delay_p99_ms: float | None
    delay_max_ms: float | None
    memory_kb: float
    """Growth of resident memory a connection."""


@dataclass(slots=True)
class Tallies:
    """What has come in since the window opened."""

    latencies_ns: list[int] = field(default_factory=list)
    first_bytes_ns: list[int] = field(default_factory=list)
    delays_us: list[int] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class Load:
    """What the connections of one order share."""

    request: bytes
    order: Order
    tallies: Tallies = field(default_factory=Tallies)
    problems: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    is_ending: bool = False
    whole_answer: bytes | None = None
    """The first one, which was read; all others are the same."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._is_stream = load.order.is_stream
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._asked_ns = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._load.problems[f"connection lost: {exc}"] += 1
            self.done.set_result(None)

    def ask(self) -> None:
        """Send the next request, or be done."""
        assert self._transport is not None
        if self._load.is_ending:
            self.done.set_result(None)
            self._transport.close()
            return
        self._pieces = []
        self._num_bytes = 0
        self._asked_ns = time.monotonic_ns()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        tallies = self._load.tallies
        if not self._num_bytes:
            tallies.first_bytes_ns.append(time.monotonic_ns() - self._asked_ns)
        self._num_bytes += len(data)
        if not self._is_stream:
            self._pieces.append(data)
            return
        tallies.num_bytes += len(data)
        start = data.find(STAMP_MARK) + len(STAMP_MARK)
        if len(STAMP_MARK) <= start <= len(data) - STAMP_DIGITS:
            tallies.delays_us.append(time.monotonic_ns() // 1000 - int(data[start : start + STAMP_DIGITS]))
        self._pieces[:] = (data,)

    def on_message_complete(self) -> None:
        load = self._load
        load.tallies.latencies_ns.append(time.monotonic_ns() - self._asked_ns)
        load.num_answers += 1
        status = self._parser.get_status_code()
        if status != 200:
            load.problems[f"status {status}"] += 1
        elif not (self._is_whole_stream() if self._is_stream else self._is_whole_answer()):
            load.problems["not a whole answer"] += 1
        self.ask()

    def _is_whole_stream(self) -> bool:
        """Chunks are all of one length; which ones come when, the stamps tell."""
        return self._num_bytes == _STREAM_BYTES and self._pieces[-1].endswith(DONE[-2:])

    def _is_whole_answer(self) -> bool:
        body = b"".join(self._pieces)
        if self._load.whole_answer is None:
            if json.loads(body)["choices"][0]["text"] != self._load.order.text:
                return False
            self._load.whole_answer = body
        return body == self._load.whole_answer


@cache
def _body(prompt: Prompt, *, is_stream: bool) -> bytes:
    body = {"model": MODEL, "prompt": _text_or_ids(prompt), "max_tokens": NUM_CHUNKS, "temperature": 0}
    return json.dumps(body | {"stream": is_stream}, separators=(",", ":")).encode()


def _text_or_ids(prompt: Prompt) -> str | list[int]:
    if prompt is Prompt.TOKEN_IDS:
        rng = random.Random(1)  # noqa: S311 - the same ids in every run
        return [rng.randrange(_VOCABULARY) for _ in range(_NUM_TOKEN_IDS)]
    return "hello world " * (33 if prompt is Prompt.SHORT else 5000)


def _request(order: Order) -> bytes:
    body = _body(order.prompt, is_stream=order.is_stream)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: bench\r\naccept: */*\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % (order.port, len(body)) + body


class Processes:
    """Some processes and their children."""

    def __init__(self, pids: Sequence[int]) -> None:
        roots = [psutil.Process(pid) for pid in pids]
        self._all = [*roots, *(child for root in roots for child in root.children(recursive=True))]

    def cpu_s(self) -> float:
        """CPU time so far, to the nanosecond: each process has a clock of its own (clock_getcpuclockid(3))."""
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._all)

    def kernel_and_user_s(self) -> tuple[float, float]:
        """The same in two, to the tick."""
        times = [process.cpu_times() for process in self._all]
        return sum(time.system for time in times), sum(time.user for time in times)

    def rss_kb(self) -> float:
        """Resident memory."""
        return sum(process.memory_info().rss for process in self._all) / 1000


def _busy_s() -> float:
    """CPU time of everybody on this machine, its hypervisor's other guests included."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def measure(order: Order) -> Measured:
    """Connect, warm up, measure, and let what is under way end."""
    loop = asyncio.get_running_loop()
    load = Load(_request(order), order)
    gateway, others = Processes(order.gateway_pids), Processes([os.getpid(), *order.other_pids])
    rss_before_kb = gateway.rss_kb()
    connections = []
    for _ in range(order.num_connections):
        _, connection = await loop.create_connection(lambda: Connection(load), "127.0.0.1", order.port)
        connections.append(connection)
        connection.ask()
    await asyncio.sleep(order.warm_up_s)
    load.tallies = Tallies()
    started_s = time.monotonic()
    all_before_s, split_before = _busy_s(), gateway.kernel_and_user_s()
    cpu_before_s, others_before_s = gateway.cpu_s(), others.cpu_s()
    await asyncio.sleep(order.seconds)
    cpu_s, others_s = gateway.cpu_s() - cpu_before_s, others.cpu_s() - others_before_s
    all_s, split = _busy_s() - all_before_s, gateway.kernel_and_user_s()
    seconds = time.monotonic() - started_s
    tallies, load.tallies = load.tallies, Tallies()
    memory_kb = (gateway.rss_kb() - rss_before_kb) / order.num_connections
    load.is_ending = True
    await asyncio.wait([connection.done for connection in connections], timeout=_DRAIN_TIMEOUT_S)
    unfinished = sum(not connection.done.done() for connection in connections)
    if unfinished:
        load.problems["no end"] += unfinished
    num_requests = len(tallies.latencies_ns)
    num_units = (tallies.num_bytes - num_requests * len(DONE)) / CHUNK_BYTES if order.is_stream else num_requests
    cpu_us = cpu_s * 1e6 / num_units if num_units else 0.0
    kernel_s, user_s = (after - before for after, before in zip(split, split_before, strict=True))
    latencies_ms, first_bytes_ms = _ranked_ms(tallies.latencies_ns, 1e6), _ranked_ms(tallies.first_bytes_ns, 1e6)
    delays_ms = _ranked_ms(tallies.delays_us, 1e3)
    return Measured(
        num_answers=load.num_answers,
        problems=dict(load.problems),
        requests_per_s=num_requests / seconds,
        units_per_s=num_units / seconds,
        cpu_us=cpu_us,
        kernel_us=cpu_us * kernel_s / (kernel_s + user_s) if kernel_s + user_s else 0.0,
        gateway_cores=cpu_s / seconds,
        other_cores=others_s / seconds,
        foreign_cores=max(0.0, all_s - cpu_s - others_s) / seconds,
        latency_p50_ms=_percentile(latencies_ms, 50),
        latency_p99_ms=_percentile(latencies_ms, 99),
        first_byte_p50_ms=_percentile(first_bytes_ms, 50),
        first_byte_p99_ms=_percentile(first_bytes_ms, 99),
        delay_p50_ms=_percentile(delays_ms, 50),
        delay_p99_ms=_percentile(delays_ms, 99),
        delay_max_ms=_percentile(delays_ms, 100),
        memory_kb=memory_kb,
    )


def _ranked_ms(values: Iterable[int], units_per_ms: float) -> list[float]:
    return sorted(value / units_per_ms for value in values)


def _percentile(ranked: Sequence[float], percent: int) -> float | None:
    return ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] if ranked else None


async def serve() -> None:
    """Until stdin ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        measured = await measure(msgspec.json.decode(line, type=Order))
        gc.collect()
        sys.stdout.buffer.write(msgspec.json.encode(measured) + b"\n")
        sys.stdout.flush()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, nargs="+", required=True, help="where to run")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    gc.disable()  # A pause of this process would be taken for a gateway's.
    uvloop.run(serve())


if __name__ == "__main__":
    main()
