"""`mrl launch CONFIG [--hosts A,B,...]`: train on several hosts; with `--slurm` as SLURM jobs.

The first host owns the run folder, which the other hosts see; on each of those one process, `mrl join`, supervises the
processes there. Without `--hosts` this is `mrl train`. `--dry-run` prints the plan, and starts and writes nothing.
"""

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence

from mrl.cli import train
from mrl.config.load import load_config
from mrl.config.run_folder import check_run_folder, run_folder_of
from mrl.errors import ConfigError, MissingError
from mrl.host_memory import host_memory_bytes
from mrl.processes.planning.hosts import check_hosts, parse_hosts, remote_words
from mrl.processes.planning.plan import build_plan
from mrl.processes.planning.slurm import Job, SlurmRequest, render

SUBMIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: those of `mrl train`, the hosts, and the request to SLURM."""
    train.add_arguments(parser)
    parser.add_argument(
        "--hosts",
        default="",
        metavar="A,B",
        help="names of hosts, or NAME=ADDRESS; with --slurm the number of hosts (default: 1)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan without starting or writing anything")
    parser.add_argument("--slurm", action="store_true", help="print a batch script for SLURM instead")
    asked = parser.add_argument_group("with --slurm")
    asked.add_argument("--submit", action="store_true", help="submit the batch script too")
    asked.add_argument("--cpus", type=int, metavar="N", help="CPUs per host (required)")
    asked.add_argument("--gpus", type=int, metavar="N", help="GPUs per host (default: 0)")
    asked.add_argument("--minutes", type=int, metavar="N", help="time limit of a job in minutes (default: 60)")
    asked.add_argument("--partition", metavar="P", help="SLURM partition")
    asked.add_argument(
        "--requeue", action="store_true", help="continue in a new job after preemption or the time limit"
    )
    asked.add_argument("--heterogeneous", action="store_true", help="put daemons on a host of their own, without GPUs")
    asked.add_argument(
        "--separate", action="store_true", help="submit one job per policy; the jobs meet through the run folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, print the plan, or print SLURM scripts and submit them."""
    check_options(arguments)
    config = load_config(arguments.config, arguments.overrides)
    where = str(arguments.config)
    if arguments.slurm:
        from mrl.allocation.floors import check_floors
        from mrl.config.defaults import by_size
        from mrl.processes.preparation.hub_models import pinned
        from mrl.processes.preparation.model_bytes import weights_bytes

        check_floors(config, where=where)
        config = by_size(config, weights_bytes(config)).config  # the time that the run needs to end
        jobs = render(config, arguments.config, request_of(arguments), arguments.overrides)
        show(jobs)
        if earlier := train.begun(config, resume=arguments.resume):
            config = pinned(config, where=where, earlier=earlier, on_note=lambda _: None)
        check_run_folder(config, **train.beginning(arguments))
        return submit(jobs) if arguments.submit else 0
    hosts = parse_hosts(arguments.hosts)
    if not arguments.dry_run:
        return train.train(config, **train.beginning(arguments), where=where, hosts=hosts)
    from mrl.memory_plan.fitting import fitted_to_memory
    from mrl.memory_plan.needs import MIB
    from mrl.memory_plan.run_memory import check_sleepers
    from mrl.processes.planning.devices import visible_gpus
    from mrl.processes.planning.dry_run import describe
    from mrl.processes.preparation.completion import complete
    from mrl.processes.preparation.hub_models import pinned
    from mrl.processes.preparation.preflight import preflight

    earlier = train.begun(config, resume=arguments.resume)
    config = complete(pinned(config, where=where, earlier=earlier, on_note=lambda _: None)).config
    check_hosts(config, [host.name for host in hosts], where=where)
    remote = remote_words(config, hosts, os.environ, where=where)
    folder = run_folder_of(config).path
    host_mib = host_memory_bytes() / MIB
    plan = build_plan(config, folder, gpus=visible_gpus(os.environ), hosts=hosts, remote=remote)
    config = fitted_to_memory(config, plan, host_mib).config
    check_run_folder(config, **train.beginning(arguments))
    preflight(config, where=where, first_host=plan.first_host)
    check_sleepers(config, plan, host_mib=host_mib, where=where)
    print(f"run folder {folder}")
    print("\n".join(describe(plan, config)))
    return 0


def check_options(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for the first option that another option leaves without meaning."""
    only_slurm = ("submit", "cpus", "gpus", "minutes", "partition", "requeue", "heterogeneous", "separate")
    given = [f"--{name}" for name in only_slurm if getattr(arguments, name)]
    if given and not arguments.slurm:
        raise ConfigError(f"{given[0]} has no effect without --slurm", where="mrl launch", cure="add --slurm")
    if arguments.slurm and arguments.policy_from_start:
        cure = "restart the policy on one host first: run `mrl train CONFIG --resume --policy-from-start NAME` briefly"
        raise ConfigError(
            "--policy-from-start cannot be combined with --slurm: a requeued job would restart again", cure=cure
        )
    for first, second in (("heterogeneous", "separate"), ("submit", "dry_run")):
        if getattr(arguments, first) and getattr(arguments, second):
            names = f"--{first} and --{second.replace('_', '-')}"
            raise ConfigError(f"{names} cannot be combined", where="mrl launch", cure="remove one of them")
    if arguments.slurm and not arguments.cpus:
        raise ConfigError("--slurm requires --cpus, the CPUs per host", where="mrl launch")
    if arguments.slurm and arguments.hosts and not (arguments.hosts.isdecimal() and int(arguments.hosts)):
        wanted = "the number of hosts; SLURM chooses which"
        raise ConfigError(
            "--hosts must be a number with --slurm", where="mrl launch", got=arguments.hosts, wanted=wanted
        )


def request_of(arguments: argparse.Namespace) -> SlurmRequest:
    """Return the request to SLURM that the options make."""
    return SlurmRequest(
        num_hosts=int(arguments.hosts or 1),
        cpus_per_host=arguments.cpus,
        gpus_per_host=arguments.gpus or 0,
        minutes=arguments.minutes or 60,
        partition=arguments.partition or "",
        shape="heterogeneous" if arguments.heterogeneous else "separate" if arguments.separate else "equal",
        requeue=arguments.requeue,
        begin="--clean" if arguments.clean else "--resume" if arguments.resume else "",
    )


def show(jobs: Sequence[Job]) -> None:
    """Print the scripts, with titles where there are several."""
    for number, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            print(f"# ---- job {number} of {len(jobs)}: {job.title}")
        print(job.script, end="", flush=True)


def submit(jobs: Sequence[Job]) -> int:
    """Submit the scripts; all jobs but the first start after the first. Raises ConfigError with sbatch's message."""
    if shutil.which("sbatch") is None:
        raise MissingError(
            "--submit: `sbatch` is not installed on this host", where="mrl launch", cure="submit from a login node"
        )
    first = ""
    for job in jobs:
        after = [f"--dependency=after:{first}"] if first else []
        done = subprocess.run(
            ["sbatch", "--parsable", *after],
            input=job.script,
            capture_output=True,
            text=True,
            timeout=SUBMIT_S,
            check=False,
        )
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise ConfigError(f"sbatch rejected the job of {job.title}", where="mrl launch", got=said)
        first = first or done.stdout.strip().partition(";")[0]
        print(f"submitted {job.title} as job {done.stdout.strip()}", flush=True)
    return 0
