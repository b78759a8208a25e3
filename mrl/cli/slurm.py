"""`mrl slurm CONFIG --hosts N --cpus N [--gpus N] [--minutes N] [--partition P]`: print a batch script for `sbatch`."""

import argparse
from pathlib import Path

from mrl.config.load import load_config
from mrl.launch.slurm import SlurmRequest, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask SLURM for."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="number of hosts (1)")
    parser.add_argument("--cpus", type=int, required=True, metavar="N", help="CPUs per host")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs per host (0)")
    parser.add_argument("--minutes", type=int, default=60, metavar="N", help="time limit (60)")
    parser.add_argument("--partition", default="", metavar="P", help="partition")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    config = load_config(arguments.config, arguments.overrides)
    request = SlurmRequest(arguments.hosts, arguments.cpus, arguments.gpus, arguments.minutes, arguments.partition)
    print(render(config, arguments.config, request, arguments.overrides), end="")
    return 0
