"""One figure of a benchmark, and what is required of it: a row of the JSON object that a benchmark ends with."""

import math
from typing import NamedTuple


class Row(NamedTuple):
    """`ratio` to what it is `against`, bounded by `required` (">=1.5", "<=1"); None or not a number: not measured."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    required: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the ratio keeps its bound; one that nobody could measure does not."""
        if self.required is None:
            return True
        if self.ratio is None:
            return False
        bound = float(self.required[2:])
        return self.ratio >= bound if self.required[0] == ">" else self.ratio <= bound

    @property
    def fields(self) -> dict[str, object]:
        """For JSON, which has no word for what is not a number."""
        numbers = {"value": self.value, "ratio": self.ratio}
        known = {name: number for name, number in numbers.items() if number is not None and not math.isnan(number)}
        return self._asdict() | dict.fromkeys(numbers) | known | {"ok": self.ok}
