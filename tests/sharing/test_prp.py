"""PRP against its formula: pooled advantages, terms of the variants, and the identity with a larger group."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import ConfigError
from mrl.learner.loss import behaviour_by_token
from mrl.learner.packing import pack
from mrl.objectives.specs import Cispo, Clipped, Correction, Shaped
from mrl.records.codec import pack_array, unpack_array
from tests.support.retokenizing import retokenize


def slow_joint(own, peers, own_over_peer, peer_over_own):
    """HACPO's advantages of own answers, then of the peers', one baseline for all."""
    pool = list(own) + [r for rewards in peers for r in rewards]
    mu = (sum(own) + sum(omega * sum(rewards) for omega, rewards in zip(own_over_peer, peers, strict=True))) / len(pool)
    std = math.sqrt(sum((r - sum(pool) / len(pool)) ** 2 for r in pool) / (len(pool) - 1)) + 1e-6
    theirs = [omega * (r - mu) / std for omega, rewards in zip(peer_over_own, peers, strict=True) for r in rewards]
    return [(r - mu) / std for r in own], theirs


def slow_pooled(own, peers):
    """[(A_i)] of own answers, then of the peers', over one pool."""
    pool = list(own) + [r for rewards in peers for r in rewards]
    mean = sum(pool) / len(pool)
    std = math.sqrt(sum((r - mean) ** 2 for r in pool) / (len(pool) - 1))
    return [0.0 if len(set(pool)) == 1 else (r - mean) / (std + 1e-6) for r in pool]


def test_pooled_advantages_equal_their_slow_twin(build, make_context, make, peer, step_of):
    """One mean and one deviation over all answers, whoever wrote them."""
    groups_of_peers = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=1, max_size=2)

    @settings(max_examples=30, deadline=None)
    @given(own=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), theirs=groups_of_peers)
    def holds(own, theirs):
        regularised = make_context(peers=("s0", "s1"), kl_coefficient=0.1)  # so that rows without advantage stay
        told = [make.rollout(make.sampled(peer, rewards), peer, source=f"s{n}") for n, rewards in enumerate(theirs)]
        absorbed = step_of(build("prp", regularised), [make.group(own)], told)
        found = [row.advantages[0] for row in absorbed.examples]
        assert found == pytest.approx(slow_pooled(own, theirs), rel=1e-5, abs=1e-6)

    holds()


@pytest.mark.parametrize(("seed_of_start", "overlong_buffer_tokens"), [(2, 0), (5, 0), (5, 60)])
def test_identical_peer_is_a_group_twice_as_large(
    build, make_context, make, receiver, lab, step_of, seed_of_start, overlong_buffer_tokens
):
    """The learner itself as its peer: rows, denominators and gradient are those of GRPO with 2G answers.

    Also when the parameters have moved since the start of the step, where ratios and clips come in, and when overlong
    answers lose reward: those of the peer lose as much.
    """
    context = make_context(overlong_buffer_tokens=overlong_buffer_tokens)
    model, start = lab.model(2), lab.model(seed_of_start)
    texts = [b"reverse: %d" % n + b"!" * n for n in range(6)]
    how = {"logprobs": start.sampler_logprobs}
    own = make.sampled(receiver, [1, 0, 0], texts=texts[:3], **how)
    theirs = make.sampled(receiver, [1, 1, 0], texts=texts[3:], **how)
    whole = make.sampled(receiver, [1, 0, 0, 1, 1, 0], texts=texts, **how)
    prp, alone = build("prp", context, dual_clip="off"), build("independent", context)
    found, expected = step_of(prp, [own], [make.rollout(theirs, receiver)]), step_of(alone, [whole])
    assert [row.component for row in found.examples] == ["policy_gradient"] * 3 + ["peer_rollouts"] * 3
    assert set(found.denominators.values()) == set(expected.denominators.values()) == {6.0}
    for one, other in zip(found.examples, expected.examples, strict=True):
        for name in ("prompt_token_ids", "answer_token_ids", "advantages", "weights", "behaviour_logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    gradients = [lab.gradient(a, r, model, start=start) for a, r in ((found, prp), (expected, alone))]
    lab.assert_same(*gradients)


@pytest.mark.parametrize(("moved", "weight_side"), [(1.0, "low"), (1.02, "inside"), (1.02, "high"), (1.3, "inside")])
@pytest.mark.parametrize("variant", ["behaviour", "recompute", "decoupled", "sequence", "luffy"])
def test_gradient_of_every_variant(build, make, receiver, peer, lab, step_of, variant, moved, weight_side):
    """Peers' rows alone (own rewards are at the pooled mean of 0), against the variant's formula by tokens.

    At the start of a step, and after the parameters have moved, a little and beyond clips: what is taken at the start
    (the old policy, the weight outside the clip) stays there. That weight lies below, between or above its bounds.
    """
    nats_per_byte = {"low": -0.2, "inside": -2.45, "high": -6.0}[weight_side] if variant == "decoupled" else -0.2
    model, start = lab.model(), lab.model()
    for parameter in model.parameters():
        parameter.data.mul_(moved)
    theirs = make.sampled(peer, [1, -1], texts=[b"copy: hay", b"copy: yah"], logprobs=nats_per_byte)
    own = make.sampled(receiver, [0, 0])
    regime = build("prp", variant=variant, **({"weight_cap": 2.0} if variant == "decoupled" else {}))
    absorbed = step_of(regime, [own], [make.rollout(theirs, peer)])
    deviation = math.sqrt(2 / 3)

    def slow(model):
        total = 0.0
        for text, advantage in ((b"copy: hay", 1 / deviation), (b"copy: yah", -1 / deviation)):
            ids = retokenize(receiver, text, finished=True, max_tokens=64).token_ids
            sizes = [max(1, n) for n in receiver.byte_lengths(ids, np.array([0, len(ids)])).tolist()]
            log_pi, log_old = (one.logprobs(np.array([3]), ids) for one in (model, start))
            log_old = log_old.detach()
            told = log_pi.new_tensor(sizes) * nats_per_byte  # the peer cut every byte: each own token is a span
            gap = log_pi - told
            if variant == "sequence":
                mean = log_pi.mean() - sum(sizes) * -0.2 / sum(sizes)
                total = total - min_clipped(mean.exp(), advantage)
                continue
            if variant == "luffy":
                term = -advantage * log_pi.exp() / (log_pi.exp() + 0.1)
            elif variant == "behaviour":
                term = -min_clipped(gap.exp(), advantage)
            else:
                weight = 1.0
                if variant == "decoupled":
                    exact = float((log_old - told).mean().exp())
                    assert {"low": exact < 0.5, "inside": 0.5 < exact < 2.0, "high": exact > 2.0}[weight_side], exact
                    weight = min(2.0, max(0.5, exact))
                term = -weight * min_clipped((log_pi - log_old).exp(), advantage)
            total = total + term.mean()
        return total / 4

    lab.assert_same(lab.gradient(absorbed, regime, model, start=start), lab.score_of(model, slow))


@pytest.mark.parametrize("name", ["prp", "hacpo"])
def test_overlong_answers_of_peers_lose_what_own_ones_would(build, make_context, make, receiver, peer, step_of, name):
    """By their length in own tokens, whatever the peer's were; the limit for one that does not fit at all."""
    limit, texts = 12, [b"reverse: yah", b"copy: hay, hay", b"z" * 40]
    context = make_context(max_answer_tokens=limit, overlong_buffer_tokens=limit, overlong_penalty=0.5)
    theirs = make.sampled(peer, [1, 0, 1], texts=texts)
    theirs.answers[2] = make.group([1], texts=[b"z" * 40]).answers[0]  # untraced, so that it cannot be cut
    own = make.sampled(receiver, [1, 0], texts=[b"copy: hay", b"reverse: yah"])
    regime = build(name, context, **({"variant": "recompute"} if name == "prp" else {}))
    absorbed = step_of(regime, [own], [make.rollout(theirs, peer)])
    found = [float(row.advantages[0]) for row in absorbed.examples]

    def loss(text):
        ids = retokenize(receiver, text, finished=True, max_tokens=999).token_ids
        return 0.5 * min(limit, len(ids)) / limit

    own_rewards = [1 - loss(b"copy: hay"), 0 - loss(b"reverse: yah")]
    peer_rewards = [1 - loss(texts[0]), 0 - loss(texts[1]), 1 - 0.5]
    if name == "prp":
        expected = slow_pooled(own_rewards, [peer_rewards])
    else:  # P(own) = 1 / 2, P(peer) = 2 / 3
        expected = [a for part in slow_joint(own_rewards, [peer_rewards], [3 / 4], [4 / 3]) for a in part]
    assert [row.source for row in absorbed.examples] == ["own"] * 2 + ["peer"] * 2
    assert found == pytest.approx(expected[:4], rel=1e-4)


def min_clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@pytest.mark.parametrize("gap_nats", [0.0, 1.7])
def test_a_mean_per_own_token_depends_on_the_tokens_and_one_per_byte_does_not(
    build, make, receiver, peer, step_of, record, gap_nats
):
    """Log-probs with sum L over T_n own tokens and T_m of the peer, of one text.

    The ratio of "sequence" is exp(L (1 / T_n - 1 / T_m)) where both sums are equal; per byte of the text it is 1.
    """
    text, total_nats = b"reverse: yah", -6.0
    theirs = make.sampled(peer, [1.0], texts=[text], logprobs=lambda ids: np.full(len(ids), total_nats / len(ids)))
    regime = build("prp", variant="sequence")
    absorbed = step_of(regime, [make.sampled(receiver, [0, 0])], [make.rollout(theirs, peer)])
    (place,) = (n for n, row in enumerate(absorbed.examples) if row.component == "peer_rollouts")
    row = absorbed.examples[place]
    num_own, num_peer = row.answer_token_ids.size, len(theirs.answers[0].token_ids) // 4
    assert num_own < num_peer == len(text) + 1
    own = np.full(num_own, (total_nats + gap_nats) / num_own, dtype=np.float32)
    ratio = math.exp(float((own - row.behaviour_logprobs).mean()))
    assert ratio == pytest.approx(math.exp((total_nats + gap_nats) / num_own - total_nats / num_peer), rel=1e-5)
    per_byte = math.exp(record(regime, absorbed, {place: own})["align/gap_nats_per_byte/peer"])
    assert per_byte == pytest.approx(math.exp(gap_nats / len(text)), rel=1e-5)


def test_source_advantages_are_taken_as_told(build, make, receiver, step_of):
    """With "source" each answer is measured within its own group, and an own group that failed is left out."""
    theirs = make.sampled(receiver, [1, 0, 0])
    absorbed = step_of(build("prp", advantages="source"), [make.group([0, 0])], [make.rollout(theirs, receiver)])
    assert [row.advantages[0] for row in absorbed.examples] == pytest.approx([1.1547, -0.57735, -0.57735], rel=1e-4)
    assert {row.component for row in absorbed.examples} == {"peer_rollouts"}
    assert absorbed.denominators == {"policy_gradient": 5.0, "peer_rollouts": 5.0}


def test_without_a_peer_it_is_the_own_objective(build, make, step_of):
    """Peers are optional."""
    groups = [make.group([1, 0]), make.group([0, 0], "q")]
    found, alone = step_of(build("prp"), groups), step_of(build("independent"), groups)
    assert [row.advantages.tolist() for row in found.examples] == [row.advantages.tolist() for row in alone.examples]
    assert found.denominators["policy_gradient"] == alone.denominators["policy_gradient"]
    assert found.counts["sharing/peer_rows"] == 0


@pytest.mark.parametrize(
    ("variant", "rows"), [("behaviour", 0), ("decoupled", 0), ("sequence", 0), ("recompute", 2), ("luffy", 2)]
)
def test_untraced_answers_serve_variants_without_ratios(build, make, receiver, step_of, record, variant, rows):
    """Rejected rows are counted and not in the denominator; their rewards still move the pooled mean."""
    theirs = make.group([1, 1])  # ids that are no text: no trace
    regime = build("prp", variant=variant)
    absorbed = step_of(regime, [make.group([0, 0])], [make.rollout(theirs, receiver)])
    peers = [row for row in absorbed.examples if row.component == "peer_rollouts"]
    assert len(peers) == rows
    assert all(row.behaviour_logprobs is row.behaviour_spans is None for row in peers)
    assert absorbed.denominators["peer_rollouts"] == 2 + rows
    assert all((row.advantages < 0).all() for row in absorbed.examples if row.component == "policy_gradient")
    values = record(regime, absorbed)
    assert values["align/rejected_share/peer"] == 1 - rows / 2
    assert values["align/trace_rejected/untraced/peer"] == 2


def test_terms_follow_the_own_objective(build, make_context):
    """The clips of own tokens, the own term where rows are taken as own; GSPO's narrow bounds never for tokens."""

    def term(variant, method="grpo", parameters=None, **objective):
        return (
            build("prp", make_context(method=method, **objective), variant=variant, **(parameters or {}))
            .components[1]
            .term
        )

    assert term("behaviour", "dapo", {"dual_clip": 4}) == Clipped(0.2, 0.28, "token", "behaviour", 4.0)
    assert term("behaviour", parameters={"dual_clip": "off"}) == Clipped(0.2, 0.2, "token", "behaviour")
    assert term("behaviour", "gspo") == Clipped(0.2, 0.2, "token", "behaviour", 3.0)
    assert term("recompute", "gspo", dual_clip=3) == Clipped(3e-4, 4e-4, "sequence", dual_clip=3)
    assert term("recompute", "cispo") == Cispo(1.0, 0.2, None)
    assert term("recompute", "dppo") == Clipped()
    assert term("sequence", "gspo") == Clipped(3e-4, 4e-4, "sequence", "behaviour", 3.0)
    assert term("luffy", parameters={"shaping_gamma": 0.3}) == Shaped(0.3)
    decoupled = term("decoupled", parameters={"weight_cap": 4, "weight_level": "token"})
    assert decoupled == Clipped(correction=Correction("token", "truncate", 0.25, 4.0))


@pytest.mark.parametrize("variant", ["behaviour", "sequence"])
@pytest.mark.parametrize(("liked_nats", "bounded"), [(1.0, False), (1.2, True)])
def test_a_bad_answer_that_the_policy_likes_better_is_bounded(
    build, make, receiver, lab, step_of, variant, liked_nats, bounded
):
    """Below e^1.1 = 3 times the peer's likelihood it pushes with its ratio, above not at all; "off" has no bound.

    The clip alone bounds no ratio above 1 where the advantage is negative, and here it stands there before any update.
    """
    model, text = lab.model(), b"copy: yah"
    theirs = make.sampled(
        receiver, [-1], texts=[text], logprobs=lambda ids: np.minimum(model.sampler_logprobs(ids) - liked_nats, 0)
    )
    received = [make.rollout(theirs, receiver)]
    found, unbounded = (build("prp", variant=variant, **keys) for keys in ({}, {"dual_clip": "off"}))
    gradients = []
    for regime in (found, unbounded):
        absorbed = step_of(regime, [make.sampled(receiver, [0, 0])], received)
        peers = replace(absorbed, examples=[row for row in absorbed.examples if row.component == "peer_rollouts"])
        gradients.append(lab.gradient(peers, regime, model))
    assert lab.is_zero(gradients[0]) == bounded
    assert not lab.is_zero(gradients[1])


def test_idle_peer_rows_stay_where_they_are_regularised(build, make_context, make, receiver, step_of):
    """As own rows do."""
    received = [make.rollout(make.sampled(receiver, [1, 1]), receiver)]
    assert step_of(build("prp"), [make.group([1, 1])], received).examples == []
    kept = step_of(build("prp", make_context(kl_coefficient=0.01)), [make.group([1, 1])], received)
    assert [row.component for row in kept.examples] == ["policy_gradient"] * 2 + ["peer_rollouts"] * 2


def test_publishes_every_group_whole(build, make, receiver):
    """Failures too: a peer's baseline needs them."""
    group = make.sampled(receiver, [0, 1])
    (record,) = build("prp").publish(group, make.author(fingerprint=receiver.fingerprint))
    assert [answer.reward for answer in record.answers] == [0, 1]
    assert [answer.advantage for answer in record.answers] == pytest.approx([-0.7071, 0.7071], rel=1e-3)
    ids = unpack_array(record.answers[0].trace.token_ids, "i4")
    assert pack_array(ids, "i4") == group.answers[0].token_ids


def spans_as_written(own_lengths, peer_lengths):
    """Span of every own and of every peer token, from where both cuts meet; an end is a byte of its own."""
    ends, peer_ends = (np.cumsum(np.maximum(lengths, 1)) for lengths in (own_lengths, peer_lengths))
    common = np.intersect1d(ends, peer_ends)
    return np.searchsorted(common, ends), np.searchsorted(common, peer_ends)


@pytest.mark.parametrize("own_is_finer", [True, False])
@pytest.mark.parametrize("rule", ["none", "receiver_additive", "receiver_multiplicative", "bytes", "uniform"])
def test_every_rule_keeps_the_peers_log_likelihood(
    build, make, make_context, receiver, peer, lab, step_of, rule, own_is_finer
):
    """As the loss reads a row: each span of several tokens, and so the row, has the peer's sum; "none" the ratio."""
    coarse_and_fine = (receiver, peer)
    theirs, mine = coarse_and_fine if own_is_finer else coarse_and_fine[::-1]
    texts = [b"reverse: yah", b"copy: hay"]
    shared = make.sampled(theirs, [1, -1], texts=texts, logprobs=lambda ids: -0.2 - 0.3 * np.arange(len(ids)))
    told = make.rollout(shared, theirs)
    regime = build("prp", replace(make_context(), receiver=mine), variant="behaviour", spreading=rule)
    rows = [
        row
        for row in step_of(regime, [make.sampled(mine, [0, 0])], [told]).examples
        if row.component == "peer_rollouts"
    ]
    assert len(rows) == 2
    for row, answer in zip(rows, shared.answers, strict=True):
        ids = [row.answer_token_ids, unpack_array(answer.token_ids, "i4")]
        lengths = [t.byte_lengths(i, np.array([0, len(i)])) for t, i in zip((mine, theirs), ids, strict=True)]
        span, peer_span = spans_as_written(*lengths)
        assert (np.bincount(span).max() > 1) == own_is_finer == (np.bincount(peer_span).max() == 1)
        wanted = np.bincount(peer_span, unpack_array(answer.logprobs, "f4"))
        own = lab.model().sampler_logprobs(row.answer_token_ids)
        (batch,) = pack([row], regime.components, microbatch_tokens=64)
        read = behaviour_by_token(batch, regime.components, torch.tensor(own, dtype=torch.float32)).numpy()
        if rule == "none":
            assert own - read == pytest.approx((np.bincount(span, own) - wanted)[span], rel=1e-4, abs=1e-5)
        else:
            assert np.bincount(span, read) == pytest.approx(wanted, rel=1e-5)
            assert read.sum() == pytest.approx(unpack_array(answer.logprobs, "f4").sum(), rel=1e-5)


@pytest.mark.parametrize("rule", ["none", "receiver_additive", "receiver_multiplicative"])
def test_gradient_by_every_rule_of_own_log_probs(build, make, make_context, receiver, peer, lab, step_of, rule):
    """A peer that merges what the learner splits, at the start of a step, against the ratios of tokens as written."""
    model = lab.model()
    theirs = make.sampled(receiver, [1, -1], texts=[b"copy: hay", b"reverse: yah"], logprobs=-1.5)
    own = make.sampled(peer, [0, 0])
    regime = build("prp", replace(make_context(), receiver=peer), variant="behaviour", spreading=rule)
    absorbed = step_of(regime, [own], [make.rollout(theirs, receiver)])
    deviation = math.sqrt(2 / 3)

    def slow(model):
        total = 0.0
        for text, advantage in ((b"copy: hay", 1 / deviation), (b"reverse: yah", -1 / deviation)):
            ids = retokenize(receiver, text, finished=True, max_tokens=64).token_ids
            sizes = [max(1, n) for n in receiver.byte_lengths(ids, np.array([0, len(ids)])).tolist()]
            log_pi = model.logprobs(np.array([3]), retokenize(peer, text, finished=True, max_tokens=64).token_ids)
            assert sum(sizes) == len(log_pi) > len(sizes)
            ratios, place = [], 0
            for size in sizes:
                old = log_pi[place : place + size].detach()
                gap = old.sum() + 1.5
                part = {"none": gap, "receiver_additive": gap / size}.get(rule, old - -1.5 * old / old.sum())
                ratios.append((log_pi[place : place + size] - old + part).exp())
                place += size
            total = total - min_clipped(torch.cat(ratios), advantage).mean()
        return total / 4

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))


READ = {
    "behaviour": {"spreading": "bytes", "dual_clip": 3.0},
    "recompute": {},
    "decoupled": {"spreading": "uniform", "weight_level": "token", "weight_cap": 3.0},
    "sequence": {"dual_clip": "off"},
    "luffy": {"shaping_gamma": 0.2},
}
"""Variant -> the keys that it reads, each with some value."""
KEYS = {key: value for keys in READ.values() for key, value in keys.items()}


@pytest.mark.parametrize("variant", READ)
def test_a_key_that_the_variant_does_not_read_is_refused(build, variant):
    """When it is set, even to its default; what is read is taken, and defaults say nothing."""
    parameters = build("prp", variant=variant, **READ[variant]).parameters
    assert {key: getattr(parameters, key) for key in READ[variant]} == READ[variant]
    for key in KEYS.keys() - READ[variant].keys():
        for value in (KEYS[key], getattr(parameters, key)):
            with pytest.raises(ConfigError, match=f"sharing.prp: {key} has no effect; got variant '{variant}'") as one:
                build("prp", variant=variant, **{key: value})
            assert "\n" not in str(one.value)
            assert str(one.value).endswith(f"cure: remove {key}")


@pytest.mark.parametrize("level", [None, "sequence", "geometric"])
def test_a_weight_of_a_row_needs_a_division(build, level):
    """Without one a token has its span's ratio, which a sum over the row would count more than once."""
    levels = {} if level is None else {"weight_level": level}
    with pytest.raises(
        ConfigError, match=rf"needs weight_level 'token', .*; got weight_level '{level or 'geometric'}'; cure"
    ):
        build("prp", variant="decoupled", spreading="none", **levels)
    by_token = build("prp", variant="decoupled", weight_level="token", spreading="none")
    assert by_token.components[1].spreading == "none"
    for rule in ("receiver_additive", "receiver_multiplicative"):
        assert build("prp", variant="decoupled", spreading=rule, **levels).components[1].spreading == rule
