import numpy as np
import pytest

from mrl.engines.engine import GenerationRequest
from mrl.rollout.sampling import batches


def requests(*group_sizes: int) -> list[GenerationRequest]:
    return [GenerationRequest(np.array([1], np.int32), np.zeros(size, np.uint64)) for size in group_sizes]


@pytest.mark.parametrize(
    ("sizes", "at_once", "wanted"),
    [([4, 4, 4], 0, [[4, 4, 4]]), ([4, 4, 4], 8, [[4, 4], [4]]), ([4, 4, 4], 7, [[4], [4], [4]]),
     ([9, 2, 2, 9], 4, [[9], [2, 2], [9]]), ([], 4, []), ([3, 1, 1], 4, [[3, 1], [1]])],
)  # fmt: skip
def test_batches_hold_whole_groups_in_order(sizes, at_once, wanted):
    """As many as fit; a group that is too large for a batch has one of its own; 0 cuts nowhere."""
    asked = requests(*sizes)
    found = batches(asked, at_once)
    assert [[request.seeds.size for request in batch] for batch in found] == wanted
    assert [id(request) for batch in found for request in batch] == [id(request) for request in asked]
