"""CoPD: phases, who teaches whom, the gate, and the gradient of distilled groups in the papers' notation."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from mrl.alignment.next_units import encode_units
from mrl.metrics.names import is_known
from mrl.objectives.specs import Clipped, Correction, Distilled
from mrl.records.codec import unpack_array
from mrl.records.experience import Received
from mrl.sharing.own_traces import trace_of
from mrl.sharing.rlad import request_id

DISTIL = {"rl_steps": 0, "max_gap_nats": 1e9}


def falling(ids):
    """Log-probs of a teacher, another for every token."""
    return -0.1 - 0.07 * np.arange(len(ids))


def chunks(own_lengths, told_lengths):
    """DPCA (arXiv 2606.09456): two pointers over the bytes; yields own and told places of each minimal chunk."""
    i = j = at_i = at_j = 0
    mine, theirs = [], []
    while i < len(own_lengths) or j < len(told_lengths):
        if at_i <= at_j and i < len(own_lengths):
            at_i, i = at_i + own_lengths[i], i + 1
            mine.append(i - 1)
        else:
            at_j, j = at_j + told_lengths[j], j + 1
            theirs.append(j - 1)
        if at_i == at_j and mine and theirs:
            yield mine, theirs
            mine, theirs = [], []


@pytest.mark.parametrize("rl_steps", [0, 1, 3])
@pytest.mark.parametrize("distil_steps", [1, 2])
def test_phases_alternate_by_the_version_that_sampled(build, make, receiver, rl_steps, distil_steps):
    """In turn so many versions by rewards, and so many that ask; worker and learner agree on which."""
    regime = build("copd", rl_steps=rl_steps, distil_steps=distil_steps)
    asked = []
    for step in range(12):
        group = make.sampled(receiver, [1, 0], step=step)
        told = regime.publish(group, make.author())
        assert bool(told) == (regime.asks(group) == ["p"])
        assert regime.is_settled(group) != bool(told)
        asked.append(bool(told))
    assert asked == [step % (rl_steps + distil_steps) >= rl_steps for step in range(12)]


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo"])
def test_without_distilling_steps_it_is_independent(build, make_context, make, receiver, lab, step_of, method):
    """Nobody is asked; components, rows, denominators and gradient are the same, bit for bit."""
    context, model = make_context(method=method, kl_coefficient=0.1), lab.model()
    copd, alone = build("copd", context, distil_steps=0), build("independent", context)
    assert copd.asking is copd.patience is None
    assert copd.components == alone.components
    assert_same_step(lab, step_of, [copd, alone], [make.sampled(receiver, [1, 0]), make.group([1, 1])], model)


@pytest.mark.parametrize("step", [0, 4])
def test_groups_without_scores_are_trained_by_rewards(build, make, receiver, lab, step_of, step):
    """In a phase of rewards, and where no score came: the bits of the own objective, and what was missed is counted."""
    copd, alone, model = build("copd"), build("independent"), lab.model()
    groups = [make.sampled(receiver, [1, 0], step=step), make.sampled(receiver, [1, 1], "q", step=step)]
    absorbed = assert_same_step(lab, step_of, [copd, alone], groups, model)
    assert absorbed.counts["sharing/absent_rows"] == absorbed.counts["sharing/asked_rows"] == (4 if step else 0)
    copd.hear([make.scored_by(receiver, groups[0], -0.1)], step=step)
    assert step_of(copd, []).counts["regime/ignored_late"] == 1


def assert_same_step(lab, step_of, regimes, groups, model):
    """Rows, denominators and gradients of one step; returns what the first regime made of it."""
    found, expected = (step_of(regime, groups) for regime in regimes)
    assert found.denominators == expected.denominators
    assert len(found.examples) == len(expected.examples) > 0
    for one, other in zip(found.examples, expected.examples, strict=True):
        for name in type(one).__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    gradients = [
        lab.gradient(a, r, model, reference=lab.model(4)) for a, r in ((found, regimes[0]), (expected, regimes[1]))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(a.any() for a in gradients[0])
    return found


def test_a_peer_that_thinks_the_same_moves_nothing(build, make, receiver, lab, step_of):
    """Whatever the rewards are."""
    model = lab.model()
    group = make.sampled(receiver, [1, 0], logprobs=model.sampler_logprobs)
    regime = build("copd", **DISTIL)
    absorbed = step_of(regime, [group], [make.scored_by(receiver, group, model.sampler_logprobs)])
    assert absorbed.counts["sharing/scored_rows"] == len(absorbed.examples) == 2
    assert absorbed.counts["sharing/agreement/peer"] == 1
    largest = max(float(one.abs().max()) for one in lab.gradient(absorbed, regime, model))
    assert largest < 1e-6, "a float32 of a log-prob"


@pytest.mark.parametrize("rewards", [[1, 0], [0, 0]])
def test_one_tokenizer_is_the_formula_by_token(build, make, receiver, lab, step_of, rewards):
    """A_t = beta (log pi_j - log pi_k) (arXiv 2604.27083, eq. 8), also where all rewards are equal."""
    model = lab.model()
    group = make.sampled(receiver, rewards, logprobs=model.sampler_logprobs)
    regime = build("copd", **DISTIL, coefficient=0.7, min_agreement=0)
    absorbed = step_of(regime, [group], [make.scored_by(receiver, group, falling)])

    def slow(model):
        total = 0.0
        for answer in group.answers:
            ids = unpack_array(answer.token_ids, "i4")
            log_pi = model.logprobs(np.array([1, 2, 3]), ids)
            advantages = 0.7 * (torch.tensor(falling(ids)) - log_pi.detach())
            total = total - (advantages * log_pi).mean() / 2
        return total

    assert len(absorbed.examples) == 2
    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))


@pytest.mark.parametrize("spreading", ["none", "receiver_additive", "receiver_multiplicative"])
@pytest.mark.parametrize("is_finer", [True, False])
def test_two_tokenizers_are_the_formula_by_chunk(
    build, make_context, make, receiver, peer, lab, step_of, spreading, is_finer
):
    """Own tokens finer or coarser than the teacher's: the chunk's whole difference at each of its tokens, or DPCA's
    parts of it (arXiv 2606.09456: log q_i = L_T / L_S log p_i, or its even form).
    """
    mine, theirs = (peer, receiver) if is_finer else (receiver, peer)
    model, context = lab.model(), replace(make_context(), receiver=mine)
    group = make.sampled(mine, [1, 0], logprobs=model.sampler_logprobs)
    regime = build("copd", context, **DISTIL, spreading=spreading, min_agreement=0)
    absorbed = step_of(regime, [group], [make.scored_by(theirs, group, falling)])
    widths = []

    def advantages_of(answer, log_pi):
        ids = unpack_array(answer.token_ids, "i4")
        (seen,) = make.sampled(theirs, [0.0], texts=[answer.completion]).answers
        told_ids = unpack_array(seen.token_ids, "i4")
        told = falling(told_ids)
        lengths = [[len(tokenizer.completion_bytes(one[n : n + 1])) or 1 for n in range(len(one))]
                   for tokenizer, one in ((mine, ids), (theirs, told_ids))]  # fmt: skip
        advantages = torch.zeros(len(ids), dtype=torch.float64)
        for own_places, told_places in chunks(*lengths):
            of_teacher, of_student = float(told[told_places].sum()), float(log_pi[own_places].sum())
            widths.append((len(own_places), len(told_places)))
            match spreading:
                case "none":
                    advantages[own_places] = of_teacher - of_student
                case "receiver_additive":
                    advantages[own_places] = (of_teacher - of_student) / len(own_places)
                case _:
                    advantages[own_places] = (of_teacher / of_student - 1) * log_pi[own_places]
        return advantages

    def slow(model):
        total = 0.0
        for answer in group.answers:
            log_pi = model.logprobs(np.array([1, 2, 3]), unpack_array(answer.token_ids, "i4"))
            total = total - (advantages_of(answer, log_pi.detach()) * log_pi).mean() / 2
        return total

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))
    assert max(own if is_finer else told for own, told in widths) > 1, "says nothing: every chunk is a token"


def test_an_end_that_the_teacher_lacks_is_not_moved(build, make, peer, receiver, lab, step_of):
    """Its token has neither the teacher's advantage nor that of the rewards."""
    model = lab.model()
    group = make.sampled(receiver, [1, 0], logprobs=model.sampler_logprobs)
    seen = make.sampled(peer, [0.0, 0.0], texts=[one.completion for one in group.answers], finished=False)
    told = make.score(request_id("own", group.ticket), [trace_of(one, peer) for one in seen.answers])
    absorbed = step_of(build("copd", **DISTIL, min_agreement=0), [group], [told])
    for row in absorbed.examples:
        assert math.isnan(row.teacher_logprobs[-1])
        assert np.isfinite(row.teacher_logprobs[:-1]).all()
        assert not row.advantages.any()


@pytest.mark.parametrize(("share", "is_open"), [(0.75, True), (0.76, False)])
def test_the_gate_opens_by_the_share_of_spans_that_agree(build, make, receiver, step_of, lab, share, is_open):
    """One token in four is a nat and more away; a closed gate leaves the own objective, and is counted."""
    group = made_of_four_tokens(make, receiver)
    told = make.scored_by(receiver, group, lambda ids: np.array([-0.5, -1.4, -0.6, -1.6]))
    regime, model = build("copd", **DISTIL, min_agreement=share), lab.model()
    absorbed = step_of(regime, [group], [told])
    counts = absorbed.counts
    assert counts["sharing/agreement/peer"] == 0.75
    assert counts["sharing/gated_rows"] == (0 if is_open else 2)
    assert [row.teacher_logprobs is not None for row in absorbed.examples] == [is_open] * 2
    assert all(map(is_known, counts))
    if not is_open:
        alone = build("independent")
        expected = lab.gradient(step_of(alone, [group]), alone, model)
        assert all(map(torch.equal, lab.gradient(absorbed, regime, model), expected))


def made_of_four_tokens(make, receiver):
    """A mixed group of two equal answers, of four tokens at -0.5 nats each."""
    text = next(
        text
        for text in (b"yz", b"yzq", b"zqv", b"zqvw")
        if len(make.sampled(receiver, [1.0], texts=[text]).answers[0].token_ids) == 16
    )
    return make.sampled(receiver, [1, 0], texts=[text, text])


def test_the_gate_is_one_for_each_teacher(build, make_context, make, receiver, step_of):
    """The one that agrees teaches, the other does not."""
    context = make_context(peers=("a", "b"))
    regime = build("copd", context, **DISTIL, teaches={"a": ["words"], "b": ["other"]})
    groups = [make.sampled(receiver, [1, 0], "p"), make.sampled(receiver, [1, 0], "q")]
    groups[1] = msgspec.structs.replace(groups[1], task="other")
    received = [
        make.scored_by(receiver, groups[0], -0.6, source="a"),
        make.scored_by(receiver, groups[1], -2.6, source="b"),
    ]
    absorbed = step_of(regime, groups, received)
    found = {(row.prompt_id, row.teacher_logprobs is not None) for row in absorbed.examples}
    assert found == {("p", True), ("q", False)}
    counts = absorbed.counts
    assert (counts["sharing/agreement/a"], counts["sharing/agreement/b"], counts["sharing/gated_rows"]) == (1, 0, 2)


def test_only_the_policy_that_was_asked_teaches(build, make_context, make, receiver, step_of):
    """A score that another one sends of itself is ignored, also after the asked one's."""
    regime = build(
        "copd", make_context(peers=("a", "b")), **DISTIL, min_agreement=0, teaches={"a": ["words"], "b": ["x"]}
    )
    group = make.sampled(receiver, [1, 0])
    assert regime.publish(group, make.author())[0].scorer == "a"
    scores = [make.scored_by(receiver, group, -0.6, source=source) for source in "ab"]
    absorbed = step_of(regime, [group], scores)
    assert {row.examined.source for row in absorbed.examples} == {"a"}
    assert absorbed.counts["regime/ignored_other"] == 1.0


def test_who_teaches_on_which_task(build, make_context, make, receiver, step_of):
    """Those who are named on a group's task; several take turns; no task of anybody's is trained by rewards."""
    context = make_context(peers=("a", "b", "c"))
    group = make.sampled(receiver, [1, 0])

    def asked(regime, task="words"):
        groups = [msgspec.structs.replace(group, prompt_id=str(n), task=task) for n in range(60)]
        told = [regime.publish(one, make.author()) for one in groups]
        return {one.scorer for records in told for one in records}

    everybody = build("copd", context, rl_steps=0)
    assert asked(everybody) == set("abc")
    assert everybody.asking.scorer == "a, b, c"
    named = build("copd", context, rl_steps=0, teaches={"a": ["words"], "b": ["words", "x"], "own": ["y"]})
    assert (asked(named), asked(named, "x"), asked(named, "y")) == ({"a", "b"}, {"b"}, set())
    assert named.asking.scorer == "a, b"
    alone = build("copd", context, rl_steps=0, teaches={"own": ["words"]})
    assert alone.asking is None
    assert alone.components == build("independent", context).components


def test_term_and_patience(build, make_context):
    """The own clips, dual clip and correction; the table's waits."""
    regime = build("copd", make_context(method="dapo", dual_clip=3), coefficient=0.3, peer_wait_s=4, spreading="none")
    tis = Correction("token", "truncate", 0.0, 5.0)
    own = Clipped(0.2, 0.28, dual_clip=3.0, correction=tis)
    (component,) = regime.components
    assert (component.term, component.spreading) == (Distilled(own, 0.3, 5.0), "none")
    assert (regime.patience.hold_versions, regime.patience.wait_s) == (1, 4)


def test_unusable_scores_are_counted_and_trained_by_rewards(build, make, peer, receiver, step_of, record):
    """Unscored and lying ones are told apart; their rows keep the advantages of the rewards."""
    group = make.sampled(receiver, [1, 0, 0])
    told = make.scored_by(peer, group, -0.1)
    lie = make.sampled(peer, [0.0], texts=[b"no"]).answers[0]
    scores = [told.record.scores[0], None, trace_of(lie, peer)]
    regime = build("copd", **DISTIL, min_agreement=0)
    absorbed = step_of(regime, [group], [make.score(request_id("own", group.ticket), scores)])
    assert [(row.teacher_logprobs is None, bool(row.advantages.any())) for row in absorbed.examples] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    counts = absorbed.counts | record(regime, absorbed)
    assert (counts["sharing/scored_rows"], counts["sharing/unscored_rows"], counts["sharing/asked_rows"]) == (1, 1, 3)
    assert counts["align/rejected/lengths/peer"] == 1
    assert all(map(is_known, counts))


def test_the_reference_still_holds_rows_of_equal_rewards(build, make_context, make, receiver, step_of):
    """With a regularizer the rows of an unscored group of equal rewards stay, as under the own objective."""
    group = make.sampled(receiver, [1, 1])
    for kl, size in ((None, 0), (0.1, 2)):
        absorbed = step_of(build("copd", make_context(kl_coefficient=kl), rl_steps=0), [group])
        assert len(absorbed.examples) == size
        assert absorbed.denominators == {"policy_gradient": 2.0}


def test_masked_answers_are_left_out_and_keep_the_others_scores(build, make_context, make, receiver, step_of):
    """An answer that was cut is scored with its group, and not trained."""
    whole, cut = (make.sampled(receiver, [1, 0, 0], finished=finished) for finished in (True, False))
    group = msgspec.structs.replace(whole, answers=[cut.answers[0], *whole.answers[1:]])
    regime = build("copd", make_context(mask_cut_answers=True), **DISTIL, min_agreement=0)
    absorbed = step_of(regime, [group], [make.scored_by(receiver, group, -0.1)])
    assert len(absorbed.examples) == 2
    assert all(row.teacher_logprobs is not None for row in absorbed.examples)
    assert absorbed.denominators == {"policy_gradient": 2.0}


def id_of(tokenizer, unit):
    """Of a unit in the middle of an answer, or of its end."""
    return tokenizer.id_of(unit, opens=False) if unit else tokenizer.eos_id


def told_units(tokenizer, texts, tops):
    """Of every text, in the tokens of `tokenizer`, the same units: bytes -> probability."""
    ids = [id_of(tokenizer, unit) for unit in tops]
    nats = [math.log(share) for share in tops.values()]
    sizes = [len(unpack_array(text.token_ids, "i4")) for text in texts]
    return [encode_units(np.array([ids] * n, np.int32), np.array([nats] * n, np.float32), tokenizer) for n in sizes]


def with_units(make, tokenizer, group, tops, *, source="peer"):
    """What a teacher with this tokenizer answers about `group`, with units."""
    seen = make.sampled(tokenizer, [0.0] * len(group.answers), texts=[one.completion for one in group.answers])
    traces = [trace_of(one, tokenizer) for one in seen.answers]
    units = told_units(tokenizer, seen.answers, tops)
    return make.score(request_id("own", group.ticket), traces, source=source, units=units)


def test_units_are_asked_for(build, make, receiver):
    """So many as the table says; without, the request has no word of it."""
    group = make.sampled(receiver, [1, 0])
    (plain,) = build("copd", **DISTIL, top_units=0).publish(group, make.author())
    (asking,) = build("copd", **DISTIL, top_units=4).publish(group, make.author())
    assert asking.num_units == 4
    assert plain.num_units is msgspec.UNSET
    assert b"num_units" not in msgspec.msgpack.encode(plain)
    assert msgspec.structs.replace(asking, num_units=msgspec.UNSET) == plain


@pytest.mark.parametrize("is_finer", [True, False])
def test_units_stand_where_both_sides_have_one_token(build, make_context, make, receiver, peer, lab, step_of, is_finer):
    """Where a span is more, the sampled difference stands; the gradient is that of both as written."""
    mine, theirs = (peer, receiver) if is_finer else (receiver, peer)
    tops = {b"y": 0.5, b"a": 0.2, b"": 0.1}
    context, model = replace(make_context(), receiver=mine), lab.model()
    group = make.sampled(mine, [1, 0], logprobs=model.sampler_logprobs, texts=[b"reverse: yah", b"y"])
    regime = build("copd", context, **DISTIL, top_units=3, coefficient=0.7, min_agreement=0)
    absorbed = step_of(regime, [group], [with_units(make, theirs, group, tops)])

    kinds = []

    def slow(model):
        total = 0.0
        for row, answer in zip(absorbed.examples, group.answers, strict=True):
            ids = unpack_array(answer.token_ids, "i4")
            (seen,) = make.sampled(theirs, [0.0], texts=[answer.completion]).answers
            lengths = [[len(of.completion_bytes(one[n : n + 1])) or 1 for n in range(len(one))]
                       for of, one in ((mine, ids), (theirs, unpack_array(seen.token_ids, "i4")))]  # fmt: skip
            log_pi, terms = model.logprobs(np.array([1, 2, 3]), ids), []
            for own_places, told_places in chunks(*lengths):
                kinds.append((len(own_places), len(told_places)))
                if kinds[-1] == (1, 1):
                    before = int(ids[own_places[0] - 1]) if own_places[0] else 3
                    every = torch.log_softmax(model.embed[before] @ model.weight.T, -1).exp()
                    p = [every[id_of(mine, unit)] for unit in tops]
                    events = [*zip(p, tops.values(), strict=True), (1 - sum(p), 1 - sum(tops.values()))]
                    terms.append(0.7 * sum(a * math.log(a.item() / b) for a, b in events))
                else:
                    gap = float(row.teacher_logprobs[own_places[0]]) - log_pi[own_places].sum().item()
                    terms += [-0.7 * gap * log_pi[place] for place in own_places]
            total = total + sum(terms) / len(terms) / 2
        return total

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))
    assert {(1, 1)} < set(kinds), "says nothing: all spans are alike"
    told = sum(kind == (1, 1) for kind in kinds)
    assert absorbed.counts["sharing/unit_tokens"] == pytest.approx(told / sum(own for own, _ in kinds))
    assert absorbed.counts["sharing/unit_mass"] == pytest.approx(0.8, abs=1e-5)
    assert all(is_known(name) for name in absorbed.counts)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("other_ends", [(), (5,)])
def test_a_teacher_whose_likeliest_are_the_own_ones_moves_nothing(
    build, make, receiver, lab, step_of, monkeypatch, finished, other_ends
):
    """By units that hold nearly all of what the policy gives, each as likely to both, whichever of its ends it uses."""
    model = lab.model()
    group = make.sampled(receiver, [1, 0], logprobs=model.sampler_logprobs, finished=finished)
    with torch.no_grad():
        table = torch.log_softmax(model.embed @ model.weight.T, -1)
    units = []
    for answer in group.answers:
        ids = unpack_array(answer.token_ids, "i4")
        of_places = table[[3, *ids[:-1].tolist()]]
        likeliest = of_places.index_fill(-1, torch.tensor([receiver.eos_id]), 0.0).topk(20).indices  # the end is first
        nats = of_places.gather(-1, likeliest).float().numpy()
        units.append(encode_units(likeliest.numpy().astype(np.int32), nats, receiver))
    scores = [trace_of(answer, receiver) for answer in group.answers]
    monkeypatch.setattr(receiver, "eos_ids", (*other_ends, *receiver.eos_ids))
    regime = build("copd", **DISTIL, top_units=20, min_agreement=0)
    absorbed = step_of(regime, [group], [make.score(request_id("own", group.ticket), scores, units=units)])
    assert absorbed.counts["sharing/unit_tokens"] == 1
    assert max(float(one.abs().max()) for one in lab.gradient(absorbed, regime, model)) < 1e-5


def test_units_that_cannot_be_make_the_score_none(build, make, receiver, step_of):
    """Probabilities above 1 are no opinion; as many lists as scores, or the record is none."""
    group, regime = make.sampled(receiver, [1, 0]), build("copd", **DISTIL, top_units=2, min_agreement=0)
    lie = with_units(make, receiver, group, {b"y": 0.9, b"a": 0.8})
    assert step_of(regime, [group], [lie]).counts["sharing/scored_rows"] == 0
    group = make.sampled(receiver, [1, 0])
    sound = with_units(make, receiver, group, {b"y": 0.9}).record
    short = Received(msgspec.structs.replace(sound, units=sound.units[:1]), 0)
    assert step_of(regime, [group], [short]).counts["sharing/absent_rows"] == 2


def test_units_that_nobody_asked_for_are_left_aside(build, make, receiver, step_of):
    """A learner whose kernel knows none is not handed any."""
    group = make.sampled(receiver, [1, 0])
    told = with_units(make, receiver, group, {b"y": 0.9})
    rows = step_of(build("copd", **DISTIL, top_units=0, min_agreement=0), [group], [told]).examples
    assert [row.teacher_units for row in rows] == [None, None]
    assert all(row.teacher_logprobs is not None for row in rows)
