"""How a rank leaves the group that it is in: with the others, or alone."""

from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist

from mrl.errors import DeviceError
from mrl.learner.ranks.world import World


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled as the group is destroyed, for which NCCL waits until all of its ranks do so."""
    calls: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize(("device", "fails", "leaves"), [("cuda", True, 0), ("cuda", False, 1), ("cpu", True, 1)])
def test_a_rank_that_fails_alone_waits_for_nobody(destroyed: list[bool], device: str, fails: bool, leaves: int) -> None:
    """On GPUs, where the others may be in a collective that lacks it: it has to say why, and to end, at once."""
    with suppress(DeviceError), ExitStack() as closing:
        closing.enter_context(World(1, 8, torch.device(device)))
        if fails:
            raise DeviceError("out of memory", where="rank 1", got="", wanted="", cure="")
    assert len(destroyed) == leaves
