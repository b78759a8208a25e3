"""The filters of PRP: bad answers far from the policy, and a share of peers' answers that falls."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import ConfigError
from mrl.metrics.names import is_known
from mrl.objectives.specs import Filtered
from mrl.records.codec import pack_array
from mrl.sharing.regimes import check_sharing


def of_peers(absorbed):
    """The rows that peers wrote."""
    return [row for row in absorbed.examples if row.component == "peer_rollouts"]


def bytes_of(absorbed):
    """Everything that is trained on, to the bit."""
    arrays = ("answer_token_ids", "advantages", "weights", "behaviour_logprobs", "behaviour_spans")
    return [
        (row.component, row.source, [np.asarray(getattr(row, name)).tobytes() for name in arrays])
        for row in absorbed.examples
    ]


@pytest.mark.parametrize("variant", ["behaviour", "recompute", "decoupled", "sequence", "luffy"])
def test_left_out_nothing_is_filtered(build, make, receiver, peer, step_of, variant):
    """Terms, rows, denominators and counts are those of `prp` without filters, late in a run too."""
    regime = build("prp", variant=variant)
    assert not isinstance(regime.components[1].term, Filtered)
    told = [make.rollout(make.sampled(peer, [1.0, 0.0, 0.0]), peer)]
    early = step_of(regime, [make.group([1.0, 0.0])], told)
    late = step_of(build("prp", variant=variant), [make.group([1.0, 0.0])], told, step=10**6)
    assert bytes_of(early) == bytes_of(late)
    assert early.denominators == late.denominators
    assert len(of_peers(early)) == 3
    assert not {"sharing/peer_share", "sharing/annealed_rows"} & set(early.counts)


@pytest.mark.parametrize("variant", ["behaviour", "decoupled"])
def test_the_term_is_filtered(build, variant):
    """The variant's own term, within."""
    plain, found = build("prp", variant=variant), build("prp", variant=variant, negative_divergence=0.5)
    assert found.components[1] == replace(plain.components[1], term=Filtered(plain.components[1].term, 0.5))
    assert found.components[0] == plain.components[0]


@pytest.mark.parametrize("variant", ["behaviour", "decoupled"])
@pytest.mark.parametrize(("gap_nats", "reward", "is_dropped"), [(0.4, -1, False), (0.6, -1, True), (0.6, 1, False)])
def test_a_bad_answer_beyond_the_divergence_moves_nothing(
    build, make, receiver, lab, step_of, variant, gap_nats, reward, is_dropped
):
    """With equal tokenizers D is the mean of the gaps; the row stays in the denominator, its reward in the mean.

    Every second token is likelier to the policy than to its peer, so that no clip takes its gradient.
    """
    model = lab.model()

    def told(ids):
        is_even = np.arange(len(ids)) % 2 == 0
        high = (gap_nats * len(ids) + 0.1 * (~is_even).sum()) / is_even.sum()
        return model.sampler_logprobs(ids) + np.where(is_even, high, -0.1)

    theirs = make.sampled(receiver, [reward], texts=[b"copy: yah"], logprobs=told)
    received = [make.rollout(theirs, receiver)]
    gradients = {}
    for bound in (None, 0.5):
        keys = {} if bound is None else {"negative_divergence": bound}
        regime = build("prp", variant=variant, **keys)
        absorbed = step_of(regime, [make.sampled(receiver, [0, 0])], received)
        assert absorbed.denominators["peer_rollouts"] == 3.0
        gradients[bound] = lab.gradient(replace(absorbed, examples=of_peers(absorbed)), regime, model)
    assert not lab.is_zero(gradients[None])
    assert lab.is_zero(gradients[0.5]) == is_dropped
    if not is_dropped:
        lab.assert_same(gradients[0.5], gradients[None])


def test_the_share_falls_evenly(build, make_context, make, receiver, step_of):
    """Against the definition: of N answers the first ceil(N max(0, 1 - t / S)), in rows, mean and denominator."""

    @settings(max_examples=40, deadline=None)
    @given(step=st.integers(0, 12), until=st.integers(1, 10), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def holds(step, until, sizes):
        names = [f"s{n}" for n in range(len(sizes))]
        taken = [next(k for k in range(N + 1) if k * until >= N * max(0, until - step)) for N in sizes]
        context = make_context(peers=tuple(names), kl_coefficient=0.1)  # so that rows without advantage stay
        groups = [
            make.sampled(receiver, [float(n % 2) for n in range(size)], texts=[b"copy: %d" % n for n in range(size)])
            for size in sizes
        ]
        told = [make.rollout(group, receiver, source=name) for name, group in zip(names, groups, strict=True)]
        regime = build("prp", context, peer_share_until_step=until)
        absorbed = step_of(regime, [make.group([1.0, 0.0])], told, step=step)
        assert [(row.source, pack_array(row.answer_token_ids, "i4")) for row in of_peers(absorbed)] == [
            (name, answer.token_ids)
            for name, group, k in zip(names, groups, taken, strict=True)
            for answer in group.answers[:k]
        ]
        assert absorbed.denominators["peer_rollouts"] == 2 + sum(taken)
        assert absorbed.counts["sharing/annealed_rows"] == sum(sizes) - sum(taken)
        assert absorbed.counts["sharing/peer_share"] == pytest.approx(max(0.0, 1 - step / until))
        rewards = [1.0, 0.0] + [float(n % 2) for k in taken for n in range(k)]
        deviation = np.std(rewards, ddof=1) + 1e-6
        found = [row.advantages[0] for row in absorbed.examples]
        assert found == pytest.approx([(one - np.mean(rewards)) / deviation for one in rewards], rel=1e-4, abs=1e-6)

    holds()


def test_from_the_last_step_on_it_is_independent_and_waits_for_nobody(build, make, receiver, step_of):
    """Rows and denominators of own answers, and groups of that version are settled at once."""
    regime, alone = build("prp", peer_share_until_step=5), build("independent")
    groups = [make.group([1.0, 0.0], step=5)]
    regime.asks(groups[0])
    assert regime.is_settled(groups[0])
    younger = make.group([1.0, 0.0], "q", step=4)
    regime.asks(younger)
    assert not regime.is_settled(younger)
    told = [make.rollout(make.sampled(receiver, [1.0, 0.0]), receiver)]
    found, wanted = step_of(regime, groups, told, step=5), step_of(alone, groups, step=5)
    assert bytes_of(found) == bytes_of(wanted)
    assert found.denominators["policy_gradient"] == wanted.denominators["policy_gradient"]


def test_counts_are_metrics(build, make, receiver, step_of):
    """Every one is in the table."""
    absorbed = step_of(build("prp", peer_share_until_step=5), [make.group([1.0, 0.0])], [], step=1)
    assert absorbed.counts["sharing/annealed_rows"] == 0.0
    assert [name for name in absorbed.counts if not is_known(name)] == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"variant": "luffy", "negative_divergence": 1}, "negative_divergence has no effect; got variant 'luffy'"),
        ({"negative_divergence": 1, "spreading": "none"}, "negative_divergence cannot be combined with spreading"),
        ({"negative_divergence": -1}, "sharing.prp.negative_divergence: invalid value; got -1; wanted >= 0"),
        ({"peer_share_until_step": 0}, "sharing.prp.peer_share_until_step: invalid value; got 0; wanted >= 1"),
    ],
)
def test_contradictions_are_told_in_one_line(keys, told):
    """With the key, what was found and what was wanted."""
    with pytest.raises(ConfigError, match=told):
        check_sharing({"regime": "prp", "prp": keys}, "run.toml")
