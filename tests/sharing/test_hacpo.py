"""HACPO against its formulas and the facts of the authors' code."""

import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.step_order import StepOrder, split_minibatches
from mrl.objectives.specs import CrossSequence
from mrl.records.codec import pack_array
from mrl.sharing.hacpo import Capabilities, joint_advantages, scaled
from tests.support.retokenizing import retokenize

REWARD = st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0, 5.0])
OMEGA = st.sampled_from([0.1, 0.5, 1.0, 3.0])


def slow_joint(own, peers, omega_kj, omega_jk, correction=1, least=0.0):
    """muhat = 1/(nG) sum_j sum_i omega(k, j) R; sigma over all rewards; the guards of the code.

    Negative rewards are lifted by the least one before, which moves every reward and the baseline alike.
    """
    if least < 0:
        own, peers = [r - least for r in own], [[r - least for r in rewards] for rewards in peers]
    pool = list(own) + [r for rewards in peers for r in rewards]
    if all(r == pool[0] for r in pool):
        return [0.0] * len(own), [0.0] * (len(pool) - len(own))
    mu = (sum(own) + sum(omega_kj[j] * r for j, rewards in enumerate(peers) for r in rewards)) / len(pool)
    if mu > max(1 - min(least, 0.0), *pool):
        mu = sum(own) / len(own)
    mean = sum(pool) / len(pool)
    sigma = math.sqrt(sum((r - mean) ** 2 for r in pool) / (len(pool) - correction)) + 1e-6
    theirs = [omega_jk[j] * (r - mu) / sigma for j, rewards in enumerate(peers) for r in rewards]
    return [(r - mu) / sigma for r in own], theirs


@given(
    own=st.lists(REWARD, min_size=1, max_size=4),
    peers=st.lists(st.tuples(st.lists(REWARD, min_size=1, max_size=4), OMEGA, OMEGA), min_size=1, max_size=3),
    correction=st.sampled_from([0, 1]),
)
def test_joint_advantages_equal_their_slow_twin(own, peers, correction):
    """Baseline, omegas, either deviation, the uniform group and the baseline above 1."""
    rewards, omega_kj, omega_jk = zip(*peers, strict=True)
    least = min([*own, *(r for theirs in rewards for r in theirs)])
    found = joint_advantages(
        np.array(own),
        [np.array(r) for r in rewards],
        own_over_peer=omega_kj,
        peer_over_own=omega_jk,
        std_correction=correction,
        least=least,
    )
    expected = slow_joint(own, rewards, omega_kj, omega_jk, correction, least)
    assert found.own_G.tolist() == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert found.of_peers.tolist() == pytest.approx(expected[1], rel=1e-5, abs=1e-6)


@given(peers=st.lists(st.tuples(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8), OMEGA), min_size=1))
def test_passes_and_failures_are_scaled_as_ever(peers):
    """Rewards of 0 and 1 times omega, bit for bit."""
    rewards, omegas = [np.array(r) for r, _ in peers], [omega for _, omega in peers]
    found = scaled(rewards, omegas, least=0.0)
    assert [one.tobytes() for one in found] == [(omega * r).tobytes() for omega, r in zip(omegas, rewards, strict=True)]


def test_lifting_all_rewards_lifts_no_advantage():
    """-1 and 1 are 0 and 2, also where omegas scale them."""
    own, theirs = np.array([-1.0, 1.0]), np.array([1.0, 1.0, -1.0])
    low = joint_advantages(own, [theirs], own_over_peer=[0.75], peer_over_own=[4 / 3], least=-1.0)
    high = joint_advantages(own + 1, [theirs + 1], own_over_peer=[0.75], peer_over_own=[4 / 3])
    assert low.own_G.tolist() == pytest.approx(high.own_G.tolist(), rel=1e-6)
    assert low.of_peers.tolist() == pytest.approx(high.of_peers.tolist(), rel=1e-6)


def test_guards_of_the_code():
    """A uniform group ignores omega; a baseline above 1 falls back to the own mean."""
    uniform = joint_advantages(np.ones(2), [np.ones(2)], own_over_peer=[3.0], peer_over_own=[0.3])
    assert not uniform.own_G.any()
    assert not uniform.of_peers.any()
    high = joint_advantages(np.array([1.0, 0.0]), [np.ones(2)], own_over_peer=[10.0], peer_over_own=[0.1])
    assert high.own_G.tolist() == pytest.approx([1.0, -1.0], rel=1e-4)  # (r - 1/2) / (1/2)


@pytest.mark.parametrize("shift", [0.0, 2e-4, 0.02])
@pytest.mark.parametrize("kl", [None, 0.1])
def test_alone_it_is_the_own_objective(build, make_context, make, receiver, lab, step_of, shift, kl):
    """One agent under GSPO, EOS included: the same gradient; idle rows keep their places, no update is added.

    At the start of a step, inside the clip and beyond it, with and without a divergence.
    """
    context, model, start = make_context(method="gspo", kl_coefficient=kl), lab.model(), lab.model()
    for parameter in start.parameters():
        parameter.data.mul_(1 + shift)
    groups = [
        make.sampled(receiver, [1, 0, 0], logprobs=model.sampler_logprobs),
        make.sampled(receiver, [0, 0, 0], "q", logprobs=model.sampler_logprobs),
    ]
    hacpo, alone = build("hacpo", context, own_eos=True), build("independent", context)
    found, expected = step_of(hacpo, groups), step_of(alone, groups)
    assert len(found.examples) == 6
    assert found.denominators == {"policy_gradient": 6.0, "cross": 6.0}
    assert found.expansion == 1.0
    how = {"start": start, "reference": lab.model(7)}
    lab.assert_same(lab.gradient(found, hacpo, model, **how), lab.gradient(expected, alone, model, **how))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_own_rows_are_without_their_closing_eos(build, make_context, make, receiver, lab, step_of, aggregation):
    """As in the authors' code: neither in the row, nor in its mean ratio, nor in the count; by GRPO and by GSPO alike.

    The gradient is that of the same answers cut before their EOS, and of another one when `own_eos` is set. An answer
    that is EOS alone keeps it.
    """
    texts, model, start = [b"hay", b"reverse: yah"], lab.model(), lab.model()
    for parameter in start.parameters():
        parameter.data.mul_(1 + 1e-5)
    ended, cut = (
        make.sampled(receiver, [1, 0], texts=texts, finished=finished, logprobs=model.sampler_logprobs)
        for finished in (True, False)
    )
    for method in ("grpo", "gspo"):
        context = make_context(method=method, aggregation=aggregation)
        regime, alone = build("hacpo", context), build("independent", context)
        found, expected = step_of(regime, [ended]), step_of(alone, [cut])
        assert [row.answer_token_ids.tolist() for row in found.examples] == [
            row.answer_token_ids.tolist() for row in expected.examples
        ]
        assert found.denominators["policy_gradient"] == expected.denominators["policy_gradient"]
        gradient = lab.gradient(found, regime, model, start=start)
        lab.assert_same(gradient, lab.gradient(expected, alone, model, start=start))
        kept = step_of(build("hacpo", context, own_eos=True), [ended])
        assert [row.answer_token_ids[-1] for row in kept.examples] == [receiver.eos_id] * 2
    (answer,) = make.sampled(receiver, [1]).answers
    eos_alone = {"token_ids": pack_array([receiver.eos_id], "i4"), "logprobs": pack_array([-0.5], "f4")}
    group = msgspec.structs.replace(ended, answers=[msgspec.structs.replace(answer, completion=b"", **eos_alone)])
    (only,) = step_of(regime, [group]).examples
    assert only.answer_token_ids.tolist() == [receiver.eos_id]


def test_a_masked_answer_stays_masked_without_eos(build, make_context, make, receiver, step_of):
    """An answer that the token limit cut has no EOS to lose; the denominators count the others alone."""
    regime = build("hacpo", make_context(mask_cut_answers=True, aggregation="token_mean"))
    groups = [make.sampled(receiver, [1, 0]), make.sampled(receiver, [1, 0], "q", finished=False)]
    found = step_of(regime, groups)
    ended = [row for row in found.examples if row.prompt_id == "p"]
    assert [bool(row.weights.any()) for row in found.examples] == [True, True, False, False]
    assert found.denominators["policy_gradient"] == sum(row.answer_token_ids.size for row in ended)
    assert receiver.eos_id not in np.concatenate([row.answer_token_ids for row in found.examples])


@pytest.fixture
def cross(build, make, receiver, peer, lab, step_of):
    """One own group of failures and a peer's success whose sequence ratio is `ratio`, and its gradient."""
    model = lab.model()
    text = b"copy: hay"
    ids = retokenize(receiver, text, finished=False, max_tokens=64).token_ids
    mean = float(model.sampler_logprobs(ids).mean())

    def cross(ratio: float, update_index: int = 0, **parameters):
        regime = build("hacpo", **parameters)
        told = make.sampled(
            peer, [1.0], texts=[text], logprobs=lambda ids: np.r_[np.full(len(ids) - 1, mean - math.log(ratio)), -9.0]
        )
        absorbed = step_of(regime, [make.sampled(receiver, [0.0])], [make.rollout(told, peer)])
        only = type(absorbed)(absorbed.examples[1:], absorbed.denominators)
        return absorbed, lab.gradient(only, regime, model, update_index=update_index)

    cross.model, cross.ids = model, ids
    return cross


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_cross_gradient(cross, lab, alpha):
    """-(1/D) omega(j, k) s^(alpha + 1) A (1/|y|) sum_t grad log pi_k, without the end of the answer."""
    absorbed, found = cross(0.9, alpha=alpha)
    row = absorbed.examples[1]
    assert row.answer_token_ids.tolist() == cross.ids.tolist()
    assert row.weights.sum() == pytest.approx(1.0)
    omega, mu, sigma = 10.0, 0.1 * 1 / 2, math.sqrt(1 / 2)  # P(own) = 0 and P(peer) = 1: held in [0.1, 10]
    assert row.advantages[0] == pytest.approx(omega * (1 - mu) / sigma, rel=1e-4)
    scale = 0.9 ** (alpha + 1) * float(row.advantages[0]) / 2
    expected = lab.score_of(cross.model, lambda model: -scale * model.logprobs(np.array([3]), cross.ids).mean())
    lab.assert_same(found, expected)


@pytest.mark.parametrize(
    ("ratio", "update_index", "moves"),
    [
        (0.79, 0, False),  # below the lower bound
        (0.81, 0, True),
        (0.99, 0, True),
        (1.01, 0, False),  # above 1, whatever the sign of A
        (0.84, 1, True),  # m = 1: the bound is .825
        (0.84, 2, False),  # m = 2: .85
        (0.999, 99, False),  # capped at 1
    ],
)
def test_stepwise_clip(cross, lab, ratio, update_index, moves):
    """The gradient is exactly 0 outside [lower + m lower_step, 1]; the bound stops at 1."""
    _, found = cross(ratio, update_index, lower=0.8, lower_step=0.025)
    assert lab.is_zero(found) != moves


def test_order_of_minibatches_is_that_of_the_code(build, make, receiver, step_of):
    """As many own rows as cross rows and two minibatches: updates m = 0, 1 own, m = 2, 3 cross, mean over rows."""
    own = make.sampled(receiver, [1, 0, 0, 0])
    theirs = make.sampled(receiver, [1, 1, 0, 0])
    absorbed = step_of(build("hacpo"), [own], [make.rollout(theirs, receiver)])
    assert absorbed.expansion == 2.0
    assert absorbed.denominators == {"policy_gradient": 8.0, "cross": 8.0}
    order = StepOrder(absorbed.examples, absorbed.denominators, absorbed.expansion)
    parts = split_minibatches(order, 2, np.random.default_rng(0))
    kinds = [{row.component for row in part.examples} for part in parts]
    assert kinds == [{"policy_gradient"}] * 2 + [{"cross"}] * 2
    assert all(part.denominators == {"policy_gradient": 2.0, "cross": 2.0} for part in parts)


def test_masked_rows_add_no_updates(build, make_context, make, receiver, step_of):
    """They keep their places, so that as many cross rows as own rows double the updates, however many are masked.

    With more updates the lower bound of the clip would reach 1 before the first cross row, which then had no gradient.
    """
    own = [make.sampled(receiver, [1], "p"), make.sampled(receiver, [1, 0] * 8, "q", finished=False)]
    theirs = [make.sampled(receiver, [0], "p"), make.sampled(receiver, [1, 0] * 8, "q")]
    regime = build("hacpo", make_context(mask_cut_answers=True))
    absorbed = step_of(regime, own, [make.rollout(group, receiver) for group in theirs])
    assert sum(bool(row.weights.any()) for row in absorbed.examples) == 1 + 17
    assert absorbed.expansion == 2.0


@pytest.mark.parametrize(("aggregation", "denominator"), [("token_mean", "tokens"), ("sequence_mean", "rows")])
def test_both_denominators_cover_the_whole_step(build, make_context, make, receiver, step_of, aggregation, denominator):
    """Divided by the number of updates, each is what one minibatch holds."""
    own, theirs = make.sampled(receiver, [1, 0]), make.sampled(receiver, [1, 0])
    absorbed = step_of(build("hacpo", make_context(aggregation=aggregation)), [own], [make.rollout(theirs, receiver)])
    tokens = sum(row.answer_token_ids.size for row in absorbed.examples)
    assert absorbed.denominators == {"policy_gradient": tokens if denominator == "tokens" else 4.0, "cross": 4.0}


def test_capability_is_the_share_of_successes(build, make_context, make, receiver, step_of):
    """From the run's bound on; the window goes through a restart; equals have omega 1."""
    regime = build("hacpo", replace(make_context(), success_reward=0.5), window_steps=2)
    heard = [make.rollout(make.sampled(receiver, [0.5, 0.25]), receiver)]
    absorbed = step_of(regime, [make.sampled(receiver, [1.0, 0.0])], heard)
    assert regime.state()["capabilities"] == {"own": [0.5], "peer": [0.5]}
    own = [row.advantages[0] for row in absorbed.examples[:2]]
    expected = slow_joint([1.0, 0.0], [[0.5, 0.25]], [1.0], [1.0])
    assert own == pytest.approx(expected[0], rel=1e-5)
    assert [row.advantages[0] for row in absorbed.examples[2:]] == pytest.approx(expected[1], rel=1e-5)
    restored = build("hacpo", window_steps=2)
    restored.restore(json.loads(json.dumps(regime.state())))
    assert restored.state() == regime.state()


def test_capability_is_that_of_the_last_steps(build, make, receiver, step_of):
    """As many as the table says: what lies further back is forgotten."""
    regime = build("hacpo", window_steps=2)
    for step, rewards in enumerate(([1.0, 1.0], [0.0, 0.0], [1.0, 0.0])):
        heard = [make.rollout(make.sampled(receiver, rewards[::-1], f"p{step}"), receiver)]
        step_of(regime, [make.sampled(receiver, rewards, f"p{step}")], heard, step=step)
    assert regime.state()["capabilities"] == {"own": [0.0, 0.5], "peer": [0.0, 0.5]}


def test_components(build, make_context):
    """The cross term has the table's bounds and no divergence: the authors' is on own rows only."""
    own, cross = build("hacpo", make_context(kl_coefficient=0.001), lower=0.9, lower_step=0.01, alpha=3).components
    assert cross.term == CrossSequence(0.9, 0.01, 3)
    assert cross.regularizer is None
    assert own.regularizer is not None


def test_answers_without_a_trace_only_move_the_baseline(build, make, receiver, step_of):
    """No ratio can be formed; the reward counts."""
    absorbed = step_of(build("hacpo"), [make.group([0, 0])], [make.rollout(make.group([1, 1]), receiver)])
    assert [row.component for row in absorbed.examples] == ["policy_gradient"] * 2
    assert all((row.advantages < 0).all() for row in absorbed.examples)
    assert absorbed.expansion == 1.0


def test_rows_without_their_end_still_show_what_sharing_costs(build, make, receiver, peer, step_of, record):
    """The end is left out of the aligned rows as it is of the trained ones, so that own log-probs fit them."""
    own, texts = make.sampled(receiver, [1, 0]), [b"reverse: yah", b"copy: hay"]
    regime = build("hacpo")
    found = step_of(regime, [own], [make.rollout(make.sampled(peer, [1, 0], texts=texts), peer)])
    cross = {place: row.answer_token_ids.size for place, row in enumerate(found.examples) if row.component == "cross"}
    told = record(regime, found, {place: np.full(size, -0.25, np.float32) for place, size in cross.items()})
    gaps = [0.5 * len(text) - 0.25 * size for text, size in zip(texts, cross.values(), strict=True)]
    assert told["align/dropped_nats/peer"] == -0.5 * len(texts)
    size = sum(map(len, texts))
    assert told["align/gap_nats_per_byte/peer"] == pytest.approx(sum(gaps) / size, rel=1e-5)


def test_capability_is_the_mean_over_the_last_steps_that_had_any():
    """A step without rewards of a policy leaves its window alone; the oldest step of a full window goes."""
    seen = Capabilities(window_steps=2)
    assert seen.of("a") is None
    for rewards in ([1, 1], [], [0, 1], [0, 0]):
        seen.note({"a": rewards})
    assert seen.of("a") == 0.25
    seen.note({"b": [1]})
    assert (seen.of("a"), seen.of("b")) == (0.25, 1.0)


def test_steps_weigh_alike_whatever_their_size():
    """It is a mean of batch means (arXiv 2603.02604), not of rewards."""
    seen = Capabilities(window_steps=5)
    seen.note({"a": [1]})
    seen.note({"a": [0] * 9})
    assert seen.of("a") == 0.5


@pytest.mark.parametrize(
    ("own", "other", "ratio"), [(0.5, 0.25, 2), (0, 0, 1), (0, 1, 0.1), (1, 0, 10), (0.4, 0.4, 1), (-3, 1, 0.1)]
)
def test_ratio_is_held_in_bounds(own, other, ratio):
    """omega within [0.1, 10], 1 between equals, also between two that never passed."""
    seen = Capabilities(window_steps=5)
    seen.note({"own": [own], "other": [other]})
    assert seen.ratio("own", "other") == pytest.approx(ratio)


def test_the_unknown_is_as_able():
    """Without a step of either, omega is 1."""
    seen = Capabilities(window_steps=5)
    seen.note({"own": [0.1]})
    assert seen.ratio("own", "other") == seen.ratio("other", "own") == 1.0


def test_windows_survive_json():
    """The window goes on where it was."""
    one, other = Capabilities(window_steps=2), Capabilities(window_steps=2)
    for rewards in ([1], [0]):
        one.note({"a": rewards})
    other.restore(json.loads(json.dumps(one.state())))
    for seen in (one, other):
        seen.note({"a": [1]})
    assert one.state() == other.state() == {"a": [0.0, 1.0]}
