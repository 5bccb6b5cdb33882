"""The state of running deployments on disk: written whole, believed only while its writer lives, held by one at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.core import Role
from pdserve.errors import ConfigError
from pdserve.launch.state import (
    LOCK_FILE,
    STATE_FILE,
    DeploymentState,
    EngineRecord,
    claim,
    is_alive,
    list_states,
    own_process,
    process_start,
    read_state,
    run_dir,
    write_state,
)

if TYPE_CHECKING:
    from pathlib import Path


def _state(name: str = "default") -> DeploymentState:
    return DeploymentState(
        name=name,
        model="smollm2",
        served_model_name="SmolLM2-135M-Instruct",
        gateway_url="http://127.0.0.1:8192",
        admin_url="http://127.0.0.1:8193",
        is_ready=True,
        log_dir="/state/default/logs",
        engines=(
            EngineRecord(
                name="prefill-0",
                role=Role.PREFILL,
                url="http://127.0.0.1:8100",
                pid=4711,
                log_path="/state/default/logs/prefill-0.log",
                side_channel_host="127.0.0.1",
                side_channel_port=5600,
            ),
        ),
        **own_process(),
    )


def test_a_state_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """While its deployment holds its name."""
    with claim(tmp_path, "default") as folder:
        write_state(folder, _state())
        assert read_state(tmp_path, "default") == _state()
        assert list_states(tmp_path) == (_state(),)


def test_a_deployment_that_ends_is_forgotten(tmp_path: Path) -> None:
    """Its logs stay."""
    with claim(tmp_path, "default") as folder:
        write_state(folder, _state())
        (folder / "logs").mkdir()
    assert read_state(tmp_path, "default") is None
    assert (folder / "logs").exists()


def test_a_deployment_that_fails_is_forgotten_too(tmp_path: Path) -> None:
    """Whatever ended it."""

    def fail() -> None:
        with claim(tmp_path, "default") as folder:
            write_state(folder, _state())
            raise RuntimeError("while running")

    with pytest.raises(RuntimeError, match="while running"):
        fail()
    assert not (run_dir(tmp_path, "default") / STATE_FILE).exists()


def test_one_name_is_held_by_one_deployment(tmp_path: Path) -> None:
    """The error names the holder, and the two ways out."""
    with claim(tmp_path, "default") as folder:
        write_state(folder, _state())
        with pytest.raises(ConfigError) as caught, claim(tmp_path, "default"):
            pytest.fail("two deployments hold one name")
    assert f"pid {os.getpid()}, http://127.0.0.1:8192" in str(caught.value)
    assert "pdserve down --name default" in str(caught.value)
    assert "--name" in str(caught.value)


def test_a_refused_claim_takes_nothing_away(tmp_path: Path) -> None:
    """The state of the one that runs stays."""
    with claim(tmp_path, "default") as folder:
        write_state(folder, _state())
        with pytest.raises(ConfigError), claim(tmp_path, "default"):
            pass
        assert read_state(tmp_path, "default") is not None


def test_other_names_are_free(tmp_path: Path) -> None:
    """Two deployments on one machine are told apart by name."""
    with claim(tmp_path, "a") as first, claim(tmp_path, "b") as second:
        write_state(first, _state("a"))
        write_state(second, _state("b"))
        assert [state.name for state in list_states(tmp_path)] == ["a", "b"]


def test_what_a_dead_supervisor_left_is_not_believed_and_removed(tmp_path: Path) -> None:
    """Its process number may belong to another process by now, which started at another time."""
    folder = run_dir(tmp_path, "default")
    folder.mkdir()
    stale = msgspec.structs.replace(_state(), supervisor_start="another boot:1")
    write_state(folder, stale)
    assert not is_alive(stale)
    assert read_state(tmp_path, "default") is None
    assert not (folder / STATE_FILE).exists()
    assert list_states(tmp_path) == ()


def test_a_name_is_free_again_when_its_holder_was_killed(tmp_path: Path) -> None:
    """The lock file may be there; the lock is not."""
    folder = run_dir(tmp_path, "default")
    folder.mkdir()
    (folder / LOCK_FILE).touch()
    write_state(folder, msgspec.structs.replace(_state(), supervisor_start="another boot:1"))
    with claim(tmp_path, "default"):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"name": "default", "from": "another version"}'])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, content: bytes) -> None:
    """Another version's file is no reason to fail."""
    folder = run_dir(tmp_path, "default")
    folder.mkdir()
    (folder / STATE_FILE).write_bytes(content)
    assert read_state(tmp_path, "default") is None
    assert list_states(tmp_path) == ()


def test_no_state_folder_means_no_deployment(tmp_path: Path) -> None:
    """On a machine where pdserve never ran."""
    assert list_states(tmp_path / "missing") == ()
    assert read_state(tmp_path / "missing", "default") is None


def test_a_state_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """It names the folder."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot keep the deployment's state there"),
        claim(tmp_path / "file", "default"),
    ):
        pass


def test_a_process_is_told_by_its_start() -> None:
    """The same for the same process, none for one that is not there."""
    assert process_start(os.getpid()) == process_start(os.getpid())
    assert process_start(2**22 + 1) is None  # Linux gives out no larger number.
