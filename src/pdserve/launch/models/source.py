"""What every source of a model offers, and how it tells how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class OnProgress(Protocol):
    """Called now and then while a model is made ready, from any thread."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`total` is 0 while nobody can say how much there will be."""


class ModelSource(Protocol):
    """Where a model comes from. Made of a spec that was spelled well; nothing else is known of it yet."""

    @property
    def served_name(self) -> str:
        """What clients call the model."""

    @property
    def known_path(self) -> Path | None:
        """The folder that `fetch` will return, when that is certain beforehand."""

    def check(self) -> None:
        """Find what can be found before anything starts. Raises ConfigError."""

    def fetch(self, on_progress: OnProgress) -> Path:
        """Make the folder ready and return it. Raises ModelUnavailable."""
