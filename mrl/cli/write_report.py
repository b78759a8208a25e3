"""`mrl report RUN`."""

import argparse
from pathlib import Path

from mrl.config.run_folder import read_run_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")


def run(arguments: argparse.Namespace) -> int:
    """Write report.html of a run that is over or going on, and print its path."""
    from mrl.report.page import write_report

    read_run_config(arguments.run)
    print(write_report(arguments.run))
    return 0
