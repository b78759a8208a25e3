import math

import msgspec
import pytest

from mrl.config.policy_tables import ObjectiveTable
from mrl.config.rules.objective_rules import UNDIVIDED
from mrl.objectives.specs import Cispo, Clipped, Correction, Dppo, Regularizer
from mrl.records.episodes import EpisodeSegment
from mrl.sharing.own_objective import METHODS, own_objective

TIS = Correction("token", "truncate", 0.0, 5.0)
GEOMETRIC = Correction("geometric", "truncate", 0.0, 5.0)
"""That of a ratio of whole answers."""


def resolved(**keys):
    return own_objective(ObjectiveTable(**keys), max_answer_tokens=10)


@pytest.mark.parametrize(
    ("method", "term", "advantage", "aggregation"),
    [
        ("grpo", Clipped(0.2, 0.2, "token", "proximal", None, TIS), "group_std", "sequence_mean"),
        ("dr_grpo", Clipped(0.2, 0.2, correction=TIS), "group_mean", "constant"),
        ("dapo", Clipped(0.2, 0.28, correction=TIS), "group_std", "token_mean"),
        ("gspo", Clipped(3e-4, 4e-4, "sequence", correction=GEOMETRIC), "group_std", "sequence_mean"),
        ("cispo", Cispo(1.0, 0.2, TIS), "group_std", "token_mean"),
        ("dppo", Dppo(0.2), "group_mean", "token_mean"),
    ],
)
def test_methods_stand_for_their_published_values(method, term, advantage, aggregation):
    """A method's name alone gives its term, its advantage and its mean; none of them regularises by itself."""
    found = resolved(method=method)
    assert (found.term, found.advantage, found.aggregation) == (term, advantage, aggregation)
    assert found.regularizer is None
    assert found.drop_uniform_groups == (method == "dapo")
    assert found.max_resampling == 10


def test_every_method_of_the_configuration_is_known():
    """The table of methods and the schema name the same."""
    choices = ObjectiveTable.model_fields["method"].annotation.__args__
    assert set(choices) == set(METHODS)


@pytest.mark.parametrize("name", ["independent", "prp", "xgrpo", "hacpo"])
@pytest.mark.parametrize("correction", [0, 1])
def test_the_deviation_is_that_of_the_objective(build, make_context, make, receiver, step_of, name, correction):
    """Whether a peer has answered or not: all prompts of a policy are measured alike, at its source too."""
    regime = build(name, make_context(std_correction=correction))
    alone, met = (make.sampled(receiver, rewards, prompt) for rewards, prompt in (([1, 0, 0], "a"), ([1, 0], "m")))
    peers = make.sampled(receiver, [1, 1], "m")
    received = {"xgrpo": [make.value([1, 1], "m")], "independent": []}.get(name, [make.rollout(peers, receiver)])
    found = step_of(regime, [alone, met], received).examples
    assert found[0].advantages[0] == pytest.approx((2 / 3) / math.sqrt((2 / 3) / (3 - correction)), rel=1e-4)
    pool = 2 if name == "independent" else 4
    mean = {"independent": 1 / 2, "hacpo": (1 + 2 * 2 / 5) / 4}.get(name, 3 / 4)  # omega = P(own) / P(peer) = 2 / 5
    deviation = math.sqrt({2: 1 / 2, 4: 3 / 4}[pool] / (pool - correction))
    assert found[3].advantages[0] == pytest.approx((1 - mean) / deviation, rel=1e-4)
    if name in ("prp", "hacpo"):
        (record,) = regime.publish(alone, make.author())
        assert record.answers[0].advantage == pytest.approx(float(found[0].advantages[0]))


@pytest.mark.parametrize(
    ("name", "parameters", "held"),
    [
        ("independent", {}, {"own"}),
        ("prp", {}, {"own", "peer"}),
        ("graft", {"balance": False, "floor": 0.0}, {"own", "peer"}),
        ("hacpo", {}, {"own"}),
        ("xgrpo", {}, {"own"}),
        ("sgt", {}, {"own"}),
    ],
)
def test_rows_are_held_to_the_reference(build, make_context, make, receiver, lab, step_of, name, parameters, held):
    """What a divergence adds to the gradient is that of k3 over the rows of `held`, under the regime's denominator."""
    model, reference, coefficient = lab.model(2), lab.model(7), 0.3
    groups = [
        make.sampled(receiver, [0, 0], logprobs=model.sampler_logprobs),
        make.sampled(receiver, [1, 0], "m", logprobs=model.sampler_logprobs),
    ]
    theirs = make.sampled(receiver, [1, 0], texts=[b"copy: hay", b"copy: yah"], logprobs=model.sampler_logprobs)
    received = {"xgrpo": [make.value([1, 0])], "sgt": [make.success()]}.get(name, [make.rollout(theirs, receiver)])
    regime, free = (build(name, make_context(kl_coefficient=kl), **parameters) for kl in (coefficient, None))
    absorbed, plain = (step_of(one, groups, received) for one in (regime, free))
    found = lab.gradient(absorbed, regime, model, reference=reference)
    without = lab.gradient(plain, free, model)

    def slow(model):
        rows = [row for row in absorbed.examples if row.source in held]
        assert len(rows) == (2 if name == "graft" else 4) + 2 * ("peer" in held)
        total = sum(lab.divergence(reference, row)(model) for row in rows)
        return coefficient * total / absorbed.denominators["policy_gradient"]

    lab.assert_same([one - other for one, other in zip(found, without, strict=True)], lab.score_of(model, slow))


def test_rules_of_the_table_know_which_methods_divide():
    """The configuration's rules cannot import the methods."""
    assert {method for method, keys in METHODS.items() if keys["advantage"] == "group_mean"} == set(UNDIVIDED)


def test_keys_that_are_given_win():
    """A key of the table replaces the method's value, zero and false included."""
    found = resolved(
        **{"method": "dapo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3, "advantage": "group_mean"},
        **{"aggregation": "constant", "drop_uniform_groups": False, "max_resampling": 2},
    )
    assert found.term == Clipped(0.1, 0.3, dual_clip=3, correction=TIS)
    assert (found.advantage, found.aggregation) == ("group_mean", "constant")
    assert (found.drop_uniform_groups, found.max_resampling) == (False, 2)
    assert resolved(drop_uniform_groups=True).drop_uniform_groups
    assert resolved(method="dppo", clip_high=0.1).term == Dppo(0.1)
    assert resolved(method="cispo", clip_low=0.5, clip_high=4).term == Cispo(0.5, 4, TIS)


def test_dapo_without_what_it_adds_is_grpo():
    """Equal clips, GRPO's mean, no filtering, no KL and no penalty of length: one and the same objective."""
    assert resolved(method="dapo") != resolved()
    keys = {"clip_high": 0.2, "aggregation": "sequence_mean", "drop_uniform_groups": False}
    assert resolved(method="dapo", **keys) == resolved(method="grpo")


def test_correction_can_be_chosen_or_left_out():
    """The table's correction goes into the term; "off" leaves the term alone."""
    table = {"level": "geometric", "action": "gate", "lower": 0.5, "upper": 2}
    assert resolved(correction=table).term.correction == Correction("geometric", "gate", 0.5, 2)
    assert resolved(correction={"level": "off"}).term.correction is None
    assert resolved(method="gspo", correction={"level": "off"}).term.correction is None
    assert resolved(method="gspo", correction={"level": "token", "upper": 2}).term.correction.level == "token"
    assert resolved(method="gspo", correction={"upper": 2}).term.correction == Correction("geometric", upper=2)


def test_regularizer_stands_when_something_is_regularised():
    """A divergence or an entropy bonus; coefficients of 0 are none."""
    assert resolved(kl_coefficient=0.001).regularizer == Regularizer(0.001, "k3", 0.0)
    assert resolved(entropy_coefficient=0.01).regularizer == Regularizer(0.0, "k3", 0.01)
    assert resolved(kl_coefficient=0.1, kl_estimator="k2").component().regularizer.kl_estimator == "k2"
    assert resolved(kl_coefficient=0, entropy_coefficient=0).regularizer is None


def test_component_of_own_rows():
    """The kind of the denominator follows from the mean; another term can stand in."""
    kinds = {name: resolved(aggregation=name).component().denominator for name in ("sequence_mean", "token_mean")}
    assert kinds == {"sequence_mean": "rows", "token_mean": "tokens"}
    own = resolved(method="dr_grpo").component("mine", term=Dppo())
    assert (own.name, own.term, own.coefficient, own.denominator, own.rows) == ("mine", Dppo(), 1.0, "constant", "own")


@pytest.mark.parametrize(
    ("aggregation", "weight", "denominator"),
    [("sequence_mean", 0.25, 3), ("token_mean", 1, 6), ("constant", 1, 30)],
)
def test_weights_and_denominators(aggregation, weight, denominator):
    """A mean over answers of token means; a mean over tokens; or a sum over answers times the token limit."""
    found = resolved(aggregation=aggregation)
    assert found.weights(4).tolist() == [weight] * 4
    assert found.weights(0).size == 0
    assert found.denominator([4, 0, 2]) == denominator
    assert found.denominator([]) == 1.0


def test_overlong_answers_lose_reward(make_group):
    """Two tokens of three lie before the buffer, the third is the limit and costs the whole penalty."""
    table = ObjectiveTable(overlong_buffer_tokens=1, overlong_penalty=0.5)
    group = make_group([1, 1])
    assert own_objective(table, max_answer_tokens=3).rewards(group).tolist() == [1, 0.5]
    assert resolved().rewards(group).tolist() == [1, 1]


def test_answers_of_one_turn_beside_episodes_have_a_limit_of_their_own(make_group):
    """That of a turn: the limit of all turns of an episode is one that they never reach."""
    table, group = ObjectiveTable(overlong_buffer_tokens=1, overlong_penalty=0.5), make_group([1, 1])
    objective = own_objective(table, max_answer_tokens=6, max_turn_tokens=3)
    assert objective.rewards(group).tolist() == [1, 0.5]
    turns = [EpisodeSegment(num_tokens=3, is_sampled=True, messages=())]
    played = msgspec.structs.replace(group.answers[1], segments=turns, ending="done")
    assert objective.rewards(msgspec.structs.replace(group, answers=[played])).tolist() == [1]


def test_clip_of_tokens():
    """Bounds of a whole row's ratio are not used for tokens; the correction of own rows stays."""
    assert resolved(clip_high=0.3).token_clip() == Clipped(0.2, 0.3, correction=TIS)
    assert resolved(method="gspo", dual_clip=4).token_clip() == Clipped(0.2, 0.2, dual_clip=4, correction=GEOMETRIC)
    assert resolved(method="cispo").token_clip() == Clipped(correction=TIS)
    assert resolved(method="dppo").token_clip() == Clipped()
