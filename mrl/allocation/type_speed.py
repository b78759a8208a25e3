"""How fast a policy would be on a type of unit that its engines never ran on: by what others lost or won there."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

Speeds = Sequence[float | None]
"""Of one policy by type of unit, in any measure that is the same over types; None where it was not measured."""


def foreseen(measured: Mapping[str, Speeds]) -> dict[str, tuple[float, ...] | None]:
    """The speeds of every policy with the gaps filled; None for a policy that was measured nowhere.

    A gap is filled from each type on which the policy was measured, by the mean ratio of the two types over the
    policies that were measured on both, and then the mean is taken; where nobody was, the types count as equally fast.
    All means are geometric, since speeds differ by factors.
    """
    return {policy: _filled(speeds, measured) for policy, speeds in measured.items()}


def _filled(speeds: Speeds, measured: Mapping[str, Speeds]) -> tuple[float, ...] | None:
    known = {kind: speed for kind, speed in enumerate(speeds) if speed is not None}
    if not known:
        return None
    filled = []
    for kind, speed in enumerate(speeds):
        ratios = {other: _ratio(kind, other, measured) for other in known}
        related = [known[other] * ratio for other, ratio in ratios.items() if ratio is not None]
        filled.append(geometric_mean(related or known.values()) if speed is None else speed)
    return tuple(filled)


def _ratio(kind: int, other: int, measured: Mapping[str, Speeds]) -> float | None:
    """Speed on type `kind` over that on `other`."""
    pairs = [(speeds[kind], speeds[other]) for speeds in measured.values()]
    ratios = [one / two for one, two in pairs if one is not None and two is not None]
    return geometric_mean(ratios) if ratios else None
