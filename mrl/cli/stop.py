"""`mrl stop RUN [--policy NAME] [--wait]`: end a run, or one policy of it, from any host that sees the run folder.

The request is a file, which the run's supervisor takes within a second. Learners save a checkpoint before they end, and
`--resume` goes on from there, with all policies.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from mrl.config.run_folder import read_run_config, supervisor_of
from mrl.config.schema import RunConfig
from mrl.config.stop_request import file_stop_request, is_ended
from mrl.errors import ConfigError, PeerLost, RunFolderError

POLL_S = 0.1
MARGIN_S = 60.0
"""Seconds that `--wait` waits beyond `supervision.stop_s`, since the run also writes its report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run, policy, and whether to wait."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--policy", default="", metavar="NAME", help="stop only this policy; the others continue")
    parser.add_argument("--wait", action="store_true", help="return once the run, or the policy, has ended")


def run(arguments: argparse.Namespace) -> int:
    """File the request and, with `--wait`, wait for the end of the run or policy."""
    run_folder, policy = arguments.run.absolute(), arguments.policy
    config = read_run_config(run_folder)
    check_policy(config, policy, where=str(run_folder))
    if supervisor_of(run_folder) is None:
        raise RunFolderError("the run is not running, so there is nothing to stop", where=str(run_folder))
    request = file_stop_request(run_folder, policy)
    if not arguments.wait:
        print(f"asked {run_folder} to stop {policy or 'all policies'}")
        return 0

    def is_over() -> bool:
        is_done = bool(policy) and not request.exists() and is_ended(run_folder, policy)
        return is_done or supervisor_of(run_folder) is None

    _await(is_over, config.supervision.stop_s + MARGIN_S, where=str(run_folder))
    request.unlink(missing_ok=True)  # the run ended before its supervisor took the request
    print(f"{policy or run_folder} has ended")
    return 0


def check_policy(config: RunConfig, policy: str, *, where: str) -> None:
    """Raises ConfigError when this policy alone cannot be ended."""
    if policy and policy not in config.policies:
        raise ConfigError("no such policy", where=where, got=policy, wanted=", ".join(config.policies))
    if policy and config.run.sync:
        raise ConfigError(
            "a synchronous run waits for all of its policies; one alone cannot be stopped",
            where=where,
            got=policy,
            cure=f"stop the whole run with `mrl stop {where}`",
        )


def _await(is_over: Callable[[], bool], bound_s: float, *, where: str) -> None:
    deadline_s = time.monotonic() + bound_s
    while not is_over():
        if time.monotonic() > deadline_s:
            raise PeerLost(f"{where}: the run did not carry out the stop request within {bound_s:g} s")
        time.sleep(POLL_S)
