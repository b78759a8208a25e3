"""Units by name, and the mistakes that a configuration can make with them."""

import pytest

from mrl.config.load import validate
from mrl.config.rules.run_rules import check_rules
from mrl.config.rules.unit_rules import fitting_units
from mrl.config.unit_names import Unit, parse_units
from mrl.config.unit_types import named_types, seen_type
from mrl.errors import ConfigError


def check(
    units: list[str],
    *,
    devices: tuple[str, ...] = ("cpu", "cpu"),
    sync: bool = False,
    rollout: dict[str, object] | None = None,
    **allocation: object,
) -> None:
    policies = {
        f"p{index}": {"model": "m", "device": device, "rollout": rollout or {}} for index, device in enumerate(devices)
    }
    tables = {
        "run": {"name": "r", "steps": 3, "sync": sync},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": policies,
        "allocation": {"units": units, **allocation},
    }
    check_rules(validate(tables, where="here.toml"), where="here.toml")


def test_names_say_host_kind_and_devices() -> None:
    assert parse_units(["gpu:0", "cpu:4-6,1", "node2/gpu:1,0"]) == (
        Unit("gpu:0", "", "gpu", (0,)),
        Unit("cpu:4-6,1", "", "cpu", (1, 4, 5, 6)),
        Unit("node2/gpu:1,0", "node2", "gpu", (0, 1)),
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "cpu:",
        "tpu:0",
        "cpu:0:1",
        "cpu:3-1",
        "cpu:0,0",
        "cpu:0-1-2",
        "cpu:99999",
        "a b/cpu:0",
        "cpu:0-9999999999",
    ],
)
def test_what_is_no_unit_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"allocation.units: not a valid unit"):
        parse_units([name])


@pytest.mark.parametrize("names", [["cpu:0", "cpu:0"], ["cpu:0-2", "cpu:2"], ["a/gpu:1", "a/gpu:0,1"]])
def test_a_device_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="is in two units"):
        parse_units(names)


def test_the_same_device_of_two_hosts_or_kinds_is_two_devices() -> None:
    assert len(parse_units(["cpu:0", "gpu:0", "a/cpu:0", "b/cpu:0"])) == 4


def test_types_are_those_of_units_or_of_all_units_of_a_host() -> None:
    """A unit's own comes before its host's; who has none is left out."""
    units = parse_units(["gpu:0", "gpu:1", "n2/gpu:0", "n2/gpu:1"])
    named = {"H100": ["gpu:0"], "A10": ["n2"], "A10 40G": ["n2/gpu:1"]}
    assert named_types(named, units) == {"gpu:0": "H100", "n2/gpu:0": "A10", "n2/gpu:1": "A10 40G"}


def test_an_engine_fits_the_units_of_its_device_and_of_the_types_that_its_policy_names() -> None:
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {
            "a": {"model": "m"},
            "b": {"model": "m", "rollout": {"unit_types": ["fast", "huge"]}},
            "c": {"model": "m", "device": "cuda"},
        },
        "allocation": {
            "units": ["cpu:0", "cpu:1", "n2/cpu:0", "gpu:0"],
            "unit_types": {"fast": ["cpu:1"], "huge": ["n2"]},
        },
    }
    config = validate(tables, where="")
    check_rules(config, where="")
    found = {name: sorted(fitting_units(config, name)) for name in config.policies}
    assert found == {"a": ["cpu:0", "cpu:1", "n2/cpu:0"], "b": ["cpu:1", "n2/cpu:0"], "c": ["gpu:0"]}


@pytest.mark.parametrize(
    ("name", "models", "wanted"),
    [
        ("cpu:3", [], "cpu"),
        ("cpu:0-3", [], "cpu x4"),
        ("gpu:0", [], "gpu"),
        ("gpu:0", ["NVIDIA A10"], "NVIDIA A10"),
        ("gpu:0,1", ["NVIDIA A10", "NVIDIA A10"], "NVIDIA A10 x2"),
        ("gpu:0,1", ["NVIDIA H100", "NVIDIA A10"], "NVIDIA A10 + NVIDIA H100 x2"),
    ],
)
def test_a_unit_without_a_type_is_what_its_host_sees(name: str, models: list[str], wanted: str) -> None:
    [unit] = parse_units([name])
    assert seen_type(unit, models) == wanted


def test_a_good_configuration_passes() -> None:
    check(["cpu:0", "cpu:1", "gpu:0"], devices=("cpu", "cuda", "cpu"))
    check(["cpu:0"], floor_units=0)
    check(["gpu:0,1", "gpu:2"], devices=("cuda", "cuda"), rollout={"engine": "vllm"})
    check(["cpu:0", "cpu:1"], unit_types={"slow": ["cpu:1"]})
    check(["cpu:0", "gpu:0", "gpu:1"], residency="sleep", devices=("cpu", "cuda", "cuda"))


@pytest.mark.parametrize(
    ("units", "more", "what"),
    [
        (["gpu:0", "gpu:1"], {}, "no unit can run an engine of p0"),
        (["cpu:0", "cpu:0"], {}, "is in two units"),
        (
            ["cpu:0", "n2/cpu:1"],
            {"unit_types": {"slow": ["cpu:1"]}},
            "unit_types.slow: neither a unit nor a host with units; got 'cpu:1'.*did you mean 'cpu:0'",
        ),
        (
            ["cpu:0", "cpu:1"],
            {"unit_types": {"slow": ["cpu:1"], "fast": ["cpu:1"]}},
            "unit_types: cpu:1 has two types; got 'slow, fast'",
        ),
        (
            ["cpu:0", "cpu:1"],
            {"unit_types": {"slow": ["cpu:1"]}, "rollout": {"unit_types": ["slwo"]}},
            "policies.p0.rollout.unit_types: unknown type of unit; got 'slwo'; wanted one of slow; .*mean 'slow'",
        ),
        (
            ["cpu:0", "cpu:1"],
            {"rollout": {"unit_types": ["slow"]}},
            "unknown type of unit; got 'slow'; wanted a name in allocation.unit_types, which is empty",
        ),
        (
            ["cpu:0", "cpu:1"],
            {"unit_types": {"none": []}, "rollout": {"unit_types": ["none"]}},
            "no unit can run an engine of p0.*of type none",
        ),
        ([], {"unit_types": {"slow": ["cpu:1"]}}, "unit_types.slow: neither a unit nor a host with units"),
        (["cpu:0", "cpu:1"], {"slots": 15}, "too few slots per unit for one whole group of p0"),
        (["cpu:0", "cpu:1"], {"ttl_s": 1.0}, "a lease would expire before it can be renewed"),
        (["cpu:0", "cpu:1"], {"sync": True}, "a synchronous run cannot move its workers"),
        (
            ["cpu:0", "cpu:1"],
            {"rollout": {"engine": "vllm", "server": {"url": "http://h:1"}}},
            "p0.rollout.server.url: .*cannot use leased units; got 'http://h:1'",
        ),
        (
            ["gpu:0,1", "gpu:2"],
            {"devices": ("cuda", "cuda")},
            "the embedded engine of p0 uses only one GPU of a unit; got 'gpu:0,1'",
        ),
        (
            ["gpu:0,1", "gpu:2,3"],
            {"devices": ("cuda", "cuda"), "rollout": {"engine": "vllm", "gpus": 2}},
            "rollout.gpus: with leased units, the unit determines the number of GPUs; got 2; cure: .*such as gpu:0,1",
        ),
    ],
)
def test_mistakes_are_one_clear_line(units: list[str], more: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check(units, **more)  # type: ignore[arg-type]


def test_a_type_has_a_name_that_can_stand_in_a_metric() -> None:
    with pytest.raises(ConfigError, match=r"unit_types"):
        check(["cpu:0", "cpu:1"], unit_types={"slow/one": ["cpu:1"]})
