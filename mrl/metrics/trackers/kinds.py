"""Table of the kinds of trackers."""

from typing import cast

from mrl.metrics.trackers.swanlab import SwanlabTracker
from mrl.metrics.trackers.tensorboard import TensorboardTracker
from mrl.metrics.trackers.tracker import Tracker
from mrl.metrics.trackers.trackio import TrackioTracker
from mrl.metrics.trackers.wandb import WandbTracker
from mrl.plugins import TRACKER, find_plugin, load_plugin, missing_names

TRACKERS: dict[str, type[Tracker]] = {
    "swanlab": SwanlabTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""`kind` of a table `[[trackers]]` -> class. The extra that installs a tracker's package has the name of its kind."""
CONTRACT = ("package", "options", "missing_login", "start", "log", "finish")
"""Attributes of `Tracker` that the class of a plug-in must have."""


def tracker_class(kind: str, *, where: str) -> type[Tracker]:
    """Return the class of one of `TRACKERS`, or of a plug-in. Raises PluginError for a kind that is neither."""
    if kind in TRACKERS:
        return TRACKERS[kind]
    plugin = find_plugin(TRACKER, kind, TRACKERS, where=where)
    return cast("type[Tracker]", load_plugin(plugin, _fault_of, where=where))


def _fault_of(found: object) -> str:
    return missing_names(found, CONTRACT) if isinstance(found, type) else "a class"
