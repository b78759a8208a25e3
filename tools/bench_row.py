"""Figures of a benchmark: its rows, their table, and the line of JSON with which it ends."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One figure. `ratio` to `against`, bounded by `required` (">=1.5", "<=1"); None or NaN: not measured."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    required: str | None = None
    ratio_of_medians: float | None = None
    """Ratio of the medians of rounds, where `ratio` is that of their best."""

    @property
    def ok(self) -> bool:
        """Whether the ratio keeps its bound; a ratio that was not measured does not."""
        if self.required is None:
            return True
        if self.ratio is None:
            return False
        bound = float(self.required[2:])
        return self.ratio >= bound if self.required[0] == ">" else self.ratio <= bound

    @property
    def fields(self) -> dict[str, object]:
        """Fields for JSON, which has no word for NaN: null takes its place."""
        numbers = {"value": self.value, "ratio": self.ratio}
        known = {name: number for name, number in numbers.items() if number is not None and not math.isnan(number)}
        found = self._asdict() | dict.fromkeys(numbers) | known | {"ok": self.ok}
        if self.ratio_of_medians is None:
            del found["ratio_of_medians"]
        return found


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for each row."""
    for row in rows:
        is_measured = row.ratio is not None and not math.isnan(row.ratio)
        ratio = f"{row.ratio:.3g} against {row.against}" if is_measured else ""
        medians = "" if row.ratio_of_medians is None else f", {row.ratio_of_medians:.3g} by medians"
        missed = "MISSED" if is_measured else "not measured"
        verdict = "" if row.required is None else f"   required {row.required}: {'ok' if row.ok else missed}"
        print(f"{row.name:<60}{row.value:>12.5g} {row.unit:<14} {ratio}{medians}{verdict}".rstrip())


def end(bench: str, rows: Sequence[Row]) -> int:
    """Print the line of JSON; return the exit code, 1 when a row misses its bound."""
    print(json.dumps({"bench": bench, "rows": [row.fields for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1
