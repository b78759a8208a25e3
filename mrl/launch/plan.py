"""The processes of a run on one host: their names, commands and environments. Starts nothing."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mrl.config.run_folder import RunFolder
from mrl.config.schema import PolicyTable, RunConfig
from mrl.exchange.shards import role_of
from mrl.launch.devices import place
from mrl.launch.torchrun import torchrun_argv, torchrun_environment
from mrl.parent_death import SUPERVISOR_PID

Role = Literal["exchange", "allocator", "learner", "worker", "evaluator"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `name` is unique in the run and the name under which its telemetry speaks ("worker/qwen/0")."""

    name: str
    role: str
    policy: str
    index: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    restart: Literal["always", "until_done"] = "always"
    """"until_done": exit code 0 means finished; "always": a process that ends while the run goes on has failed."""

    @property
    def log_name(self) -> str:
        """File name of its log."""
        return self.name.replace("/", "-") + ".log"


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of one host, in the order in which they start."""

    processes: tuple[ProcessSpec, ...]


def build_plan(
    config: RunConfig,
    run_folder: Path,
    *,
    gpus: Sequence[str] = (),
    hosts: Sequence[str] = (),
    python: str = sys.executable,
) -> Plan:
    """The plan of a run in `run_folder`; every host has the GPUs `gpus`.

    With several `hosts` (of one SLURM job, this one first) each policy lives whole on one of them, in turn, and what
    does not live on the first is started through `srun`. Raises ConfigError when a policy asks for GPUs that do not
    exist.
    """
    lives_on = {name: hosts[index % len(hosts)] if hosts else "" for index, name in enumerate(config.policies)}
    placement: dict[tuple[str, str, int], tuple[str, ...]] = {}
    for host in dict.fromkeys(lives_on.values()):
        placement |= place(config, gpus, names=[name for name, at in lives_on.items() if at == host])
    specs = [_shard(index, run_folder, python) for index in range(config.exchange.shards)]
    specs.append(_daemon("allocator", run_folder, python))
    for name, policy in config.policies.items():
        if not policy.frozen:
            specs.append(_learner(name, policy, run_folder, python, placement.get(("learner", name, 0), ())))
    for name, policy in config.policies.items():
        for index in range(policy.rollout.workers):
            specs.append(_worker(name, policy, index, run_folder, python, placement.get(("worker", name, index), ())))
    spare = [gpu for gpu in gpus if not any(gpu in taken for taken in placement.values())]
    specs.append(_evaluator(config, run_folder, python, tuple((spare or gpus)[:1])))
    here = hosts[0] if hosts else ""
    return Plan(tuple(_on_host(spec, lives_on.get(spec.policy, here), here) for spec in specs))


def role_argv(role: Role, run_folder: Path, *, python: str, policy: str = "", index: int = 0) -> tuple[str, ...]:
    """The command of one role process."""
    argv: tuple[str, ...] = (python, "-m", "mrl", role, "--run-folder", str(run_folder))
    if policy:
        argv = (*argv, "--policy", policy)
    return (*argv, "--index", str(index)) if policy or index else argv


def learner_argv(run_folder: Path, *, python: str, policy: str, processes: int) -> tuple[str, ...]:
    """The command of one learner: torchrun on this host, with `LIFE` to be filled in at every start."""
    torchrun = torchrun_argv(RunFolder(run_folder).rendezvous, python=python, policy=policy, processes=processes)
    return (*torchrun, "-m", "mrl", "learner", "--run-folder", str(run_folder), "--policy", policy)


def environment(threads: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """What every role process has in its environment."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _on_host(spec: ProcessSpec, host: str, here: str) -> ProcessSpec:
    if host == here:
        return spec
    # The supervisor's pid means nothing on another host; there SLURM ends the step when srun dies.
    srun = (
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        f"--nodelist={host}",
        "--export=ALL",
        "--kill-on-bad-exit=1",
    )
    return replace(spec, argv=(*srun, "env", "-u", SUPERVISOR_PID, *spec.argv))


def _daemon(role: Literal["exchange", "allocator"], run_folder: Path, python: str) -> ProcessSpec:
    argv = role_argv(role, run_folder, python=python)
    return ProcessSpec(name=role, role=role, policy="", index=0, argv=argv, env=environment(1))


def _shard(index: int, run_folder: Path, python: str) -> ProcessSpec:
    argv = role_argv("exchange", run_folder, python=python, index=index)
    return replace(_daemon("exchange", run_folder, python), name=role_of(index), index=index, argv=argv)


def _learner(name: str, policy: PolicyTable, run_folder: Path, python: str, gpus: tuple[str, ...]) -> ProcessSpec:
    return ProcessSpec(
        name=f"learner/{name}",
        role="learner",
        policy=name,
        index=0,
        argv=learner_argv(run_folder, python=python, policy=name, processes=policy.learner.processes),
        env=environment(policy.learner.threads, gpus) | torchrun_environment(RunFolder(run_folder).rendezvous),
        restart="until_done",
    )


def _worker(
    name: str, policy: PolicyTable, index: int, run_folder: Path, python: str, gpus: tuple[str, ...]
) -> ProcessSpec:
    return ProcessSpec(
        name=f"worker/{name}/{index}",
        role="worker",
        policy=name,
        index=index,
        argv=role_argv("worker", run_folder, python=python, policy=name, index=index),
        env=environment(policy.rollout.threads, gpus),
    )


def _evaluator(config: RunConfig, run_folder: Path, python: str, gpus: tuple[str, ...]) -> ProcessSpec:
    argv = role_argv("evaluator", run_folder, python=python)
    env = environment(config.evaluation.threads, gpus)
    return ProcessSpec(name="evaluator", role="evaluator", policy="", index=0, argv=argv, env=env)
