"""Peers' groups on the prompts of own groups: order, rewards, and what is usable."""

import pytest
from msgspec import structs

from mrl.records.experience import MAX_COMPLETION_BYTES, Received
from mrl.sharing.peer_groups import PeerGroupParameters
from mrl.sharing.peer_rollouts import RolloutReader, peer_rewards


@pytest.fixture
def read(make, peer, receiver):
    """Traces for two own groups; two peers answered the first, one of them the second, with a text that is none."""

    def read(context):
        groups = [make.group([0, 0], "p"), make.group([0, 0], "q")]
        one = make.rollout(make.sampled(peer, [1, 0], "p"), peer, source="a")
        other = make.rollout(make.sampled(receiver, [0, 1], "p"), receiver, source="b")
        third = make.rollout(make.sampled(peer, [1, 0.5], "q"), peer, source="a").record
        broken = structs.replace(third.answers[1], completion=b"\xff", trace=None)
        reader = RolloutReader(PeerGroupParameters(), context)
        for group in groups:
            reader.asks(group)
        reader.hear([other, one, Received(structs.replace(third, answers=[third.answers[0], broken]), 0)], step=0)
        return reader.take_traces(groups, needs_trace=True)

    return read


def test_all_answers_stand_in_order(read, make_context):
    """By own group, then by peer, then as in the record; those that cannot be used among them, with their rewards."""
    context = make_context(peers=("a", "b"))
    traces = read(context)
    found = [[(trace.source, trace.reward, trace.is_usable) for trace in of_group] for of_group in traces]
    assert found == [
        [("a", 1, True), ("a", 0, True), ("b", 0, True), ("b", 1, True)],
        [("a", 1, True), ("a", 0.5, False)],
    ]
    assert [peer_rewards(of_group, context).tolist() for of_group in traces] == [[1, 0, 0, 1], [1, 0.5]]


def test_answers_are_cut_at_the_own_limit(read, make_context):
    """No peer makes a row longer than the policy's own answers can be."""
    traces = read(make_context(max_answer_tokens=3, peers=("a", "b")))
    assert {trace.num_tokens for of_group in traces for trace in of_group if trace.is_usable} <= {1, 2, 3}


def test_an_answer_too_long_to_cross_costs_the_others_nothing(make, peer, make_context):
    """Its reward comes alone: with its text no receiver could read the record."""
    group = make.sampled(peer, [1, 0.5], "p")
    long = structs.replace(group.answers[1], completion=b" " * (MAX_COMPLETION_BYTES + 1))
    shared = make.rollout(structs.replace(group, answers=[group.answers[0], long]), peer, source="a")
    context = make_context(peers=("a",))
    reader = RolloutReader(PeerGroupParameters(), context)
    own = make.group([0, 0], "p")
    reader.asks(own)
    reader.hear([shared], step=0)

    [traces] = reader.take_traces([own], needs_trace=True)
    assert [(trace.reward, trace.rejected) for trace in traces] == [(1, ""), (0.5, "withheld")]
