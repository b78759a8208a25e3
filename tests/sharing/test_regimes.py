import numpy as np
import pytest
from msgspec import structs

from mrl.config.policy_tables import PolicyTable
from mrl.errors import ConfigError
from mrl.records.codec import encode
from mrl.sharing.independent import IndependentParameters, IndependentRegime
from mrl.sharing.own_objective import METHODS
from mrl.sharing.own_traces import traces_of
from mrl.sharing.regimes import (
    REGIMES,
    build_regime,
    check_objectives,
    check_sharing,
    scorers,
    shares,
    sharing_schema,
)
from mrl.sharing.sgt import SgtRegime


def test_regimes_are_built_by_name(make_context):
    """The table's `regime` chooses, the sub-table of that name holds its parameters; without a name nobody shares."""
    context = make_context()
    sgt = build_regime({"regime": "sgt", "sgt": {"lambda": 0.3, "gate_age_versions": 5}}, context)
    assert isinstance(sgt, SgtRegime)
    assert [c.coefficient for c in sgt.components] == [1.0, 0.3]
    assert sgt.parameters.gate_age_versions == 5
    assert isinstance(build_regime({}, context), IndependentRegime)


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_builds_and_says_what_it_is(name, build):
    """Own rows come first, names are distinct, peers' rows are named as such."""
    regime = build(name)
    names = [component.name for component in regime.components]
    assert names[0] == "policy_gradient"
    assert len(set(names)) == len(names)
    assert [component.rows for component in regime.components] == ["own", "peer"][: len(names)]
    assert regime.awaited() == []
    assert shares({"regime": name}) == (name != "independent") == (regime.asking is not None)
    with pytest.raises(ConfigError, match=f"sharing.{name}.nonsense: unknown key; got 'nonsense'") as caught:
        build(name, nonsense=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, kind in REGIMES.items() if kind.reuses])
def test_own_rows_are_the_same_when_a_group_is_absorbed_again(name, build, make_group, make_success, step_of):
    """In another batch and later, behind a rescue: what a run may train on again (`learner.reuse_share`)."""
    regime, again = build(name), make_group([1, 0, 0], "again")
    failed, others = make_group([0, 0], "p"), make_group([0, 1], "q")
    first = step_of(regime, [again, failed])
    regime.hear([make_success(prompt_id="p")], step=1)
    regime.asks(others)

    second = regime.absorb([others, again, failed], step=1, rng=np.random.default_rng(0))

    own = [[row for row in one.examples if row.prompt_id == "again"] for one in (first, second)]
    assert len(own[0]) == 3
    assert [(row.component, *map(bytes, (row.advantages, row.weights, row.behaviour_logprobs))) for row in own[0]] == [
        (row.component, *map(bytes, (row.advantages, row.weights, row.behaviour_logprobs))) for row in own[1]
    ]
    assert len(second.rescued) == (name == "sgt")
    third = regime.absorb([failed], step=2, rng=np.random.default_rng(0))
    assert (third.examples, regime.awaited()) == ([], []), "a failure that comes again is rescued no second time"


WIRE = {
    "prp": (240, 125, 13),
    "hacpo": (240, 125, 13),
    "graft": (240, 125, 13),
    "xgrpo": (240, 9, 0),
    "sgt": (360, 0, 13),
    "rlad": (270, 35, 0),
    "copd": (270, 35, 0),
    "score": (280, 40, 9),
}
"""Bytes per prompt, per answer and per token, as the regimes' modules say; texts come on top. SGT sends one answer."""


@pytest.mark.parametrize("name", WIRE)
@pytest.mark.parametrize("num_answers", [2, 12])
@pytest.mark.parametrize("num_bytes", [10, 400])
def test_records_are_as_large_as_the_modules_say(build, make, receiver, name, num_answers, num_bytes):
    """Within a tenth, for short and long answers, few and many, with ids of tickets and prompts of a usual length."""
    rewards = [1.0] + [0.0] * (num_answers - 1)
    texts = [b"z" * num_bytes] * num_answers
    group = structs.replace(make.sampled(receiver, rewards, "words/trim/000123", texts=texts), ticket="0.1234")
    author = make.author("policy", receiver.fingerprint)
    if name == "score":
        traces = [structs.replace(one, token_ids=None) for one in traces_of(group.answers, receiver)]
        record = structs.replace(make.score("policy:0.1234:score", traces).record, fingerprint=receiver.fingerprint)
    else:
        (record,) = build(name, **{"copd": {"rl_steps": 0}}.get(name, {})).publish(group, author)
    fixed, per_answer, per_token = WIRE[name]
    num_sent, num_texts = (1 if name == "sgt" else num_answers), 0 if name in ("xgrpo", "score") else num_bytes
    said = fixed + num_sent * (per_answer + num_texts + per_token * len(group.answers[0].token_ids) // 4)
    assert len(encode(record)) == pytest.approx(said, rel=0.1)


def policies(*names, frozen=()):
    return {name: PolicyTable(frozen=name in frozen) for name in names}


def test_scorers_are_the_teachers_of_those_that_learn():
    """A frozen policy asks nobody; without a name the first other policy teaches; other regimes have no scorers."""
    rlad = {"regime": "rlad"}
    assert scorers({"regime": "sgt"}, policies("a", "b")) == scorers({}, policies("a")) == frozenset()
    assert scorers(rlad, policies("a", "b")) == {"a", "b"}
    assert scorers(rlad, policies("student", "teacher", frozen=["teacher"])) == {"teacher"}
    assert scorers(rlad | {"rlad": {"teacher": "c"}}, policies("a", "b", "c")) == {"c"}
    assert scorers(rlad | {"rlad": {"teacher": "nobody"}}, policies("a", "b")) == frozenset()
    assert scorers(rlad, policies("a")) == frozenset()
    copd = {"regime": "copd"}
    assert scorers(copd, policies("a", "b", "t", frozen=["t"])) == {"a", "b", "t"}
    assert scorers(copd | {"copd": {"teaches": {"b": ["trim"]}}}, policies("a", "b", "c")) == {"b"}
    assert scorers(copd | {"copd": {"distil_steps": 0}}, policies("a", "b")) == frozenset()


def maximising(**objective):
    return {"a": PolicyTable(objective=objective), "b": PolicyTable()}


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("objective", [{"method": "dapo"}, {"drop_uniform_groups": True}])
def test_groups_that_a_regime_learns_of_are_not_to_be_dropped(name, objective):
    """GRAFT replaces failed groups, and PRP, XGRPO and HACPO pool them with those of peers."""
    if name in ("independent", "sgt", "prefix", "rlad"):
        return check_objectives({"regime": name}, maximising(**objective), "run.toml")
    with pytest.raises(ConfigError) as caught:
        check_objectives({"regime": name}, maximising(**objective), "run.toml")
    assert str(caught.value) == (
        f"run.toml: policies.a.objective.drop_uniform_groups: {name} learns from the groups that this drops; got True; "
        "cure: set policies.a.objective.drop_uniform_groups = false"
    )
    check_objectives({"regime": name}, maximising(**objective | {"drop_uniform_groups": False}), "run.toml")


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_needs_a_clip_of_tokens(method):
    """With any other term alpha = 1 would not be the own objective; the teacher itself learns by what it likes."""
    rlad = {"regime": "rlad", "rlad": {"teacher": "b"}}
    policies = maximising(method=method)
    check_objectives({"regime": "sgt"}, policies, "run.toml")
    check_objectives({"regime": "rlad", "rlad": {"teacher": "a"}}, policies, "run.toml")
    if method in ("grpo", "dr_grpo", "dapo"):
        return check_objectives(rlad, policies, "run.toml")
    with pytest.raises(ConfigError) as caught:
        check_objectives(rlad, policies, "run.toml")
    assert str(caught.value) == (
        "run.toml: policies.a.objective.method: with a teacher, token ratios must be clipped; "
        f"got '{method}'; wanted grpo, dr_grpo or dapo"
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"regime": "sgtt"}, r"run.toml: .*no such regime; got 'sgtt'; .*independent, .*sgt.*did you mean sgt"),
        ({"regime": 7}, "no such regime"),
        ({"regime": "sgt", "lambda": 0.1}, "sharing.lambda: unknown key; got 'lambda'; wanted one of regime, indep"),
        ({"regime": "sgt", "stg": {}}, r"sharing.stg: unknown key; .*did you mean sharing.sgt\?"),
        ({"regime": "sgt", "sgt": 3}, r"sharing.sgt: not a table; got 3; wanted \[sharing.sgt\]"),
        (
            {"regime": "sgt", "sgt": {"lamda": 0.1}},
            r"sharing.sgt.lamda: unknown key; .*did you mean sharing.sgt.lambda\?",
        ),
        ({"regime": "independent", "sgt": {"lamda": 0.1}}, "sharing.sgt.lamda: unknown key"),
        ({"independent": {"lambda": 0.1}}, "sharing.independent.lambda: unknown key; .*an empty table"),
        ({"regime": "sgt", "sgt": {"lambda": -1}}, "sharing.sgt.lambda: invalid value; got -1"),
        ({"regime": "sgt", "sgt": {"lambda": float("nan")}}, "sharing.sgt.lambda: invalid value"),
        (
            {"regime": "sgt", "sgt": {"normaliser": "rows"}},
            "sgt.normaliser: invalid value; got 'rows'.*'prompts', 'rescues' or 'tokens'",
        ),
        ({"regime": "sgt", "sgt": {"max_pending": 0, "lamda": 1}}, "sharing.sgt.lamda: unknown key"),
        ({"regime": "prp", "prp": {"variant": "plain"}}, "sharing.prp.variant: invalid value; got 'plain'"),
        (
            {"regime": "xgrpo", "xgrpo": {"baseline": "peer_only", "peer_weight": 0.5}},
            "sharing.xgrpo: baseline 'peer_only' already means peer_weight = 1; cure: remove one of them",
        ),
        (
            {"regime": "xgrpo", "xgrpo": {"window_steps": 3}},
            "sharing.xgrpo: window_steps has no effect; got baseline 'pooled'; wanted 'rescaled'",
        ),
        ({"regime": "xgrpo", "xgrpo": {"peer_weight": 2}}, "sharing.xgrpo.peer_weight: invalid value; got 2"),
        ({"regime": "hacpo", "hacpo": {"lower": 1.5}}, "sharing.hacpo.lower: invalid value; got 1.5"),
        (
            {"regime": "graft", "graft": {"flor": 1}},
            r"sharing.graft.flor: unknown key; .*did you mean sharing.graft.floor",
        ),
        ({"regime": "rlad", "rlad": {"alpha": -1}}, "sharing.rlad.alpha: invalid value; got -1"),
        ({"regime": "copd", "copd": {"rl_steps": -1}}, "sharing.copd.rl_steps: invalid value; got -1"),
        ({"regime": "copd", "copd": {"min_agreement": 1.5}}, "sharing.copd.min_agreement: invalid value; got 1.5"),
        ({"regime": "copd", "copd": {"teaches": {"a": []}}}, "sharing.copd.teaches: invalid value; got"),
        (
            {"regime": "copd", "copd": {"rl_steps": 0, "distil_steps": 0}},
            "sharing.copd: rl_steps and distil_steps are both 0; wanted at least one of them >= 1",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(table, message):
    """An unknown regime, an unknown key or a bad value names the key, what was found and what was wanted."""
    with pytest.raises(ConfigError, match=message) as caught:
        check_sharing(table, "run.toml")
    assert "\n" not in str(caught.value)


def test_parameters_of_other_regimes_may_stand_beside():
    """Choosing another regime by one override leaves the tables of the others in place."""
    assert check_sharing({"regime": "independent", "sgt": {"lambda": 0.3}}, "run.toml") == IndependentParameters()


def test_schema_describes_every_regime():
    """Each regime has its closed table, with the keys that a config file uses."""
    properties = sharing_schema()["properties"]
    assert properties["regime"]["anyOf"][0]["enum"] == list(REGIMES)
    assert "lambda" in properties["sgt"]["properties"]
    assert all(not properties[name]["additionalProperties"] for name in REGIMES)
