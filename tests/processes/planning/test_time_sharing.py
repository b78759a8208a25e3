"""Who has a device in turns, and what a plan says of it."""

from pathlib import Path
from typing import Any

import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.config.run_folder import LOCAL_FOLDER, RunFolder
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.processes.planning.hosts import Host
from mrl.processes.planning.placement import least_gpus, most_gpus
from mrl.processes.planning.plan import build_plan
from mrl.processes.planning.time_sharing import TURN_DEVICES, device_turn, shared_gpus, turn_devices
from tests.support.word_runs import word_run


def config_of(**policies: dict[str, Any]) -> RunConfig:
    return word_run(policies)


def test_learners_and_workers_are_told_which_devices_they_have_in_turns() -> None:
    """All GPUs of a learner's ranks, that of a worker, and on cores one for all; nobody else is told any."""
    config = config_of(
        a={"device": "cuda", "turns": True, "learner": {"processes": 2}},
        b={"turns": True},
        c={},
    )
    plan = build_plan(config, Path("/r"), gpus=["GPU-x", "GPU-y"])
    told = {spec.name: turn_devices(spec.env) for spec in plan.processes if TURN_DEVICES in spec.env}
    assert told == {
        "learner/a": ["GPU-x", "GPU-y"],
        "worker/a/0": ["GPU-x"],
        "learner/b": ["cpu"],
        "worker/b/0": ["cpu"],
    }


def test_a_shared_gpu_is_told_with_who_has_it_in_turns() -> None:
    pair = config_of(**{name: {"device": "cuda", "turns": True} for name in "ab"})
    (line,) = shared_gpus(build_plan(pair, Path("/r"), gpus=["0"]).processes)
    assert line == (
        "GPU 0 is shared in turns by learner/a, learner/b, worker/a/0, worker/b/0: "
        "its memory has to hold the largest of them"
    )
    mixed = config_of(a={"device": "cuda", "turns": True}, b={"device": "cuda"})
    (line,) = shared_gpus(build_plan(mixed, Path("/r"), gpus=["0"]).processes)
    assert line.endswith("its memory has to hold the largest of them beside learner/b, worker/b/0")


def test_processes_of_a_host_meet_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_FOLDER, str(tmp_path))
    assert device_turn(RunFolder(tmp_path / "run"), "learner/a") is None
    monkeypatch.setenv(TURN_DEVICES, "GPU-x,GPU-y")
    turns = [device_turn(RunFolder(tmp_path / "run"), role) for role in ("learner/a", "worker/a/0")]
    assert [turn.ask() is None for turn in turns if turn is not None] == [True, False]


def test_turns_over_several_hosts_are_refused() -> None:
    hosts = (Host("h0"), Host("h1"))
    with pytest.raises(ConfigError, match=r"only processes of one host can use a device in turns; got .*2 hosts"):
        build_plan(config_of(a={"turns": True}), Path("/r"), hosts=hosts)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"learner": {"hosts": 2, "processes": 2}}, r"policies\.a\.learner\.hosts: cannot be combined with turns"),
        (
            {"rollout": {"engine": "vllm", "server": {"url": "http://h:1"}}},
            r"policies\.a\.rollout\.server\.url: cannot be combined with turns",
        ),
        (
            {"rollout": {"engine": "vllm", "weights": "adapters"}, "learner": {"lora": {}}},
            r"policies\.a\.rollout\.weights: cannot be combined with turns = true; got .?adapters",
        ),
        (
            {"device": "cuda", "rollout": {"engine": "sglang", "gpus": 2}, "learner": {"processes": 3}},
            r"rollout\.gpus: cannot be combined with turns = true; got 2; wanted a divisor of learner\.processes = 3",
        ),
        (
            {"device": "cuda", "rollout": {"weights_in": "gpu"}},
            r"rollout\.weights_in: cannot be combined with turns = true; got .?gpu",
        ),
        ({"rollout": {"weights": "broadcast"}}, r"policies\.a\.rollout\.weights: cannot be combined with turns"),
    ],
)
def test_what_cannot_leave_a_device_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_rules(config_of(a={"turns": True, **keys}), where="test")
    assert "cure: set policies.a.turns = false" in str(refused.value)


def on_units(units: list[str], residency: str = "stop", **policies: dict[str, Any]) -> RunConfig:
    config = config_of(**policies)
    return config.model_copy(
        update={"allocation": config.allocation.model_copy(update={"units": units, "residency": residency})}
    )


def test_engines_on_units_share_them_in_turns_with_learners() -> None:
    """An engine has the devices of its unit, and a learner on cores those of all units; GPUs of units are for all."""
    config = on_units(
        ["gpu:1", "cpu:2-3", "cpu:5"], a={"device": "cuda", "turns": True}, b={"turns": True, "learner": {"threads": 4}}
    )
    check_rules(config, where="test")
    plan = build_plan(config, Path("/r"), gpus=["GPU-x", "GPU-y"])
    assert {(spec.name, *turn_devices(spec.env)) for spec in (*plan.processes, *plan.leased) if spec.policy} == {
        ("learner/a", "GPU-x"),
        ("learner/b", "core 2", "core 3", "core 5"),
        ("worker/a/0", "GPU-y"),
        ("worker/b/1", "core 2", "core 3"),
        ("worker/b/2", "core 5"),
    }
    pair = on_units(["gpu:0"], **{name: {"device": "cuda", "turns": True} for name in "ab"})
    assert (least_gpus(pair), most_gpus(pair)) == (1, 2)
    plan = build_plan(pair, Path("/r"), gpus=["0"])
    (line,) = shared_gpus((*plan.processes, *plan.leased))
    assert line == (
        "GPU 0 is shared in turns by learner/a, learner/b, worker/a/0, worker/b/0: "
        "its memory has to hold the largest of them"
    )


def test_engines_on_units_without_turns_share_them_with_nobody() -> None:
    alone = on_units(["gpu:0"], a={"device": "cuda"}, b={"device": "cuda"})
    plan = build_plan(alone, Path("/r"), gpus=["0", "1", "2"])
    assert list(shared_gpus((*plan.processes, *plan.leased))) == []
    assert (least_gpus(alone), most_gpus(alone)) == (2, 3)


def test_who_takes_no_turns_is_on_no_unit_of_those_who_do() -> None:
    """Not on units of the same kind. Nor does an engine sleep there."""
    mixed = on_units(["cpu:0", "gpu:0"], a={"turns": True}, b={}, c={"device": "cuda"})
    told = r"b\.turns: other policies take turns on the same kind of device; .*; wanted true, as policies\.a\.turns"
    with pytest.raises(ConfigError, match=told):
        check_rules(mixed, where="test")
    check_rules(on_units(["cpu:0", "gpu:0"], a={"turns": True}, c={"device": "cuda"}), where="test")
    asleep = on_units(["gpu:0", "cpu:0"], "sleep", a={"turns": True}, b={"turns": True, "device": "cuda"})
    with pytest.raises(ConfigError, match=r'residency = "sleep": cannot be combined with policies\.b\.turns'):
        check_rules(asleep, where="test")
