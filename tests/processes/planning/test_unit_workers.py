"""Workers on leased units: what the plan leaves to the leases, and the process that a lease starts."""

import os
from pathlib import Path

import pytest

from mrl.config.load import validate
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit
from mrl.errors import ConfigError
from mrl.parent_death import CORES
from mrl.processes.planning.dry_run import describe
from mrl.processes.planning.hosts import MRL, parse_hosts
from mrl.processes.planning.plan import build_plan, unit_worker
from mrl.processes.planning.unit_workers import UNIT, UNIT_EPOCH, UNIT_RUN, check_cores, units_of
from tests.support.word_runs import word_run


def config(*units: str, device: str = "cpu") -> RunConfig:
    policy = {"device": device, "rollout": {"workers": 2}}
    return word_run({"a": policy, "b": policy}, allocation={"units": list(units)})


def test_the_plan_starts_no_worker_where_leases_do() -> None:
    """And still everything else."""
    names = {spec.name for spec in build_plan(config("cpu:0", "cpu:1"), Path("r")).processes}
    assert names == {"exchange", "allocator", "learner/a", "learner/b"}
    assert "worker/a/1" in {spec.name for spec in build_plan(config(), Path("r")).processes}


def test_leased_gpus_are_nobody_elses() -> None:
    """Learners take what is left."""
    plan = build_plan(config("gpu:0", "gpu:2", device="cuda"), Path("r"), gpus=["u0", "u1", "u2", "u3", "u4"])
    visible = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in plan.processes}
    assert (visible["learner/a"], visible["learner/b"]) == ("u1", "u3")


def test_a_gpu_that_is_not_there_and_a_host_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"only 2 GPUs are visible on this host; got 'gpu:2'; wanted GPU numbers below 2"
    ):
        build_plan(config("gpu:2", device="cuda"), Path("r"), gpus=["0", "1"])
    with pytest.raises(ConfigError, match=r"host is not part of the run; got 'x/cpu:0'; wanted no host name"):
        build_plan(config("x/cpu:0"), Path("r"))


def test_units_that_leave_no_gpu_are_what_is_told() -> None:
    """Making more GPUs visible is not what the person forgot. Without units it is."""
    told = r"the units leave no GPU for learners.*got 'units of all 2 GPUs that are .*'.*cure: remove a GPU"
    with pytest.raises(ConfigError, match=told):
        build_plan(config("gpu:0", "gpu:1", device="cuda"), Path("r"), gpus=["0", "1"])
    with pytest.raises(ConfigError, match="no GPU is visible on this host"):
        build_plan(config(device="cuda"), Path("r"))


def test_a_core_that_this_host_lacks_is_refused() -> None:
    """The first that lacks is named; GPUs have no cores."""
    core = min(os.sched_getaffinity(0))
    check_cores([Unit(f"cpu:{core}", "", "cpu", (core,)), Unit("gpu:4000", "", "gpu", (4000,))], where="here")
    unit = Unit("n2/cpu:4000-4001", "n2", "cpu", (4000, 4001))
    with pytest.raises(ConfigError, match=r"host n2: .*this host has no core 4000; got 'n2/cpu:4000-4001'"):
        check_cores([unit], where="host n2")


def test_a_host_with_nothing_but_units_takes_part() -> None:
    """Its units are its own; those without a host's name are the first one's."""
    conf = config("cpu:0", "n3/cpu:0", "n3/cpu:1")
    plan = build_plan(conf, Path("r"), hosts=parse_hosts("n1,n2,n3"), remote=["ssh", "{host}"])
    assert "n3" in plan.other_hosts
    assert {spec.name: spec.restart for spec in plan.joins} == {"supervisor/n2": "always", "supervisor/n3": "spared"}
    assert [unit.name for unit in units_of(conf, "n3", is_first=False)] == ["n3/cpu:0", "n3/cpu:1"]
    assert [unit.name for unit in units_of(conf, "n1", is_first=True)] == ["cpu:0"]
    assert units_of(conf, "n2", is_first=False) == ()


def test_a_worker_on_cores_is_bound_to_them_and_has_a_thread_for_each() -> None:
    conf = config("cpu:0", "cpu:2-4")
    spec = unit_worker(conf, Path("/r"), Unit("cpu:2-4", "", "cpu", (2, 3, 4)), policy="b", epoch=7, gpus=[])
    assert (spec.name, spec.index, spec.restart) == ("worker/b/1", 1, "leased")
    assert spec.argv == (*MRL, "worker", "--run-folder", "/r", "--policy", "b", "--index", "1")
    assert (spec.env[CORES], spec.env["OMP_NUM_THREADS"]) == ("2,3,4", "3")
    assert (spec.env[UNIT], spec.env[UNIT_EPOCH], spec.env[UNIT_RUN]) == ("cpu:2-4", "7", "/r")


def test_a_worker_on_gpus_sees_only_these() -> None:
    conf = config("gpu:1,3", device="cuda")
    spec = unit_worker(
        conf,
        Path("/r"),
        Unit("gpu:1,3", "", "gpu", (1, 3)),
        policy="a",
        epoch=2,
        gpus=["GPU-a", "GPU-b", "GPU-c", "GPU-d"],
    )
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-d"
    assert CORES not in spec.env


def test_the_plan_knows_what_leases_may_start() -> None:
    """On each unit a worker of every policy that learns and whose engine fits, with its host's name and GPUs."""
    tables = config("gpu:1", "n2/gpu:0,3", "cpu:0", device="cuda").model_dump()
    tables["policies"] |= {"c": {"model": "m"}, "d": {"model": "m", "frozen": True}}
    plan = build_plan(validate(tables, where="test"), Path("r"), gpus=["x", "y"] * 4, hosts=parse_hosts("n1,n2"))
    found = {(spec.host, spec.name): spec.env.get("CUDA_VISIBLE_DEVICES") for spec in plan.leased}
    assert found == {
        ("n1", "worker/a/0"): "y",
        ("n1", "worker/b/0"): "y",
        ("n2", "worker/a/1"): None,
        ("n2", "worker/b/1"): None,
        ("n1", "worker/c/2"): None,
    }
    assert {spec.env[UNIT] for spec in plan.leased} == {"gpu:1", "n2/gpu:0,3", "cpu:0"}
    assert not {spec.name for spec in plan.leased} & {spec.name for spec in plan.processes}


def test_leases_start_nobody_on_a_type_on_which_its_engine_does_not_fit() -> None:
    tables = config("cpu:0", "cpu:1").model_dump()
    tables["allocation"]["unit_types"] = {"large": ["cpu:1"]}
    tables["policies"]["b"]["rollout"]["unit_types"] = ["large"]
    plan = build_plan(validate(tables, where="test"), Path("r"))
    assert {spec.name for spec in plan.leased} == {"worker/a/0", "worker/a/1", "worker/b/1"}


def test_a_dry_run_lists_them_by_unit() -> None:
    """Under the host that has it."""
    conf = config("cpu:0", "n2/cpu:0-1")
    lines = list(describe(build_plan(conf, Path("r"), hosts=parse_hosts("n1,n2")), conf))
    n2 = lines.index("host n2")
    here, there = (
        lines.index("  unit cpu:0, where a lease starts one of"),
        lines.index("  unit n2/cpu:0-1, where a lease starts one of"),
    )
    assert here < n2 < there
    assert [line for line in lines[there + 1 :] if line.startswith("    w")] == ["    worker/a/1", "    worker/b/1"]
    assert "OMP_NUM_THREADS=2" in lines[there + 3]
