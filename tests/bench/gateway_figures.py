"""From samples to medians, ratios and tables. Pure.

A ratio is taken within each round, where both gateways met the machine in the same state, and its median is shown.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.gateway_peers import Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.gateway_load import Measured

NOTHING = "-"
_BUSY_CORES = 0.95
"""Below this a gateway waited for engines and client: its requests a second are theirs."""


class LoadName(StrEnum):
    """What a gateway is measured under."""

    THOUSAND = "1,000 streams"
    WHOLE = "whole answers"
    LONG = "60 kB prompts"
    TOKEN_IDS = "100,000 token ids"
    STREAMS = "64 streams"
    ONE = "one connection"
    ONE_PREFILL = "one connection to P"


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one gateway in one round."""

    name: Name
    load: LoadName
    round: int
    measured: Measured
    problems: tuple[str, ...] = ()
    """Why it must not count."""


Round = dict[tuple[Name, LoadName], "Measured"]
Reader = Callable[[Round, Name], float | None]
"""One figure of a gateway in a round; None where it was not taken."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached: a number, or a multiple of somebody else's."""

    limit: float
    of: Name | None = None
    is_least: bool = False
    unit: str = ""

    def __str__(self) -> str:
        sign = "≥" if self.is_least else "≤"
        return f"{sign} {self.limit:g} of {self.of}" if self.of else f"{sign} {self.limit:g}{self.unit}"

    def is_reached(self, value: float) -> bool:
        """Whether a figure or a ratio is good enough."""
        return value >= self.limit if self.is_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    title: str
    read: Reader
    goals: tuple[Goal, ...] = ()
    note: Reader | None = None
    """A second figure, shown in brackets."""
    is_bounded: bool = False
    """Whether engines and client may have set the figure: it is then a lower bound."""


def _of(load: LoadName, field: str) -> Reader:
    def read(values: Round, name: Name) -> float | None:
        measured = values.get((name, load))
        value: float | None = None if measured is None else getattr(measured, field)
        return value

    return read


def _added_us(values: Round, name: Name) -> float | None:
    """One request's latency less that of the legs, asked one after the other without a gateway."""
    legs = [LoadName.ONE] if name is Name.NGINX else [LoadName.ONE, LoadName.ONE_PREFILL]
    added_ms = _of(LoadName.ONE, "latency_p50_ms")(values, name)
    for leg in legs:
        leg_ms = _of(leg, "latency_p50_ms")(values, Name.DIRECT)
        if added_ms is None or leg_ms is None or name is Name.DIRECT:
            return None
        added_ms -= leg_ms
    return None if added_ms is None else added_ms * 1e3


def _cpu(title: str, load: LoadName, *goals: Goal) -> Row:
    return Row(title, _of(load, "cpu_us"), goals, note=_of(load, "kernel_us"))


def _cores(values: Round, name: Name) -> float | None:
    return _of(LoadName.WHOLE, "gateway_cores")(values, name)


_ROUTER = Name.VLLM_ROUTER
CPU_ROWS = (
    _cpu("CPU a request, 400 B prompt, whole answer: µs (kernel)", LoadName.WHOLE, Goal(0.5, _ROUTER)),
    _cpu("CPU a request, 60 kB prompt: µs (kernel)", LoadName.LONG, Goal(0.75, _ROUTER)),
    _cpu("CPU a request, 100,000 token ids: µs (kernel)", LoadName.TOKEN_IDS, Goal(0.75, _ROUTER)),
    _cpu("CPU a streamed chunk, 64 streams: µs (kernel)", LoadName.STREAMS, Goal(0.8, _ROUTER), Goal(1.2, Name.NGINX)),
)
ROWS = (
    *CPU_ROWS,
    _cpu("CPU a streamed chunk, 1,000 streams: µs (kernel)", LoadName.THOUSAND),
    Row(
        "requests/s, 16 connections",
        _of(LoadName.WHOLE, "requests_per_s"),
        (Goal(50, Name.TOY, is_least=True),),
        is_bounded=True,
    ),
    Row("latency added to one request: µs", _added_us, (Goal(1, _ROUTER),)),
    Row("time to first byte, 64 streams, p50: ms", _of(LoadName.STREAMS, "first_byte_p50_ms")),
    Row("time to first byte, 64 streams, p99: ms", _of(LoadName.STREAMS, "first_byte_p99_ms"), (Goal(1, _ROUTER),)),
    Row("a chunk's way, 64 streams, p99: ms", _of(LoadName.STREAMS, "delay_p99_ms")),
    Row("a chunk's way, 1,000 streams, p99: ms", _of(LoadName.THOUSAND, "delay_p99_ms")),
    Row("largest stall, 1,000 streams: ms", _of(LoadName.THOUSAND, "delay_max_ms"), (Goal(50, unit=" ms"),)),
    Row("memory a stream, 1,000 streams: kB", _of(LoadName.THOUSAND, "memory_kb"), (Goal(40, unit=" kB"),)),
)
WORKER_ROWS = (
    Row("requests/s, 16 connections", _of(LoadName.WHOLE, "requests_per_s")),
    Row("CPU a request: µs (kernel)", _of(LoadName.WHOLE, "cpu_us"), note=_of(LoadName.WHOLE, "kernel_us")),
    Row("cores that the gateway used", _cores),
    Row("cores that engines and client used", _of(LoadName.WHOLE, "other_cores")),
)


class Figures:
    """Samples by round; those with a problem are left out."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        rounds: dict[int, Round] = defaultdict(dict)
        for sample in samples:
            if not sample.problems:
                rounds[sample.round][sample.name, sample.load] = sample.measured
        self.rounds = [rounds[number] for number in sorted(rounds)]

    def values(self, read: Reader, name: Name) -> list[float]:
        """One for each round that has it."""
        return [value for values in self.rounds if (value := read(values, name)) is not None]

    def median(self, read: Reader, name: Name) -> float | None:
        """Over the rounds."""
        values = self.values(read, name)
        return statistics.median(values) if values else None

    def ratio(self, read: Reader, name: Name, other: Name) -> float | None:
        """The median of the rounds' own ratios."""
        ratios = []
        for values in self.rounds:
            ours, theirs = read(values, name), read(values, other)
            if ours is not None and theirs:
                ratios.append(ours / theirs)
        return statistics.median(ratios) if ratios else None

    def spread(self, names: Sequence[Name], rows: Iterable[Row] = CPU_ROWS) -> float:
        """How far the rounds are apart at most, as a share of the median."""
        found = [self.values(row.read, name) for row in rows for name in names]
        return max((_spread(values) for values in found if values), default=0.0)


def _spread(values: Sequence[float]) -> float:
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def table_of(figures: Figures, names: Sequence[Name]) -> list[list[str]]:
    """Everybody's medians, ours as ratios, and the goals; the first line is the headings."""
    compared = [name for name in (_ROUTER, Name.NGINX) if name in names]
    lines = [["", *names, *(f"pdserve : {name}" for name in compared), "goal"]]
    for row in ROWS:
        ratios = [figures.ratio(row.read, Name.OURS, name) for name in compared]
        cells = [_cell(figures, row, name) for name in names]
        lines.append(
            [
                row.title,
                *cells,
                *map(_ratio_text, ratios),
                "; ".join(_goal_text(figures, row, goal) for goal in row.goals),
            ]
        )
    return lines


def worker_table_of(figures: Figures) -> list[list[str]]:
    """One worker beside two."""
    names = (Name.ONE_WORKER, Name.TWO_WORKERS)
    lines = [["", *names, "2 : 1"]]
    for row in WORKER_ROWS:
        ratio = figures.ratio(row.read, Name.TWO_WORKERS, Name.ONE_WORKER)
        lines.append([row.title, *(_cell(figures, row, name) for name in names), _ratio_text(ratio)])
    return lines


def _cell(figures: Figures, row: Row, name: Name) -> str:
    value = figures.median(row.read, name)
    if value is None or (name is Name.DIRECT and not value):
        return NOTHING
    note = figures.median(row.note, name) if row.note is not None else None
    cores = figures.median(_cores, name) if row.is_bounded else None
    bound = "≥ " if cores is not None and cores < _BUSY_CORES else ""
    return bound + number_text(value) + (f" ({number_text(note)})" if note is not None else "")


def _goal_text(figures: Figures, row: Row, goal: Goal) -> str:
    value = figures.ratio(row.read, Name.OURS, goal.of) if goal.of else figures.median(row.read, Name.OURS)
    if value is None:
        return str(goal)
    return f"{goal}: {'reached' if goal.is_reached(value) else f'missed, {number_text(value)}'}"


def _ratio_text(ratio: float | None) -> str:
    return NOTHING if ratio is None else number_text(ratio)


def number_text(value: float) -> str:
    """Three digits, as far as there are three to show."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def markdown(table: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines; all columns but the first and the goals are numbers."""
    head, *rest = table
    rule = ["---" if name in {"", "goal"} else "---:" for name in head]
    return ["| " + " | ".join(line) + " |" for line in (head, rule, *rest)]


def plain(table: Sequence[Sequence[str]]) -> list[str]:
    """The same for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def with_section(text: str, *, start: str, end: str, lines: Iterable[str]) -> str:
    """A document with everything between two of its lines replaced. Raises ValueError when one is missing."""
    before, found_start, rest = text.partition(f"{start}\n")
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"no lines {start!r} and {end!r} in the document")
    return f"{before}{start}\n" + "\n".join(lines) + f"\n{end}{after}"


def problems_of(samples: Iterable[Sample]) -> list[str]:
    """What must not have been, in sentences."""
    return [
        f"{sample.name}, {sample.load}, round {sample.round}: {problem}"
        for sample in samples
        for problem in sample.problems
    ]


def cpu_bars(figures: Figures, names: Sequence[Name]) -> Mapping[str, list[tuple[Name, float, float]]]:
    """For the plot: by what was done, everybody's CPU time and what of it the kernel took."""
    bars = {}
    for row in CPU_ROWS:
        assert row.note is not None
        medians = [(name, figures.median(row.read, name), figures.median(row.note, name)) for name in names]
        bars[row.title.partition(": µs")[0]] = [(name, cpu, kernel or 0.0) for name, cpu, kernel in medians if cpu]
    return bars
