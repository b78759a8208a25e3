"""An evaluator that runs whatever it is given, and the verifier that compares what it made; for hostile answers."""

KEPT: list[str] = []
"""What earlier answers left in this module; it should stay empty."""


def run(answer: str) -> str:
    """The variable `result` of a Python program."""
    names: dict[str, object] = {"result": ""}
    exec(answer, names)
    return names["result"]


def same(reference: str, answer: str) -> float:
    """1.0 for the reference."""
    return float(answer == reference)
