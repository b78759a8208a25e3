"""The table, the last line and the exit code of every benchmark."""

import json

import pytest
from bench_row import Row, end, print_rows

NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "is_ok", "told"),
    [
        (Row("a", 3.0, "s"), True, "a 3 s"),
        (Row("a", 3.0, "s", "b", 1.5), True, "a 3 s 1.5 against b"),
        (Row("a", 3.0, "s", "b", 1.5, ">=1.5"), True, "a 3 s 1.5 against b required >=1.5: ok"),
        (Row("a", 3.0, "s", "b", 1.5, "<=1"), False, "a 3 s 1.5 against b required <=1: MISSED"),
        (Row("a", 3.0, "s", "b", NAN, ">=1"), False, "a 3 s required >=1: not measured"),
        (Row("a", NAN, "s", "b", None, ">=1"), False, "a nan s required >=1: not measured"),
        (Row("a", 3.0, "s", "b", 2.0, ">=1", 1.25), True, "a 3 s 2 against b, 1.25 by medians required >=1: ok"),
    ],
)
def test_a_row_is_told_with_its_bound_and_misses_it_with_exit_code_1(capsys, row, is_ok, told):
    """One that was not measured misses it as well. JSON has no word for NaN, and medians only where there are some."""
    print_rows([row])
    assert end("bench", [Row("other", 1.0, "s"), row]) == int(not is_ok)

    line, last = capsys.readouterr().out.splitlines()
    assert line.split() == told.split()
    bench, rows = json.loads(last).values()
    assert (bench, rows[0]["ok"], rows[1]["ok"]) == ("bench", True, is_ok)
    assert set(rows[0]) == {"name", "value", "unit", "against", "ratio", "required", "ok"}
    assert rows[1].get("ratio_of_medians") == row.ratio_of_medians
    assert (rows[1]["value"], rows[1]["ratio"]) == tuple(
        None if number is None or number != number else number for number in (row.value, row.ratio)
    )
