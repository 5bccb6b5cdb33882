"""The supervisor, with real processes: start, states, logs, the ways to stop, and its own sudden death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.core import EngineAddress, EngineName, Role
from pdserve.launch.plan import EngineCommand
from pdserve.launch.supervisor import EngineState, Supervisor
from processes import FAMILY, FAMILY_SIZE, GONE_WITHIN_S, POLITE, STUBBORN, program, wait_gone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and parent-death signals")

_SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.launch.plan import EngineCommand
from pdserve.launch.supervisor import Supervisor

async def main(log_dir, programs):
    commands = [
        EngineCommand(EngineAddress(EngineName(name), Role.DECODE, ""), tuple(argv), (), "", 0)
        for name, argv in programs.items()
    ]
    async with Supervisor(commands, log_dir=Path(log_dir), environ=os.environ, grace_s=0.1) as supervisor:
        print(json.dumps([status.pid for status in supervisor.statuses()]), flush=True)
        await asyncio.Event().wait()

if LOOP == "uvloop":
    import uvloop
    uvloop.run(main(*json.loads(sys.argv[1])))
else:
    asyncio.run(main(*json.loads(sys.argv[1])))
"""


def _command(code: str, *, name: str = "decode-0", env: tuple[tuple[str, str], ...] = ()) -> EngineCommand:
    return EngineCommand(
        address=EngineAddress(EngineName(name), Role.DECODE, "http://127.0.0.1:1"),
        argv=tuple(program(code)),
        env=env,
        side_channel_host="127.0.0.1",
        side_channel_port=1,
    )


def _supervisor(tmp_path: Path, *commands: EngineCommand) -> Supervisor:
    return Supervisor(commands, log_dir=tmp_path / "logs", environ={"FROM": "pdserve"}, grace_s=GONE_WITHIN_S)


async def _processes_up(path: Path, number: int) -> list[int]:
    """Wait until so many processes have said in a log that they are up."""
    return await asyncio.to_thread(_follow, [path], number)


def _follow(paths: Sequence[Path], number: int) -> list[int]:
    argv = ["tail", "-q", "-n", "+1", "-F", *map(str, paths)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout is not None
        pids: list[int] = []
        while len(pids) < number:
            line = tail.stdout.readline().decode()
            if line.startswith("up "):
                pids.append(int(line.split()[1]))
        tail.kill()
    return pids


async def test_engines_start_side_by_side_and_their_processes_are_known(tmp_path: Path) -> None:
    """Each status names the engine's own process, not a guard's."""
    async with _supervisor(tmp_path, _command(POLITE, name="a"), _command(POLITE, name="b")) as supervisor:
        statuses = supervisor.statuses()
        assert [status.address.name for status in statuses] == ["a", "b"]
        assert [status.state for status in statuses] == [EngineState.STARTING] * 2
        for status in statuses:
            assert await _processes_up(status.log_path, 1) == [status.pid]


async def test_the_environment_is_added_to(tmp_path: Path) -> None:
    """An engine sees pdserve's environment and what its command adds."""
    command = _command("say(os.environ['FROM'], os.environ['ADDED'])", env=(("ADDED", "by the plan"),))
    async with _supervisor(tmp_path, command) as supervisor:
        status = await supervisor.next_exit()
    assert status.log_path.read_text() == "pdserve by the plan\n"


async def test_an_exit_is_an_event_with_code_and_cause(tmp_path: Path) -> None:
    """Nobody has to look for it, and the error carries the end of the log and what it means."""
    code = "say('api_server.py: error: unrecognized arguments: --frob'); os._exit(2)"
    async with _supervisor(tmp_path, _command(code, name="prefill-0"), _command(POLITE)) as supervisor:
        status = await supervisor.next_exit()
        error = supervisor.exit_error(status.address.name)
        assert supervisor.status(EngineName("decode-0")).state is EngineState.STARTING
    assert (status.address.name, status.state, str(status.exit)) == (
        "prefill-0",
        EngineState.EXITED,
        "exited with status 2",
    )
    assert "vLLM does not know --frob" in str(error)
    assert error.log_tail.endswith("unrecognized arguments: --frob")
    assert error.log_path == str(tmp_path / "logs" / "prefill-0.log")


async def test_a_signal_that_ended_an_engine_is_named(tmp_path: Path) -> None:
    """A kill from outside looks like the kernel's for lack of memory."""
    async with _supervisor(tmp_path, _command(STUBBORN)) as supervisor:
        (running,) = supervisor.statuses()
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        status = await supervisor.next_exit()
        assert str(status.exit) == "was ended by SIGKILL"
        assert "memory ran out" in supervisor.exit_error(status.address.name).cause


async def test_a_program_that_cannot_be_run_is_an_exit(tmp_path: Path) -> None:
    """Starting goes on for the others; the error says what is wrong."""
    command = EngineCommand(EngineAddress(EngineName("x"), Role.DECODE, ""), ("/no/such/vllm",), (), "", 0)
    async with _supervisor(tmp_path, command) as supervisor:
        status = await supervisor.next_exit()
        assert (
            "cannot be run: /no/such/vllm: No such file or directory"
            in supervisor.exit_error(status.address.name).cause
        )


async def test_states_only_go_forward(tmp_path: Path) -> None:
    """A readiness check that comes late does not bring an engine back."""
    async with _supervisor(tmp_path, _command(POLITE)) as supervisor:
        name = EngineName("decode-0")
        supervisor.mark(name, EngineState.SERVING)
        supervisor.mark(name, EngineState.READY)
        assert supervisor.status(name).state is EngineState.SERVING
        await _processes_up(supervisor.status(name).log_path, 1)
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        assert supervisor.status(name).state is EngineState.STOPPING
        await stopping
        supervisor.mark(name, EngineState.READY)
        assert supervisor.status(name).state is EngineState.EXITED


async def test_stop_asks_and_waits_for_the_last_process(tmp_path: Path) -> None:
    """When it returns nothing of any engine is left, and polite engines ended by themselves."""
    supervisor = _supervisor(tmp_path, _command(POLITE, name="a"), _command(POLITE, name="b"))
    await supervisor.start()
    for status in supervisor.statuses():
        await _processes_up(status.log_path, 1)
    await supervisor.stop()
    assert [str(status.exit) for status in supervisor.statuses()] == ["exited with status 0"] * 2
    assert not any(psutil.pid_exists(status.pid) for status in supervisor.statuses() if status.pid)


async def test_what_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    """With all that it started, in whatever session."""
    async with _supervisor(tmp_path, _command(FAMILY)) as supervisor:
        pids = await _processes_up(supervisor.statuses()[0].log_path, FAMILY_SIZE)
        await supervisor.stop(0.1)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert str(supervisor.statuses()[0].exit) == "was ended by SIGKILL"


async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    """Both calls return, long before the grace is over."""
    async with _supervisor(tmp_path, _command(STUBBORN)) as supervisor:
        await _processes_up(supervisor.statuses()[0].log_path, 1)
        first = asyncio.create_task(supervisor.stop(3600))
        await asyncio.sleep(0)
        await supervisor.stop(3600)
        await first
        assert str(supervisor.statuses()[0].exit) == "was ended by SIGKILL"


async def test_a_cancelled_stop_is_still_a_stop(tmp_path: Path) -> None:
    """Whoever waits may give up; the engines end all the same."""
    supervisor = _supervisor(tmp_path, _command(POLITE))
    await supervisor.start()
    await _processes_up(supervisor.statuses()[0].log_path, 1)
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert str((await supervisor.next_exit()).exit) == "exited with status 0"


async def test_an_error_while_running_stops_the_engines(tmp_path: Path) -> None:
    """Leaving the block, however, leaves nothing behind."""
    supervisor = _supervisor(tmp_path, _command(POLITE))

    async def fail() -> None:
        async with supervisor:
            await _processes_up(supervisor.statuses()[0].log_path, 1)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        await fail()
    assert supervisor.statuses()[0].state is EngineState.EXITED


async def test_the_last_runs_log_is_kept(tmp_path: Path) -> None:
    """One log a run, and the one before beside it."""
    for words in ("first", "second", "third"):
        async with _supervisor(tmp_path, _command(f"say('{words}')")) as supervisor:
            await supervisor.next_exit()
    logs = tmp_path / "logs"
    assert (logs / "decode-0.log").read_text() == "third\n"
    assert (logs / "decode-0.log.1").read_text() == "second\n"


async def test_both_guards_killed_leaves_nothing_of_the_engines_group(tmp_path: Path) -> None:
    """The kernel kills the engine, the supervisor what the engine had started."""
    code = "if os.fork() == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STUBBORN
    async with _supervisor(tmp_path, _command(code)) as supervisor:
        (running,) = supervisor.statuses()
        pids = await _processes_up(running.log_path, 2)
        inner = psutil.Process(running.pid).parent()
        assert inner is not None
        outer = inner.parent()
        assert outer is not None
        for process in (outer, inner):
            process.kill()
        status = await supervisor.next_exit()
        assert str(status.exit) == "was ended by SIGKILL"
        assert wait_gone(pids) == set()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_killed_supervisor_leaves_nothing(tmp_path: Path, loop: str) -> None:
    """SIGKILL can't be caught: the guards see to it, also for processes that ignore SIGTERM in sessions of their own."""
    programs = {"stubborn": program(STUBBORN), "family": program(FAMILY)}
    argv = [sys.executable, "-c", f"LOOP = {loop!r}\n{_SCRIPT}", json.dumps([str(tmp_path), programs])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        started = json.loads(supervisor.stdout.readline())
        engines = _follow([tmp_path / f"{name}.log" for name in programs], 1 + FAMILY_SIZE)
        below = {process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)}
        supervisor.kill()
    assert below.issuperset([*started, *engines])
    assert wait_gone(below) == set()
