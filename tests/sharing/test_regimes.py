import pytest

from mrl.errors import ConfigError
from mrl.sharing.independent import IndependentParameters, IndependentRegime
from mrl.sharing.regimes import REGIMES, build_regime, check_sharing, sharing_schema
from mrl.sharing.sgt import SgtRegime


def test_regimes_are_built_by_name(receiver):
    """The table's `regime` chooses, the sub-table of that name holds its parameters; without a name nobody shares."""
    how = {"policy": "own", "receiver": receiver, "max_answer_tokens": 8}
    sgt = build_regime({"regime": "sgt", "sgt": {"lambda": 0.3, "gate_age_versions": 5}}, **how)
    assert isinstance(sgt, SgtRegime)
    assert [c.coefficient for c in sgt.components] == [1.0, 0.3]
    assert sgt.parameters.gate_age_versions == 5
    assert isinstance(build_regime({}, **how), IndependentRegime)
    assert {build_regime({"regime": name}, **how).policy for name in REGIMES} == {"own"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"regime": "sgtt"}, r"run.toml: .*no such regime; got 'sgtt'; .*independent, sgt.*did you mean sgt"),
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
        ({"regime": "sgt", "sgt": {"lambda": -1}}, "sharing.sgt.lambda: not valid; got -1"),
        ({"regime": "sgt", "sgt": {"lambda": float("nan")}}, "sharing.sgt.lambda: not valid"),
        (
            {"regime": "sgt", "sgt": {"normaliser": "rows"}},
            "sgt.normaliser: not valid; got 'rows'.*'rescues' or 'prompts'",
        ),
        ({"regime": "sgt", "sgt": {"max_pending": 0, "lamda": 1}}, "sharing.sgt.lamda: unknown key"),
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
    assert properties["regime"]["enum"] == list(REGIMES)
    assert "lambda" in properties["sgt"]["properties"]
    assert all(not properties[name]["additionalProperties"] for name in REGIMES)
