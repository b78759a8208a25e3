"""XGRPO's baselines against twins in the notation of the method, and its identities."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.sharing.advantages import group_advantages
from mrl.sharing.hacpo import Capabilities
from mrl.sharing.xgrpo import cross_advantages

REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 5.0]), min_size=2, max_size=5)
PEERS = st.lists(st.lists(st.sampled_from([-0.5, 0.0, 1.0]), min_size=1, max_size=4), min_size=1, max_size=3)
BASELINES = ["pooled", "peer_only", "rescaled", "mean_only", "leave_one_out"]


def mean(values):
    return sum(values) / len(values)


def slow(own, peers, baseline, omega, w, correction):
    """A_i = (r_i - mu_i) / (sigma + eps), one answer at a time."""
    pool = own + [r for rewards in peers for r in rewards]
    if len(set(pool)) == 1:
        return [0.0] * len(own)
    sigma = math.sqrt(sum((r - mean(pool)) ** 2 for r in pool) / (len(pool) - correction))
    lift = -min(0.0, *pool)  # a factor above 1 makes a loss no greater
    own, peers = [r + lift for r in own], [[r + lift for r in rewards] for rewards in peers]
    theirs = [omega[m] * r if baseline == "rescaled" else r for m, rewards in enumerate(peers) for r in rewards]
    advantages = []
    for i, r in enumerate(own):
        others = own[:i] + own[i + 1 :] if baseline == "leave_one_out" else own
        if w is not None:
            mu = (1 - w) * mean(others) + w * mean(theirs)
        elif baseline == "peer_only":
            mu = mean(theirs)
        else:
            mu = mean(others + theirs)
        advantages.append(r - mu if baseline == "mean_only" else (r - mu) / (sigma + 1e-6))
    return advantages


@pytest.mark.parametrize("baseline", BASELINES)
@given(own=REWARDS, peers=PEERS, w=st.sampled_from([None, 0.0, 0.3, 1.0]), correction=st.sampled_from([0, 1]))
def test_baselines_equal_their_slow_twins(baseline, own, peers, w, correction):
    """Every baseline, with the peers' share or a given weight, either deviation, one to three peers."""
    omega = [0.5 + m for m in range(len(peers))]
    found = cross_advantages(
        np.array(own),
        [np.array(rewards) for rewards in peers],
        scales=omega if baseline == "rescaled" else [1.0] * len(peers),
        baseline=baseline,
        peer_weight=w,
        std_correction=correction,
    )
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(slow(own, peers, baseline, omega, w, correction), rel=1e-5, abs=1e-6)


@given(own=REWARDS)
def test_equal_rewards_of_peers_change_nothing(own):
    """The mean is GRPO's; so are the advantages with the population's deviation. With the corrected one they grow.

    The pooled deviation of 2G rewards is the own one times sqrt(2 (G - 1) / (2G - 1)).
    """
    size, rewards = len(own), np.array(own)
    if len(set(own)) == 1:
        return
    population = cross_advantages(rewards, [rewards], scales=[1.0], std_correction=0)
    assert population.tolist() == pytest.approx(
        ((rewards - rewards.mean()) / rewards.std()).tolist(), rel=1e-4, abs=1e-6
    )
    corrected = cross_advantages(rewards, [rewards], scales=[1.0])
    factor = math.sqrt(2 * (size - 1) / (2 * size - 1))
    assert (corrected * factor).tolist() == pytest.approx(group_advantages(own).tolist(), rel=1e-4, abs=1e-6)
    undivided = cross_advantages(rewards, [rewards], scales=[1.0], divide=False)
    assert undivided.tolist() == pytest.approx(group_advantages(own, "group_mean").tolist(), abs=1e-6)


def test_left_out_alone_it_is_measured_against_peers():
    """A single own answer has no other own one: the peers' mean alone is its baseline, whatever the weight."""
    for weight in (None, 0.3):
        found = cross_advantages(
            np.array([1.0]),
            [np.array([0.0, 1.0])],
            scales=[1.0],
            baseline="leave_one_out",
            peer_weight=weight,
            divide=False,
        )
        assert found.tolist() == [0.5]


@pytest.mark.parametrize(
    ("own", "peers", "sign"), [([0, 0], [0, 1], -1), ([1, 1], [0, 1], 1), ([0, 0], [0, 0], 0), ([1, 1], [1, 1], 0)]
)
def test_uniform_own_groups_move_by_what_peers_reach(build, make, step_of, own, peers, sign):
    """Own failures are pushed down where a peer succeeds, own successes up where one fails, equals not at all."""
    absorbed = step_of(build("xgrpo"), [make.group(own)], [make.value(peers)])
    assert len(absorbed.examples) == (2 if sign else 0)
    assert all((np.sign(row.advantages) == sign).all() for row in absorbed.examples)
    assert absorbed.denominators == {"policy_gradient": 2.0}


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("weight", [None, 0.3])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_step_does_what_the_table_says(
    build, make_context, make, receiver, lab, step_of, baseline, weight, correction
):
    """Advantages by the baseline, weight and deviation that were asked for, and the gradient that they make.

    omega is P(own) / P(peer) of this step.
    """
    if baseline == "peer_only" and weight is not None:
        return
    own, peers, model = [1.0, 0.0, 0.0], [[1.0, 1.0], [0.0, 1.0, 0.0]], lab.model()
    group = make.sampled(receiver, own, logprobs=model.sampler_logprobs)
    received = [make.value(rewards, source=source) for source, rewards in zip(("peer", "third"), peers, strict=True)]
    context = make_context(peers=("peer", "third"), std_correction=correction)
    regime = build("xgrpo", context, baseline=baseline, peer_weight=weight)
    absorbed = step_of(regime, [group], received)
    omega = [mean(own) / mean(rewards) for rewards in peers]
    expected = slow(own, peers, baseline, omega, weight, correction)
    assert [float(row.advantages[0]) for row in absorbed.examples] == pytest.approx(expected, rel=1e-5)

    def loss(model):
        scores = [model.logprobs(row.prompt_token_ids, row.answer_token_ids).mean() for row in absorbed.examples]
        return -sum(a * score for a, score in zip(expected, scores, strict=True)) / 3

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, loss))


@pytest.mark.parametrize("own_method", ["grpo", "dr_grpo"])
def test_without_a_peer_it_is_the_own_objective(build, make_context, make, step_of, own_method):
    """Peers are optional, prompt by prompt; an undivided own objective stays undivided with them."""
    context = make_context(method=own_method)
    groups = [make.group([1, 0]), make.group([1, 0], "q")]
    found = step_of(build("xgrpo", context), groups, [make.value([1, 1], "q")])
    alone = step_of(build("independent", context), groups)
    assert [row.advantages.tolist() for row in found.examples[:2]] == [
        r.advantages.tolist() for r in alone.examples[:2]
    ]
    divisor = 0.5 + 1e-6 if own_method == "grpo" else 1.0
    assert [float(row.advantages[0]) for row in found.examples[2:]] == pytest.approx([0.25 / divisor, -0.75 / divisor])
    assert (found.counts["sharing/asked_prompts"], found.counts["sharing/hit_prompts"]) == (2, 1)


def test_rescaled_by_running_means(build, make, step_of):
    """omega = P(own) / P(peer) over the window, this step included; it survives a restart."""
    regime = build("xgrpo", baseline="rescaled", window_steps=2)
    step_of(regime, [make.group([1, 0])], [make.value([1, 1])])  # own 0.5, peer 1
    restored = build("xgrpo", baseline="rescaled", window_steps=2)
    restored.restore(json.loads(json.dumps(regime.state())))
    for one in (regime, restored):
        group = make.group([1, 0], "q")
        absorbed = step_of(one, [group], [make.value([0, 1], "q")])  # means now .5 and .75: omega 2/3
        expected = slow([1.0, 0.0], [[0.0, 1.0]], "rescaled", [2 / 3], None, 1)
        assert [float(row.advantages[0]) for row in absorbed.examples] == pytest.approx(expected)
        assert absorbed.counts["sharing/hit_rate"] == 1.0
    assert regime.state() == restored.state()


@pytest.mark.parametrize("baseline", ["pooled", "rescaled"])
def test_an_identical_peer_has_identical_rewards(build, make_context, make, receiver, step_of, baseline):
    """Also where overlong answers lose reward: what is published has lost it, so that like is pooled with like."""
    context = make_context(overlong_buffer_tokens=60)
    group = make.sampled(receiver, [1, 0, 0], texts=[b"reverse: %d" % n + b"!" * n for n in range(3)])
    regime = build("xgrpo", context, baseline=baseline)
    (record,) = regime.publish(group, make.author("peer"))
    rewards = context.objective.rewards(group)
    assert record.rewards == rewards.tolist() != [1, 0, 0]
    found = step_of(regime, [group], [make.value(record.rewards)])
    factor = math.sqrt(2 * 2 / 5)  # sqrt(2 (G - 1) / (2G - 1))
    assert [float(row.advantages[0]) * factor for row in found.examples] == pytest.approx(
        group_advantages(rewards).tolist(), rel=1e-4
    )


def test_publishes_rewards_and_nothing_else(build, make):
    """Failures count too."""
    (record,) = build("xgrpo").publish(make.group([0, 0.5], "q", step=3), make.author())
    assert (record.rewards, record.prompt_id, record.source) == ([0, 0.5], "q", "own")
    assert (record.newest.step, record.fingerprint, record.record_id) == (3, "print", "id0")


def test_capabilities_of_negative_rewards_have_an_order():
    """The one that earns more is the abler one, also below 0; with rewards from 0 on it is the plain ratio."""
    below, above = Capabilities(window_steps=2), Capabilities(window_steps=2)
    below.note({"own": [-1.0, -0.5], "peer": [-0.5, -0.25]})
    below.note({"own": [-1.0, -1.0], "peer": [0.5, 0.5]})
    assert below.ratio("peer", "own") == 8.5  # (0.0625 + 1) / (-0.875 + 1)
    assert below.ratio("own", "peer") == 1 / 8.5
    above.note({"own": [0.0, 1.0, 1.0], "peer": [0.0, 0.25]})
    assert above.ratio("own", "peer") == (2 / 3) / 0.125
