import pytest

from mrl.errors import ConfigError
from mrl.sharing.independent import IndependentRegime
from mrl.sharing.regimes import REGIMES, build_regime, check_sharing, sharing_schema
from mrl.sharing.sgt import SgtRegime


def test_regimes_are_built_by_name(receiver):
    """The table's `regime` chooses, its other keys are the parameters; without a name there is no sharing."""
    how = {"policy": "own", "receiver": receiver, "max_answer_tokens": 8}
    sgt = build_regime({"regime": "sgt", "lambda": 0.3, "gate_age_versions": 5}, **how)
    assert isinstance(sgt, SgtRegime)
    assert [c.coefficient for c in sgt.components] == [1.0, 0.3]
    assert sgt.parameters.gate_age_versions == 5
    assert isinstance(build_regime({}, **how), IndependentRegime)
    assert {build_regime({"regime": name}, **how).policy for name in REGIMES} == {"own"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"regime": "sgtt"}, r"run.toml: .*no such regime; got 'sgtt'; .*independent, sgt.*did you mean 'sgt'"),
        ({"regime": 7}, "no such regime"),
        ({"regime": "sgt", "lamda": 0.1}, r"sharing.lamda: unknown key; .*did you mean sharing.lambda\?"),
        ({"regime": "independent", "lambda": 0.1}, "sharing.lambda: unknown key; .*one of regime"),
        ({"regime": "sgt", "lambda": -1}, "sharing.lambda: not valid; got -1"),
        ({"regime": "sgt", "lambda": float("nan")}, "sharing.lambda: not valid"),
        ({"regime": "sgt", "normaliser": "rows"}, "sharing.normaliser: not valid; got 'rows'.*'rescues' or 'prompts'"),
        ({"regime": "sgt", "max_pending": 0, "lamda": 1}, "sharing.lamda: unknown key"),
    ],
)
def test_mistakes_are_told_in_one_line(table, message):
    """An unknown regime, an unknown key or a bad value names the key, what was found and what was wanted."""
    with pytest.raises(ConfigError, match=message) as caught:
        check_sharing(table, "run.toml")
    assert "\n" not in str(caught.value)


def test_schema_describes_every_regime():
    """Each regime is one choice, with the keys that a config file uses."""
    choices = sharing_schema()["anyOf"]
    assert [choice["properties"]["regime"]["const"] for choice in choices] == list(REGIMES)
    assert "lambda" in choices[1]["properties"]
    assert all(not choice["additionalProperties"] for choice in choices)
