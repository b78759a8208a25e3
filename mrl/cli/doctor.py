"""`mrl doctor`: show what this machine has, and try whether each engine starts, samples, scores and takes weights."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

import mrl
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.engines.environment import is_made, making_command
from mrl.engines.wheel_limits import GLIBC, lacks, this_machine
from mrl.errors import ConfigError
from mrl.gateway.agent_network import described_network
from mrl.metrics.gpu_load import GpuLoad
from mrl.processes.engines import DIALECTS
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.preparation.engine_examination import Finding, Subject, examine
from mrl.tasks.sealed.sealing import described_seal

ENGINES = ("embedded", *DIALECTS)
GIB = 1024**3
COLUMNS = ("engine", "version", "starts", "samples", "log-probs off by", "new weights off by", "every byte checked", "")

OPTIONAL = (
    ("reasoning_gym", "tasks", "tasks of reasoning-gym, including those of the quickstart"),
    ("math_verify", "tasks", "verification of mathematical answers"),
    ("peft", "lora", "training of LoRA adapters (learner.lora)"),
    ("renderers", "renderers", "tool calls of more model families (prompt.family)"),
    ("matplotlib", "plots", "figures of `mrl compare` and `mrl bandit`"),
)
"""(module, extra that installs the module, purpose) for the optional packages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: engines and device, or the configuration that names them."""
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", help=f"engines to try, of {', '.join(ENGINES)}; default: all"
    )
    device = "cuda" if visible_gpus(os.environ) else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=f"device of the engines; default: {device}")
    help_of_config = "try the engines of this configuration, with their devices, interpreters, options and URLs"
    parser.add_argument("--config", type=config_file, metavar="CONFIG", help=help_of_config)


def run(arguments: argparse.Namespace) -> int:
    """Examine engines and print the findings; return 1 when an engine fails, 2 when the user can cure all failures.

    An engine that was not named and is not installed is no failure: it is listed with the command that installs it.
    """
    for name in arguments.engines:
        if name not in ENGINES:
            cure = f"use `mrl doctor --config {name}`" if name.endswith(".toml") else ""
            raise ConfigError("no such engine", where="mrl doctor", got=name, wanted=", ".join(ENGINES), cure=cure)
    subjects = _subjects(arguments)
    is_any_meant = not arguments.engines and arguments.config is None
    absent = [one for one in subjects.values() if is_any_meant and not _is_here(one)]
    subjects = {name: one for name, one in subjects.items() if one not in absent}
    print("\n".join([*machine(), *unfit(subjects.values())]))
    findings = []
    for name, subject in subjects.items():
        print(f"examining {name} ...", file=sys.stderr, flush=True)
        found = examine(subject)
        found.engine = name
        findings.append(found)
    Console(width=None if sys.stdout.isatty() else 140).print(table(findings))
    for found in findings:
        if found.problem:
            print(f"{found.engine}: {found.problem}")
    print("".join(f"{line}\n" for line in not_here(absent)), end="")
    wrong = [found for found in findings if found.problem]
    return 0 if not wrong else 2 if all(found.is_users for found in wrong) else 1


def not_here(absent: Iterable[Subject]) -> list[str]:
    """Return lines on what is not installed, with the command that installs it: these engines, and packages."""
    kinds = [(one.engine, _kind(one.device)) for one in absent]
    rows = [(engine, f"inference server on {kind.upper()}s", making_command(engine, kind)) for engine, kind in kinds]
    missing = [row for row in OPTIONAL if importlib.util.find_spec(row[0]) is None]
    rows += [(module, what, f"pip install 'mrl[{extra}]'") for module, extra, what in missing]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {what:<{widths[1]}}  {command}" for name, what, command in rows]
    return ["not installed (optional):", *lines]


def subjects_of(config: RunConfig) -> dict[str, Subject]:
    """Return the engines of a configuration, by a name that lists the policies with this engine."""
    owners: dict[Subject, list[str]] = {}
    for policy, settings in config.policies.items():
        rollout, server = settings.rollout, settings.rollout.server
        subject = Subject(
            rollout.engine, settings.device, server.python, server.url, server.dtype, tuple(server.options)
        )
        owners.setdefault(subject, []).append(policy)
    return {f"{subject.engine} of {', '.join(policies)}": subject for subject, policies in owners.items()}


def machine() -> list[str]:
    """Return lines on the versions and resources of this machine."""
    memory_gib, free_gib = psutil.virtual_memory().total / GIB, psutil.disk_usage(str(Path.home())).free / GIB
    gpus = visible_gpus(os.environ)
    libraries = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "pyzmq"))
    return [
        f"mrl {mrl.__version__}, python {platform.python_version()}, {', '.join(libraries)}",
        f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB of memory, {free_gib:.0f} GiB of disk free, "
        + (f"{len(gpus)} GPUs" if gpus else "no GPU"),
        f"answers that are evaluated as code: {described_seal()}",
        f"agents that a run starts can reach {described_network()}",
        f"metrics of GPUs: {gpu_metrics(gpus)}",
        *(
            ["PYTHONDONTWRITEBYTECODE is set: every process compiles all modules again, which slows its start"]
            * sys.dont_write_bytecode
        ),
    ]


def gpu_metrics(gpus: Sequence[str]) -> str:
    """Describe whether runs here measure load, memory and power of GPUs, or why not."""
    load = GpuLoad(gpus)
    if load.absent:
        return f"none ({load.absent})"
    return f"from driver {load.driver()}, for {sum(map(bool, load.values()))} of {len(gpus)} GPUs"


def unfit(subjects: Iterable[Subject]) -> list[str]:
    """Return lines on why pinned wheels do not run on GPUs here, for the engines that mrl would start on GPUs."""
    engines = {one.engine for one in subjects if one.device == "cuda" and not one.python and not one.url}
    return [line for engine in sorted(engines & set(GLIBC)) for line in lacks(engine, this_machine())]


def table(findings: list[Finding]) -> Table:
    """Return a table with a row for each engine."""
    made = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for found in findings:
        cells = (found.engine, found.version, found.starts, found.samples, found.logprob_gap, found.canary_gap)
        made.add_row(*cells, found.digests, "[red]see below" if found.problem else "[green]ok")
    return made


def _is_here(subject: Subject) -> bool:
    return subject.engine == "embedded" or is_made(subject.engine, _kind(subject.device))


def _kind(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _subjects(arguments: argparse.Namespace) -> Mapping[str, Subject]:
    """Return the engines to examine. Raises ConfigError when a configuration and a device are both given."""
    if arguments.config is None:
        device = arguments.device or ("cuda" if visible_gpus(os.environ) else "cpu")
        return {name: Subject(name, device) for name in arguments.engines or ENGINES}
    if arguments.device:
        cure = "remove --device: the configuration sets the device of each policy"
        raise ConfigError(
            "--device cannot be combined with --config", where="mrl doctor", got=arguments.device, cure=cure
        )
    found = subjects_of(load_config(arguments.config, []))
    chosen = {name: one for name, one in found.items() if one.engine in (arguments.engines or ENGINES)}
    if not chosen:
        raise ConfigError(
            "no policy uses this engine",
            where=str(arguments.config),
            got=", ".join(arguments.engines),
            wanted=", ".join(sorted({one.engine for one in found.values()})),
        )
    return chosen
