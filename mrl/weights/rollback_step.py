"""Step from which policies of a synchronous run go on: the newest one of which every policy has a checkpoint."""

from collections.abc import Mapping

from mrl.config.run_epochs import RunEpochs
from mrl.errors import CheckpointError
from mrl.weights.checkpoint_store import CheckpointStore


def roll_back_to_common_step(
    policy: str, stores: Mapping[str, CheckpointStore], lives: Mapping[str, RunEpochs]
) -> int | None:
    """Return the newest common step of the policies in `stores`, and delete newer checkpoints of `policy`.

    None where one of them never saved any: then all begin anew.
    Raises RunFolderError, with nothing deleted, where the checkpoints of one of them are gone; CheckpointError where
    all have some, but of different steps.
    """
    for name, store in stores.items():
        # The steps are read before the note: a peer that goes back at the same time notes it before it deletes.
        lives[name].check_not_lost(store.steps(), together=sorted(stores))
    step = newest_common_step(stores)
    if lives[policy].saved_step > (step or 0):
        lives[policy].saved(step or 0)  # what is discarded now is not lost
    stores[policy].discard_after(step or 0)
    return step


def newest_common_step(stores: Mapping[str, CheckpointStore]) -> int | None:
    """Return the newest step of which every policy has a checkpoint; None when one of them has none at all.

    Raises CheckpointError when all have some, but of different steps.
    """
    steps = {policy: set(store.steps()) for policy, store in stores.items()}
    if not all(steps.values()):
        return None
    common = set.intersection(*steps.values())
    if not common:
        found = "; ".join(f"{policy} has {sorted(own)}" for policy, own in steps.items())
        raise CheckpointError(f"no step at which every policy has a checkpoint: {found}")
    return max(common)
