"""How pdserve looks in a terminal: one console, tables, bars, and the model's progress bar."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.launch.models.source import OnProgress
    from pdserve.launch.overview import EngineRow

_STATE_STYLES = {
    "ready": "green",
    "ok": "green",
    "proven": "green",
    "starting": "yellow",
    "proving": "yellow",
    "warning": "yellow",
    "draining": "yellow",
    "unproven": "yellow",
    "exited": "red",
    "down": "red",
}


_PIPE_WIDTH = 120
"""Columns where there is no terminal to ask: rich would take 80 and cut the tables."""


def make_console() -> Console:
    """Standard output, without rich's guesses about numbers and paths."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def styled_state(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, ""))


def engine_table(rows: Sequence[EngineRow]) -> Table:
    """The live table: engine, role, pid, port, state, KV room."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in ("ENGINE", "ROLE", "PID", "PORT", "STATE", "KV ROOM"):
        table.add_column(column, justify="right" if column in {"PID", "PORT", "KV ROOM"} else "left")
    for row in rows:
        process = row.process
        pid = "" if process.pid is None else str(process.pid)
        port = process.url.rpartition(":")[2]
        table.add_row(process.name, str(process.role), pid, port, styled_state(row.state), kv_room(row))
    return table


def kv_room(row: EngineRow) -> str:
    """How many tokens' KV still fits."""
    if row.counters is None:
        return ""
    free = 1.0 - row.counters.kv_usage
    if row.counters.num_kv_tokens == 0:
        return f"{free:.0%} free"
    return f"{free:.0%} of {row.counters.num_kv_tokens:,} tokens"


def bar(value: float, total: float, *, start: float = 0.0, width: int = 40) -> str:
    """A bar from `start` for `value`, on a scale where `total` fills the width; never invisible."""
    if total <= 0:
        return ""
    offset = min(round(start / total * width), width - 1)
    length = max(1, round(value / total * width))
    return " " * offset + "█" * min(length, width - offset)


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """A bar for a model that is made ready; nothing is drawn when there is nothing to do."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total or None)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield on_progress
