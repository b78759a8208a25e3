"""The vote of a collective on one prompt (RLCCF, arXiv 2508.12338): agreement in place of a label.

    p_m(a) = share of the answers of policy m that say a,   SC_m = max_a p_m(a),   V(a) = sum_m SC_m p_m(a)

The answer with the largest V is taken for right. SC is the self-consistency of a policy on the prompt: who always says
the same counts for more than who says something else every time. This is what the paper's abstract says; its equations
were not at hand, so none is cited. Two rules are those of mrl: answers out of which nothing was read count in a
policy's total and for nothing else, and a tie decides nothing.

Shapes: G choices per policy, one for each answer: a digest of what was read out of it, or "" for nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction


def self_consistency(choices_G: Sequence[str]) -> Fraction:
    """SC: the share of the answers that say what most of them say. 0 where none says anything."""
    return Fraction(max(_counts(choices_G).values(), default=0), max(1, len(choices_G)))


def winner(votes: Iterable[Sequence[str]]) -> str:
    """The choice that the policies' choices elect; "" in a tie, and where nobody says anything.

    Votes are added as fractions: the order of the policies does not matter, not even by rounding.
    """
    weight: defaultdict[str, Fraction] = defaultdict(Fraction)
    for choices_G in votes:
        consistency = self_consistency(choices_G)
        for choice, count in _counts(choices_G).items():
            weight[choice] += consistency * Fraction(count, len(choices_G))
    largest = max(weight.values(), default=None)
    elected = [choice for choice, total in weight.items() if total == largest]
    return elected[0] if len(elected) == 1 else ""


def agreement(choices_G: Sequence[str], elected: str, *, failed_reward: float) -> list[float]:
    """[G] rewards: 1 for the elected choice, 0 for another, `failed_reward` for an answer that says nothing."""
    return [float(choice == elected) if choice else failed_reward for choice in choices_G]


def _counts(choices_G: Sequence[str]) -> Counter[str]:
    return Counter(choice for choice in choices_G if choice)
