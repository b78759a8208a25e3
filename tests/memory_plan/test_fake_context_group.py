"""The exchange of places for heads without other ranks, against the one among ranks, on real tensors."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fake_ranks.rank import fake_group
from torch import nn

from mrl.learner.ranks.context_group import ContextGroup
from mrl.memory_plan.fake_context_group import FakeContextGroup
from mrl.memory_plan.pass_memory import LiveBytes, pass_peaks
from mrl.models.row_attention import RowLayout, row_attention
from mrl.models.skeleton import config_of_recipe
from tests.memory_plan.test_pass_memory import TOLD, recipe

PLACES, HEADS, WIDTH = 512, 8, 16
ROWS = 2


@pytest.fixture
def ranks() -> Iterator[int]:
    """Four, of which the others answer with nothing."""
    with fake_group(4):
        yield 4


def peaks(exchange: ContextGroup, places: int, own: int, cached_heads: int) -> tuple[int, int]:
    """Of forward and backward of one attention over the rows of a pass, of whose places `own` are this rank's."""
    torch.manual_seed(0)
    states = [torch.randn(1, heads, own, WIDTH, requires_grad=True) for heads in (HEADS, cached_heads, cached_heads)]
    layout, module = RowLayout((places // ROWS,) * ROWS), nn.Module()
    live = LiveBytes(states)
    with live:
        attended, _ = row_attention(module, *states, None, packed_rows=layout, place_exchange=exchange)
        forward = live.take_peak()
        attended.sum().backward()
        return forward, live.take_peak()


@pytest.mark.parametrize("cached_heads", [8, 4, 2])
def test_one_rank_alone_holds_what_a_rank_of_several_holds(ranks: int, cached_heads: int) -> None:
    """Forward and backward, also where heads of keys and values are fewer than ranks."""
    assert dist.group.WORLD is not None
    among = peaks(ContextGroup(dist.group.WORLD, 0, ranks), PLACES, PLACES // ranks, cached_heads)
    alone = peaks(FakeContextGroup(size=ranks), PLACES // ranks, PLACES // ranks, cached_heads)
    assert alone == pytest.approx(among, rel=0.01)


def test_a_pass_that_ranks_share_needs_room_for_the_exchange() -> None:
    """Of a model whose blocks need most in attention: in those with a wide part behind it, the exchange is over by
    then."""
    config = config_of_recipe(recipe("llama"))
    config.intermediate_size = 8
    shared, own = (pass_peaks(config, **TOLD, checkpointing=True, context_parallel=ranks) for ranks in (2, 1))
    states_bytes = 4 * TOLD["batch"].places * config.hidden_size
    assert shared.blocks > own.blocks + states_bytes
