"""Where all policies of a synchronous run can go on together."""

from collections.abc import Mapping

from mrl.checkpoint.store import CheckpointStore
from mrl.errors import CheckpointError

MIN_KEPT = 3
"""Checkpoints that every policy keeps at least.

One may have saved a step that another has yet to save, while that one's last save is still on its way to the disk.
"""


def newest_common_step(stores: Mapping[str, CheckpointStore]) -> int | None:
    """The newest step of which every policy has a checkpoint; None when one of them has none at all.

    Raises CheckpointError when all have some, but of different steps.
    """
    steps = {policy: set(store.steps()) for policy, store in stores.items()}
    if not all(steps.values()):
        return None
    common = set.intersection(*steps.values())
    if not common:
        found = "; ".join(f"{policy} has {sorted(own)}" for policy, own in steps.items())
        raise CheckpointError(f"no step of which every policy has a checkpoint: {found}")
    return max(common)
