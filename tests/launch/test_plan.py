"""A configuration becomes processes with commands, environments and GPUs."""

from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.launch.devices import place, visible_gpus
from mrl.launch.memory import estimate_mib, num_parameters
from mrl.launch.plan import build_plan
from mrl.launch.slurm import SlurmRequest, check_hosts, render

RECIPE = {"architecture": "llama", "tokenizer": "metaspace", "vocab_size": 512, "hidden_size": 128, "num_layers": 4}


def config_of(**policies: dict[str, Any]) -> RunConfig:
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {name: {"model": "m", **table} for name, table in policies.items()},
        "exchange": {"host": "0.0.0.0"},
    }
    return validate(tables, where="test")


def test_every_role_has_its_process_in_starting_order() -> None:
    """Daemons, learners of policies that learn, all workers, one evaluator."""
    config = config_of(a={"rollout": {"workers": 2}}, teacher={"frozen": True})
    names = [spec.name for spec in build_plan(config, Path("/r")).processes]
    assert names == ["exchange", "allocator", "learner/a", "worker/a/0", "worker/a/1", "worker/teacher/0", "evaluator"]


def test_every_shard_of_the_exchange_has_its_process() -> None:
    """The first is called and started as a single daemon is; the others say which they are."""
    config = config_of(a={})
    config = config.model_copy(update={"exchange": config.exchange.model_copy(update={"shards": 3})})
    specs = [spec for spec in build_plan(config, Path("/r"), python="py").processes if spec.role == "exchange"]
    first = ("py", "-m", "mrl", "exchange", "--run-folder", "/r")
    assert [spec.name for spec in specs] == ["exchange", "exchange/1", "exchange/2"]
    assert [spec.argv for spec in specs] == [first, (*first, "--index", "1"), (*first, "--index", "2")]
    assert [spec.log_name for spec in specs] == ["exchange.log", "exchange-1.log", "exchange-2.log"]


def test_commands_and_environments_follow_the_contract() -> None:
    """Roles run as `python -m mrl ROLE`, learners under torchrun without restarts of its own; threads per role."""
    config = config_of(a={"learner": {"processes": 2, "threads": 3}, "rollout": {"threads": 4}})
    specs = {spec.role: spec for spec in build_plan(config, Path("/r"), python="py").processes}
    assert specs["worker"].argv == ("py", "-m", "mrl", "worker", "--run-folder", "/r", "--policy", "a", "--index", "0")
    assert specs["exchange"].argv == ("py", "-m", "mrl", "exchange", "--run-folder", "/r")
    store = "--rdzv-conf store_type=file,keep_alive_interval=600 --rdzv-endpoint /r/rendezvous/a-{life}"
    torchrun = f"py -m torch.distributed.run --rdzv-backend c10d {store} --rdzv-id a-{{life}}"
    learner = f"{torchrun} --max-restarts 0 --nproc-per-node 2 -m mrl learner --run-folder /r --policy a"
    assert specs["learner"].argv == tuple(learner.split())
    assert specs["learner"].env["MRL_RENDEZVOUS"] == "/r/rendezvous"
    assert specs["learner"].restart == "until_done"
    threads = {role: spec.env["OMP_NUM_THREADS"] for role, spec in specs.items()}
    assert threads == {"exchange": "1", "allocator": "1", "learner": "3", "worker": "4", "evaluator": "1"}
    assert specs["worker"].env["HF_HUB_OFFLINE"] == "1"
    assert specs["worker"].log_name == "worker-a-0.log"


def test_gpus_go_to_learners_first_and_then_round_to_workers() -> None:
    """One GPU per rank; workers take the rest and then share."""
    config = config_of(
        a={"device": "cuda", "learner": {"processes": 2}, "rollout": {"workers": 2}}, b={"device": "cuda"}, c={}
    )
    assert place(config, ["0", "1", "2", "3"]) == {
        ("learner", "a", 0): ("0", "1"),
        ("learner", "b", 0): ("2",),
        ("worker", "a", 0): ("3",),
        ("worker", "a", 1): ("0",),
        ("worker", "b", 0): ("1",),
    }
    with pytest.raises(ConfigError, match="too few GPUs"):
        place(config, ["0"])
    with pytest.raises(ConfigError, match="no GPU"):
        place(config, [])


def test_visible_gpus_are_those_of_the_environment_or_the_host(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES wins, also when it is empty; other nvidia devices do not count."""
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "2", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, tmp_path) == ["3", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_policies_of_several_hosts_live_whole_on_one() -> None:
    """Only what is not on the first host goes through srun, without the supervisor's pid; GPUs count per host."""
    config = config_of(a={"device": "cuda"}, b={"device": "cuda"})
    specs = {spec.name: spec for spec in build_plan(config, Path("/r"), gpus=["0"], hosts=["h0", "h1"]).processes}
    away = [name for name, spec in specs.items() if spec.argv[0] == "srun"]
    assert away == ["learner/b", "worker/b/0"]
    assert "--nodelist=h1" in specs["learner/b"].argv
    assert specs["learner/b"].argv[specs["learner/b"].argv.index("env") :][:3] == ("env", "-u", "MRL_SUPERVISOR_PID")
    assert specs["learner/b"].env["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_batch_script_asks_for_hosts_and_runs_train(tmp_path: Path) -> None:
    """Overrides are quoted; sizes that do not fit are refused."""
    config = config_of(a={"learner": {"threads": 8}}, b={})
    text = render(config, tmp_path / "c.toml", SlurmRequest(2, 12, minutes=90), ["--run.name=my run"])
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --time=90" in text
    assert f"mrl train --hosts \"$hosts\" {tmp_path}/c.toml '--run.name=my run'" in text
    with pytest.raises(ConfigError, match="too few CPUs per host; got 8; wanted >= 12"):
        render(config, tmp_path / "c.toml", SlurmRequest(2, 8))


@pytest.mark.parametrize(
    ("hosts", "address", "part"),
    [
        (["h0", "h0"], "0.0.0.0", "stands twice"),
        (["h0", "h1", "h2"], "0.0.0.0", "more hosts than policies"),
        (["h0", "h1"], "127.0.0.1", "loopback"),
        (["h0", "h1"], "localhost", "loopback"),
    ],
)
def test_hosts_that_contradict_the_configuration_are_refused(hosts: list[str], address: str, part: str) -> None:
    """Two hosts need an address that both reach and a policy each."""
    config = config_of(a={}, b={})
    config = config.model_copy(update={"exchange": config.exchange.model_copy(update={"host": address})})
    with pytest.raises(ConfigError, match=part):
        check_hosts(config, hosts, where="test")
    check_hosts(config, hosts[:1], where="test")


def test_memory_is_estimated_from_the_recipe_or_the_weights(tmp_path: Path) -> None:
    """Learners count four copies of the parameters, per rank, and one more where the loss holds on to the first."""
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))
    config = config_of(small={"model": "", "make": RECIPE}, given={"model": str(tmp_path)})
    assert num_parameters(config.policies["given"]) == 2_000_000
    assert 0.8e6 < num_parameters(config.policies["small"]) < 1.5e6
    specs = {spec.name: spec for spec in build_plan(config, Path("/r")).processes}
    learner = estimate_mib(specs["learner/small"], config.policies["small"])
    worker = estimate_mib(specs["worker/small/0"], config.policies["small"])
    held = config_of(small={"model": "", "make": RECIPE, "objective": {"kl_coefficient": 0.01}})
    one_copy_mib = 4 * num_parameters(config.policies["small"]) / 2**20
    assert estimate_mib(specs["learner/small"], held.policies["small"]) == pytest.approx(learner + one_copy_mib)
    assert estimate_mib(specs["exchange"], None) < worker < learner < 2000
