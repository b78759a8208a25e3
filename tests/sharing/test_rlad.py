"""RLAD: requests, scores, and the gradient with a teacher."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mrl.metrics.names import is_known
from mrl.objectives.specs import Correction, Trrd
from mrl.records.codec import decode, encode, unpack_array
from mrl.records.experience import experience_decoder
from mrl.sharing import rlad as module
from mrl.sharing.own_traces import trace_of
from mrl.sharing.rlad import request_id

TIS = Correction("token", "truncate", 0.0, 5.0)


def test_request_holds_the_texts_of_a_group(build, make, receiver):
    """What the teacher needs, and an id that the learner knows too."""
    regime, group = build("rlad"), make.sampled(receiver, [1, 0], "q")
    (request,) = regime.publish(group, make.author())
    assert decode(encode(request), experience_decoder) == request
    assert (request.scorer, request.prompt_id, request.record_id) == ("peer", "q", request_id("own", group.ticket))
    assert [one.completion for one in request.answers] == [answer.completion for answer in group.answers]
    assert all(one.finished for one in request.answers)
    assert regime.asks(group) == ["q"]


@pytest.mark.parametrize("rewards", [[0, 0], [1, 1]])
def test_groups_that_move_nothing_are_not_sent(build, make_context, make, step_of, rewards):
    """Nobody is asked, nothing is counted as asked, even where their rows are regularised."""
    regime, group = build("rlad", make_context(kl_coefficient=0.1)), make.group(rewards)
    assert regime.publish(group, make.author()) == regime.asks(group) == []
    assert regime.is_settled(group)
    absorbed = step_of(regime, [group])
    assert len(absorbed.examples) == 2
    assert absorbed.counts["sharing/asked_rows"] == absorbed.counts["sharing/absent_rows"] == 0


def test_oversized_texts_are_not_sent(build, make):
    """A record could not hold them."""
    regime, group = build("rlad"), make.group([1, 0], texts=[b"x" * 300_000, b"y"])
    assert regime.publish(group, make.author()) == regime.asks(group) == []


def test_life_of_a_request(build, make, peer, receiver):
    """Open until its group is trained, settled once its score is there; then late."""
    regime, group = build("rlad"), make.sampled(receiver, [1, 0])
    regime.asks(group)
    assert regime.awaited() == ["p"]
    assert not regime.is_settled(group)
    told = make.scored_by(peer, group, -0.1)
    regime.hear([told, make.success(), make.scored_by(peer, group, -0.1, source="other")], step=0)
    assert regime.is_settled(group)
    assert regime.awaited() == []
    absorbed = regime.absorb([group], step=0, rng=np.random.default_rng(0))
    assert absorbed.forget == ["p"]
    assert absorbed.counts["regime/ignored_other"] == 2
    assert absorbed.counts["sharing/asked_rows"] == absorbed.counts["sharing/scored_rows"] == 2
    assert absorbed.counts["sharing/hit_rate"] == 1.0
    regime.hear([told], step=1)
    late = regime.absorb([], step=1, rng=np.random.default_rng(0))
    assert late.counts["regime/ignored_late"] == 1
    assert late.counts["sharing/hit_rate"] == 1.0
    assert all(map(is_known, absorbed.counts | late.counts))


def test_a_masked_answer_takes_its_score_with_it(build, make_context, make, peer, receiver):
    """Scores go to rows by their places: the answers that were not cut keep theirs."""
    whole, cut = (make.sampled(receiver, [1, 0, 0], finished=finished) for finished in (True, False))
    group = msgspec.structs.replace(whole, answers=[cut.answers[0], *whole.answers[1:]])
    examples = {}
    for mask in (False, True):
        regime = build("rlad", make_context(mask_cut_answers=mask))
        regime.asks(group)
        regime.hear([make.scored_by(peer, group, -0.1)], step=0)
        examples[mask] = regime.absorb([group], step=0, rng=np.random.default_rng(0)).examples

    assert (len(examples[False]), len(examples[True])) == (3, 2)
    for kept, row in zip(examples[False][1:], examples[True], strict=True):
        assert row.teacher_logprobs is not None
        assert np.array_equal(row.answer_token_ids, kept.answer_token_ids)
        assert np.array_equal(row.teacher_logprobs, kept.teacher_logprobs)


def test_prompt_of_another_open_request_is_not_forgotten(build, make, receiver, step_of):
    """Two groups on one prompt: it is watched until both are trained."""
    regime = build("rlad")
    one, other = make.sampled(receiver, [1, 0]), make.sampled(receiver, [1, 0])
    regime.asks(other)
    assert step_of(regime, [one]).forget == []
    assert step_of(regime, [other]).forget == ["p"]


def test_requests_are_bounded_and_forgotten(build, make, receiver, step_of, monkeypatch):
    """Beyond the bound the oldest goes, with its watch."""
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    regime = build("rlad")
    for prompt_id in "abc":
        regime.asks(make.sampled(receiver, [1, 0], prompt_id))
    assert regime.awaited() == ["b", "c"]
    assert step_of(regime, []).forget == ["a"]


def test_scores_of_dropped_groups_are_let_go(build, make_context, make, receiver, step_of):
    """Nobody trains on a group that was dropped; its scores leave when it is too stale for that, and so does its watch.

    A group that has come too late for that leaves at once.
    """
    regime = build("rlad", replace(make_context(), max_staleness_versions=2))
    for step in range(9):
        regime.asks(make.sampled(receiver, [1, 0], f"dropped{step}", step=step))
    assert regime.awaited() == ["dropped6", "dropped7", "dropped8"]
    regime.asks(make.sampled(receiver, [1, 0], "late", step=1))
    assert "late" in regime.awaited(), "those before it are still of use"
    regime.asks(make.sampled(receiver, [1, 0], "new", step=12))
    assert regime.awaited() == ["new"]
    assert "dropped0" in step_of(regime, []).forget


def test_unusable_scores_leave_the_plain_ratio(build, make, peer, receiver, step_of, record):
    """Unscored, lying and miscounted ones are told apart; the row is trained without a teacher."""
    groups = [make.sampled(receiver, [1, 0, 0], prompt_id) for prompt_id in "ab"]
    told = make.scored_by(peer, groups[0], -0.1)
    lie = make.sampled(peer, [0.0], texts=[b"no"]).answers[0]
    scores = [told.record.scores[0], None, trace_of(lie, peer)]
    received = [
        make.score(request_id("own", groups[0].ticket), scores, prompt_id="a"),
        make.score(request_id("own", groups[1].ticket), scores[:2], prompt_id="b"),
    ]
    regime = build("rlad")
    absorbed = step_of(regime, groups, received)
    assert [row.teacher_logprobs is None for row in absorbed.examples] == [False, True, True, True, True, True]
    counts = absorbed.counts | record(regime, absorbed)
    assert (counts["sharing/scored_rows"], counts["sharing/unscored_rows"], counts["sharing/absent_rows"]) == (1, 1, 3)
    assert counts["align/trace_rejected/lengths/peer"] == counts["align/rejected/lengths/peer"] == 1
    assert (counts["align/rows/peer"], counts["align/rejected_share/peer"]) == (3, pytest.approx(2 / 3))
    assert counts["align/rejected/unscored/peer"] == 1
    assert counts["sharing/hit_rate"] == 1 / 6
    assert all(map(is_known, counts))


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo"])
def test_alpha_one_is_the_own_objective(build, make_context, make, peer, receiver, lab, step_of, told, method):
    """And so is any alpha without scores."""
    model, start, context = lab.model(2), lab.model(5), make_context(method=method)
    group = make.sampled(receiver, [1, 0, 0], logprobs=start.sampler_logprobs)
    rlad, alone = build("rlad", context, alpha=1.0 if told else 0.3), build("independent", context)
    received = [make.scored_by(peer, group, -0.1)] if told else []
    found, expected = step_of(rlad, [group], received), step_of(alone, [group])
    assert (found.examples[0].teacher_logprobs is not None) == told
    assert found.denominators == expected.denominators
    gradients = [lab.gradient(a, r, model, start=start) for a, r in ((found, rlad), (expected, alone))]
    lab.assert_same(*gradients)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_teacher_equal_to_the_past_self_is_the_own_objective(build, make, receiver, lab, step_of, alpha):
    """pi_T = pi_old gives GRPO for every alpha (arXiv 2602.22495, eq. 3)."""
    model, start = lab.model(2), lab.model(2)
    for parameter in model.parameters():
        parameter.data.mul_(1.02)  # a small step: inside the clamp
    group = make.sampled(receiver, [1, 0, 0], logprobs=start.sampler_logprobs)
    rlad, alone = build("rlad", alpha=alpha), build("independent")
    found = step_of(rlad, [group], [make.scored_by(receiver, group, start.sampler_logprobs)])
    expected = step_of(alone, [group])
    lab.assert_same(lab.gradient(found, rlad, model, start=start), lab.gradient(expected, alone, model, start=start))


def test_gradient_with_a_teacher(build, make, receiver, lab, step_of):
    """r = (pi_old / pi_T)^(1 - alpha) at the start of a step; inside the clip and the clamp it scales the score."""
    model = lab.model()
    group = make.sampled(receiver, [1, 0], logprobs=model.sampler_logprobs)
    received = [make.scored_by(receiver, group, lambda ids: model.sampler_logprobs(ids) - 0.2)]
    regime = build("rlad", alpha=0.5)
    absorbed = step_of(regime, [group], received)

    def slow(model):
        total = 0.0
        for row in absorbed.examples:
            log_pi = model.logprobs(row.prompt_token_ids, row.answer_token_ids)
            ratio = (0.5 * (log_pi - log_pi.detach()) + 0.5 * (log_pi - log_pi.detach() + 0.2)).exp()
            total = total - (ratio * float(row.advantages[0])).mean() / 2
        return total

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))


def test_who_teaches(build, make_context, make, step_of):
    """The named policy, or the first other by name; the teacher itself has none and trains by its own objective."""
    context = make_context(peers=("b", "a"))
    assert build("rlad", context).publish(make.group([1, 0]), make.author())[0].scorer == "a"
    assert build("rlad", context, teacher="b").publish(make.group([1, 0]), make.author())[0].scorer == "b"
    itself = build("rlad", context, teacher="own")
    assert itself.asking is itself.patience is None
    assert itself.components == build("independent", context).components
    absorbed = step_of(itself, [make.group([1, 0])])
    assert absorbed.counts["sharing/asked_rows"] == absorbed.counts["sharing/absent_rows"] == 0
    assert "sharing/hit_rate" not in absorbed.counts
    assert build("rlad", replace(context, others=())).asking is None


def test_term_and_patience(build, make_context):
    """The own clips, dual clip and correction; the table's waits."""
    regime = build("rlad", make_context(method="dapo", dual_clip=3), alpha=0.3, peer_hold_versions=2, peer_wait_s=4)
    assert regime.components[0].term == Trrd(0.3, 0.2, 0.28, 1.0, 3.0, TIS)
    assert (regime.patience.hold_versions, regime.patience.wait_s) == (2, 4)
    assert (regime.asking.kinds, regime.asking.max_age_versions) == (("score",), None)
    assert regime.asking.scorer == "peer"
    assert build("rlad", teacher_clamp=None).components[0].term == Trrd(0.5, 0.2, 0.2, None, None, TIS)


@pytest.mark.parametrize(("name", "parameters"), [("rlad", {}), ("copd", {"rl_steps": 0})])
def test_rate_survives_json(name, parameters, build, make, receiver, step_of):
    """What was asked before a restart still counts."""
    regime, restored = build(name, **parameters), build(name, **parameters)
    step_of(regime, [make.sampled(receiver, [1, 0])])
    restored.restore(json.loads(json.dumps(regime.state())))
    assert step_of(restored, []).counts == step_of(regime, []).counts
    assert step_of(restored, []).counts["sharing/hit_rate"] == 0.0


def test_every_answer_that_was_scored_counts(build, make, peer, receiver, step_of, record):
    """With own log-probs against the teacher's; those that no sound score came for with the reason."""
    groups = [make.sampled(receiver, [1, 0, 0], prompt_id) for prompt_id in "ab"]
    told = make.scored_by(peer, groups[1], lambda ids: -0.1 - 0.2 * np.arange(len(ids)))
    lie = make.sampled(peer, [0.0], texts=[b"no"]).answers[0]
    scores = [trace_of(lie, peer), None, told.record.scores[2]]
    received = make.score(request_id("own", groups[1].ticket), scores, prompt_id="b")
    regime = build("rlad")
    absorbed = step_of(regime, groups, [received])
    own = np.linspace(-0.3, -0.9, absorbed.examples[5].answer_token_ids.size).astype(np.float32)
    values = record(regime, absorbed, {5: own})
    assert values["align/rows/peer"] == 3
    assert values["align/rejected/lengths/peer"] == values["align/trace_rejected/lengths/peer"] == 1
    assert values["align/rejected/unscored/peer"] == 1
    nats, size = unpack_array(scores[2].logprobs, "f4"), len(groups[1].answers[2].completion)
    gap_nats = own.sum() - nats.sum()
    assert (values["align/receiver_tokens/peer"], values["align/bytes/peer"]) == (own.size, size)
    assert values["align/spans/peer"] == own.size  # the teacher cuts every byte
    assert values["align/length_ratio/peer"] == own.size / (size + 1)
    assert values["align/peer_nats_per_byte/peer"] == pytest.approx(nats.sum() / size, rel=1e-6)
    assert values["align/dropped_nats/peer"] == 0
    assert values["align/gap_nats_per_byte/peer"] == pytest.approx(gap_nats / size, rel=1e-5)
    assert values["align/gap_nats_per_token/peer"] == pytest.approx(gap_nats / own.size, rel=1e-5)
    assert all(map(is_known, absorbed.counts | values))


def test_without_scores_nothing_is_said_of_the_pair(build, make, receiver, step_of, record):
    """Nothing was looked at."""
    regime = build("rlad")
    assert record(regime, step_of(regime, [make.sampled(receiver, [1, 0])])) == {}
