"""GRAFT: which groups are replaced, against brute force, and what replaced rows do."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.objectives.specs import Clipped, Grafted
from mrl.records.experience import RolloutRecord, SharedAnswer
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version
from mrl.sharing.graft import choose_grafts
from tests.support.retokenizing import retokenize

N = 3
PASSED = st.integers(0, N)


def own(passed):
    answers = [
        Answer(
            token_ids=b"",
            logprobs=b"",
            versions=[],
            completion=b"x",
            finish_reason=FinishReason.STOP,
            reward=float(i < passed),
        )
        for i in range(N)
    ]
    return ScoredGroup(ticket="t", prompt_id="p", task="w", prompt_token_ids=b"", answers=answers)


def theirs(passed, source):
    answers = [
        SharedAnswer(completion=b"x", finish_reason=FinishReason.STOP, reward=float(i < passed), advantage=0.0)
        for i in range(N)
    ]
    tags = {"record_id": "r", "fingerprint": "f", "prompt_id": "p", "task": "w", "created_unix_s": 0.0}
    return RolloutRecord(source=source, oldest=Version(0, 0), newest=Version(0, 0), answers=answers, **tags)


def top_with_ties(candidates, m):
    """The smallest set of best candidates with at least m members that no equal is left out of, by trying all sizes."""
    if m == 0:
        return set()
    for size in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(sorted(candidates), size):
            rest = candidates.keys() - set(chosen)
            if size >= m and all(candidates[a] > candidates[b] for a in chosen for b in rest):
                return set(chosen)
    return set()


def slow_choice(own_passed, peers_passed, balance, one_way=()):
    """Prompt -> peer: C(A -> B) and C(B -> A) per peer, the top m of the first, the best peer; a run that ended has no
    B -> A, and no balance."""
    wins = {}
    for source, passed in sorted(peers_passed.items()):
        forward = {q: a for q, a in passed.items() if own_passed[q] == 0 and 1 <= a < N}
        backward = [q for q, a in passed.items() if a == 0 and 1 <= own_passed[q] < N]
        m = min(len(forward), len(backward)) if balance and source not in one_way else len(forward)
        for q in top_with_ties(forward, m):
            if q not in wins or forward[q] > wins[q][0]:
                wins[q] = (forward[q], source)
    return {q: source for q, (_, source) in wins.items()}


@given(
    own_passed=st.lists(st.sampled_from([0, 0, 1, N]), min_size=1, max_size=6),
    answers=st.data(),
    balance=st.booleans(),
    one_way=st.sets(st.sampled_from("ab")),
)
def test_choice_equals_brute_force(own_passed, answers, balance, one_way):
    """Selection, balance with ties, and the choice among two peers, each of which answered some of the prompts."""
    told = {source: answers.draw(st.dictionaries(st.integers(0, len(own_passed) - 1), PASSED)) for source in ("a", "b")}
    heard = [[theirs(told[s][q], s) for s in ("a", "b") if q in told[s]] for q in range(len(own_passed))]
    found = choose_grafts([own(passed) for passed in own_passed], heard, balance=balance, one_way=one_way)
    assert {q: record.source for q, record in found.items()} == slow_choice(own_passed, told, balance, one_way)


def test_ties_are_included():
    """m = 1 and two prompts with as many successes: both are grafted."""
    groups = [own(0), own(0), own(0), own(1)]
    heard = [[theirs(2, "a")], [theirs(2, "a")], [theirs(1, "a")], [theirs(0, "a")]]
    assert sorted(choose_grafts(groups, heard, balance=True)) == [0, 1]
    assert sorted(choose_grafts(groups, heard, balance=False)) == [0, 1, 2]


@pytest.fixture
def graft(build, make, receiver, peer, lab, step_of):
    """One failed own group and a peer's mixed group, whose sequence ratio is `ratio`."""
    model = lab.model()
    text = b"copy: hay"
    ids = retokenize(receiver, text, finished=True, max_tokens=64).token_ids
    mean = float(model.sampler_logprobs(ids).mean())

    def graft(ratio: float, **parameters):
        told = make.sampled(peer, [1.0, 0.0], texts=[text, b"z"], logprobs=mean - math.log(ratio))
        regime = build("graft", **({"balance": False} | parameters))
        absorbed = step_of(regime, [make.group([0, 0])], [make.rollout(told, peer)])
        only = type(absorbed)(absorbed.examples[:1], absorbed.denominators)
        return absorbed, lab.gradient(only, regime, model)

    graft.model, graft.ids = model, ids
    return graft


def test_failed_group_is_replaced_whole(graft):
    """The peer's rows with the advantages of their source, after all own rows, under one denominator."""
    absorbed, _ = graft(0.9)
    assert [row.component for row in absorbed.examples] == ["grafted"] * 2
    assert [row.advantages[0] for row in absorbed.examples] == pytest.approx([0.70711, -0.70711], rel=1e-4)
    assert {row.phase for row in absorbed.examples} == {1}
    assert absorbed.denominators == {"policy_gradient": 2.0, "grafted": 2.0}
    assert absorbed.counts["sharing/grafted_prompts"] == 1


@pytest.mark.parametrize(("ratio", "weight"), [(0.79, 0.0), (0.81, 0.81), (0.99, 0.99), (1.5, 1.0)])
def test_rows_weigh_by_a_gated_capped_ratio(graft, lab, ratio, weight):
    """w = 1[s > floor] min(s, 1): rejected rows contribute nothing, no row more than an own one."""
    absorbed, found = graft(ratio)
    if not weight:
        assert lab.is_zero(found)
        return
    scale = -weight * float(absorbed.examples[0].advantages[0]) / 2
    lab.assert_same(
        found, lab.score_of(graft.model, lambda model: scale * model.logprobs(np.array([3]), graft.ids).mean())
    )


def test_floor_is_the_tables(graft, lab):
    """Without a floor every row is trained on."""
    _, found = graft(0.1, floor=0.0)
    assert not lab.is_zero(found)


@pytest.mark.parametrize("peer_rewards", [[0, 0], [1, 1], None])
def test_no_eligible_prompt_leaves_the_own_objective(build, make, receiver, lab, step_of, peer_rewards):
    """A peer that failed, or always succeeded, or said nothing: rows, denominators and gradient are the own."""
    model = lab.model()
    groups = [make.group([0, 0]), make.sampled(receiver, [1, 0], "q", logprobs=model.sampler_logprobs)]
    received = [make.rollout(make.sampled(receiver, peer_rewards), receiver)] if peer_rewards else []
    graft, alone = build("graft"), build("independent")
    found, expected = step_of(graft, groups, received), step_of(alone, groups)
    assert found.denominators == dict.fromkeys(("policy_gradient", "grafted"), 4.0)
    lab.assert_same(lab.gradient(found, graft, model), lab.gradient(expected, alone, model))


def test_balance_needs_a_prompt_the_other_way(build, make, receiver, step_of):
    """What the peer would graft here limits what is grafted from it."""
    groups = [make.group([0, 0]), make.group([1, 0], "q")]
    one_way = [make.rollout(make.sampled(receiver, [1, 0]), receiver)]
    both = [*one_way, make.rollout(make.sampled(receiver, [0, 0], "q"), receiver)]
    assert step_of(build("graft"), groups, one_way).counts["sharing/grafted_prompts"] == 0
    absorbed = step_of(build("graft"), groups, both)
    assert [row.component for row in absorbed.examples] == ["policy_gradient"] * 2 + ["grafted"] * 2
    assert [row.prompt_id for row in absorbed.examples] == ["q", "q", "p", "p"]
    assert absorbed.denominators == {"policy_gradient": 4.0, "grafted": 4.0}
    assert [row.source for row in absorbed.examples] == ["own"] * 2 + ["peer"] * 2


def test_term_has_the_own_clips_and_no_second_correction(build, make_context):
    """The gate is the correction; GSPO's narrow bounds are not those of tokens."""
    dapo = build("graft", make_context(method="dapo", dual_clip=3), floor=0.7).components[1]
    assert dapo.term == Grafted(Clipped(0.2, 0.28, dual_clip=3), floor=0.7)
    assert build("graft", make_context(method="gspo")).components[1].term == Grafted(Clipped(), floor=0.8)


def test_publishes_every_group_whole(build, make, receiver):
    """Peers need failures too: these say what the balance is."""
    (record,) = build("graft").publish(make.sampled(receiver, [0, 0]), make.author())
    assert [answer.reward for answer in record.answers] == [0, 0]
