"""Commands that start one role of a run; launchers and the supervisor use them, people seldom do."""

import argparse
import gc
import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from mrl.parent_death import die_with_supervisor
from mrl.process_start import importing

ROLES: dict[str, str] = {
    "exchange": "mrl.processes.exchange",
    "allocator": "mrl.processes.allocator",
    "gateway": "mrl.processes.gateway",
    "learner": "mrl.processes.learner",
    "worker": "mrl.processes.worker",
    "kept-version": "mrl.processes.evaluation.checkpoint_serving",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run folder, policy and index."""
    parser.add_argument(
        "--run-folder", type=Path, required=True, metavar="FOLDER", help="folder of the run, runs/<name>"
    )
    needs_policy = parser.get_default("command") in ("learner", "worker", "kept-version")
    parser.add_argument(
        "--policy", default="", required=needs_policy, metavar="NAME", help="policy that this process serves"
    )
    parser.add_argument(
        "--index", type=int, default=0, metavar="I", help="number of the worker, or step of the kept version"
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Bind the process to the supervisor's life, before heavy imports; run the role to its end; end the process."""
    die_with_supervisor()
    from mrl.config.file_modes import check_writers, limit_modes
    from mrl.config.run_folder import read_run_config
    from mrl.errors import ConfigError

    run_folder = arguments.run_folder.absolute()
    check_writers(run_folder)
    config = read_run_config(run_folder)
    limit_modes(config)
    policies = config.policies
    if arguments.policy and arguments.policy not in policies:
        raise ConfigError("no such policy", where=str(run_folder), got=arguments.policy, wanted=", ".join(policies))
    with importing():
        role = importlib.import_module(ROLES[arguments.command])
        gc.freeze()  # half a million objects that live as long as the process; to pass over them all would take 0.2 s
    code = int(role.main(run_folder, arguments.policy, arguments.index))
    sys.stdout.flush()
    sys.stderr.flush()
    # The role has closed what it owns. Leaving through the interpreter would first collect the object graph of torch
    # and transformers, which takes seconds when all roles do so at once.
    os._exit(code)
