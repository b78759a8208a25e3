"""Check the trackers of a configuration before anything is started."""

import importlib.util
import os
import re
from collections.abc import Callable

from mrl.config.nearest_key import nearest
from mrl.config.schema import RunConfig, TrackerTable
from mrl.errors import ConfigError, MissingError
from mrl.metrics.trackers.kinds import TRACKERS, tracker_class
from mrl.metrics.trackers.tracker import Tracker
from mrl.processes.trackers import labelled

WORDS = {str: "a quoted string", bool: "true or false", list: "a list of strings"}
_KEY = re.compile(r"key|token|secret|passw", re.IGNORECASE)


def check_trackers(config: RunConfig, on_missing: Callable[[MissingError], None], *, where: str) -> None:
    """Raises ConfigError for an option that its tracker does not have.

    `on_missing` is told of a missing package, and of a login that is needed.
    """
    for place, (_, table) in enumerate(labelled(config.trackers)):
        check_tracker(table, on_missing, where=where, key=f"trackers.{place}")


def check_tracker(table: TrackerTable, on_missing: Callable[[MissingError], None], *, where: str, key: str) -> None:
    """Check one tracker's table, which stands at `key`, as `check_trackers` does."""
    kind = tracker_class(table.kind, where=f"{where}: {key}.kind")
    for option, value in table.options.items():
        _check_option(kind, table.kind, option, value, where=f"{where}: {key}.options")
    spec = importlib.util.find_spec(kind.package)
    if spec is None or spec.origin is None:  # no origin: a mere folder of this name, such as wandb makes
        what = f"the package {kind.package} is not installed"
        package = f"'mrl[{table.kind}]'" if table.kind in TRACKERS else kind.package
        on_missing(MissingError(what, where=f"{key}.kind", cure=f"pip install {package}"))
    elif login := kind.missing_login(os.environ, table.options):
        on_missing(MissingError(f"not logged in to {table.kind}", where=f"{key}.kind", cure=login))


def _check_option(kind: type[Tracker], name: str, option: str, value: object, *, where: str) -> None:
    options, (where, _, key) = kind.options, where.rpartition(": ")
    if option not in options:
        near = nearest(option, options)
        cure = f"did you mean {near}?" if near else ""
        if _KEY.search(option):
            cure = "leave it out: give keys through the environment or the tracker's own login"
        raise ConfigError(
            f"{key}: {name} has no such option in mrl",
            where=where,
            got=option,
            wanted="one of " + ", ".join(options) if options else "no options",
            cure=cure,
        )
    if not isinstance(value, options[option]) or (
        isinstance(value, list) and not all(isinstance(v, str) for v in value)
    ):
        raise ConfigError(f"{key}.{option}: invalid value", where=where, got=value, wanted=WORDS[options[option]])
