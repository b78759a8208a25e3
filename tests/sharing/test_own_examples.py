import msgspec
import numpy as np
import pytest

from mrl.records.chosen_experts import ChosenExperts
from mrl.records.episodes import EpisodeSegment
from mrl.sharing.own_examples import own_advantages, own_examples


@pytest.fixture
def rows(make_context):
    """Own rows of groups under an objective."""

    def rows(groups, *, advantages=None, keep_idle=False, **objective):
        return own_examples(groups, make_context(**objective), advantages=advantages, keep_idle=keep_idle)

    return rows


def test_own_rows_carry_grpo_credit(rows, make_group):
    """Each answer is one row: advantage on every token, weights 1/T, the behaviour's log-probabilities as sampled."""
    own = rows([make_group([1, 0, 0, 0])])
    examples = own.examples
    assert own.lengths == [2, 3, 2, 3]
    assert [row.answer_token_ids.tolist() for row in examples] == [[10, 11], [11, 11, 12], [12, 11], [13, 11, 12]]
    assert [row.weights.sum() for row in examples] == pytest.approx([1, 1, 1, 1])
    assert [set(row.advantages.round(3).tolist()) for row in examples] == [{1.5}, {-0.5}, {-0.5}, {-0.5}]
    assert examples[1].behaviour_logprobs.tolist() == [-1.5] * 3
    assert {row.source for row in examples} == {"own"}
    assert {row.component for row in examples} == {"policy_gradient"}
    assert {row.phase for row in examples} == {0}
    assert examples[0].prompt_token_ids.tolist() == [1, 2, 3]
    assert all(row.behaviour_spans is row.teacher_logprobs is row.teacher_spans is None for row in examples)


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_tokens_weigh_alike_where_answers_are_not_averaged(rows, make_group, aggregation):
    """Only the mean over answers divides by their lengths."""
    assert {w for row in rows([make_group([1, 0])], aggregation=aggregation).examples for w in row.weights} == {1.0}


def test_uniform_groups_count_but_are_left_out(rows, make_group):
    """Rows of zero advantage are not trained, and still divide the others."""
    own = rows([make_group([0] * 4), make_group([1] * 4), make_group([0, 1])])
    assert len(own.examples) == 2
    assert len(own.lengths) == 10


@pytest.mark.parametrize("how", [{"kl_coefficient": 0.01}, {"entropy_coefficient": 0.01}, {"keep_idle": True}])
def test_rows_that_are_regularised_or_keep_a_place_stay(rows, make_group, how):
    """A row without an advantage is still held to the reference, or keeps its place in the order of minibatches."""
    own = rows([make_group([0] * 3)], **how)
    assert len(own.examples) == 3
    assert not any(row.advantages.any() for row in own.examples)


def test_advantages_of_a_regime_replace_the_own(rows, make_group):
    """They also decide which rows are left out."""
    groups = [make_group([1, 0]), make_group([0, 0])]
    own = rows(groups, advantages=[np.zeros(2, np.float32), np.array([3, -1], np.float32)])
    assert [row.advantages[0] for row in own.examples] == [3, -1]


def test_own_advantages_see_overlong_answers(make_context, make_group):
    """The penalty counts before the mean is taken."""
    context = make_context(max_answer_tokens=3, overlong_buffer_tokens=1, advantage="group_mean")
    assert own_advantages(make_group([1, 1]), context.objective).tolist() == [0.5, -0.5]


def test_no_groups_no_rows(rows):
    """An empty batch has neither."""
    own = rows([])
    assert own.examples == own.lengths == []


def test_answers_that_were_cut_can_be_masked(rows, make_group):
    """They leave no row and no length; what the others are worth is as before, theirs in the baseline included."""
    whole, cut = make_group([1, 0], "p"), make_group([1, 0], "q", finished=False)
    mixed = msgspec.structs.replace(whole, answers=[whole.answers[0], cut.answers[1]])
    kept, masked = (rows([mixed, cut], mask_cut_answers=mask) for mask in (False, True))

    assert [len(kept.examples), len(masked.examples)] == [4, 1]
    assert (kept.lengths, masked.lengths) == ([2, 3, 2, 3], [2])
    assert masked.examples[0].advantages.tolist() == kept.examples[0].advantages.tolist()


@pytest.mark.parametrize(
    ("ending", "is_masked"),
    [("done", False), ("max_turns", False), ("raised", False), ("cut", True), ("max_tokens", True)],
)
def test_episodes_are_masked_where_a_limit_of_tokens_ended_them(rows, make_group, ending, is_masked):
    """Not where all turns were taken: else a game of so many turns would leave nothing to train on."""
    group = make_group([1, 0], finished=ending == "done")
    turn = EpisodeSegment(num_tokens=2, is_sampled=True, messages=())
    played = msgspec.structs.replace(group.answers[0], segments=[turn], ending=ending)
    played = msgspec.structs.replace(group, answers=[played, played])
    own = rows([played], advantages=[np.ones(2, np.float32)], mask_cut_answers=True)
    assert len(own.examples) == len(own.lengths) == (0 if is_masked else 2)


def test_a_masked_answer_may_keep_its_place(rows, make_group):
    """Where rows are paired with something else, or their order counts: it weighs nothing."""
    own = rows([make_group([1, 0], finished=False)], mask_cut_answers=True, keep_idle=True)
    assert [row.weights.sum() for row in own.examples] == [0, 0]
    assert own.lengths == []


def test_rows_have_the_experts_of_their_answers_and_share_those_of_the_prompt(rows, make_group):
    """As they came; those of another number of tokens are none."""
    experts = [np.arange(4 * size, dtype=np.uint8).reshape(size, 4) for size in (2, 3)]
    of_prompt = np.full((2, 4), 300, dtype=np.uint16)
    group = make_group([1, 0])
    answers = [
        msgspec.structs.replace(answer, experts=ChosenExperts.packed(told))
        for answer, told in zip(group.answers, experts, strict=True)
    ]
    told = msgspec.structs.replace(group, answers=answers, prompt_experts=ChosenExperts.packed(of_prompt))

    first, second = rows([told]).examples
    for row, wanted in zip((first, second), experts, strict=True):
        np.testing.assert_array_equal(row.experts, wanted)
    np.testing.assert_array_equal(first.prompt_experts, of_prompt)
    assert first.prompt_experts is second.prompt_experts
    odd = msgspec.structs.replace(told, prompt_experts=ChosenExperts.packed(of_prompt[:1]))
    assert rows([odd]).examples[0].prompt_experts is None
    assert all(row.experts is row.prompt_experts is None for row in rows([group]).examples)
