"""`letters_right`: the share of letters that are right and in their place."""


def letters_right(reference: str, answer: str) -> float:
    """1.0 for the reference itself. It runs in a process of its own, with limits of time and memory."""
    right = sum(a == b for a, b in zip(reference, answer, strict=False))
    return right / max(len(reference), len(answer), 1)
