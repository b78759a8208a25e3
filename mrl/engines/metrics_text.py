"""Prometheus' text format, as inference servers write it: the sum of each metric over its label sets."""


def metrics_of(text: str) -> dict[str, float]:
    """Name of a metric -> sum of its samples; lines that are no samples are passed over."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not name or line.startswith("#"):
            continue
        name = name.partition("{")[0]
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums
