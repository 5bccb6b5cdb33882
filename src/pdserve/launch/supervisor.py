"""Starts the engines side by side, each under its guard, knows what state each is in, and stops them all together.

Engines are processes here and nothing else: whether one answers HTTP is for its caller to find out and `mark`. That no engine
outlives this process, however it ends, is the work of pdserve.launch.guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import EngineExited
from pdserve.launch import guard
from pdserve.launch.diagnosis import Diagnosis, ExitStatus, diagnose, log_tail, without_frames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from pdserve.core import EngineAddress, EngineName
    from pdserve.launch.plan import EngineCommand

GRACE_S = 10.0
"""From asking the engines to stop to killing them. vLLM gives its own processes 5 s (`shutdown` in v1/utils.py, 0.32)."""
NUM_TAIL_LINES = 20
"""Of the log, for a person, not counting the frames of tracebacks."""
NUM_DIAGNOSED_LINES = 400
"""Of the log, for finding the cause: behind it come the tracebacks of every process that waited for the one that failed."""


class EngineState(enum.StrEnum):
    """How far an engine is. It only ever goes forward, in this order."""

    STARTING = "starting"
    READY = "ready"
    SERVING = "serving"
    STOPPING = "stopping"
    EXITED = "exited"

    def precedes(self, other: EngineState) -> bool:
        order = list(EngineState)
        return order.index(self) < order.index(other)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine at one moment."""

    address: EngineAddress
    state: EngineState
    pid: int | None
    """The engine's own, not its guard's. None when its program could not even be forked."""
    exit: ExitStatus | None
    log_path: Path


class Supervisor:
    """Owns the engines of one deployment, from the start to the end of every process that they started."""

    def __init__(
        self, commands: Sequence[EngineCommand], *, log_dir: Path, environ: Mapping[str, str], grace_s: float = GRACE_S
    ) -> None:
        self._engines = {command.address.name: _Engine(command, log_dir) for command in commands}
        self._log_dir = log_dir
        self._environ = environ
        self._grace_s = grace_s
        self._exits: asyncio.Queue[EngineName] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            await self.start()
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every engine and return once each has a process. A program that can't be run shows as an exit with 127."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for engine in self._engines.values():
            await engine.start(self._environ, grace_s=self._grace_s)
            self._watchers.append(asyncio.create_task(self._watch(engine)))
        await asyncio.gather(*(engine.forked.wait() for engine in self._engines.values()))

    async def _watch(self, engine: _Engine) -> None:
        await engine.watch()
        self._exits.put_nowait(engine.command.address.name)

    def statuses(self) -> tuple[EngineStatus, ...]:
        """All engines, in the order of their commands."""
        return tuple(engine.status() for engine in self._engines.values())

    def status(self, name: EngineName) -> EngineStatus:
        """One engine."""
        return self._engines[name].status()

    def mark(self, name: EngineName, state: EngineState) -> None:
        """Say what has been found out about an engine. Without effect on one that is further already, or gone."""
        self._engines[name].advance(state)

    async def next_exit(self) -> EngineStatus:
        """Wait for the next engine to end, asked to or not. Each is told of once."""
        return self.status(await self._exits.get())

    def likely_cause(self, name: EngineName) -> Diagnosis:
        """Why an engine ended, or why it does not become ready though it runs."""
        engine = self._engines[name]
        return diagnose(log_tail(engine.log_path, NUM_DIAGNOSED_LINES), engine.exit, engine.command.argv)

    def exit_error(self, name: EngineName) -> EngineExited:
        """An ended engine as an error, with the end of its log and the likely cause in words."""
        engine = self._engines[name]
        assert engine.exit is not None, f"{name} still runs"
        lines = without_frames(log_tail(engine.log_path, NUM_DIAGNOSED_LINES)).splitlines()
        return EngineExited(
            name,
            str(engine.exit),
            cause=str(self.likely_cause(name)),
            log_tail="\n".join(lines[-NUM_TAIL_LINES:]),
            log_path=str(engine.log_path),
        )

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop all engines at once and return when nothing of them is left. A second call, also during the first, kills."""
        seconds = self._grace_s if grace_s is None else grace_s
        order = "kill" if self._is_stopping else f"stop {seconds}"
        self._is_stopping = True
        for engine in self._engines.values():
            engine.tell(order)
        # Shielded: whoever stops waiting does not stop the watching.
        await asyncio.shield(asyncio.gather(*self._watchers))


class _Engine:
    """One engine's process, through its guard."""

    def __init__(self, command: EngineCommand, log_dir: Path) -> None:
        self.command = command
        self.log_path = log_dir / f"{command.address.name}.log"
        self.state = EngineState.STARTING
        self.pid: int | None = None
        self.exit: ExitStatus | None = None
        self.forked = asyncio.Event()
        self._guard: asyncio.subprocess.Process | None = None

    def status(self) -> EngineStatus:
        return EngineStatus(self.command.address, self.state, self.pid, self.exit, self.log_path)

    def advance(self, state: EngineState) -> None:
        if self.state.precedes(state):
            self.state = state

    async def start(self, environ: Mapping[str, str], *, grace_s: float) -> None:
        log = _fresh_log(self.log_path)
        try:
            # By its file, isolated and without site-packages: what the engine's environment names must not reach the guard.
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, self.command.address.name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        spec = {"argv": self.command.argv, "env": {**environ, **dict(self.command.env)}, "grace_s": grace_s}
        self._write(json.dumps(spec))

    async def watch(self) -> None:
        """Follow the guard's reports to its end."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        wait_status = None
        async for line in self._guard.stdout:
            verb, _, value = line.decode().strip().partition(" ")
            if verb == "started":
                self.pid = int(value)
                self.forked.set()
            elif verb == "exited":
                wait_status = int(value)
        await self._guard.wait()
        if wait_status is None:
            self._end_without_guards()
        self.exit = ExitStatus.of(signal.SIGKILL if wait_status is None else wait_status)
        self.advance(EngineState.EXITED)
        self.forked.set()

    def _end_without_guards(self) -> None:
        """Both guards were killed. The kernel has killed the engine then, but not what it started in its process group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def tell(self, order: str) -> None:
        """Give the guard an order, unless it is gone."""
        self.advance(EngineState.STOPPING)
        if self.exit is None:
            self._write(order)

    def _write(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())


def _fresh_log(path: Path) -> int:
    """A new file for this run; the last run's is kept as `.log.1`."""
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
