"""A configuration becomes processes with commands, environments and GPUs."""

import sys
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.learner.ranks.rank_place import rank_place
from mrl.processes.planning.dry_run import describe
from mrl.processes.planning.hosts import MRL, Host, counting_gpus
from mrl.processes.planning.plan import build_plan
from mrl.processes.planning.time_sharing import shared_gpus
from mrl.processes.planning.torchrun import ALLOCATOR_WORDS, LARGE_PAGES, SHUTDOWN
from tests.support.word_runs import word_run

RECIPE = {"architecture": "llama", "tokenizer": "metaspace", "vocab_size": 512, "hidden_size": 128, "num_layers": 4}


def config_of(**policies: dict[str, Any]) -> RunConfig:
    return word_run(policies, exchange={"host": "0.0.0.0"})


def test_every_role_has_its_process_in_starting_order() -> None:
    """Daemons, learners of policies that learn, all workers."""
    config = config_of(a={"rollout": {"workers": 2}}, teacher={"frozen": True})
    names = [spec.name for spec in build_plan(config, Path("/r")).processes]
    assert names == ["exchange", "allocator", "learner/a", "worker/a/0", "worker/a/1", "worker/teacher/0"]


def test_commands_and_environments_follow_the_contract() -> None:
    """Roles run as `python -m mrl ROLE`, several ranks under torchrun without restarts of its own; threads per role."""
    config = config_of(a={"learner": {"processes": 2, "threads": 3}, "rollout": {"threads": 4}})
    specs = {spec.role: spec for spec in build_plan(config, Path("/r")).processes}
    assert specs["worker"].argv == (*MRL, "worker", "--run-folder", "/r", "--policy", "a", "--index", "0")
    assert specs["exchange"].argv == (*MRL, "exchange", "--run-folder", "/r")
    store = "--rdzv-conf store_type=file,keep_alive_interval=600 --rdzv-endpoint {local}/a-{life}"
    torchrun = f"{sys.executable} -m torch.distributed.run --rdzv-backend c10d {store} --rdzv-id a-{{life}}"
    torchrun += " --max-restarts 0 --nproc-per-node 2 --log-dir {local}/torchrun"
    learner = f"{torchrun} -m mrl learner --run-folder /r --policy a"
    assert specs["learner"].argv == tuple(learner.split())
    assert specs["learner"].env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert specs["learner"].restart == "until_done"
    threads = {role: spec.env["OMP_NUM_THREADS"] for role, spec in specs.items()}
    assert threads == {"exchange": "1", "allocator": "1", "learner": "3", "worker": "4"}
    assert specs["worker"].env["HF_HUB_OFFLINE"] == "1"
    assert specs["worker"].log_name == "worker-a-0.log"
    alone = next(spec for spec in build_plan(config_of(a={}), Path("/r")).processes if spec.policy)
    assert alone.argv == (*MRL, "learner", "--run-folder", "/r", "--policy", "a")
    of_user = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}
    place = rank_place(of_user | dict(alone.env))
    assert (place.rank, place.size, alone.env["LOCAL_RANK"]) == (0, 1, "0"), "it has the ranks of nobody else"
    assert not of_user.keys() & specs["learner"].env.keys(), "torchrun says them"


def test_learners_live_on_the_hosts_in_turn() -> None:
    """Daemons live on the first, which starts one process for each other one and nothing else there.

    Its two learners make that the fuller one, so that a worker on cores goes to the other.
    """
    config = config_of(a={"device": "cuda"}, b={"device": "cuda"}, c={})
    hosts = (Host("h0"), Host("h1", "10.0.0.2"))
    plan = build_plan(config, Path("/r"), gpus=["0"], hosts=hosts, remote=["ssh", "{host}"])
    homes = {spec.name: spec.host for spec in plan.processes}
    assert {name for name, host in homes.items() if host == "h1"} == {"learner/b", "worker/b/0", "worker/c/0"}
    assert [spec.name for spec in plan.joins] == ["supervisor/h1"]
    assert plan.joins[0].argv[:2] == ("ssh", "h1")
    assert plan.joins[0].argv[2].endswith(f"{sys.executable} -m mrl join /r --host h1")
    assert [spec.name for spec in plan.started_by("h1")] == ["learner/b", "worker/b/0", "worker/c/0"]
    assert {spec.name for spec in plan.started_by("h0")} == {"supervisor/h1"} | {
        n for n, h in homes.items() if h == "h0"
    }
    specs = {spec.name: spec.env for spec in plan.processes}
    assert (specs["learner/b"]["MRL_HOST"], specs["learner/b"]["MRL_ADDRESS"]) == ("h1", "10.0.0.2")
    assert "CUDA_VISIBLE_DEVICES" not in specs["learner/b"], "its host chooses"
    assert specs["learner/a"]["CUDA_VISIBLE_DEVICES"] == "0"
    there = build_plan(config, Path("/r"), gpus=["3"], hosts=hosts, here="h1")
    assert [s.env.get("CUDA_VISIBLE_DEVICES") for s in there.started_by("h1")] == ["3", "3", None]
    assert there.joins == ()


def test_a_learner_over_hosts_is_a_process_on_each() -> None:
    """Each an agent of its own, called as its first rank is, with its place among them; the run is done with the first.
    No interface is named for them: each rank finds that of its host's address."""
    config = config_of(a={"learner": {"processes": 4, "hosts": 2}, "rollout": {"workers": 2}}, b={})
    plan = build_plan(config, Path("/r"), hosts=(Host("h0"), Host("h1")), remote=["x", "{host}"])
    first, second = (spec for spec in plan.processes if (spec.role, spec.policy) == ("learner", "a"))
    assert [(spec.name, spec.host, spec.index) for spec in (first, second)] == [
        ("learner/a", "h0", 0),
        ("learner/a/rank2", "h1", 1),
    ]
    assert first.argv == second.argv
    assert first.argv[first.argv.index("--nproc-per-node") + 1] == "2"
    places = [(spec.env["MRL_LEARNER_HOSTS"], spec.env["MRL_LEARNER_PLACE"]) for spec in (first, second)]
    assert places == [("h0,h1", "0"), ("h0,h1", "1")]
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & (first.env.keys() | second.env.keys())
    assert {spec.restart for spec in (first, second)} == {"until_done"}
    assert plan.learners == {"learner/a", "learner/b"}
    assert not plan.spares("h1")
    (alone,) = (spec for spec in plan.processes if spec.name == "learner/b")
    assert alone.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "MRL_LEARNER_HOSTS" not in alone.env
    shown = [line.strip() for line in describe(plan, config)]
    assert {"learner/a, ranks 0-1", "learner/a/rank2, ranks 2-3", "learner/b"} <= set(shown)


def test_the_first_host_may_have_the_daemons_alone() -> None:
    """Policies live on the others in turn."""
    config = config_of(a={}, b={})
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"policies_on_first_host": False})})
    plan = build_plan(config, Path("/r"), hosts=(Host("h0"), Host("h1"), Host("h2")), remote=["x", "{host}"])
    assert [spec.name for spec in plan.processes if spec.host == "h0"] == ["exchange", "allocator"]
    assert [spec.name for spec in plan.started_by("h1")] == ["learner/a", "worker/a/0"]
    assert plan.other_hosts == ("h1", "h2")


def test_learners_on_gpus_have_a_flight_recorder() -> None:
    """NCCL's, which writes into the run folder; those on a CPU have none to write."""
    config = config_of(gpu={"device": "cuda"}, cpu={})
    specs = {spec.name: spec for spec in build_plan(config, Path("/r"), gpus=("0", "1")).processes}
    assert specs["learner/gpu"].env["TORCH_FR_DUMP_TEMP_FILE"] == "/r/crash/flight-recorder-gpu-"
    assert specs["learner/gpu"].env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert not any(key.startswith(("TORCH_FR", "TORCH_NCCL")) for key in specs["learner/cpu"].env)


def test_torch_on_a_gpu_has_memory_that_grows_in_place_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learners and embedded engines, whose caches grow beside learners; a server's sleep would not stand it.

    By the name that torch has for the variable now, or the one that it had.
    """
    config = config_of(a={"device": "cuda"}, b={}, c={"device": "cuda", "rollout": {"engine": "vllm"}})
    for name in ALLOCATOR_WORDS:
        monkeypatch.delenv(name, raising=False)

    def said() -> dict[str, str]:
        specs = build_plan(config, Path("/r"), gpus=["0", "1", "2", "3"]).processes
        return {spec.name: spec.env["PYTORCH_ALLOC_CONF"] for spec in specs if "PYTORCH_ALLOC_CONF" in spec.env}

    assert said() == dict.fromkeys(("learner/a", "worker/a/0", "learner/c"), "expandable_segments:True")
    for name in ALLOCATOR_WORDS:
        monkeypatch.setenv(name, "max_split_size_mb:512")
        assert said() == {}
        monkeypatch.delenv(name)


def test_torch_knows_the_variables_by_these_names() -> None:
    library = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    assert all(name.encode() in library for name in (*ALLOCATOR_WORDS, LARGE_PAGES))


def test_who_copies_between_a_gpu_and_main_memory_takes_it_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners and embedded engines; a server has an environment of its own, and the user's word counts."""
    config = config_of(a={"device": "cuda"}, b={}, c={"device": "cuda", "rollout": {"engine": "vllm"}})
    monkeypatch.delenv(LARGE_PAGES, raising=False)

    def said() -> set[str]:
        specs = build_plan(config, Path("/r"), gpus=["0", "1", "2", "3"]).processes
        return {spec.name for spec in specs if spec.env.get(LARGE_PAGES) == "1"}

    assert said() == {"learner/a", "worker/a/0", "learner/c"}
    monkeypatch.setenv(LARGE_PAGES, "0")
    assert said() == set()


def tables(**policy: Any) -> RunConfig:
    return config_of(a={"device": "cuda", **policy})


def test_servers_are_shown_their_gpus_and_shared_ones_are_told() -> None:
    """One server of two GPUs beside a learner; an embedded engine on its learner's only GPU."""
    config = tables(rollout={"engine": "vllm", "gpus": 2})
    plan = build_plan(config, Path("/r"), gpus=["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    shown = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in plan.processes}
    assert (shown["learner/a"], shown["worker/a/0"]) == ("GPU-a", "GPU-b,GPU-c")
    assert list(shared_gpus(plan.processes)) == []
    alone = build_plan(tables(), Path("/r"), gpus=["GPU-a"])
    assert list(shared_gpus(alone.processes)) == [
        "GPU GPU-a is shared by learner/a, worker/a/0: its memory has to hold all of them"
    ]


def test_workers_may_live_on_other_hosts_than_their_learner() -> None:
    """Every host finds the same, and knows its own GPUs by name; one that shows fewer is told what was counted on."""
    config = tables(learner={"processes": 2}, rollout={"engine": "vllm", "workers": 2, "weights": "files"})
    hosts = (Host("h0"), Host("h1"))
    config = counting_gpus(config, hosts, 3)
    assert config.launch.gpus_per_host == 3
    here = build_plan(config, Path("/r"), gpus=["0", "1", "2"], hosts=hosts, remote=["x", "{host}"])
    there = build_plan(config, Path("/r"), gpus=["GPU-x"], hosts=hosts, here="h1")
    assert {spec.name: spec.host for spec in here.processes} == {spec.name: spec.host for spec in there.processes}
    (worker,) = there.started_by("h1")
    assert (worker.name, worker.env["CUDA_VISIBLE_DEVICES"]) == ("worker/a/1", "GPU-x")
    assert [spec.name for spec in here.joins] == ["supervisor/h1"]
    with pytest.raises(ConfigError, match="host h1 has fewer visible GPUs than the plan needs; got '0 outside"):
        build_plan(config, Path("/r"), gpus=[], hosts=hosts, here="h1")


def test_hosts_for_which_nothing_is_left_are_refused() -> None:
    """One learner and one worker need no third host; with a unit of its own it has something to do."""
    hosts = (Host("h0"), Host("h1"), Host("h2"))
    with pytest.raises(ConfigError, match="--hosts: some hosts have nothing to run; got 'h2'; wanted 2 hosts"):
        build_plan(config_of(a={}), Path("/r"), hosts=hosts)
    config = config_of(a={})
    allocation = config.allocation.model_copy(update={"units": ["h1/cpu:0", "h2/cpu:0"], "slots": 1024})
    plan = build_plan(config.model_copy(update={"allocation": allocation}), Path("/r"), hosts=hosts, remote=["{host}"])
    assert plan.other_hosts == ("h1", "h2")
    assert {spec.host for spec in plan.processes} == {"h0"}


def test_the_first_host_without_gpus_has_to_be_told_how_many_others_show() -> None:
    """It plans for all of them."""
    config = tables(rollout={"engine": "vllm"})
    launch = config.launch.model_copy(update={"policies_on_first_host": False})
    apart, hosts = config.model_copy(update={"launch": launch}), (Host("h0"), Host("h1"))
    with pytest.raises(ConfigError, match=r"launch.gpus_per_host: required, as the first host"):
        build_plan(apart, Path("/r"), hosts=hosts)
    told = apart.model_copy(update={"launch": launch.model_copy(update={"gpus_per_host": 2})})
    assert {spec.name for spec in build_plan(told, Path("/r"), hosts=hosts).started_by("h1")} >= {"worker/a/0"}


def test_torchrun_leaves_ranks_the_time_that_a_run_has_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own half a minute is less than a step of a large model takes, and nothing of that would be saved."""
    config = config_of(a={"learner": {"processes": 2}})
    config = config.model_copy(update={"supervision": config.supervision.model_copy(update={"stop_s": 300.5})})
    (learner,) = (spec for spec in build_plan(config, Path("/r")).processes if spec.role == "learner")
    monkeypatch.setenv(SHUTDOWN, learner.env[SHUTDOWN])
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2).shutdown_timeout > 300.5
    assert "_shutdown(e.sigval, timeout=self._shutdown_timeout)" in getsource(SimpleElasticAgent.run)


def test_nccl_stays_on_loopback_unless_weights_are_broadcast_to_another_host() -> None:
    """It chooses one interface in a process, for all its groups."""
    hosts = (Host("h0"), Host("h1"))
    for weights, is_local in (("files", True), ("broadcast", False)):
        config = config_of(a={"rollout": {"weights": weights}})
        env = build_plan(config, Path("/r"), hosts=hosts).processes[2].env
        assert ("NCCL_SOCKET_IFNAME" in env) == is_local
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert build_plan(config, Path("/r")).processes[2].env["NCCL_SOCKET_IFNAME"] == "lo"
