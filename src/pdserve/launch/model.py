"""From what a user writes as the model to a folder that vLLM can serve.

Two steps: `check_model` finds what can be found before anything starts, `resolve_model` does the work. Each place that a
model can come from is a module of pdserve.launch.models; this one only chooses.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.launch.models.folder import LocalFolder
from pdserve.launch.models.hubs import HuggingFaceModel, ModelScopeModel
from pdserve.launch.models.smollm2 import SmolLM2

if TYPE_CHECKING:
    from pdserve.launch.models.source import ModelSource, OnProgress

FORMS = "smollm2, a folder's path, hf:ORG/NAME or modelscope:ORG/NAME"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to be served."""

    path: Path
    served_name: str


def check_model(spec: str, *, cache_dir: Path) -> ModelSource:
    """Where the model will come from, after every check that needs no network and no time. Raises ConfigError."""
    source = parse_model(spec, cache_dir=cache_dir)
    source.check()
    return source


def resolve_model(source: ModelSource, *, on_progress: OnProgress) -> ResolvedModel:
    """Fetch or convert the model if need be. Raises ModelUnavailable."""
    return ResolvedModel(path=source.fetch(on_progress), served_name=source.served_name)


def parse_model(spec: str, *, cache_dir: Path) -> ModelSource:
    """Tell the four forms apart; looks at the disk only to explain a spec that is none of them. Raises ConfigError."""
    if spec == "smollm2":
        return SmolLM2(models_dir=cache_dir / "models")
    if spec.startswith("hf:"):
        return HuggingFaceModel(_hub_name(spec))
    if spec.startswith("modelscope:"):
        return ModelScopeModel(_hub_name(spec))
    if spec.startswith(("/", "./", "../", "~/")) or spec in {".", ".."} or (spec and Path(spec).is_dir()):
        return LocalFolder(_absolute(spec))
    raise ConfigError(f"model {spec!r}: {_suggestion(spec)}")


def _hub_name(spec: str) -> str:
    name = spec.partition(":")[2]
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {spec!r}: after the colon write ORG/NAME, like Qwen/Qwen2.5-0.5B-Instruct")
    return name


def _absolute(spec: str) -> Path:
    """Without following symbolic links: a model is called after the folder that its user named."""
    return Path(os.path.normpath(Path(spec).expanduser().absolute()))


def _suggestion(spec: str) -> str:
    if _HUB_NAME.fullmatch(spec):
        return f"there is no such folder here; for the model of that name on Hugging Face write hf:{spec}"
    return f"not a model; write one of {FORMS}"
