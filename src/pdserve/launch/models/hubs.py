"""Models from Hugging Face and ModelScope, fetched into each hub's usual cache by the hub's own library.

Maps those libraries' errors to ModelUnavailable, in one function each. Knows nothing of what is in a model beyond the
files that a server needs.
"""

from __future__ import annotations

import importlib.util
import io
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, ModelUnavailable
from pdserve.launch.models.folder import missing_parts

if TYPE_CHECKING:
    from pdserve.launch.models.source import OnProgress

FILES_TO_FETCH = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Weights, configuration, tokenizer and chat template: no second copy of the weights in another format, no pictures."""

ELSEWHERE = "Or fetch it on a machine that can, and give the folder as the model"


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """`hf:ORG/NAME`."""

    name: str

    @property
    def served_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def known_path(self) -> None:
        """The folder is called after the revision, which only the hub knows."""

    def check(self) -> None:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise ConfigError(f"model hf:{self.name}: huggingface_hub is not installed: pip install huggingface_hub")

    def fetch(self, on_progress: OnProgress) -> Path:
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

        # The bases are OSError and the error of whichever HTTP library this version of huggingface_hub is built on.
        failures = (*HfHubHTTPError.__bases__, HFValidationError)
        on_progress(f"Fetching hf:{self.name}", 0, 0)
        try:
            path = snapshot_download(
                self.name,
                allow_patterns=list(FILES_TO_FETCH),
                tqdm_class=_bar_class(f"Fetching hf:{self.name}", on_progress),
            )
        except failures as exc:
            raise ModelUnavailable(f"model hf:{self.name}: {_explain_hugging_face(exc)}. {ELSEWHERE}") from exc
        return _whole(Path(path), spec=f"hf:{self.name}")


@dataclass(frozen=True, slots=True)
class ModelScopeModel:
    """`modelscope:ORG/NAME`."""

    name: str

    @property
    def served_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def known_path(self) -> None:
        """Where ModelScope's cache puts it is ModelScope's business."""

    def check(self) -> None:
        # modelscope_hub came with modelscope 1.40, and with it errors that have one base.
        if importlib.util.find_spec("modelscope") is None or importlib.util.find_spec("modelscope_hub") is None:
            raise ConfigError(
                f'model modelscope:{self.name}: modelscope 1.40 or newer is not installed: pip install "pdserve[modelscope]"'
            )

    def fetch(self, on_progress: OnProgress) -> Path:
        from modelscope import snapshot_download  # noqa: PLC0415
        from modelscope.hub.errors import HubError  # noqa: PLC0415

        on_progress(f"Fetching modelscope:{self.name}", 0, 0)
        counter = _file_counter(f"Fetching modelscope:{self.name}", on_progress)
        try:
            path = snapshot_download(self.name, allow_patterns=list(FILES_TO_FETCH), progress_callbacks=[counter])
        except (OSError, HubError) as exc:
            raise ModelUnavailable(f"model modelscope:{self.name}: {_explain_model_scope(exc)}. {ELSEWHERE}") from exc
        return _whole(Path(path), spec=f"modelscope:{self.name}")


def _whole(path: Path, *, spec: str) -> Path:
    """A hub may hold a name without weights that vLLM can load, such as one in GGUF alone."""
    if missing := missing_parts(path):
        raise ModelUnavailable(f"model {spec}: what was fetched to {path} has no {', no '.join(missing)}")
    return path


def _explain_hugging_face(error: Exception) -> str:
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "its owner lets only those in who accepted its terms: accept them on its page, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return "Hugging Face has no model of that name, or it is private and HF_TOKEN is not set"
        case LocalEntryNotFoundError() if isinstance(error.__cause__, OfflineModeIsEnabled):
            return "it is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it"
        case LocalEntryNotFoundError():
            reason = error.__cause__ or error
            return f"Hugging Face cannot be reached ({_first_line(reason)}); HF_ENDPOINT can name a mirror"
        case _:
            return f"the download failed ({_first_line(error)}); HF_ENDPOINT can name a mirror"


def _explain_model_scope(error: Exception) -> str:
    from modelscope.hub.errors import NetworkError, NotExistError  # noqa: PLC0415

    # snapshot_download turns some of its library's errors into errors of requests, and keeps the real one as the cause.
    match error.__cause__ if isinstance(error.__cause__, NotExistError) else error:
        case NotExistError():
            return "ModelScope has no model of that name, or it is private"
        case NetworkError() | ConnectionError():
            return f"ModelScope cannot be reached ({_first_line(error)})"
        case _:
            return f"the download failed ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bar_class(stage: str, on_progress: OnProgress) -> type:
    """A tqdm bar that reports instead of drawing. Only the bar that counts bytes on disk: one bar counts files, and
    huggingface_hub 2 has one more for bytes on the wire.
    """
    from huggingface_hub.utils import tqdm  # noqa: PLC0415

    class ReportingBar(tqdm):  # type: ignore[misc] # huggingface_hub is not there for every check
        def __init__(self, *args: object, **kwargs: object) -> None:
            is_of_bytes = kwargs.get("unit") == "B" and not str(kwargs.get("desc")).startswith("Downloading bytes")
            self.is_reported = is_of_bytes
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def display(self, *_args: object, **_kwargs: object) -> None:
            if self.is_reported:
                on_progress(stage, int(self.n), int(self.total or 0))

    return ReportingBar


def _file_counter(stage: str, on_progress: OnProgress) -> type:
    """What ModelScope makes an instance of for each file; together they count the bytes of all."""
    lock = threading.Lock()
    done = total = 0

    class FileCounter:
        def __init__(self, _filename: str, file_size: int) -> None:
            self._add(0, file_size)

        def update(self, size: int) -> None:
            self._add(size, 0)

        def end(self) -> None:
            """Nothing is left to count."""

        def _add(self, num_done: int, num_total: int) -> None:
            nonlocal done, total
            with lock:
                done, total = done + num_done, total + num_total
                on_progress(stage, done, total)

    return FileCounter
