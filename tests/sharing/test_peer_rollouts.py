"""Peers' groups as rows: places, numbers, and what the learner is told of their alignment."""

import pytest

from mrl.records.finish import FinishReason
from mrl.sharing.peer_rollouts import carry_groups, peer_example, rewards_of, rollouts_of


@pytest.fixture
def heard(make, peer, receiver):
    """Two own groups; two peers answered the first, one of them the second, with an answer that cannot be read."""
    groups = [make.group([0, 0], "p"), make.group([0, 0], "q")]
    one = make.rollout(make.sampled(peer, [1, 0], "p"), peer, source="a")
    other = make.rollout(make.sampled(receiver, [0, 1], "p"), receiver, source="b")
    broken = make.rollout(make.sampled(peer, [1, 0], "q"), peer, source="a")
    answers = [
        broken.record.answers[0],
        type(broken.record.answers[0])(completion=b"\xff", finish_reason=FinishReason.STOP, reward=0.5, advantage=0.0),
    ]
    record = type(broken.record)(
        **{name: getattr(broken.record, name) for name in broken.record.__struct_fields__} | {"answers": answers}
    )
    return groups, [rollouts_of([one, other]), [record]]


def test_rows_know_their_places(heard, make_setting):
    """`place` counts all answers to the prompt, `number` all of the source, rejected ones included in both."""
    groups, records = heard
    rows = carry_groups(groups, records, make_setting(), needs_trace=True)
    assert [[(row.source, row.place, row.number) for row in of_group] for of_group in rows.of_group] == [
        [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1)],
        [("a", 0, 2)],
    ]
    assert rewards_of(records[0]).tolist() == [1, 0, 0, 1]
    assert [row.answer.reward for row in rows.of_group[0]] == [1, 0, 0, 1]
    assert [(item.source, item.reason) for item in rows.tried] == [
        ("a", ""),
        ("a", ""),
        ("a", ""),
        ("a", "utf8"),
        ("b", ""),
        ("b", ""),
    ]
    assert [row.group.prompt_id for of_group in rows.of_group for row in of_group] == ["p"] * 4 + ["q"]


def test_shared_rows_are_those_trained_on_with_their_places(heard, make_setting):
    """Per peer in the order of its rows, whatever the order of training."""
    groups, records = heard
    rows = carry_groups(groups, records, make_setting(), needs_trace=True)
    first, second, third, _ = rows.of_group[0]
    shared = rows.shared([(third, 5), (second, 8), (first, 7)])
    assert [(one.source, one.places) for one in shared] == [("a", (7, 8)), ("b", (5,))]
    assert shared[0].batch.row(1).token_ids.tolist() == second.trace.token_ids.tolist()


def test_example_of_a_row(heard, make_setting):
    """The own prompt, the own tokens, one advantage, cut where asked."""
    groups, records = heard
    row = carry_groups(groups, records, make_setting(), needs_trace=True).of_group[0][0]
    size = row.trace.token_ids.size
    weights = make_setting().objective.weights(size - 1)
    example = peer_example(
        row,
        component="c",
        advantage=2.0,
        weights=weights,
        behaviour=row.trace.span_logprob.astype("f4"),
        spans=row.trace.span_of_token,
        phase=3,
        num_tokens=size - 1,
    )
    assert example.answer_token_ids.tolist() == row.trace.token_ids[:-1].tolist()
    assert example.prompt_token_ids.tolist() == [1, 2, 3]
    assert example.advantages.tolist() == [2.0] * (size - 1)
    assert len(example.behaviour_logprobs) == len(example.behaviour_spans) == len(example.weights) == size - 1
    assert (example.component, example.source, example.prompt_id, example.phase) == ("c", "a", "p", 3)


def test_answers_are_cut_at_the_own_limit(heard, make_setting):
    """No peer makes a row longer than the policy's own answers can be."""
    groups, records = heard
    rows = carry_groups(groups, records, make_setting(max_answer_tokens=3), needs_trace=True)
    assert {row.trace.token_ids.size for of_group in rows.of_group for row in of_group} <= {1, 2, 3}
