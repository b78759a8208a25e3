"""Numbers as short text with their unit. None, NaN and infinities become "-"."""

import math
from itertools import pairwise

MISSING = "-"


def fixed(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals, without a negative zero: 0.41."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def labelled(text: str, step: int | None, last_step: int | None) -> str:
    """Return a value with the step of its measurement, unless that is the last step of the run: 0.61 (step 240)."""
    return text if step is None or text == MISSING or step == last_step else f"{text} (step {step})"


def signed(value: float | None, digits: int = 2) -> str:
    """Return a number like `fixed`, with a sign unless it is zero: +0.37."""
    text = fixed(value, digits)
    return text if text.startswith("-") or text == MISSING or float(text) == 0 else f"+{text}"


def count(value: float | None) -> str:
    """Return a number with three digits at most and a power of a thousand: 210, 5.1k, 12k, 3.4M."""
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in ("", "k", "M", "G", "T"):
        shown = f"{value:.0f}" if unit == "" or abs(value) >= 9.95 else f"{value:.1f}"
        if abs(float(shown)) < 1000 or unit == "T":
            return shown + unit
        value /= 1000
    raise AssertionError


def size(num_bytes: float | None) -> str:
    """Return bytes in powers of a thousand: 71 kB."""
    text = count(num_bytes)
    if text == MISSING:
        return text
    digits, unit = (text, "") if text[-1].isdigit() else (text[:-1], text[-1])
    return f"{digits} {unit}B"


def percent(share: float | None) -> str:
    """Return a share as a whole percentage: 63%."""
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:.0f}%"


def seconds(duration_s: float | None) -> str:
    """Return a duration in seconds, minutes or hours: 0.05s, 1.2s, 300s, 25m, 3.0h."""
    if duration_s is None or not math.isfinite(duration_s):
        return MISSING
    if duration_s >= 5940:
        return f"{duration_s / 3600:.1f}h"
    if duration_s >= 600:
        return f"{duration_s / 60:.0f}m"
    return f"{duration_s:.{2 if duration_s < 0.095 else 1 if duration_s < 9.95 else 0}f}s"


def elapsed(duration_s: float) -> str:
    """Return a duration as on a clock: 00:42, 1:02:03."""
    minutes, rest = divmod(int(max(0.0, duration_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Draw a series in `width` characters at most, each the mean of its part, scaled to the range of these means."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    edges = [round(cell * len(finite) / cells) for cell in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low < 1e-9:
        return "▄" * cells
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)
