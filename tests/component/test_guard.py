"""The guards, with real processes: whichever of them ends, and however, nothing of the engine is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from pdserve.launch import guard
from processes import FAMILY, FAMILY_SIZE, GONE_WITHIN_S, POLITE, STUBBORN, program, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and parent-death signals")

_SHARED_MEMORY = """
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
tracker = f"/proc/{resource_tracker._resource_tracker._pid}/cmdline"
while b"resource_tracker" not in open(tracker, "rb").read():
    time.sleep(0.001)               # forked, but not yet the program that it will be
say("segment", segment.name)
stay()
"""


class _Guard:
    """A guard under test, seen as its supervisor sees it."""

    def __init__(self, argv: list[str], *, env: dict[str, str] | None = None, grace_s: float = GONE_WITHIN_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "test"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.tell(json.dumps({"argv": argv, "env": env or {}, "grace_s": grace_s}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait(GONE_WITHIN_S)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def hang_up(self) -> None:
        """What a supervisor's end looks like."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def log(self) -> Iterator[str]:
        """What the engine and the guard write, line by line as it comes."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            yield line.decode().strip()

    def report(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def processes_up(self, number: int) -> list[int]:
        """Wait until so many processes of the engine have said that they are up."""
        pids: list[int] = []
        for line in self.log():
            if line.startswith("up "):
                pids.append(int(line.split()[1]))
            if len(pids) == number:
                return pids
        pytest.fail(f"the engine ended with {len(pids)} of {number} processes up")

    @property
    def inner_pid(self) -> int:
        (inner,) = psutil.Process(self.process.pid).children()
        return inner.pid

    def end(self) -> tuple[int, str]:
        """Wait for the guard; its exit status and its last report."""
        status = self.process.wait(GONE_WITHIN_S)
        assert self.process.stdout is not None
        return status, self.process.stdout.read().decode().splitlines()[-1]


def test_the_engines_exit_status_is_passed_on() -> None:
    """As the guard's own, and in its report as `os.waitpid` gives it."""
    with _Guard(program("os._exit(7)")) as guarded:
        status, report = guarded.end()
    assert status == 7
    assert os.waitstatus_to_exitcode(int(report.removeprefix("exited "))) == 7


def test_an_engine_that_a_signal_ended_is_told_apart() -> None:
    """The report holds the signal; the exit status is 128 and its number, as in a shell."""
    with _Guard(program("os.kill(os.getpid(), signal.SIGSEGV)")) as guarded:
        status, report = guarded.end()
    assert status == 128 + signal.SIGSEGV
    assert os.waitstatus_to_exitcode(int(report.removeprefix("exited "))) == -signal.SIGSEGV


def test_the_report_names_the_engines_own_process() -> None:
    """So that `status` shows what `top` shows."""
    with _Guard(program(POLITE)) as guarded:
        (pid,) = guarded.processes_up(1)
        assert guarded.report() == f"started {pid}"


def test_a_program_that_cannot_be_run_says_so_in_the_log() -> None:
    """The exit status is a shell's for that."""
    with _Guard(["/no/such/program"]) as guarded:
        assert next(guarded.log()) == "[pdserve] cannot run /no/such/program: No such file or directory"
        assert guarded.end()[0] == guard.CANNOT_START


def test_the_engine_has_exactly_the_environment_that_it_was_given() -> None:
    """Nothing of the guard's own gets in."""
    with _Guard(["/usr/bin/env"], env={"A": "1", "B": "two words"}) as guarded:
        assert list(guarded.log()) == ["A=1", "B=two words"]


def test_the_engine_is_cut_off_from_the_terminal() -> None:
    """It leads a session of its own, so that Ctrl-C does not reach it, and its input is empty."""
    with _Guard(program("say(os.getsid(0) == os.getpid(), os.read(0, 1))")) as guarded:
        assert next(guarded.log()) == "True b''"


def test_the_engine_ignores_no_signal() -> None:
    """Python ignores two for itself, and a new program would inherit that; what a shell ignored before stays its own affair."""
    ignored_by_python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    with _Guard(["/bin/grep", "SigIgn", "/proc/self/status"]) as guarded:
        assert int(next(guarded.log()).split()[1], 16) & ignored_by_python == 0


def test_an_order_to_stop_asks_the_engine_first() -> None:
    """It ends by itself, with its own status."""
    with _Guard(program(POLITE)) as guarded:
        guarded.processes_up(1)
        guarded.tell("stop 20")
        assert "asked" in guarded.log()
        assert guarded.end()[0] == 0


def test_the_end_of_input_stops_the_engine() -> None:
    """That is how a supervisor's death looks."""
    with _Guard(program(POLITE)) as guarded:
        guarded.processes_up(1)
        guarded.hang_up()
        assert guarded.end()[0] == 0


def test_an_engine_that_does_not_stop_is_killed_after_its_grace() -> None:
    """With everything that it started, in whatever session."""
    with _Guard(program(FAMILY)) as guarded:
        pids = guarded.processes_up(FAMILY_SIZE)
        guarded.tell("stop 0.1")
        assert guarded.end()[0] == 128 + signal.SIGKILL
        assert wait_gone(pids) == set()


@pytest.mark.parametrize("second", [lambda guarded: guarded.tell("kill"), lambda guarded: guarded.process.terminate()])
def test_a_second_order_does_not_wait(second: Callable[[_Guard], None]) -> None:
    """`kill` and a second SIGTERM are the same."""
    with _Guard(program(STUBBORN)) as guarded:
        (pid,) = guarded.processes_up(1)
        guarded.process.terminate()
        assert "[pdserve] asked the engine to stop; it has 20 s" in guarded.log()
        second(guarded)
        assert guarded.end()[0] == 128 + signal.SIGKILL
        assert wait_gone([pid]) == set()


def test_what_an_engine_leaves_behind_ends_with_it() -> None:
    """A daemon in a session of its own outlives an engine that exits, but not its guard."""
    code = FAMILY.replace("stay()\n", "stay()\n", 1).rstrip().removesuffix("stay()") + "time.sleep(0.2)\nos._exit(3)"
    with _Guard(program(code)) as guarded:
        pids = guarded.processes_up(FAMILY_SIZE - 1)
        assert guarded.end()[0] == 3
        assert wait_gone(pids) == set()


@pytest.mark.parametrize("which", ["inner", "outer"])
def test_a_killed_guard_leaves_nothing(which: str) -> None:
    """The other one sees to it, also for processes that ignore SIGTERM in sessions of their own."""
    with _Guard(program(FAMILY), grace_s=0.1) as guarded:
        pids = guarded.processes_up(FAMILY_SIZE)
        guards = {"outer": guarded.process.pid, "inner": guarded.inner_pid}
        os.kill(guards[which], signal.SIGKILL)
        assert wait_gone([*pids, *guards.values()]) == set()


def test_the_engine_dies_with_both_guards() -> None:
    """The kernel sees to the engine itself; what it had started is the supervisor's to kill."""
    with _Guard(program(STUBBORN)) as guarded:
        (pid,) = guarded.processes_up(1)
        inner_pid = guarded.inner_pid
        for guard_pid in (guarded.process.pid, inner_pid):
            os.kill(guard_pid, signal.SIGKILL)
        assert wait_gone([pid, inner_pid]) == set()


def test_a_guard_that_is_killed_at_once_starts_nothing_that_stays() -> None:
    """However early the supervisor's end comes."""
    with _Guard(program(STUBBORN), grace_s=0.1) as guarded:
        guarded.hang_up()
        status, report = guarded.end()
    assert status in {0, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
    assert report.startswith("exited ")


def test_shared_memory_of_a_killed_engine_is_unlinked() -> None:
    """Python's resource tracker is given the time for it: vLLM leaves hundreds of megabytes in /dev/shm otherwise."""
    with _Guard(program(_SHARED_MEMORY)) as guarded:
        segment = next(line for line in guarded.log() if line.startswith("segment ")).split()[1]
        guarded.processes_up(1)
        path = Path("/dev/shm") / segment  # noqa: S108 - where Linux keeps it
        assert path.exists()
        guarded.tell("kill")
        guarded.end()
        assert not path.exists()


def test_no_command_at_all_prints_the_usage() -> None:
    """For a person who runs it by hand."""
    result = subprocess.run(
        [sys.executable, "-m", "pdserve.launch.guard"],
        input=b"",
        capture_output=True,
        check=False,
        timeout=GONE_WITHIN_S,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(b"usage: guard.py NAME")
