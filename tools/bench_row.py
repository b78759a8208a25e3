"""Row of the JSON object with which a benchmark ends: one figure, and the bound that it has to keep."""

import math
from typing import NamedTuple


class Row(NamedTuple):
    """One figure. `ratio` to `against`, bounded by `required` (">=1.5", "<=1"); None or NaN: not measured."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    required: str | None = None

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
        return self._asdict() | dict.fromkeys(numbers) | known | {"ok": self.ok}
