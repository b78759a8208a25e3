"""`mrl train CONFIG [--clean | --resume [--policy-from-start NAME]] [--key.path VALUE ...]`: run CONFIG to its end."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mrl.config.file_modes import limit_modes
from mrl.config.load import load_config
from mrl.config.run_folder import RunFolder, check_run_folder, create_run_folder, read_run_config, run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import MissingError, MRLError
from mrl.host_memory import host_memory_bytes

if TYPE_CHECKING:
    from mrl.fork_server import ForkServer
    from mrl.processes.display import RunConsole
    from mrl.processes.planning.hosts import Host
    from mrl.processes.planning.plan import Plan
    from mrl.processes.supervisor import Supervisor
    from mrl.report.run_display import RunDisplay

SIGNALLED = 128
"""Added to a signal's number, the exit code of a run that the signal ended."""
QUICK_REPORT_BYTES = 8 * 1024 * 1024
QUICK_REPORT_FILES = 1_000
"""Bounds of a run that still gets its report after a signal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: configuration, and those of `add_earlier`."""
    parser.add_argument("config", type=config_file, metavar="CONFIG", help="TOML file, or `quickstart`")
    add_earlier(parser)


def add_earlier(parser: argparse.ArgumentParser) -> None:
    """Add the arguments on an earlier run of the same name: delete, continue, or let a policy begin anew."""
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--clean", action="store_true", help="delete the earlier run of this name first")
    earlier.add_argument("--resume", action="store_true", help="continue the earlier run of this name")
    parser.add_argument(
        "--policy-from-start",
        action="append",
        default=[],
        metavar="NAME",
        help="with --resume: restart this policy from step 0; its checkpoints are set aside",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train on this host."""
    config = load_config(arguments.config, arguments.overrides)
    return train(config, **beginning(arguments), where=str(arguments.config))


def beginning(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how the run begins, as keyword arguments of `train` and `check_run_folder`."""
    return {"clean": arguments.clean, "resume": arguments.resume, "from_start": arguments.policy_from_start}


def begun(config: RunConfig, *, resume: bool) -> RunConfig | None:
    """Return the stored configuration of a resumed run, with commits of models and the day in prompts; else None."""
    folder = run_folder_of(config)
    return read_run_config(folder.path, is_own=False) if resume and folder.config_json.is_file() else None


def train(
    config: RunConfig,
    *,
    clean: bool,
    resume: bool,
    from_start: Collection[str] = (),
    where: str,
    hosts: "Sequence[Host]" = (),
) -> int:
    """Check everything, fetch and make missing policies, then supervise the run to its end; return the exit code."""
    with ExitStack() as closing:
        forks = _forks(config, closing)  # its process imports the roles' modules while this process imports and checks
        from mrl.memory_plan.needs import MIB
        from mrl.memory_plan.run_memory import check_sleepers
        from mrl.processes.children import is_forked
        from mrl.processes.display import RunConsole
        from mrl.processes.planning.devices import visible_gpus
        from mrl.processes.planning.hosts import check_hosts, counting_gpus, host_environment, idle_hosts, remote_words
        from mrl.processes.planning.local_folder import local_folder_of
        from mrl.processes.planning.plan import build_plan
        from mrl.processes.planning.time_sharing import shared_gpus
        from mrl.processes.preparation.made_policies import resolve_policies
        from mrl.processes.preparation.preflight import check_made
        from mrl.processes.preparation.replayed_run import with_replay

        check_hosts(config, [host.name for host in hosts], where=where)
        remote = remote_words(config, hosts, os.environ, where=where)
        if idle := idle_hosts(config, hosts, os.environ):
            print(f"note: {idle}", flush=True)
        gpus = visible_gpus(os.environ)
        config = counting_gpus(config, hosts, len(gpus))
        planned = partial(build_plan, gpus=gpus, hosts=hosts, remote=remote)
        config = _checked(config, planned, {"clean": clean, "resume": resume, "from_start": from_start}, where)
        plan = planned(config, run_folder_of(config).path)
        check_sleepers(config, plan, host_mib=host_memory_bytes() / MIB, where=where)
        on_terminal = sys.stdout.isatty()
        # FORCE_COLOR, which notebooks and CI set, makes no terminal of a pipe: a live view there is lines without end.
        console = RunConsole(width=None if on_terminal else 120, force_terminal=on_terminal)
        config = with_replay(resolve_policies(config, console=console))
        check_made(config)
        closing.callback(os.umask, limit_modes(config))
        folder = create_run_folder(config, clean=clean, resume=resume, from_start=from_start, closing=closing)
        os.environ.update(host_environment(hosts[0]) if hosts else {})
        plan = planned(config, folder.path)
        if forks and not any(map(is_forked, plan.started_by(plan.first_host))):
            forks.close()  # on this host no process is a fork
        print("".join(f"{line}\n" for line in shared_gpus((*plan.processes, *plan.leased))), end="")
        with local_folder_of(config):
            return _supervise(config, folder, plan, console, forks)


def _forks(config: RunConfig, closing: ExitStack) -> "ForkServer | None":
    """Start the process from which roles on the CPU are forked; None where no role can be a fork."""
    from mrl.processes.children import CAN_FORK, start_forks

    if not CAN_FORK or all(policy.device != "cpu" for policy in config.policies.values()):
        return None
    forks = start_forks()
    closing.callback(forks.close)
    return forks


def _checked(config: RunConfig, planned: "Callable[..., Plan]", how: dict[str, Any], where: str) -> RunConfig:
    """Return `config` completed, with its models fetched. All other checks pass before anything is fetched."""
    from mrl.memory_plan.fitting import fitted_to_memory
    from mrl.memory_plan.needs import MIB
    from mrl.processes.preparation.checkpoint_room import room_notes
    from mrl.processes.preparation.completion import complete
    from mrl.processes.preparation.hub_models import fetched, pinned, unfetched
    from mrl.processes.preparation.learning_values import warnings
    from mrl.processes.preparation.model_bytes import parameters
    from mrl.processes.preparation.preflight import preflight

    folder, notes = run_folder_of(config), list[str]()

    def check(config: RunConfig, on_unfetched: "Callable[[MissingError], None] | None" = None) -> RunConfig:
        config = complete(config).config
        plan = planned(config, folder.path)
        config = fitted_to_memory(config, plan, host_memory_bytes() / MIB).config
        check_run_folder(config, **how)
        preflight(config, where=where, first_host=plan.first_host, on_unfetched=on_unfetched, on_note=notes.append)
        return config

    print(f"checking {where}", flush=True)
    config = pinned(config, where=where, earlier=begun(config, resume=how["resume"]), on_note=notes.append)
    if names := unfetched(config):
        check(config, lambda _: None)
        config = fetched(config, names, where=where, tell=partial(print, flush=True))
    config = check(config)
    known = parameters(config)
    for note in dict.fromkeys((*notes, *warnings(config, known), *room_notes(config, known))):
        print(f"note: {note}", flush=True)
    return config


def _supervise(
    config: RunConfig, folder: RunFolder, plan: "Plan", console: "RunConsole", forks: "ForkServer | None"
) -> int:
    from mrl.metrics.jsonl import each_metrics
    from mrl.metrics.logging import configure_logging
    from mrl.processes.display import Display
    from mrl.processes.preparation.pair_cards import measured_beside
    from mrl.processes.supervisor import Supervisor, open_inbox
    from mrl.report.run_display import RunDisplay

    board = RunDisplay(config)
    inbox = open_inbox(folder, config.exchange.host, plan.processes)
    try:
        earlier = each_metrics(folder.metrics_jsonl, lambda told: print(f"mrl: {told}", flush=True))
        board.replay(earlier, time.monotonic())
        supervisor = Supervisor(config, folder, plan, inbox=inbox, display=Display(board, console), forks=forks)
        configure_logging("supervisor", stream=(supervisor.attempt / "supervisor.log").open("a", buffering=1))
        print(f"run folder {folder.path}, logs in {supervisor.attempt}", flush=True)
        with measured_beside(config, folder, supervisor.attempt / "pair_cards.log"):
            code = supervisor.run()
    finally:
        inbox.close()
    return conclude(folder, supervisor, board, console, code)


def conclude(folder: RunFolder, ended: "Supervisor", board: "RunDisplay", console: Console, code: int) -> int:
    """Write the report, print the final table and why the run ended; return the exit code.

    A report that cannot be written turns exit code 0 into 2. After a signal a large run gets no report, since the
    shell's prompt has to be back within seconds.
    """
    fault = ""
    try:
        told = _report(folder, after_signal=code > SIGNALLED)
    except (MRLError, OSError) as error:  # the folder is gone, or the disk is full
        told, fault = "no report", f"no report: {' '.join(str(error).split())}"
    console.print(board.final_table())
    for note in board.final_notes():
        print(f"note: {note}")
    print(f"peak memory {ended.peak_pss_mib:.0f} MiB")
    print(told, flush=True)
    if fault:
        sys.stderr.write(f"mrl: error: {fault}\n")
    if ended.reason:
        prefix = "mrl: error" if code in (1, 2) else "mrl"
        onward = _onward(folder) if code > SIGNALLED and folder.config_json.exists() else ""
        sys.stderr.write(f"{prefix}: {ended.reason}; logs in {ended.attempt}{onward}\n")
    return code or (2 if fault else 0)


def _onward(folder: RunFolder) -> str:
    if any(folder.path.glob("checkpoints/*/step_*")):
        return "; the same command with --resume continues the run"
    return "; no checkpoint was saved, so the same command with --resume begins at the first step"


def _report(folder: RunFolder, *, after_signal: bool) -> str:
    from mrl.report.page import is_small, write_report

    if after_signal and not is_small(folder, max_bytes=QUICK_REPORT_BYTES, max_files=QUICK_REPORT_FILES):
        return f"no report was written after the signal, as the run is large; `mrl report {folder.path}` writes it"
    return f"report {write_report(folder.path)}"
