"""`mrl report RUN`: write report.html of a run, or give its metrics to a tracker."""

import argparse
from pathlib import Path

from mrl.config.run_folder import RunFolder, read_run_config
from mrl.config.schema import RunConfig, TrackerTable
from mrl.errors import MissingError
from mrl.metrics.trackers.kinds import TRACKERS, tracker_class


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run and tracker."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    parser.add_argument(
        "--to", metavar="KIND", help=f"send all metrics of the run to {', '.join(TRACKERS)} or a plug-in"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write report.html of a run, ended or going on, and print its path; or give its metrics to a tracker."""
    from mrl.report.page import write_report

    if arguments.to and ":" not in arguments.to:
        tracker_class(arguments.to, where="--to")
    config = read_run_config(arguments.run)
    if arguments.to:
        return _give(config, arguments.run, arguments.to)
    print(write_report(arguments.run))
    return 0


def _give(config: RunConfig, path: Path, kind: str) -> int:
    """Give the run's metrics to a tracker, with the run's own table of this kind if there is one."""
    from mrl.processes.preparation.tracker_checks import check_tracker
    from mrl.processes.trackers import replay

    tracker_class(kind, where="--to")
    tables = [table for table in config.trackers if table.kind == kind]
    table = tables[0] if tables else TrackerTable.model_validate({"kind": kind})
    missing: list[MissingError] = []
    check_tracker(table, missing.append, where=str(path), key="--to")
    for error in missing:
        raise error
    for line in replay(config, RunFolder(path.resolve()), table):
        print(line, flush=True)
    return 0
