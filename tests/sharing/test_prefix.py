"""Prefixes of peers' successes: which states are handed out, and what the groups from there are worth."""

import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import pack_array, unpack_array
from mrl.records.episodes import EpisodeSegment, Message
from mrl.records.experience import EpisodeRecord, Received, SharedTurn
from mrl.records.rollouts import Continuation
from mrl.records.version import Version, VersionSpan
from mrl.sharing.peer_episodes import RenderedEpisode

ROW_ARRAYS = ("prompt_token_ids", "answer_token_ids", "advantages", "weights", "behaviour_logprobs", "is_trained")


class Spelling:
    """Every message as one token; refuses what it is told to."""

    def __init__(self, refuses=""):
        self.refuses = refuses

    def spell(self, turns):
        is_sampled = np.array([turn.is_sampled for turn in turns])
        return self.refuses or RenderedEpisode(np.arange(len(turns), dtype=np.int32), is_sampled)


def said(num_turns: int, words: str = "a") -> list[SharedTurn]:
    """So many turns of a policy, and what an environment says between them."""
    turns = []
    for place in range(num_turns):
        turns.append(SharedTurn(is_sampled=True, messages=(Message("assistant", f"{words}{place}"),)))
        turns.append(SharedTurn(is_sampled=False, messages=(Message("user", f"told {place}"),)))
    return turns[:-1]


def success(turns, prompt_id="p", *, source="peer", step=0, reward=1.0, age=0, number=0) -> Received:
    version = Version(0, step)
    tags = {"oldest": version, "newest": version, "fingerprint": "f", "task": "words", "created_unix_s": 0.0}
    record_id = f"{source}:{prompt_id}:{step}:{number}"
    record = EpisodeRecord(
        **tags, record_id=record_id, source=source, prompt_id=prompt_id, turns=turns, verifier="v", reward=reward
    )
    return Received(record, age)


@pytest.fixture
def prefix(build, make_context):
    """The regime of a policy that spells episodes so."""

    def make(renderer=None, objective=None, **parameters):
        context = replace(make_context(**(objective or {})), renderer=renderer or Spelling())
        return build("prefix", context, **parameters)

    return make


@pytest.fixture
def make_episodes(make_group):
    """A group of episodes of two own turns; `continuation`: where they began."""

    def make(rewards, prompt_id="p", *, step=0, continuation=None):
        group = make_group(rewards, prompt_id, step=step)
        answers = [
            structs.replace(
                answer,
                token_ids=pack_array([20, 21, 22, 23 + place], "i4"),
                logprobs=pack_array([-0.5, -0.25, -1.0], "f4"),
                versions=[VersionSpan(3, Version(0, step))],
                segments=[
                    EpisodeSegment(num_tokens=1, is_sampled=True, messages=(Message("assistant", f"one {place}"),)),
                    EpisodeSegment(num_tokens=1, is_sampled=False, messages=(Message("user", "told"),)),
                    EpisodeSegment(num_tokens=2, is_sampled=True, messages=(Message("assistant", "two"),)),
                ],
            )
            for place, answer in enumerate(group.answers)
        ]
        return structs.replace(group, answers=answers, continuation=continuation)

    return make


def continuation(num_given=1, num_left=1, prompt_id="p") -> Continuation:
    turns = said(num_given + num_left)[: 2 * num_given]
    return Continuation(prompt_id=prompt_id, source="peer", turns=turns, num_left=num_left)


def absorbed_of(regime, groups, received=(), *, step=0, seed=0):
    for group in groups:
        regime.asks(group)
    regime.hear(list(received), step=step)
    return regime.absorb(groups, step=step, rng=np.random.default_rng(seed))


def assert_same_rows(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in ROW_ARRAYS)
        assert (one.component, one.prompt_id, one.source) == (other.component, other.prompt_id, other.source)


@pytest.mark.parametrize("rewards", [[1, 0, 0.5], [0, 0, 0]])
def test_where_nobody_failed_or_no_peer_succeeded_it_is_independent_bit_for_bit(prefix, build, make_episodes, rewards):
    """Rows, credit and denominator are those of GRPO, nothing is handed out, and the generator is untouched."""
    groups = [make_episodes([1, 0, 0.5], "o"), make_episodes(rewards, "p")]
    elsewhere = [success(said(3), "elsewhere")]
    regime, generator = prefix(), np.random.default_rng(0)
    for group in groups:
        regime.asks(group)
    regime.hear(elsewhere, step=0)
    found = regime.absorb(groups, step=0, rng=generator)
    expected = absorbed_of(build("independent"), groups)

    assert_same_rows(found.examples, expected.examples)
    assert found.denominators == expected.denominators
    assert list(found.continuations) == []
    assert generator.bit_generator.state == np.random.default_rng(0).bit_generator.state


def test_a_failed_start_state_is_gone_on_with_behind_a_peers_first_turns(prefix, make_episodes):
    """What the environment said to the last of them included; the failure is settled, and nothing of it is trained."""
    regime = prefix()
    absorbed = absorbed_of(regime, [make_episodes([0, 0])], [success(said(2))])

    assert absorbed.continuations == [Continuation(prompt_id="p", source="peer", turns=said(2)[:2], num_left=1)]
    assert absorbed.examples == []
    assert (absorbed.forget, regime.awaited()) == (["p"], [])
    assert absorbed.counts["prefix/continuations"] == absorbed.counts["sharing/hit_prompts"] == 1
    assert absorbed.counts["sharing/hit_rate_from/peer"] == 1


def test_every_number_of_turns_but_all_is_drawn(prefix, make_episodes):
    """Evenly; by the learner's generator alone."""
    counts = np.zeros(5)
    for seed in range(400):
        found = absorbed_of(prefix(), [make_episodes([0, 0])], [success(said(4))], seed=seed)
        again = absorbed_of(prefix(), [make_episodes([0, 0])], [success(said(4))], seed=seed)
        assert found.continuations == again.continuations
        counts[found.continuations[0].num_given] += 1
    assert counts[[0, 4]].tolist() == [0, 0]
    assert counts[1:4].min() > 100, "of 400, 133 are expected of each"


def test_backwards_the_policy_plays_one_turn_more_when_it_succeeds(prefix, make_episodes):
    """It begins before the last turn; eight groups of the task decide, half of which must have a success."""
    regime, given = prefix(start="backwards"), []
    for step in range(24):
        (one,) = absorbed_of(
            regime, [make_episodes([0, 0], step=step)], [success(said(4), number=step)], step=step
        ).continuations
        given.append(one.num_given)
        regime.asks(make_episodes([0, float(step % 2)], step=step, continuation=one))
    assert given == [3] * 8 + [2] * 8 + [1] * 8
    counts = absorbed_of(regime, [make_episodes([0, 0], step=24)], [success(said(4), number=24)], step=24)
    assert counts.continuations[0].num_given == 1, "a peer's first turn is always given"
    assert counts.counts["prefix/own_turns/words"] == 4


def test_backwards_goes_on_where_a_checkpoint_left_it(prefix, make_episodes):
    """Groups that were counted before count after a resume."""
    first, second = prefix(start="backwards"), prefix(start="backwards")
    for _ in range(7):
        first.asks(make_episodes([0, 1], continuation=continuation()))
    second.restore(json.loads(json.dumps(first.state())))
    second.asks(make_episodes([0, 1], continuation=continuation()))

    (one,) = absorbed_of(second, [make_episodes([0, 0])], [success(said(4))]).continuations
    assert one.num_given == 2


def test_a_continued_group_is_own_rows_by_its_own_baseline(prefix, make_episodes, lab):
    """A slow twin: GRPO as written, on the sampled tokens of each row alone, behind a prompt that holds the rest."""
    begun, continued = make_episodes([1, 0, 0], "o"), make_episodes([1, 1, 0], continuation=continuation(2, 2))
    absorbed = absorbed_of(prefix(), [begun, continued])

    expected = []
    for group in (begun, continued):
        rewards = np.array([answer.reward for answer in group.answers])
        expected += [(reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) for reward in rewards]
    rows = absorbed.examples
    assert absorbed.denominators == {"policy_gradient": 6.0}
    np.testing.assert_allclose([row.advantages[0] for row in rows], expected, rtol=1e-3)
    for row in rows:
        assert row.is_trained.tolist() == [True, False, True, True]
        assert row.weights.tolist() == [np.float32(1 / 3)] * 3
        assert row.behaviour_logprobs.tolist() == [-0.5, -0.25, -1.0]
        assert row.prompt_token_ids.tolist() == [1, 2, 3]
        assert row.source == "own"
    assert absorbed.counts["prefix/groups"] == 1
    assert absorbed.counts["prefix/reward_mean"] == pytest.approx(2 / 3)
    assert absorbed.counts["prefix/solved_share"] == 1
    assert absorbed.counts["prefix/given_turns_mean"] == absorbed.counts["prefix/left_turns_mean"] == 2


def test_tokens_of_the_peer_and_the_environment_have_no_gradient(prefix, make_episodes, lab):
    """The loss of a continued group is that of its sampled tokens, to the last bit of every parameter's gradient."""
    group = make_episodes([1, 0], continuation=continuation(2, 1))
    group = structs.replace(group, prompt_token_ids=pack_array([1, 40, 41, 42, 3], "i4"))  # 40 to 42: the peer's turns
    model = lab.model()
    is_own = [0, 2, 3]

    def sampled(answer):
        logprobs = lab_logprobs(model, answer)[is_own]
        return structs.replace(answer, logprobs=pack_array(logprobs.detach().numpy(), "f4"))

    def lab_logprobs(model, answer):
        return model.logprobs(np.array([3]), unpack_array(answer.token_ids, "i4"))

    group = structs.replace(group, answers=[sampled(answer) for answer in group.answers])
    regime = prefix(objective={"advantage": "group_mean"})
    absorbed = absorbed_of(regime, [group])

    def by_hand(model):
        total = 0.0
        for answer, advantage in zip(group.answers, (0.5, -0.5), strict=True):
            own = lab_logprobs(model, answer)[is_own]
            total = total - advantage * (own - own.detach()).exp().sum() / 3 / 2
        return total

    gradient = lab.gradient(absorbed, regime, model)
    lab.assert_same(gradient, lab.score_of(model, by_hand))
    trained = {3, 20, 21, 22, 23, 24}
    of_weight = gradient[1]
    embedded = gradient[0]
    assert of_weight[40:43].any(), "they compete with what was sampled"
    assert not embedded[40:43].any(), "nothing is predicted from a peer's token"
    assert {int(place) for place in embedded.abs().sum(1).nonzero()} <= trained


def test_a_continued_group_neither_asks_nor_is_published(prefix, make_episodes, make):
    """Its failure is none of the start state, and its success is not the policy's own from the beginning."""
    regime = prefix()
    assert regime.asks(make_episodes([0, 0], continuation=continuation())) == []
    assert regime.publish(make_episodes([0, 1], continuation=continuation()), make.author()) == []
    regime.asks(make_episodes([0, 0]))
    regime.asks(make_episodes([0, 1], continuation=continuation()))
    assert regime.awaited() == ["p"], "from where the peer was it is no success of the start state"
    regime.asks(make_episodes([0, 1]))
    assert regime.awaited() == []


def test_successes_of_two_turns_and_more_are_published(prefix, make_episodes, make_group, make):
    """The first one of a group, up to the policy's last turn; of one turn there is nothing to go on behind."""
    (record,) = prefix().publish(make_episodes([0, 1, 1]), make.author())
    assert [turn.messages[0].content for turn in record.turns] == ["one 1", "told", "two"]
    one_turn = make_episodes([1])
    short = [structs.replace(answer, segments=answer.segments[:1]) for answer in one_turn.answers]
    assert prefix().publish(structs.replace(one_turn, answers=short), make.author()) == []
    assert prefix().publish(make_group([1, 1]), make.author()) == []


@pytest.mark.parametrize(
    ("received", "count"),
    [
        (success(said(1)), "regime/rejected_one_turn"),
        (success(said(2)[1:] + said(2)[:1]), "regime/rejected_malformed"),
        (success(said(2), reward=0.5), "regime/ignored_failed"),
        (success(said(2), source="own"), "regime/ignored_own"),
        (success(said(2), age=3), "regime/ignored_stale"),
        (success(said(2), "q"), "regime/ignored_not_pending"),
        (success(said(2, "a" * 300_000)), "regime/rejected_too_long"),
    ],
)
def test_what_leads_nowhere_is_counted(prefix, make_episodes, received, count):
    """The failure goes on waiting for another."""
    regime = prefix(max_age_versions=2)
    absorbed = absorbed_of(regime, [make_episodes([0, 0])], [received])
    assert absorbed.counts[count] == 1
    assert (list(absorbed.continuations), regime.awaited()) == ([], ["p"])


def test_what_own_words_cannot_say_is_counted(prefix, make_episodes):
    """By the reason that the spelling gives; another success of the prompt is tried."""
    absorbed = absorbed_of(prefix(Spelling("tool_calls")), [make_episodes([0, 0])], [success(said(2))])
    assert absorbed.counts["regime/rejected_tool_calls"] == absorbed.counts["align/rejected"] == 1
    both = [success(said(1), number=1), success(said(2), number=2)]
    for seed in range(4):
        assert len(absorbed_of(prefix(), [make_episodes([0, 0])], both, seed=seed).continuations) == 1


def test_no_more_states_than_a_share_of_the_batch(prefix, make_episodes):
    """Those that failed first; the records of the others are kept for the next batch."""
    regime = prefix(max_share=0.5)
    groups = [make_episodes([0, 0], f"p{place}") for place in range(5)]
    received = [success(said(2), f"p{place}") for place in (4, 3, 1, 0)]
    first = absorbed_of(regime, groups, received)
    assert [one.prompt_id for one in first.continuations] == ["p0", "p1"]
    second = regime.absorb(
        [make_episodes([1, 0], f"q{place}") for place in range(5)], step=1, rng=np.random.default_rng(0)
    )
    assert [one.prompt_id for one in second.continuations] == ["p3", "p4"]
    assert regime.awaited() == ["p2"]


def test_a_failure_waits_within_its_bound(prefix, make_episodes):
    """Then it is given up and counted; a success that comes later leads nowhere."""
    regime = prefix(gate_age_versions=2)
    absorbed_of(regime, [make_episodes([0, 0])])
    late = absorbed_of(regime, [make_episodes([1, 0], "q", step=3)], [success(said(2))], step=3)
    assert late.counts["sharing/expired_prompts"] == late.counts["regime/ignored_not_pending"] == 1
    assert list(late.continuations) == []


def test_what_is_drawn_does_not_depend_on_who_came_first(prefix, make_episodes):
    """As a synchronous run must have it: records by age, failures by theirs, in this life and in a resumed one."""
    received = [success(said(4, words), step=step, number=step) for step, words in enumerate("abc")]
    for seed in range(6):  # with one seed alone the middle one may be drawn
        drawn = [
            absorbed_of(prefix(), [make_episodes([0, 0])], order, seed=seed).continuations
            for order in (received, received[::-1], received + received)
        ]
        assert drawn[0] == drawn[1] == drawn[2]


def test_the_expected_gradient_is_that_of_the_value_behind_the_given_turns(prefix, make_group):
    """Every group that can be sampled there, enumerated: (G - 1) / G of the gradient of J_k, as the baseline has it.

    A game of two turns with three choices each; the peer's first one is given. Nothing is said about the first turn,
    about which the value of the start state has a gradient of its own.
    """
    rewards = np.array([[1.0, 0.0, 0.25], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
    policy = [np.exp(row) / np.exp(row).sum() for row in np.array([[0.3, -0.2, 1.0], [0.5, 0.0, -1.0]])]
    score = np.eye(3) - policy[1]  # [choice, logit] of log pi behind the peer's first choice
    regime = prefix(objective={"advantage": "group_mean"})

    expected = np.zeros(3)
    for pair in np.ndindex(3, 3):
        group = structs.replace(make_group([rewards[0][choice] for choice in pair]), continuation=continuation())
        absorbed = regime.absorb([group], step=0, rng=np.random.default_rng(0))
        credit = [float((row.advantages * row.weights).sum()) for row in absorbed.examples]
        told = sum(
            (worth * score[choice] for worth, choice in zip(credit, pair if credit else (), strict=True)), np.zeros(3)
        )
        expected += policy[1][pair[0]] * policy[1][pair[1]] * told / absorbed.denominators["policy_gradient"]

    value_behind = (policy[1] * rewards[0]) @ score
    np.testing.assert_allclose(expected, value_behind / 2, rtol=1e-5)
    value_at_start = policy[0] * (rewards @ policy[1] - policy[0] @ rewards @ policy[1])
    assert np.abs(value_at_start).max() > 0.05, "which no group from behind the first turn estimates"
