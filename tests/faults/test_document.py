"""docs/operations.md says what the tests have seen."""

from __future__ import annotations

import pytest

from faults.document import PATH, REASONS, generated, part
from faults.table import ROWS
from pdserve.errors import Reason
from pdserve.sim.faults import parse_fault


@pytest.mark.parametrize("name", list(generated()))
def test_a_generated_part_is_up_to_date(name: str) -> None:
    """Every line there is one of the table's, and the other way round."""
    assert part(PATH.read_text(encoding="utf-8"), name) == generated()[name]


def test_every_reason_is_explained() -> None:
    """And none that there is not."""
    assert set(REASONS) == set(Reason)


def test_every_row_is_a_fault_by_its_name() -> None:
    """No two rows of one side are the same."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        parse_fault(row.fault)
