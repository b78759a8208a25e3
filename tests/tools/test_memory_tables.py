"""What the documentation says of what fits where, against the memory plan."""

from pathlib import Path

import memory_tables
import pytest

PAGES = Path(__file__).parents[2] / "docs"


def told_on(page: str) -> list[list[str]]:
    """Cells of all lines of tables."""
    lines = (PAGES / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.thorough
def test_the_page_has_what_the_plan_says() -> None:
    """Of the smallest model, on every number of GPUs; `tools/memory_tables.py` makes the tables anew."""
    told = told_on("learner.md")

    head, *rows = memory_tables.sizes_table(["8B"])

    assert head == ["model", "beside that", "8", "16", "32", "64"]
    assert [row[1] for row in rows] == list(memory_tables.OPTIONS)
    assert all(row in told for row in rows), rows


@pytest.mark.thorough
def test_two_policies_fit_on_one_gpu_in_turns_and_not_side_by_side() -> None:
    """As docs/turns.md says, of which the table is made anew by the same tool."""
    head, *rows = memory_tables.turns_table()
    at_once = next(row for row in rows if row[0].startswith("at once"))

    assert all(row in told_on("turns.md") for row in [head, *rows]), rows
    assert at_once[1].startswith("(")
    assert float(at_once[2]) < 74.5
