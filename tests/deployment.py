"""A deployment started by the command line itself, for tests that need real engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.launch.state import read_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pdserve.config import ArgValue
    from pdserve.launch.state import DeploymentState

READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
ENGINE_ARGS: Mapping[str, ArgValue] = {
    # In bfloat16 the shape of a batch is enough to turn a near tie; in float32 two engines write the same text.
    "dtype": "float32",
    "enable-auto-tool-choice": True,
    "tool-call-parser": "hermes",
}
"""What the tests' engines are given besides what pdserve gives them."""


@dataclass(frozen=True)
class RealPair:
    """One prefill engine, one decode engine and the gateway, running."""

    state: DeploymentState
    env: Mapping[str, str]
    process: subprocess.Popen[bytes]

    @property
    def gateway_url(self) -> str:
        """Where clients connect."""
        return self.state.gateway_url

    @property
    def admin_url(self) -> str:
        """Where the operator connects."""
        return self.state.admin_url

    @property
    def prefill_url(self) -> str:
        """The prefill engine itself."""
        return next(engine.url for engine in self.state.engines if engine.role == "prefill")

    @property
    def decode_url(self) -> str:
        """The decode engine itself."""
        return next(engine.url for engine in self.state.engines if engine.role == "decode")

    @property
    def model(self) -> str:
        """The name that requests use."""
        return self.state.served_model_name


def pdserve(*arguments: str, env: Mapping[str, str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    argv = [sys.executable, "-m", "pdserve", *arguments]
    return subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False)


def isolated_env(state_dir: Path) -> dict[str, str]:
    """The environment of commands that must not see, nor be seen by, other deployments of this machine."""
    return {**os.environ, "PDSERVE_STATE_DIR": str(state_dir), "COLUMNS": "200"}


@contextlib.contextmanager
def up(*arguments: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`pdserve up` in the foreground, until it says that it is ready; stopped as Ctrl-C stops it."""
    ready, ready_fd = os.pipe()
    argv = [sys.executable, "-m", "pdserve", "up", "--port", "0", *arguments, "--ready-fd", str(ready_fd)]
    process = subprocess.Popen(argv, env=dict(env), pass_fds=[ready_fd])
    os.close(ready_fd)
    try:
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read() == b"ready", f"pdserve up ended with {process.wait()}"
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def real_pair(state_dir: Path) -> Iterator[RealPair]:
    """1P1D of the default model."""
    env = isolated_env(state_dir)
    config = state_dir / "tests.json"
    config.write_text(json.dumps({"name": "tests", "engines": {"args": dict(ENGINE_ARGS)}}), encoding="utf-8")
    with up("--config", str(config), env=env) as process:
        state = read_state(state_dir, "tests")
        assert state is not None
        yield RealPair(state, env, process)
