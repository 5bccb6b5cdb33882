"""What other pdserve commands may know of a running deployment: one folder each, with a JSON file, a lock and the logs.

The supervisor writes and removes the file. Whoever reads it sees only deployments whose supervisor lives: a process number
alone proves nothing, since the kernel gives it out again, so the process's start time is kept with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import msgspec
import psutil

from pdserve.core import Role
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

STATE_FILE = "state.json"
LOCK_FILE = "lock"
LOG_DIR = "logs"


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as it was started."""

    name: str
    role: Role
    url: str
    pid: int | None
    log_path: str
    side_channel_host: str
    side_channel_port: int


class DeploymentState(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment, while it runs."""

    name: str
    model: str
    served_model_name: str
    gateway_url: str
    admin_url: str
    supervisor_pid: int
    supervisor_start: str
    """Tells the supervisor from a later process with its number: `process_start`."""
    started_at: float
    """Seconds since 1970, for people."""
    is_ready: bool
    log_dir: str
    api_keys_file: str | None = None
    """Where the keys are, never the keys: who may read that file may ask."""
    engine_api_key_file: str | None = None
    tls_ca: str | None = None
    engines: tuple[EngineRecord, ...]


class OwnProcess(TypedDict):
    """Those fields of the state that say who wrote it."""

    supervisor_pid: int
    supervisor_start: str
    started_at: float


def own_process() -> OwnProcess:
    """This process, as the supervisor of a deployment."""
    start = process_start(os.getpid())
    assert start is not None, "this process runs"
    started_at = psutil.Process().create_time()
    return OwnProcess(supervisor_pid=os.getpid(), supervisor_start=start, started_at=started_at)


def run_dir(state_dir: Path, name: str) -> Path:
    """A deployment's folder."""
    return state_dir / name


@contextlib.contextmanager
def claim(state_dir: Path, name: str) -> Iterator[Path]:
    """Hold a deployment's name, and remove its state at the end. Raises ConfigError when another pdserve holds it.

    The kernel lets go of the lock when its holder ends, however that ends, so it can't be left behind.
    """
    folder = run_dir(state_dir, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot keep the deployment's state there: {exc.strerror}") from exc
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock)
        _lock(lock, folder, name)
        undo.callback(forget, folder)
        yield folder


def _lock(descriptor: int, folder: Path, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        state = _try_load(folder)
        holder = f" (pid {state.supervisor_pid}, {state.gateway_url})" if state else ""
        raise ConfigError(
            f"a deployment named {name!r} already runs on this machine{holder}. Stop it with `pdserve down --name {name}`, or "
            "give this one another name: `name` in the configuration, or --name"
        ) from exc


def write_state(folder: Path, state: DeploymentState) -> None:
    """Replace the file in one step: a reader sees the old one or the new one, never half of one."""
    new = folder / f"{STATE_FILE}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    new.replace(folder / STATE_FILE)


def forget(folder: Path) -> None:
    """Remove the state. The logs stay."""
    (folder / STATE_FILE).unlink(missing_ok=True)


def read_state(state_dir: Path, name: str) -> DeploymentState | None:
    """A running deployment, or None. What a killed supervisor left is removed on the way."""
    folder = run_dir(state_dir, name)
    state = _try_load(folder)
    if state is None or is_alive(state):
        return state
    forget(folder)
    return None


def list_states(state_dir: Path) -> tuple[DeploymentState, ...]:
    """All running deployments, by name."""
    names = sorted(path.parent.name for path in state_dir.glob(f"*/{STATE_FILE}"))
    return tuple(state for name in names if (state := read_state(state_dir, name)))


def is_alive(state: DeploymentState) -> bool:
    """Whether the supervisor that wrote the state still runs."""
    return process_start(state.supervisor_pid) == state.supervisor_start


def process_start(pid: int) -> str | None:
    """When a process started, in a form that is only good for comparing; None when there is no such process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # On Linux in ticks since boot, and with the boot's id: the time of day may be set back, and psutil derives from it.
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists():
            return str(process.create_time())
        ticks = stat.read_bytes().rpartition(b")")[2].split()[19].decode()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}:{ticks}"
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def _try_load(folder: Path) -> DeploymentState | None:
    """None when there is no file, or one that another version of pdserve wrote."""
    try:
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=DeploymentState)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
