"""Floors of a configuration: all have to hold at once on the units that the policies fit."""

from pathlib import Path

import pytest

from mrl.allocation.floors import check_floors
from mrl.cli.main import main
from mrl.config.load import validate
from mrl.errors import ConfigError

CONFIG = """
[run]
name = "r"
steps = 3
[tasks.copy]
source = "words"
dataset = "copy"
[allocation]
units = ["cpu:0", "cpu:1"]
floor_units = 2
[policies.a]
model = "m"
[policies.b]
model = "m"
"""


def test_more_floors_than_units_of_a_kind_are_one_clear_line_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that would start it."""
    path = tmp_path / "r.toml"
    path.write_text(CONFIG)
    for command in (["train"], ["check"], ["launch", "--dry-run"], ["launch", "--slurm", "--cpus", "4"]):
        assert main([*command, str(path)]) == 2
        line = capsys.readouterr().err
        told = "too few cpu units for the floors of all policies; got '2 * 2 policies > 2 units'"
        assert f"{path}: allocation.floor_units: {told}" in line
        assert "wanted floor_units <= 1" in line


def test_floors_of_all_policies_need_units_also_where_some_fit_only_a_few() -> None:
    """Three floors on three units, one of which fits only the first; two units for three would not do."""
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {
            "a": {"model": "m", "rollout": {"unit_types": ["slow"]}},
            "b": {"model": "m"},
            "c": {"model": "m"},
        },
        "allocation": {"units": ["cpu:0", "cpu:1", "cpu:2"], "unit_types": {"slow": ["cpu:1"]}},
    }
    check_floors(validate(tables, where=""), where="")
    tables["allocation"]["units"].pop()  # type: ignore[index]
    with pytest.raises(ConfigError, match="got '1 \\* 3 policies > 2 units'"):
        check_floors(validate(tables, where=""), where="")


@pytest.mark.parametrize(
    ("types", "units", "floor", "got", "most"),
    [
        (["x y", "y z", "x z", "x y"], "x y z", 1, "1 * 4 policies > 3 units", 0),
        (["x y", "y z", "x z"], "x y z", 1, "", 0),
        (["x y", "y z", "x z"], "x x y y z", 2, "2 * 3 policies > 5 units", 1),
        (["x y", "x"], "x y y", 2, "2 * 1 policies > 1 units", 1),
        (["x", "x", "y", "y"], "x x x y", 2, "2 * 4 policies > 4 units", 0),
        (["x", "x", "y"], "x y y y", 10**9, "1000000000 * 3 policies > 4 units", 0),
        (["x", "x", "y"], "x x x x x y y", 3, "3 * 3 policies > 7 units", 2),
    ],
)
def test_all_floors_have_to_hold_on_the_units_that_the_policies_fit(
    types: list[str], units: str, floor: int, got: str, most: int
) -> None:
    """Where they do not, the line counts those who compete, and names the largest floor that would do."""
    names = [f"cpu:{index}" for index, _ in enumerate(units.split())]
    pairs = list(zip(units.split(), names, strict=True))
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {
            f"p{index}": {"model": "m", "rollout": {"unit_types": row.split()}} for index, row in enumerate(types)
        },
        "allocation": {
            "units": names,
            "unit_types": {kind: [name for other, name in pairs if other == kind] for kind in "xyz"},
            "floor_units": floor,
            "slots": 8 * len(names),
        },
    }
    if not got:
        check_floors(validate(tables, where=""), where="")
        return
    with pytest.raises(ConfigError) as raised:
        check_floors(validate(tables, where=""), where="")
    assert f"got '{got}'; wanted floor_units <= {most}" in str(raised.value)
    assert ("so that policies take turns" in str(raised.value)) == (most == 0)
