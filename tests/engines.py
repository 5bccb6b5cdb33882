"""Real vLLM engines one by one, and a gateway in front of them: for tests that stop, kill and restart what they use.

Nothing here supervises: a killed engine stays dead until its test starts it again. Each runs under pdserve's own guard, so
that none outlives the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import msgspec
import psutil
import pytest

from deployment import ENGINE_ARGS, READY_TIMEOUT_S, STOP_TIMEOUT_S
from pdserve.config import Config, EnginesConfig, PrefillConfig, http_url
from pdserve.launch import deployment, guard
from pdserve.launch.model import resolve_model
from pdserve.launch.ports import any_free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.launch.plan import EngineCommand

_GRACE_S = 10.0
_LOOK_INTERVAL_S = 0.2
_NUM_LOG_CHARACTERS = 4000


def engine_commands(config: Config) -> tuple[EngineCommand, ...]:
    """The engines that `pdserve up` would start now, prefill first."""
    config = msgspec.structs.replace(config, engines=EnginesConfig(args=dict(ENGINE_ARGS)))
    checked = deployment.check(config, os.environ)
    model = resolve_model(checked.source, on_progress=lambda *_: None)
    return deployment.plan(checked, model, os.environ).engines


def plain_command() -> EngineCommand:
    """One vLLM without a connector; in all else a pair's engine."""
    (command,) = engine_commands(Config(prefill=PrefillConfig(count=0)))
    flag = command.argv.index("--kv-transfer-config")
    return replace(command, argv=command.argv[:flag] + command.argv[flag + 2 :])


class EngineProcess:
    """One engine: a command that can be started again and again, and its processes while it runs."""

    def __init__(self, command: EngineCommand, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self._guard: subprocess.Popen[bytes] | None = None
        self._main: psutil.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.command.address.url

    @property
    def is_running(self) -> bool:
        """Whether anything of it is left."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start it and return at once."""
        spec = {"argv": self.command.argv, "env": {**os.environ, **dict(self.command.env)}, "grace_s": _GRACE_S}
        argv = [sys.executable, "-I", "-S", guard.__file__, self.command.address.name]
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.write(json.dumps(spec).encode() + b"\n")
        self._guard.stdin.flush()
        verb, _, pid = self._guard.stdout.readline().decode().strip().partition(" ")
        assert verb == "started", f"{self.command.address} did not start: {self.log_tail()}"
        self._main = psutil.Process(int(pid))

    def until_healthy(self) -> None:
        """Wait until it answers, or fail with the end of its log."""
        assert self._guard is not None
        for _ in range(int(READY_TIMEOUT_S / _LOOK_INTERVAL_S)):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_LOOK_INTERVAL_S)
                pytest.fail(f"{self.command.address} ended before it was ready: {self.log_tail()}")
        pytest.fail(f"{self.command.address} is not ready after {READY_TIMEOUT_S} s: {self.log_tail()}")

    def pause(self) -> None:
        """SIGSTOP to all of it: its sockets stay open and nobody reads them."""
        self._signal(signal.SIGSTOP)

    def pause_core(self) -> None:
        """SIGSTOP to what computes: the API server goes on, takes requests and calls itself healthy."""
        assert self._main is not None
        _send(signal.SIGSTOP, self._main.children(recursive=True))

    def resume(self) -> None:
        """SIGCONT to all of it."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all of it at once, and wait for its end."""
        self._signal(signal.SIGKILL)
        assert self._guard is not None
        self._guard.communicate(timeout=STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Ask it to stop, paused or not, and wait until nothing of it is left."""
        if self._guard is not None and self._guard.poll() is None:
            self.resume()
            self._guard.communicate(timeout=STOP_TIMEOUT_S)  # The end of its input is the guard's order to stop.

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-_NUM_LOG_CHARACTERS:]

    def _signal(self, number: signal.Signals) -> None:
        assert self._main is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            _send(number, [self._main, *self._main.children(recursive=True)])


def _send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def running_engines(commands: Sequence[EngineCommand], log_dir: Path) -> Iterator[tuple[EngineProcess, ...]]:
    """Engines side by side, all healthy; none is left at the end."""
    engines = tuple(EngineProcess(command, log_dir / f"{command.address.name}.log") for command in commands)
    with contextlib.ExitStack() as undo:
        for engine in engines:
            undo.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.until_healthy()
        yield engines


@contextlib.contextmanager
def running_gateway(
    config: Mapping[str, object], *, prefill: Sequence[str], decode: Sequence[str], folder: Path
) -> Iterator[tuple[str, str]]:
    """`pdserve gateway` in front of these engines, as a process; where its clients and its operator connect."""
    port, admin_port = any_free_port("127.0.0.1"), any_free_port("127.0.0.1")
    path = folder / "gateway.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    argv = [sys.executable, "-m", "pdserve", "gateway", "--config", str(path)]
    argv += ["--port", str(port), "--admin-port", str(admin_port)]
    argv += [word for url in prefill for word in ("--prefill", url)] + [
        word for url in decode for word in ("--decode", url)
    ]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield http_url("127.0.0.1", port), http_url("127.0.0.1", admin_port)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)
