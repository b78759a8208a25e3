"""Rewards by the vote: when they are found, from whose votes, and what the regime underneath is given."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mrl.metrics.names import is_known
from mrl.records.codec import decode, encode
from mrl.records.experience import Received, ValueRecord, VoteRecord, experience_decoder
from mrl.records.version import Version
from mrl.sharing.advantages import group_advantages
from mrl.sharing.independent import IndependentRegime
from mrl.sharing.xgrpo import cross_advantages


@pytest.fixture
def voted(make_context):
    """The context of policy "own", with the task "words" voted on."""

    def voted(**how):
        return replace(make_context(**how), voted={"words": 0.0})

    return voted


@pytest.fixture
def said(make):
    """An own group whose answers say this, with the rewards that a worker gives: none."""

    def said(choices, prompt_id="p", **how):
        group = make.group([0.0] * len(choices), prompt_id, **how)
        answers = [msgspec.structs.replace(a, choice=c) for a, c in zip(group.answers, choices, strict=True)]
        return msgspec.structs.replace(group, answers=answers)

    return said


def vote(choices, prompt_id="p", *, source="peer", step=0, age=0, **tags):
    """A peer's vote as the learner gets it."""
    fields = {
        "record_id": f"{source}/{step}", "source": source, "oldest": Version(0, step), "newest": Version(0, step),
        "fingerprint": "f", "prompt_id": prompt_id, "task": "words", "created_unix_s": 0.0,
    }  # fmt: skip
    record = VoteRecord(**fields | tags, choices=choices)
    return Received(decode(encode(record), experience_decoder), age)


def rewards_of(absorbed):
    return [[answer.reward for answer in group.answers] for group in absorbed.groups]


def test_a_peer_s_vote_overrules_the_own_majority(build, voted, said, step_of):
    """Three of four say a; a peer that always says b is believed, and the own advantages follow."""
    regime = build("independent", voted())
    absorbed = step_of(regime, [said(["a", "a", "a", "b"])], [vote(["b"] * 4)])
    assert rewards_of(absorbed) == [[0.0, 0.0, 0.0, 1.0]]
    expected = group_advantages(np.array([0.0, 0.0, 0.0, 1.0]))
    assert [row.advantages[0] for row in absorbed.examples] == expected.tolist()
    assert absorbed.counts["vote/overruled_share"] == absorbed.counts["vote/complete_share"] == 1.0
    assert absorbed.counts["vote/self_consistency"] == 0.75
    assert absorbed.counts["sharing/hit_rate"] == 1.0
    assert absorbed.forget == ["p"]
    assert all(is_known(name) for name in absorbed.counts)


def test_without_a_vote_in_time_the_own_majority_decides_and_is_counted(build, voted, said, step_of):
    """The group waits as long as the peer is silent; then it is trained alone, and a late vote changes nothing."""
    regime, group = build("independent", voted()), said(["a", "a", "b", ""])
    assert regime.asks(group) == ["p"] == regime.awaited()
    assert not regime.is_settled(group)
    absorbed = step_of(regime, [group])
    assert rewards_of(absorbed) == [[1.0, 1.0, 0.0, 0.0]]
    assert absorbed.counts["vote/complete_share"] == absorbed.counts["sharing/hit_rate"] == 0.0
    late = step_of(regime, [said(["a", "b"], "q")], [vote(["b"] * 4)])
    assert late.counts["regime/ignored_late"] == 1.0


def test_a_group_whose_prompt_was_closed_is_not_counted_as_voted_on(build, voted, said):
    """Nobody was asked about it any more: its own majority decides."""
    absorbed = build("independent", voted()).absorb([said(["a", "a", "b"])], step=0, rng=np.random.default_rng(0))
    assert rewards_of(absorbed) == [[1.0, 1.0, 0.0]]
    assert absorbed.counts["vote/complete_share"] == 0.0


def test_one_policy_alone_waits_for_nobody(build, voted, said, step_of):
    """Its rewards are the majority of its own group."""
    regime, group = build("independent", voted(peers=())), said(["a", "b", "b"])
    regime.asks(group)
    assert regime.is_settled(group)
    assert rewards_of(step_of(regime, [group])) == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize(("own", "peer"), [(["a"] * 3, ["a"] * 2), (["a", "b"], ["a", "b"]), (["", ""], ["a"])])
def test_who_all_agree_or_none_elect_moves_nothing(build, voted, said, step_of, own, peer):
    """All rewarded, or nobody: no row is left to train on."""
    absorbed = step_of(build("independent", voted()), [said(own)], [vote(peer)])
    assert absorbed.examples == []
    assert absorbed.counts["vote/tied_share"] == float(own == ["a", "b"])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"source": "stranger"}, "other"),
        ({"source": "own"}, "own"),
        ({"prompt_id": "q"}, "late"),
        ({"age": 5}, "stale"),
    ],
)
def test_votes_that_have_no_say(build, voted, said, step_of, how, reason):
    """Of a policy that is not in the run, of oneself, on another prompt, or too old."""
    absorbed = step_of(build("independent", voted()), [said(["a", "a", "b"])], [vote(["b"] * 9, **how)])
    assert rewards_of(absorbed) == [[1.0, 1.0, 0.0]]
    assert absorbed.counts[f"regime/ignored_{reason}"] == 1.0


def test_no_one_can_claim_to_be_consistent(build, voted, said, step_of):
    """How consistent a source is follows from its choices; a field that says so is not read."""
    raw = msgspec.msgpack.decode(encode(vote(["b", "c", "d", "e"]).record)) | {"self_consistency": 1000.0}
    claimed = Received(decode(msgspec.msgpack.encode(raw), experience_decoder), 0)
    absorbed = step_of(build("independent", voted()), [said(["a", "a", "b"])], [claimed])
    assert rewards_of(absorbed) == [[1.0, 1.0, 0.0]]


def test_a_large_group_has_no_more_votes_than_a_small_one(build, voted, said, step_of):
    """A peer with a hundred answers that are less of one mind is one voice all the same."""
    absorbed = step_of(build("independent", voted()), [said(["a", "a", "a"])], [vote(["b"] * 99 + ["c"])])
    assert rewards_of(absorbed) == [[1.0, 1.0, 1.0]]


def test_the_newest_vote_of_a_peer_counts(build, voted, said, step_of):
    """One that comes later and is older does not replace it."""
    votes = [vote(["b"] * 4, step=2), vote(["a"] * 4, step=1)]
    assert rewards_of(step_of(build("independent", voted()), [said(["a", "b", "c"])], votes)) == [[0.0, 1.0, 0.0]]


def test_xgrpo_measures_against_the_rewards_that_peers_votes_come_to(build, voted, said, step_of):
    """The peer publishes no rewards: they follow from what it said, once an answer is elected."""
    regime = build("xgrpo", voted())
    absorbed = step_of(regime, [said(["a", "b", "c", "c"])], [vote(["b", "b", "b", "a"], age=1)])
    expected = cross_advantages(np.array([0.0, 1.0, 0.0, 0.0]), [np.array([1.0, 1.0, 1.0, 0.0])], scales=[1.0])
    assert rewards_of(absorbed) == [[0.0, 1.0, 0.0, 0.0]]
    assert [row.advantages[0] for row in absorbed.examples] == expected.tolist()
    assert absorbed.counts["sharing/hit_prompts"] == 1.0
    assert absorbed.forget == ["p"]


@pytest.mark.parametrize("name", ["independent", "xgrpo"])
def test_all_own_groups_on_a_prompt_are_rewarded_by_one_vote(build, voted, said, step_of, name):
    """In one step and in two: what the peer said holds for each of them."""
    regime, groups = build(name, voted()), [said(["a", "a", "a", "b"]) for _ in range(3)]
    for group in groups[2:]:
        regime.asks(group)
    absorbed = step_of(regime, groups[:2], [vote(["b"] * 4)])
    assert rewards_of(absorbed) == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert absorbed.counts["sharing/hit_rate"] == absorbed.counts["vote/complete_share"] == 1.0
    last = regime.absorb(groups[2:], step=1, rng=np.random.default_rng(0))
    assert rewards_of(last) == [[0.0, 0.0, 0.0, 1.0]]
    assert list(last.forget) == ["p"]


def test_rewards_that_a_peer_tells_of_a_voted_task_are_ignored(build, voted, said, make, step_of):
    """However new: those that follow from its votes hold."""
    told = make.value([1.0] * 8, step=9)
    absorbed, alone = (
        step_of(build("xgrpo", voted()), [said(["a", "b", "c", "c"])], [vote(["b", "b", "b", "a"]), *more])
        for more in ([told], [])
    )
    assert [row.advantages[0] for row in absorbed.examples] == [row.advantages[0] for row in alone.examples]
    assert absorbed.counts["regime/ignored_other"] == 1.0


def test_a_tie_moves_nothing_also_where_failures_are_punished(build, make_context, said, step_of):
    """Whoever says nothing has no other reward than the rest."""
    regime = build("independent", replace(make_context(), voted={"words": -1.0}))
    assert step_of(regime, [said(["a", "b", ""])]).examples == []
    assert rewards_of(step_of(regime, [said(["a", "a", ""], "q")])) == [[1.0, 1.0, -1.0]]


@pytest.mark.parametrize("name", ["independent", "xgrpo"])
def test_nothing_that_rewards_decide_is_published(build, voted, said, make, name):
    """One vote, and no value record; it says what was read out of the answers, and nothing of them."""
    [record] = build(name, voted()).publish(said(["a", "", "a"], step=3), make.author("qwen"))
    assert record == VoteRecord(
        record_id="id0", source="qwen", oldest=Version(0, 3), newest=Version(0, 3), fingerprint="print",
        prompt_id="p", task="words", created_unix_s=12.5, choices=["a", "", "a"],
    )  # fmt: skip
    assert len(encode(record)) < 400


def test_tasks_with_a_verifier_of_their_own_pass_through(build, voted, said, make, step_of):
    """Beside a voted task: published, asked, settled and trained on as without it."""
    regime, plain = build("xgrpo", voted()), build("xgrpo")
    other = msgspec.structs.replace(make.group([1.0, 0.0, 0.0], "q"), task="sums")
    assert regime.publish(other, make.author()) == plain.publish(other, make.author())
    assert isinstance(regime.publish(other, make.author())[0], ValueRecord)
    assert regime.asking.kinds == ("vote", "value")
    assert regime.asks(other) == ["q"]
    assert not regime.is_settled(other)
    value = make.value([1.0, 1.0], "q")
    value = msgspec.structs.replace(value, record=msgspec.structs.replace(value.record, task="sums"))
    absorbed = step_of(regime, [said(["a", "a", "b"]), other], [vote(["a"]), value])
    assert rewards_of(absorbed) == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    alone = step_of(plain, [other], [value])
    rows = [row for row in absorbed.examples if row.prompt_id == "q"]
    assert [row.advantages.tolist() for row in rows] == [row.advantages.tolist() for row in alone.examples]
    assert sorted(absorbed.forget) == ["p", "q"]
    assert (absorbed.counts["sharing/asked_prompts"], absorbed.counts["sharing/hit_prompts"]) == (2.0, 2.0)


def test_without_a_voted_task_the_regime_is_the_plain_one(build):
    """Nothing is wrapped."""
    assert type(build("independent")) is IndependentRegime


def test_the_totals_outlive_a_restart(build, voted, said, step_of):
    """Those of the vote and of the regime underneath."""
    first = build("xgrpo", voted())
    step_of(first, [said(["a", "b"])], [vote(["a"])])
    second = build("xgrpo", voted())
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert step_of(second, [said(["a", "b"], "q")]).counts["sharing/hit_rate"] == 0.5
