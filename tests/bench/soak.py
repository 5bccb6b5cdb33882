"""Many requests with faults, disconnects and restarts through one gateway: `scripts/bench soak`.

Gateway, stand-in engines (2P2D) and this client are three processes. Every text is compared with what the stand-ins' model says
after that prompt, every request must end in time, and in the end nothing may be held, open or grown. Ctrl-C ends the load and
judges what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop

from bench.asking import APIS, CHAT, COMPLETIONS, body_of, read_stream, read_whole
from bench.soak_engines import MODEL
from pdserve.http.client import ConnectionFailed, ConnectionPool, ProtocolViolated
from pdserve.sim.prompt import render
from pdserve.sim.tokens import Continuation, decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bench.asking import Said
    from pdserve.http.server import Headers

LIMITS = {"connect": 2.0, "prefill": 2.0, "first_byte": 2.0, "whole_answer": 2.0, "silence": 2.0, "total": 20.0}
"""The gateway's deadlines, in seconds."""
_HANG_S = LIMITS["total"] + 20.0
"""A request that has not ended by then hangs; the margin is for a machine that stands still."""
_LEASE_MARGIN_S = 3.0
_MAX_TOKENS = 12
_NUM_PROMPTS = 400
_MIN_JUDGED = 40_000
"""Requests below which memory is still warming up, and is not judged."""
_MAX_GROWTH_KIB = 4096
"""How much the gateway may grow in 100,000 requests."""
_MAX_SHOWN = 5
_WORDS = (
    "the quick brown fox jumps over",
    "lazy dog",
    "and then",
    "once more",
    "around",
    "old stone house",
    "near the river",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and the texts that are right for it."""

    api: str
    is_stream: bool
    body: bytes
    texts: tuple[str, ...]
    leaves_after: int | None
    """The pieces of the answer after which the client is gone; None: it stays."""


@dataclass(slots=True)
class Tallies:
    """What has happened so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0
    num_hung: int = 0
    num_unclear: int = 0
    """Answers that were neither right nor an error told as it should be."""
    num_done: int = 0
    num_restarts: int = 0
    latencies_s: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Requests done, and the gateway's RSS in KiB."""

    def found(self, what: str, request: Request, detail: object) -> None:
        """Something that must not be."""
        self.outcomes[what] += 1
        if len(self.wrong) < _MAX_SHOWN:
            kind = "streamed" if request.is_stream else "whole"
            self.wrong.append(f"{what}: {request.api} {kind}: {str(detail)[:400]}")


# Requests


class Requests:
    """Makes them, the same ones for the same seed."""

    def __init__(self, seed: int, *, disconnects: float) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - a run that can be repeated
        self._disconnects = disconnects
        self._prompts = [
            " ".join(self._rng.choices(_WORDS, k=self._rng.randrange(4, 90))) + f" {number}"
            for number in range(_NUM_PROMPTS)
        ]
        self._known: dict[tuple[bool, int, str], list[str]] = {}

    def make(self) -> Request:
        """The next one."""
        rng = self._rng
        api, is_stream = rng.choice(APIS), rng.random() < 0.5
        numbers = [rng.randrange(_NUM_PROMPTS)]
        num_tokens, fields = rng.randrange(1, _MAX_TOKENS + 1), {"temperature": 0, "stream": is_stream}
        salts = [""]
        draw = rng.random()
        if draw < 0.03 and api in {COMPLETIONS, CHAT}:
            seed = rng.randrange(50)
            fields |= {"n": 2, "seed": seed, "temperature": 1}
            salts = [f"seed {seed}", f"seed {seed + 1}"]
        elif draw < 0.06 and api == COMPLETIONS:
            numbers += [rng.randrange(_NUM_PROMPTS) for _ in range(2)]
        texts = [self._text(api, number, salt, num_tokens) for number in numbers for salt in salts]
        prompts = [self._prompts[number] for number in numbers]
        prompt = prompts if len(prompts) > 1 else prompts[0]
        body = body_of(api, prompt, model=MODEL, max_tokens=num_tokens, **fields)
        leaves_after = rng.randrange(0, 4) if rng.random() < self._disconnects else None
        return Request(api, is_stream, json.dumps(body).encode(), tuple(texts), leaves_after)

    def _text(self, api: str, number: int, salt: str, num_tokens: int) -> str:
        """What the stand-ins' model says: it knows nothing but the context."""
        key = (api == COMPLETIONS, number, salt)
        words = self._known.get(key)
        if words is None:
            prompt = self._prompts[number]
            text = prompt if api == COMPLETIONS else render([{"role": "user", "content": prompt}])
            model = Continuation(encode(text), salt=salt)
            words = self._known[key] = [decode([model.next_token(may_end=False)]) for _ in range(_MAX_TOKENS)]
        return "".join(words[:num_tokens])


class _Sink:
    """Takes one answer; `done` once it is whole, or after as many pieces as its client waits for."""

    def __init__(self, done: asyncio.Future[None], leaves_after: int | None) -> None:
        self.done = done
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self.is_whole = False
        self._leaves_after = leaves_after

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = dict(headers)

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)
        if self._leaves_after is not None and len(self.pieces) >= self._leaves_after:
            self._set_done()

    def on_end(self) -> None:
        self.is_whole = True  # From here on the connection is the pool's.
        self._set_done()

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _set_done(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Client:
    """Keeps some requests under way until there are enough."""

    def __init__(self, url: str, requests: Requests, tallies: Tallies) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host = f"{parts.hostname}:{parts.port}".encode()
        self._pool = ConnectionPool(parts.hostname, parts.port)
        self._requests = requests
        self._tallies = tallies
        self._loop = asyncio.get_running_loop()
        self._left = 0

    async def run(self, number: int, *, concurrency: int) -> None:
        """Send them all."""
        self._left = number
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work())

    def stop(self) -> None:
        """Begin no more."""
        self._left = 0

    def close(self) -> None:
        """Drop what is idle."""
        self._pool.close()

    async def _work(self) -> None:
        while self._left > 0:
            self._left -= 1
            await self._send(self._requests.make())
            self._tallies.num_done += 1

    async def _send(self, request: Request) -> None:
        connection = self._pool.try_acquire() or await self._pool.connect()
        sink = _Sink(self._loop.create_future(), request.leaves_after)
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        started_s = self._loop.time()
        try:
            async with asyncio.timeout(_HANG_S):
                connection.send(head % (request.api.encode(), self._host, len(request.body)) + request.body, sink)
                if request.leaves_after == 0:
                    await asyncio.sleep(len(request.body) % 7 * 0.001)  # At any moment before the first byte.
                else:
                    await sink.done
        except TimeoutError:
            self._tallies.num_hung += 1
            self._tallies.found("hung", request, "no end")
            connection.abort()
            return
        except (ConnectionFailed, ProtocolViolated) as exc:
            self._tallies.num_unclear += 1
            self._tallies.found("broken", request, exc)
            return
        if not sink.is_whole:
            connection.abort()
            self._tallies.outcomes["left"] += 1
            return
        self._tallies.latencies_s.append(self._loop.time() - started_s)
        self._judge(request, sink)

    def _judge(self, request: Request, sink: _Sink) -> None:
        tallies, body = self._tallies, b"".join(sink.pieces)
        is_stream = request.is_stream and sink.status == 200
        try:
            said = (read_stream if is_stream else read_whole)(request.api, body)
        except (ValueError, KeyError) as exc:
            tallies.num_unclear += 1
            tallies.found("unreadable", request, f"{exc!r} {body[:200]!r}")
            return
        if not _is_right_so_far(said, request, is_whole=said.error is None):
            tallies.num_wrong += 1
            tallies.found("wrong text", request, f"{said.texts} in place of {request.texts}")
        elif said.error is None and said.is_marked == is_stream and sink.status == 200:
            tallies.outcomes["right"] += 1
        elif said.error is not None and not said.is_marked and not said.num_after_end:
            self._count_error(request, sink, said)
        else:
            tallies.num_unclear += 1
            tallies.found("unclear", request, said)

    def _count_error(self, request: Request, sink: _Sink, said: Said) -> None:
        assert said.error is not None
        reason = sink.headers.get(b"x-pdserve-reason")
        if sink.status == 200:
            shown = said.error.reason or "(Anthropic's form has no reason)"
            self._tallies.outcomes[f"cut short: {shown}"] += 1
        elif reason is not None:
            self._tallies.outcomes[f"{sink.status} {reason.decode()}"] += 1
        else:
            self._tallies.num_unclear += 1
            self._tallies.found("without a reason", request, said)


def _is_right_so_far(said: Said, request: Request, *, is_whole: bool) -> bool:
    if is_whole:
        return [said.texts.get(index) for index in range(len(request.texts))] == list(request.texts)
    return all(
        index < len(request.texts) and request.texts[index].startswith(text) for index, text in said.texts.items()
    )


# Processes


class Engines:
    """The stand-ins' process."""

    def __init__(self, process: asyncio.subprocess.Process, urls: dict[str, str]) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self.urls = urls

    async def order(self, do: str, **values: object) -> dict[str, int]:
        """Have something done; what is in use afterwards."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            report: dict[str, int] = json.loads(await self._process.stdout.readline())
        return report


@contextlib.asynccontextmanager
async def running_engines(options: argparse.Namespace) -> AsyncIterator[Engines]:
    """2P2D."""
    command = (sys.executable, "-m", "bench.soak_engines", "--seed", str(options.seed), "--lease", str(options.lease))
    async with _process(*command, reads=True) as process:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise SystemExit("the engines did not start")
        yield Engines(process, json.loads(line))


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's process."""

    url: str
    admin_url: str
    pid: int

    def rss_kib(self) -> int:
        """What it has in memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1024

    def num_sockets(self) -> int:
        """What it has open, listeners included."""
        links = [str(entry.readlink()) for entry in Path(f"/proc/{self.pid}/fd").iterdir() if entry.is_symlink()]
        return sum(link.startswith("socket:") for link in links)


@contextlib.asynccontextmanager
async def running_gateway(urls: dict[str, str], *, lease_s: float) -> AsyncIterator[Gateway]:
    """`pdserve gateway` in front of them."""
    lease = {"kv_lease": lease_s, "kv_lease_margin": _LEASE_MARGIN_S}
    config = {"gateway": {"port": 0, "admin_port": 0}, "timeouts": LIMITS | lease}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pdserve.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        log_path = Path(folder) / "gateway.log"
        options = [f"--{name.partition('-')[0]}={url}" for name, url in urls.items()]
        command = (sys.executable, "-m", "pdserve", "gateway", "--config", str(path), *options)
        with log_path.open("wb") as log:
            async with _process(*command, stderr=log) as process:
                assert process.stdout is not None
                while line := (await process.stdout.readline()).decode():
                    if line.startswith("gateway on "):
                        break
                else:
                    raise SystemExit(f"the gateway did not start:\n{log_path.read_text(encoding='utf-8')[-2000:]}")
                draining = asyncio.create_task(_drain(process.stdout))
                words = line.replace(",", "").split()
                yield Gateway(words[2], words[5], process.pid)
                draining.cancel()


async def _drain(stream: asyncio.StreamReader) -> None:
    """What it tells of its engines would fill the pipe."""
    while await stream.readline():
        pass


@contextlib.asynccontextmanager
async def _process(*command: str, stderr: Any = None, reads: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
    """Out of Ctrl-C's reach, and gone at the block's end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE if reads else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _get(url: str, path: str) -> Any:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


# The run


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    is_good: bool
    found: str


@dataclass(frozen=True, slots=True)
class Report:
    """What came out."""

    num_requests: int
    seconds: float
    num_faults: int
    num_restarts: int
    latency_ms: dict[str, float]
    outcomes: dict[str, int]
    memory_kib: dict[str, int]
    checks: list[Check]
    examples: list[str]

    @property
    def is_good(self) -> bool:
        """Whether every check passed."""
        return all(check.is_good for check in self.checks)


async def run(options: argparse.Namespace) -> Report:
    """Start everybody, send everything, judge."""
    tallies = Tallies()
    requests = Requests(options.seed, disconnects=options.disconnects)
    async with (
        running_engines(options) as engines,
        running_gateway(engines.urls, lease_s=options.lease) as gateway,
    ):
        await _until(lambda status: status["split"] == "proven", gateway, 30.0)
        num_sockets = gateway.num_sockets() - (await engines.order("report"))["connections"]
        await engines.order("faults", share=options.faults)
        client = Client(gateway.url, requests, tallies)
        beside = [
            asyncio.create_task(_sample(gateway, tallies)),
            asyncio.create_task(_restart_engines(engines, tallies, options)),
            asyncio.create_task(_narrate(tallies, options)),
        ]
        with _stopped_by_ctrl_c(client):
            started_s = time.monotonic()
            await client.run(options.requests, concurrency=options.concurrency)
            seconds = time.monotonic() - started_s
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        for task in beside:
            if not task.cancelled():
                task.result()
        tallies.memory.append((tallies.num_done, gateway.rss_kib()))
        client.close()
        left = await engines.order("calm")
        ended = await _settle(engines, gateway, num_sockets, lease_s=options.lease)
        return _report(tallies, seconds, left["num_struck"], ended)


async def _settle(engines: Engines, gateway: Gateway, num_sockets: int, *, lease_s: float) -> list[Check]:
    """Wait until nothing is held any more: lost handoffs end with P's lease."""
    deadline_s = time.monotonic() + lease_s + 15.0
    while True:
        left = await engines.order("report")
        status = await _get(gateway.admin_url, "/status")
        num_open = gateway.num_sockets() - left["connections"]
        in_use = {name: left[name] for name in ("blocks", "held_blocks", "running", "waiting", "tasks") if left[name]}
        counted = {name: status[name] for name in ("num_running", "num_queued") if status[name]}
        for engine in status["engines"]:
            counted |= {f"{engine['name']} {key}": engine[key] for key in ("num_in_flight", "num_held") if engine[key]}
        checks = [
            Check("all engines idle, no block held", not in_use, str(in_use or "nothing in use")),
            Check("no request, leg or handoff open in the gateway", not counted, str(counted or "none open")),
            Check("no connection left open", num_open <= num_sockets, f"{num_open - num_sockets:+d} sockets"),
        ]
        if all(check.is_good for check in checks) or time.monotonic() > deadline_s:
            return checks
        await asyncio.sleep(0.2)


def _report(tallies: Tallies, seconds: float, num_faults: int, ended: list[Check]) -> Report:
    wrong, hung, unclear = tallies.num_wrong, tallies.num_hung, tallies.num_unclear
    checks = [
        Check("no wrong text", wrong == 0, f"{wrong} of {tallies.num_done}"),
        Check(f"no request hung (over {_HANG_S:g} s)", hung == 0, f"{hung} of {tallies.num_done}"),
        Check("every answer right, or one clear error", unclear == 0, f"{unclear} of {tallies.num_done}"),
        *ended,
        _memory_check(tallies.memory),
    ]
    ranked = sorted(tallies.latencies_s)
    return Report(
        num_requests=tallies.num_done,
        seconds=round(seconds, 1),
        num_faults=num_faults,
        num_restarts=tallies.num_restarts,
        latency_ms={f"p{percent}": _percentile_ms(ranked, percent) for percent in (50, 99, 100)},
        outcomes=dict(tallies.outcomes.most_common()),
        memory_kib={str(done): rss for done, rss in _thinned(tallies.memory)},
        checks=checks,
        examples=tallies.wrong,
    )


def _memory_check(memory: Sequence[tuple[int, int]]) -> Check:
    """A straight line through the last quarter's samples: how steep it is."""
    what = f"gateway's memory flat (under {_MAX_GROWTH_KIB / 1024:g} MiB in 100,000 requests)"
    num_done = memory[-1][0]
    last = [(done, rss) for done, rss in memory if done >= num_done * 3 / 4]
    if num_done < _MIN_JUDGED or len(last) < 3:
        return Check(what, True, f"not judged below {_MIN_JUDGED} requests; {memory[-1][1] / 1024:.0f} MiB")
    growth_kib = _slope(last) * 100_000
    found = f"{growth_kib / 1024:+.1f} MiB in the last quarter's pace, {memory[-1][1] / 1024:.0f} MiB in the end"
    return Check(what, growth_kib <= _MAX_GROWTH_KIB, found)


def _slope(points: Sequence[tuple[int, int]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _thinned(memory: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    step = max(1, len(memory) // 20)
    return [*memory[:-1:step], memory[-1]]


def _percentile_ms(ranked: Sequence[float], percent: int) -> float:
    return round(ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] * 1e3, 1) if ranked else 0.0


async def _sample(gateway: Gateway, tallies: Tallies) -> None:
    while True:
        tallies.memory.append((tallies.num_done, gateway.rss_kib()))
        await asyncio.sleep(1.0)


async def _restart_engines(engines: Engines, tallies: Tallies, options: argparse.Namespace) -> None:
    """One engine after so many requests; who it is, the seed says."""
    rng = random.Random(options.seed + 1)  # noqa: S311 - a run that can be repeated
    names = sorted(engines.urls)
    while options.restart_every:
        due = (tallies.num_restarts + 1) * options.restart_every
        while tallies.num_done < due:  # noqa: ASYNC110 - a look now and then is enough
            await asyncio.sleep(0.05)
        await engines.order("restart", name=rng.choice(names))
        tallies.num_restarts += 1


async def _narrate(tallies: Tallies, options: argparse.Namespace) -> None:
    """A line now and then for whoever waits."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(5.0)
        pace = tallies.num_done / (time.monotonic() - started_s)
        sys.stderr.write(
            f"{tallies.num_done} of {options.requests} requests, {pace:.0f}/s, {tallies.num_wrong} wrong\n"
        )


async def _until(holds: Callable[[Any], bool], gateway: Gateway, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds(await _get(gateway.admin_url, "/status")):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def _stopped_by_ctrl_c(client: Client) -> Any:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, client.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# What is shown


def lines_of(report: Report, *, is_markdown: bool) -> list[str]:
    """The report as a table."""
    pace = report.num_requests / report.seconds if report.seconds else 0.0
    facts = [
        ("requests", f"{report.num_requests:,} in {report.seconds:g} s, {pace:.0f}/s"),
        ("legs that suffered a fault", f"{report.num_faults:,}"),
        ("engines restarted", f"{report.num_restarts}"),
        ("latency", ", ".join(f"{name} {value:g} ms" for name, value in report.latency_ms.items())),
        *((f"got: {name}", f"{count:,}") for name, count in report.outcomes.items()),
        *((("pass: " if check.is_good else "FAIL: ") + check.what, check.found) for check in report.checks),
    ]
    if is_markdown:
        return ["| what | found |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    width = max(len(name) for name, _ in facts)
    return [*(f"{name.ljust(width)}  {value}" for name, value in facts), *report.examples]


def main() -> None:
    """Read the command line, run, show; exit 1 when a check fails."""
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--concurrency", type=int, default=32, help="requests under way at once")
    parser.add_argument("--faults", type=float, default=0.02, help="share of legs that suffer one")
    parser.add_argument("--disconnects", type=float, default=0.02, help="share of clients that leave early")
    parser.add_argument(
        "--restart-every", type=int, default=5000, metavar="N", help="restart an engine every N requests"
    )
    parser.add_argument("--lease", type=float, default=30.0, metavar="SECONDS", help="how long P keeps blocks for D")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/operations.md")
    options = parser.parse_args()
    report = uvloop.run(run(options))
    sys.stdout.write("\n".join(lines_of(report, is_markdown=options.markdown)) + "\n")
    if options.json is not None:
        options.json.write_text(
            json.dumps(asdict(report) | {"is_good": report.is_good}, indent=1) + "\n", encoding="utf-8"
        )
    sys.exit(0 if report.is_good else 1)


if __name__ == "__main__":
    main()
