"""A model in a local folder, in the layout that vLLM and transformers read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.launch.models.source import OnProgress

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
"""What vLLM's default loader looks for: `DefaultModelLoader._prepare_weights` in 0.32."""
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder that someone else filled."""

    path: Path
    """Absolute."""

    @property
    def served_name(self) -> str:
        return self.path.name

    @property
    def known_path(self) -> Path:
        return self.path

    def check(self) -> None:
        if not self.path.exists():
            raise ConfigError(f"model {self.path}: there is no such folder")
        if not self.path.is_dir():
            raise ConfigError(
                f"model {self.path}: this is a file; give the folder that holds config.json and the weights"
            )
        if missing := missing_parts(self.path):
            raise ConfigError(f"model {self.path}: the folder has no {', no '.join(missing)}")

    def fetch(self, on_progress: OnProgress) -> Path:  # noqa: ARG002 - nothing to do takes no time
        return self.path


def missing_parts(folder: Path) -> list[str]:
    """What a folder lacks to be served, in words. Empty when it looks whole."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    indexes = [folder / name for name in WEIGHT_INDEXES if (folder / name).is_file()]
    if indexes:
        return missing + sorted(name for name in _indexed_files(indexes[0]) if not (folder / name).is_file())
    if not any(entry.suffix in WEIGHT_SUFFIXES for entry in folder.iterdir()):
        missing.append(f"weights ({', '.join('*' + suffix for suffix in WEIGHT_SUFFIXES)})")
    return missing


def _indexed_files(index: Path) -> set[str]:
    """The files that hold a sharded model: an interrupted download leaves some out."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"model {index.parent}: {index.name} cannot be read as an index of weights: {exc!r}") from exc
