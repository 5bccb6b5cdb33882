"""The two processes between the supervisor and an engine: whichever of them all is killed, no engine is left behind.

    supervisor > outer guard > inner guard > engine > whatever the engine starts (vLLM: EngineCore, workers, resource trackers)

A parent-death signal reaches one process only, and vLLM's EngineCore does not notice when the API server above it is killed
(v1/engine/core.py in 0.32). So each guard is a subreaper: what loses its parent below becomes its child, and it ends only when
it has none left. Each stops the engine when the one above it is gone; the outer one kills what a killed inner one leaves.
Standard library only, and nothing of pdserve, so that it runs from its file alone and starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USAGE = """usage: guard.py NAME < input   (NAME is for ps alone)
input:  {"argv": [...], "env": {...}, "grace_s": 10} on one line, then `stop SECONDS` or `kill`; its end is a stop
output: `started PID`, and `exited WAITSTATUS` when nothing of the engine is left
The engine writes where the guard's standard error goes. SIGTERM is a stop, a second one a kill."""

CANNOT_START = 127
"""Exit status when the engine's program cannot be run, as shells have it."""
TRACKER_GRACE_S = 2.0
"""How long multiprocessing's resource trackers may outlive the engine: they unlink the shared memory of killed processes."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"
_CONTROL, _REPORT, _LOG = 0, 1, 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main() -> NoReturn:
    """Be the outer guard, and its fork the inner one."""
    # uvloop (0.23) leaves open what it made for the child's pipes; an engine that held the report's end would hide its guards'.
    os.closerange(_LOG + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    line, commands = _read_first_line()
    if not line:
        sys.exit(USAGE)
    spec = json.loads(line)
    _become_subreaper()
    _die_with_parent(signal.SIGHUP)
    control, to_inner = os.pipe()
    outer_pid = os.getpid()
    inner_pid = os.fork()
    if inner_pid == 0:
        os.close(to_inner)
        os.dup2(control, _CONTROL)
        os.close(control)
        _die_with_parent(signal.SIGHUP, parent=outer_pid)
        os._exit(_guard_engine(spec))
    os.close(control)
    os._exit(_guard_inner(inner_pid, to_inner, commands, grace_s=spec["grace_s"]))


def _guard_inner(inner_pid: int, to_inner: int, commands: bytes, *, grace_s: float) -> int:
    def tell(command: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # It ended just now; SIGCHLD is on its way.
            os.write(to_inner, f"{command}\n".encode())

    children = Children(inner_pid)
    guard = Guard(children, grace_s=grace_s, ask=lambda grace: tell(f"stop {grace}"), force=lambda: tell("kill"))
    guard.obey(commands)
    status = guard.wait()
    children.end_all()
    return _exit_code(status)


def _guard_engine(spec: dict[str, Any]) -> int:
    _become_subreaper()
    children = Children(_start_engine(spec))
    _report(f"started {children.main}")

    def ask(grace_s: float) -> None:
        _note(f"asked the engine to stop; it has {grace_s:g} s")
        _signal_group(children.main, signal.SIGTERM)

    def force() -> None:
        _note("killing the engine")
        children.kill_all()

    status = Guard(children, grace_s=spec["grace_s"], ask=ask, force=force).wait()
    children.end_all()
    _report(f"exited {status}")
    return _exit_code(status)


class Guard:
    """Waits for the main child to end, and makes it end when told to, or when nobody is left to tell."""

    def __init__(
        self, children: Children, *, grace_s: float, ask: Callable[[float], None], force: Callable[[], None]
    ) -> None:
        self._children = children
        self._grace_s = grace_s
        self._ask = ask
        self._force = force
        self._is_stopping = False
        self._deadline_s: float | None = None
        self._poller = select.poll()
        self._poller.register(children.events, select.POLLIN)
        self._poller.register(_CONTROL, select.POLLIN)

    def wait(self) -> int:
        """The main child's wait status. What it has started may still run."""
        while (status := self._children.reap()) is None:
            for descriptor, _ in self._poller.poll(self._patience_ms()):
                if descriptor == _CONTROL:
                    self._read_control()
                else:
                    self._on_signals(os.read(descriptor, 4096))
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._kill()
        return status

    def obey(self, commands: bytes) -> None:
        """`stop SECONDS` and `kill`, a line each."""
        for command in commands.decode().splitlines():
            verb, _, seconds = command.partition(" ")
            if verb == "kill":
                self._kill()
            elif verb == "stop":
                self._stop(float(seconds))

    def _read_control(self) -> None:
        commands = os.read(_CONTROL, 4096)
        if commands:
            self.obey(commands)
            return
        self._poller.unregister(_CONTROL)
        self._stop(self._grace_s)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGHUP:  # The one above is gone; the end of input says the same.
                self._stop(self._grace_s)
            elif number in {signal.SIGTERM, signal.SIGINT}:
                self._kill() if self._is_stopping else self._stop(self._grace_s)

    def _stop(self, grace_s: float) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._deadline_s = time.monotonic() + grace_s
            self._ask(grace_s)

    def _kill(self) -> None:
        self._is_stopping = True
        self._deadline_s = None
        self._force()

    def _patience_ms(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic()) * 1000 + 1


class Children:
    """The main child, and all that is or becomes a child of this process below it."""

    def __init__(self, main: int) -> None:
        self.main = main
        self.events, write_end = os.pipe()
        """Readable when a signal came: its number in a byte."""
        os.set_blocking(self.events, False)
        os.set_blocking(write_end, False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def reap(self) -> int | None:
        """Collect every child that has ended. The main child's status when it is among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.main:
                    status = ended[1]
        return status

    def kill_all(self) -> None:
        """SIGKILL to all that is below this process now, but for the resource trackers: `end_all` gives them their time."""
        if not _IS_LINUX:
            _signal_group(self.main, signal.SIGKILL)
        for pid in _descendants():
            if not _is_resource_tracker(pid):
                _kill(pid)

    def end_all(self) -> None:
        """Return when no child is left; orphans become children of this process, so no descendant is left either."""
        if not _IS_LINUX:
            _signal_group(self.main, signal.SIGKILL)
        tracker_deadline_s = time.monotonic() + TRACKER_GRACE_S
        poller = select.poll()
        poller.register(self.events, select.POLLIN)
        while self._has_any():
            patience_s = max(0.0, tracker_deadline_s - time.monotonic())
            for pid in _descendants():
                if not (patience_s and _is_resource_tracker(pid)):
                    _kill(pid)
            # Each process that was killed, or that one had started meanwhile, announces itself by a SIGCHLD here.
            poller.poll(patience_s * 1000 + 1 if patience_s else None)
            with contextlib.suppress(BlockingIOError):
                os.read(self.events, 4096)

    def _has_any(self) -> bool:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True


# Starting, and telling


def _read_first_line() -> tuple[bytes, bytes]:
    """The first line of the input, and whatever came with it."""
    received = b""
    while b"\n" not in received:
        piece = os.read(_CONTROL, 65536)
        if not piece:
            return b"", b""
        received += piece
    line, _, rest = received.partition(b"\n")
    return line, rest


def _start_engine(spec: dict[str, Any]) -> int:
    """Fork and run the engine in a session of its own, so that a terminal's Ctrl-C does not reach it."""
    guard_pid = os.getpid()
    running, not_yet_running = os.pipe()
    pid = os.fork()
    if pid:
        # Closed by the kernel when the program runs: before, a signal to its process group could miss it.
        os.close(not_yet_running)
        os.read(running, 1)
        os.close(running)
        return pid
    try:
        os.setsid()
        _die_with_parent(signal.SIGKILL, parent=guard_pid)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores these, and what is ignored stays so in a new program.
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), _CONTROL)
        os.dup2(_LOG, _REPORT)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - no shell is wanted
    except OSError as exc:
        _note(f"cannot run {spec['argv'][0]}: {exc.strerror}")
    finally:
        os._exit(CANNOT_START)


def _report(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # Nobody is left to read it.
        os.write(_REPORT, f"{line}\n".encode())


def _note(text: str) -> None:
    """A line in the engine's log."""
    with contextlib.suppress(OSError):
        os.write(_LOG, f"[pdserve] {text}\n".encode())


def _exit_code(status: int) -> int:
    """As shells have it: 128 and the signal's number for a process that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# What the kernel offers


def _become_subreaper() -> None:
    """Processes below that lose their parent become children of this one instead of process 1."""
    if _IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Get that signal when the parent ends. Elsewhere than on Linux the end of the input is the only sign."""
    if _IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # It ended before the kernel knew that we wanted to hear of it.
        os._exit(CANNOT_START)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _descendants() -> list[int]:
    """All processes below this one, by /proc; none elsewhere than on Linux."""
    children: dict[int, list[int]] = {}
    for pid, parent in _all_processes():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    unseen = [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def _all_processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir() if _IS_LINUX else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # It ended meanwhile.
                # The program's name, in parentheses, may hold spaces and parentheses itself; its state and parent follow.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                yield int(entry.name), int(fields[1])


def _is_resource_tracker(pid: int) -> bool:
    """One that CPython's multiprocessing starts: `python -c 'from multiprocessing.resource_tracker import main;main(5)'`."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
