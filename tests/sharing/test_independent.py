import numpy as np
import pytest

from mrl.sharing.independent import IndependentParameters, IndependentRegime, length_mean_weights, own_rows


def test_own_rows_carry_grpo_credit(make_group):
    """Each answer is one row: advantage on every token, weights 1/T, the behaviour's log-probabilities as sampled."""
    examples, denominator = own_rows([make_group([1, 0, 0, 0])], source="own")
    assert denominator == 4
    assert [row.answer_token_ids.tolist() for row in examples] == [[10, 11], [11, 11, 12], [12, 11], [13, 11, 12]]
    assert [row.weights.sum() for row in examples] == pytest.approx([1, 1, 1, 1])
    assert [set(row.advantages.round(3).tolist()) for row in examples] == [{1.5}, {-0.5}, {-0.5}, {-0.5}]
    assert examples[1].behaviour_logprobs.tolist() == [-1.5] * 3
    assert {row.source for row in examples} == {"own"}
    assert {row.component for row in examples} == {"policy_gradient"}
    assert examples[0].prompt_token_ids.tolist() == [1, 2, 3]


def test_uniform_groups_count_but_are_left_out(make_group):
    """Rows of zero advantage are not trained, and still divide the others."""
    examples, denominator = own_rows([make_group([0] * 4), make_group([1] * 4), make_group([0, 1])], source="own")
    assert len(examples) == 2
    assert denominator == 10


def test_denominator_is_never_zero(make_group):
    """A batch without groups divides by one."""
    assert own_rows([], source="own") == ([], 1.0)


def test_independent_shares_nothing(make_group, make_success):
    """It publishes nothing, asks for nothing, keeps nothing, and does not look at what it receives."""
    regime = IndependentRegime(IndependentParameters(), policy="own")
    failed = make_group([0, 0])
    assert regime.asks(failed) == regime.awaited() == regime.publish(make_group([1, 1]), None) == []
    absorbed = regime.absorb([failed], [make_success()], step=3, rng=np.random.default_rng(0))
    assert absorbed.examples == absorbed.forget == absorbed.rescued == []
    assert absorbed.denominators == {"policy_gradient": 2.0}
    assert regime.state() == {}
    assert regime.reads == frozenset()
    assert regime.asking is None


@pytest.mark.parametrize(("num_tokens", "rows", "expected"), [(4, 1, 0.25), (4, 2, 0.125), (1, 1, 1.0)])
def test_length_mean_weights(num_tokens, rows, expected):
    """Weights 1 / (T k); an empty row has none."""
    assert length_mean_weights(num_tokens, rows_sharing=rows).tolist() == [expected] * num_tokens
    assert length_mean_weights(0).size == 0
