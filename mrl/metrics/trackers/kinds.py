"""The kinds of trackers."""

from mrl.metrics.trackers.swanlab import SwanlabTracker
from mrl.metrics.trackers.tensorboard import TensorboardTracker
from mrl.metrics.trackers.tracker import Tracker
from mrl.metrics.trackers.trackio import TrackioTracker
from mrl.metrics.trackers.wandb import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    "swanlab": SwanlabTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}
"""`kind` of a table `[[trackers]]` -> its class. The extra that brings the package of one has the name of its kind."""
