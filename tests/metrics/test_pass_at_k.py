"""pass@k, majorities and what policies solve together, held against the enumeration of all choices of answers."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from mrl.metrics.pass_at_k import estimate, fail_at_k, kappas, majority, passes, together
from mrl.records.evaluation_messages import PromptTally

SIZES = range(1, 7)


def answers(n: int, c: int) -> list[bool]:
    """n answers, c of them right."""
    return [place < c for place in range(n)]


def choices(found: Sequence[bool], k: int) -> Iterator[tuple[bool, ...]]:
    """All choices of k of them."""
    return itertools.combinations(found, k)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tallies(*rights: int, n: int) -> list[PromptTally]:
    return [PromptTally(prompt_id=f"p{place}", answered=n, right=right) for place, right in enumerate(rights)]


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in SIZES for k in range(1, n + 1)])
def test_failing_is_the_share_of_choices_without_a_right_answer(n, k):
    for c in range(n + 1):
        wanted = mean([not any(chosen) for chosen in choices(answers(n, c), k)])
        assert fail_at_k([n], [c], k)[0] == pytest.approx(wanted, abs=1e-12), (n, c, k)


def test_one_answer_of_n_is_the_share_of_right_ones_bit_for_bit():
    n, c = np.arange(1, 300), np.arange(1, 300) // 3
    assert (fail_at_k(n, c, 1) == (n - c) / n).all()


def test_no_choice_fails_where_too_few_answers_are_wrong_and_none_succeeds_where_all_are():
    assert fail_at_k([16, 16], [9, 0], 8).tolist() == [0.0, 1.0]
    assert fail_at_k([10_000], [1], 10_000)[0] == 0.0


def test_a_prompt_with_fewer_answers_than_are_drawn_is_left_out():
    found = [PromptTally(prompt_id="a", answered=3, right=3), PromptTally(prompt_id="b", answered=4, right=1)]
    assert passes(found, 4) == {"b": 1.0}
    assert passes(found, 5) == {}


def test_the_answer_given_most_often_is_the_majority_whatever_is_in_the_minority():
    assert majority([("7", False), ("7", False), ("4", True)]) == (0.0, False)
    assert majority([("4", True), ("7", False), ("4", True)]) == (1.0, False)


def test_tied_answers_count_with_their_mean_and_are_said_to_be_tied():
    assert majority([("4", True), ("7", False), ("9", False)]) == (pytest.approx(1 / 3), True)
    assert majority([("4", True), ("7", False)]) == (0.5, True)


def test_answers_that_say_nothing_do_not_vote():
    assert majority([("", False), ("", False), ("4", True)]) == (1.0, False)
    assert majority([("", False), ("", False)]) == (0.0, False)


def test_a_choice_that_is_right_at_times_counts_with_its_share():
    assert majority([("4", True), ("4", False), ("7", True)]) == (0.5, False)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_policies_together_are_the_mean_over_independent_choices_of_each(k):
    """The slow twin draws k answers of every policy in all ways."""
    n, right = 4, {"a": [0, 1, 4, 2], "b": [3, 0, 1, 0], "c": [0, 0, 2, 1]}
    found = together({name: tallies(*counts, n=n) for name, counts in right.items()}, k)
    assert found is not None

    def over_choices(says) -> float:
        """The mean, over prompts and choices, of what is said of who solves the prompt."""
        values = []
        for prompt in range(4):
            of_policy = [list(choices(answers(n, right[name][prompt]), k)) for name in right]
            values.append(
                mean([says(dict(zip(right, map(any, one), strict=True))) for one in itertools.product(*of_policy)])
            )
        return mean(values)

    assert found.prompts == 4
    assert found.union.mean == pytest.approx(over_choices(lambda solves: any(solves.values())))
    for one in right:
        for other in set(right) - {one}:
            wanted = over_choices(lambda solves, one=one, other=other: solves[one] and not solves[other])
            assert found.alone[one][other] == pytest.approx(wanted), (one, other)
        wanted = over_choices(lambda solves, one=one: not solves[one] and any(solves.values()))
        assert found.rescuable[one].mean == pytest.approx(wanted), one


def test_with_all_answers_the_matrix_counts_prompts():
    """k = n: A solved two prompts, one of which B did not; B solved one that A did not."""
    found = together({"a": tallies(2, 1, 0, 0, n=2), "b": tallies(0, 2, 1, 0, n=2)}, 2)
    assert found is not None
    assert found.alone == {"a": {"b": 0.25}, "b": {"a": 0.25}}
    assert (found.union.mean, found.rescuable["a"].mean) == (0.75, 0.25)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_likeness_is_cohens_kappa_over_all_choices_of_answers(k):
    """The slow twin counts, choice by choice, the pairs of outcomes on all prompts, and agreement by chance of them."""
    n, right = 4, {"a": [0, 1, 4, 2, 3], "b": [3, 0, 1, 0, 3], "c": [0, 0, 2, 1, 4]}
    found = kappas({name: tallies(*counts, n=n) for name, counts in right.items()}, k)
    for one, other in itertools.combinations(right, 2):
        pairs = [
            pair
            for a, b in zip(right[one], right[other], strict=True)
            for pair in itertools.product(map(any, choices(answers(n, a), k)), map(any, choices(answers(n, b), k)))
        ]
        observed = mean([a == b for a, b in pairs])
        by_chance = mean([a == b for (a, _), (_, b) in itertools.product(pairs, pairs)])
        assert found[one][other] == pytest.approx((observed - by_chance) / (1 - by_chance)), (one, other)
    assert {one: list(row) for one, row in found.items()} == {"a": ["b", "c"], "b": ["c"]}


def test_likeness_is_1_of_equal_sets_0_of_independent_ones_and_below_0_of_opposite_ones():
    a = tallies(1, 1, 0, 0, n=1)
    others = {"same": tallies(1, 1, 0, 0, n=1), "any": tallies(1, 0, 1, 0, n=1), "opposite": tallies(0, 0, 1, 1, n=1)}
    assert kappas({"a": a} | others, 1)["a"] == {"same": 1.0, "any": 0.0, "opposite": -1.0}


def test_two_that_solve_everything_or_nothing_have_no_likeness():
    nothing, everything = tallies(0, 0, n=2), tallies(2, 2, n=2)
    for pair in ({"a": nothing, "b": nothing}, {"a": everything, "b": everything}, {"a": [], "b": nothing}):
        assert math.isnan(kappas(pair, 1)["a"]["b"])
    assert kappas({"a": nothing, "b": everything}, 1) == {"a": {"b": 0.0}}


def test_policies_are_compared_on_the_prompts_that_all_have_answered():
    a = [PromptTally(prompt_id="p0", answered=2, right=1), PromptTally(prompt_id="p1", answered=1, right=1)]
    found = together({"b": tallies(0, 0, n=2), "a": a, "c": tallies(0, 0, n=2)}, 2)
    assert found is not None
    assert (found.prompts, found.union.mean) == (1, 1.0)
    assert together({"a": a, "b": []}, 1) is None


def test_an_interval_is_that_of_a_mean_over_prompts():
    """Of 400 prompts, half of them solved, a normal interval is 0.5 +- 1.96 * 0.5 / 20."""
    found = estimate([1.0, 0.0] * 200)
    assert (found.mean, found.prompts) == (0.5, 400)
    assert found.low == pytest.approx(0.451, abs=0.006)
    assert found.high == pytest.approx(0.549, abs=0.006)


def test_the_same_values_have_the_same_interval():
    values = np.random.default_rng(1).random(300)
    assert estimate(values) == estimate(values)


def test_an_interval_covers_the_mean_of_the_population_as_often_as_it_says():
    rng = np.random.default_rng(3)
    found = [estimate(rng.binomial(8, 0.3, size=60) / 8) for _ in range(200)]
    assert 0.90 <= mean([one.low <= 0.3 <= one.high for one in found]) <= 0.99


def test_equal_values_have_an_interval_without_width():
    found = estimate([1.0] * 7)
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
