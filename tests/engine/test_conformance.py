"""The conformance matrix: what one plain vLLM answers, the gateway answers too, and every request goes the way it must."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.conformance import document, exchange
from engine.conformance.table import CASES
from engines import plain_command, running_engines

if TYPE_CHECKING:
    from deployment import RealPair
    from engine.conformance.case import Case

_DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


@pytest.fixture(scope="module")
def results(real_pair: RealPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, exchange.Result]:
    """The whole matrix, run once: the pair behind its gateway, and one vLLM without a connector beside it."""
    with running_engines([plain_command()], tmp_path_factory.mktemp("plain")) as (plain,):
        servers = exchange.Servers(real_pair.gateway_url, real_pair.admin_url, plain.url, real_pair.model)
        results = asyncio.run(exchange.run_all(CASES, servers))
    return {case.name: result for case, result in zip(CASES, results, strict=True)}


@pytest.mark.engine
@pytest.mark.timeout(900)  # The first one waits for all.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gateway_answers_as_one_plain_vllm(case: Case, results: dict[str, exchange.Result]) -> None:
    """Equal but for ids and times, by the way that the table says."""
    assert results[case.name].difference is None
    assert results[case.name].way == case.way


def test_the_document_has_every_case() -> None:
    """docs/conformance.md is the table's last run: the same requests in the same words."""
    _, _, table = _DOCUMENT.read_text(encoding="utf-8").partition(document.TABLE_HEAD)
    rows = [line.removeprefix("| ").rpartition(" | ")[0] for line in table.splitlines()]
    assert rows == [document.row(case) for case in CASES], "run scripts/conformance"
