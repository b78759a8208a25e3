"""`mrl train CONFIG [--clean | --resume] [--key.path VALUE ...]`."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mrl.config.load import load_config
from mrl.config.run_folder import RunFolder, check_run_folder, create_run_folder, lock_run_folder, run_folder_of
from mrl.config.schema import RunConfig

if TYPE_CHECKING:
    from mrl.launch.plan import Plan
    from mrl.report.board import Board
    from mrl.roles.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Configuration and what to do with an earlier run of the same name."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("--hosts", default="", metavar="A,B", help="hosts of the SLURM job, this one first")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--clean", action="store_true", help="delete the earlier run of this name first")
    earlier.add_argument("--resume", action="store_true", help="continue the earlier run of this name")


def run(arguments: argparse.Namespace) -> int:
    """Check everything, make missing policies, then supervise the run to its end."""
    from mrl.cli.policies import resolve_policies
    from mrl.cli.preflight import preflight
    from mrl.launch.devices import visible_gpus
    from mrl.launch.plan import build_plan
    from mrl.launch.slurm import check_hosts

    where = str(arguments.config)
    config = load_config(arguments.config, arguments.overrides)
    gpus, hosts = visible_gpus(os.environ), [host for host in arguments.hosts.split(",") if host]
    check_hosts(config, hosts, where=where)
    build_plan(config, run_folder_of(config).path, gpus=gpus, hosts=hosts)
    check_run_folder(config, clean=arguments.clean, resume=arguments.resume)
    preflight(config, where=where)
    console = Console(width=None if sys.stdout.isatty() else 120)
    config = resolve_policies(config, console=console)
    folder = create_run_folder(config, clean=arguments.clean, resume=arguments.resume)
    release = lock_run_folder(folder)
    try:
        plan = build_plan(config, folder.path, gpus=gpus, hosts=hosts)
        return _supervise(config, folder, plan, console)
    finally:
        release()


def _supervise(config: RunConfig, folder: RunFolder, plan: "Plan", console: Console) -> int:
    from mrl.metrics.jsonl import read_metrics
    from mrl.report.board import Board
    from mrl.roles.display import Display
    from mrl.roles.supervisor import Supervisor, open_inbox

    board = Board(config)
    inbox = open_inbox(folder, config.exchange.host)
    try:
        earlier = read_metrics(folder.metrics_jsonl)
        supervisor = Supervisor(config, folder, plan, inbox=inbox, display=Display(board, console))
        if earlier:
            board.replay(earlier, time.monotonic())
        print(f"run folder {folder.path}, logs in {supervisor.attempt}", flush=True)
        code = supervisor.run()
    finally:
        inbox.close()
    return _conclude(folder, supervisor, board, console, code)


def _conclude(folder: RunFolder, supervisor: "Supervisor", board: "Board", console: Console, code: int) -> int:
    from mrl.report.page import write_report

    page = write_report(folder.path)
    console.print(board.final_table())
    print(f"peak memory {supervisor.peak_pss_mib:.0f} MiB")
    print(f"report {page}", flush=True)
    if supervisor.reason:
        prefix = "mrl: error" if code in (1, 2) else "mrl"
        sys.stderr.write(f"{prefix}: {supervisor.reason}; logs in {supervisor.attempt}\n")
    return code
