"""Policies that step together go on from the newest step that all of them have."""

import pytest

from mrl.errors import CheckpointError
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.rollback_step import newest_common_step


def stores(folder, **steps: list[int]) -> dict[str, CheckpointStore]:
    made = {policy: CheckpointStore(folder / policy, policy, keep=9) for policy in steps}
    for policy, own in steps.items():
        for step in own:
            made[policy].write_pieces(step, {}, rank=0, life=0)
            made[policy].complete(step, b"{}", life=0)
    return made


@pytest.mark.parametrize(("a", "b", "common"), [([4, 8], [4], 4), ([4, 8], [4, 8], 8), ([4], [], None), ([], [], None)])
def test_the_newest_step_that_all_have(tmp_path, a, b, common):
    """One policy may be a checkpoint ahead; a policy without any sends all back to the start."""
    assert newest_common_step(stores(tmp_path, a=a, b=b)) == common


def test_checkpoints_without_a_common_step_are_an_error(tmp_path):
    """To begin anew would throw away what is there."""
    with pytest.raises(CheckpointError, match=r"a has \[8\]; b has \[4\]"):
        newest_common_step(stores(tmp_path, a=[8], b=[4]))


def test_what_lies_after_the_common_step_is_discarded(tmp_path):
    """It belongs to a life that the others do not continue."""
    store = stores(tmp_path, a=[4, 8, 12])["a"]
    store.discard_after(4)
    assert store.steps() == [4]
    store.discard_after(0)
    assert store.steps() == []
