"""The vote against a twin in the notation of its module, and what it comes to where all is plain."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.sharing.collective import agreement, self_consistency, winner

CHOICES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=6)
VOTES = st.lists(CHOICES, min_size=1, max_size=4)


def slow(votes):
    """argmax_a sum_m SC_m p_m(a), over common denominators, one answer at a time; None where two are equal."""
    totals = {}
    for answer in sorted({choice for choices in votes for choice in choices if choice}):
        totals[answer] = Fraction(0)
        for choices in votes:
            shares = [Fraction(choices.count(one), len(choices)) for one in choices if one]
            totals[answer] += max(shares, default=Fraction(0)) * Fraction(choices.count(answer), len(choices))
    best = [answer for answer, total in totals.items() if total == max(totals.values())]
    return best[0] if len(best) == 1 else ""


@given(votes=VOTES, seed=st.integers(0, 99))
def test_the_winner_is_that_of_the_slow_twin_in_any_order(votes, seed):
    """Policies, and their answers, in another order elect the same."""
    expected = slow(votes)
    assert winner(votes) == expected
    shuffled = [random.Random(seed).sample(choices, len(choices)) for choices in votes]
    random.Random(seed).shuffle(shuffled)
    assert winner(shuffled) == expected


@given(choices=CHOICES, copies=st.integers(1, 3))
def test_one_policy_alone_is_the_majority_of_its_group(choices, copies):
    """So is any number that say the same as often, whatever their groups' sizes."""
    said = {choice: choices.count(choice) for choice in choices if choice}
    most = [choice for choice, count in said.items() if count == max(said.values())]
    expected = most[0] if len(most) == 1 else ""
    assert winner([choices]) == expected
    assert winner([choices * (n + 1) for n in range(copies)]) == expected


@pytest.mark.parametrize(
    ("votes", "elected"),
    [
        ([["a", "a"], ["a", "a"]], "a"),
        ([["a", "a", "a", "a"], ["b", "b", "b", "c"]], "a"),  # 1 * 1 beside 3/4 * 3/4
        ([["a", "a", "a", "a"], ["b", "b", "b", "c"], ["b", "b", "c", "c"]], "a"),  # 1 beside 9/16 + 1/4
        ([["a", "b"], ["b", "c"]], "b"),
        ([["a", "a", "", ""], ["b", "b", "b", "c"]], "b"),  # 1/2 * 1/2 beside 9/16
        ([["a"] * 4, ["b"] * 4], ""),
        ([["a", "b", "c"]], ""),
        ([["", ""], [""]], ""),
        ([], ""),
    ],
)
def test_the_vote_by_hand(votes, elected):
    """Agreement, weight by consistency, answers that say nothing, and ties, which elect nobody."""
    assert winner(votes) == elected


def test_a_tie_is_a_tie_where_rounding_would_see_a_winner():
    """1/49 + 4/49 + 4/49 is 9/49, though not as floats, however they are added."""
    blank = [""] * 7
    votes = [(["a"] * number + blank)[:7] for number in (1, 2, 2)]
    assert 1 / 49 + 4 / 49 + 4 / 49 != 9 / 49
    assert winner([*votes, (["b"] * 3 + blank)[:7]]) == ""


@given(choices=CHOICES, elected=st.sampled_from(["", "a", "b"]))
def test_rewards_are_agreement_and_nothing_where_nobody_is_elected(choices, elected):
    """An answer that says nothing has the reward of a failure, where anyone is elected."""
    rewards = agreement(choices, elected, failed_reward=-0.5)
    failed = -0.5 if elected else 0.0
    assert rewards == [failed if not choice else float(choice == elected) for choice in choices]
    assert elected or 1.0 not in rewards


def test_self_consistency_is_the_share_of_the_majority_among_all_answers():
    """Answers that say nothing count among all."""
    assert self_consistency(["a", "a", "b", ""]) == Fraction(1, 2)
    assert self_consistency(["", ""]) == 0
