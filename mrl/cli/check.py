"""`mrl check CONFIG`: what `mrl train` would check, and the plan it would follow; starts and writes nothing."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mrl.cli.policies import cached_folder, is_made, recipe_of
from mrl.cli.preflight import preflight
from mrl.config.load import load_config
from mrl.config.run_folder import RunFolder, run_folder_of
from mrl.config.schema import RunConfig
from mrl.launch.devices import visible_gpus
from mrl.launch.memory import estimate_mib
from mrl.launch.plan import Plan, ProcessSpec, build_plan
from mrl.sharing.regimes import check_sharing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")


def run(arguments: argparse.Namespace) -> int:
    """Validate and print the resolved plan."""
    config = load_config(arguments.config, arguments.overrides)
    gpus = visible_gpus(os.environ)
    folder = run_folder_of(config)
    plan = build_plan(config, folder.path, gpus=gpus)
    preflight(config, where=str(arguments.config))
    for line in _summary(config, folder, str(arguments.config)):
        print(line)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_policies(config))
    console.print(_processes(config, plan))
    print(f"this host: {len(os.sched_getaffinity(0))} cores, {len(gpus)} GPUs")
    return 0


def _summary(config: RunConfig, folder: RunFolder, where: str) -> Iterator[str]:
    yield f"{where} is valid"
    yield f"run folder  {folder.path}" + (" (exists)" if folder.path.exists() else "")
    yield f"steps       {config.run.steps} per policy, seed {config.run.seed}"
    yield "sharing     " + _sharing(config)
    yield "tasks       " + ", ".join(f"{name} ({task.source}/{task.dataset})" for name, task in config.tasks.items())


def _sharing(config: RunConfig) -> str:
    regime = str(config.sharing.get("regime", "independent"))
    parameters = check_sharing(config.sharing, "").model_dump(mode="json", by_alias=True)
    return ", ".join([regime, *(f"{key} = {value}" for key, value in parameters.items())])


def _policies(config: RunConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="policies", title_justify="left", show_edge=False)
    for heading in ("policy", "model", "learns"):
        table.add_column(heading, overflow="fold")
    for name, policy in config.policies.items():
        model = policy.model
        if policy.make is not None:
            folder = cached_folder(recipe_of(config, name))
            state = "cached" if is_made(folder) else "to be made"
            model = f"{policy.make.architecture}, {policy.make.tokenizer} tokenizer ({state}): {folder}"
        table.add_row(name, model, "no (frozen)" if policy.frozen else f"lr {policy.learner.lr:g}")
    return table


def _processes(config: RunConfig, plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="processes", title_justify="left", show_edge=False, show_footer=True)
    needs = [estimate_mib(spec, config.policies.get(spec.policy)) for spec in plan.processes]
    threads = [int(spec.env["OMP_NUM_THREADS"]) * _ranks(config, spec) for spec in plan.processes]
    table.add_column("process", f"{len(plan.processes)} processes")
    table.add_column("device")
    table.add_column("threads", str(sum(threads)), justify="right")
    table.add_column("memory (estimate)", f"{sum(needs):.0f} MiB", justify="right")
    for spec, need, count in zip(plan.processes, needs, threads, strict=True):
        table.add_row(spec.name, _device(config, spec), str(count), f"{need:.0f} MiB")
    return table


def _ranks(config: RunConfig, spec: ProcessSpec) -> int:
    return config.policies[spec.policy].learner.processes if spec.role == "learner" else 1


def _device(config: RunConfig, spec: ProcessSpec) -> str:
    policy = config.policies.get(spec.policy)
    if policy is None or policy.device == "cpu":
        return "cpu"
    return "cuda " + spec.env.get("CUDA_VISIBLE_DEVICES", "")
