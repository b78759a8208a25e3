"""`mrl join RUN --host NAME [--wait-s S]`: run the roles that a run on several hosts has on this host.

The first host starts this command on the others (`launch.remote`); with `launch.hosts_join` something else does, such
as a SLURM job per policy.
"""

import argparse
import sys
from pathlib import Path

DEFAULT_WAIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run, name of this host, bound of the wait."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run; it need not exist yet")
    parser.add_argument("--host", required=True, metavar="NAME", help="name of this host in `mrl launch --hosts`")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=DEFAULT_WAIT_S,
        metavar="S",
        help=f"seconds to wait for the run and its first host (default: {DEFAULT_WAIT_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run this host's roles to the end of the run."""
    from mrl.errors import ConfigError
    from mrl.processes.join import main
    from mrl.processes.planning.hosts import parse_hosts

    if len(parse_hosts(arguments.host)) != 1 or "=" in arguments.host:
        raise ConfigError(
            "--host: not a host name", got=arguments.host, wanted="one of the names in `mrl launch --hosts`"
        )
    code = main(arguments.run.absolute(), arguments.host, arguments.wait_s)
    if code not in (0, 75):
        sys.stderr.write(f"mrl: host {arguments.host} exited with code {code}; logs in {arguments.run}/logs/latest\n")
    sys.stdout.flush()
    return code
