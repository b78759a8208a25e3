"""What the documentation says of what fits where, against the memory plan."""

from pathlib import Path

import memory_tables
import pytest

DOCS = Path(__file__).parents[2] / "docs/learner.md"


@pytest.mark.thorough
def test_the_page_has_what_the_plan_says() -> None:
    """Of the smallest model, on every number of GPUs; `tools/memory_tables.py` makes the tables anew."""
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in DOCS.read_text().splitlines()]

    head, *rows = memory_tables.sizes_table(["8B"])

    assert head == ["model", "beside that", "8", "16", "32", "64"]
    assert len(rows) == 5
    assert all(row in told for row in rows), rows
