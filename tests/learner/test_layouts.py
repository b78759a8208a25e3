"""However ranks, shards, packing and microbatches are laid out, training gives the same parameters."""

import itertools
from pathlib import Path

import check_layouts
import pytest
import torch

from mrl.learner.ranks.world import World

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]


def shards(ranks: int, **keys: object):
    return ranks, {"sharding": "shard", **keys}


SMALL = {"optimizer_dtype": "bfloat16"}
LEAN = {"parameter_dtype": "bfloat16"}
WANTED = [
    (1, {}),
    (1, {"microbatch_tokens": 32}),
    shards(1),
    shards(2),
    shards(2, microbatch_tokens=32),
    shards(2, activation_checkpointing=True, microbatch_tokens=4096),
    (2, {}),
    (4, {}),
    shards(4),
    shards(4, shard_size=2, microbatch_tokens=48),
    (2, {"context_parallel": 2, "microbatch_tokens": 32}),
    shards(2, context_parallel=2, activation_checkpointing=True),
    shards(4, context_parallel=2),
    (4, {"context_parallel": 4}),
    shards(2, activation_checkpointing=True, activation_offload=True),
    (1, SMALL),
    shards(2, **SMALL),
    (2, {"optimizer_memory": "host"}),
    shards(2, optimizer_memory="host"),
    shards(2),
]
"""The last one is there twice: the same bits."""
OFFLOADED, SMALL_ALONE, SMALL_PAIR, HOST, AGAIN = -6, -5, -4, -2, -1


HANDED = [
    ((1, {}), (1, {})),
    (shards(2), shards(2)),
    (shards(2), shards(2, optimizer_memory="host")),
    (shards(2, optimizer_memory="host"), shards(2)),
    (shards(2), (1, {})),
    ((1, {}), shards(4, shard_size=2)),
    (shards(2, **SMALL), shards(2, **SMALL)),
    ((1, SMALL), shards(4, **SMALL)),
    (shards(2), shards(2, **SMALL)),
]
"""The second goes on from a checkpoint of the first."""


@pytest.mark.system
def test_every_layout_trains_the_same_parameters(tmp_path):
    """1, 2 and 4 ranks, whole or in shards, in any packing, with passes of their own or parts of one.

    Also across a checkpoint that other ranks go on from.

    To 1e-5, exactly between ranks; and bit for bit where the layout is the same. With moments in bfloat16 to a
    thousandth, and among themselves as closely as the others.
    """
    wanted = [check_layouts.Layout(ranks, keys) for ranks, keys in WANTED]
    handed = [tuple(check_layouts.Layout(ranks, keys) for ranks, keys in pair) for pair in HANDED]

    trained, resumed = check_layouts.train_all(wanted, handed, tmp_path)

    alone, pair = trained[0][0], trained[3][0]
    for layout, of_ranks in zip([*wanted, *handed], [*trained, *resumed], strict=True):
        is_small = any(
            one.table.optimizer_dtype != "float32" for one in (layout if type(layout) is tuple else [layout])
        )
        assert check_layouts.difference(of_ranks[0], alone) <= (1e-3 if is_small else check_layouts.BOUND), layout
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks)), layout
    assert check_layouts.same_bits(trained[2][0], alone), "one shard is the whole"
    assert check_layouts.same_bits(trained[AGAIN][0], pair)
    assert check_layouts.same_bits(trained[HOST][0], pair), "wherever the moments lie"
    assert check_layouts.same_bits(trained[OFFLOADED][0], pair), "wherever the inputs of blocks wait"
    small, small_pair = trained[SMALL_ALONE][0], trained[SMALL_PAIR][0]
    assert check_layouts.difference(small_pair, small) <= check_layouts.BOUND
    assert check_layouts.difference(small, alone) > check_layouts.BOUND, "which is not that of float32"
    assert check_layouts.same_bits(resumed[6][0], small_pair)
    assert check_layouts.difference(resumed[7][0], small) <= check_layouts.BOUND
    assert check_layouts.same_bits(resumed[0][0], alone)
    assert all(check_layouts.same_bits(resumed[index][0], pair) for index in (1, 2, 3))
    world = World(0, 1, torch.device("cpu"))
    untrained = dict(check_layouts.whole_weights(check_layouts.make_trainer(wanted[0], "qwen3", world, 5).model))
    assert max(float((alone[name] - tensor).abs().max()) for name, tensor in untrained.items()) > 5e-4


@pytest.mark.slow
@pytest.mark.system
def test_parameters_in_bfloat16_are_rounded_alike_in_every_layout(tmp_path):
    """The same parameters on one rank and on two, whole or in shards, and across a checkpoint that others go on from.

    Sums over two ranks have other last bits than those of one, which tips the rounding of one in a thousand at most; on
    equally many ranks all bits are the same. Within a twentieth of float32; a resume may change to it and back.
    """
    wanted = [
        check_layouts.Layout(*one) for one in ((1, {}), (1, LEAN), shards(1, **LEAN), (2, LEAN), shards(2, **LEAN))
    ]
    (alone, lean, _, _, pair), both = wanted, check_layouts.Layout(*shards(2, **LEAN, **SMALL, precision="bfloat16"))
    handed = [(pair, pair), (lean, pair), (pair, alone), (alone, pair)]

    trained, resumed = check_layouts.train_all([*wanted, both], handed, tmp_path)

    for of_ranks in (*trained, *resumed):
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks))
        widened = {name: tensor.float() for name, tensor in of_ranks[0].items()}
        assert check_layouts.difference(widened, trained[0][0]) <= 0.05
    expected = trained[1][0]
    for found, *_ in (*trained[2:5], *resumed[:2]):
        assert same_parameters(found, expected)
        norms = [{name: one for name, one in of.items() if "gradient" in name} for of in (found, expected)]
        assert check_layouts.difference(*norms) <= check_layouts.BOUND, "sums over ranks are float32"
    assert check_layouts.same_bits(resumed[0][0], trained[4][0])
    assert check_layouts.same_bits(trained[2][0], expected)
    assert same_parameters(trained[3][0], trained[4][0], most=0)
    assert {tensor.dtype for name, tensor in expected.items() if "gradient" not in name} == {torch.bfloat16}


def same_parameters(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], most: float = 1e-3) -> bool:
    """But for a share `most` of them, and for norms of gradients, which are sums in another order."""
    tensors = {name: tensor for name, tensor in first.items() if "gradient" not in name}
    num_apart = sum(int((tensor != second[name]).sum()) for name, tensor in tensors.items())
    return num_apart <= most * sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_shards_train_the_same_parameters(tmp_path):
    """To 5e-5, also with activation checkpointing, and exactly between ranks."""
    layout = check_layouts.Layout(*shards(2, compile=True, activation_checkpointing=True))
    (alone,), (first, second) = check_layouts.train_all([check_layouts.Layout(1), layout], [], tmp_path)[0]
    assert check_layouts.difference(first, alone) <= layout.bound
    assert check_layouts.same_bits(first, second)


@pytest.mark.thorough
def test_a_mixture_of_experts_trains_the_same_parameters_in_shards(tmp_path):
    """To 1e-5, also with activation checkpointing and by copies on two ranks; exactly between ranks."""
    keys = ({}, {"sharding": "shard"}, {"sharding": "shard", "activation_checkpointing": True})
    wanted = [check_layouts.Layout(1), *(check_layouts.Layout(2, one) for one in keys)]

    (alone,), *others = check_layouts.train_all(wanted, [], tmp_path, family="qwen3_moe")[0]

    assert any(".experts.7." in name for name in alone)
    for first, second in others:
        assert check_layouts.difference(first, alone) <= check_layouts.BOUND
        assert check_layouts.same_bits(first, second)


@pytest.mark.thorough
def test_replayed_routers_are_told_the_same_on_ranks_shards_and_shared_passes(tmp_path):
    """Shards run layers again. A prompt in several passes is counted in each of them, all else once."""
    replay, shard = {"router_replay": True}, {"sharding": "shard", "activation_checkpointing": True}
    wanted = [check_layouts.Layout(1, replay), *(check_layouts.Layout(2, replay | one) for one in ({}, shard))]
    wanted += [check_layouts.Layout(2, replay | {"context_parallel": 2}), check_layouts.Layout(1)]

    (alone,), *others, (plain,) = check_layouts.train_all(wanted, [], tmp_path, family="qwen3_moe", steps=3)[0]

    expected = {name: tensor for name, tensor in alone.items() if name in plain}
    counted = torch.stack([tensor for name, tensor in alone.items() if name not in plain])
    assert check_layouts.difference(expected, plain) > 100 * check_layouts.BOUND
    assert ((counted > 0.3) & (counted < 0.95)).all()
    for first, second in others:
        assert check_layouts.same_bits(first, second)
        found = {name: tensor for name, tensor in first.items() if name in plain}
        assert check_layouts.difference(found, expected) <= check_layouts.BOUND
        again = torch.stack([tensor for name, tensor in first.items() if name not in plain])
        torch.testing.assert_close(again, counted, atol=0.01, rtol=0)
