"""What a gateway costs, ours and others, in one go: `scripts/bench gateway`.

The gateway has one core for itself; engines that compute nothing and the client share the others. In each round every gateway
is started anew and meets each load once. A whole run writes its figures into docs/performance.md and draws docs/gateway.svg;
`--quick` and `--only` show theirs and write nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

import pdserve
from bench import gateway_peers
from bench.gateway_engines import PREFILL_TEXT, TEXT
from bench.gateway_figures import (
    Figures,
    LoadName,
    Sample,
    cpu_bars,
    markdown,
    plain,
    problems_of,
    table_of,
    with_section,
    worker_table_of,
)
from bench.gateway_load import Measured, Order, Prompt
from bench.gateway_peers import Legs, Name, Ports
from bench.gateway_plot import svg_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.gateway_peers import Installed, Peer

DOCS = Path(__file__).parents[2] / "docs"
START = "<!-- gateway: `scripts/bench gateway` -->"
END = "<!-- end of gateway -->"
_CACHE = Path.home() / ".cache" / "pdserve" / "bench-peers"
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_NUM_RIGHT = 16
"""Right answers in a row, each on a connection of its own, with which a gateway is up."""
_PACE_S = 0.01
_QUICK = 0.2
_SHOWN = (Name.OURS, Name.VLLM_ROUTER, Name.SGLANG_ROUTER, Name.NGINX, Name.TOY, Name.DIRECT)
_WORKERS = (Name.ONE_WORKER, Name.TWO_WORKERS)


@dataclass(frozen=True, slots=True)
class Load:
    """What the client and the engines do."""

    num_connections: int
    seconds: float
    warm_up_s: float = 0.4
    prompt: Prompt = Prompt.SHORT
    is_stream: bool = False
    pace_s: float = _PACE_S
    """Between two chunks of a stream."""


LOADS = {
    # First, since memory that another load has left behind would be taken for these streams'.
    LoadName.THOUSAND: Load(1000, 3.0, warm_up_s=1.5, is_stream=True, pace_s=0.05),
    LoadName.WHOLE: Load(16, 3.0),
    LoadName.LONG: Load(8, 2.0, prompt=Prompt.LONG),
    LoadName.TOKEN_IDS: Load(8, 2.0, prompt=Prompt.TOKEN_IDS),
    LoadName.STREAMS: Load(64, 3.0, warm_up_s=0.8, is_stream=True),
    LoadName.ONE: Load(1, 1.5),
    LoadName.ONE_PREFILL: Load(1, 1.0),
}


def loads_of(name: Name) -> list[LoadName]:
    """Those that a gateway meets."""
    if name in _WORKERS:
        return [LoadName.WHOLE]
    if name is Name.DIRECT:
        return [LoadName.THOUSAND, LoadName.STREAMS, LoadName.ONE, LoadName.ONE_PREFILL]
    left_out = {LoadName.ONE_PREFILL}
    if name is Name.SGLANG_ROUTER:
        left_out.add(LoadName.TOKEN_IDS)  # It answers them with 422.
    if name is Name.TOY:
        left_out.add(LoadName.THOUSAND)  # 20,000 chunks a second are several times what it can relay.
    return [load for load in LOADS if load not in left_out]


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where."""

    gateway: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def of(cls, cores: Sequence[int], *, num_workers: int = 1) -> Cores:
        """As many as there are workers for the gateway and the rest for the others; where that leaves none, all for all."""
        if len(cores) > num_workers:
            return cls(tuple(cores[:num_workers]), tuple(cores[num_workers:]))
        return cls(tuple(cores), tuple(cores))


class Helper:
    """A process of ours that answers each line with one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def read(self) -> bytes:
        """The next line."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the engines or the client ended; what they wrote above says why")
        return line

    async def ask(self, order: object) -> bytes:
        """Send one and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        return await self.read()


@dataclass(frozen=True, slots=True)
class Rig:
    """Engines and client, which stay for the whole run."""

    engines: Helper
    client: Helper
    urls: dict[str, str]
    cores: Sequence[int]

    async def counts(self, *, pace_s: float = _PACE_S) -> dict[str, int]:
        """What the engines were asked since the last call."""
        counts: dict[str, int] = json.loads(await self.engines.ask({"pace_s": pace_s}))
        return counts


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that answers."""

    ports: Ports
    pids: tuple[int, ...]


@contextlib.asynccontextmanager
async def running_rig() -> AsyncIterator[Rig]:
    """Engines and client, on all cores but the first."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the gateway, one for engines and client")
    where = ["--cores", *map(str, Cores.of(cores).others)]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with (
        _process([sys.executable, "-m", "bench.gateway_engines", *where], **pipes) as engines,
        _process([sys.executable, "-m", "bench.gateway_load", *where], **pipes) as client,
    ):
        helper = Helper(engines)
        yield Rig(helper, Helper(client), json.loads(await helper.read()), cores)


@contextlib.asynccontextmanager
async def running_gateway(peer: Peer, installed: Installed, rig: Rig, cores: Cores) -> AsyncIterator[Running]:
    """One gateway in front of the engines, once it answers as it should; without a gateway, D and P themselves."""
    if peer.name is Name.DIRECT:
        yield Running(Ports(clients=_port_of(rig.urls["decode"]), admin=_port_of(rig.urls["prefill"])), ())
        return
    ports = Ports(_free_port(), _free_port())
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PDSERVE_")
    }
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        command = installed.command(peer.name, ports, rig.urls, Path(folder))
        pinned = ["taskset", "-c", ",".join(map(str, cores.gateway)), *command]
        with log_path.open("wb") as log:
            async with _process(pinned, stdout=log, stderr=log, env=environment, cwd=folder) as process:
                if not await _comes_up(peer.legs, ports.clients, rig, process):
                    end = log_path.read_text(encoding="utf-8", errors="replace")[-3000:]
                    raise SystemExit(f"{peer.name} did not come up. Its log ends:\n{end}")
                yield Running(ports, (process.pid,))


@contextlib.asynccontextmanager
async def _process(command: Sequence[str], **how: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Out of Ctrl-C's reach, and gone at the block's end with whatever it started."""
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True, **how)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _comes_up(legs: Legs, port: int, rig: Rig, process: asyncio.subprocess.Process) -> bool:
    """Ask until the engines are asked for every answer as they should be: each worker proves its own pairs."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    num_right = 0
    await rig.counts()
    while time.monotonic() < deadline_s and process.returncode is None:
        measured = await _ask_once(port, rig)
        counts = await rig.counts()
        if measured is None or measured.problems or wrong_legs(legs, counts, num_answers=1):
            num_right = 0
            await asyncio.sleep(0.1)
        elif (num_right := num_right + 1) == _NUM_RIGHT:
            return True
    return False


async def _ask_once(port: int, rig: Rig) -> Measured | None:
    """None while nobody listens."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            return None
    order = Order(port, num_connections=1, seconds=0.0, warm_up_s=0.0)
    return msgspec.json.decode(await rig.client.ask(order), type=Measured)


def wrong_legs(legs: Legs, counts: dict[str, int], *, num_answers: int) -> list[str]:
    """What of the engines' counts does not fit so many answers. Proofs and health checks may have asked for more."""
    at_least = {
        Legs.SPLIT: ("num_prefills", "num_decodes"),
        Legs.AT_ONCE: ("num_other_prefills", "num_alone"),
        Legs.ALONE: ("num_alone",),
    }[legs]
    wrong = [f"{name} {counts[name]} for {num_answers} answers" for name in at_least if counts[name] < num_answers]
    if legs is Legs.SPLIT and counts["num_alone"]:
        wrong.append(f"{counts['num_alone']} requests reached D without a handoff")
    return wrong


async def measure(peer: Peer, load_name: LoadName, running: Running, rig: Rig, *, share: float, number: int) -> Sample:
    """One sample. `share` of the load's time is taken."""
    load = LOADS[load_name]
    is_prefill = load_name is LoadName.ONE_PREFILL
    order = Order(
        port=running.ports.admin if is_prefill else running.ports.clients,
        num_connections=load.num_connections,
        seconds=load.seconds * share,
        warm_up_s=load.warm_up_s * max(share, 0.5),
        prompt=load.prompt,
        is_stream=load.is_stream,
        gateway_pids=list(running.pids),
        other_pids=[rig.engines.pid],
        text=PREFILL_TEXT if is_prefill else TEXT,
    )
    await rig.counts(pace_s=load.pace_s)
    measured = msgspec.json.decode(await rig.client.ask(order), type=Measured)
    counts = await rig.counts()
    problems = [f"{count} times {what}" for what, count in measured.problems.items()]
    if not measured.units_per_s:
        problems.append("no answer in time")
    if not is_prefill:
        problems += wrong_legs(peer.legs, counts, num_answers=measured.num_answers)
    return Sample(peer.name, load_name, number, measured, tuple(problems))


async def run(peers: Sequence[Peer], installed: Installed, *, rounds: int, share: float) -> list[Sample]:
    """Every gateway under every load, round by round; who begins changes."""
    samples: list[Sample] = []
    async with running_rig() as rig:
        for number in range(rounds):
            turn = number % len(peers)
            for peer in [*peers[turn:], *peers[:turn]]:
                cores = Cores.of(rig.cores, num_workers=2 if peer.name in _WORKERS else 1)
                for helper in (rig.engines, rig.client):
                    os.sched_setaffinity(helper.pid, cores.others)
                async with running_gateway(peer, installed, rig, cores) as running:
                    for load_name in loads_of(peer.name):
                        sample = await measure(peer, load_name, running, rig, share=share, number=number)
                        samples.append(sample)
                        _tell(sample)
                    if peer.name is Name.OURS:
                        await _check_proof(running.ports.admin)
    return samples


async def _check_proof(admin_port: int) -> None:
    """Our own books must say of every prompt that P computed it, or something else was measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", admin_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    places = [line for line in lines if line.startswith("pdserve_prefills_total{") and not line.endswith(" 0.0")]
    if not places or not all('place="remote"' in line for line in places):
        raise SystemExit(f"not every prompt was computed on P: {places}")


def _tell(sample: Sample) -> None:
    measured = sample.measured
    sys.stderr.write(
        f"{sample.round + 1} {sample.name}, {sample.load}: {measured.units_per_s:,.0f}/s, {measured.cpu_us:.1f} µs "
        f"({measured.kernel_us:.1f} kernel), cores: {measured.gateway_cores:.2f} + {measured.other_cores:.2f}, "
        f"others {measured.foreign_cores:.2f}\n"
    )
    for problem in sample.problems:
        sys.stderr.write(f"  does not count: {problem}\n")


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _machine() -> str:
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.partition(": ")[2] for line in cpu_info.splitlines() if line.startswith("model name")), "?")
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, "
        f"{platform.python_implementation()} {platform.python_version()}"
    )


def report(samples: Sequence[Sample], installed: Installed, *, rounds: int, is_markdown: bool) -> list[str]:
    """Tables, and what has to be said beside them."""
    figures = Figures(samples)
    present = {sample.name for sample in samples}
    names = [name for name in _SHOWN if name in present]
    render = markdown if is_markdown else plain
    versions = ", ".join(peer.version for peer in installed.peers if peer.version)
    spread = figures.spread([name for name in names if name is not Name.DIRECT])
    foreign = statistics.median(sample.measured.foreign_cores for sample in samples)
    lines = [
        f"{_machine()}; other programs took {foreign:.2f} cores meanwhile. {versions}.",
        f"Medians of {rounds} rounds, which differ by {spread:.0%} at most in CPU time.",
        "",
        *render(table_of(figures, names)),
    ]
    if present & set(_WORKERS):
        lines += ["", *render(worker_table_of(figures))]
    left_out = [f"Left out: {name} ({why})." for name, why in installed.missing.items()]
    return [*lines, *([""] if left_out else []), *left_out]


def _write_docs(samples: Sequence[Sample], lines: list[str]) -> None:
    figures = Figures(samples)
    shown = [name for name in _SHOWN if name is not Name.DIRECT]
    page = DOCS / "performance.md"
    text = with_section(page.read_text(encoding="utf-8"), start=START, end=END, lines=lines)
    page.write_text(text, encoding="utf-8")
    (DOCS / "gateway.svg").write_text(svg_of(cpu_bars(figures, shown)), encoding="utf-8")


def main() -> None:
    """Read the command line, install, run, show; exit 1 when an answer was not as it should be."""
    parser = argparse.ArgumentParser(prog="scripts/bench gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", type=Name, choices=list(Name), metavar="NAME", help=", ".join(Name))
    parser.add_argument("--quick", action="store_true", help="one short round: does it work?")
    parser.add_argument("--peers", type=Path, default=_CACHE, metavar="FOLDER", help="where peers are installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--markdown", action="store_true", help="show what is written into docs/performance.md")
    options = parser.parse_args()
    rounds, share = (1, _QUICK) if options.quick else (options.rounds, 1.0)
    installed = gateway_peers.install(options.peers, version=pdserve.__version__)
    peers = [peer for peer in installed.peers if options.only is None or peer.name in options.only]
    samples = uvloop.run(run(peers, installed, rounds=rounds, share=share))
    sys.stdout.write("\n".join(report(samples, installed, rounds=rounds, is_markdown=options.markdown)) + "\n")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode([asdict(sample) for sample in samples]) + b"\n")
    problems = problems_of(samples)
    sys.stderr.write("".join(f"does not count: {problem}\n" for problem in problems))
    if not (problems or options.quick or options.only):
        _write_docs(samples, report(samples, installed, rounds=rounds, is_markdown=True))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
