"""An evaluator that runs any program, and the verifier that compares its result, for hostile answers."""

KEPT: list[str] = []
"""Objects that earlier answers left in this module; it should stay empty."""


def run(answer: str) -> str:
    """Run a Python program and return its variable `result`."""
    names: dict[str, object] = {"result": ""}
    exec(answer, names)
    return names["result"]


def same(reference: str, answer: str) -> float:
    """Return 1.0 for the reference, else 0.0."""
    return float(answer == reference)
